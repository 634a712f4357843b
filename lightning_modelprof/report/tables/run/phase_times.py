"""Phases: where the wall time of all steps went, to the nanosecond."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.words import other_shares
from lightning_modelprof.run.loops import loop_of

_COLUMNS: Final = (
    Column("label", "Phase"),
    Column("num_steps", "Steps", Unit.COUNT, help="in how many the phase took any time."),
    Column("total_ns", "Total", Unit.DURATION_NS, "CPU", adds_up=True, help="self time in all steps."),
    Column(
        "avg_ns", "Avg", Unit.DURATION_NS, "CPU", help="per finished step, those without the phase included."
    ),
    Column("max_ns", "Max", Unit.DURATION_NS, "CPU", help="of one step."),
    Column("min_ns", "Min", Unit.DURATION_NS, "CPU", help="of one step."),
    Column("ratio", "Ratio(%)", Unit.RATIO, "CPU", adds_up=True, help="of the steps' wall time."),
    Column(
        "device_total_ns",
        "Device total",
        Unit.DURATION_NS,
        help=(
            "elapsed time on the device's stream between events at the phase's boundaries, over the steps"
            " for which it is known; it includes the time in which the device waited for the host. On"
            ' CUDA, XPU and MPS, unless `inspect={"device_timing": False}`.'
        ),
    ),
)
PHASE_TIMES: Final = TableKind(
    id="phases",
    title="Phases",
    help="Over *all* finished steps, clean or not.",
    columns=_COLUMNS,
    has_phases=True,
    views=("steps",),
    compared=Figure(keys=("avg_ns",)),
)


def phase_times_table(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """Which phases the loop spent its time in, over every finished step."""
    loop = loop_of(analysis.info.loop)
    has_device = any(phase.device_total_ns is not None for phase in analysis.phases)
    columns = _COLUMNS if has_device else _COLUMNS[:-1]
    rows = tuple(tuple(getattr(phase, column.key) for column in columns) for phase in analysis.phases)
    thread = "training thread" if loop.is_fit else "thread of the loop"
    notes = [
        f"Self time on the {thread} over all finished {loop.steps}, clean or not; it sums to their wall"
        " time.",
        *other_shares(analysis),
    ]
    if any(phase.key == "profiler" and phase.total_ns for phase in analysis.phases):
        notes.append(
            "Profiler is this package's own work, such as opening and closing a window; no benchmark figure"
            " holds any of it."
        )
    if has_device:
        covered = max(phase.device_num_steps for phase in analysis.phases)
        notes.append(
            "Device total is elapsed time on the device's stream between the phase's boundaries, waiting"
            f" included, over the {covered} of {analysis.num_steps} {loop.steps} for which it is known."
        )
    elif analysis.info.device_type == "cpu":
        notes.append("The run is on the CPU: there is no device time.")
    return (
        PHASE_TIMES.table(
            columns=columns,
            labels={"num_steps": loop.steps.capitalize()},
            rows=rows,
            notes=tuple(notes) if rows else (),
            absent_reason=None if rows else f"no {loop.name} {loop.step} ran to its end",
        ),
    )
