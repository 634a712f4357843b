"""Cut-off, damaged or malformed files: readable events are kept, and losses are reported."""

from __future__ import annotations

import gc
import gzip
import json
import re
import warnings
import zlib
from unittest.mock import patch

import pytest

from lightning_modelprof.errors import TraceError
from lightning_modelprof.trace import damaged
from lightning_modelprof.trace.model import Category
from lightning_modelprof.trace.reader import parse_trace, read_trace
from tests.support.fuzz_traces import base_traces, damaged_trace, read_all

pytestmark = pytest.mark.slow


def timed(number, **args):
    return {
        "ph": "X", "cat": "kernel" if number % 2 else "cpu_op", "name": f"op {number} }}, {{", "pid": 1,
        "tid": 2, "ts": number, "dur": 1,
        "args": {"correlation": number, "Input Dims": [[1, 2], []], **args},
    }  # fmt: skip


EVENTS = [
    timed(0),
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}},
    *map(timed, range(1, 6)),
]
HEAD = {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}], "baseTimeNanoseconds": 1000}


def written(is_list, indent, events=EVENTS):
    """A trace's text, and the positions at which its events end."""
    texts = [json.dumps(event, indent=indent) for event in events]
    comma = ",\n" if indent else ", "
    head = "[" if is_list else json.dumps(HEAD, indent=indent).rstrip("\n}") + ', "traceEvents": ['
    head += "\n    \n  "  # as Kineto writes it
    text, ends = head, []
    for number, one in enumerate(texts):
        text += (comma if number else "") + one
        ends.append(len(text))
    text += "]" if is_list else '], "displayTimeUnit": "ms", "INFO": [{"x": 1}, {"y": 2}]}'
    json.loads(text)
    return text.encode(), ends


def names(trace):
    return [trace.name_of(row) for row in range(len(trace))]


def truth(events):
    return [event["name"] for event in events if event["ph"] == "X"]


# Cut off


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("indent", [None, 1])
def test_file_cut_at_any_byte_keeps_whole_events(is_list, indent):
    """Every whole event is read, wherever the file ends; a file without one is rejected."""
    raw, ends = written(is_list, indent)
    for cut in range(len(raw)):
        kept = sum(end <= cut for end in ends)
        if not kept:
            with pytest.raises(TraceError):
                parse_trace(raw[:cut], "cut.json")
            continue
        trace = parse_trace(raw[:cut], "cut.json")
        assert names(trace) == truth(EVENTS[:kept]), cut
        assert trace.base_ns == (0 if is_list else 1000)
        (damage,) = trace.damage
        assert "cut off or damaged" in damage
        assert f"{kept} events were read; anything after them is lost" in damage
        if cut in ends:
            assert "aren't a whole event" not in damage
    assert parse_trace(raw, "whole.json").damage == ()
    assert gc.isenabled()


@pytest.mark.parametrize("is_list", [False, True])
def test_gzip_cut_at_any_byte_keeps_whole_events(tmp_path, is_list):
    raw, ends = written(is_list, None)
    packed = gzip.compress(raw)
    path = tmp_path / "cut.json.gz"
    refused = []
    most = 0
    for cut in range(len(packed)):
        path.write_bytes(packed[:cut])
        came_over = zlib.decompressobj(31).decompress(packed[:cut]) if cut else b""
        kept = sum(end <= len(came_over) for end in ends)
        try:
            trace = read_trace(path)
        except TraceError:
            refused.append(kept)
            continue
        assert len(trace.damage) == 1
        assert "the gzip file is cut off" in trace.damage[0]
        most = max(most, len(trace))
        assert names(trace)[:kept] == truth(EVENTS[:kept])[: len(trace)]
        assert len(trace) >= len(truth(EVENTS[:kept])) - 1  # the two libraries may buffer a few bytes
    assert most == 6
    assert set(refused) <= {0, 1}


