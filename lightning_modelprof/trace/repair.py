"""Repairs defects of a trace file that can mean only one thing, such as a backslash that nobody escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

_STRING_OR_WORD: Final = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|N/A|[-+]?\b(?:nan|inf|infinity)\b', re.IGNORECASE | re.DOTALL
)


_ESCAPES_NOTHING: Final = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
"""After pairs of backslashes have been taken out."""


_BACKSLASH: Final = re.compile(rb'\\(["\\/])?')


_QUOTED_TIME: Final = re.compile(
    rb'(?<!\\)("(?:ts|dur)"\s*:\s*)"\s*(-?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?)\s*"'
)


_MOST_REPAIRS: Final = 1_000_000
"""A file with more is no trace that somebody wrote a little wrong."""


_DECODED_BYTES: Final = 2**20


def repair(text: bytes | bytearray) -> tuple[bytes | bytearray, str]:
    r"""Make JSON of a text in which some writer did not follow its rules.

    A backslash that escapes nothing is a backslash, and so are the others in its string. ``nan``,
    ``Infinity`` and ``N/A`` mean that there is no value. A time in quotes is a number. Bytes that are not
    UTF-8 are written as ``\xe9``, so that different names stay different.

    Args:
        text: of the whole file.

    Returns:
        The repaired text and one sentence that counts the repairs; ``""`` where nothing was repaired.
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
"""Where it begins and ends, and what is to stand there."""


def _repairs_of_strings_and_words(text: bytes | bytearray, counts: Counter[str]) -> Iterator[_Repair]:
    for match in _STRING_OR_WORD.finditer(text):
        found = match[0]
        if not found.startswith(b'"'):
            counts["values that are no number"] += 1
            yield match.start(), match.end(), b"null"
        elif b"\\" in found and _ESCAPES_NOTHING.search(found.replace(b"\\\\", b"")):
            counts["strings with backslashes"] += 1
            inside = _BACKSLASH.sub(lambda one: one[0] if one[1] else b"\\\\", found[1:-1])
            yield match.start(), match.end(), b'"' + inside + b'"'


def _repairs_of_times(text: bytes | bytearray, counts: Counter[str]) -> Iterator[_Repair]:
    for match in _QUOTED_TIME.finditer(text):
        counts["times in quotes"] += 1
        yield match.start(), match.end(), match[1] + match[2]


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
    begin = 0
    while begin < len(text):
        # A comma is no part of a letter, in whatever encoding.
        end = text.find(b",", begin + _DECODED_BYTES) + 1 or len(text)
        decoded = text[begin:end].decode(errors="surrogateescape")
        escaped, number = _FOREIGN.subn(lambda one: f"\\\\x{ord(one[0]) - 0xDC00:02x}", decoded)
        if number:
            counts["bytes that are not UTF-8"] += number
            yield begin, end, escaped.encode()
        begin = end


_FOREIGN: Final = re.compile("[\udc80-\udcff]")
