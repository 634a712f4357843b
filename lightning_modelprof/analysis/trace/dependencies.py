"""Dependencies: a graph of the host and device work in the steps, and what each piece waits for.

Nodes are work with its measured duration: stretches of a host thread between its launches and waits, and
kernels, copies and sets. Edges are the software's dependencies: the order of a thread and of a stream,
launches, waits of streams for events, waits of the host for the device, full launch queues, and backward,
which the main thread hands to autograd's thread. No edge has the length of a recorded gap. Time in which a
host thread isn't known to be blocked is its work; time in which a device is idle is never a node.

Sources for the kinds of dependencies: Zhu et al., "Daydream" (USENIX ATC 2020), section 4; Hu et al., "dPRO"
(MLSys 2022); and the critical path analysis of HolisticTraceAnalysis, which has launches, synchronization and
the order of operators and kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.calls import clipped_ends, innermost_at
from lightning_modelprof.analysis.timeline.intervals import different
from lightning_modelprof.analysis.timeline.steps import launching_steps
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.blocked import (
    HOST,
    ROUNDING_NS,
    Blocked,
    Queues,
    find_blocked,
    find_stream_waits,
)
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category


class Dependencies(Record, frozen=True, kw_only=True, eq=False):
    """A graph of k nodes, each after everything it depends on; p pieces of time make up the nodes.

    Node 0 is the start, without duration. A node has at most two dependencies; if something waits for more,
    nodes without duration join them.

    Attributes:
        begin_ns, end_ns: of the steps covered, which are consecutive.
        node_begin_ns, node_end_ns: int64, shape (k,): recorded time of the work.
        before: int64, shape (k,): the node that each follows on its thread or stream, 0 for the start.
        awaited: int64, shape (k,): what else it waits for, 0 for nothing.
        latency_ns: int64, shape (k,): least time from the end of the awaited node to its start.
        end_of_step: int64, shape (k,): index of the step that can't end before the node: the node is the
            step's last one on the steps' thread or was launched in the step; -1 for all others.
        piece_node: int64, shape (p,): node of each piece, ascending.
        piece_begin_ns, piece_end_ns: int64, shape (p,): the pieces of a node tile it.
        piece_row: int64, shape (p,): the device event, or the innermost event open on the host thread; -1
            without one.
    """

    begin_ns: int
    end_ns: int
    node_begin_ns: NDArray[np.int64]
    node_end_ns: NDArray[np.int64]
    before: NDArray[np.int64]
    awaited: NDArray[np.int64]
    latency_ns: NDArray[np.int64]
    end_of_step: NDArray[np.int64]
    piece_node: NDArray[np.int64]
    piece_begin_ns: NDArray[np.int64]
    piece_end_ns: NDArray[np.int64]
    piece_row: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.before)


class DependencyFinder:
    """Builds the graphs of one trace that has device events and steps.

    Attributes:
        launch_latency_ns: least time from the start of a kernel-launching call to the start of the kernel.
    """

    def __init__(self, timeline: Timeline) -> None:
        steps, bounds = timeline.steps, timeline.bounds
        assert steps is not None
        assert bounds is not None
        self._timeline, self._steps, self._bounds = timeline, steps, bounds
        self._queues = Queues(timeline)
        self._blocked = find_blocked(timeline, self._queues, steps.track)
        self._stream_waits = find_stream_waits(timeline, self._queues)
        self._launching_step = launching_steps(timeline.trace, steps.intervals, timeline.launch)
        self.launch_latency_ns = _least_latency(timeline, self._queues)

    def find(self, first: int, last: int) -> Dependencies:
        """Graph of consecutive steps, from one index to another."""
        begin_ns, end_ns = int(self._bounds.intervals[first, 0]), int(self._bounds.intervals[last, 1])
        nodes = _Nodes(begin_ns)
        node_of = self._add_device(nodes, begin_ns, end_ns)
        in_steps = (node_of > 0) & (self._launching_step >= first) & (self._launching_step <= last)
        nodes.end_of_step[node_of[in_steps]] = self._launching_step[in_steps] - first
        waits = self._add_threads(nodes, first, last)
        self._add_awaited(nodes, waits, node_of)
        self._add_launches(nodes, node_of, begin_ns)
        return nodes.finish(self._timeline, end_ns)

    def _add_device(self, nodes: _Nodes, begin_ns: int, end_ns: int) -> NDArray[np.int64]:
        """Add a node for each device event, after its predecessor on the stream and awaited streams.

        Returns:
            The node of each of the trace's device events, 0 for those that ended before, shape (m,).
        """
        queues = self._queues
        is_in = (queues.end_ns > begin_ns) & (queues.begin_ns < end_ns)
        begins_ns, ends_ns = np.maximum(queues.begin_ns, begin_ns), np.minimum(queues.end_ns, end_ns)
        members = np.flatnonzero(is_in)
        node_of = np.zeros(len(is_in), np.int64)
        node_of[members] = nodes.add(
            begins_ns[members], ends_ns[members], row=self._timeline.trace.device.event[members]
        )
        for stream in queues.members.values():
            own = stream[is_in[stream]]
            if not len(own):
                continue
            before = np.append(-1, own[:-1])
            # If events of a stream overlap, as in graphs, an event follows the last one that had ended.
            crosses = ends_ns[before] > np.minimum(begins_ns[own] + ROUNDING_NS, ends_ns[own])
            by_end = own[np.argsort(ends_ns[own], kind="stable")]
            place = np.searchsorted(ends_ns[by_end], begins_ns[own], side="right")
            ended = np.where(place > 0, by_end[place - 1], -1)
            before = np.where(crosses & (before >= 0), ended, before)
            nodes.before[node_of[own]] = np.where(before >= 0, node_of[before], 0)
        joins = _Joins(nodes)
        for member, awaited in self._stream_waits:
            if is_in[member] and is_in[awaited]:
                own_node = int(node_of[member])
                nodes.before[own_node] = joins.of(int(nodes.before[own_node]), int(node_of[awaited]))
        joins.add()
        return node_of

    def _add_threads(self, nodes: _Nodes, first: int, last: int) -> NDArray[np.int64]:
        """Add the stretches of each host thread between its launches and waits.

        Returns:
            (node, wait number) of the nodes that start when a wait is over.
        """
        queues, blocked = self._queues, self._blocked
        begin_ns, end_ns = int(self._bounds.intervals[first, 0]), int(self._bounds.intervals[last, 1])
        main, step_ends_ns = self._steps.track, self._steps.intervals[first : last + 1, 1]
        known = queues.caller >= 0
        releases = np.array(blocked.releases, np.int64).reshape(-1, 2)
        cut_track = np.concatenate(
            (
                self._timeline.trace.track[queues.caller[known]],
                releases[:, 0],
                np.full(len(step_ends_ns), main),
            )
        )
        cut_ns = np.concatenate((queues.launch_ns[known], releases[:, 1], step_ends_ns))
        waits = []
        for track in different(np.append(cut_track, main)).tolist():
            until_ns = min(end_ns, int(step_ends_ns[-1])) if track == main else end_ns
            if until_ns <= begin_ns:
                continue
            begins, stops, wait = _stretches(
                (begin_ns, until_ns),
                cut_ns[cut_track == track],
                np.flatnonzero(blocked.track == track),
                blocked,
            )
            added = nodes.add(begins, stops, track=track)
            nodes.before[added[1:]] = added[:-1]
            waits.append(np.column_stack((added[wait >= 0], wait[wait >= 0])))
            if track == main:
                place = np.searchsorted(stops, step_ends_ns, side="right") - 1
                nodes.end_of_step[added[place[place >= 0]]] = np.flatnonzero(place >= 0)
        return np.concatenate(waits) if waits else np.zeros((0, 2), np.int64)

    def _add_awaited(self, nodes: _Nodes, waits: NDArray[np.int64], node_of: NDArray[np.int64]) -> None:
        blocked = self._blocked
        of_thread = blocked.thread[waits[:, 1]] >= 0
        node, wait = waits[of_thread].T
        nodes.awaited[node] = nodes.last_of(blocked.thread[wait], nodes.begin_ns[node])
        joins = _Joins(nodes)
        for node, wait in waits[~of_thread].tolist():
            found = 0
            for member in blocked.awaited[wait]:
                found = joins.of(found, int(node_of[member]))
            nodes.awaited[node] = found
        joins.add()

    def _add_launches(self, nodes: _Nodes, node_of: NDArray[np.int64], begin_ns: int) -> None:
        """Start each device event no sooner after its launch than the trace's shortest latency."""
        queues = self._queues
        members = np.flatnonzero((node_of > 0) & (queues.caller >= 0) & (queues.launch_ns >= begin_ns))
        own, track = node_of[members], self._timeline.trace.track[queues.caller[members]]
        launching = nodes.last_of(track, queues.launch_ns[members])
        lag_ns = nodes.begin_ns[own] - nodes.end_ns[launching]
        nodes.awaited[own] = launching
        nodes.latency_ns[own] = np.clip(lag_ns, 0, self.launch_latency_ns)


