"""Collectives: how often each was called in each process group, and how long that took."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.enclosing import nearest_around
from lightning_modelprof.analysis.grouping import distinct
from lightning_modelprof.analysis.timeline.names import (
    SYMMETRIC_MEMORY_PREFIX,
    is_communication_operator,
    launches_communication,
)
from lightning_modelprof.analysis.timeline.tally import Tally, add_up, tally_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.trace.model import Category, Collective

Source = Literal["device", "host"]
"""Where communication was seen: as kernels, or as the backend's operators on the host."""

_Key = tuple[str, str | None, int | None]
"""Name, process group and number of its ranks."""

_KERNEL_NAME: Final = re.compile(r"[nr]ccl(?:Dev)?Kernel_([A-Za-z]+)")
"""``ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)``: the collective is what follows."""

_FUNCTION: Final = re.compile(r"(?:void )?((?:(?:\(anonymous namespace\)|\w+)::)*\w+)\s*[<(]")
"""Of a kernel of another library the function, ``deep_ep::internode::dispatch``, without parameters."""

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
"""torch, NCCL and their versions write one collective in several ways; here without case and ``_``."""

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
"""Size of torch's types by their names in lower case; those of ``Float8_...`` are one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """All calls of one collective in one process group.

    Attributes:
        name: in torch's plain words, such as ``all_reduce``; as recorded where that is not one of those.
        group: the process group's description or name; ``None`` is not recorded.
        group_size: ranks in the group; ``None`` is not recorded.
        time: of the kernels, or where the device has none of the host ranges, whatever overlaps them.
        size_bytes: what this rank put in, number of elements times their size; ``None`` when any call
            did not record it.
    """

    name: str
    group: str | None
    group_size: int | None
    time: Tally
    size_bytes: int | None


def find_collectives(
    timeline: Timeline, rows: NDArray[np.int64], source: Source
) -> tuple[CollectiveTime, ...]:
    """Tallies of the communication events by name and group, longest total first.

    Args:
        timeline: n events.
        rows: the communication events, all of ``source``.
        source: whether they are kernels or ranges on the host.
    """
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
    return _sorted(
        CollectiveTime(
            name=name,
            group=group,
            group_size=group_size,
            time=tallies[place],
            size_bytes=_total_or_none(sizes[place]),
        )
        for (name, group, group_size), place in places.items()
    )


def pool_collectives(collectives: Iterable[CollectiveTime]) -> tuple[CollectiveTime, ...]:
    """Those of several ranks together: calls, times and bytes of the same name and group are added up."""
    by_key: dict[_Key, list[CollectiveTime]] = {}
    for one in collectives:
        by_key.setdefault((one.name, one.group, one.group_size), []).append(one)
    return _sorted(
        CollectiveTime(
            name=name,
            group=group,
            group_size=size,
            time=add_up(one.time for one in same),
            size_bytes=_total_or_none(one.size_bytes for one in same),
        )
        for (name, group, size), same in by_key.items()
    )


def _labels(
    timeline: Timeline, rows: NDArray[np.int64], source: Source
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What tells which collective each event belongs to.

    Returns:
        Index of its description, -1 without one, and id of the name that says most, both of shape (k,): what
        a kernel does not say itself is taken from the host events around its launch.
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
    """What the collective is called: by its description, else by the name of the range or the kernel."""
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
    """What one call puts in, ``None`` if it did not say."""
    if one is None or one.dtype is None or one.in_elements is None or one.in_elements < 0:
        return None
    dtype = one.dtype.lower()
    element_bytes = 1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype)
    return None if element_bytes is None else element_bytes * one.in_elements


def _total_or_none(sizes: Iterable[int | None]) -> int | None:
    """The sum, ``None`` if one of them is."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _sorted(collectives: Iterable[CollectiveTime]) -> tuple[CollectiveTime, ...]:
    """Longest total first, then by name and group."""
    return tuple(sorted(collectives, key=lambda one: (-one.time.total_ns, one.name, one.group or "")))
