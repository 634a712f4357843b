"""Cost of profiling per step and per fit: CPU time of our callback and its peers, over a bare Trainer.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 10 --steps 1000 --json overhead.json

Method:

* The model is one small linear layer on data in memory. Almost all of a step is Lightning's own loop, so a
  few microseconds are visible, and the relative cost per step is the worst case.
* `time.thread_time` counts the training thread's CPU time, because waiting for a core on a shared machine is
  no tool's cost. The data loader reads it for all variants alike, after a warm-up and at the end. The figure
  is the mean over all steps in between, so it includes rare events. A tool's own threads are in the figure of
  all the process's threads.
* Variants alternate in one process, in rotating order. Each is compared with the bare Trainer, or with the
  logger alone, of its own round, because a machine's speed drifts by more than the measured costs. The figure
  is the median of these differences with a bootstrap interval. A quotient is one of two such medians.
* *Once* is the fit without its steps: setup, report, and printing. Each fit of ours counts as the process's
  first one, which prints its report. Imports aren't included; ``startup.py`` and the first fits in
  ``overhead_processes.py`` have them. FLOPs and windows are off (``flops=False, active=0``).
* All variants get all rounds. AdvancedProfiler and gpuprof cost at least ten times as much as an empty
  callback in earlier runs, so they're no longer included. 40 rounds of 3,000 steps of nine variants take ten
  minutes.
* ``overhead_processes.py`` measures tools that change the whole process, in separate processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import peers_tables as tables
import torch
from overhead_variants import BARE, EMPTY, Fit, Variant, be_quiet, fit, variants

PEERS = ("traceml-ai",)


def measure(chosen: list[Variant], rounds: int, steps: int) -> list[Variant]:
    """Alternate all variants, after a warm-up, so that no round includes first imports and compilation."""
    for variant in chosen:
        fit(variant.arguments, steps=50)
    for number in range(rounds):
        start = number % len(chosen)
        order = chosen[start:] + chosen[:start]
        # Reverse every other round, so that no variant always follows the same neighbor.
        for variant in reversed(order) if number % 2 else order:
            variant.fits.append(fit(variant.arguments, steps))
    return chosen


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], rounds: int) -> dict[str, float]:
    """Return a statistic of all rounds, with its bootstrapped 95% interval.

    Args:
        statistic: takes indices of rounds, shape (draws, rounds), and returns one figure per draw.
        rounds: number of rounds.
    """
    draws = np.random.default_rng(0).integers(rounds, size=(4000, rounds))
    low, high = np.quantile(statistic(draws), (0.025, 0.975))
    value = statistic(np.arange(rounds)[None])[0]
    return {"median": float(value), "interval_low": float(low), "interval_high": float(high)}


def spread(values: np.ndarray) -> dict[str, float]:
    """Return the median with its interval, minimum and maximum."""
    median = bootstrap(lambda draws: np.median(values[draws], axis=1), len(values))
    return {**median, "min": float(values.min()), "max": float(values.max())}


def quotient(costs: np.ndarray, unit: np.ndarray) -> dict[str, float]:
    """Divide the costs' median by the unit's median, because in a single round the unit can be near zero."""
    return bootstrap(
        lambda draws: np.median(costs[draws], axis=1) / np.median(unit[draws], axis=1), len(costs)
    )


def summarize(measured: list[Variant]) -> dict[str, dict[str, Any]]:
    """Compare each variant with its base of the same round."""
    figures = {
        kind.name: {one.name: np.array([getattr(of, kind.name) for of in one.fits]) for one in measured}
        for kind in fields(Fit)
    }
    results = {}
    for one in measured:
        name, base = one.name, one.base
        result: dict[str, Any] = {"label": one.label, "base": base, "fits": [asdict(of) for of in one.fits]}
        result["step_us"] = spread(figures["step_us"][name])
        for kind in ("step_us", "threads_us"):
            over = figures[kind][name] - figures[kind][base]
            result[f"{kind}_over"] = spread(over)
            result[f"{kind}_times"] = quotient(over, figures[kind][one.unit] - figures[kind][base])
        # An empty callback costs little, but no tool causes that cost.
        empty = EMPTY if base == BARE else base
        for kind in ("once_ms", "once_all_ms"):
            result[f"{kind}_over"] = spread(figures[kind][name] - figures[kind][empty])
        results[name] = result
    return results


def chosen_variants(names: list[str] | None) -> list[Variant]:
    """Return the variants with these names and their references; without names, all."""
    known = {variant.name: variant for variant in variants()}
    wanted = {BARE, EMPTY}
    for name in known if names is None else names:
        wanted |= {name, known[name].base, known[name].unit}
    return [variant for name, variant in known.items() if name in wanted]


def version_of(package: str) -> str:
    """Return the version from the package's metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def environment() -> dict[str, Any]:
    """Describe the environment of the figures."""
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
    names = [variant.name for variant in variants()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="fits of each variant (default: 40)")
    parser.add_argument("--steps", type=int, default=3000, help="measured in a fit (default: 3000)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 1:
        parser.error("expected --rounds and --steps of at least 1")
    return args


def main() -> None:
    args = parse_args()
    be_quiet()
    results = summarize(measure(chosen_variants(args.only), args.rounds, args.steps))
    document = {"environment": environment(), "rounds": args.rounds, "steps": args.steps, "variants": results}
    print(", ".join(f"{key} {value}" for key, value in document["environment"].items()))
    print(tables.overhead_table(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
