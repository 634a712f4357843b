"""The rows of two tables by their names: what each is on one side and on the other."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.report.compare.changed_figures import Figure, calls_column, column_position
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.row_paths import RowPath, row_paths


class TableSide:
    """The rows of one table by their paths.

    Args:
        table: before, or after.
        key: of the column that is compared.
        figure: what is compared of such tables.
        divisor: number of steps that the figures are sums of; ``None`` if they are no sums.
    """

    def __init__(self, table: Table, key: str, figure: Figure, divisor: int | None) -> None:
        self.table = table
        self.names = name_positions(table, figure)
        self.at = dict(row_paths(table, self.names))
        self.position = position_of(table, key)
        self.unit = table.columns[self.position].unit
        counted = calls_column(table)
        self.calls = None if counted is None else counted.key
        self.divisor = divisor

    def value(self, path: RowPath) -> float | None:
        """The figure of a row, per step where it is a sum; ``None`` without it or without the row."""
        return self._number(path, self.position)

    def num_calls(self, path: RowPath) -> float | None:
        """Its number of calls, per step where the figure is; ``None`` if the table does not count them."""
        return None if self.calls is None else self._number(path, position_of(self.table, self.calls))

    def row_unit(self, path: RowPath) -> Unit | None:
        """The unit of a row's figure; ``None`` without the row."""
        if path not in self.at:
            return None
        return self.table.row_units[self.at[path]] if self.unit is Unit.BY_ROW else self.unit

    def name_cells(self, path: RowPath) -> tuple[Cell, ...]:
        """What the row is called; it must be there."""
        row = self.table.rows[self.at[path]]
        return tuple(row[position] for position in self.names)

    def _number(self, path: RowPath, position: int) -> float | None:
        if path not in self.at:
            return None
        cell = self.table.rows[self.at[path]][position]
        if not isinstance(cell, int | float):
            return None
        return cell if self.divisor is None else cell / self.divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPair:
    """A row of both sides, or of one of them.

    Attributes:
        names: cells that say which row it is.
        unit: of the figure.
        before, after: the figure, ``None`` where the side does not have it.
        difference: after less before; ``None`` unless both sides have it in the same unit.
        calls: of each side.
        state: ``new``, ``gone``, or ``""`` for a row of both sides.
    """

    names: tuple[Cell, ...]
    unit: Unit
    before: float | None
    after: float | None
    difference: float | None
    calls: tuple[float | None, float | None]
    state: str

    @property
    def weight(self) -> float:
        """How far up the row belongs; below 0 without a figure on either side."""
        if self.difference is not None:
            return abs(self.difference)
        return max((abs(value) for value in (self.before, self.after) if value is not None), default=-1.0)


def pair_rows(before: TableSide, after: TableSide) -> dict[RowPath, RowPair]:
    """The rows of both sides; rows are the same when their names are, and those of the rows they are in."""
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
        state="" if None not in units else "new" if units[0] is None else "gone",
    )


def name_positions(table: Table, figure: Figure) -> list[int]:
    """Where the columns are that say which row is which."""
    if figure.names is None:
        return [0]
    return [position for key in figure.names if (position := column_position(table, key)) is not None]


def position_of(table: Table, key: str) -> int:
    """Where a column is that the table is known to have."""
    position = column_position(table, key)
    assert position is not None
    return position
