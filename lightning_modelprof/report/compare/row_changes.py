"""Two tables of the same kind, compared row by row."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.record import Record
from lightning_modelprof.report.compare.changed_figures import (
    calls_column,
    column_position,
    comparable,
    figure_of,
    heading_of,
    is_number,
    num_steps,
)
from lightning_modelprof.report.model import Better, Cell, Report, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec

_STEPS_IN_TITLE: Final = re.compile(r" \(steps? .*| of (?:window|trace) .*")


def changed_rows(before: Report, after: Report) -> tuple[Table, ...]:
    """Return the row changes of each table that has rows in both reports and changed."""
    others = {table.id: table for table in after.tables}
    found = []
    for table in before.tables:
        other = others.get(table.id)
        if other is None or not table.rows or not other.rows:
            continue
        steps = (num_steps(before, table), num_steps(after, other))
        changes = row_changes(comparable(table), comparable(other), steps)
        if _has_changed(changes):
            found.append(changes)
    return tuple(found)


def row_changes(before: Table, after: Table, steps: tuple[int | None, int | None] = (None, None)) -> Table:
    """Compare rows, largest difference first; rows stay below the same row as before.

    Definition: rows match if their names and those of the rows above them do. ``TableSpec.compared`` selects
    the figure; a sum is divided by the number of steps. ``ratio`` is the difference relative to before. A row
    on one side only has ``None`` on the other and no difference; it is sorted as if its value were the
    difference. Rows without the figure on either side are left out. If units vary by row, rows of one unit
    stay together.

    Args:
        after: the other side's table with the same ID.
        steps: number of steps that each side's figures sum over; ignored unless they are sums.

    Returns:
        A table without rows, with the reason, if nothing is comparable.
    """
    figure = figure_of(before)
    key = next((key for key in figure.keys if all(_has_numbers(side, key) for side in (before, after))), None)
    reason = _why_not(key, figure, steps)
    if key is None or reason is not None:
        return _table(before, after, key, figure, absent_reason=reason)
    divisors = steps if figure.sum_over is not None else (None, None)
    sides = (TableSide(before, key, figure, divisors[0]), TableSide(after, key, figure, divisors[1]))
    rows = list(_in_order(pair_rows(*sides)))
    return _table(before, after, key, figure, rows=rows, notes=_notes(figure, steps, rows))


def _in_order(rows: Mapping[RowPath, RowPair]) -> Iterator[RowPair]:
    """Yield rows, siblings by unit and weight; a row without figures stays if a row below it has one."""
    parents = {
        path: next((path[:end] for end in range(len(path) - 1, 0, -1) if path[:end] in rows), ())
        for path in rows
    }
    kept = _with_ancestors((path for path, row in rows.items() if row.weight >= 0), parents)
    children: defaultdict[RowPath, list[RowPath]] = defaultdict(list)
    for path in rows:
        if path in kept:
            children[parents[path]].append(path)
    units = list(dict.fromkeys(row.unit for row in rows.values()))

    def ordered(paths: Sequence[RowPath]) -> list[RowPath]:
        """Times and bytes can't be compared in size, so units come first."""
        return sorted(paths, key=lambda path: (units.index(rows[path].unit), -rows[path].weight))

    waiting: list[tuple[int, RowPath]] = [(0, path) for path in reversed(ordered(children[()]))]
    while waiting:
        depth, path = waiting.pop()
        yield replace(rows[path], depth=depth)
        waiting += [(depth + 1, child) for child in reversed(ordered(children[path]))]


def _with_ancestors(paths: Iterable[RowPath], parents: Mapping[RowPath, RowPath]) -> set[RowPath]:
    found: set[RowPath] = set()
    for path in paths:
        above = path
        while above and above not in found:
            found.add(above)
            above = parents[above]
    return found


CHANGES: Final = TableSpec(
    id="changes",
    title="Changes by row",
    help="One figure per row of a table that both sides have. Sums are divided by the number of steps.",
    columns=(
        ColumnSpec("before", "before", help="value before."),
        ColumnSpec("after", "after", help="value after."),
        ColumnSpec(
            "difference",
            "difference",
            help="after minus before, in percentage points for percentages.",
            change="bar",
        ),
        ColumnSpec(
            "ratio",
            "change",
            Unit.RATIO,
            help="difference relative to before.",
            change="bar",
            of=lambda row: share(row.difference, row.before),
        ),
        ColumnSpec("state", "state", help="new or removed, for rows that exist on one side only."),
    ),
    unit_of=lambda row: row.unit,
    better_of=lambda row: row.better,
)


