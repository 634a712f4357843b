"""GPU idle time as slices: which lanes they are in, and what the CPU did during each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.calls import clipped_ends, innermost_at
from lightning_modelprof.analysis.timeline.intervals import Intervals, different, is_among, locate
from lightning_modelprof.analysis.timeline.tally import sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.idle import CAUSES, find_fetches, find_idle
from lightning_modelprof.record import Record
from lightning_modelprof.report.dashboard_entry import Lane
from lightning_modelprof.run.phases import STEP_RANGE_PREFIX
from lightning_modelprof.trace.model import Category

IDLE_PREFIX: Final = "idle: "
"""Prefix of the kinds of idle time; the rest is the cause."""

IDLE_WORDS: Final = tuple(IDLE_PREFIX + cause for cause in CAUSES)
"""All kinds of idle time, which are also the slices' names."""

STACK_HEADING: Final = "call stack, innermost first:"
"""Line of a detail before a call stack, which has one frame per line."""

_WHY: Final = (
    "nothing was queued while the launching thread waited for data",
    "nothing was queued because the CPU launched the next work late",
    "the next work was queued and started less than 30 µs after the previous work",
    "the next work was queued, after work on another stream",
    "communication before or after the gap, or on the CPU before the launch",
    "cause not recorded: work queued on the same stream, an unknown launch or no work afterwards",
)
"""In the order of ``CAUSES``."""

_NUM_MOMENTS: Final = 9
_FEWEST_NS: Final = 5_000
"""Shorter idle time doesn't show what the CPU did."""


class IdleSlices(Record, frozen=True, kw_only=True, eq=False):
    """Idle time of all devices, k slices.

    A device's idle time is in the lane of one stream: the one that is busiest with anything but
    communication. It's cut at zero-length events, so it doesn't contain them.

    Attributes:
        intervals: start and end, shape (k, 2).
        lane: index into the timeline's lanes, int64, shape (k,).
        crossing: lanes where idle time may cross ranges, so ``depth`` doesn't hold there.
        depth: row in the lane, the first one, int64, shape (k,).
        kinds: those that occur.
        kind: index into ``kinds``, int64, shape (k,).
        details: distinct texts.
        detail: index into ``details``, int64, shape (k,).
    """

    intervals: NDArray[np.int64]
    lane: NDArray[np.int64]
    crossing: NDArray[np.int64]
    depth: NDArray[np.int64]
    kinds: tuple[str, ...]
    kind: NDArray[np.int64]
    details: tuple[str, ...]
    detail: NDArray[np.int64]


def find_idle_slices(shared: Timeline, lanes: Sequence[Lane], lane_of_event: NDArray[np.int64]) -> IdleSlices:
    """Find each device's idle time as slices in one of its lanes.

    Args:
        shared: n events.
        lane_of_event: index of each event's lane, shape (n,).
    """
    trace = shared.trace
    fetches = find_fetches(shared)
    intervals, lane, cause = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    track = [np.zeros(0, np.int64)]
    main = -1 if shared.steps is None else shared.steps.track
    for device in different(trace.device.device).tolist():
        idle = find_idle(shared, device, fetches)
        rows = trace.device.event[trace.device.device == device]
        own = _busiest_lane(shared, rows, lane_of_event)
        here = rows[lane_of_event[rows] == own]
        pieces, piece = _cut(idle.intervals, trace.begin_ns[here[trace.duration_ns[here] == 0]])
        intervals.append(pieces)
        lane.append(np.full(len(pieces), own))
        cause.append(idle.cause[piece])
        track.append(np.where(idle.launcher >= 0, trace.track[idle.launcher], main)[piece])
    every, why = np.concatenate(intervals), np.concatenate(cause)
    thread = np.where(why == CAUSES.index("kernel gap"), -1, np.concatenate(track))
    texts, detail = _details(shared, every, why, thread, _threads(shared, lanes, lane_of_event))
    used = different(why)
    where = np.concatenate(lane)
    is_range = trace.is_category(Category.DEVICE_ANNOTATION, Category.DEVICE_SYNC)
    with_ranges = different(lane_of_event[is_range])
    return IdleSlices(
        intervals=every,
        lane=where,
        crossing=with_ranges[is_among(with_ranges, where)],
        depth=np.zeros(len(where), np.int64),
        kinds=tuple(IDLE_WORDS[index] for index in used.tolist()),
        kind=np.searchsorted(used, why),
        details=texts,
        detail=detail,
    )


def _busiest_lane(shared: Timeline, rows: NDArray[np.int64], lane_of_event: NDArray[np.int64]) -> int:
    rest = rows[~shared.is_communication[rows]]
    chosen = rest if len(rest) else rows
    busy_ns = sum_by(lane_of_event[chosen], shared.trace.duration_ns[chosen], int(lane_of_event.max()) + 1)
    return int(busy_ns.argmax()) if busy_ns.any() else int(lane_of_event[chosen[0]])


