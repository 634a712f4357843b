"""The 31 models of ``flops.py`` with hand-derived truths; this file has those with unusual calls.

``MODELS`` maps names to functions that build a :class:`Case`. Weights and inputs are random, so seed first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from flop_case import Case
from flop_sequence_models import SEQUENCE_MODELS
from flop_vision_models import VISION_MODELS, lenet
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp() -> Case:
    first = 32 * 784 * 512
    forward = first + 32 * 512 * 256 + 32 * 256 * 10
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    # The first layer's input is the batch, so it needs no gradient.
    return Case(
        model=model, args=(torch.randn(32, 784),), forward_macs=forward, backward_macs=2 * forward - first
    )


class Bag(nn.Module):
    """Averages of word embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(1000, 32, mode="mean"), nn.Linear(32, 4)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.last(self.bag(words, offsets))


def embedding_bag() -> Case:
    # Look-ups and averages aren't contractions. The bags' gradient is needed.
    forward = 16 * 32 * 4
    args = torch.randint(0, 1000, (80,)), torch.arange(0, 80, 5)
    return Case(model=Bag(), args=args, forward_macs=forward, backward_macs=2 * forward)


class ControlFlow(nn.Module):
    """A loop and a row selection that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loop, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, rounds = self.first(x), 0
        while y.norm() > 1e-6 and rounds < 3:
            y, rounds = self.loop(y).tanh(), rounds + 1
        chosen = (x[:, 0] > 0).nonzero().flatten()
        return self.last(y.index_add(0, chosen, self.loop(y[chosen])))


def control_flow() -> Case:
    x = torch.randn(4, 16)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    # All 4 rows, three rounds of the loop, 2 chosen rows, the last layer.
    forward = 4 * 16 * 32 + 3 * 4 * 32 * 32 + 2 * 32 * 32 + 4 * 32 * 2
    return Case(model=ControlFlow(), args=(x,), forward_macs=forward, backward_macs=2 * forward - 4 * 16 * 32)


class Shared(nn.Module):
    """One layer under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.alias = self.twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.alias(self.twice(self.first(x)).relu()))


def shared() -> Case:
    forward = 4 * 16 * 32 + 2 * 4 * 32 * 32 + 4 * 32 * 16
    return Case(
        model=Shared(),
        args=(torch.randn(4, 16),),
        forward_macs=forward,
        backward_macs=2 * forward - 4 * 16 * 32,
    )


@dataclass
class Batch:
    """A batch that isn't a tensor."""

    x: torch.Tensor
    name: str = "batch"


class Small(nn.Module):
    """Two linear layers, for all kinds of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())

    def forward(self, batch: Any, scale: float = 1.0) -> Any:
        if isinstance(batch, dict):
            return {"logits": self.layers(batch["x"]) + batch["meta"]["shift"], "other": None}
        if isinstance(batch, Batch):
            return Batch(self.layers(batch.x))
        if isinstance(batch, list):
            return [*(self.layers(x) for x in batch[0]), None]
        return self.layers(batch) * scale


# 4 rows through 16 x 32 and 32 x 4; the rows need no gradient.
SMALL = 4 * 16 * 32 + 4 * 32 * 4
SMALL_BACKWARD = 2 * SMALL - 4 * 16 * 32


def small(batch: Any, times: int = 1) -> Case:
    return Case(
        model=Small(), args=(batch,), forward_macs=times * SMALL, backward_macs=times * SMALL_BACKWARD
    )


def rows() -> torch.Tensor:
    return torch.randn(4, 16)


def compiled(case: Case, backend: str) -> Case:
    """The same work, compiled."""
    return replace(case, model=torch.compile(case.model, backend=backend))


class Checkpointed(nn.Module):
    """Drops its block's activations and recomputes them in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


def checkpointed(reentrant: bool) -> Case:
    layer = 4 * 32 * 32
    forward = SMALL + 2 * layer
    return Case(
        model=Checkpointed(reentrant),
        args=(rows(),),
        forward_macs=forward,
        backward_macs=2 * forward - 4 * 16 * 32,
        # Non-reentrant recomputation stops at the last tensor that backward needs, before the second layer.
        recompute_macs=2 * layer if reentrant else layer,
    )


def lightning_step() -> Case:
    """A LightningModule with only a step, without ``forward``."""
    from lightning import LightningModule  # noqa: PLC0415

    class OnlyStep(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int = 0) -> torch.Tensor:
            return nn.functional.cross_entropy(self.last(self.first(batch["x"]).relu()), batch["y"])

    batch = {"x": rows(), "y": torch.randint(0, 4, (4,))}
    return replace(small(batch), model=OnlyStep(), method="training_step")


class Product(torch.autograd.Function):
    """A product whose own backward always computes both gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class OwnFunction(nn.Module):
    """A product in a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(16, 32)), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Product.apply(x, self.weight).relu())


def own_function() -> Case:
    # Like the small model, but the custom backward also computes the rows' gradient.
    return Case(model=OwnFunction(), args=(rows(),), forward_macs=SMALL, backward_macs=2 * SMALL)


MODELS = {
    "mlp": mlp,
    **VISION_MODELS,
    **SEQUENCE_MODELS,
    "embedding bag": embedding_bag,
    "control flow": control_flow,
    "shared layer": shared,
    "dict": lambda: small({"x": rows(), "meta": {"shift": torch.randn(4), "name": "a"}}),
    "dataclass": lambda: small(Batch(rows())),
    "nested lists": lambda: small([[rows(), rows()], 3], times=2),
    "compiled, aot_eager": lambda: compiled(lenet(), "aot_eager"),
    "compiled, inductor": lambda: compiled(small(rows()), "inductor"),
    "checkpoint, re-entrant": lambda: checkpointed(reentrant=True),
    "checkpoint": lambda: checkpointed(reentrant=False),
    "lightning step": lightning_step,
    "autograd function": own_function,
}
"""In the order of the table."""
