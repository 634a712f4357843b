"""Idle Summary: gaps of each GPU over the whole trace, by cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.idle import CAUSES, DeviceIdle, Idle, IdleCause
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
        "Gaps of each GPU between its first and last event, by the causes of GPU idle in Critical path. Busy"
        " and the causes add up to that time exactly. A gap counts for each cause that has a part of it."
    ),
    columns=_COLUMNS,
    rows={
        "Busy": "time with at least one kernel, copy or memset running on any stream.",
        "Idle": "gaps between them.",
        "Data loading": "nothing was queued while the launching thread waited for data.",
        "CPU": "nothing was queued, because the next work was launched after the gap started.",
        "Communication": (
            "before or after communication on another stream, or nothing was queued while the launching"
            " thread communicated on the CPU, as in gloo:all_reduce."
        ),
        "Kernel gap": "launched earlier, and shorter than 30 µs (HolisticTraceAnalysis's limit).",
        "Other stream": "launched earlier, longer, and after work on another stream.",
        "Other": "launched earlier but delayed on the same stream, or the launch is unknown.",
    },
    views=("kernels",),
    compared=CompareKey(keys=("total_ns",), sum_over="window"),
)

_LABELS: Final[Mapping[IdleCause, str]] = {
    "data loading": "Data loading",
    "host": "CPU",
    "communication": "Communication",
    "kernel gap": "Kernel gap",
    "other stream": "Other stream",
    "unknown": "Other",
}

_RARE: Final = ("Communication", "Other stream")
"""Rows shown only for GPUs with such gaps."""


@trace_table(IDLE, "idle", TraceFacts.idle)
def idle_table(ranks: Ranks[Idle]) -> Table:
    has_several = any(len(fact.devices) > 1 for fact in ranks.found.values())
    rows: list[tuple[int, dict[str, Cell]]] = []
    num_unknown = 0
    for rank, fact in ranks.found.items():
        for device in fact.devices:
            prefix = ranks.prefix(rank)
            if ranks.are_several or has_several:
                prefix += "unknown GPU " if device.device < 0 else f"GPU {device.device} "
            rows += _rows(device, prefix)
            num_unknown += device.num_unknown
    return IDLE.table(
        (cells for _, cells in rows),
        depths=tuple(depth for depth, _ in rows),
        notes=_unknown_note(num_unknown),
        is_detail=True,
    )


def _rows(device: DeviceIdle, prefix: str) -> Iterator[tuple[int, dict[str, Cell]]]:
    covered, span_ns = device.covered, device.span_ns

    def cells(label: str, covered_ns: int, total_ns: int) -> dict[str, Cell]:
        return {
            "name": prefix + label,
            "covered_ns": covered_ns,
            "covered_ratio": share(covered_ns, covered.total_ns),
            "total_ns": total_ns,
            "ratio": share(total_ns, span_ns),
        }

    yield 0, cells("Busy", covered.busy_ns, device.busy_ns)
    gaps = {"Idle": (0, device.idle, covered.idle_ns)}
    for cause, label in _LABELS.items():
        place = CAUSES.index(cause)
        gaps[label] = (1, device.by_cause[place], covered.by_cause_ns[place])
    for label, (depth, tally, covered_ns) in gaps.items():
        if tally.calls or covered_ns or label not in _RARE:
            times: dict[str, Cell] = {"gaps": tally.calls, "avg_ns": tally.avg_ns, "max_ns": tally.max_ns}
            yield depth, cells(label, covered_ns, tally.total_ns) | times


def _unknown_note(num_unknown: int) -> tuple[str, ...]:
    if not num_unknown:
        return ()
    return (f"{num_unknown} gaps are in Other because the launch of their event wasn't recorded.",)
