"""When a torch.profiler window opens and closes: a pure function of the step number.

The words and their meaning are those of ``torch.profiler.schedule``; ``tests/test_schedule.py`` holds
the two against each other for every argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from lightning_modelprof.run.steps import StepTag


class Action(Enum):
    """What the profiler does during a step, in ``torch.profiler.ProfilerAction``'s order."""

    WAIT = "wait"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_LAST = "active_last"
    """The window closes when this step ends."""


@dataclass(frozen=True, slots=True)
class WindowSteps:
    """The steps of one window; ``first_warmup == first`` when there is no warm-up."""

    index: int
    first_warmup: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """After ``skip_first`` steps, ``repeat`` cycles of ``wait``, ``warmup`` and ``active`` steps.

    ``repeat=0`` means cycles until training ends; ``active=0`` means no window at all.
    """

    skip_first: int = 0
    wait: int = 0
    warmup: int = 0
    active: int = 0
    repeat: int = 1

    @staticmethod
    def from_range(start: int, end: int) -> Schedule:
        """Paddle's half-open ``(start, end)``: record steps start .. end-1, with one step of warm-up."""
        warmup = 1 if start >= 1 else 0
        return Schedule(wait=start - warmup, warmup=warmup, active=end - start, repeat=1)

    @property
    def cycle(self) -> int:
        """Number of steps in one wait-warmup-active cycle."""
        return self.wait + self.warmup + self.active

    def window(self, index: int) -> WindowSteps | None:
        """The steps of window number ``index`` (from 0), or ``None`` if there is no such window."""
        if self.active == 0 or (self.repeat and index >= self.repeat):
            return None
        start = self.skip_first + index * self.cycle + self.wait
        first = start + self.warmup
        return WindowSteps(index=index, first_warmup=start, first=first, last=first + self.active - 1)

    def action(self, step: int) -> Action:
        """What the profiler does during step number ``step`` (from 0)."""
        if self.active == 0 or step < self.skip_first:
            return Action.WAIT
        index, position = divmod(step - self.skip_first, self.cycle)
        if (self.repeat and index >= self.repeat) or position < self.wait:
            return Action.WAIT
        if position < self.wait + self.warmup:
            return Action.WARMUP
        return Action.ACTIVE_LAST if position == self.cycle - 1 else Action.ACTIVE


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
