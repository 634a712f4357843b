"""Phases: where the wall time of all steps went, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.report.words import other_shares
from lightning_modelprof.run.loops import loop_of

_COLUMNS: Final = (
    ColumnSpec("label", "Phase"),
    ColumnSpec("num_steps", "Steps", Unit.COUNT, help="steps in which the phase took any time."),
    ColumnSpec("total_ns", "Total", Unit.DURATION_NS, "CPU", adds_up=True, help="self time in all steps."),
    ColumnSpec(
        "avg_ns", "Avg", Unit.DURATION_NS, "CPU", help="time per step, including steps without the phase."
    ),
    ColumnSpec("max_ns", "Max", Unit.DURATION_NS, "CPU", help="per step."),
    ColumnSpec("min_ns", "Min", Unit.DURATION_NS, "CPU", help="per step."),
    ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, "CPU", adds_up=True, help="share of the steps' wall time."),
    ColumnSpec(
        "device_total_ns",
        "Device total",
        Unit.DURATION_NS,
        help=(
            "elapsed time on the device's stream between events at the phase's boundaries, including"
            " waiting for the CPU. It's measured on CUDA, XPU and MPS unless"
            ' `inspect={"device_timing": False}`.'
        ),
    ),
)
PHASE_TIMES: Final = TableSpec(
    id="phases",
    title="Phases",
    help="Over *all* steps, including excluded ones.",
    columns=_COLUMNS,
    has_phases=True,
    views=("steps",),
    compared=CompareKey(keys=("avg_ns",)),
)


@run_table(PHASE_TIMES)
def phase_times_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    loop = loop_of(facts.info.loop)
    if not facts.phases:
        raise NotMeasured(f"no {loop.name} {loop.step} finished")
    has_device = any(phase.device_total_ns is not None for phase in facts.phases)
    columns = _COLUMNS if has_device else _COLUMNS[:-1]
    rows = tuple(tuple(getattr(phase, column.key) for column in columns) for phase in facts.phases)
    thread = "training thread" if loop.is_fit else "loop's thread"
    notes = [
        f"Self time on the {thread} over all {loop.steps}, including excluded ones. Phases add up to the"
        f" wall time of the {loop.steps}.",
        f"Avg, Max and Min are over all {loop.steps}; {loop.steps.capitalize()} is how many the phase"
        " occurred in."
        " Loop is Lightning's code between the other phases.",
        *other_shares(facts),
    ]
    if any(phase.key == "profiler" and phase.total_ns for phase in facts.phases):
        notes.append(
            "Profiler is the time spent directly in lightning-modelprof, such as opening and closing windows."
            " The benchmark figures exclude it. Overhead inside other phases is part of those phases; the"
            " note"
            " below Perf Summary has the total."
        )
    if has_device:
        covered = max(phase.device_num_steps for phase in facts.phases)
        notes.append(
            "Device total is elapsed time on the device's stream between the phase's boundaries, including"
            f" waiting, over the {covered} of {facts.num_steps} {loop.steps} with known times."
        )
    elif facts.info.device_type == "cpu":
        notes.append("This run was on the CPU, so there's no device time.")
    yield PHASE_TIMES.table(
        columns=columns,
        labels={"num_steps": loop.steps.capitalize()},
        rows=rows,
        notes=tuple(notes),
    )
