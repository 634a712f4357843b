"""In a worker, code that asks what it has before it, or changes it, gets and does what it does without us."""
# ruff: noqa: E721

import copy
import copyreg
import enum
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import GeneratorType

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_modelprof import LoopProfiler
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.ring import Rings, Sum, claim_slot
from lightning_modelprof.measure.workers.stand_ins import TimedCall
from lightning_modelprof.measure.workers.timed_calls import TimedCalls
from lightning_modelprof.measure.workers.watch import WatchedLoaders
from tests.support.fits import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are looked into on Linux")


class Plain:
    """Counts by its class, and makes others of it."""

    made = 0
    known = None

    def __init__(self, by=1):
        self.by = by

    def __call__(self, value):
        type(self).made += 1
        self.__class__.known = [*(self.known or ()), value]
        return value + self.by, Plain.made, Plain.known

    def other(self, by):
        return type(self)(by)

    @classmethod
    def forget(cls):
        cls.made, cls.known = 0, None
        cls.gone = 1
        del cls.gone


class Registry(type):
    """Knows its classes by name."""

    classes = {}  # noqa: RUF012

    def __init__(cls, *args):
        super().__init__(*args)
        Registry.classes.setdefault(cls.__name__, []).append(cls)


class Registered(metaclass=Registry):
    def __call__(self, value):
        return value


class Abstract(ABC):
    @abstractmethod
    def __call__(self, value): ...


class Concrete(Abstract):
    def __call__(self, value):
        return value


class Virtual:
    pass


Concrete.register(Virtual)


@dataclass(order=True)
class Ordered:
    by: int

    def __call__(self, value):
        return value * self.by


class Reduced(Plain):
    """Pickled by a function that knows its class."""


class OfArguments(Plain):
    def __new__(cls, *, by):
        return super().__new__(cls)

    def __init__(self, *, by):
        super().__init__(by)

    def __getnewargs_ex__(self):
        return (), {"by": self.by}


copyreg.pickle(Reduced, lambda one: (Reduced, (one.by + 100,)))


class Mode(enum.Enum):
    UP = 1

    def __call__(self, value):
        return value + self.value


class Steps(Plain):
    """A transform that is a sequence and a context as well, whose parent knows of each class made of it."""

    def __init_subclass__(cls, **kwargs):
        raise AssertionError("of the user's: no more of these")

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return place

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def counting(value):
    """Counts."""
    counting.calls += 1
    return value, counting.calls


class Changing(Plain):
    """Becomes another at one sample."""


class Changed:
    def __call__(self, value):
        return "changed", value


def kind_of(value):
    return {Plain: "plain", Concrete: "concrete"}.get(type(value))


