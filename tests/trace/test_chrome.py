"""The Chrome trace reader: exact nanoseconds, categories of every version, clear errors."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import os
import threading
import tracemalloc
from dataclasses import fields
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import TraceError
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.show.text import render_text
from lightning_modelprof.trace import damaged
from lightning_modelprof.trace import text as trace_text
from lightning_modelprof.trace.json import begins_ns, durations_ns, integers, positive_floats
from lightning_modelprof.trace.model import Category, Collective, InputShapes
from lightning_modelprof.trace.reader import parse_trace, read_trace

pytestmark = pytest.mark.slow


def event(ts="1", dur="1", name="op", cat="cpu_op", more=""):
    return (
        f'{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": 2, "ts": {ts}, "dur": {dur}{more}}}'
    )


def file_of(*events, more=""):
    return f'{{"traceEvents": [{", ".join(events)}]{more}}}'.encode()


def assert_same(left, right):
    """Both are equal in every column, however tracks are numbered."""
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if field.name == "device":
            assert_same_columns(one, other)
        elif field.name == "allocations":
            assert_same_columns(one, other, left, right)
        elif field.name == "tracks":
            assert sorted(one) == sorted(other)
        elif field.name == "thread_names":
            names = [{t.tracks[track]: name for track, name in t.thread_names.items()} for t in (left, right)]
            assert names[0] == names[1]
        elif not isinstance(one, np.ndarray):
            assert one == other, field.name
    assert_same_columns(left, right, left, right)


def assert_same_columns(one, other, left=None, right=None):
    for field in fields(one):
        column, wanted = getattr(one, field.name), getattr(other, field.name)
        if not isinstance(column, np.ndarray):
            continue
        assert column.dtype == wanted.dtype
        assert not column.flags.writeable
        if field.name == "track":
            column = [left.tracks[track] for track in column]
            wanted = [right.tracks[track] for track in wanted]
        np.testing.assert_array_equal(column, wanted, err_msg=field.name)


def test_columns_are_sorted_and_start_at_zero():
    trace = parse_trace(
        file_of(
            event("20.5", "1.25", "late"),
            event("10.001", "2", "inner", more=', "args": {"correlation": 7}'),
            event("10.001", "3", "outer", cat="user_annotation"),
            '{"ph": "i", "name": "ignored", "ts": 1}',
            '{"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "python"}}',
            more=', "baseTimeNanoseconds": 1000000000000, "schemaVersion": 1',
        ),
        "demo.json",
    )
    assert [trace.names[i] for i in trace.name] == ["outer", "inner", "late"]
    assert trace.begin_ns.tolist() == [0, 0, 10_499]
    assert trace.end_ns.tolist() == [3000, 2000, 11_749]
    assert trace.base_ns == 1_000_000_010_001
    assert trace.correlation.tolist() == [-1, 7, -1]
    assert trace.category.tolist() == [Category.USER_ANNOTATION, Category.CPU_OP, Category.CPU_OP]
    assert trace.tracks == (("1", "2"),)
    assert trace.metadata == {"baseTimeNanoseconds": 1_000_000_000_000, "schemaVersion": 1}
    assert (trace.source, trace.num_dropped) == ("demo.json", 0)
    assert not trace.begin_ns.flags.writeable
    assert gc.isenabled()


stamps_ns = st.integers(0, 3 * 10**18) | st.integers(1_700_000_000 * 10**9, 1_800_000_000 * 10**9)


@given(st.lists(st.tuples(stamps_ns, st.integers(0, 10**14)), min_size=1, max_size=5))
def test_nanoseconds_survive_at_every_epoch(intervals):
    text = [event(str(Decimal(ts) / 1000), str(Decimal(dur) / 1000)) for ts, dur in intervals]
    trace = parse_trace(file_of(*text), "x")
    got = {(int(b) + trace.base_ns, int(e - b)) for b, e in zip(trace.begin_ns, trace.end_ns, strict=True)}
    assert got == set(intervals)


@given(st.integers(0, 2**43 * 1000 - 1))
def test_nanoseconds_survive_as_doubles(ts):
    trace = parse_trace(file_of(event(f"{ts // 1000}.{ts % 1000:03d}", "0.001")), "x")
    assert (trace.base_ns, trace.end_ns.tolist()) == (ts, [1])


def test_epoch_stamps_keep_single_nanoseconds():
    trace = parse_trace(file_of(event("1712195495502094.567"), event("1712195495502094.568")), "x")
    assert trace.begin_ns.tolist() == [0, 1]
    assert trace.base_ns == 1_712_195_495_502_094_567


@pytest.mark.parametrize(
    ("cat", "category"),
    [
        ("Operator", Category.CPU_OP),
        ("cpu_op", Category.CPU_OP),
        ("user_annotation", Category.USER_ANNOTATION),
        ("gpu_user_annotation", Category.DEVICE_ANNOTATION),
        ("Runtime", Category.RUNTIME),
        ("cuda_runtime", Category.RUNTIME),
        ("cuda_driver", Category.RUNTIME),
        ("xpu_runtime", Category.RUNTIME),
        ("hip_api", Category.RUNTIME),
        ("Kernel", Category.KERNEL),
        ("Memcpy", Category.MEMCPY),
        ("gpu_memcpy", Category.MEMCPY),
        ("gpu_memset", Category.MEMSET),
        ("python_function", Category.PYTHON_FUNCTION),
        ("Trace", Category.OTHER),
        ("cuda_sync", Category.DEVICE_SYNC),
        ("overhead", Category.OVERHEAD),
        ("concurrent_kernel", Category.KERNEL),
        ("xpu_driver", Category.RUNTIME),
        ("mtia_runtime", Category.RUNTIME),
        ("mtia_ccp_events", Category.KERNEL),
        ("privateuse1_runtime", Category.RUNTIME),
        ("Python_Function", Category.PYTHON_FUNCTION),
        ("fwdbwd", Category.OTHER),
        ("", Category.OTHER),
    ],
)
def test_categories_of_every_version_are_known(cat, category):
    assert parse_trace(file_of(event(cat=cat)), "x").category.tolist() == [category]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("dma_request", Category.MEMCPY),
        ("event_wait", Category.DEVICE_SYNC),
        ("event_record", Category.DEVICE_SYNC),
        ("fc-dtype_Float", Category.KERNEL),
    ],
)
def test_mtia_events_are_classified_by_name(name, category):
    """Only for MTIA, because other devices' kernels may have any name."""
    one, other = event(cat="mtia_ccp_events", name=name), event(cat="kernel", name=name)
    assert parse_trace(file_of(one), "x").category.tolist() == [category]
    assert parse_trace(file_of(other), "x").category.tolist() == [Category.KERNEL]


