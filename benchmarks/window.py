"""What a profiler window costs: ours and Lightning's PyTorchProfiler, over torch's own stop and export in it.

    python benchmarks/window.py
    python benchmarks/window.py --active 10 --rounds 9 --json window.json

A window is closed at a step boundary: torch stops and exports (its share). We then read the trace back, make
the Model Summary, pack the trace and write the archive and the reports; Lightning's PyTorchProfiler makes the
table of operators when the fit ends. Both are CPU time of the whole process, of the same windows of the same
run, so that the ratio does not depend on the machine's mood.

*fit* is the CPU time of the whole fit over one without a profiler. It holds the recording itself, and in ours
all else that the callback does by default: counting FLOPs and timing modules in four steps, sampling, the
report at the end. A round has a fit of each, in rotating order.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.measure.window.capture import Capture


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


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one fit with one window, CPU seconds of the whole process.

    Attributes:
        torch_s: torch's stop and export.
        close_s: all that closing the window does, torch's share included.
        fit_s: the whole fit.
        trace_bytes: size of the exported trace, not compressed; 0 without a window.
    """

    torch_s: float
    close_s: float
    fit_s: float
    trace_bytes: int


@contextlib.contextmanager
def metered(closing: list[tuple[type, str]]) -> Iterator[tuple[CpuMeter, CpuMeter, list[int]]]:
    """Meters around torch's stop and export, and around these methods; sizes of what is exported."""
    torch_meter, close_meter, sizes = CpuMeter(), CpuMeter(), []
    stop, export = profile.stop_trace, profile.export_chrome_trace
    originals = [
        (profile, "stop_trace", stop),
        (profile, "export_chrome_trace", export),
        *((owner, name, getattr(owner, name)) for owner, name in closing),
    ]

    def sized_export(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        export(self, path, *args, **kwargs)
        sizes.append(Path(path).stat().st_size)

    profile.stop_trace = torch_meter.wrap(stop)
    profile.export_chrome_trace = torch_meter.wrap(sized_export)
    for owner, name in closing:
        setattr(owner, name, close_meter.wrap(getattr(owner, name)))
    try:
        yield torch_meter, close_meter, sizes
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def without_profiler(folder: str, active: int, options: dict[str, bool]) -> dict[str, Any]:
    return {}


def ours(folder: str, active: int, options: dict[str, bool]) -> dict[str, Any]:
    return {
        "callbacks": [ModelProfCallback(active=active, skip_first=2, report={"terminal": False}, **options)]
    }


def pytorch_profiler(folder: str, active: int, options: dict[str, bool]) -> dict[str, Any]:
    plan = schedule(skip_first=2, wait=0, warmup=1, active=active, repeat=1)
    return {"profiler": PyTorchProfiler(dirpath=folder, filename="profile", schedule=plan, **options)}


CONTENDERS: dict[str, tuple[Callable[..., dict[str, Any]], list[tuple[type, str]]]] = {
    "bare": (without_profiler, []),
    "ours": (ours, [(Capture, "_close")]),
    # Stopping and exporting happen in a step, the table of operators at the end of the fit.
    "PyTorchProfiler": (
        pytorch_profiler,
        [
            (profile, "stop_trace"),
            (profile, "_trace_ready"),
            (PyTorchProfiler, "_cache_functions_events"),
            (PyTorchProfiler, "summary"),
        ],
    ),
}
"""Trainer's arguments, and the methods that close a window, the outermost ones."""


def cost_of(name: str, model: LightningModule, active: int, options: dict[str, bool]) -> Cost:
    """Fit once."""
    arguments, closing = CONTENDERS[name]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        metered(closing) as (torch_meter, close_meter, sizes),
    ):
        batches = [torch.randn(32, 3, 32, 32) for _ in range(active + 8)]
        begin = time.process_time()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **arguments(folder, active, options),
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))
        fit_s = time.process_time() - begin
    if name != "bare" and len(sizes) != 1:
        raise RuntimeError(f"{name} exported {len(sizes)} windows, expected one")
    return Cost(torch_meter.seconds, close_meter.seconds, fit_s, sizes[0] if sizes else 0)


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(model: type[LightningModule], active: int, rounds: int, flags: dict[str, bool]) -> dict[str, Any]:
    """Figures of all contenders in one case."""
    names = list(CONTENDERS)
    for name in names:
        cost_of(name, model(), active, flags)  # the first window of a process pays for imports
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            costs[name].append(cost_of(name, model(), active, flags))
    return {
        name: {
            "trace_bytes": statistics.median(cost.trace_bytes for cost in of_name),
            "torch_ms": spread([1e3 * cost.torch_s for cost in of_name]),
            "close_ms": spread([1e3 * cost.close_s for cost in of_name]),
            "close_over_torch": spread([cost.close_s / cost.torch_s for cost in of_name]),
            "fit_over_bare_ms": spread(
                [1e3 * (cost.fit_s - bare.fit_s) for cost, bare in zip(of_name, costs["bare"], strict=True)]
            ),
        }
        for name, of_name in costs.items()
        if name != "bare"
    }


def main() -> None:
    """Print the figures for each model and set of options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--active", type=int, default=10, help="steps per window (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="windows per case (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cases: list[tuple[str, type[LightningModule], dict[str, bool]]] = [
        ("convolutions", Convolutions, {}),
        ("transformer", ManyOperators, {}),
        ("transformer, shapes", ManyOperators, {"record_shapes": True}),
        ("transformer, stacks and memory", ManyOperators, {"with_stack": True, "profile_memory": True}),
    ]
    print(
        f"torch {torch.__version__}, lightning {lightning.__version__}, {options.active} active steps,"
        f" {options.rounds} windows each"
    )
    print(
        f"{'case':<32}{'':<17}{'trace':>9}{'torch':>10}{'close':>10}{'/torch':>8}{'min':>7}{'max':>7}{'fit':>11}"
    )
    results = {}
    for case, model, flags in cases:
        results[case] = measure(model, options.active, options.rounds, flags)
        for name, figures in results[case].items():
            ratio = figures["close_over_torch"]
            print(
                f"{case:<32}{name:<17}{figures['trace_bytes'] / 1e6:>6.1f} MB"
                f"{figures['torch_ms']['median']:>7.0f} ms{figures['close_ms']['median']:>7.0f} ms"
                f"{ratio['median']:>8.2f}{ratio['min']:>7.2f}{ratio['max']:>7.2f}"
                f"{figures['fit_over_bare_ms']['median']:>+8.0f} ms"
            )
    print(
        "torch: CPU time of its stop and export; close: of all that closing a window does, torch's included;"
        "\nfit: of the whole fit, over one without a profiler"
    )
    if options.json:
        about = {"torch": torch.__version__, "lightning": lightning.__version__}
        document = {**about, "active": options.active, "rounds": options.rounds, "cases": results}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
