"""Traces written by others, with the correct verdicts; see benchmarks/verdicts/README.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_modelprof.cli.main import main
from tests.support.fits import ROOT

INPUT, HOST, DEVICE, COMMUNICATION = "INPUT-BOUND", "HOST-BOUND", "DEVICE-BOUND", "COMMUNICATION-BOUND"

SYNC = "SYNC-BOUND"

SECOND_SET = {
    "c01_merged_tp_ep.trace.json.gz": f"3 ranks of one job {HOST}: 60%",
    "c02_merged_offset_pids.json": f"2 ranks of one job {DEVICE}: The GPU is busy in 90%",
    "c03_windows_latin1.pt.trace.json": f"{INPUT}: 45%",
    "c04_gbk_quoted.pt.trace.json": f"{DEVICE}: The GPU is busy in 93%",
    "c05_mlu_cncl.pt.trace.json": f"{COMMUNICATION}: 36%",
    "c06_vxcore_ucc.pt.trace.json": f"{COMMUNICATION}: 45%",
    "c07_input_steps2.pt.trace.json": f"{INPUT}: 40%",
    "c07_input_steps3.pt.trace.json": f"{INPUT}: 40%",
    "c07_input_steps12.pt.trace.json": f"{INPUT}: 40%",
    "c08_rccl_steps2.pt.trace.json": f"{COMMUNICATION}: 35%",
    "c08_rccl_steps3.pt.trace.json": f"{COMMUNICATION}: 35%",
    "c08_rccl_steps12.pt.trace.json": f"{COMMUNICATION}: 35%",
    "c09_python_in_forward.pt.trace.json": f"{HOST}: 45%",
    "c10_lock_in_forward.pt.trace.json": f"{HOST}: 48%",
    "c11_straggler": "4 ranks of one job STRAGGLER-BOUND: 22%",
    "c12_no_straggler": f"3 ranks of one job {COMMUNICATION}: 36%",
    "c13_iterations": f"newest of 3: 2 ranks of one job {DEVICE}: The GPU is busy in 92%",
    "c14_archives/folder": "2 ranks of one job BALANCED: The GPU is busy in 87%",
    "c14_archives/gzgz": "2 ranks of one job BALANCED: The GPU is busy in 87%",
    "c14_archives/two.tar.gz": "2 ranks of one job BALANCED: The GPU is busy in 87%",
    "c14_archives/two.zip": "2 ranks of one job BALANCED: The GPU is busy in 87%",
    "c15_cut.pt.trace.json": f"{DEVICE}: The GPU is busy in 90%",
    "c15_cut.pt.trace.json.gz": f"{DEVICE}: The GPU is busy in 90%",
    "c15_full.pt.trace.json": f"{DEVICE}: The GPU is busy in 90%",
}


THIRD_SET = {
    "c01/all_ranks.json": f"3 ranks of one job {DEVICE}: The GPU is busy in 98%",
    "c02/merged.json.gz": f"2 ranks of one job {INPUT}: 38%",
    "c03b/win.pt.trace.json": f"{HOST}: 40%",
    "c04/gbk.json": f"{COMMUNICATION}: 25%",
    "c05/mlu.trace.json": f"{DEVICE}: The GPU is busy in 95%",
    "c06/rank0.json": f"{COMMUNICATION}: 40%",
    "c07/steps2.json": f"{SYNC}: 33%",
    "c07/steps3.json": f"{SYNC}: 33%",
    "c07/steps12.json": f"{SYNC}: 33%",
    "c08/steps2.json": f"{INPUT}: 35%",
    "c08/steps3.json": f"{INPUT}: 35%",
    "c08/steps12.json": f"{INPUT}: 35%",
    "c09b/lock.json.gz": "(a lock)",
    "c10b/edges.json": "aten::unique_consecutive",
    "c11": "STRAGGLER-BOUND: 22% of each step is spent waiting for a slower rank (rank 2",
    "c12": f"3 ranks of one job {COMMUNICATION}: 29%",
    "c13/run.tar.gz": f"{DEVICE}: The GPU is busy in 94%",
    "c14/job.zip": "2 ranks of one job BALANCED: The GPU is busy in 88%",
    "c15/cut.pt.trace.json": f"{INPUT}: 41%",
}
SETS = {"second_set.py": SECOND_SET, "third_set.py": THIRD_SET}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each set."""
    made = {}
    for script in SETS:
        made[script] = tmp_path_factory.mktemp("traces")
        path = ROOT / "benchmarks" / "verdicts" / script
        subprocess.run([sys.executable, path, made[script]], check=True, timeout=120)
    return made


@pytest.mark.parametrize(("script", "name"), [(script, name) for script in SETS for name in SETS[script]])
def test_verdict_is_the_expected_one(folders, capsys, script, name):
    code = main(["analyze", "--brief", str(folders[script] / name)])
    assert code == ("cut" in name)
    said = capsys.readouterr().out.split("\n")[0].replace(": The GPU spends ", ": ")
    assert SETS[script][name] in said
