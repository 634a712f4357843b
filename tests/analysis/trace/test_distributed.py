"""Distributed Summary: hand-made traces, an oracle on a grid, and real traces with NCCL and gloo."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.pooling import pool_alike
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.distributed import summarize_distributed
from lightning_modelprof.report.tables.trace.distributed import COLLECTIVES, DISTRIBUTED
from lightning_modelprof.trace.reader import read_trace
from tests.support.facts import fact_or_why, table_of, why_not
from tests.support.fits import run_script
from tests.support.traces import load, make_trace, reference

US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PARAMS = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Description": "default_pg",
    "Group size": 2,
    "dtype": "Float",
    "In msg nelems": 100,
    "Out msg nelems": 100,
}


def event(cat, name, begin, end, tid=1, **args):
    pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_memset") else 1
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def kernel(name, begin, end, stream=7, **args):
    return event("kernel", name, begin, end, stream, device=0, stream=stream, **args)


def step(number, begin, end):
    return event("user_annotation", f"ProfilerStep#{number}", begin, end)


def fact_of(*events):
    return summarize_distributed(build_timeline(make_trace(list(events))))


def microseconds(overlap):
    return tuple(
        part if part is None else part / US
        for part in (
            overlap.communication_ns,
            overlap.computation_ns,
            overlap.overlap_ns,
            overlap.exposed_ns,
        )
    )


def by_key(collectives):
    return {
        (one.name, one.group, one.group_size): (one.time.calls, one.time.total_ns // US, one.size_bytes)
        for one in collectives
    }


def test_overlap_across_streams():
    """Communication [10, 30) and [50, 60); computation [0, 20) and [55, 70): both in [10, 20), [55, 60)."""
    fact = fact_of(
        step(0, 0, 80),
        kernel("gemm", 0, 12),
        kernel("gemm", 8, 20, 9),
        kernel(NCCL, 10, 25, 40),
        kernel(NCCL, 20, 30, 41),
        kernel(NCCL, 50, 60, 40),
        kernel("relu", 55, 70),
        event("gpu_memcpy", "Memcpy DtoD", 22, 28, 7),
    )
    assert microseconds(fact.whole) == (30, 35, 15, 15)
    assert (fact.source, fact.base, fact.base_ns, fact.num_steps) == ("device", "steps", 80 * US, 1)
    assert not fact.is_asynchronous


def test_whole_trace_and_steps():
    """One of three collectives runs before the steps, so the mean per step covers the other two."""
    launch = [event("cuda_runtime", "cudaLaunchKernel", 11 + i, 12 + i, correlation=i) for i in (1, 2)]
    fact = fact_of(
        kernel(NCCL, 0, 4, 40),
        step(0, 10, 20),
        launch[0],
        kernel(NCCL, 14, 18, 40, correlation=1),
        launch[1],
        kernel("gemm", 16, 22, correlation=2),
        step(1, 22, 32),
        event("cuda_runtime", "cudaLaunchKernel", 22, 23, correlation=3),
        kernel(NCCL, 25, 27, 40, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 23, 24, correlation=4),
        kernel("gemm", 24, 26, correlation=4),
    )
    assert microseconds(fact.whole) == (10, 8, 3, 7)
    assert microseconds(fact.in_steps) == (6, 8, 3, 3)
    assert (fact.base_ns, fact.num_steps) == (22 * US, 2)
    table = table_of(DISTRIBUTED, {0: fact})
    assert table.rows == (
        ("ProfileStep", 22 * US, 1.0, 11 * US),
        ("Communication", 10 * US, 6 / 22, 3 * US),
        ("Computation", 8 * US, 8 / 22, 4 * US),
        ("Overlap", 3 * US, 3 / 22, 1.5 * US),
        ("Exposed", 7 * US, 3 / 22, 1.5 * US),
    )
    assert table.depths == (0, 1, 1, 1, 1)
    assert table.notes == ()


def test_no_ratio_exceeds_one_if_most_work_is_outside_steps():
    """The step is [100, 110): it has 8 of 40 µs of communication, and 4 of 30 µs of computation."""
    fact = fact_of(
        kernel(NCCL, 0, 32, 40),
        kernel("gemm", 10, 36),
        step(7, 100, 110),
        kernel(NCCL, 101, 109, 40),
        kernel("gemm", 106, 110),
    )
    rows = table_of(DISTRIBUTED, {0: fact}).rows
    assert [(row[0], row[1] // US, row[2]) for row in rows] == [
        ("ProfileStep", 10, 1.0),
        ("Communication", 40, 0.8),
        ("Computation", 30, 0.4),
        ("Overlap", 25, 0.3),
        ("Exposed", 15, 0.5),
    ]


@pytest.mark.parametrize("base", [[], [event("cpu_op", "aten::mm", 90, 130)]], ids=["device", "operators"])
def test_ratios_without_steps_use_span(base):
    fact = fact_of(kernel(NCCL, 0, 100, 40), kernel("gemm", 100, 120), *base)
    rows = table_of(DISTRIBUTED, {0: fact}).rows
    shares = (10 / 40, 20 / 40) if base else (100 / 120, 20 / 120)
    assert tuple(row[2] for row in rows[1:3]) == shares


def test_kernels_that_exchange_between_experts():
    """DeepEP's kernels, for a mixture of experts; nothing around their launches indicates communication."""
    fact = fact_of(
        step(0, 0, 100),
        kernel("void deep_ep::internode::dispatch<false, 8, true, 8>(int4*, float*)", 10, 30, 40),
        kernel("void deep_ep::internode::dispatch<true, 4, true, 8>(int4*, float*)", 30, 35, 40),
        kernel("void deep_ep::internode::combine<false, 8, __nv_bfloat16>(int4*)", 60, 70, 40),
        kernel("void cutlass::device_kernel<GemmKernel>(Params)", 20, 40),
    )
    assert microseconds(fact.whole) == (35, 20, 15, 20)
    assert by_key(fact.collectives) == {
        ("deep_ep::internode::dispatch", None, None): (2, 25, None),
        ("deep_ep::internode::combine", None, None): (1, 10, None),
    }


