"""The report in at most twenty lines: what limits the speed, where, and what to change."""

from __future__ import annotations

import io
import os
import tokenize
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from lightning_modelprof.errors import printable
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import (
    NOT_DONE,
    OTHER_TRACES,
    WARNING,
    CodeChange,
    Finding,
    Report,
    Severity,
    Status,
    Table,
)
from lightning_modelprof.show.findings import little_named, saving_text, speed_line, verdict_word
from lightning_modelprof.show.layout import ELLIPSIS, display_width, shorten
from lightning_modelprof.show.step_card import StepNumbers, merge_small
from lightning_modelprof.show.terminal.screen import PLAIN, Screen, wrap
from lightning_modelprof.units import percent

MAX_LINES: Final = 20
"""Including the empty line above."""

_MAX_WIDTH: Final = 100
_MIN_WIDTH: Final = 40
_INDENT: Final = "    "
_LEAST_GAIN: Final = 0.05
"""Minimum share of the step that findings must save for a second bar with the best case."""

_SMALL: Final = (0.04, 0.08, 0.15, 0.3)
"""Shares of the step below which parts of the bar are merged, tried in turn."""

_SHOWN_FIRST: Final = (WARNING, "Steps", NOT_DONE)

_MOST_SHOWN: Final = 4
_MOST_OTHERS: Final = 4
"""Maximum lines for traces other than the newest."""

_LOOPS: Final = ("loops", "short_loops")

_NUM_SLOWEST: Final = 3

_SYMBOLS: Final[dict[Severity | None, tuple[str, str, str]]] = {
    Severity.CRITICAL: ("■", "!!", "bold red"),
    Severity.WARNING: ("▲", "!", "yellow"),
    Severity.INFO: ("●", "-", "dim"),
    None: ("○", "?", "dim"),
}
"""Symbol, its ASCII form, and style."""

_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def short_lines(
    report: Report, screen: Screen | None, encoding: str | None, last_words: Sequence[str] = ()
) -> list[str]:
    """Build the short report.

    Args:
        report: a report with a verdict.
        screen: the terminal, if any.
        encoding: the stream's encoding; ``None`` if unknown.
        last_words: where the rest of the report is; may be longer than a line.
    """
    drawn = _Short(report, screen or Screen.plain(), _is_plain(encoding))
    head, tail = [*drawn.head()], [*drawn.tail(), *last_words]
    lines = [*head, *drawn.findings(MAX_LINES - 1 - len(head) - len(tail)), *tail]
    return [drawn.safe(line) for line in lines]


def _num_loops(table: Table) -> int:
    """Count loops other than the reported one, which has a row as well; short ones are counted in it."""
    if table.id == "loops":
        return len(table.rows) - 1
    at = next(place for place, column in enumerate(table.columns) if column.key == "calls")
    calls = [row[at] for row in table.rows]
    return sum(number for number in calls if isinstance(number, int))


def _is_plain(encoding: str | None) -> bool:
    """Whether the stream lacks the characters of the bars."""
    try:
        "■▲●█▏│·−±→".encode(encoding if isinstance(encoding, str) else "utf-8")
    except LookupError:  # an unknown encoding
        return False
    except UnicodeEncodeError:
        return True
    return False


