"""Numbers as people read them: the only rounding and the only unit suffixes.

Values that weren't measured or aren't numbers are a dash, never a zero. Only an exact zero is ``0``, so
``0.00`` and ``-0`` are never printed. A number has one form in each place:

- table cell (:func:`format_cell`): at least two decimals and three digits, in the unit of its heading;
- next to a label (:func:`format_amount`, :func:`format_duration`): three digits, with the unit that fits;
- sentence (:func:`milliseconds`, :func:`percent`, :func:`size`, :func:`digits`): three digits without
  trailing zeros, durations in milliseconds so that a sentence's durations compare; a share has no decimals
  from 10% on, also next to a label;
- axis (:func:`format_tick`): as many decimals as the neighbours need.

In the dashboard, ``static/format.js`` writes what only the browser knows: ticks, hover and selections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from enum import Enum
from typing import Final, Literal

from lightning_modelprof.errors import printable

Cell = str | int | float | None
"""A raw value; ``None`` is *not measured* and prints as a dash, never as zero."""

TimeUnit = Literal["s", "ms", "us", "ns"]

DASH: Final = "–"
"""A value that wasn't measured or isn't a number."""


class Unit(Enum):
    """What a number means, which decides how it's written."""

    TEXT = "text"
    COUNT = "count"
    DURATION_NS = "ns"
    RATIO = "ratio"
    """A fraction of 1, shown as a percentage."""
    RATE = "rate"
    """Something per second; the row's or column's label says what."""
    FLOPS = "flops"
    """Floating-point operations, shown in powers of 1000: GFLOP."""
    FLOPS_PER_S = "flops_per_s"
    """Floating-point operations per second: GFLOP/s."""
    MACS = "macs"
    """Multiply-adds, each two floating-point operations: GMAC."""
    BYTES = "bytes"
    BYTES_PER_S = "bytes_per_s"
    """A bandwidth, shown in powers of 1000 as hardware is sold: GB/s."""
    BY_ROW = "by_row"
    """The unit is in ``Table.row_units``."""


UNIT_NAMES: Final[dict[TimeUnit, str]] = {"s": "s", "ms": "ms", "us": "µs", "ns": "ns"}
"""How each unit is written; files and options use its ASCII name."""

NS_PER: Final[dict[TimeUnit, int]] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

_DURATIONS: Final = (
    # Minutes and hours start at two, because "75.2 s" is easier to compare than "1.25 min".
    (7_200 * 10**9, 3_600 * 10**9, "h"),
    (120 * 10**9, 60 * 10**9, "min"),
    *((ns, ns, UNIT_NAMES[unit]) for unit, ns in NS_PER.items()),
)
"""Lower limit in ns, ns per unit, name."""

_SENTENCE_MS: Final = (1e3, 1e11)
"""Range in ns that sentences write in milliseconds: 0.001 ms to 100000 ms."""

_PREFIXES: Final = ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"))
_WHOLE_FROM: Final = Decimal("0.0995")
"""From this share on a percentage has no decimals: 9.9%, 10%."""

_LARGE_COUNTS: Final = _PREFIXES[:3]
"""From 10^12 on a count's digits are noise; below, every digit is printed."""

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_cell(value: Cell, unit: Unit, *, time_unit: TimeUnit = "ms") -> str:
    """Write one cell of a table.

    Args:
        value: the raw value; a duration in nanoseconds, a ratio as a fraction of 1.
        unit: what the number means. Durations are plain numbers in ``time_unit`` and ratios plain
            percentages, since their units are in the heading; bytes carry their suffix.
        time_unit: the unit of the table's durations.

    Returns:
        One line of text.
    """
    if isinstance(value, str):
        return printable(value)
    number = _number(value)
    if number is None:
        return DASH
    return _measured(number / NS_PER[time_unit]) if unit is Unit.DURATION_NS else _WRITERS[unit](number)


def format_duration(ns: float | None) -> str:
    """Write a duration with its unit: ``12.3 ms``."""
    number = _number(ns)
    if number is None:
        return DASH
    scale, suffix = next((scale, suffix) for at, scale, suffix in _DURATIONS if abs(number) >= at or at == 1)
    return f"{_measured(number / scale, decimals=0)} {suffix}"


