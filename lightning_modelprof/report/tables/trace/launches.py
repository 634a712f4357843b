"""Launch Summary: launch cost, queue delay and runtime calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Final

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.launches import (
    SHORT_NS,
    KernelLaunches,
    RuntimeCall,
    RuntimeCalls,
    TimeSpread,
)
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_columns
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
    depth_of=lambda row: row["depth"],
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
            "CPU time of launch calls; one that launched multiple kernels (a CUDA graph) counts once. If many"
            " kernels are shorter than their launch, the CPU can't keep the GPU busy."
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

_NAMES: Final = {"INVALID": "(unnamed call)"}
"""The profiler's name for a function it can't name → name in the table."""


def _call_name(call: RuntimeCall | RuntimeCalls) -> str:
    return "All calls" if isinstance(call, RuntimeCalls) else _NAMES.get(call.name, call.name)


_CALL_COLUMNS: Final = (
    ColumnSpec("name", "Name", of=_call_name),
    ColumnSpec("calls", "Calls", Unit.COUNT, of=lambda one: one.host.calls),
    *tally_columns("host_", "CPU", lambda one: one.host),
    ColumnSpec(
        "host_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "CPU",
        help="share of the time in all runtime calls, summed over threads.",
        share_of="host_total_ns",
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
    depth_of=lambda row: 0 if isinstance(row, RuntimeCalls) else 1,
    views=("kernels",),
    compared=CompareKey(keys=("host_total_ns",), sum_over="window"),
)


@trace_table(LAUNCHES, "launch", TraceFacts.kernel_launches)
def launches_table(ranks: Ranks[KernelLaunches]) -> Table:
    """Show each rank's launch cost, and whether the CPU stays ahead of the GPU."""
    rows = [row for rank, fact in ranks.found.items() for row in _rows(fact, ranks.prefix(rank))]
    return LAUNCHES.table(
        rows,
        notes=_graph_note(sum(fact.num_graph_calls for fact in ranks.found.values())),
        is_detail=True,
    )


@trace_table(RUNTIME_CALLS, "launch", TraceFacts.runtime_calls)
def runtime_calls_table(ranks: Ranks[RuntimeCalls]) -> Table:
    """List runtime calls by CPU time, with the waits among them, over all ranks."""
    pooled = pool(ranks.found.values())
    calls = sorted(pooled.calls, key=lambda call: (-call.host.total_ns, call.name))
    return RUNTIME_CALLS.table(
        (pooled, *calls),
        wholes={"host_ratio": pooled.host.total_ns},
        is_detail=True,
    )


def _rows(fact: KernelLaunches, prefix: str) -> Iterator[dict[str, Cell]]:
    num_kernels, num_linked = fact.kernels.count, fact.linked.count
    short = zip(SHORT_NS, fact.short, strict=True)
    # Delays overlap, so their sum isn't a time.
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
    for depth, label, spread, whole in named:
        ratio = share(spread.count, whole)
        yield {**asdict(spread), "name": prefix + label, "ratio": ratio, "depth": depth}


def _graph_note(num_graph_calls: int) -> tuple[str, ...]:
    if not num_graph_calls:
        return ()
    return (
        f"{num_graph_calls} call{'s' * (num_graph_calls != 1)} launched more than one kernel, such as a CUDA"
        " graph. Queue delay and"
        " Shorter than their launch mean little for these.",
    )
