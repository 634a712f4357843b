"""Read Chrome trace JSON, as torch.profiler writes it, into the columns of a :class:`Trace`.

Only used fields are decoded, and time stamps become integer nanoseconds without loss. They're written as
microseconds with up to three decimals, and not every such number fits a double: since torch 2.4 they count
from ``baseTimeNanoseconds`` and are small; before that they were microseconds since 1970. Small ones are
decoded as doubles, which is fast; large ones are decoded again as decimals.

A file is decoded in pieces, so memory holds the columns and one piece's objects. If any of it is invalid,
it's read again with care (``damaged.py``): event by event, keeping readable events and counting the others.
"""

from __future__ import annotations

import codecs
import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.errors import TraceError
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.trace.columns import TraceBuilder
from lightning_modelprof.trace.damaged import CUT_OFF, read_with_care
from lightning_modelprof.trace.json import ANYTHING, NOT_JSON, RAW_ENTRIES
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.text import (
    EventPieces,
    NotCutError,
    Progress,
    Text,
    TextFile,
    TextSource,
    TinyEventsError,
    is_list,
)


def read_trace(path: str | Path, max_bytes: int = MAX_TRACE_BYTES, progress: Progress | None = None) -> Trace:
    """Read a Chrome trace file, plain or gzip-compressed (detected by content, not by name).

    Args:
        max_bytes: maximum uncompressed JSON to read; a few kilobytes of gzip can hold gigabytes.
        progress: called now and then with the number of bytes read and the file's size.

    Raises:
        TraceError: when the file can't be opened, is empty or too large, isn't a trace, or is too damaged for
            reliable figures. A cut-off file is read as far as possible, with a note in ``Trace.damage``.
    """
    text = TextFile(Path(path), max_bytes, progress)
    try:
        return _read(text, str(path))
    finally:
        text.close()


def parse_trace(raw: bytes, source: str) -> Trace:
    """Parse the JSON text of a trace.

    Args:
        raw: the uncompressed JSON: an object with ``traceEvents``, or the list of events itself.

    Raises:
        TraceError: as :func:`read_trace`.
    """
    return _read(Text(raw), source)


def _read(text: TextSource, source: str) -> Trace:
    try:
        return _read_events(text, source)
    except TinyEventsError as error:
        raise TraceError(f"{source}: {error}") from None


def _read_events(text: TextSource, source: str) -> Trace:
    with _collector_paused():
        builder = TraceBuilder()
        damage: tuple[str, ...] = ()
        try:
            metadata = _read_pieces(text, builder)
            is_whole = not text.damage
        except (*NOT_JSON, NotCutError):
            is_whole = False
        if not is_whole:
            builder, metadata, damage = _read_damaged(text, source)
        if builder.num_events and not builder.has_kinds:
            raise TraceError(
                f"{source}: expected Chrome trace events, got {builder.num_events} objects without the key"
                " ph. Check that torch.profiler wrote it."
            )
        return builder.build(
            source=source,
            metadata=metadata,
            base_ns=_base_time_ns(metadata, source),
            damage=(*damage, *builder.remarks()),
            is_cut=any(sentence.startswith(CUT_OFF) for sentence in damage),
        )


def _read_damaged(text: TextSource, source: str) -> tuple[TraceBuilder, dict[str, Any], tuple[str, ...]]:
    """Read event by event, then again from a repaired text if anything was unreadable."""
    builder, problem = TraceBuilder(), None
    try:
        metadata, damage, num_unreadable = read_with_care(text, builder, source)
        if not num_unreadable:
            return builder, metadata, damage
    except TraceError as error:
        problem = error
    whole = bytearray()
    for block in text.blocks():
        whole += block
    fixed, repairs = repair(whole)
    if repairs:
        builder = TraceBuilder()
        metadata, damage, _ = read_with_care(Text(fixed, text.damage), builder, source)
        return builder, metadata, (repairs, *damage)
    if problem is not None:
        raise problem
    return builder, metadata, damage


