"""Device Summary: hand-made traces, an oracle on a grid, and the numbers of the removed plugin."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace import device_usage
from lightning_modelprof.analysis.trace.device_usage import (
    HostUsage,
    integrate_capped,
    joined_time,
    summarize_device_usage,
)
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.tables.trace.device_usage import DEVICE_USAGE
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from tests.support.facts import table_of, why_not
from tests.support.traces import load, make_trace, reference

TENSOR = "volta_h884gemm"
ORDINARY = "volta_sgemm_32x128_tn"
PROPERTIES = [
    {"id": 0, "name": "Tesla V100", "totalGlobalMem": 34084028416, "computeMajor": 7, "computeMinor": 0},
    {"id": 2, "name": "A100", "totalGlobalMem": 42297524224, "computeMajor": 8, "computeMinor": 6},
]
CPU = {
    "elapsed_ns": 2_000_000_000,
    "process_ns": 3_000_000_000,
    "workers_ns": 500_000_000,
    "system_busy_ns": 4_000_000_000,
    "system_total_ns": 16_000_000_000,
    "num_cpus": 8,
}


def work(cat, name, begin, duration, *, device=0, stream=7, blocks=None, occupancy=None, correlation=None):
    """A device event; times in microseconds."""
    args = {
        "device": device,
        "stream": stream,
        "blocks per SM": blocks,
        "est. achieved occupancy %": occupancy,
        "correlation": correlation,
    }
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": "no number" if device is None else device,
        "tid": stream,
        "ts": begin,
        "dur": duration,
        "args": {key: value for key, value in args.items() if value is not None},
    }


def kernel(begin, duration, name="k", **more):
    return work("kernel", name, begin, duration, **more)


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


def step(number, begin, duration):
    return host("user_annotation", f"ProfilerStep#{number}", begin, duration)


def usage(*events, **metadata):
    return summarize_device_usage(build_timeline(make_trace(list(events), **metadata)))


def host_usage(cpu):
    return usage(kernel(0, 1), **{TRACE_METADATA_KEY: {"cpu": cpu}}).host


def rows(by_rank):
    """Cells by column key, for each row's name, in order."""
    table = table_of(DEVICE_USAGE, by_rank)
    keys = [column.key for column in table.columns]
    return {row[0]: dict(zip(keys, row, strict=True)) for row in table.rows}


def notes(by_rank):
    return " ".join(table_of(DEVICE_USAGE, by_rank).notes)


