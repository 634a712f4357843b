"""Table columns in a page: which are visible, which one orders the rows, and the bars of changes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Better, Table, Unit
from lightning_modelprof.units import format_cell

_FEWEST: Final = 3
"""With fewer values, falling numbers mean nothing."""


def hidden_places(
    table: Table, places: Sequence[int | None], has_any: Callable[[int], bool], sorted_by: int | None
) -> tuple[int, ...]:
    """Return the page's hidden columns: all but the non-empty main ones; none if no column is main.

    Args:
        places: the table column of each page column, ``None`` for one without measurements.
        has_any: whether a page column has any content.
        sorted_by: page column that orders the rows, which is always visible.
    """
    if not any(column.is_main for column in table.columns):
        return ()
    return tuple(
        number
        for number, place in enumerate(places)
        if number and number != sorted_by and not (_is_main(table, place) and has_any(number))
    )


def _is_main(table: Table, place: int | None) -> bool:
    return place is not None and table.columns[place].is_main


def sorted_place(
    table: Table, places: Sequence[int | None], values: Callable[[int], Sequence[float | None]]
) -> int | None:
    """Return the page column whose numbers fall from row to row: the first main one, else the first.

    Args:
        places: as above.
        values: values of a page column; in trees, of the top rows. Missing values must be last.
    """
    falling = [
        number
        for number, place in enumerate(places)
        if number and place is not None and _falls(values(number))
    ]
    main = (number for number in falling if _is_main(table, places[number]))
    return next(main, falling[0] if falling else None)


def _falls(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    if len(known) < _FEWEST or None in values[: len(known)]:
        return False
    if 2 * len(set(known)) <= len(known):  # mostly ties, which show no order
        return False
    return all(one >= other for one, other in pairwise(known))


_MOST_RATIO: Final = 1.0
"""Bars of shares end here, or changes from almost nothing would make all others vanish."""

TONES: Final = {"better": "better", "worse": "worse", "neutral": "neither"}
"""Class of a bar → its word in the legend."""


class ChangeBar(Record, frozen=True):
    """The bar of one cell.

    Attributes:
        left, width: shares of the cell.
        tone: one of ``TONES``.
        is_cut: whether the change exceeds the bar.
    """

    left: float
    width: float
    tone: str
    is_cut: bool


def change_bars(table: Table) -> Mapping[tuple[int, int], ChangeBar]:
    """Return a table's bars by row and column.

    A column's longest bar (per unit, if units differ by row) is its largest change, including hidden rows;
    bars of shares end at 100%.
    """
    values: dict[tuple[int, int], float] = {}
    for column, one in enumerate(table.columns):
        cells = (cells[column] for cells in table.rows) if one.change == "bar" else ()
        for place, cell in enumerate(cells):
            if isinstance(cell, int | float) and math.isfinite(cell):
                values[place, column] = float(cell)
    largest: defaultdict[tuple[int, Unit], float] = defaultdict(float)
    for (row, column), value in values.items():
        unit = _unit(table, row, column)
        most = _MOST_RATIO if unit is Unit.RATIO else math.inf
        largest[column, unit] = max(largest[column, unit], min(abs(value), most))
    return {
        (row, column): _bar(value, scale, table.row_better[row] if table.row_better else "")
        for (row, column), value in values.items()
        if (scale := largest[column, _unit(table, row, column)])
    }


def cut_note(bars: Mapping[tuple[int, int], ChangeBar]) -> str:
    cut = sum(bar.is_cut for bar in bars.values())
    if not cut:
        return ""
    return (
        f"{format_cell(cut, Unit.COUNT)}"
        f" bar{', marked with an arrow, is' if cut == 1 else 's, marked with arrows, are'}"
        " clipped at 100%."
    )


def _bar(value: float, scale: float, better: Better) -> ChangeBar:
    width = min(abs(value) / scale, 1.0) / 2
    is_better = better == ("less" if value < 0 else "more")
    return ChangeBar(
        left=0.5 - width if value < 0 else 0.5,
        width=width,
        tone="neutral" if not better or not value else "better" if is_better else "worse",
        is_cut=abs(value) > scale,
    )


def _unit(table: Table, row: int, column: int) -> Unit:
    unit = table.columns[column].unit
    return table.row_units[row] if unit is Unit.BY_ROW and table.row_units else unit