class Asks(Dataset):
    def __init__(self):
        self.plain, self.registered, self.concrete = Plain(), Registered(), Concrete()
        self.ordered, self.reduced, self.of_arguments = Ordered(2), Reduced(), OfArguments(by=5)
        self.mode, self.steps, self.changing = Mode.UP, Steps(), Changing()
        self.function, self.partial = counting, functools.partial(max, 3)

    def classes(self):
        plain, other = self.plain, self.plain.other(4)
        return [
            plain(3),
            type(plain) == Plain,
            Plain == type(plain),
            type(plain) != Plain,
            type(plain) in (int, Plain),
            type(Plain()) == type(plain),
            plain.__class__ is Plain,
            (kind_of(plain), kind_of(self.concrete)),
            type(other) is Plain,
            other.by,
            (isinstance(Plain(), type(plain)), issubclass(Plain, type(plain)), issubclass(int, type(plain))),
        ]

    def ancestry(self):
        return [
            self.registered(3),
            Registry.classes["Registered"] == [Registered],
            isinstance(self.concrete, Abstract),
            isinstance(Virtual(), Concrete),
            isinstance(Virtual(), type(self.concrete)),
            isinstance(3, Abstract),
            self.derived(type(self.plain)),
            self.derived(type(self.concrete)),
            self.ordered < Ordered(3),
            sorted([Ordered(3), self.ordered, Ordered(1)])[1] is self.ordered,
        ]

    def derived(self, kind):
        """What somebody has who derives from a class that has just been asked for."""

        class Further(kind):
            other = 7

        Further.more = 5
        one = Further()
        return [
            type(one) is Further,
            one.__class__ is Further,
            type(copy.copy(one)) is Further,
            Further in {Further},
            Further != kind,
            isinstance(one, kind),
            isinstance(kind(), Further),
            issubclass(Further, kind),
            hasattr(kind, "more"),
            one(4)[0] if kind == Plain else one(4),
        ]

    def objects(self):
        with self.steps as steps:
            several = len(steps), steps[7], steps(1)[0], type(steps) == Steps, Steps() != steps
        return [several, self.mode is Mode.UP, Mode(1) is self.mode, self.mode(3)]

    def copies(self):
        plain = [self.plain, self.reduced, self.of_arguments, self.ordered]
        pickles = [pickle.dumps(one, protocol) for one in plain for protocol in range(2, 6)]
        again = [pickle.loads(pickle.dumps(one)) for one in [*plain, self.function]]
        copied = [copy.copy(one) for one in [*plain, self.partial]]
        return [
            pickles,
            [type(one).__name__ for one in again],
            [type(one) for one in again[:4]] == [type(one) for one in plain],
            again[4] is counting,
            [type(one) in (Plain, Reduced, OfArguments, Ordered, functools.partial) for one in copied],
            copied[1].by,
            copied[4].args,
            copied[4] is self.partial,
            pickle.loads(pickle.dumps(type(self.plain))) is Plain,
            type(copy.deepcopy(self)) is Asks,
        ]

    def functions(self):
        self.function.calls += 10
        self.function.last = len(self.function.__doc__)
        found = [
            self.function(1),
            counting.calls,
            counting.last,
            repr(self.function) == repr(counting),
            str([self.function]) == str([counting]),
            vars(self.function) == vars(counting),
            hasattr(self.function, "__wrapped__"),
            self.function.__module__,
            self.function.__name__,
            inspect.getsource(self.function) == inspect.getsource(counting),
        ]
        del self.function.last
        return [*found, hasattr(counting, "last")]

    def __getitem__(self, index):
        if index == 3:
            self.changing.__class__ = Changed
        asked = [self.classes(), self.ancestry(), self.objects(), self.copies(), self.functions()]
        return [*asked, self.changing(index) if index > 2 else None, isinstance(self.changing, Changed)]


@pytest.fixture
def slot():
    rings = Rings(2)
    yield claim_slot(rings.fd, rings.name, 2, 0)
    os.close(rings.fd)


def answers(slot=None):
    """Those of some samples, whose calls are timed, not timed, and without us, in turns."""
    Plain.forget()
    counting.calls = 0
    dataset = Asks()
    timed = None
    if slot is not None:
        timed = TimedCalls(slot, UserCode())
        timed.begin(dataset)
        assert type(dataset) is not Asks
    found = []
    for index, is_timing in enumerate((True, False, True, False, True, None, None)):
        if timed is not None:
            timed.switch(is_timing)
            timed.batch[:] = [0, 0, 0, 0]
        found.append(dataset[index])
    assert type(dataset) is Asks
    assert type(dataset.plain) is Plain
    assert type(dataset.changing) is Changed
    return found


