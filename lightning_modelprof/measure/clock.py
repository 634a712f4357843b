"""Host clock and device events: times are read without ever making the device wait.

A device event is recorded on the current stream and read at least a step later, once the device has passed
it. Nothing here synchronises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

HostClock = Callable[[], int]
"""Returns integer nanoseconds that never decrease."""


host_clock: HostClock = time.perf_counter_ns


class DeviceClock(Protocol):
    """Marks points on a device's current stream; the time between them can be read later."""

    def mark(self) -> Any: ...

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has passed ``mark``; must not wait."""

    def elapsed_ns(self, begin: Any, end: Any) -> int | None:
        """Nanoseconds between two marks; ``None`` while one isn't reached or if they aren't comparable."""

    def release(self, mark: Any) -> None:
        """Return a mark that is no longer needed."""

    def close(self) -> None:
        """Free the returned marks."""


class TorchEventClock:
    """Device events of CUDA, XPU or MPS, reused from a pool."""

    def __init__(self, device: torch.device) -> None:
        self._event_type = getattr(torch, device.type).Event
        self._pool: list[Any] = []

    def mark(self) -> Any:
        event = self._pool.pop() if self._pool else self._event_type(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def elapsed_ns(self, begin: Any, end: Any) -> int | None:
        """Return the time between two events, at the driver's resolution of about half a microsecond."""
        try:
            elapsed_ms: float = begin.elapsed_time(end)
        except RuntimeError:  # one isn't reached yet, or they are on different devices
            return None
        return round(elapsed_ms * 1e6)

    def release(self, mark: Any) -> None:
        self._pool.append(mark)

    def close(self) -> None:
        """Destroy the events now, rather than in a DataLoader worker's garbage collection."""
        self._pool.clear()


def device_clock(device: torch.device) -> DeviceClock | None:
    """Return the clock of ``device``; ``None`` if only the CPU can be timed."""
    if device.type in {"cuda", "xpu", "mps"} and hasattr(getattr(torch, device.type), "Event"):
        return TorchEventClock(device)
    return None


try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


class CpuTime(NamedTuple):
    """CPU time in ns that all threads of this process have used so far."""

    user_ns: int
    system_ns: int


def cpu_time() -> CpuTime:
    """Return user and system time, as in ``time``; to the microsecond where the system has it."""
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return CpuTime(round(usage.ru_utime * 1e9), round(usage.ru_stime * 1e9))
    times = os.times()
    return CpuTime(round(times.user * 1e9), round(times.system * 1e9))
