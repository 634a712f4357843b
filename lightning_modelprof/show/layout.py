"""A table as strings, the step that the outputs share.

Columns of one group become a block, names keep their indentation level, and long tables are cut; each output
draws the blocks in its own way.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Cell, Column, Table, TimeUnit, Unit
from lightning_modelprof.units import DASH, choose_time_unit, format_cell, heading, signed

NAME_LIMIT = 64
"""Characters of a text cell; a templated CUDA kernel's name has hundreds."""

FIRST_ROWS = 100
"""Rows that a page shows at first, for tables without a limit of their own."""

SEPARATOR = " / "

ELLIPSIS = "…"

_AFTER_ARGUMENTS = re.compile(r"(?: const)?(?: \[clone [^\]]*\])*$")
"""What a demangled C++ function can have after its arguments."""

_NAMESPACE = re.compile(r"(?:\b\w+|\(anonymous namespace\))::")

_TEMPLATE = re.compile(r"\w<")

_INTEGER_PART = re.compile(r"[-+]?[0-9,]+")


class LayoutColumn(Record, frozen=True):
    """One column of strings.

    Attributes:
        label: heading, including the unit.
        unit: unit of the cells, which decides their alignment.
        cells: one string per row.
    """

    label: str
    unit: Unit
    cells: tuple[str, ...]

    @property
    def is_number(self) -> bool:
        """Whether its heading is right-aligned."""
        return self.unit is not Unit.TEXT

    @property
    def is_empty(self) -> bool:
        """Whether nothing in it was measured."""
        return all(cell == DASH for cell in self.cells)

    def aligned(self) -> tuple[str, ...]:
        """Pad the cells to one width, with the decimal points of numbers aligned.

        A column may have ``12.64`` and ``0.000250``: right-aligned, the smaller would look larger.
        """
        if not self.is_number:
            return align_left(self.cells)
        if self.unit is Unit.BY_ROW:
            # Seconds above samples have no common decimal point.
            return align_right(self.cells)
        matches = [_INTEGER_PART.match(cell) for cell in self.cells]
        ends = [
            len(cell) if match is None else match.end()
            for cell, match in zip(self.cells, matches, strict=True)
        ]
        integers = align_right([cell[:end] for cell, end in zip(self.cells, ends, strict=True)])
        rest = align_left([cell[end:] for cell, end in zip(self.cells, ends, strict=True)])
        return tuple(left + right for left, right in zip(integers, rest, strict=True))


class LayoutGroup(Record, frozen=True):
    """Adjacent columns of one group, or a single column without a group."""

    group: str | None
    strips: tuple[LayoutColumn, ...]

    @property
    def heading(self) -> str:
        """The block's heading in Paddle's format: ``CPU Total / Avg / Max / Min / Ratio(%)``."""
        labels = SEPARATOR.join(strip.label for strip in self.strips)
        return f"{self.group} {labels}" if self.group else labels

    @property
    def is_empty_group(self) -> bool:
        return self.group is not None and all(strip.is_empty for strip in self.strips)

    def packed(self, *, align: bool) -> tuple[str, ...]:
        """Join each row's cells, ``138.99 / 12.64 / 17.91``; a single dash if nothing was measured.

        Args:
            align: whether to pad the parts, so that the slashes are aligned.
        """
        shown = [strip.aligned() if align else strip.cells for strip in self.strips]
        return tuple(
            # One dash is as clear as five.
            cells[0] if all(cell.strip() == DASH for cell in cells) else SEPARATOR.join(cells)
            for cells in zip(*shown, strict=True)
        )


class Layout(Record, frozen=True):
    """A table as strings.

    Attributes:
        names: the first column.
        depths: indentation level of each name.
        blocks: all other columns.
        time_unit: unit of the duration columns; ``None`` without any.
        notes: the table's notes, after one on how many rows were cut, if any were.
    """

    names: LayoutColumn
    depths: tuple[int, ...]
    blocks: tuple[LayoutGroup, ...]
    time_unit: TimeUnit | None
    notes: tuple[str, ...]

    def indented_names(self, indent: str = "  ") -> tuple[str, ...]:
        return tuple(indent * depth + name for name, depth in zip(self.names.cells, self.depths, strict=True))


