"""Traces of several ranks: which rank waits for which, and how much of the communication is transfer."""

import json

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.units import percent
from tests.support.traces import event

STEP_US = 10_000
STEPS = 6
RECORDED_STEP_US = STEP_US - 10 / STEPS
"""The last step ends with its range, the others where the next one starts."""


def rank_events(fetch_us, kernel_us, comm_us):
    """Steps of 10 ms with a fetch, a matmul and an all-reduce, each with one time per step."""
    found = []
    for step in range(STEPS):
        begin, number = STEP_US * step, 10 * step
        fetched = begin + fetch_us[step]
        computed = fetched + 100 + kernel_us[step]
        on_host, on_device = {"pid": 50}, {"pid": 0, "tid": 7, "device": 0, "stream": 7}
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        found += [
            event("user_annotation", f"ProfilerStep#{step}", begin, begin + STEP_US - 10, **on_host),
            event("user_annotation", name, begin + 5, fetched, **on_host),
            event("cpu_op", "aten::mm", fetched + 10, fetched + 60, **on_host),
            event(
                "cuda_runtime", "cudaLaunchKernel", fetched + 20, fetched + 30, **on_host, correlation=number
            ),
            event("kernel", "sgemm", fetched + 100, computed, **on_device, correlation=number),
            event("cpu_op", "c10d::allreduce_", fetched + 62, fetched + 90, **on_host),
            event(
                "cuda_runtime",
                "cudaLaunchKernel",
                fetched + 70,
                fetched + 80,
                **on_host,
                correlation=number + 1,
            ),
            event(
                "kernel",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                computed,
                computed + comm_us[step],
                **on_device,
                correlation=number + 1,
            ),
        ]
    return found


def report_of(tmp_path, *ranks):
    files = []
    for rank, events in enumerate(ranks):
        file = tmp_path / f"rank{rank}.trace.json"
        info = {"rank": rank, "world_size": len(ranks), "backend": "nccl"}
        file.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
        files.append(file)
    return analyze(*files)


def finding_of(report, kind):
    return next(one for one in report.findings if one.kind == kind)


def value_of(finding, label):
    return next(one.value for one in finding.evidence if one.label == label)


def steps(value):
    return [value] * STEPS


SLOW = {
    "Dataloader": (
        rank_events(steps(200), steps(3000), steps(5900)),
        rank_events(steps(5900), steps(3000), steps(200)),
    ),
    "kernels": (
        rank_events(steps(200), steps(3000), steps(5900)),
        rank_events(steps(200), steps(8700), steps(200)),
    ),
}


@pytest.mark.parametrize("phase", SLOW)
def test_late_rank_and_its_phase_are_named(tmp_path, phase):
    report = report_of(tmp_path, *SLOW[phase])
    assert report.verdict.kind == "straggler_bound"
    assert f"rank 1 in {phase}" in report.verdict.summary
    finding = finding_of(report, "straggler_rank")
    assert f"rank 1 in {phase}" in finding.title
    assert finding.share == pytest.approx(5700 / RECORDED_STEP_US)
    assert finding.saving_ns_per_step == pytest.approx(5_700_000, rel=0.001)


@pytest.mark.parametrize("phase", SLOW)
def test_only_transfer_counts_as_communication(tmp_path, phase):
    """0.2 of 5.9 ms are transfer, too little for a finding."""
    report = report_of(tmp_path, *SLOW[phase])
    finding = finding_of(report, "communication_exposed")
    assert finding.status.name == "CLEAN"
    step_ns = finding_of(report, "straggler_rank").whole_ns
    assert value_of(finding, "exposed transfer per step") == pytest.approx(200 / RECORDED_STEP_US * step_ns)


def test_equal_ranks_have_no_straggler(tmp_path):
    alike = rank_events(steps(200), steps(3000), steps(5900))
    report = report_of(tmp_path, alike, alike)
    assert report.verdict.kind == "communication_bound"
    assert finding_of(report, "straggler_rank").status.name == "CLEAN"
    finding = finding_of(report, "communication_exposed")
    assert "accumulate_grad_batches" in finding.action
    assert percent(finding.share) in report.verdict.summary
    assert percent(finding.share) in finding.summary


def test_ranks_waiting_in_turn_need_equal_work(tmp_path):
    slow, fast = [200, 5900] * (STEPS // 2), [5900, 200] * (STEPS // 2)
    report = report_of(tmp_path, rank_events(slow, steps(3000), fast), rank_events(fast, steps(3000), slow))
    assert finding_of(report, "straggler_rank").status.name == "CLEAN"
    assert "equal work" in finding_of(report, "communication_exposed").action