def test_unusable_events_are_counted():
    raw = file_of(
        event("5"),
        event("6", "-1"),
        event("1e300"),
        event("7", "null"),
        '{"ph": "X", "name": "no duration", "ts": 8}',
        '{"ph": "X", "name": "no stamp", "dur": 8}',
    )
    trace = parse_trace(raw, "x")
    assert (len(trace), trace.num_dropped) == (1, 5)


def test_event_list_and_empty_trace_are_read():
    assert len(parse_trace(b" [" + event().encode() + b"]", "x")) == 1
    empty = parse_trace(b'{"traceEvents": []}', "x")
    assert (len(empty), empty.base_ns, empty.names) == (0, 0, ())


def test_thread_as_number_or_text_is_the_same():
    other = event().replace('"tid": 2', '"tid": "2"')
    trace = parse_trace(file_of(event(), other), "x")
    assert trace.tracks == (("1", "2"),)
    assert trace.track.tolist() == [0, 0]


@pytest.mark.parametrize("field", ["pid", "tid", "cat", "name", "args"])
@pytest.mark.parametrize("value", ["7.0", "7.5", "true", "null", '"7"', "[7]", '""', "[]", "7", '"x"'])
def test_odd_types_of_unneeded_fields_are_harmless(field, value):
    """This holds for all events and both ways to read stamps; args that aren't an object count as none."""
    usual = event().replace("{", '{"args": {"correlation": 5}, ', 1)
    wrong = json.dumps({**json.loads(usual), field: "@"}).replace('"@"', value)
    for ts in ("1", "1712195495502094.567"):
        memory = f'{{"ph": "i", "name": "[memory]", "ts": {ts}, "args": {value}, "{field}": {value}}}'
        name = f'{{"ph": "M", "name": "thread_name", "args": {value}, "{field}": {value}}}'
        stamped = wrong.replace('"ts": 1,', f'"ts": {ts},')
        trace = parse_trace(file_of(stamped, memory, name, stamped), "x")
        assert (len(trace), trace.damage, trace.num_dropped) == (2, (), 0)
        assert trace.correlation.tolist() == [-1 if field == "args" else 5] * 2
        text = str(int(float(value))) if value == "7.0" else str(json.loads(value))
        if field in ("pid", "tid"):
            assert trace.tracks[0][field == "tid"] == text
        if field == "name" and value != "7.0":
            assert trace.names == ("" if value == "null" else text,)


def test_float_thread_is_the_same_thread():
    trace = parse_trace(file_of(event(), event().replace('"tid": 2', '"tid": 2.0')), "x")
    assert trace.tracks == (("1", "2"),)


def test_begin_and_end_events_are_counted():
    pair = [
        '{"ph": "B", "name": "f", "ts": 5, "pid": 1, "tid": 1}',
        '{"ph": "E", "ts": 6, "pid": 1, "tid": 1}',
    ]
    said = "begin/end events (ph B and E) were ignored; torch.profiler writes complete events (ph X)."
    trace = parse_trace(file_of(event(), *pair * 600), "x")
    assert trace.damage == (f"1,200 {said}",)
    assert len(trace) == 1
    trace = parse_trace(file_of(*pair), "x")
    assert trace.damage == (f"2 {said}", "The file has no readable timed event.")


@pytest.mark.parametrize("content", ["", '{"ph": "M", "name": "thread_name"}', '{"ph": "X"}'])
def test_file_without_timed_events_is_noted(content):
    trace = parse_trace(file_of(content), "x")
    assert trace.damage == ("The file has no readable timed event.",)