def build_layout(table: Table, *, max_rows: int) -> Layout:
    """Format every cell of the shown rows, with one time unit for the whole table.

    Args:
        max_rows: maximum rows of a table without a limit of its own; see ``shown_rows``.
    """
    limit = max_rows if table.row_limit is None else table.row_limit
    shown = shown_rows(table, limit)
    time_unit = table.time_unit or _time_unit(table, shown)
    strips = [
        LayoutColumn(
            label=printable(heading(column.label, column.unit)),
            unit=column.unit,
            cells=_texts(
                [table.rows[row][position] for row in shown],
                [_unit(table, row, column) for row in shown],
                time_unit,
                is_change=column.change != "",
            ),
        )
        for position, column in enumerate(table.columns)
    ]
    return Layout(
        names=LayoutColumn(
            strips[0].label, strips[0].unit, _row_names(table, shown, strips[0].cells, time_unit)
        ),
        depths=tuple(table.depths[row] if table.depths else 0 for row in shown),
        blocks=_blocks(table.columns[1:], strips[1:]),
        time_unit=time_unit if any(column.unit is Unit.DURATION_NS for column in table.columns) else None,
        notes=(*_hidden_note(table, len(shown), limit), *table.notes),
    )


def all_rows(table: Table) -> Layout:
    """Format every row, in the time unit of the rows that a page shows at first."""
    first = shown_rows(table, FIRST_ROWS if table.row_limit is None else table.row_limit)
    time_unit = table.time_unit or _time_unit(table, first)
    return build_layout(replace(table, time_unit=time_unit, row_limit=None), max_rows=len(table.rows))


def _time_unit(table: Table, rows: Sequence[int]) -> TimeUnit:
    return choose_time_unit(
        value
        for row in rows
        for column, value in zip(table.columns, table.rows[row], strict=True)
        if _unit(table, row, column) is Unit.DURATION_NS and isinstance(value, int | float)
    )


def shown_rows(table: Table, limit: int) -> Sequence[int]:
    """Return the rows that people see: the first ``limit``, in trees the first ``limit`` below each row.

    So a shown row has its children, a single row at the top doesn't use up the limit, and each thread or
    operator has some rows.
    """
    if not table.depths:
        return range(min(limit, len(table.rows)))
    shown = []
    num_siblings: list[int] = []  # by depth, below the current row's ancestors
    for row, depth in enumerate(table.depths):
        num_siblings[depth + 1 :] = []
        num_siblings += [0] * (depth + 1 - len(num_siblings))
        num_siblings[depth] += 1
        if max(num_siblings) <= limit:  # so no ancestor is hidden either
            shown.append(row)
    return shown


def part_absent(tables: Sequence[Table]) -> tuple[list[Table], list[str]]:
    """Take out the tables that are absent for the same reason, with one sentence per reason.

    Returns:
        The other tables, in order, and the sentences.
    """
    titles: dict[str, list[str]] = {}
    for table in tables:
        if not table.rows and not table.notes and table.absent_reason is not None:
            titles.setdefault(table.absent_reason, []).append(table.title)
    shared = {reason: names for reason, names in titles.items() if len(names) > 1}
    kept = [table for table in tables if table.rows or table.notes or table.absent_reason not in shared]
    return kept, [f"{', '.join(names)}: {reason.removesuffix('.')}." for reason, names in shared.items()]


def display_width(text: str) -> int:
    """Return the terminal cells of a text: Chinese and Japanese characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def align_left(texts: Sequence[str]) -> tuple[str, ...]:
    """Pad on the right to the longest text's width."""
    return tuple(text + space for text, space in _spaces(texts))


def align_right(texts: Sequence[str]) -> tuple[str, ...]:
    """Pad on the left to the longest text's width."""
    return tuple(space + text for text, space in _spaces(texts))


def _spaces(texts: Sequence[str]) -> list[tuple[str, str]]:
    widths = [display_width(text) for text in texts]
    most = max(widths, default=0)
    return [(text, " " * (most - width)) for text, width in zip(texts, widths, strict=True)]


def center(text: str, width: int, fill: str = " ") -> str:
    """Center in a width of terminal cells."""
    missing = max(0, width - display_width(text))
    left = missing // 2
    return fill * left + text + fill * (missing - left)


def _hidden_note(table: Table, num_shown: int, limit: int) -> tuple[str, ...]:
    num_rows = len(table.rows)
    if num_shown == num_rows:
        return ()
    what = (
        f"{num_shown:,} of {num_rows:,} rows: the first {limit:,}, and the first {limit:,} below each"
        if any(table.depths)
        else f"the first {num_shown:,} of {num_rows:,} rows"
    )
    if table.row_limit is None:
        return (f"Shows {what}; the JSON report has all of them.",)
    return (f"Shows {what}. Raise row_limit (--row-limit) to see more; the JSON report has all of them.",)


