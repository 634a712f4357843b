"""Step time breakdown of one profiler window: what each step waited for."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.step_breakdown import STEP_CATEGORIES, StepBreakdown
from lightning_modelprof.report.model import Cell, Column, Table, Unit

_LABELS: Final = {
    "kernel": "Kernel",
    "memcpy": "Memcpy",
    "memset": "Memset",
    "communication": "Communication",
    "runtime": "Runtime",
    "dataloader": "DataLoader",
    "cpu_exec": "CPU Exec",
    "other": "Other",
}

_COLUMNS: Final = (
    Column("name", "Step"),
    Column("total_ns", "Total", Unit.BY_ROW),
    *(Column(f"{key}_ns", _LABELS[key], Unit.BY_ROW) for key in STEP_CATEGORIES),
)

_ON_DEVICE: Final = frozenset({"kernel", "memcpy", "memset"})

_NOTES: Final = (
    "Each moment of a step counts once, for the first of the columns that is busy then on any thread, stream"
    " or device, so the columns sum to the step: time of the host behind work of the device does not show.",
    "A step begins where the device events launched in the step before end, and lasts to the end of its own.",
    "Communication is NCCL's and RCCL's kernels and the host's nccl: and gloo: operators, as far as no other"
    " device event hides it. CPU Exec is operators and annotations, without those around a whole step,"
    " Lightning's [pl] ranges and this package's own.",
)
_NO_DEVICE_NOTE: Final = "The trace has no device events: Kernel, Memcpy and Memset are not measured."

NO_STEP: Final = "the trace holds none of the recorded steps, or neither steps nor operators"
"""Why there is no breakdown though there is a trace that can be read."""


def step_breakdown_table(breakdown: StepBreakdown | None, table_id: str, title_suffix: str = "") -> Table:
    """One row per step, their mean, and each column's share of the steps' time.

    Args:
        breakdown: ``None`` when the trace gave no step to break down; the table then says why.
        table_id: key of the table in files.
        title_suffix: what follows the title, with its own space or brackets.
    """
    title = f"Step time breakdown{title_suffix}"
    if breakdown is None:
        return Table(id=table_id, title=title, columns=_COLUMNS, rows=(), absent_reason=NO_STEP)
    measured = [breakdown.has_device or key not in _ON_DEVICE for key in STEP_CATEGORIES]

    def row(name: str, total: Cell, parts: tuple[Cell, ...]) -> tuple[Cell, ...]:
        cells = (part if known else None for part, known in zip(parts, measured, strict=True))
        return name, total, *cells

    total_share = 1.0 if breakdown.mean_total_ns else None
    return Table(
        id=table_id,
        title=title,
        columns=_COLUMNS,
        rows=(
            *(row(f"step {step.number}", step.total_ns, step.parts_ns) for step in breakdown.steps),
            row("Mean", breakdown.mean_total_ns, breakdown.mean_parts_ns),
            row("Share", total_share, breakdown.shares),
        ),
        row_units=(*[Unit.DURATION_NS] * (len(breakdown.steps) + 1), Unit.RATIO),
        notes=(*_NOTES, *(() if breakdown.has_device else (_NO_DEVICE_NOTE,)), *breakdown.notes),
    )
