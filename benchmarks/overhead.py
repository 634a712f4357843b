"""What profiling costs: main-thread CPU time per training step of ours and of its peers, over a bare Trainer.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 40 --steps 500 --json overhead.json

How it is measured, and why so:

* The model is one small linear layer on data in memory. What remains of a step is Lightning's own loop, so
  that some microseconds can be seen at all, and the relative cost of a step is the worst there is.
* `time.thread_time` counts the CPU time of the training thread, as waiting for a core on a shared machine is
  no cost of anybody's. The data loader reads it, the same way for all, every 50 steps: one logging interval.
  A run counts with its fastest block of 50 steps, as in timeit: what else a machine does only ever adds. The
  mean over all its steps is there too, for costs that are rare.
* The variants take turns in one process, many short runs in rotating order. Each is compared with the bare
  Trainer of its own round, as a machine's speed drifts by more than what is measured. The figure is the
  median of these differences, with a bootstrap interval, and the lowest and highest round.
* What a tool does on threads of its own is in no figure of the training thread. So CPU time of all threads of
  the process is there too, as a mean over all steps: in short fits, as the first seconds are the most
  expensive ones of anything that samples.
* The bare Trainer runs twice in each round: what "bare again" shows is the noise that is left.
* What happens once per run (set-up, the report at the end) is not in the steps; it has a column of its own.
* What changes the whole process is measured in processes of its own, by ``overhead_processes.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from overhead_variants import BARE, BLOCK, EMPTY, WARM_UP_STEPS, Variant, be_quiet, variants

PEERS = ("gpuprof", "traceml-ai")


def measure(chosen: list[Variant], rounds: int, steps: int) -> list[Variant]:
    """Runs all variants in turns; returns those that could run."""
    usable = []
    for variant in chosen:
        # Also a warm-up: what the first use imports and compiles belongs to no round.
        try:
            variant.run(steps)
        except (ImportError, MisconfigurationException) as error:
            print(f"skipped {variant.name}: {error}")
            continue
        variant.clear()
        usable.append(variant)

    for number in range(rounds):
        start = number % len(usable)
        order = usable[start:] + usable[:start]
        # Backwards every other time, so that nobody always follows the same neighbour.
        for variant in reversed(order) if number % 2 else order:
            variant.run(steps)
    return usable


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], rounds: int) -> dict[str, float]:
    """A statistic of all rounds, and its 95 % interval when the rounds are drawn anew.

    Args:
        statistic: takes indices of rounds, shape (draws, rounds), and returns one figure per draw.
        rounds: how many there are.
    """
    draws = np.random.default_rng(0).integers(rounds, size=(4000, rounds))
    low, high = np.quantile(statistic(draws), (0.025, 0.975))
    value = statistic(np.arange(rounds)[None])[0]
    return {"median": float(value), "interval_low": float(low), "interval_high": float(high)}


def spread(values: np.ndarray) -> dict[str, float]:
    """Median with its interval, lowest and highest."""
    median = bootstrap(lambda draws: np.median(values[draws], axis=1), len(values))
    return {**median, "min": float(values.min()), "max": float(values.max())}


def quotient(costs: np.ndarray, unit: np.ndarray) -> dict[str, float]:
    """Median of the costs over the median of the unit; in a single round the unit can be near zero."""
    return bootstrap(
        lambda draws: np.median(costs[draws], axis=1) / np.median(unit[draws], axis=1), len(costs)
    )


def summarize(usable: list[Variant]) -> dict[str, dict[str, Any]]:
    """Compares every variant with the bare Trainer of the same round."""
    step_us = {variant.name: np.array(variant.step_us) for variant in usable}
    mean_us = {variant.name: np.array(variant.mean_us) for variant in usable}
    threads_us = {variant.name: np.array(variant.threads_us) for variant in usable}
    once_ms = {variant.name: np.array(variant.once_ms) for variant in usable}
    over_bare = {name: values - step_us[BARE] for name, values in step_us.items()}
    return {
        variant.name: {
            "label": variant.label,
            "step_us": spread(step_us[variant.name]),
            "over_bare_us": spread(over_bare[variant.name]),
            "mean_over_bare_us": spread(mean_us[variant.name] - mean_us[BARE]),
            "threads_over_bare_us": spread(threads_us[variant.name] - threads_us[BARE]),
            "step_ratio": spread(step_us[variant.name] / step_us[BARE]),
            "cost_in_empty_callbacks": (
                quotient(over_bare[variant.name], over_bare[EMPTY]) if EMPTY in over_bare else None
            ),
            "once_over_bare_ms": float(np.median(once_ms[variant.name] - once_ms[BARE])),
            "rounds_step_us": variant.step_us,
            "rounds_mean_us": variant.mean_us,
        }
        for variant in usable
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    print(f"\nbare Trainer: {results[BARE]['step_us']['median']:.1f} us of CPU time per step (median)\n")
    print(
        f"{'':<34}{'us/step':>8}{'95 % interval':>18}{'min .. max':>16}{'mean':>8}{'threads':>9}"
        f"{'x empty':>9}{'95 % interval':>16}{'step':>8}{'once, ms':>10}"
    )
    for name, result in results.items():
        if name == BARE:
            continue
        cost, empties = result["over_bare_us"], result["cost_in_empty_callbacks"]
        interval = f"{cost['interval_low']:+.1f} .. {cost['interval_high']:+.1f}"
        extremes = f"{cost['min']:+.0f} .. {cost['max']:+.0f}"
        times, times_interval = "–", "–"
        if empties:
            times = f"{empties['median']:.2f}"
            times_interval = f"{empties['interval_low']:.2f} .. {empties['interval_high']:.2f}"
        print(
            f"{result['label']:<34}{cost['median']:>+8.1f}{interval:>18}{extremes:>16}"
            f"{result['mean_over_bare_us']['median']:>+8.1f}"
            f"{result['threads_over_bare_us']['median']:>+9.1f}{times:>9}{times_interval:>16}{result['step_ratio']['median']:>7.3f}x"
            f"{result['once_over_bare_ms']:>+10.1f}"
        )
    print(
        "\nus/step: CPU time over the bare Trainer of the same round, fastest blocks. mean: of all steps."
        "\nthreads: mean of all steps, of all threads of the process."
        "\nx empty: us/step in costs of an empty Callback. step: CPU time of a step over that of the bare"
        "\nTrainer. once: outside the steps (set-up, report), per run, over the bare Trainer. Compare what"
        "\nhas a logger with the logger alone."
    )


def version_of(package: str) -> str:
    """As its metadata says."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        models = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
        ]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        **{package: version_of(package) for package in PEERS},
        "system": f"{platform.system()} {platform.machine()}",
    }


def parse_args() -> argparse.Namespace:
    names = [variant.name for variant in variants() if variant.name != BARE]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="runs of each variant (default: 40)")
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help=f"steps measured in a run, a multiple of {BLOCK} (default: 300)",
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < BLOCK or args.steps % BLOCK:
        parser.error(f"expected --rounds of at least 1 and --steps as a multiple of {BLOCK}")
    return args


def main() -> None:
    args = parse_args()
    be_quiet()
    about = environment()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{args.rounds} rounds of {args.steps} steps after {WARM_UP_STEPS} of warm-up")
    chosen = [v for v in variants() if v.name == BARE or not args.only or v.name in args.only]
    results = summarize(measure(chosen, args.rounds, args.steps))
    print_table(results)
    if args.json:
        document = {"environment": about, "rounds": args.rounds, "steps": args.steps, "variants": results}
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
