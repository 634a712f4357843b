"""Launch Summary: what it costs to start kernels, how long they are queued, and every runtime call."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.launches import (
    SHORT_NS,
    KernelLaunches,
    RuntimeCalls,
    TimeSpread,
)
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_RECORDED: Final = (
    "recorded values; p90 is the smallest that at least nine tenths of the others don't exceed."
)
_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("count", "Count", Unit.COUNT, help="number of kernels or calls."),
    ColumnSpec(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        help="share of all kernels; for Shorter and Negative, of those with a known launch.",
    ),
    ColumnSpec("total_ns", "Total", Unit.DURATION_NS, "Time"),
    ColumnSpec("avg_ns", "Avg", Unit.DURATION_NS, "Time"),
    ColumnSpec(
        "median_ns",
        "p50",
        Unit.DURATION_NS,
        "Time",
        help=_RECORDED,
    ),
    ColumnSpec(
        "p90_ns",
        "p90",
        Unit.DURATION_NS,
        "Time",
        help=_RECORDED,
    ),
    ColumnSpec("max_ns", "Max", Unit.DURATION_NS, "Time"),
    ColumnSpec("min_ns", "Min", Unit.DURATION_NS, "Time"),
)
LAUNCHES: Final = TableSpec(
    id="launches",
    title="Launch Summary",
    help="Kernels of each rank over the whole trace.",
    columns=_COLUMNS,
    rows={
        "Kernel time": "GPU durations; the rows below it overlap.",
        "At most 5 µs": "kernels that take no longer.",
        "At most 10 µs": "kernels that take no longer.",
        "Known launch": "kernels with a known or unknown launch call.",
        "Unknown launch": "kernels with a known or unknown launch call.",
        "Shorter than their launch": (
            "kernels whose launch call took more CPU time than everything it launched took on the GPU."
        ),
        "Launch call": (
            "CPU time of launch calls; one that launched multiple kernels (a CUDA graph) counts once."
        ),
        "Queue delay": (
            "start of the kernel − end of its launch call. Small if the GPU waits for the CPU, large if the"
            " CPU is ahead."
        ),
        "Negative": "the kernel started before the call returned, or the clocks differ.",
    },
    views=("kernels",),
    compared=CompareKey(keys=("avg_ns",)),
)

_STATISTICS: Final = tuple(column.key for column in _COLUMNS[3:])

_NOTES: Final = (
    "Kernel time is GPU time, and the rows below it overlap. Ratio is the share of all kernels; for"
    " Shorter than their launch and Negative, it's the share of kernels with a known launch.",
    "Launch call is the CPU time of calls that launched kernels. If many kernels are shorter than their"
    " launch, the CPU can't keep the GPU busy; fuse kernels{advice}.",
    "Queue delay is the time from the end of the launch call to the start of the kernel: small if the GPU"
    " waits for the CPU, large if the CPU is ahead. It's negative if the kernel started before the call"
    " returned or the clocks differ.",
)

_CALL_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT),
    ColumnSpec("host_total_ns", "Total", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    ColumnSpec(
        "host_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "CPU",
        help="share of the time in all runtime calls, summed over threads.",
    ),
    ColumnSpec(
        "wait_ns",
        "Waits for GPU",
        Unit.DURATION_NS,
        help=(
            "time in calls that, by name, return only when the GPU is done: `…Synchronize` and copies"
            " without `Async`. Others show a dash, although `cudaMalloc`, `cudaFree`, asynchronous copies"
            " of memory that isn't pinned and launches into a full queue sometimes wait."
        ),
    ),
)
RUNTIME_CALLS: Final = TableSpec(
    id="runtime_calls",
    title="Runtime calls",
    help=(
        "Calls and CPU time by function of the CUDA, ROCm or XPU runtime and driver, all ranks together."
        " The first row is the total."
    ),
    columns=_CALL_COLUMNS,
    views=("kernels",),
    compared=CompareKey(keys=("host_total_ns",), sum_over="window"),
)

_NAMES: Final = {"INVALID": "(unnamed call)"}
"""What the profiler calls a function that it has no name for."""

_CALL_NOTES: Final = (
    "Ratio is the share of the time in all runtime calls, summed over threads.",
    "Waits for GPU is the time in synchronization calls and in copy calls without Async in their names. Other"
    " calls, such as cudaMalloc, cudaFree, copies of pageable memory and launches into a full queue,"
    " sometimes wait too.",
)


@trace_table(LAUNCHES, "launch", TraceFacts.kernel_launches)
def launches_table(ranks: Ranks[KernelLaunches]) -> Table:
    """What the kernels of each rank cost the host, and whether it keeps ahead of the device."""
    rows = [row for rank, fact in ranks.found.items() for row in _rows(fact, ranks.prefix(rank))]
    num_graph_calls = sum(fact.num_graph_calls for fact in ranks.found.values())
    return LAUNCHES.table(
        rows=tuple(cells for _, cells in rows),
        depths=tuple(depth for depth, _ in rows),
        notes=(*_notes(num_graph_calls), *_graph_note(num_graph_calls)),
    )


@trace_table(RUNTIME_CALLS, "launch", TraceFacts.runtime_calls)
def runtime_calls_table(ranks: Ranks[RuntimeCalls]) -> Table:
    """Which calls of the devices' runtimes took the host's time, and in which it waited; ranks together."""
    pooled = pool(ranks.found.values())
    rows: list[tuple[Cell, ...]] = []
    for name, host, wait_ns in (
        ("All calls", pooled.total, pooled.waiting.total_ns),
        *(
            (_NAMES.get(call.name, call.name), call.host, call.host.total_ns if call.waits else None)
            for call in sorted(pooled.calls, key=lambda call: (-call.host.total_ns, call.name))
        ),
    ):
        times = (host.total_ns, host.avg_ns, host.max_ns, host.min_ns)
        rows.append((name, host.calls, *times, share(host.total_ns, pooled.total.total_ns), wait_ns))
    return RUNTIME_CALLS.table(
        rows=tuple(rows),
        depths=(0, *[1] * (len(rows) - 1)),
        notes=_CALL_NOTES,
    )


def _rows(fact: KernelLaunches, prefix: str) -> list[tuple[int, tuple[Cell, ...]]]:
    """Depth and cells of the rows of one rank, whose names start with ``prefix``."""
    num_kernels, num_linked = fact.kernels.count, fact.linked.count
    short = zip(SHORT_NS, fact.short, strict=True)
    # The sum of delays that pass at the same time is no time.
    delay, negative = (replace(spread, total_ns=None) for spread in (fact.delay, fact.negative_delay))
    named: list[tuple[int, str, TimeSpread, int | None]] = [
        (0, "Kernel time", fact.kernels, num_kernels),
        *((1, f"At most {limit_ns // 1000} µs", spread, num_kernels) for limit_ns, spread in short),
        (1, "Known launch", fact.linked, num_kernels),
        (2, "Shorter than their launch", fact.shorter, num_linked),
        (1, "Unknown launch", fact.unlinked, num_kernels),
        (0, "Launch call", fact.calls, None),
        (0, "Queue delay", delay, None),
        (1, "Negative", negative, num_linked),
    ]
    rows: list[tuple[int, tuple[Cell, ...]]] = []
    for depth, label, spread, whole in named:
        times = (getattr(spread, key) for key in _STATISTICS)
        rows.append((depth, (prefix + label, spread.count, share(spread.count, whole), *times)))
    return rows


def _notes(num_graph_calls: int) -> tuple[str, ...]:
    """What the figures mean; graphs are no advice to who has them."""
    advice = " or enlarge batches" if num_graph_calls else ", enlarge batches or use CUDA graphs"
    return tuple(note.format(advice=advice) for note in _NOTES)


def _graph_note(num_graph_calls: int) -> tuple[str, ...]:
    if not num_graph_calls:
        return ()
    return (
        f"{num_graph_calls} call{'s' * (num_graph_calls != 1)} launched more than one kernel, such as a CUDA"
        " graph. Queue delay and"
        " Shorter than their launch mean little for these.",
    )
