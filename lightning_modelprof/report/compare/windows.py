"""Build a report from two profiler windows or imported traces: the largest change, then tables row by row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.record import Record
from lightning_modelprof.report.compare.differences import warnings, why_no_speedup
from lightning_modelprof.report.compare.row_changes import changed_rows
from lightning_modelprof.report.compare.tables import findings_table
from lightning_modelprof.report.model import Cell, Report, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.summary import Difference, PartTimes, Summary, WindowComparison
from lightning_modelprof.units import digits, duration_unit, percent, signed


def compare_windows(
    before: Report, after: Report, names: tuple[str, str], differences: Sequence[Difference] = ()
) -> Report:
    """Compare two windows or traces side by side.

    Args:
        before: report of a profiler window, or of one job's traces.
        after: report of the same kind.
        differences: known differences between their runs.

    Caveats:
        There are no intervals, so any difference may be chance: a window has few steps.
    """
    sides = (window_steps(before), window_steps(after))
    known = _both(sides)
    models = [" | ".join(_device_models(report)) for report in (before, after)]
    others = [Difference("Device", *models)] if all(models) and models[0] != models[1] else []
    if any(one.name == "Device" for one in differences):
        others = []
    # The step time breakdown comes first, with the spread of the steps.
    rest = [table for table in changed_rows(before, after) if table.id != "step_breakdown_changes"]
    return Report(
        title=_first_line(sides, [*differences, *others]),
        facts=(
            *warnings(others),
            *(
                (label, _described(name, side))
                for label, name, side in zip(("Before", "After"), names, sides, strict=True)
            ),
        ),
        tables=(
            *(() if known is None else (steps_table(*known),)),
            findings_table(before, after),
            *rest,
        ),
        notes=_notes(before, after, known),
        summary=Summary(window_comparison=_window_comparison(names, known)),
    )


def _both(
    sides: tuple[ComparedSteps | str, ComparedSteps | str],
) -> tuple[ComparedSteps, ComparedSteps] | None:
    before, after = sides
    return None if isinstance(before, str) or isinstance(after, str) else (before, after)


def _first_line(
    sides: tuple[ComparedSteps | str, ComparedSteps | str], differences: Sequence[Difference]
) -> str:
    known = _both(sides)
    if known is None:
        reasons = [
            f"{label}: {side}"
            for label, side in zip(("before", "after"), sides, strict=True)
            if isinstance(side, str)
        ]
        return f"No steps to compare ({'; '.join(reasons)})"
    old, new = (side.mean_ns[STEP] for side in known)
    if not old or new is None:
        return "No steps to compare (a step took no measurable time)"
    scale, unit = duration_unit(max(old, new))
    change = why_no_speedup(differences) if differences else signed(percent((new - old) / old))
    line = f"step {digits(old / scale, 4)} → {digits(new / scale, 4)} {unit} ({change})"
    parts = {part: value for part, value in differences_ns(*known).items() if part != STEP and value}
    if not parts:
        return line
    part = max(parts, key=lambda part: abs(parts[part]))
    scale, unit = duration_unit(abs(parts[part]))
    return f"{line}; largest change: {part} {signed(digits(parts[part] / scale))} {unit}"


def _described(name: str, side: ComparedSteps | str) -> str:
    if isinstance(side, str):
        return f"{name} ({side})"
    number = len(side.durations_ns)
    if number == 0:
        return f"{name} (rank means)"
    return f"{name} (1 step)" if number == 1 else f"{name} ({number:,} steps of {_step_time_range(side)})"


def _step_time_range(side: ComparedSteps) -> str:
    low, high = side.low_ns[STEP], side.high_ns[STEP]
    scale, unit = duration_unit(high)
    return f"{digits(low / scale, 4)} to {digits(high / scale, 4)} {unit}"


def _notes(
    before: Report, after: Report, known: tuple[ComparedSteps, ComparedSteps] | None
) -> tuple[str, ...]:
    notes = []
    if known is not None:
        no_interval = (
            "No confidence interval, because a window has too few steps. A difference may be chance."
        )
        if all(len(side.durations_ns) > 1 for side in known):
            spreads = (
                f" Steps took {_step_time_range(known[0])} before and {_step_time_range(known[1])} after."
            )
        else:
            spreads = " The spread of steps isn't known for both sides."
        notes.append(f"{no_interval}{spreads} Compare runs to get an interval.")
    ranks = [len(report.summary.traces) for report in (before, after)]
    if all(ranks) and ranks[0] != ranks[1]:
        notes.append(f"Different numbers of traces: {ranks[0]} before, {ranks[1]} after.")
    return tuple(notes)


def _device_models(report: Report) -> tuple[str, ...]:
    table = next((one for one in report.tables if one.id == "device_usage"), None)
    keys = [] if table is None else [column.key for column in table.columns]
    if table is None or "model" not in keys:
        return ()
    models = (row[keys.index("model")] for row in table.rows)
    return tuple(dict.fromkeys(str(model) for model in models if model))


def _window_comparison(
    names: tuple[str, str], known: tuple[ComparedSteps, ComparedSteps] | None
) -> WindowComparison:
    parts = known and {
        part: PartTimes(before_ns=old, after_ns=known[1].mean_ns.get(part))
        for part, old in known[0].mean_ns.items()
    }
    return WindowComparison(before=names[0], after=names[1], parts=parts)


_STEP: Final = re.compile(r"step \d+")


STEP: Final = "Step"
"""Name of the row with the whole step."""


class ComparedSteps(Record, frozen=True, kw_only=True):
    """The steps of one window.

    Attributes:
        mean_ns: part → mean per step, :data:`STEP` first; ``None`` for a part that the trace lacks. Parts sum
            to the step.
        low_ns, high_ns: part → its shortest and longest time in a step; empty with fewer than two single
            steps.
        durations_ns: durations of single steps, in order; empty for multiple ranks, whose report only has
            means.
    """

    mean_ns: dict[str, float | None]
    low_ns: dict[str, float]
    high_ns: dict[str, float]
    durations_ns: tuple[float, ...]
    notes: tuple[str, ...]


def window_steps(report: Report) -> ComparedSteps | str:
    """Return the steps of a traces' report, or why it has none."""
    table = next((one for one in report.tables if one.id == "step_breakdown"), None)
    if table is None:
        return "no step time breakdown was requested"
    if not table.rows:
        return table.absent_reason or "the step time breakdown has no rows"
    parts = (STEP, *(column.label for column in table.columns[2:]))
    singles = [row[1:] for row in table.rows if _STEP.fullmatch(str(row[0]))]
    by_part = {part: [_number(row[at]) for row in singles] for at, part in enumerate(parts)}
    known = {
        part: [value for value in values if value is not None]
        for part, values in by_part.items()
        if len(values) > 1 and None not in values
    }
    return ComparedSteps(
        mean_ns={part: _number(cell) for part, cell in zip(parts, table.rows[0][1:], strict=True)},
        low_ns={part: min(values) for part, values in known.items()},
        high_ns={part: max(values) for part, values in known.items()},
        durations_ns=tuple(value for value in by_part[STEP] if value is not None),
        notes=table.notes,
    )