def format_amount(value: Cell, unit: Unit) -> str:
    """Write a value with its unit, where no heading gives it: ``12.3 ms``, ``40%``."""
    if isinstance(value, str) or unit not in _AMOUNTS:
        return format_cell(value, unit)
    return _AMOUNTS[unit](value)


def heading(label: str, unit: Unit, *, time_unit: TimeUnit | None = None) -> str:
    """Add the unit of its numbers to a label, unless the label already has it.

    Args:
        label: of a column, or of a row in a table whose unit changes by row.
        time_unit: the unit of durations; ``None`` where another line of the table gives it.
    """
    if unit is Unit.RATIO and "%" not in label:
        return f"{label} (%)"
    return (
        f"{label} ({UNIT_NAMES[time_unit]})" if unit is Unit.DURATION_NS and time_unit is not None else label
    )


def choose_time_unit(durations_ns: Iterable[float]) -> TimeUnit:
    """Choose milliseconds, unless all of a table's durations are far below or the largest is far above."""
    largest = _largest(durations_ns)
    if largest >= 1_000 * 10**9:
        return "s"
    return "us" if 0 < largest < 10**6 else "ms"


def choose_byte_unit(values: Iterable[float]) -> tuple[str, int]:
    """Return the unit for the largest of several byte counts, and how many bytes it has."""
    return _byte_unit(_largest(values))


def duration_unit(largest_ns: float) -> tuple[int, str]:
    """Return the largest unit not above ``largest_ns``: its nanoseconds and name."""
    return next((ns, UNIT_NAMES[unit]) for unit, ns in NS_PER.items() if largest_ns >= ns or ns == 1)


def format_tick(value: float, step: float, *, is_place: bool = False) -> str:
    """Write an axis label with as many decimals as its neighbours: 0, 0.5, 1.0.

    Args:
        value: a multiple of ``step``.
        step: distance between labels: 1, 2, 2.5 or 5 times a power of ten.
        is_place: whether it's an index, such as a step number, which has no thousands separators.
    """
    least = -math.floor(math.log10(step) + 1e-9)  # the decimals of the step's first digit
    if not -12 <= least <= 6:
        return format_cell(value, Unit.TEXT if is_place else Unit.COUNT)
    if abs(value) <= step / 2:
        return "0"
    places = max(least, 0)
    places += abs(step * 10**places - round(step * 10**places)) > 1e-6  # 2.5 has one more
    return f"{value:.{places}f}" if is_place else f"{value:,.{places}f}"


def digits(value: float | Decimal | None, most: int = 3) -> str:
    """Write ``most`` significant digits without trailing zeros, for sentences."""
    number = _number(value)
    if not number:
        return DASH if number is None else "0"
    rounded = Decimal(f"{number:.{most - 1}e}").normalize()
    return f"{rounded:f}" if -7 <= rounded.adjusted() < 15 else f"{rounded:e}"


def milliseconds(ns: float | None) -> str:
    """Write milliseconds for sentences; outside 1 µs to 100 s, choose the unit."""
    if ns is None or (ns and not _SENTENCE_MS[0] <= abs(ns) < _SENTENCE_MS[1]):
        return format_duration(ns)
    return f"{digits(ns / 1e6)} ms"


def time_per_step(ns: float) -> str:
    """Write the time per step, or that it isn't measurable if it's 0."""
    return f"{milliseconds(ns)} per step" if ns else "no measurable time"


def percent(share: float | None) -> str:
    """Write a percentage without decimals from 10% on, with one below, or one digit if that rounds to 0."""
    number = _number(share)
    return DASH if number is None else f"{_measured(number.scaleb(2), int(abs(number) < _WHOLE_FROM), 1)}%"


def size(num_bytes: float | None) -> str:
    """Write three significant digits in powers of 1024, for sentences."""
    number = _number(num_bytes)
    if number is None:
        return DASH
    unit, scale = _byte_unit(abs(number))
    return f"{digits(number / scale)} {unit}"


def three_digits(value: float) -> str:
    """Write a number whose unit is elsewhere in the line: ``0.500``, ``19.7``, ``4,939``."""
    number = _number(value)
    return (
        DASH if number is None else _rate(number) if abs(number) >= 1_000 else _measured(number, decimals=0)
    )


