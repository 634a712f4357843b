"""Tests that DataLoader workers give bit-identical batches and the same errors as without us.

Each case runs with and without the callback. Measurements are compared with the worker and process that each
sample records.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    _utils,
    default_collate,
    get_worker_info,
)

from lightning_modelprof.run.workers import LoaderWorkers
from tests.support.fits import Net, fit_quietly, make_callback, make_trainer, our_warnings, run_script
from tests.support.worker_data import SIZE, AddNoise, Compose, Mapped, draw_more, sample, twice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are looked into on Linux"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: Any) -> None:
    """Shorten torch's wait for its workers to exit."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(_utils.worker, "MP_STATUS_CHECK_INTERVAL", 0.1)


# Data of all kinds


class Several(Mapped):
    """Loads a whole batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.transform(sample(index)) for index in indices]


class Yielding(IterableDataset):
    """A generator. Each worker yields its part, and changes the data set meanwhile."""

    def __init__(self) -> None:
        self.transform = Compose(twice, AddNoise())
        self.yielded = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SIZE, step):
            self.yielded += 1
            yield self.transform(sample(index)) | {"yielded": self.yielded}


class Threaded(Mapped):
    """Builds each sample in threads, as some libraries do. They draw no random numbers."""

    def __getitem__(self, index: int) -> Any:
        one = sample(index)
        with ThreadPoolExecutor(3) as pool:
            several = list(pool.map(self.transform, [one] * 3))
        return self.transform(one | {"x": sum(other["x"] for other in several)})


class Peculiar(Mapped):
    """Checks its own class, attributes and worker info."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        asked = [
            type(self).__name__ == "Peculiar",
            isinstance(self, Peculiar),
            info is None or info.dataset is self,
            sorted(vars(self)) == ["size", "transform"],
            isinstance(self.transform, Compose),
            self.transform.transforms[0].__name__ == "twice",
        ]
        return super().__getitem__(index) | {"asked": asked}


def batch_of_one(one: Any) -> Any:
    return default_collate([one])


def collate(samples: list[Any]) -> Any:
    return default_collate(samples) | {"size": len(samples), "noise": torch.rand(2)}


def load(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "fork"} | options
    if options["num_workers"] == 0:
        del options["multiprocessing_context"]
    return DataLoader(Mapped() if dataset is None else dataset, **options)


def of_a_batch_sampler() -> DataLoader[Any]:
    data = Mapped()
    sampler = BatchSampler(RandomSampler(data), 3, drop_last=False)
    return DataLoader(data, batch_sampler=sampler, num_workers=2, multiprocessing_context="fork")


def of_one_dataset() -> dict[str, Any]:
    data = Mapped()
    return {"one": load(data), "other": load(data, batch_size=3, num_workers=1, shuffle=True)}


# A fit, its outcome and its leftovers


@dataclass
class Outcome:
    batches: list[str] = field(default_factory=list)
    made: Counter[tuple[int, int]] = field(default_factory=Counter)  # (worker, process) → samples
    error: BaseException | None = None
    states: list[Any] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    workers: tuple[LoaderWorkers, ...] = ()


