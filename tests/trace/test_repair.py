"""Unambiguous defects are repaired and counted; the rest of a text is unchanged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.trace.reader import parse_trace, repair

HEAD = {"schemaVersion": 1, "traceName": "t"}


def timed(number, **changes):
    event = {
        "ph": "X",
        "cat": "kernel",
        "name": f"op {number}",
        "pid": 0,
        "tid": 7,
        "ts": 10.0 + number,
        "dur": 0.5,
        "args": {"device": 0, "stream": 7, "correlation": number},
    }
    return event | changes


def trace_with(old: bytes, new: bytes, count=6):
    """A trace whose every event has the defect; a few damaged events would just be left out."""
    events = b",\n".join(json.dumps(timed(number)).encode().replace(old, new) for number in range(count))
    raw = json.dumps(HEAD).encode()[:-1] + b', "traceEvents": [' + events + b"]}"
    return parse_trace(raw, "odd.json")


def names(trace):
    return [trace.names[name] for name in trace.name]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"C:\Users\new\train.py", r"C:\Users\new\train.py"),
        (rb"torch\cuda\nn\util.py", r"torch\cuda\nn\util.py"),
        (rb"a \"quoted\" \c", r'a "quoted" \c'),
        (rb"\\server\share", r"\server\share"),
        (b"caf\xe9", "café"),
        (rb"C:\J\xf6rg\Aug.py".replace(rb"\xf6", b"\xf6"), r"C:\Jörg\Aug.py"),
        ("größe_ändern".encode("latin-1"), "größe_ändern"),
        (b"a\x93b\x81", "a“b\\x81"),
        ("矩阵".encode("gbk"), "矩阵"),
        (r"D:\模型\昞".encode("gbk"), r"D:\模型\昞"),
        ("計算_前向传播".encode("gb18030"), "計算_前向传播"),
    ],
)
def test_names_are_repaired(written, read):
    trace = trace_with(b'"name": "op ', b'"name": "' + written + b" ")
    assert names(trace) == [f"{read} {number}" for number in range(6)]
    assert trace.damage[0].startswith("Repaired while reading: 6 ")
    assert len(trace.damage) == 1


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["矩阵乘".encode("gbk"), "前".encode("gbk")], ["矩阵乘", "前"]),  # 前 happens to be UTF-8 too
        (["矩阵乘".encode("gbk"), "前向".encode()], ["矩阵乘", "前向"]),
        (["größe".encode("latin-1"), "é前".encode()], ["größe", "é前"]),
        ([b"J\xf6", "矩".encode("gbk")], ["Jö", "¾Ø"]),  # the first one isn't GBK
    ],
)
def test_one_encoding_is_used_for_all_strings(written, read):
    event = b'{"ph": "X", "name": "%s", "ts": %d, "dur": 1}'
    events = b",".join(event % (name, at) for at, name in enumerate(written))
    trace = parse_trace(b'{"schemaVersion": 1, "traceEvents": [' + events + b"]}", "odd.json")
    assert names(trace) == read


def test_character_cut_in_half_does_not_hide_encoding():
    event = b'{"ph": "X", "name": "%s %d", "ts": %d, "dur": 1}'
    events = [event % ("矩阵".encode("gbk"), number, number) for number in range(6)]
    whole = b'{"schemaVersion": 1, "traceEvents": [' + b",".join(events) + b"]}"
    trace = parse_trace(whole[: whole.rindex(b"\xf3")], "cut.json")
    assert names(trace) == [f"矩阵 {number}" for number in range(5)]


def test_quoted_words_are_not_times():
    trace = trace_with(b'"dur": 0.5', b'"dur": "-nan(ind)"', count=3)
    assert len(trace) == 0
    assert trace.num_dropped == 3


WORDS = ["N/A", "nan", "-nan", "NaN", "inf", "-inf", "Infinity", "-Infinity"]
MICROSOFTS = [
    *("-nan(ind)", "nan(ind)", "nan(snan)", "-nan(snan)", "nan(0x8000000000000)"),
    *("1.#INF", "-1.#INF", "1.#INF00", "-1.#IND", "-1.#IND0000", "1.#QNAN", "1.#SNAN", "1.#R", "-1.#J"),
]


@pytest.mark.parametrize("word", [*WORDS, *MICROSOFTS])
def test_words_for_missing_values_are_read_as_missing(word):
    trace = trace_with(b'"stream": 7', b'"stream": ' + word.encode())
    assert len(trace) == 6
    assert trace.damage == ("Repaired while reading: 6 values that aren't numbers.",)


def test_words_in_names_are_kept():
    trace = trace_with(b'"name": "op ', b'"bad": N/A, "name": "inf: nan(ind), 1.#INF, N/A ')
    assert names(trace) == [f"inf: nan(ind), 1.#INF, N/A {number}" for number in range(6)]


def test_quoted_times_are_exact():
    events = [
        {"ph": "X", "name": f"op {n}", "pid": 1, "tid": 2, "ts": f"17750785500{n}0000.125", "dur": "3.5"}
        for n in range(4)
    ]
    trace = parse_trace(json.dumps(events).encode(), "quoted.json")
    assert (trace.begin_ns - trace.begin_ns[0]).tolist() == [n * 10_000_000 for n in range(4)]
    assert (trace.end_ns - trace.begin_ns).tolist() == [3500] * 4
    assert trace.damage == ("Repaired while reading: 8 times in quotes.",)


def test_cut_off_file_is_not_repaired():
    whole = json.dumps(HEAD | {"traceEvents": [timed(number) for number in range(50)]}).encode()
    trace = parse_trace(whole[:-200], "cut.json")
    assert "cut off" in trace.damage[0]
    assert "Repaired" not in " ".join(trace.damage)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.booleans())
def test_valid_json_is_unchanged(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="replace")
    fixed, repairs = repair(text)
    if "times in quotes" not in repairs:
        assert fixed == text
        assert repairs == ""
