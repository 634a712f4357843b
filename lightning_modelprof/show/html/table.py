"""A table for pages: the terminal's strings, and what sorting and searching need."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record, asdict, astuple
from lightning_modelprof.report.definitions import column_definition, definition, row_definition
from lightning_modelprof.report.model import Cell, Table, TimeUnit, Unit
from lightning_modelprof.show.html.columns import (
    TONES,
    ChangeBar,
    change_bars,
    cut_note,
    hidden_places,
    sorted_place,
)
from lightning_modelprof.show.layout import FIRST_ROWS, LayoutColumn, LayoutGroup, build_layout, shown_rows
from lightning_modelprof.units import DASH, UNIT_NAMES, format_cell

MAX_ROWS: Final = 10_000
"""Maximum rows of a table in a page, and below any one row; browsers get slow with more."""


_OPEN_ROWS: Final = 40
"""A tree opens while at most this many rows are visible."""


class RowView(Record, frozen=True):
    """One row.

    ``raw_name`` is the name with the unit of the raw numbers if that changes by row, else ``""``. ``about``
    is the definition of the row's name, if it has one.
    """

    name: CellView
    raw_name: str
    about: str
    cells: tuple[CellView, ...]
    depth: int


class TableView(Record, frozen=True, kw_only=True):
    """Everything that a page needs for a table; ``about`` is its definition.

    ``groups`` are headings above headings, with the number of columns below each. ``hidden`` are the columns
    that aren't visible at first; ``sorted_by`` is the column that orders the rows.

    ``open_depth`` is the depth from which on rows of a tree are folded. ``groupings`` are the ways to group
    rows that a reader can choose from, ``tones`` the classes and words of the bars of changes.
    """

    id: str
    title: str
    about: str
    unit: str
    headers: tuple[Header, ...]
    groups: tuple[tuple[str, int], ...]
    hidden: tuple[int, ...]
    sorted_by: int | None
    rows: tuple[RowView, ...]
    limit: int
    is_tree: bool
    open_depth: int
    groupings: tuple[Grouping, ...]
    tones: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Convert for the page's script: rows are lists of cells, and rare values are separate."""
        return {
            **{name: getattr(self, name) for name in self.__struct_fields__},
            "headers": [asdict(header) for header in self.headers],
            "rows": [[cell.plain() for cell in (row.name, *row.cells)] for row in self.rows],
            "depths": [row.depth for row in self.rows] if any(row.depth for row in self.rows) else [],
            "raw_names": {place: row.raw_name for place, row in enumerate(self.rows) if row.raw_name},
            "abouts": {place: row.about for place, row in enumerate(self.rows) if row.about},
            "groupings": [grouping.plain() for grouping in self.groupings],
        }


def table_view(table: Table) -> TableView:
    """Format a table with rows.

    Cells are as in the terminal, in its time unit, and include those that it cuts off: rows past the table's
    limit are hidden until the reader asks for them.
    """
    limit = FIRST_ROWS if table.row_limit is None else table.row_limit
    as_shown = build_layout(table, max_rows=limit)
    grid = build_layout(replace(table, time_unit=as_shown.time_unit, row_limit=None), max_rows=MAX_ROWS)
    places = shown_rows(table, MAX_ROWS)
    values = [table.rows[place] for place in places]
    starts = accumulate((len(block.strips) for block in grid.blocks), initial=1)  # the name's column is 0
    blocks = [_Strips(block, start) for block, start in zip(grid.blocks, starts, strict=False)]
    names = [
        write_cell(text, row[0], grid.names.unit) for text, row in zip(grid.names.cells, values, strict=True)
    ]
    shown: list[int | None] = [0, *(column.place for block in blocks for column in block.columns())]
    bars = change_bars(table)
    cells = [cells for block in blocks for cells in block.cells(values)]
    columns = [
        [_with_bar(cell, bars.get((row, place))) for row, cell in zip(places, one, strict=True)]
        if place is not None
        else one
        for place, one in zip(shown[1:], cells, strict=True)
    ]
    rows = [
        RowView(name, raw_name, row_definition(table.id, str(row[0])), tuple(written), depth)
        for name, raw_name, row, depth, *written in zip(
            names, _raw_names(table, places), values, grid.depths, *columns, strict=True
        )
    ]
    has_order = len(rows) > 1
    headers = [write_header(grid.names, "", "", grid.time_unit, has_order=has_order)]
    for block in blocks:
        headers += block.headers(headers[-1].label, grid.time_unit, has_order=has_order)
    keys = ["" if place is None else table.columns[place].key for place in shown]
    groups = [("", 1), *((block.heading, len(block.columns())) for block in blocks)]
    sorted_by = sorted_place(table, shown, lambda number: _values(rows, number)) if has_order else None
    hidden = hidden_places(table, shown, lambda number: _has_any(rows, number), sorted_by)
    return TableView(
        id=table.id,
        title=printable(table.title),
        about=definition("table", table.id),
        unit="" if grid.time_unit is None else f"time in {UNIT_NAMES[grid.time_unit]}",
        headers=tuple(
            replace(
                header,
                key=key,
                about=column_definition(table.id, key),
                is_share=_is_share(table, place, values),
            )
            for header, key, place in zip(headers, keys, shown, strict=True)
        ),
        groups=tuple(groups) if any(label for label, _ in groups) else (),
        hidden=hidden,
        sorted_by=sorted_by,
        rows=tuple(rows),
        limit=limit,
        is_tree=any(grid.depths) and len(rows) > _OPEN_ROWS,
        open_depth=_open_depth(grid.depths),
        groupings=groupings(
            table, values, [column for block in blocks for column in block.columns()], grid.time_unit
        ),
        tones=tuple(tone for tone in TONES.items() if tone[0] in {bar.tone for bar in bars.values()}),
        notes=tuple(
            text for note in (*grid.notes, cut_note(bars)) if (text := printable(" ".join(note.split())))
        ),
    )


