"""What looking into workers costs there: the price of a timed call, sample and batch, and cProfile beside it.

    python benchmarks/worker_cost.py               # about two minutes, on a machine that does nothing else

The price of one is the least CPU time of several rounds over many calls that do nothing, less the same calls
without us. What a sample of 1 ms with 8 transforms costs is these prices times how often each comes, which a
test counts (tests/measure/test_workers.py). Beside it stand batches of such samples, one by one in random
order without us, with us and with cProfile, which can be switched on in a worker without us. There the
caches are full of other things, so a call costs more than in a loop of nothing else. The thread that looks at
statements is switched off in all of it. At 20 ms between looks at first, its share is that of the training's:
see docs/cost.md.
"""

from __future__ import annotations

import cProfile
import hashlib
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.in_worker import Worker
from lightning_modelprof.measure.workers.ring import Rings, claim_slot

TRANSFORMS, SAMPLE_NS, BATCH = 8, 1_000_000, 8
ROUNDS, NUMBER = 15, 20_000
WARMUP, BATCHES = 20, 800
DATA = memoryview(bytes(10_000_000))


class Nothing:
    def __call__(self, value: Any) -> Any:
        return value


class Computing:
    """Counts, the same number of times in each call."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def __call__(self, value: Any) -> Any:
        for _ in range(self.turns):
            pass
        return value


class Hashing(Computing):
    """Works in C, as most transforms do."""

    def __call__(self, value: Any) -> Any:
        hashlib.sha256(DATA[: self.turns]).digest()
        return value


class Items(Dataset[Any]):
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __getitem__(self, index: int) -> Any:
        for transform in self.transforms:
            index = transform(index)
        return index


def cpu_ns(work: Callable[[], Any]) -> int:
    began = time.thread_time_ns()
    work()
    return time.thread_time_ns() - began


def least_ns(work: Callable[[], Any], number: int) -> float:
    """The least CPU time of one of so many."""
    return min(cpu_ns(work) for _ in range(ROUNDS)) / number


def begun(data: Items) -> Worker:
    rings = Rings(1)
    slot = claim_slot(rings.fd, rings.name, 1, 0)
    assert slot is not None
    worker = Worker(slot, UserCode(), sampling=False)
    worker.begin(data)
    return worker


def batches(data: Items, collate: Callable[[Any], Any], number: int, size: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(number):
            collate([data[index] for index in range(size)])

    return work


def prices() -> tuple[float, float, float]:
    """Nanoseconds of CPU time that a timed call, a sample without calls, and a batch without samples cost."""
    call, timed = Nothing(), Items([Nothing()])
    bare = least_ns(lambda: [call(1) for _ in range(NUMBER)], NUMBER)
    worker = begun(timed)
    ours = timed.transforms[0]
    per_call = least_ns(lambda: [ours(1) for _ in range(NUMBER)], NUMBER) - bare
    worker.end()

    plain, timed = Items([]), Items([])
    bare = least_ns(lambda: [plain[1] for _ in range(NUMBER)], NUMBER)
    worker = begun(timed)
    per_sample = least_ns(lambda: [timed[1] for _ in range(NUMBER)], NUMBER) - bare
    worker.end()

    worker = begun(Items([]))
    samples = (1,)
    now = [time.perf_counter_ns(), time.thread_time_ns(), 1, 0]  # as a first sample leaves it

    def collate() -> None:
        worker._calls.batch[:] = now
        worker.collate(list, samples)

    bare = least_ns(lambda: [list(samples) for _ in range(NUMBER)], NUMBER)
    per_batch = least_ns(lambda: [collate() for _ in range(NUMBER)], NUMBER) - bare
    worker.end()
    return per_call, per_sample, per_batch


def compare(kind: type[Computing]) -> None:
    """Batches whose transforms are of this kind without us, with us and with cProfile, in random order."""
    turns = 1_000
    while min(cpu_ns(partial(kind(turns), 1)) for _ in range(ROUNDS)) * TRANSFORMS < SAMPLE_NS:
        turns = round(turns * 1.1)
    items = [Items([kind(turns) for _ in range(TRANSFORMS)]) for _ in range(4)]
    # Its estimate of its own cost is set aside: all batches are timed.
    worker, profile = begun(items[2]), cProfile.Profile()
    one_batch = {
        "without": batches(items[0], list, 1, BATCH),
        "without, again": batches(items[1], list, 1, BATCH),
        "ours": batches(items[2], lambda data: worker.collate(list, data), 1, BATCH),
        "cProfile": partial(profile.runcall, batches(items[3], list, 1, BATCH)),
    }
    runs: dict[str, list[int]] = {name: [] for name in one_batch}
    order = random.Random(0)
    for number in range(WARMUP + BATCHES):
        for name in order.sample(list(one_batch), len(one_batch)):
            took_ns = cpu_ns(one_batch[name])
            if number >= WARMUP:
                runs[name].append(took_ns)
        worker._timed_cost_ns = 0
    worker.end()
    for name in ("without, again", "ours", "cProfile"):
        ratios = [one / bare for one, bare in zip(runs[name], runs["without"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {kind.__name__} | {name} | {middle:.4f} ({low:.4f} to {high:.4f}) |")


def main() -> None:
    """Print two tables."""
    torch.set_num_threads(1)
    per_call, per_sample, per_batch = prices()
    whole = TRANSFORMS * per_call + per_sample + per_batch / BATCH
    print("| one timed | CPU time |\n|---|---|")
    for name, price in (("call", per_call), ("sample", per_sample), ("batch", per_batch)):
        print(f"| {name} | {price / 1e3:.2f} us |")
    print(
        f"\nA sample of 1 ms with {TRANSFORMS} transforms in batches of {BATCH}: {whole / 1e3:.1f} us,"
        f" {100 * whole / SAMPLE_NS:.2f} % of it.\n"
    )

    print("| samples of 1 ms | in a worker | CPU time over that without (median, quartiles) |\n|---|---|---|")
    for kind in (Hashing, Computing):
        compare(kind)
    print(f"\n{os.cpu_count()} CPUs, torch {torch.__version__}")


if __name__ == "__main__":
    main()
