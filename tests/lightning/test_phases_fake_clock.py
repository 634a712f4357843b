"""Tests every phase of every step to the nanosecond, in a real ``Trainer.fit`` with a fake clock.

Expected times are those that user code in ``tests/support/bench.py`` reports spending. After every fit,
``Bench.fit`` also checks that the trainer has its original profiler back and that we left nothing behind.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag
from tests.support.bench import (
    HAS_SAVE_ACTION,
    MIXES_PACKAGES,
    MS,
    Bench,
    CostlyCallback,
    CostlyCallbackHooks,
    CostlyCheckpointIO,
    CostlyDataset,
    CostlyHooks,
    CostlyLoader,
    CostlyLogger,
    CostlyProfiler,
    CostlySGD,
    CostlyStream,
    HookedModel,
    ManualModel,
    PlainModel,
    Truth,
    make_trainer,
    remains,
)

# Lightning's advice (workers, loggers, ...) doesn't matter here.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning"),
]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def everything(bench: Bench) -> dict[str, Any]:
    """Trainer arguments for a run with a logger and callbacks before and after ours."""
    return {
        "before": (CostlyCallback(bench.truth),),
        "after": (CostlyCallback(bench.truth),),
        "logger": CostlyLogger(bench.truth),
        "log_every_n_steps": 1,
    }


class LoggingModel(HookedModel):
    """Logs a metric at every step, so that the logger is used."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


# Ways to optimize


def test_plain_model_has_only_its_own_phases(bench):
    bench.fit(PlainModel(bench.truth), bench.data())
    bench.check(num_steps=3)
    assert set(bench.truth.steps[1]) == {"dataloader", "forward", "zero_grad", "backward", "optimizer"}


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_automatic_optimization_with_all_hooks(bench, interval):
    model = LoggingModel(bench.truth, scheduler_interval=interval)
    bench.fit(model, bench.data(), max_epochs=2, **everything(bench))
    bench.check(num_steps=6)
    assert bench.has_tag(StepTag.FIRST_OF_EPOCH) == [True, False, False, True, False, False]
    assert bench.truth.steps[3]["dataloader_init"] > 0
    assert bench.truth.steps[1]["logging"] > 0
    assert bench.truth.steps[2]["profiler"] > 0  # the same logger with our figures for clean steps
    assert bench.truth.steps[3]["epoch_turn"] > 0  # the logger's point at the epoch's end
    bench.check_callback_times()


def test_manual_optimization_is_measured(bench):
    bench.fit(ManualModel(bench.truth), bench.data(), max_epochs=2, **everything(bench))
    bench.check(num_steps=6)
    assert "zero_grad" not in bench.truth.steps[1]  # no action covers it, so it's part of forward