def _least_latency(timeline: Timeline, queues: Queues) -> int:
    is_kernel = timeline.trace.category[timeline.trace.device.event] == Category.KERNEL
    chosen = is_kernel & (queues.caller >= 0)
    lag_ns = queues.begin_ns[chosen] - queues.launch_ns[chosen]
    return max(int(lag_ns.min()), 0) if len(lag_ns) else 0


def _stretches(
    interval: tuple[int, int], cuts_ns: NDArray[np.int64], waits: NDArray[np.int64], blocked: Blocked
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Work of one thread: starts, ends, and the number of the wait before each, -1 for none.

    Args:
        cuts_ns: where work is split, in any order.
        waits: numbers of the thread's waits.
    """
    begin_ns, until_ns = interval
    waits = waits[np.lexsort((blocked.end_ns[waits], blocked.begin_ns[waits]))]
    reached_ns = np.maximum.accumulate(np.append(begin_ns, blocked.end_ns[waits]))
    wait_begin_ns = np.maximum(blocked.begin_ns[waits], reached_ns[:-1])
    wait_end_ns = np.maximum(blocked.end_ns[waits], wait_begin_ns)
    counts = (
        (blocked.end_ns[waits] >= reached_ns[:-1]) & (wait_end_ns >= begin_ns) & (wait_begin_ns <= until_ns)
    )
    waits, wait_begin_ns, wait_end_ns = waits[counts], wait_begin_ns[counts], wait_end_ns[counts]
    # Work starts at the start, after each wait, and at each cut outside all waits.
    cuts_ns = different(cuts_ns[(cuts_ns > begin_ns) & (cuts_ns < until_ns)])
    at = np.searchsorted(wait_begin_ns, cuts_ns, side="right") - 1
    if len(waits):
        cuts_ns = cuts_ns[(at < 0) | (cuts_ns >= wait_end_ns[at])]
    starts_blocked = len(waits) > 0 and bool(wait_begin_ns[0] <= begin_ns)
    plain = cuts_ns if starts_blocked else np.append(begin_ns, cuts_ns)
    begins = np.concatenate((plain, wait_end_ns))
    stops = np.concatenate((plain, wait_begin_ns))
    number = np.concatenate((np.full(len(plain), -1), waits))
    # If a wait ends exactly at a cut, a node without duration stands in between.
    order = np.lexsort((np.append(np.full(len(plain), len(waits)), np.arange(len(waits))), begins))
    begins, stops, number = begins[order], np.append(stops[order], until_ns)[1:], number[order]
    kept = begins <= until_ns
    return begins[kept], np.clip(stops[kept], begins[kept], until_ns), number[kept]


class _Nodes:
    """Nodes in the order found; ``finish`` sorts them."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = np.array([begin_ns], np.int64)
        self.end_ns = self.begin_ns.copy()
        self.before = np.zeros(1, np.int64)
        self.awaited = np.zeros(1, np.int64)
        self.latency_ns = np.zeros(1, np.int64)
        self.end_of_step = np.full(1, -1, np.int64)
        self.row = np.full(1, -1, np.int64)
        self.track = np.full(1, -1, np.int64)

    def __len__(self) -> int:
        return len(self.begin_ns)

    def add(
        self,
        begin_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        *,
        row: NDArray[np.int64] | None = None,
        track: int = -1,
    ) -> NDArray[np.int64]:
        """Add nodes without predecessors and return their numbers."""
        count = len(begin_ns)
        nothing = np.zeros(count, np.int64)
        self.begin_ns = np.append(self.begin_ns, begin_ns)
        self.end_ns = np.append(self.end_ns, end_ns)
        self.before = np.append(self.before, nothing)
        self.awaited = np.append(self.awaited, nothing)
        self.latency_ns = np.append(self.latency_ns, nothing)
        self.end_of_step = np.append(self.end_of_step, nothing - 1)
        self.row = np.append(self.row, nothing - 1 if row is None else row)
        self.track = np.append(self.track, nothing + track)
        return np.arange(len(self) - count, len(self))

    def last_of(self, track: NDArray[np.signedinteger], time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last node of each thread that had ended at a time, 0 for none, shape (n,)."""
        found = np.zeros(len(time_ns), np.int64)
        for one in different(track).tolist():
            own = np.flatnonzero(self.track == one)
            asked = np.flatnonzero(track == one)
            place = np.searchsorted(self.end_ns[own], time_ns[asked], side="right")
            found[asked] = np.append(0, own)[place]
        return found

    def finish(self, timeline: Timeline, end_ns: int) -> Dependencies:
        self._keep_order()
        order = np.lexsort((self.begin_ns, self.end_ns))
        order = np.append(0, order[order > 0])
        place = np.empty(len(self), np.int64)
        place[order] = np.arange(len(self))
        before, awaited = place[self.before[order]], place[self.awaited[order]]
        # Only at the same moment can a node without duration come before what it waits for.
        here = np.arange(len(self))
        before, awaited = np.where(before < here, before, 0), np.where(awaited < here, awaited, 0)
        piece_node, piece_begin_ns, piece_end_ns, piece_row = _pieces(self, timeline)
        piece_node = place[piece_node]
        by_node = np.argsort(piece_node, kind="stable")  # each node's pieces are in order of time
        return Dependencies(
            begin_ns=int(self.begin_ns[0]),
            end_ns=end_ns,
            node_begin_ns=self.begin_ns[order],
            node_end_ns=self.end_ns[order],
            before=before,
            awaited=awaited,
            latency_ns=self.latency_ns[order],
            end_of_step=self.end_of_step[order],
            piece_node=piece_node[by_node],
            piece_begin_ns=piece_begin_ns[by_node],
            piece_end_ns=piece_end_ns[by_node],
            piece_row=piece_row[by_node],
        )

    def _keep_order(self) -> None:
        """Shift nodes that start before their dependencies end, by rounding; drop other such dependencies."""
        needed_ns = np.maximum(self.end_ns[self.before], self.end_ns[self.awaited] + self.latency_ns)
        early = needed_ns > self.begin_ns
        shifted = early & (needed_ns <= np.minimum(self.begin_ns + ROUNDING_NS, self.end_ns))
        self.begin_ns = np.where(shifted, needed_ns, self.begin_ns)
        for edge, latency_ns in ((self.before, 0), (self.awaited, self.latency_ns)):
            edge[self.end_ns[edge] + latency_ns > self.begin_ns] = 0


class _Joins:
    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._first = len(nodes)
        self._pairs: list[tuple[int, int]] = []
        self._times: list[int] = []

    def of(self, one: int, other: int) -> int:
        """A node after both; 0 means none."""
        if not one or not other:
            return one or other
        self._pairs.append((one, other))
        self._times.append(max(self._time(one), self._time(other)))
        return self._first + len(self._pairs) - 1

    def _time(self, node: int) -> int:
        return self._times[node - self._first] if node >= self._first else int(self._nodes.end_ns[node])

    def add(self) -> None:
        times = np.array(self._times, np.int64)
        added = self._nodes.add(times, times)
        pairs = np.array(self._pairs, np.int64).reshape(-1, 2)
        self._nodes.before[added], self._nodes.awaited[added] = pairs[:, 0], pairs[:, 1]


_Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def _pieces(nodes: _Nodes, timeline: Timeline) -> _Pieces:
    """Node, start, end and row of each piece: a device event, or a thread's innermost event."""
    trace = timeline.trace
    on_host = trace.is_category(*HOST)
    ends_ns = clipped_ends(timeline)
    nothing = np.zeros(0, np.int64)
    parts: list[_Pieces] = [(nothing, nothing, nothing, nothing)]
    for track in different(nodes.track[nodes.track >= 0]).tolist():
        own = np.flatnonzero((nodes.track == track) & (nodes.end_ns > nodes.begin_ns))
        if not len(own):
            continue
        rows = np.flatnonzero(on_host & (trace.track == track))
        first_ns, last_ns = int(nodes.begin_ns[own[0]]), int(nodes.end_ns[own[-1]])
        changes = np.concatenate((trace.begin_ns[rows], ends_ns[rows]))
        changes = changes[(changes > first_ns) & (changes < last_ns)]
        times = different(np.concatenate((changes, nodes.begin_ns[own], nodes.end_ns[own])))
        node = np.searchsorted(nodes.begin_ns[own], times[:-1], side="right") - 1
        is_work = times[:-1] < nodes.end_ns[own[node]]
        begin_ns, end_ns, node = times[:-1][is_work], times[1:][is_work], own[node[is_work]]
        parts.append((node, begin_ns, end_ns, np.full(len(node), track)))
    node, begin_ns, end_ns, tracks = (np.concatenate(column) for column in zip(*parts, strict=True))
    row = innermost_at(timeline, tracks, begin_ns, on_host, ends_ns)
    on_device = np.flatnonzero(nodes.row >= 0)
    return (
        np.append(on_device, node),
        np.append(nodes.begin_ns[on_device], begin_ns),
        np.append(nodes.end_ns[on_device], end_ns),
        np.append(nodes.row[on_device], row),
    )
