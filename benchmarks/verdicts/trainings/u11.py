"""Remaining useful life of engines from sensor windows."""
import argparse
import time

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=401)
args = parser.parse_args()

SENSORS, WINDOW = 14, 96


class Engines(LightningDataModule):
    def __init__(self, batch_size=24):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(40)
        windows = torch.randn(1680, WINDOW, SENSORS, generator=generator)
        life = windows[:, -10:, :4].mean((1, 2)) + 0.1 * torch.randn(1680, generator=generator)
        self.train_set = TensorDataset(windows[:1200], life[:1200])
        self.val_set = TensorDataset(windows[1200:], life[1200:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        if args.fixed:
            return DataLoader(self.val_set, batch_size=120)
        return DataLoader(self.val_set)


class LifeModel(LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.inputs = nn.Linear(SENSORS, width)
        self.positions = nn.Parameter(torch.randn(WINDOW, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, windows):
        x = self.encoder(self.inputs(windows) + self.positions)
        return self.head(x[:, -1]).squeeze(1)

    def training_step(self, batch, batch_idx):
        windows, life = batch
        loss = nn.functional.mse_loss(self(windows), life)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        windows, life = batch
        predicted = self(windows)
        self.log_dict({
            "val_mse": nn.functional.mse_loss(predicted, life),
            "val_mae": nn.functional.l1_loss(predicted, life),
        })

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-4, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(18, verbose=False)
    clock = StepClock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(LifeModel(), datamodule=Engines())
    for name in ("train_loss", "val_mse", "val_mae"):
        if name in trainer.callback_metrics:
            print(f"{name.upper()} {trainer.callback_metrics[name].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
