"""Distributed: communication time of the ranks, and the part that computation hides."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import Key, OfAll, sum_of_all
from lightning_modelprof.analysis.timeline.calls import covered_time, host_communication, nearest_around
from lightning_modelprof.analysis.timeline.intervals import (
    Intervals,
    different,
    intersect,
    is_among,
    length,
    partition,
    union,
)
from lightning_modelprof.analysis.timeline.names import (
    SYMMETRIC_MEMORY_PREFIX,
    asks_device_to_communicate,
    is_collective_call,
    is_communication_operator,
    launches_communication,
    looks_like_communication,
)
from lightning_modelprof.analysis.timeline.tally import Tally, distinct, rows_named, tally_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Collective, Trace

Base = Literal["steps", "operators", "device"]
"""Span that the time is compared with."""


_NO_COMMUNICATION: Final = "the trace has no communication"


_ONLY_CALLS: Final = (
    "the trace has c10d or symm_mem calls but neither communication kernels nor a backend's CPU ranges, so"
    " communication time is unknown"
)


_MAX_NAMED: Final = 3


_MAX_NAME: Final = 60


_ONE_PROCESS: Final = (
    "the CPU called NCCL but no kernel communicates; a single-process job has nothing to communicate"
)


_NOT_RECOGNISED: Final = (
    "no communication kernel was recognized, although the CPU called for communication and the job has more"
    " than one process"
)


class Overlap(Record, frozen=True, kw_only=True):
    """Communication and computation time of one rank; overlaps count once.

    Attributes:
        communication_ns: time in which at least one kernel or host range communicates.
        computation_ns: time in which at least one other kernel runs, without copies and sets; ``None``
            without any kernel.
        overlap_ns: time in both; ``None`` without any kernel.
        exposed_ns: communication without the overlap; ``None`` without any kernel.
    """

    communication_ns: int
    computation_ns: int | None
    overlap_ns: int | None
    exposed_ns: int | None


class StepShares(Record, frozen=True, kw_only=True):
    """Composition of one rank's kept steps; the parts are disjoint and sum to ``total_ns`` exactly.

    Attributes:
        total_ns: length of the kept steps.
        computation_ns: computation without simultaneous communication; ``None`` without any kernel.
        overlap_ns: simultaneous computation and communication; ``None`` without any kernel.
        exposed_ns: communication without computation; without any kernel, all communication.
        copies_ns: only copies and sets; ``None`` without any kernel.
        other_ns: none of these.
    """

    total_ns: int
    computation_ns: int | None
    overlap_ns: int | None
    exposed_ns: int
    copies_ns: int | None
    other_ns: int


class CommunicationRows(Record, frozen=True, kw_only=True):
    """Events that are a rank's communication.

    Attributes:
        rows: of the trace, in its order; at least one.
        is_asynchronous: as in :class:`Distributed`.
    """

    rows: NDArray[np.int64]
    source: Source
    is_asynchronous: bool


class Distributed(Record, frozen=True, kw_only=True):
    """Communication of one rank.

    Attributes:
        is_asynchronous: whether the events are host ranges of a backend that works on a device (``nccl:``):
            they are the time to ask for communication, not the time that it takes.
        in_steps: inside the kept steps; ``None`` without ``ProfilerStep`` ranges.
        base: what ``base_ns`` spans; ``None`` without steps, operators and device events.
        base_ns: length of that span, without gaps between kept steps that aren't consecutive; ``None``
            without one.
        in_base: inside that span, so that no part is longer than ``base_ns``, as ``whole`` can be; ``None``
            without one.
        collectives: in no particular order.
        shares: composition of the kept steps; ``None`` without steps, if they have no length, and if
            ``is_asynchronous``, as communication itself wasn't recorded.
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


def summarize_distributed(timeline: Timeline) -> Distributed:
    """Measure communication and computation over the whole trace, and every collective.

    Communication is the union of the communication kernels of all devices and streams. Without any, it's the
    union of the backend's ranges on the host (``gloo:all_reduce``) on all threads; those that only ask a
    device for it, as NCCL's do, count only if no kernels were recorded at all.
    """
    found = find_communication_rows(timeline)
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


