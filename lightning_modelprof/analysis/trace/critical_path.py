"""Critical path: what the steps wait for, and their time if parts of it were faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.timeline.calls import host_communication, nearest_around
from lightning_modelprof.analysis.timeline.intervals import Intervals, locate
from lightning_modelprof.analysis.timeline.names import is_place
from lightning_modelprof.analysis.timeline.tally import distinct, sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.dependencies import Dependencies, DependencyFinder
from lightning_modelprof.analysis.trace.idle import find_fetches
from lightning_modelprof.analysis.trace.operator_costs import callers_of
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import DEVICE_WORK, Category

Cause = Literal["data loading", "host", "launch", "copy", "kernel", "communication", "unexplained"]

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

_DATA, _HOST, _LAUNCH, _COPY, _KERNEL, _COMMUNICATION, _UNEXPLAINED = range(len(CAUSES))

MOST_EVENTS: Final = 20_000
"""Most device events to analyze; of longer traces, only the first steps."""

_SHORT: Final = 4
"""Nodes per section; if sections are shorter on average, replay node by node."""

_MOST_PARTS: Final = 50
"""Path parts kept separately."""

_MOST_NAMED: Final = 3
"""Operators and kernels with a what-if."""

_NO_STEPS: Final = "the trace has no complete recorded step"
_NO_LAUNCHES: Final = "the trace doesn't say what launched its GPU events"


class PathPart(Record, frozen=True, kw_only=True):
    """Time of one kind on the critical path, over all steps.

    Attributes:
        operator: the innermost operator around it, or that launched it; else the innermost range; "" without.
        kernel: name of the kernel or copy, "" on the host.
        line: the innermost calling function outside torch and Lightning, "" if unknown.
    """

    cause: Cause
    operator: str
    kernel: str
    line: str
    time_ns: int


class WhatIf(Record, frozen=True, kw_only=True):
    """Total time of all steps if some of their work were faster.

    Attributes:
        kind: kind of ``name``: a cause of the path, an operator or a kernel.
        work_ns: its time in the steps, on the critical path or not.
        path_ns: its time on the critical path.
        half_ns: time of all steps if each piece of it took half its time.
        none_ns: the same if it took no time.
    """

    kind: Literal["cause", "operator", "kernel"]
    name: str
    work_ns: int
    path_ns: int
    half_ns: int
    none_ns: int


class PathStep(Record, frozen=True, kw_only=True):
    """One step, as recorded and as replayed without changes."""

    number: int
    recorded_ns: int
    replayed_ns: int


class CriticalPath(Record, frozen=True, kw_only=True):
    """The critical path of one rank's steps.

    Attributes:
        recorded_ns: their time; the times of ``parts`` sum to it.
        replayed_ns: their time if each piece of work starts as soon as its dependencies are done.
        launch_latency_ns: shortest time from the start of a launch to the start of its kernel.
        parts: longest first.
        what_ifs: causes in order, then operators, then kernels.
        num_left_out: steps that weren't analyzed, because there are too many events.
    """

    steps: tuple[PathStep, ...]
    recorded_ns: int
    replayed_ns: int
    launch_latency_ns: int
    parts: tuple[PathPart, ...]
    what_ifs: tuple[WhatIf, ...]
    num_left_out: int

    def cause_ns(self, cause: Cause) -> int:
        return sum(part.time_ns for part in self.parts if part.cause == cause)


class Pieces(Record, frozen=True, kw_only=True, eq=False):
    """Work in some steps, p pieces.

    Attributes:
        duration_ns: int64, shape (p,).
        row: int64, shape (p,): the device event, or the innermost event on the host thread; -1 for none.
        cause: int64, shape (p,): position in ``CAUSES``.
        operator: int64, shape (p,): name id of the innermost operator around it or its launch, else of the
            innermost range; -1 without one.
        kernel: int64, shape (p,): name id of the kernel or copy; -1 on the host.
    """

    duration_ns: NDArray[np.int64]
    row: NDArray[np.int64]
    cause: NDArray[np.int64]
    operator: NDArray[np.int64]
    kernel: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row)


class PathSlices(Record, frozen=True, kw_only=True, eq=False):
    """The critical path in order of time, without gaps; q slices.

    Attributes:
        begin_ns, end_ns: int64, shape (q,): as recorded.
        piece: int64, shape (q,): the piece of work; -1 for the time from a launch to its kernel, and for
            unexplained time.
        cause: int64, shape (q,): position in ``CAUSES``.
        after: int64, shape (q,): the next piece on the path, -1 at its end.
    """

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    piece: NDArray[np.int64]
    cause: NDArray[np.int64]
    after: NDArray[np.int64]


class StepReplay:
    """A trace's steps, for replaying them with faster work.

    Attributes:
        graphs: dependencies, one graph per run of consecutive steps.
        pieces: all work in them that other work may wait for.
        replayed_ns: time of the replay without changes.
        launch_latency_ns: shortest time from the start of a launch to the start of its kernel.
    """

    def __init__(self, timeline: Timeline) -> None:
        finder = DependencyFinder(timeline)
        bounds = timeline.bounds
        assert bounds is not None
        self._timeline = timeline
        self.graphs: list[Dependencies] = []
        chosen: list[int] = []
        for first, last in _runs(timeline, MOST_EVENTS):
            self.graphs.append(finder.find(first, last))
            chosen += range(first, last + 1)
        self._intervals = bounds.intervals[chosen]
        self._offsets = np.cumsum([0, *(len(graph.piece_node) for graph in self.graphs)]).tolist()
        self.numbers = tuple(bounds.numbers[step] for step in chosen)
        self.launch_latency_ns = finder.launch_latency_ns
        self.pieces = _describe(timeline, self.graphs)
        self.recorded_ns = sum(graph.end_ns - graph.begin_ns for graph in self.graphs)
        self._orders = [_Order(graph) for graph in self.graphs]
        self._ends = [
            order.replay((graph.node_end_ns - graph.node_begin_ns)[order.nodes])[order.place]
            for graph, order in zip(self.graphs, self._orders, strict=True)
        ]
        self.replayed_ns = sum(
            int(ends[graph.end_of_step >= 0].max(initial=0))
            for graph, ends in zip(self.graphs, self._ends, strict=True)
        )

    def select(
        self, *, cause: Cause | None = None, operator: str | None = None, kernel: str | None = None
    ) -> NDArray[np.bool_]:
        """Which pieces match the given cause, operator and kernel."""
        pieces, trace = self.pieces, self._timeline.trace
        chosen = np.ones(len(pieces), np.bool_)
        if cause is not None:
            chosen &= pieces.cause == CAUSES.index(cause)
        for name, ids in ((operator, pieces.operator), (kernel, pieces.kernel)):
            if name is not None:
                chosen &= ids == (trace.names.index(name) if name in trace.names else -2)
        return chosen

    def if_faster(self, asked: Sequence[tuple[NDArray[np.bool_], float]]) -> list[int]:
        """Time of all steps if some pieces were faster, for several such questions.

        Time of the recorded steps that no dependency explains is assumed to remain.

        Args:
            asked: which pieces, shape (p,), and how many times faster: at least 1; infinite for work that
                takes no time at all.
        """
        total_ns = np.full(len(asked), self.recorded_ns - self.replayed_ns)
        saved = []
        for selected, times in asked:
            pieces = np.flatnonzero(selected)
            duration_ns = self.pieces.duration_ns[pieces]
            saved.append((pieces, duration_ns - np.rint(duration_ns / times).astype(np.int64)))
        for graph, order, offset in zip(self.graphs, self._orders, self._offsets, strict=False):
            place = order.place[graph.piece_node]
            duration_ns = np.tile((graph.node_end_ns - graph.node_begin_ns)[order.nodes], (len(asked), 1))
            for number, (pieces, saved_ns) in enumerate(saved):
                first, last = np.searchsorted(pieces, (offset, offset + len(place)))
                duration_ns[number] -= sum_by(
                    place[pieces[first:last] - offset], saved_ns[first:last], len(graph)
                )
            ends = order.replay(duration_ns)
            total_ns += ends[:, order.place[graph.end_of_step >= 0]].max(axis=1, initial=0)
        return [int(ns) for ns in total_ns]

    def steps(self) -> tuple[PathStep, ...]:
        found = []
        number = iter(self.numbers)
        done = 0
        for graph, ends in zip(self.graphs, self._ends, strict=True):
            count = int(graph.end_of_step.max()) + 1
            step_ends = np.zeros(count, np.int64)
            is_end = graph.end_of_step >= 0
            np.maximum.at(step_ends, graph.end_of_step[is_end], ends[is_end])
            step_ends = np.maximum.accumulate(step_ends)
            recorded = self._intervals[done : done + count]
            # A step starts at its bounds, where the host may be ahead, but not before the host starts it.
            for interval, replayed in zip(
                recorded.tolist(), np.diff(step_ends, prepend=0).tolist(), strict=True
            ):
                found.append(
                    PathStep(number=next(number), recorded_ns=interval[1] - interval[0], replayed_ns=replayed)
                )
            done += count
        return tuple(found)

    def path(self) -> PathSlices:
        """The longest chain of dependencies from start to end, with the recorded time in between."""
        parts = [
            _walk_back(graph, ends, offset)
            for graph, ends, offset in zip(self.graphs, self._ends, self._offsets, strict=False)
        ]
        begin_ns, end_ns, piece, kind = (np.concatenate(column) for column in zip(*parts, strict=True))
        cause = np.where(piece >= 0, np.append(self.pieces.cause, 0)[piece], kind)
        places = np.where(piece >= 0, np.arange(len(piece)), len(piece))
        following = np.minimum.accumulate(places[::-1])[::-1]
        return PathSlices(
            begin_ns=begin_ns,
            end_ns=end_ns,
            piece=piece,
            cause=cause,
            after=np.append(piece, -1)[following],
        )


def summarize_critical_path(timeline: Timeline) -> CriticalPath:
    if reason := why_no_path(timeline):
        raise NotMeasured(reason)
    replay = StepReplay(timeline)
    path = replay.path()
    bounds = timeline.bounds
    assert bounds is not None
    parts = _parts(timeline, replay.pieces, path)
    return CriticalPath(
        steps=replay.steps(),
        recorded_ns=replay.recorded_ns,
        replayed_ns=replay.replayed_ns,
        launch_latency_ns=replay.launch_latency_ns,
        parts=_shortened(parts),
        what_ifs=tuple(_what_ifs(replay, path, parts)),
        num_left_out=int(np.count_nonzero(np.diff(bounds.intervals))) - len(replay.numbers),
    )


def why_no_path(timeline: Timeline) -> str:
    """Why a timeline has no critical path; ``""`` if it has one."""
    if not timeline.has_device:
        return NO_DEVICE
    if timeline.span is None:
        return _NO_STEPS
    return _NO_LAUNCHES if (timeline.launch.begin_ns < 0).all() else ""


def replayed_time(timeline: Timeline) -> Intervals:
    """Time of the steps that a critical path covers."""
    bounds = timeline.bounds
    assert bounds is not None
    runs = np.array(list(_runs(timeline, MOST_EVENTS)), np.int64).reshape(-1, 2)
    return np.stack((bounds.intervals[runs[:, 0], 0], bounds.intervals[runs[:, 1], 1]), axis=1)


def _runs(timeline: Timeline, most_events: int) -> Iterator[tuple[int, int]]:
    """First and last step of each run of consecutive steps, within ``most_events`` device events."""
    bounds = timeline.bounds
    assert bounds is not None
    filled = np.flatnonzero(bounds.intervals[:, 0] < bounds.intervals[:, 1])
    stretch = locate(bounds.intervals[filled, 0], bounds.stretches)
    events_ns = np.sort(timeline.trace.begin_ns[timeline.trace.device.event])
    num_events = np.cumsum(np.diff(np.searchsorted(events_ns, bounds.intervals[filled])).ravel())
    kept = filled[(num_events <= most_events) | (np.arange(len(filled)) == 0)]
    for run in np.split(kept, np.flatnonzero(np.diff(stretch[: len(kept)])) + 1):
        if len(run):
            yield int(run[0]), int(run[-1])


class _Order:
    """A graph's nodes in sections, each replayed in one go after those before it.

    A section is a stretch of a thread or a stream: each node follows the one before it, and awaits only
    earlier sections. Threads and streams seldom wait for each other back and forth, so there are few
    sections.

    Attributes:
        nodes: int64, shape (k,): the nodes, section by section.
        place: int64, shape (k,): each node's position among them.
    """

    def __init__(self, graph: Dependencies) -> None:
        section, lasts = [0], [-1]  # the start node has its own section
        for node, (before, awaited) in enumerate(
            zip(graph.before[1:].tolist(), graph.awaited[1:].tolist(), strict=True), 1
        ):
            one = section[before]
            if before != lasts[one] or (awaited and section[awaited] >= one):
                one = len(lasts)
                lasts.append(node)
            lasts[one] = node
            section.append(one)
        numbers = np.array(section, np.int64)
        self.nodes = np.argsort(numbers, kind="stable")
        self.place = np.empty(len(graph), np.int64)
        self.place[self.nodes] = np.arange(len(graph))
        self._begins = np.append(np.searchsorted(numbers[self.nodes], np.arange(1, len(lasts))), len(graph))
        self._before = self.place[graph.before[self.nodes]]
        self._awaited = self.place[graph.awaited[self.nodes]]
        self._latency_ns = graph.latency_ns[self.nodes]

    def replay(self, duration_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """End of each node since the start, if each starts as soon as it can; overwrites the durations.

        Args:
            duration_ns: of the nodes section by section, shape (k,), or for several replays, shape (r, k).
        """
        ends = duration_ns
        if len(self.nodes) < _SHORT * len(self._begins):
            for replayed in np.atleast_2d(ends):
                replayed[:] = self._one_by_one(replayed)
            return ends
        for first, last in pairwise(self._begins.tolist()):
            done = np.cumsum(ends[..., first:last], axis=-1)
            # A node ends no earlier than any earlier node's possible start plus all work from there on.
            ready = ends.take(self._awaited[first:last], axis=-1) + self._latency_ns[first:last]
            ready[..., 0] = np.maximum(ready[..., 0], ends[..., self._before[first]])
            ready[..., 1:] -= done[..., :-1]
            np.add(done, np.maximum.accumulate(ready, axis=-1), out=ends[..., first:last])
        return ends

    def _one_by_one(self, duration_ns: NDArray[np.int64]) -> list[int]:
        columns = (self._before, self._awaited, self._latency_ns, duration_ns)
        ends = [0]
        for before, awaited, latency, duration in zip(*(one[1:].tolist() for one in columns), strict=True):
            one, other = ends[before], ends[awaited] + latency
            ends.append((one if one > other else other) + duration)  # faster than max()
        return ends


def _walk_back(
    graph: Dependencies, ends: NDArray[np.int64], offset: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Start, end, piece and cause (if there is no piece) of the slices of one graph's path."""
    is_end = np.flatnonzero(graph.end_of_step >= 0)
    # Of several that end last, the one recorded last.
    node = int(is_end[np.lexsort((graph.node_end_ns[is_end], ends[is_end]))[-1]]) if len(is_end) else 0
    is_awaited = ends[graph.awaited] + graph.latency_ns > ends[graph.before]
    came_from = np.where(is_awaited, graph.awaited, graph.before).tolist()
    on_path = []
    while node:
        on_path.append(node)
        node = came_from[node]
    nodes = np.array(on_path[::-1], np.int64)
    wait_ns = np.where(is_awaited, graph.latency_ns, 0)[nodes]
    previous_ns = np.append(graph.begin_ns, graph.node_end_ns[nodes])
    next_ns = np.append(graph.node_begin_ns[nodes], graph.end_ns)
    launched_ns = previous_ns + np.append(wait_ns, 0)
    is_on_path = np.zeros(len(graph), np.bool_)
    is_on_path[nodes] = True
    pieces = np.flatnonzero(is_on_path[graph.piece_node])
    none = np.full(len(previous_ns), -1)
    columns = (
        np.concatenate((graph.piece_begin_ns[pieces], previous_ns, launched_ns)),
        np.concatenate((graph.piece_end_ns[pieces], launched_ns, next_ns)),
        np.concatenate((pieces + offset, none, none)),
        np.concatenate((np.zeros(len(pieces), np.int64), none * 0 + _LAUNCH, none * 0 + _UNEXPLAINED)),
    )
    filled = np.flatnonzero(columns[0] < columns[1])
    order = filled[np.argsort(columns[0][filled], kind="stable")]
    begin_ns, end_ns, piece, cause = (column[order] for column in columns)
    return begin_ns, end_ns, piece, cause


