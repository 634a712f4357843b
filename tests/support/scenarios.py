"""Trainings with at most one known fault each, and the expected report.

The faulty code measures its own time. If it computes, the fault and the steps are both measured in CPU time
of the training thread, which a busy machine doesn't change. If another process is waited for, both are
measured by a clock that stands still while the training thread waits for a CPU. So are faults whose finding
relies on samples alone; they sleep, because a thread that samples a computing one has to wait for a CPU and
on a busy machine sees some places more often than others. The line to find is marked with ``# fault:
<name>``: the slow statement, or the ``def`` of a function that no thread of the training process runs or that
costs nothing itself.
"""

from __future__ import annotations

import inspect
import linecache
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanSquaredError

FILE = Path(__file__)
NUM_STEPS = 40
SIZE = 8
LINEAR = inspect.getsourcefile(nn.Linear)


_BUSY = """
import time

import torch
from torch import nn
from torchmetrics import MeanSquaredError

def wait(milliseconds):
    begin = time.thread_time_ns()
    while time.thread_time_ns() - begin < milliseconds * 1e6:
        pass

def spin(self, milliseconds):
    begin = time.thread_time_ns()
    wait(self.scale * milliseconds)
    self.spent_ns += time.thread_time_ns() - begin

def sleep(self, milliseconds):
    begin = self.clock()
    time.sleep(milliseconds / 1e3)
    self.spent_ns += self.clock() - begin

class SlowCell(nn.GRUCell):
    def forward(self, *inputs):
        time.sleep(0.000_5)
        return super().forward(*inputs)

class SlowError(MeanSquaredError):
    def update(self, *arguments):
        time.sleep(0.001)
        super().update(*arguments)

class SlowValue(torch.Tensor):
    def clone(self):
        time.sleep(0.000_2)
        return self.as_subclass(torch.Tensor).clone()

class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.005)
        return gradient.view_as(gradient)
"""
_MADE: dict[str, Any] = {"__name__": "busy"}
# As library code, so that the user's innermost line is the one that calls it.
exec(compile(_BUSY, "<busy>", "exec"), _MADE)
wait: Callable[[float], None] = _MADE["wait"]
SlowCell: type[nn.GRUCell] = _MADE["SlowCell"]
SlowError: type[MeanSquaredError] = _MADE["SlowError"]
SlowValue: type[torch.Tensor] = _MADE["SlowValue"]
SlowGradient: type[torch.autograd.Function] = _MADE["SlowGradient"]


class Costs:
    """Time of one training's faults, by their own measurement.

    Attributes:
        spent_ns: time that doesn't depend on inspection.
        measured_ns: per-step time that does: many small calls take longer in steps that we inspect.
        clock: the clock of the fit.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.spent_ns = 0
        self.measured_ns: list[int] = []
        self.scale = scale
        self.clock: Any = time.perf_counter_ns

    def per_step_ns(self, num_steps: int) -> float:
        """Fault time of a step that we don't inspect."""
        return self.spent_ns / num_steps + float(np.median(self.measured_ns or [0]))

    spin = _MADE["spin"]
    """Compute for some milliseconds; unlike after a sleep, the core stays warm."""

    sleep = _MADE["sleep"]
    """Sleep for some milliseconds; only with ``Training.waits``."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin = self.clock()
        yield
        self.measured_ns.append(self.clock() - begin)


@dataclass
class Training:
    """The parts of a fit; those of the steps may be replaced."""

    module: LightningModule
    data: Any
    val: Any = None
    before: list[Callback] = field(default_factory=list)
    after: list[Callback] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    waits: bool = False
    """Whether it sleeps or waits for another process, so that CPU time isn't enough."""


