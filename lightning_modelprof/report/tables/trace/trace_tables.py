"""The tables of traces: those of every file beside this one, in the order of the views."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import VIEWS, TableOptions, View
from lightning_modelprof.report.tables.trace.table import MADE, TraceTable

_NO_TABLES: Final = ("table", "trace_tables")


def _all_tables() -> tuple[TraceTable[Any], ...]:
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if file.name not in _NO_TABLES:
            importlib.import_module(f"{__package__}.{file.name}")
    if not MADE:
        raise ImportError(f"no tables in {Path(__file__).parent}")
    return tuple(sorted(MADE, key=lambda one: (VIEWS.index(one.view), one.build.__module__)))


TRACE_TABLES: Final = _all_tables()
"""All of them."""


def trace_tables(
    by_rank: Mapping[int, TraceFacts],
    options: TableOptions,
    *,
    id_suffix: str = "",
    title_suffix: str = "",
    without: frozenset[View] = frozenset(),
) -> tuple[Table, ...]:
    """The tables that are asked for.

    Args:
        by_rank: rank → facts of its trace; of the same time.
        without: views to leave out though they are asked for.
    """
    tables = []
    for entry in TRACE_TABLES:
        if entry.view in without or (options.views is not None and entry.view not in options.views):
            continue
        table = apply_options(entry.of(by_rank, options), options)
        tables.append(replace(table, id=table.id + id_suffix, title=table.title + title_suffix))
    return tuple(tables)
