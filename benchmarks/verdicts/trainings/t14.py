"""Dilated convolutions that predict the next hours of a series."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError


class Series(LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(14)
        data = torch.randn(4200, 4, 160, generator=g).cumsum(2) * 0.2
        self.train = TensorDataset(data[:3200, :, :144], data[:3200, 0, 144:])
        self.val = TensorDataset(data[3200:, :, :144], data[3200:, 0, 144:])

    def train_dataloader(self):
        g = torch.Generator().manual_seed(2)
        return DataLoader(self.train, 64, shuffle=True, drop_last=True, generator=g)

    def val_dataloader(self):
        return DataLoader(self.val, 64)


class TCN(LightningModule):
    def __init__(self, width=64):
        super().__init__()
        layers = [nn.Conv1d(4, width, 1)]
        for d in (1, 2, 4, 8):
            layers += [nn.Conv1d(width, width, 3, padding=d, dilation=d), nn.ReLU()]
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(width, 16)
        self.val_mae = MeanAbsoluteError()

    def forward(self, x):
        return self.head(self.net(x)[..., -1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_mae.update(self(x), y)
        self.log("val_mae", self.val_mae)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Tick(Callback):
    def __init__(self):
        self.at = []

    def on_train_batch_start(self, *_):
        self.at.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    seed_everything(27, verbose=False)
    tick = Tick()
    callbacks = [tick]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        max_steps=args.steps,
        val_check_interval=1.0 if args.fixed else 10,
        check_val_every_n_epoch=2 if args.fixed else 1,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        default_root_dir=args.profile,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TCN(), datamodule=Series())
    at = tick.at[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (at[-1] - at[0]) / (len(at) - 1):.3f}")


if __name__ == "__main__":
    main()
