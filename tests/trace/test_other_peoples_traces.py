"""Sets of traces that strangers wrote, with what is right; benchmarks/verdicts/README.md tells of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_modelprof.cli.main import main
from tests.support.fits import ROOT

INPUT, HOST, DEVICE, COMMUNICATION = "INPUT-BOUND", "HOST-BOUND", "DEVICE-BOUND", "COMMUNICATION-BOUND"

SECOND_SET = {
    "c01_merged_tp_ep.trace.json.gz": f"3 ranks of one job {HOST}: 60.0 %",
    "c02_merged_offset_pids.json": f"2 ranks of one job {DEVICE}: The device is busy in 90.0 %",
    "c03_windows_latin1.pt.trace.json": f"{INPUT}: 45.0 %",
    "c04_gbk_quoted.pt.trace.json": f"{DEVICE}: The device is busy in 92.5 %",
    "c05_mlu_cncl.pt.trace.json": f"{COMMUNICATION}: 36.0 %",
    "c06_vxcore_ucc.pt.trace.json": f"{COMMUNICATION}: 45.0 %",
    "c07_input_steps2.pt.trace.json": f"{INPUT}: 40.0 %",
    "c07_input_steps3.pt.trace.json": f"{INPUT}: 40.0 %",
    "c07_input_steps12.pt.trace.json": f"{INPUT}: 40.0 %",
    "c08_rccl_steps2.pt.trace.json": f"{COMMUNICATION}: 35.0 %",
    "c08_rccl_steps3.pt.trace.json": f"{COMMUNICATION}: 35.0 %",
    "c08_rccl_steps12.pt.trace.json": f"{COMMUNICATION}: 35.0 %",
    "c09_python_in_forward.pt.trace.json": f"{HOST}: 45.0 %",
    "c10_lock_in_forward.pt.trace.json": f"{HOST}: 47.9 %",
    "c11_straggler": "4 ranks of one job STRAGGLER-BOUND: 22.0 %",
    "c12_no_straggler": f"3 ranks of one job {COMMUNICATION}: 36.0 %",
    "c13_iterations": f"newest of 3: 2 ranks of one job {DEVICE}: The device is busy in 91.5 %",
    "c14_archives/folder": "2 ranks of one job BALANCED: The device is busy in 87.0 %",
    "c14_archives/gzgz": "2 ranks of one job BALANCED: The device is busy in 87.0 %",
    "c14_archives/two.tar.gz": "2 ranks of one job BALANCED: The device is busy in 87.0 %",
    "c14_archives/two.zip": "2 ranks of one job BALANCED: The device is busy in 87.0 %",
    "c15_cut.pt.trace.json": f"{DEVICE}: The device is busy in 90.0 %",
    "c15_cut.pt.trace.json.gz": f"{DEVICE}: The device is busy in 90.0 %",
    "c15_full.pt.trace.json": f"{DEVICE}: The device is busy in 90.0 %",
}


@pytest.fixture(scope="module")
def second_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    script = ROOT / "benchmarks" / "verdicts" / "second_set.py"
    subprocess.run([sys.executable, script, folder], check=True, timeout=120)
    return folder


@pytest.mark.parametrize("name", SECOND_SET)
def test_the_verdict_is_the_one_expected(second_set, capsys, name):
    code = main(["analyze", "--brief", str(second_set / name)])
    assert code == ("cut" in name)
    assert SECOND_SET[name] in capsys.readouterr().out.split("\n")[0]
