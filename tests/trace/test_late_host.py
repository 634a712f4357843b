"""CPU work while the GPU is idle, and verdicts that don't depend on the number of steps."""

import json

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.report.rules.rule import LATE_SHARE
from tests.support.traces import event

STEP_US = 10_000


def step_events(number, inside):
    """One step: a kernel of 4 ms, launched at the start, then the given CPU work."""
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
def test_verdict_does_not_depend_on_step_count(tmp_path, num_steps, inside):
    """The GPU is idle after its last event, because the CPU launched nothing more."""
    verdict = report_of(tmp_path, inside, num_steps).verdict
    assert verdict.kind == "host_bound"
    assert verdict.accounted_ratio == pytest.approx(1.0, abs=0.02)


def waits_for_the_kernel(begin):
    return [event("cuda_runtime", "cudaStreamSynchronize", begin + 200, begin + 4140, pid=50)]


@pytest.mark.parametrize("num_steps", [2, 3, 4, 6, 12])
def test_cost_of_wait_does_not_depend_on_step_count(tmp_path, num_steps):
    """After its last event the GPU is idle for 3.9 ms of the wait, as in every step before."""
    report = report_of(tmp_path, waits_for_the_kernel, num_steps)
    assert report.verdict.kind == "sync_bound"
    assert saved_ms(finding_of(report, "host_device_sync")) == pytest.approx(3.94, abs=0.01)


WORK = {
    "aten::sort": lambda begin: [event("cpu_op", "aten::sort", begin + 200, begin + 9900, pid=50)],
    "Python code in augment": lambda begin: [
        event("user_annotation", "augment", begin + 200, begin + 9900, pid=50)
    ],
    "Python code outside operators": nothing,
    "<built-in method acquire of _thread.lock object> (a lock)": lambda begin: [
        event(
            "python_function",
            f"<built-in method acquire of _thread.lock object at 0x7f3a{begin:08x}>",  # its own per step
            begin + 200,
            begin + 9900,
            pid=50,
        )
    ],
    "cudaMalloc": lambda begin: [event("cuda_runtime", "cudaMalloc", begin + 200, begin + 9900, pid=50)],
}


@pytest.mark.parametrize("what", WORK)
def test_work_in_gap_is_named(tmp_path, what):
    report = report_of(tmp_path, WORK[what])
    finding = finding_of(report)
    assert what in finding.summary
    assert what in report.verdict.summary
    assert "torch.compile" not in finding.action


@pytest.mark.parametrize("what", ["aten::sort", "Python code in augment"])
def test_critical_path_share_is_evidence(tmp_path, what):
    finding = finding_of(report_of(tmp_path, WORK[what]))
    share = next(one.value for one in finding.evidence if one.label == "share of the critical path")
    assert share == pytest.approx(0.97, abs=0.04)
    assert "of the critical path" in finding.summary


def many_launches(begin):
    """A CPU that constantly launches small kernels."""
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


def test_constant_launches_get_advice_to_launch_less(tmp_path):
    assert "fewer small operators" in finding_of(report_of(tmp_path, many_launches)).action


def test_evidence_matches_table(tmp_path):
    """This holds even if the first step is longer than the others and doesn't count."""

    def longer_first(begin):
        kernel = event("kernel", "sgemm", 130 + 4000, 30_000, pid=0, tid=7, device=0, stream=7, correlation=1)
        return [kernel] if begin == 0 else WORK["aten::sort"](begin)

    report = report_of(tmp_path, longer_first, 8)
    table = next(one for one in report.tables if one.id == "host_waits")
    place = [column.key for column in table.columns].index("idle_ns")
    late = next(row[place] for row in table.rows if row[0] == "CPU late")
    known = {one.label: one.value for one in finding_of(report).evidence}
    assert known["GPU idle per step while the CPU is late"] == pytest.approx(late)
    assert f"{100 * known[LATE_SHARE]:.0f}%" in report.verdict.summary


