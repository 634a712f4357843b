"""Tests that signals, kills, full disks, dead workers and forks affect training as they would without us.

Each event happens with and without the callback, and both trainings must have the same outcome. All
measurements until then must be readable.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, _utils

from lightning_modelprof import ConfigError
from lightning_modelprof.engine import plan as save_timer
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import WindowStatus
from tests.lightning.test_bit_identity import assert_same
from tests.lightning.test_fault_matrix import (
    EVERYTHING,
    NUM_STEPS,
    Noisy,
    Outcome,
    nothing_stays,
    state_of,
    train,
)
from tests.support.fits import (
    Net,
    Numbers,
    fit_quietly,
    is_profiling,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    run_script,
    steps_of,
    windows_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of POSIX"),
]

# Signals and kills, each in a separate process forked from one that has imported torch

SCRIPT = """
import hashlib, json, os, random, signal, sys, time, traceback, warnings
from pathlib import Path
import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
import lightning_modelprof.engine.plan as save_timer
from lightning_modelprof.engine.session import Session
from tests.support.fits import *

save_timer._MIN_INTERVAL_NS = save_timer._INTERVAL_FACTOR = 0  # save at every step

class Journal(Callback):
    # Writes down what the training is after every batch, and how it ended.
    def __init__(self, path):
        self.path = path

    def write(self, *words):
        with open(self.path, "a") as file:
            print(*words, file=file)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        digest = hashlib.sha256()
        for tensor in [*module.state_dict().values(), torch.get_rng_state(), outputs["loss"]]:
            digest.update(tensor.detach().numpy().tobytes())
        for state in trainer.optimizers[0].state_dict()["state"].values():
            digest.update(state["momentum_buffer"].numpy().tobytes())
        digest.update(repr((random.getstate(), np.random.get_state())).encode())
        self.write(trainer.global_rank, batch_idx, digest.hexdigest()[:16])

class Task(Net):
    def training_step(self, batch, batch_idx):
        self.at_batch(self, batch_idx)
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss * (1 + random.random() + np.random.rand())

def send(name):
    def at_batch(module, batch_idx):
        if batch_idx == 7 and module.global_rank == module.trainer.world_size - 1:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.2 if name == "SIGTERM" else 5)  # the handler of SIGTERM returns
    return at_batch

def fork(child):
    def at_batch(module, batch_idx):
        if batch_idx == 7:
            module.trainer.callbacks[-1].before = saved(module)
            pid = os.fork()
            if pid == 0:
                child()
                return  # and goes on training
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                time.sleep(0.01)
            journal = module.trainer.callbacks[-1]
            journal.write("the child ended with", os.waitstatus_to_exitcode(status))
            is_same = saved(module) == journal.before
            journal.write("its parent's files are", "as they were" if is_same else "changed")
    return at_batch

def saved(module):
    # Names and contents of all files of ours.
    folder = Path(module.trainer.default_root_dir) / "modelprof"
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

def fail():
    raise ZeroDivisionError("of the child")

def nothing(module, batch_idx):
    pass

def breaks_setup(rank):
    def change():
        make = Session.__init__
        def broken(self, config, loop, *args, **kwargs):
            if loop.rank == rank:
                raise ValueError("broken by a test")
            make(self, config, loop, *args, **kwargs)
        Session.__init__ = broken
    return change

TWO = {"strategy": "ddp_fork", "devices": 2}
CASES = {
    "SIGINT": (send("SIGINT"), {}, None),
    "SIGTERM": (send("SIGTERM"), {}, None),
    "SIGKILL": (send("SIGKILL"), {}, None),
    "a child exits": (fork(lambda: os._exit(5)), {}, None),
    "a child raises": (fork(fail), {}, None),
    # Python gives its child's random numbers a seed that is never the same.
    "a child goes on": (fork(lambda: random.seed(3)), {}, None),
    "SIGKILL of one rank": (send("SIGKILL"), TWO, None),
    "setup fails on rank 0": (nothing, TWO, breaks_setup(0)),
    "setup fails on rank 1": (nothing, TWO, breaks_setup(1)),
}

