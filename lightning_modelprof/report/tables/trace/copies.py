"""Memory Manipulation Summary: cost of copies and memsets."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.trace.copies import Copies
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_columns
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, of=lambda kind: kind.tally.calls),
    *tally_columns(
        "host_",
        "CPU",
        lambda kind: kind.host if kind.host.calls else None,
        help=(
            "CPU time in the runtime calls that launched them, each call counted once per kind (a CUDA graph"
            " may launch more than one). A dash means that no call is known. Blocking copies show up here,"
            " unless the CPU waits in a separate call (`cudaStreamSynchronize`)."
        ),
    ),
    *tally_columns(
        "device_",
        "GPU",
        lambda kind: kind.tally,
        help="sum of durations; overlaps counted in full.",
        adds_up=True,
    ),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        adds_up=True,
        help="share of the summed time of all GPU events.",
        share_of="device_total_ns",
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
            " CPU; `DataLoader(pin_memory=True)` avoids that for batches, but `.item()` and `.cpu()` cause"
            " them too."
        ),
    ),
    ColumnSpec(
        "operator",
        "Operator",
        help="the innermost operator whose launches account for most of the time.",
        of=lambda kind: kind.operators.main,
    ),
    ColumnSpec(
        "num_operators",
        "Operators",
        Unit.COUNT,
        help="number of different launching operators.",
        of=lambda kind: kind.operators.count,
    ),
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


@trace_table(COPIES, "memory_manipulation", TraceFacts.copies)
def copies_table(ranks: Ranks[Copies]) -> Table:
    """Build one row per kind of copy or memset over all ranks, longest GPU time first."""
    pooled = pool(ranks.found.values())
    kinds = sorted(pooled.kinds, key=lambda kind: (-kind.tally.total_ns, kind.name))
    calls = sum(kind.tally.calls for kind in kinds)
    num_sized = sum(kind.num_sized for kind in kinds)
    note = f"Size and Bandwidth cover the {num_sized} of {calls} calls with a recorded size."
    return COPIES.table(
        kinds,
        wholes={"device_ratio": pooled.device_total_ns},
        notes=(note,) if num_sized < calls else (),
    )
