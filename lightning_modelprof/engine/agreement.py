"""At which step something starts on all ranks at once, and what says so in a report of a loop without it."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from lightning_modelprof.engine.budget import LONGEST_WAIT, RETRY_SHARE, Budget
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.measure.window.other_profilers import is_profiling_anywhere

_WAITED: Final = "{what} would have taken more than 5% of {loop}; set {ask} to do it anyway"


_SEEN: Final = (
    "another torch profiler was recording and would have seen extra operators; set {ask} to do it anyway"
)


_NOT_AGREED: Final = "the ranks couldn't agree on a step for {what}; set {ask} to do it anyway"


_MISSED: Final = "this rank learned too late at which step the other ranks did it; set {ask} to do it anyway"


_LEAST_GAP: Final = 8
"""Steps between two looks at what the first rank has announced, and between its word and the deed."""


_GAP_SHARE: Final = 4
"""Such a gap is a quarter of the steps so far, so a million steps need fewer than 60 looks."""


class Unasked(NamedTuple):
    """Something that is done where nobody has asked for it, if there is time.

    Attributes:
        key: by which it is announced.
        name: in a report.
        ask: the argument that asks for it by name.
    """

    key: str
    name: str
    ask: str


WINDOW: Final = Unasked("window", "a profiler window", "active=10")
COUNT: Final = Unasked("count", "inspecting a step", "flops=True")
TIMES: Final = Unasked("times", "timing modules", "flops=True")


class Announcements(Protocol):
    """How the first rank tells the others at which step something starts.

    Attributes:
        is_first: whether this is the rank that decides.
    """

    is_first: bool

    def announce(self, what: str, step: int) -> None:
        """Tell the other ranks; doesn't wait."""

    def announced(self, what: str) -> int | None:
        """The step that was announced, ``None`` so far; doesn't wait."""


class RankAgreement:
    """What the ranks of a loop agree on without waiting for each other.

    The first rank decides, and says so some steps ahead. The others look whether it has. A rank that looks
    too late goes without.

    Args:
        announcements: ``None`` where the ranks cannot talk.
    """

    def __init__(self, loop: Loop, budget: Budget, announcements: Announcements | None) -> None:
        self._loop = loop
        self._budget = budget
        self._announcements = announcements

    def steps_to_wait(self, what: Unasked, step: int, wait: int, cost_ns: float) -> tuple[int, str]:
        """In how many steps something starts, on all ranks at once, or is looked at again; and why not now.

        Args:
            wait: after how many steps this rank has time for it.
        """
        if self._loop.world_size == 1:
            return wait, self.why_late(what)
        others = self._announcements
        if others is None:
            return LONGEST_WAIT, _NOT_AGREED.format(what=what.name, ask=what.ask)
        start = others.announced(what.key)
        if start is not None and start < step:
            return LONGEST_WAIT, _MISSED.format(ask=what.ask)
        if start is not None:
            self._budget.reserve(0 if start == step else cost_ns)
            return start - step, self.why_late(what)
        accumulate = max(1, self._loop.accumulate)
        gap = max(_LEAST_GAP, 2 * accumulate, step // _GAP_SHARE)
        gap = -(-gap // accumulate) * accumulate
        if others.is_first and not wait:
            others.announce(what.key, step + gap)
            self._budget.reserve(cost_ns)
        return gap, self.why_late(what)

    def why_late(self, what: Unasked) -> str:
        if what is not WINDOW and is_profiling_anywhere():
            return _SEEN.format(ask=what.ask)
        return _WAITED.format(what=what.name, loop=self._loop.kind.subject, ask=what.ask)


def steps_unseen(step: int) -> int:
    """In how many steps to look again whether no other profiler records; 0 if none does."""
    return max(1, step // RETRY_SHARE) if is_profiling_anywhere() else 0
