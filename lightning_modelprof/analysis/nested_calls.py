"""Chosen calls of the host threads, how they nest, and what each launched on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.grouping import Groups, stable_order
from lightning_modelprof.analysis.timeline.tally import sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.trace.model import Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NestedCalls:
    """k calls, thread by thread, each followed by the calls inside it.

    Attributes:
        row: int64, shape (k,): row of each in the trace.
        track: int64, shape (k,): host thread.
        parent: int64, shape (k,): index of the innermost of these calls around each, -1 without one.
        stop: int64, shape (k,): index after the last of the calls inside each.
        duration_ns: int64, shape (k,): length; a call that ends after the one around it (by the rounding of
            old traces) counts as ending with it.
        launched_by: int64, shape (m,): index of the innermost call in which each of the trace's m device
            events was launched, on the launching thread; -1 without one.
        device_self_ns: int64, shape (k,): time of the device events launched in each and in no call inside
            it, added up.
        device_total_ns: int64, shape (k,): the same with the calls inside.
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
        """Which calls are in no other call of their group.

        Args:
            group: number of each call's group, shape (k,).

        Returns:
            Shape (k,).
        """
        order = stable_order(group)
        # Grows from group to group; inside one it says how far the calls so far reach.
        reached = np.maximum.accumulate(group[order] * (len(self) + 1) + self.stop[order])
        is_inside = np.zeros(len(self), np.bool_)
        is_inside[order[1:]] = reached[:-1] > (group[order] * (len(self) + 1) + order)[1:]
        return ~is_inside


def find_calls(
    timeline: Timeline, wanted: NDArray[np.bool_], end_ns: NDArray[np.int64], launching: NDArray[np.int64]
) -> NestedCalls:
    """Nest the wanted events of the host.

    Args:
        timeline: n events, m of them of the device.
        wanted: which events are calls, shape (n,).
        end_ns: the ends of all events by ``enclosing.clipped_ends``, shape (n,).
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
    """Duration of each of the wanted events of the host without the wanted ones directly in it.

    Args:
        timeline: n events.
        wanted: which events are calls, shape (n,).
        end_ns: the ends of all events by ``enclosing.clipped_ends``, shape (n,).

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
    """Rows of the wanted events, in the trace's order on each thread."""
    rows = np.flatnonzero(wanted)
    return rows[stable_order(trace.track[rows].astype(np.int64))]


def _parents(stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the last earlier call that does not stop before each, -1 without one, shape (k,)."""
    count = len(stop)
    depth = np.arange(count) - np.cumsum(np.bincount(stop, minlength=count + 1))[:count]
    order = stable_order(depth)
    keys = depth[order] * count + order
    num_outermost = count - int(np.count_nonzero(depth))
    parent = np.full(count, -1, np.int64)
    # Of the calls one level further out the last one before each; both sides are sorted.
    parent[order[num_outermost:]] = order[np.searchsorted(keys, keys[num_outermost:] - count) - 1]
    return parent


def _stops(
    begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], track: NDArray[np.signedinteger]
) -> NDArray[np.int64]:
    """Index of the first later call of the same thread that does not begin in each, shape (k,)."""
    edges = np.flatnonzero(np.diff(track, prepend=-1, append=-1)) if len(track) else np.zeros(1, np.int64)
    stop = np.arange(1, len(track) + 1)
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        found = first + np.searchsorted(begin_ns[first:last], end_ns[first:last])
        stop[first:last] = np.maximum(stop[first:last], found)
    return stop


def thread_label(trace: Trace, track: int) -> str:
    """A host thread in words, such as ``Thread 1234 (python)``."""
    number = trace.tracks[track][1]
    name = trace.thread_names.get(track, "").removeprefix(f"thread {number}").strip(" ()")
    return f"Thread {number} ({name})" if name else f"Thread {number}"
