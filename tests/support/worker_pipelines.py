"""Data sets whose samples contain their own times, also for spawned workers."""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

READ_S = 0.01
SLEEPS_S = (0.0001, 0.0005, 0.001, 0.002)
COMPUTE_S = 0.001
COLLATE_S = 0.01


def burn(seconds):
    """Use the CPU for some seconds."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


class Cost:
    """Sleep, and store the time in its own column of the sample."""

    def __init__(self, column, seconds):
        self.column, self.seconds = column, seconds

    def __call__(self, sample):
        began = time.perf_counter()
        time.sleep(self.seconds)
        sample[self.column] = time.perf_counter() - began
        return sample


def compute(sample):
    """Use the CPU, and store the time."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    burn(COMPUTE_S)
    sample[5], sample[6] = time.perf_counter() - began, time.thread_time() - began_cpu
    return sample


class Chain:
    """Transforms in sequence."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def read():
    """A sample before its transforms.

    Columns: 0 to 4 sleeps, 5 and 6 wall and CPU time of computing, 7 collating, 8 total CPU time.
    """
    sample = torch.zeros(9, dtype=torch.float64)
    began = time.perf_counter()
    time.sleep(READ_S)
    sample[0] = time.perf_counter() - began
    return sample


READ_LINE = read.__code__.co_firstlineno + 7


def make_sample(transform):
    began_cpu = time.thread_time()
    sample = transform(read())
    sample[8] = time.thread_time() - began_cpu
    return sample


def make_transform():
    return Chain([*(Cost(1 + place, seconds) for place, seconds in enumerate(SLEEPS_S)), compute])


class Map(Dataset):
    def __init__(self, size):
        self.size = size
        self.transform = make_transform()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return make_sample(self.transform)


class Iterable(IterableDataset):
    def __init__(self, size):
        self.size = size
        self.transform = make_transform()

    def __iter__(self):
        worker = get_worker_info()
        for _ in range(worker.id, self.size, worker.num_workers):
            yield make_sample(self.transform)


def collate(samples):
    """Store the collating time, divided among the samples, in another column."""
    began = time.perf_counter()
    time.sleep(COLLATE_S)
    batch = torch.stack(samples)
    batch[:, 7] = (time.perf_counter() - began) / len(samples)
    return batch
