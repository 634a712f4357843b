"""Blocked: times in which a host thread or stream waits, and what it waits for."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import different, union
from lightning_modelprof.analysis.timeline.names import AUTOGRAD_PREFIX
from lightning_modelprof.analysis.timeline.tally import rows_named
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.host_waits import copies_by_call
from lightning_modelprof.analysis.trace.launches import waits_for_device
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category

ROUNDING_NS: Final = 1_000
"""Timestamps of old traces are whole microseconds: an end this much after a start counts as before it."""

_QUEUE: Final = 64
"""Largest queue below which no launch ever waits for a place."""

_FULL: Final = 0.95
"""A queue is full at this share of the most launches ever queued..."""

_SLOW_LAUNCH: Final = 5
"""... if the launch also takes this many times as long as a quick one."""

_QUICK: Final = 10
"""Percentile of the launches that is quick; most of them may wait for a place."""

_LEAST_SLOW: Final = 5
"""Slow launches into a full queue; fewer are chance."""

_PAUSE_NS: Final = 20_000
"""On a helper thread, shorter gaps between events are its own work."""

_FREES: Final = ("cudaFree", "cudaFreeHost", "hipFree", "hipHostFree")
"""Calls that wait for the whole device before their own work."""

HOST: Final = (Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON_FUNCTION)


class Blocked(Record, frozen=True, kw_only=True, eq=False):
    """b times in which a host thread is blocked; some have length 0, as the awaited work was done already.

    Attributes:
        track: int64, shape (b,): the thread.
        begin_ns: int64, shape (b,): arrival of the thread.
        end_ns: int64, shape (b,): when it continues; the awaited work has ended.
        awaited: awaited device events by position among the trace's; empty when waiting for a thread.
        thread: int64, shape (b,): the other thread whose earlier work is awaited; -1 for device events.
        releases: (thread, time) at which a thread unblocks another one.
    """

    track: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    awaited: tuple[tuple[int, ...], ...]
    thread: NDArray[np.int64]
    releases: tuple[tuple[int, int], ...]


class Queues:
    """The device events of each stream in order, and their launches."""

    def __init__(self, timeline: Timeline) -> None:
        trace, launch = timeline.trace, timeline.launch
        work = trace.device
        self.begin_ns = trace.begin_ns[work.event]
        self.end_ns = trace.end_ns[work.event]
        self.caller = np.where(launch.runtime >= 0, launch.runtime, launch.operator)
        self.launch_ns = launch.begin_ns
        self.track = trace.track[work.event].astype(np.int64)
        self.members = {
            track: np.flatnonzero(self.track == track) for track in different(self.track).tolist()
        }
        # A stream works in launch order: the last event launched before a moment is the last of all.
        self._launched = {
            track: np.maximum.accumulate(self.launch_ns[members]) for track, members in self.members.items()
        }
        self._ended = {
            track: np.maximum.accumulate(self.end_ns[members]) for track, members in self.members.items()
        }

    def last(self, track: int, launched_before_ns: int, ended_by_ns: int) -> int:
        """The last event of a stream launched before one moment and ended by another, -1 for none."""
        place = min(
            int(np.searchsorted(self._launched[track], launched_before_ns)),
            int(np.searchsorted(self._ended[track], ended_by_ns + ROUNDING_NS, side="right")),
        )
        return int(self.members[track][place - 1]) if place else -1


class _Found:
    def __init__(self) -> None:
        self.times: list[tuple[int, int, int]] = []
        self.awaited: list[tuple[int, ...]] = []
        self.thread: list[int] = []
        self.releases: list[tuple[int, int]] = []

    def add(
        self, track: int, begin_ns: int, end_ns: int, awaited: tuple[int, ...] = (), thread: int = -1
    ) -> None:
        self.times.append((track, begin_ns, end_ns))
        self.awaited.append(awaited)
        self.thread.append(thread)

    def finish(self) -> Blocked:
        columns = np.array(self.times, np.int64).reshape(-1, 3)
        return Blocked(
            track=columns[:, 0],
            begin_ns=columns[:, 1],
            end_ns=columns[:, 2],
            awaited=tuple(self.awaited),
            thread=np.array(self.thread, np.int64),
            releases=tuple(self.releases),
        )


def find_blocked(timeline: Timeline, queues: Queues, main: int) -> Blocked:
    """Times that host threads wait for the device, for a place in its queue, or for each other."""
    found = _Found()
    _add_synchronizations(found, timeline, queues)
    _add_full_queues(found, timeline, queues)
    _add_hand_overs(found, timeline, queues, main)
    return found.finish()


def _add_synchronizations(found: _Found, timeline: Timeline, queues: Queues) -> None:
    """Calls that return when the device is done, and copies that make the host wait."""
    trace, launch = timeline.trace, timeline.launch
    calls = np.flatnonzero(trace.category == Category.RUNTIME)
    named = rows_named(trace, calls, lambda name: waits_for_device(name) or name in _FREES)
    copies = copies_by_call(timeline)
    member_of = dict(zip(launch.runtime.tolist(), range(len(launch.runtime)), strict=True))
    stream_of = _stream_of_synchronization(timeline)
    launches = _launches_by_thread(timeline, queues)
    syncs: list[tuple[int, tuple[int, ...], int]] = []
    for row in sorted({*named.tolist(), *(row for row, copy in copies.items() if copy.waits)}):
        begin_ns, end_ns = int(trace.begin_ns[row]), int(trace.end_ns[row])
        name, track = trace.name_of(row), int(trace.track[row])
        if row in member_of:
            # A copy: the host's part of it is work, after waiting for what was queued before or for the copy.
            awaited = _before_copy(
                queues, member_of[row], begin_ns, end_ns, is_staged=row in copies and copies[row].is_staged
            )
            done_ns = max((int(queues.end_ns[one]) for one in awaited), default=begin_ns)
            found.add(track, begin_ns, min(max(done_ns, begin_ns), end_ns), awaited)
            continue
        if "Device" in name or "Ctx" in name or name in _FREES or name == "urQueueFinish":
            awaited = tuple(
                one for stream in queues.members if (one := queues.last(stream, begin_ns, end_ns)) >= 0
            )
        else:
            awaited = _of_one_stream(
                queues, begin_ns, end_ns, stream_of.get(int(trace.correlation[row])), launches.get(track)
            )
        done_ns = min(max((int(queues.end_ns[one]) for one in awaited), default=begin_ns), end_ns)
        if name in _FREES:
            found.add(track, begin_ns, max(done_ns, begin_ns), awaited)
        else:
            syncs.append((row, awaited, end_ns - max(begin_ns, done_ns)))
    # The host's own part of a synchronization is the least that any call of its name took after the device.
    least: dict[int, int] = {}
    for row, _, rest_ns in syncs:
        name_id = int(trace.name[row])
        least[name_id] = min(least.get(name_id, rest_ns), rest_ns)
    for row, awaited, rest_ns in syncs:
        own_ns = min(rest_ns, least[int(trace.name[row])])
        found.add(int(trace.track[row]), int(trace.begin_ns[row]), int(trace.end_ns[row]) - own_ns, awaited)


def _before_copy(
    queues: Queues, member: int, begin_ns: int, end_ns: int, *, is_staged: bool
) -> tuple[int, ...]:
    """Event that a copying call waits for; a copy from unpinned memory waits for what is before it."""
    if not is_staged:
        return (member,) if queues.end_ns[member] <= end_ns + ROUNDING_NS else ()
    before = queues.last(int(queues.track[member]), begin_ns, end_ns)
    return (before,) if before >= 0 and before != member else ()


def _stream_of_synchronization(timeline: Timeline) -> dict[int, int]:
    """Track of the stream that each call waits for, by correlation, if the trace has it."""
    trace = timeline.trace
    rows = np.flatnonzero((trace.category == Category.DEVICE_SYNC) & (trace.correlation >= 0))
    return dict(zip(trace.correlation[rows].tolist(), trace.track[rows].tolist(), strict=True))


_Launches = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Times of a thread's launches, and the events that they launched."""