class _Short:
    def __init__(self, report: Report, screen: Screen, is_plain: bool) -> None:
        self._report = report
        self._screen = screen
        self._is_plain = is_plain
        self._width = min(max(screen.width, _MIN_WIDTH), _MAX_WIDTH)

    def safe(self, line: str) -> str:
        return line.translate(PLAIN) if self._is_plain else line

    def _wrap(self, text: str, indent: str = "") -> list[str]:
        """Wrap to the width of the printed characters: "+-" is wider than "±"."""
        return wrap(self.safe(text), self._width - len(indent))

    @property
    def _cut(self) -> int:
        """Width of cut lines; three dots are two characters wider than an ellipsis."""
        return self._width - 2 * self._is_plain

    def head(self) -> Iterator[str]:
        verdict, paint = self._report.verdict, self._screen.paint
        if verdict is None:
            return
        word = verdict_word(verdict)
        text = " ".join(filter(None, (f"{word} ", printable(verdict.summary), little_named(verdict))))
        first, *rest = self._wrap(text)
        yield paint(word, "bold") + first[len(word) :] if first.startswith(word) else paint(first, "bold")
        yield from rest
        # Warnings about the figures, and which steps they cover, come before the figures.
        facts = [(label, value) for label, value in self._report.facts if label in _SHOWN_FIRST]
        for label, value in facts[:_MOST_SHOWN]:
            yield from self._wrap(f"{label}: {printable(value)}")[:2]
        if more := len(facts[_MOST_SHOWN:]):
            yield f"{more} more warning{'s' if more > 1 else ''} in the full report"
        yield from self._bars()
        yield from self._wrap(speed_line(self._report))

    def findings(self, room: int) -> Iterator[str]:
        found = [one for one in self._report.findings if one.status is Status.FOUND]
        if not found:
            asked = sum(one.status is Status.CLEAN for one in self._report.findings)
            silent = sum(one.status is Status.NOT_EVALUATED for one in self._report.findings)
            if asked or silent:
                more = f", {silent} not checked" if silent else ""
                yield from self._wrap(f"No findings: {asked} check{'' if asked == 1 else 's'} passed{more}.")
            return
        for number, finding in enumerate(found):
            left = len(found) - number - 1
            lines = self._finding(number + 1, finding, room - bool(left))
            if not lines:
                unseen = left + 1
                yield f"{_INDENT}{unseen} more finding{'s' if unseen > 1 else ''} in the full report"
                return
            room -= len(lines)
            yield from lines

    def tail(self) -> Iterator[str]:
        others = [printable(value) for label, value in self._report.facts if label == OTHER_TRACES]
        for other in others[:_MOST_OTHERS]:
            first, *rest = self._wrap(other)
            yield shorten_end(first, self._cut) if rest else first
        if more := len(others[_MOST_OTHERS:]):
            yield f"{more} more trace{'s' if more > 1 else ''}; --brief prints a line for each"
        slowest = " · ".join(self._slowest())
        cost = self._report.summary.own_cost
        share = None if cost is None else cost.share
        took = "" if share is None else f"profiler overhead {percent(share)}"
        texts = [text for text in (f"slowest modules: {slowest}" if slowest else "", took) if text]
        together = "   ".join(texts)
        for text in [together] if display_width(together) <= self._width else texts:
            yield from (self._screen.paint(line, "dim") for line in self._wrap(text) if line)

        tables = [table for table in self._report.tables if table.id in _LOOPS and table.rows]
        if tables:
            more = sum(map(_num_loops, tables))
            titles = " and ".join(table.title for table in tables)
            ran = f"{more:,} more loop{'' if more == 1 else 's'} ran in this process"
            yield f"{ran}; see {titles} in the full report"

    def _bars(self) -> Iterator[str]:
        card = self._report.step_card
        if card is None or card.wall_ns <= 0:
            return
        numbers, total = StepNumbers(card), ""
        for small in _SMALL:  # merge parts until there is room for the bar itself
            parts = merge_small(card.host, small)
            texts = [f"{part.label} {ms}" for part, ms in zip(parts, numbers.parts(parts), strict=True)]
            total = f" = {numbers.step} ms"
            # A separator is three cells, and a part's last cell can be partial.
            free = self._width - sum(map(display_width, texts)) - 4 * len(parts) - len(total)
            if free >= self._width // 6:
                break
        is_below = free < self._width // 6
        if is_below:  # the names get their own line
            free = self._width - 2 * len(parts)
        # Cells of both bars have the same scale, so the bars are comparable.
        label = f" best case if all findings are fixed: {numbers.best} ms"
        scale = max(free, len(parts)) / card.wall_ns
        has_gain = card.saved_ns >= _LEAST_GAIN * card.wall_ns
        beside = self._width - display_width(label) - 1
        if has_gain and card.better_ns > 0 and beside >= self._width // 6:
            scale = min(scale, beside / card.better_ns)
        bars = [
            self._screen.paint(self._blocks(part.ns * scale), _STYLES.get(part.key, "dim")) for part in parts
        ]
        if is_below:
            yield "│".join(bars)
            names = " · ".join(text.replace(" ", _NO_BREAK) for text in texts)
            lines = self._wrap(names + total.replace(" ", _NO_BREAK))
            yield from (line.replace(_NO_BREAK, " ") for line in lines)
        else:
            yield " │".join(f"{bar} {text}" for bar, text in zip(bars, texts, strict=True)) + total
        if has_gain:
            bar = self._blocks(card.better_ns * scale)
            lines = [bar + label] if beside >= self._width // 6 else [bar, *self._wrap(label.strip())]
            yield from (self._screen.paint(line, "dim") for line in lines)

    def _blocks(self, cells: float) -> str:
        """Draw a bar; its last cell can be partial."""
        if self._is_plain:
            return "#" * max(1, int(cells))
        eighths = max(1, int(cells * 8))
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

    def _finding(self, number: int, finding: Finding, room: int) -> list[str]:
        """Return head, place and action in at most ``room`` lines; empty if they don't fit."""
        symbol, plain, style = _SYMBOLS[finding.severity]
        head = f"{number} {plain if self._is_plain else symbol} {printable(finding.title)}"
        if gain := saving_text(finding):
            head += f"  {gain}"
        first, *more = self._wrap(head)
        lines = [self._screen.paint(first, style), *(_INDENT + line for line in more)]
        places = [text for text in map(self._place, finding.locations) if text[0]]
        texts = [printable(finding.action or finding.summary)]
        texts += [_first_sentence(texts[0])]
        change = self._change(finding.change) if number == 1 else []
        for added in [change, []] if change else [[]]:
            for text in texts:
                body = self._body(places, text) + added
                if len(lines) + len(body) <= room:
                    return [*lines, *body]
        body = self._body(places, texts[-1])
        if len(lines) + len(body) > room >= len(lines) + 1:
            kept = body[: room - len(lines)]
            return [*lines, *kept[:-1], shorten_end(kept[-1], self._cut)]
        return []

    def _body(self, places: Sequence[tuple[str, str]], text: str) -> list[str]:
        place, target = places[0] if places else ("", "")
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        lines = self._wrap(f"{place}{more} · {text}" if place else text, _INDENT)
        if target and lines[0].startswith(name := self.safe(place.split(" ")[0])):
            lines[0] = self._screen.link(name, target) + lines[0][len(name) :]
        return [_INDENT + line for line in lines]

    def _change(self, change: CodeChange | None) -> list[str]:
        if change is None or not change.diff:
            return []
        where = _near(f"{change.file}:{change.line}")
        room = self._width - len(f"{_INDENT}+ ")
        shown = [
            f"{sign} {part}"
            for sign, text in change.shown_lines
            for part in (pasteable(printable(text), room) if sign == "+" else [printable(text)])
        ]
        return [
            f"{_INDENT}Change in {printable(where)} ({change.label}):",
            *(
                self._screen.paint(
                    _INDENT + shorten(line, self._cut - len(_INDENT)), "green" if line[0] == "+" else "dim"
                )
                for line in shown
            ),
        ]

    def _place(self, location: Place) -> tuple[str, str]:
        """Return the place, and its link target or ``""``."""
        text = self._spot(location)
        inner = location.inner
        if inner is not None and inner.file == location.file and inner.line is not None:
            text += f" → line {inner.line}"
            text += f" in {printable(inner.function)}" if inner.function else ""
        elif inner is not None and (spot := self._spot(inner)):
            text += f" → {spot}"
        if location.call is not None and (call := self._spot(location.call)):
            text += f", called from {call}"
        return text, _target(location)

    def _spot(self, location: Place) -> str:
        return " ".join(filter(None, (_near(location.at), location.where)))

    def _slowest(self) -> list[str]:
        # The model's own row, which is the time outside its modules, is named after its class.
        return [
            f"{shorten(printable(str(row[0])), 32)}{' itself' * (row[0] == row[1])} {percent(value)}"
            for table in self._report.tables
            if table.id == "slowest_modules"
            for row in table.rows
            for column, value in zip(table.columns, row, strict=True)
            if column.key == "ratio" and isinstance(value, int | float)
        ][:_NUM_SLOWEST]


