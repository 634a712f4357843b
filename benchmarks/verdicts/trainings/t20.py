"""Segments fields in satellite tiles and keeps an eye on the IoU."""
import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from sklearn.metrics import confusion_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 5


def tiles(n=600, size=80):
    coarse = torch.rand(n, CLASSES, 5, 5)
    mask = F.interpolate(coarse, size=size, mode="bilinear").argmax(1)
    palette = torch.randn(CLASSES, 4)
    images = palette[mask].permute(0, 3, 1, 2) + 0.5 * torch.randn(n, 4, size, size)
    return TensorDataset(images.contiguous(), mask)


class Segmenter(LightningModule):
    def __init__(self, fixed=False):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ReLU(),
            nn.Conv2d(16, CLASSES, 1),
        )
        self.confusion = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        self.fixed = fixed

    def count(self, logits, mask):
        predicted = logits.argmax(1)
        if self.fixed:
            pairs = torch.bincount((mask * CLASSES + predicted).flatten(), minlength=CLASSES**2)
            self.confusion += pairs.view(CLASSES, CLASSES).numpy()
        else:
            self.confusion += confusion_matrix(
                mask.cpu().numpy().ravel(), predicted.cpu().numpy().ravel(), labels=range(CLASSES)
            )

    def training_step(self, batch, batch_idx):
        images, mask = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, mask)
        self.count(logits.detach(), mask)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        hit = self.confusion.diagonal()
        union = self.confusion.sum(0) + self.confusion.sum(1) - hit
        self.log("miou", float((hit / union).mean()))
        self.confusion[:] = 0

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Beat(Callback):
    def __init__(self):
        self.beats = []

    def on_train_batch_start(self, *_):
        self.beats.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=450)
    args = parser.parse_args()
    seed_everything(43, verbose=False)
    loader = DataLoader(tiles(), batch_size=16, shuffle=True, drop_last=True)
    beat = Beat()
    callbacks = [beat]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Segmenter(args.fixed), loader)
    beats = beat.beats[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (beats[-1] - beats[0]) / (len(beats) - 1):.3f}")


if __name__ == "__main__":
    main()
