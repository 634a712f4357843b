"""The JSON text of a trace file, in pieces of whole events, so that memory does not grow with the file.

A trace is one JSON object with the list ``traceEvents`` and some entries before and after it, or that list
alone. JSON cannot be cut just anywhere, but between two events it can: the text ``}, {"`` with a name behind
it never stands inside of a string, because its quote would end the string. It may stand inside of an event,
and ``}, {`` alone may even stand inside of a string; a piece that was cut there is no valid JSON, so a wrong
cut is always noticed.
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
"""Text that is decoded at once: what it becomes still fits into the caches, which makes it faster."""

_READ_BYTES: Final = 2**16
"""Of a gzip file; what lies behind the end of one gzip file in another is copied for each."""

_CAREFUL_BYTES: Final = 2**12
"""Inflated at once from a damaged gzip file: what a step gave is lost when it fails."""

_MOST_PACKED: Final = 200
"""Times that the text of a gzip file may be larger than the file, once it is larger than ``_LOOSE_BYTES``.

Traces of torch.profiler shrink to a tenth or a thirtieth; what shrinks so much says nothing new."""

_LOOSE_BYTES: Final = 2**28
_ITEM_BYTES: Final = 2**18
_HEAD_BYTES: Final = 512
_ARCHIVES: Final = ("tar archive", "zip archive")
_MOST_LAYERS: Final = 4
"""Times that gzip may be inside gzip."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOUNDARY: Final = re.compile(rb'\}\s*,\s*(?=\{\s*"\w)')
_WEAK_BOUNDARY: Final = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between events of which none has a usual name in front, such as empty ones."""

_NOT_SPACE: Final = re.compile(rb"\S")
_EVENTS_BEGIN: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST_BEGINS: Final = re.compile(rb"^[^\[\{\w]*\[\s*\{")
_PHASE: Final = re.compile(rb'"ph"\s*:\s*"\w"')
_LOOK_BYTES: Final = 2**16
"""What stands before the events of a job with many process groups has tens of kilobytes."""

_NEAR_END: Final = (2**13, 2**16)

MAX_EVENT_BYTES: Final = 4 * 2**20
"""Text of one event that is decoded; those of torch.profiler have some kilobytes.

Decoded JSON may take thirty times the memory of its text, so what is decoded at once is limited."""

_LEAST_EVENT_BYTES: Final = 40
"""Mean text of the events of a file with many; those of torch.profiler have more than a hundred.

So the work that a file makes is bounded by the size of its text."""

_MANY_EVENTS: Final = 2**20

MAX_AROUND_BYTES: Final = 8 * 2**20
"""Text of all entries before and behind the events that is decoded."""

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that were read and the size of the file."""


class TinyEventsError(Exception):
    """The text has very many events that say next to nothing."""


def check_event_sizes(num_events: int, num_bytes: int) -> None:
    """Raises :class:`TinyEventsError` for very many events that say next to nothing."""
    if num_events > _MANY_EVENTS and num_bytes < num_events * _LEAST_EVENT_BYTES:
        raise TinyEventsError(
            f"expected Chrome trace events of at least {_LEAST_EVENT_BYTES} bytes on average, got"
            f" {num_events:,} events of {digits(num_bytes / num_events)} bytes. Check that torch.profiler"
            " wrote it."
        )


class NotCutError(Exception):
    """The text has nothing that looks like the events of a trace for so long that it is no usual trace."""


class TextSource(Protocol):
    """Text that can be read from its begin as often as needed."""

    damage: str
    """Why the text ends before its end; ``""`` while it does not."""

    def blocks(self) -> Iterator[bytes]: ...


class Text:
    """A text that is in memory already."""

    def __init__(self, text: bytes | bytearray, damage: str = "") -> None:
        self._text = text
        self.damage = damage

    def blocks(self) -> Iterator[bytes]:
        for begin in range(0, len(self._text), BLOCK_BYTES):
            yield bytes(self._text[begin : begin + BLOCK_BYTES])


