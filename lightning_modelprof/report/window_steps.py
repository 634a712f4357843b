"""The steps of a window, read back from its step time breakdown, and those of two windows side by side."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.report.model import Cell, Column, Report, Table, Unit

_STEP: Final = re.compile(r"step \d+")

STEP: Final = "Step"
"""Name of the row of the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSteps:
    """The steps of one window.

    Attributes:
        mean_ns: part → mean per step, :data:`STEP` first; ``None`` for a part that the trace cannot tell. The
            parts sum to the step.
        low_ns, high_ns: part → its shortest and longest time in a step; empty without two single steps.
        durations_ns: of single steps, in order; empty for several ranks, of which the report has means alone.
        notes: of the breakdown.
    """

    mean_ns: dict[str, float | None]
    low_ns: dict[str, float]
    high_ns: dict[str, float]
    durations_ns: tuple[float, ...]
    notes: tuple[str, ...]


def window_steps(report: Report) -> WindowSteps | str:
    """The steps of a report on traces, or why it has none."""
    table = next((one for one in report.tables if one.id == "step_breakdown"), None)
    if table is None:
        return "its step time breakdown was not asked for"
    if not table.rows:
        return table.absent_reason or "its step time breakdown has no rows"
    parts = (STEP, *(column.label for column in table.columns[2:]))
    singles = [row[1:] for row in table.rows if _STEP.fullmatch(str(row[0]))]
    by_part = {part: [_number(row[at]) for row in singles] for at, part in enumerate(parts)}
    known = {
        part: [value for value in values if value is not None]
        for part, values in by_part.items()
        if len(values) > 1 and None not in values
    }
    return WindowSteps(
        mean_ns={part: _number(cell) for part, cell in zip(parts, table.rows[0][1:], strict=True)},
        low_ns={part: min(values) for part, values in known.items()},
        high_ns={part: max(values) for part, values in known.items()},
        durations_ns=tuple(value for value in by_part[STEP] if value is not None),
        notes=table.notes,
    )


def differences_ns(before: WindowSteps, after: WindowSteps) -> dict[str, float]:
    """Part → after less before, of what both sides know; :data:`STEP` is among them."""
    return {
        part: new - old
        for part, old in before.mean_ns.items()
        if old is not None and (new := after.mean_ns.get(part)) is not None
    }


def steps_table(before: WindowSteps, after: WindowSteps) -> Table:
    """The mean step and its parts side by side, the largest difference first.

    Definition: each moment of a step counts once, as in the step time breakdown, so the differences of the
    parts sum to that of the step. From and to are the shortest and the longest of the steps.
    """
    differences = differences_ns(before, after)
    parts = [part for part in before.mean_ns if part != STEP]
    parts.sort(key=lambda part: -abs(differences.get(part, 0.0)))
    unknown = [part for part in parts if part not in differences]
    sums = "The differences of the parts sum to that of the step."
    if unknown:
        sums = f"A side cannot tell {', '.join(unknown)}: the other differences do not sum to the step's."
    return Table(
        id="comparison_steps",
        title="A step and its parts",
        columns=(
            Column("name", "Part of the step"),
            Column("before", "before", Unit.DURATION_NS),
            Column("after", "after", Unit.DURATION_NS),
            Column("difference", "difference", Unit.DURATION_NS),
            Column("ratio", "change", Unit.RATIO),
            Column("before_low", "from", Unit.DURATION_NS, "steps before"),
            Column("before_high", "to", Unit.DURATION_NS, "steps before"),
            Column("after_low", "from", Unit.DURATION_NS, "steps after"),
            Column("after_high", "to", Unit.DURATION_NS, "steps after"),
        ),
        rows=tuple(_row(part, before, after, differences.get(part)) for part in (STEP, *parts)),
        depths=(0, *[1] * len(parts)),
        notes=(
            *_common_notes(before.notes, after.notes),
            sums,
        ),
    )


def _common_notes(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """The notes of both breakdowns; those of one side say so."""
    notes = [note if note in after else f"Before: {note}" for note in before]
    return notes + [f"After: {note}" for note in after if note not in before]


def _row(part: str, before: WindowSteps, after: WindowSteps, difference: float | None) -> tuple[Cell, ...]:
    old = before.mean_ns[part]
    return (
        part,
        old,
        after.mean_ns.get(part),
        difference,
        difference / old if difference is not None and old else None,
        *(side.get(part) for one in (before, after) for side in (one.low_ns, one.high_ns)),
    )


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, int | float) else None
