"""The JSON text of a trace file, in pieces of whole events, so that memory doesn't grow with the file.

A trace is one JSON object with the list ``traceEvents`` and some entries before and after it, or only that
list. JSON can't be cut anywhere, but it can between two events: the text ``}, {"`` followed by a name never
occurs inside a string, because its quote would end the string. It may occur inside an event, and ``}, {``
even inside a string; a piece cut there isn't valid JSON, so a wrong cut is always noticed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Protocol

import msgspec
from isal import igzip_lib

from lightning_modelprof.errors import TraceError, printable, remedy
from lightning_modelprof.run.opening import open_regular
from lightning_modelprof.trace.json import NOT_JSON, OUTLINE, RAW_ITEMS
from lightning_modelprof.trace.packed import BROKEN, Forward, format_of, member_blocks, trace_members
from lightning_modelprof.units import digits, size

BLOCK_BYTES: Final = 2**19
"""Text decoded at once; its objects still fit into the caches, which is faster."""

_READ_BYTES: Final = 2**16
"""Bytes per read of a gzip file; small, as data after the end of each concatenated gzip file is copied."""

_CAREFUL_BYTES: Final = 2**12
"""Bytes inflated at once from a damaged gzip file, as a failing step loses its output."""

_MOST_PACKED: Final = 200
"""Maximum expansion of a gzip file whose text is larger than ``_LOOSE_BYTES``.

torch.profiler traces compress 10 to 30 times; text that compresses more has next to no information."""

_LOOSE_BYTES: Final = 2**28
_ITEM_BYTES: Final = 2**18
_HEAD_BYTES: Final = 512
_ARCHIVES: Final = ("tar archive", "zip archive")
_MOST_LAYERS: Final = 4
"""Maximum depth of gzip inside gzip."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOUNDARY: Final = re.compile(rb'\}\s*,\s*(?=\{\s*"\w)')
_WEAK_BOUNDARY: Final = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between events that don't start with a key, such as empty ones."""

_NOT_SPACE: Final = re.compile(rb"\S")
_EVENTS_BEGIN: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST_BEGINS: Final = re.compile(rb"^[^\[\{\w]*\[\s*\{")
_PHASE: Final = re.compile(rb'"ph"\s*:\s*"\w"')
_LOOK_BYTES: Final = 2**16
"""The text before a job's events takes tens of kilobytes with many process groups."""

_NEAR_END: Final = (2**13, 2**16)

MAX_EVENT_BYTES: Final = 4 * 2**20
"""Maximum text of a decoded event; torch.profiler's have some kilobytes.

Decoded JSON may take thirty times the memory of its text, so the text decoded at once is limited."""

_LEAST_EVENT_BYTES: Final = 40
"""Minimum mean event text in a file with many events; torch.profiler's have more than a hundred bytes.

This bounds the work for a file by the size of its text."""

_MANY_EVENTS: Final = 2**20

MAX_AROUND_BYTES: Final = 8 * 2**20
"""Maximum decoded text of all entries before and after the events."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes read and the size of the file."""


class TinyEventsError(Exception):
    """The text has very many, nearly empty events."""


def check_event_sizes(num_events: int, num_bytes: int) -> None:
    """Raise :class:`TinyEventsError` for very many, nearly empty events."""
    if num_events > _MANY_EVENTS and num_bytes < num_events * _LEAST_EVENT_BYTES:
        raise TinyEventsError(
            f"expected Chrome trace events of at least {_LEAST_EVENT_BYTES} bytes on average, got"
            f" {num_events:,} events of {digits(num_bytes / num_events)} bytes. Check that torch.profiler"
            " wrote it."
        )


class NotCutError(Exception):
    """The text has no trace events for so long that it isn't a usual trace."""


class TextSource(Protocol):
    """Text that can be read from its start any number of times."""

    damage: str
    """Why the text is incomplete; ``""`` if it isn't."""

    def blocks(self) -> Iterator[bytes]: ...


class Text:
    """A text in memory."""

    def __init__(self, text: bytes | bytearray, damage: str = "") -> None:
        self._text = text
        self.damage = damage

    def blocks(self) -> Iterator[bytes]:
        for begin in range(0, len(self._text), BLOCK_BYTES):
            yield bytes(self._text[begin : begin + BLOCK_BYTES])


