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


_NO_DEVICE_NOTE: Final = "The trace has no GPU events, so Kernel, Memcpy and Memset weren't measured."
_NO_RUNTIME_NOTE: Final = "The trace has no runtime calls, so Runtime wasn't measured."


@trace_table(STEP_BREAKDOWN, "step_breakdown", TraceFacts.step_breakdown)
def step_breakdown_table(ranks: Ranks[StepBreakdown]) -> Table:
    """List what each step waited for, with the mean and each column's share of step time."""
    whole = pool_breakdowns(list(ranks.found.values()))
    if ranks.are_several:
        rows = [
            {"name": f"{ranks.prefix(rank)}mean", "total_ns": one.mean_total_ns}
            | _known(one, one.mean_parts_ns)
            for rank, one in ranks.found.items()
        ]
    else:
        rows = [
            {"name": f"step {step.number}", "total_ns": step.total_ns} | _known(whole, step.parts_ns)
            for step in whole.steps
        ]
    return STEP_BREAKDOWN.table(
        (
            # The mean comes first because most readers want it and long tables are cut at the end.
            {"name": "Mean", "total_ns": whole.mean_total_ns} | _known(whole, whole.mean_parts_ns),
            {"name": "Share", "total_ns": 1.0 if whole.mean_total_ns else None} | _known(whole, whole.shares),
            *rows,
        ),
        row_units=(Unit.DURATION_NS, Unit.RATIO, *[Unit.DURATION_NS] * len(rows)),
        notes=(
            *(() if whole.has_device else (_NO_DEVICE_NOTE,)),
            *(() if whole.has_runtime else (_NO_RUNTIME_NOTE,)),
            *_left_out_note(ranks.found, whole),
            *dict.fromkeys(note for one in ranks.found.values() for note in one.notes),
        ),
        is_detail=True,
    )


def _known(fact: StepBreakdown, parts: Sequence[Cell]) -> dict[str, Cell]:
    unknown = set() if fact.has_device else {"kernel", "memcpy", "memset"}
    unknown |= set() if fact.has_runtime else {"runtime"}
    return {f"{key}_ns": part for key, part in zip(STEP_CATEGORIES, parts, strict=True) if key not in unknown}


def _left_out_note(found: Mapping[int, StepBreakdown], whole: StepBreakdown) -> tuple[str, ...]:
    lacking = [str(rank) for rank, one in found.items() if whole.has_device and not one.has_device]
    if not lacking:
        return ()
    several = len(lacking) > 1
    return (f"Mean and Share exclude rank{'s' if several else ''} {', '.join(lacking)}: no GPU events.",)
