"""Reading Chrome traces: exact nanoseconds, categories of every version, clear errors."""

from __future__ import annotations

import gc
import gzip
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.trace_facts import analyze_trace
from lightning_modelprof.errors import TraceError
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.run.chrome import parse_trace, read_trace
from lightning_modelprof.run.trace import Category
from lightning_modelprof.show.text import render_text


def event(ts="1", dur="1", name="op", cat="cpu_op", more=""):
    return (
        f'{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": 2, "ts": {ts}, "dur": {dur}{more}}}'
    )


def file_of(*events, more=""):
    return f'{{"traceEvents": [{", ".join(events)}]{more}}}'.encode()


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


@given(st.lists(st.tuples(stamps_ns, st.integers(0, 10**15)), min_size=1, max_size=5))
def test_nanoseconds_survive_at_every_epoch(intervals):
    text = [event(str(Decimal(ts) / 1000), str(Decimal(dur) / 1000)) for ts, dur in intervals]
    trace = parse_trace(file_of(*text), "x")
    got = {(int(b) + trace.base_ns, int(e - b)) for b, e in zip(trace.begin_ns, trace.end_ns, strict=True)}
    assert got == set(intervals)


@given(st.integers(0, 2**43 * 1000 - 1))
def test_nanoseconds_survive_in_doubles(ts):
    trace = parse_trace(file_of(event(f"{ts // 1000}.{ts % 1000:03d}", "0.001")), "x")
    assert (trace.base_ns, trace.end_ns.tolist()) == (ts, [1])


def test_epoch_stamps_one_nanosecond_apart():
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
        ("cuda_sync", Category.OTHER),
    ],
)
def test_categories_of_every_version(cat, category):
    assert parse_trace(file_of(event(cat=cat)), "x").category.tolist() == [category]


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


def test_list_of_events_and_no_events():
    assert len(parse_trace(b" [" + event().encode() + b"]", "x")) == 1
    empty = parse_trace(b'{"traceEvents": []}', "x")
    assert (len(empty), empty.base_ns, empty.names) == (0, 0, ())


def test_same_thread_as_number_and_text():
    other = event().replace('"tid": 2', '"tid": "2"')
    assert parse_trace(file_of(event(), other), "x").tracks == (("1", "2"),)


def test_compression_is_told_by_content(tmp_path):
    raw = file_of(event())
    for name, data in (("a.json", gzip.compress(raw)), ("b.json.gz", raw), ("c.json", raw)):
        (tmp_path / name).write_bytes(data)
        assert len(read_trace(tmp_path / name)) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b" \n", "empty file"),
        (gzip.compress(b""), "empty file"),
        (gzip.compress(file_of(event()))[:-12], "cut off"),
        (gzip.compress(file_of(event()))[:6], "cut off"),
        (b"\x1f\x8b" + b"x" * 40, "gzip"),
        (file_of(event())[:-5], "cut off"),
        (b"not json", "expected a Chrome trace in JSON"),
        (b'{"traceEvents": [\xff]}', "expected a Chrome trace in JSON"),
        (b'{"schemaVersion": 1}', "got the keys: schemaVersion"),
        (b"{}", "got the keys: none"),
        (b"5", "another type"),
        (b'{"traceEvents": 5}', "another type"),
        (file_of(event('"noon"')), r"got `str` - at `\$.traceEvents\[0\].ts`"),
        (file_of(event(more=', "args": {"correlation": 99999999999999999999}')), "args.correlation"),
        (file_of(event(), more=', "baseTimeNanoseconds": "x"'), "baseTimeNanoseconds"),
    ],
)
def test_errors_name_file_place_and_remedy(tmp_path, data, message):
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # one clear traceback
    assert gc.isenabled()


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match="cannot be opened"):
            read_trace(path)


def test_names_are_not_cut_or_changed():
    name = "void kernel<4, at::native::(λ)>(int)"
    raw = json.dumps({"traceEvents": [json.loads(event()) | {"name": name}]}).encode()
    assert parse_trace(raw, "x").names == (name,)


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 5_000_000))
    with pytest.raises(TraceError, match="GiB of JSON, got more"):
        read_trace(path, max_bytes=1_000_000)
    path.write_bytes(b"[" + b" " * 2_000_000 + b"]")  # not compressed
    with pytest.raises(TraceError, match="raise the limit"):
        read_trace(path, max_bytes=1_000_000)
    assert len(read_trace(path)) == 0


@pytest.mark.parametrize("nested", [b"[", b'{"a":', b'{"traceEvents":[{"ph":"X","args":{"a":'])
def test_a_million_deep_nesting_is_refused(nested):
    with pytest.raises(TraceError):
        parse_trace(nested * 1_000_000, "deep.json")


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
    render_text(build_trace_report([analyze_trace(trace)]))
