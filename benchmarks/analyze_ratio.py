"""CPU time of ``lightning-modelprof analyze`` relative to a process that only loads the JSON.

    python benchmarks/analyze_ratio.py TRACE [--times 2] [--pairs 10]

Measures whole processes: user and system time as the operating system reports it, with cached bytecode. Each
pair runs one process of each kind, in alternating order. ``--times`` repeats the trace back to back and
continues its steps, ids and times.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
LOAD = "import json, sys\nwith open(sys.argv[1]) as file: json.load(file)"
IDS = ("External id", "external id", "correlation", "Sequence number")
STEP = re.compile(r"ProfilerStep#(\d+)")


def repeated(document: dict[str, Any], times: int) -> dict[str, Any]:
    """Repeat a trace's events, one copy after the other."""
    events = document["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    first_us = min(event["ts"] for event in timed)
    period_us = max(event["ts"] + event["dur"] for event in timed) - first_us + 1_000
    moved = [*timed, *(event for event in events if event.get("ph") in ("s", "f", "t") or _is_memory(event))]
    numbers = [int(found[1]) for event in timed if (found := STEP.match(event["name"]))]
    num_steps = max(numbers) - min(numbers) + 1 if numbers else 0
    num_ids = 1 + max(value for event in moved for value in _ids(event).values())
    added = []
    for turn in range(1, times):
        for event in moved:
            copy = {**event, "ts": event["ts"] + turn * period_us}
            if isinstance(event.get("id"), int):
                copy["id"] = event["id"] + turn * num_ids
            if "args" in event:
                copy["args"] = event["args"] | {
                    key: value + turn * num_ids for key, value in _ids(event).items() if key != "id"
                }
            if found := STEP.match(event["name"]):
                copy["name"] = f"ProfilerStep#{int(found[1]) + turn * num_steps}"
            added.append(copy)
    return {**document, "traceEvents": [*events, *added]}


def _is_memory(event: dict[str, Any]) -> bool:
    return event.get("ph") == "i" and event.get("name") == "[memory]"


def _ids(event: dict[str, Any]) -> dict[str, int]:
    """Return an event's positive ids."""
    args = {key: value for key, value in event.get("args", {}).items() if key in IDS}
    every = {**args, "id": event.get("id")}
    return {key: value for key, value in every.items() if isinstance(value, int) and value > 0}


def cpu_s(*arguments: str) -> float:
    """Return the CPU seconds of one Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--times", type=int, default=1, help="copies of the trace (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of processes (default: %(default)s)")
    options = parser.parse_args()
    raw = options.trace.read_bytes()
    document = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "trace.json")
        Path(file).write_text(json.dumps(repeated(document, options.times)))
        print(f"{Path(file).stat().st_size / 1e6:.0f} MB")
        for tables in ("--brief", "--full"):
            ours = ("-m", "lightning_modelprof", "analyze", file, tables)
            theirs = ("-c", LOAD, file)
            cpu_s(*ours)  # compiles the bytecode
            pairs = []
            for turn in range(options.pairs):
                times = [cpu_s(*one) for one in ((ours, theirs) if turn % 2 else (theirs, ours))]
                pairs.append(times if turn % 2 else times[::-1])
            ratios = [one / other for one, other in pairs]
            print(
                f"{tables}: {statistics.median(ratios):.2f} times json.load"
                f" ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs),"
                f" {statistics.median(one for one, _ in pairs):.2f} s"
                f" and {statistics.median(other for _, other in pairs):.2f} s"
            )


if __name__ == "__main__":
    main()
