"""Memory: allocated bytes of each device, and the operators that allocated and released them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.calls import clipped_ends, innermost_at, nearest_around
from lightning_modelprof.analysis.timeline.intervals import different
from lightning_modelprof.analysis.timeline.memory_layers import MemoryLayers, memory_curve
from lightning_modelprof.analysis.timeline.tally import Groups, distinct, rows_named, sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import STEP_RANGE_PREFIX

NO_OWNER: Final = "(none)"
"""Stands in for the operator if neither an operator nor an annotation was open."""

_EMPTY_PREFIX: Final = "aten::empty"
"""Operators that allocate for their callers."""

CPU: Final = 0
CPU_NAME: Final = "CPU"
_DEVICE_WORDS: Final = {
    CPU: CPU_NAME,
    1: "GPU",
    6: "GPU",
    12: "XPU",
    13: "MPS",
    15: "HPU",
    18: "IPU",
    19: "MTIA",
    20: "PrivateUse1",
}
"""Names of torch's device type numbers (c10/core/DeviceType.h); 1 is CUDA, 6 is HIP."""


class MemoryFlow(Record, frozen=True, kw_only=True):
    """Memory that one operator, or all operators on one device, allocated and released.

    Attributes:
        name: the operator, as ``caller (aten::empty)`` if it only allocated for another one; without an
            operator, the innermost annotation (all steps as ``ProfilerStep``), else ``NO_OWNER``; or the
            device.
        allocated_bytes, released_bytes: sums, both positive.
    """

    name: str
    allocations: int
    releases: int
    allocated_bytes: int
    released_bytes: int

    @property
    def increased_bytes(self) -> int:
        """Allocated minus released; negative if more was released."""
        return self.allocated_bytes - self.released_bytes


class DeviceMemory(Record, frozen=True, kw_only=True):
    """Memory of one device in one profiler window, in bytes; ``None`` means not recorded.

    The CPU's levels are relative to the start of the window: running sums of its allocations and releases.
    Torch's count of allocated bytes means little there: it counts only while a profiler runs, and is 0 for
    the shared memory of DataLoader workers.

    Attributes:
        total: all allocations and releases; named after the device.
        operators: the same by operator, largest increase first. They sum to ``total`` exactly.
        peak_allocated_bytes: most allocated at any time of the window, including its start. Torch before 1.10
            didn't record it.
        peak_reserved_bytes: most held by the caching allocator after any event of the window; ``None`` for
            the CPU, which has none.
        begin_bytes, end_bytes: allocated before the first event and after the last one. For the CPU, 0 and
            the increase, which is negative if more was released than allocated.
        curve: allocated memory over the window, by use; ``None`` if nothing had a size.
    """

    total: MemoryFlow
    operators: tuple[MemoryFlow, ...]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    begin_bytes: int | None
    end_bytes: int | None
    curve: MemoryLayers | None = None


class Memory(Record, frozen=True, kw_only=True):
    """Memory of every device with an allocation or release in the window, the CPU first."""

    devices: tuple[DeviceMemory, ...]


