"""Cost of the callback in libraries built on Lightning, and the gain from following its advice.

    python benchmarks/libraries.py with_darts with_gluonts
    python benchmarks/libraries.py --rounds 7 --python VENV/bin/python with_chemprop

Each fit of ``examples/libraries`` runs in its own process, in turns: without the callback, with it, and as
the report advises. Times cover only the fit, not imports: CPU time of all threads and workers, and wall time.
A prediction repeats in the same process; its CPU time is the median of 20. Ratios compare neighbors in a
round; the table has medians and quartiles. The fit without our callback has one that does nothing, because
some libraries do more work with any callback (neuralforecast pickles its list at each prediction).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parents[1] / "examples" / "libraries"
VARIANTS: Final = ("plain", "profiled", "faster")
PREDICTIONS: Final = 20


def main() -> None:
    """Print a line per library."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("examples", nargs="+", help="names of scripts in examples/libraries, without .py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the library")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.examples[0], options.one)))
        return
    print("| example | callback, fit (CPU) | callback, predict (CPU ms) | advice (CPU) | advice (wall) |")
    print("| --- | --- | --- | --- | --- |")
    for example in options.examples:
        print(row(example, [one_round(options.python, example) for _ in range(options.rounds)]), flush=True)


def one_round(python: str, example: str) -> dict[str, dict[str, float]]:
    """Run each variant once, in its own process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            command = [python, str(Path(__file__).resolve()), example, "--one", variant]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=True
            )
        found[variant] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def run_one(example: str, variant: str) -> dict[str, float]:
    """Return CPU and wall seconds of one fit, and CPU milliseconds of one prediction."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE))
    module = importlib.import_module(example)
    from lightning_modelprof import ModelProfCallback  # noqa: PLC0415  # after the library's own imports

    callbacks = [ModelProfCallback(dirpath="modelprof") if variant == "profiled" else idle_callback()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cpu, wall = cpu_seconds(), time.perf_counter()
        model = module.fit(callbacks, faster=variant == "faster")
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
        predict_ms = statistics.median(prediction(module.predict, model) for _ in range(PREDICTIONS)) * 1e3
    return {"cpu_s": cpu, "wall_s": wall, "predict_ms": predict_ms}


def idle_callback() -> object:
    """Return a callback of pytorch_lightning if it's loaded, else of lightning; both Trainers take either."""
    package = sys.modules.get("pytorch_lightning") or importlib.import_module("lightning.pytorch")
    return package.Callback()


def prediction(predict: Callable[[Any], object], model: Any) -> float:
    """Return the CPU seconds of one prediction."""
    begin = cpu_seconds()
    predict(model)
    return cpu_seconds() - begin


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def row(example: str, rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    cost = [one["profiled"]["cpu_s"] / one["plain"]["cpu_s"] for one in rounds]
    predict = [one["profiled"]["predict_ms"] - one["plain"]["predict_ms"] for one in rounds]
    cpu = [one["plain"]["cpu_s"] / one["faster"]["cpu_s"] for one in rounds]
    wall = [one["plain"]["wall_s"] / one["faster"]["wall_s"] for one in rounds]
    cells = (spread(cost, "x"), spread(predict, ""), spread(cpu, "x"), spread(wall, "x"))
    return f"| {example} | {' | '.join(cells)} |"


def spread(values: Sequence[float], unit: str) -> str:
    """Format median and quartiles."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return f"{middle:.2f}{unit} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
