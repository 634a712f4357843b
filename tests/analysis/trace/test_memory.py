"""Memory Summary: hand-made traces, an oracle that replays each thread, and the removed plugin's numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.calls import clipped_ends, innermost_at, nearest_around
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.memory import NO_OWNER, summarize_memory
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.tables.trace.memory import MEMORY
from tests.support.facts import table_of, why_not
from tests.support.traces import load, make_trace, reference

CPU, CUDA = 0, 1


def event(name, begin, end, tid=1, cat="cpu_op"):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin}


def memory(ts, size, allocated=None, reserved=None, device=0, device_type=CUDA, tid=1):
    args = {"Bytes": size, "Device Type": device_type, "Device Id": -1 if device_type == CPU else device}
    args |= {"Total Allocated": allocated} if allocated is not None else {}
    args |= {"Total Reserved": reserved} if reserved is not None else {}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": tid, "ts": ts, "args": args}


def summarize(*events):
    return summarize_memory(build_timeline(make_trace(list(events))))


def flows(device):
    """Name → allocations, releases, allocated and released bytes; checks that they add up to the device."""
    found = {
        one.name: (one.allocations, one.releases, one.allocated_bytes, one.released_bytes)
        for one in device.operators
    }
    assert len(found) == len(device.operators)
    total = device.total
    sums = (total.allocations, total.releases, total.allocated_bytes, total.released_bytes)
    assert tuple(map(sum, zip(*found.values(), strict=True))) == sums
    return found


def test_event_is_charged_once_to_innermost_operator():
    found = summarize(
        event("ProfilerStep#3", 0, 100, cat="user_annotation"),
        event("my range", 5, 60, cat="user_annotation"),
        event("aten::linear", 10, 50),
        event("aten::addmm", 20, 40),
        event("inside an operator", 42, 48, cat="user_annotation"),
        memory(15, 100),  # directly in linear
        memory(25, 30),  # in addmm, so not in linear
        memory(30, -10),
        memory(31, 0),  # neither an allocation nor a release
        memory(45, 7),  # in linear: the annotation inside it isn't an operator
        memory(55, 1),  # in no operator, so the innermost annotation
        memory(70, -2),  # only in the step
        memory(120, 4),  # in nothing
        memory(25, 1000, tid=2),  # on another thread
    )
    (device,) = found.devices
    assert device.total.name == "GPU 0"
    assert flows(device) == {
        "aten::linear": (2, 0, 107, 0),
        "aten::addmm": (1, 1, 30, 10),
        "my range": (1, 0, 1, 0),
        "ProfilerStep": (0, 1, 0, 2),
        NO_OWNER: (2, 0, 1004, 0),
    }
    assert [one.increased_bytes for one in device.operators] == [1004, 107, 20, 1, -2]


def test_operator_owns_its_start_but_not_its_end():
    operators = [event("aten::a", 0, 30), event("aten::b", 10, 20), event("aten::empty_one", 15, 15)]
    found = summarize(*operators, *(memory(ts, 1) for ts in (0, 10, 15, 20, 30)))
    assert flows(found.devices[0]) == {
        "aten::a": (2, 0, 2, 0),
        "aten::b": (2, 0, 2, 0),  # an operator of zero length is never open
        NO_OWNER: (1, 0, 1, 0),
    }


def test_empty_is_attributed_to_its_caller():
    found = summarize(
        event("aten::conv2d", 0, 50),
        event("aten::empty", 10, 20),
        event("aten::zeros_like", 60, 90),
        event("aten::empty_like", 62, 80),
        event("aten::empty_strided", 64, 78),
        event("aten::empty", 100, 110),
        event("a range", 120, 150, cat="user_annotation"),
        event("aten::empty", 130, 140),
        memory(15, 1),
        memory(70, 2),
        memory(105, 4),
        memory(135, 8),
    )
    assert {name: flow[2] for name, flow in flows(found.devices[0]).items()} == {
        "aten::conv2d (aten::empty)": 1,
        "aten::zeros_like (aten::empty_strided)": 2,  # through aten::empty_like
        "aten::empty": 12,  # called by no operator
    }


def test_all_steps_share_one_row():
    steps = [event(f"ProfilerStep#{n}", 10 * n, 10 * n + 10, cat="user_annotation") for n in range(3)]
    found = summarize(*steps, memory(5, 1), memory(15, 2), memory(25, -3))
    assert flows(found.devices[0]) == {"ProfilerStep": (2, 1, 3, 3)}


def test_peaks_are_within_window():
    found = summarize(
        event("aten::a", 0, 100),
        memory(10, 5, allocated=105, reserved=200),  # so 100 bytes were allocated before
        memory(20, 50, allocated=155, reserved=300),
        memory(30, -150, allocated=5, reserved=100),
        memory(15, 7, allocated=7, reserved=0, device_type=CPU),
        memory(25, -40, allocated=60, reserved=90, device=1),  # never above the starting level
    )
    cpu, first, second = found.devices
    assert [device.total.name for device in found.devices] == ["CPU", "GPU 0", "GPU 1"]
    assert (first.begin_bytes, first.peak_allocated_bytes, first.end_bytes) == (100, 155, 5)
    assert first.peak_reserved_bytes == 300
    assert (second.begin_bytes, second.peak_allocated_bytes, second.end_bytes) == (100, 100, 60)
    assert (cpu.begin_bytes, cpu.peak_allocated_bytes, cpu.end_bytes) == (0, 7, 7)
    assert cpu.peak_reserved_bytes is None  # torch writes 0, but the CPU's allocator reserves nothing


def test_cpu_levels_are_sums():
    """Torch writes 0 for the shared memory that DataLoader workers send, which isn't a level."""
    (cpu,) = summarize(
        memory(10, -40, allocated=960, device_type=CPU),  # allocated before the window
        memory(20, 100, allocated=0, device_type=CPU),
        memory(30, 50, allocated=1010, device_type=CPU),
        memory(40, -30, device_type=CPU),
    ).devices
    assert (cpu.begin_bytes, cpu.peak_allocated_bytes, cpu.end_bytes) == (0, 110, 80)
    assert cpu.end_bytes == cpu.total.increased_bytes
    (freed,) = summarize(memory(10, -40, allocated=5, device_type=CPU)).devices
    assert (freed.begin_bytes, freed.peak_allocated_bytes, freed.end_bytes) == (0, 0, -40)


