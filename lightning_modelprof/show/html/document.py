"""The document that pages draw in the browser: charts, flame graphs and tables as plain JSON values.

report.html holds one, and each view of the dashboard gets one or two. What can be read without a script, the
head of a report, is HTML (``parts.py``) and may stand above and below what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lightning_modelprof.errors import without_surrogates
from lightning_modelprof.report.model import Chart, FlameGraph, Table
from lightning_modelprof.show.html.chart import chart_view
from lightning_modelprof.show.html.flame import flame_view
from lightning_modelprof.show.html.table import table_view


def page_document(
    charts: Iterable[Chart] = (),
    flames: Iterable[FlameGraph] = (),
    tables: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    """What a page draws; charts without a point and flame graphs without a width are left out.

    Args:
        tables: of :func:`table_data`.
    """
    return {
        "charts": [msgspec.to_builtins(view) for chart in charts if (view := chart_view(chart)) is not None],
        "flames": [msgspec.to_builtins(one) for flame in flames if (one := flame_view(flame)) is not None],
        "tables": list(tables),
    }


def table_data(
    table: Table, *, is_folded: bool = False, no_slices: Iterable[str] | None = None
) -> dict[str, Any]:
    """A table with rows.

    Args:
        is_folded: whether it is seen only once a reader opens it.
        no_slices: where rows have the names of slices of a timeline that the page has: those that have none.
    """
    return {
        **table_view(table).plain(),
        "is_folded": is_folded,
        "no_slices": None if no_slices is None else list(no_slices),
    }


def encode(values: Any) -> bytes:
    """Plain values as JSON in UTF-8; a number that JSON has no word for is null."""
    try:
        return msgspec.json.encode(values)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(values))


def as_script(document: dict[str, Any]) -> str:
    """JSON for a ``script`` element, which no name in it can end."""
    return encode(document).decode().replace("<", "\\u003c")
