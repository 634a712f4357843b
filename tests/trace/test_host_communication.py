"""Communication on the CPU isn't a late launch, and its time counts once."""

import json

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.analysis.timeline.calls import host_communication
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from tests.support.traces import event, make_trace

STEP = 10_000
INFO = {"distributedInfo": {"backend": "any", "rank": 0, "world_size": 4}}


def steps(host_range, category="user_annotation", num_steps=6):
    """Steps of 10 ms with 4 ms of communication on the CPU, then 4.5 ms of GPU work, and nothing else."""
    found = []
    for step in range(num_steps):
        begin = STEP * step
        found += [
            event("user_annotation", f"ProfilerStep#{step}", begin, begin + STEP, pid=50),
            event(category, host_range, begin + 500, begin + 4500, pid=50),
            event("python_function", "comm.py(7): wait", begin + 600, begin + 4400, pid=50),
            event("cpu_op", "aten::mm", begin + 4600, begin + 4700, pid=50),
            event(
                "cuda_runtime", "cudaLaunchKernel", begin + 4650, begin + 4660, pid=50, correlation=step + 1
            ),
            event("kernel", "gemm", begin + 4700, begin + 9200, pid=0, tid=7, stream=7, correlation=step + 1),
        ]
    return found


@pytest.fixture
def report_of(tmp_path):
    def analyzed(events, **metadata):
        file = tmp_path / "one.trace.json"
        file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **metadata}))
        return analyze(file)

    return analyzed


def rows_of(report, name):
    found = next(one for one in report.tables if one.id == name)
    assert not found.absent_reason
    keys = [column.key for column in found.columns]
    return {row[0]: dict(zip(keys, row, strict=True)) for row in found.rows}


RANGES = [
    *("ucc:all_gather", "gloo:all_gather", "mpi:all_gather", "hccl:all_reduce", "cncl:broadcast"),
    *("xccl:barrier", "eccl:reduce_scatter", "flagcx:all_reduce", "my_backend:_all_gather_base"),
    *("any:reduce_scatter_tensor_coalesced", "any:send 0->1", "any:recvAnySource", "any:alltoall_base"),
]


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op"])
@pytest.mark.parametrize("name", RANGES)
def test_step_is_communication_bound(report_of, name, category):
    report = report_of(steps(name, category), **INFO)
    assert report.verdict.kind == "communication_bound"
    assert "40%" in report.verdict.summary
    found = {one.kind: one for one in report.findings if one.saving_ns_per_step}
    assert found["communication_exposed"].saving_ns_per_step == 4_000_000
    late = {one.label: one.value for one in found["launch_bound"].evidence}[
        "GPU idle per step while the CPU is late"
    ]
    assert late == pytest.approx(1_500_000)
    assert found["launch_bound"].saving_ns_per_step == pytest.approx(1_400_000)  # without aten::mm
    assert not any(name in text for text in (found["launch_bound"].summary, found["launch_bound"].action))
    assert "comm.py" not in found["launch_bound"].summary


def test_tables_agree(report_of):
    report = report_of(steps("ucc:all_gather"), **INFO)
    assert rows_of(report, "distributed")["Communication"]
    causes = rows_of(report, "critical_path")
    assert causes["Communication"]["idle_ns"] == 4_000_000
    assert causes["CPU late"]["idle_ns"] == pytest.approx(1_500_000)
    assert rows_of(report, "host_waits")["CPU late"]["idle_ns"] == pytest.approx(1_500_000)
    idle = rows_of(report, "idle")
    for key in ("covered_ns", "total_ns"):
        parts = [row[key] for name, row in idle.items() if name not in ("Busy", "Idle")]
        assert sum(parts) == idle["Idle"][key]


def test_busy_gpu_time_is_computing(report_of):
    """Communication on the CPU doesn't keep the GPU busy."""
    card = report_of(steps("gloo:all_reduce"), **INFO).step_card
    parts = {part.key: part.ns for part in card.device}
    assert parts["computing"] == pytest.approx(4_500_000)
    assert parts["idle_communication"] == pytest.approx(4_000_000)
    assert sum(parts.values()) == pytest.approx(STEP * 1000)


@pytest.mark.parametrize(
    "name",
    [
        "any:load",
        "any::all_reduce",
        "any: all_reduce",
        "queue:send_mail",
        "train.py:reduce(3)",
        "any:reduced",
    ],
)
def test_other_ranges_are_not_communication(report_of, name):
    assert report_of(steps(name), **INFO).verdict.kind == "host_bound"


def rows_that_talk(*events):
    timeline = build_timeline(make_trace(list(events)))
    return [timeline.trace.name_of(row) for row in host_communication(timeline).tolist()]


def test_ranges_that_launch_kernels_are_not_cpu_communication():
    asking = [
        event("user_annotation", "cncl:all_reduce", 0, 10),
        event("cpu_op", "inner", 1, 9),
        event("mlu_runtime", "cnInvokeKernel", 2, 3, correlation=1),
        event("mlu_op", "KernelRing", 4, 40, pid=0, tid=7, device=0, queue=7, correlation=1),
        event("user_annotation", "cncl:all_gather", 50, 60),
        event("user_annotation", "nccl:all_gather", 70, 80),
    ]
    assert rows_that_talk(*asking) == ["cncl:all_gather"]


def test_copy_in_range_does_not_count_as_launch():
    events = [
        event("user_annotation", "ucc:all_reduce", 0, 10),
        event("cuda_runtime", "cudaMemcpyAsync", 2, 3, correlation=1),
        event("gpu_memcpy", "Memcpy DtoH", 4, 5, pid=0, tid=7, device=0, stream=7, correlation=1),
    ]
    assert rows_that_talk(*events) == ["ucc:all_reduce"]


def test_communication_in_fetch_counts_as_fetch(report_of):
    fetches = [
        event(
            "user_annotation",
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            STEP * step + 400,
            STEP * step + 4550,
            pid=50,
        )
        for step in range(6)
    ]
    causes = rows_of(report_of([*steps("gloo:broadcast"), *fetches], **INFO), "critical_path")
    assert causes["Data loading"]["idle_ns"] == 4_150_000
    assert causes["Communication"]["idle_ns"] == 0
