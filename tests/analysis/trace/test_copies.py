"""Memory Manipulation Summary: hand-made traces, a slow oracle, and independent figures of real traces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.lazy import NO_DEVICE
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.copies import memory_of, summarize_copies
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.tables.trace.copies import COPIES
from lightning_modelprof.trace.model import Category
from tests.support.facts import table_of, why_not
from tests.support.traces import load, make_trace, reference

US = 1000
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy DtoH (Device -> Pinned)"
ON_DEVICE = "Memcpy DtoD (Device -> Device)"
MEMSET = "Memset (Device)"


def on_device(cat, name, begin, duration, **args):
    """A device event; times in microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": begin,
        "dur": duration,
        "args": {"device": 0, "stream": 7} | args,
    }


def copy(name, begin, duration, **args):
    return on_device(
        "gpu_memset" if name.startswith("Memset") else "gpu_memcpy", name, begin, duration, **args
    )


def host(cat, name, begin, duration, **args):
    """An event of a host thread; times in microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 100,
        "tid": 1,
        "ts": begin,
        "dur": duration,
        "args": args,
    }


def call(begin, duration, correlation, name="cudaMemcpyAsync"):
    return host("cuda_runtime", name, begin, duration, correlation=correlation)


def summary(*events):
    return summarize_copies(build_timeline(make_trace(list(events))))


def rows(fact):
    """Cells by column key, for each kind's name, in order."""
    table = table_of(COPIES, fact if isinstance(fact, dict) else {0: fact})
    keys = [column.key for column in table.columns]
    return {row[0]: dict(zip(keys, row, strict=True)) for row in table.rows}


def notes(fact):
    return " ".join(table_of(COPIES, fact if isinstance(fact, dict) else {0: fact}).notes)


def test_mtia_copies():
    """They are recognized by name, and store their bytes under another key. A kernel's size isn't a copy."""
    events = [
        on_device("mtia_ccp_events", "dma_request", 10 * n, 3 + n, size=100 * n, direction="HOST_TO_DEVICE")
        for n in range(5)
    ]
    events += [
        on_device("mtia_ccp_events", "fc-dtype_Float", 60, 40, size=7),
        on_device("mtia_ccp_events", "event_wait", 0, 90, wait_on_stream=4),  # no work
    ]
    copies = [one for one in events if one["name"] == "dma_request"]
    fact = summary(*events)
    (kind,) = fact.kinds
    assert (kind.name, kind.tally.calls) == ("dma_request", len(copies))
    assert kind.tally.total_ns == sum(one["dur"] for one in copies) * US
    assert kind.size_bytes == sum(one["args"]["size"] for one in copies)
    assert fact.device_total_ns == kind.tally.total_ns + 40 * US


def test_figures_of_copy_kind():
    fact = summary(
        host("cpu_op", "aten::to", 0, 100),
        host("cpu_op", "aten::copy_", 5, 90),
        call(10, 60, 1),
        call(75, 10, 2),
        copy(PAGEABLE, 20, 30, correlation=1, bytes=6000),
        copy(PAGEABLE, 80, 10, correlation=2, bytes=2000),
        copy(MEMSET, 100, 5, bytes=0),
        on_device("kernel", "gemm", 200, 35),
    )
    table = rows(fact)
    assert list(table) == [PAGEABLE, MEMSET]
    assert table[PAGEABLE] == {
        "name": PAGEABLE,
        "calls": 2,
        "host_total_ns": 70 * US,
        "host_avg_ns": 35 * US,
        "host_max_ns": 60 * US,
        "host_min_ns": 10 * US,
        "device_total_ns": 40 * US,
        "device_avg_ns": 20 * US,
        "device_max_ns": 30 * US,
        "device_min_ns": 10 * US,
        "device_ratio": 0.5,  # of 40 + 5 + 35
        "size_bytes": 8000,
        "bytes_per_s": 2e8,  # 8000 bytes in 40 µs
        "memory": "pageable",
        "operator": "aten::copy_",
        "num_operators": 1,
    }
    assert table[MEMSET] == {
        "name": MEMSET,
        "calls": 1,
        "host_total_ns": None,
        "host_avg_ns": None,
        "host_max_ns": None,
        "host_min_ns": None,
        "device_total_ns": 5 * US,
        "device_avg_ns": 5 * US,
        "device_max_ns": 5 * US,
        "device_min_ns": 5 * US,
        "device_ratio": 0.0625,
        "size_bytes": 0,  # recorded
        "bytes_per_s": 0.0,
        "memory": "device",
        "operator": None,
        "num_operators": None,
    }


