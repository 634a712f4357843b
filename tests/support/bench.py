"""A fake clock, and user code that spends known times in every hook and keeps its own account of them.

The account (:class:`Truth`) is independent of profiler actions: costs are booked by the code that causes
them, and steps are delimited by the data set and the public hooks, so the expected values are independent of
the measured ones. All costs differ by some nanoseconds, so mix-ups can't cancel out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.profilers import Profiler
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import RankRecord
from lightning_modelprof.run.steps import StepTag
from tests.support.fits import grouped

LIGHTNING = Version(lightning.__version__)
HAS_SAVE_ACTION = Version("2.5") <= LIGHTNING
"""Before 2.5, Lightning's profiler had no action for checkpoints, which are part of the saving callback."""
MIXES_PACKAGES = Version("2.6") <= LIGHTNING
"""Before 2.6, a pytorch_lightning Trainer rejected lightning.pytorch callbacks."""

MS = 1_000_000

TRAIN_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
)
VALIDATION_HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
COST_MS = {
    "dataset": 3,
    "loader_iter": 13,
    "on_before_batch_transfer": 1,
    "transfer_batch_to_device": 2,
    "on_after_batch_transfer": 1,
    "training_step": 5,
    "backward": 7,
    "optimizer": 11,
    "zero_grad": 1,
    "configure_gradient_clipping": 2,
    "clip_grad_by_norm": 4,
    "lr_scheduler": 3,
    "lr_scheduler_step": 1,
    "logger": 6,
    "save_checkpoint": 9,
    "validation_step": 8,
    "profiler": 1,
    "scaler": 2,
}
HOOK_COST_MS = 2
"""Cost of every other hook."""


class FakeClock:
    """Integer nanoseconds that only advance on request; counts its reads."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * MS
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return self.now_ns

    def advance(self, ns: int) -> None:
        self.now_ns += ns


def thread_clock() -> HostClock:
    """CPU time of the calling thread, from any thread; it stands still while others run."""
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime_ns(clock_id)


class UndisturbedClock:
    """Real time of the creating thread, including sleep, minus its waits for a CPU.

    Only that thread can read it; others get its CPU time since its own last read.
    """

    def __init__(self) -> None:
        self._owner, self._cpu_clock = threading.get_ident(), thread_clock()
        # Scheduler statistics: time on a CPU, time waiting for one, time slices.
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._statistics = path.open("rb", buffering=0) if path.exists() else None
        self._held_ns = 0
        self._last = (0, 0)
        self()

    def _waited_ns(self) -> int:
        return int(os.pread(self._statistics.fileno(), 100, 0).split()[1]) if self._statistics else 0

    def __call__(self) -> int:
        if threading.get_ident() != self._owner:
            then_ns, cpu_ns = self._last
            return then_ns + self._cpu_clock() - cpu_ns
        before_ns = self._waited_ns()
        while True:
            now_ns = time.perf_counter_ns()
            after_ns = self._waited_ns()
            if after_ns == before_ns:  # no wait between the two readings
                self._last = (now_ns - after_ns - self._held_ns, self._cpu_clock())
                return self._last[0]
            before_ns = after_ns

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Exclude the body's time, except CPU time."""
        began_ns, began_cpu_ns = self(), self._cpu_clock()
        yield
        self._held_ns += max(0, self() - began_ns - (self._cpu_clock() - began_cpu_ns))