def test_gzip_file_without_checksum_is_complete(tmp_path):
    """The checksum is cut off, but the JSON isn't."""
    raw, _ = written(False, None)
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(raw)[:-4])
    trace = read_trace(path)
    assert len(trace) == 6
    assert trace.metadata["displayTimeUnit"] == "ms"
    assert trace.damage == (
        "The file is damaged (the gzip file is cut off). All 7 events were read, but they may have changed"
        " since they were written.",
    )


# Damaged


def many(count=500):
    return json.dumps({**HEAD, "traceEvents": [timed(n) for n in range(count)], "traceName": "t"}).encode()


@pytest.mark.parametrize("size_of_text", [5_000, 60_000, 3_000_000])
def test_wrong_checksum_is_reported_and_events_are_kept(tmp_path, size_of_text):
    """The larger texts have the checksum in the last of several blocks."""
    raw = many(size_of_text // 150)
    packed = bytearray(gzip.compress(raw, 1))
    packed[-6] ^= 1
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed)
    trace = read_trace(path)
    (damage,) = trace.damage
    # Only the output of the failing inflate call is lost, and it is small.
    assert len(trace) > size_of_text // 150 - 40
    assert "checksum" in damage


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.99])
def test_changed_gzip_bytes_lose_what_follows_or_the_file(tmp_path, share):
    """From there on the text is garbage, possibly so much of it that the file is rejected."""
    packed = bytearray(gzip.compress(many(20_000)))
    path = tmp_path / "trace.json.gz"
    at = int(share * len(packed))
    packed[at : at + 40] = b"\xff" * 40
    path.write_bytes(packed)
    sound = int(share * 20_000 * 0.9)
    try:
        trace = read_trace(path)
    except TraceError as error:
        first_bad = re.search(r"The first is event (\d+)", str(error))
        trace = None
    if trace is None:
        assert int(first_bad[1]) >= sound
        return
    assert names(trace)[:sound] == [f"op {n} }}, {{" for n in range(sound)]
    assert "the gzip file is damaged" in trace.damage[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dur": 1', b'"dur": 01'),
        (b'"dur": 1', b'"dur": 1e999'),
        (b'"dur": 1', b'"dur": '),
        (b'"dur": 1', b"\x00" * 30),
        (b'"dur": 1,', b'"dur": 1'),
        (b'"name": "op 250', b'"name": "op\n250'),
        (b'"name": "op 250', b'"name": "op \\ud800'),
        (b'"name": "op 250', b'"name": "op" 250'),
        (b'"ts": 250', b'"ts": {}'),
        (b'"ph": "X"', b'"ph": null'),
        (b'"args": {', b'"args": {"a": {'),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_bad_event_among_many_is_left_out(old, new, indent):
    texts = [json.dumps(timed(n), indent=indent).encode() for n in range(500)]
    assert old in texts[250]
    texts[250] = texts[250].replace(old, new, 1)
    raw = (
        json.dumps(HEAD).encode()[:-1] + b', "traceEvents": [' + b",\n".join(texts) + b'], "traceName": "t"}'
    )
    trace = parse_trace(raw, "bad.json")
    assert names(trace) == [f"op {n} }}, {{" for n in range(500) if n != 250]
    assert trace.num_dropped == 0
    assert trace.metadata == {**HEAD, "traceName": "t"}
    assert trace.base_ns == 1000
    said = " ".join(trace.damage)
    assert "1 of 500 events can't be read and are left out. The first is event 250, " in said
    assert "lost" not in said  # all other events are there


def test_missing_bytes_in_the_middle_lose_few_events():
    raw = many()
    begin, end = raw.index(b'"op 100 ') + 3, raw.index(b'"op 200 ') + 3
    trace = parse_trace(raw[:begin] + raw[end:], "hole.json")
    # Events 100 and 200 are now one event, whose name has halves of both.
    assert len(trace) == 400
    trace = parse_trace(raw[:begin] + b"\x00" * 1000 + raw[end:], "hole.json")
    assert len(trace) == 399
    assert "1 of 400 events can't be read" in " ".join(trace.damage)


@pytest.mark.parametrize(
    ("count", "bad", "is_read"), [(99, 1, False), (100, 1, True), (200, 2, True), (200, 3, False)]
)
def test_one_percent_of_events_may_be_bad(count, bad, is_read):
    events = [timed(n) for n in range(count)]
    for event in events[5 : 5 + bad]:
        event["ts"] = "noon"
    raw = json.dumps({"traceEvents": events}).encode()
    if is_read:
        trace = parse_trace(raw, "bad.json")
        assert len(trace) == count - bad
        assert trace.damage == (
            f"{bad} of {count} events can't be read and are left out. The first is event 5, Expected"
            " `float | null`, got `str` - at `$.traceEvents[5].ts`.",
        )
    else:
        with pytest.raises(
            TraceError, match=rf"{bad} of {count} events can't be read. The first is event 5, "
        ):
            parse_trace(raw, "bad.json")


def test_undecodable_entries_are_named():
    trace = parse_trace(many().replace(b'"traceName": "t"', b'"traceName": 1e999'), "bad.json")
    assert len(trace) == 500
    assert trace.metadata == HEAD
    assert trace.damage == ("Some entries around the events can't be read: traceName.",)


def test_damaged_head_is_reported():
    """The first event's time since 1970 is lost, but its distance to the others isn't."""
    raw = many().replace(b'"schemaVersion": 1', b'"schemaVersion": 01')
    trace = parse_trace(raw, "bad.json")
    assert (len(trace), trace.base_ns, trace.metadata) == (500, 0, {"traceName": "t"})
    first, second = trace.damage
    assert first.startswith("The file is damaged (JSON is malformed")
    assert second == "Some entries around the events can't be read: everything before the events."


def test_byte_order_mark_is_not_damage():
    trace = parse_trace(b"\xef\xbb\xbf" + many(), "windows.json")
    assert (len(trace), trace.damage, trace.base_ns) == (500, (), 1000)


def test_second_event_list_of_wrong_type_is_rejected():
    """Found by fuzzing: the last entry of a name counts in JSON, and its type wasn't checked."""
    with pytest.raises(TraceError):
        parse_trace(b'{"traceEvents": [,{"ph": "X", "name": "a"}, ], "traceEvents": 5}', "odd.json")


@pytest.mark.parametrize("form", ['{"traceEvents": [%s]}', "[%s]"])
def test_nesting_near_recursion_limit_is_handled(form):
    """An event at the limit is one level too deep within a list; the limit depends on the caller."""
    sound = [json.dumps(timed(n)) for n in range(100)]
    outcomes = []
    for depth in [*range(700, 1_003), 3_000]:
        deep = sound[1].replace("[[1, 2], []]", "[" * depth + "]" * depth)
        trace = parse_trace((form % ", ".join([*sound, deep])).encode(), "deep.json")
        assert len(trace) == 101 - len(trace.damage)
        outcomes.append(len(trace))
    assert outcomes == sorted(outcomes, reverse=True)
    assert set(outcomes) == {100, 101}


def test_categories_survive_careful_reading():
    trace = parse_trace(many().replace(b'"dur": 1', b'"dur": NaN', 1), "bad.json")
    assert len(trace.device) == 250
    assert set(trace.category.tolist()) == {Category.CPU_OP, Category.KERNEL}


# Random damage


@pytest.mark.parametrize("max_bad_share", [0.01, 1.0])
def test_random_damage_gives_a_report_or_a_trace_error(tmp_path, max_bad_share):
    """A small sample of ``tests/support/fuzz_traces.py``; a larger share lets more files through."""
    bases = base_traces()
    outcomes = set()
    for number in range(40):
        data = damaged_trace(bases, 20261, number)
        with patch.object(damaged, "_MAX_BAD_SHARE", max_bad_share), warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                outcomes.add(read_all(data, tmp_path))
            except Exception as error:
                raise AssertionError(f"see fuzz_traces.py --seed 20261 --only {number}") from error
    assert outcomes == {"whole", "damaged", "refused"}
    assert gc.isenabled()


def test_undamaged_base_traces_are_whole(tmp_path):
    """So fuzzing really tests damage."""
    bases = base_traces()
    assert bases
    for base in bases:
        assert read_all(base, tmp_path) == "whole"
