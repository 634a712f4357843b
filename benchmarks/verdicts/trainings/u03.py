"""BYOL: an online network predicts what its slow copy sees in another view."""
import argparse
import copy
import math
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true", help="nothing to fix")
parser.add_argument("--steps", type=int, default=281)
args = parser.parse_args()


def augment(images):
    """Flips, contrast and noise, other ones for each image."""
    n = len(images)
    flip = torch.rand(n, 1, 1, 1) < 0.5
    images = torch.where(flip, images.flip(3), images)
    contrast = 0.6 + 0.8 * torch.rand(n, 1, 1, 1)
    return images * contrast + 0.1 * torch.randn_like(images)


def encoder():
    layers, width = [], 3
    for out, stride in ((24, 1), (48, 2), (96, 2), (128, 2)):
        layers += [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def mlp(width, hidden, out):
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, out),
    )


class BYOL(LightningModule):
    def __init__(self, base_momentum=0.99):
        super().__init__()
        self.online = nn.Sequential(encoder(), mlp(128, 256, 64))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = mlp(64, 256, 64)
        self.base_momentum = base_momentum

    def training_step(self, batch, batch_idx):
        (images,) = batch
        first, second = augment(images), augment(images)
        p1, p2 = self.predictor(self.online(first)), self.predictor(self.online(second))
        with torch.no_grad():
            z1, z2 = self.target(first), self.target(second)
        loss = 2 - F.cosine_similarity(p1, z2).mean() - F.cosine_similarity(p2, z1).mean()
        self.log("byol_loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        progress = self.global_step / args.steps
        momentum = 1 - (1 - self.base_momentum) * (math.cos(math.pi * progress) + 1) / 2
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.target.parameters()), list(self.online.parameters()), 1 - momentum
            )

    def configure_optimizers(self):
        learned = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(learned, lr=1e-3, weight_decay=1e-4, fused=True)


class Watch(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(31, verbose=False)
    images = torch.rand(4096, 3, 32, 32)
    loader = DataLoader(TensorDataset(images), batch_size=48, shuffle=True, drop_last=True)
    watch = Watch()
    callbacks = [watch]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BYOL(), loader)
    starts = watch.starts[len(watch.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['byol_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