def _launches_by_thread(timeline: Timeline, queues: Queues) -> dict[int, _Launches]:
    trace = timeline.trace
    known = np.flatnonzero(queues.caller >= 0)
    track = trace.track[queues.caller[known]].astype(np.int64)
    order = np.lexsort((known, queues.launch_ns[known], track))
    known, track = known[order], track[order]
    ends = np.flatnonzero(np.diff(track)) + 1
    return {
        int(track[part[0]]): (queues.launch_ns[known[part]], known[part])
        for part in np.split(np.arange(len(known)), ends)
        if len(part)
    }


def _of_one_stream(
    queues: Queues, begin_ns: int, end_ns: int, stream: int | None, launches: _Launches | None
) -> tuple[int, ...]:
    """Last event of the awaited stream: the recorded stream, or the most likely one.

    That is the stream whose last event ended last during the call; if all had ended before, the one that the
    thread launched to last.
    """
    if stream is not None and stream in queues.members:
        last = queues.last(stream, begin_ns, end_ns)
        return (last,) if last >= 0 else ()
    lasts = [(int(queues.end_ns[one]), one) for one in _unfinished(queues, begin_ns, end_ns)]
    if lasts:
        return (max(lasts)[1],)
    if launches is None:
        return ()
    place = int(np.searchsorted(launches[0], begin_ns)) - 1
    if place < 0:
        return ()
    last = queues.last(int(queues.track[launches[1][place]]), begin_ns, end_ns)
    return (last,) if last >= 0 else ()


