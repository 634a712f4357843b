"""Tests multiple loops in one process: short ones share one record, others one directory with a line each."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.cli.main import main
from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine import process_loops
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS, ProcessLoops, ShortLoop, short_loop
from lightning_modelprof.lightning.trainer_loop import TrainerLoop
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.loops import LOOPS, MAX_KEPT
from tests.support.bench import make_trainer
from tests.support.documents import raw_rows
from tests.support.fits import grouped, run_script

pytestmark = [pytest.mark.slow, pytest.mark.short]


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.profilers = []
        self.fails = False

    def training_step(self, batch):
        return self.layer(torch.ones(2, 2)).sum()

    def predict_step(self, batch):
        self.profilers.append(type(self.trainer.profiler))
        if self.fails:
            raise ValueError("a batch that cannot be")
        return self.layer(torch.ones(2, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def callback_in(folder, **arguments):
    return ModelProfCallback(
        **grouped({"dirpath": folder, "tensorboard": False, "sampling": False} | arguments)
    )


def trainer_of(callback, folder, **arguments):
    return make_trainer(
        callbacks=[callback], default_root_dir=folder, max_epochs=1, **{"max_steps": -1, **arguments}
    )


def test_short_loops_print_nothing_and_create_no_directory(tmp_path, capsys):
    model, callback = Small(), callback_in(tmp_path / "run")
    trainer = trainer_of(callback, tmp_path)
    for _ in range(20):
        trainer.predict(model, [0])
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()
    assert (callback.report, callback.run) == (None, None)
    assert set(model.profilers) == {PassThroughProfiler}, "nothing measures the batches"
    PROCESS_LOOPS.end()
    out = capsys.readouterr().out
    assert out.startswith("lightning-modelprof: 20 prediction loops of Small took ")
    assert out.count("\n") == 1
    [short] = load_run(tmp_path / "run").short_loops
    assert (short.loop, short.model, short.calls, short.batches, short.failed) == (
        "predict", "Small", 20, 20, 0,
    )  # fmt: skip
    assert len(short.durations_ns) == 20
    assert sum(short.durations_ns) == short.total_ns > 0
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "Short loops" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "has_report"),
    [({}, False), ({"flops": True}, True), ({"steps": (1, 3)}, True), ({"steps": (7, 9)}, False),
     ({"active": 2, "skip_first": 0}, True), ({"active": 10}, False), ({"active": 0}, False)],
)  # fmt: skip
def test_explicit_requests_give_short_loop_report(tmp_path, arguments, has_report):
    callback = callback_in(tmp_path / "run", terminal=False, **arguments)
    trainer_of(callback, tmp_path).predict(Small(), [0] * 5)
    assert (callback.report is not None) == has_report


@pytest.mark.parametrize(
    ("loop", "batches", "has_report"),
    [("predict", 19, False), ("predict", 20, True), ("fit", 4, False), ("fit", 5, True)],
)
def test_loop_has_report_from_minimum_length(tmp_path, loop, batches, has_report):
    callback = callback_in(tmp_path / "run", active=0, terminal=False)
    getattr(trainer_of(callback, tmp_path), loop)(Small(), [0] * batches)
    assert (callback.report is not None) == has_report


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_batch_test_is_short_for_any_rank_count(world_size):
    loop = Loop()
    loop.world_size = world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "num_steps", 2)
        found = short_loop(ProfileConfig(), loop, model="Small", wanted=None, now=0)
    assert found is not None
    assert found.batches == 2


def test_short_loops_after_fit_are_saved_with_it(tmp_path, capsys):
    model, callback = Small(), callback_in(tmp_path / "run", active=0)
    trainer = trainer_of(callback, tmp_path)
    trainer.fit(model, [0] * 8)
    fitted = callback.report
    for _ in range(3):
        trainer.predict(model, [0, 0])
    assert callback.report is fitted
    capsys.readouterr()
    PROCESS_LOOPS.end()
    assert "3 prediction loops" in capsys.readouterr().out
    run = load_run(tmp_path / "run")
    assert run.ranks[0].num_steps == 8
    [short] = run.short_loops
    assert (short.calls, short.batches) == (3, 6)
    tables = json.loads((tmp_path / "run" / "report.json").read_text())["tables"]
    [cells] = raw_rows(tables["short_loops"])
    assert (cells["calls"], cells["batches"], cells["total_ns"]) == (3, 6, short.total_ns)
    assert cells["mean_ns"] == pytest.approx(short.total_ns / 3)
    assert cells["p99_ns"] == pytest.approx(np.percentile(short.durations_ns, 99))
    assert "Short loops" in (tmp_path / "run" / "report.txt").read_text()
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith("run")) == ["run"]


def test_later_fits_print_one_line_and_share_directory(tmp_path, capsys):
    """Each fit has its own callback, as in cross-validation."""
    for _ in range(3):
        trainer_of(callback_in(tmp_path / "run", active=0), tmp_path).fit(Small(), [0] * 8)
    out = capsys.readouterr().out
    assert out.count("page: ") == 1, "the first one's report"
    lines = [
        one for one in out.splitlines() if one.startswith("lightning-modelprof: Small, 8 training steps")
    ]
    assert len(lines) == 2, "the first one has twenty lines"
    assert ". CANNOT TELL: " in lines[0]
    assert lines[0].endswith(f". Files: {tmp_path / 'run' / 'fit_2'}")
    PROCESS_LOOPS.end()
    run = load_run(tmp_path / "run")
    assert [one.folder for one in run.loops] == [
        str(tmp_path / "run"), str(tmp_path / "run" / "fit_2"), str(tmp_path / "run" / "fit_3"),
    ]  # fmt: skip
    assert [one.steps for one in run.loops] == [8, 8, 8]
    for line in run.loops:
        of_it = load_run(line.folder)
        assert of_it.info.created == line.created
    assert "Loops" in (tmp_path / "run" / "report.txt").read_text()
    assert load_run(tmp_path / "run" / "fit_2").loops == ()


def test_first_loop_with_files_owns_directory(tmp_path):
    for arguments in ({"files": False}, {}, {}):
        callback = callback_in(tmp_path / "run", active=0, terminal=False, **arguments)
        trainer_of(callback, tmp_path).fit(Small(), [0] * 8)
    PROCESS_LOOPS.end()
    assert [one.folder for one in load_run(tmp_path / "run").loops] == [
        "", str(tmp_path / "run"), str(tmp_path / "run" / "fit_2"),
    ]  # fmt: skip


def test_every_notebook_cell_has_report(tmp_path, capsys, monkeypatch):
    shell = SimpleNamespace(execution_count=1)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    for cell in (1, 1, 2):
        shell.execution_count = cell
        trainer_of(callback_in(tmp_path / "run", active=0), tmp_path).fit(Small(), [0] * 8)
    assert capsys.readouterr().out.count("page: ") == 2


def test_failed_loop_counts_as_failed(tmp_path):
    model, callback = Small(), callback_in(tmp_path / "run", terminal=False)
    model.fails = True
    with pytest.raises(ValueError, match="cannot be"):
        trainer_of(callback, tmp_path).predict(model, [0])
    PROCESS_LOOPS.end()
    [short] = load_run(tmp_path / "run").short_loops
    assert (short.calls, short.failed) == (1, 1)


def short(**changes):
    return ShortLoop(
        **{
            "kind": LOOPS["predict"], "model": "Small", "batches": 2, "begin_ns": 0, "wanted": None,
            "uses_terminal": False, **changes,
        }
    )  # fmt: skip


def test_saved_durations_are_spread_evenly_over_many_loops(tmp_path):
    """10,000 loops of 1, 2, 3, ... ns: the saved ones have the same percentile within 1%."""
    loops = ProcessLoops()
    for number in range(10_000):
        loops.add_short(short(wanted=tmp_path / "run"), number + 1, failed=False)
    loops.end()
    [one] = load_run(tmp_path / "run").short_loops
    assert (one.calls, one.batches, one.total_ns) == (10_000, 20_000, 50_005_000)
    assert MAX_KEPT / 2 - 1 <= len(one.durations_ns) <= MAX_KEPT
    assert np.percentile(one.durations_ns, 99) == pytest.approx(9_900, rel=0.01)
    assert np.mean(one.durations_ns) == pytest.approx(5_000, rel=0.01)


def test_nothing_is_written_without_files(tmp_path, capsys):
    loops = ProcessLoops()
    loops.add_short(short(uses_terminal=True), 2_000_000, failed=False)
    loops.add_short(short(uses_terminal=True, kind=LOOPS["test"]), 1_000_000, failed=False)
    loops.end()
    assert capsys.readouterr().out == (
        "lightning-modelprof: 1 prediction loop of Small took 2 ms, 1 test loop of Small took 1 ms; too short"
        " for a report.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_child_process_starts_empty(tmp_path):
    loops = ProcessLoops()
    loops.add_short(short(wanted=tmp_path / "run"), 1, failed=False)
    loops.forget()
    loops.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.logs_warnings
def test_training_continues_if_batches_cannot_be_counted(tmp_path, monkeypatch):
    """Such as a Trainer from another Lightning version or a custom one."""

    def fail(loop):
        raise AttributeError("max_batches")

    monkeypatch.setattr(TrainerLoop, "num_steps", property(fail))
    model = Small()
    trainer_of(callback_in(tmp_path / "run"), tmp_path).predict(model, [0] * 3)
    assert len(model.profilers) == 3


def test_first_loops_loggers_are_released(tmp_path):
    logger = CSVLogger(tmp_path)
    callback = callback_in(tmp_path / "run", active=0, terminal=False)
    trainer_of(callback, tmp_path, logger=logger).fit(Small(), [0] * 8)
    is_there = weakref.ref(logger)
    del logger, callback
    gc.collect()
    assert is_there() is None


def test_missing_notebook_shell_is_tolerated(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    callback = callback_in(tmp_path / "run", active=0)
    trainer_of(callback, tmp_path).fit(Small(), [0] * 8)
    assert callback.report is not None


JOBS = """
import sys
from pathlib import Path
from joblib import Parallel, delayed
from tests.support.fits import *
from tests.support.warm import spawn_from_here

