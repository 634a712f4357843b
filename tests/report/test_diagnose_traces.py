"""Verdicts on real GPU traces, compared with the removed TensorBoard plugin."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.trace.device_shares import DeviceShares, WaitShares
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Finding, Severity, Status
from lightning_modelprof.report.rules.device import launch_bound
from lightning_modelprof.report.rules.engine import diagnose_traces
from lightning_modelprof.report.verdict import of_device_traces
from tests.support.traces import event, load, make_trace, reference


def share_of_the_plugin(name):
    """DataLoader's share of the steps in torch_tb_profiler's breakdown."""
    steps = reference(name, "tb_plugin")["steps"]
    return sum(one["DataLoader"] for one in steps) / sum(one["Total"] for one in steps)


def diagnosed(*names):
    """The verdict, and the findings by kind."""
    verdict, findings = diagnose_traces(JobFacts(map(TraceFacts, map(load, names))))
    assert len({one.kind for one in findings}) == len(findings) == 7
    return verdict, {one.kind: one for one in findings}


def share_of(finding):
    return finding.share


def found(findings):
    """Severities of findings by kind, without hints, which have their own tests."""
    is_hint = {kind: one.severity is Severity.INFO for kind, one in findings.items()}
    return {
        kind: one.severity
        for kind, one in findings.items()
        if one.status is Status.FOUND and not is_hint[kind]
    }


@pytest.mark.parametrize(("num_kernels", "is_told"), [(2, False), (4, False), (5, True)])
def test_no_verdict_if_most_kernels_are_lost(num_kernels, is_told):
    """Ten launches, not all with a kernel, as during graph capture."""
    events = [event("user_annotation", "ProfilerStep#1", 0, 1000)]
    for number in range(10):
        begin = 10 + 90 * number
        events.append(event("cuda_runtime", "cudaLaunchKernel", begin, begin + 4, correlation=number + 1))
        if number < num_kernels:
            events.append(event("kernel", "k", begin + 5, begin + 85, tid=7, pid=0, correlation=number + 1))
    verdict, findings = diagnose_traces(JobFacts([TraceFacts(make_trace(events))]))
    lost = f"{10 - num_kernels} of 10 kernel launches have no kernel in the trace"
    assert verdict.summary.startswith(lost) is not is_told
    assert verdict.kind == "cannot_tell" or is_told
    evaluated = [one.kind for one in findings if one.status is not Status.NOT_EVALUATED]
    assert bool(evaluated) is is_told


def test_unlinked_kernels_are_not_lost():
    """As in a runtime whose calls are numbered differently from their kernels."""
    events = [event("user_annotation", "ProfilerStep#1", 0, 1000)]
    for number in range(10):
        begin = 10 + 90 * number
        events.append(event("cuda_runtime", "cudaLaunchKernel", begin, begin + 4, correlation=number + 1))
        events.append(event("kernel", "k", begin + 5, begin + 85, tid=7, pid=0, correlation=number + 100))
    verdict, _ = diagnose_traces(JobFacts([TraceFacts(make_trace(events))]))
    assert "have no kernel" not in verdict.summary


def test_input_bound_without_workers():
    """Besides the fetches, the CPU is late for 8% of a step, and batch copies from pageable memory block it
    for 2 of 178 ms."""
    verdict, findings = diagnosed("v100_resnet50_workers0")
    assert verdict.kind == "input_bound"
    assert verdict.summary.startswith("33% of each step")
    finding = findings["input_bound"]
    assert found(findings) == {"input_bound": Severity.CRITICAL}
    assert share_of(finding) == pytest.approx(share_of_the_plugin("v100_resnet50_workers0"), abs=1e-3)
    assert "num_workers=1 or more" in finding.action  # 59 ms of fetch and 118 ms of the rest
    assert findings["host_to_device_copy"].summary.startswith(
        "The CPU waits 4 times per step"
    )  # two tensors, copy and sync
    assert findings["launch_bound"].status is Status.CLEAN


def test_not_input_bound_with_four_workers():
    """1478 kernels per step (median 2 us), recorded with stacks: the CPU is late for 19% of the step."""
    verdict, findings = diagnosed("v100_resnet50_workers4")
    assert verdict.kind == "balanced"
    assert found(findings) == {"launch_bound": Severity.WARNING}
    assert findings["input_bound"].status is Status.CLEAN
    assert share_of(findings["launch_bound"]) == pytest.approx(0.186, abs=0.002)


def test_busy_device_is_device_bound():
    verdict, findings = diagnosed("v100_ns_resolution")
    assert verdict.kind == "device_bound"
    assert found(findings) == {}


def test_late_launches_with_hidden_communication():
    """DDP on one node: the GPU is idle for three quarters of each step, in gaps of up to 16 ms."""
    verdict, findings = diagnosed("a100_nccl")
    assert verdict.kind == "host_bound"
    assert verdict.summary.startswith("The GPU spends 75% of each step waiting for the CPU")
    assert found(findings) == {"launch_bound": Severity.CRITICAL}
    # By hand: 39.559468 of 667.225958 ms, the sum of three steps.
    evidence = {one.label: one.value for one in findings["communication_exposed"].evidence}
    step_ns = findings["launch_bound"].whole_ns
    share = evidence["exposed communication per step"] / step_ns
    assert share == pytest.approx(39559468 / 667225958)


def test_exposed_communication_of_two_ranks():
    """By hand: 336.983 of 1230.289 and 303.523 of 1238.593 ms; the CPU is late for about as long."""
    verdict, findings = diagnosed("sampled_2rank_rank0", "sampled_2rank_rank1")
    assert verdict.kind == "communication_bound"
    share = (336983 + 303523) / (1230289 + 1238593)
    assert share_of(findings["communication_exposed"]) == pytest.approx(share)
    assert found(findings) == {
        "communication_exposed": Severity.WARNING,
        "launch_bound": Severity.WARNING,
    }


def test_trace_without_steps_has_no_verdict():
    """43 s without steps, of which the first CUDA call takes 30 s."""
    verdict, findings = diagnosed("a100_alexnet")
    assert verdict.kind == "cannot_tell"
    assert "ProfilerStep" in verdict.summary
    assert found(findings) == {}


def test_toy_model_on_amd_device():
    """14 kernels in 9.3 ms, 6.6 ms of which are one launch, the first of its kind."""
    verdict, findings = diagnosed("mi250_toy")
    assert verdict.kind == "host_bound"
    assert found(findings) == {"launch_bound": Severity.CRITICAL}
    assert "longest gap 6.63 ms" in findings["launch_bound"].summary


def shares(**given):
    parts = dict.fromkeys(("computing", "communication", "fetch", "host", "other"), 0.0) | given
    assert sum(parts.values()) == pytest.approx(1)
    return DeviceShares(step_ns=1e7, busy=parts["computing"] + parts["communication"], **parts)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"computing": 0.85, "fetch": 0.15}, "device_bound"),
        ({"computing": 0.80, "fetch": 0.20}, "input_bound"),
        ({"computing": 0.81, "fetch": 0.19}, "balanced"),
        ({"computing": 0.5, "communication": 0.15, "host": 0.35}, "communication_bound"),
        ({"computing": 0.5, "host": 0.5}, "host_bound"),
        ({"computing": 0.89, "other": 0.11}, "cannot_tell"),
    ],
)
def test_thresholds(given, kind):
    assert of_device_traces(shares(**given)).kind == kind


def test_time_without_events_is_explained_by_idle_causes():
    """11% of the steps is in no event; 10, 11 or 20% is idle time with unknown cause."""
    given = shares(computing=0.89, other=0.11)
    for unexplained, kind in ((0.10, "device_bound"), (0.11, "cannot_tell"), (0.2, "cannot_tell")):
        waits = WaitShares(late=0.0, around_model=0.0, forward_saving=0.0, unexplained=unexplained)
        verdict = of_device_traces(given, waits)
        assert verdict.kind == kind
        assert verdict.accounted_ratio == pytest.approx(1 - min(unexplained, 0.11))


def test_rules_and_shares_together():
    """The GPU is busy 40%; the CPU is late for 35%, of which the model's launches are 31."""
    finding = Finding(
        kind="launch_bound",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="",
        summary="",
        saving_ns_per_step=0.31 * 1e7,
        whole_ns=1e7,
    )
    given = shares(computing=0.4, host=0.6)
    waits = WaitShares(late=0.35, around_model=0.0, forward_saving=0.0)
    assert of_device_traces(given, waits, [finding], [launch_bound]).summary.startswith(
        "The GPU spends 31% of each step"
    )
    found = of_device_traces(given, waits)  # it computes less than half of the time
    assert (found.kind, found.summary.partition(". ")[2].split()[3]) == ("host_bound", "35%")
    assert (
        of_device_traces(given, WaitShares(late=0.5, around_model=0, forward_saving=0)).kind == "host_bound"
    )
    more = shares(computing=0.3, host=0.38, fetch=0.32)
    assert of_device_traces(more, waits, [finding], [launch_bound]).kind == "input_bound"


