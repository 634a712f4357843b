"""Overview: share of the steps that each event type covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import Key, OfAll
from lightning_modelprof.analysis.timeline.intervals import (
    Intervals,
    different,
    intersect,
    length,
    locate,
    union,
)
from lightning_modelprof.analysis.timeline.names import (
    AUTOGRAD_PREFIX,
    OPTIMIZER_PREFIX,
    ZERO_GRAD_PREFIX,
    is_shown_elsewhere,
)
from lightning_modelprof.analysis.timeline.tally import rows_named
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.dataloader import is_fetch, not_nested
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

HostType = Literal[
    "operator",
    "backward",
    "runtime",
    "dataloader",
    "optimization",
    "zero_grad",
    "communication",
    "user_defined",
    "python_function",
    "overhead",
]
DeviceType = Literal["kernel", "memcpy", "memset", "communication"]

HOST_TYPES: Final[tuple[HostType, ...]] = (
    "operator",
    "backward",
    "runtime",
    "dataloader",
    "optimization",
    "zero_grad",
    "communication",
    "user_defined",
    "python_function",
    "overhead",
)
_PHASE_TYPES: Final[tuple[tuple[HostType, str], ...]] = (
    ("optimization", "optimizer"),
    ("zero_grad", "zero_grad"),
)
"""Types that are phases of the Model Summary."""
DEVICE_TYPES: Final[tuple[DeviceType, ...]] = ("kernel", "memcpy", "memset", "communication")


class EventType(Record, frozen=True, kw_only=True):
    """Events of one type; simultaneous ones count once.

    Attributes:
        key: one of ``HOST_TYPES`` or ``DEVICE_TYPES``.
        calls: events that start inside the steps.
        total_ns: time inside the steps in which at least one of them ran, on any thread, stream or device.
        whole_calls, whole_ns: the same over the whole trace; ``None`` for phases of the steps.
    """

    key: Key[HostType | DeviceType]
    calls: int
    total_ns: int
    whole_calls: OfAll[int]
    whole_ns: OfAll[int]


class Overview(Record, frozen=True, kw_only=True):
    """Coverage of the steps by each event type, for one rank or several together.

    Attributes:
        steps_ns: time of the steps on the host, to which host types are clipped.
        device_steps_ns: time of the stretches of steps between device-aware bounds (:class:`StepBounds`), to
            which device types are clipped; ``None`` without device events.
        host: occurring types of host events, in no particular order. Each event has one type.
        device: occurring types of device events, in no particular order.
    """

    num_steps: int
    steps_ns: int
    device_steps_ns: int | None
    host: tuple[EventType, ...]
    device: tuple[EventType, ...]
    notes: tuple[str, ...]


def summarize_overview(timeline: Timeline) -> Overview:
    """Merge the events of each type over all threads, streams and devices and clip them to the steps."""
    steps, bounds, stretches = timeline.steps, timeline.bounds, timeline.stretches
    if steps is None or bounds is None or stretches is None:
        raise NotMeasured("the trace has none of the recorded steps, or neither steps nor operators")
    host_window = steps.intervals
    host = _measure(timeline.trace, _host_members(timeline), host_window)
    host += _phases(timeline, host_window)
    return Overview(
        num_steps=len(steps.numbers),
        steps_ns=length(host_window),
        device_steps_ns=length(stretches) if timeline.has_device else None,
        host=tuple(host),
        device=tuple(_measure(timeline.trace, _device_members(timeline), stretches)),
        notes=(*steps.notes, *(bounds.notes if timeline.has_device else ())),
    )


def _phases(timeline: Timeline, steps: Intervals) -> list[EventType]:
    """Optimization and Zero grad as in the Model Summary, without the optimizer's closure."""
    host = timeline.host_time
    found: list[EventType] = []
    if host is None:
        return found
    for key, phase in _PHASE_TYPES:
        own = host.phase == phase
        total_ns = length(host.pieces[own[host.call]])
        calls = int(np.count_nonzero(locate(host.begin_ns[own], steps) >= 0))
        if calls or total_ns:
            found.append(
                EventType(
                    key=key,
                    calls=calls,
                    total_ns=total_ns,
                    whole_calls=None,
                    whole_ns=None,
                )
            )
    return found


