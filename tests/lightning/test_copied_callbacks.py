"""Tests callbacks that are copied or miss the fit's end, dying workers, and odd formulas and batches."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, get_worker_info

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.run.archive import load_run
from tests.support.fits import (
    REPORT_FILES,
    Net,
    Numbers,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    run_script,
)

pytestmark = pytest.mark.slow


class Copying(Callback):
    """Copies another callback after batch 6."""

    def __init__(self, copied: Any, make: Any) -> None:
        self.copied, self.make, self.made = copied, make, None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            self.made = self.make(self.copied)


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda one: pickle.loads(ForkingPickler.dumps(one))]
)
def test_copy_is_fresh_and_measures_another_fit(tmp_path: Path, make: Any) -> None:
    callback = make_callback(tmp_path, steps=(4, 9))
    copying = Copying(callback, make)
    fit_quietly(make_trainer(tmp_path, callback, copying), Net(), loader(24))
    made: Any = copying.made
    assert not {"log", "log_dict"} & set(vars(made))  # these refer to the module and its trainer
    assert (made.report, made.run) == (None, None)
    fit_quietly(make_trainer(tmp_path, made), Net(), loader(20))
    assert (len(callback.run.ranks[0].steps), len(made.run.ranks[0].steps)) == (12, 10)
    runs = [load_run(tmp_path / name) for name in ("modelprof", "modelprof/fit_2")]
    assert [len(run.ranks[0].steps) for run in runs] == [12, 10]


class Raising(Callback):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        raise self.error("of another callback")


class Watching(Callback):
    """Reads the saved run in on_exception."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, []

    @property
    def state_key(self) -> str:
        return f"Watching{id(self)}"

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        run = load_run(self.folder)
        self.seen.append((type(exception), run.info.status, len(run.ranks[0].steps)))


def fail_at_6(batch_idx: int) -> None:
    if batch_idx == 6:
        raise ZeroDivisionError


def check_kept(folder: Path, callback: Any) -> None:
    """Check that six steps and the report are in the callback and on the disk."""
    for run in (callback.run, load_run(folder / "modelprof")):
        assert (run.info.status, len(run.ranks[0].steps)) == ("failed", 6)
    assert all((folder / "modelprof" / name).stat().st_size for name in REPORT_FILES)
    assert callback.report is not None
    assert "failed" in callback.report.title
    assert callback.report.title in (folder / "modelprof" / "report.txt").read_text()


@pytest.mark.parametrize(
    "order", ["raise ours", "ours raise", "watch raise ours watch", "raise raise watch ours"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError, SystemExit])
def test_results_survive_error_in_another_callback(
    tmp_path: Path, capsys: Any, error: Any, order: str
) -> None:
    callback = make_callback(tmp_path, steps=(4, 9), terminal=True)
    make = {
        "ours": lambda: callback,
        "raise": lambda: Raising(error),
        "watch": lambda: Watching(tmp_path / "modelprof"),
    }
    callbacks = [make[kind]() for kind in order.split()]
    trainer = make_trainer(tmp_path, *callbacks)
    profiler = trainer.profiler
    with our_warnings() as messages, pytest.raises(error, match="of another callback"):
        fit_quietly(trainer, Net(fail_at_6), loader(24))
    assert messages == []
    assert trainer.profiler is profiler
    check_kept(tmp_path, callback)
    assert capsys.readouterr().out.count("all tables: ") == 1
    told = order.split().index("raise")
    for place, one in enumerate(callbacks):
        if isinstance(one, Watching):
            assert one.seen == ([(ZeroDivisionError, "failed", 6)] if place < told else [])
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader(24))
    assert messages == []
    assert (callback.run.info.status, len(callback.run.ranks[0].steps)) == ("finished", 12)


