"""Timeline lanes: which there are, their order, and their labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import length, union
from lightning_modelprof.analysis.timeline.names import AUTOGRAD_PREFIX
from lightning_modelprof.analysis.timeline.tally import distinct, stable_order
from lightning_modelprof.analysis.timeline.timeline import Timeline as TraceTimeline
from lightning_modelprof.record import Record
from lightning_modelprof.report.dashboard_entry import Lane
from lightning_modelprof.trace.columns import stream_number
from lightning_modelprof.trace.model import DEVICE_WORK, NOT_RECORDED, Category, Trace

HOST_GROUP: Final = "host"


OTHER_GROUP: Final = "other"
"""Group of lanes that are neither CPU threads nor streams, such as the profiler's own span."""


_DEVICE, _HOST, _OTHER = range(3)


_NUM_SIDES: Final = 3


_ON_HOST: Final = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.PYTHON_FUNCTION,
)


_ON_DEVICE: Final = (*DEVICE_WORK, Category.DEVICE_ANNOTATION, Category.DEVICE_SYNC)


_ROLES: Final = {
    "pt_main_thread": "main thread",
    "pt_autograd_": "autograd thread",
    "pt_data_pin": "DataLoader's pin-memory thread",
    "pt_data_worker": "DataLoader worker",
}
"""Prefix of a thread name that torch sets → role."""


class _Place(Record, frozen=True):
    """One lane before it has a label; ``device`` and ``stream`` are -1 if unknown."""

    track: int
    side: int
    busy_ns: int
    device: int
    stream: int


def find_lanes(shared: TraceTimeline) -> tuple[tuple[Lane, ...], NDArray[np.int64]]:
    """Find the lanes in reading order, and the lane of each event.

    Streams are first, by device and number, then the thread of the steps, then the other CPU threads by the
    time in which anything is open on them, then the rest.

    Returns:
        The lanes, and the index of each event's lane, shape (n,).
    """
    trace = shared.trace
    keys, key_of = distinct(
        trace.track.astype(np.int64) * _NUM_SIDES + _sides(trace), len(trace.tracks) * _NUM_SIDES
    )
    places = _places(trace, keys, key_of)
    main = _main_track(shared, places)
    order = sorted(range(len(places)), key=lambda index: _reading_order(places[index], main))
    position = np.empty(len(places), np.int64)
    position[order] = np.arange(len(places))
    several = len({trace.tracks[place.track][0] for place in places if place.side == _HOST}) > 1
    autograd = _autograd_tracks(trace)
    lanes = tuple(_lane(trace, places[index], main, autograd, several=several) for index in order)
    return lanes, position[key_of]


def device_label(number: int) -> str:
    return f"GPU {number}" if number >= 0 else "unknown GPU"


def _sides(trace: Trace) -> NDArray[np.int64]:
    """Classify events as CPU or device; ambiguous ones follow the other events on their track."""
    on_host, on_device = trace.is_category(*_ON_HOST), trace.is_category(*_ON_DEVICE)
    side_of_track = np.full(len(trace.tracks), _OTHER, np.int64)
    side_of_track[trace.track[on_device]] = _DEVICE
    side_of_track[trace.track[on_host]] = _HOST
    sides: NDArray[np.int64] = side_of_track[trace.track]
    sides[on_device] = _DEVICE  # a process ID may equal a device number
    return sides


def _places(trace: Trace, keys: NDArray[np.int64], key_of: NDArray[np.int64]) -> list[_Place]:
    work = trace.device
    device_of = np.full(len(trace.tracks), NOT_RECORDED, np.int64)
    stream_of = device_of.copy()
    device_of[trace.track[work.event]] = work.device
    stream_of[trace.track[work.event]] = work.stream
    order = stable_order(key_of)
    ends = np.cumsum(np.bincount(key_of, minlength=len(keys))).tolist()
    places = []
    for key, first, last in zip(keys.tolist(), [0, *ends], ends, strict=False):
        own = order[first:last]
        track, side = divmod(key, _NUM_SIDES)
        process, thread = trace.tracks[track]
        device, stream = int(device_of[track]), int(stream_of[track])
        places.append(
            _Place(
                track=track,
                side=side,
                busy_ns=length(union(trace.begin_ns[own], trace.end_ns[own])),
                # On the device's side, the process is the device and the thread is the stream.
                device=device if device >= 0 else _number(process),
                stream=stream if stream >= 0 else _number(thread),
            )
        )
    return places


