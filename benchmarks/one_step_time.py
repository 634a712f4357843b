"""Computes the step time and related figures of an old run, without the package's own analysis.

    python benchmarks/one_step_time.py RUN...      # folders with a run.json

Version 0.x printed up to six step times: the loop's mean including validation, the mean of steady steps, the
trimmed mean, the median, and two from traces. A report now has one, the mean over its clean steps from fetch
to fetch. This script shows what each number became:

- step time: total duration of the clean steps / their number, the same as ``batch_cost`` and 1 / ``ips``;
- parts: total self time of each phase in these steps / their number, which add up to it;
- waiting for data: of that phase, or the device's wait if that is shorter;
- best case: the step time less the savings of the findings about steps, at most each phase's time.

It prints the four old step times next to the new one, and fails if the report shows another one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from lightning_modelprof.reading import read_report
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, StepTag

MS = 1e6


def old_step_times(record, totals) -> dict[str, float]:
    """Return the step times that old versions printed, in ns."""
    steps = record.steps
    profiler = [phase.key for phase in PHASES].index("profiler")
    ours = np.where(steps.phases_ns[:, profiler] == NOT_MEASURED, 0, steps.phases_ns[:, profiler])
    wall = steps.duration_ns - ours
    is_steady = (steps.tags & int(NOT_CLEAN & ~(StepTag.FIRST_OF_EPOCH | StepTag.VALIDATION))) == 0
    is_clean = (steps.tags & int(NOT_CLEAN)) == 0
    some = np.sort(wall[is_clean])
    cut = len(some) // 5
    outside = sum(ns for key, ns in record.outside_ns.items() if key != "profiler")
    return {
        "of the loop": (int(wall.sum()) + outside) / max(len(wall), 1),
        "steady": float(wall[is_steady].mean()) if is_steady.any() else float("nan"),
        "trimmed": float(some[cut : len(some) - cut].mean()) if len(some) else float("nan"),
        "median": float(np.median(some)) if len(some) else float("nan"),
    }


def new_numbers(totals) -> tuple[float, dict[str, float]]:
    """Return the step time and its parts in ns: sums over the clean steps / their number."""
    clean = totals.clean()
    count = len(clean)
    sums = clean.total("phases_ns").tolist()
    parts = {phase.key: ns / count for phase, ns in zip(PHASES, sums, strict=True) if ns}
    return int(clean.total("duration_ns")) / count, parts


def compare(folder: Path) -> bool:
    """Print one run's numbers; returns whether its report has the new ones."""
    record = load_run(folder).ranks[0]
    totals = StepTotals.of(record.steps) if record.totals is None else record.totals
    report = read_report(folder)
    card = report.step_card
    if card is None or not len(totals.clean()):
        print(f"{folder}: no clean step")
        return True
    step_ns, parts = new_numbers(totals)
    print(f"{folder}: step time {step_ns / MS:.4g} ms")
    for name, ns in old_step_times(record, totals).items():
        print(f"    was {ns / MS:.4g} ms {name}, {100 * (ns / step_ns - 1):+.1f}%")
    said = {part.key: part.ns for part in card.host}
    is_same = abs(card.wall_ns / step_ns - 1) < 1e-9 and said.keys() == parts.keys()
    for key, ns in sorted(parts.items(), key=lambda one: -one[1]):
        is_same &= abs(said.get(key, 0.0) - ns) <= 1e-9 * step_ns
        print(f"    {key}: {ns / MS:.4g} ms, {100 * ns / step_ns:.3g}%")
    left = dict(parts)
    for finding in sorted(report.findings, key=lambda one: not one.phases):
        if finding.saving_ns_per_step and finding.share_of == "step":
            keys = [key for key in finding.phases or left if key in left]
            there = sum(left[key] for key in keys)
            share = min(1.0, finding.saving_ns_per_step / there) if there else 0.0
            left |= {key: left[key] * (1 - share) for key in keys}
            after = step_ns - finding.saving_ns_per_step
            print(
                f"    {finding.kind}: {finding.saving_ns_per_step / MS:.4g} ms, after it {after / MS:.4g} ms"
            )
    best = sum(left.values())
    print(f"    best case {best / MS:.4g} ms, the report says {card.better_ns / MS:.4g} ms")
    return is_same


def main() -> int:
    """Compare all runs; returns 1 if a report has other numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path)
    results = [compare(folder) for folder in parser.parse_args().run]
    print(f"{sum(results)} of {len(results)} reports have these numbers")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