def test_base_without_steps_is_device_or_operators():
    fact = fact_of(kernel(NCCL, 0, 10, 40), kernel("gemm", 5, 25))
    assert (fact.base, fact.base_ns, fact.in_steps, fact.num_steps) == ("device", 25 * US, None, 0)
    assert table_of(DISTRIBUTED, {0: fact}).rows[0] == (
        "Span of the GPU events",
        25 * US,
        1.0,
        None,
    )
    fact = fact_of(kernel(NCCL, 0, 10, 40), event("cpu_op", "aten::mm", 2, 22))
    assert (fact.base, fact.base_ns, fact.in_steps) == ("operators", 20 * US, None)
    assert table_of(DISTRIBUTED, {0: fact}).rows[0][0] == "Span of the operators"


def test_trace_without_base_has_no_ratios():
    fact = fact_of(event("user_annotation", "gloo:barrier", 0, 10))
    assert (fact.base, fact.base_ns) == (None, None)
    table = table_of(DISTRIBUTED, {0: fact})
    assert table.rows[0] == ("Communication", 10 * US, None, None)
    assert table.depths == (0, 0, 0, 0)


def test_gloo_on_host():
    """The union over threads of [2, 8), [5, 12) and [14, 15); without kernels, the overlap is unknown."""
    fact = fact_of(
        step(0, 0, 20),
        event("cpu_op", "c10d::allreduce_", 1, 2),
        event("user_annotation", "gloo:all_reduce", 2, 8, 2),
        event("cpu_op", "gloo:all_reduce", 5, 12, 3),
        event("user_annotation", "gloo:broadcast", 14, 15, 2),
    )
    assert fact.source == "host"
    assert not fact.is_asynchronous
    assert microseconds(fact.whole) == (11, None, None, None)
    assert by_key(fact.collectives) == {
        ("all_reduce", None, None): (2, 13, None),
        ("broadcast", None, None): (1, 1, None),
    }
    table = table_of(DISTRIBUTED, {0: fact})
    assert [row[1] for row in table.rows] == [20 * US, 11 * US, None, None, None]
    assert ["CPU ranges" in note for note in table.notes] == [True, False]


def test_gloo_with_device():
    fact = fact_of(
        step(0, 0, 20),
        event("user_annotation", "gloo:all_reduce", 2, 8, 2),
        kernel("gemm", 5, 12),
    )
    assert fact.source == "host"
    assert microseconds(fact.whole) == (6, 7, 3, 3)


def test_nccl_recorded_only_on_host():
    fact = fact_of(step(0, 0, 20), event("user_annotation", "nccl:all_reduce", 2, 8))
    assert (fact.source, fact.is_asynchronous) == ("host", True)
    assert len(table_of(DISTRIBUTED, {0: fact}).notes) == 3