@dataclass(frozen=True)
class Scenario:
    """One training and its expected report.

    Attributes:
        make: makes the training from its costs and a directory.
        verdict: its kind.
        finding: kind of the most expensive finding; ``None`` if there must be no warning.
        saving: whether the cost is known, so that the saving must equal it.
        is_estimated: whether there's a saving although the cost is unknown.
        severe: whether it must be a warning or worse; otherwise it must not be.
        exact: whether the line is the statement's; otherwise a function's ``def``.
        placed: whether there's a line at all.
        sampled: whether the saving relies on samples alone, too few in such a short fit; hand-made runs test
            its size.
    """

    name: str
    make: Callable[[Costs, Path], Training]
    verdict: str
    finding: str | None = None
    saving: bool = True
    is_estimated: bool = False
    severe: bool = True
    exact: bool = True
    placed: bool = True
    sampled: bool = False

    @property
    def line(self) -> int:
        """The line to find."""
        pattern = re.compile(rf"# fault: .*\b{self.name}\b")
        [line] = [
            number for number, text in enumerate(FILE.read_text().split("\n"), 1) if pattern.search(text)
        ]
        return line


# Healthy trainings


class Model(LightningModule):
    """A small regression that other trainings extend."""

    def __init__(self, costs: Costs | None = None) -> None:
        super().__init__()
        self.costs = costs
        self.layers = nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows(Dataset):
    """Rows without any cost."""

    def __init__(self, size: int = NUM_STEPS * 4) -> None:
        self.rows = torch.rand(size, SIZE)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def rows(size: int = NUM_STEPS * 4, **kwargs: Any) -> DataLoader:
    return DataLoader(Rows(size), batch_size=4, **kwargs)


class Work(nn.Module):
    """A layer that takes some milliseconds, as the model's own time."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wait(self.milliseconds)
        return self.linear(inputs)


class Working(Model):
    """The model takes most of the step."""

    def __init__(self, milliseconds: float = 8, costs: Costs | None = None) -> None:
        super().__init__(costs)
        self.layers = nn.Sequential(Work(milliseconds), nn.Linear(SIZE, 1))


def healthy_tiny_model(costs: Costs, folder: Path) -> Training:
    return Training(Model(), rows(size=400))


class Large(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.loss(batch.repeat(128, 1))


def healthy_large_model(costs: Costs, folder: Path) -> Training:
    return Training(Large(), rows())


class Arrays(Rows):
    """Rows without tensors, as a worker has to be running to hand tensors over."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.made = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        with self.made:
            self.made.value += 1
        return self.rows[index].numpy()


class FromArrays(Working):
    """Its batch is one array, as Lightning's transfer iterates over lists and bytes."""

    def __init__(self) -> None:
        super().__init__(12)  # so that taking a batch from the queue is negligible

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(torch.from_numpy(batch))


class FarAhead(Callback):
    """Hold an epoch until the worker has made all of its rows, as it might fall behind on a busy machine."""

    def __init__(self, costs: Costs, rows: Arrays) -> None:
        self.costs = costs
        self.rows = rows

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        until = time.monotonic() + 60
        with self.costs.clock.held():
            while self.rows.made.value < len(self.rows) * (trainer.current_epoch + 1):
                assert time.monotonic() < until
                time.sleep(0.005)
            time.sleep(0.050)  # the last ones are in transit


def from_worker(rows: Arrays, **kwargs: Any) -> DataLoader:
    """A worker that may prefetch all batches of an epoch."""
    return DataLoader(
        rows, batch_size=4, collate_fn=np.stack, num_workers=1, prefetch_factor=len(rows) // 4, **kwargs
    )


def healthy_worker(costs: Costs, folder: Path) -> Training:
    rows = Arrays(NUM_STEPS * 4)
    loader = from_worker(rows, persistent_workers=True)
    return Training(FromArrays(), loader, before=[FarAhead(costs, rows)], waits=True)


def healthy_accumulation(costs: Costs, folder: Path) -> Training:
    return Training(Working(), rows(), trainer={"accumulate_grad_batches": 2})


class Grandchild(Model):
    """Calls a child's child directly."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.enc = nn.Sequential(Work(8), nn.Linear(SIZE, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.model.enc(batch).square().mean()


def grandchild_call(costs: Costs, folder: Path) -> Training:
    return Training(Grandchild(), rows())


class GradientPenalty(Model):
    """As in critics and physics-informed networks."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        points = batch.requires_grad_()
        outputs = self.layers(SlowGradient.apply(points))
        [gradients] = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        return outputs.square().mean() + (gradients.norm(dim=1) - 1).square().mean()