def test_unrecorded_levels_are_none():
    (device,) = summarize(event("aten::a", 0, 100), memory(10, 5), memory(20, -5)).devices
    levels = (device.begin_bytes, device.peak_allocated_bytes, device.peak_reserved_bytes, device.end_bytes)
    assert levels == (None, None, None, None)


@pytest.mark.parametrize(
    ("device_type", "device", "name"),
    [
        (1, 3, "GPU 3"),
        (6, 0, "GPU 0"),
        (12, 1, "XPU 1"),
        (18, 0, "IPU 0"),
        (19, 0, "MTIA 0"),
        (20, 2, "PrivateUse1 2"),
        (17, 2, "device type 17 2"),
        (-1, -1, "unknown device"),
    ],
)
def test_device_names(device_type, device, name):
    found = summarize(event("aten::a", 0, 9), memory(5, 1, device=device, device_type=device_type))
    assert found.devices[0].total.name == name


def test_trace_without_memory_events():
    reason = why_not(summarize, event("aten::a", 0, 100))
    assert reason == "memory wasn't recorded; set profile_memory=True"
    table = table_of(MEMORY, {0: reason})
    assert (table.rows, table.absent_reason) == ((), reason)


def two_devices():
    return summarize(
        event("aten::a", 0, 100),
        event("aten::b", 10, 20),
        memory(5, 64, allocated=64, reserved=0, device_type=CPU),
        memory(15, 100, allocated=100, reserved=200),
        memory(50, -30, allocated=70, reserved=200),
    )


def test_table():
    table = table_of(MEMORY, {0: two_devices()})
    assert [column.unit for column in table.columns[1:3]] == [Unit.COUNT] * 2
    assert {column.unit for column in table.columns[3:]} == {Unit.BYTES}
    assert list(zip(table.depths, table.rows, strict=True)) == [
        (0, ("CPU", 1, 0, 64, 0, 64, 64, None, 0, 64)),
        (1, ("aten::a", 1, 0, 64, 0, 64, None, None, None, None)),
        (0, ("GPU 0", 1, 1, 100, 30, 70, 100, 200, 0, 70)),
        (1, ("aten::b", 1, 0, 100, 0, 100, None, None, None, None)),
        (1, ("aten::a", 0, 1, 0, 30, -30, None, None, None, None)),
    ]
    assert not any("unknown" in note for note in table.notes)


def test_table_of_several_ranks():
    unknown = summarize(event("aten::a", 0, 9), memory(5, 1))
    table = table_of(MEMORY, {2: unknown, 0: two_devices(), 1: "no memory"})
    names = [row[0] for row, depth in zip(table.rows, table.depths, strict=True) if depth == 0]
    assert names == ["rank 0 CPU", "rank 0 GPU 0", "rank 2 GPU 0"]
    assert "Without rank 1: no memory." in table.notes
    assert any("unknown for rank 2 GPU 0 because" in note for note in table.notes)


