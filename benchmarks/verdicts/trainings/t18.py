"""Keyword spotting: spectrograms are made by the workers."""
import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Clips(Dataset):
    def __init__(self, n=256, samples=16000):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 8, n)
        t = np.arange(samples) / samples
        tones = np.sin(2 * np.pi * (200 + 150 * self.labels[:, None]) * t)
        self.clips = (tones + 0.5 * rng.normal(size=(n, samples))).astype("float32")
        self.window = np.hanning(400).astype("float32")

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        frames = np.lib.stride_tricks.sliding_window_view(self.clips[i], 400)[::160]
        power = np.abs(np.fft.rfft(frames * self.window, n=512)) ** 2
        return np.log(power[:, :128] + 1e-6).astype("float32"), int(self.labels[i])


class Spotter(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(32, 48, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(48, 8),
        )

    def training_step(self, batch, batch_idx):
        spectrograms, labels = batch
        loss = F.cross_entropy(self.net(spectrograms[:, None]), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=480)
    args = parser.parse_args()
    seed_everything(29, verbose=False)
    clips = Clips()
    loader = DataLoader(
        clips,
        batch_size=32,
        sampler=RandomSampler(clips, generator=torch.Generator().manual_seed(1)),
        num_workers=2,
        persistent_workers=args.fixed,
    )
    clock = Clock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Spotter(), loader)
    starts = clock.starts[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")
