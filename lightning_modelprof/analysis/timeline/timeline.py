"""Timeline: one trace with derived columns that all facts share."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.host_phases import (
    HostTime,
    Steps,
    find_steps,
    has_step_ranges,
    host_time,
    recorded_steps,
)
from lightning_modelprof.analysis.timeline.intervals import Intervals, union
from lightning_modelprof.analysis.timeline.names import is_range
from lightning_modelprof.analysis.timeline.nesting import (
    LaunchLinks,
    find_communication,
    find_parents,
    link_launches,
    nearest_ancestor,
)
from lightning_modelprof.analysis.timeline.steps import (
    StepBounds,
    bound_steps,
    guess_steps,
    num_whole_steps,
    steps_asked_for,
)
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

_NO_RANGES_NOTE: Final = "The trace has no ProfilerStep ranges, so step 0 is the span of its CPU operators."
_EMPTY_RANGES_NOTE: Final = (
    "The trace's ProfilerStep ranges have length 0, so step 0 is the span of its CPU operators."
)


class Timeline(Record, frozen=True, kw_only=True, eq=False):
    """One trace with what all facts share; n events, m of them device events.

    Attributes:
        steps: the steps on the host; without ``ProfilerStep`` ranges those of :func:`guess_steps`, else one
            step 0 around all operators; ``None`` without operators or without any of the recorded steps.
        bounds: the steps between device-aware bounds; ``None`` without steps.
        host_time: phases of the steps on the host; ``None`` without steps.
        parent: int64, shape (n,): the innermost event around each host event on its thread, -1 for outermost
            and device events.
        is_operator: bool, shape (n,): operators, without annotations that old torch wrote as operators.
        is_annotation: bool, shape (n,): named ranges on the host.
        is_step_range: bool, shape (n,): ranges used as steps that aren't ``ProfilerStep``.
        is_communication: bool, shape (n,): kernels that move data between ranks, and the backend's operators
            on the host (``nccl:all_reduce``); see :func:`find_communication`.
        launch: shape (m,): launch of each device event.
        cut_steps: numbers of the last steps, which may be incomplete in a file that is cut off; they are in
            nothing above.
    """

    trace: Trace
    steps: Steps | None
    bounds: StepBounds | None
    host_time: HostTime | None
    parent: NDArray[np.int64]
    is_operator: NDArray[np.bool_]
    is_annotation: NDArray[np.bool_]
    is_step_range: NDArray[np.bool_]
    is_communication: NDArray[np.bool_]
    launch: LaunchLinks
    cut_steps: tuple[int, ...] = ()

    @property
    def span(self) -> tuple[int, int] | None:
        """From the start of the first kept step to the end of the last; ``None`` without steps."""
        bounds = self.bounds
        if bounds is None or not len(bounds.intervals):
            return None
        return int(bounds.intervals[0, 0]), int(bounds.intervals[-1, 1])

    @property
    def stretches(self) -> Intervals | None:
        """The span without gaps between kept steps that aren't consecutive; ``None`` without a span."""
        return None if self.span is None or self.bounds is None else self.bounds.stretches

    @property
    def device_span(self) -> tuple[int, int] | None:
        """From the start of the first device event to the end of the last; ``None`` without any."""
        work = self.trace.device.event
        if not len(work):
            return None
        return int(self.trace.begin_ns[work].min()), int(self.trace.end_ns[work].max())

    @property
    def has_device(self) -> bool:
        return len(self.trace.device) > 0

    def nearest(self, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The innermost wanted event around each host event, excluding itself, -1 without one, shape (n,)."""
        return nearest_ancestor(self.parent, wanted)


def build_timeline(trace: Trace, step_range: re.Pattern[str] | None = None) -> Timeline:
    """Derive what all facts share, for this package's windows only from completely recorded steps.

    Args:
        step_range: names of the ranges to use as steps; ``None`` for ``ProfilerStep``, else a guess.
    """
    operator_row = trace.category == Category.CPU_OP
    annotation_row = trace.category == Category.USER_ANNOTATION
    named_as_range = trace.is_named(is_range)
    parent = find_parents(trace)
    is_operator = operator_row & ~named_as_range
    is_annotation = annotation_row | (operator_row & named_as_range)
    launch = link_launches(trace, parent, is_operator)
    steps = _find_steps(trace, launch, is_annotation, step_range)
    is_step_range = np.zeros(len(trace), np.bool_)
    cut_steps: tuple[int, ...] = ()
    if steps is not None:
        is_step_range[steps.rows] = True
        if trace.is_cut and steps.has_ranges:
            steps, cut_steps = _without_cut(trace, steps, launch)
    return Timeline(
        trace=trace,
        steps=steps,
        bounds=None if steps is None else bound_steps(trace, steps, launch),
        host_time=None if steps is None else host_time(trace, steps),
        parent=parent,
        is_operator=is_operator,
        is_annotation=is_annotation,
        is_step_range=is_step_range,
        is_communication=find_communication(trace, parent, launch),
        launch=launch,
        cut_steps=cut_steps,
    )


def _without_cut(trace: Trace, steps: Steps, launch: LaunchLinks) -> tuple[Steps | None, tuple[int, ...]]:
    """The whole steps, ``None`` without any, and the numbers of the others."""
    num_whole = num_whole_steps(trace, steps.intervals, launch)
    numbers = steps.numbers
    whole = replace(steps, intervals=steps.intervals[:num_whole], numbers=numbers[:num_whole])
    return whole if num_whole else None, numbers[num_whole:]


def _find_steps(
    trace: Trace,
    launch: LaunchLinks,
    is_annotation: NDArray[np.bool_],
    step_range: re.Pattern[str] | None,
) -> Steps | None:
    if step_range is not None:
        return steps_asked_for(trace, step_range)
    wanted = recorded_steps(trace)
    steps = find_steps(trace, wanted)
    if steps is not None or find_steps(trace, None) is not None:
        return steps
    guess = guess_steps(trace, launch, is_annotation) if wanted is None else None
    return guess or _span_of_operators(trace)


def _span_of_operators(trace: Trace) -> Steps | None:
    operators = np.flatnonzero(trace.category == Category.CPU_OP)
    if not len(operators):
        return None
    # An operator of length 0 gives an empty step, which doesn't count.
    span = union(trace.begin_ns[operators].min(keepdims=True), trace.end_ns[operators].max(keepdims=True))
    if not len(span):
        return None
    track = int(trace.track[operators[0]])
    note = _EMPTY_RANGES_NOTE if has_step_ranges(trace) else _NO_RANGES_NOTE
    return Steps(intervals=span, numbers=(0,), track=track, notes=(note,), has_ranges=False)
