"""Transforms in workers are found without touching them, and samples measure their time."""

from __future__ import annotations

import functools
import random
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.call_samples import CallProbe, CallSamples, CallSums, State
from lightning_modelprof.measure.workers.calls import CallName, Calls
from lightning_modelprof.measure.workers.in_worker import WorkerText
from lightning_modelprof.measure.workers.probes import _calls
from lightning_modelprof.measure.workers.ring import Head, ReadSlot
from lightning_modelprof.run.stacks import StackSamples
from tests.support import self_inspecting as made

HERE = Path(__file__).parent


class OfALibrary(UserCode):
    """Treats all classes here as a library's."""

    def is_users_file(self, file: str) -> bool:
        return False


def found(dataset: Any, *, is_users: bool = True) -> list[tuple[str, str, int]]:
    calls = Calls(UserCode(roots=(str(HERE.parent),)) if is_users else OfALibrary())
    calls.find(dataset)
    return [(one.name, one.kind, one.depth) for one in calls.names]


def adds(value: Any) -> Any:
    return value + 1


class Adds:
    def __call__(self, value: Any) -> Any:
        return value + 10


class Compose(made.Compose):
    pass


class Wrapper:
    """A user's object that holds transforms under its own names."""

    def __init__(self) -> None:
        self.whole = Compose(Adds(), adds)
        self.by_name = {"one": Adds()}
        self.rest = 3

    def __call__(self, value: Any) -> Any:
        return self.by_name["one"](self.whole(value))


class Items(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)

    def __len__(self) -> int:
        return 4


ITEMS = ("Items.__getitem__", "sample", 0)


def test_transforms_in_user_object_are_found() -> None:
    assert found(Items(Wrapper())) == [
        ITEMS,
        ("Wrapper", "compose", 1),
        ("Compose", "compose", 2),
        ("Adds", "transform", 3),
        ("adds", "transform", 3),
        ("Adds", "transform", 2),  # the one in the dictionary
    ]


