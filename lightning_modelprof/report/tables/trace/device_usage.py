"""Device Summary: how busy the processors and the devices were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.device_usage import DeviceUsage, HostUsage, OneDevice
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_TITLE: Final = "Device Summary"
_COLUMNS: Final = (
    Column("name", "Device"),
    Column("utilization", "Utilization (%)", Unit.RATIO, help="|union of kernels| / T."),
    Column("busy", "Busy (%)", Unit.RATIO, help="the same with copies and sets."),
    Column(
        "sm_efficiency",
        "SM efficiency (%)",
        Unit.RATIO,
        help=(
            "∫ min(1, Σ blocks per SM of the running kernels) dt / T, idle time as 0; kernels without"
            " that number count as 0, and a dash means that none has it."
        ),
    ),
    Column(
        "occupancy",
        "Occupancy (%)",
        Unit.RATIO,
        help=(
            "mean of the profiler's estimate over the kernels that have one, weighted by their time in"
            " the span; idle time does not count."
        ),
    ),
    Column(
        "occupancy_zero",
        "Occupancy 0 (%)",
        Unit.RATIO,
        help="the profiler writes 0 for some busy kernels: the share of that time.",
    ),
    Column(
        "tensor_cores",
        "Tensor Cores (%)",
        Unit.RATIO,
        help=(
            "time of kernels whose names say that they use tensor cores / time of the kernels whose names"
            " tell, in the span. A dash without kernels and on devices without tensor cores: other makers'"
            " (told by the runtime's calls or the devices' models), and NVIDIA's before Volta or of the"
            " GTX 16 series."
        ),
    ),
    Column(
        "tensor_unknown",
        "Tensor Cores unknown (%)",
        Unit.RATIO,
        help=(
            "time of the kernels whose names do not tell (somebody's own, most of Triton's) / time of all"
            " kernels in the span. A dash where Tensor Cores is one."
        ),
    ),
    Column("model", "Model", help="what the file says."),
    Column("memory_bytes", "Memory", Unit.BYTES, help="what the file says."),
    Column("compute_capability", "Compute capability", help="what the file says."),
)
DEVICE_USAGE: Final = TableKind(
    id="device_usage",
    title="Device Summary",
    help=(
        "The CPU rows are read once when a window starts to record and once when it stops; *elapsed*"
        " is the host time between the two. They are absent for traces that the callback did not"
        " record: torch does not write CPU times.\n\n"
        "One row per device (and rank) over the span, of length T; without steps over the operators,"
        " else over the device events. The first step begins when the device events that are left over"
        " from before it have ended."
    ),
    columns=_COLUMNS,
    rows={
        "CPU(Process)": (
            "CPU time (user and system, all threads) of the training process / elapsed. 100 % is one CPU,"
            " so the most is 100 % × number of CPUs."
        ),
        "CPU(Workers)": (
            "the same for all processes that the training process started, and those that they started:"
            " DataLoader workers above all. Those that began or ended inside the window are counted; other"
            " ranks of the job, which Lightning's rank 0 starts, and their workers are not. In ticks of 10"
            " ms per process, so short windows are coarse. A dash where an ended worker's time is not"
            " accounted for (macOS, Windows, or where the process that started it ended first)."
        ),
        "CPU(System)": (
            "time that CPUs of the machine worked / (that + idle + waiting for a disk), all processes of"
            " all users: 100 % is every CPU busy. The same for every rank of a machine."
        ),
    },
    views=("overview",),
    compared=Figure(keys=("value",), names=("name", "figure")),
)


_CPU_NOTE: Final = (
    "CPU(Process) and CPU(Workers) are the processor time of the training process and of its children per"
    " elapsed time: 100 % is one core{cores}. CPU(System) is the busy share of all cores, whoever used them."
)
_NO_CPU_NOTE: Final = (
    "There are no CPU figures: the trace was not recorded by ModelProfCallback, which notes the processors'"
    " times in it."
)
_UNREAD_CPU_NOTE: Final = "A dash in a CPU row: the system did not give the time."
_GPU_NOTE: Final = (
    "GPU Utilization is the share of the time in which any kernel runs; Busy also counts copies and sets."
    " SM efficiency is the mean share of the multiprocessors that have work, with idle time as 0."
)
_OCCUPANCY_NOTE: Final = (
    "Occupancy is the profiler's estimate, weighted by the kernels' time. For some busy kernels it writes 0,"
    " which pulls the mean down: Occupancy 0 is the share of that time."
)
_TENSOR_NOTE: Final = (
    "Tensor Cores is the share of kernels that use them in the time of the kernels whose names tell; Tensor"
    " Cores unknown is the share of the kernels' time whose names do not. Both are dashes on devices without"
    " tensor cores."
)
_NO_ESTIMATE_NOTE: Final = (
    "SM efficiency and Occupancy are dashes where the profiler wrote no estimate: it does so on NVIDIA's"
    " devices only."
)
_UNKNOWN_SM_NOTE: Final = "Kernels whose blocks per SM were not recorded count as 0 in SM efficiency."
_COVERS: Final = {
    "steps": (
        "The GPU figures cover the time from the start of the first step to the end of the last one's work on"
        " the device."
    ),
    "operators": (
        "The trace has no ProfilerStep ranges with a length: the GPU figures cover its operators and the work"
        " that they launched."
    ),
    "device events": (
        "The trace has no steps: the GPU figures cover the time from its first device event to its last."
    ),
}
_NO_DEVICE_NOTE: Final = "There are no device events, so there is no GPU row."


def device_usage_table(by_rank: Mapping[int, DeviceUsage | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """Three rows for the processors and one for each device, of each rank.

    Args:
        by_rank: the usage of each rank.
        options: not used; the rows have one order.
    """
    ranks = split_ranks(by_rank)
    usages = list(ranks.found.values())
    rows = [row for rank, usage in ranks.found.items() for row in _rows(usage, ranks.prefix(rank))]
    # Without a device all columns but the first two would be empty.
    num_columns = len(_COLUMNS) if any(usage.devices for usage in usages) or not usages else 2
    return DEVICE_USAGE.table(
        columns=_COLUMNS[:num_columns],
        rows=tuple(row[:num_columns] for row in rows),
        notes=(*_cpu_notes([usage.host for usage in usages]), *_device_notes(usages), *ranks.notes),
        absent_reason=ranks.absent_reason,
    )


def _rows(usage: DeviceUsage, prefix: str) -> list[tuple[Cell, ...]]:
    """The rows of one rank."""
    host = usage.host
    rest = (None,) * (len(_COLUMNS) - 2)
    devices = [_device_row(device, prefix) for device in usage.devices]
    if host is None and devices:
        return devices  # three rows of dashes say nothing that the note does not
    return [
        (f"{prefix}CPU(Process)", host.process if host else None, *rest),
        (f"{prefix}CPU(Workers)", host.workers if host else None, *rest),
        (f"{prefix}CPU(System)", host.system if host else None, *rest),
        *devices,
    ]


def _device_row(device: OneDevice, prefix: str) -> tuple[Cell, ...]:
    """One device's cells."""
    return (
        f"{prefix}GPU" if device.number is None else f"{prefix}GPU {device.number}",
        device.utilization,
        device.busy,
        device.sm_efficiency,
        device.occupancy,
        device.occupancy_zero,
        device.tensor_cores,
        device.tensor_unknown,
        device.name,
        device.memory_bytes,
        device.compute_capability,
    )


