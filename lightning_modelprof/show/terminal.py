"""The report in a terminal: tables that fit its width, with colour where the reader wants colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Final

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Report, Severity, Table
from lightning_modelprof.show.findings import found_texts, summary_line, verdict_line
from lightning_modelprof.show.format import DASH, ELLIPSIS, shorten
from lightning_modelprof.show.grid import (
    NAME_LIMIT,
    Block,
    Grid,
    align_left,
    align_right,
    build_grid,
    display_width,
    part_absent,
)
from lightning_modelprof.show.text import render_text

_MAX_ROWS: Final = 40
_MAX_PROSE_WIDTH: Final = 100
"""Lines of more than a hundred characters are hard to read."""

_GAP: Final = "  "
"""Between two columns, and before what belongs to the line above."""

_FIVE_NUMBERS: Final = 52
"""What Total, Avg, Max, Min and Ratio need beside the names, so that the group stays in one piece."""

_FACT_LIMIT: Final = 24
_MIN_NAME: Final = 24
_MIN_COLUMN: Final = 16

_CODES: Final = {
    "bold": "1",
    "dim": "2",
    "cyan": "36",
    "bold cyan": "1;36",
    "bold red": "1;31",
    "yellow": "33",
}
_WITHOUT_COLOUR: Final = {"bold cyan": "bold", "bold red": "bold", "cyan": "", "yellow": ""}
_SEVERITY_STYLE: Final[dict[Severity | None, str]] = {
    Severity.CRITICAL: "bold red",
    Severity.WARNING: "yellow",
}

_NO_TERMINALS: Final = ("ipykernel", "idlelib")
"""Whose streams may call themselves terminals, or be asked for colours (Jupyter sets FORCE_COLOR)."""

_NEW_WINDOWS: Final = ("WT_SESSION", "ANSICON", "TERM_PROGRAM", "TERM")
"""One of them is set in a console of Windows that understands colours and lines."""


@dataclass(frozen=True, slots=True)
class _Terminal:
    """What is known of the terminal behind a stream."""

    width: int
    has_styles: bool
    has_colours: bool

    def paint(self, text: str, style: str) -> str:
        """The text in bold, dim or a colour, as far as that can be shown and is wanted."""
        wanted = style if self.has_colours else _WITHOUT_COLOUR.get(style, style)
        return f"\x1b[{_CODES[wanted]}m{text}\x1b[0m" if text and wanted and self.has_styles else text

    @property
    def prose_width(self) -> int:
        """Of sentences."""
        return max(1, min(self.width, _MAX_PROSE_WIDTH))


def print_report(
    report: Report,
    file: IO[str] | None = None,
    *,
    max_rows: int = _MAX_ROWS,
    last_words: Sequence[str] = (),
    is_below_a_bar: bool = False,
) -> None:
    """Print the report: tables as wide as the terminal, or plain text where there is no terminal.

    Respects ``NO_COLOR``, ``FORCE_COLOR``, ``COLUMNS`` and ``TERM``.

    Args:
        report: what to print.
        file: where to; the standard output by default.
        max_rows: longest table in a terminal; a longer one is cut and says so.
        last_words: lines below the report.
        is_below_a_bar: begin a line, as a progress bar may have left its own open.
    """
    given = sys.stdout if file is None else file
    if given is None:  # a program without a console has no standard output
        return
    # A live display, such as Lightning's RichProgressBar, puts a stream of its own in this place, and erases
    # what goes past it. Where there is no terminal, nothing is erased: text goes where it would without it.
    behind = getattr(given, "rich_proxied_file", given)
    terminal, encoding = _terminal(behind), getattr(behind, "encoding", None)
    if terminal is None or not str(encoding or "utf-8").lower().startswith("utf"):
        text = "\n" * is_below_a_bar + render_text(report)
    else:
        text = "".join(f"{line}\n" for line in _lines(report, terminal, max_rows))
    text += "".join(f"{line}\n" for line in last_words)  # a path that is broken in two cannot be copied
    _write(_encodable(text, encoding), behind if terminal is None else given)


def print_lines(lines: Sequence[str]) -> None:
    """Print some lines to the standard output, as a report is printed."""
    stream = sys.stdout
    if stream is not None:
        text = "".join(f"{one_line(line)}\n" for line in lines)
        _write(
            _encodable(text, getattr(stream, "encoding", None)), getattr(stream, "rich_proxied_file", stream)
        )


def _terminal(stream: IO[str]) -> _Terminal | None:
    """The terminal behind a stream, ``None`` if it is none."""
    asked = os.environ.get
    try:
        if type(stream).__module__.partition(".")[0] in _NO_TERMINALS:
            return None
        is_old = os.name == "nt" and not any(map(asked, _NEW_WINDOWS))
        if is_old or not (stream.isatty() or asked("FORCE_COLOR")):
            return None
        return _Terminal(
            width=_width(stream),
            has_styles=asked("TERM") not in ("dumb", "unknown"),
            has_colours=not asked("NO_COLOR"),
        )
    except Exception:  # somebody's own stream; it may be written to all the same
        return None


def _width(stream: IO[str]) -> int:
    """Columns of the terminal, 80 if nothing tells."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    for one in (stream, sys.__stdin__, sys.__stdout__, sys.__stderr__):
        try:
            if width := os.get_terminal_size(one.fileno()).columns:  # type: ignore[union-attr]
                return width
        except (AttributeError, OSError, ValueError):  # noqa: PERF203 - no file, or no terminal
            continue
    return 80


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


