"""Timelines: hand-made and real traces, a slow oracle for the rows, and packing round trips."""

from __future__ import annotations

import sys
from collections import Counter as Multiset
from dataclasses import fields, replace
from functools import cache
from hashlib import sha512
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lightning_modelprof
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.dashboard_entry import Counter, DrawnTimeline, Lane
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.timeline.critical_path import PATH_PREFIX
from lightning_modelprof.report.timeline.details import WORDS
from lightning_modelprof.report.timeline.idle_slices import IDLE_WORDS
from lightning_modelprof.report.timeline.lanes import find_depths
from lightning_modelprof.report.timeline.timeline import MOST_POINTS, thin, timeline_of
from lightning_modelprof.show.html.colors import color_class
from lightning_modelprof.show.tensorboard.packing import pack_columns, unpack_columns
from lightning_modelprof.show.tensorboard.timeline_columns import (
    PYTHON_FUNCTION,
    check_timeline,
    pack_timeline,
    unpack_timeline,
)
from lightning_modelprof.trace.reader import read_trace
from tests.support.traces import FOLDER, event, load, make_trace

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from generate_trace import generate_trace

pytestmark = pytest.mark.slow

STATIC = Path(lightning_modelprof.__file__).parent / "tensorboard_plugin" / "static"
REAL = sorted(path.name.removesuffix(".pt.trace.json.gz") for path in FOLDER.glob("*.pt.trace.json.gz"))


def timeline(*events, **metadata):
    return timeline_of(make_trace(list(events), **metadata))


def memory(ts, size, allocated=None, reserved=None, device=0, device_type=1):
    args = {"Bytes": size, "Device Type": device_type, "Device Id": -1 if device_type == 0 else device}
    args |= {"Total Allocated": allocated} if allocated is not None else {}
    args |= {"Total Reserved": reserved} if reserved is not None else {}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args}


def thread_name(tid, name, pid=1):
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def slices(found):
    """Per slice: lane label, depth, name, start and duration."""
    return [
        (found.lanes[lane].label, depth, found.names[name], begin, duration)
        for lane, depth, name, begin, duration in zip(
            found.lane.tolist(), found.depth.tolist(), found.name.tolist(),
            found.slice_begin_ns.tolist(), found.slice_duration_ns.tolist(), strict=True,
        )
    ]  # fmt: skip


def by_name(found, column):
    """Value by slice name, without idle time."""
    return {
        found.names[name]: value
        for name, value in zip(found.name.tolist(), column, strict=True)
        if found.names[name] not in IDLE_WORDS
    }


def depths(found):
    return by_name(found, found.depth.tolist())


def kinds(found):
    return by_name(found, [found.categories[index] for index in found.category.tolist()])


def details(found):
    return by_name(found, [found.details[index] if index >= 0 else None for index in found.detail.tolist()])


# Rows


def test_nested_slices_are_as_deep_as_calls():
    found = timeline(
        event("user_annotation", "step", 0, 100),
        event("cpu_op", "outer", 10, 50),
        event("cpu_op", "inner", 10, 20),
        event("cpu_op", "next", 20, 30),
        event("cpu_op", "no length", 20, 20),
        event("cpu_op", "at the end", 100, 100),
        event("cpu_op", "elsewhere", 15, 16, tid=2),
    )
    assert depths(found) == {
        "step": 0, "outer": 1, "inner": 2, "next": 2, "no length": 3, "at the end": 0, "elsewhere": 0,
    }  # fmt: skip


def test_late_slice_goes_one_deeper_and_keeps_its_times():
    found = timeline(
        event("cpu_op", "outer", 0, 10),
        event("cpu_op", "late", 8, 12),
        event("cpu_op", "in both", 9, 10),
        event("cpu_op", "next", 10, 20),
        event("cpu_op", "in next", 13, 14),
    )
    # "next" is back in the first row, so what it contains doesn't stay deeper.
    assert depths(found) == {"outer": 0, "late": 1, "in both": 2, "next": 0, "in next": 1}
    assert ("main thread 1", 1, "late", 8000, 4000) in slices(found)


def test_crossing_slices_need_two_rows():
    chain = [event("kernel", f"k{i}", 10 * i, 10 * i + 11, tid=7, pid=0) for i in range(20)]
    assert list(depths(timeline(*chain)).values()).count(1) == 10


