"""Step time breakdown: what each profiled step waited for, as the removed TensorBoard plugin showed it.

Source of the definitions: the Overview of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in
2026). Three of its faults are mended: categories that fill a step leave nothing to those below them,
communication kernels are told by their names, and annotations around a whole step are no work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.host_phases import Steps, find_steps, recorded_steps
from lightning_modelprof.analysis.intervals import Intervals, locate, partition, union
from lightning_modelprof.run.phases import RANGE_PREFIX, STEP_RANGE_PREFIX
from lightning_modelprof.run.trace import DEVICE_WORK, Category, Trace

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
"""What a step consists of, from high to low priority: where several run, the first one owns the time."""

_COMMUNICATION_KERNELS: Final = ("nccl", "rccl")
_COMMUNICATION_OPERATORS: Final = ("nccl:", "gloo:")
_DATALOADER: Final = "enumerate(DataLoader)#"
_DATAPIPE: Final = "enumerate(DataPipe)#"
_NOT_WORK: Final = (STEP_RANGE_PREFIX, RANGE_PREFIX, "[pl]")
"""Ranges that say where the host is, not that it works: the step's, this package's and Lightning's."""

_NO_RANGES_NOTE: Final = "The trace has no ProfilerStep ranges: step 0 is the span of its host operators."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What one step consists of.

    Attributes:
        number: the step's number.
        total_ns: its length between device-aware bounds.
        parts_ns: time of each of ``STEP_CATEGORIES``; they sum to ``total_ns`` exactly.
    """

    number: int
    total_ns: int
    parts_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """What the steps of one window consist of.

    Attributes:
        steps: the steps, in order of time; at least one.
        mean_total_ns: mean length of a step.
        mean_parts_ns: mean time of each of ``STEP_CATEGORIES``.
        shares: share of each category in the time of all steps; ``None`` if that is 0.
        has_device: whether the trace has any device events.
        notes: caveats.
    """

    steps: tuple[StepParts, ...]
    mean_total_ns: float
    mean_parts_ns: tuple[float, ...]
    shares: tuple[float | None, ...]
    has_device: bool
    notes: tuple[str, ...]


def break_down_steps(trace: Trace) -> StepBreakdown | None:
    """Split each step among the categories, over all threads, streams and devices of the process.

    Args:
        trace: one profiler window. The steps are those that its metadata lists as complete, or all when it
            lists none; a trace without any step counts as one step from its first to its last operator.

    Returns:
        ``None`` when the trace has none of the listed steps, or neither steps nor operators.
    """
    found = find_steps(trace, recorded_steps(trace))
    if found is None and find_steps(trace, None) is None:
        found = _span_of_operators(trace)
    if found is None:
        return None
    bounds, num_device_events = _device_aware_bounds(trace, found.intervals)
    num_kept = _without_tail(num_device_events)
    parts_ns = _parts(bounds[:num_kept], _layers(trace, found.intervals))
    total_ns = bounds[:num_kept, 1] - bounds[:num_kept, 0]
    whole_ns = int(total_ns.sum())
    sums_ns = [int(value) for value in parts_ns.sum(axis=0)]
    return StepBreakdown(
        steps=tuple(
            StepParts(number=number, total_ns=int(total), parts_ns=tuple(parts.tolist()))
            for number, total, parts in zip(found.numbers[:num_kept], total_ns, parts_ns, strict=True)
        ),
        mean_total_ns=whole_ns / num_kept,
        mean_parts_ns=tuple(value / num_kept for value in sums_ns),
        shares=tuple(value / whole_ns if whole_ns else None for value in sums_ns),
        has_device=bool(np.isin(trace.category, DEVICE_WORK).any()),
        notes=(*found.notes, *_tail_note(found.numbers[num_kept:])),
    )


def _span_of_operators(trace: Trace) -> Steps | None:
    """One step 0 around all host operators, ``None`` without any."""
    operators = np.flatnonzero(trace.category == Category.CPU_OP)
    if not len(operators):
        return None
    # An operator of length 0 would give an empty step, which is none.
    span = union(trace.begin_ns[operators].min(keepdims=True), trace.end_ns[operators].max(keepdims=True))
    if not len(span):
        return None
    track = int(trace.track[operators[0]])
    return Steps(intervals=span, numbers=(0,), track=track, notes=(_NO_RANGES_NOTE,))


def _launching_step(trace: Trace, work: NDArray[np.intp], steps: Intervals) -> NDArray[np.intp]:
    """Index of the step in which any thread launched each device event, -1 without one.

    Args:
        trace: the trace.
        work: indices of the device events, shape (n,).
        steps: the steps on the host, m rows.

    Returns:
        Shape (n,), values from -1 to m - 1.
    """
    launches = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation >= 0))
    step = locate(trace.begin_ns[launches], steps)
    inside = (step >= 0) & (trace.end_ns[launches] <= steps[step, 1])  # wholly, as the plugin had it
    launches, step = launches[inside], step[inside]
    order = np.argsort(trace.correlation[launches], kind="stable")
    correlation = trace.correlation[launches[order]]
    match = np.searchsorted(correlation, trace.correlation[work])
    known = match < len(launches)
    known[known] = correlation[match[known]] == trace.correlation[work[known]]
    launching = np.full(len(work), -1, np.intp)
    launching[known] = step[order[match[known]]]
    return launching


def _device_aware_bounds(trace: Trace, steps: Intervals) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Extend each step to the end of the device events launched in it; the next one begins there.

    The first step begins after the device events that are left over from before it.

    Returns:
        Begin and end of each step, shape (m, 2), in order and disjoint, though a step may be empty; and
        how many device events each step launched, shape (m,).
    """
    work = np.flatnonzero(np.isin(trace.category, DEVICE_WORK))
    launching = _launching_step(trace, work, steps)
    begin_ns, end_ns = trace.begin_ns[work], trace.end_ns[work]
    launched = launching >= 0
    last_ns = steps[:, 1].copy()
    np.maximum.at(last_ns, launching[launched], end_ns[launched])
    reached_ns = int(steps[0, 0])
    if (launching == 0).any():
        left_over = end_ns[~launched & (end_ns < begin_ns[launching == 0].min())]
        reached_ns = int(left_over.max(initial=reached_ns))
    bounds = []
    for host_begin_ns, end in zip(steps[:, 0].tolist(), last_ns.tolist(), strict=True):
        begin = max(reached_ns, host_begin_ns)
        reached_ns = max(end, begin)
        bounds.append((begin, reached_ns))
    return np.array(bounds, np.int64), np.bincount(launching[launched], minlength=len(steps))


