"""How much of a loop the profiler may take for work that was not asked for by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from lightning_modelprof.measure.clock import HostClock, host_clock
from lightning_modelprof.measure.resources.cpu import cpu_wait_ns
from lightning_modelprof.record import LARGEST

SHARE: Final = 0.05
"""Of the loop's time so far."""


LEAST_NS: Final = 100_000_000
"""Free in any loop of one process. With several ranks nothing is free: all of them wait for the slowest."""


class Budget:
    """Counts the time the profiler has taken, and says how long the loop must run before it may take more.

    Both are wall time without the time in which this thread was ready to run and had no CPU. Other programs
    on the machine make our work and the loop longer by that time, but not by the same share: a loop that
    sleeps or waits for a device loses little of it, and a prediction of our costs knows nothing of it. CPU
    time alone would not do: a logger that waits for a network uses none, and neither does a loop that waits
    for its data. Where the system doesn't count the time without a CPU, this is plain wall time.

    Args:
        clock: host clock; the loop starts now.
        is_alone: whether no other rank waits for this one.
        cpu_wait: nanoseconds this thread has waited for a CPU, ``None`` if unknown. The default asks the
            system, unless the clock isn't the system's.
    """

    def __init__(
        self,
        clock: HostClock,
        *,
        is_alone: bool = True,
        cpu_wait: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock = clock
        self._is_alone = is_alone
        self._cpu_wait = cpu_wait or (cpu_wait_ns if clock is host_clock else _no_wait)
        self._wait_ns = 0
        self._spent_ns = self._reserved_ns = 0
        self._since_ns: int | None = None  # our work has gone on since then
        self._began_ns = self.now()

    def now(self) -> int:
        """Nanoseconds by the host clock, without those in which this thread had no CPU."""
        wait_ns = self._cpu_wait()
        if wait_ns is not None:
            self._wait_ns = wait_ns
        return self._clock() - self._wait_ns

    @property
    def elapsed_ns(self) -> int:
        """How long the loop has run; while our work goes on, until its last part."""
        return (self.now() if self._since_ns is None else self._since_ns) - self._began_ns

    def begin(self) -> int:
        """Our work starts; returns the time."""
        self._since_ns = self.now()
        return self._since_ns

    def end(self) -> int:
        """Our work ends; returns the time."""
        now = self._settle()
        self._since_ns = None
        return now

    @contextmanager
    def asked_for(self, *, by_name: bool) -> Iterator[None]:
        """A part of our work; it costs nothing if it was asked for by name."""
        if by_name:
            self._settle()
        try:
            yield
        finally:
            if by_name and self._since_ns is not None:
                self._since_ns = self.now()

    def spend(self, ns: float) -> None:
        """Count time that we took outside of our own work, such as in a step that we made slower."""
        self._spent_ns += max(0, round(ns))

    def reserve(self, ns: float) -> None:
        """Keep so much for what was announced to other ranks; 0 when it starts."""
        self._reserved_ns = round(ns)

    def wait_ns(self, cost_ns: float) -> int:
        """How much longer the loop must run before it has time for this cost; 0 if it has."""
        now = self._settle()
        wanted_ns = self._spent_ns + self._reserved_ns + cost_ns
        if self._is_alone and wanted_ns <= LEAST_NS:
            return 0
        return max(0, min(LARGEST, math.ceil(wanted_ns / SHARE) - (now - self._began_ns)))

    def _settle(self) -> int:
        now = self.now()
        if self._since_ns is not None:
            self.spend(now - self._since_ns)
            self._since_ns = now
        return now


def _no_wait() -> int:
    return 0