def _lines(report: Report, terminal: _Terminal, max_rows: int) -> Iterator[str]:
    """Everything to print, from top to bottom."""
    paint = terminal.paint
    yield ""
    if report.verdict is not None:
        yield from _wrapped(terminal, verdict_line(report.verdict), "bold")
    yield from _wrapped(terminal, one_line(report.title), "bold cyan")
    yield from _facts(report.facts, terminal)
    if report.findings:
        yield ""
        yield paint("Findings", "bold")
        yield from _findings(report, terminal)
    tables, absent = part_absent(report.tables)
    for table in tables:
        yield ""
        yield from _table(table, terminal, max_rows)
    for heading, notes in (("Without data", absent), ("Notes", report.notes)):
        if notes:
            yield ""
            yield paint(heading, "bold")
            yield from _notes(notes, terminal)


def _wrapped(terminal: _Terminal, text: str, style: str = "") -> Iterator[str]:
    for line in wrap(text, terminal.width):
        yield terminal.paint(line, style)


def _findings(report: Report, terminal: _Terminal) -> Iterator[str]:
    for text in found_texts(report.findings):
        yield from _wrapped(terminal, text.head, _SEVERITY_STYLE.get(text.severity, ""))
        for line in text.lines:
            yield from (_GAP + part for part in wrap(line, terminal.prose_width - len(_GAP)))
    yield from _wrapped(terminal, summary_line(report.findings), "dim")


def _facts(facts: tuple[tuple[str, str], ...], terminal: _Terminal) -> Iterator[str]:
    labels = align_left([shorten(one_line(label), _FACT_LIMIT) for label, _ in facts])
    for label, (_, value) in zip(labels, facts, strict=True):
        indent = display_width(label) + len(_GAP)
        first, *rest = wrap(one_line(value), terminal.width - indent)
        yield terminal.paint(label, "dim") + _GAP + first
        yield from (" " * indent + line for line in rest)


