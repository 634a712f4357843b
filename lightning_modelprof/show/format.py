"""Numbers and names as a person reads them: the only rounding and the only unit suffixes.

Three rules hold everywhere. *Not measured* is a dash and never a zero; an exact zero is ``0`` and nothing
else is, so ``0.00`` is never printed; and a name stays on one line whatever it contains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Cell, TimeUnit, Unit

DASH = "–"
"""A value that was not measured."""

ELLIPSIS = "…"

_POWER_OF_NS: dict[TimeUnit, int] = {"s": 9, "ms": 6, "us": 3, "ns": 0}

_LARGE_COUNTS = ((18, "E"), (15, "P"), (12, "T"))
"""From a million millions on the digits of a count are noise; below, every digit is printed."""

_THOUSANDS = ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"))
_FLOP_UNITS = tuple((power, f"{prefix}FLOP") for power, prefix in _THOUSANDS)
_FLOP_RATE_UNITS = tuple((power, f"{prefix}FLOP/s") for power, prefix in _THOUSANDS)
_MAC_UNITS = tuple((power, f"{prefix}MAC") for power, prefix in _THOUSANDS)

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_BANDWIDTH_UNITS = ((15, "PB/s"), (12, "TB/s"), (9, "GB/s"), (6, "MB/s"), (3, "kB/s"))

_AFTER_ARGUMENTS = re.compile(r"(?: const)?(?: \[clone [^\]]*\])*$")
"""What a demangled C++ function may have behind its arguments."""

_NAMESPACE = re.compile(r"(?:\w+|\(anonymous namespace\))::")

_TEMPLATE = re.compile(r"\w<")

_PROSE_DURATIONS = (
    # Minutes and hours start at two, because "75.2 s" is easier to compare than "1.25 min".
    (7_200 * 10**9, 3_600 * 10**9, "h"),
    (120 * 10**9, 60 * 10**9, "min"),
    (10**9, 10**9, "s"),
    (10**6, 10**6, "ms"),
    (10**3, 10**3, "us"),
    (0, 1, "ns"),
)


def format_cell(value: Cell, unit: Unit, *, time_unit: TimeUnit = "ms") -> str:
    """Write one cell of a table.

    Args:
        value: the raw value; a duration in nanoseconds, a ratio as a fraction of 1.
        unit: what the number means. Durations are plain numbers in ``time_unit`` and ratios plain
            percentages, since their units stand in the heading; bytes carry their suffix.
        time_unit: the unit of the table's durations.

    Returns:
        One line of text: a dash for ``None``; ``nan`` or ``inf`` for what is not a number.
    """
    if value is None:
        return DASH
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    number = Decimal(value)
    if unit is Unit.DURATION_NS:
        return _measured(number.scaleb(-_POWER_OF_NS[time_unit]))
    return _WRITERS[unit](number)


def format_duration(ns: float | None) -> str:
    """Write a duration with its unit, for prose: ``12.3 ms``."""
    if ns is None:
        return DASH
    if isinstance(ns, float) and not math.isfinite(ns):
        return str(ns)
    scale, suffix = next((scale, suffix) for at, scale, suffix in _PROSE_DURATIONS if abs(ns) >= at)
    return f"{_measured(Decimal(ns) / scale, decimals=0)} {suffix}"


def format_amount(value: Cell, unit: Unit) -> str:
    """Write a value with its unit, where no heading says it: ``12.3 ms``, ``40.22 %``."""
    if value is None or isinstance(value, str):
        return format_cell(value, unit)
    if unit is Unit.DURATION_NS:
        return format_duration(value)
    return f"{format_cell(value, unit)} %" if unit is Unit.RATIO else format_cell(value, unit)


def heading(label: str, unit: Unit, *, time_unit: TimeUnit | None = None) -> str:
    """A label with the unit its numbers are written in, unless the label already says it.

    Args:
        label: the label of a column, or of a row of a table whose unit changes by row.
        unit: what the numbers are.
        time_unit: the unit of durations; ``None`` where another line of the table names it.
    """
    if unit is Unit.RATIO and "%" not in label:
        return f"{label} (%)"
    if unit is Unit.DURATION_NS and time_unit is not None:
        return f"{label} ({time_unit})"
    return label


def choose_time_unit(durations_ns: Iterable[float]) -> TimeUnit:
    """Milliseconds, unless all durations of a table are far below or the largest is far above."""
    largest = max((abs(ns) for ns in durations_ns if math.isfinite(ns)), default=0)
    if largest >= 1_000 * 10**9:
        return "s"
    return "us" if 0 < largest < 10**6 else "ms"


def format_tick(value: float, step: float, *, is_place: bool = False) -> str:
    """Write a label of an axis with as many decimals as its neighbours: 0, 0.5, 1.0.

    Args:
        value: a multiple of ``step``.
        step: the distance of two labels.
        is_place: whether it numbers something, as steps, so that it has no thousands separators.
    """
    decimals = -math.floor(math.log10(step) + 1e-9)
    if not -12 <= decimals <= 6:
        return format_cell(value, Unit.TEXT if is_place else Unit.COUNT)
    if abs(value) < step / 2:
        return "0"
    places = max(decimals, 0)
    return f"{value:.{places}f}" if is_place else f"{value:,.{places}f}"


def choose_byte_unit(values: Iterable[float]) -> tuple[str, int]:
    """The unit that the largest of some numbers of bytes is written in, and how many bytes it has."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0)
    power = 0
    while largest >= 1024 ** (power + 1) and power < len(_BYTE_UNITS) - 1:
        power += 1
    return _BYTE_UNITS[power], 1024**power


