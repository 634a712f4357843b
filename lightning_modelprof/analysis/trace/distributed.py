"""Distributed: how long the ranks communicated, and how much of it computation hid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.busy import covered_time
from lightning_modelprof.analysis.collectives import CollectiveTime, Source, find_collectives
from lightning_modelprof.analysis.grouping import rows_named
from lightning_modelprof.analysis.timeline.intervals import Intervals, intersect, length, partition, union
from lightning_modelprof.analysis.timeline.names import asks_device_to_communicate, is_collective_call
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.trace.model import Category, Trace

Base = Literal["steps", "operators", "device"]
"""Whose span the time is compared with."""

_NO_COMMUNICATION: Final = Absent("the trace has no communication")
_ONLY_CALLS: Final = Absent(
    "the trace has calls of c10d or symm_mem, but neither kernels that communicate nor a backend's ranges on"
    " the host, so how long communication took was not recorded"
)
_ONE_PROCESS: Final = Absent(
    "no kernel of the trace communicates, though the host asked NCCL for it: a job of one process has nothing"
    " to communicate"
)
_NOT_RECOGNISED: Final = Absent(
    "no kernel of the trace was recognised as one that communicates, though the host asked for communication"
    " and the job has several processes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How long one rank communicated and computed; what overlaps counts once.

    Attributes:
        communication_ns: time in which at least one kernel or host range communicates.
        computation_ns: time in which at least one other kernel runs (copies and sets are none); ``None``
            without any kernel.
        overlap_ns: time in both; ``None`` without any kernel.
        exposed_ns: communication without the overlap; ``None`` without any kernel.
    """

    communication_ns: int
    computation_ns: int | None
    overlap_ns: int | None
    exposed_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """What the kept steps of one rank consist of; the parts are disjoint and sum to ``total_ns`` exactly.

    Attributes:
        total_ns: length of the kept steps.
        computation_ns: computation without communication at the same time; ``None`` without any kernel.
        overlap_ns: computation and communication at the same time; ``None`` without any kernel.
        exposed_ns: communication without computation; without any kernel all communication.
        copies_ns: only copies and sets; ``None`` without any kernel.
        other_ns: nothing of these.
    """

    total_ns: int
    computation_ns: int | None
    overlap_ns: int | None
    exposed_ns: int
    copies_ns: int | None
    other_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationRows:
    """Which events are a rank's communication.

    Attributes:
        rows: of the trace, in its order; at least one.
        source: where communication was seen.
        is_asynchronous: as in :class:`Distributed`.
    """

    rows: NDArray[np.int64]
    source: Source
    is_asynchronous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """Communication of one rank.

    Attributes:
        source: where communication was seen.
        is_asynchronous: there are host ranges of a backend that works on a device (``nccl:``): they are
            the time to ask for communication, not the time that it takes.
        whole: over the whole trace.
        in_steps: inside the kept steps; ``None`` when the trace has no ``ProfilerStep`` ranges.
        num_steps: how many steps were kept.
        base: whose span ``base_ns`` is; ``None`` without steps, operators and device events.
        base_ns: length of that span, without the time between kept steps that do not follow each other;
            ``None`` without one.
        in_base: inside that span, so that no part is longer than ``base_ns``, as ``whole`` can be;
            ``None`` without one.
        collectives: longest total first.
        notes: caveats.
        shares: what the kept steps consist of; ``None`` without steps, where they have no length, and where
            ``is_asynchronous``, as communication itself was not recorded.
    """

    source: Source
    is_asynchronous: bool
    whole: Overlap
    in_steps: Overlap | None
    num_steps: int
    base: Base | None
    base_ns: int | None
    in_base: Overlap | None
    collectives: tuple[CollectiveTime, ...]
    notes: tuple[str, ...]
    shares: StepShares | None = None


def summarize_distributed(timeline: Timeline) -> Distributed | Absent:
    """Communication and computation over the whole trace, and every collective.

    Communication is the union of the communication kernels of all devices and streams. Where there is
    none, it is the union of the backend's ranges on the host (``gloo:all_reduce``) on all threads; those of
    NCCL only where no kernels were recorded at all.
    """
    found = find_communication_rows(timeline)
    if isinstance(found, Absent):
        return found
    trace, rows = timeline.trace, found.rows
    is_kernel = trace.category == Category.KERNEL
    communication = union(trace.begin_ns[rows], trace.end_ns[rows])
    computation = None
    if is_kernel.any():
        others = is_kernel & ~timeline.is_communication
        computation = union(trace.begin_ns[others], trace.end_ns[others])
    base, covered = _base(timeline)
    in_steps, num_steps = _in_steps(timeline, communication, computation)
    return Distributed(
        source=found.source,
        is_asynchronous=found.is_asynchronous,
        whole=_overlap(communication, computation),
        in_steps=in_steps,
        num_steps=num_steps,
        base=base,
        base_ns=None if covered is None else length(covered),
        in_base=None if covered is None else _overlap_inside(covered, communication, computation),
        collectives=find_collectives(timeline, rows, found.source),
        notes=() if timeline.bounds is None or base == "device" else timeline.bounds.notes,
        shares=None if found.is_asynchronous else _shares(timeline, communication, computation),
    )