def test_nccl_without_communication_kernels():
    asked = event("user_annotation", "nccl:all_reduce", 2, 8)
    assert "single-process" in why_not(fact_of, step(0, 0, 20), asked, kernel("gemm", 3, 9))
    beside = fact_of(step(0, 0, 20), asked, kernel("gemm", 3, 9), event("cpu_op", "gloo:barrier", 7, 11, 2))
    assert (microseconds(beside.whole), beside.is_asynchronous) == ((4, 6, 2, 2), False)


@pytest.mark.parametrize(
    ("group_size", "info", "is_several"),
    [
        (None, None, False),
        (1, {"world_size": 1}, False),
        (1, {"world_size": "many"}, False),
        (2, None, True),
        (None, {"world_size": 8}, True),
        (1, {"world_size": 8}, True),
    ],
)
def test_reason_for_missing_communication_kernels(group_size, info, is_several):
    """A job of several processes must communicate, so its kernels weren't recognized."""
    args = {} if group_size is None else PARAMS | {"Group size": group_size}
    events = [
        event("cpu_op", "record_param_comms", 1, 9, **args),
        event("user_annotation", "nccl:all_reduce", 2, 8),
        kernel("gemm", 3, 9),
    ]
    metadata = {} if info is None else {"distributedInfo": info}
    reason = why_not(summarize_distributed, build_timeline(make_trace(events, **metadata)))
    assert ("was recognized" in reason) == is_several
    assert ("single-process" in reason) != is_several


def launched(host, name, device_time=40):
    """A kernel launched in a host range, and a gemm launched outside it."""
    return fact_of(
        step(0, 0, 100),
        event("cpu_op", "record_param_comms", 8, 18),
        event("cpu_op", host, 10, 15),
        event("cuda_runtime", "urEnqueueKernelLaunch", 11, 13, correlation=1),
        kernel(name, 20, 20 + device_time, correlation=1),
        event("cpu_op", "aten::mm", 60, 70),
        event("cuda_runtime", "urEnqueueKernelLaunch", 61, 63, correlation=2),
        kernel("gemm_kernel", 70, 90, correlation=2),
    )


@pytest.mark.parametrize(
    ("host", "name", "collective"),
    [
        ("xccl:all_reduce", "main_kernel_of_anybody", "all_reduce"),
        ("nccl:all_reduce", "void mscclKernel_Sum_float<>()", "all_reduce"),
        ("symm_mem::multimem_all_reduce_", "void mine<float>()", "multimem_all_reduce"),
        ("symm_mem::one_shot_all_reduce", "void anything<float>()", "one_shot_all_reduce"),
    ],
)
def test_kernels_launched_in_backend_range_communicate(host, name, collective):
    fact = launched(host, name)
    assert (fact.source, microseconds(fact.whole)) == ("device", (40, 20, 0, 40))
    assert by_key(fact.collectives) == {(collective, None, None): (1, 40, None)}


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("nccl:all_gather", "void at::native::elementwise_kernel<>()"),  # torch copies around a collective
        ("xccl:all_gather", "void at::native::xpu::cat<>()"),
        ("symm_mem::fused_all_gather_matmul", "nvjet_tst"),
        ("symm_mem::_async_input_mm", "cutlass"),
        ("gloo:all_reduce", "some_copy"),
        ("c10d::allreduce_", "some_copy"),
        ("aten::mm", "gemm"),
    ],
)
def test_other_kernels_launched_next_to_communication_do_not(host, name):
    fact = fact_or_why(launched, host, name)
    assert isinstance(fact, str) or fact.source == "host"  # gloo's own ranges


@pytest.mark.parametrize(
    "name",
    [
        "ccl_allreduce_kernel<float>",
        "void ccl::reduce<float>()",
        "oneccl_allreduce_large",
        "void multimem_all_reduce_kernel<float>",
        "one_shot_all_reduce_kernel",
        "void two_shot_all_reduce_kernel<>",
        "void vllm::cross_device_reduce_1stage<__half, 2>",
        "void oneShotAllReduceKernel<float>",
        "mscclKernel_Sum_float",
    ],
)
def test_communication_kernels_by_name(name):
    fact = fact_of(kernel(name, 0, 5), kernel("accl_gemm", 10, 12))
    assert microseconds(fact.whole) == (5, 2, 0, 5)


def test_calls_of_symmetric_memory_without_kernels():
    assert "symm_mem" in why_not(fact_of, event("cpu_op", "symm_mem::one_shot_all_reduce", 0, 5))


