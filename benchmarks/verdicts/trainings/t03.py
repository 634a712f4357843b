"""Metric learning with batch-hard triplets."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 12


class Glyphs(LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(5)
        prototypes = torch.randn(CLASSES, 1, 28, 28, generator=g)
        self.labels = torch.randint(0, CLASSES, (6000,), generator=g)
        self.images = prototypes[self.labels] + 0.8 * torch.randn(6000, 1, 28, 28, generator=g)

    def train_dataloader(self):
        dataset = TensorDataset(self.images, self.labels)
        return DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)


def batch_hard(embeddings, labels, margin=0.3):
    distances = torch.cdist(embeddings, embeddings)
    losses = []
    for anchor in range(len(labels)):
        positive = labels == labels[anchor]
        negative = ~positive
        positive[anchor] = False
        if not positive.any():
            continue
        hardest_positive = distances[anchor][positive].max()
        hardest_negative = distances[anchor][negative].min()
        losses.append(F.relu(hardest_positive - hardest_negative + margin))
    return torch.stack(losses).mean()


def batch_hard_matrix(embeddings, labels, margin=0.3):
    distances = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels[None, :]
    other = ~torch.eye(len(labels), dtype=torch.bool)
    hardest_positive = distances.masked_fill(~(same & other), float("-inf")).amax(1)
    hardest_negative = distances.masked_fill(same, float("inf")).amin(1)
    valid = (same & other).any(1)
    return F.relu(hardest_positive - hardest_negative + margin)[valid].mean()


class Embedder(LightningModule):
    def __init__(self, fixed):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(48 * 49, 64),
        )
        self.criterion = batch_hard_matrix if fixed else batch_hard

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = self.criterion(self(images), labels)
        self.log("triplet", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Timer(Callback):
    def __init__(self):
        self.at = []

    def on_train_batch_start(self, *a):
        self.at.append(time.perf_counter())


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--profile")
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--steps", type=int, default=450)
    return p.parse_args()


if __name__ == "__main__":
    args = cli()
    seed_everything(11, verbose=False)
    timer = Timer()
    cbs = [timer]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        cbs.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_steps=args.steps, max_epochs=-1, callbacks=cbs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=args.profile,
    )
    trainer.fit(Embedder(args.fixed), datamodule=Glyphs())
    at = timer.at[5:]
    print(f"LOSS {trainer.callback_metrics['triplet'].item():.6f}")
    print(f"STEP_MS {(at[-1] - at[0]) / (len(at) - 1) * 1e3:.3f}")