def find_communication_rows(timeline: Timeline) -> CommunicationRows | Absent:
    """The events that are a rank's communication: kernels, else the backend's ranges on the host."""
    trace = timeline.trace
    is_kernel = trace.category == Category.KERNEL
    communicating = np.flatnonzero(timeline.is_communication)
    rows = communicating[is_kernel[communicating]]
    if len(rows):
        return CommunicationRows(rows=rows, source="device", is_asynchronous=False)
    asking = rows_named(trace, communicating, asks_device_to_communicate)
    # Where kernels were recorded and none communicates, what was asked of the device took no time there.
    is_asynchronous = len(asking) > 0 and not is_kernel.any()
    rows = communicating if is_asynchronous else np.setdiff1d(communicating, asking, assume_unique=True)
    if not len(rows):
        return _why_absent(trace, was_asked=len(asking) > 0)
    return CommunicationRows(rows=rows, source="host", is_asynchronous=is_asynchronous)


def _why_absent(trace: Trace, *, was_asked: bool) -> Absent:
    if was_asked:
        return _NOT_RECOGNISED if _has_several_processes(trace) else _ONE_PROCESS
    return _ONLY_CALLS if trace.is_named(is_collective_call).any() else _NO_COMMUNICATION


def _has_several_processes(trace: Trace) -> bool:
    """Whether the trace says that its job has several processes, or a group of it."""
    noted = trace.metadata.get("distributedInfo")
    sizes = [one.group_size for one in trace.collectives]
    sizes += [noted.get("world_size")] if isinstance(noted, dict) else []
    return any(isinstance(size, int) and size > 1 for size in sizes)


def _overlap(communication: Intervals, computation: Intervals | None) -> Overlap:
    total_ns = length(communication)
    if computation is None:
        return Overlap(communication_ns=total_ns, computation_ns=None, overlap_ns=None, exposed_ns=None)
    both_ns = length(intersect(communication, computation))
    return Overlap(
        communication_ns=total_ns,
        computation_ns=length(computation),
        overlap_ns=both_ns,
        exposed_ns=total_ns - both_ns,
    )


def _overlap_inside(stretches: Intervals, communication: Intervals, computation: Intervals | None) -> Overlap:
    """The same inside of some stretches of time."""
    inside = None if computation is None else intersect(computation, stretches)
    return _overlap(intersect(communication, stretches), inside)


def _in_steps(
    timeline: Timeline, communication: Intervals, computation: Intervals | None
) -> tuple[Overlap | None, int]:
    """The same inside the kept steps, and how many there are."""
    steps, bounds = timeline.steps, timeline.bounds
    if steps is None or bounds is None or not steps.has_ranges or not len(bounds.intervals):
        return None, 0
    filled = _filled(bounds.intervals)
    return _overlap_inside(filled, communication, computation), len(bounds.intervals)


def _filled(intervals: NDArray[np.int64]) -> Intervals:
    """Without steps of length 0."""
    filled: Intervals = intervals[intervals[:, 0] < intervals[:, 1]]
    return filled


def _shares(timeline: Timeline, communication: Intervals, computation: Intervals | None) -> StepShares | None:
    """What the kept steps consist of."""
    steps, bounds, trace = timeline.steps, timeline.bounds, timeline.trace
    if steps is None or bounds is None or not steps.has_ranges:
        return None
    whole = _filled(bounds.intervals)
    if not len(whole):
        return None
    copying = trace.is_category(Category.MEMCPY, Category.MEMSET)
    copies = union(trace.begin_ns[copying], trace.end_ns[copying])
    kernels = communication[:0] if computation is None else computation
    layers = [intersect(kernels, communication), kernels, communication]
    if computation is not None:
        layers.append(copies)
    parts_ns = [length(part) for part in partition(whole, layers)]
    overlap_ns, computation_ns, exposed_ns = parts_ns[:3]
    has_kernels = computation is not None
    return StepShares(
        total_ns=length(whole),
        computation_ns=computation_ns if has_kernels else None,
        overlap_ns=overlap_ns if has_kernels else None,
        exposed_ns=exposed_ns,
        copies_ns=parts_ns[3] if has_kernels else None,
        other_ns=parts_ns[-1],
    )


def _base(timeline: Timeline) -> tuple[Base | None, Intervals | None]:
    """Whose span the time is compared with, and the stretches of time that it is."""
    covered = covered_time(timeline)
    if covered is None:
        return None, None
    return "device" if covered.kind == "device events" else covered.kind, covered.intervals
