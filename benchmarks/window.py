"""What closing a profiler window costs: all that the callback does, over torch's own stop and export in it.

    python benchmarks/window.py
    python benchmarks/window.py --active 10 --rounds 9

A window is closed at a step boundary: torch stops and exports (its share), then the trace is read back, the
Model Summary made, the trace packed and the archive and report written (ours). Both are CPU time of the
whole process, of the same windows of the same run, so that the ratio does not depend on the machine's mood.
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
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.measure.capture import Capture


class Convolutions(LightningModule):
    """Few operators: three convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class ManyOperators(Convolutions):
    """Many operators: eight transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.net = nn.Sequential(nn.Flatten(2), nn.Linear(1024, 64), nn.TransformerEncoder(layer, 8))


class CpuMeter:
    """CPU seconds spent in functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # what is nested is counted by the outer one
                    self.seconds += time.process_time() - begin

        return timed


def close_cost(model: LightningModule, active: int, options: dict[str, bool]) -> tuple[float, float, int]:
    """CPU seconds of torch's stop and export, of the whole closing, and the trace's size in bytes."""
    torch_meter, whole_meter = CpuMeter(), CpuMeter()
    originals = (profile.stop_trace, profile.export_chrome_trace, Capture._close)
    sizes = []

    def export(self: Any, path: str, *args: Any) -> None:
        originals[1](self, path, *args)
        sizes.append(Path(path).stat().st_size)

    profile.stop_trace = torch_meter.wrap(originals[0])
    profile.export_chrome_trace = torch_meter.wrap(export)
    Capture._close = whole_meter.wrap(originals[2])
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            callback = ModelProfCallback(active=active, skip_first=2, terminal=False, **options)
            batches = [torch.randn(32, 3, 32, 32) for _ in range(active + 8)]
            trainer = Trainer(
                max_epochs=1,
                accelerator="cpu",
                callbacks=[callback],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            trainer.fit(model, DataLoader(batches, batch_size=None))
    finally:
        profile.stop_trace, profile.export_chrome_trace, Capture._close = originals
    return torch_meter.seconds, whole_meter.seconds, sizes[0]


def main() -> None:
    """Print the ratio for each model and set of options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--active", type=int, default=10, help="steps per window (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="windows per case (default: 3)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cases: list[tuple[str, type[LightningModule], dict[str, bool]]] = [
        ("convolutions", Convolutions, {}),
        ("transformer", ManyOperators, {}),
        ("transformer, shapes", ManyOperators, {"record_shapes": True}),
        ("transformer, stacks and memory", ManyOperators, {"with_stack": True, "profile_memory": True}),
    ]
    print(f"torch {torch.__version__}, {options.active} active steps, {options.rounds} windows each")
    print(f"{'case':<32}{'trace':>9}{'torch':>10}{'whole':>10}{'ratio':>8}{'min':>7}{'max':>7}")
    for name, model, flags in cases:
        close_cost(model(), options.active, flags)  # the first window of a process pays for imports
        runs = [close_cost(model(), options.active, flags) for _ in range(options.rounds)]
        ratios = [whole / own for own, whole, _ in runs]
        own, whole = (statistics.median(run[index] for run in runs) for index in (0, 1))
        size = statistics.median(run[2] for run in runs) / 1e6
        print(
            f"{name:<32}{size:>6.1f} MB{own * 1e3:>7.0f} ms{whole * 1e3:>7.0f} ms"
            f"{statistics.median(ratios):>8.2f}{min(ratios):>7.2f}{max(ratios):>7.2f}"
        )
    print(
        "torch: CPU time of its stop and export; whole: of all that closing a window does, torch's included"
    )


if __name__ == "__main__":
    main()