class Journal(Callback):
    """Records each batch, and which worker built its samples."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        digest = hashlib.sha256()
        for part in parts_of(batch):
            self.outcome.made.update(zip(part["worker"].tolist(), part["process"].tolist(), strict=True))
            for leaf in tree_leaves({name: value for name, value in part.items() if name != "process"}):
                digest.update(
                    leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else str(leaf).encode()
                )
        self.outcome.batches.append(digest.hexdigest())


def parts_of(batch: Any) -> list[dict[str, Any]]:
    """Batches of one or several loaders."""
    if isinstance(batch, dict) and "x" in batch:
        return [batch]
    several = batch.values() if isinstance(batch, dict) else batch
    return [part for part in several if part is not None]


class Module(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(self.layers(part["x"]).square().mean() for part in parts_of(batch))


class Reloaded(Module):
    """Its loader has a different number of workers in each epoch."""

    def train_dataloader(self) -> Any:
        return load(num_workers=(1, 2, 0, 2)[self.trainer.current_epoch], shuffle=True)


def train(
    folder: Path, make_data: Callable[[], Any], is_measured: bool, module: type = Module, **trainer: Any
) -> Outcome:
    """Run one fit with a fixed seed. An error that ends it is in the outcome."""
    outcome = Outcome()
    seed_everything(5, workers=True, verbose=False)
    callback = make_callback(folder, active=0, sampling=True) if is_measured else None
    callbacks = [Journal(outcome)] if callback is None else [callback, Journal(outcome)]
    gc.collect()
    before = left_behind()[1]  # not yet released by another test
    with our_warnings() as messages:
        try:
            fit_quietly(make_trainer(folder, *callbacks, **trainer), module(), make_data())
        except BaseException as error:
            outcome.error = error
    outcome.states = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
    outcome.messages = messages
    if callback is not None and callback.run is not None:
        outcome.workers = callback.run.ranks[0].workers
        assert not [kind for kind in left_behind()[1] - before if "memfd" in kind]
    return outcome


def both(folder: Path, make_data: Callable[[], Any], **fit: Any) -> tuple[Outcome, Outcome]:
    """Check that fits with and without the callback have the same batches, and that we leave nothing."""
    expected = train(folder, make_data, False, **fit)
    gc.collect()
    before = left_behind()
    found = train(folder, make_data, True, **fit)
    assert found.messages == []
    assert type(found.error) is type(expected.error), (expected.error, found.error)
    assert {worker for worker, _ in expected.made} == {worker for worker, _ in found.made}
    assert expected.batches == found.batches
    assert expected.states == found.states
    gc.collect()
    if found.error is None:
        limit = time.monotonic() + 20
        while any(new := new_since(before)) and time.monotonic() < limit:  # files may be another test's
            time.sleep(0.05)
        assert not any(new), new
    return expected, found


def left_behind() -> tuple[set[str], Counter[str]]:
    """Our files in shared memory and the temporary directory, and counts of open files by kind."""
    multiprocessing.active_children()  # joins workers that torch ended without waiting
    opened: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the directory listing itself
            opened[re.sub(r"\d+", "N", str(fd.readlink()))] += 1
    return ours_in("/dev/shm") | ours_in(tempfile.gettempdir()), opened


def new_since(before: tuple[set[str], Counter[str]]) -> tuple[set[str], Counter[str]]:
    """Leftovers that were not there before."""
    files, opened = left_behind()
    return files - before[0], opened - before[1]


def ours_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if "modelprof" in path.name}


# Working loaders


EPOCHS = {"max_epochs": 2}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled, workers anew in each epoch": (partial(load, shuffle=True), EPOCHS),
    "persistent workers": (partial(load, shuffle=True, persistent_workers=True), {"max_epochs": 3}),
    "a generator": (lambda: load(Yielding()), EPOCHS),
    "persistent workers of a generator": (
        lambda: load(Yielding(), persistent_workers=True),
        {"max_epochs": 3},
    ),
    "several at once": (lambda: load(Several(), shuffle=True), {}),
    "batch sampler": (of_a_batch_sampler, EPOCHS),
    "no batches": (lambda: load(batch_size=None, collate_fn=batch_of_one), {}),
    "worker_init_fn and collate_fn": (lambda: load(worker_init_fn=draw_more, collate_fn=collate), EPOCHS),
    "threads in workers": (lambda: load(Threaded(Compose(twice))), {}),
    "looks at itself": (lambda: load(Peculiar()), EPOCHS),
    # Without a worker_init_fn, Lightning sets its own, which imports Lightning in each worker.
    "spawn": (partial(load, num_workers=1, worker_init_fn=draw_more, multiprocessing_context="spawn"), {}),
    "one worker, prefetch 1": (lambda: load(num_workers=1, prefetch_factor=1), EPOCHS),
    "two loaders with one dataset": (of_one_dataset, EPOCHS),
    "CombinedLoader": (lambda: CombinedLoader([load(), load(Yielding())], "max_size_cycle"), EPOCHS),
    "loaders of different length": (lambda: CombinedLoader([load(), load(Mapped(size=6))], "max_size"), {}),
    "other numbers of workers": (
        lambda: None,
        {"module": Reloaded, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 4},
    ),
}


UNCONSUMED = ("two loaders with one dataset", "CombinedLoader", "other numbers of workers")
"""Cases in which Lightning starts iterators without taking their last batches."""

NUM_WORKERS = {
    "spawn": {1},
    "one worker, prefetch 1": {1},
    "two loaders with one dataset": {1, 2},
    "other numbers of workers": {1, 2},
}
CALLS = {"threads in workers": {"Compose", "twice"}}


@pytest.mark.parametrize("case", CASES)
def test_batches_and_worker_counts_are_unchanged(tmp_path: Path, case: str) -> None:
    make_data, fit = CASES[case]
    expected, found = both(tmp_path, make_data, **fit)
    assert expected.error is None
    assert len(found.batches) >= 4
    # Samples and processes per worker, as recorded in the samples.
    of_worker, processes = Counter[int](), Counter[int]()
    for (worker, _), samples in found.made.items():
        if worker >= 0:  # not this process
            of_worker[worker] += samples
            processes[worker] += 1
    counted, starts = Counter[int](), Counter[int]()
    for one in (one for loader in found.workers for one in loader.workers):
        counted[one.worker] += one.samples
        starts[one.worker] += one.starts
    if case in UNCONSUMED:
        assert counted >= of_worker
        assert starts >= processes
    else:
        assert (counted, starts) == (of_worker, processes)
    assert {loader.num_workers for loader in found.workers} == NUM_WORKERS.get(case, {2})
    for loader in found.workers:
        assert loader.notes == ()
        names = [call.name for call in loader.calls]
        assert CALLS.get(case, {"Compose", "twice", "AddNoise"}) <= set(names), names
        assert loader.calls[-1].kind == "collate"


def test_comparison_can_fail(tmp_path: Path) -> None:
    """Other random numbers give other batches."""
    one = train(tmp_path, load, False)
    other = train(tmp_path, partial(load, worker_init_fn=draw_more), False)
    assert len(one.batches) == len(other.batches)
    assert not set(one.batches) & set(other.batches)


# Failing loaders


class Fails:
    """A transform that raises for one sample, a few calls deep."""

    def __init__(self, at: int = 9) -> None:
        self.at = at

    def __call__(self, one: Any) -> Any:
        return self.check(one)

    def check(self, one: Any) -> Any:
        if int(one["x"].mean()) == self.at:
            raise ZeroDivisionError(f"sample {self.at} of the user's")
        return one


class FailsYielding(Yielding):
    def __iter__(self) -> Any:
        for one in super().__iter__():
            yield Fails(at=18)(one)


class FailsSeveral(Several):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Compose(Fails())(sample(index)) for index in indices]


def failing_collate(samples: list[Any]) -> Any:
    for one in samples:
        Fails()(one | {"x": one["x"] // 2})
    return default_collate(samples)


def failing_init(worker: int) -> None:
    if worker == 1:
        raise KeyError("of the user's worker_init_fn")


FAILING: dict[str, Callable[[], Any]] = {
    "a transform": lambda: load(Mapped(Compose(Compose(Fails()), AddNoise()))),
    "a transform, persistent workers": lambda: load(Mapped(Fails()), persistent_workers=True),
    "a transform in a thread": lambda: load(Threaded(Compose(twice, Fails(at=14)))),
    "a generator": lambda: load(FailsYielding()),
    "several at once": lambda: load(FailsSeveral()),
    "collate_fn": lambda: load(Mapped(), collate_fn=failing_collate),
    "worker_init_fn": lambda: load(Mapped(), worker_init_fn=failing_init),
}


@pytest.mark.parametrize("case", FAILING)
def test_error_text_is_unchanged(tmp_path: Path, case: str) -> None:
    expected, found = both(tmp_path, FAILING[case])
    errors = expected.error, found.error
    assert expected.error is not None
    if sys.version_info < (3, 11):  # frames can't remove themselves from tracebacks there
        assert str(expected.error).splitlines()[-1] == str(found.error).splitlines()[-1]
    else:
        texts = [
            re.sub(r'(concurrent.futures._base.py", line )[0-9]+', r"\1", str(error)) for error in errors
        ]
        assert texts[0] == texts[1]  # except for whether the thread failed before the wait
    assert "of the user's" in str(found.error)
    for loader in found.workers:  # earlier measurements are kept
        assert "init" in case or sum(one.samples for one in loader.workers) >= 2


class Dies(Mapped):
    """Its worker is killed in the middle of a sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_killed_worker_keeps_its_measurements(tmp_path: Path) -> None:
    outcomes = [train(tmp_path, lambda: load(Dies()), is_measured) for is_measured in (False, True)]
    for outcome in outcomes:  # its pipe may break before torch notices that it died
        assert isinstance(outcome.error, RuntimeError | OSError | EOFError), repr(outcome.error)
    expected, found = outcomes
    come = min(len(expected.batches), len(found.batches))
    assert come
    assert expected.batches[:come] == found.batches[:come]
    assert found.messages == []
    (loader,) = found.workers
    # Worker 0 builds batches 0 and 2, and dies in the second sample of batch 4.
    dead, other = loader.workers
    assert (dead.worker, dead.batches, dead.samples) == (0, 2, 4)
    assert other.batches in (2, 3)
    of_samples = next(call for call in loader.calls if call.kind == "sample")
    assert of_samples.calls == other.samples + 4
    del outcomes, expected, found
    gc.collect()