def test_compression_is_detected_by_content(tmp_path):
    raw = file_of(event())
    for name, data in (("a.json", gzip.compress(raw)), ("b.json.gz", raw), ("c.json", raw)):
        (tmp_path / name).write_bytes(data)
        assert len(read_trace(tmp_path / name)) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b" \n", "empty file"),
        (gzip.compress(b"", mtime=0), "empty file"),
        (gzip.compress(file_of(event()), mtime=0)[:6], "the gzip file is cut off"),
        (b"\x1f\x8b", "the gzip file is cut off"),
        (b"\x1f\x8b" + b"x" * 40, "the gzip file is damaged"),
        (gzip.compress(b"no trace", mtime=0), "expected a Chrome trace in JSON"),
        (file_of(event())[:60], "cut off"),
        (b'{"traceEvents": [', "cut off"),
        (b"not json", "expected a Chrome trace in JSON"),
        (b'{"traceEvents": [\xff]}', "expected a Chrome trace in JSON"),
        (b'{"schemaVersion": 1}', "got the keys schemaVersion"),
        (b"{}", "got the keys none"),
        (b"5", "expected a JSON object with the key traceEvents"),
        (b'"text"', "expected a JSON object with the key traceEvents"),
        (b'{"traceEvents": 5}', "expected a list of events in traceEvents"),
        (b'{"traceEvents": null}', "expected a list of events in traceEvents"),
        (
            b'{"traceEvents": [5]}',
            "1 of 1 events can't be read. The first is event 0, Expected `object`, got `int`",
        ),
        (b'[{"a": 1}, {"a": 2}]', "got 2 objects without the key ph"),
        (file_of(event('"noon"')), r"got `str` - at `\$.traceEvents\[0\].ts`"),
        (file_of(event("-1e999")), "out of range"),
        (file_of(event(name="\\ud800")), "1 of 1 events can't be read"),
        (file_of(event(), more=', "baseTimeNanoseconds": 1.5'), "expected an integer in baseTimeNanoseconds"),
        (file_of(event(), more=', "baseTimeNanoseconds": "x"'), "baseTimeNanoseconds"),
    ],
)
def test_errors_name_file_and_problem(tmp_path, data, message):
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # one clear traceback
    assert gc.isenabled()


def test_missing_file_or_folder_is_an_error(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match="can't read") as caught:
            read_trace(path)
        assert str(path) in str(caught.value)
        assert gc.isenabled()