def test_range_that_outlives_its_function_contains_what_follows():
    found = depths(
        timeline(
            event("python_function", "train", 0, 100),
            event("python_function", "enter", 10, 15),
            event("user_annotation", "range", 12, 60),
            event("python_function", "forward", 20, 50),
        )
    )
    assert found == {"train": 0, "enter": 1, "range": 2, "forward": 3}


def oracle(events):
    """Rows of one lane's (begin, end) slices: each in the first free row below all that contain it."""
    rows = []
    for i, (begin, end) in enumerate(events):
        still_open = [j for j in range(i) if events[j][1] > begin]
        row = max((rows[j] + 1 for j in still_open if events[j][1] >= end), default=0)
        while any(rows[j] == row for j in still_open):
            row += 1
        rows.append(row)
    return rows


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 25)), min_size=1, max_size=40
)


@settings(max_examples=100, deadline=None)
@given(SPANS)
def test_depths_match_oracle(spans):
    spans = sorted((begin, -(begin + size), lane) for lane, begin, size in spans)
    begin, end, lane = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    found = find_depths(begin, -end, lane)
    assert len(found) == len(spans) > 0
    for one in np.unique(lane):
        own = np.flatnonzero(lane == one)
        assert found[own].tolist() == oracle(
            list(zip(begin[own].tolist(), (-end[own]).tolist(), strict=True))
        )


def is_derived(word):
    """Whether a category's slices are idle time or the critical path instead of events."""
    return word in IDLE_WORDS or word.startswith(PATH_PREFIX)


def check_layout(found, trace):
    """Every event is one slice, besides derived slices; slices are sorted and don't overlap in a row."""
    is_idle = np.array([is_derived(word) for word in found.categories])[found.category]
    every = [row[2:] for row, idle in zip(slices(found), is_idle, strict=True) if not idle]
    assert Multiset(every) == Multiset(
        zip(
            (trace.names[index] for index in trace.name.tolist()),
            trace.begin_ns.tolist(),
            trace.duration_ns.tolist(),
            strict=True,
        )
    )
    begin, end = found.slice_begin_ns, found.slice_begin_ns + found.slice_duration_ns
    keys = list(zip(found.lane.tolist(), found.depth.tolist(), begin.tolist(), strict=True))
    assert keys == sorted(keys)
    same_row = (np.diff(found.lane) == 0) & (np.diff(found.depth) == 0)
    assert (begin[1:] >= end[:-1])[same_row].all()
    moments = [time for counter in found.counters for time in counter.time_ns.tolist()]
    assert found.begin_ns == min([*begin.tolist(), *moments]) <= 0
    assert found.end_ns == max([*end.tolist(), *moments])


KINDS = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "kernel", "gpu_memcpy")


@st.composite
def traces(draw):
    events = []
    for number in range(draw(st.integers(1, 25))):
        cat = draw(st.sampled_from(KINDS))
        on_device = cat in ("kernel", "gpu_memcpy")
        begin = draw(st.integers(0, 60))
        events.append(
            event(
                cat,
                draw(st.sampled_from(["aten::mm", "ProfilerStep#3", "</script>\u2028", ""]))
                + str(number % 7),
                begin,
                begin + draw(st.integers(0, 30)),
                tid=draw(st.integers(1, 2)),
                pid=0 if on_device else 1,
                **({"device": 0, "stream": 7} if on_device else {}),
                **({"correlation": draw(st.integers(1, 6))} if cat not in KINDS[:3] else {}),
            )
        )
    moments = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(-9, 9)), max_size=5))
    return make_trace([*events, *(memory(ts, size, allocated=50 + size) for ts, size in moments)])


@settings(max_examples=100, deadline=None)
@given(traces())
def test_any_trace_has_a_valid_timeline(trace):
    found = timeline_of(trace)
    check_layout(found, trace)
    check_launches(found, trace)
    assert_same(unpack_timeline(pack_timeline(found)), found)
    check_timeline(pack_timeline(found))
    ends = found.slice_begin_ns + found.slice_duration_ns
    is_idle = np.array([is_derived(word) for word in found.categories])[found.category]
    for one in np.flatnonzero(
        ~is_idle
    ).tolist():  # containment; idle time has only events without length in it
        inside = (found.lane == found.lane[one]) & (found.slice_begin_ns >= found.slice_begin_ns[one])
        inside &= (ends <= ends[one]) & (found.slice_duration_ns < found.slice_duration_ns[one])
        inside &= found.slice_begin_ns < ends[one]
        assert (found.depth[inside] > found.depth[one]).all()


# Lanes


