"""Idle: when and why each device was idle."""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.timeline.calls import (
    busy_ns,
    busy_time,
    covered_time,
    host_communication,
)
from lightning_modelprof.analysis.timeline.intervals import (
    Intervals,
    different,
    intersect,
    length,
    locate,
    numbered,
    subtract,
    union,
)
from lightning_modelprof.analysis.timeline.tally import Tally, rows_named, sum_by, tally, tally_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.dataloader import is_fetch
from lightning_modelprof.record import Record

KERNEL_GAP_NS: Final = 30_000
"""A shorter gap before work that was queued in time is a kernel gap.

Source: HolisticTraceAnalysis, ``breakdown_analysis.py``, ``consecutive_kernel_delay`` (30, in microseconds).
"""

IdleCause = Literal["data loading", "host", "kernel gap", "other stream", "communication", "unknown"]

CAUSES: Final[tuple[IdleCause, ...]] = get_args(IdleCause)
"""Causes of device idle time; see :class:`IdleTime`."""

_DATA_LOADING, _HOST, _GAP, _OTHER_STREAM, _COMMUNICATION, _UNKNOWN = range(len(CAUSES))
_NEVER: Final = np.iinfo(np.int64).max


class CoveredIdle(Record, frozen=True, kw_only=True):
    """Idle time of some steps, or of the whole covered time, in nanoseconds.

    Idle time within the covered time (:mod:`~lightning_modelprof.analysis.timeline.calls`) is what reports
    call *GPU idle*. ``busy_ns`` and ``by_cause_ns`` sum to ``total_ns``.

    Attributes:
        busy_ns: time in which at least one event of the device runs.
        by_cause_ns: total of the pieces of :func:`find_idle`, in the order of ``CAUSES``.
    """

    total_ns: int
    busy_ns: int
    by_cause_ns: tuple[int, ...]

    @property
    def idle_ns(self) -> int:
        return self.total_ns - self.busy_ns


class DeviceIdle(Record, frozen=True, kw_only=True):
    """Causes of one device's idle time between its first event and the end of its last one.

    A gap is a time without any event of the device on any stream; :class:`IdleTime` defines its causes.
    ``busy_ns`` and the totals of ``by_cause`` sum to ``span_ns``.

    Attributes:
        device: device number, -1 if the file doesn't have it.
        span_ns: from the start of the first event (kernel, copy, set) to the end of the last.
        busy_ns: time in which at least one of them runs.
        idle: all gaps.
        by_cause: gaps with a part of each of ``CAUSES``, and the time of these parts.
        num_unknown: gaps without a known cause because the launch is unknown.
        covered: over the covered time, e.g. the kept steps.
    """

    device: int
    span_ns: int
    busy_ns: int
    idle: Tally
    by_cause: tuple[Tally, ...]
    num_unknown: int
    covered: CoveredIdle


class Idle(Record, frozen=True, kw_only=True):
    """Idle time of one rank's devices, by device number."""

    devices: tuple[DeviceIdle, ...]

    @property
    def busiest(self) -> DeviceIdle:
        return max(self.devices, key=lambda device: device.covered.busy_ns)


def summarize_idle(timeline: Timeline) -> Idle:
    trace = timeline.trace
    if not timeline.has_device:
        raise NotMeasured(NO_DEVICE)
    fetches = find_fetches(timeline)
    devices = different(trace.device.device).tolist()
    return Idle(devices=tuple(_of_device(timeline, device, fetches) for device in devices))


class Gaps(Record, frozen=True, kw_only=True, eq=False):
    """The k times without any event of one device between its first event and the end of its last.

    Attributes:
        span_ns: from the start of the first event to the end of the last.
        launch_ns: start of the launch of the event that ends each gap, -1 if unknown, shape (k,).
        launcher: row of that launch, -1 if unknown, shape (k,).
        ending: position of that event among the device events, shape (k,).
        is_host_wait: whether it was launched after the gap started, shape (k,).
    """

    intervals: Intervals
    span_ns: int
    launch_ns: NDArray[np.int64]
    launcher: NDArray[np.int64]
    ending: NDArray[np.int64]
    is_host_wait: NDArray[np.bool_]


def find_gaps(timeline: Timeline, device: int) -> Gaps:
    """Gaps of one device, which has events, and the launch of each gap's ending event."""
    trace, launch = timeline.trace, timeline.launch
    members = np.flatnonzero(trace.device.device == device)
    work = trace.device.event[members]
    begin_ns, end_ns = trace.begin_ns[work], trace.end_ns[work]
    span = np.array([[begin_ns.min(), end_ns.max()]], np.int64)
    gaps = subtract(span[span[:, 0] < span[:, 1]], busy_time(timeline, device))
    ending = members[_first_launched(gaps[:, 1], begin_ns, launch.begin_ns[members])]
    launch_ns, launcher = _launch_of(timeline, ending)
    return Gaps(
        intervals=gaps,
        span_ns=int(end_ns.max() - begin_ns.min()),
        launch_ns=launch_ns,
        launcher=launcher,
        ending=ending,
        is_host_wait=launch_ns > gaps[:, 0],
    )