def test_time_between_windows_is_in_no_ratio():
    """Two windows of 20, each with 5 of communication."""
    fact = fact_of(
        *(step(n, at, at + 10) for n, at in ((5, 0), (6, 10), (55, 1_000), (56, 1_010))),
        kernel(NCCL, 5, 10, 40),
        kernel(NCCL, 1_005, 1_010, 40),
    )
    assert (fact.base, fact.base_ns, fact.num_steps) == ("steps", 40 * US, 4)
    table = table_of(DISTRIBUTED, {0: fact})
    assert table.rows[0] == ("ProfileStep", 40 * US, 1.0, 10 * US)
    assert table.rows[1] == ("Communication", 10 * US, 0.25, 2.5 * US)
    assert "2 separate ranges, and no ratio includes the time in between" in " ".join(table.notes)


def test_host_ranges_do_not_count_if_kernels_exist():
    fact = fact_of(event("user_annotation", "nccl:all_reduce", 0, 50), kernel(NCCL, 60, 70, 40))
    assert microseconds(fact.whole) == (10, 0, 0, 10)
    assert [one.time.calls for one in fact.collectives] == [1]


def test_trace_without_communication():
    single = why_not(
        fact_of,
        step(0, 0, 20),
        event("cpu_op", "aten::broadcast_tensors", 1, 5),
        event("cpu_op", "aten::all", 5, 6),
        kernel("void broadcast_kernel<float>()", 2, 9),
    )
    assert single == "the trace has no communication"
    assert why_not(fact_of) == single
    assert "c10d" in why_not(fact_of, event("cpu_op", "c10d::allreduce_", 0, 5))
    for kind in (DISTRIBUTED, COLLECTIVES):
        made = table_of(kind, {0: single, 1: single})
        assert (made.rows, made.absent_reason) == ((), "the trace has no communication")
        assert made.notes == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NCCL, "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclDevKernel_Broadcast_RING_LL(x)", "broadcast"),
        ("ncclDevKernel_SendRecv(x)", "send_recv"),
        ("rcclKernel_AllReduce(x)", "all_reduce"),
        ("ncclDevKernel_Generic_1(x)", "Generic"),
        ("void my_nccl_thing(int)", "my_nccl_thing"),
    ],
)
def test_name_from_kernel_alone(name, expected):
    assert by_key(fact_of(kernel(name, 0, 5)).collectives) == {(expected, None, None): (1, 5, None)}


def test_kernel_description_takes_precedence():
    args = PARAMS | {"Collective name": "_allgather_base", "dtype": "BFloat16"}
    fact = fact_of(
        event("cpu_op", "record_param_comms", 0, 9, **PARAMS),
        event("user_annotation", "nccl:all_reduce", 1, 8),
        event("cuda_runtime", "cudaLaunchKernelExC", 2, 3, correlation=5),
        kernel(NCCL, 10, 14, 40, correlation=5, **args),
    )
    assert by_key(fact.collectives) == {("all_gather", "default_pg", 2): (1, 4, 200)}


def test_launching_operator_provides_description():
    """The innermost one around the launch on its thread, not a simultaneous one on another thread."""
    fact = fact_of(
        event("cpu_op", "record_param_comms", 0, 100, 2, **PARAMS | {"Collective name": "broadcast"}),
        event("cpu_op", "c10d::allreduce_", 0, 20),
        event("cpu_op", "record_param_comms", 1, 19, **PARAMS),
        event("user_annotation", "nccl:all_reduce", 2, 18),
        event("cuda_runtime", "cudaLaunchKernelExC", 3, 4, correlation=5),
        kernel(NCCL, 30, 34, 40, correlation=5),
    )
    assert by_key(fact.collectives) == {("all_reduce", "default_pg", 2): (1, 4, 400)}


def test_launching_backend_range_provides_name():
    """torch 1 and 2.0 write no description; an all-to-all's kernels are called SendRecv."""
    fact = fact_of(
        event("cpu_op", "record_param_comms", 1, 19),
        event("user_annotation", "nccl:all_to_all", 2, 18),
        event("cuda_runtime", "cudaLaunchKernel", 3, 4, correlation=5),
        kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", 30, 34, 40, correlation=5),
    )
    assert by_key(fact.collectives) == {("all_to_all", None, None): (1, 4, None)}


