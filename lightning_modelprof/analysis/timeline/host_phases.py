"""Split the profiled steps on the host among the phases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import (
    Intervals,
    innermost,
    intersect,
    locate,
    outermost,
    partition,
    union,
)
from lightning_modelprof.analysis.timeline.names import (
    AUTOGRAD_PREFIX,
    DATALOADER_PREFIXES,
    OPTIMIZER_PREFIX,
    ZERO_GRAD_PREFIX,
)
from lightning_modelprof.record import Record, field
from lightning_modelprof.run.phases import RANGE_PREFIX, STEP_RANGE_PREFIX, TRACE_METADATA_KEY
from lightning_modelprof.trace.model import Category, Trace

PhaseSource = Literal["modelprof ranges", "torch ranges", "none"]
"""Source of the phases: this package's ranges, torch's own, or nothing."""

_MAX_DIGITS: Final = 18
"""Digits of a step number; more are garbage."""

_PIECED: Final = frozenset({"backward", "forward"})
"""Phases pieced together from operators when torch's own ranges are used; they have no calls."""


class Steps(Record, frozen=True, kw_only=True):
    """The steps as an interval set, and their thread."""

    intervals: Intervals
    numbers: tuple[int, ...]
    track: int
    notes: tuple[str, ...]
    has_ranges: bool = True
    """Whether they are ranges; if not, the only step is the span of all operators."""
    are_numbered: bool = True
    """Whether the recorder numbered them, so that a step has the same number on all ranks."""
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Ranges that aren't ``ProfilerStep``, on all threads."""
    origin: str = ""
    """Note on where such ranges come from."""


class HostTime(Record, frozen=True, kw_only=True):
    """Phases of the steps.

    Attributes:
        pieces: interval set of n rows inside the steps.
        call: index of each piece's call, shape (n,), values from 0 to m - 1.
        phase: phase key of each call, shape (m,).
        begin_ns: start of each call's range, shape (m,).
        not_ranges: phases that are pieced together and so have no calls, only one placeholder each.
    """

    pieces: Intervals
    call: NDArray[np.intp]
    phase: NDArray[np.str_]
    begin_ns: NDArray[np.int64]
    source: PhaseSource
    not_ranges: frozenset[str] = frozenset()


def recorded_steps(trace: Trace) -> Collection[int] | None:
    """Numbers of the complete steps, as noted by the callback in the trace; ``None`` without a note."""
    own = trace.metadata.get(TRACE_METADATA_KEY)
    numbers = own.get("recorded_steps") if isinstance(own, dict) else None
    return numbers if isinstance(numbers, list) else None


def _host_ranges(trace: Trace, prefixes: tuple[str, ...], track: int | None = None) -> NDArray[np.intp]:
    names = np.concatenate([trace.name_ids(prefix) for prefix in prefixes])
    # Torch 1.9 wrote ranges as operators; the device's copies of annotations aren't host ranges.
    host = (trace.category == Category.CPU_OP) | (trace.category == Category.USER_ANNOTATION)
    mask = host & np.isin(trace.name, names)
    return np.flatnonzero(mask if track is None else mask & (trace.track == track))


def _suffix(trace: Trace, index: int, prefix: str = STEP_RANGE_PREFIX) -> str:
    name: str = trace.names[trace.name[index]]
    return name[len(prefix) :]


def has_step_ranges(trace: Trace) -> bool:
    """Whether the trace has ``ProfilerStep`` ranges on the host, of any length."""
    return len(_host_ranges(trace, (STEP_RANGE_PREFIX,))) > 0


def find_steps(trace: Trace, wanted: Collection[int] | None) -> Steps | None:
    """The wanted steps on the thread with most of them, ``None`` without any."""
    ranges = _host_ranges(trace, (STEP_RANGE_PREFIX,))
    texts = {index: _suffix(trace, index) for index in ranges.tolist()}
    numbered = {i: int(text) for i, text in texts.items() if text.isdecimal() and len(text) <= _MAX_DIGITS}
    if not numbered:
        return None
    track = int(np.bincount(trace.track[list(numbered)]).argmax())
    on_track = [index for index in numbered if trace.track[index] == track]
    chosen = [index for index in on_track if wanted is None or numbered[index] in wanted]
    intervals, kept = outermost(trace.begin_ns[chosen], trace.end_ns[chosen])
    if not len(kept):
        return None
    elsewhere = len(numbered) - len(on_track)
    note = f"Steps on other threads are left out ({elsewhere}); the rows cover one thread's steps."
    return Steps(
        intervals=intervals,
        numbers=tuple(numbered[chosen[index]] for index in kept.tolist()),
        track=track,
        notes=(note,) if elsewhere else (),
    )


def host_time(trace: Trace, steps: Steps) -> HostTime:
    """Phases from this package's ranges, or else from torch's."""
    return own_host_time(trace, steps) or torch_host_time(trace, steps)


