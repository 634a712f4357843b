"""LightGCN: recommendations from a graph of users and items."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

USERS, ITEMS, EDGES = 4000, 2500, 70000


def interactions():
    g = torch.Generator().manual_seed(12)
    users = torch.randint(0, USERS, (EDGES,), generator=g)
    items = (torch.rand(EDGES, generator=g) ** 2 * ITEMS).long()
    return torch.unique(torch.stack([users, items]), dim=1)


def normalized_adjacency(edges):
    users, items = edges[0], edges[1] + USERS
    rows, cols = torch.cat([users, items]), torch.cat([items, users])
    degree = torch.bincount(rows, minlength=USERS + ITEMS).clamp(min=1).float()
    values = (degree[rows] * degree[cols]).rsqrt()
    size = (USERS + ITEMS, USERS + ITEMS)
    return torch.sparse_coo_tensor(torch.stack([rows, cols]), values, size).coalesce().to_sparse_csr()


class SymmetricProduct(torch.autograd.Function):
    """A @ x for a symmetric A, so that the gradient is A @ grad."""

    @staticmethod
    def forward(ctx, adjacency, x):
        ctx.adjacency = adjacency
        return adjacency @ x

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.adjacency @ grad


class Pairs(Dataset):
    def __init__(self, edges, batch_size):
        self.edges, self.batch_size = edges, batch_size

    def __len__(self):
        return self.edges.shape[1] // self.batch_size

    def __getitem__(self, index):
        chosen = torch.randint(0, self.edges.shape[1], (self.batch_size,))
        users, items = self.edges[:, chosen]
        return users, items, torch.randint(0, ITEMS, (self.batch_size,))


class LightGCN(LightningModule):
    def __init__(self, adjacency, dim=64, layers=3):
        super().__init__()
        self.adjacency = adjacency
        self.embedding = nn.Parameter(0.1 * torch.randn(USERS + ITEMS, dim))
        self.layers = layers

    def forward(self):
        x = total = self.embedding
        for _ in range(self.layers):
            x = SymmetricProduct.apply(self.adjacency, x)
            total = total + x
        return (total / (self.layers + 1)).split([USERS, ITEMS])

    def training_step(self, batch, batch_idx):
        users, liked, other = batch
        u, i = self()
        scores = (u[users] * (i[liked] - i[other])).sum(1)
        loss = F.softplus(-scores).mean()
        self.log("bpr", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3, fused=True)


class StepStart(Callback):
    def __init__(self):
        self.at = []

    def on_train_batch_start(self, *_):
        self.at.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    seed_everything(3, verbose=False)
    edges = interactions()
    model = LightGCN(normalized_adjacency(edges))
    loader = DataLoader(Pairs(edges, 4096), batch_size=None, shuffle=True)
    start = StepStart()
    callbacks = [start]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    at = start.at[5:]
    print(f"LOSS {trainer.callback_metrics['bpr'].item():.6f}")
    print(f"STEP_MS {1e3 * (at[-1] - at[0]) / (len(at) - 1):.3f}")
