"""Dataloader: batch fetches of the training thread, the operators inside, and device work that hides them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import Key, OfAll
from lightning_modelprof.analysis.timeline.intervals import Intervals, intersect, length, locate, union
from lightning_modelprof.analysis.timeline.names import is_dataloader
from lightning_modelprof.analysis.timeline.tally import (
    Tally,
    by_name,
    rows_named,
    sum_by,
    tally,
    tally_by,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import RANGE_PREFIX
from lightning_modelprof.trace.model import Category, Trace

OWN_FETCH: Final = RANGE_PREFIX + "dataloader"
"""Name of this package's range around a fetch."""

Loading = Literal["workers", "main thread"]
"""Where batches are made: in workers, so that the fetch only waits, or in the fetching thread itself."""

_ITERATORS: Final[dict[str, Loading]] = {
    "_MultiProcessingDataLoaderIter": "workers",
    "_SingleProcessDataLoaderIter": "main thread",
}
"""Torch's iterators, by the names of its fetch ranges."""


class HostToDevice(Record, frozen=True, kw_only=True):
    """Host-to-device copies of one kind launched in the steps.

    Attributes:
        name: of the device events, including the host memory: ``Memcpy HtoD (Pageable -> Device)``.
        tally: copies and their time on the device.
        size_bytes: total bytes; ``None`` if any size wasn't recorded.
    """

    name: Key[str]
    tally: Tally
    size_bytes: OfAll[int]


class DataloaderTime(Record, frozen=True, kw_only=True):
    """Batch fetches of the training thread inside the steps, for one rank or several together.

    Attributes:
        fetches: number and time of the outermost fetches in the steps.
        per_step: fetch time of each step, including those without a fetch.
        hidden: time of each fetch in which a device of the process was busy (kernels, copies, sets); ``None``
            without device events.
        exposed: the rest of each fetch, without device work: the most that faster loading could save;
            ``None`` without device events.
        operators: outermost operators inside the fetches, by name.
        outside_operators_ns: fetch time outside operators: Python, the data set, waiting.
        copies: from the host to devices, in no particular order.
        loading: where the batches were made, from the fetches' names; empty if they don't show it.
        has_own_ranges: whether the fetches are this package's ranges, not torch's.
    """

    fetches: Tally
    per_step: Tally
    steps_ns: int
    hidden: OfAll[Tally]
    exposed: OfAll[Tally]
    operators: Mapping[str, Tally]
    outside_operators_ns: int
    copies: tuple[HostToDevice, ...]
    loading: frozenset[Loading]
    has_own_ranges: bool


def is_fetch(name: str) -> bool:
    """Whether this host range is a batch fetch, torch's or this package's."""
    return name == OWN_FETCH or is_dataloader(name)


def _fetches(trace: Trace, annotations: NDArray[np.int64]) -> NDArray[np.int64]:
    own = rows_named(trace, annotations, OWN_FETCH.__eq__)
    return own if len(own) else rows_named(trace, annotations, is_dataloader)


def summarize_dataloader(timeline: Timeline) -> DataloaderTime:
    """Measure the fetches on the steps' thread, clipped to the steps."""
    trace, steps = timeline.trace, timeline.steps
    if steps is None:
        raise NotMeasured("the trace has none of the recorded steps, or neither steps nor operators")
    annotations = np.flatnonzero(timeline.is_annotation)
    fetches = _fetches(trace, annotations)
    if not len(fetches):
        raise NotMeasured("the trace has no fetches, by torch's DataLoader or lightning-modelprof's ranges")
    rows, ranges = not_nested(trace, fetches[trace.track[fetches] == steps.track])
    time_ns = _covered_ns(ranges, steps.intervals)
    kept = np.flatnonzero((time_ns > 0) | (locate(ranges[:, 0], steps.intervals) >= 0))
    if not len(kept):
        raise NotMeasured("all batch fetches are outside the recorded steps or on other threads")
    ranges, time_ns = ranges[kept], time_ns[kept]
    pieces = intersect(ranges[ranges[:, 0] < ranges[:, 1]], steps.intervals)
    step_ns = sum_by(locate(pieces[:, 0], steps.intervals), pieces[:, 1] - pieces[:, 0], len(steps.intervals))
    operators = _operators(timeline, pieces, steps.track)
    hidden_ns = _covered_ns(ranges, intersect(_busy(timeline), steps.intervals))
    return DataloaderTime(
        fetches=tally(time_ns),
        per_step=tally(step_ns),
        steps_ns=length(steps.intervals),
        hidden=tally(hidden_ns) if timeline.has_device else None,
        exposed=tally(time_ns - hidden_ns) if timeline.has_device else None,
        operators=operators,
        outside_operators_ns=int(time_ns.sum()) - sum(one.total_ns for one in operators.values()),
        copies=_copies(timeline, steps.intervals),
        loading=_loading(trace, annotations[trace.track[annotations] == steps.track], ranges),
        has_own_ranges=trace.name_of(int(rows[0])) == OWN_FETCH,
    )