def gradient_penalty(costs: Costs, folder: Path) -> Training:
    return Training(GradientPenalty(), rows(), waits=True)


class ByHand(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.gradients(self.loss(SlowGradient.apply(batch.requires_grad_())))
        optimizer.step()

    def gradients(self, loss: torch.Tensor) -> None:
        self.manual_backward(loss)


class ByTorch(ByHand):
    def gradients(self, loss: torch.Tensor) -> None:
        loss.backward()


def manual_backward(costs: Costs, folder: Path) -> Training:
    return Training(ByHand(), rows(), waits=True)


def backward_of_torch(costs: Costs, folder: Path) -> Training:
    return Training(ByTorch(), rows(), waits=True)


class ItemPerStep(Working):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen = loss.item()  # doesn't wait on the CPU
        return loss


def item_per_step_on_the_cpu(costs: Costs, folder: Path) -> Training:
    return Training(ItemPerStep(), rows())


def too_few_steps(costs: Costs, folder: Path) -> Training:
    return Training(SlowStep(costs), rows(), trainer={"max_steps": 8})


# Input


class SlowRows(Rows):
    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:  # once per batch
            self.costs.spin(10)  # fault: slow_dataset
        return super().__getitem__(index)


def slow_dataset(costs: Costs, folder: Path) -> Training:
    return Training(Model(), DataLoader(SlowRows(costs), batch_size=4))


def slow_collate(costs: Costs, folder: Path) -> Training:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        costs.spin(10)  # fault: slow_collate
        return torch.stack(samples)

    samples = list(torch.rand(NUM_STEPS * 4, SIZE))
    return Training(Model(), DataLoader(samples, batch_size=4, collate_fn=collate))


class SlowStream(IterableDataset):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(NUM_STEPS):
            self.costs.spin(10)  # fault: slow_stream
            yield torch.rand(4, SIZE)


def slow_stream(costs: Costs, folder: Path) -> Training:
    return Training(Model(), DataLoader(SlowStream(costs), batch_size=None))


class SleepyRows(Rows):
    """Sleeps in a worker process, as if waiting for a disk."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            time.sleep(0.020)  # fault: one_worker
        return super().__getitem__(index)


class GapClock(Callback):
    """Measure from the end of a batch to the start of the next one, by the public hooks.

    The first gaps are excluded, as in the report: batches made before training wait there.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.end_ns: int | None = None
        self.gaps_ns: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if self.end_ns is not None:
            self.gaps_ns.append(self.costs.clock() - self.end_ns)

    def on_train_batch_end(self, *args: Any) -> None:
        self.end_ns = self.costs.clock()

    def on_train_end(self, *args: Any) -> None:
        self.costs.spent_ns += round(float(np.mean(self.gaps_ns[4:])) * (len(self.gaps_ns) + 1))


def one_worker(costs: Costs, folder: Path) -> Training:
    loader = DataLoader(SleepyRows(), batch_size=4, num_workers=1)
    return Training(Model(), loader, before=[GapClock(costs)], waits=True)


def start_slowly(worker: int) -> None:  # fault: epoch_restart_of_workers
    time.sleep(0.150)


class EpochGapClock(Callback):
    """Measure from the end of an epoch to the next one's first batch, by the public hooks."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.end_ns: int | None = None

    def on_train_epoch_end(self, *args: Any) -> None:
        self.end_ns = self.costs.clock()

    def on_train_batch_start(self, *args: Any) -> None:
        if self.end_ns is not None:
            self.costs.spent_ns += self.costs.clock() - self.end_ns
        self.end_ns = None


def epoch_restart_of_workers(costs: Costs, folder: Path) -> Training:
    rows = Arrays(40)
    return Training(
        FromArrays(),
        from_worker(rows, worker_init_fn=start_slowly),
        before=[EpochGapClock(costs), FarAhead(costs, rows)],
        trainer={"max_epochs": 4},
        profile={"skip_first": 0},
        waits=True,
    )


# Callbacks, loggers, checkpoints, validation


class SlowCallback(Callback):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def on_train_batch_end(self, *args: Any) -> None:
        self.costs.spin(10)  # fault: slow_callback_before, slow_callback_after


def slow_callback_before(costs: Costs, folder: Path) -> Training:
    return Training(Model(), rows(), before=[SlowCallback(costs)])


def slow_callback_after(costs: Costs, folder: Path) -> Training:
    return Training(Model(), rows(), after=[SlowCallback(costs)])


class SlowBeforeStep(Callback):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.costs.spin(10)  # fault: slow_callback_in_optimizer


def slow_callback_in_optimizer(costs: Costs, folder: Path) -> Training:
    return Training(Model(), rows(), before=[SlowBeforeStep(costs)])


class SlowEpochEnd(Callback):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def on_train_epoch_end(self, *args: Any) -> None:
        self.costs.spin(100)  # fault: slow_epoch_end


def slow_epoch_end(costs: Costs, folder: Path) -> Training:
    return Training(Model(), rows(size=40), before=[SlowEpochEnd(costs)], trainer={"max_epochs": 4})


class SlowLogger(CSVLogger):
    def __init__(self, costs: Costs, folder: Path) -> None:
        super().__init__(folder)
        self.costs = costs

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.costs.spin(10)  # fault: slow_logger


class Logging(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def slow_logger(costs: Costs, folder: Path) -> Training:
    trainer = {"logger": SlowLogger(costs, folder), "log_every_n_steps": 1}
    # The profiler's own scalars would go through the same logger.
    return Training(Logging(), rows(), trainer=trainer, profile={"log_every_n_steps": 0})


class EpochMetric(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def slow_epoch_turns(costs: Costs, folder: Path) -> Training:
    """Epochs of one batch; the logger takes 10 ms for Lightning's values between two of them."""
    trainer = {"logger": SlowLogger(costs, folder), "max_epochs": NUM_STEPS}
    return Training(EpochMetric(), rows(4), trainer=trainer, profile={"log_every_n_steps": 0})


class ManyValues(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        value = loss.detach().as_subclass(SlowValue)  # as if it had to be waited for
        with self.costs.measured():
            for number in range(80):
                self.log(f"value_{number}", value)  # fault: many_log_calls
        return loss


def many_log_calls(costs: Costs, folder: Path) -> Training:
    return Training(ManyValues(costs), rows(), waits=True)


class MetricEachStep(Model):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.errors = nn.ModuleList(SlowError() for _ in range(10))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        outputs = self.layers(batch)
        guesses, targets = outputs.detach(), batch[:, :1]
        with self.costs.measured():
            for error in self.errors:
                error.update(guesses, targets)  # fault: metrics_each_step
        return outputs.square().mean()


def metrics_each_step(costs: Costs, folder: Path) -> Training:
    # Enough steps for small sampling errors.
    return Training(MetricEachStep(costs), rows(4 * 240), waits=True)


class SlowFile(TorchCheckpointIO):
    """Write nothing, so that a checkpoint takes little more than the known time."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.costs.spin(25)  # fault: checkpoint_every_step

    def remove_checkpoint(self, *args: Any) -> None:
        pass


def checkpoint_every_step(costs: Costs, folder: Path) -> Training:
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1)
    trainer = {"enable_checkpointing": True, "plugins": [SlowFile(costs)]}
    return Training(Model(), rows(), after=[saving], trainer=trainer)


class SlowToSave(Model):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.costs.spin(100)  # fault: slow_save_hook


def slow_save_hook(costs: Costs, folder: Path) -> Training:
    saving = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=1)
    trainer = {"enable_checkpointing": True, "plugins": [SlowFile(Costs(0))]}
    return Training(SlowToSave(costs), rows(), after=[saving], trainer=trainer)


class SlowToValidate(Model):
    def __init__(self, costs: Costs, milliseconds: float) -> None:
        super().__init__(costs)
        self.milliseconds = milliseconds

    def validation_step(self, *args: Any) -> None:
        self.costs.spin(self.milliseconds)  # fault: validation_every_step, slow_validation


def validation_every_step(costs: Costs, folder: Path) -> Training:
    trainer = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0, "max_steps": 25}
    return Training(SlowToValidate(costs, 40), rows(), val=rows(4), trainer=trainer)


def slow_validation(costs: Costs, folder: Path) -> Training:
    trainer = {"val_check_interval": 10, "limit_val_batches": 4, "num_sanity_val_steps": 0}
    return Training(SlowToValidate(costs, 30), rows(), val=rows(16), trainer=trainer)


class Validated(Model):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.loss(batch)


class SlowValidationRows(Rows):
    def __init__(self, costs: Costs) -> None:
        super().__init__(16)
        self.costs = costs

    def __getitem__(self, index: int) -> torch.Tensor:
        self.costs.spin(8)  # fault: slow_validation_dataset
        return super().__getitem__(index)


def slow_validation_dataset(costs: Costs, folder: Path) -> Training:
    trainer = {"val_check_interval": 10, "num_sanity_val_steps": 0}
    data = DataLoader(SlowValidationRows(costs), batch_size=4)
    return Training(Validated(costs), rows(), val=data, trainer=trainer)


class SlowValidationEnd(Validated):
    def on_validation_epoch_end(self) -> None:
        self.costs.spin(100)  # fault: slow_validation_end


def slow_validation_end(costs: Costs, folder: Path) -> Training:
    trainer = {"val_check_interval": 10, "num_sanity_val_steps": 0}
    return Training(SlowValidationEnd(costs), rows(), val=rows(4), trainer=trainer)


# The module's own code


class SlowStep(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.slow_loss(self.layers(batch))

    def slow_loss(self, outputs: torch.Tensor) -> torch.Tensor:
        self.costs.spin(10)  # fault: slow_loss
        return outputs.square().mean()


def slow_loss(costs: Costs, folder: Path) -> Training:
    return Training(SlowStep(costs), rows())


class SlowLossModule(nn.Module):
    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        self.costs.spin(10)  # fault: slow_loss_module
        return outputs.square().mean()


class WithLossModule(Model):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.criterion = SlowLossModule(costs)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.criterion(self.layers(batch))


def slow_loss_module(costs: Costs, folder: Path) -> Training:
    return Training(WithLossModule(costs), rows())


def slow_layer_hooks(costs: Costs, folder: Path) -> Training:
    model = Model()

    def watch(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        costs.sleep(5)  # fault: slow_layer_hooks

    for layer in [one for one in model.layers.modules() if isinstance(one, nn.Linear)][:2]:
        layer.register_forward_hook(watch)
    return Training(model, rows(), waits=True)


class SteppedByHand(Model):
    """A recurrent cell in a loop over time steps, although torch has a layer for the sequence."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.cell = SlowCell(SIZE, SIZE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with self.costs.measured():
            state = torch.zeros_like(inputs)
            for _ in range(20):
                state = self.cell(inputs, state)  # fault: stepped_by_hand
        return state

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layers(self(batch)).square().mean()


def stepped_by_hand(costs: Costs, folder: Path) -> Training:
    # So that enough samples are of its line.
    return Training(SteppedByHand(costs), rows(NUM_STEPS * 16), waits=True)


class TableByPython(nn.Module):
    """A layer with a parameter and a table of numbers that Python makes each time."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs
        self.scale = nn.Parameter(torch.ones(SIZE))

    def numbers(self) -> list[float]:
        self.costs.sleep(6)
        return [0.5] * SIZE

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        table = torch.tensor(self.numbers())  # fault: table_made_by_python
        return inputs * (table + self.scale)


class WithTable(Model):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.table = TableByPython(costs)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layers(self.table(batch)).square().mean()


def table_made_by_python(costs: Costs, folder: Path) -> Training:
    # So that enough samples are of its line.
    return Training(WithTable(costs), rows(NUM_STEPS * 12), waits=True)


class RowLoop(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        outputs = self.layers(batch.repeat(300, 1))  # most samples are in the loop, even on a busy machine
        with self.costs.measured():
            total = outputs.new_zeros(())
            for row in outputs.detach():
                total = total + row.square().sum()  # fault: row_loop
        return outputs.square().mean() + 0 * total


def row_loop(costs: Costs, folder: Path) -> Training:
    return Training(RowLoop(costs), rows(NUM_STEPS * 12))


class HostTensor(Model):
    weights = [float(number) for number in range(100_000)]  # noqa: RUF012

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with self.costs.measured():
            weights = torch.tensor(self.weights)  # fault: tensor_made_on_the_host
        return self.loss(batch) * weights[1]


def tensor_made_on_the_host(costs: Costs, folder: Path) -> Training:
    return Training(HostTensor(costs), rows())


class CustomLoop(Model):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.costs.spin(10)  # fault: custom_loop


def custom_loop(costs: Costs, folder: Path) -> Training:
    return Training(CustomLoop(costs), rows())


class SlowHook(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.costs.spin(10)  # fault: slow_module_hook


def slow_module_hook(costs: Costs, folder: Path) -> Training:
    return Training(SlowHook(costs), rows())


class SlowTransfer(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.costs.spin(10)  # fault: slow_transfer
        return batch


def slow_transfer(costs: Costs, folder: Path) -> Training:
    return Training(SlowTransfer(costs), rows())


class SlowClipping(Model):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.costs.spin(10)  # fault: slow_clipping


def slow_clipping(costs: Costs, folder: Path) -> Training:
    return Training(SlowClipping(costs), rows(), trainer={"gradient_clip_val": 1.0})


class SlowScheduler(Model):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.costs.spin(10)  # fault: slow_lr_scheduler
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def slow_lr_scheduler(costs: Costs, folder: Path) -> Training:
    return Training(SlowScheduler(costs), rows())


class KeepsGradients(Model):
    def optimizer_zero_grad(self, *args: Any) -> None:
        with self.costs.measured():
            args[-1].zero_grad(set_to_none=False)
        self.costs.spin(10)  # fault: gradients_filled_with_zeros


def gradients_filled_with_zeros(costs: Costs, folder: Path) -> Training:
    return Training(KeepsGradients(costs), rows())


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, costs: Costs) -> torch.Tensor:
        ctx.costs = costs
        return inputs * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.costs.spin(10)
        return grads[0], None


class Trunk(nn.Module):
    """Frozen, and slow in backward."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs
        self.linear = nn.Linear(SIZE, SIZE)
        self.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return SlowBackward.apply(self.linear(inputs), self.costs)


class FrozenTrunk(Model):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.layers = nn.Sequential(Trunk(costs), nn.Linear(SIZE, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:  # fault: frozen_layers_computed
        return self.loss(batch.requires_grad_())


def frozen_layers_computed(costs: Costs, folder: Path) -> Training:
    return Training(FrozenTrunk(costs), rows())


class ManyParameters(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(100)), nn.Linear(SIZE, 1))

    def configure_optimizers(self) -> Any:  # fault: unfused_optimizer
        return torch.optim.Adam(self.parameters(), foreach=False)


def unfused_optimizer(costs: Costs, folder: Path) -> Training:
    return Training(ManyParameters(), rows())


class OwnOptimizer(torch.optim.SGD):
    """Torch's optimizer, with a Python loop after it."""

    def __init__(self, parameters: Any, costs: Costs) -> None:
        super().__init__(parameters, lr=0.01)
        self.costs = costs

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.costs.sleep(10)  # fault: own_optimizer
        return loss


class SteppedByOwn(Model):
    def configure_optimizers(self) -> Any:
        return OwnOptimizer(self.parameters(), self.costs)


def own_optimizer(costs: Costs, folder: Path) -> Training:
    # So that enough samples are of its line.
    return Training(SteppedByOwn(costs), rows(NUM_STEPS * 12), waits=True)


class SlowSource(Callback):
    """As if a source file were on a slow disk, where every stack that leads there checks for changes."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.before = linecache.checkcache
        linecache.checkcache = self.check

    def check(self, filename: str | None = None) -> None:
        if filename == LINEAR:
            time.sleep(0.001)
        self.before(filename)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        linecache.checkcache = self.before


def anomaly_detection(costs: Costs, folder: Path) -> Training:
    trainer = {"detect_anomaly": True}
    return Training(Model(), rows(NUM_STEPS * 12), before=[SlowSource()], trainer=trainer, waits=True)


class ManyThreads(Callback):
    """As if OMP_NUM_THREADS were set for another machine."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(4 * (os.cpu_count() or 1))

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(self.before)


def threads_oversubscribed(costs: Costs, folder: Path) -> Training:
    return Training(Working(), rows(), before=[ManyThreads()])


class Biased(Model):
    def __init__(self) -> None:  # fault: bias_before_batchnorm
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), Flat(), nn.Linear(48, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.loss(batch[:, None])


class Flat(nn.Module):
    """Takes some time, so that the step isn't empty."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wait(5)
        return inputs * self.scale


def small_batches(costs: Costs, folder: Path) -> Training:
    """8 ms with any batch; the last one of eight has one row instead of four."""
    return Training(Working(), rows(29), trainer={"max_epochs": 8})


def bias_before_batchnorm(costs: Costs, folder: Path) -> Training:
    return Training(Biased(), rows())


class Twice(Model):
    """Two heads that each call the backbone with the same batch."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.backbone = Slow(costs, 5)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        first = self.layers(self.backbone(batch)).square().mean()
        second = self.backbone(batch).mean()  # fault: called_twice
        return first + second


class Slow(nn.Module):
    """A slow layer with a parameter."""

    def __init__(self, costs: Costs, milliseconds: float) -> None:
        super().__init__()
        self.costs = costs
        self.milliseconds = milliseconds
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wait(self.milliseconds)
        return inputs * self.scale


def called_twice(costs: Costs, folder: Path) -> Training:
    return Training(Twice(costs), rows())


class Networks(LightningModule):
    """The critic's input isn't detached, so its backward goes through the generator too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(*(nn.Linear(400, 400) for _ in range(6)))
        self.critic = nn.Linear(400, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        critic.zero_grad()
        loss = self.critic(self.generator(batch.new_ones(64, 400))).mean()
        self.manual_backward(loss)  # fault: gradients_for_nothing
        critic.step()
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(-self.critic(self.generator(batch.new_ones(64, 400))).mean())
        generator.step()
        self.untoggle_optimizer(generator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-9) for part in (self.generator, self.critic)]


def gradients_for_nothing(costs: Costs, folder: Path) -> Training:
    return Training(Networks(), rows())


class Tables(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(60_000, 32)  # fault: large_dense_table
        self.head = nn.Linear(32, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.head(self.users(torch.arange(16))).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def large_dense_table(costs: Costs, folder: Path) -> Training:
    return Training(Tables(), rows())


class Doubles(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        self.double()  # fault: computes_in_float64

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layers(batch.new_ones(64, 512, dtype=self.dtype)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def computes_in_float64(costs: Costs, folder: Path) -> Training:
    return Training(Doubles(), rows())


SCENARIOS = (
    Scenario("healthy_tiny_model", healthy_tiny_model, "balanced"),
    Scenario("healthy_large_model", healthy_large_model, "balanced"),
    Scenario("healthy_worker", healthy_worker, "balanced"),
    Scenario("healthy_accumulation", healthy_accumulation, "balanced"),
    Scenario("grandchild_call", grandchild_call, "balanced"),
    Scenario("gradient_penalty", gradient_penalty, "balanced"),
    Scenario("manual_backward", manual_backward, "balanced"),
    Scenario("backward_of_torch", backward_of_torch, "balanced"),
    Scenario("item_per_step_on_the_cpu", item_per_step_on_the_cpu, "balanced"),
    Scenario("too_few_steps", too_few_steps, "cannot_tell"),
    Scenario("slow_dataset", slow_dataset, "input_bound", "input_bound"),
    Scenario("slow_collate", slow_collate, "input_bound", "input_bound"),
    Scenario("slow_stream", slow_stream, "input_bound", "input_bound"),
    Scenario("one_worker", one_worker, "input_bound", "input_bound"),
    Scenario(
        "epoch_restart_of_workers", epoch_restart_of_workers, "input_bound", "worker_startup", exact=False
    ),
    Scenario("slow_callback_before", slow_callback_before, "overhead_bound", "slow_callback"),
    Scenario("slow_callback_after", slow_callback_after, "overhead_bound", "slow_callback"),
    Scenario("slow_callback_in_optimizer", slow_callback_in_optimizer, "overhead_bound", "slow_callback"),
    Scenario("slow_epoch_end", slow_epoch_end, "overhead_bound", "slow_callback"),
    Scenario("slow_logger", slow_logger, "overhead_bound", "slow_logger"),
    Scenario("many_log_calls", many_log_calls, "overhead_bound", "slow_logging_calls", sampled=True),
    Scenario("metrics_each_step", metrics_each_step, "overhead_bound", "slow_logging_calls", sampled=True),
    Scenario("checkpoint_every_step", checkpoint_every_step, "overhead_bound", "checkpoint_share"),
    Scenario("slow_save_hook", slow_save_hook, "overhead_bound", "slow_module_hook"),
    Scenario("validation_every_step", validation_every_step, "overhead_bound", "validation_share"),
    Scenario("slow_validation", slow_validation, "overhead_bound", "validation_share"),
    Scenario("slow_validation_dataset", slow_validation_dataset, "overhead_bound", "validation_share"),
    Scenario("slow_validation_end", slow_validation_end, "overhead_bound", "validation_share"),
    Scenario("slow_loss", slow_loss, "host_bound", "slow_forward_outside_model"),
    Scenario("slow_loss_module", slow_loss_module, "host_bound", "slow_custom_module"),
    Scenario(
        "anomaly_detection",
        anomaly_detection,
        "host_bound",
        "anomaly_detection",
        is_estimated=True,
        placed=False,
    ),
    Scenario("own_optimizer", own_optimizer, "optimizer_bound", "slow_optimizer", sampled=True),
    Scenario("slow_layer_hooks", slow_layer_hooks, "host_bound", "slow_layer_hooks", sampled=True),
    Scenario(
        "stepped_by_hand",
        stepped_by_hand,
        "host_bound",
        "slow_line_in_module",
        sampled=True,
        is_estimated=True,  # of its backward
    ),
    Scenario("table_made_by_python", table_made_by_python, "host_bound", "slow_line_in_module", sampled=True),
    Scenario("called_twice", called_twice, "balanced", "repeated_forward", is_estimated=True),
    Scenario(
        "gradients_for_nothing", gradients_for_nothing, "balanced", "unused_gradients", is_estimated=True
    ),
    Scenario(
        "large_dense_table", large_dense_table, "optimizer_bound", "dense_embeddings", is_estimated=True
    ),
    Scenario("computes_in_float64", computes_in_float64, "balanced", "double_precision", is_estimated=True),
    Scenario("row_loop", row_loop, "host_bound", "slow_forward_outside_model"),
    Scenario("tensor_made_on_the_host", tensor_made_on_the_host, "host_bound", "slow_forward_outside_model"),
    Scenario("custom_loop", custom_loop, "host_bound", "slow_forward_outside_model"),
    Scenario("slow_module_hook", slow_module_hook, "overhead_bound", "slow_module_hook"),
    Scenario("slow_transfer", slow_transfer, "overhead_bound", "slow_transfer"),
    Scenario("slow_clipping", slow_clipping, "overhead_bound", "clip_cost"),
    Scenario("slow_lr_scheduler", slow_lr_scheduler, "overhead_bound", "slow_lr_scheduler"),
    Scenario("gradients_filled_with_zeros", gradients_filled_with_zeros, "overhead_bound", "zero_grad_cost"),
    Scenario(
        "frozen_layers_computed", frozen_layers_computed, "balanced", "frozen_layers_computed", exact=False
    ),
    Scenario(
        "unfused_optimizer",
        unfused_optimizer,
        "optimizer_bound",
        "optimizer_not_fused",
        is_estimated=True,
        exact=False,
    ),
    Scenario(
        "threads_oversubscribed",
        threads_oversubscribed,
        "balanced",
        "cpu_threads_oversubscribed",
        saving=False,
        placed=False,
    ),
    Scenario("slow_epoch_turns", slow_epoch_turns, "overhead_bound", "slow_epoch_turns", placed=False),
    Scenario(
        "small_batches", small_batches, "balanced", "small_batches", saving=False, severe=False, placed=False
    ),
    Scenario(
        "bias_before_batchnorm",
        bias_before_batchnorm,
        "balanced",
        "conv_bias_before_batchnorm",
        saving=False,
        severe=False,
        exact=False,
    ),
)
