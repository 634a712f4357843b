"""Tests that Lightning's callbacks, tuners, checkpoints and CLI behave the same with our callback."""

from __future__ import annotations

import inspect
import json
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, callbacks, seed_everything
from lightning.pytorch.callbacks import Callback, Checkpoint, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner
from torch import nn

from tests.lightning.test_bit_identity import assert_same
from tests.support.fits import fit_quietly, loader, make_callback, make_trainer, our_warnings

pytestmark = pytest.mark.slow

MEASURING = {"active": 2, "flops": True, "inspect": {"sampling": True}}
"""A window, an inspection and stack samples, all within a short fit."""
TIMES = ("DeviceStatsMonitor", "time", "per_sec")
"""Parts of the names of figures that differ between runs."""


class Task(LightningModule):
    """Has everything that Lightning's callbacks look for, and draws random numbers in every step."""

    def __init__(self, lr: float = 0.01, batch_size: int = 2, fails_at: int = -1) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(16, 1)
        self.lr, self.batch_size, self.fails_at = lr, batch_size, fails_at

    def forward(self, inputs):
        return self.head(self.backbone(inputs)).squeeze(-1)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        loss = self.loss(batch) * (1 + random.random())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self):
        return loader(16, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return loader(4)

    predict_dataloader = val_dataloader


class Points(Logger):
    """Stores everything that Lightning and its callbacks log."""

    name, version = "points", 0

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Any] = []

    def log_metrics(self, metrics, step=None):
        if all(name.startswith("modelprof/") for name in metrics):
            return
        steady = {name: 0 if any(part in name for part in TIMES) else metrics[name] for name in metrics}
        self.points.append((step, steady))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Diary(LambdaCallback):
    """Records every hook that Lightning calls, in order, with the visible training state."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        names = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction)]
        hooks = [name for name in names if name in ("setup", "teardown") or name.startswith("on_")]
        super().__init__(**{name: self._keeper(name) for name in hooks})

    def _keeper(self, hook: str) -> Callable[..., None]:
        def keep(trainer: Any, *args: Any, **kwargs: Any) -> None:
            entry = (
                hook,
                trainer.global_step,
                trainer.current_epoch,
                trainer.should_stop,
                len(args),
                list(kwargs),
            )
            if hook == "on_train_batch_end":
                rates = [
                    [group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers
                ]
                bar = trainer.progress_bar_callback
                shown = {} if bar is None else bar.get_metrics(trainer, trainer.lightning_module)
                shown = {name: shown[name] for name in shown if name not in ("ips", "reader")}
                entry += (rates, shown, dict(trainer.callback_metrics))
            self.entries.append(entry)

        return keep


class StepTimer(callbacks.Timer):
    """Pretends that every batch takes one second."""

    num_batches = 0

    def time_elapsed(self, stage=None):
        return float(self.num_batches)

    def on_train_batch_end(self, *args, **kwargs):
        self.num_batches += 1
        super().on_train_batch_end(*args, **kwargs)


def make_state(trainer: Any, module: Any, folder: Path) -> dict[str, Any]:
    """Final state of a training, including its files."""
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    checkpoints = {
        file: torch.load(folder / file, weights_only=False) for file in files if file.endswith(".ckpt")
    }
    for checkpoint in checkpoints.values():
        checkpoint["callbacks"].get("Timer", {}).pop("time_elapsed", None)
    return {
        "weights": module.state_dict(),
        "is_trained": [parameter.requires_grad for parameter in module.parameters()],
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "settings": (module.lr, module.batch_size, trainer.accumulate_grad_batches),
        "callback_metrics": dict(trainer.callback_metrics),
        "progress": trainer.fit_loop.state_dict(),
        "diary": [c.entries for c in trainer.callbacks if isinstance(c, Diary)],
        "points": [logger.points for logger in trainer.loggers if isinstance(logger, Points)],
        "generators": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
        "files": files,
        "checkpoints": checkpoints,
    }


@dataclass
class Case:
    """Lightning callbacks for a directory, and a check that they did their work."""

    make: Callable[[Path], list[Callback]]
    worked: Callable[[dict[str, Any]], Any]
    task: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    raises: type[Exception] | None = None


def points_of(state: dict[str, Any]) -> set[str]:
    """Names of all logged figures."""
    return {name for _, metrics in state["points"][0] for name in metrics}


def batches_of(state: dict[str, Any]) -> list[Any]:
    """Diary entries after each batch."""
    return [entry for entry in state["diary"][0] if entry[0] == "on_train_batch_end"]


def shown_in(state: dict[str, Any]) -> set[str]:
    """Names of all figures in the progress bar."""
    return {name for entry in batches_of(state) for name in entry[7]}


def rates_of(state: dict[str, Any]) -> list[float]:
    """Learning rate after each batch."""
    return [entry[6][0][0] for entry in batches_of(state)]


def num_steps(state: dict[str, Any]) -> int:
    """Number of optimizer steps."""
    progress = state["progress"]["epoch_loop.automatic_optimization.optim_progress"]
    return progress["optimizer"]["step"]["total"]["completed"]


CASES = {
    "EarlyStopping": Case(
        lambda _: [callbacks.EarlyStopping("val_loss", min_delta=100, patience=1)],
        lambda state: num_steps(state) == 16,
        trainer={"max_epochs": 4},
    ),
    "ModelCheckpoint": Case(
        lambda folder: [
            ModelCheckpoint(
                folder / "best", "{epoch}-{val_loss:.6f}", "val_loss", save_top_k=2, save_last=True
            ),
            ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=5, save_last="link"),
        ],
        lambda state: len(state["files"]) == 9,  # one is a folder
        trainer={"max_epochs": 3},
    ),
    "LearningRateMonitor": Case(
        lambda _: [callbacks.LearningRateMonitor("step", log_momentum=True)],
        lambda state: {"lr-SGD", "lr-SGD-momentum"} <= points_of(state),
    ),
    "StochasticWeightAveraging": Case(
        lambda _: [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)],
        lambda state: 0.05 in rates_of(state),
        trainer={"max_epochs": 3},
    ),
    "GradientAccumulationScheduler": Case(
        lambda _: [callbacks.GradientAccumulationScheduler({0: 1, 1: 3})],
        lambda state: num_steps(state) == 11,
    ),
    "ModelPruning": Case(
        lambda _: [
            callbacks.ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
        ],
        lambda state: int((state["weights"]["backbone.0.weight"] == 0).sum()) > 64,
    ),
    "Timer": Case(
        lambda folder: [StepTimer(timedelta(seconds=10)), ModelCheckpoint(folder, every_n_train_steps=9)],
        lambda state: num_steps(state) == 10 and len(state["checkpoints"]) == 1,
    ),
    "Timer that is over": Case(
        lambda _: [callbacks.Timer(timedelta(seconds=0))],
        lambda state: num_steps(state) == 0,
    ),
    "DeviceStatsMonitor": Case(
        lambda _: [callbacks.DeviceStatsMonitor(cpu_stats=True)],
        lambda state: any("cpu_percent" in name for name in points_of(state)),
    ),
    "LearningRateFinder": Case(
        lambda _: [callbacks.LearningRateFinder(num_training_steps=20, early_stop_threshold=None)],
        lambda state: state["settings"][0] != 0.01,
    ),
    "BatchSizeFinder": Case(
        lambda _: [callbacks.BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2)],
        lambda state: state["settings"][1] == 4,
    ),
    "OnExceptionCheckpoint": Case(
        lambda folder: [callbacks.OnExceptionCheckpoint(folder)],
        lambda state: state["checkpoints"]["on_exception.ckpt"]["global_step"] == 5,
        task={"fails_at": 5},
        raises=ZeroDivisionError,
    ),
    "RichProgressBar": Case(
        lambda _: [callbacks.RichProgressBar()],
        lambda state: {"loss", "val_loss"} <= shown_in(state),
        trainer={"enable_progress_bar": True},
    ),
    "TQDMProgressBar": Case(
        lambda _: [callbacks.TQDMProgressBar()],
        lambda state: {"loss", "val_loss"} <= shown_in(state),
        trainer={"enable_progress_bar": True},
    ),
    "ThroughputMonitor": Case(
        lambda _: [callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=4)],
        lambda state: "train/samples" in points_of(state),
    ),
    "BackboneFinetuning": Case(
        lambda _: [callbacks.BackboneFinetuning(1, lambda epoch: 1.5)],
        lambda state: all(state["is_trained"]) and len(state["optimizers"][0]["param_groups"]) == 2,
    ),
}
if hasattr(callbacks, "WeightAveraging"):  # since Lightning 2.6
    CASES |= {
        "WeightAveraging": Case(
            lambda _: [callbacks.WeightAveraging()], lambda state: num_steps(state) == 16
        ),
        "EMAWeightAveraging": Case(
            lambda folder: [callbacks.EMAWeightAveraging(decay=0.5), ModelCheckpoint(folder)],
            lambda state: any("averaging_state" in saved for saved in state["checkpoints"].values()),
        ),
    }

TOGETHER = Case(
    lambda folder: [
        callbacks.EarlyStopping("val_loss", patience=5),
        ModelCheckpoint(folder, monitor="val_loss", every_n_train_steps=None, save_top_k=2, save_last=True),
        ModelCheckpoint(folder / "steps", save_top_k=-1, every_n_train_steps=5),
        callbacks.LearningRateMonitor("step"),
        callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
        callbacks.Timer(timedelta(hours=1)),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        callbacks.LearningRateFinder(num_training_steps=20, early_stop_threshold=None),
        callbacks.BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2),
        callbacks.OnExceptionCheckpoint(folder),
        callbacks.TQDMProgressBar(),
        callbacks.RichModelSummary(),
        callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=4),
        callbacks.BackboneFinetuning(1, lambda epoch: 1.5),
    ],
    lambda state: len(state["checkpoints"]) >= 3,
    trainer={"max_epochs": 3, "enable_progress_bar": True, "enable_model_summary": True},
)


def train(
    folder: Path,
    case: Case,
    *,
    is_measured: bool,
    is_first: bool = False,
    ckpt_path: Path | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train in an emptied ``folder`` and return the final state. Our files are stored next to it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    seed_everything(3, verbose=False)
    ours = [make_callback(folder.parent, **MEASURING)] if is_measured else []
    others = [*case.make(folder), Diary()]
    arguments = {
        "max_epochs": 2,
        "logger": Points(),
        "log_every_n_steps": 1,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in others),
    }
    order = [*ours, *others] if is_first else [*others, *ours]
    trainer = make_trainer(folder, *order, **(arguments | case.trainer | more))
    module = Task(**case.task)
    with our_warnings() as messages:
        if case.raises is None:
            fit_quietly(trainer, module, None, ckpt_path=ckpt_path)
        else:
            with pytest.raises(case.raises):
                fit_quietly(trainer, module, None, ckpt_path=ckpt_path)
    assert messages == []
    state = make_state(trainer, module, folder)
    for callback in ours:  # it measured
        num_batches = len(batches_of(state))
        assert (len(callback.run.ranks[0].steps) if callback.run else 0) == num_batches
        assert not num_batches or callback.run.info.status == ("failed" if case.raises else "finished")
    return state


@pytest.mark.parametrize("name", CASES)
def test_lightning_callback_is_unchanged(tmp_path, name):
    without = train(tmp_path / "run", CASES[name], is_measured=False)
    assert CASES[name].worked(without)
    assert_same(without, train(tmp_path / "run", CASES[name], is_measured=True))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """With so little work, several threads would mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The directory, and the final state of a fit with many callbacks but not ours."""
    folder = tmp_path_factory.mktemp("together") / "run"
    without = train(folder, TOGETHER, is_measured=False)
    assert TOGETHER.worked(without)
    return folder, without


@pytest.mark.parametrize("is_first", [True, False])
def test_many_callbacks_are_unchanged(together, is_first):
    folder, without = together
    assert_same(without, train(folder, TOGETHER, is_measured=True, is_first=is_first))


class Meddler(Callback):
    """Does one thing that our callback must never do."""

    def __init__(self, deed: str) -> None:
        self.deed = deed

    def on_train_start(self, trainer, pl_module):
        if self.deed == "draws":
            torch.rand(1)
        if self.deed == "logs":
            trainer.logger.log_metrics({"more": 1.0})
        if self.deed == "writes":
            Path(trainer.default_root_dir, "file").touch()

    def state_dict(self):
        return {"more": 1} if self.deed == "keeps" else {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = self.deed == "stops"


@pytest.mark.parametrize("deed", ["", "draws", "logs", "writes", "keeps", "stops"])
def test_comparison_can_fail(tmp_path, deed):
    def make(folder):
        return [ModelCheckpoint(folder)]

    def make_more(folder):
        return [Meddler(deed), *make(folder)]

    states = [
        train(tmp_path / "run", Case(m, bool), is_measured=False, max_epochs=1) for m in (make, make_more)
    ]
    if not deed:
        assert_same(*states)
        return
    with pytest.raises(AssertionError, match="state"):
        assert_same(*states)


def test_resuming_from_checkpoint_is_unchanged(tmp_path):
    """Saved with or without us, resumed with or without us: the state is the same, callbacks included."""
    case = Case(lambda folder: TOGETHER.make(folder)[:6], TOGETHER.worked)
    ends = []
    for is_made_with in (False, True):
        train(tmp_path / "run", case, is_measured=is_made_with, max_epochs=1)
        path = shutil.copy(tmp_path / "run" / "last.ckpt", tmp_path / f"{is_made_with}.ckpt")
        resumed = [
            train(tmp_path / "run", case, is_measured=is_with, ckpt_path=path, max_epochs=2)
            for is_with in (False, True)
        ]
        ends += resumed
    assert ends[0]["progress"]["epoch_progress"]["total"]["completed"] == 2
    for end in ends[1:]:
        assert_same(ends[0], end)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_tuner_is_unchanged(tmp_path, mode):
    """Runs both searches in sequence, then fits with their results."""
    found = []
    for is_measured in (False, True):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        seed_everything(3, verbose=False)
        ours = [make_callback(tmp_path, **MEASURING)] if is_measured else []
        trainer = make_trainer(
            folder, Diary(), *ours, logger=Points(), enable_progress_bar=True, max_epochs=3
        )
        module = Task()
        tuner = Tuner(trainer)
        with our_warnings() as messages:
            finder = tuner.lr_find(module, num_training=20, early_stop_threshold=None)
            size = tuner.scale_batch_size(module, mode=mode, steps_per_trial=1, init_val=2, max_trials=2)
            fit_quietly(trainer, module, None)
        assert messages == []
        rates = finder.results | {"suggestion": finder.suggestion()}
        found.append({"size": size, "rates": rates, **make_state(trainer, module, folder)})
    assert found[0]["size"] > 1
    assert found[0]["rates"]["suggestion"] == found[0]["settings"][0]
    assert_same(*found)


def test_prediction_writer_is_unchanged(tmp_path):
    written = []

    class Writer(callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, *place):
            written[-1].append((prediction, batch_indices, place[1:]))

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            written[-1].append((predictions, batch_indices))

    for ours in ([], [make_callback(tmp_path, **MEASURING)]):
        seed_everything(3, verbose=False)
        written.append([])
        make_trainer(tmp_path, Writer("batch_and_epoch"), *ours).predict(Task())
    assert len(written[0]) == 3  # two batches and the epoch
    assert_same(*written)


@pytest.mark.parametrize("name", ["ModelSummary", "RichModelSummary"])
def test_model_summary_text_is_unchanged(tmp_path, capsys, caplog, name):
    texts, log = [], logging.getLogger("lightning.pytorch")
    caplog.set_level(logging.INFO, logger=log.name)
    if not log.propagate:  # depends on the logging setup when lightning was imported
        log.addHandler(caplog.handler)
    for is_measured in (False, True):
        caplog.clear()
        case = Case(lambda _: [getattr(callbacks, name)(max_depth=2)], bool)
        train(tmp_path / "run", case, is_measured=is_measured, max_steps=3)
        texts.append(
            (capsys.readouterr().out, [r.getMessage() for r in caplog.records if "backbone" in r.msg])
        )
    log.removeHandler(caplog.handler)
    assert "backbone.0" in str(texts[0])
    assert texts[0] == texts[1]


def test_lightning_cli_is_unchanged(tmp_path, monkeypatch):
    """Runs a whole program. The saved configuration differs only by our entry."""
    pytest.importorskip("docstring_parser", reason="LightningCLI needs jsonargparse[signatures]")
    cli = pytest.importorskip("lightning.pytorch.cli")
    states, configurations = [], []
    for is_measured in (False, True):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        entry = {
            "class_path": "lightning_modelprof.ModelProfCallback",
            "init_args": MEASURING
            | {"skip_first": 0, "report": {"terminal": False}, "dirpath": str(tmp_path / "ours")},
        }
        ours = ["--trainer.callbacks+", json.dumps(entry)] if is_measured else []
        options = {"default_root_dir": folder, "accelerator": "cpu", "max_epochs": 2, "logger": "CSVLogger"}
        options |= {"logger.save_dir": folder, "enable_progress_bar": False, "log_every_n_steps": 1}
        monkeypatch.setattr("sys.argv", ["program"])
        program = cli.LightningCLI(
            Task,
            seed_everything_default=3,
            trainer_defaults={"callbacks": [ModelCheckpoint(save_top_k=-1), Diary()]},
            args=["fit", *(f"--trainer.{name}={value}" for name, value in options.items()), *ours],
        )
        configuration = folder / "lightning_logs" / "version_0" / "config.yaml"
        configurations.append(yaml.safe_load(configuration.read_text()))
        configuration.unlink()
        (configuration.parent / "metrics.csv").unlink()
        states.append(make_state(program.trainer, program.model, folder))
    entries = configurations[1]["trainer"].pop("callbacks")
    assert entries[-1]["class_path"] == "lightning_modelprof.ModelProfCallback"
    assert (configurations[0]["trainer"].pop("callbacks") or []) == entries[:-1]
    assert configurations[0] == configurations[1]
    assert len(states[0]["checkpoints"]) == 2
    assert len(batches_of(states[0])) == 16
    assert_same(*states)
