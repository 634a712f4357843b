"""Device-aware bounds of the steps: each lasts until the device events that it launched have ended.

Source: the Overview of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in 2026).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.host_phases import Steps
from lightning_modelprof.analysis.intervals import Intervals, locate
from lightning_modelprof.analysis.launch_links import LaunchLinks
from lightning_modelprof.run.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBounds:
    """The steps between device-aware bounds, k of them.

    Attributes:
        intervals: begin and end, shape (k, 2), in order and disjoint; a step may be empty.
        numbers: the steps' numbers.
        dropped: numbers of the steps that were left out at the end, because the profiler seems to have
            stopped before their device events were in.
    """

    intervals: NDArray[np.int64]
    numbers: tuple[int, ...]
    dropped: tuple[int, ...]


def bound_steps(trace: Trace, steps: Steps, launch: LaunchLinks) -> StepBounds:
    """Extend each step to the end of the device events launched in it; the next one begins there.

    The first step begins after the device events that are left over from before it.
    """
    launching = _launching_step(trace, steps.intervals, launch)
    bounds = _bounds(trace, steps.intervals, launching)
    num_kept = _without_tail(np.bincount(launching[launching >= 0], minlength=len(bounds)))
    return StepBounds(
        intervals=bounds[:num_kept], numbers=steps.numbers[:num_kept], dropped=steps.numbers[num_kept:]
    )


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


def _without_tail(num_device_events: NDArray[np.intp]) -> int:
    """How many steps to keep: the profiler may stop before the device events of the last ones are in."""
    with_work = np.flatnonzero(num_device_events)
    if not len(with_work):
        return len(num_device_events)
    last = int(with_work[-1])
    is_cut = last > 0 and 5 * num_device_events[last] < 4 * num_device_events[last - 1]  # below 0.8 of it
    return last if is_cut else last + 1