def test_figures_of_device():
    """The step is [0, 100): [10, 30) at 1/4, [30, 40) at 1/4 + 1/2, [40, 50) at 1/2, [60, 80) full."""
    fact = usage(
        step(1, 0, 100),
        kernel(10, 30, blocks=0.25, occupancy=20),
        kernel(30, 20, stream=9, blocks=0.5, occupancy=0),
        kernel(60, 20, TENSOR, blocks=640.0, occupancy=100),
        work("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 75, 15, stream=9),
        deviceProperties=PROPERTIES,
    )
    assert rows({0: fact})["GPU 0"] == {
        "name": "GPU 0",
        "utilization": 0.6,  # [10, 50) and [60, 80)
        "busy": 0.7,  # and [80, 90)
        "sm_efficiency": pytest.approx((20 * 0.25 + 10 * 0.75 + 10 * 0.5 + 20) / 100, rel=1e-15),
        "occupancy": pytest.approx((30 * 0.2 + 20 * 0.0 + 20 * 1.0) / 70, rel=1e-15),
        "occupancy_zero": 2 / 7,
        "tensor_cores": 1.0,  # of the 20 µs whose name is known
        "tensor_unknown": 5 / 7,
        "model": "Tesla V100",
        "memory_bytes": 34084028416,
        "compute_capability": "7.0",
    }
    assert (fact.covers, fact.devices[0].sm_unknown) == ("steps", 0.0)


def test_only_steps_count():
    """The steps are [100, 200): they have 5 of the first kernel's 10 µs and nothing of the third."""
    fact = usage(
        step(1, 100, 50),
        step(2, 150, 50),
        kernel(95, 10, TENSOR, blocks=1.0, occupancy=40),
        kernel(120, 15, blocks=1.0, occupancy=80),
        kernel(300, 1000, blocks=1.0, occupancy=100),
    )
    (device,) = fact.devices
    assert (device.utilization, device.sm_efficiency) == (0.2, 0.2)
    assert device.occupancy == pytest.approx((5 * 0.4 + 15 * 0.8) / 20, rel=1e-15)
    assert (device.tensor_cores, device.tensor_unknown) == (1.0, 0.75)


def test_steps_last_until_their_work_ends():
    fact = usage(
        step(1, 0, 50),
        host("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=3),
        kernel(40, 60, correlation=3),
    )
    assert fact.span == (0, 100_000)
    assert fact.devices[0].utilization == 0.6


def test_time_between_windows_does_not_count():
    """Windows [0, 100) and [10_000, 10_100) have 50 of the first kernel's 60 µs and 20 of the second's 40."""
    fact = usage(
        *(step(n, at, 50) for n, at in ((5, 0), (6, 50), (55, 10_000), (56, 10_050))),
        kernel(50, 60, TENSOR, blocks=0.5, occupancy=40),
        kernel(9_980, 40, blocks=1.0, occupancy=80),
        kernel(5_000, 500, blocks=1.0, occupancy=100),
        work("gpu_memcpy", "Memcpy HtoD", 90, 9_930, stream=9),
    )
    (device,) = fact.devices
    assert (fact.span, device.utilization) == ((0, 10_100_000), 0.35)
    assert device.busy == 0.35  # the copy runs beside the kernels in [90, 100) and [10_000, 10_020)
    assert device.sm_efficiency == pytest.approx((50 * 0.5 + 20) / 200, rel=1e-15)
    assert device.occupancy == pytest.approx((50 * 0.4 + 20 * 0.8) / 70, rel=1e-15)
    assert (device.tensor_cores, device.tensor_unknown) == (1.0, pytest.approx(2 / 7, rel=1e-15))
    assert "2 separate ranges, and no ratio includes the time in between: 5 to 6, 55 to 56." in notes(
        {0: fact}
    )


def test_long_gaps_between_steps_do_not_count():
    """A gap of 1 ms is part of the span, a longer one isn't: 0.1 of 1.2 ms, 0.1 of 0.2 ms."""
    near, far = (
        usage(step(1, 0, 100), step(2, at, 100), kernel(0, 50), kernel(at, 50)) for at in (1_100, 1_100.001)
    )
    assert near.devices[0].utilization == pytest.approx(100 / 1_200)
    assert far.devices[0].utilization == 0.5
    assert (near.notes, len(far.notes)) == ((), 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5),
    st.lists(st.integers(-5, 100), min_size=1),
)
def test_joined_time_counts_elapsed_time(sizes, moments):
    """Compared with counting every nanosecond."""
    stretches, now = [], 0
    for gap, size in sizes:
        stretches.append((now + gap, now + gap + size))
        now += gap + size
    found = joined_time(np.array(moments), np.array(stretches, np.int64).reshape(-1, 2))
    inside = [point for begin, end in stretches for point in range(begin, end)]
    assert found.tolist() == [sum(point < moment for point in inside) for moment in moments]


def test_steps_left_out_are_named():
    launch = host("cuda_runtime", "cudaLaunchKernel", 1, 2, correlation=1)
    fact = usage(step(1, 0, 9), launch, kernel(4, 3, correlation=1), step(2, 9, 9))
    assert (fact.span, fact.devices[0].utilization) == ((0, 9_000), 3 / 9)
    assert "Steps left out at the end: 2." in notes({0: fact})


def test_span_without_steps():
    operators = usage(host("cpu_op", "aten::mm", 0, 100), kernel(20, 30))
    assert (operators.covers, operators.devices[0].utilization) == ("operators", 0.3)
    nothing_else = usage(kernel(20, 30), kernel(70, 10))
    assert (nothing_else.covers, nothing_else.devices[0].utilization) == (
        "device events",
        pytest.approx(2 / 3),
    )
    texts = {covers: notes({0: fact}) for covers, fact in (("o", operators), ("d", nothing_else))}
    assert "ProfilerStep ranges have no length" in texts["o"]
    assert "ProfilerStep ranges have no length" not in texts["d"]
    assert "from its first GPU event" in texts["d"]


def test_unrecorded_figures_are_none():
    (device,) = usage(step(1, 0, 100), kernel(10, 30)).devices
    assert (device.utilization, device.busy) == (0.3, 0.3)
    assert (device.tensor_cores, device.tensor_unknown) == (None, 1.0)
    assert (device.sm_efficiency, device.sm_unknown) == (None, 1.0)
    assert (device.occupancy, device.occupancy_zero) == (None, None)
    assert (device.name, device.memory_bytes, device.compute_capability) == (None, None, None)


def test_estimates_for_only_some_kernels():
    fact = usage(step(1, 0, 100), kernel(10, 30), kernel(50, 10, blocks=0.5, occupancy=60))
    (device,) = fact.devices
    assert (device.sm_efficiency, device.sm_unknown) == (0.05, 0.75)
    assert (device.occupancy, device.occupancy_zero) == (0.6, 0.0)
    assert "count as 0 in SM efficiency" in notes({0: fact})
    assert "count as 0" not in notes({0: usage(step(1, 0, 9), kernel(1, 3))})


def test_device_without_kernels():
    copied, empty = usage(
        step(1, 0, 100),
        work("gpu_memset", "Memset (Device)", 20, 10, device=1),
        kernel(40, 0, device=3, blocks=2.0, occupancy=50),
    ).devices
    for device, busy in ((copied, 0.1), (empty, 0.0)):
        assert (device.utilization, device.busy, device.sm_efficiency) == (0.0, busy, 0.0)
        assert (device.occupancy, device.occupancy_zero, device.tensor_cores) == (None, None, None)


def test_span_of_zero_length():
    (device,) = usage(kernel(40, 0, blocks=2.0)).devices
    assert (device.utilization, device.busy, device.sm_efficiency) == (None, None, None)


def test_several_devices():
    fact = usage(
        step(1, 0, 100),
        kernel(0, 10),
        kernel(5, 30, device=2),
        kernel(50, 40, device=None),
        deviceProperties=PROPERTIES,
    )
    table = rows({0: fact})
    found = {name: (row["utilization"], row["model"]) for name, row in table.items() if "GPU" in name}
    assert found == {"GPU": (0.4, None), "GPU 0": (0.1, "Tesla V100"), "GPU 2": (0.3, "A100")}
    assert table["GPU 2"]["compute_capability"] == "8.6"


def test_tensor_cores_of_other_devices_are_unknown():
    launch = host("cuda_runtime", "hipLaunchKernel", 1, 2, correlation=1)
    assert usage(step(1, 0, 9), launch, kernel(4, 3, correlation=1)).devices[0].tensor_cores is None


@pytest.mark.parametrize(
    ("name", "tells"),
    [
        ("AMD Instinct MI300X", False),
        ("MI250X", False),
        ("AMD Radeon Graphics", False),
        ("Intel(R) Data Center GPU Max 1550", False),
        ("NVIDIA A100-PG509-200", True),
        ("Tesla V100-SXM2-16GB", True),
        ("GRID T4", True),
        ("", True),
    ],
)
def test_model_name_identifies_other_vendors(name, tells):
    """Like ROCm traces without runtime calls."""
    events = step(1, 0, 9), kernel(4, 3, ORDINARY)
    (device,) = usage(*events, deviceProperties=[{"id": 0, "name": name}]).devices
    assert (device.tensor_cores, device.tensor_unknown) == ((0.0, 0.0) if tells else (None, None))


def test_tensor_core_share_excludes_unknown_kernels():
    """60 of 100 µs are in unknown kernels; of the other 40, tensor cores take 30."""
    (device,) = usage(
        step(1, 0, 100),
        kernel(0, 60, "_mine"),
        kernel(60, 30, "void cutlass::device_kernel<GemmUniversal>(Params)"),
        kernel(90, 10, ORDINARY),
    ).devices
    assert (device.tensor_cores, device.tensor_unknown) == (0.75, 0.6)


@pytest.mark.parametrize("as_text", [json.dumps, repr])
def test_properties_given_as_text(as_text):
    written = [{**PROPERTIES[0], "extra": None}]
    (device,) = usage(kernel(0, 1), deviceProperties=as_text(written)).devices
    assert (device.name, device.memory_bytes, device.compute_capability) == ("Tesla V100", 34084028416, "7.0")


@pytest.mark.parametrize(
    "written",
    [
        None,
        7,
        "",
        "[{",
        "__import__('os')",
        "[" * 100_000,
        {"id": 0},
        [None, 3, "x", []],
        [{"name": "x"}],
        [{"id": "0", "name": "x"}],
        [{"id": 0, "name": 3, "totalGlobalMem": "many", "computeMajor": None, "computeMinor": True}],
        [{"id": 0, "name": "", "totalGlobalMem": -5, "computeMajor": 7.5, "computeMinor": 0}],
        "[{'id': 0, 'name': 3}]",
    ],
)
def test_invalid_properties_are_ignored(written):
    (device,) = usage(kernel(0, 1), deviceProperties=written).devices
    assert (device.name, device.memory_bytes, device.compute_capability) == (None, None, None)


def test_cpu_usage():
    fact = usage(step(1, 0, 9), kernel(4, 3), **{TRACE_METADATA_KEY: {"cpu": CPU}})
    assert fact.host == HostUsage(process=1.5, workers=0.25, system=0.25, num_cpus=8)
    table = rows({0: fact})
    assert list(table) == ["CPU(Process)", "CPU(Workers)", "CPU(System)", "GPU 0"]
    assert [table[name]["utilization"] for name in list(table)[:3]] == [1.5, 0.25, 0.25]
    assert all(set(list(table[name].values())[2:]) == {None} for name in list(table)[:3])
    assert "one of 8 CPUs" in notes({0: fact})
    assert "not measured" not in notes({0: fact})


def test_cpu_usage_is_missing_in_other_traces():
    fact = usage(kernel(0, 1))
    assert fact.host is None
    assert {name: row["utilization"] for name, row in rows({0: fact}).items()} == {"GPU 0": 1.0}
    assert "wasn't recorded by ModelProfCallback" in notes({0: fact})


def test_cpu_usage_without_device():
    fact = usage(host("cpu_op", "aten::mm", 0, 5), **{TRACE_METADATA_KEY: {"cpu": CPU}})
    assert (fact.devices, fact.span, fact.covers) == ((), None, None)
    assert rows({0: fact}) == {
        "CPU(Process)": {"name": "CPU(Process)", "utilization": 1.5},
        "CPU(Workers)": {"name": "CPU(Workers)", "utilization": 0.25},
        "CPU(System)": {"name": "CPU(System)", "utilization": 0.25},
    }
    assert "no GPU events" in notes({0: fact})


@pytest.mark.parametrize("key", list(CPU))
def test_missing_cpu_time_affects_only_its_figures(key):
    expected = {"process": 1.5, "workers": 0.25, "system": 0.25, "num_cpus": 8}
    lost = {
        "elapsed_ns": ("process", "workers"),
        "process_ns": ("process",),
        "workers_ns": ("workers",),
        "system_busy_ns": ("system",),
        "system_total_ns": ("system",),
        "num_cpus": ("num_cpus",),
    }[key]
    truth = HostUsage(**{name: None if name in lost else value for name, value in expected.items()})
    for bad in (None, "many", [], {}, True, -1, 1e300, 10**30):
        assert host_usage(CPU | {key: bad}) == truth
    assert host_usage({name: value for name, value in CPU.items() if name != key}) == truth
    fact = usage(kernel(0, 1), **{TRACE_METADATA_KEY: {"cpu": CPU | {key: None}}})
    assert ("A dash in a CPU row" in notes({0: fact})) == (key != "num_cpus")


def test_cpu_usage_over_zero_time():
    assert host_usage(CPU | {"elapsed_ns": 0, "system_total_ns": 0}) == HostUsage(
        process=None, workers=None, system=None, num_cpus=8
    )


@pytest.mark.parametrize("ours", [None, [], "x", {}, {"cpu": None}, {"cpu": [1]}, {"cpu": "x"}])
def test_invalid_cpu_metadata_is_ignored(ours):
    assert usage(kernel(0, 1), **{TRACE_METADATA_KEY: ours}).host is None


def test_devices_of_several_ranks():
    first = usage(step(1, 0, 10), kernel(0, 5), **{TRACE_METADATA_KEY: {"cpu": CPU}})
    second = usage(step(1, 0, 10), kernel(0, 8, device=1))
    lost = "it was not found"
    table = rows({3: second, 0: first, 5: lost})
    assert list(table) == [
        "rank 0 CPU(Process)",
        "rank 0 CPU(Workers)",
        "rank 0 CPU(System)",
        "rank 0 GPU 0",
        "rank 3 GPU 1",
    ]
    assert (table["rank 0 GPU 0"]["utilization"], table["rank 3 GPU 1"]["utilization"]) == (0.5, 0.8)
    assert "Without rank 5: it was not found." in notes({3: second, 0: first, 5: lost})


def test_trace_without_usage():
    reason = why_not(usage, host("cpu_op", "aten::mm", 0, 5))
    table = table_of(DEVICE_USAGE, {0: reason, 1: reason})
    assert (table.rows, table.absent_reason) == ((), reason)


def test_units():
    columns = table_of(DEVICE_USAGE, {0: "x"}).columns
    ratios = ["utilization", "busy", "sm_efficiency", "occupancy", "occupancy_zero"]
    ratios += ["tensor_cores", "tensor_unknown"]
    assert [column.key for column in columns if column.unit is Unit.RATIO] == ratios
    assert [column.key for column in columns if column.unit is Unit.BYTES] == ["memory_bytes"]


def integral_on_a_grid(intervals):
    """Computed for every instant, in fractions."""
    whole = Fraction(0)
    for instant in range(max((end for _, end, _ in intervals), default=0)):
        running = sum(Fraction(share) for begin, end, share in intervals if begin <= instant < end)
        whole += min(Fraction(1), running)
    return whole


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.integers(0, 12),
            st.sampled_from([0.0, 1e-6, 0.0625, 0.1, 0.3, 0.7, 1.0, 13.5, 1e9]) | st.floats(0, 2),
        ),
        max_size=14,
    )
)
def test_capped_integral_matches_grid(made):
    intervals = [(begin, begin + duration, share) for begin, duration, share in made]
    found = integrate_capped(
        np.array([begin for begin, _, _ in intervals], np.int64),
        np.array([end for _, end, _ in intervals], np.int64),
        np.array([share for _, _, share in intervals], np.float64),
    )
    # A share is accurate to 2**-41, so each nanosecond of an interval may be off by that.
    assert abs(Fraction(found) - integral_on_a_grid(intervals)) < Fraction(1, 10**9)


