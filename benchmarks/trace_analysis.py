"""How fast traces become tables: ours, json.loads, torch_tb_profiler, HolisticTraceAnalysis and torch.

    python benchmarks/trace_analysis.py a.pt.trace.json.gz b.pt.trace.json
    python benchmarks/trace_analysis.py --generate-mb 2 50 1000
    python benchmarks/trace_analysis.py a.pt.trace.json.gz --peers-python torch_tb_profiler=PEERS/bin/python

* Each measurement is a separate process. *Process* is CPU time (user and system, all threads and child
  processes) from Python's start to its end, and peak resident memory. The other figures are from the file to
  the tables, without Python's startup and imports.
* All contenders alternate on all files, in rotating order. Ratios are taken within a round, because a
  machine's speed drifts. Figures are the median of the rounds with minimum and maximum. Files larger than
  ``--large-mb`` are only in the first two rounds, for us and json.loads alone.
* Peers can live in another environment (``--peers-python NAME=PATH``). Missing ones are reported as not
  installed, failing ones as failed; neither has a number.
* ``key_averages`` is a different comparison. The process records a window of a CPU training, then compares
  torch's ``key_averages().table()`` with ours on the same window, including the export to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers_tables as tables
from generate_trace import generate_trace

WORKER = Path(__file__).with_name("trace_analysis_worker.py")
ROOT = Path(__file__).resolve().parents[1]
OURS = "ours"


LARGE_ROUNDS = 2
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "6"}

CONTENDERS = {
    OURS: "",
    "json_loads": "",
    "torch_tb_profiler": "torch_tb_profiler",
    "hta": "HolisticTraceAnalysis",
}
"""The worker's functions, and the package each needs; "" for ours and the standard library."""


@dataclass(slots=True)
class Outcome:
    """One contender's result on one file.

    Attributes:
        cpu_s, peak_bytes: from the file to the tables, one figure per round.
        process_s, process_bytes: of the whole process, one figure per round.
        details: the worker's description of its work in the last round.
        problem: why there are no figures.
    """

    cpu_s: list[float] = field(default_factory=list)
    process_s: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)
    process_bytes: list[float] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def measure(paths: list[Path], options: argparse.Namespace) -> list[dict[str, Outcome]]:
    """Alternate all contenders on all files, so that a slow minute of the machine spreads over all files."""
    table = [{name: Outcome() for name in CONTENDERS} for _ in paths]
    are_large = [uncompressed_bytes(path) > options.large_mb * 1e6 for path in paths]
    for is_large, outcomes in zip(are_large, table, strict=True):
        for name, peer in CONTENDERS.items():
            if is_large and peer:
                outcomes[name].problem = f"left out above {options.large_mb:g} MB"
    names = list(CONTENDERS)
    for number in range(options.rounds):
        start = number % len(names)
        for path, is_large, outcomes in zip(paths, are_large, table, strict=True):
            if is_large and number >= LARGE_ROUNDS:
                continue
            for name in names[start:] + names[:start]:
                if not outcomes[name].problem:
                    python = options.peers.get(CONTENDERS[name])
                    run_worker(outcomes[name], name, python, [str(path)], options.timeout)
    return table


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_worker(
    outcome: Outcome, name: str, python: str | None, arguments: list[str], timeout: float
) -> dict[str, Any] | None:
    """Add one measurement in a fresh process to the outcome; returns ``None`` if it failed."""
    command = [python or sys.executable, str(WORKER), name, *arguments]
    begin = children_s()
    try:
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        outcome.problem = f"not finished after {timeout:g} s"
        return None
    except OSError as error:
        outcome.problem = f"not installed ({error.strerror}: {python})"
        return None
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.decode().splitlines() or [f"exit code {done.returncode}"])[-1]
        outcome.problem = f"failed: {reason}"
        return None
    answer: dict[str, Any] = json.loads(lines[-1])
    if missing := answer.get("not_installed"):
        outcome.problem = f"not installed ({missing})"
        return None
    if "cpu_s" in answer:
        outcome.process_s.append(children_s() - begin)
        for figure in ("cpu_s", "peak_bytes", "process_bytes"):
            getattr(outcome, figure).append(answer[figure])
    outcome.details = answer["details"]
    return answer


