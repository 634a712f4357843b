"""Removes noise from image patches with a small U-Net."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Patches(LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(77)
        coarse = torch.rand(1200, 1, 8, 8, generator=g)
        self.clean = F.interpolate(coarse, size=64, mode="bilinear")
        self.noisy = self.clean + 0.1 * torch.randn(self.clean.shape, generator=g)

    def train_dataloader(self):
        return DataLoader(
            TensorDataset(self.noisy, self.clean), batch_size=12, shuffle=True, drop_last=True
        )


def double_conv(inp, out):
    return nn.Sequential(
        nn.Conv2d(inp, out, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1), nn.ReLU(inplace=True),
    )


class UNet(LightningModule):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = double_conv(1, 24), double_conv(24, 48), double_conv(48, 64)
        self.up2, self.up1 = double_conv(64 + 48, 48), double_conv(48 + 24, 24)
        self.out = nn.Conv2d(24, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return x - self.out(a)

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = F.l1_loss(self(noisy), clean)
        self.log("l1", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-4)


class Meter(Callback):
    def __init__(self):
        self.marks = []

    def on_train_batch_start(self, *_):
        self.marks.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=90)
    args = parser.parse_args()
    seed_everything(5, verbose=False)
    if not args.fixed:
        torch.set_num_threads(1)
    meter = Meter()
    callbacks = [meter]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(UNet(), datamodule=Patches())
    marks = meter.marks[5:]
    print(f"LOSS {trainer.callback_metrics['l1'].item():.6f}")
    print(f"STEP_MS {1e3 * (marks[-1] - marks[0]) / (len(marks) - 1):.3f}")


if __name__ == "__main__":
    main()
