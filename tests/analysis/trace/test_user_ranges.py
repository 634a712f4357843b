"""UserDefined Summary: which ranges belong to the user, hand-made traces, an oracle, and real recordings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_modelprof.analysis.pooling import pool_alike
from lightning_modelprof.analysis.timeline.names import is_shown_elsewhere, is_torch_range
from lightning_modelprof.analysis.timeline.tally import NOTHING, Tally
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.user_ranges import summarize_user_ranges
from lightning_modelprof.report.options import SORT_KEYS, TableOptions
from lightning_modelprof.report.tables.trace.user_ranges import USER_RANGES
from lightning_modelprof.trace.reader import read_trace
from tests.support.facts import table_of, why_not
from tests.support.traces import event, load, make_trace

US = 1000
DEFAULT = TableOptions()


def mine(name, begin, end, tid=1):
    return event("user_annotation", name, begin, end, tid)


def launch(begin, end, correlation, tid=1):
    return event("cuda_runtime", "cudaLaunchKernel", begin, end, tid, correlation=correlation)


def kernel(begin, end, correlation, **args):
    return event("kernel", "k", begin, end, "stream 7", correlation=correlation, device=0, stream=7, **args)


def summarize(*events):
    return summarize_user_ranges(build_timeline(make_trace(list(events))))


def by_name(fact):
    return {one.name: one for one in pool_alike(o for thread in fact.threads for o in thread.ranges)}


def us(*times):
    """A tally of calls that took these microseconds."""
    times = [time * US for time in times]
    return Tally(len(times), sum(times), max(times), min(times)) if times else NOTHING


def cells(table):
    """Row name → cells by column key."""
    return {row[0]: dict(zip([c.key for c in table.columns], row, strict=True)) for row in table.rows}


@pytest.mark.parametrize(
    "name",
    [
        "ProfilerStep#3",
        "modelprof: forward",
        "[pl][profile]run_training_batch",
        "[pl][module]Linear: head",
        "nn.Module: Linear_0",
        "Optimizer.step#SGD.step",
        "Optimizer.zero_grad#SGD.zero_grad",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "enumerate(DataPipe)#Mapper",
        "nccl:all_reduce",
        "gloo:broadcast",
    ],
)
def test_ranges_shown_in_other_tables(name):
    assert is_shown_elsewhere(name)
    assert why_not(summarize, mine(name, 0, 10), event("cpu_op", "aten::mm", 1, 2))


@pytest.mark.parametrize(
    ("name", "is_torch"),
    [
        ("DistributedDataParallel.forward", True),
        ("FullyShardedDataParallel._pre_forward", True),
        ("FSDP::all_gather (layers.0)", True),
        ("Torch-Compiled Region: 0/0", True),
        ("## Call CompiledFxGraph fabc ##", True),
        ("graph_0_inductor_wrapper_call", True),
        ("my_memcpy_stage", False),
        ("my_memset", False),
        ("optimizer", False),
        ("Optimizer", False),
        ("## forward ##", False),
        ("nccl", False),
        ("DataLoader", False),
        ("[param|cuda]", False),
    ],
)
def test_ranges_shown_in_this_table(name, is_torch):
    assert is_torch_range(name) == is_torch
    (one,) = by_name(summarize(mine(name, 0, 10))).values()
    assert (one.name, one.is_torch) == (name, is_torch)


# Steps of 100 µs each. load runs [10, 30) and [110, 150), and again inside that [120, 130); it launches 4 µs
# at 12, 6 µs at 111 and 3 µs at 121. stage [20, 25) is in the first load and launches 5 µs. On thread 2, load
# [0, 8) launches 7 µs. A launch at 60 is in no range.
SMALL = (
    mine("ProfilerStep#0", 0, 100),
    mine("ProfilerStep#1", 100, 200),
    mine("load", 10, 30),
    mine("my_memcpy_stage", 20, 25),
    mine("load", 110, 150),
    mine("load", 120, 130),
    mine("load", 0, 8, 2),
    *(launch(12, 13, 1), launch(21, 22, 2), launch(111, 112, 3), launch(121, 122, 4), launch(60, 61, 5)),
    launch(3, 4, 6, 2),
    *(kernel(300, 304, 1), kernel(304, 309, 2), kernel(309, 315, 3), kernel(315, 318, 4)),
    *(kernel(320, 350, 5), kernel(350, 357, 6)),
)


def test_figures():
    fact = summarize(*SMALL)
    rows = by_name(fact)
    assert set(rows) == {"load", "my_memcpy_stage"}
    assert (rows["load"].calls, rows["load"].host) == (4, us(20, 40, 8))
    assert rows["load"].device == us(4 + 5, 6 + 3, 7)
    assert (rows["my_memcpy_stage"].host, rows["my_memcpy_stage"].device) == (us(5), us(5))
    assert (fact.steps_ns, fact.device_ns) == (200 * US, 55 * US)
    assert {thread.name: (thread.host_ns, thread.device_ns) for thread in fact.threads} == {
        "Thread 1": (60 * US, 18 * US),
        "Thread 2": (8 * US, 7 * US),
    }


def test_table():
    table = table_of(USER_RANGES, {0: summarize(*SMALL)})
    assert list(cells(table)) == ["load", "my_memcpy_stage"]
    row = cells(table)["load"]
    assert [row[f"host_{key}_ns"] for key in ("total", "avg", "max", "min")] == [
        68 * US,
        pytest.approx(68 * US / 3),
        40 * US,
        8 * US,
    ]
    assert (row["calls"], row["host_ratio"], row["device_ratio"]) == (4, 68 / 200, 25 / 55)
    assert [row[f"device_{key}_ns"] for key in ("total", "avg", "max", "min")] == [
        25 * US,
        pytest.approx(25 * US / 3),
        9 * US,
        7 * US,
    ]
    assert row["written_by"] == "user"
    assert table.depths == ()


def test_sections_by_thread():
    fact = summarize(*SMALL)
    table = table_of(USER_RANGES, {0: fact}, TableOptions(thread_sep=True, sorted_by="cpu_total"))
    assert [(depth, row[0], row[1], row[2]) for depth, row in zip(table.depths, table.rows, strict=True)] == [
        (0, "Thread 1", 4, 60 * US),
        (1, "load", 3, 60 * US),
        (1, "my_memcpy_stage", 1, 5 * US),
        (0, "Thread 2", 1, 8 * US),
        (1, "load", 1, 8 * US),
    ]
    two = table_of(USER_RANGES, {0: fact, 1: fact}, TableOptions(thread_sep=True))
    assert [row[0] for row, depth in zip(two.rows, two.depths, strict=True) if not depth] == [
        "rank 0 Thread 1",
        "rank 1 Thread 1",
        "rank 0 Thread 2",
        "rank 1 Thread 2",
    ]


def test_ranges_of_torch_come_last():
    fact = summarize(mine("DistributedDataParallel.forward", 0, 90), mine("a", 0, 5), mine("b", 10, 30))
    table = table_of(USER_RANGES, {0: fact})
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("b", "user"),
        ("a", "user"),
        ("DistributedDataParallel.forward", "torch"),
    ]


def test_table_without_device_or_steps():
    """Without steps, ratios use the span of the operators, or are missing."""
    alone = cells(table_of(USER_RANGES, {0: summarize(mine("a", 0, 5))}))["a"]
    assert (alone["host_total_ns"], alone["host_ratio"]) == (5 * US, None)
    assert all(value is None for key, value in alone.items() if key.startswith("device"))
    with_operators = summarize(mine("a", 0, 5), event("cpu_op", "f", 0, 20))
    assert cells(table_of(USER_RANGES, {0: with_operators}))["a"]["host_ratio"] == 5 / 20


def test_absent_reason_explains_how_to_add_range():
    reason = why_not(summarize, event("cpu_op", "f", 0, 20))
    assert 'torch.profiler.record_function("name")' in reason


def test_ranks_are_pooled():
    there = summarize(mine("ProfilerStep#0", 0, 50), mine("load", 0, 30))
    table = table_of(USER_RANGES, {0: summarize(*SMALL), 2: there, 7: "it is damaged"})
    row = cells(table)["load"]
    assert (row["calls"], row["host_total_ns"], row["host_avg_ns"]) == (5, 98 * US, 98 * US / 4)
    assert (row["host_max_ns"], row["host_ratio"]) == (40 * US, 98 / 250)
    assert (row["device_total_ns"], row["device_avg_ns"]) == (25 * US, pytest.approx(25 * US / 3))
    assert "Without rank 7: it is damaged." in table.notes


def test_launches_without_runtime_call_use_their_operator():
    fact = summarize(
        mine("a", 0, 50),
        event("cpu_op", "f", 10, 20, **{"External id": 5}),
        kernel(60, 64, 900, **{"External id": 5}),
    )
    assert by_name(fact)["a"].device == us(4)


@pytest.mark.parametrize("key", SORT_KEYS)
def test_sorted_by(key):
    fact = summarize(
        *(mine("a", 0, 9), launch(1, 2, 1)),
        *(mine("b", 10, 13), mine("b", 15, 30), launch(16, 17, 2)),
        *(mine("c", 40, 45), launch(41, 42, 3), mine("c", 50, 52), mine("c", 60, 61)),
        *(kernel(100, 105, 1), kernel(105, 112, 2), kernel(112, 121, 3)),
    )
    expected = {
        "cpu_total": "bac",  # 18, 9, 8
        "cpu_self": "bac",  # a range has no self time, so its total
        "cpu_avg": "bac",  # 9, 9, 8/3: b has the larger total of the first two
        "cpu_max": "bac",  # 15, 9, 5
        "cpu_min": "cba",  # 1, 3, 9
        "gpu_total": "cba",  # 9, 7, 5
        "gpu_self": "cba",
        "gpu_avg": "abc",  # 5, 3.5, 3
        "gpu_max": "cba",
        "gpu_min": "bca",  # 0 and 0, then 5
        "calls": "cba",
    }.get(key, "cba")  # ranges have no memory, so the default: device time
    table = table_of(USER_RANGES, {0: fact}, TableOptions(sorted_by=key))
    assert "".join(row[0] for row in table.rows) == expected


# The oracle: every range checks every other range and every launch.


@st.composite
def recordings(draw):
    """Ranges that nest by halving their time, on two threads, and launches anywhere."""
    events, correlation = [], 0
    for tid in (1, 2):
        stack = [(0, 64)]
        for _ in range(draw(st.integers(0, 8))):
            begin, end = stack.pop(draw(st.integers(0, len(stack) - 1)))
            name = draw(st.sampled_from(["a", "b", "ProfilerStep#1", "nccl:x"]))
            events.append(mine(name, begin, end, tid))
            middle = (begin + end) // 2
            stack += [(begin, middle), (middle, end)] if middle > begin else [(begin, end)]
        for at in draw(st.lists(st.integers(0, 70), max_size=4)):
            correlation += 1
            events.append(launch(at, at, correlation, tid))
            events.append(kernel(80, 80 + draw(st.integers(0, 9)), correlation))
    return events


@settings(max_examples=200, deadline=None)
@given(recordings())
def test_matches_oracle(events):
    ranges = [e for e in events if e["name"] in {"a", "b"}]
    if not ranges:
        assert why_not(summarize, *events)
        return
    fact = summarize(*events)
    lasts = {e["args"]["correlation"]: e["dur"] for e in events if e["cat"] == "kernel"}
    found = {(thread.name, one.name): one for thread in fact.threads for one in thread.ranges}
    assert set(found) == {(f"Thread {e['tid']}", e["name"]) for e in ranges}
    for (thread, name), one in found.items():
        same = [
            (e["ts"], e["ts"] + e["dur"])
            for e in ranges
            if (f"Thread {e['tid']}", e["name"]) == (thread, name)
        ]
        assert one.calls == len(same)
        outer = [
            (begin, end)
            for index, (begin, end) in enumerate(same)
            if not any(
                b <= begin and end <= e and ((b, e) != (begin, end) or other < index)
                for other, (b, e) in enumerate(same)
                if other != index
            )
        ]
        assert one.host == us(*(end - begin for begin, end in outer))
        times = [
            sum(
                lasts[e["args"]["correlation"]]
                for e in events
                if e["cat"] == "cuda_runtime" and f"Thread {e['tid']}" == thread and begin <= e["ts"] < end
            )
            for begin, end in outer
        ]
        assert one.device == (us(*times) if lasts else None)


# Real recordings


def test_ranges_recorded_by_torch(tmp_path):
    """Torch itself also writes the optimizer's ranges and the steps."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("my_memcpy_stage"):
                batch = torch.ones(2, 4)
            optimizer.zero_grad()
            with record_function("outer"), record_function("inner"):
                model(batch).sum().backward()
            optimizer.step()
            profiler.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    rows = cells(table_of(USER_RANGES, {0: summarize_user_ranges(build_timeline(read_trace(path)))}))
    assert {name: row["calls"] for name, row in rows.items()} == {
        "my_memcpy_stage": 3,
        "outer": 3,
        "inner": 3,
    }
    assert rows["inner"]["host_total_ns"] <= rows["outer"]["host_total_ns"]
    assert 0 < rows["outer"]["host_ratio"] <= 1  # if the guess finds the steps


@pytest.mark.parametrize(("name", "calls"), [("a100_nccl", 3), ("v100_ns_resolution", 5)])
def test_ranges_of_real_training(name, calls):
    """Forward and optimizer launch from their ranges' thread, backward from autograd's."""
    rows = by_name(summarize_user_ranges(build_timeline(load(name))))
    assert {text: (row.calls, row.is_torch) for text, row in rows.items()} == {
        "## forward ##": (calls, False),
        "## backward ##": (calls, False),
        "## optimizer ##": (calls, False),
        "DistributedDataParallel.forward": (calls, True),
    }
    device_ns = {text: row.device.total_ns for text, row in rows.items()}
    assert device_ns["## forward ##"] == device_ns["DistributedDataParallel.forward"]
    assert device_ns["## forward ##"] > 100 * device_ns["## backward ##"]
