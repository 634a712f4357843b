"""When a torch.profiler window opens and closes: a pure function of the step number.

The words and their meaning are those of ``torch.profiler.schedule``; ``tests/measure/test_schedule.py`` holds
the two against each other for every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from lightning_modelprof.run.steps import StepTag


class WindowAction(Enum):
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
        return self.wait + self.warmup + self.active

    def window(self, index: int) -> WindowSteps | None:
        """The steps of window number ``index`` (from 0), or ``None`` if there is no such window."""
        if self.active == 0 or (self.repeat and index >= self.repeat):
            return None
        start = self.skip_first + index * self.cycle + self.wait
        first = start + self.warmup
        return WindowSteps(index=index, first_warmup=start, first=first, last=first + self.active - 1)

    def action(self, step: int) -> WindowAction:
        """What the profiler does during step number ``step`` (from 0)."""
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
    """The schedule that does what a function of the step number says; ``None`` if none does.

    Args:
        name_of: step number → name of a ``torch.profiler.ProfilerAction``.

    Caveats:
        The first 20,000 steps are looked at.
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
