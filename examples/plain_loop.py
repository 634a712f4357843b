"""Profile a training loop without Lightning.

    python examples/plain_loop.py
    python examples/plain_loop.py --epochs 8

Fetch batches with ``profiler.fetch``, name the phases and call ``profiler.step()`` after each batch.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lightning_modelprof import LoopProfiler


def main() -> None:
    """Train a small classifier on random data."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dirpath", default="modelprof")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    accuracy = Accuracy(task="multiclass", num_classes=10)

    with LoopProfiler(model, optimizers=[optimizer], active=5, dirpath=options.dirpath) as profiler:
        for _ in range(options.epochs):
            for images, labels in profiler.fetch(loader):
                with profiler.phase("forward"):
                    scores = model(images)
                    loss = nn.functional.cross_entropy(scores, labels)
                with profiler.phase("zero_grad"):
                    optimizer.zero_grad()
                profiler.backward(loss)
                with profiler.phase("optimizer"):
                    optimizer.step()
                with profiler.phase("logging"):
                    accuracy.update(scores, labels)
                profiler.step()
    print(f"Training accuracy on random labels: {accuracy.compute():.0%}")


if __name__ == "__main__":
    main()
