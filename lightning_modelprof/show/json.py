"""The report for machines: its document as JSON, with every row, the raw numbers and the texts."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from lightning_modelprof.report.model import Report
from lightning_modelprof.show.document import document_of


def render_json(report: Report) -> bytes:
    """Write the report's document as indented UTF-8 JSON, the same bytes for the same report.

    A number that is not finite is written as ``null``: JSON has no NaN, and one bad division must not
    cost the whole report of a run that took a day.

    Args:
        report: what to write.

    Returns:
        One JSON object and a newline.

    Raises:
        ValueError: when two tables or two columns have the same key: one of them would silently be lost.
        TypeError: when the configuration holds something that is not a plain JSON value.
    """
    document = document_of(report)
    try:
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    except (UnicodeEncodeError, OverflowError):
        # Half a surrogate pair, as in some file names, has no UTF-8; its backslash form is valid JSON.
        # Nor does msgspec write whole numbers of more than 64 bits.
        plain = _finite(msgspec.to_builtins(document))
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    """The same value with ``null`` in place of NaN and infinities, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
