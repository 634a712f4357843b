"""A complete training: balanced sampling, validation, early stopping, checkpoints, a CSV log."""
import argparse
import tempfile
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true", help="nothing to fix")
parser.add_argument("--steps", type=int, default=361)
args = parser.parse_args()

CLASSES = 6


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, width // 2, 3, 1, 1, bias=False), nn.BatchNorm2d(width // 2),
            nn.ReLU(), nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return (x + self.layers(x)).relu()


class GrainClassifier(LightningModule):
    def __init__(self, width=96):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 4, 4), *[Bottleneck(width) for _ in range(5)],
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.02, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main(folder):
    seed_everything(25, verbose=False)
    images, labels = torch.rand(2880, 3, 64, 64), torch.randint(CLASSES, (2880,)).square() // 5
    weights = 1.0 / labels.bincount(minlength=CLASSES).float()[labels]
    sampler = WeightedRandomSampler(weights, len(labels))
    train = DataLoader(TensorDataset(images, labels), batch_size=32, sampler=sampler)
    val = DataLoader(TensorDataset(images[:320], labels[:320]), batch_size=64)
    clock = StepClock()
    callbacks = [
        clock, LearningRateMonitor(), EarlyStopping("val_loss", patience=20, strict=False),
        ModelCheckpoint(f"{folder}/best", monitor="val_accuracy", mode="max", save_last=True),
    ]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks,
        logger=CSVLogger(folder), default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=30,
    )
    trainer.fit(GrainClassifier(), train, val)
    starts = clock.starts[len(clock.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
