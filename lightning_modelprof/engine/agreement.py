"""Start something at the same step on all ranks, and explain in the report if it didn't."""

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
"""Steps between checks for an announcement, and from an announcement to its step."""


_GAP_SHARE: Final = 4
"""Such a gap is a quarter of the steps so far, so a million steps need fewer than 60 checks."""


class Unasked(NamedTuple):
    """Work that is done without a request, if there's time.

    Attributes:
        key: identifies its announcement.
        name: in a report.
        ask: argument that requests it explicitly.
    """

    key: str
    name: str
    ask: str


WINDOW: Final = Unasked("window", "a profiler window", "active=10")
COUNT: Final = Unasked("count", "inspecting a step", "flops=True")
TIMES: Final = Unasked("times", "timing modules", "flops=True")


class Announcements(Protocol):
    """Channel for the first rank to announce at which step something starts.

    Attributes:
        is_first: whether this rank decides.
    """

    is_first: bool

    def announce(self, what: str, step: int) -> None:
        """Announce a step to the other ranks; doesn't wait."""

    def announced(self, what: str) -> int | None:
        """Return the announced step, ``None`` so far; doesn't wait."""


class RankAgreement:
    """Agreement between a loop's ranks that doesn't make them wait for each other.

    The first rank decides and announces its decision some steps ahead. The others check for it. A rank that
    checks too late skips the work.

    Args:
        announcements: ``None`` if the ranks can't communicate.
    """

    def __init__(self, loop: Loop, budget: Budget, announcements: Announcements | None) -> None:
        self._loop = loop
        self._budget = budget
        self._announcements = announcements

    def steps_to_wait(self, what: Unasked, step: int, wait: int, cost_ns: float) -> tuple[int, str]:
        """Return the steps until all ranks start something or check again, and why not now.

        Args:
            wait: steps until this rank has time for it.
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
    """Return the steps until the next check for other profilers; 0 if none records."""
    return max(1, step // RETRY_SHARE) if is_profiling_anywhere() else 0