def test_lanes_are_in_reading_order():
    found = timeline(
        thread_name(11, "thread 11 (pt_main_thread)"),
        thread_name(12, "thread 12 (pt_autograd_0)"),
        thread_name(13, "thread 13 (pt_data_pin)"),
        thread_name(14, "thread 14 (my <b>thread)"),
        event("Trace", "PyTorch Profiler (0)", 0, 100, pid="Spans", tid="PyTorch Profiler"),
        event("kernel", "far", 5, 6, tid=20, pid=10, device=10, stream=20),
        event("kernel", "late stream", 5, 6, tid=20, pid=2, device=2, stream=20),
        event("kernel", "first stream", 5, 6, tid=7, pid=2, device=2, stream=7),
        event("cuda_sync", "Context Sync", 5, 6, tid=-1, pid=2),
        event("cpu_op", "short", 0, 3, tid=14),
        event("cpu_op", "autograd::engine::evaluate_function: Mm", 0, 40, tid=15),
        event("cpu_op", "longest of all", 0, 90, tid=12),
        event("cpu_op", "pin", 0, 2, tid=13),
        event("user_annotation", "ProfilerStep#1", 0, 1, tid=11),
    )
    assert [(lane.group, lane.label, lane.is_device) for lane in found.lanes] == [
        ("GPU 2", "GPU 2 stream 7", True),
        ("GPU 2", "GPU 2 stream 20", True),
        ("GPU 2", "GPU 2 no stream", True),
        ("GPU 10", "GPU 10 stream 20", True),
        ("host", "main thread 11", False),
        ("host", "autograd thread 12", False),
        ("host", "autograd thread 15", False),
        ("host", "thread 14 (my <b>thread)", False),
        ("host", "DataLoader's pin-memory thread 13", False),
        ("other", "PyTorch Profiler", False),
    ]


def test_process_with_device_number_is_told_apart():
    """In a container the training may be process 1, thread 1, while device 1 has a stream 1."""
    found = timeline(
        event("cpu_op", "host", 0, 10, tid=1, pid=1), event("kernel", "device", 0, 20, tid=1, pid=1)
    )
    assert [lane.label for lane in found.lanes] == ["GPU 1 stream 1", "main thread 1"]
    assert depths(found) == {"host": 0, "device": 0}


def test_several_processes_are_told_apart():
    found = timeline(event("cpu_op", "a", 0, 2, pid=5, tid=8), event("cpu_op", "b", 0, 1, pid=6, tid=8))
    assert [lane.group for lane in found.lanes] == ["host process 5", "host process 6"]


# Kinds, details, launches, steps


def test_kinds_are_plain_words():
    named = {
        "operator": ("cpu_op", "aten::mm"),
        "user range": ("user_annotation", "mine"),
        "step": ("user_annotation", "ProfilerStep#2"),
        "phase": ("user_annotation", "modelprof: forward"),
        "module": ("user_annotation", "nn.Module: Linear_0"),
        "data loading": ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        "python function": ("python_function", "train.py(3): fit"),
        "runtime call": ("cuda_runtime", "cudaLaunchKernel"),
        "kernel": ("kernel", "gemm"),
        "memcpy": ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
        "memset": ("gpu_memset", "Memset (Device)"),
        "device range": ("gpu_user_annotation", "mine on the device"),
        "synchronization": ("cuda_sync", "Stream Synchronize"),
        "profiler overhead": ("overhead", "Buffer Flush"),
        "other event": ("unheard of", "?"),
    }
    talks = [
        ("kernel", "ncclDevKernel_AllReduce"),
        ("cpu_op", "record_param_comms"),
        ("user_annotation", "nccl:all_reduce"),
    ]
    old_range = ("Operator", "Optimizer.step#SGD.step")  # old versions of torch wrote ranges as operators
    events = [*named.values(), *talks, old_range]
    found = timeline(*(event(cat, name, i, i + 1) for i, (cat, name) in enumerate(events)))
    truth = {name: kind for kind, (_, name) in named.items()} | dict.fromkeys(
        (n for _, n in talks), "communication"
    )
    assert kinds(found) == truth | {old_range[1]: "user range"}
    assert set(found.categories) - set(IDLE_WORDS) == set(WORDS)


def test_every_kind_has_a_color():
    assert [word for word in (*WORDS, *IDLE_WORDS) if color_class(word) is None] == []


