"""When a device is busy, and in which time that is asked: one definition for every figure that says it.

A device is busy while at least one kernel, copy or set runs on any of its streams, and else it is idle. A
share of that is of the covered time: from the begin of the first kept step to the end of the last, without
the time between steps that do not follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_modelprof.analysis.timeline.intervals import Intervals, intersect, length, union
from lightning_modelprof.analysis.timeline.timeline import Timeline

Covers = Literal["steps", "operators", "device events"]
"""Time from the first of these to the end of the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoveredTime:
    """The time that figures of a device cover.

    Attributes:
        kind: from what to what it is.
        intervals: an interval set.
    """

    kind: Covers
    intervals: Intervals

    @property
    def total_ns(self) -> int:
        """Its length."""
        return length(self.intervals)


def covered_time(timeline: Timeline) -> CoveredTime | None:
    """The kept steps; without any the time of all device events; ``None`` without these either."""
    if timeline.span is not None and timeline.stretches is not None:
        has_ranges = timeline.steps is None or timeline.steps.has_ranges
        return CoveredTime(kind="steps" if has_ranges else "operators", intervals=timeline.stretches)
    span = timeline.device_span
    if span is None:
        return None
    return CoveredTime(
        kind="device events", intervals=union(np.array(span[:1], np.int64), np.array(span[1:], np.int64))
    )


def busy_time(timeline: Timeline, device: int) -> Intervals:
    """When one device is busy, in the whole trace."""
    trace = timeline.trace
    rows = trace.device.event[trace.device.device == device]
    return union(trace.begin_ns[rows], trace.end_ns[rows])


def busy_ns(timeline: Timeline, device: int, covered: Intervals) -> int:
    """How long one device is busy in a time."""
    return length(intersect(busy_time(timeline, device), covered))
