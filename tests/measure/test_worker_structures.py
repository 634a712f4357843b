"""Where libraries keep their transforms, imitated: each is found, timed, named, and does what it did."""

from __future__ import annotations

import inspect
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.ring import Rings, Sum, claim_slot
from lightning_modelprof.measure.workers.timed_calls import TimedCalls
from lightning_modelprof.measure.workers.watch import WatchedLoaders

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are looked into on Linux")

HERE = Path(__file__).parent


class OfALibrary(UserCode):
    """Of the classes here, those that say so are a library's."""

    def is_users_file(self, file: str) -> bool:
        return False


class Watch:
    """Times a data set in this process, as a worker does."""

    def __init__(self, dataset: Any, *, is_users: bool = True) -> None:
        self.dataset = dataset
        self.rings = Rings(1)
        slot = claim_slot(os.dup(self.rings.fd), self.rings.name, 1, 0)
        assert slot is not None
        self.timed = TimedCalls(slot, UserCode(roots=(str(HERE),)) if is_users else OfALibrary())
        self.timed.begin(dataset)

    def calls(self) -> dict[str, tuple[str, int, int]]:
        """Name → kind, depth and how often."""
        return {
            call.name.name: (call.name.kind, call.name.depth, int(call.sums[Sum.CALLS]))
            for call in self.rings.slots()[0].calls
        }

    def total_ms(self, name: str, own: bool = False) -> float:
        (call,) = (call for call in self.rings.slots()[0].calls if call.name.name == name)
        return float(call.sums[Sum.TOTAL_NS] - own * call.sums[Sum.INNER_NS]) / 1e6


def sleeps(value: Any) -> Any:
    time.sleep(0.002)
    return value + 1


class Adds:
    def __call__(self, value: Any) -> Any:
        return value + 10


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Wrapper:
    """A user's own object, which has transforms by names of its own."""

    def __init__(self) -> None:
        self.whole = Compose(Adds(), sleeps)
        self.by_name = {"one": Adds()}
        self.rest = 3

    def __call__(self, value: Any) -> Any:
        return self.by_name["one"](self.whole(value))


class Items(Dataset):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


def test_transforms_in_an_object_of_the_users_are_found():
    watch = Watch(Items(Wrapper()))
    assert [watch.dataset[index] for index in range(4)] == [21, 22, 23, 24]
    assert [call.name.name for call in watch.rings.slots()[0].calls] == [
        "Items.__getitem__",
        "Wrapper",
        "Compose",
        "Adds",
        "sleeps",
        "Adds",  # that of the dictionary
    ]
    assert [call.name.depth for call in watch.rings.slots()[0].calls] == [0, 1, 2, 3, 3, 2]
    assert {int(call.sums[Sum.CALLS]) for call in watch.rings.slots()[0].calls} == {4}
    assert watch.total_ms("sleeps") >= 8


