"""Measured facts about steps that took much longer than usual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_modelprof.run.ranges import Count, Real, Whole

_OLDER: Final = "not looked for (the run was saved by an older version)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """One step, and what else happened in it.

    Attributes:
        step: its number.
        tags: :class:`~lightning_modelprof.run.steps.StepTag` bits.
        duration_ns: wall time without the phase ``profiler``.
        usual_ns: median of the clean steps before it; in the first of a loop, of those around it.
        phases_ns: self time by phase key; without phases that took none, or were not measured.
        collector_ns: time in Python's garbage collector, in runs of a millisecond and more.
        generation: oldest generation that it collected; ``None`` if it did not run for so long.
        first_watched, last_watched: the steps over which the counts below were taken, this one among them.
        watched_ns: time over which they were taken: that of these steps, and what was before the loop's first
            one or after its last.
        beyond_ns: how much of that was more than usual: of all steps, of whatever kind, with more than
            ``factor`` times the median what is beyond it, and all that was in no step. ``None`` in runs of
            versions that did not look.
        spread_ns: what the other steps took beyond the fastest of them, together: so long they may have
            waited for a CPU. ``None`` as above.
        major_faults: page faults of the process that read from a disk; ``None`` where the system does not
            count.
        cpu_wait_ns: how long the training thread was ready to run and had no CPU; ``None`` as
            ``why_no_cpu_wait`` says.
    """

    step: Count
    tags: Count
    duration_ns: Whole
    usual_ns: Real
    phases_ns: dict[str, Whole]
    collector_ns: Whole
    generation: Whole | None
    first_watched: Count
    last_watched: Count
    watched_ns: Whole
    beyond_ns: Whole | None = None
    spread_ns: Whole | None = None
    major_faults: Whole | None = None
    cpu_wait_ns: Whole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSteps:
    """Steps that took more than ``factor`` times the median of the clean steps before them.

    Steps in which this profiler was at work are none of them, nor the first ones.

    Attributes:
        factor: how many times the median is slow.
        count: how many there were among the clean steps.
        excess_ns: how much longer than the median these took, together.
        num_special: further ones, with a validation or the start of an epoch in them.
        why_not_looked_for: why nothing is known of slow steps; ``""`` if it is.
        usual_cpu_wait: share of the time for which the training thread was ready to run and had no CPU, while
            no clean step was slow; ``None`` if there was always one, or where nobody counts.
        cpu_wait_share: the same over all of the loop, from its first step to the last look.
        why_no_cpu_wait: why nothing is known of that; ``""`` if it is.
        worst: the slowest of both, in the order of the loop.
    """

    factor: Real
    count: Count = 0
    excess_ns: Whole = 0
    num_special: Count = 0
    why_not_looked_for: str = ""
    usual_cpu_wait: Real | None = None
    cpu_wait_share: Real | None = None
    why_no_cpu_wait: str = _OLDER
    worst: tuple[SlowStep, ...] = ()
