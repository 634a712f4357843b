"""Time a Lightning Fabric training loop, count its FLOPs and record a trace.

    python examples/fabric.py
    lightning-modelprof analyze fabric_trace.json.gz      # trace tables: operators, idle time, ...

`ModelProfCallback` needs a Trainer. In your own loop, use these instead:

    EventTimer        times stages; on a GPU it uses device events, so nothing waits
    count_flops       counts the forward and backward FLOPs of a step, and leaves the model unchanged
    torch.profiler    records a few steps for `lightning-modelprof analyze`

In plain PyTorch, the four numbered places are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lightning_modelprof import EventTimer, count_flops

STAGES = ("data", "forward", "backward", "optimizer")


def timed(batches: Iterable[Any], timer: EventTimer) -> Iterator[Any]:
    """Yield the batches, with the wait for each as the stage "data"."""
    iterator = iter(batches)
    while True:
        with timer("data"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def train(
    fabric: Fabric, model: nn.Module, optimizer: optim.Optimizer, data: Any, profiler: Any
) -> EventTimer:
    """Train for one epoch; returns the stage times."""
    accuracy = Accuracy(task="multiclass", num_classes=10).to(fabric.device)
    timer = EventTimer(fabric.device)  # 1. one timer per thread
    for images, labels in timed(data, timer):  # 2. the wait for each batch
        with timer("forward"):  # 3. a name for each stage
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            accuracy.update(scores, labels)
        with timer("backward"):
            fabric.backward(loss)
        with timer("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        profiler.step()  # 4. mark the end of the step for torch.profiler
    print(f"Training accuracy on random labels: {accuracy.compute():.0%}")
    return timer


def loss_of(output: Tensor) -> Tensor:
    """Return a loss, so that count_flops counts backward too."""
    return output.logsumexp(dim=1).mean()


def show(timer: EventTimer, steps: int) -> None:
    """Print a line per stage, with device time if the device has events, else CPU time."""
    stages = timer.results()
    totals_ns = {}
    for name in STAGES:
        spread = stages[name].device or stages[name].real
        totals_ns[name] = spread.avg_ns * stages[name].calls
    for name, total_ns in totals_ns.items():
        share = total_ns / sum(totals_ns.values())
        print(f"{name:>10} {total_ns / steps / 1e6:9.3f} ms per step {share:7.1%}")


def main() -> None:
    """Train, then print where the time went."""
    parser = argparse.ArgumentParser(description="Show where a Fabric loop spends its time.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--trace", type=Path, default=Path("fabric_trace.json.gz"))
    options = parser.parse_args()

    fabric = Fabric(accelerator=options.accelerator, devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    samples = options.steps * options.batch_size
    images, labels = torch.rand(samples, 3, 16, 16), torch.randint(10, (samples,))
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(images, labels), batch_size=options.batch_size))
    net = nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 10)
    )
    model, optimizer = fabric.setup(net, optim.SGD(net.parameters(), lr=0.1))

    batch = torch.rand(options.batch_size, 3, 16, 16, device=fabric.device)
    count = count_flops(model, batch, loss_fn=loss_of)
    for phase, macs in count.macs.items():
        print(f"{phase:>10} {macs:,} multiply-adds per step")

    schedule = torch.profiler.schedule(skip_first=5, wait=0, warmup=2, active=5, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda done: done.export_chrome_trace(str(options.trace))
    ) as profiler:
        timer = train(fabric, model, optimizer, data, profiler)
    show(timer, options.steps)
    print(f"Analyze the trace: lightning-modelprof analyze {options.trace}")


if __name__ == "__main__":
    main()
