"""Tests that the GPU benchmark keeps its other results when a variant is too slow."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fits import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="a copy without all of the house")


@pytest.mark.parametrize("slow", ["bare", "traceml"])
def test_only_variants_that_time_out_are_missing(slow, tmp_path, monkeypatch, capsys):
    def run(command, *, timeout, **_):
        if slow == "traceml" if "traceml" in command[0] else slow in command:
            raise subprocess.TimeoutExpired(command, timeout)
        (answer,) = (one for one in command if one.endswith("answer.json"))
        Path(answer).write_text(json.dumps({"step": 0.001, "window": 0.1, "fit": 1.0}))

    module = runpy.run_path(str(SCRIPT))
    monkeypatch.setattr(module["shutil"], "which", lambda *_, **__: "/bin/traceml")
    monkeypatch.setattr(module["subprocess"], "run", run)
    target = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--rounds", "2", "--json", str(target)])
    module["main"]()
    found = json.loads(target.read_text())
    assert found["failed"] == {slow: "stopped after 600 s"}
    assert {name: len(fits) for name, fits in found["fits"]["large"].items()} == dict.fromkeys(
        {"bare", "ours", "ours-window", "simple", "pytorch", "traceml"} - {slow}, 2
    )
    said = capsys.readouterr().out
    assert "not measured, stopped after 600 s" in said
    assert ("SimpleProfiler" in said) is (slow != "bare")
