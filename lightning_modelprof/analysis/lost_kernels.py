"""Lost kernels: launches whose kernel is not in the trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.grouping import by_name
from lightning_modelprof.analysis.timeline.intervals import locate
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.trace.model import Category

_LAUNCH_WORDS: Final = ("LaunchKernel", "LaunchCooperativeKernel", "KernelLaunch", "GraphLaunch")
"""Calls that start kernels on CUDA, ROCm and XPU: ``cudaLaunchKernelExC``, ``hipExtModuleLaunchKernel``,
``urEnqueueKernelLaunch``, ``cudaGraphLaunch``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunchCount:
    """Calls that launch kernels, in the kept steps, or in the whole trace where it has none.

    A launch has no kernel when it was captured into a graph, which runs nothing, or when the profiler lost
    the device's events.

    Attributes:
        launches: how many; a graph is one.
        lost: those of which no kernel is in the trace.
        kernels: that were launched there; those whose launch is not known, that began there.
        steps: numbers of the steps with lost ones.
    """

    launches: int
    lost: int
    kernels: int
    steps: tuple[int, ...] = ()

    @property
    def tells_nothing(self) -> bool:
        """Whether more launches lack their kernel than kernels are there."""
        return self.lost > self.kernels


def count_kernel_launches(timeline: Timeline) -> KernelLaunchCount:
    """How many kernels were launched, and how many of them the trace lacks."""
    trace = timeline.trace
    launches, is_lost = _launches(timeline)
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    launch_ns = timeline.launch.begin_ns[is_kernel]
    ran_ns = np.where(launch_ns >= 0, launch_ns, trace.begin_ns[trace.device.event[is_kernel]])
    if timeline.bounds is None or timeline.steps is None:
        return KernelLaunchCount(
            launches=len(launches), lost=int(np.count_nonzero(is_lost)), kernels=len(ran_ns)
        )
    numbers = timeline.bounds.numbers
    steps = timeline.steps.intervals[: len(numbers)]
    step = locate(trace.begin_ns[launches], steps)
    lost = np.bincount(step[(step >= 0) & is_lost], minlength=len(numbers))
    return KernelLaunchCount(
        launches=int(np.count_nonzero(step >= 0)),
        lost=int(lost.sum()),
        kernels=int(np.count_nonzero(locate(ran_ns, steps) >= 0)),
        steps=tuple(number for number, count in zip(numbers, lost.tolist(), strict=True) if count),
    )


def pool_kernel_launches(ranks: Iterable[KernelLaunchCount]) -> KernelLaunchCount:
    """Those of several ranks or windows together."""
    ranks = tuple(ranks)
    return KernelLaunchCount(
        launches=sum(one.launches for one in ranks),
        lost=sum(one.lost for one in ranks),
        kernels=sum(one.kernels for one in ranks),
        steps=tuple(sorted({number for one in ranks for number in one.steps})),
    )


def _launches(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of the k calls that start kernels, and which of them have no device event; both of shape (k,).

    A call of the driver inside one of the runtime is the same launch.
    """
    trace = timeline.trace
    is_launch = (trace.category == Category.RUNTIME) & (trace.correlation >= 0)
    is_launch &= trace.is_named(lambda name: any(word in name for word in _LAUNCH_WORDS))
    rows = np.flatnonzero(is_launch)
    has_kernel = np.zeros(len(trace), np.bool_)
    has_kernel[rows] = np.isin(trace.correlation[rows], trace.correlation[trace.device.event])
    outer = timeline.nearest(is_launch)[rows]
    is_inner = outer >= 0
    np.logical_or.at(has_kernel, outer[is_inner], has_kernel[rows[is_inner]])
    rows = rows[~is_inner]
    rows = rows[~_are_never_joined(timeline, rows, has_kernel[rows])]
    return rows, ~has_kernel[rows]


def _are_never_joined(
    timeline: Timeline, rows: NDArray[np.int64], has_kernel: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which launches are of a name that the recorder never joins to its kernels, though these are there.

    That is a name of which no call has a kernel, where at least as many kernels have no launch.

    Args:
        timeline: the trace.
        rows: the launches, shape (k,).
        has_kernel: shape (k,).
    """
    trace = timeline.trace
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    num_orphans = int(np.count_nonzero(timeline.launch.runtime[is_kernel] < 0))
    names, name = by_name(trace, rows)
    num_calls = np.bincount(name, minlength=len(names))
    num_joined = np.bincount(name[has_kernel], minlength=len(names))
    never: NDArray[np.bool_] = ((num_joined == 0) & (num_calls <= num_orphans))[name]
    return never
