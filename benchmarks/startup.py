"""What the command line takes until it answers: CPU time of ten runs of each command, and what is imported.

    python benchmarks/startup.py

CPU time of the process, user and system, by the operating system: other work on the machine changes it
less than the clock. The first run of each is thrown away, as it may compile; what it compiles is kept.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 10
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
THREE_EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": name, "ts": 10 * index, "dur": 3, "pid": 1, "tid": 1}
    for index, name in enumerate(("aten::add", "aten::mm", "aten::relu"))
]


def cpu_s(arguments: list[str]) -> float:
    """CPU seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, capture_output=True, check=False, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(arguments: list[str]) -> tuple[int, int]:
    """Modules that a command imports: ours, and all."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments[1:]],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    names = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line]
    return sum(name.startswith("lightning_modelprof") for name in names), len(names)


def main() -> None:
    """Print the table."""
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
        callback = "import lightning_modelprof; lightning_modelprof.ModelProfCallback"
        commands["import lightning"] = [sys.executable, "-c", "import lightning"]
        commands["import lightning, and ModelProfCallback"] = [
            sys.executable, "-c", f"import lightning; {callback}"
        ]  # fmt: skip
        print("| command | CPU ms, median | least to most | modules imported: ours, all |")
        print("|---|---|---|---|")
        for label, arguments in commands.items():
            cpu_s(arguments)
            taken = [1e3 * cpu_s(arguments) for _ in range(ROUNDS)]
            ours, everything = imported(arguments)
            spread = f"{min(taken):.0f} to {max(taken):.0f}"
            print(f"| {label} | {statistics.median(taken):.0f} | {spread} | {ours}, {everything} |")


if __name__ == "__main__":
    main()