class TextFile:
    """A file of text, plain or gzip-compressed (told apart by content, not by name).

    What can be read only once (a pipe) is copied to a temporary file first.

    Args:
        max_bytes: largest uncompressed text to read; a few kilobytes of gzip can hold gigabytes.

    Raises:
        TraceError: while reading, when the file cannot be read or is too large.
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
        """The uncompressed text in blocks of megabytes; in small ones once it is known to be damaged."""
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
        """The traces inside, if it is an archive; none for any other file, a pipe among them.

        Raises:
            TraceError: when it is an archive that can't be read.
        """
        try:
            if not self._path.is_file():  # whoever writes to a pipe would be left alone
                return []
            with open_regular(self._path) as file:
                stream = self._unpacked(file, BLOCK_BYTES)
                kind = format_of(stream.peek(_HEAD_BYTES))
                return trace_members(self._path, stream, file) if kind in _ARCHIVES else []
        except (OSError, ValueError):
            return []

    def looks_like_trace(self) -> bool:
        """Whether the first kilobytes are those of a Chrome trace; never of a pipe or what can't be read."""
        try:
            if not self._path.is_file():
                return False
            with open_regular(self._path) as file:
                head = self._unpacked(file, _CAREFUL_BYTES).peek(_LOOK_BYTES)
        except (OSError, ValueError):
            return False
        head = head.replace(b"\0", b"")  # text of two bytes a letter
        return bool(_EVENTS_BEGIN.search(head) or (_LIST_BEGINS.search(head) and _PHASE.search(head)))

    def _text_of(self, file: IO[bytes], block_bytes: int) -> Iterator[bytes]:
        """The text of the file, or of the member that is meant."""
        stream = self._unpacked(file, block_bytes)
        if self._member:
            try:
                blocks = member_blocks(self._path, self._member, stream, file, block_bytes)
                yield from self._checked(self._layers(Forward(blocks), block_bytes)).blocks()
            except BROKEN as error:
                self.damage = self.damage or f"the archive is cut off or damaged ({printable(str(error))})"
            return
        yield from self._checked(stream).blocks()

    def _unpacked(self, file: IO[bytes], block_bytes: int) -> Forward:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        return self._layers(Forward(self._read(file, size)), block_bytes)

    def _layers(self, stream: Forward, block_bytes: int) -> Forward:
        """Without the gzip around it, and the gzip around that."""
        for _ in range(_MOST_LAYERS):
            if stream.peek(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
                break
            stream = Forward(self._inflate(stream, block_bytes))
        return stream

    def _checked(self, stream: Forward) -> Forward:
        """The stream, if it isn't of a format that is known and can't be read here."""
        head = stream.peek(_HEAD_BYTES)
        kind = "gzip file nested in many others" if head.startswith(_GZIP_MAGIC) else format_of(head)
        if kind:
            raise TraceError(f"{self._path}: expected a Chrome trace in JSON, got a {kind}. Unpack it first.")
        return stream

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """The file, or its copy, as often as needed."""
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
            if num_bytes > self._max_bytes:  # compressed or not, its text is larger still
                raise self._too_large()
            self._copy.write(block)
        return self._copy

    def _read(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        while block := file.read(BLOCK_BYTES):
            self._tell(file.tell(), size)
            yield block

    def _inflate(self, file: Forward, block_bytes: int) -> Iterator[bytes]:
        """Inflate as far as possible: of a file that is cut off, all that came over."""
        inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        packed = b""
        num_bytes = 0
        try:
            while True:
                if inflater.eof:  # a file may consist of several gzip files, one behind the other
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
    """The file that a path leads into, ``None`` if it leads into folders alone."""
    try:
        return next((parent for parent in path.parents if parent.is_file()), None)
    except (OSError, ValueError):
        return None


def _without_padding(packed: bytes, file: Forward) -> bytes:
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

    Attributes:
        rest: after :meth:`pieces`, the text without the events that were handed out, as valid as the whole.
    """

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self.rest = b""

    def pieces(self) -> Iterator[bytes]:
        """JSON lists of whole events, but for the last events, which stay in ``rest``.

        Raises:
            NotCutError: when the events do not begin soon, or one of them does not end soon.
        """
        head = b""
        left: list[bytes] = []  # text behind the last event that was handed out
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
    """Where the list of events begins, behind its bracket; ``None`` where there is none yet."""
    if is_list(text):
        return text.index(b"[") + 1
    found = _EVENTS_BEGIN.search(text)
    return None if found is None else found.end()


def is_list(text: bytes | bytearray) -> bool:
    first = _NOT_SPACE.search(text)
    return first is not None and first.group() == b"["


def _is_top_level(head: bytes) -> bool:
    """Whether the list that begins behind the text is the file's own, not one inside of another entry."""
    if is_list(head):
        return True
    try:
        return bytes(OUTLINE.decode(head + b"]}").traceEvents) == b"[]"
    except NOT_JSON:
        return False


def event_spans(text: bytearray | memoryview, begin: int) -> Iterator[tuple[int, int]]:
    """Cut the text from the first event on wherever an event may end; the last piece is all that is left."""
    for boundary in _BOUNDARY.finditer(text, begin):
        yield begin, boundary.start() + 1
        begin = boundary.end()
    yield begin, len(text)


def list_items(text: memoryview) -> Iterator[msgspec.Raw | memoryview]:
    """The text of each item of a valid JSON list, found some kilobytes at once."""
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
                if is_last:  # one is nested too deeply
                    yield from (text[start:stop] for start, stop in event_spans(text[:end], begin))
                    return
        size *= 2  # the only place to cut is inside of an event


def _last_boundary(text: bytes | memoryview) -> tuple[int, int] | None:
    """Where the last whole event ends and where the next begins; ``None`` without two events."""
    for boundaries in (_BOUNDARY, _WEAK_BOUNDARY):
        for begin in (*(max(0, len(text) - near) for near in _NEAR_END), 0):
            last = None
            for boundary in boundaries.finditer(text, begin):
                last = boundary
            if last is not None:
                return last.start() + 1, last.end()
    return None
