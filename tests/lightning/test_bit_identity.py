"""Tests that training with the callback is bit-identical to training without it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_modelprof import ModelProfCallback
from tests.support.fits import (
    Manual,
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    steps_of,
    windows_of,
)

pytestmark = pytest.mark.slow


class Noisy(Net):
    """Uses every random generator in every step, so that a draw by us would change the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        noise = random.random() + float(np.random.rand())
        self.log("noise", noise)
        return loss * (1 + noise)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Losses(Callback):
    """Stores each step's loss and the metrics logged so far."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = (outputs or {}).get("loss")  # manual optimization returns no loss
        self.seen.append((None if loss is None else loss.clone(), dict(trainer.callback_metrics)))


@dataclass
class Case:
    """A way to train. ``loader`` and ``trainer`` are arguments of the DataLoader and the Trainer."""

    module: type = Noisy
    loader: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    validates: bool = False


CASES = {
    "plain": Case(),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed"}),
    "shuffling workers": Case(loader={"shuffle": True, "num_workers": 2}),
    "accumulation and clipping": Case(trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "validation": Case(validates=True, trainer={"val_check_interval": 4}),
    "progress bar": Case(trainer={"enable_progress_bar": True}),
    "manual optimization": Case(module=Manual),
}

MEASURING = {
    "clock alone": {"timer_only": True},
    "windows": {"active": 2, "repeat": 3, "profile_memory": True, "record_shapes": True},
    "windows and outputs": {"active": 2, "repeat": 0, "tensorboard": True, "terminal": True},
    "counting": {"active": 0, "skip_first": 10, "flops": True, "fvcore": True},
}


def train(folder, case, arguments):
    """Final state of a fit, and the callback (``None`` if ``arguments`` is)."""
    seed_everything(3, verbose=False)
    callback = None if arguments is None else make_callback(folder, **arguments)
    losses = Losses()
    checkpoint = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=5, save_top_k=-1)
    trainer = make_trainer(
        folder,
        *([] if callback is None else [callback]),
        losses,
        checkpoint,
        **(
            {"enable_checkpointing": True, "max_epochs": 2, "logger": TensorBoardLogger(folder)}
            | case.trainer
        ),
    )
    module = case.module(dropout=0.5) if case.module is Noisy else case.module()
    fit_quietly(trainer, module, loader(24, **case.loader), loader(4) if case.validates else None)
    files = sorted((folder / "checkpoints").glob("*.ckpt"))
    state = {
        "weights": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "losses": losses.seen,
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "progress": trainer.fit_loop.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "checkpoints": {file.name: torch.load(file, weights_only=False) for file in files},
    }
    return state, callback


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Final state of a fit without the callback, per case."""
    states = {}

    def get(name):
        if name not in states:
            states[name], _ = train(tmp_path_factory.mktemp("without"), CASES[name], None)
        return states[name]

    return get


def assert_same(one, other, path="state"):
    """Assert that two states are bit-identical, down to every tensor."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert one == other, path


def without_paths(state):
    """State without that of the checkpoint callback, which contains the run's directory."""
    checkpoints = {
        name: {key: value for key, value in checkpoint.items() if key != "callbacks"}
        for name, checkpoint in state["checkpoints"].items()
    }
    return state | {"checkpoints": checkpoints}


@pytest.mark.parametrize("measuring", MEASURING)
@pytest.mark.parametrize("name", CASES)
def test_training_is_bit_identical(tmp_path, capsys, without, name, measuring):
    state, callback = train(tmp_path, CASES[name], MEASURING[measuring])
    assert len(steps_of(callback)) == 24  # it measured
    assert bool(windows_of(callback)) == (MEASURING[measuring].get("active", 0) > 0)
    if measuring == "counting":
        cost = callback.run.ranks[0].model_cost
        assert any(operator.flops for operator in cost.count.operators)
        assert cost.times.steps == 3
    assert len(state["checkpoints"]) >= 2
    assert_same(without_paths(without(name)), without_paths(state))
    for checkpoint in state["checkpoints"].values():
        assert not any("ModelProf" in key for key in checkpoint["callbacks"])
        assert len(checkpoint["callbacks"]) == 1  # ModelCheckpoint's own


def test_comparison_can_fail(without):
    """Another precision gives a different state."""
    one, other = without("plain"), without("bf16-mixed")
    with pytest.raises(AssertionError, match="weights"):
        assert_same(one, other)


def test_checkpoints_resume_with_and_without_callback(tmp_path):
    """A checkpoint written with the callback resumes without it, and vice versa."""
    ends = []
    for first, second in ((True, False), (False, True)):
        folder = tmp_path / f"{first}"
        checkpoint = folder / "middle.ckpt"
        for is_measured, max_steps in ((first, 5), (second, 10)):
            seed_everything(3, verbose=False)
            module = Net(dropout=0.5)
            trainer = make_trainer(
                folder,
                *([make_callback(folder, active=2)] if is_measured else []),
                max_steps=max_steps,
                max_epochs=-1,
            )
            fit_quietly(trainer, module, loader(40), ckpt_path=checkpoint if max_steps == 10 else None)
            trainer.save_checkpoint(checkpoint)
        ends.append(module.state_dict())
    assert_same(*ends)


def test_csv_logger_metrics_are_unchanged(tmp_path):
    """Ours have separate rows or columns; the user's values are unchanged."""
    tables = []
    for is_measured in (False, True):
        seed_everything(3, verbose=False)
        folder = tmp_path / str(is_measured)
        callbacks = [make_callback(folder, active=0)] if is_measured else []
        logger = CSVLogger(folder)
        fit_quietly(make_trainer(folder, *callbacks, logger=logger), Net(), loader())
        header, *rows = [
            line.split(",")
            for line in (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
        ]
        loss, step = header.index("loss"), header.index("step")
        tables.append([(row[step], row[loss]) for row in rows if row[loss]])
    assert tables[0] == tables[1]


def test_profiler_and_hooks_are_restored(tmp_path):
    callback = ModelProfCallback(active=2, skip_first=0, report={"terminal": False})
    trainer = make_trainer(tmp_path, callback, enable_progress_bar=True)
    profiler, bar = trainer.profiler, trainer.progress_bar_callback
    fit_quietly(trainer, Net(), loader())
    assert trainer.profiler is profiler
    assert "get_metrics" not in vars(bar)
    assert trainer.callbacks.count(callback) == 1
