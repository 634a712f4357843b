"""Computes from the step number when a torch.profiler window opens and closes.

Terms and their meaning are those of ``torch.profiler.schedule``; ``tests/measure/test_schedule.py`` compares
the two for every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from lightning_modelprof.run.steps import StepTag


class WindowAction(Enum):
    """The profiler's activity during a step, in ``torch.profiler.ProfilerAction``'s order."""

    WAIT = "wait"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_LAST = "active_last"
    """The window closes when this step ends."""


@dataclass(frozen=True, slots=True)
class WindowSteps:
    """The steps of one window; ``first_warmup == first`` without a warm-up."""

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
        """Convert Paddle's half-open ``(start, end)``: record steps start .. end-1 after one warm-up step."""
        warmup = 1 if start >= 1 else 0
        return Schedule(wait=start - warmup, warmup=warmup, active=end - start, repeat=1)

    @property
    def cycle(self) -> int:
        return self.wait + self.warmup + self.active

    def window(self, index: int) -> WindowSteps | None:
        """Return the steps of window number ``index`` (from 0), or ``None`` if there is no such window."""
        if self.active == 0 or (self.repeat and index >= self.repeat):
            return None
        start = self.skip_first + index * self.cycle + self.wait
        first = start + self.warmup
        return WindowSteps(index=index, first_warmup=start, first=first, last=first + self.active - 1)

    def action(self, step: int) -> WindowAction:
        """Return the profiler's activity during step number ``step`` (from 0)."""
        if self.active == 0 or step < self.skip_first:
            return WindowAction.WAIT
        index, position = divmod(step - self.skip_first, self.cycle)
        if (self.repeat and index >= self.repeat) or position < self.wait:
            return WindowAction.WAIT
        if position < self.wait + self.warmup:
            return WindowAction.WARMUP
        return WindowAction.ACTIVE_LAST if position == self.cycle - 1 else WindowAction.ACTIVE


_TRIED_STEPS: Final = 20_000
_NAMES: Final = {
    "NONE": WindowAction.WAIT,
    "WARMUP": WindowAction.WARMUP,
    "RECORD": WindowAction.ACTIVE,
    "RECORD_AND_SAVE": WindowAction.ACTIVE_LAST,
}


def fit_schedule(name_of: Callable[[int], str]) -> Schedule | None:
    """Return the schedule that matches a function of the step number; ``None`` if none does.

    Args:
        name_of: returns the name of a step number's ``torch.profiler.ProfilerAction``.

    Caveats:
        Compares only the first 20,000 steps.
    """
    actions = [_NAMES.get(name_of(step)) for step in range(_TRIED_STEPS)]
    if None in actions:
        return None
    begins = [
        step
        for step, action in enumerate(actions)
        if action is not WindowAction.WAIT
        and (not step or actions[step - 1] in (WindowAction.WAIT, WindowAction.ACTIVE_LAST))
    ]
    ends = [step for step, action in enumerate(actions) if action is WindowAction.ACTIVE_LAST]
    if not begins or not ends:
        return Schedule() if not begins else None
    first = begins[0]
    length = ends[0] - first + 1
    warmup = actions[first : first + length].count(WindowAction.WARMUP)
    wait = begins[1] - first - length if len(begins) > 1 else first
    is_endless = len(begins) > 1 and begins[-1] + (begins[1] - first) >= _TRIED_STEPS
    found = Schedule(
        skip_first=first - wait,
        wait=wait,
        warmup=warmup,
        active=length - warmup,
        repeat=0 if is_endless else len(begins),
    )
    is_same = found.skip_first >= 0 and all(found.action(step) is one for step, one in enumerate(actions))
    return found if is_same else None


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
