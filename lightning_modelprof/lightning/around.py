"""What passes before a loop and after it, by Lightning's actions: the outermost of nested ones counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.steps.actions import Action
from lightning_modelprof.run.records import REPORT, SANITY_CHECK, ActionTime, AroundLoop

_CALLS: Final = 0
_TOTAL: Final = 1
_AFTER: Final = 2

_BEGIN_OF_CHECK: Final = ".on_sanity_check_start"
_END_OF_CHECK: Final = ".on_sanity_check_end"
"""Hooks of callbacks around the sanity check, which is no action of Lightning's."""


class AroundClock:
    """Adds up the host time before and after one loop: in each action, and from its end to the next one.

    Args:
        clock: host clock; it is read twice for each outermost action.
        running: an action that runs and of whose end nobody will tell; ``""`` where one begins next.

    Attributes:
        on_end: called when all is over, if the loop has come to its end.
    """

    def __init__(self, clock: HostClock, running: str = "") -> None:
        self._clock = clock
        self._before: dict[str, list[int]] = {}
        self._after: dict[str, list[int]] = {}
        self._times: dict[str, list[int]] | None = self._before  # None while nothing is to be added up
        self._open = ""  # the outermost action, of whose end we will hear
        self._depth = 0  # how often it runs within itself
        self._is_over = False
        self.on_end: Callable[[], None] = _nothing
        self._last_ns = clock()
        self._sum, self._column = [0, 0, 0], _AFTER
        if running:
            self._enter(running, self._before)

    def begin(self, name: str) -> None:
        """An action begins."""
        if self._times is None:
            return
        if not self._open:
            self._charge(self._clock())
            is_check = name.endswith((_BEGIN_OF_CHECK, _END_OF_CHECK))
            self._open = SANITY_CHECK if is_check else name
            self._enter(self._open, self._times, calls=not name.endswith(_END_OF_CHECK))
        elif name == self._open:
            self._depth += 1

    def end(self, name: str) -> None:
        """An action ends."""
        if not self._open or (SANITY_CHECK if name.endswith(_END_OF_CHECK) else name) != self._open:
            return
        if self._depth:
            self._depth -= 1
            return
        self._charge(self._clock())
        self._open, self._column = "", _AFTER

    def loop_begins(self, now: int) -> None:
        """From now on the ledger takes the time."""
        self._charge(now)
        self._stop()

    def loop_ends(self, now: int) -> None:
        """The loop is over, and its report comes first."""
        self._last_ns, self._times = now, self._after
        self._enter(REPORT, self._after)

    def give_up(self) -> None:
        """No loop has come, or one that is not measured."""
        if self._times is self._before:
            self._stop()

    def finish(self) -> None:
        """Nothing more will come."""
        if self._times is self._after:
            self._charge(self._clock())
            self._stop()
            self._is_over = True
            on_end, self.on_end = self.on_end, _nothing
            on_end()

    def times(self) -> AroundLoop:
        """What was added up so far."""
        return AroundLoop(before=_times(self._before), after=_times(self._after) if self._is_over else None)

    def _enter(self, name: str, times: dict[str, list[int]], *, calls: int = 1) -> None:
        self._sum, self._column = times.setdefault(name, [0, 0, 0]), _TOTAL
        self._sum[_CALLS] += calls

    def _charge(self, now: int) -> None:
        self._sum[self._column] += now - self._last_ns
        self._last_ns = now

    def _stop(self) -> None:
        self._times, self._open, self._depth = None, "", 0


class AroundAction(Action):
    """An action outside of the loop."""

    __slots__ = ("around", "name")

    def __init__(self, around: AroundClock, name: str) -> None:
        self.around = around
        self.name = name

    def __enter__(self) -> None:
        self.around.begin(self.name)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.around.end(self.name)


def _times(sums: dict[str, list[int]]) -> tuple[ActionTime, ...]:
    return tuple(
        ActionTime(action=name, calls=calls, total_ns=total_ns, after_ns=after_ns)
        for name, (calls, total_ns, after_ns) in sums.items()
    )


def _nothing() -> None:
    pass