def _describe(timeline: Timeline, graphs: list[Dependencies]) -> Pieces:
    trace, launch = timeline.trace, timeline.launch
    row = np.concatenate([graph.piece_row for graph in graphs])
    duration_ns = np.concatenate([graph.piece_end_ns - graph.piece_begin_ns for graph in graphs])
    cause_of, operator_of = np.full(len(trace) + 1, _HOST), np.full(len(trace) + 1, -1)
    # On the host, for the innermost event; the last entry stands for none.
    is_used = np.zeros(len(trace) + 1, np.bool_)
    is_used[row] = True
    used = np.flatnonzero(is_used[:-1])
    work = trace.device.event
    launching = launch.runtime[launch.runtime >= 0]
    cause_of[launching] = _LAUNCH
    is_copy = trace.is_category(Category.MEMCPY, Category.MEMSET)
    cause_of[launch.runtime[(launch.runtime >= 0) & (trace.category[work] == Category.MEMCPY)]] = _COPY
    communicates = np.zeros(len(trace), np.bool_)
    communicates[host_communication(timeline)] = True
    fetches = np.zeros(len(trace), np.bool_)
    fetches[find_fetches(timeline)] = True
    for wanted, cause in ((communicates, _COMMUNICATION), (fetches, _DATA)):
        if wanted.any():
            cause_of[used[nearest_around(timeline, used, wanted, or_itself=True) >= 0]] = cause
    cause_of[work] = np.where(is_copy[work], _COPY, _KERNEL)
    cause_of[:-1][timeline.is_communication & (trace.category == Category.KERNEL)] = _COMMUNICATION
    ranges = timeline.is_annotation & ~timeline.is_step_range & ~trace.is_named(is_place)
    for wanted in (ranges, timeline.is_operator):
        around = nearest_around(timeline, used, wanted, or_itself=True)
        operator_of[used[around >= 0]] = trace.name[around[around >= 0]]
    operator_of[work] = np.where(launch.operator >= 0, trace.name[launch.operator], -1)
    is_device = trace.is_category(*DEVICE_WORK)
    kernel_of = np.append(np.where(is_device, trace.name, -1), -1)
    return Pieces(
        duration_ns=duration_ns,
        row=row,
        cause=cause_of[row],
        operator=operator_of[row],
        kernel=kernel_of[row],
    )


