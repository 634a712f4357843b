"""Host waits: where the host waits for its device, what that costs, and other causes of device idle time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.pooling import InTurn, Key, Largest, pool
from lightning_modelprof.analysis.timeline.calls import (
    busy_ns,
    busy_time,
    clipped_ends,
    host_communication,
    innermost_at,
    nearest_around,
)
from lightning_modelprof.analysis.timeline.host_phases import Steps
from lightning_modelprof.analysis.timeline.intervals import (
    Intervals,
    different,
    intersect,
    is_among,
    length,
    locate,
    numbered,
    subtract,
    union,
)
from lightning_modelprof.analysis.timeline.names import (
    AUTOGRAD_PREFIX,
    LIGHTNING_PREFIX,
    is_shown_elsewhere,
    is_torch_range,
)
from lightning_modelprof.analysis.timeline.steps import StepBounds
from lightning_modelprof.analysis.timeline.tally import rows_named, sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.copies import memory_of
from lightning_modelprof.analysis.trace.idle import IdleTime, after_last_event, find_fetches, find_idle
from lightning_modelprof.analysis.trace.launches import waits_for_device
from lightning_modelprof.analysis.trace.operator_costs import callers_of, is_project_frame
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import RANGE_PREFIX, STEP_RANGE_PREFIX
from lightning_modelprof.trace.model import Category

MODEL_PHASES: Final = ("forward", "backward", "optimizer", "zero_grad", "clip")
"""Phases in which the host launches the model's work."""


NO_STEP_RANGES: Final = (
    "the trace has no steps (ProfilerStep ranges), so one-time waits at the start look like waits in"
    " every step"
)


ONE_STEP: Final = "the trace has one step, so one-time waits at the start look like waits in every step"


NO_WHOLE_STEP: Final = "the file is cut off and has no complete step"


NO_STEPS_TO_COMPARE: Final = (NO_STEP_RANGES, ONE_STEP, NO_WHOLE_STEP)
"""Reasons why traces have no steps to compare."""


_NO_STEP: Final = "the trace has no complete recorded step"


class HostWait(Record, frozen=True, kw_only=True):
    """All waits of one kind at one place, over the counted steps.

    Attributes:
        saves_ns: the waits' part of how much earlier the device would be done if no call waited; see
            :func:`stakes_of_waits`.
    """

    place: Key[WaitPlace]
    calls: int
    wait_ns: int
    saves_ns: int


WorkKind = Literal["operator", "runtime", "function", "python"]


class LateWork(Record, frozen=True, kw_only=True):
    """Host work during long idle times of the device without any launch.

    Attributes:
        kind: an operator, a runtime call, a Python function, or Python code without an event in the trace.
        name: for Python code, that of the range around it, "" without one.
        time_ns: its part of these idle times, over the counted steps.
        caller: the user's function that calls a library's function; else "".
    """

    kind: Key[WorkKind]
    name: Key[str]
    time_ns: int
    caller: Key[str] = ""


class HostWaits(Record, frozen=True, kw_only=True):
    """Effect of the host on the device of one rank, or of several ranks together.

    Of several devices in one process, it's the one that is busy longest. Idle time counts for the step that
    contains it, between device-aware bounds. Times are sums over the steps; ``fetch_ns``,
    ``communication_ns``, ``saves_ns`` and ``late_ns`` never overlap and sum to no more than ``idle_ns``.

    Attributes:
        num_steps: counted steps: those that directly follow a recorded step, since the host's work before any
            other is unknown; if there are none, all steps.
        idle_ns: time in them without any device event.
        fetch_ns: part of it in which the launching thread waited for its next batch with an empty queue.
        saves_ns: part of the rest that would be saved if no call waited.
        late_ns: remaining idle time with an empty queue: the host was late.
        launch_ns: part of that in the phases that launch the model's work; all of it if the trace doesn't
            have this package's phases.
        longest_launch_ns: the longest stretch of that; 0 without any.
        num_kernels: kernels that started in the steps, on all devices.
        waits: largest saving first, then longest first.
        late_work: host work in the longer stretches of ``launch_ns``, longest first; empty if these aren't
            most of it.
        communication_ns: idle time in which the launching thread communicated with an empty queue.
        saves_by_step_ns: possible saving in each step that has a length, including those that don't count.
    """

    num_steps: int
    steps_ns: int
    idle_ns: int
    fetch_ns: int
    late_ns: int
    launch_ns: int
    longest_launch_ns: Largest[int]
    num_kernels: int
    waits: tuple[HostWait, ...]
    late_work: tuple[LateWork, ...] = ()
    communication_ns: int = 0
    saves_by_step_ns: InTurn[int] = ()

    @property
    def saves_ns(self) -> int:
        return sum(wait.saves_ns for wait in self.waits)


