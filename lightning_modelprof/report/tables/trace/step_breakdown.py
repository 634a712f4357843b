"""Step time breakdown of one profiler window: what each step waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.step_breakdown import (
    STEP_CATEGORIES,
    StepBreakdown,
    pool_breakdowns,
)
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks
from lightning_modelprof.report.words import STEP_LABELS

_CATEGORIES: Final = {
    "kernel": "without communication; a dash without device events.",
    "memcpy": "copies on the device; a dash without device events.",
    "memset": "sets on the device; a dash without device events.",
    "communication": "as in the Distributed Summary, and the host's `nccl:` and `gloo:` operators.",
    "runtime": "calls of CUDA or ROCm; a dash without runtime calls.",
    "dataloader": "`enumerate(DataLoader)#...`.",
    "cpu_exec": (
        "other operators and annotations, but none that wraps a whole step, nor Lightning's `[pl]` and our"
        " own ranges."
    ),
    "other": "the rest.",
}
_COLUMNS: Final = (
    Column("name", "Step"),
    Column("total_ns", "Total", Unit.BY_ROW, help="of the step, which the others sum to."),
    *(Column(f"{key}_ns", STEP_LABELS[key], Unit.BY_ROW, help=_CATEGORIES[key]) for key in STEP_CATEGORIES),
)
STEP_BREAKDOWN: Final = TableKind(
    id="step_breakdown",
    title="Step time breakdown",
    help=(
        "Per step and as a mean (with several ranks only the means): the categories of the Overview"
        " of PyTorch's removed TensorBoard plugin. Each moment of a step goes to the first of these"
        " that is busy then, on any thread, stream or device; they sum to the step exactly. A step"
        " begins where the device events launched in the step before end (the first one where those"
        " left over from before it do), and lasts to the end of its own; last steps that are"
        " incomplete are left out, and named. A runtime call that straddles the end of a step belongs"
        " to no step here (as in the plugin), so what it launched does not lengthen one; the Model"
        " Summary counts it in the step in which it begins. An annotation a little shorter than a step"
        " makes all time in it CPU Exec. Host work while the device works does not show. Several"
        " ranks: where any has device events, those without are left out of Mean and Share, and named."
    ),
    columns=_COLUMNS,
    views=("overview",),
    compared=Figure(keys=("mean",)),
)


_ON_DEVICE: Final = frozenset({"kernel", "memcpy", "memset"})
_BY_RUNTIME: Final = frozenset({"runtime"})

_NOTES: Final = (
    "Each moment of a step counts once, for the first of the columns that is busy then on any thread, stream"
    " or device, so the columns sum to the step: time of the host behind work of the device does not show.",
    "A step begins where the device events launched in the step before end, and lasts to the end of its own.",
    "Communication is the kernels of NCCL and its like and the host's nccl: and gloo: operators, as far as no"
    " other device event hides it. CPU Exec is operators and annotations, without those around a whole step,"
    " Lightning's [pl] ranges and this package's own.",
)
_NO_DEVICE_NOTE: Final = "The trace has no device events: Kernel, Memcpy and Memset are not measured."
_NO_RUNTIME_NOTE: Final = "The trace has no calls of a device's runtime: Runtime is not measured."


def step_breakdown_table(by_rank: Mapping[int, StepBreakdown | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """What each step waited for, with the mean and each column's share of the steps' time."""
    ranks = split_ranks(by_rank)
    if ranks.absent_reason is not None:
        return STEP_BREAKDOWN.table(
            absent_reason=ranks.absent_reason,
        )
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
            *ranks.notes,
        ),
    )


def _left_out_note(found: Mapping[int, StepBreakdown], whole: StepBreakdown) -> tuple[str, ...]:
    """Which ranks the mean of all is without."""
    lacking = [str(rank) for rank, one in found.items() if whole.has_device and not one.has_device]
    if not lacking:
        return ()
    several = len(lacking) > 1
    return (
        f"Without rank{'s' if several else ''} {', '.join(lacking)} in Mean and Share:"
        f" {'they have' if several else 'it has'} no device events.",
    )


def _row(name: str, total: Cell, parts: Sequence[Cell], fact: StepBreakdown) -> tuple[Cell, ...]:
    """A row of a fact, with dashes for what its trace cannot tell."""
    unknown = (frozenset() if fact.has_device else _ON_DEVICE) | (
        frozenset() if fact.has_runtime else _BY_RUNTIME
    )
    cells = (part if key not in unknown else None for key, part in zip(STEP_CATEGORIES, parts, strict=True))
    return name, total, *cells
