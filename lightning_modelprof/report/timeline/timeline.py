"""A trace becomes a timeline: every event a slice in the lane and row in which it is drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.tally import stable_order
from lightning_modelprof.analysis.timeline.timeline import Timeline as TraceTimeline
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.memory import summarize_memory
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.profile import Timeline
from lightning_modelprof.report.timeline.details import find_details
from lightning_modelprof.report.timeline.lanes import find_lanes
from lightning_modelprof.report.timeline_counters import find_counters
from lightning_modelprof.report.timeline_depths import find_depths
from lightning_modelprof.report.timeline_kinds import find_kinds
from lightning_modelprof.trace.model import Trace


def timeline_of(
    trace: Trace, facts: TraceFacts | None = None, shared: TraceTimeline | None = None
) -> Timeline:
    """Every event of the trace as a slice, with its exact begin, duration and name.

    Args:
        trace: what was recorded.
        facts: of the same trace; they tell the rank, which is ``None`` without them.
        shared: what all facts of the trace share; it is derived anew if it is not given.
    """
    shared = build_timeline(trace) if shared is None else shared
    lanes, lane = find_lanes(shared)
    depth = find_depths(trace.begin_ns, trace.end_ns, lane)
    rows_per_lane = int(depth.max(initial=0)) + 1
    order = stable_order(lane * rows_per_lane + depth)  # the trace is in order of time
    categories, category = find_kinds(shared)
    details, detail = find_details(trace)
    memory = summarize_memory(shared) if facts is None else facts.memory
    counters, counter_notes = find_counters(trace, memory, lanes)
    steps, step_notes = _steps(shared)
    first_ns = [int(counter.time_ns[0]) for counter in counters]
    last_ns = [int(counter.time_ns[-1]) for counter in counters]
    return Timeline(
        source=trace.source,
        rank=None if facts is None else facts.rank,
        begin_ns=min([int(trace.begin_ns.min(initial=0)), *first_ns]),
        end_ns=max([int(trace.end_ns.max(initial=0)), *last_ns]),
        lanes=lanes,
        names=trace.names,
        categories=categories,
        details=details,
        steps=steps,
        lane=lane[order],
        depth=depth[order],
        slice_begin_ns=trace.begin_ns[order],
        slice_duration_ns=trace.duration_ns[order],
        name=trace.name[order].astype(np.int64),
        category=category[order],
        detail=detail[order],
        launch=_launches(shared, order),
        counters=counters,
        notes=(*step_notes, *counter_notes),
    )


def _launches(shared: TraceTimeline, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position of the slice that launched each one: the runtime call, without one the operator.

    Args:
        shared: n events.
        order: row of each slice in the trace, shape (n,).
    """
    position = np.empty(len(order) + 1, np.int64)
    position[order] = np.arange(len(order))
    position[-1] = -1  # of row -1, which is none
    links = shared.launch
    launch = np.full(len(order), -1, np.int64)
    work = position[shared.trace.device.event]
    launch[work] = position[np.where(links.runtime >= 0, links.runtime, links.operator)]
    return launch


def _steps(shared: TraceTimeline) -> tuple[tuple[tuple[int, int, int], ...], tuple[str, ...]]:
    """The steps between their device-aware bounds, and what is to be said of them."""
    if shared.steps is None or shared.bounds is None:
        return (), ("The trace has no steps.",)
    bounds = shared.bounds
    steps = tuple(
        (number, begin_ns, end_ns)
        for number, (begin_ns, end_ns) in zip(bounds.numbers, bounds.intervals.tolist(), strict=True)
    )
    return steps, (*shared.steps.notes, *bounds.notes)