def _number(text: str) -> int:
    number = stream_number(text)
    return NOT_RECORDED if number is None else number


def _main_track(shared: TraceTimeline, places: list[_Place]) -> int:
    """Return the thread of the steps; without steps, the one with its process's number; else -1."""
    steps, tracks = shared.steps, shared.trace.tracks
    if steps is not None and steps.has_ranges:
        return steps.track
    own = (place.track for place in places if place.side == _HOST and len(set(tracks[place.track])) == 1)
    return next(own, -1 if steps is None else steps.track)


def _autograd_tracks(trace: Trace) -> frozenset[int]:
    """Find threads with autograd nodes, which before torch 1.10 only the nodes' own names identify."""
    nodes = trace.is_named(
        lambda name: name.startswith(AUTOGRAD_PREFIX) or "Backward" in name or "AccumulateGrad" in name
    )
    found = np.unique(trace.track[nodes & (trace.category == Category.CPU_OP)])
    return frozenset(found.tolist())


def _reading_order(place: _Place, main: int) -> tuple[int, ...]:
    if place.side == _HOST:
        return place.side, place.track != main, -place.busy_ns
    return place.side, place.device < 0, place.device, place.stream < 0, place.stream


def _lane(trace: Trace, place: _Place, main: int, autograd: frozenset[int], *, several: bool) -> Lane:
    process, thread = trace.tracks[place.track]
    if place.side == _DEVICE:
        group = device_label(place.device)
        stream = f"stream {place.stream}" if place.stream >= 0 else "no stream"
        return Lane(label=f"{group} {stream}", group=group, is_device=True)
    # Kineto writes names like "thread 1234 (python)".
    name = trace.thread_names.get(place.track, "").removeprefix(f"thread {thread}").strip(" ()")
    if place.side == _OTHER:
        label = name or (f"track {process} {thread}" if _number(thread) >= 0 else thread)
        return Lane(label=label, group=OTHER_GROUP, is_device=False)
    group = f"{HOST_GROUP} process {process}" if several else HOST_GROUP
    role = next((words for prefix, words in _ROLES.items() if name.startswith(prefix)), None)
    if place.track == main:
        role = "main thread"
    elif role is None and place.track in autograd:
        role = "autograd thread"
    label = f"{role} {thread}" if role else f"thread {thread} ({name})" if name else f"thread {thread}"
    return Lane(label=label, group=group, is_device=False)


_NO_SLICE: Final = -(2**63)
"""End of the last slice in an unused row."""


def find_depths(
    begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], lane: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each slice's row in its lane: the first free one below all slices that contain it.

    Slices that nest like calls are as deep as the calls. A slice that starts in another and ends after it
    goes one row deeper, with its true times. A zero-length slice is inside what is open around it, and
    contains nothing.

    Args:
        begin_ns: shape (n,), sorted; for equal starts, the longer slice first.
        end_ns: shape (n,).
        lane: small non-negative numbers, shape (n,).
    """
    depth = np.zeros(len(begin_ns), np.int64)
    order = stable_order(lane)
    for own in np.split(order, np.flatnonzero(np.diff(lane[order])) + 1):
        depth[own] = _depths_of_lane(begin_ns[own], end_ns[own])
    return depth


def _depths_of_lane(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count what is open when each slice starts; where slices cross, search for free rows."""
    has_length = begin_ns < end_ns
    long_begin_ns, long_end_ns = begin_ns[has_length], end_ns[has_length]
    ends_ns = np.sort(long_end_ns)
    # For equal starts, zero-length slices come last, so everything that has started comes before them.
    num_begun: NDArray[np.int64] = np.cumsum(has_length) - has_length
    depth: NDArray[np.int64] = num_begun - np.searchsorted(ends_ns, begin_ns, side="right")
    crosses = _crosses(long_begin_ns, long_end_ns, ends_ns, depth[has_length])
    if crosses.any():
        # Nothing is open when a slice of depth 0 starts, so earlier crossings don't affect it.
        stretch = np.cumsum(depth == 0)
        is_crossed = np.zeros(len(depth) + 1, np.bool_)
        is_crossed[stretch[has_length][crosses]] = True
        rows = np.flatnonzero(is_crossed[stretch])
        depth[rows] = _first_free_rows(zip(begin_ns[rows].tolist(), end_ns[rows].tolist(), strict=True))
    return depth