def _read_pieces(text: TextSource, builder: TraceBuilder) -> dict[str, Any]:
    """Decode a valid file; return its entries other than its events."""
    cutter = EventPieces(text)
    for piece in cutter.pieces():
        builder.add(piece)
    rest = cutter.rest
    if is_list(rest):
        builder.add(rest)
        return {}
    entries = RAW_ENTRIES.decode(rest)
    builder.add(bytes(entries.pop("traceEvents", b"null")))
    return {key: ANYTHING.decode(value) for key, value in entries.items()}


def _base_time_ns(metadata: dict[str, Any], source: str) -> int:
    """Offset that torch subtracted from all time stamps, 0 before torch 2.4."""
    base_ns = metadata.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int):
        raise TraceError(
            f"{source}: expected an integer in baseTimeNanoseconds, got {base_ns!r}. Record the trace again."
        )
    return base_ns


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would walk all decoded events again for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_NO_VALUE: Final = (
    # C libraries; Microsoft's and glibc's may give the kind of NaN in brackets.
    rb"[-+]?\b(?:nan(?:\(\w{0,40}\)|\b)|(?:inf|infinity)\b)"
    # Microsoft's before 2015, cut to a number's digits.
    rb"|[-+]?(?<![\w.])1\.#(?:inf|ind|qnan|snan|[ijqrs])[0-9a-z]{0,40}|N/A"
)


_STRING_OR_WORD: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|' + _NO_VALUE, re.IGNORECASE | re.DOTALL)


_ESCAPES_NOTHING: Final = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
"""In text without pairs of backslashes."""


_BACKSLASH: Final = re.compile(rb'\\(["\\/])?')


_QUOTED_TIME: Final = re.compile(
    rb'(?<!\\)("(?:ts|dur)"\s*:\s*)"\s*(?:(-?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?)|'
    + _NO_VALUE
    + rb')\s*"',
    re.IGNORECASE,
)


_MOST_REPAIRS: Final = 1_000_000
"""A file that needs more isn't a slightly wrong trace."""


_DECODED_BYTES: Final = 2**20


def repair(text: bytes | bytearray) -> tuple[bytes | bytearray, str]:
    """Repair JSON that breaks common rules.

    A backslash that escapes nothing is a literal backslash, and so are the others in its string. ``nan``,
    ``1.#INF`` and ``N/A`` mean a missing value. A quoted time is a number. Strings that aren't UTF-8 are GBK
    if all of the file's can be, else Latin-1.

    Returns:
        The repaired text and one sentence that counts the repairs; ``""`` if there were none.
    """
    counts: Counter[str] = Counter()
    fixed = _replace(text, _repairs_of_other_encodings(text, counts))
    fixed = _replace(fixed, _repairs_of_strings_and_words(fixed, counts))
    fixed = _replace(fixed, _repairs_of_times(fixed, counts))
    if not counts or counts.total() > _MOST_REPAIRS:
        return text, ""
    repairs = ", ".join(f"{number:,} {what}" for what, number in counts.items())
    return fixed, f"Repaired while reading: {repairs}."


_Repair = tuple[int, int, bytes]
"""Start, end and replacement."""


def _repairs_of_strings_and_words(text: bytes | bytearray, counts: Counter[str]) -> Iterator[_Repair]:
    for match in _STRING_OR_WORD.finditer(text):
        found = match[0]
        if not found.startswith(b'"'):
            counts["values that aren't numbers"] += 1
            yield match.start(), match.end(), b"null"
        elif b"\\" in found and _ESCAPES_NOTHING.search(found.replace(b"\\\\", b"")):
            counts["strings with backslashes"] += 1
            inside = _BACKSLASH.sub(lambda one: one[0] if one[1] else b"\\\\", found[1:-1])
            yield match.start(), match.end(), b'"' + inside + b'"'


