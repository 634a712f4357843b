"""The verdict of real GPU traces, beside what the removed TensorBoard plugin says of them."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.trace_facts import analyze_trace
from lightning_modelprof.report.diagnose_traces import diagnose_traces
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.verdict import DeviceShares, verdict_of_traces
from tests.traces import FOLDER, load, reference

real = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the real traces are not here; set MODELPROF_TRACES to their folder"
)


def share_of_the_plugin(name):
    """DataLoader's share of the steps in torch_tb_profiler's breakdown."""
    steps = reference(name, "tb_plugin")["steps"]
    return sum(one["DataLoader"] for one in steps) / sum(one["Total"] for one in steps)


@real
def test_input_bound_without_workers():
    verdict, [finding] = diagnose_traces([analyze_trace(load("v100_resnet50_workers0"))])
    assert verdict.kind == "input_bound"
    assert verdict.summary.startswith("33.4 % of a step")
    assert (finding.status, finding.severity) == (Status.FOUND, Severity.CRITICAL)
    share = next(one.value for one in finding.evidence if one.label == "share of the step")
    assert share == pytest.approx(share_of_the_plugin("v100_resnet50_workers0"), abs=1e-3)
    assert "num_workers=1 or more" in finding.action  # 59 ms of fetch beside 118 ms


@real
def test_not_with_four_workers():
    verdict, [finding] = diagnose_traces([analyze_trace(load("v100_resnet50_workers4"))])
    assert (verdict.kind, finding.status) == ("balanced", Status.CLEAN)


@real
@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["v100_ns_resolution"], "device_bound"),
        (["a100_nccl"], "host_bound"),
        (["sampled_2rank_rank0", "sampled_2rank_rank1"], "host_bound"),
    ],
)
def test_other_devices(names, kind):
    assert diagnose_traces(map(analyze_trace, map(load, names)))[0].kind == kind


def shares(**given):
    parts = dict.fromkeys(("busy", "communication", "fetch", "host", "other"), 0.0) | given
    assert sum(parts.values()) == pytest.approx(1)
    return DeviceShares(step_ns=1e7, **parts)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"busy": 0.85, "fetch": 0.15}, "device_bound"),
        ({"busy": 0.80, "fetch": 0.20}, "input_bound"),
        ({"busy": 0.81, "fetch": 0.19}, "balanced"),
        ({"busy": 0.5, "communication": 0.15, "host": 0.35}, "communication_bound"),
        ({"busy": 0.5, "host": 0.5}, "host_bound"),
        ({"busy": 0.89, "other": 0.11}, "cannot_tell"),
    ],
)
def test_thresholds(given, kind):
    assert verdict_of_traces(shares(**given)).kind == kind


def test_without_device_events():
    verdict = verdict_of_traces(None)
    assert (verdict.kind, verdict.accounted_ratio) == ("cannot_tell", None)
