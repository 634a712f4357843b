"""Accuracy of the recommended worker count for CPU-bound batches, on an idle and on a busy machine.

    python benchmarks/worker_cpus.py               # about four minutes, on a machine that does nothing else

Sixteen pipelines are drawn from seeds. A batch of 1 to 8 samples takes 4 to 32 ms, of which 40 to 100% is its
worker's CPU time and the rest sleep. The rest of a step takes 2 to 17 ms, with none, half or all of it CPU
time. LoopProfiler measures it with 0 to 3 workers. Then 0 to 4 workers run an epoch without us. During the
last eight, another process computes all the time. ``benchmarks/workers.py`` has samples that sleep.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof import LoopProfiler
from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue, queue_of
from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue
from lightning_modelprof.analysis.steps.workers import measured_workers

SEEDS, PIPELINES, BATCHES, WARM, MOST_WORKERS, PREFETCH = {"quiet": 11, "busy": 12}, 8, 150, 16, 4, 2
WITHIN = 0.15


def work(seconds: float, computing: float) -> None:
    """Take this long, partly on a CPU."""
    ends = time.thread_time() + seconds * computing
    while time.thread_time() < ends:
        pass
    if computing < 1:
        time.sleep(seconds * (1 - computing))


class Samples(Dataset[int]):
    def __init__(self, times_s: list[float], computing: float) -> None:
        self.times_s, self.computing = times_s, computing

    def __len__(self) -> int:
        return len(self.times_s)

    def __getitem__(self, index: int) -> int:
        work(self.times_s[index], self.computing)
        return index


@dataclass(frozen=True)
class Pipeline:
    """Times in seconds; ``spread`` is the standard deviation of the logarithm of the sample times."""

    batch: int
    batch_s: float
    computing: float
    rest_s: float
    rest_computing: float
    workers: int
    spread: float

    @classmethod
    def drawn(cls, seed: int, number: int) -> Pipeline:
        draw = np.random.default_rng([seed, number])
        return cls(
            batch=int(draw.integers(1, 9)),
            batch_s=0.004 * 8 ** draw.random(),
            computing=float(draw.choice([1.0, 1.0, 0.7, 0.4])),
            rest_s=0.002 + 0.015 * draw.random(),
            rest_computing=float(draw.choice([1.0, 1.0, 0.5, 0.0])),
            workers=int(draw.integers(0, 4)),
            spread=float(draw.choice([0.0, 0.3, 0.8])),
        )

    def loader(self, workers: int) -> DataLoader[int]:
        draw = np.random.default_rng([99])
        times = draw.lognormal(-0.5 * self.spread**2, self.spread, BATCHES * self.batch)
        samples = Samples((times * self.batch_s / self.batch).tolist(), self.computing)
        return DataLoader(
            samples, self.batch, num_workers=workers, multiprocessing_context="fork" if workers else None
        )

    def rest(self) -> None:
        work(self.rest_s, self.rest_computing)

    def taken_s(self, workers: int) -> float:
        """Return the step time of an epoch without us."""
        got = []
        for _ in self.loader(workers):
            got.append(time.perf_counter())
            self.rest()
        return (got[-1] - got[WARM - 1]) / (len(got) - WARM)

    def predicted(self) -> LoaderQueue:
        with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
            for _ in profiler.fetch(self.loader(self.workers)):
                with profiler.phase("forward"):
                    self.rest()
                profiler.step()
        assert profiler.run is not None
        facts = Facts(profiler.run)
        if not self.workers:
            return facts.read(fetch_queue)
        return queue_of(facts, facts.read(measured_workers)[0].record)


def compare(pipeline: Pipeline, say: Callable[[str], None]) -> list[float]:
    """Return the relative errors of predicted step times, and print a table row."""
    queue = pipeline.predicted()
    real = {number: pipeline.taken_s(number) for number in range(MOST_WORKERS + 1)}
    predicted = {
        one.workers: one.step_ns / 1e9
        for one in queue.predictions
        if one.workers <= MOST_WORKERS and (not one.workers or one.prefetch_factor == PREFETCH)
    }
    errors = [predicted[number] / real[number] - 1 for number in predicted]
    lost = real[min(queue.advised.workers, MOST_WORKERS)] / min(real.values()) - 1
    told = ", ".join(f"{one:+.0%}" for one in errors)
    say(
        f"| {1e3 * pipeline.batch_s:.1f} | {pipeline.computing:.0%} | {1e3 * pipeline.rest_s:.1f} |"
        f" {pipeline.rest_computing:.0%} | {pipeline.workers} | {told} |"
        f" {queue.advised.workers} | {lost:.0%} |"
    )
    return errors


def main() -> None:
    """Print a table for an idle and one for a busy machine."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, seed in SEEDS.items():
        columns = (
            "batch, ms",
            "computes",
            "rest, ms",
            "computes",
            "workers",
            "predicted over real step, by workers",
        )
        print(f"\n{name}\n\n| {' | '.join((*columns, 'advised', 'loses'))} |\n|{'---|' * 8}")
        errors: list[float] = []
        for number in range(PIPELINES):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if name == "busy" else None
            try:
                errors += compare(Pipeline.drawn(seed, number), print)
            finally:
                if other is not None:
                    other.kill()
        sizes = [abs(one) for one in errors]
        print(
            f"\n{sum(one <= WITHIN for one in sizes)} of {len(sizes)} within {WITHIN:.0%}, the median off by"
            f" {np.median(sizes):.0%}, the worst by {max(sizes):.0%}"
        )


if __name__ == "__main__":
    main()
