"""Forecasting of loads with an MLP-Mixer, weights watched in TensorBoard."""
import argparse
import tempfile
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=401)
args = parser.parse_args()

HISTORY, HORIZON, CHANNELS = 192, 48, 32


class Loads(Dataset):
    def __init__(self, hours=9000):
        generator = torch.Generator().manual_seed(12)
        self.series = torch.randn(hours, CHANNELS, generator=generator).cumsum(0) * 0.02

    def __len__(self):
        return len(self.series) - HISTORY - HORIZON

    def __getitem__(self, index):
        window = self.series[index:index + HISTORY + HORIZON]
        return window[:HISTORY], window[HISTORY:]


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_time = nn.Sequential(nn.Linear(HISTORY, HISTORY), nn.GELU(), nn.Dropout(0.1))
        self.over_channels = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.over_time(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class Forecaster(LightningModule):
    def __init__(self, width=160, depth=4):
        super().__init__()
        self.inputs = nn.Linear(CHANNELS, width)
        self.mixers = nn.Sequential(*[Mixer(width) for _ in range(depth)])
        self.horizon, self.outputs = nn.Linear(HISTORY, HORIZON), nn.Linear(width, CHANNELS)

    def training_step(self, batch, batch_idx):
        history, future = batch
        x = self.mixers(self.inputs(history))
        forecast = self.outputs(self.horizon(x.transpose(1, 2)).transpose(1, 2))
        loss = nn.functional.huber_loss(forecast, future)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class WeightHistograms(Callback):
    def __init__(self, every_n_steps):
        self.every_n_steps = every_n_steps

    def on_after_backward(self, trainer, module):
        if trainer.global_step % self.every_n_steps:
            return
        writer = trainer.logger.experiment
        for name, parameter in module.named_parameters():
            writer.add_histogram(f"weights/{name}", parameter, trainer.global_step)
            writer.add_histogram(f"gradients/{name}", parameter.grad, trainer.global_step)


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main(logs):
    seed_everything(20, verbose=False)
    loader = DataLoader(Loads(), batch_size=8, shuffle=True, drop_last=True)
    pace = Pace()
    callbacks = [pace, WeightHistograms(every_n_steps=200 if args.fixed else 4)]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks,
        logger=TensorBoardLogger(logs, default_hp_metric=False), default_root_dir=args.profile,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Forecaster(), loader)
    starts = pace.starts[len(pace.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(args.profile or folder)
