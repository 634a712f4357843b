"""A job of many ranks on one machine: the size of the ranks' messages, and the cost of merging them.

    python benchmarks/many_ranks.py [--ranks 1024] [--steps 20000]

The ranks' steps are synthetic: gamma-distributed times in eight phases, with one rank 20 ms late. Each rank's
message is created and packed as in a real run. The first rank then unpacks all of them, finds the late rank
and builds the report.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.report.build import build_report
from lightning_modelprof.run.archive import save_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.ranks import pack_rank_steps, rank_steps, unpack_rank_steps
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.show.document import render_json

TIMED = ("dataloader", "transfer", "forward", "backward", "optimizer", "callbacks", "logging", "other")
MS = 1_000_000


def run_of(rank: int, num_ranks: int, num_steps: int, late: int) -> Run:
    """Make one rank's measurements."""
    times = np.random.default_rng(rank).gamma(4, 0.25 * MS, (num_steps, len(TIMED))).astype(np.int64)
    times[:, 0] += 20 * MS * (rank == late)
    times[:, 3] += 20 * MS * (rank != late)  # the others wait in backward
    rows = np.zeros((num_steps, len(PHASES)), np.int64)
    rows[:, [PHASE_INDEX[key] for key in TIMED]] = times
    recorder = Recorder()
    for begin in range(0, num_steps, 200):
        for row in rows[begin : begin + 200].tolist():
            recorder.add((row, 0, 32))
        recorder.take_new()
    record = RankRecord(rank=rank, steps=recorder.steps(), totals=recorder.totals())
    info = RunInfo(
        created="2026-01-01T00:00:00+00:00",
        status="finished",
        world_size=num_ranks,
        host=f"node{rank // 8}",
        strategy="DDPStrategy",
    )
    return Run(info=info, ranks=(record,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    late = options.ranks // 3
    messages, first, pack_s = [], None, 0.0
    for rank in range(options.ranks):
        run = run_of(rank, options.ranks, options.steps, late)
        first = first or run
        begin = time.perf_counter()
        messages.append(pack_rank_steps(rank_steps(run)))
        pack_s += time.perf_counter() - begin
    assert first is not None
    sizes = [len(message) for message in messages]
    print(f"{options.ranks} ranks of {options.steps:,} steps, rank {late} late by 20 ms")
    print(f"message of a rank: {max(sizes) / 1024:.1f} KiB, made in {1e3 * pack_s / len(messages):.1f} ms")
    print(f"all messages: {sum(sizes) / 2**20:.1f} MiB on every rank while they are gathered")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    run = replace(first, rank_steps=tuple(map(unpack_rank_steps, messages)))
    unpacked = time.perf_counter()
    report = build_report(Facts(run))
    built = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"first rank: unpacked in {unpacked - begin:.2f} s, report in {built - unpacked:.2f} s,"
        f" peak memory +{(after - before) / 1024:.0f} MiB"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        save_run(run, path)
        print(
            f"run.json {path.stat().st_size / 2**20:.1f} MiB,"
            f" report.json {len(render_json(report)) / 2**20:.1f} MiB"
        )
    print(f"late: {Facts(run).rank_skew.straggler}")


if __name__ == "__main__":
    main()
