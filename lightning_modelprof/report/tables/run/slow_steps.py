"""Slow steps: which ones, by how much, why, and the worst beside a typical one."""

from __future__ import annotations

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import SlowCause, SlowFacts
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import SPECIAL, SlowStep


def slow_tables(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """Which steps took much longer than usual, and what was different in the worst of them.

    Definition: steps of more than ``factor`` times the median of the last 512 clean steps (of a short run:
    all), without those in which this profiler was at work; the slowest eight that are clean and the slowest
    eight of the others.
    """
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


def _slow_table(rows: tuple[tuple[Cell, ...], ...], reason: str | None, notes: tuple[str, ...] = ()) -> Table:
    return Table(
        id="slow_steps",
        title="Slow steps",
        columns=(
            Column("step", "Step"),
            Column("duration_ns", "Time", Unit.DURATION_NS),
            Column("times_usual", "Times usual", Unit.RATE),
            Column("cause", "Cause"),
            Column("phase", "Longest beyond usual"),
            Column("phase_excess_ns", "Beyond by", Unit.DURATION_NS),
            Column("collector_ns", "Collector", Unit.DURATION_NS),
            Column("major_faults", "Faults", Unit.COUNT),
            Column("cpu_wait", "CPU wait", Unit.RATIO),
        ),
        rows=rows,
        notes=notes,
        absent_reason=reason,
        is_detail=not rows,  # most runs have none, and then nobody wants to read of them
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
    return Table(
        id="worst_step",
        title=f"A typical {step} and the worst",
        columns=(
            Column("label", "Phase"),
            Column("typical", "Typical", Unit.BY_ROW),
            Column("worst", "Worst", Unit.BY_ROW),
            Column("more", "More", Unit.BY_ROW),
        ),
        rows=tuple(rows),
        row_units=tuple(units),
        notes=(
            f"Worst: {step} {worst.slow.step}{is_special}; cause: {cause_words(worst)}. Typical: medians over"
            " the clean ones.",
            *of_wait,
        ),
    )