def test_operator_is_found_by_external_id_if_launch_is_lost():
    fact = fact_of(
        event("cpu_op", "record_param_comms", 1, 19, **PARAMS, **{"External id": 77}),
        kernel(NCCL, 30, 34, 40, correlation=5, **{"External id": 77}),
    )
    assert by_key(fact.collectives) == {("all_reduce", "default_pg", 2): (1, 4, 400)}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("Long", 8), ("Half", 2), ("Byte", 1), ("Float8_e4m3fn", 1), ("ComplexDouble", 16), ("QInt32", None)],
)
def test_element_size(dtype, size):
    fact = fact_of(kernel(NCCL, 0, 1, **PARAMS | {"dtype": dtype}))
    assert fact.collectives[0].size_bytes == (None if size is None else 100 * size)


def test_size_is_unknown_if_one_call_did_not_record_it():
    known = kernel(NCCL, 0, 1, **PARAMS)
    unknown = kernel(NCCL, 2, 3, **{key: value for key, value in PARAMS.items() if key != "In msg nelems"})
    assert fact_of(known, known).collectives[0].size_bytes == 800
    (both,) = fact_of(known, unknown).collectives
    assert (both.time.calls, both.size_bytes) == (2, None)


def test_groups_are_kept_apart():
    other = PARAMS | {"Process Group Description": "dp", "Group size": 4}
    fact = fact_of(
        kernel(NCCL, 0, 1, **PARAMS),
        kernel(NCCL, 2, 5, **other),
        kernel(NCCL, 6, 7, **PARAMS | {"dtype": "Half"}),
    )
    assert by_key(fact.collectives) == {
        ("all_reduce", "default_pg", 2): (2, 2, 600),
        ("all_reduce", "dp", 4): (1, 3, 400),
    }
    assert [row[1] for row in table_of(COLLECTIVES, {0: fact}).rows] == ["dp", "default_pg"]  # longest first


def two_ranks():
    first = fact_of(step(0, 0, 20), kernel(NCCL, 2, 6, 40, **PARAMS), kernel("gemm", 0, 4))
    second = fact_of(
        step(0, 0, 40),
        kernel(NCCL, 2, 12, 40, **PARAMS),
        kernel("ncclDevKernel_Broadcast(x)", 15, 20),
    )
    return {1: second, 0: first, 2: "the trace has no communication"}


def test_several_ranks():
    ranks = two_ranks()
    table = table_of(DISTRIBUTED, ranks)
    assert [row[0] for row in table.rows] == [
        f"rank {rank} {part}"
        for rank in (0, 1)
        for part in ("ProfileStep", "Communication", "Computation", "Overlap", "Exposed")
    ]
    assert [row[1] // US for row in table.rows] == [20, 4, 4, 2, 2, 40, 15, 0, 0, 15]
    assert table.notes[-1] == "Without rank 2: the trace has no communication."
    # All-reduce: 4 on rank 0 and 10 on rank 1, with 400 bytes each.
    pooled = table_of(COLLECTIVES, ranks)
    assert pooled.rows == (
        ("all_reduce", "default_pg", 2, 2, 14 * US, 7 * US, 10 * US, 4 * US, 800),
        ("broadcast", None, None, 1, 5 * US, 5 * US, 5 * US, 5 * US, None),
    )
    assert pooled.notes[-1] == table.notes[-1]


# The oracle: checks every microsecond.

KINDS = [
    ("kernel", NCCL),
    ("kernel", "gemm"),
    ("kernel", "relu"),
    ("gpu_memcpy", "Memcpy HtoD"),
    ("user_annotation", "gloo:all_reduce"),
    ("cpu_op", "aten::mm"),
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 12)), max_size=10))
def test_matches_oracle(drawn):
    events = [(cat, name, begin, begin + size) for (cat, name), begin, size in drawn]
    made = [event(*one, tid=index, device=0) for index, one in enumerate(events)]
    on_device = [one for one in events if one[1] == NCCL]
    communicating = on_device or [one for one in events if one[1].startswith("gloo:")]
    if not communicating:
        assert why_not(fact_of, *made)
        return
    fact = fact_of(*made)
    kernels = [one for one in events if one[0] == "kernel"]
    computing = [one for one in kernels if one[1] != NCCL]
    counts = [0, 0, 0, 0]
    for point in range(50):
        talks = any(begin <= point < end for _, _, begin, end in communicating)
        works = any(begin <= point < end for _, _, begin, end in computing)
        for index, is_so in enumerate((talks, works, talks and works, talks and not works)):
            counts[index] += is_so
    assert microseconds(fact.whole) == (tuple(counts) if kernels else (counts[0], None, None, None))
    assert sum(one.time.calls for one in fact.collectives) == len(communicating)
    assert sum(one.time.total_ns for one in fact.collectives) == US * sum(
        end - begin for _, _, begin, end in communicating
    )