def test_capped_integral_does_not_drift():
    """Ten thousand overlapping kernels, then a year of idle time, where floating-point residue would show."""
    begin = np.arange(10_000, dtype=np.int64)
    end = begin + 3
    share = np.where(begin % 2 == 0, 0.1, 0.3)
    year_ns = 365 * 24 * 3600 * 10**9
    found = integrate_capped(np.append(begin, year_ns), np.append(end, year_ns + 1), np.append(share, 1.0))
    # Three run at each instant, 0.5 or 0.7 alternately, but fewer at the first two and last two.
    inner = sum(0.5 if instant % 2 == 0 else 0.7 for instant in range(2, 10_000))
    outer = 0.1 + 0.4 + (0.1 + 0.3) + 0.3
    assert found == pytest.approx(inner + outer + 1, abs=1e-6)


made_work = st.lists(
    st.tuples(
        st.sampled_from(["k", TENSOR, ORDINARY, "Memcpy HtoD (Pinned -> Device)"]),
        st.integers(0, 60),
        st.integers(0, 25),
        st.integers(0, 1),  # device
        st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 4.0]),
        st.none() | st.sampled_from([0, 1]) | st.integers(0, 100),
    ),
    min_size=1,
    max_size=10,
)
SPAN = range(20, 60)


def slow_usage(made, device):
    """The figures of ``found`` below, computed for every instant."""
    mine = [
        (name, begin, begin + length, *rest)
        for name, begin, length, number, *rest in made
        if number == device
    ]
    kernels = [one for one in mine if not one[0].startswith("Memcpy")]
    at = [(now, *one) for now in SPAN for one in kernels if one[1] <= now < one[2]]
    blocks = [(now, share) for now, _, _, _, share, _ in at if share is not None]
    rated = [occupancy / 100 for *_, occupancy in at if occupancy is not None]
    busy = {now for now in SPAN for one in mine if one[1] <= now < one[2]}
    told = [name for _, name, *_ in at if name in (TENSOR, ORDINARY)]
    working = sum(min(1, sum(share for when, share in blocks if when == now)) for now in SPAN)
    return (
        len({now for now, *_ in at}) / len(SPAN),
        len(busy) / len(SPAN),
        working / len(SPAN) if blocks or not at else None,
        sum(rated) / len(rated) if rated else None,
        rated.count(0) / len(rated) if rated else None,
        sum(name == TENSOR for _, name, *_ in at) / len(told) if told else None,
        1 - len(told) / len(at) if at else None,
    )


