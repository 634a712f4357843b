"""A table as the page shows it: the strings of the terminal, and what sorting and searching need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Cell, Table, TimeUnit, Unit
from lightning_modelprof.show.grid import Block, Grid, build_grid, shown_rows
from lightning_modelprof.show.html_cells import (
    CellView,
    Header,
    is_share,
    with_raw_unit,
    write_cell,
    write_header,
)
from lightning_modelprof.show.html_groups import Grouping, ShownColumn, groupings

MAX_ROWS: Final = 10_000
"""Rows of a table in the page, and below any one row; a browser gets slow with more."""

FIRST_ROWS: Final = 100
"""Rows that are there before the reader asks for all, of a table that does not say how many."""

_OPEN_ROWS: Final = 40
"""A tree opens as far as this many rows are seen."""


@dataclass(slots=True)
class RowView:
    """One row; in a tree with its depth, whether it has rows below it, and whether they are open.

    ``raw_name`` is the name with the unit of the raw numbers, where that changes by row; ``""`` elsewhere.
    """

    name: CellView
    raw_name: str
    cells: list[CellView]
    depth: int
    is_parent: bool
    is_open: bool
    is_hidden: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """What the template needs of a table; ``groups`` are headings above them and how many they span.

    ``groupings`` are the ways to put rows together that a reader can choose from.
    """

    id: str
    title: str
    unit: str
    headers: tuple[Header, ...]
    groups: tuple[tuple[str, int], ...]
    rows: tuple[RowView, ...]
    limit: int
    is_tree: bool
    groupings: tuple[Grouping, ...]
    notes: tuple[str, ...]


def table_view(table: Table) -> TableView:
    """Write a table with rows.

    The cells are those that the terminal shows, in its unit of time, and also those that it cuts off: rows
    behind the table's limit wait until the reader asks for them.
    """
    limit = FIRST_ROWS if table.row_limit is None else table.row_limit
    as_shown = build_grid(table, max_rows=limit)
    grid = build_grid(replace(table, time_unit=as_shown.time_unit, row_limit=None), max_rows=MAX_ROWS)
    places = shown_rows(table, MAX_ROWS)
    values = [table.rows[place] for place in places]
    blocks = [_Strips(block, start) for block, start in _starts(grid.blocks)]
    names = _names(grid, [row[0] for row in values])
    columns = [cells for block in blocks for cells in block.cells(values)]
    rows = [
        RowView(name, raw_name, list(cells), depth, False, True, False)
        for name, raw_name, depth, *cells in zip(
            names, _raw_names(table, places), grid.depths, *columns, strict=True
        )
    ]
    _open(rows, limit)
    has_order = len(rows) > 1
    headers = [write_header(grid.names, "", "", grid.time_unit, has_order=has_order)]
    for block in blocks:
        headers += block.headers(headers[-1].label, grid.time_unit, has_order=has_order)
    groups = [("", 1), *((block.group, len(block.columns())) for block in blocks)]
    return TableView(
        id=table.id,
        title=one_line(table.title),
        unit="" if grid.time_unit is None else f"time in {grid.time_unit}",
        headers=tuple(headers),
        groups=tuple(groups) if any(label for label, _ in groups) else (),
        rows=tuple(rows),
        limit=limit,
        is_tree=any(grid.depths) and len(rows) > _OPEN_ROWS,
        groupings=groupings(
            table, values, [column for block in blocks for column in block.columns()], grid.time_unit
        ),
        notes=tuple(text for note in grid.notes if (text := one_line(" ".join(note.split())))),
    )


def _raw_names(table: Table, places: Sequence[int]) -> list[str]:
    """The names with the units of the raw numbers, where these change by row."""
    if not table.row_units or all(column.unit is not Unit.BY_ROW for column in table.columns):
        return [""] * len(places)
    return [with_raw_unit(one_line(str(table.rows[place][0])), table.row_units[place]) for place in places]


def _starts(blocks: Sequence[Block]) -> list[tuple[Block, int]]:
    """Each block with the number of its first column, the name's column being 0."""
    found = []
    start = 1
    for block in blocks:
        found.append((block, start))
        start += len(block.strips)
    return found


class _Strips:
    """The columns of one block; a group of which nothing was measured is one column of dashes."""

    def __init__(self, block: Block, start: int) -> None:
        self.group = block.group or ""
        self._is_empty = block.is_empty_group
        self._strips = block.strips[:1] if block.is_empty_group else block.strips
        self._start = start

    def columns(self) -> list[ShownColumn]:
        """The columns with their places in the table's rows."""
        places = range(self._start, self._start + len(self._strips))
        return [
            ShownColumn(None if self._is_empty else place, strip, self.group)
            for place, strip in zip(places, self._strips, strict=True)
        ]

    def headers(self, before: str, time_unit: TimeUnit | None, *, has_order: bool) -> list[Header]:
        """Their headings, behind a column that is called ``before``."""
        if self._is_empty:
            return [Header("", True, False, self.group, self.group)]
        labels = [before, *(strip.label for strip in self._strips)]
        return [
            write_header(strip, self.group, label, time_unit, has_order=has_order)
            for label, strip in zip(labels, self._strips, strict=False)
        ]

    def cells(self, rows: Sequence[tuple[Cell, ...]]) -> list[list[CellView]]:
        """Their cells."""
        found = []
        for place, strip in enumerate(self._strips, self._start):
            texts = strip.aligned() if strip.is_number else strip.cells
            raw = [row[place] for row in rows]
            has_bar = is_share(strip.unit, raw)
            found.append(
                [
                    write_cell(text, value, strip.unit, has_bar=has_bar)
                    for text, value in zip(texts, raw, strict=True)
                ]
            )
        return found


def _names(grid: Grid, raw: Sequence[Cell]) -> list[CellView]:
    return [
        write_cell(text, value, grid.names.unit, has_bar=False)
        for text, value in zip(grid.names.cells, raw, strict=True)
    ]


def _open(rows: Sequence[RowView], limit: int) -> None:
    """Say which rows have others below them, which of those are open, and which rows are hidden at first."""
    for row, after in pairwise(rows):
        row.is_parent = after.depth > row.depth
    deepest = max((row.depth for row in rows), default=0)
    if len(rows) > _OPEN_ROWS:
        counts = [sum(row.depth <= depth for row in rows) for depth in range(deepest + 1)]
        deepest = max([1, *(depth for depth, count in enumerate(counts) if count <= _OPEN_ROWS)])
    ranks: list[int] = []
    hidden_below: int | None = None  # depth of a row that the limit hides with all below it
    for row in rows:
        ranks[row.depth + 1 :] = []
        ranks += [0] * (row.depth + 1 - len(ranks))
        ranks[row.depth] += 1
        if hidden_below is not None and row.depth <= hidden_below:
            hidden_below = None
        if hidden_below is None and ranks[row.depth] > limit:
            hidden_below = row.depth
        row.is_open = row.depth < deepest
        row.is_hidden = hidden_below is not None or row.depth > deepest