def measure_key_averages(options: argparse.Namespace) -> dict[str, Any]:
    """Compare torch's key_averages() with ours, on windows of a CPU training."""
    rounds = []
    for number in range(options.rounds):
        outcome = Outcome()
        answer = run_worker(
            outcome, "key_averages", None, [str(options.window_steps), str(number % 2)], options.timeout
        )
        if answer is None:
            return {"problem": outcome.problem}
        rounds.append(answer["details"])
    return {"rounds": rounds, "num_events": rounds[-1]["num_events"], "json_bytes": rounds[-1]["json_bytes"]}


def uncompressed_bytes(path: Path) -> int:
    """Return the size of the uncompressed JSON."""
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path.stat().st_size
    import gzip  # noqa: PLC0415 - this process stays small, as its children begin as copies of it

    size = 0
    with gzip.open(path) as text:
        while chunk := text.read(2**20):
            size += len(chunk)
    return size


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(path: Path, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return one file's figures."""
    document: dict[str, Any] = {"file": path.name, "json_bytes": uncompressed_bytes(path), "contenders": {}}
    ours = outcomes[OURS].cpu_s
    for name, outcome in outcomes.items():
        if outcome.problem or not ours:
            document["contenders"][name] = {"problem": outcome.problem or "ours failed"}
            continue
        document["contenders"][name] = {
            "cpu_s": spread(outcome.cpu_s),
            "process_s": spread(outcome.process_s),
            "peak_bytes": spread(outcome.peak_bytes),
            "process_bytes": spread(outcome.process_bytes),
            "times_ours": spread([theirs / our for theirs, our in zip(outcome.cpu_s, ours, strict=False)]),
            "details": outcome.details,
        }
    return document


def environment() -> dict[str, Any]:
    """Describe the environment of the figures."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def parse_args() -> argparse.Namespace:
    """Parse the command line, with ``peers`` as a mapping."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="traces of torch.profiler, plain or gzip")
    add("--generate-mb", nargs="+", type=float, default=[], metavar="N", help="also generated traces of N MB")
    add("--rounds", type=int, default=5, help="measurements of each contender on each file (default: 5)")
    add("--seed", type=int, default=0, help="of the generated traces (default: 0)")
    add(
        "--large-mb", type=float, default=250.0, metavar="N", help="a file above this is large (default: 250)"
    )
    add("--peers-python", action="append", default=[], metavar="NAME=PATH", help="Python that has a peer")
    add("--window-steps", type=int, default=10, help="steps recorded for key_averages, 0: none (default: 10)")
    add("--timeout", type=float, default=900.0, metavar="S", help="for one measurement (default: 900)")
    add("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    options.peers = dict(entry.partition("=")[::2] for entry in options.peers_python)
    known = {peer for peer in CONTENDERS.values() if peer}
    if unknown := set(options.peers) - known:
        parser.error(
            f"expected --peers-python {' or '.join(sorted(known))}, got {', '.join(sorted(unknown))}"
        )
    if options.rounds < 1 or not (options.files or options.generate_mb or options.window_steps):
        parser.error("expected FILES, --generate-mb or --window-steps, and --rounds of at least 1")
    return options


def main() -> None:
    options = parse_args()
    document: dict[str, Any] = {"environment": environment(), "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        paths = list(options.files)
        for megabytes in options.generate_mb:
            paths.append(Path(folder) / f"generated_{megabytes:g}MB.pt.trace.json")
            generate_trace(paths[-1], int(megabytes * 1e6), seed=options.seed)
        outcomes = measure(paths, options)
        document["files"] = [summarize(*of_file) for of_file in zip(paths, outcomes, strict=True)]
    document["key_averages"] = measure_key_averages(options) if options.window_steps else None
    print(tables.traces_table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
