"""Slow steps: which ones, by how much, why, and the worst beside a typical one."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import SlowCause, SlowFacts
from lightning_modelprof.report.kinds import TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import SPECIAL, SlowStep


def slow_tables(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """Which steps took much longer than usual, and what was different in the worst of them."""
    facts, loop = analysis.slow, loop_of(analysis.info.loop)
    if isinstance(facts, Absent):
        return (_slow_table((), facts.reason),)
    if facts.worst is None:
        none_was = f"no {loop.step} took more than {facts.record.factor:g} times the median"
        return (_slow_table((), facts.record.why_not_looked_for or none_was),)
    return (
        _slow_table(tuple(_row(one) for one in facts.causes), None, _notes(facts, loop.steps)),
        _worst_table(facts, facts.worst, loop.step),
    )


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
        f", and {record.num_special:,} with a validation or an epoch's start" if record.num_special else ""
    )
    shown = len(facts.causes)
    all_of = "" if shown == record.count + record.num_special else f" The slowest {shown} are shown."
    notes = (
        f"{record.count:,} clean {steps}{special} took more than {record.factor:g} times the median.{all_of}",
        f"Faults and CPU wait are of all {steps} that were looked at together, this one among them: the sum"
        " of the faults, and the share of their time in which the training thread was ready and had no CPU.",
    )
    if not record.why_no_cpu_wait:
        return notes
    return (*notes, f"CPU wait: {record.why_no_cpu_wait}. So the machine is named as no cause.")


SLOW_STEPS: Final = TableKind(
    id="slow_steps",
    title="Slow steps",
    help=(
        "Steps are checked in groups of 200 (the last group has the rest). A step is slow if it takes"
        " more than three times the median of the last 512 clean, not slow steps before its group. As"
        " long as fewer than 20 of these are known, the group's own clean steps count as well: the"
        " first group is compared with its own median, and with fewer than 20 no step is called slow."
        " If at least half of a group's clean steps are slow, that pace becomes the usual one. Times"
        " are without the phase Profiler. Steps in which this profiler was at work, and the first"
        " ones, are none of them. The slowest eight that are clean are shown, and the slowest eight of"
        " those with a validation or the start of an epoch."
    ),
    columns=(
        Column("step", "Step"),
        Column("duration_ns", "Time", Unit.DURATION_NS, help="of the step."),
        Column("times_usual", "Times usual", Unit.RATE, help="the same by the median."),
        Column(
            "cause",
            "Cause",
            help=(
                "the collector, if it took half of the time beyond the median, with the oldest generation"
                " that it collected; else the phase that took half of it; but the machine, if CPU wait"
                " explains half and the phase is one that computes, or there is none; else unknown."
            ),
        ),
        Column(
            "phase",
            "Longest beyond usual",
            help="the phase that is longest beyond its median over the clean steps.",
        ),
        Column(
            "phase_excess_ns",
            "Beyond by",
            Unit.DURATION_NS,
            help="how much longer that phase took than its median.",
        ),
        Column(
            "collector_ns",
            "Collector",
            Unit.DURATION_NS,
            help="time in Python's garbage collector, in runs of a millisecond and more.",
        ),
        Column(
            "major_faults",
            "Faults",
            Unit.COUNT,
            help=(
                "page faults of the process that read from a disk, of the whole group of steps; empty where"
                " the system does not count. They are shown and never a cause: how long one took is not"
                " known."
            ),
        ),
        Column(
            "cpu_wait",
            "CPU wait",
            Unit.RATIO,
            help=(
                "the share of the time in which the training thread was ready to run and had no CPU, of the"
                " whole group of steps; empty where the system does not count (only Linux with scheduler"
                " statistics does)."
            ),
        ),
    ),
    views=("steps",),
)


def _slow_table(rows: tuple[tuple[Cell, ...], ...], reason: str | None, notes: tuple[str, ...] = ()) -> Table:
    return SLOW_STEPS.table(
        rows=rows,
        notes=notes,
        absent_reason=reason,
        is_detail=not rows,  # most runs have none, and then nobody wants to read of them
    )


WORST_STEP: Final = TableKind(
    id="worst_step",
    title="A typical step and the worst",
    help=(
        "Medians of the phases over the clean steps beside the slowest clean step; CPU wait of groups"
        " without a slow clean step beside its group's."
    ),
    columns=(
        Column("label", "Phase"),
        Column("typical", "Typical", Unit.BY_ROW, help="median over the clean steps."),
        Column("worst", "Worst", Unit.BY_ROW, help="of the slowest clean step."),
        Column("more", "More", Unit.BY_ROW, help="how much more that is."),
    ),
    has_phases=True,
    views=("steps",),
)


def _worst_table(facts: SlowFacts, worst: SlowCause, step: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for phase in PHASES:
        typical_ns = facts.medians_ns.get(phase.key)
        worst_ns = worst.slow.phases_ns.get(phase.key, 0)
        if not typical_ns and not worst_ns:
            continue
        more_ns = None if typical_ns is None else worst_ns - typical_ns
        rows.append((phase.label, typical_ns, worst_ns, more_ns))
    units = [Unit.DURATION_NS] * len(rows)
    usual, wait = facts.record.usual_cpu_wait, _cpu_wait(worst.slow)
    of_wait: tuple[str, ...] = ()
    if wait is not None:
        rows.append(("CPU wait", usual, wait, None if usual is None else wait - usual))
        units.append(Unit.RATIO)
        of_wait = (
            "CPU wait: share of the time, typically while no clean one was slow, and at the worst of all"
            " that were looked at together with it.",
        )
    is_special = " with a validation or an epoch's start" if worst.slow.tags & SPECIAL else ""
    return WORST_STEP.table(
        title=f"A typical {step} and the worst",
        rows=tuple(rows),
        row_units=tuple(units),
        notes=(
            f"Worst: {step} {worst.slow.step}{is_special}; cause: {cause_words(worst)}. Typical: medians over"
            " the clean ones.",
            *of_wait,
        ),
    )
