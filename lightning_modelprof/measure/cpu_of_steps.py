"""Some steps looked at: do fetches compute or wait, are batches ready, how much CPU is left for workers?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from lightning_modelprof.measure.resources.cpu import Instant, read_instant, reaped_ns, used_by_children
from lightning_modelprof.run.cpu_use import CpuUse
from lightning_modelprof.run.phases import PHASE_INDEX

PERIOD: Final = 7
"""Of so many steps one is read. No divisor of usual numbers of accumulated batches: all kinds come."""

_DATALOADER: Final = PHASE_INDEX["dataloader"]
_PROFILER: Final = PHASE_INDEX["profiler"]


class CpuOfSteps:
    """Reads the clocks of the thread and the process at both ends of a fetch, and where its step ends.

    Args:
        skip_first: the first steps of the loop, of which none is read.
        is_ready: whether workers have the next batch ready; ``None`` where none have it to make.

    Attributes:
        is_reading: whether the running step is read.
    """

    def __init__(self, skip_first: int = 0, is_ready: Callable[[], bool | None] = lambda: None) -> None:
        self.skip(skip_first)
        self._is_ready = is_ready
        self._ready: bool | None = None
        self._num_asked = self._num_ready = 0
        self.is_reading = False
        self._thread_ns = self._process_ns = self._fetch_thread_ns = 0
        self._num_steps = self._steps_ns = self._fetches_ns = 0
        self._fetches_thread_ns = self._rest_thread_ns = self._rest_process_ns = 0
        self._first: Instant | None = None
        self._last: Instant | None = None
        self._began_s = 0.0
        self._reaped_ns: int | None = None
        self._workers_ns: int | None = None

    def skip(self, skip_first: int) -> None:
        """Read none of so many steps from now on."""
        self._left = skip_first + 1

    # In the loop's thread, around fetches

    def begin_fetch(self) -> None:
        """A fetch begins, and its step with it."""
        self._left -= 1
        self.is_reading = self._left <= 0  # a second fetch in a step ends the reading of the first
        if self.is_reading:
            self._left = PERIOD
            self._ready = self._is_ready()
            self._thread_ns = time.thread_time_ns()

    def end_fetch(self) -> None:
        """The fetch of the step that is read has ended."""
        now_ns = time.thread_time_ns()
        self._fetch_thread_ns = now_ns - self._thread_ns
        self._thread_ns, self._process_ns = now_ns, time.process_time_ns()

    def end_step(self, phases_ns: list[int], tags: int) -> None:
        """The step that is read has ended; it counts if nothing special was in it."""
        self.is_reading = False
        if tags or phases_ns[_PROFILER]:
            return
        self._num_steps += 1
        self._num_asked += self._ready is not None
        self._num_ready += self._ready is True
        self._steps_ns += sum(phases_ns)
        self._fetches_ns += phases_ns[_DATALOADER]
        self._fetches_thread_ns += self._fetch_thread_ns
        self._rest_thread_ns += time.thread_time_ns() - self._thread_ns
        self._rest_process_ns += time.process_time_ns() - self._process_ns

    # Around the loop

    def start(self) -> None:
        """The loop begins."""
        self._first, self._began_s, self._reaped_ns = read_instant(), time.time(), reaped_ns()

    def stop(self, *, has_workers: bool) -> None:
        """The loop has ended; finding the workers takes about 20 us for each process of the machine."""
        if self._num_steps and self._last is None:
            self._last = read_instant()
            self._workers_ns = used_by_children(self._began_s, self._reaped_ns) if has_workers else 0

    def record(self) -> CpuUse | None:
        """What was read; ``None`` where no step was, or before the loop has ended."""
        first, last = self._first, self._last
        if first is None or last is None:
            return None
        busy_ns = idle_ns = None
        if first.system_ns is not None and last.system_ns is not None:
            # Linux may correct idle and iowait downwards.
            busy_ns, idle_ns = (max(0, b - a) for a, b in zip(first.system_ns, last.system_ns, strict=True))
        return CpuUse(
            num_steps=self._num_steps,
            steps_ns=self._steps_ns,
            fetches_ns=self._fetches_ns,
            fetches_thread_ns=self._fetches_thread_ns,
            rest_thread_ns=self._rest_thread_ns,
            rest_process_ns=self._rest_process_ns,
            loop_ns=last.clock_ns - first.clock_ns,
            process_ns=last.process_ns - first.process_ns,
            workers_ns=self._workers_ns,
            num_asked=self._num_asked,
            num_ready=self._num_ready,
            busy_ns=busy_ns,
            cpus_ns=None if busy_ns is None or idle_ns is None else busy_ns + idle_ns,
        )