class _Part(NamedTuple):
    name: str
    before: ComparedSteps
    after: ComparedSteps

    @property
    def difference(self) -> float | None:
        old, new = self.before.mean_ns[self.name], self.after.mean_ns.get(self.name)
        return None if old is None or new is None else new - old


def differences_ns(before: ComparedSteps, after: ComparedSteps) -> dict[str, float]:
    """Map parts that both sides know, :data:`STEP` included, to after minus before."""
    parts = [_Part(part, before, after) for part in before.mean_ns]
    return {part.name: part.difference for part in parts if part.difference is not None}


_RANGE: Final = "shortest and longest step on that side, not an interval of the mean."
STEP_CHANGES: Final = TableSpec(
    id="comparison_steps",
    title="Step time by part",
    help=(
        "Mean step and its parts from the Step time breakdown of two windows, largest difference first."
        " Parts don't overlap, so their differences add up to the step's."
    ),
    columns=(
        ColumnSpec("name", "Part of the step"),
        ColumnSpec(
            "before",
            "before",
            Unit.DURATION_NS,
            help="value before.",
            of=lambda part: part.before.mean_ns[part.name],
        ),
        ColumnSpec(
            "after",
            "after",
            Unit.DURATION_NS,
            help="value after.",
            of=lambda part: part.after.mean_ns.get(part.name),
        ),
        ColumnSpec("difference", "difference", Unit.DURATION_NS, help="after minus before.", change="bar"),
        ColumnSpec(
            "ratio",
            "change",
            Unit.RATIO,
            help="difference relative to before.",
            change="bar",
            of=lambda part: share(part.difference, part.before.mean_ns[part.name]),
        ),
        ColumnSpec(
            "before_low",
            "from",
            Unit.DURATION_NS,
            "steps before",
            help=_RANGE,
            of=lambda part: part.before.low_ns.get(part.name),
        ),
        ColumnSpec(
            "before_high",
            "to",
            Unit.DURATION_NS,
            "steps before",
            help=_RANGE,
            of=lambda part: part.before.high_ns.get(part.name),
        ),
        ColumnSpec(
            "after_low",
            "from",
            Unit.DURATION_NS,
            "steps after",
            help=_RANGE,
            of=lambda part: part.after.low_ns.get(part.name),
        ),
        ColumnSpec(
            "after_high",
            "to",
            Unit.DURATION_NS,
            "steps after",
            help=_RANGE,
            of=lambda part: part.after.high_ns.get(part.name),
        ),
    ),
    depth_of=lambda part: int(part.name != STEP),
    better_of=lambda _: "less",
    heading="Changes in a step",
)


def steps_table(before: ComparedSteps, after: ComparedSteps) -> Table:
    """Show the mean step and its parts side by side, largest difference first."""
    whole, *parts = (_Part(name, before, after) for name in before.mean_ns)
    parts.sort(key=lambda part: -abs(part.difference or 0.0))
    unknown = [part.name for part in parts if part.difference is None]
    notes = _notes_by_side(before.notes, after.notes)
    if unknown:
        notes.append(
            f"One side doesn't record {', '.join(unknown)}, so the other differences don't add up to the"
            " step's."
        )
    return STEP_CHANGES.table([whole, *parts], notes=tuple(notes))


def _notes_by_side(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    notes = [note if note in after else f"Before: {note}" for note in before]
    return notes + [f"After: {note}" for note in after if note not in before]


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, int | float) else None
