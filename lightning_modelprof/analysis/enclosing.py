"""What of the host is around an event or open at a moment: look-ups in the call tree for some of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.grouping import stable_order
from lightning_modelprof.analysis.timeline.timeline import Timeline


def nearest_around(
    timeline: Timeline, rows: NDArray[np.int64], wanted: NDArray[np.bool_], *, or_itself: bool = False
) -> NDArray[np.int64]:
    """The innermost wanted event around each of some host events: ``Timeline.nearest`` for a few.

    Args:
        timeline: n events.
        rows: the events, -1 for none, shape (k,).
        wanted: which events count, shape (n,).
        or_itself: whether an event that is wanted is its own answer.

    Returns:
        Shape (k,): row of the event, -1 where there is none.
    """
    parent = timeline.parent
    found = np.where(rows >= 0, rows if or_itself else parent[rows], -1)
    searching = np.flatnonzero(found >= 0)
    while len(searching):
        searching = searching[~wanted[found[searching]]]
        found[searching] = parent[found[searching]]
        searching = searching[found[searching] >= 0]
    return found


def innermost_at(
    timeline: Timeline,
    track: NDArray[np.signedinteger],
    time_ns: NDArray[np.int64],
    wanted: NDArray[np.bool_],
    end_ns: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The innermost wanted event that is open on a host thread at each of some moments.

    Events are half-open: one that begins at the moment is open, one that ends then is not. One that ends
    after the event around it counts as ending with it, as in ``Timeline.parent``.

    Args:
        timeline: n events.
        track: host thread of each moment, shape (k,).
        time_ns: the moments, shape (k,), in any order.
        wanted: which events count, shape (n,); must be events of host threads.
        end_ns: the ends of all events by :func:`clipped_ends`, shape (n,).

    Returns:
        Shape (k,): row of the event, -1 where none is open.
    """
    begun = _last_begun(timeline, track, time_ns, wanted)
    parent = timeline.parent
    # All that is open at a moment encloses the last event that began before it: climb from there.
    closed = np.flatnonzero(begun >= 0)
    while len(closed):
        row = begun[closed]
        closed = closed[~wanted[row] | (end_ns[row] <= time_ns[closed])]
        begun[closed] = parent[begun[closed]]
        closed = closed[begun[closed] >= 0]
    return begun


def clipped_ends(timeline: Timeline) -> NDArray[np.int64]:
    """End of each event, but not after the end of any event around it, shape (n,)."""
    end_ns: NDArray[np.int64] = timeline.trace.end_ns.copy()
    rows = np.flatnonzero(timeline.parent >= 0)
    parent = timeline.parent[rows]
    above = timeline.parent.copy()
    while (end_ns[rows] > end_ns[parent]).any():
        # Each round doubles the number of events around it that an event has been compared with.
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
    """Row of the last wanted event that began on the thread until each moment, -1 without one, shape (k,)."""
    trace = timeline.trace
    rows = np.flatnonzero(wanted)
    rows = rows[stable_order(trace.track[rows].astype(np.int64))]  # by thread, and there in the trace's order
    order = stable_order(track.astype(np.int64))
    row_tracks, point_tracks = trace.track[rows], track[order]
    found = np.full(len(time_ns), -1, np.int64)
    for one in np.unique(track).tolist():
        own = rows[slice(*np.searchsorted(row_tracks, (one, one + 1)))]
        points = order[slice(*np.searchsorted(point_tracks, (one, one + 1)))]
        place = np.searchsorted(trace.begin_ns[own], time_ns[points], side="right") - 1
        begun = place >= 0
        found[points[begun]] = own[place[begun]]
    return found
