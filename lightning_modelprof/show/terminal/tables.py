"""All tables of a report for a terminal, fitted to its width and continued below if they are wider."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Report, Severity, Table
from lightning_modelprof.show.findings import found_texts, passed_line, summary_line, verdict_line
from lightning_modelprof.show.layout import (
    NAME_LIMIT,
    Layout,
    LayoutGroup,
    align_left,
    align_right,
    build_layout,
    display_width,
    part_absent,
    shorten,
)
from lightning_modelprof.show.terminal.screen import Screen, cut_line, wrap
from lightning_modelprof.units import UNIT_NAMES

_GAP: Final = "  "
"""Between columns, and before continuation lines."""

_FIVE_NUMBERS: Final = 52
"""Width of Total, Avg, Max, Min and Ratio next to the names, so that the group stays together."""

_FACT_LIMIT: Final = 24
_MIN_NAME: Final = 24
_MIN_COLUMN: Final = 16

_SEVERITY_STYLE: Final[dict[Severity | None, str]] = {
    Severity.CRITICAL: "bold red",
    Severity.WARNING: "yellow",
}


def full_lines(report: Report, screen: Screen, max_rows: int) -> Iterator[str]:
    paint = screen.paint
    yield ""
    if report.verdict is not None:
        yield from _wrapped(screen, verdict_line(report.verdict), "bold")
    yield from _wrapped(screen, printable(report.title), "bold cyan")
    yield from _facts(report.facts, screen)
    if report.findings:
        yield ""
        yield paint("Findings", "bold")
        yield from _findings(report, screen)
    tables, absent = part_absent(report.tables)
    for table in tables:
        yield ""
        yield from _table(table, screen, max_rows)
    for heading, notes in (("Not available", absent), ("Notes", report.notes)):
        if notes:
            yield ""
            yield paint(heading, "bold")
            yield from _notes(notes, screen)


def _wrapped(screen: Screen, text: str, style: str = "") -> Iterator[str]:
    for line in wrap(text, screen.width):
        yield screen.paint(line, style)


def _findings(report: Report, screen: Screen) -> Iterator[str]:
    for text in found_texts(report.findings):
        yield from _wrapped(screen, text.head, _SEVERITY_STYLE.get(text.severity, ""))
        for line in text.lines:
            yield from (_GAP + part for part in wrap(line, screen.prose_width - len(_GAP)))
    for line in filter(None, (passed_line(report.findings), summary_line(report.findings))):
        yield from _wrapped(screen, line, "dim")


def _facts(facts: tuple[tuple[str, str], ...], screen: Screen) -> Iterator[str]:
    labels = align_left([shorten(printable(label), _FACT_LIMIT) for label, _ in facts])
    for label, (_, value) in zip(labels, facts, strict=True):
        indent = display_width(label) + len(_GAP)
        first, *rest = wrap(printable(value), screen.width - indent)
        yield screen.paint(label, "dim") + _GAP + first
        yield from (" " * indent + line for line in rest)


def _table(table: Table, screen: Screen, max_rows: int) -> Iterator[str]:
    title = printable(table.title)
    if table.absent_reason is not None and not table.rows:
        first, *rest = wrap(f"{title}: {printable(table.absent_reason)}", screen.width)
        yield screen.paint(first[: len(title)], "bold") + screen.paint(first[len(title) :], "dim")
        yield from (screen.paint(line, "dim") for line in rest)
        yield from _notes(table.notes, screen)
        return
    grid = build_layout(table, max_rows=max_rows)
    unit = "" if grid.time_unit is None else f"  time in {UNIT_NAMES[grid.time_unit]}"
    yield screen.paint(title, "bold") + screen.paint(unit, "dim")
    yield from _panels(grid, screen)
    yield from _notes(grid.notes, screen)


def _notes(notes: Sequence[str], screen: Screen) -> Iterator[str]:
    for note in notes:
        if text := printable(" ".join(note.split())):
            for number, line in enumerate(wrap(text, screen.prose_width - len(_GAP))):
                yield screen.paint(f"{_GAP if number else '· '}{line}", "dim")


class _Column(Record, frozen=True):
    """One column as drawn; only the first column of a group has the group's name above it."""

    group: str
    label: str
    cells: tuple[str, ...]
    is_number: bool

    @property
    def width(self) -> int:
        return max(map(display_width, (self.group, self.label, *self.cells))) + len(_GAP)


def _panels(grid: Layout, screen: Screen) -> Iterator[str]:
    """Yield the table; if it's wider than the screen, it continues below with the names repeated."""
    # The names take what is free with all columns side by side, else they leave room for one group.
    width = screen.width
    beside = sum(column.width for block in grid.blocks for column in _columns(block, width))
    limit = max(_MIN_NAME, min(48, width - _FIVE_NUMBERS), min(NAME_LIMIT, width - beside - len(_GAP)))
    names = tuple(shorten(name, limit) for name in grid.indented_names())
    first = _Column("", grid.names.label, names, is_number=False)
    free = max(width - first.width, _MIN_COLUMN)
    panel: list[_Column] = []
    for block in grid.blocks:
        columns = _columns(block, free)
        # A group stays together unless it's wider than the screen.
        is_too_wide = sum(column.width for column in columns) > free
        for piece in [[column] for column in columns] if is_too_wide else [columns]:
            if panel and sum(column.width for column in (*panel, *piece)) > free:
                if block.is_empty_group:
                    continue  # the table's notes explain the dashes
                yield from _draw([first, *panel], grid.depths, screen)
                yield ""
                panel = []
            panel += piece
    yield from _draw([first, *panel], grid.depths, screen)


def _columns(block: LayoutGroup, free: int) -> list[_Column]:
    group = block.group or ""
    if block.is_empty_group:
        # One column of dashes is as clear as five.
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


def _draw(columns: list[_Column], depths: tuple[int, ...], screen: Screen) -> Iterator[str]:
    paint, has_groups = screen.paint, any(column.group for column in columns)
    drawn = []
    for column in columns:
        texts = [*([column.group] if has_groups else ()), column.label, *column.cells]
        drawn.append((align_right if column.is_number else align_left)(texts))
    lines = [list(cells) for cells in zip(*drawn, strict=True)]
    num_heads, is_tree = 1 + has_groups, any(depths)
    for number, cells in enumerate(lines):
        if number == num_heads:
            yield paint("─" * min(screen.width, display_width(_GAP.join(cells))), "dim")
        line = cut_line(_GAP.join(cells), screen.width)
        if number < num_heads:
            yield paint(line, "cyan")
        elif is_tree and depths[number - num_heads] == 0:
            yield paint(line, "bold")
        else:
            yield line