class Unpicklable(Mapped):
    def __init__(self) -> None:
        super().__init__()
        self.opened = open(os.devnull)  # noqa: PTH123, SIM115

    def __del__(self) -> None:
        self.opened.close()


UNPICKLABLE: dict[str, tuple[Callable[..., Any], str]] = {
    "dataset": (
        lambda **by: load(Unpicklable(), **by),
        "TypeError: cannot pickle '_io.TextIOWrapper' object",
    ),
    "collate_fn": (lambda **by: load(collate_fn=lambda one: one, **by), "Can't pickle"),
    "worker_init_fn": (lambda **by: load(worker_init_fn=lambda one: one, **by), "Can't pickle"),
}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("what", UNPICKLABLE)
def test_unpicklable_parts_raise_same_error(tmp_path: Path, what: str, method: str) -> None:
    make, message = UNPICKLABLE[what]
    expected, found = both(tmp_path, partial(make, multiprocessing_context=method))
    assert found.batches == []
    assert chain(expected.error) == chain(found.error)
    assert message in "\n".join(chain(found.error))


def chain(error: BaseException | None) -> list[str]:
    """An error and those before it; Lightning's own is last here."""
    found = []
    while error is not None:
        found.append(re.sub("0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}"))
        error = error.__context__
    return found