def _with_bar(cell: CellView, bar: ChangeBar | None) -> CellView:
    return cell if bar is None else replace(cell, change=bar)


def _values(rows: Sequence[RowView], number: int) -> list[float | None]:
    return [row.cells[number - 1].value for row in rows if row.depth == 0]


def _has_any(rows: Sequence[RowView], number: int) -> bool:
    return any(row.cells[number - 1].text and not row.cells[number - 1].is_missing for row in rows)


def _raw_names(table: Table, places: Sequence[int]) -> list[str]:
    if not table.row_units or all(column.unit is not Unit.BY_ROW for column in table.columns):
        return [""] * len(places)
    return [with_raw_unit(printable(str(table.rows[place][0])), table.row_units[place]) for place in places]


class _Strips:
    """The columns of one block; a group without measurements is one column of dashes."""

    def __init__(self, block: LayoutGroup, start: int) -> None:
        self.group = block.group or ""
        self.heading = "" if block.is_empty_group else self.group  # above its columns
        self._is_empty = block.is_empty_group
        self._strips = block.strips[:1] if block.is_empty_group else block.strips
        self._start = start

    def columns(self) -> list[ShownColumn]:
        places = range(self._start, self._start + len(self._strips))
        return [
            ShownColumn(None if self._is_empty else place, strip, self.group)
            for place, strip in zip(places, self._strips, strict=True)
        ]

    def headers(self, before: str, time_unit: TimeUnit | None, *, has_order: bool) -> list[Header]:
        """Return the headings; ``before`` is the label of the column before the block."""
        if self._is_empty:
            return [Header(self.group, True, False, self.group, self.group)]
        labels = [before, *(strip.label for strip in self._strips)]
        return [
            write_header(strip, self.group, label, time_unit, has_order=has_order)
            for label, strip in zip(labels, self._strips, strict=False)
        ]

    def cells(self, rows: Sequence[tuple[Cell, ...]]) -> list[list[CellView]]:
        found = []
        for place, strip in enumerate(self._strips, self._start):
            texts = strip.aligned() if strip.is_number else strip.cells
            found.append(
                [write_cell(text, row[place], strip.unit) for text, row in zip(texts, rows, strict=True)]
            )
        return found


def _open_depth(depths: Sequence[int]) -> int:
    """Return the depth from which on rows are folded: a tree opens while few rows are visible."""
    deepest = max(depths, default=0)
    if len(depths) <= _OPEN_ROWS:
        return deepest
    counts = [sum(one <= depth for one in depths) for depth in range(deepest + 1)]
    return max([1, *(depth for depth, count in enumerate(counts) if count <= _OPEN_ROWS)])