def test_validation_results_survive_error_in_another_callback(tmp_path: Path) -> None:
    class Failing(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            fail_at_6(batch_idx)
            super().validation_step(batch, batch_idx)

    callback = make_callback(tmp_path, active=0)
    trainer = make_trainer(tmp_path, Raising(KeyboardInterrupt), callback)
    with our_warnings() as messages, pytest.raises(KeyboardInterrupt, match="of another callback"):
        trainer.validate(Failing(), loader(24))
    assert messages == []
    check_kept(tmp_path, callback)


LOST = """
    import sys, warnings
    from pathlib import Path
    from lightning_modelprof.lightning.phases import PhaseProfiler
    from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer
    from tests.lightning.test_copied_callbacks import Raising, fail_at_6

    folder, way = Path(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    if way == "not told":  # a Lightning that has another name for the action
        table = PhaseProfiler._table
        PhaseProfiler._table = lambda self, make: table(
            self, lambda name: make(name.replace("on_exception", "on_failure"))
        )
    class Killing(Raising):
        def on_exception(self, *args):
            import os
            os._exit(3)
    callback = make_callback(folder, active=0)
    other = Killing(ValueError) if way == "killed" else Raising(ValueError)
    fit_quietly(make_trainer(folder, other, callback), Net(fail_at_6), loader(24))
"""


@pytest.mark.parametrize(("way", "code"), [("not told", 1), ("killed", 3)])
def test_results_survive_program(tmp_path: Path, way: str, code: int) -> None:
    """If the callback misses the loop's end, results are saved when the program ends, or before."""
    done = run_script(LOST, tmp_path, way, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    run = load_run(tmp_path / "modelprof")
    assert run.info.status == "failed"
    assert len(run.ranks[0].steps) == 6
    assert (tmp_path / "modelprof" / "report.txt").exists() == (way == "not told")


class Dying(Numbers):
    """Ends its worker before the first sample. With tensors in transit, torch's own error varies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().__getitem__(index)


@pytest.mark.skipif(sys.platform != "linux", reason="forked workers")
@pytest.mark.parametrize("how", ["exit", "SIGKILL", "SIGSEGV"])
def test_dying_worker_raises_same_error_as_without_callback(tmp_path: Path, how: str) -> None:
    found = []
    for is_measured in (False, True):
        ours = [make_callback(tmp_path, active=0, sampling=True)] if is_measured else []
        data = DataLoader(Dying(how), num_workers=1, multiprocessing_context="fork")
        with our_warnings() as messages, pytest.raises(RuntimeError, match="DataLoader worker") as error:
            fit_quietly(make_trainer(tmp_path, *ours), Net(), data)
        assert messages == []
        text = "".join(one for one in str(error.value) if not one.isdigit())
        found.append((type(error.value), text))
    assert found[0] == found[1]


def fails(*args: Any, **kwargs: Any) -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "result",
    [10**400, 10**5000, float("nan"), float("inf"), -1, 0.5, torch.tensor(5), None, "many", fails],
    ids=["huge", "unprintable", "nan", "infinite", "negative", "half", "tensor", "none", "text", "raises"],
)
def test_invalid_formula_result_leaves_operator_uncounted(result: Any) -> None:
    formula = result if result is fails else lambda *args, **kwargs: result
    with FlopCounter(model := nn.Linear(2, 3), {"aten::addmm": formula}) as counter:
        model(torch.ones(4, 2))
    assert not counter.flops
    assert sum(counter.uncounted.values()) == 1
    ((operator, message),) = counter.errors
    assert operator == "aten::addmm"
    assert len(message) < 300


class Endless(Mapping[Any, Any]):
    """A batch that generates its fields on demand, endlessly."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.asked, self.batch = 0, (inputs, targets)

    def __getitem__(self, key: Any) -> Any:
        self.asked += 1
        return self.batch[key % 2]

    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return sys.maxsize


class OfEndless(Net):
    """Accepts endless batches, and keeps Lightning from iterating over them."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.odd = make, []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.odd.append(self.make(*batch))
        return self.odd[-1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.batch if isinstance(batch, Endless) else next(batch), batch_idx)


def generator(*batch: Any) -> Iterator[Any]:
    while True:
        yield batch


@pytest.mark.parametrize("make", [Endless, generator])
def test_endless_batch_is_not_exhausted(tmp_path: Path, make: Any) -> None:
    weights = []
    for folder, with_ours in (("plain", False), ("ours", True)):
        torch.manual_seed(3)
        module = OfEndless(make)
        callback = make_callback(tmp_path, steps=(4, 6), flops=True, skip_first=2)
        trainer = make_trainer(tmp_path / folder, *([callback] if with_ours else []))
        fit_quietly(trainer, module, loader(24))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))
    assert len(callback.run.ranks[0].steps) == 12
    assert callback.run.info.status == "finished"
    if make is Endless:
        assert max(batch.asked for batch in module.odd) < 5_000


FORKS = """
import atexit, multiprocessing, os, signal, sys
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from tests.support.fits import Net, Numbers, loader, make_callback, make_trainer

def leave(how):
    signal.alarm(120)  # one that hangs as it ends fails the test, and is not left behind
    atexit.register(print, "told at exit")
    if how == "exit":
        sys.exit(5)
    if how == "raise":
        raise ZeroDivisionError("of the child")
    if how == "fit":
        make_trainer(Path("child"), make_callback(Path("child"), steps=(4, 9))).fit(Net(), loader(24))
        sys.exit(5)
    os._exit(5)

class Forks(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx != int(sys.argv[2]):
            return
        how = sys.argv[1]
        if how == "process":
            child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
            child.start()
            child.join()
            status = child.exitcode
        elif how == "workers":
            list(DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork"))
            status = 5
        else:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                leave(how)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("child", status, flush=True)

callback = make_callback(Path("."), steps=(4, 9))
make_trainer(Path("."), callback, Forks()).fit(Net(), loader(24))
rank = callback.run.ranks[0]
print("parent", len(rank.steps), *rank.windows[0].recorded_steps)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize(
    ("how", "batch", "status"),
    [
        ("exit", 6, 5),
        ("exit", 10, 5),  # the window has closed
        ("raise", 6, 1),
        ("os._exit", 6, 5),
        ("fit", 6, 5),
        ("process", 6, 5),
        ("workers", 6, 5),
    ],
)
def test_child_forked_in_window_ends_normally(tmp_path: Path, how: str, batch: int, status: int) -> None:
    done = run_script(FORKS, how, batch, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"child {status}" in lines
    assert "parent 12 4 5 6 7 8" in lines
    assert lines.count("told at exit") == (how in ("exit", "raise", "fit"))
    assert ("of the child" in done.stderr) == (how == "raise")
    assert "internal error" not in done.stderr
    assert [path.name for path in tmp_path.glob("modelprof*")] == ["modelprof"]