def _table(table: Table, terminal: _Terminal, max_rows: int) -> Iterator[str]:
    title = one_line(table.title)
    if table.absent_reason is not None and not table.rows:
        first, *rest = wrap(f"{title}: {one_line(table.absent_reason)}", terminal.width)
        yield terminal.paint(first[: len(title)], "bold") + terminal.paint(first[len(title) :], "dim")
        yield from (terminal.paint(line, "dim") for line in rest)
        yield from _notes(table.notes, terminal)
        return
    grid = build_grid(table, max_rows=max_rows)
    unit = "" if grid.time_unit is None else f"  time in {grid.time_unit}"
    yield terminal.paint(title, "bold") + terminal.paint(unit, "dim")
    yield from _panels(grid, terminal)
    yield from _notes(grid.notes, terminal)


def _notes(notes: Sequence[str], terminal: _Terminal) -> Iterator[str]:
    for note in notes:
        if text := one_line(" ".join(note.split())):
            for number, line in enumerate(wrap(text, terminal.prose_width - len(_GAP))):
                yield terminal.paint(f"{_GAP if number else '· '}{line}", "dim")


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most so many terminal cells, broken at spaces, and within words that are longer."""
    width, lines, line = max(width, 2), [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if display_width(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        line = word
        while display_width(line) > width:
            end = next(end for end in range(width, 0, -1) if display_width(line[:end]) <= width)
            lines.append(line[:end])
            line = line[end:]
    return [*lines, line] if line or not lines else lines


@dataclass(frozen=True, slots=True)
class _Column:
    """One column as drawn; its group's name stands above the first column of the group only."""

    group: str
    label: str
    cells: tuple[str, ...]
    is_number: bool

    @property
    def width(self) -> int:
        return max(map(display_width, (self.group, self.label, *self.cells))) + len(_GAP)


def _panels(grid: Grid, terminal: _Terminal) -> Iterator[str]:
    """The table, continued below with its names repeated where it is wider than the terminal."""
    # The names take what is free when all columns stand side by side, else leave room for one group.
    width = terminal.width
    beside = sum(column.width for block in grid.blocks for column in _columns(block, width))
    limit = max(_MIN_NAME, min(48, width - _FIVE_NUMBERS), min(NAME_LIMIT, width - beside - len(_GAP)))
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
                yield from _draw([first, *panel], grid.depths, terminal)
                yield ""
                panel = []
            panel += piece
    yield from _draw([first, *panel], grid.depths, terminal)


def _columns(block: Block, free: int) -> list[_Column]:
    group = block.group or ""
    if block.is_empty_group:
        # One column of dashes says as much as five.
        return [_Column(group, "", block.strips[0].cells, is_number=True)]
    return [
        _Column(
            group if index == 0 else "",
            strip.label,
            strip.aligned()
            if strip.is_number
            else tuple(shorten(cell, free - len(_GAP)) for cell in strip.cells),
            strip.is_number,
        )
        for index, strip in enumerate(block.strips)
    ]


def _draw(columns: list[_Column], depths: tuple[int, ...], terminal: _Terminal) -> Iterator[str]:
    """One panel: headings, a rule, rows; what is wider than a sliver of a terminal is cut off."""
    paint, has_groups = terminal.paint, any(column.group for column in columns)
    drawn = []
    for column in columns:
        texts = [*([column.group] if has_groups else ()), column.label, *column.cells]
        drawn.append((align_right if column.is_number else align_left)(texts))
    lines = [list(cells) for cells in zip(*drawn, strict=True)]
    num_heads, is_tree = 1 + has_groups, any(depths)
    for number, cells in enumerate(lines):
        if number == num_heads:
            yield paint("─" * min(terminal.width, display_width(_GAP.join(cells))), "dim")
        line = _cut(_GAP.join(cells), terminal.width)
        if number < num_heads:
            yield paint(line, "cyan")
        elif is_tree and depths[number - num_heads] == 0:
            yield paint(line, "bold")
        else:
            yield line


def _cut(line: str, width: int) -> str:
    if display_width(line) <= width:
        return line.rstrip()
    end = next(end for end in range(width - 1, -1, -1) if display_width(line[:end]) < width)
    return line[:end] + ELLIPSIS