@settings(max_examples=100, deadline=None)
@given(made_work)
def test_matches_oracle(made):
    events = [
        work(
            "gpu_memcpy" if name.startswith("Memcpy") else "kernel",
            name,
            begin,
            duration,
            device=device,
            stream=index,
            blocks=blocks,
            occupancy=occupancy,
        )
        for index, (name, begin, duration, device, blocks, occupancy) in enumerate(made)
    ]
    fact = usage(step(1, SPAN.start, 15), step(2, SPAN.start + 15, len(SPAN) - 15), *events)
    assert [device.number for device in fact.devices] == sorted({one[3] for one in made})
    for device in fact.devices:
        found = (
            device.utilization,
            device.busy,
            device.sm_efficiency,
            device.occupancy,
            device.occupancy_zero,
            device.tensor_cores,
            device.tensor_unknown,
        )
        assert found == tuple(
            None if value is None else pytest.approx(value, rel=1e-12, abs=1e-15)
            for value in slow_usage(made, device.number)
        )


def plugin_figures(name):
    gpu = reference(name, "tb_plugin")["gpu"]["0"]
    return [
        gpu["utilization"],
        gpu["est_sm_efficiency"],
        gpu["est_achieved_occupancy_pct"] / 100,
        gpu["tensor_core_ratio"],
    ]