def _parts(timeline: Timeline, pieces: Pieces, path: PathSlices) -> list[PathPart]:
    trace, launch = timeline.trace, timeline.launch
    # Time from a launch to its kernel belongs to that kernel's operator.
    piece = np.where((path.piece < 0) & (path.cause == _LAUNCH), path.after, path.piece)
    operator = np.append(pieces.operator, -1)[piece]
    kernel = np.append(pieces.kernel, -1)[path.piece]
    caller = np.arange(-1, len(trace))[1:]
    caller[trace.device.event] = np.where(launch.runtime >= 0, launch.runtime, launch.operator)
    row = np.append(pieces.row, -1)[piece]
    row = np.where(row >= 0, caller[row], -1)
    known = np.flatnonzero(row >= 0)
    line = np.full(len(row), -1)
    callers = callers_of(timeline, row[known])
    lines: tuple[str, ...] = ()
    if callers is not None:
        lines, line[known] = callers
    kinds = np.zeros(len(piece), np.int64)
    for column, size in (
        (path.cause, len(CAUSES)),
        (operator, len(trace.names)),
        (kernel, len(trace.names)),
        (line, len(lines)),
    ):
        kinds = distinct(kinds * (size + 1) + column + 1, (int(kinds.max(initial=0)) + 1) * (size + 1))[1]
    count = int(kinds.max(initial=-1)) + 1
    total_ns = sum_by(kinds, path.end_ns - path.begin_ns, count)
    example = np.zeros(count, np.int64)
    example[kinds] = np.arange(len(kinds))
    names, all_lines = (*trace.names, ""), (*lines, "")  # the last one is for -1
    found = [
        PathPart(
            cause=CAUSES[of_cause],
            operator=names[of_operator],
            kernel=names[of_kernel],
            line=all_lines[of_line],
            time_ns=time_ns,
        )
        for of_cause, of_operator, of_kernel, of_line, time_ns in zip(
            *(column[example].tolist() for column in (path.cause, operator, kernel, line)),
            total_ns.tolist(),
            strict=True,
        )
    ]
    return sorted(found, key=lambda part: -part.time_ns)