def rate_with_error(rate: float, error: float | None) -> str:
    """Write three digits, with the error's decimals unless that hides it: ``19.7 ± 0.9``, ``92 ± 11``."""
    text = three_digits(rate)
    if error is None:
        return text
    spread = digits(error, 2)
    of_rate, of_error = (len(one.partition(".")[2]) for one in (text, spread))
    if of_error < of_rate:
        text = f"{rate:,.{of_error}f}"
    elif round(error, of_rate):
        spread = f"{error:,.{of_rate}f}"
    return f"{text} ± {spread}"


def signed(text: str) -> str:
    """Add a plus sign to a written difference, unless it's zero, negative or a dash."""
    return text if text[0] in (DASH, "-") or text.split(maxsplit=1)[0].rstrip("%") == "0" else f"+{text}"


def _number(value: float | Decimal | None) -> Decimal | None:
    return (
        None if value is None or (isinstance(value, float) and not math.isfinite(value)) else Decimal(value)
    )


def _largest(values: Iterable[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0)


def _byte_unit(largest: float | Decimal) -> tuple[str, int]:
    power = next(power for power in (5, 4, 3, 2, 1, 0) if largest >= 1024**power or power == 0)
    return _BYTE_UNITS[power], 1024**power


def _measured(number: Decimal, decimals: int = 2, significant: int = 3) -> str:
    """Write at least ``decimals`` decimals and ``significant`` digits, so that nothing rounds to zero."""
    if number == 0:
        return "0"
    exponent = number.adjusted()
    if not -7 <= exponent < 15:
        return f"{number:.2e}"
    return f"{number:.{max(decimals, significant - 1 - exponent)}f}"


def _plain(number: Decimal) -> str:
    # A number without a unit may be a step or a year, which has no thousands separators.
    is_whole = number == number.to_integral_value() and number.adjusted() < 15
    return f"{number or 0:.0f}" if is_whole else _measured(number)


def _ratio(number: Decimal) -> str:
    # Two decimals as Paddle prints them; only a share too small for these gets more.
    return _measured(number.scaleb(2), significant=1)


def _rate(number: Decimal) -> str:
    # 4,939 samples/s: the decimals of a large rate are noise.
    return f"{number:,.0f}" if 3 <= number.adjusted() < 15 else _measured(number)


def _count(number: Decimal) -> str:
    exponent = number.adjusted()
    if exponent >= 21:
        return f"{number:.2e}"
    if scaled := _scaled(number, "", _LARGE_COUNTS, 2):
        return scaled
    # A mean count (2.5 calls per step) is a measured number; a whole one is exact.
    return f"{number or 0:,.0f}" if number == number.to_integral_value() else _measured(number)


def _bytes(number: Decimal) -> str:
    unit, scale = _byte_unit(abs(number))
    return f"{_count(number) if scale == 1 else _measured(number / scale)} {unit}"


def _operations(unit: str) -> Callable[[Decimal], str]:
    return lambda number: "0" if number == 0 else _scaled(number, unit) or f"{_count(number)} {unit}"


def _per_second(unit: str) -> Callable[[Decimal], str]:
    return lambda number: _scaled(number, unit) or f"{_measured(number, 0)} {unit}"


def _scaled(
    number: Decimal, unit: str, prefixes: Iterable[tuple[int, str]] = _PREFIXES, decimals: int = 0
) -> str | None:
    """Write with the largest prefix that the number reaches; ``None`` if it reaches none."""
    # Operation counts and copy times are accurate to three digits at most.
    for power, prefix in prefixes:
        if number.adjusted() >= power:
            return f"{_measured(number.scaleb(-power), decimals)} {prefix}{unit}"
    return None


_AMOUNTS: Final[dict[Unit, Callable[[float | None], str]]] = {
    Unit.DURATION_NS: format_duration,
    Unit.RATIO: percent,
}
"""Units that are written differently next to a label than in a cell."""

_WRITERS: Final[dict[Unit, Callable[[Decimal], str]]] = {
    Unit.TEXT: _plain,
    Unit.BY_ROW: _plain,
    Unit.COUNT: _count,
    Unit.RATIO: _ratio,
    Unit.RATE: _rate,
    Unit.FLOPS: _operations("FLOP"),
    Unit.FLOPS_PER_S: _per_second("FLOP/s"),
    Unit.MACS: _operations("MAC"),
    Unit.BYTES: _bytes,
    Unit.BYTES_PER_S: _per_second("B/s"),
}
