"""Cost of many windows in a long fit: ``active=3, wait=97, repeat=0``, compared with our run without any.

    python benchmarks/many_windows.py
    python benchmarks/many_windows.py --rounds 3 --steps 1000 --json many_windows.json

The cost is the training thread's CPU time in the whole fit, except for the steps that record and for torch's
stop, export and freeing of what it recorded. It's relative to the fit without windows (``active=0``), less as
many of its mean steps. The steps in which a window warms up count as ours. So does torch's time to prepare
and start its profiler, which also has its own figure. Neither run counts FLOPs.

The model is the single linear layer of ``overhead.py``. No step is shorter, so no share can be higher. The
two runs alternate, and the figure is the median of the rounds with a bootstrap interval. The table also has
the CPU times of all threads and processes, recording steps included.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import peers_tables as tables
from overhead import environment, spread
from overhead_variants import be_quiet, fit, ours
from torch.profiler import profile
from window import TORCHS_SHARE, CpuMeter, replaced

from lightning_modelprof.measure.window.capture import Capture

PLAN = {"active": 3, "wait": 97, "repeat": 0}


class Recording:
    """The training thread's CPU seconds from a window's start to its closing, and the recorded steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = self.windows = 0
        self._begin_s = 0.0

    def start(self, function: Any) -> Any:
        def started(capture: Capture) -> None:
            function(capture)
            self._begin_s = time.thread_time()

        return started

    def close(self, function: Any) -> Any:
        def closed(capture: Capture, *args: Any) -> None:
            self.seconds += time.thread_time() - self._begin_s
            self.steps += len(capture._recorded)
            self.windows += 1
            function(capture, *args)

        return closed


def run(steps: int) -> dict[str, float]:
    """Run one fit of each kind."""
    torchs, starting, recording = CpuMeter(), CpuMeter(), Recording()
    wrapped = [(owner, name, torchs.wrap) for owner, name in TORCHS_SHARE]
    wrapped += [(profile, name, starting.wrap) for name in ("prepare_trace", "start_trace")]
    wrapped += [(Capture, "_start", recording.start), (Capture, "_close", recording.close)]
    without = fit(lambda folder: {"callbacks": [ours()]}, steps)
    with replaced(wrapped):
        windows = fit(lambda folder: {"callbacks": [ours(**PLAN)]}, steps)
    outside_s = windows.total_s - recording.seconds - torchs.thread_s
    expected_s = without.total_s - recording.steps * without.step_us / 1e6
    more_s = outside_s - expected_s
    return {
        "windows": recording.windows,
        "share": more_s / expected_s,
        "share_without_starting": (more_s - starting.thread_s) / expected_s,
        "ms_a_window": 1e3 * more_s / recording.windows,
        "starting_ms": 1e3 * starting.thread_s / recording.windows,
        "torch_ms": 1e3 * torchs.thread_s / recording.windows,
        "recording_ms": 1e3 * recording.seconds / recording.windows,
        "all_ms": 1e3 * (windows.total_all_s - without.total_all_s) / recording.windows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="fits of each (default: 10)")
    parser.add_argument("--steps", type=int, default=3000, help="of a fit (default: 3000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    be_quiet()
    run(300)  # imports of the first window don't count in any round
    rounds = [run(options.steps) for _ in range(options.rounds)]
    figures = {name: spread(np.array([one[name] for one in rounds])) for name in rounds[0]}
    document = {"environment": environment(), "steps": options.steps, "rounds": options.rounds}
    document |= {"plan": PLAN, "figures": figures}
    print(tables.many_windows_table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
