"""The report in a terminal: twenty lines or all tables, with color if the reader wants it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import IO, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Report
from lightning_modelprof.show.terminal.screen import encodable, find_screen, write_lines
from lightning_modelprof.show.terminal.short import short_lines
from lightning_modelprof.show.terminal.short_comparison import comparison_lines, is_comparison
from lightning_modelprof.show.terminal.tables import full_lines
from lightning_modelprof.show.text import render_text

_MAX_ROWS: Final = 40


def print_report(
    report: Report,
    file: IO[str] | None = None,
    *,
    full: bool = False,
    max_rows: int = _MAX_ROWS,
    last_words: Sequence[str] = (),
    is_below_a_bar: bool = False,
    has_colours: bool | None = None,
) -> None:
    """Print a report in at most 20 lines, or with all its tables.

    Respects ``NO_COLOR``, ``FORCE_COLOR``, ``COLUMNS`` and ``TERM``. Reports without a verdict are always
    printed in full, except comparisons.

    Args:
        report: The report to print.
        file: Where to print it; standard output by default.
        full: Print all tables, fitted to the terminal's width, or as plain text outside a terminal.
        max_rows: Maximum rows per table in a terminal; longer tables are cut, with a note.
        last_words: Lines to print below the report.
        is_below_a_bar: Start a new line, in case a progress bar left its own open.
        has_colours: Use color; ``None`` follows ``NO_COLOR``.
    """
    given = sys.stdout if file is None else file
    if given is None:  # a program without a console has no standard output
        return
    # A live display, such as Lightning's RichProgressBar, replaces the stream with its own and erases what
    # bypasses it. Without a terminal nothing is erased, so the text goes to the original stream.
    behind = getattr(given, "rich_proxied_file", given)
    screen, encoding = find_screen(behind), getattr(behind, "encoding", None)
    if screen is not None and has_colours is not None:
        screen = replace(screen, has_colours=has_colours)
    if not full and report.verdict is not None:
        text = "".join(f"{line}\n" for line in ("", *short_lines(report, screen, encoding, last_words)))
    elif not full and is_comparison(report):
        text = "".join(f"{line}\n" for line in comparison_lines(report, screen, last_words))
    else:
        if screen is None or not str(encoding or "utf-8").lower().startswith("utf"):
            text = "\n" * is_below_a_bar + render_text(report)
        else:
            text = "".join(f"{line}\n" for line in full_lines(report, screen, max_rows))
        text += "".join(f"{line}\n" for line in last_words)  # a path broken in two can't be copied
    write_lines(encodable(text, encoding), behind if screen is None else given)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output, each as soon as it exists, the way a report is printed."""
    for line in lines:
        print_text(f"{printable(line)}\n")


def print_text(text: str) -> None:
    """Print text to standard output, the way a report is printed."""
    stream = sys.stdout
    if stream is not None:
        write_lines(
            encodable(text, getattr(stream, "encoding", None)), getattr(stream, "rich_proxied_file", stream)
        )
