"""Idle Summary: why each device waited."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.idle import DeviceIdle, Idle
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec(
        "covered_ns",
        "Total",
        Unit.DURATION_NS,
        "In the steps",
        help=(
            "idle or busy time within the time that Device Summary covers, including before the device's"
            " first event and after its last."
        ),
    ),
    ColumnSpec(
        "covered_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "In the steps",
        help="share of the time that Device Summary covers.",
    ),
    ColumnSpec("gaps", "Gaps", Unit.COUNT, "Whole trace", help="number of gaps."),
    ColumnSpec("total_ns", "Total", Unit.DURATION_NS, "Whole trace", help="time of all gaps."),
    ColumnSpec("avg_ns", "Avg", Unit.DURATION_NS, "Whole trace", help="per gap."),
    ColumnSpec("max_ns", "Max", Unit.DURATION_NS, "Whole trace", help="per gap."),
    ColumnSpec(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        "Whole trace",
        help="share of the whole trace; GPU idle elsewhere is for the steps.",
    ),
)
IDLE: Final = TableSpec(
    id="idle",
    title="Idle Summary",
    help=(
        "Why each GPU was idle between its first and last event. Busy + Waiting for CPU + Kernel gap +"
        " Other = that time, exactly. Each gap has one cause, from the event that ends it (the one launched"
        " first, if there's more than one)."
    ),
    columns=_COLUMNS,
    rows={
        "Busy": "time with at least one kernel, copy or memset running on any stream.",
        "Idle": "gaps between them.",
        "Waiting for CPU": (
            "nothing was queued, because the next work was launched after the gap started. It's split into"
            " Dataloader and CPU."
        ),
        "Dataloader": "the part in which the launching thread waited for data.",
        "CPU": "the rest of Waiting for CPU.",
        "Kernel gap": "launched earlier, and shorter than 30 µs (HolisticTraceAnalysis's limit).",
        "Other": (
            "launched earlier but delayed, unknown launches or communication on the CPU by the launching"
            " thread, as in gloo:all_reduce."
        ),
    },
    views=("kernels",),
    compared=CompareKey(keys=("total_ns",), sum_over="window"),
)


_CAUSES: Final = (
    (0, "Idle", "idle"),
    (1, "Waiting for CPU", "host_wait"),
    (2, "Dataloader", "dataloader"),
    (2, "CPU", "host"),
    (1, "Kernel gap", "kernel_gap"),
    (1, "Other", "other"),
)
"""Depth, label and attribute of the rows below Busy."""

_NOTES: Final = (
    "Busy and Idle add up to the time from the device's first event to its last, and Ratio is the share of"
    " that time. Idle is time without an event on any stream.",
    '"In the steps" covers the same time as Device Summary. Idle time before the device\'s first event has'
    " that event's cause, and idle time after the last counts as Waiting for CPU.",
    "Each gap's cause depends on the event that ends it. If that was launched after the gap started, the"
    " cause is Waiting for CPU. Otherwise it's Kernel gap if the gap is shorter than 30 µs, and Other if"
    " not.",
    "Dataloader is the part of Waiting for CPU in which the launching thread waited for data.",
)


@trace_table(IDLE, "idle", TraceFacts.idle)
def idle_table(ranks: Ranks[Idle]) -> Table:
    has_several = any(len(fact.devices) > 1 for fact in ranks.found.values())
    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    num_unknown = 0
    for rank, fact in ranks.found.items():
        for device in fact.devices:
            prefix = ranks.prefix(rank)
            if ranks.are_several or has_several:
                prefix += "unknown GPU " if device.device < 0 else f"GPU {device.device} "
            rows += _rows(device, prefix)
            depths += [0, *(depth for depth, _, _ in _CAUSES)]
            num_unknown += device.num_unknown
    return IDLE.table(
        rows=tuple(rows),
        depths=tuple(depths),
        notes=(*_NOTES, *_unknown_note(num_unknown)),
    )


def _rows(device: DeviceIdle, prefix: str) -> list[tuple[Cell, ...]]:
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
    return (f"{num_unknown} gaps are in Other because the launch of their event wasn't recorded.",)