def run(folder, at_batch, arguments, change, is_measured):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
    folder.mkdir(parents=True)
    journal, this = Journal(folder / "journal"), os.getpid()
    ours = [make_callback(folder, steps=(4, 9), flops=True, sampling=True)] if is_measured else []
    if is_measured and change is not None:
        change()
    try:
        seed_everything(3, verbose=False)
        trainer = make_trainer(folder, *ours, journal, **arguments)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Task(at_batch), loader(20 * trainer.world_size))
        end = "returned"
    except BaseException as error:
        end = f"{type(error).__name__} {error.args[:1] if isinstance(error, SystemExit) else ''}"
    if os.getpid() == this:
        journal.write("the end:", end)
        os._exit(0)
    os._exit(6)  # a child of the training's own

if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        running = {}
        for is_measured in (False, True):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                log = os.open(f"log {number} {is_measured}", os.O_CREAT | os.O_WRONLY)
                os.dup2(log, 1), os.dup2(log, 2)
                run(Path(name) / str(is_measured), *case, is_measured)
            running[pid] = is_measured
        limit = time.monotonic() + 40
        while running:
            for pid, is_measured in tuple(running.items()):
                done, code = os.waitpid(pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
                if not done and time.monotonic() > limit:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    status = "it hung"
                if status is not None:
                    del running[pid]
                    os.rename(f"log {number} {is_measured}", Path(name) / f"log {is_measured}")
                    print(json.dumps([name, is_measured, status]), flush=True)
            time.sleep(0.005)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: Any) -> tuple[Path, dict[tuple[str, bool], Any]]:
    """Directory of all cases, and their exit statuses."""
    folder = tmp_path_factory.mktemp("ends")
    result = run_script(SCRIPT, cwd=folder, timeout=300)
    assert result.returncode == 0, result.stderr[-5000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    return folder, {(name, is_measured): status for name, is_measured, status in lines}


@pytest.mark.parametrize(
    ("case", "status", "num_steps", "num_recorded"),
    [
        ("SIGINT", "interrupted", 7, 3),
        ("SIGTERM", "interrupted", 7, 3),
        ("SIGKILL", "running", 7, None),
        ("a child exits", "finished", 10, 5),
        ("a child raises", "finished", 10, 5),
        ("a child goes on", "finished", 10, 5),
    ],
)
def test_process_end_or_fork_is_as_without_callback(
    ends: Any, case: str, status: str, num_steps: int, num_recorded: Any
) -> None:
    folder, statuses = ends
    assert statuses[case, False] == statuses[case, True] != "it hung"
    without, measured = ((folder / case / str(one) / "journal").read_text() for one in (False, True))
    assert without == measured
    assert without.count("\n") >= 7
    assert "its parent's files are changed" not in measured
    run = load_run(folder / case / "True" / "modelprof")
    assert (run.info.status, len(run.ranks[0].steps)) == (status, num_steps)
    if num_recorded is not None:
        (window,) = run.ranks[0].windows
        assert len(window.recorded_steps) == num_recorded
    assert "ModelProfCallback" not in (folder / case / "log True").read_text()


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("SIGKILL of one rank", [("running", 7), ("running", 7)]),
        ("setup fails on rank 0", [None, ("finished", 10)]),
        ("setup fails on rank 1", [("finished", 10), None]),
    ],
)
def test_end_or_failed_setup_of_one_rank_is_as_without_callback(
    ends: Any, case: str, found: list[Any]
) -> None:
    folder, statuses = ends
    assert statuses[case, False] == statuses[case, True] == 0
    without, measured = (
        sorted((folder / case / str(one) / "journal").read_text().splitlines()) for one in (False, True)
    )
    assert without == measured
    assert len(without) > 14
    for expected, name in zip(found, ("run.json", "run_rank1.json"), strict=True):
        path = folder / case / "True" / "modelprof" / name
        if expected is None:
            assert not path.exists() or not path.read_bytes()
        else:
            run = load_run(path)
            assert (run.info.status, len(run.ranks[0].steps)) == expected


