"""Kernel Summary: hand-made traces, a slow oracle, and the tables of the removed plugin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.lazy import NO_DEVICE
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.kernels import summarize_kernels
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.options import DEFAULT_OPTIONS, SORT_KEYS, TableOptions
from lightning_modelprof.report.tables.trace.kernels import KERNELS
from tests.support.facts import table_of, why_not
from tests.support.traces import load, make_trace, reference

US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name, begin, duration, *, device=0, stream=7, **args):
    """A kernel; times in microseconds."""
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": begin,
        "dur": duration,
        "args": {"device": device, "stream": stream} | args,
    }


def estimates(blocks, occupancy):
    return {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}


def host(cat, name, begin, duration, tid=1, **args):
    """An event of a host thread; times in microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 100,
        "tid": tid,
        "ts": begin,
        "dur": duration,
        "args": args,
    }


def launch(name, begin, correlation):
    """An operator of 10 µs that contains the call launching a kernel."""
    return [
        host("cpu_op", name, begin, 10),
        host("cuda_runtime", "cudaLaunchKernel", begin + 2, 5, correlation=correlation),
    ]


def summary(*events):
    return summarize_kernels(build_timeline(make_trace(list(events))))


def rows(fact, options=DEFAULT_OPTIONS):
    """Cells by column key, for each kernel's name, in order."""
    table = table_of(KERNELS, fact if isinstance(fact, dict) else {0: fact}, options)
    keys = [column.key for column in table.columns]
    return {row[0]: dict(zip(keys, row, strict=True)) for row in table.rows}


def test_figures_of_kernel():
    fact = summary(
        kernel("gemm", 0, 10, **estimates(1.0, 50)),
        kernel("gemm", 20, 30, device=1, **estimates(3.0, 100)),
        kernel("copy<float>(float*, int)", 20, 60, stream=9, **estimates(0.5, 0)),
    )
    table = rows(fact)
    assert list(table) == ["copy<float>(float*, int)", "gemm"]  # 60 µs before 40 µs, names not shortened
    assert table["gemm"] == {
        "name": "gemm",
        "calls": 2,
        "device_total_ns": 40 * US,
        "device_avg_ns": 20 * US,
        "device_max_ns": 30 * US,
        "device_min_ns": 10 * US,
        "device_ratio": 0.4,  # of 40 + 60, although the two ran at the same time
        "blocks_per_sm": 2.5,  # (10 * 1 + 30 * 3) / 40
        "occupancy": 0.875,  # (10 * 0.5 + 30 * 1) / 40
        "tensor_cores": None,  # can't tell from its name
        "operator": None,
        "num_operators": None,
    }
    assert table["copy<float>(float*, int)"]["occupancy"] == 0.0  # measured, not missing


def test_estimates_cover_only_kernels_that_have_them():
    fact = summary(
        kernel("a", 0, 10, **estimates(2.0, 40)),
        kernel("a", 20, 90),
        kernel("b", 200, 5),
        kernel("b", 300, 5),
    )
    table = rows(fact)
    assert (table["a"]["blocks_per_sm"], table["a"]["occupancy"]) == (2.0, 0.4)
    assert (table["b"]["blocks_per_sm"], table["b"]["occupancy"]) == (None, None)


def test_kernels_of_zero_length():
    row = rows(summary(kernel("a", 5, 0, **estimates(2.0, 40)), kernel("a", 9, 0)))["a"]
    assert (row["calls"], row["device_total_ns"], row["device_avg_ns"]) == (2, 0, 0)
    assert row["device_ratio"] is None
    assert row["blocks_per_sm"] is None
    assert row["occupancy"] is None


def test_kernels_outside_steps_count():
    fact = summary(
        host("user_annotation", "ProfilerStep#3", 100, 50), kernel("a", 0, 10), kernel("a", 120, 10)
    )
    assert rows(fact)["a"]["device_total_ns"] == 20 * US


def test_tensor_cores_and_communication():
    names = {
        "volta_s884gemm_fp16": ("yes", "no"),
        NCCL: ("no", "yes"),
        "volta_sgemm": ("no", "no"),
        "_my_kernel": (None, "no"),
    }
    fact = summary(*(kernel(name, 10 * index, 5) for index, name in enumerate(names)))
    words = {True: "yes", False: "no", None: None}
    assert {
        one.name: (words[one.uses_tensor_cores], words[one.is_communication]) for one in fact.by_name
    } == names
    assert {name: row["tensor_cores"] for name, row in rows(fact).items()} == {
        name: uses_tensor_cores for name, (uses_tensor_cores, _) in names.items()
    }


