"""What profiling costs where every fit has a process of its own: TraceML's launcher, SimpleProfiler and ours.

    python benchmarks/overhead_processes.py
    python benchmarks/overhead_processes.py --rounds 9 --fits 5 --json overhead_processes.json

TraceML is started by ``traceml run``, patches the process and has an aggregator in another one, so it cannot
take turns with others in one process as in ``overhead.py``. Here nobody does:

* In a round each variant has one new process. It trains the model of ``overhead.py`` some times. *First fit*
  is what the first of them takes once, which has what a first use imports and compiles; all else is the mean
  of the fits after it.
* Each is compared with the bare Trainer of its own round. Two processes of the same thing differ more than
  two fits in one. Python's hashes are the same in all.
* *Whole command* is the CPU time of all processes that it waited for: Python's start, imports, all fits,
  reports, and TraceML's launcher and aggregator.
* TraceML has its callback added by ``traceml run``, with its defaults; it does not time the fetch here, as
  the batches come from no DataLoader.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import peers_tables as tables
from overhead import environment, spread, summarize
from overhead_variants import BARE, EMPTY, OURS, Fit, Variant, be_quiet, fit, variants

TRACEML = "traceml"
NAMES = (BARE, EMPTY, OURS, "simple-profiler", TRACEML)
ROOT = Path(__file__).resolve().parent.parent


def fit_some_times(name: str, steps: int, fits: int, answer: Path) -> None:
    """What a process does: train, and write the figures to a file."""
    be_quiet()
    [variant] = [one for one in variants() if one.name == (BARE if name == TRACEML else name)]
    figures = [asdict(fit(variant.arguments, steps)) for _ in range(1 + fits)]
    answer.write_text(json.dumps({"fits": figures, "traceml_imported": "traceml_ai" in sys.modules}))


def command_of(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a process.

    Raises:
        FileNotFoundError: when the command ``traceml`` is not there.
    """
    script = str(Path(__file__).resolve())
    worker = ["--worker", name, "--steps", str(options.steps), "--fits", str(options.fits)]
    worker += ["--answer", str(folder / "answer.json")]
    if name != TRACEML:
        return [sys.executable, script, *worker]
    found = shutil.which(TRACEML, path=str(Path(sys.executable).parent)) or shutil.which(TRACEML)
    if found is None:
        raise FileNotFoundError("the command traceml is not installed")
    return [found, "run", script, "--logs-dir", str(folder), "--run-name", "run", "--args", *worker]


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_process(variant: Variant, options: argparse.Namespace) -> tuple[float, float]:
    """Add the mean of a process's later fits to a variant.

    Returns:
        What its first fit took once, in ms, and the CPU seconds of its command.

    Raises:
        RuntimeError: when it failed, or when TraceML was not where it should be, or where it should not.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        command, begin = command_of(variant.name, folder, options), children_s()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        command_s = children_s() - begin
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip()[-300:])
        answer = json.loads((folder / "answer.json").read_text())
    if answer["traceml_imported"] != (variant.name == TRACEML):
        raise RuntimeError(f"expected TraceML in {TRACEML} and nowhere else, got it wrong in {variant.name}")
    first, *later = answer["fits"]
    variant.fits.append(Fit(**{kind.name: fmean(one[kind.name] for one in later) for kind in fields(Fit)}))
    return first["once_ms"], command_s


def try_process(variant: Variant, options: argparse.Namespace) -> tuple[float, float] | None:
    """``None`` for a process that failed, which is said."""
    try:
        return run_process(variant, options)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"skipped {variant.name}: {error}", flush=True)
        return None


def measure(chosen: list[Variant], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All variants in turns; those that fail are left out and said so."""
    taken: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in chosen}
    usable = list(chosen)
    for number in range(options.rounds):
        start = number % len(usable)
        for variant in usable[start:] + usable[:start]:
            figures = try_process(variant, options)
            if figures is None:
                usable.remove(variant)
            else:
                taken[variant.name].append(figures)
    results = summarize(usable)
    for name, result in results.items():
        first, command = np.array(taken[name]).T
        result["first_ms_over"] = spread(first - np.array(taken[EMPTY]).T[0])
        result["command_s"] = spread(command)
    return results


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="processes of each variant (default: 7)")
    parser.add_argument("--fits", type=int, default=3, help="counted fits of a process (default: 3)")
    parser.add_argument("--steps", type=int, default=1000, help="of a fit (default: 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or options.fits < 1 or options.steps < 1:
        parser.error("expected --rounds, --fits and --steps of at least 1")
    return options


def main() -> None:
    """Measure and print, or be one of the measured processes."""
    options = parse_args()
    if options.worker:
        fit_some_times(options.worker, options.steps, options.fits, options.answer)
        return
    known = {variant.name: variant for variant in variants()}
    known[TRACEML] = Variant(TRACEML, "TraceML, traceml run", lambda folder: {})
    results = measure([known[name] for name in NAMES], options)
    document = {"environment": environment(), "rounds": options.rounds, "fits": options.fits}
    document |= {"steps": options.steps, "variants": results}
    print(tables.overhead_table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
