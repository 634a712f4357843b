"""The terminal behind a stream, and how to write lines to it."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import IO, Final
from urllib.parse import quote

from lightning_modelprof.record import Record
from lightning_modelprof.show.layout import ELLIPSIS, display_width
from lightning_modelprof.units import DASH


def _width(stream: IO[str]) -> int:
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


_MAX_PROSE_WIDTH: Final = 100
"""Longer lines are hard to read."""


_CODES: Final = {
    "bold": "1",
    "dim": "2",
    "cyan": "36",
    "bold cyan": "1;36",
    "bold red": "1;31",
    "yellow": "33",
    "green": "32",
    "blue": "34",
    "magenta": "35",
}


_WITHOUT_COLOUR: Final = {"bold cyan": "bold", "bold red": "bold", "cyan": ""} | dict.fromkeys(
    ("yellow", "green", "blue", "magenta"), ""
)


PLAIN: Final = str.maketrans(
    {DASH: "-", ELLIPSIS: "...", "·": "-", "−": "-", "±": "+-", "→": "->", "│": "|", "─": "-"}
    | {"µ": "u", "■": "!!", "▲": "!", "●": "*", "○": "?"}
    | dict.fromkeys("█▉▊▋▌▍▎▏", "#")
)
"""Replacements for characters that a console can't show."""


_NO_TERMINALS: Final = ("ipykernel", "idlelib")
"""Their streams may claim to be terminals, or be asked for colors (Jupyter sets FORCE_COLOR)."""


_WITH_LINKS: Final = ("iTerm.app", "WezTerm", "ghostty", "Hyper")


_FIRST_VTE_WITH_LINKS: Final = 5000
"""GNOME Terminal and other VTE terminals."""


_NEW_WINDOWS: Final = ("WT_SESSION", "ANSICON", "TERM_PROGRAM", "TERM")
"""Windows consoles that understand colors and lines set one of these."""


class Screen(Record, frozen=True):
    """The terminal behind a stream."""

    width: int
    has_styles: bool
    has_colours: bool
    links: str = ""

    @classmethod
    def plain(cls) -> Screen:
        """Stand in for a terminal where there is none, as for a file or a pipe."""
        return cls(width=_MAX_PROSE_WIDTH, has_styles=False, has_colours=False)

    def link(self, text: str, place: str) -> str:
        """Link the text to ``file:line``, if the terminal shows links (OSC 8).

        Source: "Hyperlinks (a.k.a. HTML-like anchors) in terminal emulators", E. Koblinger.
        """
        if not self.links:
            return text
        file, _, line = place.rpartition(":")
        path = quote(file)
        target = f"vscode://file{path}:{line}" if self.links == "vscode" else f"file://{path}"
        return f"\x1b]8;;{target}\x1b\\{text}\x1b]8;;\x1b\\"

    def paint(self, text: str, style: str) -> str:
        """Make the text bold, dim or colored, if the terminal can and the user allows it."""
        wanted = style if self.has_colours else _WITHOUT_COLOUR.get(style, style)
        return f"\x1b[{_CODES[wanted]}m{text}\x1b[0m" if text and wanted and self.has_styles else text

    @property
    def prose_width(self) -> int:
        return max(1, min(self.width, _MAX_PROSE_WIDTH))


def find_screen(stream: IO[str]) -> Screen | None:
    """Find the terminal behind a stream; ``None`` if it isn't one."""
    asked = os.environ.get
    try:
        if type(stream).__module__.partition(".")[0] in _NO_TERMINALS:
            return None
        is_old = os.name == "nt" and not any(map(asked, _NEW_WINDOWS))
        if is_old or not (stream.isatty() or asked("FORCE_COLOR")):
            return None
        return Screen(
            width=_width(stream),
            has_styles=asked("TERM") not in ("dumb", "unknown"),
            has_colours=not asked("NO_COLOR"),
            links=_links(),
        )
    except Exception:  # a custom stream, which may still be writable
        return None


def _links() -> str:
    """Return the kind of links to files, ``vscode`` or ``file``; ``""`` if the terminal supports none.

    A terminal without support shows the text, but some old ones print the address as well.
    """
    asked = os.environ.get
    program, kind = asked("TERM_PROGRAM", ""), asked("TERM", "")
    if kind in ("dumb", "unknown") or asked("TMUX") or kind.startswith("screen"):
        return ""
    if program == "vscode":
        return "vscode"
    knows = program in _WITH_LINKS or kind in ("xterm-kitty", "xterm-ghostty", "foot", "alacritty")
    vte = asked("VTE_VERSION", "")
    is_new = vte.isdecimal() and int(vte) >= _FIRST_VTE_WITH_LINKS
    return "file" if knows or is_new or asked("WT_SESSION") or asked("KONSOLE_VERSION") else ""


def write_lines(text: str, stream: IO[str]) -> None:
    """Write whole lines; in a notebook, a live display's stream repeats partial lines forever."""
    try:
        for line in text.removesuffix("\n").split("\n"):
            _write_line(f"{line}\n", stream)
        if hasattr(stream, "flush"):
            stream.flush()
    except SystemExit as leaving:  # how a live display's console exits when the pipe is closed
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise


def _write_line(line: str, stream: IO[str]) -> None:
    try:
        stream.write(line)
    except UnicodeEncodeError:  # a stream that doesn't know its encoding
        stream.write(encodable(line, "ascii"))


def encodable(text: str, encoding: object) -> str:
    """Replace what an old terminal or a pipe on Windows can't show, because printing must not raise."""
    if not isinstance(encoding, str):
        return text
    try:
        text.encode(encoding)
    except LookupError:  # an unknown encoding
        return text
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text


def wrap(text: str, width: int) -> list[str]:
    """Break into lines of at most ``width`` terminal cells, at spaces and within longer words."""
    width, lines, line, cells = max(width, 2), [], "", 0
    for word in text.split(" "):
        own = display_width(word)
        if line and cells + 1 + own <= width:
            line, cells = f"{line} {word}", cells + 1 + own
            continue
        if line:
            lines.append(line)
        *full_lines, line = _pieces(word, own, width)
        lines += full_lines
        cells = own if not full_lines else display_width(line)
    return [*lines, line] if line or not lines else lines


def _pieces(word: str, cells: int, width: int) -> Iterator[str]:
    """Split a word of ``cells`` cells into pieces of at most ``width`` characters that fit into a line."""
    start = 0
    while cells > width:
        piece = word[start : start + width]
        used = list(accumulate(map(display_width, piece)))
        end = bisect_right(used, width)
        yield piece[:end]
        start, cells = start + end, cells - used[end - 1]
    yield word[start:]


def cut_line(line: str, width: int) -> str:
    if display_width(line) <= width:
        return line.rstrip()
    end = next(end for end in range(width - 1, -1, -1) if display_width(line[:end]) < width)
    return line[:end] + ELLIPSIS