# In this process: faults in the training's environment


@pytest.fixture(scope="module")
def without(tmp_path_factory: Any) -> Outcome:
    """Undisturbed training without the callback."""
    return train(tmp_path_factory.mktemp("without"))


def measured(
    tmp_path: Path, expected: Outcome, arguments: dict[str, Any] | None = None, **fit: Any
) -> tuple[Any, list[str]]:
    """Train with the callback and check the outcome; return the callback and our warnings.

    Args:
        tmp_path: for files.
        expected: outcome of training without the callback.
        arguments: arguments of the callback.
        fit: arguments of ``train``.
    """
    callback = make_callback(tmp_path, **(EVERYTHING | {"terminal": False} | (arguments or {})))
    with our_warnings() as messages:
        found = train(tmp_path / "with", callback, **fit)
    assert type(found.error) is type(expected.error)
    assert_same(expected.states, found.states)
    assert_same(expected.scalars, found.scalars)
    return callback, messages


class Unlucky(Numbers):
    """Its worker dies or raises at the 15th item."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def __getitem__(self, index: int) -> Any:
        if index == 14:
            if self.dies:
                os._exit(1)
            raise ZeroDivisionError("of the user's data")
        return super().__getitem__(index)


@pytest.mark.parametrize("dies", [True, False])
def test_dying_worker_ends_fit_as_without_callback(tmp_path: Path, monkeypatch: Any, dies: bool) -> None:
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # torch's wait for its worker to exit

    def fit(*callbacks: Any) -> Outcome:
        data = DataLoader(Unlucky(dies), batch_size=2, num_workers=1, multiprocessing_context="fork")
        return train(tmp_path, *callbacks, data=data)

    callback = make_callback(tmp_path, **EVERYTHING)
    expected = fit()
    with our_warnings() as messages:
        found = fit(callback)
    # The pipe of a dead worker may break before torch sees that it died.
    for outcome in (expected, found):
        expected_errors = RuntimeError | OSError | EOFError if dies else ZeroDivisionError
        assert isinstance(outcome.error, expected_errors), repr(outcome.error)
    # Batches that were ready when the worker died may or may not arrive, so compare the common ones.
    assert dies or len(expected.states) == len(found.states) == 8
    come = min(len(expected.states), len(found.states)) - 1
    assert come
    assert_same(expected.states[:come], found.states[:come])
    assert messages == []
    run = load_run(tmp_path / "modelprof")
    assert run.info.status == "failed"
    assert len(run.ranks[0].steps) == len(steps_of(callback)) == len(found.states) - 1
    del expected, found, outcome
    gc.collect()  # end the workers now


class Huge(Noisy):
    """Requests more memory than available."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 6:
            torch.empty(2**60, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def test_out_of_memory_is_recorded(tmp_path: Path) -> None:
    expected = train(tmp_path, make_module=Huge)
    assert type(expected.error) is RuntimeError
    callback, messages = measured(tmp_path, expected, make_module=Huge)
    assert messages == []
    run = load_run(tmp_path / "modelprof")
    assert (run.info.status, len(run.ranks[0].steps)) == ("failed", 6)
    assert run.ranks[0].memory.out_of_memory is not None
    assert windows_of(callback)[0].recorded_steps == (5,)


class Acting(Noisy):
    """Calls ``act`` at the start of a batch."""

    def __init__(self, act: Any, at: int = 4) -> None:
        super().__init__()
        self.act, self.at = act, at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            self.act()
        return super().training_step(batch, batch_idx)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can make a file system of 1 MB")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_does_not_affect_training(
    tmp_path: Path, without: Outcome, small_disk: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(save_timer, "_MIN_INTERVAL_NS", 0)
    monkeypatch.setattr(save_timer, "_INTERVAL_FACTOR", 0)

    def fill() -> None:
        with (small_disk / "filler").open("wb", buffering=0) as file:
            while shutil.disk_usage(small_disk).free:
                file.write(bytes(4096))

    arguments = {"dirpath": small_disk / "runs"}
    callback, messages = measured(tmp_path, without, arguments, make_module=lambda: Acting(fill))
    # torch writes traces itself and doesn't report a full disk, so the missing trace has its own warning.
    assert len(messages) == 2, messages
    assert "No space left on device" in messages[0]
    assert "torch couldn't write the trace" in messages[1]
    run = load_run(small_disk / "runs")  # the last save before the disk was full
    assert (run.info.status, len(run.ranks[0].steps)) == ("running", 4)
    assert callback.run.info.status == "finished"
    assert len(steps_of(callback)) == NUM_STEPS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_unwritable_file_does_not_affect_training(tmp_path: Path, without: Outcome, monkeypatch: Any) -> None:
    open_file = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_ours = path.parent == tmp_path / "modelprof" and "b" in mode and "x" in mode
        return open_file(Path("/dev/full") if is_ours else path, mode.replace("x", "w") if is_ours else mode)

    monkeypatch.setattr(Path, "open", opened)
    callback, messages = measured(tmp_path, without)
    assert len(messages) == 1, messages
    assert "No space left on device" in messages[0]
    assert len(steps_of(callback)) == NUM_STEPS
    left = [path.name for path in (tmp_path / "modelprof").iterdir()]
    assert sorted(left) == [".run.json.claimed", "traces"]  # the trace has a separate directory


@pytest.mark.parametrize("at", [2, 6], ids=["before the window", "in the window"])
@pytest.mark.parametrize("in_the_way", [False, True], ids=["deleted", "a file"])
def test_vanished_directory_does_not_affect_training(
    tmp_path: Path, without: Outcome, at: int, in_the_way: bool
) -> None:
    folder = tmp_path / "modelprof"

    def go() -> None:
        shutil.rmtree(folder)
        if in_the_way:
            folder.write_text("of the user")

    callback, messages = measured(tmp_path, without, make_module=lambda: Acting(go, at))
    assert len(steps_of(callback)) == NUM_STEPS
    if in_the_way:
        assert len(messages) == 1, messages
        assert folder.read_text() == "of the user"
    else:
        assert messages == []
        assert load_run(folder).info.status == "finished"
    assert windows_of(callback)[0].status is WindowStatus.COMPLETE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prepare_trace", RuntimeError),
        ("start_trace", RuntimeError),
        ("start_trace", OSError),
        ("stop_trace", RuntimeError),
        ("export_chrome_trace", RuntimeError),
        ("export_chrome_trace", OSError),
    ],
)
def test_failing_torch_profiler_does_not_affect_training(
    tmp_path: Path, without: Outcome, monkeypatch: Any, name: str, kind: type[Exception]
) -> None:
    whole = getattr(torch.profiler.profile, name)

    def failing(self: Any, *args: Any) -> Any:
        if name == "stop_trace":
            whole(self, *args)  # otherwise nothing could stop the recording
        raise kind("broken by a test")

    monkeypatch.setattr(torch.profiler.profile, name, failing)
    callback, messages = measured(tmp_path, without)
    assert len(messages) == 1, messages
    # An error type of torch, or no space for the trace, only drops the window.
    is_expected = kind is RuntimeError or name == "export_chrome_trace"
    assert load_run(tmp_path / "modelprof").info.status == ("finished" if is_expected else "aborted")
    assert len(steps_of(callback)) >= 5
    monkeypatch.undo()
    train(tmp_path, again := make_callback(tmp_path / "again", steps=(1, 3)))
    assert windows_of(again)[0].status is WindowStatus.COMPLETE


DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize(
    ("jump_ns", "at"),
    [(DAY_NS, 3), (-DAY_NS, 60), (DAY_NS, 130), (2**62, 60), (-(2**62), 130)],
    ids=["day before the loop", "back", "day", "far", "far back"],
)
def test_jumping_clock_does_not_affect_training(
    tmp_path: Path, without: Outcome, jump_ns: int, at: int
) -> None:
    # Without samples and module times, which also read the clock, it jumps between phases of a step.
    callback, reading = make_callback(tmp_path, **(EVERYTHING | {"sampling": False, "flops": False})), count()
    callback._clock = lambda: host_clock() + (jump_ns if next(reading) >= at else 0)
    with our_warnings() as messages:
        found = train(tmp_path / "with", callback)
    assert next(reading) > 130
    assert_same(without.states, found.states)
    assert len(messages) <= 1, messages  # 2**62 doesn't fit a dashboard column
    run = load_run(tmp_path / "modelprof")
    assert run.info.status == "finished"
    assert len(run.ranks[0].steps) == NUM_STEPS


class Stubborn(Logger):
    """Raises in one of its methods."""

    name = "stubborn"
    version = 0

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.seen: list[Any] = []

    def _do(self, method: str) -> None:
        if method == self.method:
            raise ZeroDivisionError("of the user's logger")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if not any(name.startswith("modelprof/") for name in metrics):
            self.seen.append((step, {name: float(value) for name, value in metrics.items()}))
        self._do("log_metrics")

    def save(self) -> None:
        self._do("save")

    def finalize(self, status: str) -> None:
        self.seen.append(status)
        self._do("finalize")


