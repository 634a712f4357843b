"""Cost of a profiler window: ours and Lightning's PyTorchProfiler, over torch's own stop and export in it.

    python benchmarks/window.py
    python benchmarks/window.py --cases convolutions --rounds 9 --json window.json

A window closes at a step boundary. Torch's share is its stop, its export, and freeing its records when its
profiler is dropped. All other work before training continues is ours. Lightning's PyTorchProfiler makes the
table of operators at the end of the fit. It frees its records later, which is in none of its figures. Both
figures are CPU time of the training thread (``time.thread_time_ns``), of the same windows of the same run, so
the ratio doesn't depend on the machine's current speed.

*All processes* is the CPU time of all threads while the window closes, plus that of all other started
processes in the whole fit, over that of all threads in torch's share. *Fit* is the CPU time of all threads
and processes in the whole fit, over a fit without a profiler. It includes the recording itself, and for ours
all other default work: counting FLOPs and timing modules in four steps, sampling, and the report at the end.
``many_windows.py`` measures the work for a window at later steps.

A round has one fit of each, in rotating order. PyTorchProfiler takes by far the longest, so it's only in the
first two rounds.
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
import peers_tables as tables
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from overhead_variants import tree_s
from torch import Tensor, nn
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.measure.window import capture
from lightning_modelprof.measure.window.capture import Capture

PEER_ROUNDS = 2


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


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of window: the model, the number of steps, and the recorded data."""

    model: type[LightningModule]
    active: int
    flags: dict[str, bool]


CASES = {
    "convolutions": Case(Convolutions, 10, {}),
    "transformer, 3 steps": Case(ManyOperators, 3, {}),
    "transformer": Case(ManyOperators, 10, {}),
    "transformer, shapes": Case(ManyOperators, 10, {"record_shapes": True}),
    "transformer, stacks and memory": Case(ManyOperators, 10, {"with_stack": True, "profile_memory": True}),
    "transformer, 27 steps": Case(ManyOperators, 27, {}),
}
"""From 1 to 60 MB of trace."""


class CpuMeter:
    """CPU seconds of the training thread and of all threads, spent in wrapped functions."""

    def __init__(self) -> None:
        self.thread_s = self.process_s = 0.0
        self._depth = 0

    def wrap(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            process_s, thread_ns = time.process_time(), time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # the outer call counts nested ones
                    self.thread_s += (time.thread_time_ns() - thread_ns) / 1e9
                    self.process_s += time.process_time() - process_s

        return timed


@contextlib.contextmanager
def replaced(replacements: list[tuple[Any, str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Replace each attribute by the function's result, until the end."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, make in replacements:
            setattr(owner, name, make(getattr(owner, name)))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


TORCHS_SHARE: list[tuple[Any, str]] = [
    (profile, "stop_trace"),
    (profile, "export_chrome_trace"),
    (capture, "free"),
]


def without_profiler(folder: str, case: Case) -> dict[str, Any]:
    return {}


def ours(folder: str, case: Case) -> dict[str, Any]:
    callback = ModelProfCallback(active=case.active, skip_first=2, report={"terminal": False}, **case.flags)
    return {"callbacks": [callback]}


def pytorch_profiler(folder: str, case: Case) -> dict[str, Any]:
    plan = schedule(skip_first=2, wait=0, warmup=1, active=case.active, repeat=1)
    return {"profiler": PyTorchProfiler(dirpath=folder, filename="profile", schedule=plan, **case.flags)}


CONTENDERS: dict[str, tuple[Callable[[str, Case], dict[str, Any]], list[tuple[Any, str]]]] = {
    "bare": (without_profiler, []),
    "ours": (ours, [(Capture, "_close")]),
    # Stop and export happen in a step, the table of operators at the end of the fit.
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
"""The Trainer's arguments, and the outermost methods that close a window."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one fit with one window.

    Attributes:
        torch_s: torch's share on the training thread.
        close_s: closing the window on the training thread, including torch's share.
        torch_all_s: torch's share on all threads.
        close_all_s: closing on all threads, and all work of other processes in the fit.
        fit_s: the whole fit, all threads and processes.
        trace_bytes: size of the exported trace, uncompressed; 0 without a window.
    """

    torch_s: float
    close_s: float
    torch_all_s: float
    close_all_s: float
    fit_s: float
    trace_bytes: int


def cost_of(name: str, case: Case) -> Cost:
    """Run one fit."""
    arguments, closing = CONTENDERS[name]
    torchs, close, sizes = CpuMeter(), CpuMeter(), []

    def sized(export: Any) -> Any:
        def sized_export(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
            export(self, path, *args, **kwargs)
            sizes.append(Path(path).stat().st_size)

        return sized_export

    wrapped = [(owner, method, torchs.wrap) for owner, method in TORCHS_SHARE]
    wrapped += [(owner, method, close.wrap) for owner, method in closing]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        replaced([(profile, "export_chrome_trace", sized)]),
        replaced(wrapped),
    ):
        batches = [torch.randn(32, 3, 32, 32) for _ in range(case.active + 8)]
        model = case.model()
        begin, begin_process = tree_s(), time.process_time()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **arguments(folder, case),
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))
        process_s = time.process_time() - begin_process
        fit_s = tree_s() - begin
    if name != "bare" and len(sizes) != 1:
        raise RuntimeError(f"{name} exported {len(sizes)} windows, expected one")
    close_all_s = close.process_s + max(0.0, fit_s - process_s)
    return Cost(
        torchs.thread_s, close.thread_s, torchs.process_s, close_all_s, fit_s, sizes[0] if sizes else 0
    )


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return all contenders' figures in one case."""
    names = list(CONTENDERS)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            if name != "PyTorchProfiler" or number < PEER_ROUNDS:
                costs[name].append(cost_of(name, case))
    return {
        name: {
            "trace_bytes": statistics.median(cost.trace_bytes for cost in of_name),
            "windows": len(of_name),
            "torch_ms": spread([1e3 * cost.torch_s for cost in of_name]),
            "close_ms": spread([1e3 * cost.close_s for cost in of_name]),
            "close_over_torch": spread([cost.close_s / cost.torch_s for cost in of_name]),
            "all_over_torch": spread([cost.close_all_s / cost.torch_all_s for cost in of_name]),
            "fit_over_bare_ms": spread(
                [1e3 * (cost.fit_s - bare.fit_s) for cost, bare in zip(of_name, costs["bare"], strict=False)]
            ),
        }
        for name, of_name in costs.items()
        if name != "bare"
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="windows per case (default: 5)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in CONTENDERS:
        cost_of(name, CASES["convolutions"])  # the first window of a process includes imports
    results = {case: measure(CASES[case], options.rounds) for case in options.cases}
    document = {"torch": torch.__version__, "lightning": lightning.__version__, "cases": results}
    print(tables.window_table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
