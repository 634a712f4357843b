"""Shared by the checks: a device, small models and trainings, and tables by column name."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof.lightning.callback import ModelProfCallback
from lightning_modelprof.report.model import Report
from lightning_modelprof.selftest.comparison import Skip

Loss = Callable[[nn.Module, Any], Tensor]


class Lab:
    """A device, and a directory for the files of trainings.

    Args:
        kind: ``cuda``, ``xpu``, ``mps`` or ``cpu``.
        folder: an empty directory.

    Attributes:
        half: a 16-bit type that is fast on the device, if there is one.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.is_gpu = kind != "cpu"
        self.device = torch.device(kind, 0) if self.is_gpu else torch.device("cpu")
        self.warnings: list[str] = []
        if kind == "xpu" and "xpu" not in AcceleratorRegistry.available_accelerators():
            raise Skip("Lightning has no XPU accelerator")
        is_old = kind == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(0) < (8, 0)
        self.half = (
            torch.bfloat16 if kind == "cuda" and not is_old else torch.float16 if is_old else torch.float32
        )
        if not self.is_gpu:
            torch.set_num_threads(1)  # synchronizing threads slows down small models
        for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def pick(self, gpu: Any, cpu: Any) -> Any:
        """Choose the size for this device."""
        return gpu if self.is_gpu else cpu

    def product_ns(self, size: int) -> float:
        """Time of one 16-bit product of two square matrices, the fastest of a few series."""
        x, times = torch.randn(size, size, device=self.device, dtype=self.half), []
        for _ in range(3):
            self.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(8):
                x @ x
            self.synchronize()
            times.append((time.perf_counter_ns() - begin) / 8)
        return min(times)

    def event(self) -> Any:
        return getattr(torch, self.kind).Event(enable_timing=True)

    def synchronize(self) -> None:
        if self.is_gpu:
            getattr(torch, self.kind).synchronize()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, pinned: bool = True) -> Tensor:
        """Random values in CPU memory."""
        made = torch.randn(*shape).to(dtype)
        return made.pin_memory() if pinned and self.kind == "cuda" else made

    def callback(self, name: str, **arguments: Any) -> ModelProfCallback:
        """The callback under test, silent, with its files in ``folder / name``."""
        report = {"terminal": False, "progress_bar": False} | arguments.pop("report", {})
        return ModelProfCallback(report=report, dirpath=self.folder / name, **arguments)

    def trainer(self, callbacks: Sequence[Callback] = (), **settings: Any) -> Trainer:
        """A Trainer without other callbacks, loggers or output."""
        accelerator = {"cuda": "gpu"}.get(self.kind, self.kind)
        usual: dict[str, Any] = {"accelerator": accelerator, "devices": 1, "max_epochs": 1, "logger": False}
        quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        usual |= dict.fromkeys(quiet, False) | {"default_root_dir": self.folder}
        return Trainer(**(usual | settings), callbacks=list(callbacks))

    def fit(
        self,
        net: LightningModule,
        batches: Sequence[Any] | DataLoader[Any],
        steps: int,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """Train on the same few batches; collect this package's warnings in ``warnings``."""
        loader = batches if isinstance(batches, DataLoader) else loader_of(batches, steps)
        with self._watching():
            self.trainer(callbacks, **settings).fit(net, loader)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
        self.warnings += [str(one.message) for one in seen if "modelprof" in f"{one.message}".lower()]

    def step_ns(self, net: LightningModule, batches: Any, steps: int, **settings: Any) -> float:
        """Mean step time from outside, without the first third of the steps; on a CPU, its CPU time."""
        clock = _StepClock(self, steps // 3, steps - 1)
        self.fit(net, batches, steps, [*settings.pop("callbacks", ()), clock], **settings)
        return clock.ns


class _StepClock(Callback):
    """Wait for the device only at the first and last step. CPU time excludes waits for a CPU."""

    def __init__(self, lab: Lab, first: int, last: int) -> None:
        self.lab, self.first, self.last, self.ns, self.start = lab, first, last, 0.0, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (self.first, self.last):
            self.lab.synchronize()
            now = time.perf_counter_ns() if self.lab.is_gpu else time.thread_time_ns()
            self.start = now if batch_idx == self.first else self.start
            self.ns = (now - self.start) / (self.last - self.first)


class Batches(Dataset[Any]):
    """The same few batches in turn, with no fetch time."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]


def loader_of(batches: Sequence[Any], count: int) -> DataLoader[Any]:
    """Make a loader without workers."""
    return DataLoader(Batches(batches, count), batch_size=None)


def mean_loss(net: nn.Module, batch: Any) -> Tensor:
    """A loss without labels."""
    return net(batch).float().square().mean()  # type: ignore[no-any-return]


class Net(LightningModule):
    """A LightningModule around a module and a loss.

    Args:
        mark: called where a phase starts or ends, with the step number and the border's name.
        loss: of the module and a batch.
    """

    def __init__(
        self, net: nn.Module, mark: Callable[[int, str], None] | None = None, loss: Loss = mean_loss
    ) -> None:
        super().__init__()
        self.net, self.loss, self.mark, self.step_number = net, loss, mark or _no_mark, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step_number = batch_idx
        self.mark(batch_idx, "forward")
        loss = self.loss(self.net, batch)
        self.mark(batch_idx, "forward end")
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.mark(self.step_number, "backward")
        super().backward(loss, *args, **kwargs)
        self.mark(self.step_number, "backward end")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.mark(self.step_number, "optimizer end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(self.net, batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


def _no_mark(step: int, border: str) -> None:
    """Do nothing."""


def layers(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Square linear layers, each with a ReLU."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.ReLU()) for _ in range(depth))
    )


def pictures(width: int) -> nn.Sequential:
    """A small convolutional net with BatchNorm and ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)),
    )


def rows(report: Report, table: str) -> list[dict[str, Any]]:
    """A report table as one dict per row; empty without the table."""
    found = [one for one in report.tables if one.id == table]
    return [dict(zip((c.key for c in one.columns), row, strict=True)) for one in found for row in one.rows]


def row(report: Report, table: str, name: str) -> dict[str, Any]:
    """A row by its first cell; empty if missing."""
    return next((one for one in rows(report, table) if next(iter(one.values())) == name), {})


def middle(values: Iterable[float]) -> float | None:
    """The median; ``None`` without values."""
    known = list(values)
    return median(known) if known else None


def weights(net: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [one.detach().cpu().clone() for one in net.parameters()]


def differing(before: Sequence[Tensor], after: Sequence[Tensor]) -> int:
    """Number of tensors that aren't bitwise equal."""
    return sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
