"""Tests that if the profiler fails, training continues with one warning and other outputs are written."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_modelprof import LoopProfiler
from lightning_modelprof.analysis.steps.benchmark import all_ranks
from lightning_modelprof.analysis.trace import trace_facts
from lightning_modelprof.engine import live_figures as live
from lightning_modelprof.engine import outputs, results, run_folder, trace_work, traces
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS
from lightning_modelprof.engine.results import Results
from lightning_modelprof.engine.session import Session
from lightning_modelprof.lightning.phases import GuardedAction, PhaseProfiler
from lightning_modelprof.measure.steps.actions import Action
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import WindowStatus
from tests.support.documents import raw_rows
from tests.support.fits import (
    Net,
    fit_quietly,
    is_profiling,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    report_of,
    run_script,
    steps_of,
    windows_of,
)

pytestmark = pytest.mark.slow


class Fault(Exception):
    """Error raised inside the package."""


def broken(error=Fault):
    def function(*args, **kwargs):
        raise error("broken by a test")

    return function


def train(folder, *callbacks, **trainer):
    """Weights after a fit with a fixed seed, and the trainer."""
    torch.manual_seed(5)
    module = Net()
    made = make_trainer(folder, *callbacks, **trainer)
    fit_quietly(made, module, loader())
    return module.state_dict(), made


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights after training without the callback."""
    return train(tmp_path_factory.mktemp("without"))[0]


@pytest.fixture
def harmless(tmp_path, weights, monkeypatch):
    """Train with the callback and check that training is unaffected; return the callback and our warnings."""

    def fit(*, trainer=None, **arguments):
        callback = make_callback(tmp_path, **({"steps": (3, 6)} | arguments))
        with our_warnings() as messages:
            found, made = train(tmp_path, callback, **(trainer or {}))
        assert made.global_step == 32
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert type(made.profiler).__name__ == "PassThroughProfiler"
        assert not is_profiling()
        monkeypatch.undo()
        PROCESS_LOOPS.forget()  # would retry the failed writes
        with our_warnings() as later:  # the next fit is unaffected
            again = make_callback(tmp_path / "again", steps=(3, 6), files=False)
            train(tmp_path / "again", again, limit_train_batches=8)
        assert later == []
        assert windows_of(again)[0].status is WindowStatus.COMPLETE
        return callback, messages

    return fit


# Internal errors: all measuring stops


@pytest.mark.parametrize(
    ("owner", "name", "num_steps"),
    [
        pytest.param(Session, "arm", None, id="arm"),
        pytest.param(results, "run_info", None, id="inside arm"),
        pytest.param(Session, "_on_boundary", 0, id="first boundary"),
        pytest.param(Capture, "begin_step", 2, id="window opens"),
        pytest.param(Capture, "_start", 3, id="window starts"),
        pytest.param(Capture, "_close", 6, id="window closes"),
        pytest.param(trace_work, "Facts", 6, id="run is analyzed"),
        pytest.param(trace_work, "build_report", 6, id="report is built"),
    ],
)
def test_internal_error_stops_only_profiler(tmp_path, monkeypatch, harmless, owner, name, num_steps):
    monkeypatch.setattr(owner, name, broken())
    callback, messages = harmless()
    assert len(messages) == 1, messages
    assert "an internal error stopped the profiler; training continues without it" in messages[0]
    assert "broken by a test" in messages[0]  # the traceback, for a bug report
    if num_steps is None:  # nothing was measured yet
        assert callback.run is None
        return
    run = load_run(tmp_path / "modelprof")
    assert run.info.status == "aborted"
    assert any("internal error" in note for note in run.ranks[0].notes)
    assert len(run.ranks[0].steps) == num_steps
    assert callback.run.info.status == "aborted"


def test_internal_error_within_window_stops_profiler(tmp_path, monkeypatch, harmless):
    """torch is recording when the error occurs."""
    begin_step = Capture.begin_step

    def fail_inside(self, step):
        if step == 5:
            assert is_profiling()
            raise Fault("broken by a test")
        return begin_step(self, step)

    monkeypatch.setattr(Capture, "begin_step", fail_inside)
    _, messages = harmless()
    assert len(messages) == 1, messages
    assert len(load_run(tmp_path / "modelprof").ranks[0].steps) == 5


