"""The tables of a report, in reading order. A new table is one file here and one line in ``TABLES``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.tables.all_ranks import all_ranks
from lightning_modelprof.report.tables.callback_times import callback_times
from lightning_modelprof.report.tables.perf_summary import perf_summary
from lightning_modelprof.report.tables.phase_times import phase_times_table
from lightning_modelprof.report.tables.window_summaries import window_summaries

TableBuilder = Callable[[Analysis], tuple[Table, ...]]

TABLES: Final[tuple[TableBuilder, ...]] = (
    perf_summary,
    all_ranks,
    window_summaries,
    phase_times_table,
    callback_times,
)