@pytest.mark.parametrize("method", ["log_metrics", "save", "finalize"])
def test_raising_logger_ends_fit_as_without_callback(tmp_path: Path, method: str) -> None:
    seen = []
    for is_measured in (False, True):
        seed_everything(11, verbose=False)
        module, logger = Noisy(), Stubborn(method)
        ours = [make_callback(tmp_path, **EVERYTHING)] if is_measured else []
        trainer = make_trainer(tmp_path, *ours, logger=logger, log_every_n_steps=3)
        with pytest.raises(ZeroDivisionError, match="of the user's logger"):
            fit_quietly(trainer, module, loader(2 * NUM_STEPS))
        seen.append((logger.seen, state_of(trainer, module)))
        nothing_stays()
    assert_same(*seen)
    if method == "save":  # Lightning does this first, before anything is measured
        assert not (tmp_path / "modelprof").exists()
    else:
        load_run(tmp_path / "modelprof")


def test_first_of_two_equal_callbacks_measures(tmp_path: Path) -> None:
    """Lightning creates them if an entry point adds to a reused list of callbacks."""
    states, ours = [], [make_callback(tmp_path, **EVERYTHING) for _ in range(2)]
    for callbacks in ([], ours):
        seed_everything(11, verbose=False)
        module = Noisy()
        trainer = make_trainer(tmp_path, *callbacks)
        with our_warnings() as messages:
            fit_quietly(trainer, module, loader(2 * NUM_STEPS))
        assert len(messages) == (1 if callbacks else 0)
        assert all("the Trainer has 2 ModelProfCallbacks and uses only one" in one for one in messages)
        states.append(state_of(trainer, module))
        nothing_stays()
    assert_same(*states)
    assert ours[0].report is ours[1].report is not None
    assert ours[0].run is ours[1].run is not None
    assert load_run(tmp_path / "modelprof").info.status == "finished"


def test_two_callbacks_are_rejected_before_any_change(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_callback(tmp_path), make_callback(tmp_path / "other"))
    profiler = trainer.profiler
    module = Noisy()
    weights = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match="expected one"):
        fit_quietly(trainer, module, loader())
    assert trainer.profiler is profiler
    assert_same(weights, module.state_dict())
    nothing_stays()


