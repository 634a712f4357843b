"""Detection of gravitational-wave chirps in simulated noise, streamed by one worker."""
import argparse
import math
import random
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true", help="nothing to fix")
parser.add_argument("--steps", type=int, default=501)
args = parser.parse_args()

LENGTH, BATCH = 2048, 32


class Chirps(IterableDataset):
    """Endless strain segments; half of them hold a chirp. Shuffled in a buffer."""

    def __init__(self, seed=0, buffer=512):
        self.seed, self.buffer = seed, buffer

    def block(self, generator, count=64):
        noise = torch.randn(count, LENGTH, generator=generator)
        has_chirp = torch.rand(count, generator=generator) < 0.5
        t = torch.linspace(0, 1, LENGTH)
        start = 8 + 16 * torch.rand(count, 1, generator=generator)
        rate = 20 + 60 * torch.rand(count, 1, generator=generator)
        chirp = torch.sin(2 * math.pi * (start * t + 0.5 * rate * t * t)) * t
        return noise + 0.6 * has_chirp[:, None] * chirp, has_chirp.float()

    def __iter__(self):
        torch.set_num_threads(1)
        generator, shuffle = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        kept = []
        while True:
            for segment, label in zip(*self.block(generator)):
                if len(kept) < self.buffer:
                    kept.append((segment, label))
                    continue
                place = shuffle.randrange(self.buffer)
                yield kept[place]
                kept[place] = (segment, label)


class ChirpNet(LightningModule):
    def __init__(self):
        super().__init__()
        layers, width = [], 1
        for out, kernel, stride in ((32, 15, 4), (64, 9, 2), (96, 9, 2), (128, 5, 2)):
            layers += [
                nn.Conv1d(width, out, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm1d(out), nn.ReLU(),
            ]
            width = out
        self.net = nn.Sequential(*layers)
        self.memory = nn.GRU(128, 64, batch_first=True)
        self.head = nn.Linear(64, 1)

    def training_step(self, batch, batch_idx):
        segments, labels = batch
        features = self.net(segments[:, None]).transpose(1, 2)
        _, last = self.memory(features)
        scores = self.head(last[0]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
        self.log("train_loss", loss, batch_size=BATCH)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(13, verbose=False)
    loader = DataLoader(Chirps(), batch_size=BATCH, num_workers=1, persistent_workers=True)
    clock = StepClock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ChirpNet(), loader)
    starts = clock.starts[len(clock.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
