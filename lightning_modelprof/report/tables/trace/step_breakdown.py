"""Step time breakdown of one profiler window: what each step waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_modelprof.analysis.trace.step_breakdown import (
    STEP_CATEGORIES,
    StepBreakdown,
    pool_breakdowns,
)
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table
from lightning_modelprof.report.words import STEP_LABELS

_CATEGORIES: Final = {
    "kernel": "kernels without communication; a dash without GPU events.",
    "memcpy": "copies on the GPU; a dash without GPU events.",
    "memset": "sets on the GPU; a dash without GPU events.",
    "communication": "as in Distributed Summary, plus the CPU's `nccl:` and `gloo:` operators.",
    "runtime": "CUDA and ROCm calls; a dash without runtime calls.",
    "dataloader": "`enumerate(DataLoader)#...`.",
    "cpu_exec": (
        "other operators and annotations, except those around a whole step, Lightning's `[pl]` ranges and"
        " our own."
    ),
    "other": "the rest.",
}
_COLUMNS: Final = (
    ColumnSpec("name", "Step"),
    ColumnSpec("total_ns", "Total", Unit.BY_ROW, help="step time; the other columns add up to it."),
    *(
        ColumnSpec(f"{key}_ns", STEP_LABELS[key], Unit.BY_ROW, help=_CATEGORIES[key])
        for key in STEP_CATEGORIES
    ),
)
STEP_BREAKDOWN: Final = TableSpec(
    id="step_breakdown",
    title="Step time breakdown",
    help=(
        "Categories of PyTorch's removed TensorBoard plugin, per step and as a mean (only means for multiple"
        " ranks). Each moment counts once, in the first category that's busy on any thread, stream or GPU,"
        " so the columns add up to the step exactly and CPU work during GPU work isn't visible. A step"
        " starts when earlier steps' GPU events end and lasts until its own end. Incomplete steps at the end"
        " are left out and listed. A runtime call across the end of a step belongs to no step here (as in"
        " the plugin), while Model Summary counts it where it starts. If any rank has GPU events, ranks"
        " without them are left out of Mean and Share and listed."
    ),
    columns=_COLUMNS,
    views=("overview",),
    compared=CompareKey(keys=("mean",)),
)


_ON_DEVICE: Final = frozenset({"kernel", "memcpy", "memset"})
_BY_RUNTIME: Final = frozenset({"runtime"})

_NOTES: Final = (
    "Each moment counts once, in the first column that's busy on any thread, stream or GPU, so the columns"
    " add up to the step. CPU work during GPU work isn't visible.",
    "A step lasts from the end of the previous step's GPU events to the end of its own.",
    "Communication is NCCL (or similar) kernels and the CPU's nccl: and gloo: operators, unless other GPU"
    " events are running. CPU Exec is all other operators and annotations, except those around whole steps,"
    " Lightning's [pl] ranges and lightning-modelprof's own.",
)
_NO_DEVICE_NOTE: Final = "The trace has no GPU events, so Kernel, Memcpy and Memset weren't measured."
_NO_RUNTIME_NOTE: Final = "The trace has no runtime calls, so Runtime wasn't measured."


@trace_table(STEP_BREAKDOWN, "step_breakdown", TraceFacts.step_breakdown)
def step_breakdown_table(ranks: Ranks[StepBreakdown]) -> Table:
    """What each step waited for, with the mean and each column's share of the steps' time."""
    whole = pool_breakdowns(list(ranks.found.values()))
    if ranks.are_several:
        rows = [
            _row(f"{ranks.prefix(rank)}mean", one.mean_total_ns, one.mean_parts_ns, one)
            for rank, one in ranks.found.items()
        ]
    else:
        rows = [_row(f"step {step.number}", step.total_ns, step.parts_ns, whole) for step in whole.steps]
    total_share = 1.0 if whole.mean_total_ns else None
    return STEP_BREAKDOWN.table(
        rows=(
            # The mean stands first: it is what most readers want, and long tables are cut at their end.
            _row("Mean", whole.mean_total_ns, whole.mean_parts_ns, whole),
            _row("Share", total_share, whole.shares, whole),
            *rows,
        ),
        row_units=(Unit.DURATION_NS, Unit.RATIO, *[Unit.DURATION_NS] * len(rows)),
        notes=(
            *_NOTES,
            *(() if whole.has_device else (_NO_DEVICE_NOTE,)),
            *(() if whole.has_runtime else (_NO_RUNTIME_NOTE,)),
            *_left_out_note(ranks.found, whole),
            *dict.fromkeys(note for one in ranks.found.values() for note in one.notes),
        ),
    )


def _left_out_note(found: Mapping[int, StepBreakdown], whole: StepBreakdown) -> tuple[str, ...]:
    """Which ranks the mean of all is without."""
    lacking = [str(rank) for rank, one in found.items() if whole.has_device and not one.has_device]
    if not lacking:
        return ()
    several = len(lacking) > 1
    return (f"Mean and Share exclude rank{'s' if several else ''} {', '.join(lacking)}: no GPU events.",)


def _row(name: str, total: Cell, parts: Sequence[Cell], fact: StepBreakdown) -> tuple[Cell, ...]:
    """A row of a fact, with dashes for what its trace cannot tell."""
    unknown = (frozenset() if fact.has_device else _ON_DEVICE) | (
        frozenset() if fact.has_runtime else _BY_RUNTIME
    )
    cells = (part if key not in unknown else None for key, part in zip(STEP_CATEGORIES, parts, strict=True))
    return name, total, *cells