_STYLES: Final = {
    "dataloader": "yellow",
    "forward": "cyan",
    "backward": "blue",
    "optimizer": "magenta",
    "validation": "green",
}
"""Colors of the phases that make up most steps."""


def pasteable(line: str, width: int) -> list[str]:
    """Break a long line of Python after commas in brackets; pasted, it's the same statement.

    A line without such commas stays whole.
    """
    if display_width(line) <= width:
        return [line]
    ends = [0, *_commas_in_brackets(line), len(line)]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    parts = [""]
    for begin, end in pairwise(ends):
        piece = line[begin:end]
        if parts[-1] and display_width(parts[-1] + piece) > width:
            parts.append(indent + piece.lstrip())
        else:
            parts[-1] += piece
    return parts


def _commas_in_brackets(line: str) -> list[int]:
    """Return the ends of the commas after which a line of Python can be broken."""
    ends, depth = [], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.lstrip()).readline):
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
            if token.string == "," and depth > 0:
                ends.append(token.end[1] + len(line) - len(line.lstrip()))
    except (tokenize.TokenError, SyntaxError):  # part of a statement
        pass
    return ends


def shorten_end(line: str, width: int) -> str:
    """End the line with an ellipsis, because it continues."""
    while display_width(line) > width - 2 and " " in line.strip():
        line = line.rstrip().rpartition(" ")[0]
    return f"{line} {ELLIPSIS}"


def _first_sentence(text: str) -> str:
    head, dot, _ = text.partition(". ")
    return head + dot.strip()


def _near(file: str) -> str:
    """Shorten a path: relative to the working directory if it's inside, else only its end."""
    path, colon, line = file.rpartition(":")
    if not path or not Path(path).is_absolute():
        return file
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # no working directory, or another drive
        relative = path
    if not relative.startswith(os.pardir):
        return f"{relative}{colon}{line}"
    return f"{ELLIPSIS}/{'/'.join(Path(path).parts[-2:])}{colon}{line}" if len(path) > 40 else file


def _target(location: Place) -> str:
    file = location.file
    return "" if not file or not Path(file).is_absolute() else f"{file}:{location.line or 1}"