def frame(name, begin, end):
    return event("python_function", name, begin, end, pid=50)


def saved_ms(finding):
    return finding.saving_ns_per_step / 1e6


def test_saving_is_gap_time_of_named_work(tmp_path):
    """The function covers only part of the gap of 5.99 ms, and also runs before it."""
    report = report_of(
        tmp_path,
        lambda begin: [
            frame("train.py(3): mask", begin + 3000, begin + 8130),
            frame("<built-in method extend of list object at 0x7f>", begin + 5000, begin + 6000),
        ],
    )
    finding = finding_of(report)
    assert saved_ms(finding) == pytest.approx(4.0)
    assert "4 ms per step" in finding.summary
    assert "40%" in report.verdict.summary
    assert "train.py(3): mask" in report.verdict.summary
    assert report.verdict.kind == "host_bound"
    table = next(one for one in report.tables if one.id == "host_waits")
    assert ("CPU late", 0.6) in [(row[0], round(row[-1], 2)) for row in table.rows]  # the rest has no name


@pytest.mark.parametrize("library", ["queue.py(154): get", "/usr/lib/python3.11/queue.py(154): get"])
@pytest.mark.parametrize(
    ("innermost", "said"),
    [
        ("<method 'acquire' of '_thread.lock' objects>", "avoid the wait for"),
        ("torch/serialization.py(1000): load", "make"),
        ("C:\\Python312\\Lib\\json\\decoder.py(340): decode", "make"),
        ("/opt/lib/python3.12/site-packages/redis/client.py(9): get", "make"),
    ],
)
def test_user_function_above_library_is_named_first(tmp_path, innermost, said, library):
    report = report_of(
        tmp_path,
        lambda begin: [
            frame("train.py(1): main", begin + 1, begin + 9980),
            frame("server.py(77): pull_rows", begin + 4200, begin + 9900),
            frame(library, begin + 4300, begin + 9800),
            frame(innermost, begin + 4400, begin + 9700),
        ],
    )
    finding = finding_of(report)
    assert finding.action.startswith(f"In server.py(77): pull_rows, {said} {innermost}")
    assert "server.py(77): pull_rows" in finding.summary
    assert "server.py(77): pull_rows" in report.verdict.summary
    assert saved_ms(finding) == pytest.approx(5.3)


FETCH = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def test_fetch_is_not_part_of_other_work(tmp_path):
    """A kernel of 4 ms, 2 ms of nothing, and a fetch of 3.9 ms until the next step."""
    inside = [
        event("user_annotation", FETCH, 6050, 9950, pid=50),
        frame("queue.py(154): get", 6060, 9940),
        frame("data.py(5): collate", 6070, 9930),
    ]
    report = report_of(
        tmp_path, lambda begin: [{**one, "ts": one["ts"] + begin} for one in inside], num_steps=8
    )
    finding = finding_of(report)
    assert "outside operators" in finding.summary
    assert FETCH not in finding.summary + finding.action
    assert "collate" not in finding.summary
    assert saved_ms(finding) == pytest.approx(2.0, abs=0.11)
    assert saved_ms(finding_of(report, "input_bound")) == pytest.approx(3.9)


def test_other_work_is_limited_to_launching_phases(tmp_path):
    """The callback is in the gap, but not in the phases that the finding is about."""

    def inside(begin):
        return [
            event("user_annotation", "modelprof: forward", begin + 50, begin + 7000, pid=50),
            event("user_annotation", "modelprof: callbacks", begin + 7000, begin + 9980, pid=50),
            frame("train.py(9): on_batch_end", begin + 7010, begin + 9970),
            frame("train.py(3): mask", begin + 5000, begin + 6900),
        ]

    finding = finding_of(report_of(tmp_path, inside))
    assert "train.py(3): mask" in finding.summary
    assert saved_ms(finding) == pytest.approx(1.9)