_RAW_UNITS: Final = {
    Unit.DURATION_NS: "ns",
    Unit.RATIO: "fraction",
    Unit.BYTES: "bytes",
    Unit.BYTES_PER_S: "bytes/s",
    Unit.FLOPS: "FLOP",
    Unit.FLOPS_PER_S: "FLOP/s",
    Unit.MACS: "MAC",
}
"""What raw numbers count, if their unit has a name."""


_LARGEST_INTEGER: Final = 2**53
"""Floats represent every integer up to here."""


_PERCENT: Final = re.compile(r"\s*\(%\)$|^%$")


class Header(Record, frozen=True):
    """The heading of one column.

    Attributes:
        is_number: whether its cells are right-aligned.
        is_sortable: whether its cells have an order.
        is_share: whether they are shares of something, which bars show well.
        raw: heading of the raw numbers, with group and unit: ``CPU Total (ns)``.
        full: heading of the displayed numbers without any context: ``CPU Total (ms)``.
        key: column key; ``""`` for a group without measurements.
    """

    label: str
    is_number: bool
    is_sortable: bool
    raw: str
    full: str
    key: str = ""
    about: str = ""
    is_share: bool = False


class CellView(Record, frozen=True):
    """One cell.

    Attributes:
        text: as in the terminal, padded so that decimal points are aligned.
        value: raw number to sort by; ``None`` for text and missing values.
        full: the whole name if ``text`` is cut, else ``""``.
    """

    text: str
    value: int | float | None = None
    full: str = ""
    change: ChangeBar | None = None

    @property
    def is_missing(self) -> bool:
        """Whether it's the dash of a missing value."""
        return self.value is None and self.text.strip() == DASH

    def plain(self) -> Any:
        """Return the text, or a list of the text and its extras."""
        if self.change is not None:
            return [self.text, self.value, self.full, astuple(self.change)]
        if self.full:
            return [self.text, self.value, self.full]
        return self.text if self.value is None else [self.text, self.value]


def write_header(
    strip: LayoutColumn, group: str, before: str, time_unit: TimeUnit | None, *, has_order: bool
) -> Header:
    """Build a column's heading.

    Args:
        group: heading above it; ``""`` without one.
        before: label of the column before it; a column labeled just ``%`` is its share.
        time_unit: unit of the table's durations.
        has_order: whether there are rows to sort.
    """
    name = " ".join(filter(None, (group, _PERCENT.sub("", strip.label) or before)))
    shown = "%" if strip.unit is Unit.RATIO else time_unit if strip.unit is Unit.DURATION_NS else None
    return Header(
        label=strip.label,
        is_number=strip.is_number,
        is_sortable=has_order and strip.unit is not Unit.BY_ROW and strip.label != "",
        raw=with_raw_unit(name, strip.unit),
        full=f"{name} ({shown})" if shown else name,
    )


def with_raw_unit(name: str, unit: Unit) -> str:
    """Append the unit of the raw numbers to a name, unless the name has it already, as ``FLOPs`` does."""
    raw = _RAW_UNITS.get(unit)
    if raw is None or re.search(rf"\b{re.escape(raw)}", name):
        return name
    return f"{name} ({raw})"


def _is_share(table: Table, place: int | None, rows: Sequence[tuple[Cell, ...]]) -> bool:
    """Whether a column has shares, which bars show well, rather than changes, which may be below 0."""
    if not place or table.columns[place].unit is not Unit.RATIO:
        return False
    return not any(isinstance(cell := row[place], int | float) and cell < 0 for row in rows)


def write_cell(text: str, raw: Cell, unit: Unit) -> CellView:
    """Build a cell; right-aligned cells don't need leading spaces."""
    if isinstance(raw, str) or raw is None:
        full = printable(raw) if isinstance(raw, str) else ""
        full = full if len(full) > len(text) else ""
        return CellView(text if unit is Unit.TEXT else text.lstrip(), full=full)
    return CellView(text.lstrip(), _value(raw))


def _value(raw: int | float) -> int | float | None:
    """Shorten for JSON, with no more digits than a browser keeps."""
    if not math.isfinite(raw):
        return None
    value = float(raw)
    return int(value) if value.is_integer() and abs(value) <= _LARGEST_INTEGER else value


NAMESPACE: Final = "Namespace"


NO_NAMESPACE: Final = "no namespace"


_NAMESPACE: Final = re.compile(r"(?:void )?(\b\w+|\(anonymous namespace\))::")


class ShownColumn(Record, frozen=True):
    """A page column: its place in the table's rows, ``None`` if nothing was measured."""

    place: int | None
    strip: LayoutColumn
    group: str


