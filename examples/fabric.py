"""A training loop of your own with Lightning Fabric: what its stages take, what a step costs, a trace.

    python examples/fabric.py
    lightning-modelprof analyze fabric_trace.json.gz      # all tables of the trace: operators, idle time, ...

`ModelProfCallback` needs a Trainer, since it lives on what the Trainer tells its profiler. In a loop of your
own

    EventTimer        times the stages that you name, on a GPU by marks on its stream, so that nothing waits;
    count_flops       counts one step of the model, forward and backward, and changes nothing on it;
    torch.profiler    records a few steps, and `lightning-modelprof analyze` reads what it wrote.

In plain PyTorch, without Fabric, the four numbered places are the same.
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

from lightning_modelprof import EventTimer, count_flops

STAGES = ("data", "forward", "backward", "optimizer")


def timed(batches: Iterable[Any], timer: EventTimer) -> Iterator[Any]:
    """The same batches; the wait for each is the stage "data"."""
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
    """One epoch; returns the times of its stages."""
    timer = EventTimer(fabric.device)  # 1. one timer for each thread
    for images, labels in timed(data, timer):  # 2. the wait for a batch
        with timer("forward"):  # 3. a name for each stage
            loss = nn.functional.cross_entropy(model(images), labels)
        with timer("backward"):
            fabric.backward(loss)
        with timer("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        profiler.step()  # 4. torch.profiler is told where a step ends
    return timer


def loss_of(output: Tensor) -> Tensor:
    """A loss for the count: which one it is hardly matters, but that there is one makes backward count."""
    return output.logsumexp(dim=1).mean()


def show(timer: EventTimer, steps: int) -> None:
    """A line for each stage: device time where the device has marks, else that of the host."""
    stages = timer.results()
    totals_ns = {}
    for name in STAGES:
        spread = stages[name].device or stages[name].real
        totals_ns[name] = spread.avg_ns * stages[name].calls
    for name, total_ns in totals_ns.items():
        share = total_ns / sum(totals_ns.values())
        print(f"{name:>10} {total_ns / steps / 1e6:9.3f} ms a step {share:7.1%}")


def main() -> None:
    """Train, then say where the time went."""
    parser = argparse.ArgumentParser(description="Where does the time of a Fabric loop go?")
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
        print(f"{phase:>10} {macs:,} multiply-adds a step")

    schedule = torch.profiler.schedule(skip_first=5, wait=0, warmup=2, active=5, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda done: done.export_chrome_trace(str(options.trace))
    ) as profiler:
        timer = train(fabric, model, optimizer, data, profiler)
    show(timer, options.steps)
    print(f"Trace: lightning-modelprof analyze {options.trace}")


if __name__ == "__main__":
    main()
