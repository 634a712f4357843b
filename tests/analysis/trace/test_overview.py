"""Overview Summary: hand-made traces, an oracle on a grid, and independent figures of real traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.model_summary import summarize_model
from lightning_modelprof.analysis.trace.overview import (
    DEVICE_TYPES,
    HOST_TYPES,
    summarize_overview,
)
from lightning_modelprof.report.tables.trace.overview import OVERVIEW
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from tests.support.facts import table_of, why_not
from tests.support.traces import event, load, make_trace, reference

US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def step(number, begin, end):
    return event("user_annotation", f"ProfilerStep#{number}", begin, end)


def summarize(*events, **metadata):
    return summarize_overview(build_timeline(make_trace(list(events), **metadata)))


def times(types):
    """Type → calls and microseconds within the steps."""
    return {one.key: (one.calls, one.total_ns // US) for one in types}


def test_range_around_all_steps_is_ignored():
    """It used to fill them by 100%, with 0 calls."""
    found = summarize(
        event("user_annotation", "whole job", 0, 500),
        step(0, 10, 100),
        event("user_annotation", "my range", 20, 50),
        step(1, 100, 200),
        event("user_annotation", "until later", 150, 300),
        event("cpu_op", "aten::mm", 20, 40),
    )
    assert times(found.host)["user_defined"] == (2, 30 + 50)


def test_each_type():
    found = summarize(
        step(0, 0, 100),
        event("user_annotation", LOADER, 0, 10),
        event("cpu_op", "aten::linear", 10, 30),
        event("cpu_op", "aten::addmm", 12, 28),
        event("cuda_runtime", "cudaLaunchKernel", 15, 20),
        event("cuda_driver", "cuLaunchKernel", 22, 24),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 30, 50, 2),
        event("cpu_op", "AddmmBackward0", 31, 49, 2),
        event("user_annotation", "nccl:all_reduce", 45, 55, 2),
        event("user_annotation", "Optimizer.step#SGD.step", 60, 80),
        event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", 80, 84),
        event("user_annotation", "my range", 85, 90),
        event("user_annotation", "[pl][profile]run_training_batch", 0, 100),
        event("python_function", "train.py(1): main", 0, 95),
        event("overhead", "Activity Buffer Request", 96, 97),
        event("Trace", "PyTorch Profiler (0)", 0, 100),
        event("gpu_user_annotation", "my range", 0, 100, "stream 7"),
    )
    assert (found.num_steps, found.steps_ns) == (1, 100 * US)
    assert times(found.host) == {
        "python_function": (1, 95),
        "operator": (3, 20 + 18),  # includes those on the autograd thread, but not its nodes
        "backward": (1, 20),
        "optimization": (1, 20),
        "dataloader": (1, 10),
        "communication": (1, 10),
        "runtime": (2, 7),
        "user_defined": (1, 5),
        "zero_grad": (1, 4),
        "overhead": (1, 1),
    }
    rows = table_of(OVERVIEW, {0: found}).rows[1:]
    assert [row[2] for row in rows] == sorted((one.total_ns for one in found.host), reverse=True)
    assert [row[3] for row in rows] == [row[2] / (100 * US) for row in rows]
    assert found.device == ()


def test_device_types():
    found = summarize(
        step(0, 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 5, 6, correlation=1),
        event("kernel", "gemm", 10, 30, "stream 7", device=0, stream=7, correlation=1),
        event("kernel", "gemm", 20, 40, "stream 9", device=0, stream=9, correlation=1),
        event("kernel", "gemm", 35, 50, "stream 7 of 1", device=1, stream=7, correlation=1),
        event("kernel", NCCL, 45, 65, "stream 20", device=0, stream=20, correlation=1),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, 5, "stream 7", correlation=1),
        event("gpu_memset", "Memset (Device)", 70, 71, "stream 7", correlation=1),
    )
    assert times(found.device) == {
        "kernel": (3, 40),
        "memcpy": (1, 5),
        "memset": (1, 1),
        "communication": (1, 20),
    }
    assert [row[5] for row in table_of(OVERVIEW, {0: found}).rows[-4:]] == [0.4, 0.05, 0.01, 0.2]


def test_times_are_clipped_to_steps_and_also_given_in_full():
    found = summarize(
        event("cpu_op", "aten::a", 0, 15),  # starts before the steps
        step(0, 10, 20),
        event("cpu_op", "aten::b", 19, 26),  # ends in the gap between them
        step(1, 30, 40),
        event("cpu_op", "aten::c", 38, 50),
        event("cpu_op", "aten::d", 60, 70),
        event("cpu_op", "aten::empty", 35, 35),
        event("user_annotation", "only outside", 50, 60),
    )
    (operators,) = found.host
    assert (operators.calls, operators.total_ns) == (3, (5 + 1 + 2) * US)
    assert (operators.whole_calls, operators.whole_ns) == (5, (15 + 7 + 12 + 10) * US)
    assert found.steps_ns == 20 * US


def test_device_may_lag_behind_host():
    """Steps of 10 on the host last 30 until the device is done; the share is still at most 100%."""
    found = summarize(
        step(0, 0, 10),
        event("cuda_runtime", "cudaLaunchKernel", 0, 1, correlation=1),
        event("kernel", "gemm", 0, 30, "stream 7", correlation=1),
        event("kernel", "of nobody", 40, 50, "stream 7", correlation=2),
    )
    assert (found.steps_ns, found.device_steps_ns) == (10 * US, 30 * US)
    (kernel,) = found.device
    assert (kernel.calls, kernel.total_ns) == (1, 30 * US)
    assert (kernel.whole_calls, kernel.whole_ns) == (2, 40 * US)


def test_nodes_of_old_autograd():
    found = summarize(
        step(0, 0, 100),
        event("cpu_op", "CudnnConvolutionBackward", 10, 30),
        event("cpu_op", "aten::cudnn_convolution_backward", 12, 20),
        event("cpu_op", "torch::autograd::AccumulateGrad", 40, 45),
    )
    assert times(found.host) == {"backward": (2, 25), "operator": (1, 8)}


def test_fetch_inside_modelprof_range_is_one_call():
    found = summarize(
        step(0, 0, 100),
        event("user_annotation", "modelprof: dataloader", 0, 20),
        event("user_annotation", LOADER, 2, 18),
        event("user_annotation", LOADER, 50, 60),  # a validation fetch
    )
    assert times(found.host) == {"dataloader": (2, 30)}


def test_range_outlives_python_function_that_opened_it():
    found = summarize(
        step(0, 0, 100),
        event("python_function", "torch/autograd/profiler.py(1): __enter__", 9, 11),
        event("user_annotation", "modelprof: dataloader", 10, 30),
        event("python_function", "torch/autograd/profiler.py(1): __enter__", 14, 16),
        event("user_annotation", LOADER, 15, 25),
    )
    assert times(found.host) == {"dataloader": (1, 20), "python_function": (2, 4)}


def test_trace_without_steps():
    reason = "the trace has none of the recorded steps, or neither steps nor operators"
    assert why_not(summarize, event("kernel", "gemm", 0, 10, "stream 7")) == reason
    other = {TRACE_METADATA_KEY: {"recorded_steps": [7]}}
    assert why_not(summarize, step(0, 0, 10), event("cpu_op", "aten::a", 1, 2), **other) == reason
    found = summarize(event("cpu_op", "aten::a", 5, 10), event("cpu_op", "aten::b", 12, 25))
    assert (found.num_steps, times(found.host)) == (1, {"operator": (2, 18)})
    assert len(found.notes) == 1


def overview(begin, end, *device):
    """One step of 100 with an operator and device events."""
    return summarize(
        step(0, 0, 100),
        event("cpu_op", "aten::a", begin, end),
        event("cuda_runtime", "cudaLaunchKernel", 0, 4, correlation=1),
        *(event("kernel", "gemm", *span, "stream 7", correlation=1) for span in device),
    )


def test_table():
    table = table_of(OVERVIEW, {0: overview(10, 60, (0, 25), (50, 75))})
    assert list(zip(table.depths, table.rows, strict=True)) == [
        (0, ("ProfileStep", 1, 100 * US, 1.0, None, None)),
        (1, ("Operator", 1, 50 * US, 0.5, None, None)),
        (1, ("Runtime", 1, 4 * US, 0.04, None, None)),
        (0, ("Kernel", 2, None, None, 50 * US, 0.5)),
    ]
    assert not any("no GPU events" in note or "ranks" in note for note in table.notes)


def test_table_for_several_ranks():
    both = {0: overview(10, 60, (0, 25)), 1: overview(0, 10), 3: "its file is damaged"}
    table = table_of(OVERVIEW, both)
    assert table.rows == (
        ("ProfileStep", 2, 200 * US, 1.0, None, None),
        ("Operator", 2, 60 * US, 0.3, None, None),
        ("Runtime", 2, 8 * US, 0.04, None, None),
        ("Kernel", 1, None, None, 25 * US, 0.25),  # rank 1 has no device
    )
    assert any("summed over 2 ranks" in note and "exclude rank 1," in note for note in table.notes)
    same = table_of(OVERVIEW, {0: overview(10, 60, (0, 25)), 1: overview(0, 10, (0, 35))})
    assert same.rows[-1] == ("Kernel", 2, None, None, 60 * US, 0.3)
    assert not any("exclude rank" in note for note in same.notes)
    assert table.notes[-1] == "Without rank 3: its file is damaged."


def test_table_without_device_or_data():
    table = table_of(OVERVIEW, {0: overview(10, 60)})
    assert any("no GPU events" in note for note in table.notes)
    absent = table_of(OVERVIEW, {0: "why", 1: "why"})
    assert (absent.rows, absent.absent_reason) == ((), "why")


def test_dropped_steps_are_named():
    found = summarize(
        step(0, 0, 10),
        event("cuda_runtime", "cudaLaunchKernel", 0, 1, correlation=1),
        event("kernel", "gemm", 2, 5, "stream 7", correlation=1),
        step(1, 10, 20),
    )
    assert found.device_steps_ns == 10 * US
    table = table_of(OVERVIEW, {0: found})
    assert any(note.startswith("Steps left out at the end: 1. ") for note in table.notes)


def test_time_between_windows_is_in_no_ratio():
    """Two windows of 20: the device is busy for 30 of these 40, and for 10 between them."""
    found = summarize(
        *(step(n, at, at + 10) for n, at in ((5, 0), (6, 10), (55, 1_000), (56, 1_010))),
        event("kernel", "gemm", 5, 25, "stream 7"),
        event("kernel", "gemm", 995, 1_015, "stream 7"),
    )
    assert found.device_steps_ns == 40 * US
    assert table_of(OVERVIEW, {0: found}).rows[-1] == ("Kernel", 1, None, None, 30 * US, 0.75)
    assert found.notes == (
        "The steps are 2 separate ranges, and no ratio includes the time in between: 5 to 6, 55 to 56.",
    )


def own_trace(*own):
    """A step containing an optimizer step with a closure: backward [20, 50), the step itself [50, 60)."""
    return make_trace(
        [
            step(0, 0, 100),
            event("user_annotation", "Optimizer.step#SGD.step", 10, 60),
            event("cpu_op", "aten::mm", 12, 18),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 20, 50, 2),
            event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", 18, 20),
            *own,
        ]
    )


@pytest.mark.parametrize(
    ("own", "optimization", "zero_grad"),
    [
        ((), 10, 2),
        # With this package's ranges, the optimizer's is innermost in [10, 12) and [48, 62).
        (
            (
                event("user_annotation", "modelprof: optimizer", 10, 62),
                event("user_annotation", "modelprof: forward", 12, 18),
                event("user_annotation", "modelprof: zero_grad", 18, 21),
                event("user_annotation", "modelprof: backward", 21, 48),
            ),
            16,
            3,
        ),
    ],
)
def test_optimization_matches_model_summary(own, optimization, zero_grad):
    """Excludes the forward and backward that Lightning runs in the optimizer's closure."""
    timeline = build_timeline(own_trace(*own))
    found = summarize_overview(timeline)
    assert {key: time for key, time in times(found.host).items() if key in {"optimization", "zero_grad"}} == {
        "optimization": (1, optimization),
        "zero_grad": (1, zero_grad),
    }
    rows = {row.key: row for row in summarize_model(timeline).rows}
    for one in found.host:
        if one.key in {"optimization", "zero_grad"}:
            row = rows["optimizer" if one.key == "optimization" else one.key]
            assert (one.calls, one.total_ns) == (row.calls, row.host_total_ns)