class Group(Record, frozen=True):
    """Rows under one heading.

    Attributes:
        sums: one per column after the name; ``None`` if it doesn't add up or no row has a value.
        num_known: number of rows with a value, for each sum.
    """

    name: str
    num_rows: int
    sums: tuple[CellView | None, ...]
    num_known: tuple[int, ...]


class Grouping(Record, frozen=True):
    """One way to group the rows; ``members`` has the number of each row's group."""

    label: str
    members: tuple[int, ...]
    groups: tuple[Group, ...]

    def plain(self) -> dict[str, Any]:
        groups = [
            {**asdict(one), "sums": [cell and cell.plain() for cell in one.sums]} for one in self.groups
        ]
        return {"label": self.label, "members": self.members, "groups": groups}


def namespace_of(name: Cell) -> str | None:
    """Return what precedes the first ``::`` of a name: ``aten::mm`` → ``aten``, ``void at::f<...>`` → ``at``.

    ``None`` if there is none, or if there's more than one word before it, as in ``Memcpy (a::b -> c)``.
    """
    match = _NAMESPACE.match(name) if isinstance(name, str) else None
    return match[1] if match else None


def groupings(
    table: Table,
    rows: Sequence[tuple[Cell, ...]],
    columns: Sequence[ShownColumn],
    time_unit: TimeUnit | None,
) -> tuple[Grouping, ...]:
    """Find the groupings that merge at least two rows and leave more than one group; none for trees.

    Args:
        rows: raw cells of the page's rows.
        columns: page columns after the name.
        time_unit: unit of the table's durations.
    """
    if any(table.depths):
        return ()
    spaces = [namespace_of(row[0]) for row in rows]
    found: list[tuple[str, list[str | None], str]] = [(NAMESPACE, spaces, NO_NAMESPACE)]
    for column in columns:
        if column.place is not None and column.strip.unit is Unit.TEXT:
            cells = [row[column.place] for row in rows]
            if all(cell is None or isinstance(cell, str) for cell in cells):
                texts = [printable(str(cell)) if cell else None for cell in cells]
                found.append((" ".join(filter(None, (column.group, column.strip.label))), texts, DASH))
    ways = []
    for label, keys, unnamed in found:
        if _is_of_use(keys):
            # Groups are in the order of their first rows.
            order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            members: list[list[int]] = [[] for _ in order]
            for row, key in enumerate(keys):
                members[order[key]].append(row)
            sums = [_group_sums(table, rows, column, members, time_unit) for column in columns]
            groups = [
                Group(
                    unnamed if key is None else key,
                    len(members[number]),
                    tuple(one[number][0] for one in sums),
                    tuple(one[number][1] for one in sums),
                )
                for key, number in order.items()
            ]
            ways.append(Grouping(label, tuple(order[key] for key in keys), tuple(groups)))
    return tuple(ways)


def _is_of_use(keys: Sequence[str | None]) -> bool:
    known = [key for key in keys if key is not None]
    return len(set(known)) < len(known) and len(set(keys)) > 1


def _group_sums(
    table: Table,
    rows: Sequence[tuple[Cell, ...]],
    column: ShownColumn,
    members: Sequence[Sequence[int]],
    time_unit: TimeUnit | None,
) -> list[tuple[CellView | None, int]]:
    """Return each group's sum, aligned with the column, and its number of rows with a value."""
    place, strip = column.place, column.strip
    if place is None or not table.columns[place].adds_up:
        return [(None, 0)] * len(members)
    cells = [[rows[row][place] for row in one] for one in members]
    numbers = [[value for value in one if isinstance(value, int | float)] for one in cells]
    totals = [_sum(one) for one in numbers]
    texts = [format_cell(total, strip.unit, time_unit=time_unit or "ms") for total in totals]
    aligned = LayoutColumn(strip.label, strip.unit, (*strip.cells, *texts)).aligned()[len(strip.cells) :]
    return [
        (None if total is None else write_cell(text, total, strip.unit), len(one))
        for text, total, one in zip(aligned, totals, numbers, strict=True)
    ]


def _sum(numbers: Sequence[int | float]) -> int | float | None:
    """Add exactly if all are integers; ``None`` for no numbers, which isn't zero."""
    if not numbers:
        return None
    return sum(numbers) if all(isinstance(number, int) for number in numbers) else math.fsum(numbers)
