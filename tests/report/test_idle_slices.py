"""GPU idle time in the timeline: hand-made gaps, and real traces whose sums match the Idle Summary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_modelprof.analysis.timeline.calls import covered_time
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.idle import CAUSES, summarize_idle
from lightning_modelprof.report.timeline.idle_slices import IDLE_WORDS
from lightning_modelprof.report.timeline.timeline import timeline_of
from tests.support.random_traces import RandomTrace
from tests.support.traces import FOLDER, event, load, make_trace

US = 1000
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
REAL = sorted(path.name.removesuffix(".pt.trace.json.gz") for path in FOLDER.glob("*.pt.trace.json.gz"))


def launch(begin, correlation, tid=1):
    return event("cuda_runtime", "cudaLaunchKernel", begin, begin + 1, tid, correlation=correlation)


def work(begin, end, correlation, *, stream=7, device=0, name="k"):
    return event(
        "kernel", name, begin, end, stream, device, device=device, stream=stream, correlation=correlation
    )


def idle_of(trace):
    """Per idle slice: lane label, kind, start and end in microseconds, lines of its detail."""
    found = timeline_of(trace)
    result = []
    for index in np.flatnonzero(np.isin(np.array(found.categories)[found.category], IDLE_WORDS)).tolist():
        kind = found.categories[found.category[index]]
        assert found.names[found.name[index]] == kind
        begin = int(found.slice_begin_ns[index])
        end = begin + int(found.slice_duration_ns[index])
        lines = found.details[found.detail[index]].split("\n")
        label = found.lanes[found.lane[index]].label
        result.append((label, kind.removeprefix("idle: "), begin / US, end / US, lines))
    return sorted(result, key=lambda one: one[2])


def without_details(idle):
    return [one[:4] for one in idle]


def test_each_cause_gets_a_slice():
    """In the step [0, 500) the GPU is idle for the fetch [0, 60), then for the CPU until 100."""
    trace = make_trace(
        [
            event("user_annotation", "ProfilerStep#3", 0, 500),
            event("user_annotation", FETCH, 0, 60),
            launch(95, 1),
            work(100, 150, 1),
            launch(110, 2),
            work(155, 200, 2),  # launched before 150: a kernel gap of 5
            launch(120, 3),
            work(240, 250, 3, stream=9),  # 40 after stream 7 ended: another stream
            launch(125, 4),
            work(290, 300, 4, stream=20, name="ncclDevKernel_AllReduce"),
            launch(130, 5),
            work(340, 350, 5),  # after communication on another stream
            launch(135, 6),
            work(390, 400, 6),  # on the same stream: unknown cause
            event("cpu_op", "aten::item", 420, 460),
            launch(450, 7),
            work(470, 490, 7),
        ]
    )
    lane = "GPU 0 stream 7"  # busy for 125 of 145
    assert without_details(idle_of(trace)) == [
        (lane, "data loading", 0, 60),
        (lane, "host", 60, 100),
        (lane, "kernel gap", 150, 155),
        (lane, "other stream", 200, 240),
        (lane, "communication", 250, 290),
        (lane, "communication", 300, 340),
        (lane, "unknown", 350, 390),
        (lane, "host", 400, 470),
        (lane, "host", 490, 500),  # the CPU launched nothing more
    ]


def test_bounds_of_each_cause():
    unknown = 99  # the trace has no launch of this number
    trace = make_trace(
        [
            event("user_annotation", "ProfilerStep#3", 10, 400),
            launch(0, 1),  # the trace starts here
            launch(10, 2),
            work(20, 30, 2),  # launched exactly as the step starts
            work(35, 40, 1),  # launched at 0, which is a known time
            launch(11, 3),
            work(70, 80, 3),  # a gap of 30 is too long for a kernel gap
            launch(12, 4),
            work(109.999, 120, 4),  # a gap of 29.999 isn't too long
            work(125, 130, unknown),  # a short gap, but its launch is unknown
            work(170, 180, unknown, stream=9),
            launch(13, 5),
            work(220, 220, unknown),  # it takes no time, so the GPU has been idle since 180
            work(220, 230, 5, stream=9),
            launch(14, 6),
            work(270, 280, 6),
        ]
    )
    lane = "GPU 0 stream 7"
    assert without_details(idle_of(trace)) == [
        (lane, "unknown", 10, 20),
        (lane, "kernel gap", 30, 35),
        (lane, "unknown", 40, 70),
        (lane, "kernel gap", 80, 109.999),
        (lane, "unknown", 120, 125),
        (lane, "unknown", 130, 170),
        (lane, "unknown", 180, 220),
        (lane, "other stream", 230, 270),
        (lane, "host", 280, 400),  # the CPU launched nothing more
    ]


def test_step_thread_counts_after_last_kernel():
    trace = make_trace(
        [
            event("cpu_op", "aten::first", 0, 400, 2),
            event("cpu_op", "aten::second", 1, 399, 2),
            event("user_annotation", "ProfilerStep#3", 10, 400),
            launch(10, 1),
            work(20, 30, 1),
            event("cpu_op", "aten::item", 100, 300),
        ]
    )
    *_, begin, end, lines = idle_of(trace)[-1]
    assert (begin, end) == (30, 400)
    assert any("aten::item" in line for line in lines)
    assert not any("aten::first" in line or "aten::second" in line for line in lines)


def test_first_event_may_be_the_launch():
    trace = make_trace(
        [
            launch(0, 1, tid=2),
            event("user_annotation", "ProfilerStep#3", 5, 100),
            launch(6, 2),
            work(8, 10, 2),
            work(50, 100, 1),
            event("cpu_op", "aten::mm", 12, 48, 2),
            event("cpu_op", "aten::item", 12, 48),
        ]
    )
    *_, begin, end, lines = idle_of(trace)[-1]
    assert (begin, end) == (10, 50)
    assert lines[1] == "meanwhile on thread 2: aten::mm"


def test_idle_time_fills_one_row_of_computing_stream():
    """Events without length split the idle slice."""
    trace = make_trace(
        [
            work(0, 10, 1),
            work(15, 15, 2),
            work(20, 30, 3),
            work(25, 70, 4, stream=20, name="ncclDevKernel_AllReduce"),
            work(80, 81, 5, stream=20, name="ncclDevKernel_AllReduce"),
        ]
    )
    assert [one[:1] + one[2:4] for one in idle_of(trace)] == [
        ("GPU 0 stream 7", 10, 15),
        ("GPU 0 stream 7", 15, 20),
        ("GPU 0 stream 7", 70, 80),
    ]
    found = timeline_of(trace)
    assert found.depth.max() == 0
    of_stream = [found.lanes[lane].label == "GPU 0 stream 7" for lane in found.lane.tolist()]
    row = [at for at, is_there in enumerate(of_stream) if is_there]
    begin, length = found.slice_begin_ns[row], found.slice_duration_ns[row]
    assert list(zip((begin / US).tolist(), (length / US).tolist(), strict=True)) == [
        (0, 10), (10, 5), (15, 0), (15, 5), (20, 10), (70, 10),
    ]  # fmt: skip


def test_idle_slice_names_cpu_work():
    """load.py takes most of the gap [10, 100); [110, 200) has an operator but no Python function."""
    frames = [
        ("train.py(3): main", 0, 205),
        ("torch/utils/data.py(9): next", 11, 60),
        ("load.py(7): get", 12, 59),
    ]
    trace = make_trace(
        [
            work(0, 10, 1),
            *(event("python_function", name, begin, end) for name, begin, end in frames),
            event("user_annotation", "modelprof: dataloader", 9, 70),
            event("cpu_op", "aten::to", 20, 22),
            launch(95, 2),
            work(100, 110, 2),
            event("cpu_op", "aten::mm", 112, 190, tid=2),
            event("user_annotation", "mine", 111, 195, tid=2),
            launch(192, 3, tid=2),
            work(200, 210, 3),
        ]
    )
    (fetch, host, other) = idle_of(trace)
    assert (fetch[1:4], host[1:4], other[1:4]) == (
        ("data loading", 10, 70),
        ("host", 70, 100),
        ("host", 110, 200),
    )
    assert fetch[4][1:] == [
        "meanwhile on main thread 1: load.py(7): get, in modelprof: dataloader",
        "call stack, innermost first:",
        "load.py(7): get",
        "torch/utils/data.py(9): next",
        "train.py(3): main",
    ]
    assert host[4][1] == "meanwhile on main thread 1: train.py(3): main"
    assert other[4][1:] == ["meanwhile on thread 2: aten::mm, in mine"]


def sums_in(found, covered):
    """Nanoseconds per lane and cause, clipped to the covered time, summed slice by slice."""
    sums = {}
    for index in range(len(found)):
        kind = found.categories[found.category[index]]
        if kind in IDLE_WORDS:
            begin = int(found.slice_begin_ns[index])
            end = begin + int(found.slice_duration_ns[index])
            group = found.lanes[found.lane[index]].group
            inside = sum(max(0, min(end, until) - max(begin, since)) for since, until in covered)
            key = (group, kind.removeprefix("idle: "))
            sums[key] = sums.get(key, 0) + inside
    return sums


def check_sums(trace):
    shared = build_timeline(trace)
    covered = covered_time(shared)
    if covered is None or not shared.has_device:
        return False
    found = timeline_of(trace, shared=shared)
    sums = sums_in(found, covered.intervals.tolist())
    for device in summarize_idle(shared).devices:
        group = f"GPU {device.device}" if device.device >= 0 else "unknown GPU"

        def of(cause, group=group):
            return sums.get((group, cause), 0)

        table = device.covered
        assert tuple(of(cause) for cause in CAUSES) == table.by_cause_ns
        assert sum(ns for (one, _), ns in sums.items() if one == group) == table.idle_ns
        assert table.idle_ns + table.busy_ns == covered.total_ns
    return True


@pytest.mark.parametrize("name", REAL)
def test_real_trace_idle_time_matches_table(name):
    assert check_sums(load(name))


def test_generated_trace_idle_time_matches_table():
    checked = [check_sums(make_trace(RandomTrace(random.Random(seed)).events)) for seed in range(60)]
    assert sum(checked) > 40
