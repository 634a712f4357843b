"""What profiling costs a step and a fit: CPU time of ours and of its peers, over a bare Trainer.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 10 --steps 1000 --json overhead.json

How it is measured, and why so:

* The model is one small linear layer on data in memory. What remains of a step is Lightning's own loop, so
  that some microseconds can be seen at all, and the relative cost of a step is the worst there is.
* `time.thread_time` counts the CPU time of the training thread, as waiting for a core on a shared machine is
  no cost of anybody's. The data loader reads it, the same way for all, after a warm-up and at the end: the
  figure is the mean of all steps between, so what is rare is in it. What a tool does on threads of its own is
  in the figure of all threads of the process.
* The variants take turns in one process, in rotating order. Each is compared with the bare Trainer, or with
  the logger alone, of its own round, as a machine's speed drifts by more than what is measured. The figure is
  the median of these differences, with a bootstrap interval; a quotient is one of two such medians.
* *Once* is the fit without its steps: set-up, report, and what it prints. Of ours each fit is as a process's
  first one, which prints its report; but imports are over, which ``startup.py`` and the first fits in
  ``overhead_processes.py`` have. Counting FLOPs and windows are switched off (``flops=False, active=0``).
* All variants get all rounds. AdvancedProfiler and gpuprof, ten times an empty callback and more in earlier
  runs, are no longer among them: 40 rounds of 3,000 steps of nine variants take ten minutes.
* What changes the whole process is measured in processes of its own, by ``overhead_processes.py``.
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
    """All variants in turns, after a warm-up: what the first use imports and compiles belongs to no round."""
    for variant in chosen:
        fit(variant.arguments, steps=50)
    for number in range(rounds):
        start = number % len(chosen)
        order = chosen[start:] + chosen[:start]
        # Backwards every other time, so that nobody always follows the same neighbour.
        for variant in reversed(order) if number % 2 else order:
            variant.fits.append(fit(variant.arguments, steps))
    return chosen


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


def summarize(measured: list[Variant]) -> dict[str, dict[str, Any]]:
    """Compares every variant with its base of the same round."""
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
        # What an empty callback takes is little, but what it takes is no tool's.
        empty = EMPTY if base == BARE else base
        for kind in ("once_ms", "once_all_ms"):
            result[f"{kind}_over"] = spread(figures[kind][name] - figures[kind][empty])
        results[name] = result
    return results


def chosen_variants(names: list[str] | None) -> list[Variant]:
    """Those of these names, and what they are compared with; all without names."""
    known = {variant.name: variant for variant in variants()}
    wanted = {BARE, EMPTY}
    for name in known if names is None else names:
        wanted |= {name, known[name].base, known[name].unit}
    return [variant for name, variant in known.items() if name in wanted]


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