def summarize_memory(timeline: Timeline) -> Memory:
    """Attribute each allocation and release to one operator, and find each device's peaks."""
    events = timeline.trace.allocations
    if not len(events):
        raise NotMeasured("memory wasn't recorded; set profile_memory=True")
    charged, names = _charge(timeline)
    types, type_of = _distinct(events.device_type)
    numbers, number_of = _distinct(events.device)
    present, device_of = distinct(type_of * len(numbers) + number_of, len(types) * len(numbers))
    devices = []
    for index, pair in enumerate(present.tolist()):
        device_type, number = int(types[pair // len(numbers)]), int(numbers[pair % len(numbers)])
        own = np.flatnonzero(device_of == index)
        payers, operator_of = distinct(charged[own], len(names))
        size = events.size_bytes[own]
        operators = _flows(size, operator_of, [names[payer] for payer in payers.tolist()])
        level = np.cumsum(size) if device_type == CPU else events.allocated_bytes[own]
        begin, peak, end = (
            (0, max(0, int(level.max())), int(level[-1])) if device_type == CPU else _level(size, level)
        )
        devices.append(
            DeviceMemory(
                total=_flows(size, np.zeros(len(own), np.int64), [_device_name(device_type, number)])[0],
                operators=tuple(sorted(operators, key=_largest_increase_first)),
                peak_allocated_bytes=peak,
                peak_reserved_bytes=None if device_type == CPU else _peak(events.reserved_bytes[own]),
                begin_bytes=begin,
                end_bytes=end,
                curve=memory_curve(timeline, own, counts_all=device_type != CPU),
            )
        )
    return Memory(devices=tuple(devices))


def _distinct(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], Groups]:
    """Sorted distinct numbers, of which there are few, and each number's position among them."""
    values = different(numbers)
    return values, np.searchsorted(values, numbers).astype(np.int64)


def _device_name(device_type: int, number: int) -> str:
    word = _DEVICE_WORDS.get(
        device_type, "unknown device" if device_type < 0 else f"device type {device_type}"
    )
    return word if number < 0 or device_type == CPU else f"{word} {number}"


def _peak(level_bytes: NDArray[np.int64]) -> int | None:
    highest = int(level_bytes.max())
    return highest if highest >= 0 else None


def _level(
    size: NDArray[np.int64], allocated: NDArray[np.int64]
) -> tuple[int | None, int | None, int | None]:
    """Bytes allocated before the first event, at most, and after the last; ``None`` if not recorded."""
    known = np.flatnonzero(allocated >= 0)
    if not len(known):
        return None, None, None
    begin = int(allocated[known[0]] - size[known[0]])
    return begin, max(begin, int(allocated.max())), int(allocated[known[-1]])


def _largest_increase_first(flow: MemoryFlow) -> tuple[int, int, str]:
    return -flow.increased_bytes, -flow.allocated_bytes, flow.name


def _flows(size: NDArray[np.int64], group: Groups, names: list[str]) -> list[MemoryFlow]:
    """One flow per group from its events' sizes, which are negative for releases."""
    gain, loss = np.maximum(size, 0), np.maximum(-size, 0)
    columns = (
        np.bincount(group[size > 0], minlength=len(names)),
        np.bincount(group[size < 0], minlength=len(names)),
        sum_by(group, gain, len(names)),
        sum_by(group, loss, len(names)),
    )
    return [
        MemoryFlow(
            name=name,
            allocations=allocations,
            releases=releases,
            allocated_bytes=allocated_bytes,
            released_bytes=released_bytes,
        )
        for name, allocations, releases, allocated_bytes, released_bytes in zip(
            names, *(column.tolist() for column in columns), strict=True
        )
    ]


def _charge(timeline: Timeline) -> tuple[NDArray[np.int64], list[str]]:
    """Find the operator or annotation behind each of the k allocations and releases.

    Returns:
        Index of its name, shape (k,), and the distinct names.
    """
    trace, events = timeline.trace, timeline.trace.allocations
    track, time_ns, end_ns = events.track, events.time_ns, clipped_ends(timeline)
    payer = innermost_at(timeline, track, time_ns, timeline.is_operator, end_ns)
    alone = np.flatnonzero(payer < 0)
    payer[alone] = innermost_at(timeline, track[alone], time_ns[alone], timeline.is_annotation, end_ns)

    is_caller = timeline.is_operator.copy()
    is_caller[rows_named(trace, np.flatnonzero(is_caller), lambda name: name.startswith(_EMPTY_PREFIX))] = (
        False
    )
    paid = np.flatnonzero(payer >= 0)
    by_empty = paid[(timeline.is_operator & ~is_caller)[payer[paid]]]
    caller = np.full(len(payer), -1)
    caller[by_empty] = nearest_around(timeline, payer[by_empty], is_caller)

    name = np.append(trace.name.astype(np.int64), -1)  # -1 for row -1, which is no event
    width = len(trace.names) + 1
    pairs, index = distinct((name[payer] + 1) * width + name[caller] + 1, width**2)
    labels = [_label(trace.names, *divmod(pair, width)) for pair in pairs.tolist()]
    names = list(dict.fromkeys(labels))  # all steps share one label
    place = np.array([names.index(label) for label in labels], np.int64)
    return place[index], names


def _label(names: tuple[str, ...], payer: int, caller: int) -> str:
    """Label of a payer; ``payer`` and ``caller`` are name ids + 1, 0 for none."""
    if not payer:
        return NO_OWNER
    name = names[payer - 1]
    if name.startswith(STEP_RANGE_PREFIX):
        return STEP_RANGE_PREFIX.rstrip("#")
    return f"{names[caller - 1]} ({name})" if caller else name