def test_details_of_each_kind():
    shapes = {"Input Dims": [[32, 3], []], "Concrete Inputs": ["", "1"]}
    comms = {
        "Collective name": "allreduce", "Process Group Name": "0", "Group size": 4, "dtype": "Float",
        "In msg nelems": 2500, "Out msg nelems": 2500,
    }  # fmt: skip
    found = timeline(
        event("cpu_op", "both", 0, 9, **shapes, **{"Call stack": "in.py(1): f;out.py(2): g"}),
        event("cpu_op", "shapes", 0, 8, **shapes),
        event("cpu_op", "old", 0, 7, **{"Input Dims": [[2]]}),
        event("cpu_op", "tensors", 0, 7, **{"Input Dims": [[2], [3]], "Concrete Inputs": ["", ""]}),
        event("cpu_op", "nothing", 0, 6),
        event("cpu_op", "record_param_comms", 0, 5, **comms),
        event(
            "kernel", "gemm", 0, 5, tid=7, pid=0, **{"blocks per SM": 0.5, "est. achieved occupancy %": 25}
        ),
        event("gpu_memcpy", "copy", 0, 5, tid=8, pid=0, bytes=4096),
    )
    inputs = 'input shapes: [[32, 3], []]\ninput values: ["", "1"]'
    assert details(found) == {
        "both": f"{inputs}\ncall stack, innermost first:\nin.py(1): f\nout.py(2): g",
        "shapes": inputs,
        "old": "input shapes: [[2]]",
        "tensors": "input shapes: [[2], [3]]",
        "nothing": None,
        "record_param_comms": "collective: allreduce, group 0 of 4 ranks, 2,500 Float in, 2,500 Float out",
        "gemm": "blocks per SM: 0.5\nestimated occupancy: 0.25 of 1",
        "copy": "4,096 bytes",
    }
    assert len(found.details) == 8  # including that of idle time


def test_launches_are_slice_positions():
    found = timeline(
        event("cpu_op", "aten::mm", 0, 9, tid=2, **{"External id": 5}),
        event("cuda_runtime", "launch", 1, 2, tid=2, correlation=3),
        event("kernel", "launched", 4, 5, tid=7, pid=0, correlation=3),
        event("kernel", "by operator", 6, 7, tid=7, pid=0, correlation=4, **{"External id": 5}),
        event("kernel", "by nobody", 8, 9, tid=7, pid=0),
    )
    names = [found.names[index] for index in found.name.tolist()]
    launched_by = by_name(found, [names[index] if index >= 0 else None for index in found.launch.tolist()])
    assert launched_by == {
        "aten::mm": None, "launch": None, "launched": "launch", "by operator": "aten::mm", "by nobody": None,
    }  # fmt: skip


def test_steps_last_until_their_kernels_end():
    found = timeline(
        event("user_annotation", "ProfilerStep#4", 0, 10),
        event("cuda_runtime", "cudaLaunchKernel", 1, 2, correlation=1),
        event("user_annotation", "ProfilerStep#5", 10, 20),
        event("cuda_runtime", "cudaLaunchKernel", 11, 12, correlation=2),
        event("kernel", "gemm", 5, 14, tid=7, pid=0, correlation=1),
        event("kernel", "gemm", 14, 23, tid=7, pid=0, correlation=2),
    )
    assert found.steps == ((4, 0, 14_000), (5, 14_000, 23_000))
    assert found.notes == ()


def test_missing_steps_are_noted():
    found = timeline(event("kernel", "alone", 0, 5))
    assert (found.steps, found.notes) == ((), ("The trace has no steps.",))
    assert len(timeline_of(make_trace([memory(5, 3)]))) == 0


def test_rank_comes_from_facts():
    trace = make_trace([event("cpu_op", "a", 0, 1)], distributedInfo={"rank": 3, "world_size": 4})
    assert timeline_of(trace).rank is None
    assert timeline_of(trace, TraceFacts(trace)).rank == 3


# Counters


def points(found):
    return {c.label: list(zip(c.time_ns.tolist(), c.value.tolist(), strict=True)) for c in found.counters}


def kernel(begin, end, blocks=None, **args):
    args |= {} if blocks is None else {"blocks per SM": blocks}
    return event("kernel", "k", begin, end, pid=0, device=0, stream=7, **{"tid": 7, **args})


