"""Look-ups in the host's call tree: events around an event, and events open at a moment."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import Intervals, different, intersect, length, union
from lightning_modelprof.analysis.timeline.names import communicates_on_host
from lightning_modelprof.analysis.timeline.tally import Groups, stable_order, sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Trace


def nearest_around(
    timeline: Timeline, rows: NDArray[np.int64], wanted: NDArray[np.bool_], *, or_itself: bool = False
) -> NDArray[np.int64]:
    """The innermost wanted event around each of some host events: ``Timeline.nearest`` for a few.

    Args:
        timeline: n events.
        rows: the events, -1 for none, shape (k,).
        wanted: which events count, shape (n,).
        or_itself: whether a wanted event is its own answer.

    Returns:
        Shape (k,): row of the event, -1 without one.
    """
    parent = timeline.parent
    found = np.where(rows >= 0, rows if or_itself else parent[rows], -1)
    searching = np.flatnonzero(found >= 0)
    while len(searching):
        searching = searching[~wanted[found[searching]]]
        found[searching] = parent[found[searching]]
        searching = searching[found[searching] >= 0]
    return found


def host_communication(timeline: Timeline) -> NDArray[np.int64]:
    """Rows of backend operators that communicate on the host, e.g. ``gloo:all_reduce``.

    For a library that also works on a device (``ucc:``), these are the ones that launched no communication
    kernel: then the host itself waits in them.
    """
    trace, launch = timeline.trace, timeline.launch
    is_range = timeline.is_communication & (timeline.is_operator | timeline.is_annotation)
    rows = np.flatnonzero(is_range)
    if not len(rows):
        return rows
    launchers = np.where(launch.runtime >= 0, launch.runtime, launch.operator)
    launches = np.zeros(len(trace) + 1, np.bool_)  # the last entry stands for no range
    around = launchers[timeline.is_communication[trace.device.event]]
    while len(around):
        around = nearest_around(timeline, around, is_range)
        launches[around] = True
        around = different(around[around >= 0])
    talks = [communicates_on_host(trace.name_of(row), launches=bool(launches[row])) for row in rows.tolist()]
    return rows[np.array(talks, np.bool_)]


def innermost_at(
    timeline: Timeline,
    track: NDArray[np.signedinteger],
    time_ns: NDArray[np.int64],
    wanted: NDArray[np.bool_],
    end_ns: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The innermost wanted event open on a host thread at each of some moments.

    Events are half-open: one that starts at the moment is open, one that ends then isn't. One that ends after
    the event around it counts as ending with it, as in ``Timeline.parent``.

    Args:
        timeline: n events.
        track: host thread of each moment, shape (k,).
        time_ns: the moments, shape (k,), in any order.
        wanted: which events count, shape (n,); must be events of host threads.
        end_ns: ends of all events from :func:`clipped_ends`, shape (n,).

    Returns:
        Shape (k,): row of the event, -1 if none is open.
    """
    begun = _last_begun(timeline, track, time_ns, wanted)
    parent = timeline.parent
    # Everything open at a moment encloses the last event that started before it: climb from there.
    closed = np.flatnonzero(begun >= 0)
    while len(closed):
        row = begun[closed]
        closed = closed[~wanted[row] | (end_ns[row] <= time_ns[closed])]
        begun[closed] = parent[begun[closed]]
        closed = closed[begun[closed] >= 0]
    return begun


def clipped_ends(timeline: Timeline) -> NDArray[np.int64]:
    """End of each event, clipped to the ends of the events around it, shape (n,)."""
    end_ns: NDArray[np.int64] = timeline.trace.end_ns.copy()
    rows = np.flatnonzero(timeline.parent >= 0)
    parent = timeline.parent[rows]
    above = timeline.parent.copy()
    while (end_ns[rows] > end_ns[parent]).any():
        # Each round doubles the number of enclosing events that an event has been compared with.
        inner = np.flatnonzero(above >= 0)
        ancestors = above[inner]
        end_ns[inner] = np.minimum(end_ns[inner], end_ns[ancestors])
        above[inner] = above[ancestors]
    return end_ns


