"""The report in a terminal: tables that fit its width, with colour where the reader wants colour."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Report, Severity, Table
from lightning_modelprof.show.findings import found_texts, summary_line, verdict_line
from lightning_modelprof.show.format import DASH, ELLIPSIS, shorten
from lightning_modelprof.show.grid import (
    NAME_LIMIT,
    Block,
    Grid,
    align_right,
    build_grid,
    display_width,
    part_absent,
)
from lightning_modelprof.show.text import render_text

_MAX_ROWS = 40
_MAX_PROSE_WIDTH = 100
_GAP = 2
"""Spaces that rich puts between two columns: one of padding and one where a divider would be."""

_FIVE_NUMBERS = 52
"""What Total, Avg, Max, Min and Ratio need beside the names, so that the group stays in one piece."""

_FACT_LIMIT = 24
_SEVERITY_STYLE: dict[Severity | None, str] = {Severity.CRITICAL: "bold red", Severity.WARNING: "yellow"}
_MIN_NAME = 24
_MIN_COLUMN = 16


def print_report(
    report: Report, file: IO[str] | None = None, *, max_rows: int = _MAX_ROWS, last_words: Sequence[str] = ()
) -> None:
    """Print the report: tables as wide as the terminal, or plain text where there is no terminal.

    Respects ``NO_COLOR``, ``FORCE_COLOR``, ``COLUMNS`` and ``TERM`` as rich does.

    Args:
        report: what to print.
        file: where to; the standard output by default.
        max_rows: longest table in a terminal; a longer one is cut and says so.
        last_words: lines below the report.
    """
    given = sys.stdout if file is None else file
    if given is None:  # a program without a console has no standard output
        return
    # A live display, such as Lightning's RichProgressBar, puts a stream of its own in this place, and erases
    # what goes past it. Where there is no terminal, nothing is erased: text goes where it would without it.
    behind = getattr(given, "rich_proxied_file", given)
    console, encoding = _console(file), getattr(behind, "encoding", None)
    stream = behind if console is None else given
    if console is None or console.legacy_windows or not str(encoding or "utf-8").lower().startswith("utf"):
        text = render_text(report) + "".join(f"{line}\n" for line in last_words)
    else:
        console.file = drawn = io.StringIO()
        for part in _parts(report, console.width, max_rows):
            console.print(part)
        for line in last_words:
            console.print(Text(line), soft_wrap=True)  # a path that is broken in two cannot be copied
        text = drawn.getvalue()
    _write(_encodable(text, encoding), stream)


def print_lines(lines: Sequence[str]) -> None:
    """Print some lines to the standard output, as a report is printed."""
    stream = sys.stdout
    if stream is not None:
        text = "".join(f"{one_line(line)}\n" for line in lines)
        _write(
            _encodable(text, getattr(stream, "encoding", None)), getattr(stream, "rich_proxied_file", stream)
        )


def _console(file: IO[str] | None) -> Console | None:
    """The terminal behind a stream, ``None`` if it is none."""
    try:
        # Names come from anybody's code: "[Callback]X" is not markup and ":smile:" not a picture.
        console = Console(file=file, markup=False, highlight=False, emoji=False)
        return console if console.is_terminal else None
    except Exception:  # somebody's own stream; it may be written to all the same
        return None


def _write(text: str, stream: IO[str]) -> None:
    """Write whole lines: in a notebook, the stream of a live display repeats half a line for ever."""
    try:
        for line in text.removesuffix("\n").split("\n"):
            _write_line(f"{line}\n", stream)
        if hasattr(stream, "flush"):
            stream.flush()
    except SystemExit as leaving:  # how the console of a live display ends the program when nobody reads
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise


def _write_line(line: str, stream: IO[str]) -> None:
    try:
        stream.write(line)
    except UnicodeEncodeError:  # a stream that does not know its encoding
        stream.write(_encodable(line, "ascii"))


def _encodable(text: str, encoding: object) -> str:
    """The text as far as an old terminal or a pipe on Windows can show it: printing must not raise."""
    if not isinstance(encoding, str):
        return text
    try:
        text.encode(encoding)
    except LookupError:  # what a stream calls its encoding is its own affair
        return text
    except UnicodeEncodeError:
        plain = text.replace(DASH, "-").replace(ELLIPSIS, "...")
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _parts(report: Report, width: int, max_rows: int) -> Iterator[RenderableType]:
    """Everything to print, from top to bottom."""
    yield ""
    if report.verdict is not None:
        yield Text(verdict_line(report.verdict), style="bold")
    yield Text(one_line(report.title), style="bold cyan")
    yield _facts(report.facts)
    if report.findings:
        yield ""
        yield from _findings(report, width)
    tables, absent = part_absent(report.tables)
    for table in tables:
        yield ""
        yield from _table(table, width, max_rows)
    if absent:
        yield ""
        yield Text("Without data", style="bold")
        yield from _notes(tuple(absent), width)
    if report.notes:
        yield ""
        yield Text("Notes", style="bold")
        yield from _notes(report.notes, width)


def _findings(report: Report, width: int) -> Iterator[RenderableType]:
    yield Text("Findings", style="bold")
    for text in found_texts(report.findings):
        yield Text(text.head, style=_SEVERITY_STYLE.get(text.severity, ""))
        for line in text.lines:
            yield Padding(Text(line), (0, max(0, width - _MAX_PROSE_WIDTH), 0, _GAP))
    yield Text(summary_line(report.findings), style="dim")


def _facts(facts: tuple[tuple[str, str], ...]) -> RichTable:
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(Text(shorten(one_line(label), _FACT_LIMIT)), Text(one_line(value)))
    return table


def _table(table: Table, width: int, max_rows: int) -> Iterator[RenderableType]:
    title = Text(one_line(table.title), style="bold")
    if table.absent_reason is not None and not table.rows:
        yield title.append(f": {one_line(table.absent_reason)}", style="not bold dim")
        yield from _notes(table.notes, width)
        return
    grid = build_grid(table, max_rows=max_rows)
    if grid.time_unit is not None:
        title.append(f"  time in {grid.time_unit}", style="not bold dim")
    yield title
    yield from _panels(grid, width)
    yield from _notes(grid.notes, width)


def _notes(notes: tuple[str, ...], width: int) -> Iterator[RenderableType]:
    for note in notes:
        text = one_line(" ".join(note.split()))
        if text:
            line = RichTable.grid(padding=(0, 1, 0, 0))
            line.add_row(Text("·", style="dim"), Text(text, style="dim"))
            # Lines of more than a hundred characters are hard to read.
            yield Padding(line, (0, max(0, width - _MAX_PROSE_WIDTH), 0, 0))


@dataclass(frozen=True, slots=True)
class _Column:
    """One column as drawn; its group's name stands above the first column of the group only."""

    group: str
    label: str
    cells: tuple[str, ...]
    is_number: bool

    @property
    def width(self) -> int:
        return max(map(display_width, (self.group, self.label, *self.cells))) + _GAP