class Inside(Callback):
    """Trains another model in the middle of training."""

    def __init__(self, folder: Path, *callbacks: Any) -> None:
        self.folder, self.callbacks = folder, callbacks
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            inner, other = make_trainer(self.folder, *self.callbacks), Noisy()
            fit_quietly(inner, other, loader(12))
            self.states.append(state_of(inner, other))


@pytest.mark.parametrize("which", ["none", "another", "the same"])
def test_fit_inside_fit_is_as_without_callback(tmp_path: Path, which: str) -> None:
    """With the same callback, each fit has its own run, and the callback ends up with the outer one."""
    states = []
    for is_measured in (False, True):
        seed_everything(11, verbose=False)
        folder = tmp_path / str(is_measured)
        ours = [make_callback(folder, **EVERYTHING)] if is_measured else []
        inner = {"none": [], "another": [make_callback(folder / "inner", active=0)], "the same": ours}[which]
        module, inside = Noisy(), Inside(folder, *(inner if is_measured else []))
        trainer = make_trainer(folder, *ours, inside)
        profiler = trainer.profiler
        with our_warnings() as messages:
            fit_quietly(trainer, module, loader(2 * NUM_STEPS))
        assert messages == []
        assert trainer.profiler is profiler
        states.append((state_of(trainer, module), inside.states))
        nothing_stays()
    assert_same(*states)
    run = load_run(folder / "modelprof")
    assert (run.info.status, len(run.ranks[0].steps)) == ("finished", NUM_STEPS)
    if which == "the same":
        assert ours[0].run.info == run.info
        inner = load_run(folder / "modelprof" / "fit_2")
        assert (inner.info.status, len(inner.ranks[0].steps)) == ("finished", 6)


def test_fit_can_be_called_again_after_exception(tmp_path: Path) -> None:
    states = []
    for is_measured in (False, True):
        seed_everything(11, verbose=False)
        folder = tmp_path / str(is_measured)
        module = Noisy(ValueError)
        trainer = make_trainer(folder, *([make_callback(folder, **EVERYTHING)] if is_measured else []))
        with pytest.raises(ValueError, match="of the user"):
            fit_quietly(trainer, module, loader(2 * NUM_STEPS))
        first = state_of(trainer, module)
        nothing_stays()
        module.raises = None
        fit_quietly(trainer, module, loader(2 * NUM_STEPS))
        states.append((first, state_of(trainer, module)))
        nothing_stays()
    assert_same(*states)
    runs = [load_run(folder / name) for name in ("modelprof", "modelprof/fit_2")]
    assert [run.info.status for run in runs] == ["failed", "finished"]


class Copies(Callback):
    """Copies and pickles the trainer during training."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def copy(self, trainer: Any) -> None:
        for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            self.kinds.add(type(copied.profiler).__name__)
            self.kinds |= set(copied.progress_bar_callback.get_metrics(copied, copied.lightning_module))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.copy(trainer)


def test_trainer_can_be_copied_and_pickled(tmp_path: Path) -> None:
    found = []
    for is_measured in (False, True):
        seed_everything(11, verbose=False)
        module, copies = Net(), Copies()
        ours = [make_callback(tmp_path, **EVERYTHING)] if is_measured else []
        bar = TQDMProgressBar(refresh_rate=0)
        trainer = make_trainer(
            tmp_path, *ours, copies, bar, enable_progress_bar=True, log_every_n_steps=2, max_steps=8
        )
        with our_warnings() as messages:
            fit_quietly(trainer, module, loader(2 * NUM_STEPS))
        assert messages == []
        found.append((sorted(copies.kinds), state_of(trainer, module)))
    assert_same(*found)
    assert not is_profiling()


def test_save_interval_is_at_most_one_hour() -> None:
    """So a machine that sleeps during a save soon saves again."""
    assert save_timer.save_interval_ns(DAY_NS) == 3_600 * 10**9
    assert save_timer.save_interval_ns(10**9) == 200 * 10**9
