"""Device Summary: utilization of CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.trace.device_usage import DeviceUsage, HostUsage, OneDevice
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import asdict
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Device"),
    ColumnSpec("utilization", "Utilization (%)", Unit.RATIO, help="|union of kernels| / T."),
    ColumnSpec("busy", "Busy (%)", Unit.RATIO, help="the same, including copies and memsets."),
    ColumnSpec(
        "sm_efficiency",
        "SM efficiency (%)",
        Unit.RATIO,
        help=(
            "∫ min(1, Σ blocks per SM of running kernels) dt / T. Idle time and kernels without the number"
            " count as 0; a dash means that no kernel has it."
        ),
    ),
    ColumnSpec(
        "occupancy",
        "Occupancy (%)",
        Unit.RATIO,
        help=(
            "mean of the profiler's estimate over kernels that have one, weighted by time. Idle time"
            " doesn't count."
        ),
    ),
    ColumnSpec(
        "occupancy_zero",
        "Occupancy 0 (%)",
        Unit.RATIO,
        help="share of that time where the profiler wrote 0 for a busy kernel.",
    ),
    ColumnSpec(
        "tensor_cores",
        "Tensor Cores (%)",
        Unit.RATIO,
        help=(
            "time of kernels whose names indicate tensor cores / time of kernels we can classify. A dash"
            " means no kernels or no tensor cores (other vendors, and NVIDIA before Volta or GTX 16)."
        ),
    ),
    ColumnSpec(
        "tensor_unknown",
        "Tensor Cores unknown (%)",
        Unit.RATIO,
        help=(
            "share of kernel time we can't classify (custom kernels, most Triton kernels). A dash where"
            " Tensor Cores is one."
        ),
    ),
    ColumnSpec("model", "Model", help="as recorded in the trace."),
    ColumnSpec("memory_bytes", "Memory", Unit.BYTES, help="as recorded in the trace."),
    ColumnSpec("compute_capability", "Compute capability", help="as recorded in the trace."),
)
DEVICE_USAGE: Final = TableSpec(
    id="device_usage",
    title="Device Summary",
    help=(
        "CPU rows are read once when the window starts recording and once when it stops; *elapsed* is the"
        " time in between. Only traces recorded by the callback have them, because PyTorch doesn't write CPU"
        " times.\n\nThere's one row per GPU (and rank) over the steps, of total length T; without steps it"
        " covers the operators, otherwise the GPU events. The first step starts when earlier GPU events"
        " have finished."
    ),
    columns=_COLUMNS,
    rows={
        "CPU(Process)": (
            "CPU time (user and system, all threads) of the training process / elapsed. 100% is one CPU, so"
            " the maximum is 100% × the number of CPUs."
        ),
        "CPU(Workers)": (
            "the same for all descendants of the training process, mainly DataLoader workers, even if they"
            " started or ended within the window. Other ranks started by Lightning's rank 0 don't count."
            " Resolution is 10 ms per process, so short windows are rough. A dash means that an ended"
            " worker's time is unknown."
        ),
        "CPU(System)": (
            "busy share of all the machine's CPUs, for all processes of all users. 100% means every CPU is"
            " busy. It's the same for every rank on a machine."
        ),
    },
    views=("overview",),
    compared=CompareKey(keys=("value",), names=("name", "figure"), better=""),
)


_NO_CPU_NOTE: Final = (
    "There are no CPU figures because this trace wasn't recorded by ModelProfCallback, which adds CPU times."
)
_UNREAD_CPU_NOTE: Final = "A dash in a CPU row means that the system didn't report the time."
_NO_ESTIMATE_NOTE: Final = (
    "A dash in SM efficiency or Occupancy means that the profiler wrote no estimate, which it only does on"
    " NVIDIA GPUs."
)
_UNKNOWN_SM_NOTE: Final = "Kernels without recorded blocks per SM count as 0 in SM efficiency."
_COVERS: Final = {
    "operators": (
        "The trace's ProfilerStep ranges have no length, so GPU figures cover its operators and the work"
        " they launched."
    ),
    "device events": (
        "The trace has no steps, so GPU figures cover the time from its first GPU event to its last."
    ),
}
_NO_DEVICE_NOTE: Final = "There are no GPU events, so there's no GPU row."


@trace_table(DEVICE_USAGE, "device", TraceFacts.device_usage)
def device_usage_table(ranks: Ranks[DeviceUsage]) -> Table:
    """Build three CPU rows and one row per GPU for each rank."""
    usages = list(ranks.found.values())
    rows = [row for rank, usage in ranks.found.items() for row in _rows(usage, ranks.prefix(rank))]
    # Without a GPU, all columns but the first two would be empty.
    has_devices = any(usage.devices for usage in usages)
    return DEVICE_USAGE.table(
        rows,
        columns=_COLUMNS if has_devices else _COLUMNS[:2],
        notes=(*_cpu_notes([usage.host for usage in usages]), *_device_notes(usages)),
    )


def _rows(usage: DeviceUsage, prefix: str) -> list[Mapping[str, Cell]]:
    devices = [_device_row(device, prefix) for device in usage.devices]
    if usage.host is None and devices:
        return devices  # the note replaces three rows of dashes
    host: Mapping[str, Cell] = {} if usage.host is None else asdict(usage.host)
    return [
        {"name": f"{prefix}CPU(Process)", "utilization": host.get("process")},
        {"name": f"{prefix}CPU(Workers)", "utilization": host.get("workers")},
        {"name": f"{prefix}CPU(System)", "utilization": host.get("system")},
        *devices,
    ]


def _device_row(device: OneDevice, prefix: str) -> Mapping[str, Cell]:
    name = f"{prefix}GPU" if device.number is None else f"{prefix}GPU {device.number}"
    return {**asdict(device), "name": name, "model": device.name}


def _cpu_notes(hosts: list[HostUsage | None]) -> list[str]:
    notes = []
    known = [host for host in hosts if host is not None]
    counts = {host.num_cpus for host in known}
    num_cpus = counts.pop() if len(counts) == 1 else None
    if num_cpus:
        notes.append(f"100% of CPU(Process) and CPU(Workers) is one of {num_cpus} CPUs.")
    if any(None in (host.process, host.workers, host.system) for host in known):
        notes.append(_UNREAD_CPU_NOTE)
    if len(known) < len(hosts):
        notes.append(_NO_CPU_NOTE)
    return notes


def _device_notes(usages: list[DeviceUsage]) -> list[str]:
    devices = [device for usage in usages for device in usage.devices]
    if not devices:
        return [_NO_DEVICE_NOTE]
    notes = []
    if any(device.sm_efficiency is None or device.occupancy is None for device in devices):
        notes.append(_NO_ESTIMATE_NOTE)
    if any(device.sm_efficiency is not None and device.sm_unknown for device in devices):
        notes.append(_UNKNOWN_SM_NOTE)
    covered = dict.fromkeys(usage.covers for usage in usages)
    notes.extend(_COVERS[covers] for covers in covered if covers in _COVERS)
    notes.extend(dict.fromkeys(note for usage in usages for note in usage.notes))
    return notes
