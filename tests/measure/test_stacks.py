"""The callback works with pytorch_lightning and with every kind of data and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from pytorch_lightning.cli import LightningCLI

from lightning_modelprof import ModelProfCallback
from tests.support.bench import MIXES_PACKAGES
from tests.support.fits import (
    REPORT_FILES,
    Net,
    fit_quietly,
    flops_of,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    report_of,
    steps_of,
    windows_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:(?!ModelProfCallback)")]


# pytorch_lightning


class OldNameNet(pytorch_lightning.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OldNameCallback(ModelProfCallback, pytorch_lightning.Callback):
    """The class the README recommends for users who need a pytorch_lightning callback."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            ModelProfCallback,
            marks=pytest.mark.skipif(
                not MIXES_PACKAGES, reason="this pytorch_lightning refuses callbacks of lightning"
            ),
        ),
        OldNameCallback,
    ],
)
def test_every_pytorch_lightning_loop(tmp_path, kind):
    callback = kind(skip_first=0, active=0, report={"terminal": False}, inspect={"sampling": False})
    logger = pytorch_lightning.loggers.CSVLogger(tmp_path)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module, data = OldNameNet(), loader(20)
    loops = {"fit": 10, "validate": 10, "test": 10, "predict": 10}
    folder = Path(logger.log_dir) / "modelprof"
    for number, (loop, steps) in enumerate(loops.items()):
        getattr(trainer, loop)(module, data)
        assert callback.run.info.loop == loop
        assert callback.run.info.status == "finished"
        assert len(steps_of(callback).step) == steps
        assert flops_of(callback)["forward"] == 2 * 2 * 8  # 2 samples, 8 multiply-adds each
        written = folder if number == 0 else folder / loop
        assert {path.name for path in written.iterdir()} >= REPORT_FILES


class OldNameData(pytorch_lightning.LightningDataModule):
    def train_dataloader(self):
        return loader(32)


def test_pytorch_lightning_cli(tmp_path):
    """LightningCLI requires its own package's callbacks, and so do its older Trainers."""
    pytest.importorskip("docstring_parser", reason="LightningCLI needs jsonargparse[signatures]")
    config = {
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "default_root_dir": str(tmp_path),
            **dict.fromkeys(
                ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
            ),
            "callbacks": [
                {
                    "class_path": f"{__name__}.OldNameCallback",
                    "init_args": {"steps": [3, 6], "report": {"terminal": False, "views": ["kernel"]}},
                }
            ],
        },
    }
    cli = LightningCLI(OldNameNet, OldNameData, args={"subcommand": "fit", "fit": config})
    (callback,) = (one for one in cli.trainer.callbacks if isinstance(one, ModelProfCallback))
    (window,) = windows_of(callback)
    assert window.recorded_steps == (3, 4, 5)
    run = report_of(tmp_path)["summary"]["run"]
    assert (run["model"], run["status"]) == ("OldNameNet", "finished")


# Data and optimization


class Data(LightningDataModule):
    def setup(self, stage):
        self.stage = stage

    def train_dataloader(self):
        return loader(20)

    def val_dataloader(self):
        return [loader(8), loader(4)]


def test_fit_with_datamodule(tmp_path):
    callback = make_callback(tmp_path, active=0)
    trainer = make_trainer(tmp_path, callback, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Validated(), datamodule=Data())
    assert len(steps_of(callback).step) == 20
    assert callback.run.ranks[0].setup.num_val_batches == 6
    assert [one.batch_size for one in callback.run.ranks[0].setup.loaders] == [2]


class Validated(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


class Pairs(Net):
    """A batch from two loaders, as a list or a dict."""

    def training_step(self, batch, batch_idx):
        batches = [one for one in (batch.values() if isinstance(batch, dict) else batch) if one is not None]
        return sum(self.loss(one) for one in batches)


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        pytest.param(lambda: [loader(20), loader(12)], 10, id="a list"),
        pytest.param(lambda: {"a": loader(20), "b": loader(12)}, 10, id="a dict"),
        pytest.param(lambda: CombinedLoader([loader(20), loader(12)], "min_size"), 6, id="min_size"),
        pytest.param(lambda: CombinedLoader([loader(20), loader(12)], "max_size"), 10, id="max_size"),
        pytest.param(
            lambda: CombinedLoader([loader(20), loader(12)], "max_size_cycle"), 10, id="max_size_cycle"
        ),
    ],
)
def test_several_training_dataloaders(tmp_path, data, steps):
    with our_warnings() as messages:
        callback = make_callback(tmp_path, active=0, flops=True)
        fit_quietly(make_trainer(tmp_path, callback), Pairs(), data())
    assert messages == []
    assert len(steps_of(callback).step) == steps
    assert len(callback.run.ranks[0].setup.loaders) == 2
    # 8 x 16 and 16 x 1 multiply-adds per sample, 2 samples per batch, from two loaders
    assert flops_of(callback)["forward"] == 2 * 2 * 2 * (8 * 16 + 16)


class Adversaries(LightningModule):
    """Two optimizers, stepped manually."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = torch.ones(len(real), 4)
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.critic(self.generator(noise)).mean()
            if sign < 0:
                loss = loss + self.critic(real).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]


def test_two_manual_optimizers(tmp_path):
    weights = []
    for callbacks in ((), (make_callback(tmp_path, active=3, flops=True),)):
        torch.manual_seed(4)
        module = Adversaries()
        fit_quietly(make_trainer(tmp_path, *callbacks), module, loader(40))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    (callback,) = callbacks
    record = callback.run.ranks[0]
    assert len(record.steps.step) == 20
    assert record.setup.manual_optimization
    assert [one.kind for one in record.setup.optimizers] == ["Adam", "Adam"]
    took_ns = {one["key"]: one["total_ns"] for one in report_of(tmp_path)["summary"]["phases"]}
    assert min(took_ns[phase] for phase in ("forward", "backward", "optimizer")) > 0
    generator, critic = 2 * 4 * 8, 2 * 8  # multiply-adds of a batch of 2
    assert flops_of(callback)["forward"] == 2 * (2 * generator + 3 * critic)
    # First the generator's weights and what reaches it through the critic, then the critic's weights twice.
    assert flops_of(callback)["backward"] == 2 * (critic + generator + 2 * critic)
    assert windows_of(callback)[0].recorded_steps == (2, 3, 4)