def test_sizes_that_were_not_recorded():
    fact = summary(
        copy(ON_DEVICE, 0, 10),
        copy(PINNED, 20, 10, bytes=500),
        copy(PINNED, 40, 90),
        copy(MEMSET, 200, 0, bytes=64),
    )
    table = rows(fact)
    assert (table[ON_DEVICE]["size_bytes"], table[ON_DEVICE]["bytes_per_s"]) == (None, None)
    assert (table[PINNED]["size_bytes"], table[PINNED]["bytes_per_s"]) == (500, 5e7)  # over its own 10 µs
    assert (table[MEMSET]["size_bytes"], table[MEMSET]["bytes_per_s"]) == (64, None)  # it took no time
    assert "cover the 2 of 4 calls with a recorded size" in notes(fact)
    assert "with a recorded size" not in notes(summary(copy(PINNED, 20, 10, bytes=500)))


def test_copies_of_zero_length():
    row = rows(summary(copy(PINNED, 20, 0)))[PINNED]
    assert (row["device_total_ns"], row["device_ratio"]) == (0, None)


def test_call_that_launches_several_copies_counts_once():
    fact = summary(
        call(0, 50, 1, "cudaGraphLaunch"),
        copy(ON_DEVICE, 60, 5, correlation=1),
        copy(ON_DEVICE, 70, 5, correlation=1),
        copy(MEMSET, 80, 5, correlation=1),
    )
    assert [(row["calls"], row["host_total_ns"]) for row in rows(fact).values()] == [
        (2, 50 * US),
        (1, 50 * US),
    ]


def test_ranges_named_like_copies_are_ignored():
    ranges = [
        host("user_annotation", "memcpy of my batch", 0, 5),
        host("cpu_op", "Memcpy", 10, 5),
        on_device("gpu_user_annotation", "Memset (Device)", 0, 5),
    ]
    assert list(rows(summary(*ranges, copy(PINNED, 20, 5)))) == [PINNED]
    assert why_not(summary, *ranges) == NO_DEVICE


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        (PAGEABLE, "pageable"),
        ("Memcpy DtoH (Device -> Pageable)", "pageable"),
        ("Memcpy HtoH (Pinned -> Pageable)", "pageable"),
        (PINNED, "pinned"),
        ("Memcpy HtoD (Managed -> Device)", "managed"),
        (ON_DEVICE, "device"),
        ("Memcpy PtoP (Device -> Device)", "device"),
        ("Memcpy AtoD (Array -> Device)", "device"),
        (MEMSET, "device"),
        ("Memset (Pinned)", "pinned"),
        ("Memcpy HtoD (Host -> Device)", None),
        ("Memset (Unknown)", None),
        ("Memset", None),
        ("CopyHostToDevice", None),
        ("", None),
    ],
)
def test_memory_kind_from_name(name, memory):
    assert memory_of(name) == memory


def test_ranks_are_pooled():
    first = summary(
        host("cpu_op", "aten::copy_", 0, 30),
        call(5, 20, 1),
        copy(PAGEABLE, 10, 10, correlation=1, bytes=100),
        on_device("kernel", "k", 50, 40),
    )
    second = summary(
        host("cpu_op", "aten::to", 0, 30),
        call(5, 4, 1),
        copy(PAGEABLE, 10, 30, correlation=1, bytes=300),
        copy(MEMSET, 50, 20),
    )
    table = rows({1: second, 0: first})
    assert table[PAGEABLE] == {
        "name": PAGEABLE,
        "calls": 2,
        "host_total_ns": 24 * US,
        "host_avg_ns": 12 * US,
        "host_max_ns": 20 * US,
        "host_min_ns": 4 * US,
        "device_total_ns": 40 * US,
        "device_avg_ns": 20 * US,
        "device_max_ns": 30 * US,
        "device_min_ns": 10 * US,
        "device_ratio": 0.4,  # of 50 + 50
        "size_bytes": 400,
        "bytes_per_s": 1e7,
        "memory": "pageable",
        "operator": "aten::to",
        "num_operators": 2,
    }
    assert table[MEMSET]["size_bytes"] is None


def test_trace_without_copies():
    assert why_not(summary, host("cpu_op", "aten::mm", 0, 5)) == NO_DEVICE
    only_kernels = why_not(summary, on_device("kernel", "k", 0, 5))
    assert "no memory copies" in only_kernels
    table = table_of(COPIES, {0: only_kernels, 1: NO_DEVICE})
    assert (table.rows, table.absent_reason) == ((), f"{only_kernels}; {NO_DEVICE}")
    assert f"Without rank 2: {NO_DEVICE}." in notes({0: summary(copy(PINNED, 0, 5)), 2: NO_DEVICE})


def test_units():
    units = {column.key: column.unit for column in table_of(COPIES, {0: NO_DEVICE}).columns}
    assert (units["size_bytes"], units["bytes_per_s"]) == (Unit.BYTES, Unit.BYTES_PER_S)
    assert units["host_total_ns"] is units["device_total_ns"] is Unit.DURATION_NS
    assert units["device_ratio"] is Unit.RATIO