def test_what_code_asks_and_changes(slot):
    without = answers()
    assert without[0][0][:4] == [(4, 1, [3]), True, True, False]
    assert without[6][0][0] == (4, 7, [3] * 7)
    assert [one[4][1] for one in without] == [11 * number for number in range(1, 8)]
    for expected, found in zip(without, answers(slot), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert one == other
    names = {one.name: slot.call(one)[Sum.CALLS] for one in slot.names}
    assert names["Plain"] == 6  # one of each sample's is of a class that was derived from it
    assert names["counting"] == names["Registered"] == names["Mode"] == names["Steps"] == 3


def test_a_function_that_stands_in_its_place_is_told_by_identity_alone(slot):
    dataset = Asks()
    TimedCalls(slot, UserCode()).begin(dataset)
    assert type(dataset.function) is TimedCall
    assert dataset.function is not counting
    assert dataset.function == counting


class Yields(IterableDataset):
    def __iter__(self):
        yield from range(3)


def test_an_iterator_is_of_its_own_class(slot):
    dataset = Yields()
    TimedCalls(slot, UserCode()).begin(dataset)
    iterator = iter(dataset)
    assert isinstance(iterator, GeneratorType)
    assert list(iterator) == [0, 1, 2]


class Missing:
    """Says that it has a transform, and has none."""

    @property
    def __dict__(self):
        return {"transforms": [counting]}

    def __call__(self, value):
        return value


class Frozen(list):
    def __setitem__(self, place, value):
        raise TypeError("of the user's: frozen")


class Odd(Dataset):
    def __init__(self):
        self.missing, self.frozen, self.after = Missing(), Frozen([counting]), Plain()

    def __getitem__(self, index):
        return self.after(self.missing(self.frozen[0](index)[0]))[0]


def test_an_object_that_cannot_be_looked_into_hides_no_other(slot):
    dataset = Odd()
    expected = [dataset[index] for index in range(3)]
    TimedCalls(slot, UserCode()).begin(dataset)
    assert [dataset[index] for index in range(3)] == expected
    names = {one.name: slot.call(one)[Sum.CALLS] for one in slot.names}
    assert names["counting"] == names["Plain"] == names["Odd.__getitem__"] == 3


# The loader, in the training process


class Pads:
    """A collate function with a setting that a training changes as it goes."""

    def __init__(self):
        self.length = 2

    def __call__(self, samples, *, length=None):
        return default_collate([[one] * (length or self.length) for one in samples])


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index)


def seeds(worker, by=1):
    torch.manual_seed(worker * by)


def test_the_functions_of_a_loader_are_the_users_to_those_who_ask():
    watched, pads, seeding = WatchedLoaders(), Pads(), functools.partial(seeds, by=2)
    loader = DataLoader(Rows(), 4, num_workers=1, collate_fn=pads, worker_init_fn=seeding)
    watched.add(loader)
    lengths = []
    for epoch in range(3):
        loader.collate_fn.length = 2 + epoch
        lengths.append([len(batch) for batch in loader])
    assert lengths == [[2, 2], [3, 3], [4, 4]]
    assert pads.length == 4
    assert isinstance(loader.collate_fn, Pads)
    assert loader.collate_fn == pads
    assert len(loader.collate_fn([torch.ones(1)], length=7)) == 7
    assert isinstance(loader.worker_init_fn, functools.partial)
    assert loader.worker_init_fn.keywords == {"by": 2}
    assert loader.worker_init_fn == seeding
    (record,) = watched.record()
    assert record.workers[0].batches == 6
    watched.end()
    assert loader.collate_fn is pads
    assert loader.worker_init_fn is seeding
    del loader
    gc.collect()


class Holds:
    """A loader of somebody's own, whose data are a long list."""

    def __init__(self, loader):
        self.loaders, self.data = [loader], Unread(range(1000))


class Unread(list):
    def __iter__(self):
        raise AssertionError("of the user's: too long to be gone through")


def test_what_is_no_list_of_loaders_is_not_gone_through():
    watched = WatchedLoaders()
    loader = DataLoader(Rows(), 4, num_workers=1)
    watched.add(Holds(loader))
    assert len(list(loader)) == 2
    assert watched.record()[0].workers[0].batches == 2
    watched.end()


def test_the_start_method_can_be_set_later(tmp_path):
    script = """
        import multiprocessing
        from torch.utils.data import DataLoader
        from lightning_modelprof.measure.workers.watch import WatchedLoaders

        watched = WatchedLoaders()
        watched.add(DataLoader([1, 2], num_workers=1))
        multiprocessing.set_start_method("spawn")
        print([one.start_method for one in watched.record()] == multiprocessing.get_all_start_methods()[:1])
        """
    result = run_script(script, cwd=tmp_path, fresh=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "True"


def test_workers_of_an_epoch_that_is_broken_off_are_gone_as_without_us():
    loader = DataLoader(Rows(), 1, num_workers=2)
    with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
        for _ in range(2):
            for number, _ in enumerate(profiler.fetch(loader)):
                if number == 3:
                    break
            assert multiprocessing.active_children() == []
