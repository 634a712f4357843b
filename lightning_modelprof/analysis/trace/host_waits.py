"""Host waits: where the host waits for its device, what that costs, and what else keeps the device idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.absent import NO_DEVICE, Absent
from lightning_modelprof.analysis.busy import busy_ns, busy_time
from lightning_modelprof.analysis.timeline.host_phases import Steps
from lightning_modelprof.analysis.timeline.intervals import (
    Intervals,
    intersect,
    length,
    locate,
    subtract,
    union,
)
from lightning_modelprof.analysis.timeline.steps import StepBounds
from lightning_modelprof.analysis.timeline.tally import sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.idle import fetch_time, find_fetches, find_gaps
from lightning_modelprof.analysis.wait_places import WaitPlace, places_of
from lightning_modelprof.analysis.wait_rows import find_waits
from lightning_modelprof.analysis.wait_stakes import stakes_of_waits
from lightning_modelprof.trace.model import Category

MODEL_PHASES: Final = ("forward", "backward", "optimizer", "zero_grad", "clip")
"""In which the host launches the model's work."""

NO_STEP_RANGES: Final = Absent(
    "the trace has no steps (ProfilerStep ranges), so what happens once, at the start, cannot be told from"
    " what happens in each of them"
)
ONE_STEP: Final = Absent(
    "the trace has one step, so what happens once, at its start, cannot be told from what happens in each"
)
NO_STEPS_TO_COMPARE: Final = (NO_STEP_RANGES, ONE_STEP)
"""Why nothing is said of steps, whatever is in them."""
_NO_STEP: Final = Absent("the trace holds none of the recorded steps to their end")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """All waits of one kind at one place, over the steps that count.

    Attributes:
        place: what waits, and where.
        calls: how many.
        wait_ns: time of the host in them.
        stake_ns: how much earlier the device would be done if no call waited, as far as it is due to these;
            see :func:`stakes_of_waits`.
    """

    place: WaitPlace
    calls: int
    wait_ns: int
    stake_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWaits:
    """What the host does to the device of one rank, or of several ranks together.

    Of several devices in one process it is the one that is busy longest. Idle time is counted in the step
    in which it lies, between device-aware bounds. Times are sums over the steps; ``fetch_ns``, ``stake_ns``
    and ``late_ns`` never overlap and sum to no more than ``idle_ns``.

    Attributes:
        covered_ns: all recorded steps; see :mod:`~lightning_modelprof.analysis.busy`.
        covered_idle_ns: time in them in which the device is idle.
        num_steps: the steps that count: those that follow directly on a recorded step, since what the
            host did before any other is not known; where there is none such, all.
        steps_ns: their length.
        idle_ns: time in them without any event of the device.
        fetch_ns: that of it in which the launching thread waited for its next batch, nothing being queued.
        stake_ns: what would be saved of the rest if no call waited.
        late_ns: what is left of the idle time in which nothing was queued: the host was late.
        launch_ns: that of it in the phases in which the model's work is launched; all of it if the trace
            does not have this package's phases.
        longest_launch_ns: the longest stretch of that; 0 without any.
        num_kernels: kernels that began in the steps, on all devices.
        waits: most at stake first, then longest first.
    """

    covered_ns: int
    covered_idle_ns: int
    num_steps: int
    steps_ns: int
    idle_ns: int
    fetch_ns: int
    late_ns: int
    launch_ns: int
    longest_launch_ns: int
    num_kernels: int
    waits: tuple[HostWait, ...]

    @property
    def stake_ns(self) -> int:
        """Of all waits together."""
        return sum(wait.stake_ns for wait in self.waits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _IdlePieces:
    """Idle time for which nothing was queued, cut at the bounds of steps: k pieces, in order of launch.

    Attributes:
        intervals: shape (k, 2).
        step: number of the step that each is in, shape (k,).
        launch_ns: launch of what ends the idle time, shape (k,).
        fetch_ns: time of each in which the launching thread waited for a batch, shape (k,).
    """

    intervals: NDArray[np.int64]
    step: NDArray[np.int64]
    launch_ns: NDArray[np.int64]
    fetch_ns: NDArray[np.int64]

    @property
    def late_ns(self) -> NDArray[np.int64]:
        """Without the fetches, shape (k,)."""
        rest: NDArray[np.int64] = self.intervals[:, 1] - self.intervals[:, 0] - self.fetch_ns
        return rest


def summarize_host_waits(timeline: Timeline) -> HostWaits | Absent:
    """Where the host waits for its device in the steps, and what that costs."""
    steps, bounds = timeline.steps, timeline.bounds
    if not timeline.has_device:
        return NO_DEVICE
    if steps is None or bounds is None or not len(bounds.intervals):
        return _NO_STEP
    if not steps.has_ranges:
        return NO_STEP_RANGES
    counted = _counted_steps(bounds)
    if not len(counted):
        return _NO_STEP
    if not steps.are_numbered and len(bounds.intervals) == 1:
        return ONE_STEP
    return _summarize(timeline, steps, bounds, counted)


def _summarize(timeline: Timeline, steps: Steps, bounds: StepBounds, counted: Intervals) -> HostWaits:
    trace = timeline.trace
    host_steps = steps.intervals[: len(bounds.numbers)]
    waits = find_waits(timeline, host_steps, steps.track)
    places = places_of(timeline, waits)
    step_of_wait = locate(trace.begin_ns[waits.row], host_steps)
    is_counted_step = np.isin(bounds.intervals[:, 0], counted[:, 0]) & _has_length(bounds.intervals)
    in_counted = is_counted_step[step_of_wait]
    covered = bounds.stretches
    device, busy = _busiest_device(timeline, covered)
    pieces = _idle_pieces(timeline, bounds, device)
    wait, piece, time_ns = stakes_of_waits(
        wait_end_ns=trace.end_ns[waits.row],
        wait_ns=_usual(places, waits.effective_ns, in_counted),
        wait_step=np.array(bounds.numbers, np.int64)[step_of_wait],
        launch_ns=pieces.launch_ns,
        gap_ns=pieces.late_ns,
        gap_step=pieces.step,
    )
    counts = locate(pieces.intervals[:, 0], counted) >= 0
    left_ns = pieces.late_ns - sum_by(piece, time_ns, len(pieces.step))
    launch_ns = np.minimum(left_ns, _in_model_phases(timeline, pieces.intervals))
    kernels = trace.category == Category.KERNEL
    return HostWaits(
        covered_ns=length(covered),
        covered_idle_ns=length(subtract(covered, busy)),
        num_steps=len(counted),
        steps_ns=length(counted),
        idle_ns=length(subtract(counted, busy)),
        fetch_ns=int(pieces.fetch_ns[counts].sum()),
        late_ns=int(left_ns[counts].sum()),
        launch_ns=int(launch_ns[counts].sum()),
        longest_launch_ns=int(launch_ns[counts].max(initial=0)),
        num_kernels=int((locate(trace.begin_ns[kernels], counted) >= 0).sum()),
        waits=_by_place(
            places,
            in_counted,
            trace.duration_ns[waits.row],
            sum_by(wait[counts[piece]], time_ns[counts[piece]], len(places)),
        ),
    )


def pool_host_waits(ranks: Sequence[HostWaits]) -> HostWaits:
    """Of several ranks or windows together, at least one."""
    found: dict[WaitPlace, list[HostWait]] = {}
    for wait in (wait for rank in ranks for wait in rank.waits):
        found.setdefault(wait.place, []).append(wait)
    return HostWaits(
        covered_ns=sum(rank.covered_ns for rank in ranks),
        covered_idle_ns=sum(rank.covered_idle_ns for rank in ranks),
        num_steps=sum(rank.num_steps for rank in ranks),
        steps_ns=sum(rank.steps_ns for rank in ranks),
        idle_ns=sum(rank.idle_ns for rank in ranks),
        fetch_ns=sum(rank.fetch_ns for rank in ranks),
        late_ns=sum(rank.late_ns for rank in ranks),
        launch_ns=sum(rank.launch_ns for rank in ranks),
        longest_launch_ns=max(rank.longest_launch_ns for rank in ranks),
        num_kernels=sum(rank.num_kernels for rank in ranks),
        waits=_sorted(
            HostWait(
                place=place,
                calls=sum(one.calls for one in same),
                wait_ns=sum(one.wait_ns for one in same),
                stake_ns=sum(one.stake_ns for one in same),
            )
            for place, same in found.items()
        ),
    )


def _counted_steps(bounds: StepBounds) -> Intervals:
    """The steps before which another one was recorded; where there is none such, all."""
    steps = bounds.intervals
    numbers = np.array(bounds.numbers, np.int64)
    begins_stretch = np.isin(steps[:, 0], bounds.stretches[:, 0])
    follows = np.append(False, (np.diff(numbers) == 1)) & ~begins_stretch
    chosen = steps[follows] if follows.any() else steps
    return chosen[_has_length(chosen)]


def _has_length(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    has_length: NDArray[np.bool_] = steps[:, 0] < steps[:, 1]
    return has_length


def _usual(
    places: Sequence[WaitPlace], wait_ns: NDArray[np.int64], in_counted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Time of each wait; in the steps that do not count no more than the longest at the same place in others.

    What happens once, when the recording begins, is not what a step costs.
    """
    longest: dict[WaitPlace, int] = {}
    for place, time, counts in zip(places, wait_ns.tolist(), in_counted.tolist(), strict=True):
        if counts:
            longest[place] = max(longest.get(place, 0), time)
    most = np.array([longest.get(place, 0) for place in places], np.int64)
    return np.minimum(wait_ns, most)


def _busiest_device(timeline: Timeline, covered: Intervals) -> tuple[int, Intervals]:
    """Number of the device that works longest in a time, and when it does."""
    numbers = np.unique(timeline.trace.device.device).tolist()
    busiest = max(numbers, key=lambda number: busy_ns(timeline, number, covered))
    return busiest, busy_time(timeline, busiest)


def _idle_pieces(timeline: Timeline, bounds: StepBounds, device: int) -> _IdlePieces:
    """The pieces in steps of those gaps of a device for which nothing was queued."""
    gaps = find_gaps(timeline, device)
    late = np.flatnonzero(gaps.is_host_wait)
    filled = np.flatnonzero(_has_length(bounds.intervals))
    steps = bounds.intervals[filled]
    pieces = intersect(gaps.intervals[late], steps)
    gap = late[locate(pieces[:, 0], gaps.intervals[late])]
    tracks = timeline.trace.track[gaps.launcher[gap]]
    fetch_ns = fetch_time(timeline, pieces, tracks, find_fetches(timeline))
    step = np.array(bounds.numbers, np.int64)[filled[locate(pieces[:, 0], steps)]]
    order = np.argsort(gaps.launch_ns[gap], kind="stable")
    return _IdlePieces(
        intervals=pieces[order],
        step=step[order],
        launch_ns=gaps.launch_ns[gap][order],
        fetch_ns=fetch_ns[order],
    )


def _in_model_phases(timeline: Timeline, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of each piece the steps' thread spends in the phases that launch the model's work, shape (k,).

    All of it where the trace does not have this package's phases.
    """
    host_time = timeline.host_time
    if host_time is None or host_time.source != "modelprof ranges":
        return pieces[:, 1] - pieces[:, 0]
    chosen = host_time.pieces[np.isin(host_time.phase[host_time.call], MODEL_PHASES)]
    order = np.argsort(pieces[:, 0])
    in_order = pieces[order]
    shared = intersect(in_order, union(chosen[:, 0], chosen[:, 1]))
    inside_ns = np.zeros(len(pieces), np.int64)
    np.add.at(inside_ns, order[locate(shared[:, 0], in_order)], shared[:, 1] - shared[:, 0])
    return inside_ns


def _by_place(
    places: Sequence[WaitPlace],
    is_counted: NDArray[np.bool_],
    wait_ns: NDArray[np.int64],
    stake_ns: NDArray[np.int64],
) -> tuple[HostWait, ...]:
    """One for each place, of those that count or have time at stake."""
    sums: dict[WaitPlace, list[int]] = {}
    for place, counts, waited, stake in zip(
        places, is_counted.tolist(), wait_ns.tolist(), stake_ns.tolist(), strict=True
    ):
        if counts or stake:
            total = sums.setdefault(place, [0, 0, 0])
            total[0] += counts
            total[1] += waited if counts else 0
            total[2] += stake
    return _sorted(
        HostWait(place=place, calls=calls, wait_ns=waited, stake_ns=stake)
        for place, (calls, waited, stake) in sums.items()
    )


def _sorted(waits: Iterable[HostWait]) -> tuple[HostWait, ...]:
    return tuple(sorted(waits, key=lambda wait: (-wait.stake_ns, -wait.wait_ns, wait.place)))
