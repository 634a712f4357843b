"""The tables of a report, in reading order. A new table is one file here and one entry in a tuple."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.run.callback_times import CALLBACKS, callback_times
from lightning_modelprof.report.tables.run.flops import (
    FLOPS,
    FLOPS_BY_OPERATOR,
    FLOPS_BY_SIZE,
    flops_by_operator_table,
    flops_by_size_table,
    flops_table,
)
from lightning_modelprof.report.tables.run.forward_table import (
    FORWARD_MODULES,
    FORWARD_OPERATORS,
    forward_modules_table,
    forward_operators_table,
)
from lightning_modelprof.report.tables.run.memory_by_phase import (
    MEMORY_BY_PHASE,
    MEMORY_PEAKS,
    memory_by_phase_table,
    memory_peaks_table,
)
from lightning_modelprof.report.tables.run.model_size import MODEL_SIZE, run_model_size
from lightning_modelprof.report.tables.run.module_tree import (
    MODULE_TREE,
    SLOWEST_MODULES,
    TOP_MODULES,
    module_tables,
    module_tree_tables,
    slowest_modules_table,
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
from lightning_modelprof.report.tables.run.ranks import (
    ALL_RANKS,
    RANK_SPREAD,
    RANKS,
    all_ranks,
    rank_spread_table,
    rank_table,
)
from lightning_modelprof.report.tables.run.slow_steps import (
    SLOW_STEPS,
    WORST_STEP,
    slow_steps_table,
    worst_step_table,
)
from lightning_modelprof.report.tables.run.source_lines import SOURCE_LINES, source_lines_table
from lightning_modelprof.report.tables.run.validation import VALIDATION, validation_table
from lightning_modelprof.report.tables.run.workers import WORKER_TRANSFORMS, WORKERS, worker_tables
from lightning_modelprof.report.tables.trace.model_summary import window_model_summary
from lightning_modelprof.report.tables.trace.trace_tables import TRACE_TABLES, trace_tables

__all__ = ["TABLES", "TRACE_TABLES", "loop_tables", "module_tables", "trace_tables"]


class RunTable(NamedTuple):
    """The tables of a run that one function makes.

    Attributes:
        build: makes them; none where there is nothing to say.
        kinds: what is known of them, in their order.
        needs: a fact without which there's no table at all: nobody asked for it.
    """

    build: Callable[[Facts, TableOptions], Iterable[Table]]
    kinds: tuple[TableSpec, ...] = ()
    needs: fact[Any] | None = None

    def of(self, facts: Facts, options: TableOptions) -> tuple[Table, ...]:
        """The tables, or their reason to be absent."""
        needs: fact[Any] | None = self.needs  # type: ignore[call-overload]  # no property here
        if needs is not None and facts.get(needs) is None:
            return ()
        try:
            return tuple(self.build(facts, options))
        except NotMeasured as why:
            return tuple(kind.table(absent_reason=why.reason) for kind in self.kinds)


def window_summaries(facts: Facts, options: TableOptions) -> Iterator[Table]:
    """The tables of the newest windows, in order; none when no window was asked for."""
    shown = facts.windows[-MAX_SHOWN:]
    newest = next((one for one in reversed(shown) if one.facts is not None), None)
    # Without any trace the Model Summary says why, whatever was asked for.
    if options.views is None or "model" in options.views or newest is None:
        num_earlier = len(facts.windows) - len(shown)
        note = f"{num_earlier} earlier windows have no tables here. report.json lists the saved ones."
        for one in shown:
            table = apply_options(window_model_summary(one), options)
            has_note = num_earlier and one is shown[0]
            yield replace(table, notes=(*table.notes, note)) if has_note else table
    if newest is None or newest.facts is None:
        return
    suffix = f" of window {newest.window.index}" if len(facts.windows) > 1 else ""
    rest = trace_tables(
        {facts.rank: newest.facts}, options, title_suffix=suffix, without=frozenset({"model"})
    )
    main = _main_tables(newest.facts)
    for table in rest:
        # Where nobody asked for one of them, most are folded.
        yield replace(table, is_detail=table.id not in main) if options.views is None else table


TABLES: Final = (
    RunTable(perf_summary, (PERF_SUMMARY,)),
    RunTable(all_ranks, (ALL_RANKS,), needs=Facts.all_ranks),
    RunTable(rank_table, (RANKS,)),
    RunTable(rank_spread_table, (RANK_SPREAD,)),
    RunTable(phase_times_table, (PHASE_TIMES,)),
    RunTable(validation_table, (VALIDATION,)),
    RunTable(slow_steps_table, (SLOW_STEPS,)),
    RunTable(worst_step_table, (WORST_STEP,), needs=Facts.slow),
    RunTable(callback_times, (CALLBACKS,)),
    RunTable(around_table, (AROUND,)),
    RunTable(source_lines_table, (SOURCE_LINES,)),
    RunTable(num_workers_tables, (NUM_WORKERS,)),
    RunTable(worker_tables, (WORKER_TRANSFORMS, WORKERS), needs=Facts.workers),
    RunTable(flops_table, (FLOPS,), needs=Facts.cost),
    RunTable(flops_by_size_table, (FLOPS_BY_SIZE,), needs=Facts.flops),
    RunTable(flops_by_operator_table, (FLOPS_BY_OPERATOR,), needs=Facts.cost),
    RunTable(run_model_size, (MODEL_SIZE,), needs=Facts.cost),
    RunTable(memory_peaks_table, (MEMORY_PEAKS,), needs=Facts.memory),
    RunTable(memory_by_phase_table, (MEMORY_BY_PHASE,), needs=Facts.memory),
    RunTable(slowest_modules_table, (SLOWEST_MODULES,), needs=Facts.modules),
    RunTable(module_tree_tables, (TOP_MODULES, MODULE_TREE), needs=Facts.cost),
    RunTable(forward_modules_table, (FORWARD_MODULES,), needs=Facts.cost),
    RunTable(forward_operators_table, (FORWARD_OPERATORS,), needs=Facts.forward),
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
    breakdown = facts.get(TraceFacts.step_breakdown)
    # Of a step without a device it knows little that the phases do not tell.
    has_device = breakdown is not None and breakdown.has_device
    return frozenset({"device_usage", "step_breakdown"} if has_device else {"device_usage"})
