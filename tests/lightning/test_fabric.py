"""Tests loops without a Trainer: Fabric, EventTimer, count_flops and traces from torch.profiler."""

from __future__ import annotations

import json
import re

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_modelprof import EventTimer, analyze, count_flops
from lightning_modelprof.cli.main import main
from tests.support.documents import raw_rows
from tests.support.fits import ROOT, run_script

RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Output and trace of the example, run as a user would."""
    folder = tmp_path_factory.mktemp("fabric")
    arguments = ("--accelerator", "cpu", "--steps", 20, "--batch-size", 8)
    result = run_script(RUN, ROOT / "examples" / "fabric.py", *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout, folder / "fabric_trace.json.gz"


def test_example_shows_stages_and_counts(example):
    printed, _ = example
    convolution, linear = 8 * 7 * 7 * 16 * 27, 8 * 784 * 10
    counts = dict(re.findall(r"^ *(\w+) ([\d,]+) multiply-adds", printed, re.MULTILINE))
    assert counts["forward"] == f"{convolution + linear:,}"
    assert counts["backward"] == f"{convolution + 2 * linear:,}"  # images need no gradient
    rows = re.findall(r"^ *(\w+) +([\d.]+) ms per step +([\d.]+)%$", printed, re.MULTILINE)
    assert [name for name, *_ in rows] == ["data", "forward", "backward", "optimizer"]
    assert sum(float(share) for *_, share in rows) == pytest.approx(100, abs=0.3)
    assert all(float(time) > 0 for _, time, _ in rows)


def test_analyze_command_reads_examples_trace(example, capsys):
    _, trace = example
    assert main(["analyze", str(trace), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["traces"][0]["steps"] == [7, 8, 9, 10, 11]
    rows = raw_rows(report["tables"]["operators"])
    names = {value for row in rows for value in row.values() if isinstance(value, str)}
    assert {"aten::convolution", "aten::convolution_backward"} <= names


def test_analyze_function_reads_trace(example):
    _, trace = example
    tables = {table.id: table for table in analyze(trace).tables}
    assert tables["model_summary"].rows
    assert tables["step_breakdown"].rows


def test_fabric_wrapped_models_are_counted():
    fabric = Fabric(accelerator="cpu", devices=1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    count = count_flops(model, torch.rand(3, 4), loss_fn=lambda output: output.sum())
    assert count.macs == {"forward": 3 * (4 * 8 + 8 * 2), "backward": 3 * (4 * 8 + 2 * 8 * 2)}
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    timer = EventTimer(fabric.device)
    for _ in range(3):
        with timer("step"), timer("forward"):
            loss = model(torch.rand(3, 4)).sum()
        with timer("backward"):
            fabric.backward(loss)
        optimizer.step()
    stages = timer.results()
    assert {name: stage.calls for name, stage in stages.items()} == {"step": 3, "forward": 3, "backward": 3}
    assert stages["step"].real.avg_ns >= stages["forward"].real.avg_ns > 0