@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 0)() == 0, reason="root may read all")
def test_unreadable_file_is_an_error(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(file_of(event()))
    path.chmod(0)
    with pytest.raises(TraceError, match=r"can't read .*: Permission denied"):
        read_trace(path)


def test_file_that_fails_or_vanishes_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_bytes(file_of(event()))

    def vanish(position, size):
        raise OSError(5, "Input/output error")

    with pytest.raises(TraceError, match=r"can't read .*: Input/output error"):
        read_trace(path, progress=vanish)
    assert gc.isenabled()

    path.write_bytes(file_of(event("5", "1"), event("6", "NaN")))  # needs a second read
    second = []

    def delete(position, size):
        second.append(position)
        path.unlink(missing_ok=True)

    with pytest.raises(TraceError, match=r"can't read .*: No such file"):
        read_trace(path, progress=delete)
    assert second


@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress])
def test_progress_reaches_file_size(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(trace_text, "BLOCK_BYTES", 500)
    path = tmp_path / "trace.json"
    path.write_bytes(pack(file_of(*[event(str(n)) for n in range(100)])))
    told = []
    read_trace(path, progress=lambda position, size: told.append((position, size)))
    size = path.stat().st_size
    assert {whole for _, whole in told} == {size}
    positions = [position for position, _ in told]
    assert positions == sorted(positions)
    assert positions[-1] == size


def test_concatenated_gzip_files_are_read(tmp_path):
    raw = file_of(*[event(str(n), name=f"op{n % 7}") for n in range(300)])
    path = tmp_path / "trace.json.gz"
    parts = [raw[at : at + 100] for at in range(0, len(raw), 100)]
    whole = parse_trace(raw, str(path))
    for data in (
        b"".join(map(gzip.compress, parts)),
        gzip.compress(b"") + gzip.compress(raw) + gzip.compress(b""),
        gzip.compress(raw) + b"\0" * 200_000,  # padded, as on tapes
        gzip.compress(raw[:500]) + b"\0" * 200_000 + gzip.compress(raw[500:]),
    ):
        path.write_bytes(data)
        assert_same(read_trace(path), whole)
    path.write_bytes(gzip.compress(raw) + b"garbage")
    (damage,) = read_trace(path).damage
    assert "All 300 events were read" in damage


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("raw", [file_of(event()), file_of(event("1"), event("2"))[:-1], b""])
@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress])
def test_pipes_are_read_like_files(tmp_path, raw, pack):
    """Also when damage requires a second, more careful read."""
    pipe = tmp_path / "pipe"
    path = tmp_path / "trace.json"
    os.mkfifo(pipe)
    path.write_bytes(pack(raw))

    def read(source):
        try:
            trace = read_trace(source)
        except TraceError as error:
            return str(error).replace(str(source), "")
        return trace.begin_ns.tolist(), trace.damage

    writer = threading.Thread(target=pipe.write_bytes, args=(pack(raw),), daemon=True)
    writer.start()
    assert read(pipe) == read(path)
    writer.join(10)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_endless_pipe_is_rejected(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        with contextlib.suppress(BrokenPipeError), pipe.open("wb") as file:
            while True:
                file.write(b" " * 100_000)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with pytest.raises(TraceError, match="KiB of JSON, got more"):
        read_trace(pipe, max_bytes=1_000_000)
    writer.join(10)
    assert not writer.is_alive()


@pytest.mark.parametrize(
    ("limit", "text"), [(int(0.001 * 2**30), "1.02 MiB"), (2**30 * 3 // 2, "1.5 GiB"), (1, "1 B")]
)
def test_limit_is_shown_in_fitting_unit(tmp_path, limit, text):
    assert f"at most {text} of" in str(trace_text.TextFile(tmp_path, limit)._too_large())


def test_names_are_kept_unchanged():
    name = "void kernel<4, at::native::(λ)>(int)"
    raw = json.dumps({"traceEvents": [json.loads(event()) | {"name": name}]}).encode()
    assert parse_trace(raw, "x").names == (name,)


def test_gzip_bomb_is_rejected_by_size(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 5_000_000))
    with pytest.raises(TraceError, match="KiB of JSON, got more"):
        read_trace(path, max_bytes=1_000_000)
    path.write_bytes(b"[" + b" " * 2_000_000 + b"]")  # not compressed
    with pytest.raises(TraceError, match="raise the limit"):
        read_trace(path, max_bytes=1_000_000)
    assert len(read_trace(path)) == 0


@pytest.mark.parametrize("nested", [b"[", b'{"a":', b'{"traceEvents":[{"ph":"X","args":{"a":'])
def test_very_deep_nesting_is_rejected(nested):
    depth = nested.count(b"[") + nested.count(b"{")
    with pytest.raises(TraceError):
        parse_trace(nested * (1_000_000 // depth), "deep.json")


def make(*events, **metadata):
    return parse_trace(json.dumps({**metadata, "traceEvents": events}).encode(), "made")


def timed(cat="cpu_op", name="op", ts=1, dur=1, pid=1, tid=2, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


# Numbers


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [0, 10**6, 4 * 10**12, 2**43 - 5, 2**43 + 40, 2**46, 1_712_195_495_502_094, 4 * 10**15 - 40]
            ),
            st.integers(-30, 30),
            st.sampled_from(["", ".0", ".5", ".25", ".125", ".001", ".999", ".10", ".000", ".1230", ".0625"]),
            st.sampled_from(["", "", "", "e0", "E+1", "e-1"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_stamp_notation_gives_its_nanoseconds(parts):
    """Stamps may be negative and have any number of decimals or an exponent; Decimal is the oracle."""
    texts = [f"{base + more}{fraction}{exponent}" for base, more, fraction, exponent in parts]
    exact = [Decimal(text) * 1000 for text in texts]
    kept = [ns for ns in exact if abs(ns) <= 4 * 10**18]
    trace = parse_trace(file_of(*[event(text) for text in texts]), "x")
    got = [int(ns) + trace.base_ns for ns in trace.begin_ns]
    assert trace.num_dropped == len(exact) - len(kept)
    # Beyond three decimals they're below a nanosecond and rounded, to either side if in the middle.
    assert all(abs(ns - other) <= Decimal("0.501") for ns, other in zip(got, sorted(kept), strict=True))
    whole = [ns for ns in kept if ns == int(ns)]
    assert set(map(int, whole)) <= set(got)


def test_late_epoch_stamp_makes_block_exact():
    """The first kilobytes only have small stamps, and the block has a long one after them."""
    small = [event(f"{n}.125") for n in range(200)]
    trace = parse_trace(file_of(*small, event("1712195495502094.567"), event("1712195495502094.568")), "x")
    assert trace.end_ns[-2:].tolist() == [int(trace.begin_ns[-1]) + 999, int(trace.begin_ns[-1]) + 1000]
    assert int(trace.begin_ns[-1]) + trace.base_ns == 1_712_195_495_502_094_568
    assert trace.base_ns == 125


def test_late_stamps_just_beyond_doubles_are_exact():
    """From 2**43 microseconds on, doubles are two nanoseconds apart."""
    small = [event(f"{n}.125") for n in range(200)]
    late = [event(f"8796093022208.{digits:03}") for digits in range(1, 9)]
    trace = parse_trace(file_of(*small, *late), "x")
    assert (trace.begin_ns[-8:] + trace.base_ns).tolist() == [8_796_093_022_208_000 + n for n in range(1, 9)]


def test_negative_and_exponent_epoch_stamps_are_exact():
    for text, ns in (
        ("-1712195495502094.567", -1_712_195_495_502_094_567),
        ("1.712195495502094567e15", 1_712_195_495_502_094_567),
        ("1712195495502094567e-3", 1_712_195_495_502_094_567),
    ):
        assert parse_trace(file_of(event(text)), "x").base_ns == ns


@pytest.mark.parametrize(
    "stamp", ["4000000000000001.5", "9300000000000000.5", "9999999999999999.999", "-5e15"]
)
def test_stamps_out_of_range_are_dropped_not_wrapped(stamp):
    trace = parse_trace(file_of(event(stamp), event("1712195495502094.5")), "x")
    assert (len(trace), trace.num_dropped, trace.base_ns) == (1, 1, 1_712_195_495_502_094_500)


def test_long_text_among_digits_takes_no_memory():
    """With one stamp of 200 kB among 2,000, an array of characters would take 400 MB."""
    texts = [b"1712195495502094.567"] * 2_000 + [b'"' + b"9" * 200_000 + b'"']
    tracemalloc.start()
    ns, usable = begins_ns(texts, are_digits=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20
    assert usable.tolist() == [True] * 2_000 + [False]
    assert set(ns[:-1].tolist()) == {1_712_195_495_502_094_567}


def test_durations_out_of_range_are_unusable():
    ns, usable = durations_ns([0, 0.001, 1e11, 1.1e11, -0.001, None, 2.0005])
    assert usable.tolist() == [True, True, True, False, False, False, True]
    assert ns[:3].tolist() == [0, 1, 10**14]


def test_sums_of_the_longest_durations_do_not_overflow():
    trace = make(*[timed(ts=n, dur=1e11) for n in range(1_000)], timed(ts=1, dur=1e15))
    assert int(trace.duration_ns.sum()) == 1_000 * 10**14
    assert trace.num_dropped == 1


@pytest.mark.parametrize("odd", [7.0, "x7", "", "7.0", None, [], {}, 2**63, -(2**63) - 1, 10**30, "9" * 19])
def test_integers_take_whole_numbers_only(odd):
    """Other values in the same block must not change what a value means."""
    assert integers([odd]).tolist() == [-1]
    assert integers([odd, 5], missing=0).tolist() == [0, 5]
    assert integers([odd, None, "x", 5]).tolist() == [-1, -1, -1, 5]


@pytest.mark.parametrize("others", [[], [5], [None]])
def test_quoted_numbers_are_numbers(others):
    """Digits can't mean anything else, and ids only match if both sides are read alike."""
    assert integers(["7", *others])[0] == 7
    assert integers(["-7", *others])[0] == -7
    assert positive_floats(["3.5", *others])[0] == 3.5


def test_integers_keep_their_limits():
    assert integers([2**63 - 1, -(2**63), 0]).tolist() == [2**63 - 1, -(2**63), 0]
    assert integers([2**63 - 1, -(2**63), None]).tolist() == [2**63 - 1, -(2**63), -1]
    assert integers([]).tolist() == []
    assert integers([True, 5]).tolist() == integers([True, 5, None]).tolist()[:2] == [1, 5]  # as in Python


@pytest.mark.parametrize("odd", ["3.5x", "1e5", None, [], {}, -0.5, 1e300, 10**400, float("nan")])
def test_positive_floats_take_numbers_only(odd):
    for others in ([], [2.5, 3], ["x", None]):
        column = positive_floats([odd, *others, 4])
        assert np.isnan(column[0])
        assert column[-1] == 4.0


# Fields of an event


@pytest.mark.parametrize("value", ["99999999999999999999", '"x"', "7.5", "null", "[]", "7.0"])
def test_odd_correlations_are_missing(value):
    odd = event(more=f', "args": {{"correlation": {value}, "External id": {value}}}')
    sound = event("2", more=', "args": {"correlation": 5, "External id": 6}')
    trace = parse_trace(file_of(odd, sound), "x")
    assert trace.correlation.tolist() == [-1, 5]
    assert trace.external_id.tolist() == [-1, 6]


def test_external_id_is_read_in_both_spellings():
    trace = make(
        timed(ts=1, **{"External id": 5}),
        timed(ts=2, **{"external id": 6}),
        timed(ts=3, **{"External id": 7, "external id": 8}),
        timed(ts=4),
    )
    assert trace.external_id.tolist() == [5, 6, 7, -1]


def test_device_columns_are_read():
    """Streams are numbers, text (ROCm), in tid (torch 1.9) or missing; columns are sorted like the trace."""
    trace = make(
        timed("kernel", "late", 9, pid=3, tid=4),
        timed("kernel", "first", 1, pid=0, tid=7, device=1, stream=7, **{
            "blocks per SM": 2.5, "est. achieved occupancy %": 75, "bytes": 3}),
        timed("cpu_op", "host", 2),
        timed("Memcpy", "old", 3, pid=0, tid="stream 13", bytes=4096),
        timed("gpu_memset", "rocm", 4, pid=0, tid=1, device=0, stream="12", bytes=2**63 - 1),
        timed("kernel", "odd", 5, pid="GPU", tid="default", stream="stream x", device="0"),
        timed("kernel", "huge", 6, pid=0, stream="stream " + "9" * 5000, **{
            "blocks per SM": "inf", "est. achieved occupancy %": -1}),
    )  # fmt: skip
    device = trace.device
    names = [trace.name_of(row) for row in device.event]
    assert names == ["first", "old", "rocm", "odd", "huge", "late"]
    assert device.device.tolist() == [1, 0, 0, 0, 0, 3]
    assert device.stream.tolist() == [7, 13, 12, -1, -1, 4]
    assert device.size_bytes.tolist() == [3, 4096, -1, -1, -1, -1]
    np.testing.assert_array_equal(device.blocks_per_sm, [2.5, *[np.nan] * 5])
    np.testing.assert_array_equal(device.occupancy, [0.75, *[np.nan] * 5])
    assert len(device) == 6


def memory(ts, size, allocated=-1, **more):
    args = {"Bytes": size, "Device Id": 0, "Device Type": 1, "Total Allocated": allocated, **more}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 2, "ts": ts, "args": args}


def test_memory_events_are_read():
    trace = make(
        timed(ts=10),
        memory(30, -64, 0),
        memory(20.5, 64, 64, **{"Total Reserved": 1024}),
        memory(5, "64", 2**62, **{"Device Id": None, "Device Type": "CUDA"}),
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": "2", "ts": None, "args": {"Bytes": 1}},
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 9, "ts": 40},
        {"ph": "i", "name": "another", "pid": 1, "tid": 2, "ts": 1},
    )
    memory_rows = trace.allocations
    assert memory_rows.time_ns.tolist() == [-5_000, 10_500, 20_000, 30_000]  # the first event is at 0
    assert memory_rows.size_bytes.tolist() == [64, 64, -64, 0]
    assert memory_rows.allocated_bytes.tolist() == [-1, 64, 0, -1]
    assert memory_rows.reserved_bytes.tolist() == [-1, 1024, -1, -1]
    assert memory_rows.device.tolist() == [-1, 0, 0, -1]
    assert memory_rows.device_type.tolist() == [-1, 1, 1, -1]
    assert [trace.tracks[row] for row in memory_rows.track] == [("1", "2")] * 3 + [("1", "9")]
    assert (trace.num_dropped, len(trace), len(memory_rows)) == (1, 1, 4)


def test_memory_events_keep_epoch_nanoseconds():
    text = json.dumps(memory(1, 8)).replace('"ts": 1,', '"ts": 1712195495502094.569,')
    trace = parse_trace(file_of(event("1712195495502094.567"), text), "x")
    assert trace.allocations.time_ns.tolist() == [2]


def test_thread_names_are_read():
    def named(pid, tid, args):
        return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}

    trace = make(
        timed(pid=1, tid=2),
        named(1, "2", {"name": "thread 2 (python)"}),
        named(0, 7, {"name": "stream 7"}),
        named(0, 8, {"name": ""}),
        named(0, 9, {"name": 5}),
        named(0, 10, None),
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
    )
    names = {trace.tracks[track]: name for track, name in trace.thread_names.items()}
    assert names == {("1", "2"): "thread 2 (python)", ("0", "7"): "stream 7"}


def test_shapes_stacks_and_collectives_are_read():
    collective = {
        "Collective name": "allreduce", "In msg nelems": 10, "Out msg nelems": 20, "Group size": 2,
        "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",
    }  # fmt: skip
    trace = make(
        timed(ts=1, **{"Input Dims": [[1, 2], []], "Concrete Inputs": ["", "3"]}),
        timed(ts=2, **{"Input Dims": [[1, 2], []], "Concrete Inputs": ["", "4"]}),
        timed(ts=3, **{"Input Dims": [[1, 2], []], "Concrete Inputs": ["", "3"]}),
        timed(ts=4, **{"Input Dims": [[1, 2], []]}),
        timed(ts=5, **{"Call stack": "a;b"}),
        timed(ts=6, **{"Call stack": 5}),
        timed(ts=7, **collective),
        timed(ts=8, **{**collective, "Process Group Description": "", "Group size": "2", "dtype": None,
                       "In msg nelems": -1, "Out msg nelems": 2**63}),
        timed(ts=9, **{"Collective name": ""}),
        timed(ts=10, **collective),
    )  # fmt: skip
    assert trace.shape.tolist() == [0, 1, 0, 2, *[-1] * 6]
    assert trace.shapes == (
        InputShapes("[[1, 2], []]", '["", "3"]'),
        InputShapes("[[1, 2], []]", '["", "4"]'),
        InputShapes("[[1, 2], []]", ""),
    )
    assert trace.stack.tolist() == [*[-1] * 4, 0, *[-1] * 5]
    assert trace.stacks == ("a;b",)
    assert trace.collective.tolist() == [*[-1] * 6, 0, 1, -1, 0]
    assert trace.collectives == (
        Collective(
            name="allreduce", group="default_pg", group_size=2, dtype="Float", in_elements=10, out_elements=20
        ),
        Collective(
            name="allreduce", group="0", group_size=2, dtype=None, in_elements=None, out_elements=None
        ),
    )


def test_outer_of_equal_intervals_comes_first():
    """Python functions have no id, operators are numbered in order, and a call has its operator's id."""
    trace = make(
        timed("cuda_runtime", "launch", **{"External id": 6}),
        timed("cpu_op", "inner", **{"External id": 6}),
        timed("cpu_op", "outer", **{"External id": 5}),
        timed("python_function", "function"),
    )
    assert [trace.name_of(row) for row in range(4)] == ["function", "outer", "inner", "launch"]


@given(st.permutations(range(7)))
def test_events_may_come_in_any_order(order):
    events = [
        timed("kernel", "k0", 3, 2, 0, 7, correlation=1, stream=7),
        timed("kernel", "k1", 4, 2, 0, 8, stream=8),
        timed("cpu_op", "a", 1, 9),
        timed("cpu_op", "b", 1, 5),
        timed("cuda_runtime", "c", 2, 1, correlation=1),
        memory(2, 64, 64),
        memory(3, -64, 0),
    ]
    trace = make(*[events[index] for index in order])
    names = [trace.name_of(row) for row in range(len(trace))]
    assert names == ["a", "b", "c", "k0", "k1"]
    assert trace.device.event.tolist() == [3, 4]
    assert trace.device.stream.tolist() == [7, 8]
    assert trace.allocations.size_bytes.tolist() == [64, -64]
    assert trace.correlation.tolist() == [-1, -1, 1, 1, -1]


# Blocks


BLOCK_EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}},
    *[
        timed(
            "cpu_op" if n % 3 else "kernel", f"op{n % 5} }}, {{ name", 4_000_000.125 + n, 0.5, tid=n % 4,
            correlation=n, stream=str(n % 4),
            **{"External id": n if n % 7 else None, "Input Dims": [[n % 5], []]},
        )
        for n in range(60)
    ],
    *[memory(4_000_000.5 + n, 64) for n in range(5)],
    timed(name='quotes "}, {\\" and \\\\', ts=9_000_000, list=[{"a": 1}, {"b": [{"c": 2}, {"d": 3}]}]),
    {"name": "", "ph": "X", "": 1, "ts": 9_000_001, "dur": 1},
    timed(name="last", ts=9_000_002, **{"Collective name": "x", "correlation": "7"}),
]  # fmt: skip
BEFORE = {"deviceProperties": [{"id": 0}, {"id": 1}], "schemaVersion": 1}
AFTER = {"INFO": [{"x": 1}, {"y": [{"z": 1}, {"w": 2}]}], "displayTimeUnit": "ms", "baseTimeNanoseconds": 7}
WHOLE = {**BEFORE, "traceEvents": BLOCK_EVENTS, **AFTER}
FORMS = {
    "compact": json.dumps(WHOLE, separators=(",", ":")),
    "usual": json.dumps(WHOLE),
    "pretty": json.dumps(WHOLE, indent=2),
    "windows": json.dumps(WHOLE, indent="\t").replace("\n", "\r\n"),
    "list": json.dumps(BLOCK_EVENTS),
    "pretty list": " \n" + json.dumps(BLOCK_EVENTS, indent=1) + "\n",
    "another list of that name": json.dumps({"copy": {"traceEvents": BLOCK_EVENTS[:30]}, **WHOLE}),
    "the name in a text": json.dumps({"note": '"traceEvents": [ {"ph": 1}, {"ph": 2}', **WHOLE}),
    "plain arguments": json.dumps({"traceEvents": BLOCK_EVENTS[:60]}),
    "epoch": json.dumps({"traceEvents": BLOCK_EVENTS[:60]}).replace("4000", "1712195495"),
}


@pytest.mark.parametrize("block_bytes", [1, 7, 50, 300, 1000, 3000])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_do_not_change_what_is_read(form, block_bytes, monkeypatch, tmp_path):
    raw = FORMS[form].encode()
    whole = parse_trace(raw, "x")
    assert whole.damage == ()
    assert len(whole) > 50
    monkeypatch.setattr(trace_text, "BLOCK_BYTES", block_bytes)
    assert_same(parse_trace(raw, "x"), whole)
    path = tmp_path / "trace.json"
    for pack in (lambda text: text, gzip.compress):
        path.write_bytes(pack(raw))
        got = read_trace(path)
        assert got.damage == ()
        np.testing.assert_array_equal(got.begin_ns, whole.begin_ns)
        assert got.names == whole.names


def test_nested_trace_events_are_not_events(monkeypatch):
    """The nested list has many blocks; the file's own list is in the last one, together with its end."""
    raw = json.dumps({"copy": {"traceEvents": BLOCK_EVENTS}, "traceEvents": [timed(name="own")]}).encode()
    for block_bytes in (1_000, 3_000, 2**20):
        monkeypatch.setattr(trace_text, "BLOCK_BYTES", block_bytes)
        trace = parse_trace(raw, "x")
        assert trace.names == ("own",)
        assert list(trace.metadata) == ["copy"]


def test_blocks_are_actually_split(monkeypatch):
    """Makes sure the test above is effective: many pieces are decoded, and none of them twice."""
    raw = FORMS["plain arguments"].encode()
    monkeypatch.setattr(trace_text, "BLOCK_BYTES", 1000)
    cutter = trace_text.EventPieces(trace_text.Text(raw))
    pieces = [json.loads(piece) for piece in cutter.pieces()]
    assert len(pieces) > 5
    rest = json.loads(cutter.rest)["traceEvents"]
    assert [event for piece in pieces for event in piece] + rest == BLOCK_EVENTS[:60]


@pytest.mark.parametrize("unit", [b'{"ts": 5}, ', b" ", b'"a": [1], ', b"}", b'},{"x', b'"traceEvents" : '])
def test_any_text_takes_linear_work(unit, monkeypatch):
    """Twice the text means about twice the searched bytes, whatever the text is."""
    searched = []

    def count(function):
        def counted(text, *more):
            searched.append(len(text))
            return function(text, *more)

        return counted

    monkeypatch.setattr(trace_text, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(trace_text, "events_begin", count(trace_text.events_begin))
    monkeypatch.setattr(trace_text, "_last_boundary", count(trace_text._last_boundary))
    for start in (b"{", b'{"traceEvents": ['):
        work = []
        for count_of_units in (20_000, 40_000):
            searched.clear()
            cutter = trace_text.EventPieces(trace_text.Text(start + unit * count_of_units))
            pieces = sum(map(len, cutter.pieces()))
            work.append(sum(searched) + pieces + len(cutter.rest))
            assert work[-1] < 3 * len(start + unit * count_of_units) + 50_000
        assert work[1] < 2.5 * work[0]


@pytest.mark.parametrize("content", [b" ", b'{"traceEvents": [' + b" " * 1_000, b"x"])
def test_gzip_bomb_takes_bounded_memory(content, tmp_path):
    """100 MB in 100 kB of gzip, with a limit of 1 MB."""
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(content + content[-1:] * 100_000_000, 1))
    tracemalloc.start()
    with pytest.raises(TraceError, match="KiB of JSON, got more"):
        read_trace(path, max_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


TINY = b'{"ph":"X","name":"a","ts":1.5,"dur":1,"pid":1,"tid":1}'


def memory_to_read(path, head, unit, tail, num_bytes):
    """Return the peak memory per byte of a text of about this many bytes."""
    raw = head + unit * (num_bytes // len(unit)) + tail
    path.write_bytes(gzip.compress(raw, 1))
    num_bytes = len(raw)
    del raw
    tracemalloc.start()
    with contextlib.suppress(TraceError):
        read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / num_bytes


@pytest.mark.parametrize(
    ("head", "unit", "tail", "ratio"),
    [
        (b'{"traceEvents":[' + TINY, b",{}", b"]}", 10),
        (b'{"traceEvents":[' + TINY, b',{"":0}', b"]}", 5),
        (b'{"traceEvents":[' + TINY, b"," + TINY, b"]}", 3),
        (b'{"traceEvents":[' + TINY + b',{"ph":5}', b"," + TINY, b"]}", 4),
        (b'{"traceEvents":[' + TINY, b"," + TINY, b",", 4),
        (b'{"traceEvents":[' + TINY + b"],", b'"x":[],', b'"y":0}', 3),
        (b'{"x":{', b'"x":{},', b'"y":0}}', 3),
    ],
)
def test_memory_is_bounded_by_text_size(head, unit, tail, ratio, tmp_path, monkeypatch):
    """3 bytes of JSON can become an object of 80 bytes, so only one block at a time is decoded.

    Blocks are a quarter as large as usual, so that a text of 1.5 MB has as many as one of 6 MB.
    """
    monkeypatch.setattr(trace_text, "BLOCK_BYTES", trace_text.BLOCK_BYTES // 4)
    monkeypatch.setattr(damaged, "_BATCH", damaged._BATCH // 4)
    assert memory_to_read(tmp_path / "trace.json.gz", head, unit, tail, 1_500_000) < ratio


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        (b'{"traceEvents":[' + TINY + b',{"args":{"stream":[', b"[],", b"0]}}]}"),
        (b'{"x":[', b"[],", b'0],"traceEvents":[' + TINY + b"]}"),
    ],
)
def test_memory_is_bounded_for_one_huge_value(head, unit, tail, tmp_path):
    assert memory_to_read(tmp_path / "trace.json.gz", head, unit, tail, 10_000_000) < 3


def test_events_of_megabytes_are_read_up_to_a_limit(tmp_path):
    """Long events are read even if they end beyond a block; longer ones are noted."""
    for size, is_read in ((3_000_000, True), (4_150_000, True), (6_000_000, False)):
        long = event("2", name="long", more=f', "args": {{"x": "{"}, {" * (size // 4)}", "correlation": 9}}')
        few = [event(name="before")] * 50 + [long] + [event("3", name="after")] * 50
        trace = parse_trace(file_of(*few, more=', "schemaVersion": 1'), "x")
        assert trace.metadata == {"schemaVersion": 1}
        assert len(trace) == 100 + is_read
        assert len(trace.damage) == (not is_read)
        if not is_read:
            assert "1 of 101 events can't be read" in trace.damage[0]
            assert "event 50, which has 6,000,1" in trace.damage[0]


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.sampled_from(["X", "kernel", "cuda_runtime", "cpu_op", "ProfilerStep#3", "ProfilerStep#\u00bd"]),
)
FIELDS = st.sampled_from(["ph", "cat", "name", "ts", "dur", "pid", "tid"])
ODD_EVENTS = st.builds(
    lambda usual, odd, arguments: {**usual, **odd, **({} if arguments is None else {"args": arguments})},
    st.just({"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#1", "ts": 1.5, "dur": 2, "pid": 1, "tid": 1}),
    st.dictionaries(FIELDS, ODD_VALUES, max_size=2),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["correlation", "bytes"]), ODD_VALUES)),
)


@given(st.lists(ODD_EVENTS, max_size=6), st.dictionaries(st.just("modelprof"), ODD_VALUES))
def test_odd_traces_give_a_report_or_a_trace_error(events, metadata):
    raw = json.dumps({"traceEvents": events, **metadata}).encode()
    try:
        trace = parse_trace(raw, "odd.json")
    except TraceError:
        return
    assert "odd.json" in render_text(build_trace_report([TraceFacts(trace)]))
