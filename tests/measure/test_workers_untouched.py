"""In a worker, data sets and transforms do what they do without us; found by a hostile reader."""

import copy
import functools
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.in_worker import Worker
from lightning_modelprof.measure.workers.ring import Head, Rings, Sum, claim_slot, open_memory
from lightning_modelprof.measure.workers.timed_calls import OUTSIDE, TimedCalls
from lightning_modelprof.measure.workers.watch import WatchedLoaders

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are looked into on Linux")


@pytest.fixture
def slot():
    rings = Rings(2)
    yield claim_slot(rings.fd, rings.name, 2, 0)
    os.close(rings.fd)


def looked_into(slot, data):
    TimedCalls(slot, UserCode()).begin(data)
    return data


@dataclass
class Resize:
    size: int

    def __call__(self, value):
        return value * self.size


class Bigger(Resize):
    pass


@dataclass(frozen=True)
class Frozen:
    size: int

    def __call__(self, value):
        return value


def plain(value):
    return value


class AsksAboutItself(Dataset):
    """Other data for another transform."""

    def __init__(self):
        self.resize, self.frozen, self.function = Resize(2), Frozen(3), plain
        self.table = {plain: 7}

    def __getitem__(self, index):
        return [
            self.resize == Resize(2),
            Resize(2) == self.resize,
            self.resize == Resize(3),
            self.resize == Bigger(2),
            hash(self.frozen) == hash(Frozen(3)),
            self.frozen in {Frozen(3)},
            self.table[self.function],
            self.function == plain,
            plain == self.function,
            self.resize(index),
        ]


def test_what_is_equal_stays_equal(slot):
    before = AsksAboutItself()[5]
    assert before[:4] == [True, True, False, False]
    assert looked_into(slot, AsksAboutItself())[5] == before


class Base:
    def __init__(self, by):
        self.by = by

    def __call__(self, value):
        return value + self.by


class OfItsOwnClass(Base):
    def __call__(self, value):
        return super(self.__class__, self).__call__(value) + 1


class OfItsType(Base):
    def __call__(self, value):
        return super(type(self), self).__call__(value) + 1


class Registered(Base):
    made: ClassVar = []

    def __init_subclass__(cls, **kwargs):
        cls.made.append(cls)


class Dispatches:
    @functools.singledispatchmethod
    def __call__(self, value):
        return value

    @__call__.register
    def _(self, value: int):
        return -value


class Static:
    @staticmethod
    def __call__(value):
        return value * 3


class Chained(Dataset):
    def __init__(self):
        self.transforms = [OfItsOwnClass(1), OfItsType(2), Registered(3), Dispatches(), Static()]

    def __getitem__(self, index):
        for transform in self.transforms:
            index = transform(index)
        return index


def test_classes_that_a_derived_one_would_change(slot):
    assert looked_into(slot, Chained())[1] == Chained()[1] == -3 * (1 + 2 + 3 + 3)
    assert Registered.made == []


class InPieces(Dataset):
    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return list(range(10))[indices] if isinstance(indices, slice) else [indices]


def test_indices_without_a_length(slot):
    data = looked_into(slot, InPieces())
    assert data.__getitems__(slice(2, 5)) == [2, 3, 4]
    assert data.__getitems__(7) == [7]
    (words,) = (slot.call(name) for name in slot.names if name.name.endswith("__getitems__"))
    assert words[Sum.SAMPLES] == 4


class Many(list):
    """Counts how often it is gone through."""

    def __iter__(self):
        raise AssertionError("nobody looks at so many")


def test_long_lists_are_not_gone_through(slot):
    class Names(Dataset):
        def __init__(self):
            self.names = Many(str(number) for number in range(5000))

        def __getitem__(self, index):
            return self.names[index]

    assert looked_into(slot, Names())[3] == "3"


# Numbers


class Retries(Dataset):
    def __getitem__(self, index):
        return self[index + 1] if index % 2 else index

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Around(Dataset):
    def __init__(self):
        self.inner = Retries()

    def __getitem__(self, index):
        return self.inner[index]

    def __getitems__(self, indices):
        return self.inner.__getitems__(indices)


def test_samples_inside_of_samples_are_counted_once(slot):
    data = looked_into(slot, Around())
    assert [data[index] for index in range(4)] == [0, 2, 2, 4]
    assert data.__getitems__([1, 2, 3]) == [2, 2, 4]
    sums = {name.name: slot.call(name) for name in slot.names}
    assert sums["Retries.__getitem__"][Sum.CALLS] == 4 + 3
    assert sums["Retries.__getitems__"][Sum.SAMPLES] == 3
    assert sums["Around.__getitems__"][Sum.SAMPLES] == 3