def _without_tail(num_device_events: NDArray[np.intp]) -> int:
    """How many steps to keep: the profiler may stop before the device events of the last ones are in."""
    with_work = np.flatnonzero(num_device_events)
    if not len(with_work):
        return len(num_device_events)
    last = int(with_work[-1])
    is_cut = last > 0 and 5 * num_device_events[last] < 4 * num_device_events[last - 1]  # below 0.8 of it
    return last if is_cut else last + 1


def _tail_note(dropped: tuple[int, ...]) -> tuple[str, ...]:
    """Which steps were taken for incomplete."""
    if not dropped:
        return ()
    numbers = ", ".join(map(str, dropped))
    return (
        f"Steps left out at the end: {numbers}. The profiler seems to have stopped before their device events"
        " were in: there are none, or less than 0.8 times as many as in the step before.",
    )


def _named(trace: Trace, test: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Which events have a name that passes the test, shape (n,)."""
    passes = np.array([test(name) for name in trace.names], np.bool_)
    return passes[trace.name]


def _is_communication_kernel(name: str) -> bool:
    lower = name.lower()
    return any(library in lower for library in _COMMUNICATION_KERNELS)


def _is_dataloader(name: str) -> bool:
    return name.startswith(_DATAPIPE) or (name.startswith(_DATALOADER) and name.endswith(".__next__"))


def _wraps_a_step(trace: Trace, steps: Intervals) -> NDArray[np.bool_]:
    """Which events are annotations around a whole step, shape (n,)."""
    first = np.searchsorted(steps[:, 0], trace.begin_ns)  # the first step that does not begin before it
    first_end_ns = np.append(steps[:, 1], np.iinfo(np.int64).max)[first]
    wraps: NDArray[np.bool_] = (trace.category == Category.USER_ANNOTATION) & (first_end_ns <= trace.end_ns)
    return wraps


def _layers(trace: Trace, steps: Intervals) -> list[Intervals]:
    """Time of each category but Other, whatever else runs then.

    Args:
        trace: the trace.
        steps: the steps on the host.
    """
    kind = trace.category
    # Torch 1.9 wrote annotations as operators; the device's twins of annotations are no host ranges.
    host = (kind == Category.CPU_OP) | (kind == Category.USER_ANNOTATION)
    kernel = kind == Category.KERNEL
    communication_kernel = kernel & _named(trace, _is_communication_kernel)
    communication_op = host & _named(trace, lambda name: name.startswith(_COMMUNICATION_OPERATORS))
    dataloader = host & _named(trace, _is_dataloader)
    not_work = _named(trace, lambda name: name.startswith(_NOT_WORK)) | _wraps_a_step(trace, steps)
    members = (
        kernel & ~communication_kernel,
        kind == Category.MEMCPY,
        kind == Category.MEMSET,
        communication_kernel | communication_op,
        kind == Category.RUNTIME,
        dataloader,
        host & ~communication_op & ~dataloader & ~not_work,
    )
    return [union(trace.begin_ns[member], trace.end_ns[member]) for member in members]


def _parts(bounds: NDArray[np.int64], layers: list[Intervals]) -> NDArray[np.int64]:
    """Nanoseconds of each category in each step.

    Args:
        bounds: begin and end of each step, shape (m, 2), in order and disjoint; may be empty.
        layers: time of each category but Other.

    Returns:
        Shape (m, number of categories); each row sums to its step's length.
    """
    filled = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
    whole = bounds[filled]
    parts_ns = np.zeros((len(bounds), len(layers) + 1), np.int64)
    for category, pieces in enumerate(partition(whole, layers)):
        step = filled[locate(pieces[:, 0], whole)]  # no piece lies in two steps, even where steps touch
        np.add.at(parts_ns[:, category], step, pieces[:, 1] - pieces[:, 0])
    return parts_ns
