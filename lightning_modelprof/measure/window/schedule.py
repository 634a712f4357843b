"""Computes from the step number when a torch.profiler window opens and closes.

Terms and their meaning are those of ``torch.profiler.schedule``; ``tests/measure/test_schedule.py`` compares
the two for every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final


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
