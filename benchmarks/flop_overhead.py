r"""Cost of counting per training step: forward, backward and AdamW, with and without a dispatch mode.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 \
        python benchmarks/flop_overhead.py --repetitions 15

The last two variables let glibc keep its memory. Without them, ResNet-50 gets 10,000 to 20,000 new pages from
the system per step. The number varies by chance and adds up to 20 us per operator in any column.

Each repetition runs one step of each kind in turn, so they share the machine's load. The best of each kind
counts, in CPU time. A counted step's time includes creating the counter, its hooks, removing them and
summing up. The first column after the model is the number of operators that the empty mode saw. The
optimizer's operators take lists of all parameters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.flops.count import step_count

Step = Callable[[], None]


class EmptyMode(TorchDispatchMode):
    """Only calls the operator, which is the minimum cost of any counter in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A language model layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Bottleneck(nn.Module):
    """A ResNet-50 block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        for before, after, kernel, step in sizes:
            layers += [nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu_(self.body(x) + self.shortcut(x))


def language_model() -> tuple[nn.Module, torch.Tensor]:
    """24 layers of width 32."""
    model = nn.Sequential(nn.Embedding(256, 32), *(Block(32) for _ in range(24)), nn.Linear(32, 256))
    return model, torch.randint(0, 256, (2, 16))


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Three layers of width 512."""
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(64, 512)


def resnet50() -> tuple[nn.Module, torch.Tensor]:
    """Two images of 64 x 64."""
    blocks: list[nn.Module] = []
    channels = 64
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(channels, width, 1 if index else first_stride))
            channels = 4 * width
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*stem, *blocks, *last), torch.randn(2, 3, 64, 64)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    """Four layers of width 128."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(4, 32, 128)


MODELS = {
    "language model, 24 layers": language_model,
    "perceptron": perceptron,
    "ResNet-50, 64 x 64": resnet50,
    "transformer encoder": encoder,
}


@contextmanager
def ours(model: nn.Module) -> Iterator[None]:
    """Our counter, used as in the callback."""
    with FlopCounter(model, force_eager=False) as counter:
        yield
    step_count(counter)


@contextmanager
def torchs(model: nn.Module) -> Iterator[None]:
    """Torch's counter."""
    with FlopCounterMode(display=False):
        yield


@contextmanager
def empty(model: nn.Module) -> Iterator[None]:
    with EmptyMode():
        yield


@contextmanager
def nothing(model: nn.Module) -> Iterator[None]:
    """The unchanged step."""
    yield


KINDS = {"plain": nothing, "empty mode": empty, "ours": ours, "torch's": torchs}


def measure(
    build: Callable[[], tuple[nn.Module, torch.Tensor]], repetitions: int
) -> tuple[int, dict[str, float]]:
    """Return the operator count of a step, and the shortest step of each kind in seconds."""
    torch.manual_seed(0)
    model, batch = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with EmptyMode() as mode:
        step()
    best = dict.fromkeys(KINDS, float("inf"))
    for _ in range(repetitions):
        for kind, around in KINDS.items():
            begin = time.process_time()
            with around(model):
                step()
            best[kind] = min(best[kind], time.process_time() - begin)
    return mode.operators, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    arguments = parser.parse_args()
    names = [*MODELS] if arguments.model == "all" else [arguments.model]
    others = [kind for kind in KINDS if kind != "plain"]
    columns = [f"{kind}: ratio, us/op" for kind in others]
    print(f"{'model':28}{'operators':>10}{'plain, ms':>11}" + "".join(f"{column:>26}" for column in columns))
    for name in names:
        operators, best = measure(MODELS[name], arguments.repetitions)
        line = f"{name:28}{operators:>10}{best['plain'] * 1e3:>11.2f}"
        for kind in others:
            extra_us = (best[kind] - best["plain"]) * 1e6 / operators
            line += f"{best[kind] / best['plain']:>17.2f}{extra_us:>9.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
