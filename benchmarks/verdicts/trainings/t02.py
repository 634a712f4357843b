"""Small image classifier on images that are held in memory."""
import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning import Callback, LightningModule, Trainer, seed_everything


def conv(inp, out, stride=1):
    return nn.Sequential(
        nn.Conv2d(inp, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )


class Classifier(LightningModule):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 32), conv(32, 48), conv(48, 96, 2), conv(96, 96), conv(96, 128, 2)
        )
        self.head = nn.Linear(128, classes)
        self.losses = []

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Clock(Callback):
    def __init__(self):
        self.t = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.t.append(time.perf_counter())


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--profile")
    p.add_argument("--steps", type=int, default=200)
    a = p.parse_args()
    seed_everything(7, verbose=False)
    images = torch.randn(4096, 3, 32, 32)
    labels = (images.mean((1, 2, 3)) * 100).long().clamp(-4, 5) + 4
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)
    clock = Clock()
    callbacks = [clock]
    if a.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks += [ModelProfCallback()]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=a.steps,
        max_epochs=-1,
        logger=False,
        callbacks=callbacks,
        default_root_dir=a.profile,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    t = clock.t[5:]
    print("LOSS %.6f" % trainer.callback_metrics["loss"].item())
    print("STEP_MS %.3f" % ((t[-1] - t[0]) / (len(t) - 1) * 1000))