def find_fetches(timeline: Timeline) -> NDArray[np.int64]:
    """Rows of the waits for batches, on all threads."""
    return rows_named(timeline.trace, np.flatnonzero(timeline.is_annotation), is_fetch)


def _of_device(timeline: Timeline, device: int, fetches: NDArray[np.int64]) -> DeviceIdle:
    idle = find_idle(timeline, device, fetches)
    gaps = idle.gaps
    gap_ns = gaps.intervals[:, 1] - gaps.intervals[:, 0]
    is_in_gap = idle.gap >= 0
    part, whole = numbered(idle.gap[is_in_gap] * len(CAUSES) + idle.cause[is_in_gap])
    parts_ns = sum_by(whole, (idle.intervals[:, 1] - idle.intervals[:, 0])[is_in_gap], len(part))
    covered = covered_time(timeline)
    return DeviceIdle(
        device=device,
        span_ns=gaps.span_ns,
        busy_ns=gaps.span_ns - int(gap_ns.sum()),
        idle=tally(gap_ns),
        by_cause=tuple(tally_by(part % len(CAUSES), parts_ns, len(CAUSES))),
        num_unknown=int((gaps.launch_ns < 0).sum()),
        covered=idle_in(timeline, idle, idle.intervals[:0] if covered is None else covered.intervals),
    )


def idle_in(timeline: Timeline, idle: IdleTime, intervals: Intervals) -> CoveredIdle:
    """Busy and idle time of a device in part of the covered time."""
    pieces = intersect(idle.intervals, intervals)
    cause = idle.cause[locate(pieces[:, 0], idle.intervals)]
    return CoveredIdle(
        total_ns=length(intervals),
        busy_ns=busy_ns(timeline, idle.device, intervals),
        by_cause_ns=tuple(sum_by(cause, pieces[:, 1] - pieces[:, 0], len(CAUSES)).tolist()),
    )


class IdleTime(Record, frozen=True, kw_only=True, eq=False):
    """All idle time of one device in k pieces of one cause each, in order.

    It consists of the gaps, and the covered time before the device's first event (with that event's cause, as
    in a gap) and after its last one.

    - data loading: the queue was empty, and the thread that launched the next work waited for its next batch.
    - host: the queue was empty, and that thread did something else except communicate.
    - kernel gap: work was queued, and the gap is shorter than 30 microseconds.
    - other stream: work was queued for longer, and the event before it ran on another stream.
    - communication: the same if the event before, or the queued one, is communication; or the queue was
      empty, and that thread communicated.
    - unknown: work was queued on the same stream, or its launch is unknown.

    After the device's last event, all launched work is done, so the host is late there too.

    Attributes:
        device: device number.
        gaps: between its first event and its last one.
        intervals: an interval set of k rows.
        cause: index into ``CAUSES``, shape (k,).
        launcher: row of the launch of the work that ended it, or at the end, of the last work; -1 if unknown,
            shape (k,).
        gap: index into ``gaps``, -1 before the first event and after the last, shape (k,).
    """

    device: int
    gaps: Gaps
    intervals: Intervals
    cause: NDArray[np.int64]
    launcher: NDArray[np.int64]
    gap: NDArray[np.int64]

    def time_of(self, cause: IdleCause, intervals: Intervals) -> NDArray[np.int64]:
        """Idle time for this cause in each of k intervals, shape (k,)."""
        shared = intersect(intervals, self.intervals[self.cause == CAUSES.index(cause)])
        time_ns = np.zeros(len(intervals), np.int64)
        np.add.at(time_ns, locate(shared[:, 0], intervals), shared[:, 1] - shared[:, 0])
        return time_ns


def find_idle(timeline: Timeline, device: int, fetches: NDArray[np.int64]) -> IdleTime:
    found = find_gaps(timeline, device)
    gap_ns = found.intervals[:, 1] - found.intervals[:, 0]
    is_queued = (found.launch_ns >= 0) & ~found.is_host_wait
    cause = np.where(is_queued, _cause_of_queued(timeline, device, found), _UNKNOWN)
    cause[is_queued & (gap_ns < KERNEL_GAP_NS)] = _GAP
    cause[found.is_host_wait] = _HOST
    before, after, first, last = _around_events(timeline, device)
    launch_ns, launcher = _launch_of(timeline, np.full(len(before), first))
    last_launch_ns, last_launcher = _launch_of(timeline, np.full(len(after), last))
    none_before, none_after = np.full(len(before), -1), np.full(len(after), -1)
    intervals = np.concatenate((before, found.intervals, after))
    launchers = np.concatenate((launcher, found.launcher, last_launcher))
    gap = np.concatenate((none_before, np.arange(len(found.intervals)), none_after))
    cause = np.concatenate(
        (
            np.where(launch_ns > before[:, 0], _HOST, _UNKNOWN),
            cause,
            np.where(last_launch_ns >= 0, _HOST, _UNKNOWN),
        )
    )
    pieces, cause, place = _with_fetches(timeline, intervals, cause, launchers, fetches)
    return IdleTime(
        device=device,
        gaps=found,
        intervals=pieces,
        cause=cause,
        launcher=launchers[place],
        gap=gap[place],
    )