class TextFile:
    """A file of text, plain or gzip-compressed (detected by content, not by name).

    Input that can be read only once (a pipe) is copied to a temporary file first.

    Args:
        max_bytes: maximum uncompressed text to read; a few kilobytes of gzip can hold gigabytes.

    Raises:
        TraceError: while reading, when the file can't be read or is too large.
    """

    def __init__(self, path: Path, max_bytes: int, progress: Progress | None = None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._progress = progress
        self._copy: IO[bytes] | None = None
        self._archive = _archive_of(path)
        self._member = "" if self._archive is None else path.relative_to(self._archive).as_posix()
        self.damage = ""

    def blocks(self) -> Iterator[bytes]:
        """Yield the uncompressed text in large blocks, or in small ones once damage is known."""
        block_bytes = _CAREFUL_BYTES if self.damage else BLOCK_BYTES
        self.damage = ""
        num_bytes = 0
        try:
            with self._open() as file:
                for block in self._text_of(file, block_bytes):
                    num_bytes += len(block)
                    if num_bytes > self._max_bytes:
                        raise self._too_large()
                    yield block
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            raise TraceError(
                f"can't read {self._path}: {getattr(error, 'strerror', None) or error}. {remedy(error)}"
            ) from None

    def members(self) -> list[Path]:
        """The traces inside, if it's an archive; none for any other file, including pipes.

        Raises:
            TraceError: when it's an archive that can't be read.
        """
        try:
            if not self._path.is_file():  # opening and closing a pipe would break its writer
                return []
            with open_regular(self._path) as file:
                stream = self._unpacked(file, BLOCK_BYTES)
                kind = format_of(stream.peek(_HEAD_BYTES))
                return trace_members(self._path, stream, file) if kind in _ARCHIVES else []
        except (OSError, ValueError):
            return []

    def looks_like_trace(self) -> bool:
        """Whether it starts like a Chrome trace; false for pipes and unreadable files."""
        try:
            if not self._path.is_file():
                return False
            with open_regular(self._path) as file:
                head = self._unpacked(file, _CAREFUL_BYTES).peek(_LOOK_BYTES)
        except (OSError, ValueError):
            return False
        head = head.replace(b"\0", b"")  # UTF-16 text
        return bool(_EVENTS_BEGIN.search(head) or (_LIST_BEGINS.search(head) and _PHASE.search(head)))

    def _text_of(self, file: IO[bytes], block_bytes: int) -> Iterator[bytes]:
        stream = self._unpacked(file, block_bytes)
        if self._member:
            try:
                blocks = member_blocks(self._path, self._member, stream, file, block_bytes)
                yield from self._checked(self._without_gzip(Forward(blocks), block_bytes)).blocks()
            except BROKEN as error:
                self.damage = self.damage or f"the archive is cut off or damaged ({printable(str(error))})"
            return
        yield from self._checked(stream).blocks()

    def _unpacked(self, file: IO[bytes], block_bytes: int) -> Forward:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        return self._without_gzip(Forward(self._read(file, size)), block_bytes)

    def _without_gzip(self, stream: Forward, block_bytes: int) -> Forward:
        for _ in range(_MOST_LAYERS):
            if stream.peek(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
                break
            stream = Forward(self._inflate(stream, block_bytes))
        return stream

    def _checked(self, stream: Forward) -> Forward:
        """Refuse a stream in a known format that can't be read here."""
        head = stream.peek(_HEAD_BYTES)
        kind = "gzip file nested in many others" if head.startswith(_GZIP_MAGIC) else format_of(head)
        if kind:
            raise TraceError(f"{self._path}: expected a Chrome trace in JSON, got a {kind}. Unpack it first.")
        return stream

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if self._copy is None:
            with open_regular(self._archive or self._path, or_pipe=True) as file:
                if file.seekable():
                    yield file
                    return
                copy = self._copied(file)
        else:
            copy = self._copy
        yield copy

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _copied(self, pipe: IO[bytes]) -> IO[bytes]:
        self._copy = tempfile.TemporaryFile()  # noqa: SIM115  # needed until close
        num_bytes = 0
        while block := pipe.read(_READ_BYTES):
            num_bytes += len(block)
            if num_bytes > self._max_bytes:  # its text is at least as large, compressed or not
                raise self._too_large()
            self._copy.write(block)
        return self._copy

    def _read(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        while block := file.read(BLOCK_BYTES):
            self._tell(file.tell(), size)
            yield block

    def _inflate(self, file: Forward, block_bytes: int) -> Iterator[bytes]:
        """Inflate as far as possible, as much as is left of a cut-off file."""
        inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        packed = b""
        num_bytes = 0
        try:
            while True:
                if inflater.eof:  # a file may be several concatenated gzip files
                    packed = _without_padding(inflater.unused_data, file)
                    if not packed:
                        return
                    inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
                elif inflater.needs_input:
                    packed = file.read(_READ_BYTES)
                    if not packed:
                        self.damage = "the gzip file is cut off"
                        return
                else:
                    packed = b""
                block = inflater.decompress(packed, block_bytes)
                num_bytes += len(block)
                if num_bytes > max(_LOOSE_BYTES, _MOST_PACKED * file.tell()):
                    raise TraceError(
                        f"{self._path}: this gzip file expands more than {_MOST_PACKED} times, which no trace"
                        " should. If it is a trace, unpack it first."
                    )
                if block:
                    yield block
        except igzip_lib.IsalError as error:  # type: ignore[misc]  # wrong in its stubs
            self.damage = f"the gzip file is damaged ({error})"

    def _tell(self, position: int, size: int) -> None:
        if self._progress is not None:
            self._progress(position, size)

    def _too_large(self) -> TraceError:
        return TraceError(
            f"{self._path}: expected at most {size(self._max_bytes)} of JSON, got more. If it's a"
            " torch.profiler trace and you have memory for about twice its size, raise the limit (max_bytes,"
            " --max-gib)."
        )


def _archive_of(path: Path) -> Path | None:
    """The file that a path leads into, ``None`` if it leads only through directories."""
    try:
        return next((parent for parent in path.parents if parent.is_file()), None)
    except (OSError, ValueError):
        return None


def _without_padding(packed: bytes, file: Forward) -> bytes:
    """Skip zero bytes, which some programs use as padding; ``b""`` at the end of the file."""
    packed = packed.lstrip(b"\0")
    while not packed:
        packed = file.read(_READ_BYTES)
        if not packed:
            break
        packed = packed.lstrip(b"\0")
    return packed


class EventPieces:
    """Cut the text of a trace between events.

    Attributes:
        rest: after :meth:`pieces`, the text without the yielded events, as valid as the whole.
    """

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self.rest = b""

    def pieces(self) -> Iterator[bytes]:
        """Yield JSON lists of whole events, except the last events, which stay in ``rest``.

        Raises:
            NotCutError: when the events don't start soon, or one of them doesn't end soon.
        """
        head = b""
        left: list[bytes] = []  # text after the last yielded event
        num_left = num_searched = 0
        in_events = False
        for block in self._source.blocks():
            num_left += len(block)
            if not in_events:
                left.append(block)
                if num_left < min(2 * num_searched, MAX_AROUND_BYTES):
                    continue
                num_searched = num_left
                text = b"".join(left)
                begin = events_begin(text)
                if begin is None or not _is_top_level(text[:begin]):
                    if num_left > MAX_AROUND_BYTES:
                        raise NotCutError
                    continue
                in_events = True
                head, block, left = text[:begin], text[begin:], []  # noqa: PLW2901
            cut = _last_boundary(block)
            if cut is None:
                left.append(block)
                if num_left > MAX_EVENT_BYTES:
                    raise NotCutError
                continue
            end, next_begin = cut
            yield b"".join((b"[", *left, memoryview(block)[:end], b"]"))
            left = [block[next_begin:]]
            num_left = len(left[0])
        self.rest = b"".join((head, *left))
        if len(self.rest) > MAX_AROUND_BYTES:
            raise NotCutError


def events_begin(text: bytes | bytearray) -> int | None:
    """Where the event list starts, after its bracket; ``None`` if it isn't in the text."""
    if is_list(text):
        return text.index(b"[") + 1
    found = _EVENTS_BEGIN.search(text)
    return None if found is None else found.end()


def is_list(text: bytes | bytearray) -> bool:
    first = _NOT_SPACE.search(text)
    return first is not None and first.group() == b"["


def _is_top_level(head: bytes) -> bool:
    """Whether the list starting after the text is the file's own, not one inside another entry."""
    if is_list(head):
        return True
    try:
        return bytes(OUTLINE.decode(head + b"]}").traceEvents) == b"[]"
    except NOT_JSON:
        return False


def event_spans(text: bytearray | memoryview, begin: int) -> Iterator[tuple[int, int]]:
    """Cut the text wherever an event may end, from the first event; the last piece is the rest."""
    for boundary in _BOUNDARY.finditer(text, begin):
        yield begin, boundary.start() + 1
        begin = boundary.end()
    yield begin, len(text)


def list_items(text: memoryview) -> Iterator[msgspec.Raw | memoryview]:
    """Yield the text of each item of a valid JSON list, found some kilobytes at a time."""
    begin, end = 1, len(text) - 1
    size = _ITEM_BYTES
    while begin < end:
        is_last = begin + size >= end
        cut = (end - begin, end - begin) if is_last else _last_boundary(text[begin : begin + size])
        if cut is not None:
            try:
                yield from RAW_ITEMS.decode(b"".join((b"[", text[begin : begin + cut[0]], b"]")))
                begin += cut[1]
                size = _ITEM_BYTES
                continue
            except NOT_JSON:
                if is_last:  # an item is nested too deeply
                    yield from (text[start:stop] for start, stop in event_spans(text[:end], begin))
                    return
        size *= 2  # the only place to cut is inside an event


def _last_boundary(text: bytes | memoryview) -> tuple[int, int] | None:
    """Where the last whole event ends and the next starts; ``None`` without two events."""
    for boundaries in (_BOUNDARY, _WEAK_BOUNDARY):
        for begin in (*(max(0, len(text) - near) for near in _NEAR_END), 0):
            last = None
            for boundary in boundaries.finditer(text, begin):
                last = boundary
            if last is not None:
                return last.start() + 1, last.end()
    return None
