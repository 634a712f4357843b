"""Kernels that could use tensor cores: hand-made traces, and numbers of the removed TensorBoard plugin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.kernels import tensor_core_use
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import diagnose_traces, judge
from lightning_modelprof.report.rules.precision import amp_off, tensor_cores_eligible
from lightning_modelprof.run.records import Window
from lightning_modelprof.run.setup import DeviceSetup
from tests.support.diagnosed import SETUP, analysis_of, only, steps_of
from tests.support.trace_sums import read, span_of
from tests.support.traces import event, load, make_trace, real_file, reference

FAST, SLOW, OWN = "volta_fp16_s884gemm_128x64", "volta_sgemm_128x64_nn", "my_kernel"


def finding_of(facts):
    _, findings = diagnose_traces(JobFacts([facts]))
    return next(one for one in findings if one.kind == "tensor_cores_eligible")


def evidence(finding):
    return {one.label: one.value for one in finding.evidence}


def facts_of(*work, capability=(7, 0), name="Tesla V100"):
    """Two steps with kernels, each (operator, kernel's name, microseconds)."""
    events = [
        event("user_annotation", f"ProfilerStep#{number}", 1000 * number, 1000 * number + 900)
        for number in (1, 2)
    ]
    begin = 1000
    for number, (operator, kernel, lasts) in enumerate(work, 1):
        events += [
            event("cpu_op", operator, begin, begin + 5),
            event("cuda_runtime", "cudaLaunchKernel", begin + 1, begin + 3, correlation=number),
            event("kernel", kernel, begin + 6, begin + 6 + lasts, tid=7, pid=0, correlation=number, device=0),
        ]
        begin += 10 + lasts
    device = {"id": 0, "name": name, "computeMajor": capability[0], "computeMinor": capability[1]}
    return TraceFacts(make_trace(events, deviceProperties=[device]))


@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "v100_resnet50_workers4"])
def test_eligible_share_matches_removed_plugin(name):
    """As in the plugin, 68% of kernel time is eligible and none of it runs on tensor cores."""
    expected = reference(name, "tb_plugin")
    facts = TraceFacts(load(name))
    use = tensor_core_use([facts.kernels])
    assert use.eligible_ns / use.kernels_ns == pytest.approx(
        expected["tc_eligible_ops_kernel_ratio"], rel=1e-12
    )
    assert use.used_ns == expected["tc_used_ratio"] == 0
    finding = finding_of(facts)
    assert (finding.status, finding.severity) == (Status.FOUND, Severity.INFO)
    assert finding.summary.startswith(("68%", "68%"))
    assert "16-mixed" in finding.action
    assert "neither TF32 nor bfloat16" in finding.action


def test_eligible_share_without_newer_operator_matches_plugin():
    """The plugin logs that it doesn't know ``aten::convolution_backward``, new in torch 1.11."""
    name = "v100_ns_resolution"
    use = tensor_core_use([TraceFacts(load(name)).kernels])
    kernels = TraceFacts(load(name)).kernels.by_name
    newer_ns = sum(one.operators.time_ns.get("aten::convolution_backward", 0) for one in kernels)
    expected = reference(name, "tb_plugin")["tc_eligible_ops_kernel_ratio"]
    # The plugin's durations are rounded to microseconds.
    assert (use.eligible_ns - newer_ns) / use.kernels_ns == pytest.approx(expected, rel=1e-4)
    assert use.eligible_ns / use.kernels_ns == pytest.approx(0.6435, abs=1e-4)


def test_a100_uses_tensor_cores_for_most():
    """cuDNN uses TF32 in convolutions by default. Sums over the file join kernels and operators by id."""
    events = read(real_file("a100_nccl"))
    operators = {one["args"]["External id"]: one["name"] for one in events if one.get("cat") == "cpu_op"}
    sums_ns = {"all": 0, "eligible": 0}
    for one in events:
        if one.get("cat") == "kernel":
            begin_ns, end_ns = span_of(one)
            operator = operators.get(one["args"]["External id"], "")
            is_eligible = operator in {
                "aten::mm",
                "aten::addmm",
                "aten::cudnn_convolution",
                "aten::convolution_backward",
            }
            sums_ns["all"] += end_ns - begin_ns
            sums_ns["eligible"] += (end_ns - begin_ns) * is_eligible
    facts = TraceFacts(load("a100_nccl"))
    use = tensor_core_use([facts.kernels])
    assert (use.kernels_ns, use.eligible_ns) == tuple(sums_ns.values())
    finding = finding_of(facts)
    assert finding.status is Status.FOUND
    assert "For the operators without tensor cores" in finding.action


