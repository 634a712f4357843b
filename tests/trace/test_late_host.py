"""What the host does while the device is idle, and short traces: the same verdict whatever their length."""

import json

import pytest

from lightning_modelprof import analyze
from tests.support.traces import event

STEP_US = 10_000


def step_events(number, inside):
    """One step: 4 ms of a kernel, launched at its begin, then what the host does."""
    begin = STEP_US * number
    return [
        event("user_annotation", f"ProfilerStep#{number}", begin, begin + STEP_US - 10, pid=50),
        event("cpu_op", "aten::mm", begin + 100, begin + 150, pid=50),
        event("cuda_runtime", "cudaLaunchKernel", begin + 110, begin + 120, pid=50, correlation=number + 1),
        event(
            "kernel",
            "sgemm",
            begin + 130,
            begin + 4130,
            pid=0,
            tid=7,
            device=0,
            stream=7,
            correlation=number + 1,
        ),
        *inside(begin),
    ]


def nothing(_):
    return []


def report_of(tmp_path, inside, num_steps=6):
    events = [one for number in range(num_steps) for one in step_events(number, inside)]
    file = tmp_path / "one.trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return analyze(file)


def finding_of(report, kind="launch_bound"):
    return next(one for one in report.findings if one.kind == kind)


@pytest.mark.parametrize("num_steps", [2, 3, 4, 6, 12])
@pytest.mark.parametrize(
    "inside", [nothing, lambda begin: [event("cpu_op", "aten::sort", begin + 200, begin + 9900, pid=50)]]
)
def test_verdict_does_not_depend_on_the_number_of_steps(tmp_path, num_steps, inside):
    """The device is idle after its last event, because the host has launched nothing more."""
    verdict = report_of(tmp_path, inside, num_steps).verdict
    assert verdict.kind == "host_bound"
    assert verdict.accounted_ratio == pytest.approx(1.0, abs=0.02)


WORK = {
    "aten::sort": lambda begin: [event("cpu_op", "aten::sort", begin + 200, begin + 9900, pid=50)],
    "Python code in augment": lambda begin: [
        event("user_annotation", "augment", begin + 200, begin + 9900, pid=50)
    ],
    "Python code outside of operators": nothing,
    "<built-in method acquire of _thread.lock object at 0x7f> (a lock)": lambda begin: [
        event(
            "python_function",
            "<built-in method acquire of _thread.lock object at 0x7f>",
            begin + 200,
            begin + 9900,
            pid=50,
        )
    ],
    "cudaMalloc": lambda begin: [event("cuda_runtime", "cudaMalloc", begin + 200, begin + 9900, pid=50)],
}


@pytest.mark.parametrize("what", WORK)
def test_what_fills_the_gap_is_named(tmp_path, what):
    report = report_of(tmp_path, WORK[what])
    finding = finding_of(report)
    assert what in finding.summary
    assert what in report.verdict.summary
    assert "launch fewer" not in finding.action
    assert "CUDA graphs" not in finding.action


@pytest.mark.parametrize("what", ["aten::sort", "Python code in augment"])
def test_share_of_the_critical_path(tmp_path, what):
    finding = finding_of(report_of(tmp_path, WORK[what]))
    share = next(one.value for one in finding.evidence if one.label == "share of the critical path")
    assert share == pytest.approx(0.97, abs=0.04)
    assert "of the critical path" in finding.summary


def many_launches(begin):
    """A host that launches small kernels all the time."""
    found = []
    for place in range(50):
        at = begin + 4200 + 110 * place
        ids = {"correlation": int(begin) * 100 + place + 1000}
        found += [
            event("cpu_op", "aten::add", at, at + 100, pid=50),
            event("cuda_runtime", "cudaLaunchKernel", at + 50, at + 60, pid=50, **ids),
            event("kernel", "add", at + 60, at + 65, pid=0, tid=7, device=0, stream=7, **ids),
        ]
    return found


def test_a_host_that_launches_all_the_time_has_to_launch_less(tmp_path):
    assert "launch fewer" in finding_of(report_of(tmp_path, many_launches)).action


def test_milliseconds_are_those_of_the_table(tmp_path):
    """Also where the first step is longer than the others, which do not count it."""

    def longer_first(begin):
        kernel = event("kernel", "sgemm", 130 + 4000, 30_000, pid=0, tid=7, device=0, stream=7, correlation=1)
        return [kernel] if begin == 0 else WORK["aten::sort"](begin)

    report = report_of(tmp_path, longer_first, 8)
    table = next(one for one in report.tables if one.id == "host_waits")
    place = [column.key for column in table.columns].index("idle_ns")
    late = next(row[place] for row in table.rows if row[0] == "Host late")
    finding = finding_of(report)
    assert finding.saving_ns_per_step == pytest.approx(late)
    share = next(one.value for one in finding.evidence if one.label == "share of the step")
    assert f"{100 * share:.1f} %" in report.verdict.summary