def find_communication_rows(timeline: Timeline) -> CommunicationRows:
    """Find a rank's communication events: kernels, else the backend's ranges on the host."""
    trace = timeline.trace
    is_kernel = trace.category == Category.KERNEL
    communicating = np.flatnonzero(timeline.is_communication)
    rows = communicating[is_kernel[communicating]]
    if len(rows):
        return CommunicationRows(rows=rows, source="device", is_asynchronous=False)
    asking = rows_named(trace, communicating, asks_device_to_communicate)
    # If kernels were recorded and none communicates, requests to the device took no time there.
    is_asynchronous = len(asking) > 0 and not is_kernel.any()
    rows = communicating if is_asynchronous else host_communication(timeline)
    if not is_asynchronous and not _has_several_processes(trace):
        rows = rows[~is_among(rows, asking)]
    if not len(rows):
        raise NotMeasured(_why_none(trace, was_asked=len(asking) > 0))
    return CommunicationRows(rows=rows, source="host", is_asynchronous=is_asynchronous)


def _why_none(trace: Trace, *, was_asked: bool) -> str:
    if was_asked:
        return _NOT_RECOGNISED if _has_several_processes(trace) else _ONE_PROCESS
    if trace.is_named(is_collective_call).any():
        return _ONLY_CALLS
    is_host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION)
    unknown = different(trace.name[is_host & trace.is_named(looks_like_communication)]).tolist()
    return _of_unknown_backend([trace.names[one] for one in unknown]) if unknown else _NO_COMMUNICATION


