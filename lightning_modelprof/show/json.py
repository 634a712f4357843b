"""The report for machines: raw numbers, integer nanoseconds, nothing rounded and nothing cut."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_modelprof.report.model import Report, Table

REPORT_SCHEMA_VERSION = 1
"""Version of report.json; raised when a reader of the old one would go wrong. run.json has its own."""

_RESERVED = ("schema_version", "tables", "notes")


def render_json(report: Report) -> bytes:
    """Write the report as indented UTF-8 JSON, the same bytes for the same report.

    A number that is not finite is written as ``null``: JSON has no NaN, and one bad division must not
    cost the whole report of a run that took a day.

    Args:
        report: what to write; its sections stand beside ``tables`` and ``notes``.

    Returns:
        One JSON object and a newline.

    Raises:
        ValueError: when a section has a reserved name, or two tables or two columns have the same key:
            one of them would silently be lost.
        TypeError: when a section holds something that is not a plain JSON value.
    """
    for name in _RESERVED:
        if name in report.sections:
            raise ValueError(f"report section {name!r}: this name is reserved; rename the section")
    _check_unique("table ids", [table.id for table in report.tables])
    document = {
        "schema_version": REPORT_SCHEMA_VERSION,
        **report.sections,
        "tables": {table.id: _table(table) for table in report.tables},
        "notes": report.notes,
    }
    plain = _finite(document)
    try:
        raw = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, as in some file names, has no UTF-8; its backslash form is valid JSON.
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8", "backslashreplace")
    return msgspec.json.format(raw, indent=2) + b"\n"  # json itself indents in Python, far more slowly


def _table(table: Table) -> dict[str, Any]:
    keys = [column.key for column in table.columns]
    _check_unique(f"column keys of table {table.id!r}", keys)
    document: dict[str, Any] = {
        "title": table.title,
        "columns": [
            {"key": column.key, "label": column.label, "unit": column.unit.value, "group": column.group}
            for column in table.columns
        ],
        "rows": [dict(zip(keys, row, strict=True)) for row in table.rows],
        "notes": table.notes,
        "absent_reason": table.absent_reason,
    }
    if table.depths:
        document["depths"] = table.depths
    if table.row_units:
        document["row_units"] = [unit.value for unit in table.row_units]
    return document


def _check_unique(what: str, keys: list[str]) -> None:
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"expected unique {what}, got {', '.join(map(repr, repeated))} more than once")


def _finite(value: Any) -> Any:
    """The same value with ``null`` in place of NaN and infinities, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