def _last_begun(
    timeline: Timeline,
    track: NDArray[np.signedinteger],
    time_ns: NDArray[np.int64],
    wanted: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Row of the last wanted event that started on the thread by each moment, -1 without one, shape (k,)."""
    trace = timeline.trace
    rows = np.flatnonzero(wanted)
    rows = rows[stable_order(trace.track[rows].astype(np.int64))]  # by thread, then in the trace's order
    order = stable_order(track.astype(np.int64))
    row_tracks, point_tracks = trace.track[rows], track[order]
    found = np.full(len(time_ns), -1, np.int64)
    for one in different(track).tolist():
        own = rows[slice(*np.searchsorted(row_tracks, (one, one + 1)))]
        points = order[slice(*np.searchsorted(point_tracks, (one, one + 1)))]
        place = np.searchsorted(trace.begin_ns[own], time_ns[points], side="right") - 1
        begun = place >= 0
        found[points[begun]] = own[place[begun]]
    return found


class NestedCalls(Record, frozen=True, kw_only=True, eq=False):
    """k calls, thread by thread, each followed by the calls inside it.

    Attributes:
        row: int64, shape (k,): row in the trace.
        track: int64, shape (k,): host thread.
        parent: int64, shape (k,): index of the innermost of these calls around each, -1 without one.
        stop: int64, shape (k,): index after the last call inside each.
        duration_ns: int64, shape (k,): a call that ends after the one around it (by the rounding of old
            traces) counts as ending with it.
        launched_by: int64, shape (m,): index of the innermost call that launched each of the trace's m device
            events, on the launching thread; -1 without one.
        device_self_ns: int64, shape (k,): summed time of the device events launched in each call, excluding
            nested calls.
        device_total_ns: int64, shape (k,): the same, including nested calls.
    """

    row: NDArray[np.int64]
    track: NDArray[np.int64]
    parent: NDArray[np.int64]
    stop: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    launched_by: NDArray[np.int64]
    device_self_ns: NDArray[np.int64]
    device_total_ns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row)

    def is_outermost(self, group: Groups) -> NDArray[np.bool_]:
        """Which calls are in no other call of their group, shape (k,)."""
        order = stable_order(group)
        # Grows from group to group; within one, it is how far the calls so far reach.
        reached = np.maximum.accumulate(group[order] * (len(self) + 1) + self.stop[order])
        is_inside = np.zeros(len(self), np.bool_)
        is_inside[order[1:]] = reached[:-1] > (group[order] * (len(self) + 1) + order)[1:]
        return ~is_inside


def find_calls(
    timeline: Timeline, wanted: NDArray[np.bool_], end_ns: NDArray[np.int64], launching: NDArray[np.int64]
) -> NestedCalls:
    """Nest the wanted host events.

    Args:
        end_ns: ends of all events from :func:`clipped_ends`, shape (n,).
        launching: row of the wanted event that launched each device event, -1 without one, shape (m,).
    """
    trace = timeline.trace
    rows = _thread_by_thread(trace, wanted)
    index = np.full(len(trace) + 1, -1, np.int64)  # the last one stands for no event
    index[rows] = np.arange(len(rows))
    begin_ns = trace.begin_ns[rows]
    track = trace.track[rows].astype(np.int64)
    launched_by = index[launching]
    durations_ns = trace.duration_ns[trace.device.event]
    known = launched_by >= 0
    device_self_ns = sum_by(launched_by[known], durations_ns[known], len(rows))
    stop = _stops(begin_ns, end_ns[rows], track)
    before_ns = np.concatenate((np.zeros(1, np.int64), np.cumsum(device_self_ns)))
    return NestedCalls(
        row=rows,
        track=track,
        parent=_parents(stop),
        stop=stop,
        duration_ns=end_ns[rows] - begin_ns,
        launched_by=launched_by,
        device_self_ns=device_self_ns,
        device_total_ns=before_ns[stop] - before_ns[:-1],
    )


def self_times(
    timeline: Timeline, wanted: NDArray[np.bool_], end_ns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Duration of each wanted host event without the wanted ones directly inside it.

    Args:
        end_ns: ends of all events from :func:`clipped_ends`, shape (n,).

    Returns:
        Rows of the k calls in the order of :class:`NestedCalls`, and nanoseconds of each, shape (k,).
    """
    rows = _thread_by_thread(timeline.trace, wanted)
    begin_ns, ends_ns = timeline.trace.begin_ns[rows], end_ns[rows]
    parent = _parents(_stops(begin_ns, ends_ns, timeline.trace.track[rows]))
    inner = np.flatnonzero(parent >= 0)
    duration_ns = ends_ns - begin_ns
    return rows, duration_ns - sum_by(parent[inner], duration_ns[inner], len(rows))


def _thread_by_thread(trace: Trace, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    rows = np.flatnonzero(wanted)
    return rows[stable_order(trace.track[rows].astype(np.int64))]


def _parents(stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the last earlier call that doesn't stop before each, -1 without one, shape (k,)."""
    count = len(stop)
    depth = np.arange(count) - np.cumsum(np.bincount(stop, minlength=count + 1))[:count]
    order = stable_order(depth)
    keys = depth[order] * count + order
    num_outermost = count - int(np.count_nonzero(depth))
    parent = np.full(count, -1, np.int64)
    # The last earlier call one level further out; both sides are sorted.
    parent[order[num_outermost:]] = order[np.searchsorted(keys, keys[num_outermost:] - count) - 1]
    return parent


def _stops(
    begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], track: NDArray[np.signedinteger]
) -> NDArray[np.int64]:
    """Index of the first later call on the same thread that doesn't start inside each, shape (k,)."""
    edges = np.flatnonzero(np.diff(track, prepend=-1, append=-1)) if len(track) else np.zeros(1, np.int64)
    stop = np.arange(1, len(track) + 1)
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        found = first + np.searchsorted(begin_ns[first:last], end_ns[first:last])
        stop[first:last] = np.maximum(stop[first:last], found)
    return stop


def thread_label(trace: Trace, track: int) -> str:
    """Label of a host thread, e.g. ``Thread 1234 (python)``."""
    number = trace.tracks[track][1]
    name = trace.thread_names.get(track, "").removeprefix(f"thread {number}").strip(" ()")
    return f"Thread {number} ({name})" if name else f"Thread {number}"


Covers = Literal["steps", "operators", "device events"]
"""What the covered time spans, from the start of the first to the end of the last."""


class CoveredTime(Record, frozen=True, kw_only=True, eq=False):
    """The time that a device's figures cover."""

    kind: Covers
    intervals: Intervals

    @property
    def total_ns(self) -> int:
        return length(self.intervals)


def covered_time(timeline: Timeline) -> CoveredTime | None:
    """The kept steps; without any, the time of all device events; ``None`` without either."""
    if timeline.span is not None and timeline.stretches is not None:
        has_ranges = timeline.steps is None or timeline.steps.has_ranges
        return CoveredTime(kind="steps" if has_ranges else "operators", intervals=timeline.stretches)
    span = timeline.device_span
    if span is None:
        return None
    return CoveredTime(
        kind="device events", intervals=union(np.array(span[:1], np.int64), np.array(span[1:], np.int64))
    )


def busy_time(timeline: Timeline, device: int) -> Intervals:
    """When one device is busy, over the whole trace."""
    trace = timeline.trace
    rows = trace.device.event[trace.device.device == device]
    return union(trace.begin_ns[rows], trace.end_ns[rows])


def busy_ns(timeline: Timeline, device: int, covered: Intervals) -> int:
    return length(intersect(busy_time(timeline, device), covered))