@pytest.fixture
def plugin_names(monkeypatch):
    """Classifies kernel names as the plugin did; it didn't know cuDNN's kernels since Ampere."""

    def know(name):
        rows = reference(name, "tb_plugin")["kernel_table"]["rows"]
        yes = {row[0] for row in rows if row[1] == "Yes"}
        monkeypatch.setattr(device_usage, "uses_tensor_cores", yes.__contains__)

    return know


def our_figures(trace):
    (device,) = summarize_device_usage(build_timeline(trace)).devices
    assert device.tensor_unknown == 0
    return [device.utilization, device.sm_efficiency, device.occupancy, device.tensor_cores]


@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "v100_resnet50_workers4", "a100_alexnet"])
def test_real_traces_match_removed_plugin(name, plugin_names):
    """Time stamps in whole microseconds, so the plugin's floating point lost nothing."""
    plugin_names(name)
    assert our_figures(load(name)) == pytest.approx(plugin_figures(name), rel=1e-9, abs=0)


def as_doubles(trace, grid):
    """The trace with its events' ends where microseconds in double precision put them.

    Args:
        trace: the trace.
        grid: distance between neighboring doubles at its time stamps, in parts of a microsecond.

    Returns:
        A trace whose unit is that distance; ratios don't depend on the unit.
    """
    base_ns = trace.base_ns - trace.metadata.get("baseTimeNanoseconds", 0)
    begin_us = [(base_ns + value) / 1000 for value in trace.begin_ns.tolist()]
    duration_us = [value / 1000 for value in trace.duration_ns.tolist()]
    begin = np.array([value * grid for value in begin_us])
    end = np.array([(at + duration) * grid for at, duration in zip(begin_us, duration_us, strict=True)])
    whole = np.concatenate((begin, end))
    assert (whole == np.floor(whole)).all()
    first = int(begin.min())
    return replace(trace, begin_ns=begin.astype(np.int64) - first, end_ns=end.astype(np.int64) - first)


