"""Memory Manipulation Summary: what copying and setting device memory costs, and what it holds up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.copies import Copies, CopyKind, pool_copies
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_TITLE: Final = "Memory Manipulation Summary"
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT, adds_up=True),
    Column(
        "host_total_ns",
        "Total",
        Unit.DURATION_NS,
        "CPU",
        help=(
            "the host's time in the runtime calls that launched them, each call once per kind (a CUDA"
            " graph may launch several); a dash when no call is known. Copies that block the host show"
            " there, unless it waits in a call of its own (`cudaStreamSynchronize`)."
        ),
    ),
    Column("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    Column("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    Column("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    Column(
        "device_total_ns",
        "Total",
        Unit.DURATION_NS,
        "GPU",
        adds_up=True,
        help="sum of durations, overlap counted in full.",
    ),
    Column("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    Column("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    Column("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    Column(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        adds_up=True,
        help="to the summed time of all device events.",
    ),
    Column(
        "size_bytes",
        "Size",
        Unit.BYTES,
        adds_up=True,
        help="sum over the calls with a recorded size; a dash without one (ROCm).",
    ),
    Column(
        "bytes_per_s",
        "Bandwidth",
        Unit.BYTES_PER_S,
        help=(
            "the bytes of the calls with a recorded size / those calls' device time, in GB/s; a dash"
            " without size or time (ROCm)."
        ),
    ),
    Column(
        "memory",
        "Memory",
        help=(
            "pageable, pinned, managed or device, from the name, the slower of both ends; a dash when it"
            " does not tell. Pageable copies go through a buffer of the driver: slower, and they hold up"
            " the host; `DataLoader(pin_memory=True)` avoids that for batches."
        ),
    ),
    Column("operator", "Operator", help="the innermost one that launched most of the time."),
    Column("num_operators", "Operators", Unit.COUNT, help="how many different ones launched it."),
)
COPIES: Final = TableKind(
    id="copies",
    title="Memory Manipulation Summary",
    help=(
        "The device's copies and sets by kind, over the whole file; ranges of the user with such"
        " names are not in it. Sorted by GPU total."
    ),
    columns=_COLUMNS,
    views=("kernels",),
    names_slices=True,
    compared=Figure(keys=("device_total_ns",), sum_over="window"),
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
    return COPIES.table(
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
