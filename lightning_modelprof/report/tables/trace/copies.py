"""Memory Manipulation Summary: what copying and setting device memory costs, and what it holds up."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.trace.copies import Copies, CopyKind, pool_copies
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
    ColumnSpec(
        "host_total_ns",
        "Total",
        Unit.DURATION_NS,
        "CPU",
        help=(
            "CPU time in the runtime calls that launched them, each call counted once per kind (a CUDA graph"
            " may launch more than one). A dash means that no call is known. Blocking copies show up here,"
            " unless the CPU waits in a separate call (`cudaStreamSynchronize`)."
        ),
    ),
    ColumnSpec("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    ColumnSpec(
        "device_total_ns",
        "Total",
        Unit.DURATION_NS,
        "GPU",
        adds_up=True,
        help="sum of durations; overlaps counted in full.",
    ),
    ColumnSpec("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        adds_up=True,
        help="share of the summed time of all GPU events.",
    ),
    ColumnSpec(
        "size_bytes",
        "Size",
        Unit.BYTES,
        adds_up=True,
        help="bytes of the calls with a recorded size; a dash without one (ROCm).",
    ),
    ColumnSpec(
        "bytes_per_s",
        "Bandwidth",
        Unit.BYTES_PER_S,
        help=(
            "bytes / GPU time of the calls with a recorded size, in GB/s. A dash means no size or no time"
            " (ROCm)."
        ),
    ),
    ColumnSpec(
        "memory",
        "Memory",
        help=(
            "pageable, pinned, managed or device: the slower of both ends, from the copy's name. A dash"
            " means unknown. Pageable copies go through a driver buffer, which is slower and blocks the"
            " CPU; `DataLoader(pin_memory=True)` avoids that for batches."
        ),
    ),
    ColumnSpec(
        "operator", "Operator", help="the innermost operator whose launches account for most of the time."
    ),
    ColumnSpec("num_operators", "Operators", Unit.COUNT, help="number of different launching operators."),
)
COPIES: Final = TableSpec(
    id="copies",
    title="Memory Manipulation Summary",
    help=(
        "Copies and memsets on the GPU by kind, over the whole file, sorted by GPU total. User ranges with"
        " such names aren't included."
    ),
    columns=_COLUMNS,
    views=("kernels",),
    names_slices=True,
    compared=CompareKey(keys=("device_total_ns",), sum_over="window"),
)


_NOTE: Final = (
    "Covers all copies and memsets in the file, including those outside steps. Ratio is the share of all GPU"
    " events' summed time."
)
_CPU_NOTE: Final = (
    "CPU is the time in the calls that launched the copies. Blocking copies show up here, unless the CPU"
    " waits in a separate call (cudaStreamSynchronize)."
)
_PAGEABLE_NOTE: Final = (
    "Copies of pageable CPU memory go through a driver buffer, which is slower and blocks the CPU."
    " DataLoader(pin_memory=True) avoids them for batches; .item() and .cpu() cause them too."
)


@trace_table(COPIES, "memory_manipulation", TraceFacts.copies)
def copies_table(ranks: Ranks[Copies]) -> Table:
    """One row per kind of copy or set, longest device time first, the ranks together."""
    pooled = pool_copies(ranks.found.values())
    return COPIES.table(
        rows=tuple(_row(pooled, kind) for kind in pooled.kinds),
        notes=tuple(_notes(pooled)),
    )


def _notes(copies: Copies) -> list[str]:
    notes = [_NOTE, _CPU_NOTE]
    if any(kind.memory == "pageable" for kind in copies.kinds):
        notes.append(_PAGEABLE_NOTE)
    calls = sum(kind.tally.calls for kind in copies.kinds)
    num_sized = sum(kind.num_sized for kind in copies.kinds)
    if num_sized < calls:
        notes.append(f"Size and Bandwidth cover the {num_sized} of {calls} calls with a recorded size.")
    return notes


def _row(copies: Copies, kind: CopyKind) -> tuple[Cell, ...]:
    return (
        kind.name,
        kind.tally.calls,
        kind.host.total_ns if kind.host.calls else None,
        kind.host.avg_ns,
        kind.host.max_ns,
        kind.host.min_ns,
        kind.tally.total_ns,
        kind.tally.avg_ns,
        kind.tally.max_ns,
        kind.tally.min_ns,
        copies.ratio(kind),
        kind.size_bytes,
        kind.bytes_per_s,
        kind.memory,
        kind.operators.main,
        kind.operators.count,
    )
