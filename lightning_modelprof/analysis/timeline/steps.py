"""Device-aware bounds of the steps: each lasts until the device events that it launched have ended.

Source: the Overview of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in 2026). It dropped a last
step with less than 0.8 times the device events of the step before it, also where there was simply less to
do; here the launches tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.launch_links import LaunchLinks
from lightning_modelprof.analysis.timeline.host_phases import Steps, recorded_steps
from lightning_modelprof.analysis.timeline.intervals import Intervals, locate
from lightning_modelprof.trace.model import Category, Trace

_COMPLETE: Final = 0.8
"""A step is complete if at least this part of its launches have their device events; the plugin's factor."""

_GAP_FACTOR: Final = 1.0
_MIN_GAP_NS: Final = 1_000_000
_MAX_LISTED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBounds:
    """The steps between device-aware bounds, k of them.

    Attributes:
        intervals: begin and end, shape (k, 2), in order and disjoint; a step may be empty.
        numbers: the steps' numbers.
        dropped: numbers of the steps that were left out at the end: nothing was launched in them, or the
            profiler stopped before their device events were in.
        stretches: from the begin of the first to the end of the last of steps that follow each other, an
            interval set. There are several when steps between them were not recorded.
        notes: on what is left out, for tables whose figures are about the kept steps as a whole.
    """

    intervals: NDArray[np.int64]
    numbers: tuple[int, ...]
    dropped: tuple[int, ...]
    stretches: Intervals
    notes: tuple[str, ...]


def bound_steps(trace: Trace, steps: Steps, launch: LaunchLinks) -> StepBounds:
    """Extend each step to the end of the device events launched in it; the next one begins there.

    The first step begins after the device events that are left over from before it.
    """
    launching = _launching_step(trace, steps.intervals, launch)
    num_kept = _without_tail(trace, steps.intervals, launch)
    intervals = _bounds(trace, steps.intervals, launching)[:num_kept]
    numbers, dropped = steps.numbers[:num_kept], steps.numbers[num_kept:]
    runs = _runs(numbers, steps.intervals[:num_kept])
    stretches = np.array([(intervals[run[0], 0], intervals[run[-1], 1]) for run in runs], np.int64)
    stretches = stretches.reshape(-1, 2)
    return StepBounds(
        intervals=intervals,
        numbers=numbers,
        dropped=dropped,
        stretches=stretches[stretches[:, 0] < stretches[:, 1]],
        notes=(*dropped_note(dropped), *_stretches_note(numbers, runs)),
    )


def dropped_note(dropped: tuple[int, ...]) -> tuple[str, ...]:
    """Which steps were left out at the end."""
    if not dropped:
        return ()
    return (
        f"Steps left out at the end: {', '.join(map(str, dropped))}. Nothing was launched in them, or the"
        " profiler stopped before the device events that they launched were in.",
    )


def long_gaps(steps: Intervals) -> NDArray[np.intp]:
    """After which steps much time passes before the next one: steps that follow each other touch."""
    if not len(steps):
        return np.zeros(0, np.intp)
    limit_ns = max(_MIN_GAP_NS, _GAP_FACTOR * float(np.median(steps[:, 1] - steps[:, 0])))
    return np.flatnonzero(steps[1:, 0] - steps[:-1, 1] > limit_ns)


def _launching_step(trace: Trace, steps: Intervals, launch: LaunchLinks) -> NDArray[np.intp]:
    """Index of the step in which any thread launched each device event, -1 without one, shape (m,)."""
    runtime = launch.runtime
    launching = np.full(len(runtime), -1, np.intp)
    known = np.flatnonzero(runtime >= 0)
    step = locate(trace.begin_ns[runtime[known]], steps)
    inside = (step >= 0) & (trace.end_ns[runtime[known]] <= steps[step, 1])  # wholly, as the plugin had it
    launching[known[inside]] = step[inside]
    return launching


def _bounds(trace: Trace, steps: Intervals, launching: NDArray[np.intp]) -> NDArray[np.int64]:
    """Begin and end of each step, shape (k, 2)."""
    work = trace.device.event
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
    return np.array(bounds, np.int64).reshape(-1, 2)


def _without_tail(trace: Trace, steps: Intervals, launch: LaunchLinks) -> int:
    """How many steps to keep: the profiler may stop before the device events of the last ones are in.

    A step is complete when at least 0.8 of its launches have their device events, compared with the step in
    which most have them (of some calls, such as a set of 0 bytes, none have). Launches are the calls of the
    runtime by whose names device events were launched anywhere. Steps at the end that launched nothing are
    what follows the last ``profiler.step()``, unless the callback noted that they were recorded.
    """
    launched = np.zeros(len(trace), np.bool_)
    launched[launch.runtime[launch.runtime >= 0]] = True
    launches_by_name = np.zeros(len(trace.names), np.bool_)
    launches_by_name[trace.name[launched]] = True
    calls = np.flatnonzero(
        (trace.category == Category.RUNTIME) & launches_by_name[trace.name] & (trace.correlation >= 0)
    )
    step = locate(trace.begin_ns[calls], steps)
    num_calls = np.bincount(step[step >= 0], minlength=len(steps))
    num_done = np.bincount(step[(step >= 0) & launched[calls]], minlength=len(steps))
    done = num_done / np.maximum(num_calls, 1)
    if not done.any():
        return len(steps)
    is_complete = np.where(num_calls > 0, done >= _COMPLETE * done.max(), recorded_steps(trace) is not None)
    return int(np.flatnonzero(is_complete)[-1]) + 1


def _runs(numbers: tuple[int, ...], steps: Intervals) -> list[NDArray[np.intp]]:
    """Indices of the steps that follow each other by number and in time, run by run."""
    if not numbers:
        return []
    ends = np.union1d(np.flatnonzero(np.diff(np.array(numbers, np.int64)) != 1), long_gaps(steps))
    return np.split(np.arange(len(numbers)), ends.astype(np.intp) + 1)


def _stretches_note(numbers: tuple[int, ...], runs: list[NDArray[np.intp]]) -> tuple[str, ...]:
    """Which steps follow each other, where not all do."""
    if len(runs) < 2:
        return ()
    spans = [(numbers[run[0]], numbers[run[-1]]) for run in runs]
    texts = [f"{first} to {last}" if first != last else str(first) for first, last in spans[:_MAX_LISTED]]
    more = f" and {len(runs) - _MAX_LISTED} more" if len(runs) > _MAX_LISTED else ""
    return (
        f"The steps are {len(runs)} stretches with time between them that is in no ratio: {', '.join(texts)}"
        f"{more}.",
    )
