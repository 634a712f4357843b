"""Tests that our tables are right where torch's removed TensorBoard plugin was wrong.

Each test is one failure of torch_tb_profiler 0.4.3, seen in a real trace or built by hand.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.names import uses_tensor_cores
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.trace.model import Category
from lightning_modelprof.trace.reader import parse_trace, read_trace
from tests.support.traces import break_down, load, make_trace, summarize

NEWER = ("a100_nccl", "v100_ns_resolution", "sampled_2rank_rank0", "sampled_2rank_rank1", "mi250_toy")
MS = 1_000_000


def mean_ms(breakdown, category):
    return breakdown.mean_parts_ns[STEP_CATEGORIES.index(category)] / MS


def test_dataloader_is_found_in_fresh_trace(tmp_path):
    """The plugin showed 0: since torch 1.12 the fetch is an annotation, and it dropped annotations."""
    loader = torch.utils.data.DataLoader(list(range(1000)), batch_size=100)
    path = str(tmp_path / "trace.json")
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=5, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        for _ in loader:
            torch.ones(100).sum()
            profiler.step()
    breakdown = break_down(read_trace(path))
    assert [step.number for step in breakdown.steps] == [1, 2, 3, 4, 5]
    assert mean_ms(breakdown, "dataloader") > 0


@pytest.mark.parametrize("name", NEWER)
def test_runtime_events_are_found(name):
    """The plugin showed 0: it only knew "runtime", but the category has been cuda_runtime since 2021."""
    assert mean_ms(break_down(load(name)), "runtime") > 0


@pytest.mark.parametrize("name", ["a100_nccl", "v100_ns_resolution", "sampled_2rank_rank0", "a100_alexnet"])
def test_kernels_have_their_operators(name):
    """The plugin showed 0 as Device Self and assigned every kernel to CallTreeRoot, even if External id is
    the correlation."""
    trace = load(name)
    timeline = build_timeline(trace)
    kernel = trace.category[trace.device.event] == Category.KERNEL
    assert np.mean(timeline.launch.operator[kernel] >= 0) > 0.98
    operators = TraceFacts(trace).operators
    work = trace.device.event
    assert operators.device_ns == int((trace.end_ns - trace.begin_ns)[work].sum())
    assert operators.not_launched.total_ns < 0.02 * operators.device_ns


def test_external_id_may_equal_correlation():
    trace = load("sampled_2rank_rank0")
    work = trace.device.event
    assert np.array_equal(trace.external_id[work], trace.correlation[work])


def test_steps_last_until_their_last_kernel():
    """The plugin showed 78.8 ms: runtime events extend steps to their last kernel, and it knew none."""
    assert break_down(load("v100_ns_resolution")).mean_total_ns / MS == pytest.approx(96.7, abs=0.05)


def test_communication_is_recognized_by_kernel_name():
    """The plugin showed 0.35 ms per step, but NCCL's kernels, which belong to no operator, take 15.6 ms."""
    facts = TraceFacts(load("a100_nccl"))
    assert facts.distributed.whole.communication_ns / 3 / MS == pytest.approx(15.6, abs=0.05)


@pytest.mark.parametrize("name", ["nccl:_all_gather_base", "nccl:_reduce_scatter_base", "nccl:coalesced"])
def test_backend_collectives_are_communication(name):
    """The plugin knew only five names, so it showed no communication for FSDP."""
    made = make_trace(
        [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "ProfilerStep#1",
                "pid": 1,
                "tid": 1,
                "ts": 0,
                "dur": 9,
            },
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 2, "ts": 2, "dur": 3},
        ]
    )
    assert mean_ms(break_down(made), "communication") == 0.003


def test_lightning_wrappers_are_not_cpu_work(tmp_path):
    """The plugin showed 1.89 of 2.30 ms as CPU Exec: a wrapper around the step counted as CPU work."""
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            with torch.profiler.record_function("[pl][profile]run_training_batch"):
                torch.ones(10).sum()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    wrapped = trace.is_named(lambda name: name.startswith("[pl]"))
    wrapped_ns = int((trace.end_ns - trace.begin_ns)[wrapped].sum())
    breakdown = break_down(trace)
    exec_ns = mean_ms(breakdown, "cpu_exec") * MS * len(breakdown.steps)
    operators = trace.category == Category.CPU_OP
    assert 0 < exec_ns <= int((trace.end_ns - trace.begin_ns)[operators].sum())
    assert exec_ns < wrapped_ns


def test_entries_after_the_events_are_kept():
    """The plugin cut the file at its last bracket, which lost the counters in such traces."""
    raw = json.dumps(
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2}], "later": [1, [2]]}
    )
    assert parse_trace(raw.encode(), "x").metadata == {"later": [1, [2]]}


@pytest.mark.parametrize(
    "kernel",
    [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
    ],
)
def test_kernels_of_newer_gpus_use_tensor_cores(kernel):
    assert uses_tensor_cores(kernel)


def test_child_that_overruns_parent_by_rounding_is_kept():
    """The plugin dropped such children from the tree."""
    made = make_trace(
        [
            {"ph": "X", "cat": "cpu_op", "name": "outer", "pid": 1, "tid": 1, "ts": 0, "dur": 10},
            {"ph": "X", "cat": "cpu_op", "name": "inner", "pid": 1, "tid": 1, "ts": 5, "dur": 5.25},
        ]
    )
    assert build_timeline(made).parent.tolist() == [-1, 0]


def test_trace_without_steps_is_one_step_without_summary():
    trace = load("a100_alexnet")
    assert [step.number for step in break_down(trace).steps] == [0]
    with pytest.raises(NotMeasured, match="ProfilerStep"):
        summarize(trace)
