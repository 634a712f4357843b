"""Which windows come when: those of this rank, and those of others, which make its steps slow as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.measure.window.schedule import Schedule
from lightning_modelprof.run.steps import StepTag

NEVER: Final = 2**62
"""A step number that does not come."""


class WindowPlan:
    """The windows of a schedule on one rank, and the steps that those of all ranks slow down.

    Args:
        records: whether this rank has windows itself.
        lag: steps that a rank may be ahead of one that profiles, because none of them has a collective: while
            gradients accumulate. So many steps later it may be that it waits for the closing of a window.
            ``None`` when there are no other ranks.

    Attributes:
        upcoming: the window of this rank that is open or comes next; ``None`` when none will come.
        next_step: the next step number at whose start :meth:`begin_step` must be called.
        why_late: why the first window comes later than it was to; ``""`` if it does not.
    """

    def __init__(self, schedule: Schedule, *, records: bool = True, lag: int | None = None) -> None:
        self._lag = lag
        self._last_late = -1
        self._set(schedule, records=records)
        self.why_late = ""

    def _set(self, schedule: Schedule, *, records: bool) -> None:
        first = schedule.window(0)
        self._schedule = schedule
        self.upcoming = first if records else None
        self._of_others = None if self._lag is None else first
        is_any = self.upcoming is not None or self._of_others is not None
        self.next_step = first.first_warmup if first is not None and is_any else NEVER

    @property
    def is_done(self) -> bool:
        """Whether no window is open and none will come, which every rank says at the same step."""
        return self.upcoming is None and self._of_others is None

    @property
    def is_first(self) -> bool:
        """Whether no window of this rank was before."""
        return self.upcoming is not None and self.upcoming.index == 0

    @property
    def is_asked_for(self) -> bool:
        """Whether the next window is missed if it does not come: without an end there is always one more."""
        return bool(self.is_first or self._schedule.repeat)

    def postpone(self, steps: int, why: str) -> None:
        """All windows come so many steps later, if the loop lasts; to be called before the first.

        Args:
            steps: how many, the same on all ranks.
            why: a clause that says so, for the report of a loop that does not.
        """
        self.why_late = why
        later = replace(self._schedule, skip_first=self._schedule.skip_first + steps)
        self._set(later, records=True)

    def next_window(self) -> None:
        """The upcoming window is over, or will not be."""
        assert self.upcoming is not None
        self.upcoming = self._schedule.window(self.upcoming.index + 1)

    def leave_rest(self) -> None:
        """This rank has no further window."""
        self.upcoming = None

    def end(self) -> None:
        """No more steps come."""
        self.next_step = NEVER

    def begin_step(self, step: int) -> StepTag:
        """Step number ``step`` has begun; returns the tags that windows of other ranks give it."""
        tags = StepTag(0) if self._lag is None else self._step_others(step, self._lag)
        upcoming = (self.upcoming, self._of_others)
        next_step = min((max(step + 1, one.first_warmup) for one in upcoming if one), default=NEVER)
        self.next_step = step + 1 if step < self._last_late else next_step
        return tags

    def _step_others(self, step: int, lag: int) -> StepTag:
        tags, window = StepTag(0), self._of_others
        if window is not None and step > window.last:
            self._last_late = step + lag
            window = self._of_others = self._schedule.window(window.index + 1)
        if step <= self._last_late:
            tags |= StepTag.PROFILER_STOP
        if window is not None and step >= window.first_warmup:
            tags |= StepTag.PROFILED if step >= window.first else StepTag.PROFILER_WARMUP
        return tags
