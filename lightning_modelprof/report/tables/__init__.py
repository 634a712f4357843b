"""The tables of a report, in reading order. A new table is one file here and one line in a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.tables.all_ranks import all_ranks
from lightning_modelprof.report.tables.callback_times import callback_times
from lightning_modelprof.report.tables.perf_summary import perf_summary
from lightning_modelprof.report.tables.phase_times import phase_times_table
from lightning_modelprof.report.tables.trace_tables import trace_model_summary, trace_step_breakdown
from lightning_modelprof.report.tables.window_summaries import window_summaries

TableBuilder = Callable[[Analysis], tuple[Table, ...]]

TABLES: Final[tuple[TableBuilder, ...]] = (
    perf_summary,
    all_ranks,
    window_summaries,
    phase_times_table,
    callback_times,
)
"""Of a run."""

TraceTableBuilder = Callable[[TraceFacts, str, str], Table]
"""Takes the facts of one trace, and what to append to the table's id and title."""

TRACE_TABLES: Final[tuple[TraceTableBuilder, ...]] = (
    trace_model_summary,
    trace_step_breakdown,
)
"""Of a trace file that belongs to no run of ours."""
