"""Call trees and launches, compared with slow but simple implementations."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.nesting import find_parents, link_launches, nearest_ancestor
from lightning_modelprof.trace.model import Category
from lightning_modelprof.trace.reader import parse_trace

HOST = (Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON_FUNCTION)


def timed(cat, name, begin, end, tid=1, **args):
    """An event between two times in nanoseconds."""
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args}


def make(*events):
    return parse_trace(json.dumps({"traceEvents": events}).encode(), "made")


def tree(trace):
    """Name of each event → name of its parent."""
    parent = find_parents(trace)
    return {
        trace.name_of(row): trace.name_of(parent[row]) if parent[row] >= 0 else None
        for row in range(len(trace))
    }


# Hand-made call trees


def test_calls_nest_by_thread_without_device_events():
    trace = make(
        timed("user_annotation", "step", 0, 100),
        timed("python_function", "f", 10, 90),
        timed("cpu_op", "op", 20, 40),
        timed("cuda_runtime", "launch", 25, 30),
        timed("cpu_op", "next", 40, 50),
        timed("cpu_op", "other thread", 20, 40, tid=2),
        timed("kernel", "kernel", 26, 40),
        timed("gpu_user_annotation", "twin", 26, 40),
        timed("overhead", "profiler", 27, 28),
        timed("python_function", "after", 100, 110),
    )
    assert tree(trace) == {
        "step": None, "f": "step", "op": "f", "launch": "op", "next": "f", "other thread": None,
        "kernel": None, "twin": None, "profiler": None, "after": None,
    }  # fmt: skip


def test_events_of_zero_length():
    """One belongs to an event that starts with it, but not to one that ends there; it contains nothing."""
    trace = make(
        timed("cpu_op", "outer", 0, 10),
        timed("cpu_op", "at begin", 0, 0),
        timed("cpu_op", "in between", 5, 5),
        timed("cpu_op", "the same again", 5, 5),
        timed("cpu_op", "at end", 10, 10),
        timed("cpu_op", "inner", 5, 6),
    )
    assert tree(trace) == {
        "outer": None, "at begin": "outer", "in between": "inner", "the same again": "inner", "at end": None,
        "inner": "outer",
    }  # fmt: skip


def test_child_that_ends_after_its_parent_is_clipped():
    """Old traces round: the next event is a sibling of the outer one, not a child of the inner one."""
    trace = make(
        timed("cpu_op", "outer", 0, 10),
        timed("cpu_op", "inner", 5, 11),
        timed("cpu_op", "next", 10, 20),
    )
    assert tree(trace) == {"outer": None, "inner": "outer", "next": None}


def test_range_may_outlive_function_that_opened_it():
    """``record_function.__enter__`` opens a range and returns."""
    trace = make(
        timed("python_function", "train", 0, 100),
        timed("python_function", "enter", 10, 15),
        timed("user_annotation", "range", 12, 60),
        timed("python_function", "still in enter", 13, 14),
        timed("python_function", "forward", 20, 50),
        timed("cpu_op", "op", 25, 30),
        timed("cpu_op", "behind", 70, 80),
    )
    assert tree(trace) == {
        "train": None, "enter": "train", "range": "train", "still in enter": "enter", "forward": "range",
        "op": "forward", "behind": "train",
    }  # fmt: skip


def test_operator_does_not_outlive_function_that_called_it():
    """It keeps its kernel even if rounding or a lost event makes it end after the function around it."""
    trace = make(
        timed("python_function", "f", 0, 9),
        timed("cpu_op", "aten::mm", 2, 10, **{"External id": 1}),
        timed("cuda_runtime", "cudaLaunchKernel", 4, 6, correlation=7),
        timed("cuda_runtime", "cudaFree", 7, 11),
        timed("kernel", "gemm", 12, 20, tid=7, correlation=7),
    )
    assert tree(trace) == {
        "f": None, "aten::mm": "f", "cudaLaunchKernel": "aten::mm", "cudaFree": "aten::mm", "gemm": None,
    }  # fmt: skip
    assert link(trace) == (["cudaLaunchKernel"], ["aten::mm"], [4])


ENTER = "<built-in method __enter__ of torch._C._profiler.RecordFunctionFast object at 0x7f>"


@pytest.mark.parametrize("opener", [ENTER, "torch/_dynamo/utils.py(4834): record_pregraph_bytecode_enter"])
def test_operator_opened_by_python_outlives_its_openers(opener):
    """Like torch.compile's ``Pregraph bytecode``; C functions may or may not be recorded."""
    trace = make(
        timed("cpu_op", "Torch-Compiled Region: 0/0", 0, 90_000),
        timed("python_function", "inner", 1_000, 8_000),
        timed("python_function", opener, 2_000, 6_000),
        timed("cpu_op", "Pregraph bytecode", 5_000, 30_000),
        timed("python_function", "after", 10_000, 20_000),
        timed("cpu_op", "aten::empty", 12_000, 14_000),
        timed("python_function", "closes it", 28_000, 32_000),
        timed("cpu_op", "graph", 40_000, 80_000),
    )
    region = "Torch-Compiled Region: 0/0"
    assert tree(trace) == {
        region: None, "inner": region, opener: "inner", "Pregraph bytecode": region,
        "after": "Pregraph bytecode", "aten::empty": "after", "closes it": "Pregraph bytecode",
        "graph": region,
    }  # fmt: skip


