"""The tables of a report, in reading order. A new table is one file here and one line in a tuple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.run.around import around_table
from lightning_modelprof.report.tables.run.callback_times import callback_times
from lightning_modelprof.report.tables.run.flops import flop_tables
from lightning_modelprof.report.tables.run.forward_table import run_forward_tables
from lightning_modelprof.report.tables.run.memory_by_phase import memory_tables
from lightning_modelprof.report.tables.run.model_size import run_model_size
from lightning_modelprof.report.tables.run.module_tree import module_tables, run_module_tables
from lightning_modelprof.report.tables.run.perf_summary import perf_summary
from lightning_modelprof.report.tables.run.phase_times import phase_times_table
from lightning_modelprof.report.tables.run.process_loops import loop_tables, process_loop_tables
from lightning_modelprof.report.tables.run.ranks import all_ranks, rank_tables
from lightning_modelprof.report.tables.run.slow_steps import slow_tables
from lightning_modelprof.report.tables.run.source_lines import source_lines_table
from lightning_modelprof.report.tables.run.validation import validation_table
from lightning_modelprof.report.tables.trace.model_summary import window_model_summary
from lightning_modelprof.report.tables.trace.trace_tables import TRACE_TABLES, trace_tables

__all__ = ["TABLES", "TRACE_TABLES", "loop_tables", "module_tables", "trace_tables"]


TableBuilder = Callable[[Analysis, TableOptions], tuple[Table, ...]]


def window_summaries(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:
    """The tables of the newest windows, in order; none when no window was asked for."""
    shown = analysis.windows[-MAX_SHOWN:]
    if not shown:
        return ()
    newest = next((one for one in reversed(shown) if one.facts is not None), None)
    tables = []
    # Without any trace the Model Summary says why, whatever was asked for.
    if options.views is None or "model" in options.views or newest is None:
        tables = [
            window_model_summary(one.window, one.facts.model_summary if one.facts else None, one.trace_note)
            for one in shown
        ]
        num_earlier = len(analysis.windows) - len(shown)
        if num_earlier:
            note = f"{num_earlier} earlier windows have no table here; report.json lists those that are kept."
            tables[0] = replace(tables[0], notes=(*tables[0].notes, note))
        tables = [apply_options(table, options) for table in tables]
    if newest is None or newest.facts is None:
        return tuple(tables)
    suffix = f" of window {newest.window.index}" if len(analysis.windows) > 1 else ""
    rest = trace_tables(
        {analysis.rank: newest.facts}, options, title_suffix=suffix, without=frozenset({"model"})
    )
    if options.views is None:  # nobody asked for one of them
        main = _main_tables(newest.facts)
        rest = tuple(replace(table, is_detail=table.id not in main) for table in rest)
    return (*tables, *rest)


TABLES: Final[tuple[TableBuilder, ...]] = (
    perf_summary,
    all_ranks,
    rank_tables,
    phase_times_table,
    validation_table,
    slow_tables,
    callback_times,
    around_table,
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


MAX_SHOWN: Final = 3
"""Windows with a table of their own: with one every hundred steps there can be thousands."""


def _main_tables(facts: TraceFacts) -> frozenset[str]:
    """Of the trace tables those that a short report has, beside the Model Summary."""
    breakdown = facts.step_breakdown
    # Of a step without a device it knows little that the phases do not tell.
    has_device = not isinstance(breakdown, Absent) and breakdown.has_device
    return frozenset({"device_usage", "step_breakdown"} if has_device else {"device_usage"})
