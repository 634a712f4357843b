"""Rows of a table put together under headings, with sums in the columns that add up.

Which rows belong together and what they sum to is known here, where numbers are written; the page only
moves rows. A sum is that of all rows of the group, also of those that a search or a limit hides, as far as
they have a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Cell, Table, TimeUnit, Unit
from lightning_modelprof.show.format import DASH, format_cell
from lightning_modelprof.show.grid import Strip
from lightning_modelprof.show.html_cells import CellView, is_share, write_cell

NAMESPACE: Final = "Namespace"
NO_NAMESPACE: Final = "no namespace"

_NAMESPACE: Final = re.compile(r"(?:void )?(\w+|\(anonymous namespace\))::")


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A column of the page: its place in the table's rows, ``None`` if nothing of it was measured."""

    place: int | None
    strip: Strip
    group: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rows under one heading.

    Attributes:
        name: the heading.
        num_rows: how many there are.
        sums: one per column behind the name; ``None`` where it does not add up or no row has a value.
        num_known: for each sum, how many rows have a value.
    """

    name: str
    num_rows: int
    sums: tuple[CellView | None, ...]
    num_known: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grouping:
    """One way to put the rows together; ``members`` has the number of each row's group."""

    label: str
    members: tuple[int, ...]
    groups: tuple[Group, ...]

    def data(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {
            "label": self.label,
            "members": self.members,
            "groups": [
                {
                    "name": group.name,
                    "rows": f"{format_cell(group.num_rows, Unit.COUNT)} row{'s' * (group.num_rows != 1)}",
                    "sums": [
                        None if cell is None else _sum_data(cell, known, group.num_rows)
                        for cell, known in zip(group.sums, group.num_known, strict=True)
                    ],
                }
                for group in self.groups
            ],
        }


def namespace_of(name: Cell) -> str | None:
    """What stands before the first ``::`` of a name: ``aten`` of ``aten::mm``, ``at`` of ``void at::f<...>``.

    ``None`` when there is none, or anything but one word before it, as in ``Memcpy (a::b -> c)``.
    """
    match = _NAMESPACE.match(name) if isinstance(name, str) else None
    return match[1] if match else None


def groupings(
    table: Table,
    rows: Sequence[tuple[Cell, ...]],
    columns: Sequence[ShownColumn],
    time_unit: TimeUnit | None,
) -> tuple[Grouping, ...]:
    """The ways that put at least two rows together and do not leave one group only; none of a tree.

    Args:
        table: the table.
        rows: the raw cells of the rows in the page.
        columns: those of the page behind the name.
        time_unit: of the table's durations.
    """
    if any(table.depths):
        return ()
    spaces = [namespace_of(row[0]) for row in rows]
    found: list[tuple[str, list[str | None], str]] = [(NAMESPACE, spaces, NO_NAMESPACE)]
    for column in columns:
        if column.place is not None and column.strip.unit is Unit.TEXT:
            cells = [row[column.place] for row in rows]
            if all(cell is None or isinstance(cell, str) for cell in cells):
                texts = [one_line(str(cell)) if cell else None for cell in cells]
                found.append((" ".join(filter(None, (column.group, column.strip.label))), texts, DASH))
    sums = _Sums(table, rows, columns, time_unit)
    return tuple(_grouping(label, keys, unnamed, sums) for label, keys, unnamed in found if _is_of_use(keys))


def _is_of_use(keys: Sequence[str | None]) -> bool:
    known = [key for key in keys if key is not None]
    return len(set(known)) < len(known) and len(set(keys)) > 1


def _grouping(label: str, keys: Sequence[str | None], unnamed: str, sums: _Sums) -> Grouping:
    """Rows with the same key are a group; groups stand in the order of their first rows."""
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    members: list[list[int]] = [[] for _ in order]
    for row, key in enumerate(keys):
        members[order[key]].append(row)
    cells, known = sums.of(members)
    groups = (
        Group(
            unnamed if key is None else key,
            len(members[number]),
            tuple(column[number] for column in cells),
            tuple(counts[number] for counts in known),
        )
        for key, number in order.items()
    )
    return Grouping(label, tuple(order[key] for key in keys), tuple(groups))


class _Sums:
    """Adds up rows of a table."""

    def __init__(
        self,
        table: Table,
        rows: Sequence[tuple[Cell, ...]],
        columns: Sequence[ShownColumn],
        time_unit: TimeUnit | None,
    ) -> None:
        self._table = table
        self._rows = rows
        self._columns = columns
        self._time_unit = time_unit

    def of(self, members: Sequence[Sequence[int]]) -> tuple[list[list[CellView | None]], list[list[int]]]:
        """For each column and each group the sum, and how many rows have a value."""
        sums: list[list[CellView | None]] = []
        known: list[list[int]] = []
        for column in self._columns:
            numbers = [self._numbers(one, column.place) for one in members]
            sums.append(self._written([_sum(one) for one in numbers], column.strip))
            known.append([len(one) for one in numbers])
        return sums, known

    def _numbers(self, rows: Sequence[int], place: int | None) -> list[int | float]:
        """The values of a column that adds up."""
        if place is None or not self._table.columns[place].adds_up:
            return []
        values = (self._rows[row][place] for row in rows)
        return [value for value in values if isinstance(value, int | float)]

    def _written(self, totals: Sequence[int | float | None], strip: Strip) -> list[CellView | None]:
        """Sums as cells, with their decimal points below those of the column."""
        if all(total is None for total in totals):
            return [None] * len(totals)
        texts = [format_cell(total, strip.unit, time_unit=self._time_unit or "ms") for total in totals]
        aligned = Strip(strip.label, strip.unit, (*strip.cells, *texts)).aligned()[len(strip.cells) :]
        return [
            None
            if total is None
            else write_cell(text, total, strip.unit, has_bar=is_share(strip.unit, totals))
            for text, total in zip(aligned, totals, strict=True)
        ]


def _sum(numbers: Sequence[int | float]) -> int | float | None:
    """Exact for integers; ``None`` of nothing, which is not zero."""
    if not numbers:
        return None
    return sum(numbers) if all(isinstance(number, int) for number in numbers) else math.fsum(numbers)


def _sum_data(cell: CellView, num_known: int, num_rows: int) -> dict[str, Any]:
    is_partial = num_known < num_rows
    about = f"Sum of {num_known} of {num_rows} rows; the others have no value." if is_partial else ""
    return {"text": cell.text, "value": cell.value, "bar": cell.bar, "about": about}