def after_last_event(timeline: Timeline, device: int) -> tuple[Intervals, int]:
    """The covered time after a device's last event, and the row of that event's launch, -1 if unknown."""
    _, after, _, last = _around_events(timeline, device)
    _, launcher = _launch_of(timeline, np.array([last]))
    return after, int(launcher[0])


def _cause_of_queued(timeline: Timeline, device: int, found: Gaps) -> NDArray[np.int64]:
    """Cause of gaps before work that was queued in time, from the event before it, shape (k,)."""
    trace = timeline.trace
    members = np.flatnonzero(trace.device.device == device)
    work = trace.device.event[members]
    members = members[np.argsort(trace.end_ns[work], kind="stable")]
    ends_ns = trace.end_ns[trace.device.event[members]]
    before = members[np.searchsorted(ends_ns, found.intervals[:, 0], side="right") - 1]
    talks = timeline.is_communication[trace.device.event]
    is_same = trace.device.stream[before] == trace.device.stream[found.ending]
    cause = np.where(is_same, _UNKNOWN, _OTHER_STREAM)
    cause[(talks[before] | talks[found.ending]) & ~is_same] = _COMMUNICATION
    return cause


def _around_events(timeline: Timeline, device: int) -> tuple[Intervals, Intervals, int, int]:
    """The covered time before and after a device's events, and the positions of the first and last one."""
    trace = timeline.trace
    covered = covered_time(timeline)
    members = np.flatnonzero(trace.device.device == device)
    work = trace.device.event[members]
    begin_ns = trace.begin_ns[work]
    first_ns, last_ns = begin_ns.min(), trace.end_ns[work].max()
    intervals = np.zeros((0, 2), np.int64) if covered is None else covered.intervals
    first = members[_first_launched(np.array([first_ns]), begin_ns, timeline.launch.begin_ns[members])]
    before = intersect(intervals, np.array([[-_NEVER, first_ns]], np.int64))
    last = members[np.argmax(trace.end_ns[work])]
    after = intersect(intervals, np.array([[last_ns, _NEVER]], np.int64))
    return before, after, int(first[0]), int(last)


def _launch_of(
    timeline: Timeline, ending: NDArray[np.int64] | NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and row of some device events' launches, -1 if unknown."""
    launch = timeline.launch
    launcher = np.where(launch.runtime[ending] >= 0, launch.runtime[ending], launch.operator[ending])
    return launch.begin_ns[ending], launcher


def _with_fetches(
    timeline: Timeline,
    intervals: Intervals,
    cause: NDArray[np.int64],
    launcher: NDArray[np.int64],
    fetches: NDArray[np.int64],
) -> tuple[Intervals, NDArray[np.int64], NDArray[np.int64]]:
    """Split fetches and communication of the launching thread from the host's intervals.

    Returns:
        The pieces in order, the cause of each, and the index of its interval.
    """
    trace, talks = timeline.trace, host_communication(timeline)
    late = np.flatnonzero(cause == _HOST)
    track = trace.track[launcher[late]]
    others = np.flatnonzero(cause != _HOST)
    pieces, causes, places = [intervals[others]], [cause[others]], [others]
    for thread in different(track).tolist():
        on_thread = fetches[trace.track[fetches] == thread]
        own = late[track == thread]
        mine = intervals[own]
        fetching = union(trace.begin_ns[on_thread], trace.end_ns[on_thread])
        own_talks = talks[trace.track[talks] == thread]
        talking = subtract(union(trace.begin_ns[own_talks], trace.end_ns[own_talks]), fetching)
        rest = subtract(subtract(mine, fetching), talking)
        for part, why in (
            (intersect(mine, fetching), _DATA_LOADING),
            (intersect(mine, talking), _COMMUNICATION),
            (rest, _HOST),
        ):
            pieces.append(part)
            causes.append(np.full(len(part), why))
            places.append(own[locate(part[:, 0], mine)])
    every = np.concatenate(pieces)
    order = np.argsort(every[:, 0], kind="stable")
    return every[order], np.concatenate(causes)[order], np.concatenate(places)[order]


def _first_launched(
    points_ns: NDArray[np.int64], begin_ns: NDArray[np.int64], launch_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index of the earliest launched event that starts at each point; unknown launches come last."""
    order = np.lexsort((np.where(launch_ns < 0, _NEVER, launch_ns), begin_ns))
    return order[np.searchsorted(begin_ns[order], points_ns)]