def test_short_operator_opened_by_record_function_fast():
    """It outlives its opener by less than the rounding of old traces."""
    trace = make(timed("python_function", ENTER, 0, 300), timed("cpu_op", "mine", 200, 900))
    assert tree(trace) == {ENTER: None, "mine": None}


@pytest.mark.parametrize(("cat", "name"), [("user_annotation", "mine"), ("Operator", "Optimizer.step#SGD")])
def test_ranges_of_all_versions_may_outlive_functions(cat, name):
    trace = make(
        timed("python_function", "enter", 0, 9),
        timed(cat, name, 2, 30),
        timed("cpu_op", "op", 12, 20),
    )
    assert tree(trace) == {"enter": None, name: None, "op": name}


@pytest.mark.parametrize("depth", [1, 10, 64, 65, 500])
def test_range_outlives_at_most_64_functions(depth):
    """A range nested deeper than any real one ends with its function, so that every file is read fast."""
    functions = [timed("python_function", f"f{n}", n, 2000 - n) for n in range(depth)]
    trace = make(*functions, timed("user_annotation", "mine", 600, 3000), timed("cpu_op", "op", 2500, 2600))
    parents = tree(trace)
    assert parents["mine"] == (None if depth <= 64 else f"f{depth - 65}")
    assert parents["op"] == ("mine" if depth <= 64 else None)


# Compared with a slow implementation


@st.composite
def host_events(draw):
    """Events of two threads at few distinct times: many touch, coincide, cross or have zero length."""
    unit = draw(st.sampled_from([1, 900]))  # crossings within and beyond the rounding
    cats = st.sampled_from(
        ["cpu_op", "user_annotation", "cuda_runtime", "python_function", "kernel", "Trace"]
    )
    events = draw(
        st.lists(st.tuples(cats, st.integers(0, 12), st.integers(0, 9), st.integers(1, 2)), max_size=14)
    )
    return [
        # Every third operator is a range, as written by old torch, or a function opens one.
        timed(cat, f"e{n}" if n % 3 else f"{other}#{n}", begin * unit, (begin + length) * unit, tid)
        for n, (cat, begin, length, tid) in enumerate(events)
        for other in ["RecordFunctionFast" if cat == "python_function" else "Optimizer.step"]
    ]


def slow_parents(trace):
    """Keeps all events of a thread from outer to inner, including those that ended."""
    parents = [-1] * len(trace)
    for track in range(len(trace.tracks)):
        order, ends = [], {}
        for row in range(len(trace)):
            if trace.track[row] != track or trace.category[row] not in HOST:
                continue
            begin, end = int(trace.begin_ns[row]), int(trace.end_ns[row])
            around = [other for other in order if ends[other] > begin]
            is_operator = trace.category[row] == Category.CPU_OP
            is_range = trace.category[row] == Category.USER_ANNOTATION or (
                is_operator and trace.name_of(row).startswith("Optimizer.")
            )
            if is_operator and around and trace.category[around[-1]] == Category.PYTHON_FUNCTION:
                opened = "RecordFunctionFast" in trace.name_of(around[-1])
                is_range = is_range or opened or end > ends[around[-1]] + 2000
            if is_range:
                while (
                    around
                    and ends[around[-1]] < end
                    and trace.category[around[-1]] == Category.PYTHON_FUNCTION
                ):
                    around.pop()
            if around:
                parents[row] = around[-1]
                ends[row] = min(end, ends[around[-1]])
                order.insert(order.index(around[-1]) + 1, row)
            else:
                ends[row] = end
                order.insert(0, row)
    return parents