@pytest.mark.parametrize(
    "call",
    ["hipLaunchKernel", "urEnqueueKernelLaunch", "zeCommandListAppendLaunchKernel", "mtiaLaunchKernel"],
)
def test_tensor_core_use_is_unknown_on_other_devices(call):
    fact = summary(
        host("cuda_runtime", call, 0, 2, correlation=1), kernel("Cijk_Ailk_MI16x16x1", 5, 5, correlation=1)
    )
    assert rows(fact)["Cijk_Ailk_MI16x16x1"]["tensor_cores"] is None


def test_device_model_shows_that_tensor_core_use_is_unknown():
    """Like a ROCm trace without runtime calls."""
    trace = make_trace(
        [kernel("Cijk_Ailk_MI16x16x1", 5, 5)], deviceProperties=[{"id": 0, "name": "AMD MI300X"}]
    )
    fact = summarize_kernels(build_timeline(trace))
    assert rows(fact)["Cijk_Ailk_MI16x16x1"]["tensor_cores"] is None


@pytest.mark.parametrize(
    "properties",
    [
        {"name": "Tesla P100-PCIE-16GB", "computeMajor": 6, "computeMinor": 0},
        {"name": "NVIDIA GeForce GTX 1650", "computeMajor": 7, "computeMinor": 5},
    ],
)
def test_device_without_tensor_cores_shows_dashes(properties):
    trace = make_trace([kernel("volta_sgemm", 5, 5)], deviceProperties=[{"id": 0, **properties}])
    assert rows(summarize_kernels(build_timeline(trace)))["volta_sgemm"]["tensor_cores"] is None


def test_kernels_launched_in_communication_range_communicate():
    call = host("cuda_runtime", "cudaLaunchKernel", 2, 2, correlation=1)
    fact = summary(host("cpu_op", "symm_mem::x", 0, 9), call, kernel("mine", 15, 5, correlation=1))
    assert [one.is_communication for one in fact.by_name] == [True]


def test_operator_named_like_other_runtime_changes_nothing():
    fact = summary(host("cpu_op", "zeros", 0, 2), host("cpu_op", "hip", 3, 2), kernel("h884", 5, 5))
    assert rows(fact)["h884"]["tensor_cores"] == "yes"


def test_launching_operators():
    fact = summary(
        *launch("aten::mm", 0, 1),
        *launch("aten::addmm", 20, 2),
        *launch("aten::mm", 40, 3),
        host("cuda_runtime", "cudaLaunchKernel", 60, 5, correlation=4),  # in no operator
        kernel("gemm", 100, 10, correlation=1),
        kernel("gemm", 120, 25, correlation=2),
        kernel("gemm", 150, 20, correlation=3),
        kernel("gemm", 180, 500, correlation=4),
        kernel("gemm", 700, 500),
        kernel("other", 1300, 1, correlation=4),
    )
    table = rows(fact)
    assert (table["gemm"]["operator"], table["gemm"]["num_operators"]) == ("aten::mm", 2)  # 30 µs, not 25
    assert (table["other"]["operator"], table["other"]["num_operators"]) == (None, None)
    assert fact.by_name[0].operators.time_ns == {"aten::mm": 30 * US, "aten::addmm": 25 * US}


def test_innermost_operator_launches():
    fact = summary(
        host("cpu_op", "aten::linear", 0, 50),
        *launch("aten::addmm", 10, 1),
        kernel("g", 90, 5, correlation=1),
    )
    assert rows(fact)["g"]["operator"] == "aten::addmm"


SORTED = (
    # name, durations: totals 12, 10, 8; averages 4, 10, 2; longest 6, 10, 5; shortest 2, 10, 1; calls 3, 1, 4
    ("a", (2, 4, 6)),
    ("b", (10,)),
    ("c", (1, 1, 1, 5)),
)
ORDERS = {"total": "abc", "avg": "bac", "max": "bac", "min": "cab", "calls": "cab"}