def test_transforms_in_object_of_notebook_class_are_found(monkeypatch: Any) -> None:
    """The class's module has no file."""
    typed = type("Typed", (Wrapper,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    names = [name for name, _, _ in found(Items(typed()), is_users=False)]
    assert names[1:] == ["Typed", "Compose", "Adds", "adds", "Adds"]


def test_transforms_of_same_class_get_numbers() -> None:
    transform = Compose(Adds(), adds, Adds(), Adds(), functools.partial(adds))
    names = [name for name, _, _ in found(Items(transform))]
    assert names[2:] == ["Adds", "adds", "Adds #2", "Adds #3"]  # one row for both uses of the function


def test_nested_datasets_are_found() -> None:
    data = ConcatDataset([Subset(Items(Adds()), [1]), Items(Adds())])
    assert found(data) == [
        ("ConcatDataset.__getitem__", "sample", 0),
        ("Subset.__getitems__", "sample", 1),
        ("Items.__getitem__", "sample", 2),
        ("Adds", "transform", 3),
        ("Items.__getitem__", "sample", 1),
        ("Adds", "transform", 2),
    ]


class Curried:
    """A library stage: a generator function with its arguments."""

    def __init__(self, f: Any, *args: Any) -> None:
        self.f, self.args = f, args

    def __call__(self, data: Any) -> Any:
        return self.f(data, *self.args)


def mapped(data: Any, function: Any) -> Any:
    for one in data:
        yield function(one)


class Pipeline(IterableDataset[Any]):
    def __init__(self, *stages: Any) -> None:
        self.stages = list(stages)

    def __iter__(self) -> Any:
        data = iter(range(8))
        for stage in self.stages:
            data = stage(data)
        return data


def test_library_stages_are_named_by_their_functions() -> None:
    pipeline = Pipeline(Curried(mapped, adds), Curried(mapped, Adds()))
    assert found(pipeline, is_users=False) == [
        ("Pipeline.__iter__", "sample", 0),
        ("mapped", "compose", 1),
        ("adds", "transform", 2),
        ("mapped #2", "compose", 1),
        ("Adds", "transform", 2),
    ]


class Examples:
    def __init__(self, before: Any, function: Any) -> None:
        self.before, self.function = before, function

    def __iter__(self) -> Any:
        for one in self.before:
            yield self.function(one)


class OfExamples(IterableDataset[Any]):
    def __init__(self) -> None:
        self._examples = Examples(Examples(range(3), adds), Adds())

    def __iter__(self) -> Any:
        yield from self._examples


def test_functions_in_iterated_objects_are_found() -> None:
    assert [one[:2] for one in found(OfExamples())[1:]] == [("adds", "transform"), ("Adds", "transform")]


def test_modules_inside_user_module_are_found() -> None:
    class Augment(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Identity(), torch.nn.ReLU()

        def forward(self, value: Any) -> Any:
            return self.second(self.first(value))

    one = torch.nn.Sequential(Augment(), torch.nn.Identity())
    assert found(Items(one))[1:] == [
        ("Sequential", "compose", 1),
        ("Augment", "compose", 2),
        ("Identity", "transform", 3),
        ("ReLU", "transform", 3),
        ("Identity", "transform", 2),
    ]


def test_finding_transforms_runs_no_user_code() -> None:
    counts, proxy = made.Counts(), made.Proxy(Adds())
    listed = made.Counted([made.Registered(), adds])
    data = Items([counts, proxy, listed])
    data.listed = listed
    before = (len(made.Registry.asked), made.Counted.asked)
    names = [name for name, _, _ in found(data)]
    assert object.__getattribute__(counts, "asked") == []
    assert object.__getattribute__(proxy, "asked") == []
    assert (len(made.Registry.asked), made.Counted.asked) == before
    assert names == ["Items.__getitem__", "Registered", "adds"]


# Samples


class Waits:
    """Takes the given number of samples of the thread it runs in."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self, take: Any) -> Any:
        for _ in range(self.looks):
            take()
        return take


class OfWaits(Dataset[Any]):
    def __init__(self, *looks: int) -> None:
        self.transform = Compose(*map(Waits, looks))

    def __getitem__(self, take: Any) -> Any:
        take()
        return self.transform(take)


class Looks:
    """Samples of this thread, taken by another thread at known places."""

    def __init__(self, dataset: Any) -> None:
        self.state = State(0, None)
        self.calls = Calls(UserCode(roots=(str(HERE.parent),)))
        self.calls.find(dataset)
        self.look = CallProbe(self.state, self.calls, None)
        self.look.sampler = SimpleNamespace(due_ns=10, late_ns=0)  # type: ignore[assignment]

    def __call__(self) -> None:
        thread = threading.Thread(target=self.look.look, args=(5_000_000,))
        thread.start()
        thread.join()

    def batch(self, dataset: Any, samples: int) -> None:
        self.state.batch += 1
        self.state.fetch_ns = 5
        for _ in range(samples):
            dataset[self]
        self.state.fetch_ns = 0


def test_samples_distinguish_transforms_of_same_class() -> None:
    data = OfWaits(1, 0, 4)
    looks = Looks(data)
    for _ in range(3):
        looks.batch(data, 2)
    seen = looks.look.samples()
    assert (seen.looks, seen.batches) == (36, 3)
    assert seen.time == pytest.approx(36 * 0.005)
    counts = {one.call.name: (round(one.time / 0.005), round(one.own / 0.005)) for one in seen.calls}
    assert counts == {
        "OfWaits.__getitem__": (36, 6),
        "Compose": (30, 0),
        "Waits": (6, 6),
        "Waits #2": (0, 0),
        "Waits #3": (24, 24),
    }


def test_sample_due_before_batch_is_not_counted() -> None:
    data = OfWaits(1)
    looks = Looks(data)
    looks.look.sampler.due_ns = 4
    looks.batch(data, 1)
    looks()  # outside a batch
    assert looks.look.samples().looks == 0


def in_batches(shares: list[float], looks: int) -> CallSamples:
    """Batches with the given number of samples each, a share of them in one call."""
    seen = CallSamples(calls=[CallSums(CallName("one", "transform", 1))])
    one = seen.calls[0]
    for share in shares:
        time = looks * share
        seen.looks, seen.batches = seen.looks + looks, seen.batches + 1
        seen.time, seen.squares = seen.time + looks, seen.squares + looks**2
        seen.weights += looks
        one.time, one.squares, one.products = (
            one.time + time,
            one.squares + time**2,
            one.products + time * looks,
        )
    return seen


def error_of(seen: CallSamples, number: int = 1) -> float:
    return seen.error_ns(seen.calls[0], number, fetch_ns=10**9, cpu_ns=0, samples=1) / 1e9


def test_samples_inside_one_call_are_dependent() -> None:
    """One batch in ten is entirely in the call: that's ten samples at ten batches, not a hundred."""
    half = 1.96 / 2
    alike = error_of(in_batches([0.1] * 10, 10))
    apart = error_of(in_batches([1.0] + [0.0] * 9, 10))
    assert alike == pytest.approx(half * (11 / 102 * 91 / 102 / 100) ** 0.5, rel=1e-3)
    assert apart == pytest.approx(half * (0.9 / 10 / 7) ** 0.5, rel=1e-3)
    assert error_of(in_batches([1.0] * 10, 10)) > 0  # all of these were in it, but others may not be
    assert error_of(in_batches([0.1] * 10, 10), 5) == pytest.approx(alike * 2.576 / 1.96, rel=1e-3)


def test_late_samples_widen_error_by_worker_cpu_time_at_most() -> None:
    seen = in_batches([0.5] * 100, 10)
    seen.calls[0].late = seen.calls[0].time * 0.001  # each 1 ms late
    drawn = error_of(seen) * 1e9
    for cpu_ns, late_ns in ((10**9, 4e6), (10**6, 1e6)):
        error_ns = seen.error_ns(seen.calls[0], 1, fetch_ns=10**9, cpu_ns=cpu_ns, samples=4)
        assert error_ns == pytest.approx((drawn**2 + late_ns**2) ** 0.5)


def test_simulation_recovers_mean_times() -> None:
    """Five calls sleep 0.5 to 10 ms, sampled at random: in 19 of 20 draws all are within twice the error."""
    right, num_draws = 0, 200
    for seed in range(num_draws):
        chosen = random.Random(seed)
        times_ms = [0.5 * 20 ** chosen.random() for _ in range(5)]
        record = simulated(chosen, times_ms)
        known = [(one.total_ns, one.error_ns, ms) for one, ms in zip(record, times_ms, strict=True)]
        right += all(abs(t / SAMPLES - ms * 1e6) <= 2 * e / SAMPLES for t, e, ms in known if t is not None)
        assert all(t is not None for t, _, ms in known if ms >= 0.08 * sum(times_ms))
        assert all(t is None for t, _, ms in known if ms <= 0.03 * sum(times_ms))
    assert right >= 0.95 * num_draws


SAMPLES = 800


def simulated(chosen: random.Random, times_ms: list[float]) -> list[Any]:
    """The calls recovered from 100 batches of 8 samples that take the given times."""
    seen = CallSamples(calls=[CallSums(CallName(str(place), "transform", 1)) for place in range(5)])
    whole_ms, now_ms, batch_ms = sum(times_ms), 0.0, 8 * sum(times_ms)
    in_batch: list[list[tuple[int, float]]] = [[] for _ in range(100)]
    while True:
        waited_ms = 5 * chosen.uniform(0.5, 1.5)
        now_ms += waited_ms
        if now_ms >= 100 * batch_ms:
            break
        left, place = now_ms % whole_ms, 0
        while place < 4 and left >= times_ms[place]:
            left, place = left - times_ms[place], place + 1
        in_batch[int(now_ms / batch_ms)].append((place, waited_ms / 1e3))
    for looks in filter(None, in_batch):
        time = sum(weight for _, weight in looks)
        seen.looks, seen.batches, seen.time = seen.looks + len(looks), seen.batches + 1, seen.time + time
        seen.squares, seen.weights = seen.squares + time**2, seen.weights + sum(w**2 for _, w in looks)
        for place, one in enumerate(seen.calls):
            its = sum(weight for where, weight in looks if where == place)
            one.time, one.own = one.time + its, one.own + its
            one.squares, one.products = one.squares + its**2, one.products + its * time
    head = torch.zeros(64, dtype=torch.int64).numpy()
    head[Head.BATCHES], head[Head.SAMPLES] = 100, SAMPLES
    head[Head.FETCH_NS] = round(100 * batch_ms * 1e6)
    text = WorkerText(StackSamples(), seen, CallName("collate", "collate"))
    *calls, collate = _calls([ReadSlot(head)], [text])
    assert collate.kind == "collate"
    return calls


def test_few_samples_yield_no_transform_time() -> None:
    chosen = random.Random(1)
    found = simulated(chosen, [0.02] * 5)
    assert len(found) == 5
    assert all(one.total_ns is None for one in found)
