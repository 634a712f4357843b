"""The charts and flame graphs of a report, in reading order: a new one is a function and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.device import kernel_types, operator_shares, trace_steps
from lightning_modelprof.report.charts.memory import window_memory, window_memory_of_run
from lightning_modelprof.report.charts.model import flops_by_phase, memory_curve
from lightning_modelprof.report.charts.ranks import rank_phases, rank_shares
from lightning_modelprof.report.charts.steps import (
    phase_shares,
    phases_per_step,
    step_time,
    throughput,
    validation_shares,
)
from lightning_modelprof.report.charts.workers import queue_depth, workers_over_time, workers_prediction
from lightning_modelprof.report.flames import call_flame, module_flame, worker_flame
from lightning_modelprof.report.model import Chart
from lightning_modelprof.report.specs import ChartSpec

_WINDOW_MEMORY: Final = (
    "Memory allocated during a window with `profile_memory=True`, in layers that add up to the total. It"
    " shows the GPU with the highest peak over all ranks, or the CPU if there is no GPU. A block belongs to"
    " the phase that allocated it: activations (forward), gradients (backward), optimizer state (optimizer)"
    " or batch (dataloader and transfer). Blocks freed within the same phase are temporary. Memory"
    " allocated before the window is a layer of its own; for a run it's split into parameters, buffers and"
    " optimizer state. On the CPU and with torch 1.9, memory that stays from before the window is missing."
    " Traces without addresses (torch 1) match each release to the newest block of its size. The curve has"
    " at most 400 points, each the peak of its time slice."
)
"""What the chart means, of a run and of traces."""

CHARTS: Final = (
    ChartSpec(
        id="phase_shares",
        title="Step time by phase",
        draw=phase_shares,
        help="The Ratio column of the Phases table as a bar.",
        views=("overview",),
    ),
    ChartSpec(
        id="validation_shares",
        title="Validation time by part",
        draw=validation_shares,
        help="The Ratio column of the Validation table as a bar.",
        views=("overview",),
    ),
    ChartSpec(
        id="phases_per_step",
        title="Phase times per step",
        draw=phases_per_step,
        help=(
            "Self time of each phase in each step. Runs of more than 400 steps are averaged into at most"
            " 400 points. The seven largest phases have their own layers and the rest share one. Unmeasured"
            " phases are listed in a note."
        ),
    ),
    ChartSpec(
        id="step_time",
        title="Step times",
        draw=step_time,
        help=(
            "Histogram of clean step times, without profiler overhead. Bin widths follow numpy's `auto`"
            " rule, with at most 60 bins. If the slowest step took more than twice p99, the histogram ends"
            " at p99 and a note counts the slower steps."
        ),
        views=("overview", "steps"),
    ),
    ChartSpec(
        id="throughput",
        title="Throughput",
        draw=throughput,
        help=(
            "Samples per second over all steps in a point, including excluded ones. Shows steps per second"
            " if any step's sample count is unknown."
        ),
        views=("overview",),
    ),
    ChartSpec(
        id="num_workers",
        title="Predicted step time by worker count",
        draw=workers_prediction,
        help=(
            "The Number of workers table at the current prefetch factor. *Measured* is the measured step"
            " time, and the horizontal line is the step time without waiting for data. With multiple"
            " loaders, it shows the one with the longest predicted step."
        ),
        views=("workers",),
    ),
    ChartSpec(
        id="worker_queue",
        title="Busy workers over time",
        draw=workers_over_time,
        help=(
            "How many workers are making a batch, and how many finished batches wait behind an unfinished"
            " one. Covers the newest 1,000 batches in at most 200 time slices. If all workers are busy,"
            " they're too slow or too few; idle workers have filled the queue. With multiple loaders, it"
            " shows the one with the busiest workers."
        ),
        views=("workers",),
    ),
    ChartSpec(
        id="queue_depth",
        title="Batches ready at fetch",
        draw=queue_depth,
        help=(
            "How many batches were ready when training fetched one. Every thirteenth clean step is sampled,"
            " and at least seven samples are needed. At 0, training waits; if the queue is always full, you"
            " have more workers than you need. With multiple loaders, it shows the one with the fewest ready"
            " batches. On macOS it only shows whether any batch was ready."
        ),
        views=("workers",),
    ),
    ChartSpec(
        id="rank_phases",
        title="Phase times per rank",
        draw=rank_phases,
        help="Mean clean step of each rank by phase, for at most 256 ranks.",
        views=("distributed",),
    ),
    ChartSpec(
        id="flops_by_phase",
        title="FLOPs per step",
        draw=flops_by_phase,
        help="The FLOPs table by phase, without Fourier transforms.",
        views=("modules",),
    ),
    ChartSpec(
        id="memory_curve",
        title="Memory by step",
        draw=memory_curve,
        help=(
            "Memory at the first sample of each step: process memory (private excludes file-backed and shared"
            " memory), and GPU memory that torch's allocator handed to tensors or reserved."
        ),
        views=("memory",),
    ),
    ChartSpec(
        id="window_memory",
        title="Memory in the window",
        draw=window_memory_of_run,
        help=_WINDOW_MEMORY,
        views=("memory",),
    ),
)
"""Of a run, in reading order."""

TRACE_CHARTS: Final = (
    ChartSpec(
        id="window_memory",
        title="Memory in the window",
        draw=window_memory,
        help=_WINDOW_MEMORY,
        views=("memory",),
    ),
    ChartSpec(
        id="step_breakdown",
        title="Step time breakdown by step",
        draw=trace_steps,
        help=(
            "The Step time breakdown table as bars. With multiple ranks, it shows each rank's mean step."
            " More than 400 steps are averaged into fewer points. Step numbers with gaps are renumbered"
            " from 1."
        ),
        views=("overview",),
    ),
    ChartSpec(
        id="rank_shares",
        title="Computation and communication by rank",
        draw=rank_shares,
        help=(
            "Mean step of each rank, if at least two have steps and communication. Computation is time in"
            " compute kernels only, Overlap is compute and communication together, Exposed communication"
            " includes waiting for other ranks, and Copies is time in copies and memsets only. The layers are"
            " disjoint and add up to the step. Without kernels (gloo on the CPU), overlap is unknown. Ranks"
            " without kernels are listed in a note if other ranks have some."
        ),
        views=("distributed",),
    ),
    ChartSpec(
        id="operator_shares",
        title="Operators by self time",
        draw=operator_shares,
        help=(
            "The Self column of Operator Summary, GPU time if the trace has GPU events and CPU time"
            " otherwise. Shows the seven largest operators and the rest."
        ),
        views=("operators",),
    ),
    ChartSpec(
        id="kernel_types",
        title="Kernel time by type",
        draw=kernel_types,
        help=(
            "Total time in Kernel Summary, grouped by kernel name into communication, tensor cores and"
            " other. Kernels we can't classify count as other. The chart is hidden if there's only one"
            " group."
        ),
        views=("kernels",),
    ),
)
"""From the facts of each rank of one job."""

FLAMES: Final = (
    ChartSpec(
        id="call_stacks",
        title="Training thread (flame graph)",
        draw=call_flame,
        help=(
            "Phases are at the top and callees below their callers. Width is sampled time (see Source"
            " lines). Functions that only call another function are omitted and their time goes to the"
            ' caller. Boxes below 0.2% are merged into "other".'
        ),
        views=("modules",),
    ),
    ChartSpec(
        id="worker_stacks",
        title="Workers (flame graph)",
        draw=worker_flame,
        help=(
            "Functions in the DataLoader workers by caller, all workers of a loader together. Width is"
            " sampled time, as in *Training thread (flame graph)*. With multiple loaders, it shows the one"
            " with the busiest workers."
        ),
        views=("workers",),
    ),
    ChartSpec(
        id="modules",
        title="Modules, forward and backward",
        draw=module_flame,
        help=(
            "Forward plus backward latency per step from the Modules table. A module's self time excludes"
            " its submodules. Modules without a time of their own aren't shown. The graph is hidden if the"
            " model's time includes ignored modules."
        ),
        views=("modules",),
    ),
)


def trace_charts(
    by_rank: Mapping[int, TraceFacts], *, id_suffix: str = "", title_suffix: str = ""
) -> tuple[Chart, ...]:
    """The charts of one set of ranks.

    Args:
        by_rank: rank → facts of its trace; of the same time.
    """
    return tuple(
        replace(chart, id=chart.id + id_suffix, title=chart.title + title_suffix)
        for entry in TRACE_CHARTS
        if (chart := entry.of(by_rank)) is not None
    )
