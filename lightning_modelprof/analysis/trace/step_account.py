"""Time of one rank's steps: their critical path, what runs in them, and why the GPU is idle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from lightning_modelprof.analysis.timeline.intervals import length
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.critical_path import Cause, CriticalPath, replayed_time
from lightning_modelprof.analysis.trace.host_waits import HostWaits
from lightning_modelprof.analysis.trace.idle import (
    CAUSES,
    Idle,
    IdleCause,
    find_fetches,
    find_idle,
    idle_in,
)
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES, StepBreakdown, StepParts
from lightning_modelprof.record import Record

OTHER: Final = "other"
"""Time in which nothing runs that has a cause of the critical path."""

_CAUSE_OF: Final[Mapping[str, Cause]] = {
    "kernel": "kernel",
    "memcpy": "copy",
    "memset": "copy",
    "communication": "communication",
    "runtime": "launch",
    "dataloader": "data loading",
    "cpu_exec": "host",
}
"""Causes by ``STEP_CATEGORIES`` key."""


class StepAccount(Record, frozen=True, kw_only=True):
    """Three accounts of the same steps.

    Attributes:
        recorded_ns: time of these steps, including the little time between their GPU-aware bounds.
        running_ns: time by running cause, or ``OTHER``, from the step time breakdown; they sum to
            ``recorded_ns``. Causes that the trace can't show are missing.
        path: the critical path; ``None`` if it isn't measured.
        idle_ns: idle time of the busiest GPU by cause; ``None`` if it isn't measured.
        after_waits_ns: part of its idle time with the cause "host" that would be saved if no call waited for
            the GPU; ``None`` if it isn't measured.
        counted_step_ns: mean step without the first of each series, if some are left out; else ``None``.
        why_not_path: why there is no critical path; ``""`` if there is one.
        why_not_waits: why ``after_waits_ns`` is unknown; ``""`` if it's known.
    """

    num_steps: int
    recorded_ns: int
    running_ns: Mapping[str, int]
    path: CriticalPath | None
    idle_ns: Mapping[IdleCause, int] | None
    after_waits_ns: int | None
    counted_step_ns: float | None
    why_not_path: str
    why_not_waits: str

    @property
    def step_ns(self) -> float:
        return self.recorded_ns / self.num_steps


def account_for_steps(
    timeline: Timeline,
    breakdown: StepBreakdown,
    *,
    path: CriticalPath | None,
    idle: Idle | None,
    waits: HostWaits | None,
    why_not_path: str,
    why_not_waits: str,
) -> StepAccount:
    """Account for the critical path's steps, or for all steps without one."""
    bounds = timeline.bounds
    assert bounds is not None, "the step time breakdown was measured"
    steps = breakdown.steps
    recorded_ns = length(bounds.stretches)
    if path is not None:  # its steps are the first ones
        steps = tuple(step for step in steps if step.total_ns)[: len(path.steps)]
        recorded_ns = path.recorded_ns
    is_counted = waits is not None and waits.num_steps < len(waits.saves_by_step_ns)
    return StepAccount(
        num_steps=len(steps),
        recorded_ns=recorded_ns,
        running_ns=_running(breakdown, steps, recorded_ns),
        path=path,
        idle_ns=None if idle is None else _idle_of(timeline, idle, path),
        after_waits_ns=None if waits is None else sum(waits.saves_by_step_ns[: len(steps)]),
        counted_step_ns=waits.steps_ns / waits.num_steps if waits is not None and is_counted else None,
        why_not_path=why_not_path,
        why_not_waits=why_not_waits,
    )


def _idle_of(timeline: Timeline, idle: Idle, path: CriticalPath | None) -> dict[IdleCause, int]:
    covered = idle.busiest.covered
    if path is not None and path.num_left_out:
        found = find_idle(timeline, idle.busiest.device, find_fetches(timeline))
        covered = idle_in(timeline, found, replayed_time(timeline))
    return dict(zip(CAUSES, covered.by_cause_ns, strict=True))


def _running(breakdown: StepBreakdown, steps: tuple[StepParts, ...], recorded_ns: int) -> dict[str, int]:
    unknown = {"kernel", "copy"} if not breakdown.has_device else set()
    if not breakdown.has_runtime:
        unknown.add("launch")
    parts_ns = np.array([step.parts_ns for step in steps], np.int64).sum(axis=0).tolist()
    running_ns: dict[str, int] = {}
    for category, ns in zip(STEP_CATEGORIES, parts_ns, strict=True):
        cause = _CAUSE_OF.get(category, OTHER)
        if cause not in unknown:
            running_ns[cause] = running_ns.get(cause, 0) + ns
    running_ns[OTHER] += recorded_ns - sum(running_ns.values())
    return running_ns
