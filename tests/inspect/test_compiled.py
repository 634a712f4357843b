"""Models that use torch.compile are recognized, and others aren't."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_modelprof.inspect.core.model_copies import find_compiled


def by_hand(function):
    return torch.compile(function, backend="eager")


@by_hand
def used(x):
    return x + 1


@by_hand
def never_used(x):
    return x - 1


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


class UsesAFunction(Plain):
    def forward(self, x):
        return [used(row) for row in super().forward(x)]


class OwnMethod(Plain):
    @by_hand
    def loss(self, x):
        return x.sum()


def whole():
    return by_hand(Plain())


def part():
    return nn.Sequential(Plain(), by_hand(Plain()))


def in_place():
    model = nn.Sequential(Plain())
    model[0].compile(backend="eager")
    return model


def attribute():
    model = Plain()
    model.step = by_hand(model.forward)
    return model


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Plain, None),  # never_used is in the same file
        (lambda: nn.Sequential(Plain()), None),
        (UsesAFunction, "used, which UsesAFunction uses"),
        (lambda: nn.Sequential(UsesAFunction()), "used, which UsesAFunction uses"),
        (OwnMethod, "loss, which OwnMethod uses"),
        (whole, "OptimizedModule"),
        (part, "1"),
        (in_place, "0"),
        (attribute, "Plain"),
    ],
)
def test_compiled_part_is_found(make, found):
    assert find_compiled(make()) == found


def test_library_with_compiled_functions_is_not_compiled():
    transformers = pytest.importorskip("transformers", reason="needs the transformers library")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    assert find_compiled(transformers.GPT2LMHeadModel(config)) is None