def test_steps_of_length_zero_are_noted():
    events = [step(0, 0, 0), step(1, 10, 10), event("cpu_op", "aten::a", 0, 20)]
    assert "length 0" in why_not(summarize_model, build_timeline(make_trace(events)))
    found = summarize(*events)
    assert found.notes == (
        "The trace's ProfilerStep ranges have length 0, so step 0 is the span of its CPU operators.",
    )


# The oracle: checks every microsecond with plain loops.

KINDS = {
    ("cpu_op", "aten::mm"): "operator",
    ("cpu_op", "autograd::engine::evaluate_function: MmBackward0"): "backward",
    ("cuda_runtime", "cudaFree"): "runtime",
    ("user_annotation", LOADER): "dataloader",
    ("cpu_op", "gloo:all_reduce"): "communication",
    ("user_annotation", "mine"): "user_defined",
    ("python_function", "f"): "python_function",
    ("overhead", "Buffer"): "overhead",
    ("user_annotation", "[pl][profile]x"): None,
    ("gpu_user_annotation", "mine"): None,
}
DEVICE_KINDS = {
    ("kernel", "gemm"): "kernel",
    ("kernel", NCCL): "communication",
    ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)"): "memcpy",
    ("gpu_memset", "Memset (Device)"): "memset",
}