class _IdlePieces(Record, frozen=True, kw_only=True, eq=False):
    """Idle time with an empty queue, split at step bounds: k pieces, in order of launch.

    Attributes:
        intervals: shape (k, 2).
        step: number of each piece's step, shape (k,).
        launch_ns: launch of the event that ends the idle time, shape (k,).
        fetch_ns: time of each piece in which the launching thread waited for a batch, shape (k,).
        communication_ns: time of each piece in which it communicated, shape (k,).
        track: that thread, shape (k,).
    """

    intervals: NDArray[np.int64]
    step: NDArray[np.int64]
    launch_ns: NDArray[np.int64]
    fetch_ns: NDArray[np.int64]
    communication_ns: NDArray[np.int64]
    track: NDArray[np.int32]

    @property
    def late_ns(self) -> NDArray[np.int64]:
        """Time without fetches and communication, shape (k,)."""
        length_ns = self.intervals[:, 1] - self.intervals[:, 0]
        rest: NDArray[np.int64] = length_ns - self.fetch_ns - self.communication_ns
        return rest

    def followed_by(self, others: _IdlePieces) -> _IdlePieces:
        return _IdlePieces(
            **{
                key: np.concatenate((getattr(self, key), getattr(others, key)))
                for key in self.__struct_fields__
            }
        )


def summarize_host_waits(timeline: Timeline) -> HostWaits:
    steps, bounds = timeline.steps, timeline.bounds
    if steps is None and timeline.cut_steps:
        raise NotMeasured(NO_WHOLE_STEP)
    if not timeline.has_device:
        raise NotMeasured(NO_DEVICE)
    if steps is None or bounds is None or not len(bounds.intervals):
        raise NotMeasured(_NO_STEP)
    if not steps.has_ranges:
        raise NotMeasured(NO_STEP_RANGES)
    counted = _counted_steps(bounds)
    if not len(counted):
        raise NotMeasured(_NO_STEP)
    if not steps.are_numbered and len(bounds.intervals) == 1:
        raise NotMeasured(ONE_STEP)
    return _summarize(timeline, steps, bounds, counted)


