"""torch's profiler, as far as we need it: what it records, whether one does, and how it is stopped.

Its low-level calls (``prepare_trace``, ``start_trace``, ``stop_trace``) are ours to time. Nothing is ever
asked of ``key_averages()`` or ``events()``: torch builds those in Python, many times slower than the C++
export.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_modelprof.measure.trace_ranges import TraceRanges
from lightning_modelprof.measure.trace_size import TraceSize

_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_SILENT: Final = "6"
"""With torch 2.13 the notices come up to level 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """What torch.profiler records; the words are torch.profiler's own. ``activities=None``: all there are."""

    activities: Sequence[str] | None = None
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False

    def make_size(self) -> TraceSize:
        """What estimates how large the trace will be."""
        return TraceSize(
            record_shapes=self.record_shapes, with_stack=self.with_stack, profile_memory=self.profile_memory
        )

    def make_profiler(self) -> Any:
        """A torch profiler that records nothing yet."""
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
    """Prepare a profiler, without the notices (``USDT: ... profiler_start``) that torch 2.13 would print.

    Kineto reads how much it is to say when it is first prepared, and only then. The program's standard error
    is not touched; whoever sets KINETO_LOG_LEVEL is heard.

    Raises:
        RuntimeError: when torch cannot prepare it.
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
            # Another one may have come and ended our recording; stopping it again would crash the process.
            if is_profiling():
                profiler.stop_trace()
    elif not is_profiling():  # another one that records ends what only warms up, which must not be started
        profiler.start_trace()  # torch's own way out of a warm-up: start and stop at once
        profiler.stop_trace()


def free(profiler: Any) -> None:
    """Drop what was recorded: several times the size of the trace, which else stays for long."""
    profiler.profiler = None


def is_profiling() -> bool:
    """Whether a torch profiler records in this process; one that only warms up cannot be seen."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