def test_other_vendors_are_not_evaluated():
    finding = finding_of(TraceFacts(load("mi250_toy")))
    assert finding.status is Status.NOT_EVALUATED
    assert "NVIDIA" in finding.summary


def test_shares_by_hand():
    """Of 100 us, 20 are on tensor cores, 30 could be, 10 are unknown, and 40 aren't eligible."""
    facts = facts_of(
        ("aten::mm", FAST, 20),
        ("aten::mm", SLOW, 10),
        ("aten::convolution_backward", SLOW, 20),
        ("aten::bmm", OWN, 10),
        ("aten::mv", SLOW, 15),
        ("aten::add", SLOW, 25),
    )
    finding = finding_of(facts)
    assert evidence(finding) == {
        "eligible share of kernel time": 0.6,
        "eligible time on tensor cores": pytest.approx(1 / 3),
        "eligible time not on tensor cores": 0.5,
        "slowest operator without tensor cores": "aten::convolution_backward",
    }
    assert "Slowest operators without tensor cores: aten::convolution_backward, aten::mm." in finding.summary
    assert "For the operators without tensor cores" in finding.action
    assert "channels_last" in finding.action
    assert finding.saving_ns_per_step is None


@pytest.mark.parametrize(
    ("capability", "name", "says", "says_not"),
    [
        ((7, 0), "Tesla V100", "torch.float16", "set_float32_matmul_precision"),
        ((7, 5), "Tesla T4", "neither TF32 nor bfloat16", "bf16-mixed"),
        ((8, 0), "NVIDIA A100", "set_float32_matmul_precision('high')", "float16) with a GradScaler"),
        ((None, None), "NVIDIA", "On Ampere and newer", "support neither"),
    ],
)
def test_advice_matches_device_capability(capability, name, says, says_not):
    finding = finding_of(facts_of(("aten::addmm", SLOW, 50), capability=capability, name=name))
    assert finding.status is Status.FOUND
    assert says in finding.action
    assert says_not not in finding.action
    assert "channels_last" not in finding.action  # no convolution


@pytest.mark.parametrize(
    ("capability", "name"), [((6, 1), "GTX 1080"), ((7, 5), "GTX 1660"), ((9, 0), "AMD MI250")]
)
def test_device_without_tensor_cores_is_not_evaluated(capability, name):
    finding = finding_of(facts_of(("aten::addmm", SLOW, 50), capability=capability, name=name))
    assert finding.status is Status.NOT_EVALUATED


def test_less_than_a_tenth_is_clean():
    used = facts_of(("aten::mm", FAST, 91), ("aten::mm", SLOW, 9))
    assert finding_of(used).status is Status.CLEAN
    assert finding_of(facts_of(("aten::mm", FAST, 90), ("aten::mm", SLOW, 10))).status is Status.FOUND
    assert finding_of(facts_of(("aten::add", SLOW, 9))).status is Status.NOT_EVALUATED


@pytest.mark.parametrize(
    ("capability", "precision", "matmul", "amp", "eligible"),
    [
        ((8, 0), "32-true", "highest", Status.FOUND, Status.NOT_EVALUATED),
        ((7, 0), "32-true", "high", Status.FOUND, Status.NOT_EVALUATED),  # it has no TF32
        ((8, 0), "32-true", "high", Status.FOUND, Status.FOUND),
        ((7, 0), "16-mixed", "highest", Status.CLEAN, Status.FOUND),
    ],
)
def test_settings_decide_which_finding_has_the_share(capability, precision, matmul, amp, eligible):
    """Where settings rule out tensor cores, only the hints about these settings have the windows' share."""
    facts = facts_of(("aten::mm", SLOW, 75), ("aten::add", SLOW, 25))
    cuda = DeviceSetup(capability=capability, total_bytes=100, reserved_bytes=50)
    facts = analysis_of(
        steps_of(forward=100),
        setup=replace(SETUP, cuda=cuda, matmul_precision=matmul),
        precision=precision,
        device_type="cuda",
        windows=(Window(index=0, first_step=0, last_step=0),),
        facts={0: facts},
    )
    of_amp = only(judge(amp_off, facts))
    assert of_amp.status is amp
    if amp is Status.FOUND:
        assert "75% of kernel time" in of_amp.summary
        assert evidence(of_amp)["eligible share of kernel time"] == 0.75
    assert only(judge(tensor_cores_eligible, facts)).status is eligible
