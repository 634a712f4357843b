"""What profiling costs where every fit has a process of its own: TraceML's launcher, gpuprof and ours.

    python benchmarks/overhead_processes.py
    python benchmarks/overhead_processes.py --rounds 9 --fits 5 --json overhead_processes.json

TraceML is started by ``traceml run``, patches the process and has an aggregator in another one, so it cannot
take turns with others in one process as in ``overhead.py``. Here nobody does:

* In a round each variant has one new process. It trains the model of ``overhead.py`` some times, the first of
  them as a warm-up. The fastest block of 50 steps of all its fits counts, and the mean over all their steps.
* Each is compared with the bare Trainer of its own round. Two processes of the same thing differ more than
  two fits in one: see "bare Trainer again". Python's hashes are the same in all.
* ``command`` is the CPU time of the whole command with all processes that it waited for: Python's start,
  imports, all fits, reports, and TraceML's launcher and aggregator.
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
from pathlib import Path
from statistics import fmean
from typing import Any

from overhead import environment, print_table, summarize
from overhead_variants import BARE, BLOCK, EMPTY, GPUPROF, OURS, Variant, be_quiet, variants

TRACEML = "traceml"
NAMES = (BARE, "bare-again", EMPTY, OURS, "ours-unsampled", GPUPROF, TRACEML)
ROOT = Path(__file__).resolve().parent.parent


def fit_some_times(name: str, steps: int, fits: int, answer: Path) -> None:
    """What a process does: train, and write the figures to a file."""
    be_quiet()
    trained = BARE if name == TRACEML else name
    [variant] = [one for one in variants() if one.name == trained]
    variant.run(steps)
    variant.clear()
    for _ in range(fits):
        variant.run(steps)
    figures = {
        "step_us": min(variant.step_us),
        "mean_us": fmean(variant.mean_us),
        "threads_us": fmean(variant.threads_us),
        "once_ms": fmean(variant.once_ms),
        "traceml_imported": "traceml_ai" in sys.modules,
    }
    answer.write_text(json.dumps(figures))


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


def run_process(variant: Variant, options: argparse.Namespace) -> float:
    """Add a process's figures to a variant; returns the CPU seconds of its command.

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
        figures = json.loads((folder / "answer.json").read_text())
    if figures["traceml_imported"] != (variant.name == TRACEML):
        raise RuntimeError(f"expected TraceML in {TRACEML} and nowhere else, got it wrong in {variant.name}")
    variant.step_us.append(figures["step_us"])
    variant.mean_us.append(figures["mean_us"])
    variant.threads_us.append(figures["threads_us"])
    variant.once_ms.append(figures["once_ms"])
    return command_s


def try_process(variant: Variant, options: argparse.Namespace) -> float | None:
    """``None`` for a process that failed, which is said."""
    try:
        return run_process(variant, options)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"skipped {variant.name}: {error}", flush=True)
        return None


def measure(chosen: list[Variant], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All variants in turns; those that fail are left out and said so."""
    commands: dict[str, list[float]] = {variant.name: [] for variant in chosen}
    usable = list(chosen)
    for number in range(options.rounds):
        start = number % len(usable)
        for variant in usable[start:] + usable[:start]:
            command_s = try_process(variant, options)
            if command_s is None:
                usable.remove(variant)
            else:
                commands[variant.name].append(command_s)
    results = summarize(usable)
    for name, result in results.items():
        result["command_s"] = {
            "median": sorted(commands[name])[len(commands[name]) // 2],
            "min": min(commands[name]),
            "max": max(commands[name]),
        }
    return results


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="processes of each variant (default: 7)")
    parser.add_argument("--fits", type=int, default=4, help="counted fits of a process (default: 4)")
    parser.add_argument("--steps", type=int, default=300, help=f"of a fit, a multiple of {BLOCK}")
    parser.add_argument("--only", nargs="+", choices=NAMES[1:], default=NAMES[1:], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or options.fits < 1 or options.steps < BLOCK or options.steps % BLOCK:
        parser.error(f"expected --rounds and --fits of at least 1 and --steps as a multiple of {BLOCK}")
    return options


def main() -> None:
    """Measure and print, or be one of the measured processes."""
    options = parse_args()
    if options.worker:
        fit_some_times(options.worker, options.steps, options.fits, options.answer)
        return
    about = environment()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{options.rounds} processes of {options.fits} fits of {options.steps} steps each")
    known = {variant.name: variant for variant in variants()}
    known[TRACEML] = Variant(TRACEML, "TraceML, traceml run", lambda folder: {})
    results = measure([known[name] for name in NAMES if name == BARE or name in options.only], options)
    print_table(results)
    print()
    for result in results.values():
        figures = result["command_s"]
        print(
            f"{result['label']:<34}command {figures['median']:6.1f} CPU s"
            f" ({figures['min']:.1f} .. {figures['max']:.1f})"
        )
    if options.json:
        document = {"environment": about, "rounds": options.rounds, "fits": options.fits}
        options.json.write_text(
            json.dumps({**document, "steps": options.steps, "variants": results}, indent=1)
        )


if __name__ == "__main__":
    main()