@pytest.mark.parametrize("key", [None, *SORT_KEYS])
def test_sorted_by(key):
    durations = [(name, duration) for name, calls in SORTED for duration in calls]
    fact = summary(*(kernel(name, 20 * index, duration) for index, (name, duration) in enumerate(durations)))
    order = "".join(rows(fact, TableOptions(sorted_by=key)))
    figure = "total" if key is None else key.split("_")[-1]
    assert order == ORDERS.get(figure, ORDERS["total"])  # kernels have no self time and no memory


def test_ranks_are_pooled():
    first = summary(
        *launch("aten::mm", 0, 1),
        kernel("a", 50, 10, correlation=1, **estimates(1.0, 50)),
        kernel("b", 70, 100),
    )
    second = summary(
        *launch("aten::bmm", 0, 1),
        kernel("a", 50, 30, correlation=1, **estimates(3.0, 100)),
        kernel("a", 90, 20),
        kernel("c", 200, 40),
    )
    table = rows({1: second, 0: first})
    assert list(table) == ["b", "a", "c"]
    assert table["a"] == {
        "name": "a",
        "calls": 3,
        "device_total_ns": 60 * US,
        "device_avg_ns": 20 * US,
        "device_max_ns": 30 * US,
        "device_min_ns": 10 * US,
        "device_ratio": 0.3,  # of 110 + 90
        "blocks_per_sm": 2.5,
        "occupancy": 0.875,
        "tensor_cores": None,
        "operator": "aten::bmm",  # 30 µs against 10 µs
        "num_operators": 2,
    }


def test_trace_without_kernels():
    assert why_not(summary, host("cpu_op", "aten::mm", 0, 5)) == NO_DEVICE
    copy = kernel("Memcpy HtoD (Pinned -> Device)", 0, 5) | {"cat": "gpu_memcpy"}
    assert "no kernels" in why_not(summary, copy)
    table = table_of(KERNELS, {0: NO_DEVICE, 1: NO_DEVICE})
    assert (table.rows, table.absent_reason) == ((), NO_DEVICE)
    some = table_of(KERNELS, {0: summary(kernel("a", 0, 5)), 3: NO_DEVICE})
    assert [row[0] for row in some.rows] == ["a"]
    assert f"Without rank 3: {NO_DEVICE}." in some.notes


def test_notes_about_estimates():
    with_estimates = table_of(KERNELS, {0: summary(kernel("a", 0, 5, **estimates(1, 0)))})
    without = table_of(KERNELS, {0: summary(kernel("a", 0, 5))})
    assert not any("weren't recorded" in note for note in with_estimates.notes)
    assert any("weren't recorded" in note for note in without.notes)


def test_units():
    units = {column.key: column.unit for column in table_of(KERNELS, {0: NO_DEVICE}).columns}
    assert units["device_total_ns"] is Unit.DURATION_NS
    assert units["device_ratio"] is units["occupancy"] is Unit.RATIO
    assert units["blocks_per_sm"] is units["num_operators"] is units["calls"] is Unit.COUNT


@dataclass(frozen=True)
class Made:
    """A kernel of a generated trace, in whole nanoseconds."""

    name: str
    begin_ns: int
    duration_ns: int
    device: int
    blocks: float | None
    occupancy: int | None
    operator: str | None


made_kernels = st.builds(
    Made,
    name=st.sampled_from(["a", "b", "h884", NCCL]),
    begin_ns=st.integers(0, 2000),
    duration_ns=st.integers(0, 300),
    device=st.integers(0, 2),
    blocks=st.none() | st.sampled_from([0.0, 0.25, 1.5, 640.0]),
    occupancy=st.none() | st.integers(0, 100),
    operator=st.none() | st.sampled_from(["aten::mm", "aten::add"]),
)


def written(made):
    """The kernels and their launches as events."""
    events = []
    for number, one in enumerate(made, start=1):
        args = {"correlation": number}
        if one.blocks is not None:
            args["blocks per SM"] = one.blocks
        if one.occupancy is not None:
            args["est. achieved occupancy %"] = one.occupancy
        events.append(
            kernel(one.name, one.begin_ns / 1000, one.duration_ns / 1000, device=one.device, **args)
        )
        if one.operator is not None:
            events.extend(launch(one.operator, 20 * number, number))
    return events


def mean_over_time(pairs):
    """Mean of (value, time) pairs, computed slowly."""
    whole = sum(time for value, time in pairs if value is not None)
    if not whole:
        return None
    return pytest.approx(sum(value * time for value, time in pairs if value is not None) / whole, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(made_kernels, min_size=1, max_size=12))
