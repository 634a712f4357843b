"""The document that pages draw in the browser: charts, flame graphs and tables as plain JSON values.

report.html has one, and each dashboard view has one or two. What's readable without a script, such as the
head of a report, is HTML (``parts.py``) above and below what is drawn.
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
    """Build what a page draws, without charts that have no points and flame graphs that have no width.

    Args:
        tables: results of :func:`table_data`.
    """
    return {
        "charts": [msgspec.to_builtins(view) for chart in charts if (view := chart_view(chart)) is not None],
        "flames": [msgspec.to_builtins(one) for flame in flames if (one := flame_view(flame)) is not None],
        "tables": list(tables),
    }


def table_data(
    table: Table, *, is_folded: bool = False, no_slices: Iterable[str] | None = None
) -> dict[str, Any]:
    """Build a table with rows.

    Args:
        is_folded: whether it's hidden until a reader opens it.
        no_slices: the names without slices, if the page's timeline has slices named like the rows.
    """
    return {
        **table_view(table).plain(),
        "is_folded": is_folded,
        "no_slices": None if no_slices is None else list(no_slices),
    }


def encode(values: Any) -> bytes:
    """Encode plain values as UTF-8 JSON; numbers that JSON can't express become null."""
    try:
        return msgspec.json.encode(values)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(values))


def as_script(document: dict[str, Any]) -> str:
    """Encode as JSON for a ``script`` element, so that no name can end the element."""
    return encode(document).decode().replace("<", "\\u003c")