class Truth:
    """Time spent by user code per step and phase, by its own account."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.trainer: Any = None
        self.device: Any = None  # a FakeDeviceClock that advances with the CPU clock, at its own pace
        self.is_on = False
        self._serial = 0
        self.reset()

    def reset(self) -> None:
        """Start a new fit."""
        self.steps: list[dict[str, int]] = []
        self.device_steps: list[dict[str, int]] = []
        self.outside: Counter[str] = Counter()
        self.by_hook: Counter[str] = Counter()  # time in callbacks' hooks, wherever it belongs
        self.validation: Counter[str] = Counter()  # by part, over the whole fit
        self.unfinished = 0
        self.begin_ns = self.end_ns = self.clock.now_ns
        self.in_epoch = self._batch_began = self._batch_ended = False
        self._open: Counter[str] = Counter()
        self._open_device: Counter[str] = Counter()

    def spend(self, phase: str, what: str) -> None:
        """Let the time of ``what`` pass, in ``phase`` or in a running validation."""
        self._serial += 1
        ns = COST_MS.get(what, HOOK_COST_MS) * MS + self._serial
        self.clock.advance(ns)
        if self.device is not None:
            self.device.advance(3 * ns)
        self.book(phase, what, ns)

    def book(self, phase: str, what: str, ns: int) -> None:
        """Record time that has passed."""
        if not self.is_on:
            return
        is_inside_fit = self.trainer.validating and self.trainer.state.fn == "fit"
        if is_inside_fit and phase not in {"callbacks", "checkpoint", "profiler", "user_profiler"}:
            self.validation[_part_of(phase, what)] += ns
            phase = "validation"
        self._open[phase] += ns
        # Callbacks put no marks on a device; there their time counts in the enclosing phase.
        is_between = phase == "callbacks" and not self.in_epoch
        self._open_device["epoch_turn" if is_between else phase] += 3 * ns
        if phase == "callbacks":
            self.by_hook[what] += ns

    @property
    def is_fetching(self) -> bool:
        """Whether a batch has started and not ended."""
        return self._batch_began and not self._batch_ended

    # Boundaries of steps, from the public hooks and the data set. All may be called repeatedly.

    def training_begins(self, trainer: Any) -> None:
        self.trainer = trainer
        self.reset()
        self.is_on = True

    def epoch_begins(self) -> None:
        """The batch loop starts; before the first finished step, step 0 starts here."""
        if self.is_on and not self.in_epoch:
            self.in_epoch = True
            if not self.steps:
                self._discard()

    def batch_begins(self) -> None:
        if self.is_on:
            self.epoch_begins()
            self.step_ends()
            self._batch_began = True

    def step_ends(self) -> None:
        if self.is_on and self._batch_ended:
            self._close_step()

    def batch_ended(self) -> None:
        self._batch_ended = True

    def epoch_ended(self) -> None:
        """The batch loop is over; a batch without an end is no step."""
        if self.in_epoch:
            self.in_epoch = False
            if self._batch_ended:
                self._close_step()
            elif self._batch_began:
                self._discard()

    def training_ends(self) -> None:
        if self.is_on:
            self._discard()
            self.end_ns = self.clock.now_ns
            self.is_on = False

    def _close_step(self) -> None:
        self.steps.append(dict(self._open))
        self.device_steps.append(dict(self._open_device))
        self._open.clear()
        self._open_device.clear()
        self._batch_began = self._batch_ended = False

    def _discard(self) -> None:
        self.outside.update(self._open)
        self.unfinished += self._batch_began
        self._open.clear()
        self._open_device.clear()
        self._batch_began = self._batch_ended = False


def _part_of(phase: str, what: str) -> str:
    """Part of the validation for time spent in user code."""
    if what == "on_validation_epoch_end":
        return "epoch_end"
    return {"validation": "forward"}.get(phase, phase)


class MeasuredCallback(ModelProfCallback):
    """The callback under test; tells the account when its measurement starts and ends."""

    def __init__(self, truth: Truth, **arguments: Any) -> None:
        quiet = dict.fromkeys(("terminal", "files", "progress_bar", "flops", "sampling"), False) | {
            "active": 0,
            "skip_first": 0,
        }
        super().__init__(**grouped(quiet | arguments))
        self.truth = truth
        self._clock = truth.clock

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.truth.training_begins(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.truth.batch_begins()

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.truth.batch_ended()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.truth.epoch_ended()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self.truth.training_ends()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.truth.training_ends()


# Data


class CostlyDataset(Dataset[Tensor]):
    def __init__(self, truth: Truth, length: int = 3, *, is_training: bool = True) -> None:
        self.truth = truth
        self.length = length
        self.is_training = is_training

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.is_training:
            self.truth.batch_begins()
        self.truth.spend("dataloader", "dataset")
        return torch.ones(2)


class CostlyStream(IterableDataset[Tensor]):
    """Like :class:`CostlyDataset`, but without a length; running dry takes time too."""

    def __init__(self, truth: Truth, length: int = 3) -> None:
        self.items = CostlyDataset(truth, length)

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.items.length):
            yield self.items[index]
        self.items[-1]


class CostlyLoader(DataLoader[Tensor]):
    """Creating its iterator takes time, like starting workers."""

    def __iter__(self) -> Any:
        data: Any = getattr(self.dataset, "items", self.dataset)
        if data.is_training:
            data.truth.epoch_begins()
        # A CombinedLoader restarts an exhausted loader during a fetch.
        data.truth.spend("dataloader" if data.truth.is_fetching else "dataloader_init", "loader_iter")
        return super().__iter__()


# Model


class CostlyBackward(torch.autograd.Function):
    """Identity with a slow backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, truth: Truth, phase: str) -> Tensor:
        ctx.truth, ctx.phase = truth, phase
        return loss * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.truth.spend(ctx.phase, "backward")
        return grads[0], None, None