def test_matches_oracle(made):
    table = rows(summary(*written(made)))
    assert set(table) == {one.name for one in made}
    everything = sum(one.duration_ns for one in made)
    for name, row in table.items():
        calls = [one for one in made if one.name == name]
        times = [one.duration_ns for one in calls]
        by_operator = {
            operator: sum(one.duration_ns for one in calls if one.operator == operator)
            for operator in {one.operator for one in calls} - {None}
        }
        assert row["calls"] == len(calls)
        assert row["device_total_ns"] == sum(times)
        assert (row["device_max_ns"], row["device_min_ns"]) == (max(times), min(times))
        assert row["device_avg_ns"] == sum(times) / len(times)
        assert row["device_ratio"] == (sum(times) / everything if everything else None)
        assert row["blocks_per_sm"] == mean_over_time([(one.blocks, one.duration_ns) for one in calls])
        occupancies = [(None if one.occupancy is None else one.occupancy / 100) for one in calls]
        assert row["occupancy"] == mean_over_time(list(zip(occupancies, times, strict=True)))
        assert row["num_operators"] == (len(by_operator) or None)
        if by_operator:
            assert by_operator[row["operator"]] == max(by_operator.values())
        else:
            assert row["operator"] is None


WITH_PLUGIN = (
    "v100_resnet50_workers0",
    "v100_resnet50_workers4",
    "a100_nccl",
    "v100_ns_resolution",
    "a100_alexnet",
)


def microseconds(value):
    """A value that the plugin printed in whole microseconds."""
    return pytest.approx(value * US, abs=US / 2 + 1)


def two_decimals(value, scale=1.0):
    """A value that the plugin printed with two decimals."""
    return pytest.approx(value / scale, abs=(0.005 + 1e-6) / scale)


@pytest.mark.parametrize("name", WITH_PLUGIN)
def test_real_traces_match_removed_plugin(name):
    truth = reference(name, "tb_plugin")["kernel_table"]
    table = rows(summarize_kernels(build_timeline(load(name))))
    assert len(table) == truth["n_rows_total"]
    for kernel_name, tensor, calls, total, mean, longest, shortest, blocks, occupancy in truth["rows"]:
        row = table[kernel_name]
        assert row["calls"] == calls
        assert row["device_total_ns"] == microseconds(total)
        assert row["device_avg_ns"] == microseconds(mean)
        assert (row["device_max_ns"], row["device_min_ns"]) == (microseconds(longest), microseconds(shortest))
        assert row["blocks_per_sm"] == two_decimals(blocks)
        assert row["occupancy"] == two_decimals(occupancy, scale=100)
        # The plugin says "No" for every name it doesn't know, such as cuDNN's kernels since Ampere.
        says_so = "tensor16x8x8" in kernel_name or "TensorOp" in kernel_name
        allowed = {"yes"} if tensor == "Yes" or says_so else {"no", None}
        assert row["tensor_cores"] in allowed


@pytest.mark.parametrize("name", WITH_PLUGIN[:4])  # it links none in the fifth
def test_real_traces_have_operators_of_plugin(name):
    found = summarize_kernels(build_timeline(load(name)))
    operators = {kernel.name: kernel.operators.time_ns for kernel in found.by_name}
    of_plugin = {}
    for kernel_name, operator, *_, total_us, _, _, _, _, _ in reference(name, "tb_plugin")["kernel_op_table"][
        "rows"
    ]:
        key = kernel_name, operator
        of_plugin[key] = of_plugin.get(key, 0) + total_us
    assert len(of_plugin) > 20
    for (kernel_name, operator), total_us in of_plugin.items():
        # The reference has only the 60 longest rows by grid and block, so some of a pair's may be missing.
        assert operators[kernel_name][operator] >= total_us * US * (1 - 1e-3)


def test_real_communication_kernels():
    found = summarize_kernels(build_timeline(load("a100_nccl")))
    assert sum(kernel.tally.calls for kernel in found.by_name if kernel.is_communication) == 21
    assert all(("nccl" in kernel.name) == kernel.is_communication for kernel in found.by_name)
    assert found.total_ns == pytest.approx(reference("a100_nccl", "stdlib")["kernel_dur_sum_us"] * US, abs=1)
