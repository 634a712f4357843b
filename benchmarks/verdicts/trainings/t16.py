"""A small GPT over a vocabulary of sub-words."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Chunks(Dataset):
    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        chunk = self.tokens[start : start + self.length + 1]
        return chunk[:-1], chunk[1:]


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.ln2(x))


class GPT(LightningModule):
    def __init__(self, vocabulary=6000, dim=192, layers=3, heads=6, length=96):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.layers = nn.Sequential(*[Layer(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.tokens.weight)

    def training_step(self, batch, batch_idx):
        ids, targets = batch
        loss = F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=6e-4, fused=True)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class StepTimer(Callback):
    def __init__(self):
        self.times = []

    def on_train_batch_start(self, *_):
        self.times.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    seed_everything(16, verbose=False)
    tokens = (torch.rand(300_000) ** 3 * 6000).long()
    loader = DataLoader(Chunks(tokens, 96), batch_size=8, shuffle=True, drop_last=True)
    timer = StepTimer()
    callbacks = [timer]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        gradient_clip_val=1.0, default_root_dir=args.profile, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(GPT(), loader)
    times = timer.times[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (times[-1] - times[0]) / (len(times) - 1):.3f}")