def _summarize(timeline: Timeline, steps: Steps, bounds: StepBounds, counted: Intervals) -> HostWaits:
    trace = timeline.trace
    host_steps = steps.intervals[: len(bounds.numbers)]
    waits = find_waits(timeline, host_steps, steps.track)
    places = places_of(timeline, waits)
    step_of_wait = locate(trace.begin_ns[waits.row], host_steps)
    is_counted_step = is_among(bounds.intervals[:, 0], counted[:, 0]) & _has_length(bounds.intervals)
    in_counted = is_counted_step[step_of_wait]
    device, busy = _busiest_device(timeline, bounds.stretches)
    idle = find_idle(timeline, device, find_fetches(timeline))
    before_end, at_end = _idle_pieces(timeline, bounds, idle), _pieces_at_end(timeline, bounds, idle)
    pieces = before_end.followed_by(at_end)
    ended = len((pieces if len(bounds.intervals) > 1 else before_end).step)
    wait, piece, time_ns = stakes_of_waits(
        wait_end_ns=trace.end_ns[waits.row],
        wait_ns=_usual(places, waits.effective_ns, in_counted),
        wait_step=np.array(bounds.numbers, np.int64)[step_of_wait],
        launch_ns=pieces.launch_ns[:ended],
        gap_ns=pieces.late_ns[:ended],
        gap_step=pieces.step[:ended],
    )
    filled = bounds.intervals[_has_length(bounds.intervals)]
    step_of_piece = locate(pieces.intervals[:, 0], filled)
    in_counted_piece = _counts(pieces, counted)[piece]
    saves_ns = sum_by(wait[in_counted_piece], time_ns[in_counted_piece], len(places))
    left_ns = pieces.late_ns - sum_by(piece, time_ns, len(pieces.step))
    counts = _counts(pieces, counted)
    launch_ns = np.minimum(left_ns, _in_model_phases(timeline, pieces.intervals))
    is_long = counts & (launch_ns >= _LONG_NS)
    long_ns = int(launch_ns[is_long].sum())
    is_long_most = long_ns > MOSTLY * launch_ns[counts].sum()
    kernels = trace.category == Category.KERNEL
    return HostWaits(
        num_steps=len(counted),
        steps_ns=length(counted),
        idle_ns=length(subtract(counted, busy)),
        fetch_ns=int(pieces.fetch_ns[counts].sum()),
        communication_ns=int(pieces.communication_ns[counts].sum()),
        late_ns=int(left_ns[counts].sum()),
        launch_ns=int(launch_ns[counts].sum()),
        longest_launch_ns=int(launch_ns[counts].max(initial=0)),
        num_kernels=int((locate(trace.begin_ns[kernels], counted) >= 0).sum()),
        waits=_by_place(
            places,
            in_counted,
            trace.duration_ns[waits.row],
            saves_ns,
        ),
        late_work=_late_work(timeline, pieces, np.flatnonzero(is_long), long_ns) if is_long_most else (),
        saves_by_step_ns=tuple(sum_by(step_of_piece[piece], time_ns, len(filled)).tolist()),
    )


def _counts(pieces: _IdlePieces, counted: Intervals) -> NDArray[np.bool_]:
    return locate(pieces.intervals[:, 0], counted) >= 0


_LONG_NS: Final = 500_000
"""A host that launches continuously never takes this long between launches."""


MOSTLY: Final = 0.5
"""Share of the late time from which the host's other work is reported."""


_MOST_WORK: Final = 10


_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
"""An object's address in a Python function's name, which may differ in every step."""


def _is_of_launches(name: str) -> bool:
    return "Launch" in name or waits_for_device(name)


