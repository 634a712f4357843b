"""Events of unknown devices and backends are counted and named rather than dropped."""

import json

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.trace import text
from lightning_modelprof.trace.model import Category
from tests.support.traces import event, make_trace


def steps(device_event, num_steps=6):
    """Steps of 10 ms with 4 ms of device work."""
    found = []
    for step in range(num_steps):
        begin = 10_000 * step
        found += [
            event("user_annotation", f"ProfilerStep#{step}", begin, begin + 9990, pid=50),
            event("cpu_op", "aten::mm", begin + 500, begin + 600, pid=50),
            event("hpu_runtime", "launch", begin + 550, begin + 560, pid=50, correlation=step + 1),
            device_event(begin + 600, begin + 4600, step + 1),
        ]
    return found


def hpu(begin, end, number):
    return event("hpu_op", "gemm", begin, end, pid=0, tid=7, device=0, stream=7, correlation=number)


def quoted(begin, end, number):
    texts = {"device": "0", "stream": "7", "correlation": str(number)}
    return event("hpu_op", "gemm", begin, end, pid=0, tid=7, **texts)


def queued(begin, end, number):
    return event("mlu_op", "gemm", begin, end, pid=0, tid=7, device=0, queue=7)


def launched(begin, end, number):
    return event("mlu_op", "gemm", begin, end, pid="MLU 0", tid="q", device=0, correlation=number)


def ascend(begin, end, number):
    one = event("", "aclnnMatmul_MatMulV2", begin, end, pid=70, tid=7, connection_id=number)
    del one["cat"]
    return one | {"args": {"Task Type": "AI_CORE", "Physic Stream Id": 7}}


def ascend_wait(begin, end, number):
    one = ascend(begin, end, number)
    return one | {"args": {"Task Type": "EVENT_WAIT", "Physic Stream Id": 7}}


def report_of(tmp_path, events):
    file = tmp_path / "one.trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return analyze(file)


def warnings_of(report):
    return [value for label, value in report.facts if label == "Warning"]


def table(report, name):
    return next(one for one in report.tables if one.id == name)


KINDS = [
    (hpu, "hpu_op"),
    (quoted, "hpu_op"),
    (queued, "mlu_op"),
    (launched, "mlu_op"),
    (ascend, "AI_CORE"),
]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_work_of_unknown_kinds_keeps_device_busy(tmp_path, kind, name):
    report = report_of(tmp_path, steps(kind))
    usage = table(report, "device_usage")
    row = dict(zip((column.key for column in usage.columns), usage.rows[0], strict=True))
    assert row["busy"] == pytest.approx(0.4, abs=0.05)
    said = [one for one in warnings_of(report) if one.startswith("6 device events have kinds")]
    assert len(said) == 1
    assert name in said[0]


def test_waits_of_unknown_devices_are_not_work(tmp_path):
    report = report_of(tmp_path, steps(ascend_wait))
    assert report.verdict.kind == "cannot_tell"
    assert not any("device events" in one for one in warnings_of(report))


def test_quoted_ids_link_kernel_to_launch(tmp_path):
    """The kernel's ids are quoted and the launch's aren't."""
    said = warnings_of(report_of(tmp_path, steps(quoted)))
    assert len(said) == 1
    assert "no launch" not in said[0]


def test_queue_is_read_as_stream():
    trace = make_trace([event("mlu_op", "gemm", 0, 1, pid=0, tid="queue nine", device=0, queue=9)])
    assert trace.device.stream.tolist() == [9]


@pytest.mark.parametrize(
    "changes",
    [
        {"device": 0},
        {"correlation": 1},
        {"device": 0, "correlation": 99},
        {"device": 0, "correlation": 1, "pid": 50, "tid": 1},
        {"device": 0, "queue": 1, "correlation": 1, "pid": 50, "tid": 1},
    ],
)
def test_events_without_launch_are_not_work(changes):
    """A CPU event may name a device and the launch it refers to."""
    host = event("hpu_runtime", "launch", 0, 1, pid=50, correlation=1)
    other = event("vendor_span", "thing", 2, 3, **{"pid": 0, "tid": 7, **changes})
    assert len(make_trace([other, host]).device) == 0


def test_launches_may_come_later_in_the_file(monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 200)
    works = [launched(10 * number, 10 * number + 5, number) for number in range(1, 9)]
    launches = [
        event("hpu_runtime", "launch", number, number + 1, correlation=number) for number in range(1, 8)
    ]
    trace = make_trace([*works, *launches])
    assert trace.device.event.tolist() == trace.is_category(Category.KERNEL).nonzero()[0].tolist()
    assert len(trace.device) == 7
    assert trace.damage[0].startswith("7 device events have kinds that this version doesn't know: mlu_op.")


@pytest.mark.parametrize("name", ["shm_allreduce", "sgl_kernel::shm_allreduce", "my::all_gather_into"])
def test_communication_of_unknown_backends_is_named_as_unknown(tmp_path, name):
    events = [*steps(hpu), event("cpu_op", name, 4700, 5700, pid=50)]
    reason = table(report_of(tmp_path, events), "distributed").absent_reason
    assert name in reason
    assert "unknown" in reason


@pytest.mark.parametrize("name", ["aten::mm", "my::reduce", "allreducer_init"])
def test_other_operators_do_not_communicate(tmp_path, name):
    events = [*steps(hpu), event("cpu_op", name, 4700, 5700, pid=50)]
    assert "no communication" in table(report_of(tmp_path, events), "distributed").absent_reason
