"""When the archive is saved while the loop runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_modelprof.measure.clock import HostClock

# A save costs its time again only after this many times that time has passed.
_INTERVAL_FACTOR: Final = 200
_MIN_INTERVAL_NS: Final = 10_000_000_000
# A machine that sleeps during a save makes that look like hours; the next one comes all the same.
_MAX_INTERVAL_NS: Final = 3_600_000_000_000


class SaveTimer:
    """Says when a save is due, so that saves cost next to nothing.

    Args:
        clock: host clock.

    Attributes:
        next_ns: when the next one is due.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self.next_ns = 0

    def save(self, save: Callable[[], None]) -> int:
        """Save something now, and again only after many times the nanoseconds that this took, or an hour.

        Returns:
            Those nanoseconds.
        """
        begin_ns = self._clock()
        save()
        now = self._clock()
        wanted_ns = (now - begin_ns) * _INTERVAL_FACTOR
        self.next_ns = now + max(_MIN_INTERVAL_NS, min(wanted_ns, _MAX_INTERVAL_NS))
        return now - begin_ns
