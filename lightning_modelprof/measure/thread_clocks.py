"""The CPU time that other Python threads of this process take while a loop runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

LEAST_SHARE: Final = 0.02
"""Of the loop's time: threads that took less of a CPU than that are not told."""

_MUCH: Final = 0.05
"""Of the time since the last look: a thread that takes so much wants the interpreter as well."""

_clock_of: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)  # not on Windows


class ThreadClocks:
    """Adds up the CPU clocks of other threads, each time that it is shown which threads there are.

    A clock is read by the thread's identifier, which is valid as long as the thread has a frame and the
    interpreter is ours: so identifiers come from ``sys._current_frames`` and are used at once.

    Args:
        thread: identifier of the thread that runs the loop, which is no other.

    Attributes:
        is_crowded: whether one of them had a CPU in much of the time between the last two looks.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._began_ns = self._last_ns = time.perf_counter_ns()
        self._clocks: dict[int, int] = {}  # as last read
        self._took_ns: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self.is_crowded = False
        self.look(sys._current_frames(), is_first=True)

    def look(self, threads: Iterable[int], *, is_first: bool = False) -> None:
        """Read the clocks of these threads; to be called with what ``sys._current_frames`` has just given."""
        if _clock_of is None:
            return
        now_ns = time.perf_counter_ns()
        most_ns, own = 0, threading.get_ident()
        for thread in threads:
            if thread in (self._thread, own):
                continue
            try:
                clock_ns = time.clock_gettime_ns(_clock_of(thread))
            except OSError:  # it is ending
                continue
            before_ns = clock_ns if is_first else self._clocks.get(thread, 0)
            if clock_ns < before_ns:  # the identifier is another thread's now
                before_ns = 0
            self._clocks[thread] = clock_ns
            self._took_ns[thread] = self._took_ns.get(thread, 0) + clock_ns - before_ns
            most_ns = max(most_ns, clock_ns - before_ns)
        if now_ns > self._last_ns:
            self.is_crowded = most_ns >= _MUCH * (now_ns - self._last_ns)
        self._last_ns = now_ns

    def learn_names(self) -> None:
        """Remember what threads are called, as they may end; takes a lock."""
        if not self._took_ns.keys() <= self._names.keys():
            known = {one.ident: one.name for one in threading.enumerate() if one.ident is not None}
            self._names.update({thread: known.get(thread, "") for thread in self._took_ns})

    def read(self) -> tuple[dict[int, tuple[str, int]], int]:
        """The threads that took some time, and the wall time that it is of.

        Returns:
            Identifier → name and CPU time in nanoseconds, without threads of this package; and nanoseconds.
        """
        self.look(sys._current_frames())
        self.learn_names()
        loop_ns = self._last_ns - self._began_ns
        return {
            thread: (name, took_ns)
            for thread, took_ns in self._took_ns.items()
            if took_ns >= LEAST_SHARE * loop_ns and not (name := self._names[thread]).startswith("modelprof")
        }, loop_ns