def _unfinished(queues: Queues, begin_ns: int, end_ns: int) -> list[int]:
    """The last event launched to each stream before a call, if it ended during the call."""
    found = []
    for stream in queues.members:
        last = queues.last(stream, begin_ns, np.iinfo(np.int64).max - ROUNDING_NS)
        if last >= 0 and begin_ns < queues.end_ns[last] <= end_ns + ROUNDING_NS:
            found.append(last)
    return found


def _add_full_queues(found: _Found, timeline: Timeline, queues: Queues) -> None:
    """Launches that wait for a place in the device's queue, if some had to."""
    trace = timeline.trace
    for device in different(trace.device.device).tolist():
        members = np.flatnonzero((trace.device.device == device) & (timeline.launch.runtime >= 0))
        members = members[np.argsort(queues.launch_ns[members], kind="stable")]
        if not len(members):
            continue
        call = timeline.launch.runtime[members]
        begin_ns, end_ns = trace.begin_ns[call], trace.end_ns[call]
        done_ns = np.sort(queues.end_ns[members])
        by_end = members[np.argsort(queues.end_ns[members], kind="stable")]
        num_done = np.searchsorted(done_ns, end_ns, side="right")
        queued = np.searchsorted(queues.launch_ns[members], end_ns, side="right") - num_done
        most = int(queued.max())
        if most < _QUEUE:
            continue
        usual_ns = int(np.percentile(end_ns - begin_ns, _QUICK))
        is_slow = (end_ns - begin_ns > _SLOW_LAUNCH * usual_ns) & (queued >= _FULL * most) & (num_done > 0)
        if int(is_slow.sum()) < _LEAST_SLOW:
            continue
        seen: set[int] = set()
        for place, row in enumerate(call.tolist()):
            if row in seen or (not is_slow[place] and place < most):
                continue
            seen.add(row)
            begin, end = int(begin_ns[place]), int(end_ns[place])
            awaited = int(by_end[num_done[place] - 1] if is_slow[place] else members[place - most])
            done = int(queues.end_ns[awaited])
            if done > end:
                continue
            until = max(begin, done)
            if is_slow[place]:
                until = end - min(end - until, usual_ns)
            found.add(int(trace.track[row]), begin, until, (awaited,))