class GAN(HookedModel):
    """Two toggled optimizers, each with its own backward and step."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth)
        self.automatic_optimization = False
        self.critic = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch) + self.critic(batch).sum()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.truth.spend("forward", "training_step")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.truth.spend("forward", "training_step")

    def configure_optimizers(self) -> list[Any]:
        layers = (self.layer, self.critic)
        return [CostlySGD(self.truth, layer.parameters(), "forward") for layer in layers]


def test_two_optimizers_of_gan_are_measured(bench):
    bench.fit(GAN(bench.truth), bench.data(), **everything(bench))
    bench.check(num_steps=3)
    step = bench.truth.steps[1]
    assert step["optimizer"] > 2 * 11 * MS
    assert step["forward"] > 5 * 5 * MS


def test_raw_backward_under_manual_optimization_is_forward(bench):
    class RawBackward(ManualModel):
        def training_step(self, batch, batch_idx):
            self.loss(batch, backward_phase="forward").backward()

    bench.fit(RawBackward(bench.truth), bench.data(), **everything(bench))
    bench.check(num_steps=3)
    assert bench.has_tag(StepTag.NO_OPTIMIZER_STEP) == [True] * 3


class CostlyLBFGS(torch.optim.LBFGS):
    def __init__(self, truth: Truth, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3, max_iter=3)
        self.truth = truth

    def step(self, closure: Any) -> Any:
        def closure_and_more() -> Any:
            loss = closure()
            self.truth.spend("optimizer", "optimizer")
            return loss

        return super().step(closure_and_more)


def test_lbfgs_with_multiple_closures_is_measured(bench):
    class LBFGSModel(HookedModel):
        def configure_optimizers(self):
            return CostlyLBFGS(self.truth, self.layer.parameters())

    bench.fit(LBFGSModel(bench.truth), bench.data(), **everything(bench))
    bench.check(num_steps=3)
    assert bench.truth.steps[1]["forward"] > 3 * 5 * MS


@pytest.mark.parametrize("model_class", [PlainModel, LoggingModel])
def test_gradient_accumulation_tags_skipped_optimizer_steps(bench, model_class):
    model = model_class(bench.truth, scheduler_interval="step")
    arguments = everything(bench) if model_class is LoggingModel else {}
    bench.fit(model, bench.data(5), accumulate_grad_batches=2, **arguments)
    bench.check(num_steps=5)
    assert bench.has_tag(StepTag.NO_OPTIMIZER_STEP) == [True, False, True, False, False]


class CostlyPrecision(Precision):
    """Takes time within Lightning's code: in clipping, and between the fetch and the transfer."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth

    def convert_input(self, data: Any) -> Any:
        self.truth.spend("other", "convert_input")
        return super().convert_input(data)

    def clip_grad_by_norm(self, *args: Any, **kwargs: Any) -> None:
        super().clip_grad_by_norm(*args, **kwargs)
        self.truth.spend("clip", "clip_grad_by_norm")


@pytest.mark.parametrize("model_class", [PlainModel, HookedModel])
def test_gradient_clipping_has_own_phase(bench, model_class):
    plugins = [CostlyPrecision(bench.truth)]
    bench.fit(model_class(bench.truth), bench.data(), gradient_clip_val=0.5, plugins=plugins)
    bench.check(num_steps=3)
    assert [step["other"] > 0 for step in bench.truth.steps] == [True] * 3
    assert [step["clip"] > 4 * MS for step in bench.truth.steps] == [True] * 3


def test_bf16_mixed_is_measured(bench):
    bench.fit(HookedModel(bench.truth), bench.data(), precision="bf16-mixed", **everything(bench))
    bench.check(num_steps=3)


class CostlyScaler(torch.amp.GradScaler):
    def __init__(self, truth: Truth) -> None:
        super().__init__("cpu", init_scale=8.0)
        self.truth = truth

    def scale(self, outputs: Any) -> Any:
        self.truth.spend("backward", "scaler")
        return super().scale(outputs)

    def unscale_(self, optimizer: Any) -> None:
        self.truth.spend("optimizer", "scaler")
        super().unscale_(optimizer)

    def update(self, new_scale: Any = None) -> None:
        self.truth.spend("optimizer", "scaler")
        super().update(new_scale)


