"""How many workers are enough: the queue model's advice, compared with simulated and real loaders.

    python benchmarks/workers.py                   # all 20 pipelines, about 15 minutes
    python benchmarks/workers.py --only 0 7        # two of them
    python benchmarks/workers.py --simulated       # without real loaders, seconds

Twenty pipelines are drawn from a seed. Samples sleep in one to three transforms, for a constant, normal or
log-normal time, or one in twenty for twenty times as long. A batch has 1 to 64 of them and takes 3 to 100 ms
on average. The rest of a step sleeps 0 to 20 ms, and the loader has 0 to 8 workers. Times belong to the
dataset's samples, because a large file is large in each epoch. Each epoch has a different order. The criteria
were fixed beforehand:

- Simulated: the model gets the batches of one epoch. An event-driven simulation, which shares no code with
  the model, runs its advice over another epoch. It may lose 5% compared with the best of 0 to 8 workers and
  all prefetch factors.
- Real: the model gets measurements from the workers of a real DataLoader over one epoch, made with the
  callback's code. Then each worker count from 0 to 8 runs an epoch without it. A pipeline is predicted if
  steps/s are right within 15% for all nine.

A sleep takes some 60 us longer than requested. The real part only uses measurements, which include that.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_modelprof.analysis.steps.loader_queue import PREFETCH_FACTORS, LoaderQueue, loader_queue
from lightning_modelprof.measure.workers.probes import WorkerProbes
from lightning_modelprof.run.workers import WorkerBatches

SEED, PIPELINES, BATCHES, MOST_WORKERS, PREFETCH, WARM = 20261125, 20, 240, 8, 2, 16
KINDS = ("constant", "normal", "log-normal", "1 in 20 slow")
WITHIN, MOST_LOSS = 0.15, 0.05


@dataclass(frozen=True)
class Pipeline:
    """One drawn pipeline; times in seconds."""

    number: int
    kind: str
    transforms: int
    batch: int
    batch_s: float
    step_s: float
    workers: int

    @classmethod
    def drawn(cls, number: int) -> Pipeline:
        draw = np.random.default_rng([SEED, number])
        return cls(
            number=number,
            kind=KINDS[draw.integers(len(KINDS))],
            transforms=int(draw.integers(1, 4)),
            batch=round(64 ** draw.random()),
            batch_s=0.003 * 33 ** draw.random(),
            step_s=0.020 * draw.random(),
            workers=int(draw.integers(0, MOST_WORKERS + 1)),
        )

    def samples_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return each sample's time in each transform, shape (samples, transforms)."""
        draw = np.random.default_rng([SEED, self.number, 1])
        shape = (BATCHES * self.batch, self.transforms)
        if self.kind == "constant":
            times = np.ones(shape)
        elif self.kind == "normal":
            times = np.maximum(0, draw.normal(1, 0.3, shape))
        elif self.kind == "log-normal":
            times = draw.lognormal(-0.5 * 0.8**2, 0.8, shape)
        else:
            times = np.where(draw.random((shape[0], 1)) < 0.05, 20.0, 1.0) / 1.95 * np.ones(shape)
        return times * (self.batch_s / self.batch / self.transforms)

    def order(self, epoch: int) -> list[int]:
        return np.random.default_rng([SEED, self.number, 2, epoch]).permutation(BATCHES * self.batch).tolist()


@dataclass
class Epoch:
    """Measurements of one epoch: the loop's times in nanoseconds, and the workers' batches."""

    got_ns: list[int]
    waits_ns: list[int]
    rests_ns: list[int]
    rows: list[tuple[int, ...]]
    batches: WorkerBatches | None = None

    @property
    def step_ns(self) -> float:
        return (self.got_ns[-1] - self.got_ns[WARM - 1]) / (len(self.got_ns) - WARM)

    def advice(self, workers: int, cpus: float | None) -> LoaderQueue:
        """Return the model's advice for this epoch."""
        return loader_queue(
            self.batches or _columns(self.rows),
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            rests_ns=np.array(self.rests_ns[WARM:]),
            waits_ns=np.array(self.waits_ns[WARM:]),
            cpus=cpus,
            num_cpus=MOST_WORKERS,
        )


def _columns(rows: Sequence[tuple[int, ...]]) -> WorkerBatches:
    rows = sorted(rows, key=lambda row: row[3])
    worker, index, begin, ready, cpu = (tuple(column) for column in zip(*rows, strict=True))
    return WorkerBatches(
        worker=worker,
        index=index,
        begin_ns=begin,
        fetched_ns=ready,
        ready_ns=ready,
        cpu_ns=cpu,
        samples=(1,) * len(rows),
    )


