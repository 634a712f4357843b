"""Idle Summary: why each device waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.idle import DeviceIdle, Idle
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_COLUMNS: Final = (
    Column("name", "Name"),
    Column(
        "covered_ns",
        "Total",
        Unit.DURATION_NS,
        "In the steps",
        help=(
            "the same in the time of Device Summary, whose Busy it has; also before the device's first event,"
            " told from that one, and after its last, when the host is late."
        ),
    ),
    Column(
        "covered_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "In the steps",
        help="the share of the time of Device Summary.",
    ),
    Column("gaps", "Gaps", Unit.COUNT, "Whole trace", help="how many."),
    Column("total_ns", "Total", Unit.DURATION_NS, "Whole trace", help="of all gaps."),
    Column("avg_ns", "Avg", Unit.DURATION_NS, "Whole trace", help="of one gap."),
    Column("max_ns", "Max", Unit.DURATION_NS, "Whole trace", help="of one gap."),
    Column(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        "Whole trace",
        help="the share of that span. GPU idle is of the steps.",
    ),
)
IDLE: Final = TableKind(
    id="idle",
    title="Idle Summary",
    help=(
        "Why each device had nothing to do between its first event of the trace and the end of its"
        " last one. Busy + Host wait + Kernel gap + Other = that span, exactly. A gap has one cause,"
        " told from the event that ends it (of several the one launched first). Absent without device"
        " events."
    ),
    columns=_COLUMNS,
    rows={
        "Busy": "time in which at least one kernel, copy or set runs on any stream.",
        "Idle": "the gaps between.",
        "Host wait": (
            "its launch began after the gap did, so nothing was queued. It is split by time into"
            " Dataloader and Host."
        ),
        "Dataloader": ("the part of Host wait in which the launching thread waited for its next batch."),
        "Host": "the rest of Host wait.",
        "Kernel gap": ("launched before, and shorter than 30 µs (the limit of HolisticTraceAnalysis)."),
        "Other": (
            "launched before and yet it waited, or its launch is not known; or nothing was queued and the"
            " launching thread communicated, as in gloo:all_reduce."
        ),
    },
    views=("kernels",),
    compared=Figure(keys=("total_ns",), sum_over="window"),
)


_CAUSES: Final = (
    (0, "Idle", "idle"),
    (1, "Host wait", "host_wait"),
    (2, "Dataloader", "dataloader"),
    (2, "Host", "host"),
    (1, "Kernel gap", "kernel_gap"),
    (1, "Other", "other"),
)
"""Depth, label and attribute of the rows below Busy."""

_NOTES: Final = (
    "Busy and Idle sum to the time from the device's first event to the end of its last one, of which Ratio"
    " is the share. Idle is the time without an event on any stream.",
    "In the steps is the same in the time that Device Summary covers, so Busy has one ratio in both. There,"
    " idle time before the device's first event is told from that event. After the last the host is late.",
    "A gap has one cause, told from the event that ends it. Host wait: it was launched after the gap began,"
    " so nothing was queued. Kernel gap: it was launched before, and the gap is shorter than 30 us. Other: it"
    " was launched before, and yet it waited for another stream, an event or a copy.",
    "Dataloader is the part of Host wait in which the launching thread waited for its next batch.",
)


def idle_table(by_rank: Mapping[int, Idle | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """Why the devices had nothing to do, for each device of each rank."""
    ranks = split_ranks(by_rank)
    has_several = any(len(fact.devices) > 1 for fact in ranks.found.values())
    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    num_unknown = 0
    for rank, fact in ranks.found.items():
        for device in fact.devices:
            prefix = ranks.prefix(rank)
            if ranks.are_several or has_several:
                prefix += "GPU of unknown number " if device.device < 0 else f"GPU {device.device} "
            rows += _rows(device, prefix)
            depths += [0, *(depth for depth, _, _ in _CAUSES)]
            num_unknown += device.num_unknown
    return IDLE.table(
        rows=tuple(rows),
        depths=tuple(depths),
        notes=(*(_NOTES if ranks.found else ()), *_unknown_note(num_unknown), *ranks.notes),
        absent_reason=ranks.absent_reason,
    )


def _rows(device: DeviceIdle, prefix: str) -> list[tuple[Cell, ...]]:
    """The rows of one device, whose names start with ``prefix``."""
    covered, whole_ns = device.covered, device.covered.total_ns
    busy_ns = device.busy_ns
    ratio = share(busy_ns, device.span_ns)
    in_steps = (covered.busy_ns, share(covered.busy_ns, whole_ns))
    rows: list[tuple[Cell, ...]] = [(f"{prefix}Busy", *in_steps, None, busy_ns, None, None, ratio)]
    for _, label, key in _CAUSES:
        gaps = getattr(device, key)
        covered_ns = getattr(covered, f"{key}_ns")
        rows.append(
            (
                prefix + label,
                *(covered_ns, share(covered_ns, whole_ns)),
                *(gaps.calls, gaps.total_ns, gaps.avg_ns, gaps.max_ns, share(gaps.total_ns, device.span_ns)),
            )
        )
    return rows


def _unknown_note(num_unknown: int) -> tuple[str, ...]:
    if not num_unknown:
        return ()
    return (f"Gaps that are in Other because the launch of their event was not recorded: {num_unknown}.",)
