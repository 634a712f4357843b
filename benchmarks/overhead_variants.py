"""The ways to train that ``overhead.py`` and ``overhead_processes.py`` compare, and how one is measured."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn

BARE, EMPTY, OURS, GPUPROF = "bare", "empty-callback", "ours", "gpuprof"
BLOCK = 50  # steps between two readings of the clock; also Trainer's log_every_n_steps
WARM_UP_STEPS = 60  # more than a block, so that everything has happened once


class TinyModel(LightningModule):
    """A step that is nearly nothing but Lightning's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ProbedBatches:
    """A data loader of one batch over and over that reads the clocks every `BLOCK` steps, after a warm-up.

    Between two fetches lies exactly one step, whatever hooks run in it.
    """

    def __init__(self, steps: int) -> None:
        # One more than is measured: the last fetch ends the last measured step.
        self.length = WARM_UP_STEPS + steps + 1
        self.batch = torch.rand(16, 32)
        self.thread_s: list[float] = []
        self.process_s: list[float] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.length):
            if step >= WARM_UP_STEPS and (step - WARM_UP_STEPS) % BLOCK == 0:
                self.thread_s.append(time.thread_time())
                self.process_s.append(time.process_time())
            yield self.batch


@dataclass
class Variant:
    """One way to train.

    Attributes:
        name: as on the command line.
        label: as in the table.
        arguments: makes the Trainer's arguments for a run in a folder; they are fresh each time.
        step_us: CPU time of the training thread per step in the fastest block, one figure per round.
        mean_us: the same in all blocks, one figure per round.
        threads_us: CPU time of all threads of the process per step in all blocks, one figure per round.
        once_ms: CPU time of the run outside the measured steps and the warm-up, one figure per round.
    """

    name: str
    label: str
    arguments: Callable[[str], dict[str, Any]]
    step_us: list[float] = field(default_factory=list)
    mean_us: list[float] = field(default_factory=list)
    threads_us: list[float] = field(default_factory=list)
    once_ms: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all rounds."""
        for figures in (self.step_us, self.mean_us, self.threads_us, self.once_ms):
            figures.clear()

    def run(self, steps: int) -> None:
        """Trains once and notes what it cost."""
        # In a temporary folder and with nothing printed: the terminal's speed is not the subject.
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            batches = ProbedBatches(steps)
            gc.collect()
            begin = time.thread_time()
            trainer = Trainer(
                **{
                    "accelerator": "cpu",
                    "max_epochs": 1,
                    "logger": False,
                    "log_every_n_steps": BLOCK,
                    "enable_progress_bar": False,
                    "enable_model_summary": False,
                    "enable_checkpointing": False,
                    "default_root_dir": folder,
                    **self.arguments(folder),
                }
            )
            trainer.fit(TinyModel(), batches)
            total = time.thread_time() - begin
        steps_s = np.diff(batches.thread_s) / BLOCK
        self.step_us.append(float(steps_s.min()) * 1e6)
        self.mean_us.append(float(steps_s.mean()) * 1e6)
        self.threads_us.append((batches.process_s[-1] - batches.process_s[0]) / steps * 1e6)
        self.once_ms.append((total - float(steps_s.mean()) * len(batches)) * 1e3)


def ours(**arguments: Any) -> Callback:
    from lightning_modelprof import ModelProfCallback  # noqa: PLC0415 - the peers can be measured without it

    return ModelProfCallback(active=0, report={"progress_bar": False}, **arguments)


def gpuprof(folder: str) -> dict[str, Any]:
    """Its callback as its documentation has it; its data base goes to the folder of the run."""
    from gpuprof import LightningCallback  # noqa: PLC0415 - without it the variant is skipped

    be_quiet()  # it imports pytorch_lightning, which sets a level of its own
    return {"callbacks": [LightningCallback(run_name="run", db_path=str(Path(folder) / "gpuprof.db"))]}


def tensorboard(folder: str, *callbacks: Callback) -> dict[str, Any]:
    return {"logger": TensorBoardLogger(folder), "callbacks": list(callbacks)}


def variants() -> list[Variant]:
    """All that can be trained in one process in turns."""
    return [
        Variant(BARE, "bare Trainer", lambda folder: {}),
        Variant("bare-again", "bare Trainer again", lambda folder: {}),
        Variant(EMPTY, "empty Callback", lambda folder: {"callbacks": [Callback()]}),
        Variant(OURS, "ModelProfCallback, timing only", lambda folder: {"callbacks": [ours()]}),
        Variant(
            "ours-unsampled",
            "ModelProfCallback, sampling=False",
            lambda folder: {"callbacks": [ours(inspect={"sampling": False})]},
        ),
        Variant("simple-profiler", "SimpleProfiler", lambda folder: {"profiler": SimpleProfiler()}),
        Variant(
            "advanced-profiler",
            "AdvancedProfiler",
            lambda folder: {"profiler": AdvancedProfiler(dirpath=folder, filename="profile")},
        ),
        # Its only window is over when the warm-up is.
        Variant(
            "pytorch-profiler",
            "PyTorchProfiler after its window",
            lambda folder: {"profiler": PyTorchProfiler(dirpath=folder, filename="profile")},
        ),
        Variant(GPUPROF, "gpuprof's LightningCallback", gpuprof),
        Variant("logger", "TensorBoardLogger alone", tensorboard),
        Variant("ours-logger", "ModelProfCallback + logger", lambda folder: tensorboard(folder, ours())),
        Variant(
            "throughput-monitor",
            "ThroughputMonitor + logger",
            lambda folder: tensorboard(folder, ThroughputMonitor(batch_size_fn=len)),
        ),
        Variant(
            "device-stats-monitor",
            "DeviceStatsMonitor + logger",
            lambda folder: tensorboard(folder, DeviceStatsMonitor()),
        ),
    ]


def be_quiet() -> None:
    """One thread for all, and none of the warnings about few workers and the like."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