def own_host_time(trace: Trace, steps: Steps) -> HostTime | None:
    """Phases from this package's ranges, which nest like calls; ``None`` without any."""
    ranges = _host_ranges(trace, (RANGE_PREFIX,), steps.track)
    if not len(ranges):
        return None
    everywhere, owner = innermost(trace.begin_ns[ranges], trace.end_ns[ranges])
    pieces = intersect(everywhere, steps.intervals)
    return HostTime(
        pieces=pieces,
        call=owner[locate(pieces[:, 0], everywhere)],
        phase=np.array([_suffix(trace, i, RANGE_PREFIX) for i in ranges.tolist()], np.str_),
        begin_ns=trace.begin_ns[ranges],
        source="modelprof ranges",
    )


def torch_host_time(trace: Trace, steps: Steps) -> HostTime:
    """Phases from torch's own ranges, if any.

    Dataloader, Zero grad and Optimization are ranges on the steps' thread. Backward and Forward are pieced
    together from operators: they have time, but no calls. Where they overlap (an optimizer step around a
    closure), the first of ``layers`` gets the time.
    """
    dataloader = _ranges_on(trace, steps, *DATALOADER_PREFIXES)
    zero_grad = _ranges_on(trace, steps, ZERO_GRAD_PREFIX)
    optimizer = _ranges_on(trace, steps, OPTIMIZER_PREFIX)
    backward = _autograd_time(trace)
    forward = _forward_time(trace, steps, backward)
    layers = (  # phase, its time, its calls; a pieced-together phase counts as one call
        ("dataloader", dataloader, dataloader),
        ("zero_grad", zero_grad, zero_grad),
        ("backward", backward, backward[:1]),
        ("optimizer", _after_backward(optimizer, backward), optimizer),
        ("forward", forward, forward[:1]),
    )
    *parts, _ = partition(steps.intervals, [time for _, time, _ in layers])
    owners = []
    num_calls = 0
    for (key, _, calls), part in zip(layers, parts, strict=True):
        within = np.zeros(len(part), np.intp) if key in _PIECED else locate(part[:, 0], calls)
        owners.append(num_calls + within)
        num_calls += len(calls)
    pieces = np.concatenate(parts)
    order = np.argsort(pieces[:, 0])
    return HostTime(
        pieces=pieces[order],
        call=np.concatenate(owners)[order],
        phase=np.array([key for key, _, calls in layers for _ in range(len(calls))], np.str_),
        begin_ns=np.concatenate([calls[:, 0] for _, _, calls in layers]),
        source="torch ranges" if num_calls else "none",
        not_ranges=_PIECED,
    )


def _ranges_on(trace: Trace, steps: Steps, *prefixes: str) -> Intervals:
    """Outermost ranges of one kind on the steps' thread."""
    ranges = _host_ranges(trace, prefixes, steps.track)
    return outermost(trace.begin_ns[ranges], trace.end_ns[ranges])[0]


def _autograd_time(trace: Trace) -> Intervals:
    nodes = _host_ranges(trace, (AUTOGRAD_PREFIX,))
    if not len(nodes):  # before torch 1.10, the engine had no range, only the nodes
        names = [i for i, name in enumerate(trace.names) if "Backward" in name or "AccumulateGrad" in name]
        nodes = np.flatnonzero((trace.category == Category.CPU_OP) & np.isin(trace.name, names))
    return union(trace.begin_ns[nodes], trace.end_ns[nodes])


def _after_backward(optimizer: Intervals, backward: Intervals) -> Intervals:
    """Optimizer steps from the end of the last backward inside them (a closure)."""
    if not len(backward):
        return optimizer
    last = np.searchsorted(backward[:, 0], optimizer[:, 1]) - 1
    backward_end = np.where(last >= 0, backward[last, 1], optimizer[:, 0])
    begin = np.maximum(optimizer[:, 0], backward_end)
    kept = begin < optimizer[:, 1]
    return np.column_stack((begin[kept], optimizer[kept, 1]))


def _forward_time(trace: Trace, steps: Steps, backward: Intervals) -> Intervals:
    """Time in operators on the steps' thread before each step's first backward."""
    not_operators = np.concatenate(
        [
            trace.name_ids(prefix)
            for prefix in (STEP_RANGE_PREFIX, *DATALOADER_PREFIXES, ZERO_GRAD_PREFIX, OPTIMIZER_PREFIX)
        ]
    )
    mask = (trace.category == Category.CPU_OP) & (trace.track == steps.track)
    ops = np.flatnonzero(mask & ~np.isin(trace.name, not_operators))
    in_steps = intersect(backward, steps.intervals)
    step_of = locate(in_steps[:, 0], steps.intervals)
    with_backward, first = np.unique(step_of, return_index=True)
    begin = steps.intervals[with_backward, 0]
    before = np.column_stack((begin, in_steps[first, 0]))
    return intersect(union(trace.begin_ns[ops], trace.end_ns[ops]), before[before[:, 0] < before[:, 1]])