def _cpu_notes(hosts: list[HostUsage | None]) -> list[str]:
    """What the CPU rows mean, and why some are empty."""
    notes = []
    known = [host for host in hosts if host is not None]
    if known:
        counts = {host.num_cpus for host in known}
        num_cpus = counts.pop() if len(counts) == 1 else None
        notes.append(_CPU_NOTE.format(cores=f" (of {num_cpus})" if num_cpus else ""))
    if any(None in (host.process, host.workers, host.system) for host in known):
        notes.append(_UNREAD_CPU_NOTE)
    if len(known) < len(hosts):
        notes.append(_NO_CPU_NOTE)
    return notes


def _device_notes(usages: list[DeviceUsage]) -> list[str]:
    """What the GPU rows mean, and why some cells are empty."""
    devices = [device for usage in usages for device in usage.devices]
    if not devices:
        return [_NO_DEVICE_NOTE] if usages else []
    notes = [_GPU_NOTE]
    if any(device.occupancy is not None for device in devices):
        notes.append(_OCCUPANCY_NOTE)
    notes.append(_TENSOR_NOTE)
    if any(device.sm_efficiency is None or device.occupancy is None for device in devices):
        notes.append(_NO_ESTIMATE_NOTE)
    if any(device.sm_efficiency is not None and device.sm_unknown for device in devices):
        notes.append(_UNKNOWN_SM_NOTE)
    notes.extend(_COVERS[covers] for covers in dict.fromkeys(usage.covers for usage in usages) if covers)
    notes.extend(dict.fromkeys(note for usage in usages for note in usage.notes))
    return notes