def _measure(
    trace: Trace, members: Sequence[tuple[HostType | DeviceType, NDArray[np.int64]]], window: Intervals
) -> list[EventType]:
    """Every type that occurs in the window; ``members`` are types and rows of their events."""
    found = []
    for key, rows in members:
        if not len(rows):
            continue
        begin_ns = trace.begin_ns[rows]
        merged = union(begin_ns, trace.end_ns[rows])
        total_ns = length(intersect(merged, window))
        calls = int(np.count_nonzero(locate(begin_ns, window) >= 0))
        if calls or total_ns:
            found.append(
                EventType(
                    key=key,
                    calls=calls,
                    total_ns=total_ns,
                    whole_calls=len(rows),
                    whole_ns=length(merged),
                )
            )
    return found


def _host_members(timeline: Timeline) -> list[tuple[HostType, NDArray[np.int64]]]:
    """Types of host events that aren't phases, with rows; no event has two types."""
    trace = timeline.trace
    is_step = timeline.is_step_range
    ranges = np.flatnonzero((timeline.is_operator | timeline.is_annotation) & ~is_step)
    annotations = np.flatnonzero(timeline.is_annotation & ~is_step)
    communication = ranges[timeline.is_communication[ranges]]
    backward = rows_named(trace, ranges, lambda name: name.startswith(AUTOGRAD_PREFIX))
    if not len(backward):  # before torch 1.10, the engine had no range, only the nodes
        operators = np.flatnonzero(timeline.is_operator)
        backward = rows_named(trace, operators, lambda name: "Backward" in name or "AccumulateGrad" in name)
    fetch = rows_named(trace, annotations, is_fetch)
    phases = rows_named(
        trace, annotations, lambda name: name.startswith((OPTIMIZER_PREFIX, ZERO_GRAD_PREFIX))
    )
    defined = rows_named(trace, annotations, lambda name: not is_shown_elsewhere(name))
    if timeline.steps is not None:  # a range around all steps fills them whatever happens inside
        first_ns, end_ns = timeline.steps.intervals[0, 0], timeline.steps.intervals[-1, 1]
        is_around = (trace.begin_ns[defined] < first_ns) & (trace.end_ns[defined] >= end_ns)
        defined = defined[~is_around]
    is_left = np.ones(len(trace), np.bool_)
    for special in (communication, backward, fetch, phases):
        is_left[special] = False
    return [
        ("operator", np.flatnonzero(timeline.is_operator & is_left & ~is_step)),
        ("backward", backward),
        ("runtime", np.flatnonzero(trace.category == Category.RUNTIME)),
        ("dataloader", _outermost(trace, fetch)),
        ("communication", communication),
        ("user_defined", defined[is_left[defined]]),
        ("python_function", np.flatnonzero(trace.category == Category.PYTHON_FUNCTION)),
        ("overhead", np.flatnonzero(trace.category == Category.OVERHEAD)),
    ]


def _outermost(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Outermost events, e.g. this package's range around torch's fetch."""
    tracks = different(trace.track[rows]).tolist()
    outermost = [not_nested(trace, rows[trace.track[rows] == track])[0] for track in tracks]
    return np.concatenate([rows[:0], *outermost])


def _device_members(timeline: Timeline) -> list[tuple[DeviceType, NDArray[np.int64]]]:
    rows = timeline.trace.device.event
    category, communicates = timeline.trace.category[rows], timeline.is_communication[rows]
    kernel = category == Category.KERNEL
    return [
        ("kernel", rows[kernel & ~communicates]),
        ("memcpy", rows[category == Category.MEMCPY]),
        ("memset", rows[category == Category.MEMSET]),
        ("communication", rows[kernel & communicates]),
    ]
