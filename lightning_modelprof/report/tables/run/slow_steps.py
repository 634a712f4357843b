"""Slow steps: which ones, by how much, why, and the slowest next to the median."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.step_costs import SlowFacts
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import SPECIAL, SlowStep


def _cpu_wait(slow: SlowStep) -> float | None:
    return share(slow.cpu_wait_ns, slow.watched_ns)


def _notes(facts: SlowFacts, steps: str) -> tuple[str, ...]:
    record = facts.record
    special = (
        f" and {record.num_special:,} with validation or at the start of an epoch"
        if record.num_special
        else ""
    )
    shown = len(facts.causes)
    all_of = "" if shown == record.count + record.num_special else f" The slowest {shown} are shown."
    notes = [
        f"{record.count:,} clean {steps}{special} took more than {record.factor:g} times the median.{all_of}"
    ]
    if record.why_no_cpu_wait:
        notes.append(f"CPU wait isn't available ({record.why_no_cpu_wait}), so no cause is CPU contention.")
    return tuple(notes)


SLOW_STEPS: Final = TableSpec(
    id="slow_steps",
    title="Slow steps",
    help=(
        "A step is slow if it takes over three times the median of the last 512 clean steps that weren't"
        " slow. Steps are checked in groups of 200. With fewer than 20 earlier steps, the group's own clean"
        " steps are added to the median, and with fewer than 20 in total no step is called slow. If at"
        " least half of a group's clean steps are slow, that pace becomes the new baseline. Times exclude"
        " profiler overhead, and steps with profiler work and the first steps are skipped. The table shows"
        " the eight slowest clean steps and the eight slowest with validation or at the start of an epoch."
    ),
    columns=(
        ColumnSpec("step", "Step", of=lambda one: f"step {one.slow.step}"),
        ColumnSpec(
            "duration_ns", "Time", Unit.DURATION_NS, help="step time.", of=lambda one: one.slow.duration_ns
        ),
        ColumnSpec(
            "times_usual",
            "× median",
            Unit.RATE,
            help="step time relative to the median.",
            of=lambda one: share(one.slow.duration_ns, one.slow.usual_ns),
        ),
        ColumnSpec(
            "cause",
            "Cause",
            help=(
                "Python's garbage collector if it took half of the time above the median (with its oldest"
                " generation), otherwise the phase that took half of it. It's CPU contention if waiting for"
                " a CPU explains half and no waiting phase does, and unknown otherwise."
            ),
            of=cause_words,
        ),
        ColumnSpec(
            "phase",
            "Slowest phase",
            help="the phase that is furthest above its median over clean steps.",
            of=lambda one: PHASES[PHASE_INDEX[one.phase]].label,
        ),
        ColumnSpec(
            "phase_excess_ns",
            "Above median by",
            Unit.DURATION_NS,
            help="that phase's time above its median.",
        ),
        ColumnSpec(
            "collector_ns",
            "Collector",
            Unit.DURATION_NS,
            help="time in Python's garbage collector, counting pauses of 1 ms or more.",
            of=lambda one: one.slow.collector_ns,
        ),
        ColumnSpec(
            "major_faults",
            "Page faults",
            Unit.COUNT,
            help=(
                "page faults of the process that read from disk, for the whole group of steps. Empty if the"
                " system doesn't count them. They're never reported as a cause because their time isn't"
                " known."
            ),
            of=lambda one: one.slow.major_faults,
        ),
        ColumnSpec(
            "cpu_wait",
            "CPU wait",
            Unit.RATIO,
            help=(
                "share of time the training thread was ready to run but waited for a CPU, for the whole"
                " group of steps. Only Linux with scheduler statistics counts it."
            ),
            of=lambda one: _cpu_wait(one.slow),
        ),
    ),
    place=70,
    views=("steps",),
)


@run_table(SLOW_STEPS)
def slow_steps_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    slow, loop = facts.slow, loop_of(facts.info.loop)
    if slow.worst is None:
        none_was = f"no clean {loop.step} took more than {slow.record.factor:g} times the median"
        raise NotMeasured(slow.record.why_not_looked_for or none_was)
    yield SLOW_STEPS.table(slow.causes, notes=_notes(slow, loop.steps))


WORST_STEP: Final = TableSpec(
    id="worst_step",
    title="Median and slowest step",
    help=(
        "Phase medians over clean steps next to the slowest clean step. CPU wait compares groups without"
        " slow clean steps with the slowest step's group."
    ),
    columns=(
        ColumnSpec("label", "Phase"),
        ColumnSpec("typical", "Median", Unit.BY_ROW, help="median over clean steps."),
        ColumnSpec("worst", "Slowest", Unit.BY_ROW, help="slowest clean step."),
        ColumnSpec("more", "Difference", Unit.BY_ROW, help="slowest minus median."),
    ),
    unit_of=itemgetter("unit"),
    has_phases=True,
    place=80,
    views=("steps",),
)


@run_table(WORST_STEP, needs=Facts.slow)
def worst_step_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    slow, step = facts.slow, loop_of(facts.info.loop).step
    worst = slow.worst
    if worst is None:
        return
    rows = []
    for phase in PHASES:
        typical_ns = slow.medians_ns.get(phase.key)
        worst_ns = worst.slow.phases_ns.get(phase.key, 0)
        if typical_ns or worst_ns:
            rows.append(_side_by_side(phase.label, typical_ns, worst_ns, Unit.DURATION_NS))
    wait = _cpu_wait(worst.slow)
    if wait is not None:
        rows.append(_side_by_side("CPU wait", slow.record.usual_cpu_wait, wait, Unit.RATIO))
    is_special = " with validation or at the start of an epoch" if worst.slow.tags & SPECIAL else ""
    yield WORST_STEP.table(
        rows,
        title=f"Median and slowest {step}",
        notes=(f"Slowest: {step} {worst.slow.step}{is_special}, caused by {cause_words(worst)}.",),
    )


def _side_by_side(label: str, typical: float | None, worst: float, unit: Unit) -> dict[str, Any]:
    more = None if typical is None else worst - typical
    return {"label": label, "typical": typical, "worst": worst, "more": more, "unit": unit}