def _late_work(
    timeline: Timeline, pieces: _IdlePieces, chosen: NDArray[np.intp], most_ns: int
) -> tuple[LateWork, ...]:
    """Innermost host work of the launching thread in some pieces, without fetches, launches and waits.

    Args:
        most_ns: part of the pieces' time that isn't due to anything else.
    """
    trace = timeline.trace
    fetches, phases = find_fetches(timeline), _model_phases(timeline)
    on_host = trace.is_category(*_ON_HOST)
    ends_ns = clipped_ends(timeline)
    rows, times_ns = [], []
    for track in different(pieces.track[chosen]).tolist():
        mine = pieces.intervals[chosen[pieces.track[chosen] == track]]
        on_thread = on_host & (trace.track == track)
        own = np.flatnonzero(on_thread)
        fetching = fetches[trace.track[fetches] == track]
        late = subtract(
            union(mine[:, 0], mine[:, 1]), union(trace.begin_ns[fetching], trace.end_ns[fetching])
        )
        late = late if phases is None else intersect(late, phases)
        changes = np.concatenate((trace.begin_ns[own], ends_ns[own]))
        times = different(np.concatenate((changes[locate(changes, late) >= 0], late.ravel())))
        slices = np.stack((times[:-1], times[1:]), axis=1)
        slices = slices[locate(slices[:, 0], late) >= 0]
        rows.append(innermost_at(timeline, np.full(len(slices), track), slices[:, 0], on_thread, ends_ns))
        times_ns.append(slices[:, 1] - slices[:, 0])
    row, time_ns = np.concatenate(rows), np.concatenate(times_ns)
    communicates = np.zeros(len(trace), np.bool_)
    communicates[host_communication(timeline)] = True
    is_late = nearest_around(timeline, row, communicates, or_itself=True) < 0
    row, time_ns = row[is_late], time_ns[is_late]
    kind = np.where(timeline.is_annotation[row], _PYTHON, _KIND_OF_CATEGORY[trace.category[row]])
    names = ("", *(_ADDRESS.sub("", name) for name in trace.names))
    key = np.where(row < 0, _PYTHON, (trace.name[row].astype(np.int64) + 1) * len(_KINDS) + kind)
    found, place = numbered(key * len(names) + _callers(timeline, row))
    total_ns = sum_by(place, time_ns, len(found))
    work: Counter[tuple[WorkKind, str, str]] = Counter()
    functions: dict[str, Counter[str]] = {}
    for one, total in zip(found.tolist(), total_ns.tolist(), strict=True):
        of_event, caller = divmod(one, len(names))
        name, number = names[of_event // len(_KINDS)], of_event % len(_KINDS)
        if number == _PYTHON and name.startswith(STEP_RANGE_PREFIX):
            work["python", "", ""] += total
        elif not _is_of_launches(name) and caller:
            functions.setdefault(names[caller], Counter())[name] += total
        elif not _is_of_launches(name):
            work[_KINDS[number], name.removeprefix(RANGE_PREFIX), ""] += total
    for caller_name, called in functions.items():
        rest_ns = called.total()
        (name, total), *_ = called.most_common(1)
        if name != caller_name and total >= MOSTLY * rest_ns:  # a lock, say
            work["function", name, caller_name] += total
            rest_ns -= total
        work["function", caller_name, ""] += rest_ns
    return tuple(
        LateWork(kind=kind, name=name, caller=caller, time_ns=min(time_ns, most_ns))
        for (kind, name, caller), time_ns in work.most_common(_MOST_WORK)
        if time_ns
    )


def _callers(timeline: Timeline, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Name id + 1 of the user's function that a Python function is or is called from; 0 for none."""
    trace = timeline.trace
    functions = np.flatnonzero(trace.category == Category.PYTHON_FUNCTION)
    is_users = np.zeros(len(trace), np.bool_)
    is_users[rows_named(trace, functions, is_project_frame)] = True
    is_function = (rows >= 0) & (trace.category[rows] == Category.PYTHON_FUNCTION)
    caller = nearest_around(timeline, np.where(is_function, rows, -1), is_users, or_itself=True)
    return np.where(caller < 0, 0, trace.name[caller].astype(np.int64) + 1)


_ON_HOST: Final = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.PYTHON_FUNCTION,
)


_KINDS: Final[tuple[WorkKind, ...]] = get_args(WorkKind)
_OPERATOR, _RUNTIME, _FUNCTION, _PYTHON = range(len(_KINDS))


_KIND_OF_CATEGORY: Final = np.full(256, _OPERATOR)
_KIND_OF_CATEGORY[[Category.RUNTIME, Category.PYTHON_FUNCTION]] = _RUNTIME, _FUNCTION


def pool_host_waits(ranks: Sequence[HostWaits]) -> HostWaits:
    """Pool at least one rank or window."""
    whole = pool(ranks)
    work = sorted(whole.late_work, key=lambda one: -one.time_ns)
    return replace(whole, waits=_sorted(whole.waits), late_work=tuple(work[:_MOST_WORK]))


def _counted_steps(bounds: StepBounds) -> Intervals:
    """Steps directly after a recorded step; without any, all steps."""
    steps = bounds.intervals
    numbers = np.array(bounds.numbers, np.int64)
    begins_stretch = is_among(steps[:, 0], bounds.stretches[:, 0])
    follows = np.append(False, (np.diff(numbers) == 1)) & ~begins_stretch
    chosen = steps[follows] if follows.any() else steps
    return chosen[_has_length(chosen)]


def _has_length(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    has_length: NDArray[np.bool_] = steps[:, 0] < steps[:, 1]
    return has_length


def _usual(
    places: Sequence[WaitPlace], wait_ns: NDArray[np.int64], in_counted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Time of each wait; outside the counted steps, at most the longest at the same place inside them.

    One-time waits at the start of a recording aren't part of a step's cost.
    """
    longest: dict[WaitPlace, int] = {}
    for place, time, counts in zip(places, wait_ns.tolist(), in_counted.tolist(), strict=True):
        if counts:
            longest[place] = max(longest.get(place, 0), time)
    most = np.array([longest.get(place, 0) for place in places], np.int64)
    return np.minimum(wait_ns, most)


def _busiest_device(timeline: Timeline, covered: Intervals) -> tuple[int, Intervals]:
    numbers = different(timeline.trace.device.device).tolist()
    busiest = max(numbers, key=lambda number: busy_ns(timeline, number, covered))
    return busiest, busy_time(timeline, busiest)


def _idle_pieces(timeline: Timeline, bounds: StepBounds, idle: IdleTime) -> _IdlePieces:
    """Pieces, inside steps, of a device's gaps with an empty queue."""
    gaps = idle.gaps
    late = gaps.is_host_wait
    ends_ns, launcher = gaps.launch_ns[late], gaps.launcher[late]
    return _cut_at_steps(timeline, bounds, idle, gaps.intervals[late], ends_ns=ends_ns, launcher=launcher)


def _pieces_at_end(timeline: Timeline, bounds: StepBounds, idle: IdleTime) -> _IdlePieces:
    """Pieces after the device's last event, as if the next work were launched at their end.

    That is so after each earlier step. After a single step, it's unknown whether work follows that could have
    started earlier, so no wait is blamed for this time.
    """
    after, launcher = after_last_event(timeline, idle.device)
    after = after[: len(after) if launcher >= 0 else 0]
    launchers = np.full(len(after), launcher)
    return _cut_at_steps(timeline, bounds, idle, after, ends_ns=after[:, 1], launcher=launchers)


def _cut_at_steps(
    timeline: Timeline,
    bounds: StepBounds,
    idle: IdleTime,
    late: Intervals,
    *,
    ends_ns: NDArray[np.int64],
    launcher: NDArray[np.int64],
) -> _IdlePieces:
    filled = np.flatnonzero(_has_length(bounds.intervals))
    steps = bounds.intervals[filled]
    pieces = intersect(late, steps)
    gap = locate(pieces[:, 0], late)
    step = np.array(bounds.numbers, np.int64)[filled[locate(pieces[:, 0], steps)]]
    order = np.argsort(ends_ns[gap], kind="stable")
    return _IdlePieces(
        intervals=pieces[order],
        step=step[order],
        launch_ns=ends_ns[gap][order],
        fetch_ns=idle.time_of("data loading", pieces)[order],
        communication_ns=idle.time_of("communication", pieces)[order],
        track=timeline.trace.track[launcher[gap]][order],
    )


def _in_model_phases(timeline: Timeline, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Time of each piece in which the steps' thread is in the model's phases, shape (k,).

    All of it if the trace doesn't have this package's phases.
    """
    phases = _model_phases(timeline)
    if phases is None:
        return pieces[:, 1] - pieces[:, 0]
    order = np.argsort(pieces[:, 0])
    in_order = pieces[order]
    shared = intersect(in_order, phases)
    inside_ns = np.zeros(len(pieces), np.int64)
    np.add.at(inside_ns, order[locate(shared[:, 0], in_order)], shared[:, 1] - shared[:, 0])
    return inside_ns


def _model_phases(timeline: Timeline) -> Intervals | None:
    """Times in which the steps' thread launches the model's work; ``None`` without this package's phases."""
    host_time = timeline.host_time
    if host_time is None or host_time.source != "modelprof ranges":
        return None
    chosen = host_time.pieces[np.isin(host_time.phase[host_time.call], MODEL_PHASES)]
    return union(chosen[:, 0], chosen[:, 1])


def _by_place(
    places: Sequence[WaitPlace],
    is_counted: NDArray[np.bool_],
    wait_ns: NDArray[np.int64],
    saves_ns: NDArray[np.int64],
) -> tuple[HostWait, ...]:
    sums: dict[WaitPlace, list[int]] = {}
    for place, counts, waited, saving in zip(
        places, is_counted.tolist(), wait_ns.tolist(), saves_ns.tolist(), strict=True
    ):
        if counts or saving:
            total = sums.setdefault(place, [0, 0, 0])
            total[0] += counts
            total[1] += waited if counts else 0
            total[2] += saving
    return _sorted(
        HostWait(place=place, calls=calls, wait_ns=waited, saves_ns=saving)
        for place, (calls, waited, saving) in sums.items()
    )


def _sorted(waits: Iterable[HostWait]) -> tuple[HostWait, ...]:
    return tuple(sorted(waits, key=lambda wait: (-wait.saves_ns, -wait.wait_ns, wait.place)))


Direction = Literal["sync", "device_to_host", "host_to_device"]
"""What a call waits for: a copy from or to the host, or just the device."""


DIRECTIONS: Final[tuple[Direction, ...]] = ("sync", "device_to_host", "host_to_device")


_SYNC, _TO_HOST, _TO_DEVICE = range(3)


class WaitRows(Record, frozen=True, kw_only=True, eq=False):
    """The k waiting calls in the steps, in order of their ends.

    Attributes:
        row: row in the trace, shape (k,).
        operator: row of the innermost operator around each, -1 without one, shape (k,).
        direction: index into ``DIRECTIONS``, shape (k,).
        memory: host memory of the copy, as in ``memory_of``; "" if unknown.
        effective_ns: time of each that no earlier one covers, shape (k,); 0 on threads that launch no
            kernels, since a wait there delays no launch.
    """

    row: NDArray[np.int64]
    operator: NDArray[np.int64]
    direction: NDArray[np.int64]
    memory: tuple[str, ...]
    effective_ns: NDArray[np.int64]


def find_waits(timeline: Timeline, steps: Intervals, track: int) -> WaitRows:
    """Find calls that start in the steps and return only when the device has done something.

    These are calls recognized by name (see :func:`waits_for_device`); asynchronous copies from pageable
    memory to the device, which the host prepares itself after the work before them is done; and asynchronous
    copies from or to unpinned memory that return only after the copy has ended. A call inside another waiting
    one isn't counted again. A synchronization in the same operator as a copy (``.item()``, ``.cpu()``,
    ``.to(device)``) waits for that copy.

    Source: "API synchronization behavior" in the CUDA runtime manual.

    Args:
        steps: on the host.
    """
    trace = timeline.trace
    copies = copies_by_call(timeline)
    named = rows_named(trace, np.flatnonzero(trace.category == Category.RUNTIME), waits_for_device)
    waiting = np.array([row for row, copy in copies.items() if copy.waits], np.int64)
    rows = different(np.concatenate((named, waiting)))
    rows = rows[locate(trace.begin_ns[rows], steps) >= 0]
    is_wait = np.zeros(len(trace), np.bool_)
    is_wait[rows] = True
    rows = rows[nearest_around(timeline, rows, is_wait) < 0]
    rows = rows[np.argsort(trace.end_ns[rows], kind="stable")]
    operator = nearest_around(timeline, rows, timeline.is_operator)
    # Of several copies in one operator, a call waits for the last one before it.
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


class HostCopy(Record, frozen=True):
    """A copy between host and device; ``operator`` is a row, ``waits`` is whether the host waits for it."""

    operator: int
    direction: int
    memory: str
    waits: bool

    @property
    def is_staged(self) -> bool:
        """Whether the host itself prepares it for the device, after the work queued before it."""
        return self.direction == _TO_DEVICE and self.memory != "pinned"


def copies_by_call(timeline: Timeline) -> dict[int, HostCopy]:
    """Copies between host and device by the row of their launching call."""
    trace, launch = timeline.trace, timeline.launch
    work = trace.device.event
    found: dict[int, HostCopy] = {}
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
        found[call] = HostCopy(
            operator=int(launch.operator[member]),
            direction=direction,
            memory=memory or "",
            waits=is_staged or bool(has_ended),
        )
    return found


def _direction(name: str) -> int:
    lower = name.lower()
    if "dtoh" in lower or "devicetohost" in lower:
        return _TO_HOST
    return _TO_DEVICE if "htod" in lower or "hosttodevice" in lower else _SYNC


def _effective(timeline: Timeline, rows: NDArray[np.int64], track: int) -> NDArray[np.int64]:
    trace, launch = timeline.trace, timeline.launch
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    launchers = launch.runtime[is_kernel & (launch.runtime >= 0)]
    launching = np.isin(trace.track[rows], np.append(trace.track[launchers], track))
    begin_ns, end_ns = trace.begin_ns[rows], trace.end_ns[rows]
    reached = np.maximum.accumulate(np.append(0, np.where(launching, end_ns, 0)))[:-1]
    return np.where(launching, np.maximum(end_ns - np.maximum(begin_ns, reached), 0), 0)


class WaitPlace(Record, frozen=True, kw_only=True, order=True):
    """What waits, and where; texts are "" if unknown or missing.

    Attributes:
        memory: host memory of the awaited copy: ``pageable`` or ``pinned``.
        operators: operators around the call, innermost first, without autograd's: for ``loss.item()`` they
            are ``aten::_local_scalar_dense`` and ``aten::item``.
        call: name of the runtime function.
        phase: phase key on the steps' thread.
        annotation: the user's innermost range around it on its thread, or else Lightning's.
        function: the innermost function outside torch and Lightning, as named in a trace with stacks:
            ``train.py(12): training_step``, where 12 is the first line of the function.
    """

    kind: Direction
    memory: str = ""
    operators: tuple[str, ...] = ()
    call: str = ""
    phase: str = ""
    annotation: str = ""
    function: str = ""


def places_of(timeline: Timeline, waits: WaitRows) -> list[WaitPlace]:
    trace, rows = timeline.trace, waits.row
    phases, annotations, functions = (
        _phases(timeline, rows),
        _annotations(timeline, rows),
        _functions(timeline, waits),
    )
    return [
        WaitPlace(
            kind=DIRECTIONS[waits.direction[index]],
            memory=waits.memory[index],
            operators=_operators(timeline, int(waits.operator[index])),
            call=trace.name_of(int(row)),
            phase=phases[index],
            annotation=annotations[index],
            function=functions[index],
        )
        for index, row in enumerate(rows.tolist())
    ]


def _operators(timeline: Timeline, row: int) -> tuple[str, ...]:
    names = []
    while row >= 0:
        name = timeline.trace.name_of(row)
        if (
            timeline.is_operator[row]
            and "::" in name
            and not name.startswith((AUTOGRAD_PREFIX, "torch::autograd"))
        ):
            names.append(name)
        row = int(timeline.parent[row])
    return tuple(names)


def _phases(timeline: Timeline, rows: NDArray[np.int64]) -> list[str]:
    host_time = timeline.host_time
    if host_time is None or not len(host_time.pieces):
        return [""] * len(rows)
    piece = locate(timeline.trace.begin_ns[rows], host_time.pieces)
    return ["" if index < 0 else str(host_time.phase[host_time.call[index]]) for index in piece.tolist()]


def _annotations(timeline: Timeline, rows: NDArray[np.int64]) -> list[str]:
    trace = timeline.trace
    ranges = np.flatnonzero(timeline.is_annotation & ~timeline.is_step_range)
    users = rows_named(trace, ranges, _is_users)
    lightnings = rows_named(trace, ranges, lambda name: name.startswith(LIGHTNING_PREFIX))
    found = np.full(len(rows), -1, np.int64)
    for chosen in (users, lightnings):
        wanted = np.zeros(len(trace), np.bool_)
        wanted[chosen] = True
        found = np.where(found >= 0, found, nearest_around(timeline, rows, wanted))
    return ["" if row < 0 else trace.name_of(row) for row in found.tolist()]


def _is_users(name: str) -> bool:
    return not is_shown_elsewhere(name) and not is_torch_range(name)


def _functions(timeline: Timeline, waits: WaitRows) -> list[str]:
    # Torch 1 wrote stacks into operators, not into runtime calls.
    callers = callers_of(timeline, np.where(waits.operator >= 0, waits.operator, waits.row))
    if callers is None:
        return [""] * len(waits.row)
    names, index = callers
    return ["" if one < 0 else names[one] for one in index.tolist()]


def stakes_of_waits(
    *,
    wait_end_ns: NDArray[np.int64],
    wait_ns: NDArray[np.int64],
    wait_step: NDArray[np.int64],
    launch_ns: NDArray[np.int64],
    gap_ns: NDArray[np.int64],
    gap_step: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Attribute each device gap to the host's earlier waits.

    Derivation. Let W(k) be the total time that the host waited before it launched event k. Without waits it
    would have launched that event W(k) earlier. An event starts when the one before it is done and it has
    been launched. If the device was idle for gap(k) before it because it was launched late, it could start
    earlier by S(k) = min(S(k - 1) + gap(k), W(k)): by as much as the work before it is done earlier, plus the
    gap, but no more than its launch comes earlier. If there was no such gap, S(k) = S(k - 1). So each gap
    recovers the smaller of its length and W - S, the waits not recovered yet. A gap is attributed to the
    latest such waits: they caused it, and those before them only lengthen it. The part of a wait that isn't
    recovered by the end of the next step is forgotten: a host can't be further ahead for long, and if each
    step waits, the next one has its own.

    Caveats:
        This holds for one host thread at a time and for one device that works in launch order. All waits are
        removed together: of two in a row, the first of which waits for the device, removing the first alone
        only makes the second wait. Other waits of the host, the capacity of a queue, and values that are
        needed immediately aren't considered: it's the most that can be saved.

    Args:
        wait_end_ns: end of each wait, shape (w,), sorted.
        wait_ns: length of each wait that no other wait covers, shape (w,).
        wait_step: number of the step of each wait, shape (w,), sorted.
        launch_ns: launch of the event that ends each gap, shape (g,), sorted.
        gap_ns: length of each gap, shape (g,).
        gap_step: number of the step of each gap, shape (g,).

    Returns:
        Index of the wait, index of the gap and time, one entry per pair that shares time.
    """
    waits: list[int] = []
    gaps: list[int] = []
    times: list[int] = []
    left: list[tuple[int, int]] = []  # waits with time to recover, latest last
    ends, lengths = wait_end_ns.tolist(), wait_ns.tolist()
    following = 0
    steps = wait_step.tolist()
    for gap, (launched, idle, step) in enumerate(
        zip(launch_ns.tolist(), gap_ns.tolist(), gap_step.tolist(), strict=True)
    ):
        while following < len(ends) and ends[following] <= launched:
            left.append((following, lengths[following]))
            following += 1
        rest = idle
        while rest > 0 and left:
            wait, available = left.pop()
            if steps[wait] < step - 1:
                left.clear()  # those before it are even older
                break
            time = min(rest, available)
            rest -= time
            if time:
                waits.append(wait)
                gaps.append(gap)
                times.append(time)
            if time < available:
                left.append((wait, available - time))
    return np.array(waits, np.int64), np.array(gaps, np.int64), np.array(times, np.int64)
