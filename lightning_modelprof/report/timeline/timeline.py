"""Turn a trace into a timeline: every event is a slice in its lane and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import is_among
from lightning_modelprof.analysis.timeline.tally import stable_order
from lightning_modelprof.analysis.timeline.timeline import Timeline, build_timeline
from lightning_modelprof.analysis.trace.memory import Memory
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.dashboard_entry import Counter, DrawnTimeline, Lane
from lightning_modelprof.report.discovery import found_beside
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.timeline.details import find_details, find_kinds
from lightning_modelprof.report.timeline.idle_slices import find_idle_slices, with_texts
from lightning_modelprof.report.timeline.lanes import HOST_GROUP, device_label, find_depths, find_lanes
from lightning_modelprof.report.timeline.layer import MADE
from lightning_modelprof.trace.model import NOT_RECORDED, Category, Trace

LAYERS: Final = found_beside(__name__, MADE, lambda one: (one.is_on_top, one.draw.__module__))
"""All layers of this folder's files, in drawing order."""


def timeline_of(
    trace: Trace, facts: TraceFacts | None = None, shared: Timeline | None = None
) -> DrawnTimeline:
    """Draw every event of the trace, with its exact start, duration and name, and idle time as slices.

    Args:
        facts: facts of the same trace; without them, the rank is ``None``.
        shared: the trace's shared facts; derived again if not given.
    """
    shared = build_timeline(trace) if shared is None else shared
    lanes, lane_of_event = find_lanes(shared)
    idle = find_idle_slices(shared, lanes, lane_of_event)
    begin_ns = np.concatenate((trace.begin_ns, idle.intervals[:, 0]))
    end_ns = np.concatenate((trace.end_ns, idle.intervals[:, 1]))
    lane = np.concatenate((lane_of_event, idle.lane))
    depth = np.concatenate((find_depths(trace.begin_ns, trace.end_ns, lane_of_event), idle.depth))
    mixed = np.flatnonzero(is_among(lane, idle.crossing))
    mixed = mixed[np.lexsort((-end_ns[mixed], begin_ns[mixed]))]
    depth[mixed] = find_depths(begin_ns[mixed], end_ns[mixed], lane[mixed])
    is_idle = np.arange(len(lane)) >= len(trace)  # comes after zero-length events that start with it
    in_time = np.lexsort((-end_ns, is_idle, begin_ns)) if len(idle.lane) else np.arange(len(lane))
    rows_per_lane = int(depth.max(initial=0)) + 1
    order = in_time[stable_order((lane * rows_per_lane + depth)[in_time])]
    kinds, kind = find_kinds(shared)
    categories, category = with_texts(kinds, kind, idle.kinds, idle.kind)
    names, name = with_texts(trace.names, trace.name.astype(np.int64), idle.kinds, idle.kind)
    details, detail = with_texts(*find_details(trace), idle.details, idle.detail)
    memory = (TraceFacts(trace) if facts is None else facts).get(TraceFacts.memory)
    counters, counter_notes = find_counters(trace, memory, lanes)
    steps, step_notes = _steps(shared)
    first_ns = [int(counter.time_ns[0]) for counter in counters]
    last_ns = [int(counter.time_ns[-1]) for counter in counters]
    drawn = DrawnTimeline(
        source=trace.source,
        rank=None if facts is None else facts.rank,
        begin_ns=min([int(trace.begin_ns.min(initial=0)), *first_ns]),
        end_ns=max([int(trace.end_ns.max(initial=0)), *last_ns]),
        lanes=lanes,
        names=names,
        categories=categories,
        details=details,
        steps=steps,
        lane=lane[order],
        depth=depth[order],
        slice_begin_ns=begin_ns[order],
        slice_duration_ns=(end_ns - begin_ns)[order],
        name=name[order],
        category=category[order],
        detail=detail[order],
        launch=_launches(shared, order),
        counters=counters,
        notes=(*step_notes, *counter_notes),
    )
    for layer in LAYERS:
        drawn, order = layer.draw(drawn, shared, order)
    return drawn