def _of_unknown_backend(names: Sequence[str]) -> str:
    named = ", ".join(name[:_MAX_NAME] for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{named}{more} may communicate, but no known backend uses these names, so their time is unknown"


def _has_several_processes(trace: Trace) -> bool:
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
    inside = None if computation is None else intersect(computation, stretches)
    return _overlap(intersect(communication, stretches), inside)


def _in_steps(
    timeline: Timeline, communication: Intervals, computation: Intervals | None
) -> tuple[Overlap | None, int]:
    """Overlap inside the kept steps, and their number."""
    steps, bounds = timeline.steps, timeline.bounds
    if steps is None or bounds is None or not steps.has_ranges or not len(bounds.intervals):
        return None, 0
    filled = _filled(bounds.intervals)
    return _overlap_inside(filled, communication, computation), len(bounds.intervals)


def _filled(intervals: NDArray[np.int64]) -> Intervals:
    filled: Intervals = intervals[intervals[:, 0] < intervals[:, 1]]
    return filled


def _shares(timeline: Timeline, communication: Intervals, computation: Intervals | None) -> StepShares | None:
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
    covered = covered_time(timeline)
    if covered is None:
        return None, None
    return "device" if covered.kind == "device events" else covered.kind, covered.intervals


Source = Literal["device", "host"]
"""Where communication was recorded: as kernels, or as the backend's operators on the host."""


_Key = tuple[str, str | None, int | None]
"""Name, process group and its size."""


_KERNEL_NAME: Final = re.compile(r"[nr]ccl(?:Dev)?Kernel_([A-Za-z]+)")
"""``ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)``: captures the collective."""


_FUNCTION: Final = re.compile(r"(?:void )?((?:(?:\(anonymous namespace\)|\w+)::)*\w+)\s*[<(]")
"""Function name of another library's kernel, ``deep_ep::internode::dispatch``, without parameters."""


_PLAIN_NAMES: Final = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallv": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Spellings of collectives in torch and NCCL versions, in lower case without ``_``."""


_ELEMENT_BYTES: Final = {
    "double": 8,
    "long": 8,
    "complexfloat": 8,
    "complexdouble": 16,
    "float": 4,
    "int": 4,
    "complexhalf": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Size of torch's types by lower-case name; ``Float8_...`` types have one byte."""


class CollectiveTime(Record, frozen=True, kw_only=True):
    """All calls of one collective in one process group.

    Attributes:
        name: torch's plain name, e.g. ``all_reduce``; as recorded if it's none of those.
        group: description or name of the process group; ``None`` if not recorded.
        group_size: ranks in the group; ``None`` if not recorded.
        time: of the kernels, or without any, of the host ranges, including overlaps.
        size_bytes: bytes that this rank contributed (elements times their size); ``None`` if unknown for any.
    """

    name: Key[str]
    group: Key[str | None]
    group_size: Key[int | None]
    time: Tally
    size_bytes: OfAll[int]


def find_collectives(
    timeline: Timeline, rows: NDArray[np.int64], source: Source
) -> tuple[CollectiveTime, ...]:
    """Tally communication events by name and group."""
    trace = timeline.trace
    description, named_as = _labels(timeline, rows, source)
    width = len(trace.names)
    pairs, pair_of = distinct((description + 1) * width + named_as, (len(trace.collectives) + 1) * width)
    places: dict[_Key, int] = {}
    sizes: defaultdict[int, list[int | None]] = defaultdict(list)
    group_of_pair = np.zeros(len(pairs), np.int64)
    for index, (pair, calls) in enumerate(zip(pairs.tolist(), np.bincount(pair_of).tolist(), strict=True)):
        number, name_id = divmod(pair, width)
        one = trace.collectives[number - 1] if number else None
        key = (_plain_name(trace.names[name_id], one), one and one.group, one and one.group_size)
        place = group_of_pair[index] = places.setdefault(key, len(places))
        call_bytes = _size_bytes(one)
        sizes[place].append(None if call_bytes is None else calls * call_bytes)
    tallies = tally_by(group_of_pair[pair_of], trace.duration_ns[rows], len(places))
    return tuple(
        CollectiveTime(
            name=name,
            group=group,
            group_size=group_size,
            time=tallies[place],
            size_bytes=sum_of_all(sizes[place]),
        )
        for (name, group, group_size), place in places.items()
    )


def _labels(
    timeline: Timeline, rows: NDArray[np.int64], source: Source
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Description and name of each event's collective.

    Returns:
        Index of its description, -1 without one, and id of the most informative name, both of shape (k,). For
        kernels, host events around the launch fill in what is missing.
    """
    trace, launch = timeline.trace, timeline.launch
    description = trace.collective[rows].astype(np.int64)
    named_as = trace.name[rows].astype(np.int64)
    host = rows
    if source == "device":
        place = np.searchsorted(trace.device.event, rows)
        host = np.where(launch.runtime[place] >= 0, launch.runtime[place], launch.operator[place])
        is_range = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION) & (
            timeline.is_communication | trace.is_named(launches_communication)
        )
        around = nearest_around(timeline, host, is_range, or_itself=True)
        named_as = np.where(around >= 0, trace.name[around], named_as)
    described = nearest_around(timeline, host, trace.collective >= 0, or_itself=True)
    missing = (description < 0) & (described >= 0)
    description[missing] = trace.collective[described[missing]]
    return description, named_as


def _plain_name(text: str, one: Collective | None) -> str:
    """Name of a collective: from its description, else from the name of the range or kernel."""
    if one is not None and one.name is not None:
        recorded = one.name
    elif is_communication_operator(text):
        recorded = text.partition(":")[2]
    elif text.startswith(SYMMETRIC_MEMORY_PREFIX):
        recorded = text.removeprefix(SYMMETRIC_MEMORY_PREFIX).rstrip("_")
    else:
        found = _KERNEL_NAME.search(text) or _FUNCTION.match(text)
        recorded = text if found is None else found.group(1)
    return _PLAIN_NAMES.get(recorded.lower().replace("_", ""), recorded)


def _size_bytes(one: Collective | None) -> int | None:
    if one is None or one.dtype is None or one.in_elements is None or one.in_elements < 0:
        return None
    dtype = one.dtype.lower()
    element_bytes = 1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype)
    return None if element_bytes is None else element_bytes * one.in_elements