class CostlySGD(torch.optim.SGD):
    def __init__(self, truth: Truth, parameters: Any, zero_grad_phase: str = "zero_grad") -> None:
        super().__init__(parameters, lr=1e-3)
        self.truth = truth
        self.zero_grad_phase = zero_grad_phase

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.truth.spend("optimizer", "optimizer")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.truth.spend(self.zero_grad_phase, "zero_grad")


class CostlyScheduler(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, truth: Truth, optimizer: Any) -> None:
        self.truth = truth
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, *args: Any) -> None:
        super().step(*args)
        self.truth.spend("lr_scheduler", "lr_scheduler")


class CostlySteps:
    """``training_step`` and other required methods; a mixin, as there are two Lightning packages."""

    automatic_optimization: bool
    layer: nn.Linear

    def __init__(self, truth: Truth, *, scheduler_interval: str | None = None) -> None:
        super().__init__()
        self.truth = truth
        self.scheduler_interval = scheduler_interval
        self.layer = nn.Linear(2, 1)

    def loss(self, batch: Any, backward_phase: str = "backward") -> Tensor:
        while not isinstance(batch, Tensor):
            batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
        self.truth.spend("forward", "training_step")
        loss: Tensor = CostlyBackward.apply(self.layer(batch).sum(), self.truth, backward_phase)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.truth.spend("validation", "validation_step")

    def configure_optimizers(self) -> Any:
        phase = "zero_grad" if self.automatic_optimization else "forward"  # no action surrounds a manual one
        optimizer = CostlySGD(self.truth, self.layer.parameters(), phase)
        if self.scheduler_interval is None:
            return optimizer
        scheduler = {
            "scheduler": CostlyScheduler(self.truth, optimizer),
            "interval": self.scheduler_interval,
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class CostlyHooks(CostlySteps):
    """Every other hook of a LightningModule that a step can call."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.truth.spend("transfer", "on_before_batch_transfer")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.truth.spend("transfer", "transfer_batch_to_device")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.truth.spend("transfer", "on_after_batch_transfer")
        return batch

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.truth.spend("clip", "configure_gradient_clipping")
        super().configure_gradient_clipping(*args, **kwargs)  # type: ignore[misc]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.truth.spend("lr_scheduler", "lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)  # type: ignore[misc]


def _costly_hook(hook: str, phase: str) -> Any:
    def spend(self: Any, *args: Any, **kwargs: Any) -> None:
        if hook == "on_train_epoch_end":
            self.truth.epoch_ended()
        if hook == "on_train_batch_start":
            self.truth.batch_begins()
        self.truth.spend(phase, hook)

    return spend


for _hook in (*TRAIN_HOOKS, *VALIDATION_HOOKS):
    setattr(CostlyHooks, _hook, _costly_hook(_hook, "module_hooks"))


class PlainModel(CostlySteps, LightningModule):
    """Overrides only required hooks."""


class HookedModel(CostlyHooks, LightningModule):
    """Overrides every hook."""


class ManualSteps(CostlySteps):
    """One optimizer with manual optimization."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))  # type: ignore[attr-defined]
        self.truth.spend("forward", "training_step")
        optimizer.step()
        self.truth.spend("forward", "training_step")


class PlainManualModel(ManualSteps, LightningModule):
    """Overrides only required hooks."""


class ManualModel(ManualSteps, CostlyHooks, LightningModule):
    """Overrides every hook."""


# Around the model


class CostlyCallbackHooks:
    """Every hook of a callback; a mixin, as there are two Lightning packages."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth


_CALLBACK_HOOKS = (
    *("on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_save_checkpoint"),
    *TRAIN_HOOKS,
    *VALIDATION_HOOKS,
)
for _hook in _CALLBACK_HOOKS:
    setattr(CostlyCallbackHooks, _hook, _costly_hook(_hook, "callbacks"))


class CostlyCallback(CostlyCallbackHooks, Callback):
    """Another callback that takes time in every hook."""


class CostlyLogger(Logger):
    """Slow at every point; in the batch loop that's logging, after it Lightning's loop."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth
        self.logged: list[dict[str, float]] = []

    name = "costly"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)
        if any(name.startswith("modelprof/") for name in metrics):
            self.truth.step_ends()  # the profiler's own figures: at a step's start, as profiler time
            self.truth.spend("profiler", "logger")
        else:
            self.truth.spend("logging" if self.truth.in_epoch else "epoch_turn", "logger")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class CostlyCheckpointIO(TorchCheckpointIO):
    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.truth.spend("checkpoint", "save_checkpoint")