def test_internal_error_at_end_keeps_all_steps(tmp_path, monkeypatch, harmless):
    monkeypatch.setattr(Results, "conclude", broken())
    callback, messages = harmless(active=0, steps=None)
    assert len(messages) == 1, messages
    assert len(callback.run.ranks[0].steps) == 32


@pytest.mark.parametrize(
    ("owner", "name"), [(Capture, "abandon"), (Results, "make_run")], ids=["stopping", "saving"]
)
def test_failing_cleanup_adds_one_warning(monkeypatch, harmless, owner, name):
    monkeypatch.setattr(traces.Traces, "add", broken())  # after the profiler has stopped
    monkeypatch.setattr(owner, name, broken())
    _, messages = harmless()
    assert len(messages) == 2, messages
    assert "couldn't clean up or save everything" in messages[1]


def test_failing_live_figures_warn_once(tmp_path, monkeypatch, harmless):
    monkeypatch.setattr(live, "averages", broken())
    _, messages = harmless(trainer={"enable_progress_bar": True})
    assert len(messages) == 1, messages


# Failing outputs: the others continue


class Failing(Logger):
    """Accepts the user's metrics and fails at ours."""

    name = "failing"
    version = 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("modelprof/") for name in metrics):
            raise Fault("broken by a test")


class Listening(Failing):
    """Stores the names of our metrics."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen += [name for name in metrics if name.startswith("modelprof/")]


def test_failing_logger_does_not_affect_others(tmp_path, harmless):
    listening = Listening()
    callback, messages = harmless(trainer={"logger": [Failing(), listening]})
    assert len(messages) == 1, messages
    assert "couldn't write to Failing: Fault: broken by a test" in messages[0]
    assert "modelprof/ips" in listening.seen
    assert callback.report is not None
    assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"


FILES = {"run.json", "report.json", "report.txt", "report.html", "traces/rank0_steps_3-5.pt.trace.json.gz"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_unwritable_file_does_not_affect_others(tmp_path, monkeypatch, harmless, name):
    save_run, write_atomically = outputs.save_run, outputs.write_atomically

    def check(path):
        if str(path).endswith(name):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "save_run", lambda run, path: (check(path), save_run(run, path)))
    monkeypatch.setattr(
        outputs, "write_atomically", lambda path, data: (check(path), write_atomically(path, data))
    )
    callback, messages = harmless()
    assert len(messages) == 1, messages  # only one, though most files are also written at the window's end
    assert "couldn't write" in messages[0]
    assert name in messages[0]
    assert "No space left on device" in messages[0]
    folder = tmp_path / "modelprof"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    claim = {run_folder.CLAIM_FILE} if name == "run.json" else set()  # until there is an archive
    raw = {name.removesuffix(".gz")} if name.endswith(".gz") else set()  # torch's uncompressed trace
    assert found == FILES - {name} | claim | raw
    assert len(steps_of(callback)) == 32
    (table,) = (table for table in callback.report.tables if table.id == "model_summary")
    assert table.rows  # the trace was still read


def test_missing_trace_is_explained(tmp_path, monkeypatch, harmless):
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: None)
    callback, messages = harmless()
    assert len(messages) == 1, messages
    assert "torch couldn't write the trace" in messages[0]
    assert len(steps_of(callback)) == 32
    (table,) = (table for table in callback.report.tables if table.id == "model_summary")
    assert "torch couldn't write the trace" in table.absent_reason


def test_full_disk_warns_once_for_all_traces(tmp_path, monkeypatch, harmless):
    """On a full disk, torch leaves an empty file for each window."""
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(f"{path}.tmp").touch()
    )
    monkeypatch.setattr(traces, "disk_usage", lambda path: SimpleNamespace(free=0))
    callback, messages = harmless(steps=None, skip_first=0, active=1, wait=2, repeat=3)
    assert messages == [messages[0]]
    assert "torch couldn't write the trace: the disk is full" in messages[0]
    assert len(callback.run.ranks[0].windows) == 3
    assert list(tmp_path.rglob("*.tmp")) == []


def test_truncated_trace_is_explained(tmp_path, monkeypatch, harmless):
    export = torch.profiler.profile.export_chrome_trace

    def cut(self, path):
        export(self, path)
        with open(path, "r+b") as file:  # noqa: PTH123
            file.truncate(500)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    callback, messages = harmless()
    assert messages == []
    (table,) = (table for table in callback.report.tables if table.id == "model_summary")
    assert table.rows == ()
    assert "cut off" in table.absent_reason
    assert len(steps_of(callback)) == 32


def test_blocked_traces_directory_is_reported(tmp_path, harmless):
    (tmp_path / "modelprof").mkdir()
    (tmp_path / "modelprof" / "traces").write_text("a file is in the way")
    callback, messages = harmless()
    assert len(messages) == 1, messages
    assert "couldn't write" in messages[0]
    assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"
    (table,) = (table for table in callback.report.tables if table.id == "model_summary")
    assert table.rows


def test_failing_terminal_does_not_affect_files(tmp_path, monkeypatch, harmless):
    monkeypatch.setattr(outputs, "print_report", broken(BrokenPipeError))
    _, messages = harmless(terminal=True)
    assert len(messages) == 1, messages
    assert "couldn't write to terminal: BrokenPipeError" in messages[0]
    assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"


def test_missing_page_is_not_mentioned(capsys, monkeypatch, harmless):
    monkeypatch.setattr(outputs, "render_html", broken())
    _, messages = harmless(terminal=True)
    assert len(messages) == 1, messages
    shown = capsys.readouterr().out
    assert "all tables: lightning-modelprof report" in shown
    assert "page:" not in shown


@pytest.mark.parametrize("name", ["write_report", "write_layout"])
def test_failing_tensorboard_does_not_affect_others(tmp_path, capsys, monkeypatch, harmless, name):
    monkeypatch.setattr(outputs, name, broken())
    _, messages = harmless(terminal=True, trainer={"logger": TensorBoardLogger(tmp_path)})
    assert len(messages) == 1, messages
    assert "couldn't write to TensorBoard: Fault" in messages[0]
    assert " training steps (" in capsys.readouterr().out
    assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"


def test_failing_summary_writer_does_not_affect_others(tmp_path, capsys, monkeypatch, harmless):
    class TensorBoardLogger(Listening):
        is_broken = False

        @property
        def experiment(self):
            if self.is_broken:
                raise Fault("broken by a test")
            return None

        def log_metrics(self, metrics, step=None):
            self.is_broken = True  # only now, as Lightning uses the writer in setup
            super().log_metrics(metrics, step)

    logger = TensorBoardLogger()
    _, messages = harmless(terminal=True, trainer={"logger": logger})
    assert len(messages) == 1, messages
    assert "couldn't write to TensorBoard: Fault" in messages[0]
    assert " training steps (" in capsys.readouterr().out
    assert "modelprof/ips" in logger.seen


# User functions


@pytest.mark.parametrize(
    ("samples_fn", "problem"),
    [
        pytest.param(broken(), "samples_fn raised Fault: broken by a test", id="raises"),
        pytest.param(lambda batch: 2.5, "samples_fn raised TypeError", id="float"),
        pytest.param(lambda batch: None, "samples_fn raised TypeError", id="None"),
        pytest.param(lambda batch: "2", "samples_fn raised TypeError", id="text"),
    ],
)
def test_failing_samples_fn_drops_only_samples(tmp_path, harmless, samples_fn, problem):
    callback, messages = harmless(samples_fn=samples_fn, unit="tokens")
    assert len(messages) == 1, messages
    assert problem in messages[0]
    assert "The report won't have tokens/s" in messages[0]
    assert (steps_of(callback).samples == -1).all()
    assert report_of(tmp_path)["summary"]["benchmark"]["samples_per_s"] is None
    assert report_of(tmp_path)["summary"]["benchmark"]["steps_per_s"]["avg"] > 0
    assert windows_of(callback)[0].status is WindowStatus.COMPLETE


def test_samples_fn_is_called_again_in_next_fit(tmp_path):
    is_broken = True

    def count(batch):
        if is_broken:
            raise Fault("broken by a test")
        return 7

    callback = make_callback(tmp_path, active=0, samples_fn=count)
    with our_warnings() as messages:
        train(tmp_path, callback)
    assert len(messages) == 1
    is_broken = False
    train(tmp_path, callback)
    assert (steps_of(callback).samples == 7).all()


def test_good_fit_uses_broken_parts(tmp_path):
    """A good fit calls the functions broken above."""
    assert trace_work.TraceFacts is trace_facts.TraceFacts
    assert {path.name for path in tmp_path.iterdir()} == set()
    callback = make_callback(tmp_path, steps=(3, 6))
    train(tmp_path, callback)
    found = {str(path.relative_to(tmp_path / "modelprof")) for path in (tmp_path / "modelprof").rglob("*.*")}
    assert found == FILES


# Multiple processes

DDP = """
import json
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from lightning_modelprof.engine.session import Session
from lightning_modelprof.measure.steps.actions import Action
from tests.support.fits import *

