"""Phases: wall time of all steps by phase, exact to the nanosecond."""

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
        is_optional=True,
    ),
)
PHASE_TIMES: Final = TableSpec(
    id="phases",
    title="Phases",
    help=(
        "Over *all* steps, including excluded ones. Profiler overhead inside other phases is part of those"
        " phases; the note below Perf Summary has the total."
    ),
    columns=_COLUMNS,
    has_phases=True,
    place=50,
    views=("steps",),
    compared=CompareKey(keys=("avg_ns",)),
)


@run_table(PHASE_TIMES)
def phase_times_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    loop = loop_of(facts.info.loop)
    if not facts.phases:
        raise NotMeasured(f"no {loop.name} {loop.step} finished")
    notes = list(other_shares(facts))
    covered = max(phase.device_num_steps for phase in facts.phases)
    if covered:
        notes.append(f"Device total covers the {covered} of {facts.num_steps} {loop.steps} with known times.")
    elif facts.info.device_type == "cpu":
        notes.append("This run was on the CPU, so there's no device time.")
    yield PHASE_TIMES.table(facts.phases, labels={"num_steps": loop.steps.capitalize()}, notes=tuple(notes))