def job(number):
    callback = make_callback(Path(sys.argv[1]) / str(number), terminal=True, active=0)
    trainer = make_trainer(Path(sys.argv[1]) / str(number), callback)
    trainer.fit(Net(), loader(32))
    trainer.validate(trainer.lightning_module, loader(2), verbose=False)

if __name__ == "__main__":
    if sys.argv[2] == "loky" and sys.platform == "linux":
        spawn_from_here()
    Parallel(n_jobs=2, backend=sys.argv[2])(delayed(job)(number) for number in range(2))
"""


@pytest.mark.parametrize("backend", ["loky", "multiprocessing"])
def test_job_in_worker_process_prints_one_line(tmp_path, backend):
    pytest.importorskip("joblib")
    result = run_script(JOBS, tmp_path, backend, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if "lightning-modelprof" in line]
    assert len(lines) == 2
    assert {line.rpartition("Files: ")[2] for line in lines} == {
        str(tmp_path / number / "modelprof") for number in "01"
    }
    assert "Perf Summary" not in result.stdout


def test_ray_worker_is_recognized_by_its_variable(monkeypatch):
    loop = SimpleNamespace(world_size=1, is_launched=False)
    assert not process_loops.is_worker(loop)
    monkeypatch.setenv("RAY_RAYLET_PID", "7")
    assert process_loops.is_worker(loop)
    loop.world_size = 2
    assert not process_loops.is_worker(loop), "a training of several ranks reports once"