# Short resources


def files_left(number: int) -> int:
    return len(os.listdir("/proc/self/fd")) + number  # noqa: PTH208


def bytes_left(number: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + number


SHORT: dict[str, tuple[int, Callable[[int], int], int, str]] = {
    "a file": (resource.RLIMIT_FSIZE, int, 1_000_000, "File too large"),
    "open files": (resource.RLIMIT_NOFILE, files_left, 40, "ulimit -n"),
    "address space": (resource.RLIMIT_AS, bytes_left, 200 * 2**20, "ulimit -v"),
}


@pytest.mark.parametrize("what", SHORT)
def test_training_takes_precedence_if_resources_are_short(tmp_path: Path, what: str) -> None:
    limit, count, number, said = SHORT[what]
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (count(number), before[1]))
    try:
        expected, found = both(tmp_path, load)
    finally:
        resource.setrlimit(limit, before)
    assert expected.error is None
    ((note,),) = (loader.notes for loader in found.workers)
    assert note.startswith("Its workers couldn't be measured: OSError: ")
    assert said in note


# Leftovers


def test_killed_training_leaves_nothing(tmp_path: Path) -> None:
    """Its workers exit, and their shared memory is released."""
    temporary = Path(tempfile.mkdtemp())  # short, as a socket path in it may have at most 107 characters
    before = ours_in("/dev/shm")
    result = run_script(
        """
        import os, signal, sys
        from pathlib import Path
        from tests.lightning.test_worker_faults import Mapped, Module, _utils, load, train

        _utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # how often a worker looks whether the training lives

        class Killed(Module):
            def training_step(self, batch, batch_idx):
                if batch_idx == 4:
                    print(os.getsid(0), flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().training_step(batch, batch_idx)

        train(Path("killed"), lambda: load(Mapped(size=10_000)), True, module=Killed)
        """,
        cwd=tmp_path,
        env={"TMPDIR": str(temporary)},
    )
    assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]
    session, limit = int(result.stdout), time.monotonic() + 90
    while (left := processes_of(session)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left
    assert ours_in("/dev/shm") == before
    # torch's own directories also exist without us
    assert [path for path in temporary.rglob("*") if "modelprof" in path.name] == []
    shutil.rmtree(temporary)


def processes_of(session: int) -> list[int]:
    """Living processes of a session: the training and its workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            state, _, _, own_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(own_session) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def test_no_worker_survives_fit(tmp_path: Path) -> None:
    train(tmp_path, partial(load, persistent_workers=True), True)
    gc.collect()
    assert multiprocessing.active_children() == []
