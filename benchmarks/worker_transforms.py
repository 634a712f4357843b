"""Accuracy of transform times in workers: five transforms that sleep in a Compose, drawn from a seed.

    python benchmarks/worker_transforms.py               # 20 draws of about 10 s
    python benchmarks/worker_transforms.py 100 120       # other draws, by the numbers of their seeds

A draw has five transforms of one class that sleep 0.5 to 10 ms (log-uniform), one to three workers, and
batches of 2 to 16 samples. The truth is the time that the Compose measures for each transform and writes into
the sample. A draw is right if each average in the report is within twice its error of the truth. A transform
with at least a quarter of the time must also be within 15%.
"""

from __future__ import annotations

import math
import random
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof import LoopProfiler

DRAWS = (0, 20)
SECONDS = 10.0


class Sleep:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return sample


class Compose:
    """Measures each of its transforms."""

    def __init__(self, transforms: list[Sleep]) -> None:
        self.transforms = transforms

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        ends = [time.perf_counter()]
        for transform in self.transforms:
            sample = transform(sample)
            ends.append(time.perf_counter())
        return sample + torch.tensor(ends, dtype=torch.float64).diff()


class Data(Dataset[torch.Tensor]):
    def __init__(self, seconds: list[float], size: int) -> None:
        self.size = size
        self.transform = Compose([Sleep(one) for one in seconds])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.zeros(len(self.transform.transforms), dtype=torch.float64))


def draw(seed: int) -> tuple[list[tuple[float, float, float, float]], Any]:
    """Return truth and average in ms, error and share of each measured transform, and the loader's record."""
    chosen = random.Random(seed)
    seconds = [math.exp(chosen.uniform(math.log(0.000_5), math.log(0.01))) for _ in range(5)]
    workers, batch = chosen.randint(1, 3), chosen.choice((2, 4, 8, 16))
    size = batch * max(6, round(SECONDS * workers / sum(seconds) / batch))
    loader = DataLoader(Data(seconds, size), batch, num_workers=workers)
    total = torch.zeros(5, dtype=torch.float64)
    with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
        for samples in profiler.fetch(loader):
            total += samples.sum(0)
            profiler.step()
    (record,) = profiler.run.ranks[0].workers
    making_ns = sum(one.fetch_ns + one.collate_ns for one in record.workers)
    transforms = [one for one in record.calls if one.kind == "transform"]
    found = [
        (
            1e3 * float(took) / size,
            one.total_ns / size / 1e6,
            one.error_ns / size / 1e6,
            one.total_ns / making_ns,
        )
        for took, one in zip(total, transforms, strict=True)
        if one.total_ns is not None
    ]
    return found, record


def main() -> None:
    """Print the draws, and how many are right."""
    first, last = map(int, sys.argv[1:3] or DRAWS)
    right = within = measured = quarters = close = 0
    off: list[float] = []
    print(
        "| seed | workers | batch | truth, average ± error, ms | right |\n| ---: | ---: | ---: | --- | --- |"
    )
    for seed in range(first, last):
        found, record = draw(seed)
        good = [abs(average - truth) <= 2 * error for truth, average, error, _ in found]
        large = [(truth, average) for truth, average, _, share in found if share >= 0.25]
        near = [abs(average - truth) <= 0.15 * truth for truth, average in large]
        off += [(average - truth) / error for truth, average, error, _ in found]
        right, within, measured = right + all(good), within + sum(good), measured + len(good)
        quarters, close = quarters + len(near), close + sum(near)
        told = "; ".join(f"{truth:.2f}, {average:.2f} ± {error:.2f}" for truth, average, error, _ in found)
        of = f"{seed} | {record.num_workers} | {record.batch_size}"
        print(f"| {of} | {told} | {'yes' if all(good) else 'no'} |", flush=True)
    print(f"\nDraws in which all averages are within twice their errors: {right} of {last - first}.")
    print(f"Averages within twice their errors: {within} of {measured}.")
    print(f"Of a quarter of the time or more, within 15 %: {close} of {quarters}.")
    mean, spread = sum(off) / len(off), math.sqrt(sum(one * one for one in off) / len(off))
    print(f"Off by {mean:+.2f} errors on average, {spread:.2f} in the square mean.")


if __name__ == "__main__":
    main()
