"""Tests the output of ``lightning-modelprof selftest`` when checks pass, fail, hang, crash or stop."""

from __future__ import annotations

import getpass
import json
import os
import socket
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_modelprof.cli.main import main
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.selftest import runner
from lightning_modelprof.selftest.comparison import Compared
from lightning_modelprof.selftest.machine import scrubbed, told
from lightning_modelprof.selftest.runner import CHECKS, Check, Result
from lightning_modelprof.selftest.summary import MOST_LINES, attachment, closing, heading, line_of
from lightning_modelprof.units import Unit
from tests.support.fits import ROOT

PRIVATE = {getpass.getuser(), socket.gethostname(), str(Path.home()), tempfile.gettempdir(), str(ROOT)}

FAULTY = """
import getpass, os, signal, socket, time
from pathlib import Path
from lightning_modelprof.selftest.comparison import Compared, Skip

def differs(lab):
    yield Compared("a number", 1, 1)
    yield Compared("another number", 2, 3)
    user, host = getpass.getuser(), socket.gethostname()
    raise RuntimeError(f"no {__file__} of {user} on {host} in {Path.cwd()}, ~/data/x.csv")

def hangs(lab):
    yield Compared("before", 1, 1)
    time.sleep(600)

def crashes(lab):
    yield Compared("before", 1, 1)
    os.kill(os.getpid(), signal.SIGSEGV)

def skips(lab):
    raise Skip("needs two GPUs")
    yield

def partly(lab):
    yield Compared("a number", 1, 1)
    raise Skip("the rest needs two GPUs")

def alone(lab):
    yield Compared("variables of a Trainer", sum(one.startswith("PL_") for one in os.environ), 0)
    yield Compared("files where it runs", len(list(Path.cwd().glob("select.py"))), 0)
"""

QUICK_CHILD = """
import sys, types
sys.modules["lightning_modelprof.selftest.lab"] = types.SimpleNamespace(Lab=lambda *_: None)
from lightning_modelprof.selftest.child import main
main()
"""
"""Avoids torch and Lightning, which take seconds to import."""

MACHINE = {"device": "cpu", "available": True, "devices": 1, "versions": {"torch": "2.13.0"}}