def test_16_mixed_step_skipped_for_infinite_gradients(bench):
    class Overflows(HookedModel):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (float("inf") if batch_idx == 1 else 1.0)

    plugins = [MixedPrecision("16-mixed", device="cpu", scaler=CostlyScaler(bench.truth))]
    bench.fit(
        Overflows(bench.truth), bench.data(), plugins=plugins, gradient_clip_val=0.5, **everything(bench)
    )
    bench.check(num_steps=3)
    optimizer_ms = [step["optimizer"] // MS for step in bench.truth.steps]
    assert optimizer_ms == [15, 4, 15]  # only the scaler's time is left when the step is skipped


def test_training_step_may_return_none(bench):
    class Abstains(HookedModel):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return None if batch_idx == 1 else loss

    bench.fit(Abstains(bench.truth), bench.data(), **everything(bench))
    bench.check(num_steps=3)
    assert "backward" not in bench.truth.steps[1]


# Ways to end or skip


class SkipsEpoch(HookedModel):
    """Skips the rest of the epoch at a batch, in the first or in every epoch."""

    def __init__(self, truth: Truth, batch_idx: int, *, always: bool) -> None:
        super().__init__(truth)
        self.skipped = batch_idx
        self.always = always

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == self.skipped and (self.always or self.current_epoch == 0) else None


@pytest.mark.parametrize("always", [True, False])
def test_skipped_rest_of_epoch_leaves_unfinished_steps(bench, always):
    model = SkipsEpoch(bench.truth, 1, always=always)
    bench.fit(model, bench.data(), max_epochs=2, **everything(bench))
    bench.check(num_steps=2 if always else 4)
    assert bench.record.unfinished_steps == (2 if always else 1)


def test_skipped_first_epoch_is_no_problem(bench):
    model = SkipsEpoch(bench.truth, 0, always=False)
    bench.fit(model, bench.data(), max_epochs=2, **everything(bench))
    bench.check(num_steps=3)
    assert bench.record.notes == ()


@pytest.mark.parametrize(
    "where", ["dataset", "training_step", "backward", "validation", "callback", "logger"]
)
def test_fit_after_exception_is_measured_again(where, monkeypatch):
    """Wherever the exception occurs, the unfinished step doesn't count, and the next fit starts afresh."""
    bench = Bench(log_every_n_steps=50)  # avoids logger failures at our own points
    spend, number = bench.truth.spend, {"dataset": 0}

    def break_off(phase: str, what: str) -> None:
        spend(phase, what)
        number[what] = number.get(what, 0) + 1
        raises = {
            "dataset": ("dataset", 2),
            "training_step": ("training_step", 2),
            "backward": ("backward", 2),
            "validation": ("validation_step", 1),
            "callback": ("on_train_batch_end", 2),
            "logger": ("logger", 2),
        }[where]
        if raises == (what, number[what]):
            raise RuntimeError("broken off")

    monkeypatch.setattr(bench.truth, "spend", break_off)
    arguments = {**everything(bench), "before": ()}
    model, data, validation = LoggingModel(bench.truth), bench.data(), bench.validation_data()
    trainer = bench.fit(
        model, data, validation=validation, val_check_interval=1, raises=RuntimeError, **arguments
    )
    assert bench.callback.run.info.status == "failed"
    bench.check(num_steps=len(bench.truth.steps))
    assert bench.record.unfinished_steps == 1

    monkeypatch.setattr(bench.truth, "spend", spend)
    bench.fit(model, data, validation=validation, trainer=trainer)
    assert bench.callback.run.info.status == "finished"
    assert len(bench.truth.steps) > 0
    bench.check(num_steps=len(bench.truth.steps))
    assert bench.record.unfinished_steps == 0


def test_keyboard_interrupt_ends_fit_as_interrupted(bench):
    class Interrupted(HookedModel):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    handler = signal.getsignal(signal.SIGINT)
    try:
        bench.fit(Interrupted(bench.truth), bench.data(), raises=SystemExit, **everything(bench))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from now on
    assert bench.callback.run.info.status == "interrupted"
    bench.check(num_steps=1)


# Data


@pytest.mark.parametrize("model_class", [PlainModel, LoggingModel])
def test_stream_without_length_is_prefetched(bench, model_class):
    """The fetch in a step gets the next batch; the last one finds none."""
    data = CostlyLoader(CostlyStream(bench.truth))
    arguments = everything(bench) if model_class is LoggingModel else {}
    bench.fit(model_class(bench.truth), data, max_epochs=2, **arguments)
    bench.check(num_steps=6)
    fetches = [step["dataloader"] // (3 * MS) for step in bench.truth.steps]
    assert fetches == [1, 1, 1, 2, 1, 1]  # the first fetch happens before training starts


def test_combined_loader_is_measured(bench):
    data = CombinedLoader({"a": bench.data(3), "b": bench.data(2)}, "max_size_cycle")
    bench.fit(HookedModel(bench.truth), data, max_epochs=2, **everything(bench))
    bench.check(num_steps=6)
    assert bench.truth.steps[2]["dataloader"] > 13 * MS  # the short loader restarts inside the fetch


class FetchesItself(HookedModel):
    """``training_step`` takes the iterator of batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        self.truth.spend("forward", "training_step")
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@pytest.mark.parametrize("ours_is_first", [True, False])
def test_training_step_with_dataloader_iter_is_measured(bench, ours_is_first):
    arguments = everything(bench)
    if ours_is_first:
        del arguments["before"]
    bench.fit(FetchesItself(bench.truth), bench.data(), max_epochs=2, **arguments)
    bench.check(num_steps=6)
    assert bench.record.unfinished_steps == 0


def test_dataloader_iter_may_end_inside_training_step(bench):
    data = CostlyLoader(CostlyStream(bench.truth))
    bench.fit(FetchesItself(bench.truth), data, max_epochs=2, **everything(bench))
    bench.check(num_steps=6)
    assert bench.record.unfinished_steps == 2


@pytest.mark.parametrize("missing", [0, 1])
def test_batch_may_be_none(bench, missing):
    class WithHole(CostlyDataset):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return None if index == missing else item

    data = CostlyLoader(WithHole(bench.truth), batch_size=None)
    bench.fit(HookedModel(bench.truth), data, max_epochs=2, **everything(bench))
    bench.check(num_steps=6)
    assert "forward" not in bench.truth.steps[missing]
    assert bench.record.steps.samples[missing] == NOT_MEASURED
    assert bench.record.notes == ()


# Validation, checkpoints, trial runs


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("interval", "validated"),
    [(1, [True] * 4), (2, [False, True] * 2), (1.0, [False, False, False, True])],
    ids=["after every batch", "after every second", "at the end of the epoch"],
)
def test_validation_is_measured_and_tagged(bench, accumulate, interval, validated):
    bench.fit(
        LoggingModel(bench.truth, scheduler_interval="step"),
        bench.data(4),
        validation=bench.validation_data(),
        val_check_interval=interval,
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        **everything(bench),
    )
    bench.check(num_steps=8)
    assert bench.has_tag(StepTag.VALIDATION) == validated * 2
    bench.check_callback_times()


def test_callback_times_do_not_exceed_fit(bench, tmp_path):
    """Even if one hook calls another and most of the time is outside steps."""

    class Saving(CostlyCallback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    class Packing(Callback):
        def on_save_checkpoint(self, *args: Any) -> None:
            for _ in range(40):
                bench.truth.spend("callbacks", "on_save_checkpoint")

        def on_train_epoch_end(self, *args: Any) -> None:
            for _ in range(400):
                bench.truth.spend("callbacks", "on_train_epoch_end")

    bench.fit(PlainModel(bench.truth), bench.data(), before=(Packing(), Saving(bench.truth)), max_epochs=1)
    record = bench.record
    table = next(one for one in bench.callback.report.tables if one.id == "callbacks")
    shares = {(row[0].rpartition(".")[2], row[1]): row[-1] for row in table.rows}
    fit_ns = bench.truth.end_ns - bench.truth.begin_ns
    at_saving = [one for one in record.callbacks if one.hook == "on_save_checkpoint"]
    assert sum(one.total_ns for one in at_saving) == bench.truth.by_hook["on_save_checkpoint"]
    at_end = bench.truth.by_hook["on_train_epoch_end"]
    assert at_end > int(record.steps.duration_ns.sum())
    assert shares["Packing", "on_train_epoch_end"] == pytest.approx(at_end / fit_ns, rel=0.01)
    assert sum(shares.values()) <= 1


def test_plateau_scheduler_is_not_validation(bench):
    class Plateau(PlainModel):
        def configure_optimizers(self):
            optimizer = CostlySGD(self.truth, self.layer.parameters())
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            options = {"scheduler": scheduler, "monitor": "loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": options}

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("loss", 1.0)

        def lr_scheduler_step(self, scheduler, metric):
            self.truth.spend("lr_scheduler", "lr_scheduler_step")
            super().lr_scheduler_step(scheduler, metric)

    bench.fit(Plateau(bench.truth), bench.data(), validation=bench.validation_data(), val_check_interval=1)
    bench.check(num_steps=3)


@pytest.mark.skipif(not HAS_SAVE_ACTION, reason="this Lightning does not tell its profiler of checkpoints")
@pytest.mark.parametrize(
    "when",
    [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}, {"save_on_train_epoch_end": False}],
)
def test_checkpoints_have_own_phase(bench, tmp_path, when):
    saving = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, **when)
    arguments = everything(bench)
    bench.fit(
        HookedModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        max_epochs=2,
        enable_checkpointing=True,
        plugins=[CostlyCheckpointIO(bench.truth)],
        **{**arguments, "after": (*arguments["after"], saving)},
    )
    bench.check(num_steps=6)
    assert any("checkpoint" in step for step in bench.truth.steps)


def test_sanity_check_is_not_measured(bench):
    bench.fit(
        HookedModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        num_sanity_val_steps=2,
        **everything(bench),
    )
    bench.check(num_steps=3)
    assert bench.has_tag(StepTag.VALIDATION) == [False, False, True]


def test_fast_dev_run_is_measured(bench):
    validation = bench.validation_data()
    arguments = everything(bench)
    del arguments["logger"]
    bench.fit(HookedModel(bench.truth), bench.data(), validation=validation, fast_dev_run=2, **arguments)
    bench.check(num_steps=2)


def test_barebones_trainer_is_measured(bench):
    trainer = bench.trainer(
        before=(CostlyCallback(bench.truth),), after=(CostlyCallback(bench.truth),), barebones=True
    )
    bench.fit(HookedModel(bench.truth), bench.data(), trainer=trainer)
    bench.check(num_steps=3)


class Tunable(HookedModel):
    """Has the attributes that Lightning's tuners change, and the loader that they need."""

    batch_size = 1
    lr = 1e-3
    automatic_optimization = True

    def train_dataloader(self) -> Any:
        return CostlyLoader(CostlyDataset(self.truth, 8), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return CostlyLoader(CostlyDataset(self.truth, 2, is_training=False))


@pytest.mark.parametrize(
    "tuner",
    [
        LearningRateFinder(num_training_steps=4, early_stop_threshold=None, update_attr=False),
        BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=1),
    ],
    ids=["learning rate", "batch size"],
)
def test_tuner_trials_are_not_measured(bench, tmp_path, tuner):
    bench.fit(
        Tunable(bench.truth), before=(tuner,), after=(CostlyCallback(bench.truth),), default_root_dir=tmp_path
    )
    # The tuner decides how many steps remain; the truth knows them.
    num_steps = len(bench.truth.steps)
    assert num_steps > 0
    bench.check(num_steps)


# Multiple fits


def test_second_fit_after_validation_is_measured(bench):
    model, data = HookedModel(bench.truth), bench.data()
    trainer = bench.fit(model, data, **everything(bench))
    bench.check(num_steps=3)
    first = bench.callback.run
    trainer.validate(model, bench.validation_data(), verbose=False)
    assert bench.callback.run is not first  # tested in tests/lightning/test_evaluation_loops.py
    assert remains(trainer) == []
    trainer.fit_loop.max_epochs = 3
    bench.fit(model, data, trainer=trainer)
    bench.check(num_steps=6)


@pytest.mark.parametrize("every_n_train_steps", [2, 3], ids=["in the middle of an epoch", "at its end"])
def test_resumed_fit_is_measured(bench, tmp_path, every_n_train_steps):
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=every_n_train_steps, filename="saved")
    make_trainer(callbacks=[saving], enable_checkpointing=True).fit(HookedModel(bench.truth), bench.data())
    path = str(tmp_path / "saved.ckpt")
    bench.fit(HookedModel(bench.truth), bench.data(), ckpt_path=path, max_epochs=2, **everything(bench))
    assert len(bench.truth.steps) >= 3
    bench.check(num_steps=len(bench.truth.steps))


def test_callback_works_in_two_trainers_in_turn(bench):
    for num_steps in (3, 2):
        bench.fit(HookedModel(bench.truth), bench.data(num_steps))
        bench.check(num_steps)


def test_nested_training_counts_as_callback_time(bench):
    """Each trainer has its own profiler and ledger. The outer one counts the inner run as callback time."""

    class Nested(CostlyCallback):
        def on_train_batch_end(self, *args):
            inner = Bench()
            inner.clock = inner.truth.clock = inner.callback._clock = self.truth.clock
            begin_ns = self.truth.clock.now_ns
            inner.fit(HookedModel(inner.truth), inner.data(2))
            inner.check(num_steps=2)
            self.truth.book("callbacks", "on_train_batch_end", self.truth.clock.now_ns - begin_ns)

    bench.fit(HookedModel(bench.truth), bench.data(), after=(Nested(bench.truth),))
    bench.check(num_steps=3)


# The user's own profiler


def test_users_profiler_has_own_phase(bench):
    profiler = CostlyProfiler(bench.truth)
    bench.fit(
        LoggingModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        max_epochs=2,
        profiler=profiler,
        **everything(bench),
    )
    bench.check(num_steps=6)
    starts = [name for kind, name in profiler.events if kind == "start"]
    stops = [name for kind, name in profiler.events if kind == "stop"]
    assert sorted(starts) == sorted(stops)
    assert starts.count("[_TrainingEpochLoop].train_dataloader_next") == 6


def test_exception_with_users_profiler_ends_cleanly(bench):
    class Fails(HookedModel):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise RuntimeError("broken off")
            return loss

    profiler = CostlyProfiler(bench.truth)
    bench.fit(Fails(bench.truth), bench.data(), profiler=profiler, raises=RuntimeError, **everything(bench))
    bench.check(num_steps=1)


TRAINING_STEP = "[Strategy]SingleDeviceStrategy.training_step"


@pytest.mark.parametrize("profiler_class", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_lightning_profilers_still_get_their_events(bench, tmp_path, profiler_class):
    profiler = profiler_class(dirpath=tmp_path, filename="profile")
    trainer = bench.fit(HookedModel(bench.truth), bench.data(), profiler=profiler, **everything(bench))
    bench.check(num_steps=3)
    assert isinstance(trainer.profiler, profiler_class)
    if profiler_class is SimpleProfiler:
        assert len(profiler.recorded_durations[TRAINING_STEP]) == 3
    elif profiler_class is PyTorchProfiler:
        assert any(TRAINING_STEP in event.name for event in profiler.function_events)
    else:
        assert TRAINING_STEP in (tmp_path / "fit-profile.txt").read_text()


def test_user_actions_inherit_enclosing_phase(bench):
    class WithActions(HookedModel):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("my action"):
                self.truth.spend("forward", "training_step")
            self.trainer.profiler.start("my other action")
            loss = self.loss(batch)
            self.trainer.profiler.stop("my other action")
            return loss

    bench.fit(WithActions(bench.truth), bench.data(), **everything(bench))
    bench.check(num_steps=3)


@pytest.mark.parametrize("has_profiler", [False, True])
def test_actions_from_another_thread_are_ignored(bench, has_profiler):
    """User actions that start in one phase and end in another."""

    class Background(HookedModel):
        def training_step(self, batch, batch_idx):
            self.in_thread(self.trainer.profiler.start)
            return self.loss(batch)

        def on_before_zero_grad(self, optimizer):
            super().on_before_zero_grad(optimizer)
            self.in_thread(self.trainer.profiler.stop)

        def in_thread(self, tell):
            thread = threading.Thread(target=tell, args=("in the background",))
            thread.start()
            thread.join()

    profiler = SimpleProfiler() if has_profiler else None
    bench.fit(Background(bench.truth), bench.data(), profiler=profiler, **everything(bench))
    bench.check(num_steps=3)


# Other parts of Lightning


class PytorchLightningModel(CostlyHooks, pytorch_lightning.LightningModule):
    pass


class PytorchLightningCallback(CostlyCallbackHooks, pytorch_lightning.Callback):
    pass


@pytest.mark.skipif(not MIXES_PACKAGES, reason="this pytorch_lightning refuses callbacks of lightning")
def test_pytorch_lightning_trainer_is_measured(bench):
    bench.fit(
        PytorchLightningModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        trainer_class=pytorch_lightning.Trainer,
        max_epochs=2,
        before=(PytorchLightningCallback(bench.truth),),
        after=(PytorchLightningCallback(bench.truth),),
    )
    bench.check(num_steps=6)


def test_strategy_hooks_are_measured(bench):
    truth = bench.truth

    class CostlyStrategy(SingleDeviceStrategy):
        def on_train_batch_start(self, batch, batch_idx):
            truth.spend("module_hooks", "on_train_batch_start")

        def batch_to_device(self, batch, device=None, dataloader_idx=0):
            truth.spend("transfer", "transfer_batch_to_device")
            return super().batch_to_device(batch, device, dataloader_idx)

        def training_step(self, *args, **kwargs):
            truth.spend("forward", "training_step")
            return super().training_step(*args, **kwargs)

        def backward(self, *args, **kwargs):
            truth.spend("backward", "backward")
            return super().backward(*args, **kwargs)

        def optimizer_step(self, *args, **kwargs):
            truth.spend("optimizer", "optimizer")
            return super().optimizer_step(*args, **kwargs)

    bench.fit(PlainModel(truth), bench.data(), strategy=CostlyStrategy(device=torch.device("cpu")))
    bench.check(num_steps=3)
    assert bench.truth.steps[1]["module_hooks"] > 0


def test_data_module_hooks_are_measured(bench):
    truth = bench.truth

    class CostlyDataModule(LightningDataModule):
        def train_dataloader(self):
            return bench.data()

        def on_before_batch_transfer(self, batch, dataloader_idx):
            truth.spend("transfer", "on_before_batch_transfer")
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            truth.spend("transfer", "transfer_batch_to_device")
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            truth.spend("transfer", "on_after_batch_transfer")
            return batch

    bench.fit(PlainModel(truth), CostlyDataModule())
    bench.check(num_steps=3)
    assert [step["transfer"] // MS for step in bench.truth.steps] == [4] * 3


def test_progress_bar_is_as_it_was(bench):
    bench = Bench(progress_bar=True, log_every_n_steps=1)
    bar = RichProgressBar()
    bench.fit(HookedModel(bench.truth), bench.data(), after=(bar,), enable_progress_bar=True)
    assert "get_metrics" not in vars(bar)
    bench.check(num_steps=3)


class TinyModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("is_persistent", [True, False])
def test_worker_startup_is_measured_with_real_clock(is_persistent):
    callback = ModelProfCallback(report={"terminal": False, "files": False})
    data = DataLoader(torch.ones(6, 2), batch_size=2, num_workers=2, persistent_workers=is_persistent)
    make_trainer(callbacks=[callback], max_epochs=2).fit(TinyModel(), data)
    steps = callback.run.ranks[0].steps
    assert len(steps) == 6
    assert steps.phases_ns.sum(axis=1).tolist() == steps.duration_ns.tolist()
    starts = steps.phases_ns[:, PHASE_INDEX["dataloader_init"]] > 0
    firsts = (steps.tags & StepTag.FIRST_OF_EPOCH) != 0
    assert starts.tolist() == firsts.tolist() == [True, False, False, True, False, False]
    assert (steps.phases_ns[:, PHASE_INDEX["dataloader"]] > 0).all()