def not_nested(trace: Trace, rows: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """The outermost of one thread's rows, including empty ones.

    This uses only their times, so Python functions that end inside a range (its ``__enter__``) don't matter.

    Returns:
        The k rows, and start and end of each, shape (k, 2), disjoint: one that starts before the previous one
        ends (by rounding in old traces) starts where that one ends.
    """
    begin, end = trace.begin_ns[rows], trace.end_ns[rows]
    reached = np.maximum.accumulate(np.append(0, end))[:-1]
    kept = np.flatnonzero((begin >= reached) | (end > reached))
    return rows[kept], np.column_stack((np.maximum(begin, reached)[kept], end[kept]))


def _covered_ns(ranges: NDArray[np.int64], intervals: Intervals) -> NDArray[np.int64]:
    """Time of each range, shape (k, 2), inside an interval set; shape (k,)."""
    ends = np.append(0, intervals[:, 1])
    before = np.append(0, np.cumsum(intervals[:, 1] - intervals[:, 0]))
    index = np.searchsorted(intervals[:, 0], ranges, side="right")  # of the last interval started, plus 1
    until = before[index] + np.minimum(ranges - ends[index], 0)
    covered: NDArray[np.int64] = until[:, 1] - until[:, 0]
    return covered


def _busy(timeline: Timeline) -> Intervals:
    work = timeline.trace.device.event
    return union(timeline.trace.begin_ns[work], timeline.trace.end_ns[work])


def _operators(timeline: Timeline, pieces: Intervals, track: int) -> dict[str, Tally]:
    """Outermost operators that start inside the fetches on their thread, with their time inside fetches."""
    trace = timeline.trace
    candidates = np.flatnonzero(timeline.is_operator & (trace.track == track))
    inside = candidates[locate(trace.begin_ns[candidates], pieces) >= 0]
    rows, ranges = not_nested(trace, inside)
    names, group = by_name(trace, rows)
    tallies = tally_by(group, _covered_ns(ranges, pieces), len(names))
    return dict(zip(names, tallies, strict=True))


def _is_host_to_device(name: str) -> bool:
    lower = name.lower()
    return "htod" in lower or "hosttodevice" in lower


def _copies(timeline: Timeline, steps: Intervals) -> tuple[HostToDevice, ...]:
    """Host-to-device copies launched in the steps, or started there if the launch is unknown."""
    trace, device, launch_ns = timeline.trace, timeline.trace.device, timeline.launch.begin_ns
    copied = np.flatnonzero(trace.category[device.event] == Category.MEMCPY)
    launched_ns = np.where(launch_ns[copied] >= 0, launch_ns[copied], trace.begin_ns[device.event[copied]])
    chosen = copied[locate(launched_ns, steps) >= 0]
    names, group = by_name(trace, device.event[chosen])
    tallies = tally_by(group, trace.duration_ns[device.event[chosen]], len(names))
    size = device.size_bytes[chosen]
    sizes = sum_by(group, size, len(names)).tolist()
    unknown = np.bincount(group[size < 0], minlength=len(names)).tolist()
    return tuple(
        HostToDevice(name=name, tally=one, size_bytes=None if num_unknown else total)
        for name, one, total, num_unknown in zip(names, tallies, sizes, unknown, strict=True)
        if _is_host_to_device(name)
    )


def _loading(trace: Trace, annotations: NDArray[np.int64], ranges: NDArray[np.int64]) -> frozenset[Loading]:
    rows = rows_named(trace, annotations, is_dataloader)
    place = np.searchsorted(ranges[:, 0], trace.begin_ns[rows], side="right") - 1
    inside = (place >= 0) & (trace.end_ns[rows] <= ranges[place, 1])
    names, _ = by_name(trace, rows[inside])
    return frozenset(loading for word, loading in _ITERATORS.items() if any(word in name for name in names))
