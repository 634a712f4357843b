"""The training variants that the step benchmarks compare, and how to measure one."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn

BARE, EMPTY, OURS = "bare", "empty-callback", "ours"
LOGGER, THROUGHPUT = "logger", "throughput-monitor"
LOG_EVERY = 50
WARM_UP_STEPS = 60  # more than LOG_EVERY, so that everything has happened once


def tree_s() -> float:
    """Return the CPU seconds of this process and all its descendants, including running ones."""
    own, ended = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    children = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may have ended
            children += sum(child.cpu_times()[:4])
    return own + ended.ru_utime + ended.ru_stime + children


class TinyModel(LightningModule):
    """A step that is almost only Lightning's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ProbedBatches:
    """Repeats one batch, and reads the clocks after a warm-up and at the end.

    Exactly one step lies between two fetches, whatever hooks run in it.
    """

    def __init__(self, steps: int) -> None:
        # One more than measured, because the last fetch ends the last measured step.
        self.length = WARM_UP_STEPS + steps + 1
        self.batch = torch.rand(16, 32)
        self.thread_s: list[float] = []
        self.process_s: list[float] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.length):
            if step in (WARM_UP_STEPS, self.length - 1):
                self.thread_s.append(time.thread_time())
                self.process_s.append(time.process_time())
            yield self.batch


@dataclass(frozen=True, slots=True)
class Fit:
    """CPU time of one fit.

    Attributes:
        step_us: per step on the training thread, mean over all measured steps.
        threads_us: the same on all threads of the process.
        once_ms: of the training thread, without steps.
        once_all_ms: of all threads and processes, without steps.
        total_s: of the training thread.
        total_all_s: of all threads and processes.
    """

    step_us: float
    threads_us: float
    once_ms: float
    once_all_ms: float
    total_s: float
    total_all_s: float


def fit(arguments: Callable[[str], dict[str, Any]], steps: int) -> Fit:
    """Train once; discards the output, so that the terminal's speed doesn't matter."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        batches = ProbedBatches(steps)
        gc.collect()
        begin_all, begin = tree_s(), time.thread_time()
        trainer = Trainer(
            **{
                "accelerator": "cpu",
                "max_epochs": 1,
                "logger": False,
                "log_every_n_steps": LOG_EVERY,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
                "default_root_dir": folder,
                **arguments(folder),
            }
        )
        trainer.fit(TinyModel(), batches)
        total = time.thread_time() - begin
        total_all = tree_s() - begin_all
    step_s = (batches.thread_s[1] - batches.thread_s[0]) / steps
    threads_s = (batches.process_s[1] - batches.process_s[0]) / steps
    return Fit(
        step_us=step_s * 1e6,
        threads_us=threads_s * 1e6,
        once_ms=(total - step_s * len(batches)) * 1e3,
        once_all_ms=(total_all - threads_s * len(batches)) * 1e3,
        total_s=total,
        total_all_s=total_all,
    )


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: as on the command line.
        label: as in the table.
        arguments: creates the Trainer's arguments for a run in a folder, with new objects each time.
        base, unit: the variant it's compared with, and the variant whose cost over the base is the unit.
        fits: one per round.
    """

    name: str
    label: str
    arguments: Callable[[str], dict[str, Any]]
    base: str = BARE
    unit: str = EMPTY
    fits: list[Fit] = field(default_factory=list)


def ours(**arguments: Any) -> Callback:
    """Time and sample steps, without FLOPs or windows."""
    from lightning_modelprof import ModelProfCallback  # noqa: PLC0415 - the peers can be measured without it
    from lightning_modelprof.engine.process_loops import PROCESS_LOOPS  # noqa: PLC0415

    PROCESS_LOOPS.forget()  # each fit counts as the first one, which prints its report
    return ModelProfCallback(**{"active": 0, "flops": False, **arguments})


def tensorboard(folder: str, *callbacks: Callback) -> dict[str, Any]:
    return {"logger": TensorBoardLogger(folder), "callbacks": list(callbacks)}


def variants() -> list[Variant]:
    """Return all variants that can alternate in one process."""
    return [
        Variant(BARE, "bare Trainer", lambda folder: {}),
        Variant(EMPTY, "empty Callback", lambda folder: {"callbacks": [Callback()]}),
        Variant(OURS, "ModelProfCallback", lambda folder: {"callbacks": [ours()]}),
        Variant("simple-profiler", "SimpleProfiler", lambda folder: {"profiler": SimpleProfiler()}),
        # Its only window ends during the warm-up.
        Variant(
            "pytorch-profiler",
            "PyTorchProfiler after its window",
            lambda folder: {"profiler": PyTorchProfiler(dirpath=folder, filename="profile")},
        ),
        Variant(LOGGER, "TensorBoardLogger alone", tensorboard),
        Variant(
            "ours-logger",
            "ModelProfCallback + logger",
            lambda folder: tensorboard(folder, ours()),
            LOGGER,
            THROUGHPUT,
        ),
        Variant(
            THROUGHPUT,
            "ThroughputMonitor + logger",
            lambda folder: tensorboard(folder, ThroughputMonitor(batch_size_fn=len)),
            LOGGER,
            THROUGHPUT,
        ),
        Variant(
            "device-stats-monitor",
            "DeviceStatsMonitor + logger",
            lambda folder: tensorboard(folder, DeviceStatsMonitor()),
            LOGGER,
            THROUGHPUT,
        ),
    ]


def be_quiet() -> None:
    """Use one thread, and silence warnings such as those about few workers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