@pytest.mark.slow
def test_checks_that_can_run_pass_on_cpu(tmp_path, monkeypatch, capsys):
    """Has no limits that a busy machine could miss. All checks run in .ci/run."""
    checks = [replace(check, seconds=900) for check in CHECKS if check.name in ("training", "gpu phases")]
    monkeypatch.setattr(runner, "CHECKS", checks)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "result.json"
    assert main(["selftest", "--device", "cpu", "--budget", "3000", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(checks) + 4 <= MOST_LINES
    assert lines[1].startswith("PASS  training")
    assert lines[2].startswith("SKIP  gpu phases")
    assert lines[2].endswith("needs a GPU")
    written = json.loads(file.read_text())
    assert [one["name"] for one in written["checks"]] == [check.name for check in checks]
    compared = written["checks"][0]["comparisons"]
    assert compared
    assert all(one["passes"] for one in compared)
    assert {"python", "system", "cpus", "versions", "device"} <= set(written["machine"])
    assert_private(file.read_text())
    assert sorted(tmp_path.iterdir()) == [file]  # trainings leave no files in the current directory


def test_checks_beyond_budget_are_skipped():
    results = []
    runner.run_checks("cuda", 0, lambda check: pytest.fail(f"{check.name} began"), results.append)
    assert [(one.name, one.status) for one in results] == [(check.name, "SKIP") for check in CHECKS]
    assert {one.reason for one in results} == {"no time left; raise --budget"}


def assert_private(text):
    """Check that no private name appears as a whole word (``root`` is part of other words)."""
    words = set(text.replace('"', " ").split())
    assert [one for one in PRIVATE if one in words or ("/" in one and one in text)] == []
    assert "/" not in text.replace("FLOP/s", "").replace("/step", "")


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "7")
    monkeypatch.setattr(runner, "CHILD", ("-c", QUICK_CHILD))
    names = {"differs": 60, "hangs": 3, "crashes": 60, "skips": 60, "partly": 60, "alone": 60}
    checks = [Check(name, f"faulty:{name}", seconds) for name, seconds in names.items()]
    monkeypatch.setattr(runner, "CHECKS", [*checks, Check("gpu", "faulty:none", 60, ("cuda",))])
    in_the_way(tmp_path / "project", monkeypatch)
    return tmp_path / "out.json"


def in_the_way(folder, monkeypatch):
    """Enter a user directory with a file named like a standard module."""
    folder.mkdir()
    (folder / "select.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.chdir(folder)


@pytest.mark.slow
def test_user_files_are_not_imported_by_ddp_processes(tmp_path, monkeypatch):
    in_the_way(tmp_path / "project", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    [ddp] = [one for one in CHECKS if one.name == "ddp"]
    result = runner.run_check(ddp, "cpu", 240)
    assert (result.status, result.reason) == ("PASS", "")


def test_uninstalled_copy_is_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = (
        "import sys; from lightning_modelprof import __file__ as at; print(at); sys.exit(at != sys.argv[1])"
    )
    monkeypatch.setattr(runner, "CHILD", ("-c", code))
    assert runner.run_child(str(ROOT / "lightning_modelprof" / "__init__.py"), None, 60) == ([], "")


@pytest.mark.slow
def test_checks_that_differ_hang_or_crash_fail(faulty, capsys):
    assert main(["selftest", "--device", "cpu", "--json", str(faulty)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  differs: another number 2, expected 3" in out
    for what in ("FAIL: the profiler's number", "1 FAIL", "needs two GPUs", "needs a CUDA or ROCm device"):
        assert what in out or what == "1 FAIL"
    assert "2 PASS, 3 FAIL, 2 SKIP" in out
    assert "1 agree; the rest needs two GPUs, such as a number 1, expected 1" in out
    assert len(out.splitlines()) <= MOST_LINES
    written = json.loads(faulty.read_text())
    reasons = {one["name"]: one["reason"] for one in written["checks"]}
    assert reasons["differs"].startswith("raised RuntimeError (selftest.child:")
    assert reasons["hangs"].startswith("stopped after 3 s (selftest.child:")
    assert reasons["crashes"].startswith("ended with exit code -11")
    assert [len(one["comparisons"]) for one in written["checks"]] == [2, 1, 1, 0, 1, 2, 0]
    assert_private(faulty.read_text())


def test_ctrl_c_shows_results_so_far(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_child", lambda *_: ([{"facts": MACHINE}], ""))
    monkeypatch.setattr(runner, "run_check", interrupted_at("windows"))
    assert main(["selftest", "--json", str(tmp_path / "out.json")]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("PASS  training")
    assert "1 PASS, 0 FAIL, 0 SKIP" in lines
    assert len(json.loads((tmp_path / "out.json").read_text())["checks"]) == 1


def interrupted_at(name):
    def run_check(check, device, limit_s):
        if check.name == name:
            raise KeyboardInterrupt
        return Result(check.name, "PASS", 1.0, [Compared("a number", 1, 1)])

    return run_check


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "0"], "expected a number of seconds above 0"),
        (["--device", "tpu"], "argument --device: expected one of"),
        (["--json", "/no/such/folder/out.json"], "no such directory"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_invalid_arguments_are_rejected(arguments, said, capsys):
    with suppress(SystemExit):
        assert main(["selftest", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_output_has_at_most_40_lines_if_everything_fails():
    bad = [Compared(f"number {n}", n, n + 1, 0.1, Unit.DURATION_NS) for n in range(300)]
    results = [Result(check.name, "FAIL", 90.0, bad, "raised " + "x" * 500) for check in CHECKS]
    machine = MACHINE | {
        "card": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85 * 10**9,
        "driver": "580.1",
        "cuda": "13.0",
    }
    lines = [*heading(machine), *map(line_of, results), *closing(results, "out.json")]
    assert 30 < len(lines) <= MOST_LINES
    assert max(map(len, lines)) < 125
    assert "more in out.json" in "\n".join(lines)
    assert len(json.loads(attachment(machine, results))["checks"][0]["comparisons"]) == 300


@pytest.mark.parametrize(
    "private",
    [
        "/home/ann/project/train.py",
        "/home/ann/my secret project/train.py",
        "'/home/ann/a project, with a comma/train.py'",
        '"my project/train.py"',
        "/scratch/ann",
        r"C:\Users\ann\my project\train.py",
        "~/project/train.py",
        f"{Path.home()}/secret",
        "data/secret.csv",
        "secret_project.py",
        "my-secret-model.py",
        "my.secret-model.ckpt",
        "10.1.2.3",
        "10.1.2.3:29500",
        "fe80::1c2d:3e4f",
        "2001:db8:0:1:2:3:4:5",
        "0a:1b:2c:3d:4e:5f",
        "node7.cluster.example.org",
        "node7.example.org:29500",
        "node7:29500",
        "ann@example.org",
        getpass.getuser(),
        socket.gethostname(),
    ],
)
def test_private_parts_are_removed(private):
    assert scrubbed(f"can't open {private}") == "can't open <removed>"
    assert scrubbed(f"it isn't in {private}, the 2nd isn't it") == "it isn't in <removed>, the 2nd isn't it"


def test_public_text_is_kept():
    text = "torch.compile's aten::mm isn't in torch 2.13.0, {'flops': True}, 12 MiB at 15:53"
    assert scrubbed(text) == text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Ann's secret"), "RuntimeError"),
        (OSError("no ann on node7"), "OSError"),
        (RuntimeError("CUDA out of memory. Ann's secret"), "RuntimeError: CUDA out of memory"),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device\nAnn"),
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
        (ArchiveError("can't read /home/ann/x: empty"), "ArchiveError: can't read <removed>: empty"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_error_texts_keep_only_safe_parts(error, said):
    assert told(error) == said


@pytest.mark.parametrize(
    ("ours", "truth", "more", "passes"),
    [
        (1, 1, {}, True),
        (1, 2, {}, False),
        (None, 0, {}, False),
        ("a", "a", {}, True),
        ("a", "b", {}, False),
        (104, 100, {"limit": 0.05}, True),
        (106, 100, {"limit": 0.05}, False),
        (94, 100, {"limit": 0.05}, False),
        (50, 100, {"limit": 0.05, "at_most": True}, True),
        (3, 1, {"floor": 2}, True),
        (float("nan"), 1, {"limit": 9.0}, False),
    ],
)
def test_numbers_agree_within_limits(ours, truth, more, passes):
    assert Compared("a number", ours, truth, **more).passes is passes
