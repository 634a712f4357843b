"""Cost of profiling on a GPU per step, window and fit, compared with Lightning's profilers and TraceML.

    python benchmarks/gpu.py                             # on the GPU; writes gpu.json, prints a table
    python benchmarks/gpu.py --rounds 9 --json h100.json
    python benchmarks/gpu.py --device cpu --rounds 1     # only tests the code; the times mean little

Method:

* Figures are wall time. The device is synchronized only at four points of a fit: after the first steps, after
  the steps that may have a window, at the last step, and after the fit. So a fit has three parts: steps with
  the window, steps without, and the rest.
* The step figure is the mean over the steps without a window. The window figure is its part's extra time,
  compared with the same number of such steps. The fit figure is the rest: setup, report, files.
* Variants alternate, each in its own process, because TraceML patches its process and torch's profiler leaves
  threads behind. Each is compared with the bare Trainer of its own round. The table has the median, minimum
  and maximum of these differences.
* Two models: one whose step is almost only Lightning's loop, and one that keeps a GPU busy.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BARE, TRACEML = "bare", "traceml"
WINDOW_STEPS = 5
FIRST, AFTER_WINDOW = 10, 40
PACKAGES = ("lightning-modelprof", "torch", "lightning", "traceml-ai")
LABELS = {
    "ours": "ModelProfCallback(active=0)",
    "ours-window": f"ModelProfCallback(active={WINDOW_STEPS})",
    "simple": "SimpleProfiler",
    "pytorch": f"PyTorchProfiler, {WINDOW_STEPS} steps",
    TRACEML: "TraceML, traceml run",
}


class Model(LightningModule):
    """Square linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Batches(Dataset):
    """The same batch repeated, pinned for CUDA."""

    def __init__(self, batch: Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Tensor:
        return self.batch


class Clock(Callback):
    """Reads the clock before selected steps, with an idle device."""

    def __init__(self, steps: int) -> None:
        self.at: dict[int, float] = {}
        self.wanted = (FIRST, AFTER_WINDOW, steps - 1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.wanted:
            self.at[batch_idx] = now(pl_module.device)


def now(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def trainer_arguments(name: str, folder: str) -> dict[str, Any]:
    if name in {"ours", "ours-window"}:
        from lightning_modelprof import ModelProfCallback  # noqa: PLC0415 -- the others go without

        active = WINDOW_STEPS if name == "ours-window" else 0
        return {"callbacks": [ModelProfCallback(active=active, wait=12, flops=False, skip_first=0)]}
    if name == "simple":
        return {"profiler": SimpleProfiler()}
    if name == "pytorch":
        schedule = torch.profiler.schedule(wait=14, warmup=2, active=WINDOW_STEPS, repeat=1)
        return {"profiler": PyTorchProfiler(dirpath=folder, filename="profile", schedule=schedule)}
    return {}


def one_fit(name: str, model: str, device: str) -> dict[str, float]:
    """Return the three parts of a fit in seconds, after a short fit that warms up the device."""
    large = (4096, 6, 4096, 120) if device != "cpu" else (256, 6, 256, 60)
    width, depth, rows, steps = {"tiny": (64, 2, 16, 400 if device != "cpu" else 120), "large": large}[model]
    if device == "cpu":
        torch.set_num_threads(1)
    batch = torch.randn(rows, width)
    batch = batch.pin_memory() if device == "cuda" else batch
    parts = {}
    for is_measured in (False, True):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            clock = Clock(steps)
            arguments = trainer_arguments(name, folder) if is_measured else {}
            callbacks = [*arguments.pop("callbacks", ()), clock]
            quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
            begin = time.perf_counter()
            trainer = Trainer(
                accelerator={"cuda": "gpu"}.get(device, device), devices=1, max_epochs=1, callbacks=callbacks,
                default_root_dir=folder, **dict.fromkeys(quiet, False), **arguments,
            )  # fmt: skip
            net = Model(width, depth)
            trainer.fit(net, DataLoader(Batches(batch, steps), batch_size=None))
            total = now(torch.device(device)) - begin
        first, middle, last = (clock.at[step] for step in clock.wanted)
        step = (last - middle) / (steps - 1 - AFTER_WINDOW)
        window = middle - first - (AFTER_WINDOW - FIRST) * step
        parts = {"step": step, "window": window, "fit": total - (last - first) - step * (FIRST + 1)}
    return parts


def in_process(name: str, model: str, device: str) -> dict[str, float]:
    """Run one fit in its own process.

    Raises:
        RuntimeError: If it failed, with its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        arguments = ["--one", name, "--model", model, "--device", device, "--answer", str(answer)]
        script = str(Path(__file__).resolve())
        command = [sys.executable, script, *arguments]
        if name == TRACEML:
            traceml = shutil.which("traceml", path=str(Path(sys.executable).parent)) or shutil.which(
                "traceml"
            )
            if traceml is None:
                raise RuntimeError("the command traceml is not installed")
            command = [
                traceml,
                "run",
                script,
                "--logs-dir",
                folder,
                "--run-name",
                "run",
                "--args",
                *arguments,
            ]
        environment = os.environ | {"PYTHONPATH": str(Path(script).parents[1])}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, timeout=600, env=environment
        )
        if not answer.exists():
            raise RuntimeError((done.stderr.strip().splitlines() or ["no answer"])[-1][:300])
        return json.loads(answer.read_text())


def measure(device: str, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all fits by model and variant, and the reason for each variant that failed."""
    fits: dict[str, dict[str, list[dict[str, float]]]] = {"tiny": {}, "large": {}}
    failed: dict[str, str] = {}
    for number in range(rounds):
        names = [BARE, *LABELS]
        for model, of_model in fits.items():
            for name in reversed(names) if number % 2 else names:
                if name in failed:
                    continue
                try:
                    found = in_process(name, model, device)
                    of_model.setdefault(name, []).append(found)
                except RuntimeError as error:
                    failed[name] = str(error)
                except subprocess.TimeoutExpired as error:
                    failed[name] = f"stopped after {error.timeout:.0f} s"
                print(f"round {number + 1} of {rounds}: {model} {name}", file=sys.stderr)
    return fits, failed


def machine(device: str) -> dict[str, Any]:
    """Describe the environment of the figures."""
    found: dict[str, Any] = {"device": device, "cpus": os.cpu_count(), "python": platform.python_version()}
    if device in {"cuda", "xpu"}:
        found["card"] = getattr(torch, device).get_device_name(0)
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def table(fits: dict[str, Any], failed: dict[str, str]) -> str:
    """Format the results for the docs, in Markdown."""
    lines = [
        "| over a bare Trainer | model | per step, µs | per window, ms | per fit, ms |",
        "|---|---|---:|---:|---:|",
    ]
    for model, variants in fits.items():
        if not variants.get(BARE):
            continue
        for name in (one for one in LABELS if variants.get(one)):
            cells = [
                difference(variants, name, part, scale)
                for part, scale in (("step", 1e6), ("window", 1e3), ("fit", 1e3))
            ]
            lines.append(f"| {LABELS[name]} | {model} | {' | '.join(cells)} |")
        bare = median(one["step"] for one in variants[BARE]) * 1e6
        lines.append(f"| *bare, step time* | {model} | {bare:.0f} | | |")
    lines += [f"\n{LABELS.get(name, name)}: not measured, {reason}" for name, reason in failed.items()]
    return "\n".join(lines)


def difference(variants: dict[str, Any], name: str, part: str, scale: float) -> str:
    """Format a variant's extra cost over bare: median, minimum and maximum over the rounds."""
    pairs = zip(variants[name], variants[BARE], strict=False)
    each = [(one[part] - bare[part]) * scale for one, bare in pairs]
    return f"{median(each):+.3g} ({min(each):+.3g} to {max(each):+.3g})"


def best_device() -> str:
    """Return the GPU that torch finds."""
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return kind
    return "mps" if torch.backends.mps.is_available() else "cpu"


def main(make: Callable[[], str] = best_device) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "xpu", "mps", "cpu"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device or make()
    if options.one:
        options.answer.write_text(json.dumps(one_fit(options.one, options.model, device)))
        return
    fits, failed = measure(device, options.rounds)
    result = {"machine": machine(device), "rounds": options.rounds, "fits": fits, "failed": failed}
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{json.dumps(result['machine'])}\n\n{table(fits, failed)}")


if __name__ == "__main__":
    main()
