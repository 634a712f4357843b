"""The tables of a report, in reading order. A new table is one file here and one line in a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.all_ranks import all_ranks
from lightning_modelprof.report.tables.run.callback_times import callback_times
from lightning_modelprof.report.tables.run.flops import flop_tables
from lightning_modelprof.report.tables.run.forward_table import run_forward_tables
from lightning_modelprof.report.tables.run.memory_by_phase import memory_tables
from lightning_modelprof.report.tables.run.model_size import run_model_size
from lightning_modelprof.report.tables.run.module_tree import module_tables, run_module_tables
from lightning_modelprof.report.tables.run.perf_summary import perf_summary
from lightning_modelprof.report.tables.run.phase_times import phase_times_table
from lightning_modelprof.report.tables.run.process_loops import loop_tables, process_loop_tables
from lightning_modelprof.report.tables.run.ranks import rank_tables
from lightning_modelprof.report.tables.run.slow_steps import slow_tables
from lightning_modelprof.report.tables.run.source_lines import source_lines_table
from lightning_modelprof.report.tables.run.validation import validation_table
from lightning_modelprof.report.tables.trace.trace_tables import TRACE_TABLES, trace_tables
from lightning_modelprof.report.tables.window_summaries import window_summaries

__all__ = ["TABLES", "TRACE_TABLES", "loop_tables", "module_tables", "trace_tables"]

TableBuilder = Callable[[Analysis, TableOptions], tuple[Table, ...]]

TABLES: Final[tuple[TableBuilder, ...]] = (
    perf_summary,
    all_ranks,
    rank_tables,
    phase_times_table,
    validation_table,
    slow_tables,
    callback_times,
    source_lines_table,
    flop_tables,
    run_model_size,
    memory_tables,
    run_module_tables,
    run_forward_tables,
    window_summaries,
    process_loop_tables,
)
"""Of a run; those of a trace are in ``trace_tables.TRACE_TABLES``."""
