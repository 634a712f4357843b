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
from lightning_modelprof.report.kinds import Drawing
from lightning_modelprof.report.model import Chart

_WINDOW_MEMORY: Final = (
    "What was allocated while a window with `profile_memory=True` ran, in layers that add up to it:"
    " of the device, of any rank, with the highest peak, the CPU only where there is no other. Each block is"
    " in the layer of the phase that allocated it, as long as it lives: activations (forward), gradients"
    " (backward), optimizer state (optimizer), batch (dataloader and transfer). What the same phase"
    " of the same step releases is temporary. A block that is released without having been allocated"
    " in the window was there before, and so is what the allocator counts beyond the others; of a"
    " run its parameters, buffers and optimizer state (table Model size) are taken out of that. Where"
    " the allocator's count is not recorded (the CPU, torch 1.9), what stays from before to the end"
    " is in no layer. Traces without addresses (torch 1): a release ends the newest block of its"
    " size. The window is cut into at most 400 parts, and each shows its highest moment; the line is"
    " the peak."
)
"""What the chart means, of a run and of traces."""

CHARTS: Final = (
    Drawing(
        id="phase_shares",
        title="Where the steps spend their time",
        draw=phase_shares,
        help="The column Ratio of the table Phases as one bar.",
        views=("overview",),
    ),
    Drawing(
        id="validation_shares",
        title="Where validation spends its time",
        draw=validation_shares,
        help="The column Ratio of the table Validation as one bar.",
        views=("overview",),
    ),
    Drawing(
        id="phases_per_step",
        title="Phases of each step",
        draw=phases_per_step,
        help=(
            "The self time of each phase in a step. A run of more than 400 steps is shown in at most 400"
            " points, each the mean of equally many steps (the last may have fewer). The layers add up to"
            " the step's wall time; phases that were not measured are in no layer and are named. The seven"
            " phases with the most time have layers of their own, the others share one."
        ),
    ),
    Drawing(
        id="step_time",
        title="Step times",
        draw=step_time,
        help=(
            "Counts the clean steps by wall time without the phase Profiler, in bars as wide as numpy's"
            " rule `auto` says, at most 60. Where the slowest step took more than twice the 99th"
            " percentile, the bars end there, and a note counts the steps beyond."
        ),
        views=("overview",),
    ),
    Drawing(
        id="throughput",
        title="Throughput",
        draw=throughput,
        help=(
            "Samples over wall time of the steps of a point, clean or not; steps over wall time where the"
            " samples of any step are unknown."
        ),
        views=("overview",),
    ),
    Drawing(
        id="num_workers",
        title="Predicted step by number of workers",
        draw=workers_prediction,
        help=(
            "The table Number of workers with the present prefetch factor; *now* is the measured step, and"
            " the line across is a step without any wait for its batch. Of several loaders the one with the"
            " longest predicted step."
        ),
        views=("workers",),
    ),
    Drawing(
        id="worker_queue",
        title="Workers at work over time",
        draw=workers_over_time,
        help=(
            "How many workers make a batch at a time, and how many batches are ready and come behind one that"
            " is not: means over at most 200 equal parts of the time of the newest 1,000 batches. Workers"
            " that are all busy are too slow or too few; workers that are not have filled the queue. Of"
            " several loaders the one whose workers have most to do."
        ),
        views=("workers",),
    ),
    Drawing(
        id="queue_depth",
        title="Batches ready at a fetch",
        draw=queue_depth,
        help=(
            "How many batches the workers had made when the loop fetched one: each thirteenth clean step is"
            " looked at, and at least seven are needed. At 0 the loop waits; a queue that is always full has"
            " more workers than it needs. Batches that are ready and come behind one that is not count, too."
            " Of several loaders the one with the fewest. macOS tells no more than whether there is one."
        ),
        views=("workers",),
    ),
    Drawing(
        id="rank_phases",
        title="Phases of each rank",
        draw=rank_phases,
        help="The mean clean step of each rank by phase, for at most 256 ranks.",
        views=("distributed",),
    ),
    Drawing(
        id="flops_by_phase",
        title="FLOPs of a step",
        draw=flops_by_phase,
        help="Those of the table FLOPs, by phase, without Fourier transforms.",
        views=("modules",),
    ),
    Drawing(
        id="memory_curve",
        title="Memory over the steps",
        draw=memory_curve,
        help=(
            "(On the page: *Memory*) What was there when each step was first looked at: of the process"
            " (its own is without files and shared memory), and of the device what torch's allocator gave"
            " to tensors and held."
        ),
        views=("memory",),
    ),
    Drawing(
        id="window_memory",
        title="Memory over the window",
        draw=window_memory_of_run,
        help=_WINDOW_MEMORY,
        views=("memory",),
    ),
)
"""Of a run, in reading order."""