def _unit(table: Table, row: int, column: Column) -> Unit:
    if column.unit is Unit.BY_ROW and table.row_units:
        return table.row_units[row]
    return column.unit


def _texts(
    values: Sequence[Cell], units: Sequence[Unit], time_unit: TimeUnit, *, is_change: bool
) -> tuple[str, ...]:
    """Format one column; C++ functions lose their arguments unless only these tell two of them apart."""
    names = {value: without_signature(value) for value in values if isinstance(value, str)}
    uses = Counter(names.values())
    plain = {value: name if uses[name] == 1 else value for value, name in names.items()}
    return tuple(
        shorten(format_cell(plain[value], unit), NAME_LIMIT)
        if isinstance(value, str)
        else signed(format_cell(value, unit, time_unit=time_unit))
        if is_change and value
        else format_cell(value, unit, time_unit=time_unit)
        for value, unit in zip(values, units, strict=True)
    )


def _row_names(
    table: Table, shown: Sequence[int], names: tuple[str, ...], time_unit: TimeUnit
) -> tuple[str, ...]:
    """Append each row's unit to its name if units change by row: ``batch_cost (ms)``."""
    if not table.row_units or not any(column.unit is Unit.BY_ROW for column in table.columns):
        return names
    return tuple(
        heading(name, table.row_units[row], time_unit=time_unit)
        for name, row in zip(names, shown, strict=True)
    )


def _blocks(columns: tuple[Column, ...], strips: list[LayoutColumn]) -> tuple[LayoutGroup, ...]:
    keyed = groupby(enumerate(columns), key=lambda item: (item[1].group, None if item[1].group else item[0]))
    blocks = []
    for (group, _), members in keyed:
        label = None if group is None else printable(group)
        blocks.append(LayoutGroup(label, tuple(strips[position] for position, _ in members)))
    return tuple(blocks)


def shorten(text: str, limit: int) -> str:
    """Shorten a long name by cutting its middle, because kernels and modules differ at both ends.

    C++ details go first, as needed: namespaces, then the arguments of template arguments, then all template
    arguments: ``at::sum<at::Add<float>, 4>``, ``sum<Add<float>, 4>``, ``sum<Add<…>, 4>``, ``sum<…>``.
    """
    if len(text) > limit and (text.count("::") > 1 or _TEMPLATE.search(text)):
        text = _NAMESPACE.sub("", text).replace("> >", ">>")
        if len(text) > limit:
            text = _without_templates(text, 2)
        # If it's still much too long, the function's whole name is better than one end of its arguments.
        if len(text) > 1.5 * limit and text.find("<") > limit // 2:
            text = _without_templates(text, 1)
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    head = limit - 1 - tail
    return text[:head] + ELLIPSIS + text[len(text) - tail :]


def without_signature(name: str) -> str:
    """Remove the return type ``void`` and the arguments from a C++ function; other names don't change.

    ``void at::native::sum<float>(int, float*)`` becomes ``at::native::sum<float>``: a kernel returns nothing,
    and its arguments repeat the template's.
    """
    if not name.startswith("void ") and "::" not in name:
        return name
    text = name[: _AFTER_ARGUMENTS.search(name).start()]  # type: ignore[union-attr]  # it may match nothing
    start = _last_parenthesis(text)
    # A space before the parenthesis means a description, not a function: "Memcpy (a::b -> c)".
    if start <= 0 or not (text[start - 1].isalnum() or text[start - 1] in "_>)]}"):
        return name
    return text[:start].removeprefix("void ")


def _last_parenthesis(text: str) -> int:
    """Return where the parenthesis opens that closes at the very end; -1 if there is none."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index if text[index] == "(" else -1
    return -1


def _without_templates(name: str, level: int) -> str:
    """Cut what is inside ``level`` or more angle brackets; unbalanced ``<`` and ``>`` cut nothing."""
    kept = []
    depth = 0
    for char in name:
        depth -= char == ">"
        if depth < 0:
            return name
        if depth < level:
            kept.append(char)
        depth += char == "<"
        if char == "<" and depth == level:
            kept.append(ELLIPSIS)
    return "".join(kept) if depth == 0 else name