def _table(
    before: Table,
    after: Table,
    key: str | None,
    figure: CompareKey,
    *,
    rows: Sequence[RowPair] = (),
    notes: tuple[str, ...] = (),
    absent_reason: str | None = None,
) -> Table:
    names = [
        ColumnSpec(**asdict(before.columns[position]), of=_name_at(place))
        for place, position in enumerate(name_positions(before, figure))
    ]
    column = None if key is None else before.columns[position_of(before, key)]
    unit = Unit.TEXT if column is None else column.unit
    per_step = " per step" if figure.sum_over is not None else ""
    counted = calls_column(before) or calls_column(after)
    counts = [
        ColumnSpec(
            f"calls_{side}",
            f"{counted.label.lower()}{per_step} {side}",
            Unit.COUNT,
            of=_calls_at(place),
        )
        for place, side in enumerate(("before", "after"))
        if counted is not None
    ]
    *figures, ratio, state = CHANGES.columns
    title = before.title if before.title == after.title else _STEPS_IN_TITLE.sub("", before.title)
    depths = tuple(row.depth for row in rows)
    return CHANGES.table(
        rows,
        depths=depths if any(depths) else (),
        id=f"{before.id}_changes",
        columns=(*names, *(replace(one, unit=unit) for one in figures), ratio, *counts, state),
        title=f"{title}: {heading_of(column)}{per_step}"
        if column and column.label not in ("", "Value")
        else title,
        notes=notes,
        absent_reason=absent_reason,
        time_unit=before.time_unit,
        row_limit=before.row_limit,
        is_detail=before.is_detail,
    )


def _name_at(place: int) -> Callable[[RowPair], Cell]:
    return lambda row: row.names[place]


def _calls_at(place: int) -> Callable[[RowPair], Cell]:
    return lambda row: row.calls[place]


def _notes(
    figure: CompareKey, steps: tuple[int | None, int | None], rows: Sequence[RowPair]
) -> tuple[str, ...]:
    notes = []
    if figure.sum_over == "window":
        notes.append(
            f"Sums over the window are divided by its steps, {steps[0]:,} before and {steps[1]:,} after (all"
            " ranks). Tables over the whole file also count what's outside the steps."
        )
    elif figure.sum_over == "run":
        notes.append(
            f"Sums over the run are divided by its steps, {steps[0]:,} before and {steps[1]:,} after."
        )
    if any(row.unit is Unit.RATIO for row in rows):
        notes.append("For percentages, the difference is in percentage points.")
    return tuple(notes)


def _why_not(key: str | None, figure: CompareKey, steps: tuple[int | None, int | None]) -> str | None:
    if key is None:
        return "the two sides have no figure in common"
    if figure.sum_over is None or None not in steps:
        return None
    unknown = [label for label, number in zip(("before", "after"), steps, strict=True) if number is None]
    return f"the number of steps {' and '.join(unknown)} is unknown"


def _has_numbers(table: Table, key: str) -> bool:
    position = column_position(table, key)
    return position is not None and any(is_number(row[position]) for row in table.rows)


def _has_changed(changes: Table) -> bool:
    at, state = position_of(changes, "difference"), position_of(changes, "state")
    return any(row[at] or row[state] for row in changes.rows)


_BETTER: Final[Mapping[Unit, Better]] = {
    Unit.DURATION_NS: "less",
    Unit.BYTES: "less",
    Unit.RATE: "more",
    Unit.FLOPS_PER_S: "more",
    Unit.BYTES_PER_S: "more",
}
"""By the figure's unit, unless the table decides."""


