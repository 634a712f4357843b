"""What PaddlePaddle's timer costs as a share of its own step: `paddle.profiler.Profiler(timer_only=True)`.

    python benchmarks/overhead_paddle.py
    python benchmarks/overhead_paddle.py --rounds 40 --steps 500 --json overhead_paddle.json

Needs ``paddlepaddle``, and nothing of torch or Lightning. The model is the one linear layer of `overhead.py`
in a plain loop over a `paddle.io.DataLoader`, as in Paddle's documentation: there is no Trainer, so a step is
much shorter than Lightning's and the same cost a larger share of it. Plain and timed loops take turns. CPU
time of the training thread, the fastest block of 50 steps of a run, each compared with the plain loop of its
own round; *plain again* is the noise that is left.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import paddle
from paddle.profiler import Profiler

BLOCK, WARM_UP_STEPS = 50, 60
WAYS = ("plain", "plain again", "timer")


class Rows(paddle.io.Dataset):  # type: ignore[misc]
    """Batches in memory, one an item."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.batch = paddle.rand([16, 32]).numpy()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.batch


def step_us(steps: int, *, timed: bool) -> float:
    """CPU time of the training thread per step in the fastest block."""
    layer = paddle.nn.Linear(32, 2)
    optimizer = paddle.optimizer.SGD(learning_rate=1e-3, parameters=layer.parameters())
    loader = paddle.io.DataLoader(Rows(WARM_UP_STEPS + steps + 1), batch_size=None, num_workers=0)
    timer = Profiler(timer_only=True) if timed else None
    clock = []
    with contextlib.redirect_stdout(io.StringIO()):
        if timer:
            timer.start()
        for step, batch in enumerate(loader):
            if step >= WARM_UP_STEPS and (step - WARM_UP_STEPS) % BLOCK == 0:
                clock.append(time.thread_time())
            layer(batch).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
            if timer:
                timer.step()
        if timer:
            timer.stop()
    return min(end - begin for begin, end in pairwise(clock)) / BLOCK * 1e6


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles, lowest and highest."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high, "min": min(values), "max": max(values)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="runs of each way (default: 40)")
    parser.add_argument("--steps", type=int, default=500, help=f"of a run, a multiple of {BLOCK}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < BLOCK or options.steps % BLOCK:
        parser.error(f"expected --rounds of at least 1 and --steps as a multiple of {BLOCK}")
    paddle.set_device("cpu")
    step_us(options.steps, timed=True)
    rounds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        start = number % len(WAYS)
        for way in WAYS[start:] + WAYS[:start]:
            rounds[way].append(step_us(options.steps, timed=way == "timer"))
    document: dict[str, Any] = {
        "paddle": paddle.__version__,
        "python": platform.python_version(),
        "rounds": options.rounds,
        "steps": options.steps,
        "plain_step_us": spread(rounds["plain"]),
    }
    print(f"paddle {paddle.__version__}, a plain step takes {document['plain_step_us']['median']:.1f} us")
    for way in WAYS[1:]:
        pairs = list(zip(rounds[way], rounds["plain"], strict=True))
        cost, share = (
            spread([one - plain for one, plain in pairs]),
            spread([one / plain - 1 for one, plain in pairs]),
        )
        document[way] = {"over_plain_us": cost, "share": share}
        print(
            f"{way:<12} {cost['median']:+6.1f} us (half of all: {cost['low']:+.1f} .. {cost['high']:+.1f})"
            f" {share['median']:+7.1%} of its step"
        )
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
