"""Host clock and device events: how time is read without ever making the device wait.

A device event is recorded on the current stream and asked for its time a step or more later, once the
device has passed it. Nothing here synchronises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

HostClock = Callable[[], int]
"""Returns integer nanoseconds that never go backwards."""


host_clock: HostClock = time.perf_counter_ns


class DeviceClock(Protocol):
    """Marks points on a device's current stream and tells the time between them later."""

    def mark(self) -> Any: ...

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has passed ``mark``; must not wait."""

    def elapsed_ns(self, begin: Any, end: Any) -> int | None:
        """Nanoseconds between two marks; ``None`` while one is not reached or they cannot be compared."""

    def release(self, mark: Any) -> None:
        """Give a mark back; its owner will not look at it again."""

    def close(self) -> None:
        """Free the marks that were given back."""


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
        """Time between two events, with the driver's resolution of about half a microsecond."""
        try:
            elapsed_ms: float = begin.elapsed_time(end)
        except RuntimeError:  # one of them is not reached yet, or they are on different devices
            return None
        return round(elapsed_ms * 1e6)

    def release(self, mark: Any) -> None:
        self._pool.append(mark)

    def close(self) -> None:
        """Destroy the events now, and not in a DataLoader worker whose garbage collector finds them."""
        self._pool.clear()


def device_clock(device: torch.device) -> DeviceClock | None:
    """The clock of ``device``; ``None`` where there is nothing to time apart from the host."""
    if device.type in {"cuda", "xpu", "mps"} and hasattr(getattr(torch, device.type), "Event"):
        return TorchEventClock(device)
    return None


try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


class CpuTime(NamedTuple):
    """CPU time that this process has used so far, all its threads together, in ns."""

    user_ns: int
    system_ns: int


def cpu_time() -> CpuTime:
    """User and system time, as ``time`` shows them; to the microsecond where the system has it."""
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return CpuTime(round(usage.ru_utime * 1e9), round(usage.ru_stime * 1e9))
    times = os.times()
    return CpuTime(round(times.user * 1e9), round(times.system * 1e9))
