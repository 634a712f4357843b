"""The parts of torch's profiler that we use: what it records, whether one records, and how to stop it.

We time its low-level calls (``prepare_trace``, ``start_trace``, ``stop_trace``) ourselves. ``key_averages()``
and ``events()`` are never called: torch builds those in Python, many times slower than the C++ export.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASES, RANGE_PREFIX

_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"


_SILENT: Final = "6"
"""torch 2.13 prints its notices up to level 5."""


class CaptureOptions(Record, frozen=True, kw_only=True):
    """What torch.profiler records, and how much.

    Names are torch.profiler's own. ``activities=None`` means all available. A window ends early if another
    step would make its trace larger than ``max_trace_mb``.
    """

    activities: Sequence[str] | None = None
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    max_trace_mb: float | None = None

    def make_size(self) -> TraceSize:
        return TraceSize(
            record_shapes=self.record_shapes, with_stack=self.with_stack, profile_memory=self.profile_memory
        )

    def make_profiler(self) -> Any:
        """Create a torch profiler that isn't recording yet."""
        activities = None
        if self.activities is not None:
            activities = [getattr(ProfilerActivity, name.upper()) for name in self.activities]
        return profile(
            activities=activities,
            record_shapes=self.record_shapes,
            with_stack=self.with_stack,
            profile_memory=self.profile_memory,
        )


def prepare(profiler: Any) -> None:
    """Prepare a profiler without the notices (``USDT: ... profiler_start``) that torch 2.13 prints.

    Kineto reads its log level only when it is first prepared. The program's standard error isn't touched, and
    the user's KINETO_LOG_LEVEL takes precedence.

    Raises:
        RuntimeError: when torch can't prepare it.
    """
    is_ours = _LOG_LEVEL not in os.environ
    if is_ours:
        os.environ[_LOG_LEVEL] = _SILENT
    try:
        profiler.prepare_trace()
    finally:
        if is_ours:
            os.environ.pop(_LOG_LEVEL, None)


def stop(profiler: Any, ranges: TraceRanges | None) -> None:
    """Stop a profiler that records (with its ranges) or warms up (without)."""
    if ranges is not None:
        try:
            ranges.close_all()
        finally:
            # Another one may have ended our recording; stopping it again would crash the process.
            if is_profiling():
                profiler.stop_trace()
    elif not is_profiling():  # another one's recording ends a warm-up, which must not be started then
        profiler.start_trace()  # torch's own way to end a warm-up: start and immediately stop
        profiler.stop_trace()


def free(profiler: Any) -> None:
    """Free the recorded data, several times the trace's size, which would otherwise stay for long."""
    profiler.profiler = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or C++ ran out of memory."""
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def force_stop() -> None:
    """Stop a recording after one of our calls failed, and reset torch's own state."""
    torchs: Any = autograd_profiler
    if is_profiling():
        with contextlib.suppress(RuntimeError, MemoryError):
            torchs._disable_profiler()
    if not is_profiling() and hasattr(torchs, "_run_on_profiler_stop"):
        torchs._run_on_profiler_stop()


def is_profiling() -> bool:
    """Whether a torch profiler records in this process; warm-ups can't be seen."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


class TraceRanges:
    """Named ranges on the training thread: one per open phase, innermost last."""

    def __init__(self) -> None:
        self._open: list[Any] = []
        self._are_over = False

    def push(self, phase: int) -> None:
        self.open(RANGE_PREFIX + PHASES[phase].key)

    def open(self, name: str) -> None:
        if self._are_over:
            return
        entered: Any = record_function(name)
        entered.__enter__()
        self._open.append(entered)

    def pop(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close_all(self) -> None:
        while self._open:
            self.pop()

    def end(self) -> None:
        """Close all ranges and open no more: their recording ends, or now belongs to another profiler.

        torch writes a range's end into the recording in which it started, even if that no longer exists.
        """
        self._are_over = True
        self.close_all()


_JSON_PER_BYTE: Final = {
    (False, False, False): 1.25,
    (False, False, True): 1.9,
    (False, True, False): 1.7,
    (False, True, True): 2.15,
    (True, False, False): 0.84,
    (True, False, True): 1.16,
    (True, True, False): 1.07,
    (True, True, True): 1.33,
}
"""(record_shapes, with_stack, profile_memory) → bytes of JSON per byte in torch's memory.