@st.composite
def recordings(draw):
    """Steps with gaps, and events of all kinds, each on its own thread or stream."""
    now, steps = draw(st.integers(0, 8)), []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=3)):
        steps.append((now + gap, now + gap + size))
        now += gap + size
    kinds = st.sampled_from([*KINDS, *DEVICE_KINDS])
    drawn = draw(st.lists(st.tuples(kinds, st.integers(0, 40), st.integers(0, 14)), max_size=14))
    return steps, [(kind, begin, begin + size) for kind, begin, size in drawn]


@settings(max_examples=100, deadline=None)
@given(recordings())
def test_matches_oracle(recording):
    """No launch is known, so the device uses the steps' own bounds."""
    steps, events = recording
    written = [step(number, begin, end) for number, (begin, end) in enumerate(steps)]
    written += [event(*kind, begin, end, f"track {index}") for index, (kind, begin, end) in enumerate(events)]
    found = summarize(*written)
    span = [(steps[0][0], steps[-1][1])]
    # Backward nodes of old torch are searched for only if there are no new ones; no name here is either.
    for types, kinds, windows in ((found.host, KINDS, steps), (found.device, DEVICE_KINDS, span)):
        inside = {point for begin, end in windows for point in range(begin, end)}
        expected = {}
        for key in {*kinds.values()} - {None}:
            mine = [(begin, end) for kind, begin, end in events if kinds.get(kind) == key]
            if key == "user_defined":
                mine = [(begin, end) for begin, end in mine if begin >= span[0][0] or end < span[0][1]]
            calls = sum(begin in inside for begin, _ in mine)
            covered = len(inside & {point for begin, end in mine for point in range(begin, end)})
            if calls or covered:
                expected[key] = (calls, covered)
        assert times(types) == expected
        assert all(one.total_ns <= len(inside) * US for one in types)


