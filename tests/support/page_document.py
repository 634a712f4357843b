"""Read the JSON that report.html and the dashboard's views draw."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

Drawn = dict[str, Any]
"""A document, or one of its tables."""


def document_of(page: bytes) -> Drawn:
    found = re.findall(
        r'<script type="application/json" id="document">(.*?)</script>', page.decode(), re.DOTALL
    )
    assert len(found) == 1
    assert "<" not in found[0]
    document: Drawn = json.loads(found[0], parse_constant=_refuse)
    return document


def tables_of(documents: Iterable[Drawn]) -> dict[str, Drawn]:
    """All tables with rows, by id."""
    return {table["id"]: table for document in documents for table in document["tables"]}


def texts(table: Drawn) -> list[list[str]]:
    """Cell texts below the headings, with the row's name first."""
    return [[(cell if isinstance(cell, str) else cell[0]).strip() for cell in row] for row in table["rows"]]


def values(table: Drawn) -> list[list[float | None]]:
    """Raw numbers after the name."""
    return [[None if isinstance(cell, str) else cell[1] for cell in row[1:]] for row in table["rows"]]


def numbers(table: Drawn) -> list[list[float]]:
    """The same without texts and without rows that have no number."""
    rows = [[value for value in row if value is not None] for row in values(table)]
    return [row for row in rows if row]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