TRACE_CHARTS: Final = (
    Drawing(
        id="window_memory",
        title="Memory over the window",
        draw=window_memory,
        help=_WINDOW_MEMORY,
        views=("memory",),
    ),
    Drawing(
        id="step_breakdown",
        title="What each step of the trace waited for",
        draw=trace_steps,
        help=(
            "The table Step time breakdown as bars, step by step. Of several ranks it is called *What the"
            " steps of each rank waited for* and shows the mean step of each. More than 400 steps share"
            " points, each the mean of equally many. Numbers with gaps between them are counted from 1."
        ),
        views=("overview",),
    ),
    Drawing(
        id="rank_shares",
        title="Ranks side by side",
        draw=rank_shares,
        help=(
            "The mean step of each rank, where at least two have steps and communication: Computation"
            " (only kernels that do not communicate run), Overlap (such and communication), Exposed"
            " communication (the wait for other ranks included), Copies (only copies and sets) and Other,"
            " disjoint, so they add up to the step. Without any kernels (gloo on the CPU) it is unknown"
            " what computes beside Communication. Ranks without kernels beside others that have some are"
            " left out, and named."
        ),
        views=("distributed",),
    ),
    Drawing(
        id="operator_shares",
        title="Operators by their own time",
        draw=operator_shares,
        help=(
            "The column Self of the Operator Summary, on the device if the trace has device events, else"
            " on the host: the seven operators with the most, and the rest."
        ),
        views=("operators",),
    ),
    Drawing(
        id="kernel_types",
        title="Time of the kernels",
        draw=kernel_types,
        help=(
            "All kernels of the Kernel Summary added up by their names: those that communicate, those"
            " that use tensor cores, and the others, also those whose names do not tell; with one kind"
            " only there is no chart."
        ),
        views=("kernels",),
    ),
)
"""From the facts of each rank of one job."""

FLAMES: Final = (
    Drawing(
        id="call_stacks",
        title="Where the training thread was",
        draw=call_flame,
        help=(
            "Phases at the top, below them functions by who called them; the width is sampled time"
            " (Source lines). Functions that only call another one are left out, and their time is their"
            ' caller\'s. Boxes below 0.2 % are joined into "other"; the widths add up exactly.'
        ),
        views=("modules",),
    ),
    Drawing(
        id="worker_stacks",
        title="Where the workers were",
        draw=worker_flame,
        help=(
            "Functions of the DataLoader's workers by who called them, all workers of a loader together;"
            " the width is sampled time, as in *Where the training thread was*. Of several loaders the one"
            " whose workers have most to do."
        ),
        views=("workers",),
    ),
    Drawing(
        id="modules",
        title="Modules, forward and backward",
        draw=module_flame,
        help=(
            "The latency of the table Modules, forward and backward together, of one step. A module's own"
            " time is that without the modules inside of it, so what is on a box and its own time sum to"
            " it exactly. Modules without a time of their own are not shown. There is no graph where the"
            " model's time holds that of ignored modules."
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
        id_suffix: what follows each chart's id.
        title_suffix: what follows each chart's title.
    """
    return tuple(
        replace(chart, id=chart.id + id_suffix, title=chart.title + title_suffix)
        for entry in TRACE_CHARTS
        if (chart := entry.draw(by_rank)) is not None
    )
