"""Cost of inspecting workers, in the workers: CPU time per sample of the thread, and per batch.

    python benchmarks/worker_cost.py               # under a minute

The price of a sample is the sampling thread's CPU time, by its own clock, divided by the samples that it
takes while the main thread sleeps in transforms. It includes the wake-up. A worker's cost is this price times
the number of samples, which follows from the schedule. The price of a batch is the minimum CPU time of
several rounds over many empty batches, less the same without us.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers import in_worker
from lightning_modelprof.measure.workers.ring import Rings, claim_slot

ROUNDS, NUMBER = 15, 2_000
SAMPLING_S = 20.0


class Sleeps:
    def __call__(self, value: Any) -> Any:
        time.sleep(0.002)
        return value


class Items(Dataset[Any]):
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __getitem__(self, index: int) -> Any:
        for transform in self.transforms:
            index = transform(index)
        return index


class Queue:
    """Stands in for torch's index queue: a number of batches, or batches for a certain time."""

    def __init__(self, number: int | None) -> None:
        self.left, self.ends = number, time.perf_counter() + SAMPLING_S

    def get(self) -> Any:
        if self.left is None:
            return (0, [1]) if time.perf_counter() < self.ends else None
        self.left -= 1
        return (0, [1]) if self.left >= 0 else None


class Fetcher:
    """Stands in for torch's dataset fetcher."""

    auto_collation = True

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.collate_fn = dataset, list

    def fetch(self, indices: list[int]) -> Any:
        return self.collate_fn([self.dataset[index] for index in indices])


def _worker_loop(dataset: Any, index_queue: Any, start: Callable[[FrameType], None]) -> None:
    """Stand in for torch's function, which is found by its name."""
    collate_fn = list  # noqa: F841
    start(sys._getframe())
    fetcher = Fetcher(dataset)
    while (message := index_queue.get()) is not None:
        fetcher.fetch(message[1])


def run(dataset: Any, number: int | None, *, is_measured: bool, sampling: bool) -> tuple[int, Any]:
    """Return the main thread's CPU time in nanoseconds, and the worker."""
    rings = Rings(1)
    slot = claim_slot(rings.fd, rings.name, 1, 0)
    assert slot is not None
    worker = in_worker.Worker(slot, UserCode(), sampling=sampling)
    began = 0

    def start(frame: FrameType) -> None:
        nonlocal began
        if is_measured:
            worker.begin(dataset, frame)
        began = time.thread_time_ns()

    _worker_loop(dataset, Queue(number), start)
    took = time.thread_time_ns() - began
    sampler = worker._sampler
    worker.end()
    return took, sampler


def main() -> None:
    """Print the prices, and the schedule's costs at these prices."""
    torch.set_num_threads(1)
    nothing = Items([])
    with_us, without = (
        min(run(nothing, NUMBER, is_measured=is_measured, sampling=False)[0] for _ in range(ROUNDS)) / NUMBER
        for is_measured in (True, False)
    )
    print(f"A batch: {(with_us - without) / 1e3:.1f} µs of CPU time")
    _, sampler = run(Items([Sleeps() for _ in range(8)]), None, is_measured=True, sampling=True)
    first_s, fold = in_worker._INTERVAL_NS / 1e9, in_worker._LOOKS_PER_FOLD
    dense_s = first_s * fold
    looks = sum(1 for _ in iter_looks(SAMPLING_S, first_s, fold))
    price_us = sampler.cost_ns / looks / 1e3
    print(f"A sample: {price_us:.0f} µs of CPU time, of about {looks:,} in {SAMPLING_S:.0f} s")
    for name, seconds in (("5 s", dense_s), ("minute", 60.0), ("hour", 3600.0)):
        number = sum(1 for _ in iter_looks(seconds, first_s, fold))
        share = number * price_us / 1e6 / seconds
        print(
            f"First {name}: {number:,} samples, {number * price_us / 1e6:.2f} s, {100 * share:.2f}% of a CPU"
        )
    print(f"{os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")


def iter_looks(seconds: float, first_s: float, fold: int) -> Any:
    """Yield the average sampling times."""
    now = 0.0
    while now < seconds:
        now += max(first_s, now / fold)
        yield now


if __name__ == "__main__":
    main()
