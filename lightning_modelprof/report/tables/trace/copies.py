"""Memory Manipulation Summary: what copying and setting device memory costs, and what it holds up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.copies import Copies, CopyKind, pool_copies
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_TITLE: Final = "Memory Manipulation Summary"
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT, adds_up=True),
    Column("host_total_ns", "Total", Unit.DURATION_NS, "CPU"),
    Column("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    Column("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    Column("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    Column("device_total_ns", "Total", Unit.DURATION_NS, "GPU", adds_up=True),
    Column("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    Column("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    Column("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    Column("device_ratio", "Ratio(%)", Unit.RATIO, "GPU", adds_up=True),
    Column("size_bytes", "Size", Unit.BYTES, adds_up=True),
    Column("bytes_per_s", "Bandwidth", Unit.BYTES_PER_S),
    Column("memory", "Memory"),
    Column("operator", "Operator"),
    Column("num_operators", "Operators", Unit.COUNT),
)

_NOTE: Final = (
    "All copies and sets of the file, also outside the steps. Ratio is the share of the summed time of all"
    " device events. Operator launched most of the time, Operators is how many different ones launched any."
)
_CPU_NOTE: Final = (
    "CPU is the host's time in the calls that launched the copies. A copy that blocks the host shows there,"
    " unless the host waits for it in a call of its own (cudaStreamSynchronize)."
)
_PAGEABLE_NOTE: Final = (
    "A copy of pageable host memory goes through a buffer of the driver: it is slower and holds up the host."
    " Batches cause it without DataLoader(pin_memory=True); .item() and .cpu() cause it, too."
)


def copies_table(by_rank: Mapping[int, Copies | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """One row per kind of copy or set, longest device time first, the ranks together.

    Args:
        by_rank: the copies of each rank.
        options: not used; the rows have one order.
    """
    ranks = split_ranks(by_rank)
    pooled = pool_copies(ranks.found.values())
    return Table(
        id="copies",
        title=_TITLE,
        columns=_COLUMNS,
        rows=tuple(_row(pooled, kind) for kind in pooled.kinds),
        notes=(*_notes(pooled), *ranks.notes),
        absent_reason=ranks.absent_reason,
    )


def _notes(copies: Copies) -> list[str]:
    """What the columns mean, and what to keep in mind about these copies."""
    if not copies.kinds:
        return []
    notes = [_NOTE, _CPU_NOTE]
    if any(kind.memory == "pageable" for kind in copies.kinds):
        notes.append(_PAGEABLE_NOTE)
    calls = sum(kind.tally.calls for kind in copies.kinds)
    num_sized = sum(kind.num_sized for kind in copies.kinds)
    if num_sized < calls:
        notes.append(f"Size and Bandwidth are of the {num_sized} of {calls} calls whose size was recorded.")
    return notes


def _row(copies: Copies, kind: CopyKind) -> tuple[Cell, ...]:
    """One kind's cells."""
    return (
        kind.name,
        kind.tally.calls,
        kind.host.total_ns if kind.host.calls else None,
        kind.host.avg_ns,
        kind.host.max_ns,
        kind.host.min_ns,
        kind.tally.total_ns,
        kind.tally.avg_ns,
        kind.tally.max_ns,
        kind.tally.min_ns,
        copies.ratio(kind),
        kind.size_bytes,
        kind.bytes_per_s,
        kind.memory,
        kind.operators.main,
        kind.operators.count,
    )