@pytest.mark.parametrize(("name", "grid"), [("a100_nccl", 1024), ("v100_ns_resolution", 4)])
def test_newer_real_traces_match_removed_plugin(name, grid, plugin_names):
    """It used doubles for time stamps, 0.25 µs apart since 1970; with that rounding the figures agree."""
    plugin_names(name)
    trace = load(name)
    rounded = our_figures(as_doubles(trace, grid))
    assert rounded == pytest.approx(plugin_figures(name), rel=1e-9, abs=0)
    assert our_figures(trace) == pytest.approx(rounded, rel=1e-4, abs=0)


@pytest.mark.parametrize(
    "name", ["a100_nccl", "mi250_toy", "sampled_2rank_rank0", "sampled_2rank_rank1", "v100_ns_resolution"]
)
def test_real_traces_over_all_device_events(name):
    truth = reference(name, "stdlib")
    timeline = replace(build_timeline(load(name)), steps=None, bounds=None)
    fact = summarize_device_usage(timeline)
    (device,) = fact.devices
    window_ns = fact.span[1] - fact.span[0]
    kernels_us = truth["compute_union_us"] + truth["comm_union_us"] - truth["comm_comp_overlap_us"]
    assert window_ns == pytest.approx(truth["gpu_window_us"] * 1000, abs=1)
    assert device.busy * window_ns == pytest.approx(truth["busy_us"] * 1000, abs=1)
    assert device.utilization * window_ns == pytest.approx(kernels_us * 1000, abs=1)


def test_real_devices():
    found = {
        name: summarize_device_usage(build_timeline(load(name))).devices[0]
        for name in ("a100_nccl", "mi250_toy", "sampled_2rank_rank1")
    }
    a100, mi250, second = found.values()
    assert (a100.number, a100.name, a100.compute_capability) == (0, "NVIDIA A100-PG509-200", "8.0")
    assert a100.memory_bytes / 2**30 == pytest.approx(39.39, abs=0.005)  # as shown by the plugin
    assert (mi250.number, mi250.name, mi250.memory_bytes) == (2, "AMD Radeon Graphics", 68702699520)
    assert (mi250.sm_efficiency, mi250.occupancy, mi250.tensor_cores) == (None, None, None)
    assert (second.number, second.name) == (1, None)