class TableSide:
    """A table's rows by path.

    Args:
        key: key of the compared column.
        divisor: number of steps that the figures sum over; ``None`` if they aren't sums.
    """

    def __init__(self, table: Table, key: str, figure: CompareKey, divisor: int | None) -> None:
        self.table = table
        self.names = name_positions(table, figure)
        self.at = dict(row_paths(table, self.names))
        self.position = position_of(table, key)
        self.unit = table.columns[self.position].unit
        counted = calls_column(table)
        self.calls = None if counted is None else counted.key
        self.divisor = divisor
        self.better = figure.better

    def value(self, path: RowPath) -> float | None:
        """Return a row's figure, per step if it's a sum; ``None`` if missing."""
        return self._number(path, self.position)

    def num_calls(self, path: RowPath) -> float | None:
        """Return a row's calls, per step if the figure is; ``None`` if the table doesn't count them."""
        return None if self.calls is None else self._number(path, position_of(self.table, self.calls))

    def row_unit(self, path: RowPath) -> Unit | None:
        if path not in self.at:
            return None
        return self.table.row_units[self.at[path]] if self.unit is Unit.BY_ROW else self.unit

    def name_cells(self, path: RowPath) -> tuple[Cell, ...]:
        """Return an existing row's name cells."""
        row = self.table.rows[self.at[path]]
        return tuple(row[position] for position in self.names)

    def better_of(self, path: RowPath, unit: Unit) -> Better:
        if isinstance(self.better, str):
            return self.better
        by_name = self.better or {}
        return next((by_name[name] for name in path[-1:] if name in by_name), _BETTER.get(unit, ""))

    def _number(self, path: RowPath, position: int) -> float | None:
        if path not in self.at:
            return None
        cell = self.table.rows[self.at[path]][position]
        if not isinstance(cell, int | float):
            return None
        return cell if self.divisor is None else cell / self.divisor


class RowPair(Record, frozen=True, kw_only=True):
    """A row of both sides, or of one.

    Attributes:
        names: cells that identify the row.
        before, after: the figure; ``None`` if missing on that side.
        difference: after minus before; ``None`` unless both sides have it in the same unit.
        state: ``new``, ``removed``, or ``""`` for a row of both sides.
        better: whether less or more of the figure is better.
        depth: number of rows above it.
    """

    names: tuple[Cell, ...]
    unit: Unit
    before: float | None
    after: float | None
    difference: float | None
    calls: tuple[float | None, float | None]
    state: str
    better: Better
    depth: int = 0

    @property
    def weight(self) -> float:
        """Sort weight, largest first; below 0 without a figure on either side."""
        if self.difference is not None:
            return abs(self.difference)
        return max((abs(value) for value in (self.before, self.after) if value is not None), default=-1.0)


def pair_rows(before: TableSide, after: TableSide) -> dict[RowPath, RowPair]:
    """Pair both sides' rows; rows match if their names and those of the rows above them do."""
    return {path: _pair(path, before, after) for path in (before.at | after.at)}


def _pair(path: RowPath, before: TableSide, after: TableSide) -> RowPair:
    units = [side.row_unit(path) for side in (before, after)]
    known = [unit for unit in units if unit is not None]
    old, new = before.value(path), after.value(path)
    if len(set(known)) > 1:  # the same name for two things
        new = None
    return RowPair(
        names=(before if path in before.at else after).name_cells(path),
        unit=known[0],
        before=old,
        after=new,
        difference=None if old is None or new is None else new - old,
        calls=(before.num_calls(path), after.num_calls(path)),
        state="" if None not in units else "new" if units[0] is None else "removed",
        better=before.better_of(path, known[0]),
    )


def name_positions(table: Table, figure: CompareKey) -> list[int]:
    """Return the positions of the columns that identify a row."""
    if figure.names is None:
        return [0]
    return [position for key in figure.names if (position := column_position(table, key)) is not None]


def position_of(table: Table, key: str) -> int:
    position = column_position(table, key)
    assert position is not None
    return position


RowPath = tuple[str, ...]
"""A row's text, after those of the rows above it."""


def row_paths(table: Table, names: Sequence[int] | None = None) -> Mapping[RowPath, int]:
    """Map each row's path to its position; repeated paths get a number.

    Without ``names``, all text columns name a row.
    """
    rows: dict[RowPath, int] = {}
    path: list[str] = []
    if names is None:
        names = [position for position, column in enumerate(table.columns) if column.unit is Unit.TEXT]
    for index, row in enumerate(table.rows):
        depth = table.depths[index] if table.depths else 0
        text = " ".join(str(row[position]) for position in names if row[position])
        path[depth:] = [text]
        number = 2
        while tuple(path) in rows:
            path[-1], number = f"{text} ({number})", number + 1
        rows[tuple(path)] = index
    return rows
