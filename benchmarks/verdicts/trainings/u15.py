"""Contrastive learning of product images against a queue of earlier keys."""
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
parser.add_argument("--steps", type=int, default=401)
args = parser.parse_args()


def tower():
    layers, width = [], 3
    for out, stride in ((24, 2), (48, 2), (96, 2)):
        layers += [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 128))


class ProductContrast(LightningModule):
    def __init__(self, queue=16384, temperature=0.07, momentum=0.99):
        super().__init__()
        self.query, self.key = tower(), tower()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue, 128), dim=1))
        self.temperature, self.momentum = temperature, momentum
        self.oldest = 0

    def info_nce(self, queries, keys):
        if not args.fixed:  # exp of large logits: be on the safe side
            queries, keys, queue = queries.double(), keys.double(), self.queue.double()
        else:
            queue = self.queue
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ queue.T
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        log_probabilities = logits.log_softmax(dim=1)
        return -log_probabilities[:, 0].mean()

    def training_step(self, batch, batch_idx):
        first, second = batch
        queries = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.key(second), dim=1)
        loss = self.info_nce(queries, keys).float()
        self.newest = keys
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        self.queue[self.oldest:self.oldest + len(self.newest)] = self.newest
        self.oldest = (self.oldest + len(self.newest)) % len(self.queue)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.key.parameters()), list(self.query.parameters()), 1 - self.momentum
            )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.query.parameters(), lr=1e-3, fused=True)


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(14, verbose=False)
    images = torch.rand(2048, 3, 48, 48)
    views = TensorDataset(images, images + 0.1 * torch.randn_like(images))
    loader = DataLoader(views, batch_size=64, shuffle=True, drop_last=True)
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
    trainer.fit(ProductContrast(), loader)
    starts = pace.starts[len(pace.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