made_copies = st.lists(
    st.tuples(
        st.sampled_from([PAGEABLE, PINNED, ON_DEVICE, MEMSET, "gemm"]),
        st.integers(0, 300),  # nanoseconds on the device
        st.none() | st.integers(0, 10**9),  # bytes
        st.none() | st.integers(1, 4),  # number of the launching call
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(made_copies)
def test_matches_oracle(made):
    events = [call(1000 + 20 * number, number, number) for number in range(1, 5)]  # a call takes `number` µs
    for index, (name, duration_ns, size, number) in enumerate(made):
        args = {} if size is None else {"bytes": size}
        args |= {} if number is None else {"correlation": number}
        if name == "gemm":
            events.append(on_device("kernel", name, 2000 + index / 8, duration_ns / 1000, **args))
        else:
            events.append(copy(name, 2000 + index / 8, duration_ns / 1000, **args))
    kinds = {name for name, *_ in made} - {"gemm"}
    if not kinds:
        assert why_not(summary, *events)
        return
    table = rows(summary(*events))
    assert set(table) == kinds
    everything = sum(duration_ns for _, duration_ns, _, _ in made)
    for kind, row in table.items():
        mine = [(time, size, number) for name, time, size, number in made if name == kind]
        times = [time for time, _, _ in mine]
        sized = [(time, size) for time, size, _ in mine if size is not None]
        calls_us = {number for *_, number in mine} - {None}
        assert row["calls"] == len(mine)
        assert row["device_total_ns"] == sum(times)
        assert (row["device_max_ns"], row["device_min_ns"]) == (max(times), min(times))
        assert row["device_ratio"] == (sum(times) / everything if everything else None)
        assert row["size_bytes"] == (sum(size for _, size in sized) if sized else None)
        if sum(time for time, _ in sized):
            rate = sum(size for _, size in sized) / (sum(time for time, _ in sized) * 1e-9)
            assert row["bytes_per_s"] == pytest.approx(rate, rel=1e-12)
        else:
            assert row["bytes_per_s"] is None
        assert row["host_total_ns"] == (sum(calls_us) * US if calls_us else None)
        assert row["host_max_ns"] == (max(calls_us) * US if calls_us else None)


@pytest.mark.parametrize(
    "name", ["a100_nccl", "mi250_toy", "sampled_2rank_rank0", "sampled_2rank_rank1", "v100_ns_resolution"]
)
def test_real_traces(name):
    truth = reference(name, "stdlib")
    fact = summarize_copies(build_timeline(load(name)))
    copies = {kind.name: kind for kind in fact.kinds if kind.name.startswith("Memcpy")}
    assert set(copies) == set(truth["memcpy_by_kind"])
    for kind, figures in truth["memcpy_by_kind"].items():
        assert copies[kind].tally.calls == figures["n"]
        assert copies[kind].tally.total_ns == pytest.approx(figures["dur_us"] * US, abs=1)
        if name == "mi250_toy":  # ROCm wrote no bytes; the reference added them up to 0
            assert (copies[kind].size_bytes, copies[kind].bytes_per_s) == (None, None)
        else:
            assert copies[kind].size_bytes == figures["bytes"]
    sets = [kind for kind in fact.kinds if kind.name.startswith("Memset")]
    assert sum(kind.tally.calls for kind in sets) == truth["n_memset"]
    # Copies of one kind don't overlap in these traces, so the union is the sum.
    for key, kinds in (("memcpy_union_us", copies.values()), ("memset_union_us", sets)):
        assert sum(kind.tally.total_ns for kind in kinds) == pytest.approx(truth[key] * US, abs=1)


@pytest.mark.parametrize("name", ["a100_nccl", "mi250_toy", "v100_ns_resolution"])
def test_real_launching_calls(name):
    """Each copy in these traces has its own call, and these calls launch nothing else."""
    trace = load(name)
    fact = summarize_copies(build_timeline(trace))
    host_ns = sum(kind.host.total_ns for kind in fact.kinds if kind.name.startswith("Memcpy"))
    calls = [text for text in trace.names if "Memcpy" in text and not text.startswith("Memcpy")]
    truth = reference(name, "stdlib")["runtime_calls"]
    assert calls
    assert host_ns == pytest.approx(sum(truth[call]["dur_us"] for call in calls) * US, abs=1)
    assert {kind.operators.main for kind in fact.kinds if kind.name.startswith("Memcpy")} == {"aten::copy_"}


def test_real_bandwidth():
    """Over all calls; the file shows 88.9 GB/s for a single memset and 9.9 GB/s for a single large copy."""
    trace = load("v100_resnet50_workers0")
    device = trace.device
    is_set = trace.category[device.event] == Category.MEMSET
    kinds = {kind.name: kind for kind in summarize_copies(build_timeline(trace)).kinds}
    duration_ns = trace.duration_ns[device.event[is_set]]
    assert kinds[MEMSET].num_sized == kinds[MEMSET].tally.calls == np.count_nonzero(is_set) == 312
    assert kinds[MEMSET].bytes_per_s == pytest.approx(
        device.size_bytes[is_set].sum() / duration_ns.sum() * 1e9
    )
    assert kinds[PAGEABLE].bytes_per_s == pytest.approx(115607040 / 11492e-6)