def test_transforms_in_an_object_whose_class_was_typed_into_a_notebook(monkeypatch):
    """Its module has no file."""
    typed = type("Typed", (Wrapper,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    watch = Watch(Items(typed()), is_users=False)
    assert watch.dataset[0] == 21
    assert [call.name.name for call in watch.rings.slots()[0].calls][1:] == [
        *("Typed", "Compose", "Adds", "sleeps", "Adds")
    ]


def test_a_function_in_a_dictionary_is_what_it_was_to_those_who_ask():
    dataset = Items(None)
    dataset.kept = {"transform": sleeps}
    watch = Watch(dataset)
    function = dataset.kept["transform"]
    assert function(1) == 2
    assert isinstance(function, FunctionType)
    assert inspect.isfunction(function)
    assert not inspect.iscoroutinefunction(function)
    assert inspect.signature(function) == inspect.signature(sleeps)
    assert (function.__name__, function.__module__) == ("sleeps", __name__)
    assert watch.calls()["sleeps"] == ("transform", 1, 1)
    watch.timed.switch(None)
    assert function(1) == 2
    assert watch.calls()["sleeps"] == ("transform", 1, 1)


class Curried:
    """A stage: a generator function with its arguments."""

    def __init__(self, f: Any, *args: Any) -> None:
        self.f, self.args = f, args

    def __call__(self, data: Any) -> Any:
        return self.f(data, *self.args)


def mapped(data: Any, function: Any) -> Any:
    for one in data:
        yield function(one)


def in_pairs(data: Any) -> Any:
    for one in data:
        yield one + next(data)


class Shards(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(8)


class Pipeline(IterableDataset):
    """Data sets and callables in one list."""

    def __init__(self, *stages: Any) -> None:
        self.stages = list(stages)

    def __iter__(self) -> Any:
        first, *rest = self.stages
        data = iter(first)
        for stage in rest:
            data = stage(data)
        return data


def in_pipeline() -> Pipeline:
    return Pipeline(Shards(), Curried(mapped, sleeps), Curried(in_pairs), Curried(mapped, Adds()))


def test_stages_of_generators_are_timed_as_they_yield():
    watch = Watch(in_pipeline(), is_users=False)
    assert list(watch.dataset) == [1 + 2 + 10, 3 + 4 + 10, 5 + 6 + 10, 7 + 8 + 10]
    calls = watch.calls()
    assert calls["Pipeline.__iter__"] == ("sample", 0, 4)
    assert calls["sleeps"] == ("transform", 2, 8)
    assert calls["Adds"] == ("transform", 2, 4)
    # Each stage is called once more, for its end.
    assert calls["mapped"] == ("compose", 1, 8 + 1)
    assert calls["in_pairs"] == ("transform", 1, 4 + 1)
    assert calls["mapped #2"] == ("compose", 1, 4 + 1)
    # A stage waits for the one before it: of its own it takes next to nothing.
    assert watch.total_ms("in_pairs") >= 16
    assert watch.total_ms("in_pairs", own=True) < 4
    assert watch.total_ms("mapped #2", own=True) < 4


def test_iterators_that_were_begun_while_calls_were_not_timed_are_seen():
    watch = Watch(in_pipeline(), is_users=False)
    watch.timed.switch(False)
    iterator = iter(watch.dataset)
    assert next(iterator) == 13
    assert watch.timed.batch[2] == 1  # the sample is counted
    assert watch.calls()["Pipeline.__iter__"] == ("sample", 0, 0)
    watch.timed.switch(True)
    assert next(iterator) == 17
    assert watch.timed.batch[2] == 2
    assert watch.calls()["Pipeline.__iter__"] == ("sample", 0, 1)
    assert watch.calls()["sleeps"][2] == 2
    watch.timed.switch(None)
    assert list(iterator) == [21, 25]
    assert watch.calls()["Pipeline.__iter__"] == ("sample", 0, 1)


def test_stages_that_another_thread_runs_are_not_timed():
    watch = Watch(in_pipeline(), is_users=False)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(list, watch.dataset).result() == [13, 17, 21, 25]
    assert {call[2] for call in watch.calls().values()} == {0}


class Examples:
    """What a data set iterates, and what has the function."""

    def __init__(self, before: Any, function: Any) -> None:
        self.before, self.function = before, function

    def __iter__(self) -> Any:
        for one in self.before:
            yield self.function(one)


class OfExamples(IterableDataset):
    def __init__(self) -> None:
        self._examples = Examples(Examples(range(3), sleeps), Adds())

    def __iter__(self) -> Any:
        yield from self._examples


def test_functions_in_what_a_dataset_iterates_are_found():
    watch = Watch(OfExamples())
    assert list(watch.dataset) == [11, 12, 13]
    assert watch.calls() == {
        "OfExamples.__iter__": ("sample", 0, 3),
        "sleeps": ("transform", 1, 3),
        "Adds": ("transform", 1, 3),
    }


class Holder(IterableDataset):
    """Is given to a Trainer in a loader's place, and has the loader in a list."""

    def __init__(self, loader: Any) -> None:
        self.pipeline = [loader]

    def __iter__(self) -> Any:
        return iter(self.pipeline[0])


def test_a_loader_that_something_else_holds_is_watched():
    data = DataLoader(Items(Adds()), sampler=range(6), num_workers=1, multiprocessing_context="fork")
    holder, watched = Holder(data), WatchedLoaders(sampling=False)
    watched.add(holder)
    assert [int(one) for one in holder] == [10, 11, 12, 13, 14, 15]
    watched.end()
    (record,) = watched.record()
    assert (record.kind, record.workers[0].samples) == ("DataLoader", 6)
    assert {call.name for call in record.calls} >= {"Items.__getitem__", "Adds"}
    assert data.worker_init_fn is None


@pytest.mark.parametrize("data", [list(range(6)), torch.arange(6)])
def test_data_whose_class_is_not_pythons_is_left_alone(data):
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    watched = WatchedLoaders(sampling=False)
    watched.add(loader)
    batches = list(loader)
    assert {type(batch) for batch in batches} == {torch.Tensor}
    assert torch.stack(batches).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    (record,) = watched.record()
    watched.end()
    assert record.notes == ("Single samples are not seen: the class of the data set cannot be derived from.",)
    assert [call.kind for call in record.calls] == ["collate"]


def test_modules_inside_a_module_of_the_users_are_found():
    class Augment(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Identity(), torch.nn.ReLU()

        def forward(self, value: Any) -> Any:
            return self.second(self.first(value))

    watch = Watch(Items(Augment()))
    assert isinstance(watch.dataset.transform, Augment)
    watch.dataset[torch.tensor(-1)]
    assert {name: call[1:] for name, call in watch.calls().items()} == {
        "Items.__getitem__": (0, 1),
        "Augment": (1, 1),
        "Identity": (2, 1),
        "ReLU": (2, 1),
    }