def simulated(service_ns: Sequence[int], rest_ns: int, workers: int, prefetch: int) -> Epoch:
    """Simulate an epoch, event by event: a worker finishes a batch, or the loop requests one."""
    epoch = Epoch([], [], [rest_ns] * len(service_ns), [])
    todo: list[deque[int]] = [deque() for _ in range(workers)]
    idle = [True] * workers
    ready: set[int] = set()
    events: list[tuple[int, int, int, int]] = [(0, 1, 0, 0)]
    handed, asked_ns = 0, 0
    is_waiting = False

    def work(worker: int, now: int) -> None:
        if idle[worker] and todo[worker]:
            index = todo[worker].popleft()
            idle[worker] = False
            end = now + service_ns[index]
            epoch.rows.append((worker, index, now, end, 0))
            heapq.heappush(events, (end, 0, worker, index))

    def hand_out(now: int) -> None:
        nonlocal handed
        if handed < len(service_ns):
            todo[handed % workers].append(handed)
            work(handed % workers, now)
            handed += 1

    for _ in range(workers * prefetch):
        hand_out(0)
    while events and len(epoch.got_ns) < len(service_ns):
        now, is_asking, worker, index = heapq.heappop(events)
        if is_asking:
            asked_ns, is_waiting = now, True
            if not workers:
                index = len(epoch.got_ns)
                epoch.rows.append((0, index, now, now + service_ns[index], 0))
                now += service_ns[index]
                ready.add(index)
        else:
            ready.add(index)
            idle[worker] = True
            work(worker, now)
        if is_waiting and len(epoch.got_ns) in ready:
            is_waiting = False
            epoch.got_ns.append(now)
            epoch.waits_ns.append(now - asked_ns)
            if workers:
                hand_out(now)
            heapq.heappush(events, (now + rest_ns, 1, 0, 0))
    return epoch


