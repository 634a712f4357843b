"""Which calls of a device's runtime wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.enclosing import nearest_around
from lightning_modelprof.analysis.grouping import rows_named
from lightning_modelprof.analysis.timeline.intervals import Intervals, locate
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.copies import memory_of
from lightning_modelprof.analysis.trace.launches import waits_for_device
from lightning_modelprof.trace.model import Category

Direction = Literal["sync", "device_to_host", "host_to_device"]
"""What a call waits for: a copy from or to the host, or just the device."""

DIRECTIONS: Final[tuple[Direction, ...]] = ("sync", "device_to_host", "host_to_device")
_SYNC, _TO_HOST, _TO_DEVICE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitRows:
    """The k calls that wait in the steps, in order of their ends.

    Attributes:
        row: row of each in the trace, shape (k,).
        operator: row of the innermost operator around each, -1 without one, shape (k,).
        direction: index into ``DIRECTIONS``, shape (k,).
        memory: of the host, that a copy is from or to, as ``memory_of`` has it; "" if it is not known.
        effective_ns: time of each that no earlier one covers, shape (k,); 0 for calls of threads that launch
            no kernels: whoever waits there keeps nobody from launching.
    """

    row: NDArray[np.int64]
    operator: NDArray[np.int64]
    direction: NDArray[np.int64]
    memory: tuple[str, ...]
    effective_ns: NDArray[np.int64]


def find_waits(timeline: Timeline, steps: Intervals, track: int) -> WaitRows:
    """The calls that begin in the steps and return only when the device has done something.

    These are calls that say so by their names (see :func:`waits_for_device`); asynchronous copies from
    pageable memory to the device, which the host makes ready itself after the work before them is done; and
    asynchronous copies from or to memory that is not pinned which return only after the copy has ended. A
    call inside another one that waits is not counted again. A synchronization in the same operator as a copy
    (``.item()``, ``.cpu()``, ``.to(device)``) waits for that copy.

    Source: "API synchronization behavior" in the manual of CUDA's runtime.

    Args:
        timeline: one trace.
        steps: on the host.
        track: thread of the steps.
    """
    trace = timeline.trace
    copies = _copies(timeline)
    named = rows_named(trace, np.flatnonzero(trace.category == Category.RUNTIME), waits_for_device)
    rows = np.union1d(named, [row for row, copy in copies.items() if copy.waits]).astype(np.int64)
    rows = rows[locate(trace.begin_ns[rows], steps) >= 0]
    is_wait = np.zeros(len(trace), np.bool_)
    is_wait[rows] = True
    rows = rows[nearest_around(timeline, rows, is_wait) < 0]
    rows = rows[np.argsort(trace.end_ns[rows], kind="stable")]
    operator = nearest_around(timeline, rows, timeline.is_operator)
    # Of several copies in one operator the last one before the call is what it waits for.
    by_operator: dict[int, list[int]] = {}
    for row in sorted(copies):
        by_operator.setdefault(copies[row].operator, []).append(row)
    direction, memory = [], []
    for row, around in zip(rows.tolist(), operator.tolist(), strict=True):
        before = [] if around < 0 else [one for one in by_operator.get(around, ()) if one < row]
        copy = copies.get(row) or (copies[before[-1]] if before else None)
        direction.append(_SYNC if copy is None else copy.direction)
        memory.append("" if copy is None else copy.memory)
    return WaitRows(
        row=rows,
        operator=operator,
        direction=np.array(direction, np.int64),
        memory=tuple(memory),
        effective_ns=_effective(timeline, rows, track),
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    operator: int
    direction: int
    memory: str
    waits: bool


def _copies(timeline: Timeline) -> dict[int, _Copy]:
    """Copies between host and device by the row of the call that launched them."""
    trace, launch = timeline.trace, timeline.launch
    work = trace.device.event
    found: dict[int, _Copy] = {}
    directions: dict[int, int] = {}
    chosen = np.flatnonzero((trace.category[work] == Category.MEMCPY) & (launch.runtime >= 0))
    for member in chosen.tolist():
        name_id = int(trace.name[work[member]])
        direction = directions.setdefault(name_id, _direction(trace.names[name_id]))
        if direction == _SYNC:
            continue
        call = int(launch.runtime[member])
        memory = memory_of(trace.names[name_id])
        is_staged = direction == _TO_DEVICE and memory == "pageable"
        has_ended = memory != "pinned" and trace.end_ns[call] >= trace.end_ns[work[member]]
        found[call] = _Copy(
            operator=int(launch.operator[member]),
            direction=direction,
            memory=memory or "",
            waits=is_staged or bool(has_ended),
        )
    return found


def _direction(name: str) -> int:
    """CUPTI and ROCm write ``DtoH``, older ROCm ``CopyDeviceToHost``."""
    lower = name.lower()
    if "dtoh" in lower or "devicetohost" in lower:
        return _TO_HOST
    return _TO_DEVICE if "htod" in lower or "hosttodevice" in lower else _SYNC


def _effective(timeline: Timeline, rows: NDArray[np.int64], track: int) -> NDArray[np.int64]:
    """Time of each wait that no earlier one covers; ``rows`` in order of their ends."""
    trace, launch = timeline.trace, timeline.launch
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    launchers = launch.runtime[is_kernel & (launch.runtime >= 0)]
    launching = np.isin(trace.track[rows], np.append(trace.track[launchers], track))
    begin_ns, end_ns = trace.begin_ns[rows], trace.end_ns[rows]
    reached = np.maximum.accumulate(np.append(0, np.where(launching, end_ns, 0)))[:-1]
    return np.where(launching, np.maximum(end_ns - np.maximum(begin_ns, reached), 0), 0)
