"""The report as plain text, in the layouts that Paddle's users know.

Stable and without color, for ``report.txt``, logs and golden files.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable
from typing import Any

from lightning_modelprof.errors import MissingExtraError, printable
from lightning_modelprof.report.model import Cell, Report, Table
from lightning_modelprof.show.findings import found_texts, passed_line, summary_line, verdict_line
from lightning_modelprof.show.layout import (
    Layout,
    LayoutGroup,
    align_left,
    align_right,
    build_layout,
    center,
    display_width,
    part_absent,
)
from lightning_modelprof.units import UNIT_NAMES

PERF_SUMMARY = "perf_summary"
"""Id of the table that is drawn as a box."""


_MAX_ROWS = 200


_PROSE_WIDTH = 100


_GAP = "  "


_MIN_RULE = 16
"""Dashes around the title of a narrow table."""


def render_text(report: Report, *, max_rows: int = _MAX_ROWS) -> str:
    """Write the whole report as plain text: title, verdict, facts, findings, tables, notes.

    Args:
        max_rows: maximum rows per table; longer ones are cut, with a note.

    Returns:
        Text that ends with a newline, without trailing spaces or escape sequences.
    """
    sections = [_head(report)]
    if report.findings:
        sections.append(_findings(report))
    tables, absent = part_absent(report.tables)
    sections += [_table(table, max_rows) for table in tables]
    if absent:
        sections.append(["Not available:", *_prose(absent, bullet="- ")])
    if report.notes:
        sections.append(["Notes:", *_prose(report.notes, bullet="- ")])
    lines = [line.rstrip() for section in sections for line in (*section, "")]
    return "\n".join(lines)


def _head(report: Report) -> list[str]:
    title = printable(report.title)
    lines = [title, "=" * display_width(title)]
    if report.verdict is not None:
        lines = [*_prose([verdict_line(report.verdict)]), "", *lines]
    if report.facts:
        labels = align_left([printable(label) for label, _ in report.facts])
        lines += [
            label + _GAP + printable(value) for label, (_, value) in zip(labels, report.facts, strict=True)
        ]
    return lines


def _findings(report: Report) -> list[str]:
    lines = ["Findings:"]
    for text in found_texts(report.findings):
        lines += _prose([text.head], bullet="- ")
        lines += [_GAP + line for line in _prose(text.lines)]
    ends = [passed_line(report.findings), summary_line(report.findings)]
    return [*lines, *_prose([line for line in ends if line])]


def _table(table: Table, max_rows: int) -> list[str]:
    title = printable(table.title)
    if table.absent_reason is not None and not table.rows:
        return [f"{title}: {printable(table.absent_reason)}", *_notes(table.notes)]
    grid = build_layout(table, max_rows=max_rows)
    lines = _box(title, grid) if table.id == PERF_SUMMARY else _ruled(title, grid)
    return [*lines, *_notes(grid.notes)]


def _notes(notes: tuple[str, ...]) -> list[str]:
    return ["Note:", *_prose(notes)] if notes else []


def _ruled(title: str, grid: Layout) -> list[str]:
    """Draw Paddle's summary tables: a rule with the title, columns between rules of dashes."""
    names = align_left([grid.names.label, *grid.indented_names()])
    columns = [names, *(_column(block) for block in grid.blocks)]
    rule = _GAP.join("-" * display_width(column[0]) for column in columns)
    header, *rows = (_GAP.join(cells) for cells in zip(*columns, strict=True))
    width = max(display_width(rule), display_width(title) + _MIN_RULE)
    lines = [center(title, width, "-")]
    if grid.time_unit is not None:
        lines.append(f"Time unit: {UNIT_NAMES[grid.time_unit]}")
    return [*lines, rule, header, rule, *rows, rule]


def _column(block: LayoutGroup) -> tuple[str, ...]:
    texts = [block.heading, *block.packed(align=True)]
    # A packed column is left-aligned like its heading, because its parts are already aligned.
    is_single_number = len(block.strips) == 1 and block.strips[0].is_number
    return align_right(texts) if is_single_number else align_left(texts)


def _box(title: str, grid: Layout) -> list[str]:
    """Draw Paddle's Perf Summary: a box of centered cells under a title between equals signs."""
    names = ["", *grid.indented_names()]
    columns = [[block.heading, *block.packed(align=True)] for block in grid.blocks]
    # Paddle's three columns are 15 wide; more of them wouldn't fit on a screen.
    minimum = 15 if len(columns) <= 4 else 9
    widths = [max(15, *map(display_width, names))]
    widths += [max(minimum, *map(display_width, column)) for column in columns]
    lines = [
        "| " + " | ".join(center(cell, width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in zip(names, *columns, strict=True)
    ]
    heading = [center(title, display_width(lines[0]), "=")]
    if grid.time_unit is not None:
        heading.append(f"Time unit: {UNIT_NAMES[grid.time_unit]}")
    return [*heading, *lines]


def _prose(sentences: Iterable[str], bullet: str = "") -> list[str]:
    """Wrap sentences, each starting at the margin or its bullet, with indented continuation lines."""
    lines: list[str] = []
    for sentence in sentences:
        text = printable(" ".join(sentence.split()))
        lines += textwrap.wrap(
            text, _PROSE_WIDTH, initial_indent=bullet, subsequent_indent=_GAP, break_long_words=False
        )
    return lines


def table_csv(table: Table) -> str:
    """Write raw values below the column keys; ``None`` is empty."""
    text = io.StringIO()
    header, rows = _raw(table)
    csv.writer(text).writerows([header, *rows])
    return text.getvalue()


def table_dataframe(table: Table) -> Any:
    """Return the same as a DataFrame, with the columns' units in ``attrs["units"]``.

    Raises:
        MissingExtraError: if pandas isn't installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415  # nothing else needs it
    except ImportError:
        raise MissingExtraError(
            "to_dataframe needs pandas, which is not installed. Install it with pip install pandas, or use"
            " to_csv() or to_markdown()."
        ) from None
    header, rows = _raw(table)
    frame = pd.DataFrame(rows, columns=header)
    frame.attrs["units"] = {column.key: column.unit.value for column in table.columns}
    return frame


def _raw(table: Table) -> tuple[list[str], list[tuple[Cell, ...]]]:
    header = [column.key for column in table.columns]
    if not table.depths:
        return header, list(table.rows)
    return ["depth", *header], [(depth, *row) for depth, row in zip(table.depths, table.rows, strict=True)]
