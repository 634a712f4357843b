"""Batches are bit-identical with and without worker probes, even for datasets that inspect themselves."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof import LoopProfiler
from lightning_modelprof.measure.workers.probes import WorkerProbes
from tests.support import self_inspecting as made
from tests.support.fits import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are looked into on Linux")


def digest(batches: Any) -> str:
    found = hashlib.sha256()
    for leaf in tree_leaves(batches):
        value = torch.as_tensor(leaf)
        found.update(f"{type(leaf)} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.as_subclass(torch.Tensor).contiguous().numpy().tobytes())
    return found.hexdigest()


def epochs(make: Any, method: str, *, is_watched: bool, **options: Any) -> tuple[tuple[str, int], Any]:
    """Two epochs of a loader: the batches' digest and number, and the measurements."""
    torch.manual_seed(3)
    # Each epoch starts workers that don't persist.
    num_workers = 2 if method == "fork" and options.get("persistent_workers") else 1
    loader = DataLoader(make(), 2, num_workers=num_workers, multiprocessing_context=method, **options)
    watched = WorkerProbes()
    if is_watched:
        watched.add(loader)
    batches = [batch for _ in range(2) for batch in loader]
    record = watched.record()
    watched.end()
    return (digest(batches), len(batches)), record


@pytest.mark.parametrize(
    ("case", "persistent_workers"),
    list(zip(made.CASES, itertools.cycle([False, True]), strict=False)),
    ids=str,
)
def test_samples_are_identical_in_fork(case: str, persistent_workers: bool) -> None:
    make, options = made.CASES[case], {"persistent_workers": persistent_workers}
    expected, nothing = epochs(make, "fork", is_watched=False, **options)
    found, (record,) = epochs(make, "fork", is_watched=True, **options)
    assert found == expected
    assert nothing == ()
    assert sum(one.batches for one in record.workers) == found[1]  # and they were measured
    assert [call.kind for call in record.calls if not call.depth] == ["sample", "collate"]


SPAWNED = """
import json, sys
from tests.measure.test_worker_identity import epochs, made
from tests.support.warm import spawn_from_here

if __name__ == "__main__":
    if sys.argv[1] == "forked":
        spawn_from_here()
    for make in map(made.__dict__.get, sys.argv[2:]):
        collate = made.CollatesItself() if make is not made.All else None
        options = {"collate_fn": collate, "worker_init_fn": made.start, "persistent_workers": True}
        expected, _ = epochs(make, "spawn", is_watched=False, **options)
        found, (record,) = epochs(make, "spawn", is_watched=True, **options)
        print(json.dumps([make.__name__, expected, found, sum(one.batches for one in record.workers)]))
"""


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: Any) -> dict[str, Any]:
    """Return digests without and with us, and the number of inspected batches."""
    found = {}
    for how, *names in (("new interpreter", "All"), ("forked", "Yields", "OfSlots")):
        result = run_script(SPAWNED, how, *names, cwd=tmp_path_factory.mktemp("spawned"))
        assert result.returncode == 0, result.stderr[-3000:]
        found |= {name: rest for name, *rest in map(json.loads, result.stdout.splitlines())}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["All", "Yields", "OfSlots"])
def test_samples_are_identical_in_spawned_workers(spawned: dict[str, Any], name: str) -> None:
    expected, found, batches = spawned[name]
    assert found == expected
    assert batches == found[1] >= 8


def test_self_inspecting_worker_code_changes_no_batch() -> None:
    outcomes = [
        epochs(
            made.Vars,
            "fork",
            is_watched=is_watched,
            collate_fn=made.CollatesItself(),
            worker_init_fn=made.start,
            persistent_workers=True,
        )[0]
        for is_watched in (False, True)
    ]
    assert outcomes[0] == outcomes[1]


# The loader, in the training process


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def seeds(worker: int, by: int = 1) -> None:
    torch.manual_seed(worker * by)


def test_collate_fn_stays_in_loader() -> None:
    watched, collate, seeding = WorkerProbes(), made.CollatesItself(), functools.partial(seeds, by=2)
    loader = DataLoader(Rows(), 4, num_workers=1, collate_fn=collate, worker_init_fn=seeding)
    watched.add(loader)
    assert loader.collate_fn is collate
    assert len(list(loader)) == 2
    assert isinstance(loader.worker_init_fn, functools.partial)
    assert loader.worker_init_fn == seeding
    assert loader.worker_init_fn.keywords == {"by": 2}
    assert pickle.loads(pickle.dumps(loader.worker_init_fn)).keywords == {"by": 2}
    (record,) = watched.record()
    assert record.workers[0].batches == 2
    watched.end()
    assert loader.worker_init_fn is seeding


def test_missing_worker_init_fn_still_looks_like_none() -> None:
    loader = DataLoader(Rows(), 4, num_workers=1)
    watched = WorkerProbes()
    watched.add(loader)
    assert not loader.worker_init_fn
    assert loader.worker_init_fn == None  # noqa: E711
    assert pickle.loads(pickle.dumps(loader.worker_init_fn)) is None
    watched.end()
    assert loader.worker_init_fn is None


class Holds:
    """A custom loader whose data is a long list."""

    def __init__(self, loader: Any) -> None:
        self.loaders, self.data = [loader], Unread(range(1000))


class Unread(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("of the user's: too long to be gone through")


def test_only_lists_of_loaders_are_searched() -> None:
    watched = WorkerProbes()
    loader = DataLoader(Rows(), 4, num_workers=1)
    watched.add(Holds(loader))
    assert len(list(loader)) == 2
    assert watched.record()[0].workers[0].batches == 2
    watched.end()


def test_start_method_can_be_set_later(tmp_path: Any) -> None:
    script = """
        import multiprocessing
        from torch.utils.data import DataLoader
        from lightning_modelprof.measure.workers.probes import WorkerProbes

        watched = WorkerProbes()
        watched.add(DataLoader([1, 2], num_workers=1))
        multiprocessing.set_start_method("spawn")
        print([one.start_method for one in watched.record()] == multiprocessing.get_all_start_methods()[:1])
        """
    result = run_script(script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "True"


def test_workers_of_interrupted_epoch_end() -> None:
    loader = DataLoader(Rows(), 1, num_workers=2)
    with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
        for _ in range(2):
            for number, _ in enumerate(profiler.fetch(loader)):
                if number == 3:
                    break
            gc.collect()
            assert multiprocessing.active_children() == []