class Seven(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_what_an_epoch_drops_is_not_in_the_next_one(slot):
    worker, data = Worker(slot, UserCode(), sampling=False), Seven()
    worker.begin(data)
    for _ in range(2):
        iterator = iter(data)
        for _ in range(2):
            worker.collate(list, [next(iterator) for _ in range(3)])
        next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        assert worker._calls.state.inspection is OUTSIDE
    assert slot.head[Head.SAMPLES] == 12
    worker.end()


class RareSlow(Dataset):
    """Each sample is the time that it took."""

    def __len__(self):
        return 3000

    def __getitem__(self, index):
        began = time.perf_counter()
        while time.perf_counter() < began + (0.002 if index % 97 == 0 else 20e-6):
            pass
        return time.perf_counter() - began


def test_rare_slow_samples_weigh_what_they_took():
    """Of fast samples some are timed; totals are scaled to what is known of all."""
    watched = WatchedLoaders()
    loader = DataLoader(RareSlow(), 10, num_workers=1)
    watched.add(loader)
    truth_s = sum(batch.sum().item() for batch in loader)
    (record,) = watched.record()
    watched.end()
    sample = record.calls[0]
    assert "one batch of" in record.notes[0]
    assert sample.samples == pytest.approx(3000, rel=0.05)
    assert sample.total_ns / 1e9 == pytest.approx(truth_s, rel=0.1)


class FastOnes(Dataset):
    def __len__(self):
        return 3000

    def __getitem__(self, index):
        return index


# Memory that is shared, and loaders


def test_another_file_of_the_same_number_is_left_alone(tmp_path):
    rings = Rings(1)
    fd, name, path = rings.fd, rings.name, rings.path
    rings.close()
    file = os.open(tmp_path / "theirs", os.O_CREAT | os.O_RDWR)
    if file != fd:
        os.dup2(file, fd)
        os.close(file)
    try:
        assert claim_slot(fd, name, 1, 0) is None
        assert open_memory(path, name) is None
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_a_copy_of_a_loader_measures_nothing_once_the_loop_is_over():
    loader = DataLoader(FastOnes(), 100, num_workers=1)
    watched = WatchedLoaders()
    watched.add(loader)
    twin = copy.copy(loader)
    init = loader.worker_init_fn
    watched.end()
    assert init.is_over
    assert len(list(twin)) == 30
    assert watched.record()[0].workers == ()


def test_all_workers_of_all_epochs_are_seen():
    """Those of the next epoch begin while those of the one before live."""
    loader = DataLoader(FastOnes(), 100, num_workers=4)
    watched = WatchedLoaders()
    watched.add(loader)
    iterators = []
    for _ in range(2):
        iterators.append(iter(loader))
        for batch in iterators[-1]:
            assert len(batch) == 100
    (record,) = watched.record()
    assert sum(worker.samples for worker in record.workers) == 6000
    assert not any("lived at once" in note for note in record.notes)
    watched.end()
    del iterators


def open_files():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_loaders_of_many_settings_do_not_pile_up():
    watched, before = WatchedLoaders(), open_files()
    for epoch in range(30):
        loader = DataLoader(FastOnes(), 10 + epoch, num_workers=1)
        watched.add(loader, epoch)
    assert open_files() - before <= 2 * 5
    record = watched.record()
    assert len(record) <= 13
    assert "made with other settings" in record[0].notes[-1]
    watched.end()
    assert open_files() == before


def test_another_number_of_workers_is_another_loader():
    loader = DataLoader(FastOnes(), 100, num_workers=1)
    watched = WatchedLoaders()
    for epoch, number in enumerate((1, 2)):
        loader.num_workers = number
        watched.add(loader, epoch)
        assert len(list(loader)) == 30
    one, two = sorted(watched.record(), key=lambda record: record.num_workers)
    assert (one.num_workers, two.num_workers) == (1, 2)
    assert sum(worker.samples for worker in two.workers) == 3000
    watched.end()
    assert loader.worker_init_fn is None


def test_trial_runs_are_forgotten_and_shared_loaders_said():
    watched = WatchedLoaders()
    for trial in range(3):
        loader = DataLoader(FastOnes(), 2 ** (5 + trial), num_workers=1)
        watched.add(loader, (0, trial))
    watched.begin([loader])
    watched.add_other(loader)
    watched.add_other(DataLoader(FastOnes(), 8, num_workers=1))
    (record,) = watched.record()
    assert (record.loader, record.batch_size) == (0, 128)
    assert "Validation takes batches from the same DataLoader" in record.notes[-1]
    watched.end()


def test_tensors_keep_their_class(slot):
    class Holds(Dataset):
        def __init__(self):
            self.data = torch.arange(5)

        def __getitem__(self, index):
            return self.data[index]

    assert type(looked_into(slot, Holds())[2]) is torch.Tensor


def test_files_that_the_program_opens_in_place_of_ours_stay_open(tmp_path):
    rings = Rings(1)
    slot = claim_slot(rings.fd, rings.name, 1, 0)
    slot.head[Head.BATCHES] = 5
    links = [
        (int(one.name), str(one.readlink())) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()
    ]
    numbers = [number for number, link in links if rings.name in link]
    assert numbers == [rings.fd], "the memory has no second number"
    file = os.open(tmp_path / "theirs", os.O_CREAT | os.O_RDWR)
    os.dup2(file, rings.fd)
    with pytest.raises(OSError, match="Bad file"):
        rings.fd  # noqa: B018
    assert rings.slots()[0].head[Head.BATCHES] == 5
    del slot
    gc.collect()
    rings.close()
    assert os.fstat(numbers[0]).st_ino == os.fstat(file).st_ino
    os.close(file)
    os.close(numbers[0])
