"""Plankton images of any orientation: rotated at random before the network sees them."""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=701)
args = parser.parse_args()


def rotate_with_pillow(images, degrees):
    rotated = []
    for image, angle in zip(images, degrees.tolist()):
        pixels = (image.permute(1, 2, 0).cpu().numpy() * 255).astype(np.uint8)
        picture = Image.fromarray(pixels).rotate(angle, resample=Image.Resampling.BILINEAR)
        rotated.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255)
    return torch.stack(rotated).to(images.device)


def rotate_batch(images, degrees):
    radians = degrees * (math.pi / 180)
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    theta = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


class PlanktonNet(LightningModule):
    def __init__(self, species=40):
        super().__init__()
        layers, width = [], 3
        for out, stride in ((16, 2), (32, 2), (48, 2), (96, 2)):
            layers += [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)]
            layers += [nn.SiLU()]
            width = out
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(96, species)

    def training_step(self, batch, batch_idx):
        images, species = batch
        degrees = 360 * torch.rand(len(images))
        if args.fixed:
            images = rotate_batch(images, degrees)
        else:
            images = rotate_with_pillow(images, degrees)
        loss = F.cross_entropy(self.head(self.net(images)), species)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(44, verbose=False)
    images, species = torch.rand(2560, 3, 64, 64), torch.randint(40, (2560,))
    loader = DataLoader(TensorDataset(images, species), batch_size=40, shuffle=True)
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
    trainer.fit(PlanktonNet(), loader)
    starts = pace.starts[len(pace.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
