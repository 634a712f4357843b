"""How often `compare` is right on real fits: two identical fits, and a fit that is 5% slower.

    python benchmarks/compare_power.py
    python benchmarks/compare_power.py --pairs 20 --steps 200 --repeats 1 --json compare_power.json

Method:

* `--work compute` (the default) trains a few linear layers on data in memory. A step takes some milliseconds
  on one thread. It's as noisy as the machine: clock rates change, and other programs use the caches.
* `--work reading` trains one small layer on batches that take 4 ms to arrive, as from a disk. Waiting doesn't
  depend on CPU speed, so this is less noisy as long as a core is free.
* `--work waiting` is the same with batches that take 30 ms to arrive, so nearly all of a step has a known
  length on any machine. It shows the limits of the comparison, not of the machine.
* *A/A* compares two identical fits. "same" and "cannot tell" are right.
* *A/B* adds a busy wait to `training_step` of the second fit, for 5% of the mean step time of the last fits
  without it. The slowdown is caught if the comparison says "slower" (exit status 3) at the given tolerance.
  Waits aren't exact: `waiting` sleeps, and a sleep lasts a little longer than requested.
* The order of the two fits alternates from pair to pair, so a machine that gets slower or faster favors
  neither side. With `--repeats`, fits of the two sides alternate and share the steps.
* Each fit is saved and read back, as the command does it.
* Figures include the effect of other programs on the machine. "machine" shows how far identical fits differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.analysis.compare import Comparison, Outcome, compare
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.steps import StepTimings

WIDTH, DEPTH, BATCH = 256, 4, 128
SKIP_FIRST = 10
SLOWDOWN = 0.05
SECONDS = {"compute": 0.0, "reading": 0.004, "waiting": 0.030}
"""Time until a batch arrives, by kind of work."""


class Model(LightningModule):
    """Linear layers, with a busy wait in each step."""

    def __init__(self, depth: int, wait_ns: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.wait_ns = wait_ns

    def training_step(self, batch: Tensor) -> Tensor:
        end = time.perf_counter_ns() + self.wait_ns
        while time.perf_counter_ns() < end:
            pass
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Batches:
    """The same batch repeated, each after a wait."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps = steps
        self.seconds = seconds
        self.batch = torch.rand(BATCH, WIDTH)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.steps):
            if self.seconds:
                time.sleep(self.seconds)
            yield self.batch


def fit(work: str, steps: int, wait_ns: int = 0) -> StepTimings:
    """Train once, then save the run and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            callbacks=[
                ModelProfCallback(
                    skip_first=SKIP_FIRST,
                    active=0,
                    flops=False,
                    report={"terminal": False, "progress_bar": False},
                )
            ],
        )
        depth = DEPTH if work == "compute" else 1
        trainer.fit(Model(depth, wait_ns), Batches(steps + SKIP_FIRST, SECONDS[work]))
        return load_run(Path(folder)).ranks[0].steps


def mean_ns(steps: StepTimings) -> float:
    return float(steps.clean().duration_ns.mean())


@dataclass
class Count:
    """Outcomes of a series of comparisons."""

    outcomes: Counter[str] = field(default_factory=Counter)
    right: int = 0
    excludes_no_change: int = 0
    changes: list[float] = field(default_factory=list)
    half_widths: list[float] = field(default_factory=list)
    detectable: list[float] = field(default_factory=list)

    def add(self, result: Comparison, *, right: bool) -> None:
        assert result.low is not None
        assert result.high is not None
        assert result.times_as_fast is not None
        assert result.detectable is not None
        self.outcomes[result.outcome.value] += 1
        self.right += right
        self.excludes_no_change += not result.low <= 1 <= result.high
        self.changes.append(1 / result.times_as_fast - 1)
        self.half_widths.append((result.high - result.low) / 2)
        self.detectable.append(result.detectable)

    def summary(self, pairs: int) -> dict[str, Any]:
        return {
            "pairs": pairs,
            "right": self.right,
            "outcomes": dict(self.outcomes),
            "interval_excludes_no_change": self.excludes_no_change,
            "mean_change": float(np.mean(self.changes)),
            "standard_deviation_of_change": float(np.std(self.changes, ddof=1)),
            "mean_half_width": float(np.mean(self.half_widths)),
            "mean_detectable": float(np.mean(self.detectable)),
        }


def pair(
    work: str, steps: int, repeats: int, wait_ns: int, *, swapped: bool
) -> tuple[list[StepTimings], list[StepTimings]]:
    """Alternate fits of both sides: without, with, with, without, ..."""
    sides: tuple[list[StepTimings], list[StepTimings]] = ([], [])
    for repeat in range(repeats):
        order = (0, 1) if (repeat % 2 == 0) != swapped else (1, 0)
        for side in order:
            sides[side].append(fit(work, steps // repeats, wait_ns if side else 0))
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="clean steps a side (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="fits a side (default: %(default)s)")
    parser.add_argument("--work", choices=tuple(SECONDS), default="compute")
    parser.add_argument("--tolerance", type=float, default=0.02, help="as for compare (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--raw", type=Path, help="folder for the durations of the steps, as .npy")
    options = parser.parse_args()
    quiet()
    fit(options.work, options.steps)  # the first fit of a process is slower
    without = [mean_ns(fit(options.work, options.steps)) for _ in range(3)]
    same, slower = Count(), Count()
    for index in range(options.pairs):
        before, after = pair(options.work, options.steps, options.repeats, 0, swapped=index % 2 == 1)
        without += map(mean_ns, before + after)
        result = compare(before, after, tolerance=options.tolerance, paired=options.repeats > 1)
        same.add(result, right=result.outcome in (Outcome.SAME, Outcome.CANNOT_TELL))
        wait_ns = round(SLOWDOWN * float(np.mean(without[-3:])))
        bases, slowed = pair(options.work, options.steps, options.repeats, wait_ns, swapped=index % 2 == 1)
        result = compare(bases, slowed, tolerance=options.tolerance, paired=options.repeats > 1)
        slower.add(result, right=result.outcome is Outcome.SLOWER)
        without += map(mean_ns, bases)
        if options.raw is not None:
            save_raw(options.raw, index, before, after, bases, slowed)
        print(f"{index + 1:3}  A/A {same.changes[-1]:+.1%}   A/B {slower.changes[-1]:+.1%}", flush=True)
    report(options, same, slower, np.array(without))


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def save_raw(folder: Path, index: int, *sides: list[StepTimings]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, runs in zip(("aa_before", "aa_after", "ab_before", "ab_after"), sides, strict=True):
        for repeat, steps in enumerate(runs):
            np.save(folder / f"{index}_{name}_{repeat}.npy", steps.clean().duration_ns)


def report(options: argparse.Namespace, same: Count, slower: Count, without: np.ndarray) -> None:
    result = {
        "work": options.work,
        "steps": options.steps,
        "repeats": options.repeats,
        "tolerance": options.tolerance,
        "machine": {
            "mean_step_ns": float(without.mean()),
            "spread_of_fits": float(without.std() / without.mean()),
        },
        "same_thing": same.summary(options.pairs),
        "slower_by_5_percent": slower.summary(options.pairs),
    }
    print(f"\n{options.work}: {options.steps} clean steps a side in {options.repeats} fit(s)")
    print(f"A/A: same or cannot tell in {same.right} of {options.pairs}: {dict(same.outcomes)}")
    print(f"A/B: the slowdown of 5 % is caught in {slower.right} of {options.pairs}: {dict(slower.outcomes)}")
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