def _repairs_of_times(text: bytes | bytearray, counts: Counter[str]) -> Iterator[_Repair]:
    for match in _QUOTED_TIME.finditer(text):
        counts["times in quotes"] += 1
        yield match.start(), match.end(), match[1] + (match[2] or b"null")


def _replace(text: bytes | bytearray, repairs: Iterator[_Repair]) -> bytes | bytearray:
    pieces, done = bytearray(), 0
    for number, (begin, end, new) in enumerate(repairs):
        if number > _MOST_REPAIRS:
            return text
        pieces += memoryview(text)[done:begin]
        pieces += new
        done = end
    if not done:
        return text
    pieces += memoryview(text)[done:]
    return pieces


def _repairs_of_other_encodings(text: bytes | bytearray, counts: Counter[str]) -> Iterator[_Repair]:
    foreign: Counter[bytes] = Counter()
    for begin, end in _strings_beyond_ascii(text):
        string = bytes(memoryview(text)[begin:end])
        if _decoded(string, "utf-8") is None:
            foreign[string] += 1
            if len(foreign) > _MOST_REPAIRS:
                return
    if not foreign:
        return
    is_gbk = _are_gbk(foreign)
    for begin, end in _strings_beyond_ascii(text):
        string = bytes(memoryview(text)[begin:end])
        if string in foreign or (is_gbk and _is_rather_gbk(string)):
            counts[f"strings read as {'GBK' if is_gbk else 'Latin-1'}"] += 1
            new = string.decode("gb18030") if is_gbk else string.decode("cp1252", _ESCAPED)
            yield begin, end, new.encode()


def _strings_beyond_ascii(text: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each text between two quotation marks that isn't all ASCII.

    A GBK character never contains a quotation mark or a comma, but its second byte may be a backslash.
    """
    end = 0
    while found := _BEYOND_ASCII.search(text, end):
        begin = text.rfind(b'"', end, found.start()) + 1 or end
        end = text.find(b'"', found.end())
        if end < 0:  # the file is cut off inside it
            return
        if end - begin > _DECODED_BYTES:
            end = text.find(b",", found.end() + _DECODED_BYTES, end) + 1 or end
        yield begin, end


def _decoded(string: bytes, encoding: str) -> str | None:
    try:
        return string.decode(encoding)
    except UnicodeDecodeError:
        return None


def _are_gbk(strings: Counter[bytes]) -> bool:
    """Whether all strings are GBK with mostly common characters.

    Pairs of accented Latin letters are valid GBK too, but rarely common characters.
    """
    num_letters = num_common = 0
    for string, number in strings.items():
        if _decoded(string, "gb18030") is None:
            return False
        for letter in _GBK_LETTER.findall(string):
            num_letters += number
            num_common += number * (_COMMON_GBK.fullmatch(letter) is not None)
    return num_common * 2 > num_letters


def _is_rather_gbk(string: bytes) -> bool:
    """Whether a string of a GBK file is GBK, although it's valid UTF-8 too."""
    is_chinese = any(letter >= _FIRST_OF_THREE_BYTES for letter in string.decode())
    return not is_chinese and _decoded(string, "gb18030") is not None and _are_gbk(Counter([string]))


_BEYOND_ASCII: Final = re.compile(rb"[\x80-\xff]+")


_GBK_LETTER: Final = re.compile(rb"[\x81-\xfe](?:[0-9][\x81-\xfe][0-9]|[^0-9])", re.DOTALL)


_COMMON_GBK: Final = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")
"""Punctuation and the 3,755 most common characters, which GB 2312 puts first."""


_FIRST_OF_THREE_BYTES: Final = "\u0800"
"""In UTF-8; letters of fewer bytes are Latin, Greek, Cyrillic and similar."""


_ESCAPED: Final = "lightning_modelprof.escaped"


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Keep bytes that aren't in Windows-1252, as ``\xe9``."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"\\\\x{byte:02x}" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_ESCAPED, _escape)
