"""Transformer over sensor windows; one label per window."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, heads, fixed):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.fixed = fixed

    def forward(self, x):
        h = self.norm1(x)
        if self.fixed:
            attended = self.attention(h, h, h, need_weights=False)[0]
        else:
            attended, _ = self.attention(h, h, h)
        x = x + attended
        return x + self.mlp(self.norm2(x))


class WindowClassifier(LightningModule):
    def __init__(self, channels=9, length=400, dim=96, classes=6, fixed=False):
        super().__init__()
        self.embed = nn.Linear(channels, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.Sequential(*[Block(dim, 8, fixed) for _ in range(2)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.blocks(self.embed(x) + self.position)
        return self.head(x.mean(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Times(Callback):
    def __init__(self):
        self.t = []

    def on_train_batch_start(self, *_):
        self.t.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    seed_everything(17, verbose=False)
    windows = torch.randn(1200, 400, 9).cumsum(1) * 0.1
    labels = (windows[:, -1, 0] > 0).long() + 2 * (windows[:, -1, 1] > 0).long()
    loader = DataLoader(TensorDataset(windows, labels), batch_size=12, shuffle=True, drop_last=True)
    times = Times()
    callbacks = [times]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(WindowClassifier(fixed=args.fixed), loader)
    t = times.t[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (t[-1] - t[0]) / (len(t) - 1):.3f}")


if __name__ == "__main__":
    main()