def _cut(intervals: Intervals, points_ns: NDArray[np.int64]) -> tuple[Intervals, NDArray[np.intp]]:
    """Cut intervals at the points inside them; also returns each piece's interval."""
    where = locate(points_ns, intervals)
    inside = where >= 0
    inside[inside] = points_ns[inside] > intervals[where[inside], 0]
    points = different(points_ns[inside])
    begin_ns = np.sort(np.concatenate((intervals[:, 0], points)))
    end_ns = np.sort(np.concatenate((intervals[:, 1], points)))
    return np.column_stack((begin_ns, end_ns)), locate(begin_ns, intervals)


def _threads(shared: Timeline, lanes: Sequence[Lane], lane_of_event: NDArray[np.int64]) -> dict[int, str]:
    """Map each CPU thread's track to its lane's label."""
    trace = shared.trace
    on_host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION, Category.PYTHON_FUNCTION)
    lane_of_track = np.full(len(trace.tracks), -1, np.int64)
    lane_of_track[trace.track[on_host]] = lane_of_event[on_host]
    return {track: lanes[lane].label for track, lane in enumerate(lane_of_track.tolist()) if lane >= 0}


def with_texts(
    texts: tuple[str, ...], place: NDArray[np.int64], more: tuple[str, ...], more_place: NDArray[np.int64]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Append another column of texts to a timeline's column; equal texts share one index."""
    position = {text: index for index, text in enumerate(texts)}
    added = [text for text in dict.fromkeys(more) if text not in position]
    position |= {text: len(texts) + index for index, text in enumerate(added)}
    new_place = np.array([position[text] for text in more], np.int64)[more_place]
    return (*texts, *added), np.concatenate((place, new_place))


def _details(
    shared: Timeline,
    intervals: NDArray[np.int64],
    cause: NDArray[np.int64],
    track: NDArray[np.int64],
    threads: dict[int, str],
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    open_at = _mostly_open(shared, intervals, track)
    known: dict[tuple[int, int], int] = {}
    texts: dict[str, int] = {}
    place = []
    for why, row in zip(cause.tolist(), open_at.tolist(), strict=True):
        number = known.get((why, row))
        if number is None:
            lines = [f"idle: {_WHY[why]}"]
            if row >= 0:
                lines += _host_lines(shared, row, threads[int(shared.trace.track[row])])
            number = known[why, row] = texts.setdefault("\n".join(lines), len(texts))
        place.append(number)
    return tuple(texts), np.array(place, np.int64)


def _mostly_open(
    shared: Timeline, intervals: NDArray[np.int64], track: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Find the row that is innermost on the thread at most of some moments of each piece, -1 for none.

    Uses Python functions if the thread has any, else operators and ranges except steps. Pieces shorter than
    5 µs or with an unknown thread have none.
    """
    trace = shared.trace
    found = np.full(len(intervals), -1, np.int64)
    chosen = np.flatnonzero((intervals[:, 1] - intervals[:, 0] >= _FEWEST_NS) & (track >= 0))
    if not len(chosen):
        return found
    is_python = trace.category == Category.PYTHON_FUNCTION
    has_python = np.zeros(len(trace.tracks), np.bool_)
    has_python[trace.track[is_python]] = True
    is_step = shared.is_step_range | trace.is_named(lambda name: name.startswith(STEP_RANGE_PREFIX))
    wanted = is_python | ((shared.is_operator | shared.is_annotation) & ~is_step & ~has_python[trace.track])
    begin_ns, length_ns = intervals[chosen, 0], intervals[chosen, 1] - intervals[chosen, 0]
    parts = np.arange(1, 2 * _NUM_MOMENTS, 2)
    moments = begin_ns[:, None] + length_ns[:, None] * parts // (2 * _NUM_MOMENTS)
    rows = innermost_at(
        shared, np.repeat(track[chosen], _NUM_MOMENTS), moments.reshape(-1), wanted, clipped_ends(shared)
    ).reshape(-1, _NUM_MOMENTS)
    name = np.where(rows >= 0, trace.name[rows].astype(np.int64), -1)
    same = (name[:, :, None] == name[:, None, :]).sum(axis=2) * (name >= 0)
    found[chosen] = rows[np.arange(len(rows)), same.argmax(axis=1)]
    return found


def _host_lines(shared: Timeline, row: int, thread: str) -> list[str]:
    trace = shared.trace
    around: list[int] = []
    while row >= 0:
        around.append(row)
        row = int(shared.parent[row])
    named = [trace.name_of(one) for one in around]
    ranges = [
        name
        for name, one in zip(named[1:], around[1:], strict=True)
        if shared.is_annotation[one]
        and not shared.is_step_range[one]
        and not name.startswith(STEP_RANGE_PREFIX)
    ]
    lines = [f"meanwhile on {thread}: {named[0]}" + (f", in {ranges[0]}" if ranges else "")]
    frames = [
        name
        for name, one in zip(named, around, strict=True)
        if trace.category[one] == Category.PYTHON_FUNCTION
    ]
    return [*lines, STACK_HEADING, *frames] if frames else lines
