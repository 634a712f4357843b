"""Cost of the callback with its defaults for a one-batch predict and a short fit.

    python benchmarks/short_fit.py
    python benchmarks/short_fit.py --rounds 9

The first part alternates the same call with and without the callback and counts this process's CPU time, all
threads. It prints medians, their difference with quartiles, and the ratio. The second part compares actual
costs with the estimates of ``engine/budget.py``: the extra wall time of counting one step and of a window of
ten steps, over normal steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.engine import budget
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.run.steps import StepTag

BATCH: Final = 384
STEPS: Final = 300
WIDTH: Final = 256


class Net(LightningModule):
    """Steps of about 5 ms on one CPU thread."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        layers = [
            part for _ in range(blocks) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch[0])
        return outputs.square().mean()

    def predict_step(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch[0])
        return outputs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader(num_batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(BATCH * num_batches, WIDTH)), batch_size=BATCH)


def trainer(folder: Path, callback: ModelProfCallback | None) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[] if callback is None else [callback],
    )


def cpu_ms(work: Callable[[], object]) -> float:
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    return (time.process_time() - begin) * 1e3


def compare(name: str, rounds: int, prepare: Callable[[bool], Callable[[], object]]) -> None:
    """Print the cost with and without the callback, alternating; the first turn warms up."""
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds + 1):
        for is_ours in (False, True) if turn % 2 else (True, False):
            ms = cpu_ms(prepare(is_ours))
            if turn:
                took[is_ours].append(ms)
    more = [ours - bare for ours, bare in zip(took[True], took[False], strict=True)]
    low, _, high = statistics.quantiles(more, n=4)
    bare, ours = statistics.median(took[False]), statistics.median(took[True])
    print(
        f"{name}: {bare:.2f} ms without, {ours:.2f} ms with: {statistics.median(more):+.2f} ms"
        f" ({low:+.2f} to {high:+.2f}), ratio {ours / bare:.3f}"
    )


def predict(folder: Path) -> Callable[[bool], Callable[[], object]]:
    callback, data, model = ModelProfCallback(dirpath=folder / "predict"), loader(1), Net()
    trainers = {True: trainer(folder, callback), False: trainer(folder, None)}
    return lambda is_ours: lambda: trainers[is_ours].predict(model, data)


def fit(folder: Path) -> Callable[[bool], Callable[[], object]]:
    data = loader(STEPS)

    def prepare(is_ours: bool) -> Callable[[], object]:
        PROCESS_LOOPS.forget()  # each fit counts as the first one
        callback = ModelProfCallback(dirpath=tempfile.mkdtemp(dir=folder)) if is_ours else None
        return lambda: trainer(folder, callback).fit(Net(), data)

    return prepare


def supposed(folder: Path, blocks: int) -> None:
    """Print the measured and the estimated costs of counting and of a window."""
    window_ns, counted_ns = 0.0, 0.0
    step_window, end_window, end_inspection = Capture.begin_step, Budget.end_window, Budget.end_inspection

    def timed_step(self: Capture, step: int) -> StepTag:
        nonlocal window_ns
        begin_ns = time.perf_counter_ns()
        tags = step_window(self, step)
        window_ns += time.perf_counter_ns() - begin_ns
        return tags

    def noted_window(self: Budget) -> None:
        nonlocal window_ns
        window_ns += self._open_window_ns
        end_window(self)

    def noted_inspection(self: Budget, begin_ns: int) -> None:
        nonlocal counted_ns
        end_inspection(self, begin_ns)
        counted_ns = counted_ns or self._counted_ns  # of the counted step, because modules are timed later

    Capture.begin_step = timed_step  # type: ignore[method-assign]
    Budget.end_window = noted_window  # type: ignore[method-assign]
    Budget.end_inspection = noted_inspection  # type: ignore[method-assign]
    try:
        callback = ModelProfCallback(
            active=10, flops=True, inspect={"sampling": False}, dirpath=tempfile.mkdtemp(dir=folder)
        )
        model = Net(blocks)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer(folder, callback).fit(model, loader(60))
    finally:
        Capture.begin_step = step_window  # type: ignore[method-assign]
        Budget.end_window = end_window  # type: ignore[method-assign]
        Budget.end_inspection = end_inspection  # type: ignore[method-assign]
    assert callback.run is not None
    cost = callback.run.ranks[0].model_cost
    assert cost is not None
    assert cost.sites is not None
    operators, modules = sum(line.calls for line in cost.sites.lines), sum(1 for _ in model.modules())
    window = budget.WINDOW_NS + 10 * operators * budget.NS_PER_OPERATOR
    count = budget.COUNT_NS + modules * budget.NS_PER_MODULE
    print(
        f"{modules} modules, {operators} operators: counting took {counted_ns / 1e6:.0f} ms, supposed"
        f" {count / 1e6:.0f}; a window {window_ns / 1e6:.0f} ms, supposed {window / 1e6:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        compare("predict of one batch", 20 * rounds, predict(folder))
        PROCESS_LOOPS.forget()
        compare(f"fit of {STEPS} steps", rounds, fit(folder))
        for blocks in (1, 10, 50):
            supposed(folder, blocks)


if __name__ == "__main__":
    main()
