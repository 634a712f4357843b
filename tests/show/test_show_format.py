from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Unit
from lightning_modelprof.show.format import (
    DASH,
    choose_byte_unit,
    choose_time_unit,
    format_amount,
    format_cell,
    format_duration,
    format_tick,
    heading,
    shorten,
    without_signature,
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
        (float("nan"), Unit.RATIO, "nan"),
        (float("-inf"), Unit.DURATION_NS, "-inf"),
    ],
)
def test_cells(value, unit, expected):
    assert format_cell(value, unit) == expected


@pytest.mark.parametrize(
    ("time_unit", "expected"), [("s", "0.0126"), ("ms", "12.64"), ("us", "12635.00"), ("ns", "12635000.00")]
)
def test_durations_are_in_the_unit_of_the_table(time_unit, expected):
    assert format_cell(12_635_000, Unit.DURATION_NS, time_unit=time_unit) == expected


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (None, DASH),
        (0, "0 ns"),
        (950, "950 ns"),
        (1_500, "1.50 us"),
        (12_345_678, "12.3 ms"),
        (-12_345_678, "-12.3 ms"),
        (138_990_000, "139 ms"),
        (75_200_000_000, "75.2 s"),
        (738_000_000_000, "12.3 min"),
        (9_000_000_000_000, "2.50 h"),
        (float("nan"), "nan"),
    ],
)
def test_durations_in_prose(ns, expected):
    assert format_duration(ns) == expected


numbers = st.one_of(st.none(), st.integers(), st.floats(), st.integers(-(10**500), 10**500))


@given(value=numbers, unit=st.sampled_from(Unit), time_unit=st.sampled_from(TIME_UNITS))
def test_every_number_has_a_text_and_only_zero_is_zero(value, unit, time_unit):
    text = format_cell(value, unit, time_unit=time_unit)
    assert text
    assert text.isprintable()
    is_measured_number = value is not None and value == value
    if is_measured_number and abs(value) != float("inf"):
        looks_like_zero = re.search(r"[1-9]", text) is None
        assert looks_like_zero == (value == 0)
    assert (text == DASH) == (value is None)


@given(st.one_of(st.none(), st.integers(), st.floats()))
def test_every_duration_has_a_text(ns):
    assert format_duration(ns)


@given(st.integers(1, 10**15), st.sampled_from(TIME_UNITS))
def test_printed_durations_are_right_within_their_last_digit(ns, time_unit):
    text = format_cell(ns, Unit.DURATION_NS, time_unit=time_unit)
    raw = ns / {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1}[time_unit]
    assert float(text) == pytest.approx(raw, abs=0.005, rel=1e-9) or float(text) == pytest.approx(
        raw, rel=0.005
    )


@given(st.text())
def test_a_name_stays_on_one_line(text):
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert line.isprintable()
    line.encode("utf-8")


def test_escape_sequences_do_not_reach_the_terminal():
    assert one_line("\x1b[31mred\n") == "\\x1b[31mred\\n"
    assert one_line("数据 ok") == "数据 ok"
    assert one_line("no\u00a0break") == "no break"


@given(st.text(), st.integers(3, 100))
def test_shortened_names_keep_both_ends(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    is_cpp = "<" in text or "::" in text
    assert short == text or is_cpp or (short[0] == text[0] and short[-1] == text[-1])


@given(st.text("a<>:,…( )"), st.integers(3, 40))
def test_anything_like_a_template_fits_too(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short == text or len(text) > limit
    assert text.endswith(">") == short.endswith(">") or not text


KERNEL = "at::native::elementwise<4, at::native::Add<float>, at::detail::Array<char*, 3> >"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (80, KERNEL),
        (79, "elementwise<4, Add<float>, Array<char*, 3>>"),
        (43, "elementwise<4, Add<float>, Array<char*, 3>>"),
        (42, "elementwise<4, Add<…>, Array<…>>"),
        (31, "elementwise<4, …d<…>, Array<…>>"),
        (21, "elementwise<…>"),
        (13, "elemen…ise<…>"),
    ],
)
def test_long_kernels_lose_first_what_says_least(limit, expected):
    assert shorten(KERNEL, limit) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("at::native::(anonymous namespace)::softmax_kernel", "softmax_kernel"),
        ("ns::operator<<::operator->::run", "operator<<::…ator->::run"),
        ("Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>", "Kernel2<cutl…_nn_align4>"),
        ("a < b and c > d and so on < and on", "a < b and c …on < and on"),
        ("aten::_scaled_dot_product_flash_attention", "aten::_scale…h_attention"),
    ],
)
def test_names_that_are_no_templates(name, expected):
    """The angles of operators are not brackets; one ``::`` may be the namespace of an operator."""
    assert shorten(name, 24) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void f<int>(int, T<g(1)>)", "f<int>"),
        ("void at::native::(anonymous namespace)::k(int)", "at::native::(anonymous namespace)::k"),
        ("std::vector<int> ns::f(int) const [clone .isra.0]", "std::vector<int> ns::f"),
        ("ns::A::operator()(int)", "ns::A::operator()"),
        ("ns::f()::{lambda(int)#1}::operator()(int) const", "ns::f()::{lambda(int)#1}::operator()"),
    ],
)
def test_a_function_is_named_without_its_arguments(name, expected):
    assert without_signature(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "epoch::validate (part 2)",
        "autograd::engine::evaluate_function: AddmmBackward0",
        "f(x)",
        "train.py(12): step(batch)",
        "void ",
        "void (a)",
        "a::)",
        "::(a)",
        "(a::b)",
        "ns::(a)(b",
        "",
    ],
)
def test_what_is_no_signature_stays(name):
    assert without_signature(name) == name


@given(st.text("ab:(){}<> "))
def test_a_signature_is_only_cut_at_its_ends(name):
    assert without_signature(name) in name


def test_headings_say_the_unit_once():
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
def test_the_time_unit_fits_the_largest_duration(durations, expected):
    assert choose_time_unit(durations) == expected


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (12_300_000, Unit.DURATION_NS, "12.3 ms"),
        (0.4022, Unit.RATIO, "40.22 %"),
        (None, Unit.RATIO, DASH),
        ("a\nb", Unit.DURATION_NS, r"a\nb"),
        (2**31, Unit.BYTES, "2.00 GiB"),
        (1234, Unit.COUNT, "1,234"),
    ],
)
def test_amounts_bring_their_unit(value, unit, expected):
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
def test_the_byte_unit_fits_the_largest(values, expected):
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
def test_labels_of_an_axis_have_the_same_decimals(value, step, is_place, expected):
    assert format_tick(value, step, is_place=is_place) == expected