@given(host_events())
def test_parents_match_slow_implementation(events):
    trace = make(*events)
    assert find_parents(trace).tolist() == slow_parents(trace)


@st.composite
def nested_events(draw, begin=0, end=64, depth=0):
    """Properly nested calls, whose tree is known as they are generated."""
    made = []
    at = begin
    for _ in range(draw(st.integers(0, 3 if depth else 4))):
        first = draw(st.integers(at, end))
        last = draw(st.integers(first, end))
        if first == last:
            continue
        made.append((first, last, draw(nested_events(first, last, depth + 1)) if depth < 3 else []))
        at = last
    return made


@given(nested_events())
def test_proper_nesting_is_found_exactly(calls):
    events, truth = [], {}

    def add(calls, around):
        for begin, end, inside in calls:
            name = f"e{len(events)}"
            truth[name] = around
            # Of two equal intervals the outer one has the lower id, as operators are numbered.
            cat = ("cpu_op", "user_annotation")[len(events) % 2]
            events.append(timed(cat, name, begin, end, **{"External id": len(events)}))
            add(inside, name)

    add(calls, None)
    assert tree(make(*reversed(events))) == truth


def test_parent_starts_before_its_child_and_is_open():
    num_nested = 0

    @given(host_events())
    def check(events):
        nonlocal num_nested
        trace = make(*events)
        parent = find_parents(trace)
        for row in np.flatnonzero(parent >= 0).tolist():
            outer = int(parent[row])
            assert outer < row
            assert trace.track[outer] == trace.track[row]
            assert trace.begin_ns[outer] <= trace.begin_ns[row] < trace.end_ns[outer]
            num_nested += 1

    check()
    assert num_nested > 0


@given(host_events(), st.integers(0, 2**14 - 1))
def test_nearest_ancestor(events, chosen):
    trace = make(*events)
    parent = find_parents(trace)
    wanted = np.array([bool(chosen >> row & 1) for row in range(len(trace))], np.bool_)
    before = parent.copy()
    found = nearest_ancestor(parent, wanted)
    for row in range(len(trace)):
        up = int(parent[row])
        while up >= 0 and not wanted[up]:
            up = int(parent[up])
        assert found[row] == up
    np.testing.assert_array_equal(parent, before)  # not modified in place


@pytest.mark.parametrize("depth", [1, 2, 3, 1000, 100_000])
def test_deep_chains_take_few_rounds(depth, monkeypatch):
    """A chain of nested events: rounds that double their reach need 17 for 100,000 events."""
    parent = np.arange(-1, depth - 1)
    rounds = 0

    class Counted(np.ndarray):
        def __getitem__(self, index):
            nonlocal rounds
            rounds += 1
            return super().__getitem__(index)

    nobody = np.zeros(depth, np.bool_).view(Counted)
    assert set(nearest_ancestor(parent, nobody).tolist()) == {-1}
    assert rounds <= 2 + np.log2(depth) + 1
    first = np.arange(depth) == 0
    assert nearest_ancestor(parent, first).tolist() == [-1] + [0] * (depth - 1)


# Launches


def operators(trace):
    return trace.category == Category.CPU_OP


def link(trace):
    links = link_launches(trace, find_parents(trace), operators(trace))

    def names(rows):
        return [trace.name_of(row) if row >= 0 else None for row in rows.tolist()]

    return names(links.runtime), names(links.operator), links.begin_ns.tolist()