def _launches(shared: Timeline, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the slice that launched each slice: the runtime call, else the operator.

    Args:
        shared: n events.
        order: each slice's row in the trace, from n on for idle time, which nothing launched, shape (k,).
    """
    position = np.empty(len(order) + 1, np.int64)
    position[order] = np.arange(len(order))
    position[-1] = -1  # for row -1, which means none
    links = shared.launch
    launch = np.full(len(order), -1, np.int64)
    work = position[shared.trace.device.event]
    launch[work] = position[np.where(links.runtime >= 0, links.runtime, links.operator)]
    return launch


def _steps(shared: Timeline) -> tuple[tuple[tuple[int, int, int], ...], tuple[str, ...]]:
    if shared.steps is None or shared.bounds is None:
        return (), ("The trace has no steps.",)
    bounds = shared.bounds
    steps = tuple(
        (number, begin_ns, end_ns)
        for number, (begin_ns, end_ns) in zip(bounds.numbers, bounds.intervals.tolist(), strict=True)
    )
    return steps, (*shared.steps.notes, *bounds.notes)


MOST_POINTS: Final = 20_000
"""Maximum points per counter; longer ones are thinned."""


_KEPT_OF_A_BUCKET: Final = 3


_CPU: Final = 0


_FULL: Final = 1 << 40
"""All multiprocessors of a device, in integer parts so that sums don't drift."""


def find_counters(
    trace: Trace, memory: Memory | None, lanes: Sequence[Lane]
) -> tuple[tuple[Counter, ...], tuple[str, ...]]:
    """Find the counters of each device and of the CPU, and notes on them.

    Args:
        memory: allocations in the same trace; ``None`` if not recorded.
        lanes: counters are in the order of the lanes' groups.
    """
    counters = [*_work_counters(trace)]
    if memory is not None:
        counters += _memory_counters(trace, memory)
    groups = list(dict.fromkeys(lane.group for lane in lanes))
    counters.sort(key=lambda one: groups.index(one.group) if one.group in groups else len(groups))
    thinned = [thin(counter) for counter in counters]
    notes = [
        f"{counter.label}: {len(few.value):,} of {len(counter.value):,} points shown (min, max and last per"
        " bucket)."
        for counter, few in zip(counters, thinned, strict=True)
        if len(few.value) < len(counter.value)
    ]
    if any(few.group == HOST_GROUP for few in thinned):
        notes.append("CPU memory is relative to trace start; negative if more was freed than allocated.")
    return tuple(thinned), tuple(notes)


def thin(counter: Counter, most: int = MOST_POINTS) -> Counter:
    """Keep at most ``most`` points: the first, and the lowest, highest and last of equal buckets.

    A bucket's last point holds until the next one; without it, a peak would seem to last.
    """
    count = len(counter.value)
    if count <= most:
        return counter
    num_buckets = max((most - 1) // _KEPT_OF_A_BUCKET, 1)
    starts = np.arange(num_buckets) * count // num_buckets
    bucket = np.repeat(np.arange(num_buckets), np.diff(starts, append=count))
    kept = np.zeros(count, np.bool_)
    kept[0] = True
    kept[np.append(starts[1:], count) - 1] = True
    for extreme in (np.minimum.reduceat(counter.value, starts), np.maximum.reduceat(counter.value, starts)):
        reached = np.flatnonzero(counter.value == extreme[bucket])
        kept[reached[np.diff(bucket[reached], prepend=-1) > 0]] = True
    return replace(counter, time_ns=counter.time_ns[kept], value=counter.value[kept])


def _memory_counters(trace: Trace, memory: Memory) -> Iterator[Counter]:
    """Yield each device's allocated and reserved memory, starting with what it had before the trace."""
    events = trace.allocations
    kinds, device_of = np.unique(
        np.column_stack((events.device_type, events.device)), axis=0, return_inverse=True
    )
    for index, (kind, device) in enumerate(zip(kinds[:, 0].tolist(), memory.devices, strict=True)):
        own = np.flatnonzero(device_of.reshape(-1) == index)
        time_ns, allocated, reserved = (
            column[own] for column in (events.time_ns, events.allocated_bytes, events.reserved_bytes)
        )
        name, group, what = device.total.name, device.total.name, "allocated"
        if kind == _CPU:
            group, what = HOST_GROUP, "allocated since the start"
            allocated, reserved = np.cumsum(events.size_bytes[own]), np.full(len(own), NOT_RECORDED)
        if device.begin_bytes is not None:
            known = np.full(len(own), True) if kind == _CPU else allocated >= 0
            begin_ns = min(0, int(time_ns[0]))
            yield _counter(
                f"{name} memory {what}",
                group,
                Unit.BYTES,
                np.append(begin_ns, time_ns[known]),
                np.append(device.begin_bytes, allocated[known]),
            )
        held = reserved >= 0
        if held.any():
            yield _counter(f"{name} memory reserved", group, Unit.BYTES, time_ns[held], reserved[held])


def _work_counters(trace: Trace) -> Iterator[Counter]:
    """Yield each device's SM efficiency where known, else the number of running kernels."""
    work = trace.device
    is_kernel = trace.category[work.event] == Category.KERNEL
    for number in np.unique(work.device[is_kernel]).tolist():
        own = is_kernel & (work.device == number)
        blocks = work.blocks_per_sm
        counted = own & np.isfinite(blocks) & (blocks >= 0)
        label = device_label(number)
        if counted.any():
            parts = np.rint(np.minimum(blocks[counted], 1.0) * _FULL).astype(np.int64)
            time_ns, level = _levels(trace, work.event[counted], parts)
            share = np.minimum(level, _FULL) / _FULL
            yield _counter(f"{label} SM efficiency (est.)", label, Unit.RATIO, time_ns, share)
        if (own & ~counted).any():
            events = work.event[own]
            time_ns, level = _levels(trace, events, np.ones(len(events), np.int64))
            yield _counter(f"{label} kernels running", label, Unit.COUNT, time_ns, level)


def _levels(
    trace: Trace, events: NDArray[np.int64], parts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when the sum of running parts changes, starting with 0 at trace start, and the sums."""
    time_ns = np.concatenate(([0], trace.begin_ns[events], trace.end_ns[events]))
    order = np.argsort(time_ns, kind="stable")
    time_ns = time_ns[order]
    level = np.cumsum(np.concatenate(([0], parts, -parts))[order])
    is_last = np.append(time_ns[1:] > time_ns[:-1], True)
    time_ns, level = time_ns[is_last], level[is_last]
    changes = np.diff(level, prepend=-1) != 0
    return time_ns[changes], level[changes]


def _counter(
    label: str,
    group: str,
    unit: Unit,
    time_ns: NDArray[np.int64],
    values: NDArray[np.int64] | NDArray[np.float64],
) -> Counter:
    return Counter(label=label, group=group, unit=unit, time_ns=time_ns, value=values.astype(np.float64))