def shorten(text: str, limit: int) -> str:
    """Shorten a long name: cut out its middle, because kernels and modules differ at both ends.

    What C++ adds goes first, as far as is needed: namespaces, then the arguments of template arguments, then
    all of them: ``at::sum<at::Add<float>, 4>``, ``sum<Add<float>, 4>``, ``sum<Add<…>, 4>``, ``sum<…>``.
    """
    if len(text) > limit and (text.count("::") > 1 or _TEMPLATE.search(text)):
        text = _NAMESPACE.sub("", text).replace("> >", ">>")
        if len(text) > limit:
            text = _without_templates(text, 2)
        # Much too long still: the whole name of the function says more than one end of its arguments.
        if len(text) > 1.5 * limit and text.find("<") > limit // 2:
            text = _without_templates(text, 1)
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    head = limit - 1 - tail
    return text[:head] + ELLIPSIS + text[len(text) - tail :]


def without_signature(name: str) -> str:
    """The name of a C++ function without its return type ``void`` and its arguments; other names as they are.

    ``void at::native::sum<float>(int, float*)`` becomes ``at::native::sum<float>``: a kernel returns nothing,
    and its arguments repeat what the template says.
    """
    if not name.startswith("void ") and "::" not in name:
        return name
    text = name[: _AFTER_ARGUMENTS.search(name).start()]  # type: ignore[union-attr]  # it may match nothing
    start = _last_parenthesis(text)
    # Words before a parenthesis with a space between are a sentence, not a function: "Memcpy (a::b -> c)".
    if start <= 0 or not (text[start - 1].isalnum() or text[start - 1] in "_>)]}"):
        return name
    return text[:start].removeprefix("void ")


def _last_parenthesis(text: str) -> int:
    """Where the parenthesis opens that closes at the very end; -1 when there is none."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index if text[index] == "(" else -1
    return -1


def _without_templates(name: str, level: int) -> str:
    """Cut what is in ``level`` or more pairs of angle brackets; other uses of ``<`` and ``>`` cut nothing."""
    parts = []
    depth = 0
    for char in name:
        depth -= char == ">"
        if depth < 0:
            return name
        if depth < level:
            parts.append(char)
        depth += char == "<"
        if char == "<" and depth == level:
            parts.append(ELLIPSIS)
    return "".join(parts) if depth == 0 else name


def _measured(number: Decimal, *, significant: int = 3, decimals: int = 2) -> str:
    """At least ``decimals`` decimals and at least ``significant`` digits, so that nothing rounds to zero."""
    if number == 0:
        return "0"
    exponent = number.adjusted()
    if not -7 <= exponent < 15:
        return f"{number:.2e}"
    return f"{number:.{max(decimals, significant - 1 - exponent)}f}"


def _plain(number: Decimal) -> str:
    # A number without a unit may be a step or a year, which has no thousands separators.
    is_whole = number == number.to_integral_value() and number.adjusted() < 15
    return f"{number:.0f}" if is_whole else _measured(number)


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
    for power, suffix in _LARGE_COUNTS:
        if exponent >= power:
            return f"{_measured(number.scaleb(-power))} {suffix}"
    # A mean count (2.5 calls per step) is a measured number; a whole one is exact.
    return f"{number:,.0f}" if number == number.to_integral_value() else _measured(number)


def _bytes(number: Decimal) -> str:
    power = 0
    while abs(number) >= 1024 and power < len(_BYTE_UNITS) - 1:
        number /= 1024
        power += 1
    text = _count(number) if power == 0 else _measured(number)
    return f"{text} {_BYTE_UNITS[power]}"


def _flops(number: Decimal) -> str:
    return "0" if number == 0 else _scaled(number, _FLOP_UNITS) or f"{_count(number)} FLOP"


def _flops_per_s(number: Decimal) -> str:
    return _scaled(number, _FLOP_RATE_UNITS) or f"{_measured(number, decimals=0)} FLOP/s"


def _macs(number: Decimal) -> str:
    return "0" if number == 0 else _scaled(number, _MAC_UNITS) or f"{_count(number)} MAC"


def _bandwidth(number: Decimal) -> str:
    return _scaled(number, _BANDWIDTH_UNITS) or f"{_measured(number, decimals=0)} B/s"


def _scaled(number: Decimal, units: Iterable[tuple[int, str]]) -> str | None:
    """Three digits and the largest of the units that the number reaches; ``None`` when it reaches none."""
    # Operations are counted and copies timed no better than that.
    for power, suffix in units:
        if number.adjusted() >= power:
            return f"{_measured(number.scaleb(-power), decimals=0)} {suffix}"
    return None


_WRITERS: dict[Unit, Callable[[Decimal], str]] = {
    Unit.TEXT: _plain,
    Unit.BY_ROW: _plain,
    Unit.COUNT: _count,
    Unit.RATIO: _ratio,
    Unit.RATE: _rate,
    Unit.FLOPS: _flops,
    Unit.FLOPS_PER_S: _flops_per_s,
    Unit.MACS: _macs,
    Unit.BYTES: _bytes,
    Unit.BYTES_PER_S: _bandwidth,
}