def _shortened(parts: list[PathPart]) -> tuple[PathPart, ...]:
    """Keep the longest parts, and merge the others by cause."""
    rest: dict[Cause, int] = {}
    for part in parts[_MOST_PARTS:]:
        rest[part.cause] = rest.get(part.cause, 0) + part.time_ns
    others = (
        PathPart(cause=cause, operator=OTHERS, kernel="", line="", time_ns=time_ns)
        for cause, time_ns in rest.items()
    )
    return (*parts[:_MOST_PARTS], *others)


OTHERS: Final = "all others"
"""Stands in for the operator of merged parts."""


_Kind = Literal["cause", "operator", "kernel"]


def _what_ifs(replay: StepReplay, path: PathSlices, parts: list[PathPart]) -> Iterator[WhatIf]:
    duration_ns = replay.pieces.duration_ns
    on_path = np.zeros(len(duration_ns), np.bool_)
    on_path[path.piece[path.piece >= 0]] = True
    asked: list[tuple[_Kind, str, NDArray[np.bool_]]] = [
        *(("cause", cause, replay.select(cause=cause)) for cause in CAUSES),
        *(("operator", name, replay.select(operator=name)) for name in _longest(parts, "operator")),
        *(("kernel", name, replay.select(kernel=name)) for name in _longest(parts, "kernel")),
    ]
    asked = [one for one in asked if one[0] != "cause" or one[2].any()]
    half_ns = replay.if_faster([(selected, 2) for _, _, selected in asked])
    none_ns = replay.if_faster([(selected, np.inf) for _, _, selected in asked])
    for (kind, name, selected), half, none in zip(asked, half_ns, none_ns, strict=True):
        yield WhatIf(
            kind=kind,
            name=name,
            work_ns=int(duration_ns[selected].sum()),
            path_ns=int(duration_ns[selected & on_path].sum()),
            half_ns=half,
            none_ns=none,
        )


def _longest(parts: list[PathPart], what: Literal["operator", "kernel"]) -> list[str]:
    times: dict[str, int] = {}
    for part in parts:
        name = getattr(part, what)
        if name and part.cause != "data loading":
            times[name] = times.get(name, 0) + part.time_ns
    return sorted(times, key=lambda name: -times[name])[:_MOST_NAMED]
