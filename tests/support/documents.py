"""Read parts of a report.json."""

from __future__ import annotations

from typing import Any


def raw_rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table as column key → raw value."""
    return [{key: cell["value"] for key, cell in row["cells"].items()} for row in table["rows"]]
