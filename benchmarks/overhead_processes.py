"""Cost of profiling with a separate process per variant: TraceML's launcher, SimpleProfiler and ours.

    python benchmarks/overhead_processes.py
    python benchmarks/overhead_processes.py --rounds 9 --fits 5 --json overhead_processes.json

``traceml run`` starts TraceML, patches the process and runs an aggregator in another one. So TraceML can't
alternate with others in one process, as in ``overhead.py``. Here no variant does:

* In a round, each variant has one new process, which trains the model of ``overhead.py`` several times.
  *First fit* is the first fit's cost without its steps, which includes first imports and compilation. All
  other figures are means of the later fits.
* Each is compared with the bare Trainer of its own round. Two identical processes differ more than two fits
  in one process. Python's hash seed is the same in all.
* *Whole command* is the CPU time of all processes that the command waited for: Python's startup, imports, all
  fits, reports, and TraceML's launcher and aggregator.
* ``traceml run`` adds TraceML's callback, with its defaults. It doesn't time the fetch here, because the
  batches don't come from a DataLoader.
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
    """Train in a measured process, and write the figures to a file."""
    be_quiet()
    [variant] = [one for one in variants() if one.name == (BARE if name == TRACEML else name)]
    figures = [asdict(fit(variant.arguments, steps)) for _ in range(1 + fits)]
    answer.write_text(json.dumps({"fits": figures, "traceml_imported": "traceml_ai" in sys.modules}))


def command_of(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return a process's command line.

    Raises:
        FileNotFoundError: If the command ``traceml`` isn't installed.
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
        RuntimeError: If it failed, or if TraceML was imported in the wrong variant or missing in its own.
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
    """Run a process; if it fails, print the error and return ``None``."""
    try:
        return run_process(variant, options)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"skipped {variant.name}: {error}", flush=True)
        return None


def measure(chosen: list[Variant], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Alternate all variants; reports and skips those that fail."""
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
    """Measure and print, or run as a measured process."""
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