def test_sm_efficiency_is_at_most_1():
    found = timeline(kernel(0, 4, 0.5), kernel(2, 6, 0.75, tid=8), kernel(6, 8, 9.0), kernel(10, 11, 0.25))
    assert points(found) == {
        "GPU 0 SM efficiency (est.)": [
            (0, 0.5), (2000, 1.0), (4000, 0.75), (6000, 1.0), (8000, 0.0), (10_000, 0.25), (11_000, 0.0),
        ]
    }  # fmt: skip
    assert [counter.unit for counter in found.counters] == [Unit.RATIO]


def test_kernels_are_counted_if_blocks_are_unknown():
    found = timeline(kernel(1, 4), kernel(2, 6, 0.5, tid=8), event("cpu_op", "a", 0, 1))
    assert points(found) == {
        "GPU 0 SM efficiency (est.)": [(0, 0.0), (2000, 0.5), (6000, 0.0)],
        "GPU 0 kernels running": [(0, 0.0), (1000, 1.0), (2000, 2.0), (4000, 1.0), (6000, 0.0)],
    }


def test_memory_counter_starts_with_earlier_allocations():
    found = timeline(
        event("cpu_op", "a", 0, 100),
        memory(10, 5, allocated=105, reserved=200),
        memory(20, -50, allocated=55, reserved=200),
        memory(30, -7, device_type=0),
        memory(40, 9, allocated=9, device=10),
        memory(50, 9, device=2),
    )
    assert points(found) == {
        "CPU memory allocated since the start": [(0, 0), (30_000, -7)],
        "GPU 0 memory allocated": [(0, 100), (10_000, 105), (20_000, 55)],
        "GPU 0 memory reserved": [(10_000, 200), (20_000, 200)],
        "GPU 10 memory allocated": [(0, 0), (40_000, 9)],
    }
    assert [counter.group for counter in found.counters] == ["host", "GPU 0", "GPU 0", "GPU 10"]
    assert any("CPU memory is relative to trace start" in note for note in found.notes)


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_keeps_extremes_and_last_values(values, most):
    whole = Counter(
        label="x",
        group="host",
        unit=Unit.BYTES,
        time_ns=np.arange(len(values)) * 3,
        value=np.array(values, float),
    )
    few = thin(whole, most)
    assert len(few.value) <= most or len(values) <= most
    assert few.value.tolist() == whole.value[few.time_ns // 3].tolist()
    assert (np.diff(few.time_ns) > 0).all()
    assert (few.time_ns[0], few.time_ns[-1]) == (0, whole.time_ns[-1])
    if len(values) > most:
        edges = [i * len(values) // ((most - 1) // 3) for i in range((most - 1) // 3 + 1)]
        for first, last in pairwise(edges):
            kept = few.value[(few.time_ns >= 3 * first) & (few.time_ns < 3 * last)]
            assert (kept.min(), kept.max(), kept[-1]) == (
                min(values[first:last]), max(values[first:last]), values[last - 1],
            )  # fmt: skip


def test_many_points_are_thinned_with_a_note():
    found = timeline(*(memory(i, 1, allocated=i + 1) for i in range(MOST_POINTS)), event("cpu_op", "a", 0, 1))
    (counter,) = found.counters
    assert len(counter.value) <= MOST_POINTS
    assert counter.value[-1] == MOST_POINTS
    assert any(f"of {MOST_POINTS + 1:,} points" in note for note in found.notes)


# Real and generated traces


def check_launches(found, trace):
    """Launches match the analysis, compared by start, duration and name."""
    links = build_timeline(trace).launch

    def described(row):
        return trace.name_of(row), int(trace.begin_ns[row]), int(trace.duration_ns[row])

    truth = Multiset()
    for work, runtime, operator in zip(
        trace.device.event.tolist(), links.runtime.tolist(), links.operator.tolist(), strict=True
    ):
        launcher = runtime if runtime >= 0 else operator
        if launcher >= 0:
            truth[described(work), described(launcher)] += 1
    every = [row[2:] for row in slices(found)]
    is_path = np.array([word.startswith(PATH_PREFIX) for word in found.categories])[found.category]
    linked = np.flatnonzero((found.launch >= 0) & ~is_path).tolist()
    assert Multiset((every[i], every[found.launch[i]]) for i in linked) == truth


def check_counters(found, facts):
    """Memory peaks and ends match the Memory Summary, and mean efficiency the Device Summary."""
    counters = {counter.label: counter for counter in found.counters}
    for device in getattr(facts.get(TraceFacts.memory), "devices", ()):
        name = device.total.name
        label = f"{name} memory allocated" + (" since the start" if name == "CPU" else "")
        if device.peak_allocated_bytes is None:
            assert label not in counters
        else:
            value = counters[label].value
            assert (value[0], value.max(), value[-1]) == (
                device.begin_bytes, device.peak_allocated_bytes, device.end_bytes,
            )  # fmt: skip
        if device.peak_reserved_bytes is not None:
            assert counters[f"{name} memory reserved"].value.max() == device.peak_reserved_bytes
    usage = facts.device_usage
    for device in usage.devices:
        counter = counters.get(f"GPU {device.number} SM efficiency (est.)")
        assert (counter is None) == (device.sm_efficiency is None)
        if counter is not None and not any(counter.label in note for note in found.notes):
            times = np.clip(np.append(counter.time_ns, found.end_ns), *usage.span)
            mean = (counter.value * np.diff(times)).sum() / (usage.span[1] - usage.span[0])
            assert mean == pytest.approx(device.sm_efficiency, rel=1e-9)


@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_valid_timelines(name):
    trace = load(name)
    facts = TraceFacts(trace)
    found = timeline_of(trace, facts)
    check_layout(found, trace)
    check_launches(found, trace)
    check_counters(found, facts)
    assert (found.launch >= 0).sum() > 0.9 * len(trace.device)
    assert found.lanes[0].label == "critical path"
    assert found.lanes[1].is_device
    assert next(lane for lane in found.lanes[1:] if not lane.is_device).label.startswith("main thread")
    assert found.depth.max() < 20
    assert_same(unpack_timeline(pack_timeline(found)), found)
    check_timeline(pack_timeline(found))


def test_generated_trace_with_gpu_memory(tmp_path):
    path = tmp_path / "generated.pt.trace.json"
    generate_trace(path, 1_500_000, seed=5)
    trace = read_trace(path)
    facts = TraceFacts(trace)
    found = timeline_of(trace, facts)
    check_layout(found, trace)
    check_launches(found, trace)
    check_counters(found, facts)
    assert "GPU 0 memory reserved" in points(found)


# Packing

HALF_SURROGATES = st.characters(min_codepoint=0xDC00, max_codepoint=0xDFFF)
TEXTS = st.lists(st.text(st.characters() | HALF_SURROGATES, max_size=8), min_size=1, max_size=4, unique=True)


def assert_same(left, right):
    for one in fields(DrawnTimeline):
        a, b = getattr(left, one.name), getattr(right, one.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype == np.int64
            assert np.array_equal(a, b), one.name
        elif one.name == "counters":
            assert [(c.label, c.group, c.unit, c.time_ns.tolist(), c.value.tolist()) for c in a] == [
                (c.label, c.group, c.unit, c.time_ns.tolist(), c.value.tolist()) for c in b
            ]
        else:
            assert a == b, one.name


@st.composite
def timelines(draw):
    """Any timeline, even one that no trace produces."""
    count = draw(st.integers(0, 12))
    ns = st.integers(-(2**51), 2**51)

    def column(low, high):
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), np.int64)

    names, categories, details_ = draw(TEXTS), draw(TEXTS), draw(TEXTS)
    lanes = tuple(Lane(label=text, group="g" + text, is_device=len(text) > 3) for text in draw(TEXTS))
    lane, depth = column(0, len(lanes) - 1), column(0, 5)
    order = np.lexsort((depth, lane))
    moments = sorted(draw(st.lists(ns, max_size=5)))
    floats = st.floats(allow_nan=False)
    values = draw(st.lists(floats, min_size=len(moments), max_size=len(moments)))
    return DrawnTimeline(
        source=draw(st.text(max_size=9)), rank=draw(st.none() | st.integers(0, 9)),
        begin_ns=draw(ns), end_ns=draw(ns),
        lanes=lanes, names=tuple(names), categories=tuple(categories), details=tuple(details_),
        steps=tuple(draw(st.lists(st.tuples(st.integers(0, 9), ns, ns), max_size=3))),
        lane=lane[order], depth=depth[order],
        slice_begin_ns=column(0, 2**52), slice_duration_ns=column(0, 2**52),
        name=column(0, len(names) - 1), category=column(0, len(categories) - 1),
        detail=column(-1, len(details_) - 1), launch=column(-1, count - 1),
        counters=(
            Counter(
                label="c", group="g", unit=draw(st.sampled_from(Unit)),
                time_ns=np.array(moments, np.int64), value=np.array(values, np.float64),
            ),
        ) * draw(st.integers(0, 2)),
        notes=tuple(draw(TEXTS)),
    )  # fmt: skip


@settings(deadline=None)
@given(timelines())
def test_packing_round_trip(whole):
    assert_same(unpack_timeline(pack_timeline(whole)), whole)


def test_lone_surrogate_survives_packing():
    whole = replace(timeline(event("cpu_op", "a", 0, 10)), notes=("\ud800",))
    assert unpack_timeline(pack_timeline(whole)).notes == ("\ud800",)


def test_packed_layout_for_browsers():
    """The contract with the page: keys, column names, rows of slices."""
    packed = pack_timeline(
        timeline(
            event("user_annotation", "ProfilerStep#1", 0, 10),
            event("cpu_op", "</script>\U0001f600", 1, 5),
            event("cpu_op", "b", 6, 7),
            memory(3, 8, allocated=8),
        )
    )
    meta, columns = unpack_columns(packed)
    assert meta == {
        "source": "hand-made", "rank": None, "begin_ns": 0, "end_ns": 10_000,
        "lanes": [{"label": "main thread 1", "group": "host", "is_device": False}],
        "names": ["ProfilerStep#1", "</script>\U0001f600", "b"], "details": [],
        "categories": ["operator", "step"],
        "steps": [[1, 0, 10_000]], "notes": [],
        "counters": [{"label": "GPU 0 memory allocated", "group": "GPU 0", "unit": "bytes", "count": 2}],
        "rows": [[0, 0, 1], [0, 1, 2]],
    }  # fmt: skip
    assert {name: values.tolist() for name, values in columns.items()} == {
        "begin": [0, 1000, 6000], "duration": [10_000, 4000, 1000], "name": [0, 1, 2],
        "category": [1, 0, 0], "detail": [-1, -1, -1], "launch": [-1, -1, -1],
        "counter_0_time": [0, 3000], "counter_0_value": [0.0, 8.0],
    }  # fmt: skip


@cache
def large():
    """Python functions around operators of different lengths that launch kernels."""
    events = [event("user_annotation", "ProfilerStep#1", 0, 5000)]
    for i in range(400):
        at = 10 * i
        events += [
            event("python_function", f"f{i}", at, at + 9),
            event("cpu_op", f"op{i}", at + 1, at + 2 + (i * 7919 % 400) / 100, **{"Input Dims": [[i]]}),
            event("cuda_runtime", "launch", at + 1.1, at + 1.2, correlation=i + 1),
            event("kernel", "k", at + 4, at + 5 + (i % 3), tid=7, pid=0, correlation=i + 1),
        ]
    return timeline(*events)


def test_python_functions_are_dropped_first():
    whole = large()
    without = pack_timeline(whole, len(pack_timeline(whole)) - 1)
    found = unpack_timeline(without)
    assert PYTHON_FUNCTION in whole.categories
    assert PYTHON_FUNCTION not in found.categories
    assert len(found) == len(whole) - 400
    assert depths(found) == {
        name: depth - (name.startswith(("op", "launch")))
        for name, depth in depths(whole).items()
        if name[0] != "f"
    }  # each operator moved up into the row of its function
    (note,) = set(found.notes) - set(whole.notes)
    assert note.startswith("All 400 slices of Python functions are left out. The timeline")
    check_kept(found, whole)


def check_kept(found, whole):
    """Remaining slices keep their texts and launches."""

    def described(one):
        every = [row[2:] for row in slices(one)]
        return {
            (
                every[i],
                one.categories[one.category[i]],
                one.details[one.detail[i]] if one.detail[i] >= 0 else None,
                every[one.launch[i]] if one.launch[i] >= 0 else None,
            )
            for i in range(len(one))
        }  # fmt: skip

    left = {row[2:] for row in slices(found)}
    assert described(found) == {
        (what, kind, detail, launch if launch in left else None)
        for what, kind, detail, launch in described(whole)
        if what in left
    }
    assert set(found.names) == {name for name, _, _ in left}


def test_touching_slices_move_up_side_by_side():
    whole = timeline(
        event("cpu_op", "before", 0, 5),
        event("python_function", "".join(sha512(bytes([i])).hexdigest() for i in range(9)), 5, 10),
        event("cpu_op", "inside", 5, 6),
    )
    found = unpack_timeline(pack_timeline(whole, len(pack_timeline(whole)) - 1))
    assert depths(found) == {"before": 0, "inside": 0}


@settings(max_examples=100, deadline=None)
@given(SPANS.filter(lambda spans: len(spans) > 1), st.integers(0, 2**40))
def test_remaining_slices_move_up(spans, chosen):
    """Remaining slices don't overlap in a row, and nested ones are as deep as without the dropped ones."""
    is_function = [True, False, *(bool(chosen >> i & 1) for i in range(len(spans) - 2))]
    events = [
        # Long names that don't compress, so dropping the functions is enough.
        event("python_function", sha512(bytes([i])).hexdigest() * 2, begin, begin + size, tid=lane)
        if is_function[i]
        else event("cpu_op", f"e{i}", begin, begin + size, tid=lane)
        for i, (lane, begin, size) in enumerate(spans)
    ]
    trace = make_trace(events)
    whole = timeline_of(trace)
    found = unpack_timeline(pack_timeline(whole, len(pack_timeline(whole)) - 1))
    assume(not any("shorter than" in note for note in found.notes))
    alone = timeline_of(make_trace([one for one in events if one["cat"] == "cpu_op"]))
    shift = min(one["ts"] for one in events if one["cat"] == "cpu_op") - min(one["ts"] for one in events)
    ends = found.slice_begin_ns + found.slice_duration_ns
    same_row = (np.diff(found.lane) == 0) & (np.diff(found.depth) == 0)
    assert (found.slice_begin_ns[1:] >= ends[:-1])[same_row].all()
    assert sorted(row[2:] for row in slices(found)) == sorted(
        (name, begin + 1000 * shift, size) for _, _, name, begin, size in slices(alone)
    )
    for lane in np.unique(found.lane):  # rows without a gap
        assert set(found.depth[found.lane == lane]) == set(range(found.depth[found.lane == lane].max() + 1))
    begin, end = trace.begin_ns, trace.end_ns
    crosses = (begin[:, None] < begin) & (begin < end[:, None]) & (end[:, None] < end)
    if not (crosses & (trace.track[:, None] == trace.track)).any():
        assert depths(found) == depths(alone)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.15, 0.95))
