"""How fast traces become timelines, and timelines become bytes for a browser, and how many bytes.

    python benchmarks/timeline.py
    python benchmarks/timeline.py a.pt.trace.json.gz b.pt.trace.json --events 0

* Measures a generated trace (``generate_trace.py``) and the given files. Reading a file doesn't count. The
  work that all facts share (``build_timeline``) has its own column.
* Figures are the median of the rounds with minimum and maximum, in seconds of wall time, in one process and
  one thread.
* ``rows`` is the part of ``build`` that assigns each slice a row. Nested slices are done together, crossing
  ones one by one. The last line has calls of which one in 500 is a range that ends after the call that opened
  it, as in a trace with Python functions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from generate_trace import generate_trace
from trace_analysis import environment

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.report.timeline.lanes import find_depths, find_lanes
from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.show.tensorboard.timeline_columns import pack_timeline, unpack_timeline
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import read_trace

BYTES_PER_EVENT = 616
"""Approximate size of a generated file."""


def measured(rounds: int, work: Callable[[], Any]) -> list[float]:
    """Return the sorted seconds of all rounds."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)


def written(seconds: list[float]) -> str:
    """Format median, minimum and maximum."""
    return f"{statistics.median(seconds):.3f} ({seconds[0]:.3f} .. {seconds[-1]:.3f})"


def print_trace(name: str, trace: Trace, rounds: int) -> None:
    """Print one line of figures."""
    shared = build_timeline(trace)
    timeline = timeline_of(trace, shared=shared)
    packed = pack_timeline(timeline)
    _, lane = find_lanes(shared)
    share = measured(rounds, lambda: build_timeline(trace))
    build = measured(rounds, lambda: timeline_of(trace, shared=shared))
    rows = measured(rounds, lambda: find_depths(trace.begin_ns, trace.end_ns, lane))
    pack = measured(rounds, lambda: pack_timeline(timeline))
    unpack = measured(rounds, lambda: unpack_timeline(packed))
    count = len(trace)
    figures = "".join(f"{written(seconds):>25}" for seconds in (share, build, rows, pack, unpack))
    speeds = "".join(f"{count / statistics.median(seconds):>13,.0f}" for seconds in (build, pack))
    print(f"{name[:36]:<38}{count:>9,}{figures}{speeds}{len(packed):>12,}{len(packed) / count:>7.2f}")


def crossing_calls(count: int) -> tuple[list[int], list[int]]:
    """Return starts and ends of calls on one thread, up to 40 deep, within one outermost call."""
    random = np.random.default_rng(0)
    wants_call = random.random(4 * count) < 0.5
    begins, ends, stack, now = [0], [0], [0], 0
    while len(begins) < count:
        now += 1
        if len(stack) == 1 or (len(stack) < 40 and wants_call[now]):
            stack.append(len(begins))
            begins.append(now)
            ends.append(0)
        else:
            ends[stack.pop()] = now
    for row in reversed(stack):
        now += 1
        ends[row] = now
    # A range ends somewhat later than the call around it, so it crosses that one and those that follow.
    for row in range(1, count, 500):
        ends[row] = min(ends[row] + 200, now - 1)
    return begins, ends


def print_crossing_rows(count: int, rounds: int) -> None:
    """Print the time for crossing calls."""
    begins, ends = (np.array(column, np.int64) for column in crossing_calls(count))
    lane = np.zeros(count, np.int64)
    order = np.lexsort((-ends, begins))
    begin_ns, end_ns = begins[order], ends[order]
    seconds = measured(rounds, lambda: find_depths(begin_ns, end_ns, lane))
    print(f"rows of {count:,} calls with ranges that cross them: {written(seconds)} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="traces of torch.profiler, plain or gzip")
    add("--events", type=int, default=1_000_000, help="of the generated trace, 0: none (default: 1000000)")
    add("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    options = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in environment().items()), f"{options.rounds} rounds")
    steps = ("shared", "build", "rows", "pack", "unpack")
    print(f"{'':<38}{'events':>9}" + "".join(f"{step + ' s':>25}" for step in steps), end="")
    print(f"{'build ev/s':>13}{'pack ev/s':>13}{'bytes':>12}{'/event':>7}")
    for path in options.files:
        print_trace(path.name, read_trace(path), options.rounds)
    if options.events:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "generated.pt.trace.json"
            generate_trace(path, options.events * BYTES_PER_EVENT)
            trace = read_trace(path)
        print_trace("generated", trace, options.rounds)
        print_crossing_rows(options.events, options.rounds)


if __name__ == "__main__":
    main()
