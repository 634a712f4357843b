"""The JSON text of a trace file, in pieces of whole events, so that memory does not grow with the file.

A trace is one JSON object with the list ``traceEvents`` and some entries before and after it, or that list
alone. JSON cannot be cut just anywhere, but between two events it can: the text ``}, {"`` with a name behind
it never stands inside of a string, because its quote would end the string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, Protocol

from isal import igzip_lib

from lightning_modelprof.errors import TraceError
from lightning_modelprof.run.trace_json import NOT_JSON, RAW_ENTRIES

BLOCK_BYTES: Final = 2 * 2**20
"""Text that is decoded at once: what it becomes still fits into the caches, which makes it faster."""

_READ_BYTES: Final = 2**16
"""Of a gzip file; what lies behind the end of one gzip file in another is copied for each."""

_CAREFUL_BYTES: Final = 2**12
"""Inflated at once from a damaged gzip file: what a step gave is lost when it fails."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOUNDARY: Final = re.compile(rb'\}\s*,\s*(?=\{\s*"\w)')
_EVENTS_BEGIN: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_NEAR_END: Final = 2**16
_MAX_HEAD_BLOCKS: Final = 8
"""Blocks in which the list of events must begin."""

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that were read and the size of the file."""


class TextSource(Protocol):
    """Text that can be read from its begin as often as needed."""

    damage: str
    """Why the text ends before its end; ``""`` while it does not."""

    def blocks(self) -> Iterator[bytes]:
        """The text in blocks of any length."""
        ...


class Text:
    """A text that is in memory already."""

    damage: str = ""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def blocks(self) -> Iterator[bytes]:
        """The text in blocks of ``BLOCK_BYTES``."""
        for begin in range(0, len(self._text), BLOCK_BYTES):
            yield self._text[begin : begin + BLOCK_BYTES]


class TextFile:
    """A file of text, plain or gzip-compressed (told apart by content, not by name).

    Args:
        path: the file.
        max_bytes: largest uncompressed text to read; a few kilobytes of gzip can hold gigabytes.
        progress: told now and then how far reading is.

    Raises:
        TraceError: while reading, when the file cannot be read or is too large.
    """

    def __init__(self, path: Path, max_bytes: int, progress: Progress | None = None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._progress = progress
        self.damage = ""

    def blocks(self) -> Iterator[bytes]:
        """The uncompressed text in blocks of megabytes; in small ones once it is known to be damaged."""
        block_bytes = _CAREFUL_BYTES if self.damage else BLOCK_BYTES
        self.damage = ""
        num_bytes = 0
        try:
            with self._path.open("rb") as file:
                is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
                file.seek(0)
                for block in self._inflate(file, block_bytes) if is_packed else self._read(file):
                    num_bytes += len(block)
                    if num_bytes > self._max_bytes:
                        raise self._too_large()
                    yield block
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            raise TraceError(
                f"{self._path}: expected a trace file, but it cannot be read:"
                f" {getattr(error, 'strerror', None) or error}."
                " Check the path and the permissions."
            ) from None

    def _read(self, file: IO[bytes]) -> Iterator[bytes]:
        size = self._path.stat().st_size
        while block := file.read(BLOCK_BYTES):
            self._tell(file.tell(), size)
            yield block

    def _inflate(self, file: IO[bytes], block_bytes: int) -> Iterator[bytes]:
        """Inflate as far as possible: of a file that is cut off, all that came over."""
        size = self._path.stat().st_size
        inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        packed = b""
        try:
            while True:
                if inflater.eof:  # a file may consist of several gzip files, one behind the other
                    packed = _without_padding(inflater.unused_data, file)
                    if not packed:
                        return
                    inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
                elif inflater.needs_input:
                    packed = file.read(_READ_BYTES)
                    self._tell(file.tell(), size)
                    if not packed:
                        self.damage = "the gzip file is cut off"
                        return
                else:
                    packed = b""
                block = inflater.decompress(packed, block_bytes)
                if block:
                    yield block
        except igzip_lib.IsalError as error:  # type: ignore[misc]  # wrong in its stubs
            self.damage = f"the gzip file is damaged ({error})"

    def _tell(self, position: int, size: int) -> None:
        if self._progress is not None:
            self._progress(position, size)

    def _too_large(self) -> TraceError:
        return TraceError(
            f"{self._path}: expected at most {self._max_bytes / 2**30:g} GiB of JSON, got more. If it is a"
            " trace, and memory for about three times its size is there, raise the limit (max_bytes,"
            " --max-gib)."
        )


def _without_padding(packed: bytes, file: IO[bytes]) -> bytes:
    """What comes next in the file behind zero bytes, which some programs fill up with; ``b""`` at its end."""
    packed = packed.lstrip(b"\0")
    while not packed:
        packed = file.read(_READ_BYTES)
        if not packed:
            break
        packed = packed.lstrip(b"\0")
    return packed


class EventPieces:
    """Cuts the text of a trace between events.

    Args:
        source: the text.

    Attributes:
        rest: after :meth:`pieces`, the text without the events that were handed out, as valid as the whole.
    """

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self.rest = b""

    def pieces(self) -> Iterator[bytes]:
        """JSON lists of whole events, but for the last events, which stay in ``rest``."""
        head = b""
        left: list[bytes] = []  # text behind the last event that was handed out
        in_events = False
        for block in self._source.blocks():
            if not in_events:
                left.append(block)
                if len(left) > _MAX_HEAD_BLOCKS:
                    continue  # this is no trace as we know them; it is decoded as a whole
                text = b"".join(left)
                begin = events_begin(text)
                if begin is None or not _is_top_level(text[:begin]):
                    continue
                in_events = True
                head, block, left = text[:begin], text[begin:], []  # noqa: PLW2901
            cut = _last_boundary(block)
            if cut is None:
                left.append(block)
                continue
            end, next_begin = cut
            yield b"".join((b"[", *left, memoryview(block)[:end], b"]"))
            left = [block[next_begin:]]
        self.rest = b"".join((head, *left))


def events_begin(text: bytes) -> int | None:
    """Where the list of events begins, behind its bracket; ``None`` where there is none yet."""
    stripped = text.lstrip()
    if stripped[:1] == b"[":
        return len(text) - len(stripped) + 1
    found = _EVENTS_BEGIN.search(text)
    return None if found is None else found.end()


def _is_top_level(head: bytes) -> bool:
    """Whether the list that begins behind the text is the file's own, not one inside of another entry."""
    if head.lstrip()[:1] == b"[":
        return True
    try:
        return "traceEvents" in RAW_ENTRIES.decode(head + b"]}")
    except NOT_JSON:
        return False


def split_events(text: bytes) -> list[bytes]:
    """Cut the text from the first event on wherever an event may end; the last piece is all that is left."""
    pieces = []
    begin = 0
    for boundary in _BOUNDARY.finditer(text):
        pieces.append(text[begin : boundary.start() + 1])
        begin = boundary.end()
    return [*pieces, text[begin:]]


def _last_boundary(text: bytes) -> tuple[int, int] | None:
    """Where the last whole event ends and where the next begins; ``None`` without two events."""
    for begin in (max(0, len(text) - _NEAR_END), 0):
        last = None
        for boundary in _BOUNDARY.finditer(text, begin):
            last = boundary
        if last is not None:
            return last.start() + 1, last.end()
    return None
