"""All trace tables, collected from this folder's files, in the order of the views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.discovery import found_beside, place_in
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import VIEWS, TableOptions, View
from lightning_modelprof.report.tables.trace.table import MADE

TRACE_TABLES: Final = found_beside(
    __name__, MADE, lambda one: (place_in(VIEWS, one.view), one.build.__module__)
)


def trace_tables(
    by_rank: Mapping[int, TraceFacts],
    options: TableOptions,
    *,
    id_suffix: str = "",
    title_suffix: str = "",
    without: frozenset[View] = frozenset(),
) -> tuple[Table, ...]:
    """Build the requested tables.

    Args:
        by_rank: rank → facts of its trace; all cover the same time.
        without: views to leave out even if requested.
    """
    tables = []
    for entry in TRACE_TABLES:
        if entry.view in without or (options.views is not None and entry.view not in options.views):
            continue
        table = apply_options(entry.of(by_rank, options), options)
        tables.append(
            replace(
                table,
                id=table.id + id_suffix,
                title=table.title + title_suffix,
                is_detail=table.is_detail and options.views is None,  # a requested view isn't folded
            )
        )
    return tuple(tables)