class CostlyProfiler(Profiler):
    """A slow user profiler that records every action."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth
        self.events: list[tuple[str, str]] = []

    def start(self, action_name: str) -> None:
        self.events.append(("start", action_name))
        if action_name == "run_training_epoch":
            self.truth.epoch_begins()
        if action_name.endswith(".train_dataloader_next"):
            self.truth.batch_begins()
        self.truth.spend("user_profiler", "profiler")

    def stop(self, action_name: str) -> None:
        self.events.append(("stop", action_name))
        if action_name == "run_training_epoch":
            self.truth.epoch_ended()
        self.truth.spend("user_profiler", "profiler")

    def summary(self) -> str:
        return ""


# Fits


def make_trainer(trainer_class: Any = Trainer, **arguments: Any) -> Any:
    """A quiet Trainer that writes nothing, with everything optional turned off."""
    logging.getLogger(trainer_class.__module__.partition(".trainer")[0]).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    if not arguments.get("barebones"):
        defaults |= {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
    return trainer_class(**(defaults | arguments))


class Bench:
    """A clock, the account and the callback under test.

    Args:
        arguments: of the callback.
    """

    def __init__(self, **arguments: Any) -> None:
        self.clock = FakeClock()
        self.truth = Truth(self.clock)
        self.callback = MeasuredCallback(self.truth, **arguments)

    def data(self, length: int = 3, **arguments: Any) -> CostlyLoader:
        return CostlyLoader(CostlyDataset(self.truth, length), **arguments)

    def validation_data(self, length: int = 2) -> CostlyLoader:
        return CostlyLoader(CostlyDataset(self.truth, length, is_training=False))

    def trainer(self, *, before: tuple[Any, ...] = (), after: tuple[Any, ...] = (), **arguments: Any) -> Any:
        """A Trainer with the callback under test between others."""
        return make_trainer(callbacks=[*before, self.callback, *after], **arguments)

    def fit(self, model: Any, data: Any = None, *, trainer: Any = None, **arguments: Any) -> Any:
        """Train with Trainer arguments or a Trainer, and check that the callback leaves nothing behind.

        ``raises``, ``validation`` and ``ckpt_path`` are for the fit.
        """
        raises, validation, path = (arguments.pop(key, None) for key in ("raises", "validation", "ckpt_path"))
        trainer = trainer or self.trainer(**arguments)
        profiler, callbacks = trainer.profiler, list(trainer.callbacks)
        data = {"datamodule": data} if hasattr(data, "prepare_data") else {"train_dataloaders": data}
        if validation is not None:
            data["val_dataloaders"] = validation
        with pytest.raises(raises) if raises is not None else contextlib.nullcontext():
            trainer.fit(model, **data, ckpt_path=path)
        assert trainer.profiler is profiler
        # Lightning appends callbacks, such as those of configure_callbacks
        assert [callback for callback in trainer.callbacks if callback in callbacks] == callbacks
        assert remains(trainer) == []
        return trainer

    @property
    def record(self) -> RankRecord:
        assert self.callback.run is not None
        return self.callback.run.ranks[0]

    def has_tag(self, tag: StepTag) -> list[bool]:
        """Whether each step has a tag."""
        return [bool(tags & tag) for tags in self.record.steps.tags.tolist()]

    def check(self, num_steps: int) -> None:
        """Check that all measurements equal the account, to the nanosecond."""
        record, truth = self.record, self.truth
        steps = record.steps
        assert steps.step.tolist() == list(range(num_steps))
        assert differences(named_phases(steps.phases_ns), truth.steps) == []
        assert steps.duration_ns.tolist() == [sum(step.values()) for step in truth.steps]
        assert differences([record.outside_ns], [truth.outside]) == []
        assert record.unfinished_steps == truth.unfinished
        validation_ns = {} if record.validation is None else parts_of(record)
        assert differences([validation_ns], [truth.validation]) == []
        wall_ns = truth.end_ns - truth.begin_ns
        assert int(steps.duration_ns.sum()) + sum(record.outside_ns.values()) == wall_ns

    def check_callback_times(self) -> None:
        """Check that times by callback equal the account, inside and outside steps."""
        measured: Counter[str] = Counter()
        for callback in self.record.callbacks:
            measured[callback.hook] += callback.total_ns
        assert differences([measured], [self.truth.by_hook]) == []


def differences(measured: list[Any], expected: list[Any]) -> list[str]:
    """Differences as sentences, which are easier to read than compared dictionaries."""
    found = [] if len(measured) == len(expected) else [f"{len(measured)} steps and not {len(expected)}"]
    for step, (got, wanted) in enumerate(zip(measured, expected, strict=False)):
        found += [
            f"step {step}: {key} took {got.get(key, 0):,} ns and not {wanted.get(key, 0):,}"
            for key in sorted({*got, *wanted})
            if got.get(key, 0) != wanted.get(key, 0)
        ]
    return found


def named_phases(columns: Any) -> list[dict[str, int]]:
    """Phase key → nanoseconds for every step, without phases that took no time."""
    keys = [phase.key for phase in PHASES]
    return [{key: ns for key, ns in zip(keys, row, strict=True) if ns} for row in columns.tolist()]


def parts_of(record: RankRecord) -> dict[str, int]:
    """Validation part → nanoseconds, without parts that took no time."""
    assert record.validation is not None
    return {part.key: part.total_ns for part in record.validation.parts if part.total_ns}


def remains(trainer: Any) -> list[str]:
    """This package's attributes on a trainer and its parts."""
    owners = [
        *(trainer, trainer.strategy, trainer.lightning_module, trainer.fit_loop, trainer.fit_loop.epoch_loop),
        trainer._logger_connector,
        *(trainer.loggers if trainer.loggers else ()),
        *(callback for callback in trainer.callbacks if not isinstance(callback, ModelProfCallback)),
    ]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if _is_ours(value)
    ]


def _is_ours(value: Any) -> bool:
    modules = (getattr(value, "__module__", None), type(value).__module__)
    return any(str(module).startswith("lightning_modelprof") for module in modules)