def _panels(grid: Grid, width: int) -> Iterator[RenderableType]:
    """The table, continued below with its names repeated where it is wider than the terminal."""
    # The names take what is free when all columns stand side by side, else leave room for one group.
    beside = sum(column.width for block in grid.blocks for column in _columns(block, width))
    limit = max(_MIN_NAME, min(48, width - _FIVE_NUMBERS), min(NAME_LIMIT, width - beside - _GAP))
    names = tuple(shorten(name, limit) for name in grid.indented_names())
    first = _Column("", grid.names.label, names, is_number=False)
    free = max(width - first.width, _MIN_COLUMN)
    panel: list[_Column] = []
    for block in grid.blocks:
        columns = _columns(block, free)
        # A group stays together unless it is wider than the terminal.
        is_too_wide = sum(column.width for column in columns) > free
        for piece in [[column] for column in columns] if is_too_wide else [columns]:
            if panel and sum(column.width for column in (*panel, *piece)) > free:
                if block.is_empty_group:
                    continue  # a table of dashes says nothing that the table's notes do not
                yield _draw([first, *panel], grid.depths)
                yield ""
                panel = []
            panel += piece
    yield _draw([first, *panel], grid.depths)


def _columns(block: Block, free: int) -> list[_Column]:
    group = block.group or ""
    if block.is_empty_group:
        # One column of dashes says as much as five.
        return [_Column(group, "", block.strips[0].cells, is_number=True)]
    return [
        _Column(
            group if index == 0 else "",
            strip.label,
            strip.aligned() if strip.is_number else tuple(shorten(cell, free - _GAP) for cell in strip.cells),
            strip.is_number,
        )
        for index, strip in enumerate(block.strips)
    ]


def _draw(columns: list[_Column], depths: tuple[int, ...]) -> RichTable:
    table = RichTable(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="cyan",
        border_style="dim",
    )
    has_groups = any(column.group for column in columns)
    drawn = []
    for column in columns:
        label = f"{column.group}\n{column.label}" if has_groups else column.label
        table.add_column(Text(label), justify="right" if column.is_number else "left", no_wrap=True)
        # rich would strip the spaces that align the decimal points, so all cells get one width here.
        headed = align_right([column.group, column.label, *column.cells])
        drawn.append(headed[2:] if column.is_number else column.cells)
    is_tree = any(depths)
    for row, depth in enumerate(depths):
        style = "bold" if is_tree and depth == 0 else ""
        table.add_row(*(_cell(cells[row]) for cells in drawn), style=style)
    return table


def _cell(text: str) -> Text:
    return Text(text, style="dim" if text.strip() == DASH else "", justify="left")
