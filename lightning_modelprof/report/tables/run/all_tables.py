"""The tables of a report, in reading order. A new table is one file here and one entry in a tuple."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from lightning_modelprof.analysis.absent import Absent, Analysis
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.run.callback_times import CALLBACKS, callback_times
from lightning_modelprof.report.tables.run.flops import FLOPS, FLOPS_BY_OPERATOR, FLOPS_BY_SIZE, flop_tables
from lightning_modelprof.report.tables.run.forward_table import (
    FORWARD_MODULES,
    FORWARD_OPERATORS,
    run_forward_tables,
)
from lightning_modelprof.report.tables.run.memory_by_phase import MEMORY_BY_PHASE, MEMORY_PEAKS, memory_tables
from lightning_modelprof.report.tables.run.model_size import MODEL_SIZE, run_model_size
from lightning_modelprof.report.tables.run.module_tree import (
    MODULE_TREE,
    SLOWEST_MODULES,
    TOP_MODULES,
    module_tables,
    run_module_tables,
)
from lightning_modelprof.report.tables.run.num_workers import NUM_WORKERS, num_workers_tables
from lightning_modelprof.report.tables.run.outside_loop import AROUND, around_table
from lightning_modelprof.report.tables.run.perf_summary import PERF_SUMMARY, perf_summary
from lightning_modelprof.report.tables.run.phase_times import PHASE_TIMES, phase_times_table
from lightning_modelprof.report.tables.run.process_loops import (
    LOOPS,
    SHORT_LOOPS,
    loop_tables,
    process_loop_tables,
)
from lightning_modelprof.report.tables.run.ranks import ALL_RANKS, RANK_SPREAD, RANKS, all_ranks, rank_tables
from lightning_modelprof.report.tables.run.slow_steps import SLOW_STEPS, WORST_STEP, slow_tables
from lightning_modelprof.report.tables.run.source_lines import SOURCE_LINES, source_lines_table
from lightning_modelprof.report.tables.run.validation import VALIDATION, validation_table
from lightning_modelprof.report.tables.run.workers import WORKER_TRANSFORMS, WORKERS, worker_tables
from lightning_modelprof.report.tables.trace.model_summary import window_model_summary
from lightning_modelprof.report.tables.trace.trace_tables import TRACE_TABLES, trace_tables

__all__ = ["TABLES", "TRACE_TABLES", "loop_tables", "module_tables", "trace_tables"]


class RunTable(NamedTuple):
    """The tables of a run that one function makes.

    Attributes:
        build: makes them of an analysis; none where there is nothing to say.
        kinds: what is known of them, in their order.
    """

    build: Callable[[Analysis, TableOptions], tuple[Table, ...]]
    kinds: tuple[TableSpec, ...] = ()


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
            note = f"{num_earlier} earlier windows have no tables here. report.json lists the saved ones."
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


TABLES: Final = (
    RunTable(perf_summary, (PERF_SUMMARY,)),
    RunTable(all_ranks, (ALL_RANKS,)),
    RunTable(rank_tables, (RANKS, RANK_SPREAD)),
    RunTable(phase_times_table, (PHASE_TIMES,)),
    RunTable(validation_table, (VALIDATION,)),
    RunTable(slow_tables, (SLOW_STEPS, WORST_STEP)),
    RunTable(callback_times, (CALLBACKS,)),
    RunTable(around_table, (AROUND,)),
    RunTable(source_lines_table, (SOURCE_LINES,)),
    RunTable(num_workers_tables, (NUM_WORKERS,)),
    RunTable(worker_tables, (WORKER_TRANSFORMS, WORKERS)),
    RunTable(flop_tables, (FLOPS, FLOPS_BY_SIZE, FLOPS_BY_OPERATOR)),
    RunTable(run_model_size, (MODEL_SIZE,)),
    RunTable(memory_tables, (MEMORY_PEAKS, MEMORY_BY_PHASE)),
    RunTable(run_module_tables, (SLOWEST_MODULES, TOP_MODULES, MODULE_TREE)),
    RunTable(run_forward_tables, (FORWARD_MODULES, FORWARD_OPERATORS)),
    RunTable(window_summaries),
    RunTable(process_loop_tables, (LOOPS, SHORT_LOOPS)),
)
"""Of a run, in reading order; those of a trace are in ``trace_tables.TRACE_TABLES``."""

KINDS: Final[Mapping[str, TableSpec]] = {
    kind.id: kind
    for kind in (*(kind for entry in TABLES for kind in entry.kinds), *(entry.kind for entry in TRACE_TABLES))
}
"""Id → what is known of such tables."""

_NUMBER: Final = re.compile(r"_\d+$")


def kind_of(table_id: str) -> TableSpec | None:
    """What is known of a table, whatever window or trace it is of; ``None`` of a comparison's."""
    return KINDS.get(_NUMBER.sub("", table_id))


MAX_SHOWN: Final = 3
"""Windows with a table of their own: with one every hundred steps there can be thousands."""


def _main_tables(facts: TraceFacts) -> frozenset[str]:
    """Of the trace tables those that a short report has, beside the Model Summary."""
    breakdown = facts.step_breakdown
    # Of a step without a device it knows little that the phases do not tell.
    has_device = not isinstance(breakdown, Absent) and breakdown.has_device
    return frozenset({"device_usage", "step_breakdown"} if has_device else {"device_usage"})
