"""Walking a model without calling its methods finds what those methods find."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_modelprof.measure import stored


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.again, self.nothing = self.first, None
        self.inner = nn.Sequential(nn.BatchNorm1d(3), self.first, nn.Sequential(nn.BatchNorm1d(3)))
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.first.weight
        self.register_buffer("empty", None)
        self.register_buffer("full", torch.ones(2))

    def forward(self, inputs):
        return self.inner(inputs)


MODELS = {
    "a layer": lambda: nn.Linear(2, 3),
    "layers": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3)),
    "shared parts": Shared,
    "a transformer": lambda: nn.Transformer(8, 2, 1, 1, 8),
    "a script": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))),
    "a script within": lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 3)), Shared()),
    "a compiled one": lambda: torch.compile(Shared()),
    "wrapped": lambda: nn.DataParallel(Shared()),
}


def ids(found):
    """Identify tensors by data pointer, because a script's tensors are new objects each time."""
    return [(name, one.data_ptr() if isinstance(one, torch.Tensor) else id(one)) for name, one in found]


@pytest.mark.parametrize("name", MODELS)
def test_walk_matches_torch_methods(name):
    model = MODELS[name]()
    assert ids(stored.named_modules(model)) == ids(model.named_modules())
    assert ids(stored.named_children(model)) == ids(model.named_children())
    assert list(map(id, stored.modules_of(model))) == list(map(id, model.modules()))
    assert ids(stored.named_parameters(model)) == ids(model.named_parameters())
    assert ids(stored.named_buffers(model)) == ids(model.named_buffers())
    for remove_duplicate in (True, False):
        ours = stored.named_parameters(model, remove_duplicate=remove_duplicate)
        assert ids(ours) == ids(model.named_parameters(remove_duplicate=remove_duplicate))
        ours = stored.named_buffers(model, remove_duplicate=remove_duplicate)
        assert ids(ours) == ids(model.named_buffers(remove_duplicate=remove_duplicate))