def test_launches_by_correlation_and_external_id():
    trace = make(
        timed("cpu_op", "outer", 0, 50, **{"External id": 1}),
        timed("cpu_op", "inner", 5, 40, **{"External id": 2}),
        timed("cuda_runtime", "launch", 10, 20, correlation=7),
        timed("cuda_runtime", "bare launch", 60, 61, correlation=8),
        timed("kernel", "by correlation", 30, 35, tid=7, correlation=7, **{"External id": 1}),
        timed("kernel", "outside of operators", 65, 70, tid=7, correlation=8, **{"External id": 1}),
        timed("kernel", "by external id", 71, 72, tid=7, correlation=9, **{"External id": 1}),
        timed("kernel", "by nothing", 73, 74, tid=7, correlation=10, **{"External id": 99}),
        timed("gpu_memset", "without ids", 75, 76, tid=7),
    )
    runtime, operator, begin_ns = link(trace)
    assert runtime == ["launch", "bare launch", None, None, None]
    assert operator == ["inner", None, "outer", None, None]
    assert begin_ns == [10, 60, 0, -1, -1]


def test_external_ids_equal_to_correlations_are_not_operators():
    """torch 1.12 to 2.0 wrote them this way: operator 9 is unrelated to launch 9."""
    trace = make(
        timed("cpu_op", "op", 0, 50, **{"External id": 9}),
        timed("kernel", "k", 60, 70, tid=7, correlation=9, **{"External id": 9}),
        timed("gpu_memset", "without an id", 80, 90, tid=7, correlation=10),
    )
    assert link(trace) == ([None] * 2, [None] * 2, [-1] * 2)


def test_links_without_device_host_or_events():
    for events in ([], [timed("cpu_op", "op", 0, 5)], [timed("kernel", "k", 0, 5, correlation=1)]):
        trace = make(*events)
        num_device = sum(event["cat"] == "kernel" for event in events)
        assert link(trace) == ([None] * num_device, [None] * num_device, [-1] * num_device)


def test_graph_launch_links_all_kernels_and_first_of_repeated_calls():
    """A graph launch starts many kernels; of two calls with one id, the first counts."""
    trace = make(
        timed("cuda_runtime", "graph", 0, 5, correlation=1),
        timed("cuda_runtime", "again", 6, 7, correlation=1),
        timed("kernel", "a", 8, 9, tid=7, correlation=1),
        timed("kernel", "b", 9, 10, tid=7, correlation=1),
    )
    assert link(trace)[0] == ["graph", "graph"]


@st.composite
def launching_events(draw):
    ids = st.integers(-1, 4)
    cats = st.sampled_from(["cpu_op", "cpu_op", "cuda_runtime", "kernel", "gpu_memcpy", "user_annotation"])
    rows = draw(st.lists(st.tuples(cats, st.integers(0, 12), st.integers(0, 8), ids, ids), max_size=12))
    return [
        timed(cat, f"e{n}", begin, begin + length, correlation=correlation, **{"External id": external})
        for n, (cat, begin, length, correlation, external) in enumerate(rows)
    ]


@given(launching_events())
def test_links_match_slow_implementation(events):
    trace = make(*events)
    parent = find_parents(trace)
    is_operator = operators(trace)
    links = link_launches(trace, parent, is_operator)
    work = trace.device.event.tolist()
    same_ids = all(trace.external_id[row] in (-1, trace.correlation[row]) for row in work)

    def first(rows, column, row):
        return next((host for host in rows if column[host] == column[row] >= 0), -1)

    calls = np.flatnonzero(trace.category == Category.RUNTIME).tolist()
    assert len(links.runtime) == len(links.operator) == len(links.begin_ns) == len(work)
    for place, row in enumerate(work):
        runtime = first(calls, trace.correlation, row)
        operator = -1
        if runtime >= 0:
            operator = int(parent[runtime])
            while operator >= 0 and not is_operator[operator]:
                operator = int(parent[operator])
        elif not same_ids:
            operator = first(np.flatnonzero(is_operator).tolist(), trace.external_id, row)
        known = runtime if runtime >= 0 else operator
        assert links.runtime[place] == runtime
        assert links.operator[place] == operator
        assert links.begin_ns[place] == (trace.begin_ns[known] if known >= 0 else -1)
