"""Changes as bars from the middle of a cell: left is less, right is more, and colour says what is better."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.units import format_cell

_LESS_IS_BETTER: Final = frozenset({Unit.DURATION_NS, Unit.BYTES})
_MORE_IS_BETTER: Final = frozenset({Unit.RATE, Unit.FLOPS_PER_S, Unit.BYTES_PER_S})

_MOST_RATIO: Final = 1.0
"""Bars of shares end here: what was next to nothing before would make all others vanish."""

TONES: Final = {"better": "better", "worse": "worse", "neutral": "neither, or not known which"}
"""Class of a bar, and its word in the legend."""


class ChangeBar(Record, frozen=True):
    """The bar of one cell.

    Attributes:
        left, width: shares of the cell.
        tone: one of ``TONES``.
        is_cut: whether the change goes beyond the bar.
    """

    left: float
    width: float
    tone: str
    is_cut: bool


def change_bars(table: Table) -> Mapping[tuple[int, int], ChangeBar]:
    """The bars of a table by row and column.

    Definition: the longest bar of a column, of each unit where these differ by row, is its largest change,
    hidden rows included; those of shares end at 100 %.
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
        (row, column): _bar(value, scale, _figure_unit(table, row))
        for (row, column), value in values.items()
        if (scale := largest[column, _unit(table, row, column)])
    }


def cut_note(bars: Mapping[tuple[int, int], ChangeBar]) -> str:
    """How many bars are cut; ``""`` if none is."""
    cut = sum(bar.is_cut for bar in bars.values())
    if not cut:
        return ""
    return f"{format_cell(cut, Unit.COUNT)} bar{'s' * (cut != 1)} with an arrow would go beyond 100 %."


def _bar(value: float, scale: float, unit: Unit) -> ChangeBar:
    width = min(abs(value) / scale, 1.0) / 2
    is_better = value < 0 if unit in _LESS_IS_BETTER else value > 0
    is_known = unit in _LESS_IS_BETTER | _MORE_IS_BETTER
    return ChangeBar(
        left=0.5 - width if value < 0 else 0.5,
        width=width,
        tone="neutral" if not is_known or not value else "better" if is_better else "worse",
        is_cut=abs(value) > scale,
    )


def _figure_unit(table: Table, row: int) -> Unit:
    """The unit of what is compared: a change may be a share of it."""
    before = next((place for place, one in enumerate(table.columns) if one.key == "before"), None)
    return Unit.TEXT if before is None else _unit(table, row, before)


def _unit(table: Table, row: int, column: int) -> Unit:
    unit = table.columns[column].unit
    return table.row_units[row] if unit is Unit.BY_ROW and table.row_units else unit