@pytest.mark.parametrize(
    ("given", "waits", "said"),
    [
        ({"computing": 0.80, "communication": 0.08, "host": 0.12}, {"late": 0.11}, "15%"),
        ({"computing": 0.84, "fetch": 0.16}, {"late": 0.0}, "20%"),
        ({"computing": 0.60, "host": 0.40}, {"late": 0.29}, "30%"),
        ({"computing": 0.55, "host": 0.45}, {"late": 0.45}, "50%"),
        ({"computing": 0.55, "host": 0.45}, None, "50%"),
    ],
)
def test_bound_on_rest_is_true(given, waits, said):
    """The bound is the next limit above every share that isn't computing."""
    known = None if waits is None else WaitShares(around_model=0.0, forward_saving=0.0, **waits)
    verdict = of_device_traces(shares(**given), known)
    assert verdict.kind == "balanced"
    _, _, rest = verdict.summary.partition(" of the recorded steps")
    assert rest == (f"; everything else takes less than {said} of them." if said else ".")


def test_idle_time_without_cause_is_not_balanced():
    waits = WaitShares(late=0.1, around_model=0.0, forward_saving=0.0, unexplained=0.5)
    verdict = of_device_traces(shares(computing=0.40, host=0.60), waits)
    assert verdict.kind == "cannot_tell"
    assert "50% is idle time with unknown cause" in verdict.summary


