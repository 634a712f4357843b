r"""The report for TensorBoard's own dashboards: Markdown text, and charts of scalars.

The Text dashboard squeezes tables of more than six columns until words break, so a wider table continues in
more tables below, and each group of columns is one column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Report, Table
from lightning_modelprof.show.findings import found_texts, summary_line, verdict_line
from lightning_modelprof.show.layout import LayoutGroup, build_layout, part_absent
from lightning_modelprof.units import UNIT_NAMES

TAG_PREFIX = "modelprof"

_MAX_COLUMNS = 6
_MAX_ROWS = 50
_INDENT = "&nbsp;&nbsp;"

_ESCAPED = {ord(char): "\\" + char for char in r"\`*_{}[]#|"}
# Python-Markdown has no backslash escapes for these, so they're written as entities.
_ESCAPED |= {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord("~"): "&#126;"}


class Writer(Protocol):
    """The used part of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> Any: ...

    def add_custom_scalars(self, layout: Any) -> Any: ...

    def flush(self) -> Any: ...


def write_report(writer: Writer, report: Report, step: int, prefix: str = TAG_PREFIX) -> None:
    """Write the whole report as one text, ``modelprof/report``: one card of the Text dashboard.

    One card per table would make thirty, with names that depend on what was measured.

    Args:
        step: the x-coordinate.
        prefix: start of the tag, so that one TensorBoard can have reports on multiple loops.
    """
    writer.add_text(f"{prefix}/report", markdown_report(report), step)
    writer.flush()


def write_layout(writer: Writer, charts: Mapping[str, Sequence[str]]) -> None:
    """Lay out the custom scalars dashboard; TensorBoard uses the last layout of a run.

    Args:
        charts: title of a chart → tags of its curves.
    """
    # TensorBoard reads each tag as a regular expression.
    layout = {title: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]] for title, tags in charts.items()}
    writer.add_custom_scalars({TAG_PREFIX: layout})


def markdown_summary(report: Report) -> str:
    """Write title, verdict, facts, findings and notes as Markdown."""
    lines = [f"## {escape_markdown(report.title)}", ""]
    if report.verdict is not None:
        lines += [f"**{escape_markdown(verdict_line(report.verdict))}**", ""]
    if report.facts:
        facts = [[escape_markdown(label), escape_markdown(value)] for label, value in report.facts]
        lines += [*_markdown_rows(["Fact", "Value"], [False, False], facts), ""]
    if report.findings:
        lines += ["### Findings", ""]
        for text in found_texts(report.findings):
            lines += [f"- **{escape_markdown(text.head)}**", *_bullets(text.lines, indent="    ")]
        lines += ["", escape_markdown(summary_line(report.findings)), ""]
    _, absent = part_absent(report.tables)
    if absent:
        lines += ["Not available:", "", *_bullets(tuple(absent)), ""]
    lines += _bullets(report.notes)
    return "\n".join(lines).rstrip() + "\n"


def markdown_report(report: Report) -> str:
    """Write the whole report as Markdown: :func:`markdown_summary` and the tables."""
    present, _ = part_absent(report.tables)
    tables = (markdown_table(table, max_rows=table.row_limit or _MAX_ROWS) for table in present)
    return "\n".join((markdown_summary(report), *tables))


def markdown_table(table: Table, *, max_rows: int = _MAX_ROWS) -> str:
    """Write one table as GitHub Markdown: title, time unit, at most six columns, notes.

    Args:
        table: what to write; without rows, only its title and reason.
        max_rows: maximum rows; a longer table is cut, with a note.
    """
    lines = [f"### {escape_markdown(table.title)}", ""]
    if table.absent_reason is not None and not table.rows:
        lines += [escape_markdown(table.absent_reason), "", *_bullets(table.notes)]
        return "\n".join(lines).rstrip() + "\n"
    grid = build_layout(table, max_rows=max_rows)
    if grid.time_unit is not None:
        lines += [f"Time unit: {UNIT_NAMES[grid.time_unit]}", ""]
    names = [
        _INDENT * depth + escape_markdown(name)
        for name, depth in zip(grid.names.cells, grid.depths, strict=True)
    ]
    for blocks in _split(grid.blocks):
        header = [escape_markdown(text) for text in (grid.names.label, *(block.heading for block in blocks))]
        cells = [[escape_markdown(cell) for cell in block.packed(align=False)] for block in blocks]
        numeric = [grid.names.is_number, *(block.strips[0].is_number for block in blocks)]
        rows = [list(row) for row in zip(names, *cells, strict=True)]
        lines += [*_markdown_rows(header, numeric, rows), ""]
    lines += _bullets(grid.notes)
    return "\n".join(lines).rstrip() + "\n"


def escape_markdown(text: str) -> str:
    """Escape a name so that Markdown shows it exactly, on one line, even inside a table."""
    return printable(" ".join(text.split())).translate(_ESCAPED)


def _split(blocks: tuple[LayoutGroup, ...]) -> list[tuple[LayoutGroup, ...]]:
    """Spread the columns evenly over as many tables as needed, each with the names."""
    num_tables = max(1, math.ceil(len(blocks) / (_MAX_COLUMNS - 1)))
    size = math.ceil(len(blocks) / num_tables)
    return [blocks[index * size : (index + 1) * size] for index in range(num_tables)]


def _bullets(notes: tuple[str, ...], indent: str = "") -> list[str]:
    return [f"{indent}- {escape_markdown(note)}" for note in notes if note.strip()]


def _markdown_rows(header: list[str], is_number: list[bool], rows: list[list[str]]) -> list[str]:
    rule = ["---:" if number else ":---" for number in is_number]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
