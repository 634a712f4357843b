"""Segmentation of organs with a soft Dice loss."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=351)
args = parser.parse_args()

ORGANS = 9


def dice_loss(logits, masks, smooth=1.0):
    """Mean of 1 - Dice over all images and organs."""
    probabilities = logits.softmax(dim=1)
    losses = []
    for image in range(logits.shape[0]):
        for organ in range(ORGANS):
            predicted = probabilities[image, organ]
            actual = (masks[image] == organ).float()
            overlap = (predicted * actual).sum()
            total = predicted.sum() + actual.sum()
            losses.append(1 - (2 * overlap + smooth) / (total + smooth))
    return torch.stack(losses).mean()


def dice_loss_batched(logits, masks, smooth=1.0):
    probabilities = logits.softmax(dim=1).flatten(2)
    actual = F.one_hot(masks, ORGANS).permute(0, 3, 1, 2).flatten(2).float()
    overlap = (probabilities * actual).sum(2)
    total = probabilities.sum(2) + actual.sum(2)
    return (1 - (2 * overlap + smooth) / (total + smooth)).mean()


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )


class UNet(LightningModule):
    def __init__(self, width=12):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.join1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, ORGANS, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.head(self.join1(torch.cat([self.up1(b), a], 1)))

    def training_step(self, batch, batch_idx):
        scans, masks = batch
        logits = self(scans)
        dice = dice_loss_batched(logits, masks) if args.fixed else dice_loss(logits, masks)
        loss = dice + 0.5 * F.cross_entropy(logits, masks)
        self.log_dict({"train_loss": loss, "dice": dice})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(6, verbose=False)
    scans, masks = torch.rand(640, 1, 40, 40), torch.randint(ORGANS, (640, 40, 40))
    loader = DataLoader(TensorDataset(scans, masks), batch_size=16, shuffle=True)
    pace = Pace()
    callbacks = [pace]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(UNet(), loader)
    starts = pace.starts[len(pace.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