class BreaksRankOne(Callback):
    # What is broken on one rank must not make the others wait.
    def on_train_start(self, trainer, module):
        if trainer.global_rank == 1:
            Session._on_boundary = lambda self: 1 / 0

def fit(folder, *others):
    torch.manual_seed(1)
    callback = make_callback(Path(folder), steps=(3, 6))
    trainer = make_trainer(
        Path(folder), callback, *others, strategy="ddp_fork", devices=2, enable_progress_bar=False
    )
    fit_quietly(trainer, Net(), loader())

if __name__ == "__main__":
    torch.set_num_threads(1)
    fit("whole")
    fit("broken", BreaksRankOne())
    print("both ended")
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    result = run_script(DDP, cwd=folder, timeout=100)
    assert result.returncode == 0, result.stderr[-5000:]
    assert "both ended" in result.stdout
    return folder, result.stderr


def test_every_rank_writes_its_files(ddp):
    folder, _ = ddp
    found = {
        str(path.relative_to(folder / "whole" / "modelprof")) for path in (folder / "whole").rglob("*.*")
    }
    assert found == FILES | {"run_rank1.json", "traces/rank1_steps_3-5.pt.trace.json.gz"}
    for rank, name in enumerate(("run.json", "run_rank1.json")):
        run = load_run(folder / "whole" / "modelprof" / name)
        assert run.info.world_size == 2
        assert run.info.status == "finished"
        assert [record.rank for record in run.ranks] == [rank]
        assert len(run.ranks[0].steps) == 16