def _add_hand_overs(found: _Found, timeline: Timeline, queues: Queues, main: int) -> None:
    """Waits between the steps' thread, autograd's threads and other launching threads.

    While autograd's thread works and nothing starts or ends on the steps' thread, the latter waits for it.
    Work of other launching threads is released by the steps' thread when it starts, and isn't awaited.
    """
    trace = timeline.trace
    on_host = trace.is_category(*HOST)
    rows = np.flatnonzero(on_host & (trace.track == main))
    changes = np.sort(np.concatenate((trace.begin_ns[rows], trace.end_ns[rows])), kind="stable")
    autograd = _autograd_tracks(timeline)
    launching = different(trace.track[queues.caller[queues.caller >= 0]]).tolist()
    is_work = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME)
    holes: dict[int, list[tuple[int, int, int]]] = {}
    for track in sorted({*launching, *autograd} - {main}):
        rows = np.flatnonzero(is_work & (trace.track == track))
        begins_ns, ends_ns = trace.begin_ns[rows], trace.end_ns[rows]
        hole = np.searchsorted(changes, begins_ns, side="right")
        bursts: list[tuple[int, int, int]] = []
        beside = np.ones(len(rows), np.bool_)
        if track in autograd and len(rows):
            starts = np.flatnonzero(np.diff(hole, prepend=-1))
            last_ns = np.maximum.reduceat(ends_ns, starts)
            until_ns = np.append(changes, np.iinfo(np.int64).max - ROUNDING_NS)[hole[starts]]
            is_inside = (
                (last_ns <= until_ns + ROUNDING_NS) & (hole[starts] > 0) & (hole[starts] < len(changes))
            )
            beside = ~np.repeat(is_inside, np.diff(starts, append=len(rows)))
            for start, last, until in zip(
                starts[is_inside].tolist(),
                last_ns[is_inside].tolist(),
                until_ns[is_inside].tolist(),
                strict=True,
            ):
                bursts.append((int(begins_ns[start]), min(last, until), int(hole[start])))
        pieces = union(begins_ns[beside], ends_ns[beside] + _PAUSE_NS)
        bursts += [(begin, end - _PAUSE_NS, 0) for begin, end in pieces.tolist()]
        reached = -1
        for burst_begin, end, number in sorted(bursts):
            begin = max(burst_begin, reached)
            if end < begin:
                continue
            found.add(track, reached, begin, thread=main)
            found.releases.append((main, begin))
            reached = end
            if number:
                holes.setdefault(number, []).append((begin, end, track))
        if reached >= 0:
            found.add(track, reached, np.iinfo(np.int64).max, thread=-1)
    for parts in holes.values():
        over_ns, last = max((end, track) for _, end, track in parts)
        found.add(main, min(begin for begin, _, _ in parts), over_ns, thread=last)


def _autograd_tracks(timeline: Timeline) -> frozenset[int]:
    """Threads with autograd nodes; before torch 1.10, recognized by the nodes' own names."""
    trace = timeline.trace
    nodes = trace.is_named(
        lambda name: name.startswith(AUTOGRAD_PREFIX) or "Backward" in name or "AccumulateGrad" in name
    )
    return frozenset(different(trace.track[nodes & (trace.category == Category.CPU_OP)]).tolist())


def find_stream_waits(timeline: Timeline, queues: Queues) -> tuple[tuple[int, int], ...]:
    """(event, awaited event) of streams that wait for other streams (``cudaStreamWaitEvent``).

    The awaited event is the last one launched to the other stream; of several streams, the one that ended
    last. The waiting event is the thread's next launch.
    """
    trace = timeline.trace
    calls = rows_named(
        trace, np.flatnonzero(trace.category == Category.RUNTIME), lambda name: "StreamWaitEvent" in name
    )
    launches = _launches_by_thread(timeline, queues)
    found = []
    if not len(calls):
        # Only launches were recorded: communication libraries wait for the stream that calls them.
        for times, members in launches.values():
            for place in np.flatnonzero(timeline.is_communication[trace.device.event[members]]).tolist():
                found += _awaited_by(queues, int(members[place]), int(times[place]))
        return tuple(found)
    for row in calls.tolist():
        of_thread = launches.get(int(trace.track[row]))
        if of_thread is None:
            continue
        place = int(np.searchsorted(of_thread[0], trace.begin_ns[row]))
        if place < len(of_thread[0]):
            found += _awaited_by(queues, int(of_thread[1][place]), int(trace.begin_ns[row]))
    return tuple(dict.fromkeys(found))


def _awaited_by(queues: Queues, member: int, launched_before_ns: int) -> list[tuple[int, int]]:
    """The last event of any other stream that was launched before and ended before ``member`` started."""
    begin_ns = int(queues.begin_ns[member])
    lasts = [
        (int(queues.end_ns[one]), one)
        for stream in queues.members
        if stream != queues.track[member] and (one := queues.last(stream, launched_before_ns, begin_ns)) >= 0
    ]
    return [(member, max(lasts)[1])] if lasts else []
