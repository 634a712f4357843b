"""Kernel Summary: GPU time by kernel."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.trace.kernels import Kernels, KernelUse
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_columns
from lightning_modelprof.report.tables.rows import Ranks, row_order
from lightning_modelprof.report.tables.trace.table import trace_table

_WEIGHTED: Final = (
    "mean over the calls that have the value, weighted by time; a dash if none was recorded (ROCm, XPU)."
)
_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, is_main=True, of=lambda one: one.tally.calls),
    *tally_columns(
        "device_",
        "GPU",
        lambda one: one.tally,
        help="sum of durations; overlaps counted in full.",
        each="per call.",
        adds_up=True,
        is_main=True,
    ),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        adds_up=True,
        help="share of the kernels' summed time.",
        is_main=True,
        share_of="device_total_ns",
    ),
    ColumnSpec(
        "operator",
        "Operator",
        help=(
            "the innermost operator whose launches account for most of the kernel's time; a dash without"
            " known"
            " launches."
        ),
        is_main=True,
        of=lambda one: one.operators.main,
    ),
    ColumnSpec(
        "num_operators",
        "Operators",
        Unit.COUNT,
        help="number of different launching operators; a dash without known launches.",
        of=lambda one: one.operators.count,
    ),
    ColumnSpec(
        "blocks_per_sm",
        "Blocks per SM",
        Unit.COUNT,
        help=_WEIGHTED,
        of=lambda one: one.blocks_per_sm.mean,
    ),
    ColumnSpec(
        "occupancy",
        "Occupancy (%)",
        Unit.RATIO,
        help=f"{_WEIGHTED} It's torch.profiler's estimate, which is 0 for some busy kernels.",
        of=lambda one: one.occupancy.mean,
    ),
    ColumnSpec(
        "tensor_cores",
        "Tensor Cores",
        help="from the kernel's name; a dash if we can't classify it, and on GPUs without tensor cores.",
        of=lambda one: {None: None, True: "yes", False: "no"}[one.uses_tensor_cores],
    ),
)
KERNELS: Final = TableSpec(
    id="kernels",
    title="Kernel Summary",
    help=(
        "By name over all kernels in the file, including those outside steps; ranks, GPUs and streams"
        " together. Sorted by GPU total or `sorted_by`; CPU keys sort by their GPU counterpart."
    ),
    columns=_COLUMNS,
    views=("kernels",),
    names_slices=True,
    compared=CompareKey(keys=("device_total_ns",), sum_over="window"),
)

_NO_OCCUPANCY_NOTE: Final = (
    "Blocks per SM and Occupancy weren't recorded. The profiler only estimates them on NVIDIA GPUs."
)


@trace_table(KERNELS, "kernel", TraceFacts.kernels)
def kernels_table(ranks: Ranks[Kernels], options: TableOptions) -> Table:
    """Build one row per kernel name over all ranks.

    Args:
        options: ``sorted_by`` orders the rows; kernels have no CPU time, so a CPU key counts as the GPU's.
    """

    def order(kernel: KernelUse) -> tuple[object, ...]:
        tally = kernel.tally
        by_figure = row_order(options.sorted_by, calls=tally.calls, host=None, device=tally, has_device=True)
        return by_figure, -tally.total_ns, kernel.name

    kernels = sorted(pool(ranks.found.values()).by_name, key=order)
    has_occupancy = any(one.occupancy.time_ns or one.blocks_per_sm.time_ns for one in kernels)
    return KERNELS.table(kernels, notes=() if has_occupancy else (_NO_OCCUPANCY_NOTE,))