def test_shortest_slices_are_dropped_next(share):
    whole = large()
    limit = int(share * len(pack_timeline(whole)))
    packed = pack_timeline(whole, limit)
    assert len(packed) <= limit
    found = unpack_timeline(packed)
    assume(len(found) < len(whole) - 400)
    check_kept(found, whole)
    others = [row for row in slices(whole) if not row[2].startswith("f")]
    shortest = min((row[4] for row in slices(found)), default=None)
    dropped = {row[2:] for row in others} - {row[2:] for row in slices(found)}
    assert shortest is None or max(size for _, _, size in dropped) < shortest
    assert any(
        f"{len(others) - len(found):,} of {len(others):,} slices, all shorter than" in note
        for note in found.notes
    )


def test_impossible_limit_drops_all_slices_with_note():
    whole = large()
    found = unpack_timeline(pack_timeline(whole, 1))
    assert len(found) == 0
    rest = f"{len(whole) - 400:,}"  # without the Python functions
    assert any(note.startswith(f"{rest} of {rest} slices, all shorter than") for note in found.notes)
    assert found.steps


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, columns: meta.pop("rows"),
        lambda meta, columns: meta.update(rows=[[0, 0, 1]]),
        lambda meta, columns: meta.update(rows=[[0, 0]]),
        lambda meta, columns: meta.update(rows=[[0, 0, -3]]),
        lambda meta, columns: meta.update(lanes=[{"label": "x"}]),
        lambda meta, columns: meta.update(steps=[[1, 2]]),
        lambda meta, columns: meta.update(counters=[{"label": "", "group": "", "unit": "?", "count": 2}]),
        lambda meta, columns: meta["counters"][0].update(count=7),
        lambda meta, columns: columns.pop("launch"),
        lambda meta, columns: columns.pop("counter_0_value"),
        lambda meta, columns: columns.update(name=columns["name"][:-1]),
    ],
)
def test_invalid_columns_are_rejected(change):
    whole = timeline(event("cpu_op", "a", 0, 9), event("cpu_op", "b", 1, 2), kernel(1, 2))
    meta, columns = unpack_columns(pack_timeline(whole))
    unpack_timeline(pack_columns(meta, columns))
    change(meta, columns)
    with pytest.raises(ValueError, match="no timeline"):
        unpack_timeline(pack_columns(meta, columns))


def test_trace_too_long_for_browsers_is_rejected():
    whole = timeline(event("cpu_op", "a", 0, 9))
    with pytest.raises(ValueError, match="53 bits"):
        pack_timeline(replace(whole, slice_begin_ns=np.array([2**53])))
