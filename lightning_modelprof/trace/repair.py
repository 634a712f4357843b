"""Repairs defects of a trace file that can mean only one thing, such as a backslash that nobody escaped."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

_NO_VALUE: Final = (
    # C's libraries; Microsoft's and glibc's may say in brackets what kind of NaN it is.
    rb"[-+]?\b(?:nan(?:\(\w{0,40}\)|\b)|(?:inf|infinity)\b)"
    # Microsoft's before 2015, cut to as many digits as a number would have had.
    rb"|[-+]?(?<![\w.])1\.#(?:inf|ind|qnan|snan|[ijqrs])[0-9a-z]{0,40}|N/A"
)


_STRING_OR_WORD: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|' + _NO_VALUE, re.IGNORECASE | re.DOTALL)


_ESCAPES_NOTHING: Final = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
"""After pairs of backslashes have been taken out."""


_BACKSLASH: Final = re.compile(rb'\\(["\\/])?')


_QUOTED_TIME: Final = re.compile(
    rb'(?<!\\)("(?:ts|dur)"\s*:\s*)"\s*(?:(-?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?)|'
    + _NO_VALUE
    + rb')\s*"',
    re.IGNORECASE,
)


_MOST_REPAIRS: Final = 1_000_000
"""A file with more is no trace that somebody wrote a little wrong."""


_DECODED_BYTES: Final = 2**20


def repair(text: bytes | bytearray) -> tuple[bytes | bytearray, str]:
    r"""Make JSON of a text in which some writer did not follow its rules.

    A backslash that escapes nothing is a backslash, and so are the others in its string. ``nan``,
    ``1.#INF`` and ``N/A`` mean that there is no value. A time in quotes is a number. Strings that are not
    UTF-8 are GBK where all of the file's can be, else Latin-1.

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
    """Begin and end of what stands between two quotation marks and is not all ASCII.

    No letter of GBK has a quotation mark or a comma in it, but the second byte of one may be a backslash.
    """
    end = 0
    while found := _BEYOND_ASCII.search(text, end):
        begin = text.rfind(b'"', end, found.start()) + 1 or end
        end = text.find(b'"', found.end())
        if end < 0:  # the file is cut off in the midst of it
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
    """Whether all are GBK, and most letters are common ones.

    Latin letters in pairs are letters of GBK too, but seldom common ones.
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
    """Whether a string of a file in GBK is GBK, though it happens to be UTF-8 as well."""
    is_chinese = any(letter >= _FIRST_OF_THREE_BYTES for letter in string.decode())
    return not is_chinese and _decoded(string, "gb18030") is not None and _are_gbk(Counter([string]))


_BEYOND_ASCII: Final = re.compile(rb"[\x80-\xff]+")


_GBK_LETTER: Final = re.compile(rb"[\x81-\xfe](?:[0-9][\x81-\xfe][0-9]|[^0-9])", re.DOTALL)


_COMMON_GBK: Final = re.compile(rb"[\xa1-\xa3\xb0-\xd7][\xa1-\xfe]")
"""Punctuation and the 3,755 most common characters, which GB 2312 puts first."""


_FIRST_OF_THREE_BYTES: Final = "\u0800"
"""In UTF-8; what takes fewer bytes is Latin, Greek, Cyrillic or the like."""


_ESCAPED: Final = "lightning_modelprof.escaped"


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""The bytes that no letter of Windows-1252 has, as ``\xe9``."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"\\\\x{byte:02x}" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_ESCAPED, _escape)
