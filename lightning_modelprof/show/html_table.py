"""A table as the page shows it: the strings of the terminal, and what sorting and searching need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.show.format import DASH, one_line
from lightning_modelprof.show.grid import Block, Grid, build_grid, shown_rows

MAX_ROWS: Final = 10_000
"""Rows of a table in the page, and below any one row; a browser gets slow with more."""

FIRST_ROWS: Final = 100
"""Rows that are there before the reader asks for all, of a table that does not say how many."""

_OPEN_ROWS: Final = 40
"""A tree opens as far as this many rows are seen."""


@dataclass(frozen=True, slots=True)
class Header:
    """The heading of one column."""

    label: str
    is_number: bool
    is_sortable: bool


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell.

    Attributes:
        text: as in the terminal, padded so that decimal points stand below each other.
        value: the raw number to sort by; ``None`` for text and for what was not measured.
        bar: share of the cell that is filled, 0..1; ``None`` without a bar.
        is_number: whether it belongs to the right.
        is_missing: whether it is the dash of what was not measured.
        full: the whole name where ``text`` is cut; ``""`` otherwise.
    """

    text: str
    value: float | None
    bar: float | None
    is_number: bool
    is_missing: bool
    full: str


@dataclass(slots=True)
class RowView:
    """One row; in a tree with its depth, whether it has rows below it, and whether they are open."""

    name: CellView
    cells: list[CellView]
    depth: int
    is_parent: bool
    is_open: bool
    is_hidden: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """What the template needs of a table; ``groups`` are headings above them and how many they span."""

    id: str
    title: str
    unit: str
    headers: tuple[Header, ...]
    groups: tuple[tuple[str, int], ...]
    rows: tuple[RowView, ...]
    limit: int
    is_tree: bool
    is_detail: bool
    notes: tuple[str, ...]


def table_view(table: Table) -> TableView:
    """Write a table with rows.

    The cells are those that the terminal shows, in its unit of time, and also those that it cuts off: rows
    behind the table's limit wait until the reader asks for them.
    """
    limit = FIRST_ROWS if table.row_limit is None else table.row_limit
    as_shown = build_grid(table, max_rows=limit)
    grid = build_grid(replace(table, time_unit=as_shown.time_unit, row_limit=None), max_rows=MAX_ROWS)
    values = _raw_rows(table, grid)
    is_tree = any(grid.depths)
    blocks = [_Strips(block, start) for block, start in _starts(grid.blocks)]
    names = _names(grid, [row[0] for row in values])
    columns = [cells for block in blocks for cells in block.cells(values)]
    rows = [
        RowView(name, list(cells), depth, False, True, False)
        for name, depth, *cells in zip(names, grid.depths, *columns, strict=True)
    ]
    _open(rows, limit)
    headers = [Header(grid.names.label, False, len(rows) > 1)]
    for block in blocks:
        headers += block.headers(len(rows) > 1)
    groups = [("", 1), *((block.group, len(block.headers(False))) for block in blocks)]
    return TableView(
        id=table.id,
        title=one_line(table.title),
        unit="" if grid.time_unit is None else f"time in {grid.time_unit}",
        headers=tuple(headers),
        groups=tuple(groups) if any(label for label, _ in groups) else (),
        rows=tuple(rows),
        limit=limit,
        is_tree=is_tree and len(rows) > _OPEN_ROWS,
        is_detail=table.is_detail,
        notes=tuple(text for note in grid.notes if (text := one_line(" ".join(note.split())))),
    )


def _raw_rows(table: Table, grid: Grid) -> list[tuple[Cell, ...]]:
    """The raw cells of the rows of ``grid``."""
    rows = [table.rows[row] for row in shown_rows(table, MAX_ROWS)]
    assert len(rows) == len(grid.depths)
    return rows


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

    def headers(self, has_order: bool) -> list[Header]:
        if self._is_empty:
            return [Header("", True, False)]
        return [
            Header(strip.label, strip.is_number, has_order and strip.unit is not Unit.BY_ROW)
            for strip in self._strips
        ]

    def cells(self, rows: Sequence[tuple[Cell, ...]]) -> list[list[CellView]]:
        found = []
        for place, strip in enumerate(self._strips, self._start):
            texts = strip.aligned() if strip.is_number else strip.cells
            raw = [row[place] for row in rows]
            found.append([_cell(text, value, strip.unit) for text, value in zip(texts, raw, strict=True)])
        return found


def _names(grid: Grid, raw: Sequence[Cell]) -> list[CellView]:
    return [_cell(text, value, grid.names.unit) for text, value in zip(grid.names.cells, raw, strict=True)]


def _cell(text: str, raw: Cell, unit: Unit) -> CellView:
    """A cell of a column of ``unit``; spaces at the left do nothing in a cell that belongs to the right."""
    if isinstance(raw, str) or raw is None:
        full = one_line(raw) if isinstance(raw, str) else ""
        full = full if len(full) > len(text) else ""
        shown = text if unit is Unit.TEXT else text.lstrip()
        return CellView(shown, None, None, unit is not Unit.TEXT, text.strip() == DASH, full)
    value = float(raw) if math.isfinite(raw) else None
    bar = min(max(value, 0.0), 1.0) if unit is Unit.RATIO and value is not None else None
    return CellView(text.lstrip(), value, bar, unit is not Unit.TEXT, False, "")


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
