"""The tables of traces, in reading order. A new table is one file beside this one and one entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import TableOptions, View
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.rows import Ranks, split_ranks
from lightning_modelprof.report.tables.trace.copies import COPIES, copies_table
from lightning_modelprof.report.tables.trace.critical_path import (
    PARTS,
    PATH,
    WHAT_IF,
    critical_path_parts_table,
    critical_path_table,
    what_if_table,
)
from lightning_modelprof.report.tables.trace.dataloader import DATALOADER, dataloader_table
from lightning_modelprof.report.tables.trace.device_usage import DEVICE_USAGE, device_usage_table
from lightning_modelprof.report.tables.trace.distributed import (
    COLLECTIVES,
    DISTRIBUTED,
    collectives_table,
    distributed_table,
)
from lightning_modelprof.report.tables.trace.host_waits import HOST_WAITS, host_waits_table
from lightning_modelprof.report.tables.trace.idle import IDLE, idle_table
from lightning_modelprof.report.tables.trace.kernels import KERNELS, kernels_table
from lightning_modelprof.report.tables.trace.launches import (
    LAUNCHES,
    RUNTIME_CALLS,
    launches_table,
    runtime_calls_table,
)
from lightning_modelprof.report.tables.trace.memory import MEMORY, memory_table
from lightning_modelprof.report.tables.trace.model_summary import MODEL_SUMMARY, model_summary_table
from lightning_modelprof.report.tables.trace.operators import (
    OPERATORS,
    OPERATORS_BY_SHAPE,
    operator_by_shape_table,
    operators_table,
)
from lightning_modelprof.report.tables.trace.overview import OVERVIEW, overview_table
from lightning_modelprof.report.tables.trace.rank_waits import RANK_WAITS, rank_waits_table
from lightning_modelprof.report.tables.trace.step_breakdown import STEP_BREAKDOWN, step_breakdown_table
from lightning_modelprof.report.tables.trace.user_ranges import USER_RANGES, user_ranges_table

_Fact = TypeVar("_Fact")


class TraceTable(Record, Generic[_Fact], frozen=True):
    """One table of a trace.

    Attributes:
        view: the name by which a reader asks for it.
        which: what of a trace it shows.
        build: makes it of the ranks that have the fact.
    """

    kind: TableSpec
    view: View
    which: fact[_Fact]
    build: Callable[[Ranks[_Fact], TableOptions], Table]

    def of(self, by_rank: Mapping[int, TraceFacts], options: TableOptions) -> Table:
        """The table, or its reason to be absent."""
        notes: tuple[str, ...] = ()
        try:
            ranks = split_ranks(by_rank, self.which)  # type: ignore[call-overload]  # no property here
            notes = ranks.notes
            table = self.build(ranks, options)
        except NotMeasured as why:
            table = self.kind.table(absent_reason=why.reason)
        return replace(table, notes=(*table.notes, *notes))


TRACE_TABLES: Final[tuple[TraceTable[Any], ...]] = (
    TraceTable(DEVICE_USAGE, "device", TraceFacts.device_usage, device_usage_table),
    TraceTable(OVERVIEW, "overview", TraceFacts.overview, overview_table),
    TraceTable(MODEL_SUMMARY, "model", TraceFacts.model_summary, model_summary_table),
    TraceTable(DISTRIBUTED, "distributed", TraceFacts.distributed, distributed_table),
    TraceTable(COLLECTIVES, "distributed", TraceFacts.distributed, collectives_table),
    TraceTable(RANK_WAITS, "distributed", TraceFacts.communication_calls, rank_waits_table),
    TraceTable(OPERATORS, "operator", TraceFacts.operators, operators_table),
    TraceTable(OPERATORS_BY_SHAPE, "operator", TraceFacts.operators_by_shape, operator_by_shape_table),
    TraceTable(KERNELS, "kernel", TraceFacts.kernels, kernels_table),
    TraceTable(COPIES, "memory_manipulation", TraceFacts.copies, copies_table),
    TraceTable(USER_RANGES, "userdefined", TraceFacts.user_ranges, user_ranges_table),
    TraceTable(MEMORY, "memory", TraceFacts.memory, memory_table),
    TraceTable(STEP_BREAKDOWN, "step_breakdown", TraceFacts.step_breakdown, step_breakdown_table),
    TraceTable(IDLE, "idle", TraceFacts.idle, idle_table),
    TraceTable(HOST_WAITS, "launch", TraceFacts.host_waits, host_waits_table),
    TraceTable(LAUNCHES, "launch", TraceFacts.kernel_launches, launches_table),
    TraceTable(RUNTIME_CALLS, "launch", TraceFacts.runtime_calls, runtime_calls_table),
    TraceTable(DATALOADER, "dataloader", TraceFacts.dataloader, dataloader_table),
    TraceTable(PATH, "critical_path", TraceFacts.critical_path, critical_path_table),
    TraceTable(PARTS, "critical_path", TraceFacts.critical_path, critical_path_parts_table),
    TraceTable(WHAT_IF, "critical_path", TraceFacts.critical_path, what_if_table),
)


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
