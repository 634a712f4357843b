"""Memory Summary: allocations by device and operator, and each device's peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.trace.memory import DeviceMemory, Memory, MemoryFlow
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import asdict
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("allocations", "Allocations", Unit.COUNT, help="number of allocations."),
    ColumnSpec("releases", "Frees", Unit.COUNT, help="number of frees."),
    ColumnSpec("allocated_bytes", "Allocated", Unit.BYTES, help="bytes allocated."),
    ColumnSpec("released_bytes", "Freed", Unit.BYTES, help="bytes freed."),
    ColumnSpec(
        "increased_bytes", "Increased", Unit.BYTES, help="allocated − freed; the rows are sorted by it."
    ),
    ColumnSpec(
        "peak_allocated_bytes",
        "Peak allocated",
        Unit.BYTES,
        help="peak memory in the recorded window (including its start), not over the process's life.",
    ),
    ColumnSpec(
        "peak_reserved_bytes",
        "Peak reserved",
        Unit.BYTES,
        help="peak memory held by the caching allocator (a dash on the CPU, which has none).",
    ),
    ColumnSpec("begin_bytes", "At start", Unit.BYTES, help="allocated before the first event."),
    ColumnSpec("end_bytes", "At end", Unit.BYTES, help="allocated after the last event."),
)
MEMORY: Final = TableSpec(
    id="memory",
    title="Memory Summary",
    help=(
        "Requires `profile_memory=True`. One row per device (and rank), with the operators that allocated"
        " and freed memory below it. Each allocation and free counts once, for the innermost operator open"
        " on its thread, otherwise for the innermost annotation or `(none)`. `aten::empty` and similar are"
        " shown as `caller (aten::empty)`, and all steps share one row. The rows add up to the device"
        " exactly. Negative rows free memory that other rows allocated.\n\nOn the CPU, the peak, At start"
        " and At end count from the window's start, so At start is 0 and values can be negative if more was"
        " freed than allocated. On other devices they're dashes if torch didn't record totals (1.9)."
    ),
    columns=_COLUMNS,
    views=("memory",),
    compared=CompareKey(keys=("allocated_bytes",), sum_over="window"),
)


_NO_LEVEL_NOTE: Final = "Peaks are unknown for {devices} because this version of torch didn't record them."


@trace_table(MEMORY, "memory", TraceFacts.memory)
def memory_table(ranks: Ranks[Memory]) -> Table:
    """List the operators that allocate memory, by device, with each device's peaks."""
    devices = [
        replace(device, total=replace(device.total, name=ranks.prefix(rank) + device.total.name))
        for rank, memory in ranks.found.items()
        for device in memory.devices
    ]
    unknown = ", ".join(device.total.name for device in devices if device.peak_allocated_bytes is None)
    return MEMORY.table(
        [row for device in devices for row in (_device(device), *map(_moved, device.operators))],
        depths=tuple(depth for device in devices for depth in (0, *(1 for _ in device.operators))),
        notes=(_NO_LEVEL_NOTE.format(devices=unknown),) if unknown else (),
    )


def _moved(flow: MemoryFlow) -> dict[str, Cell]:
    return {**asdict(flow), "increased_bytes": flow.increased_bytes}


def _device(device: DeviceMemory) -> dict[str, Cell]:
    levels = ("peak_allocated_bytes", "peak_reserved_bytes", "begin_bytes", "end_bytes")
    return {**_moved(device.total), **{key: getattr(device, key) for key in levels}}