# Real traces


@pytest.mark.parametrize("name", ["a100_nccl", "sampled_2rank_rank0", "sampled_2rank_rank1"])
def test_real_trace(name):
    truth = reference(name, "stdlib")
    fact = summarize_distributed(build_timeline(load(name)))
    expected = [
        truth[key] for key in ("comm_union_us", "compute_union_us", "comm_comp_overlap_us", "comm_exposed_us")
    ]
    assert microseconds(fact.whole) == pytest.approx(expected, abs=1e-3)
    assert sum(one.time.calls for one in fact.collectives) == truth["n_comm_kernels"]


@pytest.mark.parametrize("name", ["mi250_toy", "v100_resnet50_workers0", "a100_alexnet"])
def test_real_trace_of_one_process(name):
    assert why_not(summarize_distributed, build_timeline(load(name))) == "the trace has no communication"


def test_real_trace_of_one_process_job_that_calls_nccl():
    """Its host calls NCCL's all-reduce in a group of one, which needs no kernel."""
    assert reference("v100_ns_resolution", "stdlib")["comm_union_us"] == 0
    timeline = build_timeline(load("v100_ns_resolution"))
    assert "single-process" in why_not(summarize_distributed, timeline)


def test_collectives_of_real_traces():
    """DDP's buckets, and ranks of an old torch, where only the ranges around launches name the collective."""
    fact = summarize_distributed(build_timeline(load("a100_nccl")))
    top = {kernel["name"]: kernel for kernel in reference("a100_nccl", "stdlib")["top5_kernels"]}
    (all_reduce,) = (one for name, one in top.items() if "AllReduce" in name)
    assert [(one.name, one.group, one.group_size) for one in fact.collectives] == [
        ("all_reduce", "default_pg", 2),
        ("broadcast", "default_pg", 2),
    ]
    assert fact.collectives[0].time.calls == all_reduce["n"]
    assert fact.collectives[0].time.total_ns == pytest.approx(all_reduce["dur_us"] * US, abs=1)
    # The kernels' "In msg nelems" from the file, times the 4 bytes of a Float.
    trace = load("a100_nccl")
    per_step = 4 * (2049000 + 7875584 + 6563840 + 2431040 + 6637568)
    assert {one.in_elements for one in trace.collectives} >= {2049000, 6637568}
    assert fact.collectives[0].size_bytes == 3 * per_step
    ranks = [summarize_distributed(build_timeline(load(f"sampled_2rank_rank{rank}"))) for rank in (0, 1)]
    assert {one.name for one in pool_alike(one for rank in ranks for one in rank.collectives)} == {
        "all_to_all",
        "all_reduce",
        "all_gather",
    }


# A real job of two ranks, on the local CPU

_JOB = """
import os, sys, torch, torch.distributed as dist
from torch.profiler import profile, schedule
port, folder = sys.argv[1:]
child = os.fork()  # torch is imported once
rank = 0 if child else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
with profile(schedule=schedule(wait=0, warmup=1, active=2, repeat=1)) as profiler:
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        dist.broadcast(torch.ones(4), 0)
        profiler.step()
profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux")
def test_two_gloo_ranks(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    job = run_script(_JOB, port, tmp_path, cwd=tmp_path, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert job.returncode == 0, job.stderr
    ranks = {rank: summarize_distributed(build_timeline(read_trace(path))) for rank, path in enumerate(paths)}
    for rank, fact in ranks.items():
        written = json.loads(paths[rank].read_text())["traceEvents"]
        gloo = [one for one in written if one["ph"] == "X" and one["name"].startswith("gloo:")]
        assert fact.source == "host"
        calls = {one.name: one.time.calls for one in fact.collectives}
        assert calls["all_reduce"] >= 2  # one bucket of gradients per step
        assert calls["broadcast"] >= 2
        assert sum(calls.values()) == len(gloo)
        longest = max(one["dur"] for one in gloo)
        assert longest <= fact.whole.communication_ns / US <= sum(one["dur"] for one in gloo) + 0.001
    table = table_of(DISTRIBUTED, ranks)
    assert len(table.rows) == 10
    assert all(row[1] is None for row in table.rows if not row[0].endswith(("ProfileStep", "Communication")))
