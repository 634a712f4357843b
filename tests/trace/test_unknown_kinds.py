"""Events of devices and backends that nobody has told us of: they are counted and named, not dropped."""

import json

import pytest

from lightning_modelprof import analyze
from tests.support.traces import event


def steps(device_event, num_steps=6):
    """Steps of 10 ms whose device works for 4 ms."""
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


@pytest.mark.parametrize(("kind", "name"), [(hpu, "hpu_op"), (quoted, "hpu_op"), (ascend, "AI_CORE")])
def test_work_of_unknown_kinds_keeps_the_device_busy(tmp_path, kind, name):
    report = report_of(tmp_path, steps(kind))
    usage = table(report, "device_usage")
    row = dict(zip((column.key for column in usage.columns), usage.rows[0], strict=True))
    assert row["busy"] == pytest.approx(0.4, abs=0.05)
    said = [one for one in warnings_of(report) if one.startswith("6 device events are of kinds")]
    assert len(said) == 1
    assert name in said[0]


def test_waits_of_unknown_devices_are_no_work(tmp_path):
    report = report_of(tmp_path, steps(ascend_wait))
    assert report.verdict.kind == "cannot_tell"
    assert not any("device events" in one for one in warnings_of(report))


def test_quoted_ids_join_a_kernel_to_its_launch(tmp_path):
    """One side of a launch may be quoted and the other not."""
    said = warnings_of(report_of(tmp_path, steps(quoted)))
    assert len(said) == 1
    assert "no launch" not in said[0]


@pytest.mark.parametrize("name", ["shm_allreduce", "sgl_kernel::shm_allreduce", "my::all_gather_into"])
def test_communication_of_unknown_backends_is_unknown(tmp_path, name):
    events = [*steps(hpu), event("cpu_op", name, 4700, 5700, pid=50)]
    reason = table(report_of(tmp_path, events), "distributed").absent_reason
    assert name in reason
    assert "unknown" in reason


@pytest.mark.parametrize("name", ["aten::mm", "my::reduce", "allreducer_init"])
def test_other_operators_do_not_communicate(tmp_path, name):
    events = [*steps(hpu), event("cpu_op", name, 4700, 5700, pid=50)]
    assert "no communication" in table(report_of(tmp_path, events), "distributed").absent_reason
