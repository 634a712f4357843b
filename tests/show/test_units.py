"""Numbers as text: cells, durations, amounts and axis labels."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.errors import printable
from lightning_modelprof.units import (
    DASH,
    NS_PER,
    Unit,
    choose_byte_unit,
    choose_time_unit,
    digits,
    format_amount,
    format_cell,
    format_duration,
    format_tick,
    heading,
    milliseconds,
    percent,
    rate_with_error,
    signed,
    size,
    three_digits,
)

TIME_UNITS = ("s", "ms", "us", "ns")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (138_990_000, Unit.DURATION_NS, "138.99"),
        (12_635_454.5, Unit.DURATION_NS, "12.64"),
        (1_530_000, Unit.DURATION_NS, "1.53"),
        (92_700, Unit.DURATION_NS, "0.0927"),
        (1, Unit.DURATION_NS, "0.00000100"),
        (0, Unit.DURATION_NS, "0"),
        (-0.0, Unit.DURATION_NS, "0"),
        (-5_000_000, Unit.DURATION_NS, "-5.00"),
        (1, Unit.RATIO, "100.00"),
        (0.1214, Unit.RATIO, "12.14"),
        (0.00042, Unit.RATIO, "0.04"),
        (0.0000042, Unit.RATIO, "0.0004"),
        (1.7246, Unit.RATIO, "172.46"),
        (78.125, Unit.RATE, "78.12"),
        (0.0123456, Unit.RATE, "0.0123"),
        (1_234_567.8, Unit.RATE, "1,234,568"),
        (11, Unit.COUNT, "11"),
        (86_567_656, Unit.COUNT, "86,567,656"),
        (2.5, Unit.COUNT, "2.50"),
        (3.0, Unit.COUNT, "3"),
        (8_181_000_000_000, Unit.COUNT, "8.18 T"),
        (6_120_000_000_000_000, Unit.COUNT, "6.12 P"),
        (10**400, Unit.COUNT, "1.00e+400"),
        (3_499_000_000, Unit.FLOPS, "3.50 GFLOP"),
        (12_000_000_000_000.0, Unit.FLOPS, "12.0 TFLOP"),
        (999_999_999, Unit.FLOPS, "1000 MFLOP"),
        (5 * 10**20, Unit.FLOPS, "500 EFLOP"),
        (4_096, Unit.FLOPS, "4.10 kFLOP"),
        (24, Unit.FLOPS, "24 FLOP"),
        (0, Unit.FLOPS, "0"),
        (512, Unit.BYTES, "512 B"),
        (1536, Unit.BYTES, "1.50 KiB"),
        (3 * 2**30, Unit.BYTES, "3.00 GiB"),
        (1500 * 2**50, Unit.BYTES, "1500.00 PiB"),
        (12_345_678_901, Unit.BYTES_PER_S, "12.3 GB/s"),
        (999_600_000_000.0, Unit.BYTES_PER_S, "1000 GB/s"),
        (3.35e12, Unit.BYTES_PER_S, "3.35 TB/s"),
        (1_000, Unit.BYTES_PER_S, "1.00 kB/s"),
        (12.5, Unit.BYTES_PER_S, "12.5 B/s"),
        (0, Unit.BYTES_PER_S, "0 B/s"),
        (2026, Unit.TEXT, "2026"),
        (0.5, Unit.TEXT, "0.500"),
        ("name", Unit.COUNT, "name"),
        (None, Unit.DURATION_NS, DASH),
        (float("nan"), Unit.RATIO, DASH),
        (float("-inf"), Unit.DURATION_NS, DASH),
    ],
)
def test_cells_are_formatted(value, unit, expected):
    assert format_cell(value, unit) == expected


@pytest.mark.parametrize(
    ("time_unit", "expected"), [("s", "0.0126"), ("ms", "12.64"), ("us", "12635.00"), ("ns", "12635000.00")]
)
def test_durations_use_table_unit(time_unit, expected):
    assert format_cell(12_635_000, Unit.DURATION_NS, time_unit=time_unit) == expected


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (None, DASH),
        (0, "0 ns"),
        (950, "950 ns"),
        (1_500, "1.50 µs"),
        (12_345_678, "12.3 ms"),
        (-12_345_678, "-12.3 ms"),
        (138_990_000, "139 ms"),
        (75_200_000_000, "75.2 s"),
        (738_000_000_000, "12.3 min"),
        (9_000_000_000_000, "2.50 h"),
        (float("nan"), DASH),
    ],
)
def test_prose_durations_are_formatted(ns, expected):
    assert format_duration(ns) == expected


numbers = st.one_of(st.none(), st.integers(), st.floats(), st.integers(-(10**500), 10**500))


@given(value=numbers, unit=st.sampled_from(Unit), time_unit=st.sampled_from(TIME_UNITS))
def test_every_number_has_text_and_only_zero_is_zero(value, unit, time_unit):
    text = format_cell(value, unit, time_unit=time_unit)
    assert text
    assert text.isprintable()
    is_number = value is not None and (isinstance(value, int) or math.isfinite(value))
    assert (text == DASH) == (not is_number)
    if is_number:
        assert (re.search(r"[1-9]", text) is None) == (value == 0)


@given(st.one_of(st.none(), st.integers(), st.floats()))
def test_every_duration_has_text(ns):
    assert format_duration(ns)


@given(st.integers(1, 10**15), st.sampled_from(TIME_UNITS))
def test_printed_durations_are_correct_to_last_digit(ns, time_unit):
    text = format_cell(ns, Unit.DURATION_NS, time_unit=time_unit)
    raw = ns / {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1}[time_unit]
    assert float(text) == pytest.approx(raw, abs=0.005, rel=1e-9) or float(text) == pytest.approx(
        raw, rel=0.005
    )


@given(st.text())
def test_printable_text_stays_on_one_line(text):
    line = printable(text)
    assert len(line.splitlines()) <= 1
    assert line.isprintable()
    line.encode("utf-8")


def test_escape_sequences_do_not_reach_terminal():
    assert printable("\x1b[31mred\n") == "\\x1b[31mred\\n"
    assert printable("数据 ok") == "数据 ok"
    assert printable("no\u00a0break") == "no break"


def test_headings_name_unit_once():
    assert heading("Ratio", Unit.RATIO) == "Ratio (%)"
    assert heading("Ratio(%)", Unit.RATIO) == "Ratio(%)"
    assert heading("reader_cost", Unit.DURATION_NS, time_unit="ms") == "reader_cost (ms)"
    assert heading("Total", Unit.DURATION_NS) == "Total"


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        ([], "ms"),
        ([0], "ms"),
        ([float("nan"), 5], "us"),
        ([999_999], "us"),
        ([1_000_000, 5], "ms"),
        ([999 * 10**9], "ms"),
        ([5, 1_000 * 10**9], "s"),
    ],
)
def test_time_unit_fits_largest_duration(durations, expected):
    assert choose_time_unit(durations) == expected


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (12_300_000, Unit.DURATION_NS, "12.3 ms"),
        (0.4022, Unit.RATIO, "40%"),
        (None, Unit.RATIO, DASH),
        ("a\nb", Unit.DURATION_NS, r"a\nb"),
        (2**31, Unit.BYTES, "2.00 GiB"),
        (1234, Unit.COUNT, "1,234"),
    ],
)
def test_amounts_include_unit(value, unit, expected):
    assert format_amount(value, unit) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), ("B", 1)),
        ((0,), ("B", 1)),
        ((1023, float("nan")), ("B", 1)),
        ((1024, 5), ("KiB", 1024)),
        ((-(2**31),), ("GiB", 2**30)),
        ((1e30,), ("PiB", 2**50)),
        ((float("inf"), 2**20), ("MiB", 2**20)),
    ],
)
def test_byte_unit_fits_largest_value(values, expected):
    assert choose_byte_unit(values) == expected


@pytest.mark.parametrize(
    ("value", "step", "is_place", "expected"),
    [
        (0.5, 0.5, False, "0.5"),
        (1, 0.5, False, "1.0"),
        (0, 0.5, False, "0"),
        (0.30000000000000004, 0.1, False, "0.3"),
        (1500, 500, False, "1,500"),
        (1500, 500, True, "1500"),
        (0.0005, 0.0005, False, "0.0005"),
        (2e-9, 1e-9, False, format_cell(2e-9, Unit.COUNT)),
        (3e15, 1e15, False, "3.00 P"),
    ],
)
def test_axis_labels_have_same_decimals(value, step, is_place, expected):
    assert format_tick(value, step, is_place=is_place) == expected


VECTORS = Path(__file__).parents[1] / "data" / "units.json"
"""Kind, value and text."""

WRITERS = {
    "duration": format_duration,
    "bytes": lambda value: format_amount(value, Unit.BYTES),
    "count": lambda value: format_amount(value, Unit.COUNT),
    "ratio": lambda value: format_amount(value, Unit.RATIO),
    "rate": lambda value: format_amount(value, Unit.RATE),
    "tick": lambda value: format_tick(*value),
    "flops": lambda value: format_amount(value, Unit.FLOPS),
    "bandwidth": lambda value: format_amount(value, Unit.BYTES_PER_S),
    "cell ms": lambda value: format_cell(value, Unit.DURATION_NS),
    "milliseconds": milliseconds,
    "percent": percent,
    "size": size,
    "digits": digits,
    "three digits": three_digits,
}
"""Kind → formatting function."""


def vectors():
    return json.loads(VECTORS.read_text(encoding="utf-8"))


def test_python_matches_vectors():
    asked = vectors()
    assert [{**one, "text": WRITERS[one["kind"]](one["value"])} for one in asked] == asked
    assert {one["kind"] for one in asked} == set(WRITERS)


SCALARS = {kind: write for kind, write in WRITERS.items() if kind != "tick"}
SCALES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "%": Decimal("0.01")}
SCALES |= {
    **NS_PER,
    "µs": 10**3,
    "min": 60 * 10**9,
    "h": 3_600 * 10**9,
    "T": 10**12,
    "P": 10**15,
    "E": 10**18,
}
SCALES |= {
    f"{prefix}{unit}": 1_000**power
    for unit in ("FLOP", "B/s")
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))
}


def read(kind, text):
    """The number that a text stands for, in the raw unit."""
    number, _, unit = text.replace("%", " %").partition(" ")
    scale = SCALES[unit] if unit else 10**6 if kind == "cell ms" else 1
    return Decimal(number.replace(",", "")) * scale


sizes = st.one_of(
    st.integers(-(10**15), 10**15),
    st.floats(-1e15, 1e15, allow_subnormal=False),
    st.floats(-1, 1, allow_subnormal=False),
)


@pytest.mark.parametrize("kind", SCALARS)
@given(numbers=st.tuples(sizes, sizes))
def test_larger_numbers_are_never_written_smaller(kind, numbers):
    low, high = sorted(numbers)
    assert read(kind, SCALARS[kind](low)) <= read(kind, SCALARS[kind](high))


@pytest.mark.parametrize("kind", SCALARS)
@given(number=sizes)
def test_text_is_correct_to_its_digits(kind, number):
    text = SCALARS[kind](number)
    shown = read(kind, text)
    figures, _, _ = text.replace("%", " %").partition(" ")
    _, _, decimals = figures.partition("e")[0].partition(".")
    # Half of the last shown digit, or half a percent where trailing zeros are cut.
    unit = abs(shown / Decimal(figures.replace(",", ""))) if shown else Decimal(0)
    last = unit * Decimal(10) ** -len(decimals)
    off = abs(shown - Decimal(number))
    assert off <= max(last / 2, abs(Decimal(number)) / 200) * (1 + Decimal(10) ** -20)
    assert figures != "-0"
    assert len(text) <= 24


@given(step=st.sampled_from([1, 2, 2.5, 5]), power=st.integers(-6, 9), place=st.integers(-20, 20))
def test_neighbouring_axis_labels_differ(step, power, place):
    step *= 10.0**power
    one, next_one = (format_tick(number * step, step) for number in (place, place + 1))
    assert read("tick", one) < read("tick", next_one)
    assert re.fullmatch(r"-?[\d,]+(\.\d+)?", one)
    assert one == "0" if place == 0 else one.strip("-0.")


@pytest.mark.parametrize("kind", SCALARS)
def test_non_numbers_are_dashes(kind):
    expected = "–" if kind == "percent" else DASH
    assert {SCALARS[kind](value) for value in (None, math.nan, math.inf, -math.inf)} == {expected}


def test_differences_have_sign():
    assert [signed(percent(share)) for share in (0.021, -0.021, 0.0, -0.0)] == [
        "+2.1%",
        "-2.1%",
        "0%",
        "0%",
    ]
    assert signed(digits(None)) == DASH


@pytest.mark.parametrize(
    ("rate", "error", "text"),
    [
        (19.74, 0.93, "19.7 ± 0.9"),
        (24.58, 0.28, "24.6 ± 0.3"),
        (24.58, 0.02, "24.6 ± 0.02"),
        (92.0, 11.2, "92 ± 11"),
        (120.3, 17.1, "120 ± 17"),
        (4938.6, 0.5, "4,939 ± 0.5"),
        (1.443, None, "1.44"),
    ],
)
def test_rate_has_as_many_decimals_as_its_error(rate, error, text):
    assert rate_with_error(rate, error) == text
