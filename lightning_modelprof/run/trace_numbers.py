"""Numbers of a trace file as columns; times become integer nanoseconds without loss.

Stamps are microseconds with up to three decimals. A double keeps all their digits while they are small (they
count from ``baseTimeNanoseconds`` since torch 2.4) and while they are whole; others are read digit by digit.
"""

from __future__ import annotations

import re
from array import array
from decimal import Context, Decimal, localcontext
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.trace.model import NOT_RECORDED

_EXACT_IN_DOUBLE_US: Final = 2.0**43
"""Below this (101 days) doubles lie less than a nanosecond apart, so none of the written digits is lost."""

_MAX_STAMP_US: Final = 4e15
_MAX_DURATION_US: Final = 1e11
"""Stamps to the year 2096 and durations of 27 hours, longer than any window of torch.profiler.

Differences and ends stay inside int64 nanoseconds, and so do sums of 90,000 events that last as long as they
may."""

_MAX_INT: Final = 2**63
_FRACTION: Final = re.compile(rb'"ts"\s*:\s*-?\d+[.eE]')
_LONG_FRACTION: Final = re.compile(rb'"ts"\s*:\s*\d{14,}\.')
_NUMBER: Final = re.compile(rb"-?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?")
_SNIFFED_BYTES: Final = 4096
_MAX_REGULAR_DIGITS: Final = 16
"""Before the point: nanoseconds stay inside uint64, and those beyond int64 come out negative."""


def begins_with_long_stamps(text: bytes) -> bool:
    """Whether the first stamps in the text would lose digits in a double."""
    return _LONG_FRACTION.search(text, 0, _SNIFFED_BYTES) is not None


def loses_digits(stamps_us: list[float | None], text: bytes) -> bool:
    """Whether any of the stamps decoded from the text has lost digits; whole microseconds lose none."""
    is_large = bool(np.any(np.abs(np.array(stamps_us, np.float64)) >= _EXACT_IN_DOUBLE_US))
    return is_large and _FRACTION.search(text) is not None


def begins_ns(stamps_us: list[Any], *, are_digits: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Nanoseconds of stamps, and which of them are usable; the others are 0.

    Args:
        stamps_us: microseconds; ``None`` where there is none.
        are_digits: whether they are the digits in the file rather than doubles.
    """
    if are_digits:
        return _from_digits([bytes(stamp) for stamp in stamps_us])
    stamps = np.array(stamps_us, np.float64)  # a missing one becomes NaN
    usable = np.abs(stamps) <= _MAX_STAMP_US
    return _to_ns(np.where(usable, stamps, 0.0)), usable


def _from_digits(texts: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Nanoseconds of decimal numbers of microseconds, and which of the texts are such numbers.

    Nearly always all have as many digits before the point as the first and at most three behind it; then all
    are read at once, digit by digit. Else each goes through a decimal.
    """
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    num_whole = len(texts[0].partition(b".")[0])
    if max(map(len, texts)) > _MAX_REGULAR_DIGITS + 4:  # one long text would make a wide array
        return _from_decimals(texts)
    letters = np.array(texts, np.bytes_)
    width = letters.dtype.itemsize
    # A text that is shorter than the longest ends in zero bytes.
    grid = letters.view(np.uint8).reshape(len(texts), width)
    digits = grid.astype(np.int64) - ord("0")
    is_digit = (digits >= 0) & (digits <= 9)
    fraction = slice(num_whole + 1, num_whole + 4)
    is_regular = (
        num_whole < width <= num_whole + 4
        and num_whole <= _MAX_REGULAR_DIGITS
        and bool(is_digit[:, :num_whole].all())
        and bool((grid[:, num_whole] == ord(".")).all())
        and bool((is_digit[:, fraction] | (grid[:, fraction] == 0)).all())
    )
    if not is_regular:
        return _from_decimals(texts)
    powers = 10 ** np.arange(num_whole + 2, 2, -1)
    ns = digits[:, :num_whole] @ powers
    for place, power in zip(range(num_whole + 1, width), (100, 10, 1), strict=False):
        ns += np.where(is_digit[:, place], digits[:, place], 0) * power
    return ns, (ns >= 0) & (ns <= _MAX_STAMP_US * 1000)


def _from_decimals(texts: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    limit = Decimal(_MAX_STAMP_US)
    begins: list[int | None] = []
    with localcontext(Context(prec=60)):  # the caller's context could round
        for text in texts:
            stamp = Decimal(text.decode()) if _NUMBER.fullmatch(text) else None
            begins.append(round(stamp * 1000) if stamp is not None and abs(stamp) <= limit else None)
    return (
        np.array([ns or 0 for ns in begins], np.int64),
        np.array([ns is not None for ns in begins], np.bool_),
    )


def durations_ns(durations_us: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Nanoseconds of durations, and which of them are usable; the others are 0."""
    durations = np.array(durations_us, np.float64)
    usable = (durations >= 0) & (durations <= _MAX_DURATION_US)
    return _to_ns(np.where(usable, durations, 0.0)), usable


def integers(values: list[Any], missing: int = NOT_RECORDED) -> NDArray[np.int64]:
    """Whole numbers as a column; what is none becomes ``missing``."""
    try:
        return np.asarray(array("q", values), np.int64)  # NumPy itself would make 7 of 7.9 and of "7"
    except (TypeError, OverflowError):  # null, a text, a fraction, a list, more than 64 bits
        return np.array(
            [
                value if isinstance(value, int) and -_MAX_INT <= value < _MAX_INT else missing
                for value in values
            ],
            np.int64,
        )


def positive_floats(values: list[Any]) -> NDArray[np.float64]:
    """Numbers as a column; what is none, is negative or beyond 64 bits becomes NaN."""
    try:
        column = np.asarray(array("d", values), np.float64)
    except (TypeError, OverflowError):
        column = np.array(
            [
                value if isinstance(value, int | float) and abs(value) < _MAX_INT else np.nan
                for value in values
            ],
            np.float64,
        )
    return np.where((column >= 0) & (column < _MAX_INT), column, np.nan)


def _to_ns(microseconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round to whole nanoseconds, splitting off whole microseconds so that nothing is lost on the way."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