class Sleeping(Dataset[tuple[int, int, torch.Tensor]]):
    """Samples that sleep in their transforms and report when they started."""

    def __init__(self, samples_s: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self.samples_s = samples_s

    def __len__(self) -> int:
        return len(self.samples_s)

    def __getitem__(self, index: int) -> tuple[int, int, torch.Tensor]:
        begin = time.perf_counter_ns(), time.thread_time_ns()
        for seconds in self.samples_s[index]:
            time.sleep(seconds)
        return *begin, torch.full((16,), index)


def joined(samples: Sequence[tuple[int, int, torch.Tensor]]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the batch, and its worker, start, end and CPU time."""
    batch = torch.stack([one for _, _, one in samples])
    info = get_worker_info()
    begin_ns, cpu_ns, _ = samples[0]
    times = (begin_ns, time.perf_counter_ns(), time.thread_time_ns() - cpu_ns)
    return batch, (0 if info is None else info.id, *times)


def real(
    pipeline: Pipeline, epoch: int, workers: int, prefetch: int = PREFETCH, *, is_watched: bool = False
) -> Epoch:
    """Run an epoch of a real loader, with a loop that sleeps."""
    loader = DataLoader(
        Sleeping(pipeline.samples_s()),
        batch_size=pipeline.batch,
        sampler=pipeline.order(epoch),
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        collate_fn=joined,
    )
    found = Epoch([], [], [], [])
    watched = WorkerProbes() if is_watched and workers else None
    if watched is not None:
        watched.add(loader)
    asked_ns = time.perf_counter_ns()
    for index, (_, (worker, begin_ns, ready_ns, cpu_ns)) in enumerate(loader):
        got_ns = time.perf_counter_ns()
        found.got_ns.append(got_ns)
        found.waits_ns.append(got_ns - asked_ns)
        found.rows.append((worker, index, begin_ns, ready_ns, cpu_ns))
        time.sleep(pipeline.step_s)
        asked_ns = time.perf_counter_ns()
        found.rests_ns.append(asked_ns - got_ns)
    if watched is not None:
        watched.end()
        [record] = watched.record()
        found.batches = record.batches
        assert len(found.batches) == BATCHES, record.notes
    return found


@dataclass
class Outcome:
    """One table row; steps/s by worker count."""

    pipeline: Pipeline
    advised: tuple[int, int] = (0, 0)
    loss: float = 0.0
    real_advised: tuple[int, int] | None = None
    real_loss: float = 0.0
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        return [one / other - 1 for one, other in zip(self.predicted, self.measured, strict=True)]

    @property
    def worst(self) -> float:
        return max(self.errors, key=abs)


def in_simulation(pipeline: Pipeline, outcome: Outcome) -> None:
    samples_s = pipeline.samples_s().sum(axis=1)

    def service_ns(epoch: int) -> list[int]:
        batches = samples_s[pipeline.order(epoch)].reshape(BATCHES, -1).sum(axis=1)
        return np.rint(1e9 * batches).astype(int).tolist()

    rest_ns = round(1e9 * pipeline.step_s)
    advised = (
        simulated(service_ns(0), rest_ns, pipeline.workers, PREFETCH).advice(pipeline.workers, None).advised
    )
    outcome.advised = advised.workers, advised.prefetch_factor
    other = service_ns(1)
    best = min(
        simulated(other, rest_ns, workers, prefetch).step_ns
        for workers in range(MOST_WORKERS + 1)
        for prefetch in PREFETCH_FACTORS
    )
    outcome.loss = simulated(other, rest_ns, *outcome.advised).step_ns / best - 1


def in_reality(pipeline: Pipeline, outcome: Outcome) -> None:
    cpus = float(len(os.sched_getaffinity(0)))
    found = real(pipeline, 0, pipeline.workers, is_watched=True).advice(pipeline.workers, cpus)
    steps = {(one.workers, one.prefetch_factor): one.steps_per_s for one in found.predictions}
    for workers in range(MOST_WORKERS + 1):
        outcome.predicted.append(steps[workers, PREFETCH])
        outcome.measured.append(1e9 / real(pipeline, 1 + workers, workers).step_ns)
    advised = found.advised.workers, found.advised.prefetch_factor
    outcome.real_advised = advised
    own = outcome.measured[advised[0]]
    if advised[1] != PREFETCH and advised[0]:
        own = 1e9 / real(pipeline, 1 + advised[0], *advised).step_ns
    outcome.real_loss = max(0.0, max(outcome.measured) / own - 1)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "| # | samples | batch | batch, ms | step, ms | workers | advised, simulated | loses"
        " | advised, real | loses | largest error of steps/s, 0 to 8 workers |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in outcomes:
        drawn = one.pipeline
        lines.append(
            f"| {drawn.number} | {drawn.kind} | {drawn.batch} | {1e3 * drawn.batch_s:.1f}"
            f" | {1e3 * drawn.step_s:.1f} | {drawn.workers} | {_numbers(one.advised)} | {one.loss:.1%}"
            + (
                f" | {_numbers(one.real_advised)} | {one.real_loss:.1%} | {one.worst:+.1%} |"
                if one.real_advised is not None
                else " | | | |"
            )
        )
    return lines


def _numbers(advised: tuple[int, int]) -> str:
    workers, prefetch = advised
    return f"{workers}" if prefetch == PREFETCH or not workers else f"{workers}, prefetch {prefetch}"


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    done = [one for one in outcomes if one.real_advised is not None]
    lines = [
        f"- Simulated: the advice loses at most {MOST_LOSS:.0%} in"
        f" {sum(one.loss <= MOST_LOSS for one in outcomes)} of {len(outcomes)}."
    ]
    if done:
        losses = [one.real_loss for one in done]
        lines += [
            f"- Predicted within {WITHIN:.0%} for all numbers of workers:"
            f" {sum(abs(one.worst) <= WITHIN for one in done)} of {len(done)}.",
            f"- Of a real sweep the advice loses at most {MOST_LOSS:.0%} in"
            f" {sum(one <= MOST_LOSS for one in losses)} of {len(done)}, {np.median(losses):.1%} in the"
            f" median, {max(losses):.1%} at most.",
        ]
    return lines


def main() -> None:
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", type=int, help="numbers of pipelines")
    parser.add_argument("--simulated", action="store_true", help="without real loaders")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    outcomes = []
    for number in arguments.only or range(PIPELINES):
        outcome = Outcome(Pipeline.drawn(number))
        in_simulation(outcome.pipeline, outcome)
        if not arguments.simulated:
            in_reality(outcome.pipeline, outcome)
        outcomes.append(outcome)
        print(table([outcome])[-1], flush=True)
    print("", *table(outcomes), "", *summary(outcomes), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))


if __name__ == "__main__":
    main()
