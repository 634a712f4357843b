"""Kernel Summary: which kernels take the device's time."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.trace.kernels import Kernels, KernelUse, pool_kernels
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks, row_order
from lightning_modelprof.report.tables.trace.table import trace_table

_WEIGHTED: Final = (
    "mean over the calls that have the value, weighted by time; a dash if none was recorded (ROCm, XPU)."
)
_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, is_main=True, of=lambda one: one.tally.calls),
    ColumnSpec(
        "device_total_ns",
        "Total",
        Unit.DURATION_NS,
        "GPU",
        adds_up=True,
        help="sum of durations; overlaps counted in full.",
        is_main=True,
        of=lambda one: one.tally.total_ns,
    ),
    ColumnSpec(
        "device_avg_ns", "Avg", Unit.DURATION_NS, "GPU", help="per call.", of=lambda one: one.tally.avg_ns
    ),
    ColumnSpec(
        "device_max_ns", "Max", Unit.DURATION_NS, "GPU", help="per call.", of=lambda one: one.tally.max_ns
    ),
    ColumnSpec(
        "device_min_ns", "Min", Unit.DURATION_NS, "GPU", help="per call.", of=lambda one: one.tally.min_ns
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
        help=_WEIGHTED,
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


_NOTE: Final = (
    "Covers all kernels in the file, including those outside steps. Overlapping kernels count in full, so"
    " Ratio is the share of the kernels' summed time."
)
_OPERATOR_NOTE: Final = (
    "Operator is the one whose launches account for most of the kernel's time, and Operators is how many"
    " different"
    " operators launched it. Tensor Cores comes from the kernel's name; a dash means that we can't classify"
    " it or that the GPU has none."
)
_OCCUPANCY_NOTE: Final = (
    "Blocks per SM and Occupancy are means weighted by time. Occupancy is torch.profiler's"
    " estimate, which is 0 for some busy kernels."
)
_NO_OCCUPANCY_NOTE: Final = (
    "Blocks per SM and Occupancy weren't recorded. The profiler only estimates them on NVIDIA GPUs."
)


@trace_table(KERNELS, "kernel", TraceFacts.kernels)
def kernels_table(ranks: Ranks[Kernels], options: TableOptions) -> Table:
    """One row per kernel name, the ranks together.

    Args:
        options: ``sorted_by`` orders the rows; kernels have no CPU time, so a CPU key counts as the GPU's.
    """
    pooled = pool_kernels(ranks.found.values())
    return KERNELS.table(_sorted(pooled, options), notes=_notes(pooled))


def _notes(kernels: Kernels) -> tuple[str, ...]:
    has_occupancy = any(
        kernel.occupancy.mean is not None or kernel.blocks_per_sm.mean is not None
        for kernel in kernels.by_name
    )
    return (_NOTE, _OPERATOR_NOTE, _OCCUPANCY_NOTE if has_occupancy else _NO_OCCUPANCY_NOTE)


def _sorted(kernels: Kernels, options: TableOptions) -> list[KernelUse]:
    """The rows in the order that was asked for; by total time where that leaves it open."""

    def key(kernel: KernelUse) -> tuple[bool, float]:
        tally = kernel.tally
        return row_order(options.sorted_by, calls=tally.calls, host=None, device=tally, has_device=True)

    return sorted(kernels.by_name, key=key)
