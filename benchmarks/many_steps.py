"""Memory and time of a million steps: the always-on part, without a model.

    python benchmarks/many_steps.py [--steps 1000000]

Steps arrive as from the ledger. As in a session, they're flushed every 50 steps and checked for slow ones
every 200. Growth is that of the process's resident memory and of Python's allocated memory, from step 20,000
on.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
import tracemalloc
from pathlib import Path

import psutil

from lightning_modelprof.engine.live_figures import LiveFigures
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.measure.steps.slow_steps import SlowStepWatch
from lightning_modelprof.run.archive import save_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo

BEGIN, EVERY = 20_000, 50


def record(num_steps: int, *, traces: bool) -> tuple[Recorder, list[tuple[int, int, int]], float]:
    """Add steps; returns the recorder, samples of (step, resident bytes, traced bytes), and the seconds."""
    recorder, process, numbers = Recorder(skip_first=10), psutil.Process(), random.Random(1)
    watch = SlowStepWatch()
    live = LiveFigures(recorder, "samples", watch)
    points, places = [], [PHASE_INDEX[key] for key in ("dataloader", "forward", "backward", "optimizer")]
    begin, ours_s = time.perf_counter(), 0.0
    for step in range(1, num_steps + 1):
        row = [0] * len(PHASES)
        for place in places:
            row[place] = numbers.randrange(10**6, 10**7)
        started = time.perf_counter()
        recorder.add((row, 0, 32))
        if step % EVERY == 0:
            live.flush()
        if step % (4 * EVERY) == 0:
            watch.look(0)
        ours_s += time.perf_counter() - started
        if step in (BEGIN, num_steps) or step % 100_000 == 0:
            gc.collect()
            traced = tracemalloc.get_traced_memory()[0] if traces else 0
            points.append((step, process.memory_info().rss, traced))
    print(
        f"{num_steps:,} steps in {time.perf_counter() - begin:.0f} s,"
        f" {1e6 * ours_s / num_steps:.2f} us a step ours"
    )
    return recorder, points, ours_s


def main() -> None:
    """Print the growth, and the size of the run's archive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    num_steps = parser.parse_args().steps
    recorder, points, _ = record(num_steps, traces=False)
    for step, resident, _ in points:
        print(f"  step {step:9,}: resident {(resident - points[0][1]) / 2**20:+.2f} MiB")
    begin = time.perf_counter()
    run = Run(
        info=RunInfo(created="2026-01-01T00:00:00+00:00"),
        ranks=(RankRecord(rank=0, steps=recorder.steps(), totals=recorder.totals()),),
    )
    made_s = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        begin = time.perf_counter()
        save_run(run, path)
        print(
            f"archive of {len(run.ranks[0].steps):,} kept steps: {path.stat().st_size / 2**20:.2f} MiB,"
            f" made in {1e3 * made_s:.0f} ms, saved in {1e3 * (time.perf_counter() - begin):.0f} ms"
        )
    del recorder, run
    tracemalloc.start()
    _, points, _ = record(num_steps // 10, traces=True)
    for step, _, traced in points:
        print(f"  step {step:9,}: allocated by Python {traced / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
