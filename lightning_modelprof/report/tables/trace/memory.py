"""Memory Summary: who allocated memory on which device, and how much of it was in use at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.memory import DeviceMemory, Memory, MemoryFlow
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_COLUMNS: Final = (
    Column("name", "Name"),
    Column("allocations", "Allocations", Unit.COUNT, help="how many."),
    Column("releases", "Frees", Unit.COUNT, help="how many."),
    Column("allocated_bytes", "Allocated", Unit.BYTES, help="bytes of the allocations."),
    Column("released_bytes", "Freed", Unit.BYTES, help="bytes of the frees."),
    Column(
        "increased_bytes", "Increased", Unit.BYTES, help="allocated - freed, by which the rows are sorted."
    ),
    Column(
        "peak_allocated_bytes",
        "Peak allocated",
        Unit.BYTES,
        help=(
            "the most that was allocated in the recorded window, its begin included, not over the"
            " process's life."
        ),
    ),
    Column(
        "peak_reserved_bytes",
        "Peak reserved",
        Unit.BYTES,
        help="the most that the caching allocator held (a dash for the CPU, which has none).",
    ),
    Column("begin_bytes", "At start", Unit.BYTES, help="allocated before the first event."),
    Column("end_bytes", "At end", Unit.BYTES, help="allocated after the last event."),
)
MEMORY: Final = TableKind(
    id="memory",
    title="Memory Summary",
    help=(
        "With `profile_memory=True`: a row per device (and rank), under it who allocated and freed."
        " Each allocation and release counts once, for the innermost operator open on its thread at"
        " that moment (open from its begin until just before its end); without one for the innermost"
        " annotation, else `(none)`. `aten::empty` and its kin are shown as `caller (aten::empty)`;"
        " all steps are one row. The rows of a device sum to it exactly. A negative row frees what"
        " another one allocated.\n\n"
        "On the CPU peak, At start and At end are sums of the sizes since the window began: At start"
        " is 0, At end is Increased, both it and single rows below 0 where more was freed than"
        " allocated, and the peak is the highest sum, at least 0. (What torch writes as allocated"
        " there is 0 for the shared memory of a DataLoader's workers and counts only while a profiler"
        " runs.) For other devices dashes where the torch version did not record totals (1.9). Absent"
        " when no memory was recorded."
    ),
    columns=_COLUMNS,
    views=("memory",),
    compared=Figure(keys=("allocated_bytes",), sum_over="window"),
)


_NOTES: Final = (
    "Each allocation and free counts once, for the innermost operator on its thread (without one, for the"
    " innermost annotation), so the rows of a device sum to it. Increased is allocated less freed: below 0"
    " where an operator frees what others allocated.",
    "aten::empty and its kin allocate for others; they stand behind the operator that called them.",
    "Peaks, At start and At end are of the recorded window, not of the process.",
)
_CPU_NOTE: Final = (
    "The CPU's peak, At start and At end count from the begin of the window, as sums of what is allocated and"
    " freed in it: below 0 where more was freed. Nothing is reserved there."
)
_NO_LEVEL_NOTE: Final = "Peaks are unknown for {devices}: this version of torch did not record them."


def memory_table(by_rank: Mapping[int, Memory | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """Which operators allocate memory, and how much a device had allocated at most.

    Args:
        by_rank: the memory of each rank.
        options: not used; the rows have one order.
    """
    ranks = split_ranks(by_rank)
    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    devices = [
        (ranks.prefix(rank) + device.total.name, device)
        for rank, memory in ranks.found.items()
        for device in memory.devices
    ]
    for name, device in devices:
        rows += [_device_row(name, device), *(_flow_row(flow.name, flow) for flow in device.operators)]
        depths += [0, *(1 for _ in device.operators)]
    return MEMORY.table(
        rows=tuple(rows),
        depths=tuple(depths),
        notes=(*(_NOTES if rows else ()), *_device_notes(devices), *ranks.notes),
        absent_reason=ranks.absent_reason,
    )


def _flow_row(name: str, flow: MemoryFlow) -> tuple[Cell, ...]:
    moved = (getattr(flow, column.key) for column in _COLUMNS[1:6])
    return name, *moved, None, None, None, None


def _device_row(name: str, device: DeviceMemory) -> tuple[Cell, ...]:
    return *_flow_row(name, device.total)[:6], *(getattr(device, column.key) for column in _COLUMNS[6:])


def _device_notes(devices: list[tuple[str, DeviceMemory]]) -> tuple[str, ...]:
    """What to keep in mind about these devices' figures."""
    unknown = ", ".join(name for name, device in devices if device.peak_allocated_bytes is None)
    has_cpu = any(device.total.name == "CPU" for _, device in devices)
    return (
        *((_CPU_NOTE,) if has_cpu else ()),
        *((_NO_LEVEL_NOTE.format(devices=unknown),) if unknown else ()),
    )
