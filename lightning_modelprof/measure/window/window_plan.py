"""Window schedule of one rank, and the steps that other ranks' windows slow down."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.measure.window.schedule import Schedule
from lightning_modelprof.run.steps import StepTag

NEVER: Final = 2**62
"""A step number that is never reached."""


class WindowPlan:
    """The windows of a schedule on one rank, and the steps that all ranks' windows slow down.

    Args:
        records: whether this rank has windows itself.
        lag: steps that a rank may be ahead of one that profiles, as steps that only accumulate gradients have
            no collective. It may wait for a window to close that many steps later. ``None`` without other
            ranks.

    Attributes:
        upcoming: this rank's open or next window; ``None`` without one.
        next_step: next step number at whose start :meth:`begin_step` must be called.
        why_late: why the first window comes later than scheduled; ``""`` if it doesn't.
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
        """Whether no window is open or upcoming; turns true at the same step on every rank."""
        return self.upcoming is None and self._of_others is None

    @property
    def is_first(self) -> bool:
        """Whether this rank has had no window yet."""
        return self.upcoming is not None and self.upcoming.index == 0

    @property
    def is_asked_for(self) -> bool:
        """Whether a next window that doesn't come counts as missed; only the first of an endless schedule."""
        return bool(self.is_first or self._schedule.repeat)

    def postpone(self, steps: int, why: str) -> None:
        """Postpone all windows; call before the first one.

        Args:
            steps: number of steps, the same on all ranks.
            why: the reason, as a clause for the report of a loop that ends before.
        """
        self.why_late = why
        later = replace(self._schedule, skip_first=self._schedule.skip_first + steps)
        self._set(later, records=True)

    def next_window(self) -> None:
        """Move past the upcoming window, done or not."""
        assert self.upcoming is not None
        self.upcoming = self._schedule.window(self.upcoming.index + 1)

    def leave_rest(self) -> None:
        self.upcoming = None

    def end(self) -> None:
        self.next_step = NEVER

    def begin_step(self, step: int) -> StepTag:
        """Start step number ``step``; returns its tags from other ranks' windows."""
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