def test_no_verdict_without_device_shares():
    verdict = of_device_traces(None)
    assert (verdict.kind, verdict.accounted_ratio) == ("cannot_tell", None)


# Traces without a device


def of_the_host(fetch_us, step_us=100):
    """Verdict and finding for three steps that first fetch for this long, then compute."""
    events = []
    for number in range(3):
        begin = number * step_us
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, begin + step_us))
        if fetch_us:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            events.append(event("user_annotation", name, begin, begin + fetch_us))
        events.append(event("cpu_op", "aten::addmm", begin + fetch_us, begin + step_us))
    verdict, findings = diagnose_traces(JobFacts([TraceFacts(make_trace(events))]))
    return verdict, next(one for one in findings if one.kind == "input_bound")


def test_steps_without_device_can_be_input_bound():
    verdict, finding = of_the_host(60_000, 100_000)
    assert (verdict.kind, verdict.summary) == ("input_bound", "60% of each step is spent waiting for data.")
    assert finding.severity is Severity.CRITICAL
    assert finding.saving_ns_per_step == 60_000_000
    assert finding.summary == "Training waits 60 ms per step (60%) for data."
    assert "num_workers=2 or more" in finding.action  # 60 ms of fetch and 40 ms of the rest


def test_other_cpu_work_gives_no_verdict():
    verdict, finding = of_the_host(1_000, 100_000)
    assert verdict.kind == "cannot_tell"
    assert verdict.summary.startswith("This trace has no GPU events")
    assert finding.status is Status.CLEAN
    verdict, finding = of_the_host(0)
    assert verdict.kind == "cannot_tell"
    assert finding.status is Status.NOT_EVALUATED
    assert finding.summary == "the traces have no fetches"


def test_no_verdict_without_steps():
    verdict, findings = diagnose_traces(JobFacts([TraceFacts(make_trace([event("other", "nothing", 0, 1)]))]))
    assert (verdict.kind, verdict.summary) == ("cannot_tell", "The traces have no steps.")
    assert all(one.status is Status.NOT_EVALUATED for one in findings)
