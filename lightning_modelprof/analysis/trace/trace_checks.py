"""Sanity checks of a trace, reported before its figures."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.host_phases import Steps
from lightning_modelprof.analysis.timeline.intervals import different, is_among, locate
from lightning_modelprof.analysis.timeline.steps import long_gaps
from lightning_modelprof.analysis.timeline.tally import by_name
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category
from lightning_modelprof.units import milliseconds, percent

_LOSS_WORDS: Final = ("drop", "lost", "out of memory", "overflow", "fail to", "failed to")


_LOG_LEVELS: Final = ("WARNING", "ERROR")


_MAX_QUOTES: Final = 3


_CLOCK_TOLERANCE_NS: Final = 1_000
"""Timestamps of old traces are whole microseconds."""


_OVERHEAD_SHARE: Final = 0.1


def check_trace(timeline: Timeline) -> tuple[str, ...]:
    """Notes on missing or contradictory parts of the trace; empty for a sound one."""
    trace = timeline.trace
    notes = [*trace.damage, *_cut_steps(timeline.cut_steps)]
    if trace.num_dropped:
        notes.append(f"{trace.num_dropped:,} events have no usable time and are left out of all figures.")
    notes += _reported_losses(timeline)
    if timeline.has_device:
        notes += [*_lost_kernels(timeline), *_lost_launches(timeline), *_events_before_launch(timeline)]
    if timeline.steps is not None and timeline.steps.has_ranges:
        if timeline.steps.are_numbered:  # others needn't be consecutive
            notes += [*_overlapping_steps(timeline, timeline.steps), *_gaps(timeline.steps)]
            notes += _repeated_steps(timeline.steps)
        notes += _overhead(timeline, timeline.steps)
    return tuple(notes)


def _cut_steps(numbers: tuple[int, ...]) -> list[str]:
    if not numbers:
        return []
    if len(numbers) == 1:
        return [f"The last step ({numbers[0]}) is incomplete and left out."]
    return [f"The last {len(numbers)} steps ({_listed(list(numbers))}) are incomplete and left out."]


def _reported_losses(timeline: Timeline) -> list[str]:
    logs = [timeline.trace.metadata.get(level) for level in _LOG_LEVELS]
    lines = [line for log in logs if isinstance(log, list) for line in log if isinstance(line, str)]
    quotes = [line for line in lines if any(word in line.lower() for word in _LOSS_WORDS)]
    if not quotes:
        return []
    more = f" (and {len(quotes) - _MAX_QUOTES} more)" if len(quotes) > _MAX_QUOTES else ""
    return [f"The profiler reported losses: {'; '.join(quotes[:_MAX_QUOTES])}{more}."]


def _lost_kernels(timeline: Timeline) -> list[str]:
    count = count_kernel_launches(timeline)
    if not count.steps:
        return []
    return [
        f"{count.lost:,} of {count.launches:,} kernel launches have no kernel in the trace (steps"
        f" {_listed(list(count.steps))}). They were captured into a CUDA graph, or the profiler lost GPU"
        " events and the tables show too little GPU work. In that case record fewer steps."
    ]


def _lost_launches(timeline: Timeline) -> list[str]:
    unknown = int(np.count_nonzero(timeline.launch.runtime < 0))
    if not unknown:
        return []
    return [
        f"{unknown:,} of {len(timeline.launch.runtime):,} GPU events have no launch in the trace. They were"
        " launched before the trace started, or the profiler lost CPU events."
    ]


def _events_before_launch(timeline: Timeline) -> list[str]:
    trace = timeline.trace
    runtime = timeline.launch.runtime
    known = np.flatnonzero(runtime >= 0)
    early_ns = trace.begin_ns[runtime[known]] - trace.begin_ns[trace.device.event[known]]
    wrong = early_ns > _CLOCK_TOLERANCE_NS
    if not wrong.any():
        return []
    return [
        f"{int(wrong.sum()):,} of {len(known):,} GPU events start before their launch, by up to"
        f" {milliseconds(int(early_ns.max()))}. CPU and GPU clocks differ by that much, so figures that"
        " compare them (Launch, Idle, step ends) are off."
    ]


def _overlapping_steps(timeline: Timeline, steps: Steps) -> list[str]:
    """Overlapping steps on one thread, which mean that the clock went back."""
    trace = timeline.trace
    is_step = (trace.track == steps.track) & trace.is_named(lambda name: name.startswith("ProfilerStep#"))
    is_host = (trace.category == Category.CPU_OP) | (trace.category == Category.USER_ANNOTATION)
    rows = np.flatnonzero(is_step & is_host)
    overlap_ns = trace.end_ns[rows[:-1]] - trace.begin_ns[rows[1:]]
    wrong = overlap_ns > _CLOCK_TOLERANCE_NS
    if not wrong.any():
        return []
    return [
        f"{int(wrong.sum()):,} steps start before the previous one ends, by up to"
        f" {milliseconds(int(overlap_ns.max()))}. The clock was set back while recording, or multiple traces"
        " were merged. The times in this trace are unreliable."
    ]


def _gaps(steps: Steps) -> list[str]:
    """Gaps between consecutive steps, which touch unless the clock jumped."""
    intervals = steps.intervals
    gap_ns = intervals[1:, 0] - intervals[:-1, 1]
    numbers = np.array(steps.numbers)
    wrong = long_gaps(intervals)
    wrong = wrong[np.diff(numbers)[wrong] == 1]
    if not len(wrong):
        return []
    worst = int(wrong[np.argmax(gap_ns[wrong])])
    return [
        f"{milliseconds(int(gap_ns[worst]))} between step {numbers[worst]} and step {numbers[worst + 1]}"
        " belong to no step. This is work outside the steps, a wait for a CPU on a busy machine or a clock"
        " that was set forward."
    ]


def _repeated_steps(steps: Steps) -> list[str]:
    numbers = np.sort(np.array(steps.numbers, np.int64))
    repeated = different(numbers[1:][numbers[1:] == numbers[:-1]]).tolist()
    if not repeated:
        return []
    return [
        f"Multiple steps have the same number (steps {_listed(repeated)}), because windows or runs were"
        " merged. Their figures are mixed."
    ]


def _overhead(timeline: Timeline, steps: Steps) -> list[str]:
    trace = timeline.trace
    rows = np.flatnonzero(trace.category == Category.OVERHEAD)
    rows = rows[locate(trace.begin_ns[rows], steps.intervals) >= 0]
    overhead_ns = int((trace.end_ns[rows] - trace.begin_ns[rows]).sum())
    whole_ns = int((steps.intervals[:, 1] - steps.intervals[:, 0]).sum())
    if overhead_ns <= _OVERHEAD_SHARE * whole_ns:
        return []
    return [
        f"The profiler takes {percent(overhead_ns / whole_ns)} of the steps, so step times are too"
        " long by about that much."
    ]


def _listed(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:_MAX_QUOTES]))
    return text if len(numbers) <= _MAX_QUOTES else f"{text} and {len(numbers) - _MAX_QUOTES} more"


_LAUNCH_WORDS: Final = ("LaunchKernel", "LaunchCooperativeKernel", "KernelLaunch", "GraphLaunch")
"""Calls that start kernels on CUDA, ROCm and XPU: ``cudaLaunchKernelExC``, ``hipExtModuleLaunchKernel``,
``urEnqueueKernelLaunch``, ``cudaGraphLaunch``, ..."""


class KernelLaunchCount(Record, frozen=True, kw_only=True):
    """Calls that launch kernels, in the kept steps, or in the whole trace without steps.

    A launch has no kernel if it was captured into a graph, which runs nothing, or if the profiler lost device
    events.

    Attributes:
        launches: number of launches; a graph is one.
        lost: launches without a kernel in the trace.
        kernels: launched there; those with an unknown launch, started there.
        steps: numbers of the steps with lost ones.
    """

    launches: int
    lost: int
    kernels: int
    steps: tuple[int, ...] = ()

    @property
    def tells_nothing(self) -> bool:
        return self.lost > self.kernels


def count_kernel_launches(timeline: Timeline) -> KernelLaunchCount:
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


def _launches(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of the k calls that start kernels, and which have no device event; both of shape (k,).

    A driver call inside a runtime call is the same launch.
    """
    trace = timeline.trace
    is_launch = (trace.category == Category.RUNTIME) & (trace.correlation >= 0)
    is_launch &= trace.is_named(lambda name: any(word in name for word in _LAUNCH_WORDS))
    rows = np.flatnonzero(is_launch)
    has_kernel = np.zeros(len(trace), np.bool_)
    has_kernel[rows] = is_among(trace.correlation[rows], trace.correlation[trace.device.event])
    outer = timeline.nearest(is_launch)[rows]
    is_inner = outer >= 0
    np.logical_or.at(has_kernel, outer[is_inner], has_kernel[rows[is_inner]])
    rows = rows[~is_inner]
    rows = rows[~_are_never_joined(timeline, rows, has_kernel[rows])]
    return rows, ~has_kernel[rows]


def _are_never_joined(
    timeline: Timeline, rows: NDArray[np.int64], has_kernel: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which launches have a name that the recorder never joins to its kernels, although these are there.

    That is a name without a joined call, when at least as many kernels have no launch. Shape (k,).
    """
    trace = timeline.trace
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    num_orphans = int(np.count_nonzero(timeline.launch.runtime[is_kernel] < 0))
    names, name = by_name(trace, rows)
    num_calls = np.bincount(name, minlength=len(names))
    num_joined = np.bincount(name[has_kernel], minlength=len(names))
    never: NDArray[np.bool_] = ((num_joined == 0) & (num_calls <= num_orphans))[name]
    return never
