"""The steps that a schedule takes from the benchmark, on every rank and whoever of them profiles.

A rank whose profiler works is late at the next collective, where all others wait for it. So the same steps
are no clean steps on every rank, and each knows them from the schedule alone: nothing is asked of the others.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.measure.window.schedule import Schedule
from lightning_modelprof.run.steps import StepTag

NEVER: Final = -1
"""A step number that does not come."""


def sooner(one: int, other: int) -> int:
    """The step number that comes first."""
    return max(one, other) if NEVER in (one, other) else min(one, other)


class ScheduledSteps:
    """Tags steps by a schedule, as the ranks that profile do when nothing comes between.

    Args:
        schedule: of the windows.
        lag: steps that a rank may be ahead of one that profiles, because none of them has a collective: while
            gradients accumulate. So many steps later it may be that it waits for the closing of a window.

    Attributes:
        next_step: the next step number at whose start :meth:`begin_step` must be called.
    """

    def __init__(self, schedule: Schedule, lag: int = 0) -> None:
        self._schedule = schedule
        self._lag = lag
        self._upcoming = schedule.window(0)
        self._last_late = NEVER
        self.next_step = self._upcoming.first_warmup if self._upcoming else NEVER

    @property
    def is_done(self) -> bool:
        """Whether no window is open and none will come, on any rank."""
        return self._upcoming is None

    def begin_step(self, step: int) -> StepTag:
        """Step number ``step`` begins; returns the tags that this gives it."""
        tags = StepTag(0)
        if self._upcoming is not None and step > self._upcoming.last:
            self._last_late = step + self._lag
            self._upcoming = self._schedule.window(self._upcoming.index + 1)
        if step <= self._last_late:
            tags |= StepTag.PROFILER_STOP
        window = self._upcoming
        if window is not None and step >= window.first_warmup:
            tags |= StepTag.PROFILED if step >= window.first else StepTag.PROFILER_WARMUP
        self.next_step = NEVER if window is None else max(step + 1, window.first_warmup)
        if step < self._last_late:
            self.next_step = step + 1
        return tags