def test_all_ranks_table_combines_ranks(ddp):
    folder, _ = ddp
    files = [folder / "whole" / "modelprof" / name for name in ("run.json", "run_rank1.json")]
    clean = [load_run(file).ranks[0].steps.clean() for file in files]
    figures = all_ranks(load_run(files[0]).rank_steps)  # includes the other rank's figures
    assert figures.num_steps == sum(len(steps) for steps in clean)
    assert figures.batch_total_ns == sum(int(steps.duration_ns.sum()) for steps in clean)
    assert figures.batch_max_ns == max(int(steps.duration_ns.max()) for steps in clean)
    assert figures.batch_min_ns == min(int(steps.duration_ns.min()) for steps in clean)
    assert figures.samples == 2 * figures.num_steps
    report = json.loads((folder / "whole" / "modelprof" / "report.json").read_text())
    table = report["tables"]["all_ranks"]
    assert table["title"] == "All 2 ranks"
    rows = {row["figure"]: row["value"] for row in raw_rows(table)}
    assert rows["batch_cost avg"] == figures.batch_total_ns / figures.num_steps
    assert rows["samples/s of all ranks"] == pytest.approx(2e9 * figures.samples / figures.batch_total_ns)
    assert "All 2 ranks" in (folder / "whole" / "modelprof" / "report.txt").read_text()


def test_failed_rank_does_not_block_others(ddp):
    folder, errors = ddp
    assert errors.count("an internal error stopped the profiler") == 1
    whole = load_run(folder / "broken" / "modelprof" / "run.json")
    assert whole.info.status == "finished"
    [absent] = whole.absent_ranks
    assert (absent.rank, absent.reason) == (1, "an internal error stopped the profiler there")
    assert len(whole.ranks[0].steps) == 16
    assert load_run(folder / "broken" / "modelprof" / "run_rank1.json").info.status == "aborted"


