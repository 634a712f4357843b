"""Slow steps: which ones, by how much, why, and the worst beside a typical one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.step_costs import SlowCause, SlowFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import SPECIAL, SlowStep


def _row(one: SlowCause) -> tuple[Cell, ...]:
    slow = one.slow
    return (
        f"step {slow.step}",
        slow.duration_ns,
        slow.duration_ns / slow.usual_ns if slow.usual_ns else None,
        cause_words(one),
        PHASES[PHASE_INDEX[one.phase]].label,
        one.phase_excess_ns,
        slow.collector_ns,
        slow.major_faults,
        _cpu_wait(slow),
    )


def _cpu_wait(slow: SlowStep) -> float | None:
    """Share of the time over which the waiting was counted."""
    return None if slow.cpu_wait_ns is None or not slow.watched_ns else slow.cpu_wait_ns / slow.watched_ns


def _notes(facts: SlowFacts, steps: str) -> tuple[str, ...]:
    record = facts.record
    special = (
        f" and {record.num_special:,} with validation or at the start of an epoch"
        if record.num_special
        else ""
    )
    shown = len(facts.causes)
    all_of = "" if shown == record.count + record.num_special else f" The slowest {shown} are shown."
    notes = (
        f"{record.count:,} clean {steps}{special} took more than {record.factor:g} times the median.{all_of}",
        f"Page faults and CPU wait cover the whole group of {steps}. CPU wait is the share of time the"
        " training thread was ready but waited for a CPU.",
    )
    if not record.why_no_cpu_wait:
        return notes
    return (*notes, f"CPU wait isn't available ({record.why_no_cpu_wait}), so no cause is CPU contention.")


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
        ColumnSpec("step", "Step"),
        ColumnSpec("duration_ns", "Time", Unit.DURATION_NS, help="step time."),
        ColumnSpec("times_usual", "× median", Unit.RATE, help="step time relative to the median."),
        ColumnSpec(
            "cause",
            "Cause",
            help=(
                "Python's garbage collector if it took half of the time above the median (with its oldest"
                " generation), otherwise the phase that took half of it. It's CPU contention if waiting for"
                " a CPU explains half and no waiting phase does, and unknown otherwise."
            ),
        ),
        ColumnSpec(
            "phase",
            "Slowest phase",
            help="the phase that is furthest above its median over clean steps.",
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
        ),
        ColumnSpec(
            "cpu_wait",
            "CPU wait",
            Unit.RATIO,
            help=(
                "share of time the training thread was ready to run but waited for a CPU, for the whole"
                " group of steps. Only Linux with scheduler statistics counts it."
            ),
        ),
    ),
    views=("steps",),
)


@run_table(SLOW_STEPS)
def slow_steps_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    slow, loop = facts.slow, loop_of(facts.info.loop)
    if slow.worst is None:
        none_was = f"no clean {loop.step} took more than {slow.record.factor:g} times the median"
        raise NotMeasured(slow.record.why_not_looked_for or none_was)
    yield SLOW_STEPS.table(rows=tuple(_row(one) for one in slow.causes), notes=_notes(slow, loop.steps))


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
    has_phases=True,
    views=("steps",),
)


@run_table(WORST_STEP, needs=Facts.slow)
def worst_step_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    slow, step = facts.slow, loop_of(facts.info.loop).step
    worst = slow.worst
    if worst is None:
        return
    rows: list[tuple[Cell, ...]] = []
    for phase in PHASES:
        typical_ns = slow.medians_ns.get(phase.key)
        worst_ns = worst.slow.phases_ns.get(phase.key, 0)
        if not typical_ns and not worst_ns:
            continue
        more_ns = None if typical_ns is None else worst_ns - typical_ns
        rows.append((phase.label, typical_ns, worst_ns, more_ns))
    units = [Unit.DURATION_NS] * len(rows)
    usual, wait = slow.record.usual_cpu_wait, _cpu_wait(worst.slow)
    of_wait: tuple[str, ...] = ()
    if wait is not None:
        rows.append(("CPU wait", usual, wait, None if usual is None else wait - usual))
        units.append(Unit.RATIO)
        of_wait = (
            "CPU wait is the share of time without a CPU: in groups without slow clean steps, and in the"
            " slowest step's group.",
        )
    is_special = " with validation or at the start of an epoch" if worst.slow.tags & SPECIAL else ""
    yield WORST_STEP.table(
        title=f"Median and slowest {step}",
        rows=tuple(rows),
        row_units=tuple(units),
        notes=(
            f"Slowest: {step} {worst.slow.step}{is_special}, caused by {cause_words(worst)}. Median: over"
            f" clean {step}s.",
            *of_wait,
        ),
    )
