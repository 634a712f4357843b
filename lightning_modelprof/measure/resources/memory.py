"""Memory over one loop: the process's resident memory, and torch's allocator counters on the device.

Everything is read on the CPU. The device is not waited for or allocated on, no counter is reset, and an
unused device isn't initialised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch

from lightning_modelprof.errors import describe_error
from lightning_modelprof.run.memory import (
    GrowingAttribute,
    MemoryPoint,
    MemoryRecord,
    OutOfMemory,
    StepMemory,
)

try:
    import psutil
except (ImportError, NotImplementedError):  # psutil raises the latter on an unknown platform
    psutil = None

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Answer = TypeVar("Answer")

MOST_POINTS: Final = 1_000
_STATUS: Final = Path("/proc/self/status")
_CONTAINER_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class ProcessMemory(NamedTuple):
    """Bytes; ``None`` where the system doesn't report them (see :class:`MemoryPoint`)."""

    rss: int | None
    anonymous: int | None


class DeviceBytes(NamedTuple):
    """Counters of the device's allocator, in bytes; ``None`` where it doesn't count."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    num_retries: int | None = None
    num_ooms: int | None = None


class MemoryCurve:
    """Records memory during a loop, with at most a thousand points.

    Each step is read once, when first seen. When there are too many points, the minimum distance between two
    of them doubles.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        read_process: Callable[[], ProcessMemory] | None = None,
        read_device: Callable[[torch.device], DeviceBytes] | None = None,
    ) -> None:
        self._device = device
        self._read_process = read_process or process_memory
        self._read_device = read_device or device_memory
        self._points: list[MemoryPoint] = []
        self._distance = 1
        self._notes: list[str] = []

    def look(self, step: int) -> None:
        """Note that a step is running; can be called from any one thread. Never raises."""
        points = self._points
        if points and step < points[-1].step + self._distance:
            return
        process = self._read("process's memory", self._read_process) or ProcessMemory(None, None)
        device = self._read("device's memory", lambda: self._read_device(self._device))
        points.append(
            MemoryPoint(
                step=step,
                rss_bytes=process.rss,
                allocated_bytes=None if device is None else device.allocated,
                reserved_bytes=None if device is None else device.reserved,
                anonymous_bytes=process.anonymous,
            )
        )
        while len(self._points) >= MOST_POINTS:
            self._distance *= 2
            self._points = _thinned(self._points, self._distance)  # another thread may read the old list

    def record(
        self,
        *,
        step_memory: StepMemory | None = None,
        out_of_memory: OutOfMemory | None = None,
        growing: tuple[GrowingAttribute, ...] = (),
        notes: Sequence[str] = (),
    ) -> MemoryRecord:
        device = self._read("device's memory", lambda: self._read_device(self._device)) or DeviceBytes()
        return MemoryRecord(
            curve=tuple(self._points),
            peak_rss_bytes=self._read("process's peak memory", peak_rss_bytes),
            peak_allocated_bytes=device.peak_allocated,
            peak_reserved_bytes=device.peak_reserved,
            num_retries=device.num_retries,
            num_ooms=device.num_ooms,
            total_bytes=self._read("device's memory size", lambda: total_bytes(self._device)),
            host_total_bytes=self._read("machine's memory size", host_total_bytes),
            step_memory=step_memory,
            out_of_memory=out_of_memory,
            growing=growing,
            notes=(*self._notes, *notes),
        )

    def _read(self, what: str, read: Callable[[], Answer]) -> Answer | None:
        """Return the answer; ``None`` on any error, which is noted once."""
        try:
            return read()
        except Exception as error:  # drivers and systems of all kinds; training must not notice
            note = f"The {what} couldn't be read: {describe_error(error)}."
            if note not in self._notes and len(self._notes) < 10:
                self._notes.append(note)
            return None


def _thinned(points: list[MemoryPoint], distance: int) -> list[MemoryPoint]:
    kept = points[:1]
    for point in points:
        if point.step >= kept[-1].step + distance:
            kept.append(point)
    return kept


def process_memory() -> ProcessMemory:
    """Read this process's resident memory and, on Linux, the part not mapped from files or shared."""
    if psutil is None:
        return ProcessMemory(None, None)
    info = _process(os.getpid()).memory_info()
    shared = getattr(info, "shared", None)  # Linux: pages of files and of shared memory
    return ProcessMemory(int(info.rss), None if shared is None else int(info.rss - shared))


@lru_cache(maxsize=1)
def _process(number: int) -> Any:
    """Reuse one psutil process, as creating one reads its start time."""
    return psutil.Process(number)


def device_memory(device: torch.device) -> DeviceBytes:
    """Read torch's allocator counters; nothing for a CPU or an unused device."""
    backend = getattr(torch, device.type, None)
    if device.type == "mps":
        return DeviceBytes(
            allocated=int(torch.mps.current_allocated_memory()),
            reserved=int(torch.mps.driver_allocated_memory()),
        )
    if device.type not in {"cuda", "xpu"} or not backend or not backend.is_initialized():
        return DeviceBytes()
    nested = getattr(backend, "memory_stats_as_nested_dict", None)  # quicker: torch would flatten it
    stats = nested(device) if nested is not None else backend.memory_stats(device)
    return DeviceBytes(
        allocated=_counter(stats, "allocated_bytes", "all", "current"),
        reserved=_counter(stats, "reserved_bytes", "all", "current"),
        peak_allocated=_counter(stats, "allocated_bytes", "all", "peak"),
        peak_reserved=_counter(stats, "reserved_bytes", "all", "peak"),
        num_retries=_counter(stats, "num_alloc_retries"),
        num_ooms=_counter(stats, "num_ooms"),
    )


def _counter(stats: Mapping[str, Any], *names: str) -> int | None:
    found: Any = stats.get(".".join(names), stats)
    for name in names if found is stats else ():
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else None


def total_bytes(device: torch.device) -> int | None:
    """Return a device's memory; ``None`` for a CPU, and where torch doesn't report it."""
    if device.type == "mps":
        recommended = getattr(torch.mps, "recommended_max_memory", None)  # torch 2.5
        return None if recommended is None else int(recommended())
    backend = getattr(torch, device.type, None)
    if device.type not in {"cuda", "xpu"} or not backend or not backend.is_initialized():
        return None
    return int(backend.get_device_properties(device).total_memory)


def host_total_bytes() -> int | None:
    """Return the memory that this process may use: the machine's, or its container's if smaller."""
    known = [] if psutil is None else [int(psutil.virtual_memory().total)]
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such container, or "max"
            known.append(int(path.read_text()))
    return min(known, default=None)


def peak_rss_bytes() -> int | None:
    """Return the process's peak resident memory; ``None`` where the system doesn't report it.

    Source: proc(5), ``VmHWM``; getrusage(2), ``ru_maxrss``, in KiB on Linux and in bytes on macOS. The former
    is preferred: a process started by a larger one inherits that one's ``ru_maxrss``.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if resource is not None:
        peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return peak if sys.platform == "darwin" else peak * 1024
    wide = None if psutil is None else getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    return None if wide is None else int(wide)
