"""Memory over one loop: resident memory of the process, and what torch's allocator counts on the device.

Everything is read on the host. The device is not waited for, nothing is allocated on it, no counter is reset,
and a device that nobody has used yet is not started.
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
except (ImportError, NotImplementedError):  # the latter is what psutil raises on a platform it does not know
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
    """Bytes; ``None`` where the system does not tell (see :class:`MemoryPoint`)."""

    rss: int | None
    anonymous: int | None


class DeviceBytes(NamedTuple):
    """Counters of the device's allocator, in bytes; ``None`` where it does not count."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    num_retries: int | None = None
    num_ooms: int | None = None


class MemoryCurve:
    """Notes memory in the course of a loop; at most a thousand points, however long it is.

    A step is looked at once, when it is first seen. When there are too many points, the distance in steps
    that two of them must have is doubled.
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
        """The step with this number is running; may be called from any one thread. Never raises."""
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
            self._points = _thinned(self._points, self._distance)  # anew: another thread may be reading it

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
        """The answer; ``None`` whatever is raised, which is noted once."""
        try:
            return read()
        except Exception as error:  # drivers and systems of all kinds; training must not notice
            note = f"The {what} couldn't be read: {describe_error(error)}."
            if note not in self._notes and len(self._notes) < 10:
                self._notes.append(note)
            return None


def _thinned(points: list[MemoryPoint], distance: int) -> list[MemoryPoint]:
    """The first point, and each that is so many steps behind the last one that stays."""
    kept = points[:1]
    for point in points:
        if point.step >= kept[-1].step + distance:
            kept.append(point)
    return kept


def process_memory() -> ProcessMemory:
    """Resident memory of this process; and, where Linux says it, what is not mapped from files or shared."""
    if psutil is None:
        return ProcessMemory(None, None)
    info = _process(os.getpid()).memory_info()
    shared = getattr(info, "shared", None)  # Linux: pages of files and of shared memory
    return ProcessMemory(int(info.rss), None if shared is None else int(info.rss - shared))


@lru_cache(maxsize=1)
def _process(number: int) -> Any:
    """The same for every look: to make one means to read when the process began."""
    return psutil.Process(number)


def device_memory(device: torch.device) -> DeviceBytes:
    """Counters of torch's allocator on a device; nothing for a CPU, and for a device not used yet."""
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
    """One counter, from nested or from flat ones."""
    found: Any = stats.get(".".join(names), stats)
    for name in names if found is stats else ():
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else None


def total_bytes(device: torch.device) -> int | None:
    """Memory of a device; ``None`` for a CPU, and where torch does not say it."""
    if device.type == "mps":
        recommended = getattr(torch.mps, "recommended_max_memory", None)  # torch 2.5
        return None if recommended is None else int(recommended())
    backend = getattr(torch, device.type, None)
    if device.type not in {"cuda", "xpu"} or not backend or not backend.is_initialized():
        return None
    return int(backend.get_device_properties(device).total_memory)


def host_total_bytes() -> int | None:
    """Memory that this process may use: of the machine, or of its container if that has less."""
    known = [] if psutil is None else [int(psutil.virtual_memory().total)]
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such container, or "max"
            known.append(int(path.read_text()))
    return min(known, default=None)


def peak_rss_bytes() -> int | None:
    """Most resident memory that this process ever had; ``None`` where the system does not say it.

    Source: proc(5), ``VmHWM``; getrusage(2), ``ru_maxrss``, in KiB on Linux and in bytes on macOS. The former
    comes first: a process that was started by a larger one begins with that one's ``ru_maxrss``.
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