def test_types_are_known():
    found = overview(10, 60, (0, 25), (50, 75))
    assert {one.key for one in found.host} <= set(HOST_TYPES)
    assert {one.key for one in found.device} <= set(DEVICE_TYPES)


# Real traces


@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "v100_resnet50_workers4"])
def test_resnet_matches_plugin(name):
    found = summarize_overview(build_timeline(load(name)))
    truth = reference(name, "tb_plugin")["role_range_sums"]
    whole = {one.key: one.whole_ns for one in (*found.host, *found.device)}
    for key, role in (
        ("kernel", "Kernel"),
        ("memcpy", "Memcpy"),
        ("memset", "Memset"),
        ("runtime", "Runtime"),
        ("dataloader", "DataLoader"),
    ):
        assert whole[key] == truth[role] * US
    assert "communication" not in whole
    dataloader = next(one for one in found.host if one.key == "dataloader")
    assert (dataloader.calls, dataloader.total_ns) == (6, truth["DataLoader"] * US)


@pytest.mark.parametrize(
    "name", ["a100_nccl", "mi250_toy", "sampled_2rank_rank0", "sampled_2rank_rank1", "v100_ns_resolution"]
)
def test_unions_of_newer_traces(name):
    found = summarize_overview(build_timeline(load(name)))
    truth = reference(name, "stdlib")
    whole = {one.key: one.whole_ns for one in found.device}
    for key, role in (
        ("kernel", "compute"),
        ("communication", "comm"),
        ("memcpy", "memcpy"),
        ("memset", "memset"),
    ):
        assert whole.get(key, 0) == pytest.approx(truth[f"{role}_union_us"] * US, abs=1)
    communication = sum(one.whole_calls for one in found.device if one.key == "communication")
    assert communication == truth["n_comm_kernels"]
    kernels = sum(one.whole_calls for one in found.device if one.key in {"kernel", "communication"})
    assert kernels == truth["n_kernels"]
    assert all(0 < one.total_ns <= found.steps_ns for one in found.host)
    assert all(0 < one.total_ns <= found.device_steps_ns for one in found.device)
    assert found.steps_ns == pytest.approx(sum(s["wall_us"] for s in truth["profiler_steps"]) * US, abs=1)
