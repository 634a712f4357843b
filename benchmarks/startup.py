"""Times of imports and of the command line until it responds, in fresh processes, and the imported modules.

    python benchmarks/startup.py

Figures are CPU time of the process, user and system, as the operating system reports it. Other work on the
machine affects it less than wall time. The first run of each is discarded because it may compile bytecode,
which later runs use.

One process measures ``import lightning_modelprof`` after ``import lightning``, because two processes that
import Lightning differ by more than that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers_tables as tables

ROUNDS = 10
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
THREE_EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": name, "ts": 10 * index, "dur": 3, "pid": 1, "tid": 1}
    for index, name in enumerate(("aten::add", "aten::mm", "aten::relu"))
]


def cpu_s(arguments: list[str]) -> float:
    """Return the CPU seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, capture_output=True, check=False, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(arguments: list[str]) -> tuple[int, int]:
    """Return the number of modules that a command imports: ours, and all."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments[1:]],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    names = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line]
    return sum(name.startswith("lightning_modelprof") for name in names), len(names)


IMPORTS = """
import time, lightning
begin = time.process_time()
import lightning_modelprof
package = time.process_time()
lightning_modelprof.ModelProfCallback
print(begin, package - begin, time.process_time() - begin)
"""


def import_s() -> tuple[float, ...]:
    """Return a new process's CPU seconds after Lightning's import, then our package's and our callback's."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    return tuple(float(word) for word in done.stdout.split())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="processes of each command (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    document: dict[str, Any] = {"rounds": options.rounds, "commands": {}}
    import_s()
    taken = zip(*(import_s() for _ in range(options.rounds)), strict=True)
    document["imports"] = dict(zip(("lightning", "package", "callback"), map(spread, taken), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "three.json"
        trace.write_text(json.dumps({"traceEvents": THREE_EVENTS}))
        program = [sys.executable, "-m", "lightning_modelprof"]
        commands = {
            "python, which does nothing": [sys.executable, "-c", "pass"],
            "import numpy": [sys.executable, "-c", "import numpy"],
            "lightning-modelprof --help": [*program, "--help"],
            "lightning-modelprof --version": [*program, "--version"],
            "an option that is none": [*program, "report", "--no-such"],
            "a folder that is not there": [*program, "report", str(Path(folder) / "none")],
            "analyze, three events": [*program, "analyze", str(trace)],
        }
        for label, arguments in commands.items():
            cpu_s(arguments)
            figures: dict[str, Any] = spread([cpu_s(arguments) for _ in range(options.rounds)])
            figures["ours"], figures["all"] = imported(arguments)
            document["commands"][label] = figures
    print(tables.startup_table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