class Raising(Callback):
    """Fails in on_exception, after which Lightning calls no other callback's hook."""

    def on_exception(self, trainer, pl_module, exception):
        raise ValueError("of another callback")


@pytest.mark.parametrize(
    ("batch", "error", "status"),
    [(6, RuntimeError, "failed"), (12, RuntimeError, "failed"), (21, KeyboardInterrupt, "interrupted")],
    ids=["in the counted step", "later", "in a window"],
)
def test_callback_failing_in_on_exception_leaves_nothing_running(tmp_path, batch, error, status):
    class Failing(Net):
        def training_step(self, batch_of_rows, batch_idx):
            if batch_idx == batch:
                raise error("of the user")
            return super().training_step(batch_of_rows, batch_idx)

    module = Failing()
    callback = make_callback(tmp_path, steps=(18, 30), flops=True, sampling=True)
    trainer = make_trainer(tmp_path, Raising(), callback)
    with pytest.raises(ValueError, match="of another callback"):
        fit_quietly(trainer, module, loader(120))
    assert _get_current_dispatch_mode_stack() == []
    assert not [one for one in threading.enumerate() if one.name == "modelprof-sampler"]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())
    assert not is_profiling()
    assert not isinstance(trainer.profiler, PhaseProfiler)
    run = load_run(tmp_path / "modelprof")
    assert (run.info.status, len(run.ranks[0].steps)) == (status, batch)
    assert [window.recorded_steps for window in run.ranks[0].windows] == [(18, 19, 20) if batch == 21 else ()]


# Errors of the program that occur while our code runs


@pytest.fixture
def child_ends():
    """Signals that a child has ended. The handler raises once, like torch's when a worker was killed."""
    killed = []

    def handler(number, frame):
        if killed:  # ignores other children
            raise RuntimeError(killed.pop())

    def end():
        killed.append("worker is killed")
        os.kill(os.getpid(), signal.SIGCHLD)
        for _ in range(10):  # the handler runs between two lines
            pass

    before = signal.signal(signal.SIGCHLD, handler)
    yield end
    assert signal.signal(signal.SIGCHLD, before) is handler


@pytest.fixture
def child_ends_at_stop(child_ends, monkeypatch):
    stop = Session.stop

    def stop_meanwhile(self, status):
        child_ends()
        stop(self, status)

    monkeypatch.setattr(Session, "stop", stop_meanwhile)


class BreaksOff(Callback):
    def on_train_batch_end(self, trainer, *others):
        if trainer.global_step == 3:
            raise ConnectionResetError("by a worker")


def test_report_survives_killed_worker(tmp_path, child_ends_at_stop):
    callback = make_callback(tmp_path, active=0)
    with our_warnings() as messages, pytest.raises(ConnectionResetError):
        train(tmp_path, callback, BreaksOff())
    assert messages == []
    assert (callback.run.info.status, callback.report is None) == ("failed", False)
    profiler = LoopProfiler(active=0, report={"files": False, "terminal": False})
    with our_warnings() as messages, pytest.raises(ConnectionResetError), profiler:  # noqa: PT012
        for _ in profiler.fetch(range(3)):
            pass
        raise ConnectionResetError
    assert messages == []
    assert profiler.report is not None


def test_worker_error_is_raised_after_report(tmp_path, child_ends_at_stop):
    callback = make_callback(tmp_path, active=0)
    with our_warnings() as messages, pytest.raises(RuntimeError, match="worker is killed"):
        train(tmp_path, callback)
    assert messages == []
    assert (callback.run.info.status, callback.report is None) == ("finished", False)


def test_worker_error_in_our_hook_reaches_program(tmp_path, child_ends):
    class Ends(Action):
        def __enter__(self):
            child_ends()

        def __exit__(self, *error):
            self.__enter__()

    action = GuardedAction(None, Ends())
    works = (
        make_callback(tmp_path)._guard,
        LoopProfiler(active=0)._guard,
        lambda work: action.__enter__(),
        lambda work: action.__exit__(),
    )
    for guard in works:
        with our_warnings() as messages, pytest.raises(RuntimeError, match="worker is killed"):
            guard(Ends().__enter__)
        assert messages == []
