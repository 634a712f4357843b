"""Step time breakdown: what each profiled step waited for, as in the removed TensorBoard plugin.

Source of the definitions: the Overview of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in
2026), with four of its faults fixed: categories that fill a step leave nothing to those below them,
communication kernels are recognized by name, annotations around a whole step aren't work, and a last step
with less work than the one before it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import InTurn, pool
from lightning_modelprof.analysis.timeline.intervals import Intervals, locate, partition, union
from lightning_modelprof.analysis.timeline.names import is_dataloader, is_place
from lightning_modelprof.analysis.timeline.steps import dropped_note
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

STEP_CATEGORIES: Final = (
    "kernel",
    "memcpy",
    "memset",
    "communication",
    "runtime",
    "dataloader",
    "cpu_exec",
    "other",
)
"""Categories from high to low priority: if several run at the same time, the first one gets the time."""


NO_STEP: Final = "the trace has none of the recorded steps, or neither steps nor operators"


class StepParts(Record, frozen=True, kw_only=True):
    """Composition of one step.

    Attributes:
        total_ns: its length between device-aware bounds.
        parts_ns: time of each of ``STEP_CATEGORIES``; they sum to ``total_ns`` exactly.
    """

    number: int
    total_ns: int
    parts_ns: tuple[int, ...]


class StepBreakdown(Record, frozen=True, kw_only=True):
    """Composition of one window's steps.

    Attributes:
        steps: in order of time; at least one.
    """

    steps: InTurn[StepParts]
    has_device: bool
    has_runtime: bool
    notes: tuple[str, ...]

    @property
    def _total_ns(self) -> int:
        return sum(step.total_ns for step in self.steps)

    @property
    def _sums_ns(self) -> list[int]:
        return [sum(parts) for parts in zip(*(step.parts_ns for step in self.steps), strict=True)]

    @property
    def mean_total_ns(self) -> float:
        return self._total_ns / len(self.steps)

    @property
    def mean_parts_ns(self) -> tuple[float, ...]:
        """Mean time of each of ``STEP_CATEGORIES``."""
        return tuple(ns / len(self.steps) for ns in self._sums_ns)

    @property
    def shares(self) -> tuple[float | None, ...]:
        """Each category's share of the time of all steps; ``None`` if that is 0."""
        total_ns = self._total_ns
        return tuple(ns / total_ns if total_ns else None for ns in self._sums_ns)


def summarize_step_breakdown(timeline: Timeline) -> StepBreakdown:
    """Split each step among the categories, over all threads, streams and devices of the process.

    Raises:
        NotMeasured: if the trace has neither steps nor operators, or none of the recorded steps.
    """
    steps, bounds = timeline.steps, timeline.bounds
    if steps is None or bounds is None or not bounds.numbers:
        raise NotMeasured(NO_STEP)
    parts_ns = _parts(bounds.intervals, _layers(timeline, steps.intervals))
    total_ns = bounds.intervals[:, 1] - bounds.intervals[:, 0]
    return StepBreakdown(
        steps=tuple(
            StepParts(number=number, total_ns=total, parts_ns=tuple(parts))
            for number, total, parts in zip(bounds.numbers, total_ns.tolist(), parts_ns.tolist(), strict=True)
        ),
        has_device=timeline.has_device,
        has_runtime=bool((timeline.trace.category == Category.RUNTIME).any()),
        notes=(*steps.notes, *dropped_note(bounds.dropped)),
    )


def pool_breakdowns(ranks: Sequence[StepBreakdown]) -> StepBreakdown:
    """The breakdown over the steps of all ranks, at least one.

    If any rank has device events, ranks without are left out: their Kernel isn't 0 but unmeasured, and a mean
    needs all parts of a step.
    """
    return pool([rank for rank in ranks if rank.has_device] or ranks)


def _wraps_a_step(trace: Trace, steps: Intervals) -> NDArray[np.bool_]:
    """Which events are annotations around a whole step, shape (n,)."""
    first = np.searchsorted(steps[:, 0], trace.begin_ns)  # the first step that doesn't start before it
    first_end_ns = np.append(steps[:, 1], np.iinfo(np.int64).max)[first]
    wraps: NDArray[np.bool_] = (trace.category == Category.USER_ANNOTATION) & (first_end_ns <= trace.end_ns)
    return wraps


def _layers(timeline: Timeline, steps: Intervals) -> list[Intervals]:
    """Time of each category except Other, regardless of overlaps."""
    trace = timeline.trace
    kind = trace.category
    kernel = kind == Category.KERNEL
    communication = timeline.is_communication
    dataloader = trace.is_named(is_dataloader) & (timeline.is_annotation | timeline.is_operator)
    not_work = communication | dataloader | trace.is_named(is_place) | _wraps_a_step(trace, steps)
    not_work |= timeline.is_step_range
    members = (
        kernel & ~communication,
        kind == Category.MEMCPY,
        kind == Category.MEMSET,
        communication,
        kind == Category.RUNTIME,
        dataloader,
        (timeline.is_annotation | timeline.is_operator) & ~not_work,
    )
    return [union(trace.begin_ns[member], trace.end_ns[member]) for member in members]


def _parts(bounds: NDArray[np.int64], layers: list[Intervals]) -> NDArray[np.int64]:
    """Nanoseconds of each category in each step; each row sums to its step's length.

    Args:
        bounds: start and end of each step, shape (m, 2), in order and disjoint; may be empty.
        layers: time of each category except Other.
    """
    filled = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
    whole = bounds[filled]
    parts_ns = np.zeros((len(bounds), len(layers) + 1), np.int64)
    for category, pieces in enumerate(partition(whole, layers)):
        step = filled[locate(pieces[:, 0], whole)]  # no piece is in two steps, even if steps touch
        np.add.at(parts_ns[:, category], step, pieces[:, 1] - pieces[:, 0])
    return parts_ns
