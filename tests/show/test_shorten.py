"""Shortened names of kernels, operators and functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.show.layout import shorten, without_signature


@given(st.text(), st.integers(3, 100))
def test_shortened_names_keep_both_ends(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    is_cpp = "<" in text or "::" in text
    assert short == text or is_cpp or (short[0] == text[0] and short[-1] == text[-1])


@given(st.text("a<>:,…( )"), st.integers(3, 40))
def test_template_like_names_fit_limit(text, limit):
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
def test_kernel_names_lose_least_useful_parts_first(limit, expected):
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
def test_names_without_templates_are_shortened(name, expected):
    """Angles in operators aren't brackets; a single ``::`` can be an operator's namespace."""
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
def test_function_name_omits_arguments(name, expected):
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
def test_names_without_signature_are_unchanged(name):
    assert without_signature(name) == name


@given(st.text("ab:(){}<> "))
def test_without_signature_cuts_only_ends(name):
    assert without_signature(name) in name


@pytest.mark.parametrize("name", ["a::b::" + "w" * 3_000_000, "w" * 3_000_000 + "::a::b", "w" * 3_000_000])
def test_name_of_millions_of_characters_is_shortened(name):
    """Searching for a namespace from every character would take hours."""
    assert len(shorten(name, 64)) <= 64
    assert len(without_signature(f"void {name}(int)")) == len(name)