# The oracle: replays one thread up to the given moment, with a list as its stack.

WANTED = {"op": "cpu_op", "range": "user_annotation", "call": "cuda_runtime"}


def replay(trace, track, moment, is_wanted):
    """Row of the innermost wanted event open on the track at the moment, or -1."""
    stack = []
    for row in range(len(trace)):
        begin, end = int(trace.begin_ns[row]), int(trace.end_ns[row])
        if trace.track[row] != track or begin > moment:
            continue
        stack = [(other, until) for other, until in stack if until > begin]
        stack.append((row, min([end, *(until for _, until in stack)])))
    still_open = [row for row, until in stack if until > moment and is_wanted[row]]
    return still_open[-1] if still_open else -1


@st.composite
def recordings(draw):
    """Events, mostly not properly nested, on two threads, and moments on three."""
    spans = st.tuples(
        st.sampled_from(sorted(WANTED)), st.integers(0, 30), st.integers(0, 20), st.integers(1, 2)
    )
    events = [
        event(f"{kind}{number}", begin, begin + size, tid, WANTED[kind])
        for number, (kind, begin, size, tid) in enumerate(draw(st.lists(spans, min_size=1, max_size=12)))
    ]
    moments = st.lists(st.tuples(st.integers(0, 55), st.integers(1, 3)), min_size=1, max_size=6)
    return [*events, *(memory(ts, 1 + index, tid=tid) for index, (ts, tid) in enumerate(draw(moments)))]


@settings(max_examples=150, deadline=None)
@given(recordings(), st.booleans())
def test_innermost_matches_oracle(events, operators_only):
    timeline = build_timeline(make_trace(events))
    trace, moments = timeline.trace, timeline.trace.allocations
    wanted = timeline.is_operator if operators_only else timeline.is_operator | timeline.is_annotation
    found = innermost_at(timeline, moments.track, moments.time_ns, wanted, clipped_ends(timeline))
    expected = [
        replay(trace, track, moment, wanted)
        for track, moment in zip(moments.track.tolist(), moments.time_ns.tolist(), strict=True)
    ]
    assert found.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(recordings())
def test_charges_match_oracle(events):
    timeline = build_timeline(make_trace(events))
    trace, moments = timeline.trace, timeline.trace.allocations
    expected = Counter()
    for track, moment, size in zip(
        moments.track.tolist(), moments.time_ns.tolist(), moments.size_bytes.tolist(), strict=True
    ):
        row = replay(trace, track, moment, timeline.is_operator)
        row = replay(trace, track, moment, timeline.is_annotation) if row < 0 else row
        expected[NO_OWNER if row < 0 else trace.name_of(row)] += size
    (device,) = summarize_memory(timeline).devices
    assert {name: flow[2] for name, flow in flows(device).items()} == expected


@settings(max_examples=100, deadline=None)
@given(recordings())
def test_nearest_around_matches_nearest_for_few_rows(events):
    timeline = build_timeline(make_trace(events))
    wanted, rows = timeline.is_operator, np.arange(0, len(timeline.trace), 2)
    expected = timeline.nearest(wanted)[rows]
    some = np.append(rows, -1)
    assert nearest_around(timeline, some, wanted).tolist() == [*expected.tolist(), -1]
    itself = np.where(wanted[rows], rows, expected)
    assert nearest_around(timeline, some, wanted, or_itself=True).tolist() == [*itself.tolist(), -1]


# Real traces against the removed plugin


@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "v100_resnet50_workers4"])
def test_resnet_matches_plugin(name):
    """The plugin's self allocations; it doesn't split aten::empty by caller and skips ops without any."""
    timeline = build_timeline(load(name))
    found = summarize_memory(timeline)
    rows = reference(name, "tb_plugin")["memory_stats"]["rows"]
    assert [device.total.name for device in found.devices] == ["CPU", "GPU 0"]
    for device in found.devices:
        flows(device)
        counts, sizes = Counter(), Counter()
        for one in device.operators:
            operator = one.name.rpartition(" (")[2].rstrip(")")
            counts[operator] += one.allocations
            sizes[operator] += one.allocated_bytes
        truth = {row[0]: row for row in rows[device.total.name.replace(" ", "")]}
        assert len(truth) > 5 or name.endswith("4")
        for operator, row in truth.items():
            assert counts[operator] == row[5]
            assert sizes[operator] / 1024 == pytest.approx(row[7], abs=0.0051)
        operators = {name for name in counts if name.startswith("aten::") and counts[name]}
        assert operators <= truth.keys()
    sizes = timeline.trace.allocations.size_bytes
    assert sum(device.total.increased_bytes for device in found.devices) == int(sizes.sum())