Midpoint of torch 2.13's results on the CPU for an MLP, a CNN, a transformer and a GRU, all within 27% of it
(12% without stacks).
"""


_LEAST_IN_USE: Final = 32 * 2**20
"""Python with torch uses more from malloc; if glibc reports less, another allocator replaces it."""


_LEAST_STEPS: Final = 2


_LEAST_LEARNT: Final = 1_000_000
"""Bytes in memory; less would be lost in a step's other allocations."""


_MOST_LEARNT: Final = 4
"""Largest multiple of the table's ratio; more means that training freed memory in the meantime."""


class TraceSize:
    """Estimates, step by step, the uncompressed size of a trace being recorded.

    Args:
        bytes_in_use: returns the memory that malloc has handed out, ``None`` if unknown.
    """

    def __init__(
        self,
        *,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        bytes_in_use: Callable[[], int | None] | None = None,
    ) -> None:
        self._expected = _JSON_PER_BYTE[record_shapes, with_stack, profile_memory]
        self._json_per_byte = self._expected
        self._bytes_in_use = heap_bytes if bytes_in_use is None else bytes_in_use
        self._json_per_step: float | None = None  # in the previous window
        self._last: int | None = None
        self._growth = self._largest = self._num_steps = 0

    def begin(self) -> None:
        self._last = self._bytes_in_use()
        self._growth = self._largest = self._num_steps = 0

    def end_step(self) -> None:
        self._num_steps += 1
        now = self._bytes_in_use()
        if now is None or self._last is None:
            self._last = None
            return
        grown = now - self._last
        self._last = now
        self._growth += grown
        self._largest = max(self._largest, grown)

    def with_another_step(self) -> float | None:
        """Return the trace's bytes with one more such step; ``None`` if unknown.

        Excludes the step that grew most, as it may have allocated something for good, so the result is
        unknown after one step. Where memory can't be read, steps are assumed to be like those of the previous
        window.
        """
        if self._last is None:
            return None if self._json_per_step is None else self._json_per_step * (self._num_steps + 1)
        if self._num_steps < _LEAST_STEPS:
            return None
        return self._json_per_byte * self._per_step() * (self._num_steps + 1)

    def _per_step(self) -> float:
        """Return bytes in memory per step, without the one that grew most."""
        return max(0, self._growth - self._largest) / (self._num_steps - 1)

    def learn(self, num_bytes: int) -> None:
        """Learn from the size of the closed window's trace.

        A device's events may take more text per byte than in the table, which is for the CPU.
        """
        if self._num_steps:
            self._json_per_step = num_bytes / self._num_steps
        if self._last is None or self._num_steps < _LEAST_STEPS:
            return
        recorded = self._per_step() * self._num_steps
        if recorded >= _LEAST_LEARNT:
            found = num_bytes / recorded
            self._json_per_byte = min(max(found, self._expected), _MOST_LEARNT * self._expected)


def heap_bytes() -> int | None:
    """Return the bytes that malloc has handed out and not got back; ``None`` without glibc's malloc.

    Takes about a microsecond, as glibc only adds up its own counters.
    """
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    info = mallinfo2()
    in_use: int = info.uordblks + info.hblkhd
    return in_use if in_use >= _LEAST_IN_USE else None


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` in malloc.h; ``uordblks`` is in use in arenas, ``hblkhd`` in separate maps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo2() -> Any:
    """Return the function from glibc 2.33 or newer; ``None`` elsewhere."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
        function.argtypes = ()
    return function