def _crosses(
    begin_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    ends_ns: NDArray[np.int64],
    depth: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Find slices that don't end when they would if each end closed the slice that started last.

    Args:
        begin_ns: starts of k slices with a length, sorted, shape (k,).
        end_ns: their ends, shape (k,).
        ends_ns: ``end_ns``, sorted.
        depth: number of slices open when each starts, shape (k,).

    Returns:
        Shape (k,). All false if all slices nest; where two cross, true for the first that ends.
    """
    depth_of_end = np.searchsorted(begin_ns, ends_ns, side="left") - np.arange(len(ends_ns)) - 1
    expected_ns = np.empty_like(end_ns)
    # Within one depth, starts and ends alternate.
    expected_ns[stable_order(depth)] = ends_ns[stable_order(depth_of_end)]
    crosses: NDArray[np.bool_] = expected_ns != end_ns
    return crosses


def _first_free_rows(slices: Iterable[tuple[int, int]]) -> list[int]:
    """Place slices one after the other, which works for any slices but is slower."""
    rows = _Rows()
    found: list[int] = []
    for begin, end in slices:
        # A slice that ends when this one starts isn't open any more.
        row = rows.first_free(1 + rows.last_until(max(end, begin + 1)), begin)
        rows.put(row, end)
        found.append(row)
    return found


class _Rows:
    """End of each row's last slice, in two trees: the latest and the earliest end below each node."""

    def __init__(self) -> None:
        self._num_leaves = 1
        self._latest = [_NO_SLICE] * 2
        self._earliest = [_NO_SLICE] * 2

    def last_until(self, end: int) -> int:
        """Return the last row whose slice lasts until ``end``; -1 without one."""
        latest, node = self._latest, 1
        if latest[node] < end:
            return -1
        while node < self._num_leaves:
            node = 2 * node + (latest[2 * node + 1] >= end)
        return node - self._num_leaves

    def first_free(self, row: int, begin: int) -> int:
        """Return the first row from ``row`` on whose slice has ended by ``begin``."""
        if row == self._num_leaves:
            self._grow()
        earliest, node = self._earliest, row + self._num_leaves
        while earliest[node] > begin:
            while node & 1:  # up to a node with something further right
                node >>= 1
            if not node:
                row = self._num_leaves
                self._grow()
                return row
            node += 1
        while node < self._num_leaves:
            node = 2 * node + (earliest[2 * node] > begin)
        return node - self._num_leaves

    def put(self, row: int, end: int) -> None:
        node = row + self._num_leaves
        self._latest[node] = self._earliest[node] = end
        while node := node >> 1:
            self._join(node)

    def _grow(self) -> None:
        leaves = self._latest[self._num_leaves :] + [_NO_SLICE] * self._num_leaves
        self._num_leaves *= 2
        self._latest = [_NO_SLICE] * self._num_leaves + leaves
        self._earliest = self._latest.copy()
        for node in range(self._num_leaves - 1, 0, -1):
            self._join(node)

    def _join(self, node: int) -> None:
        for ends, choose in ((self._latest, max), (self._earliest, min)):
            ends[node] = choose(ends[2 * node], ends[2 * node + 1])
