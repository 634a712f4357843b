"""The tensors that a model holds by name, and the memory behind a tensor: for whoever asks who holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.inspect.modules.tensor_memory import memory_of, unnoticed


def held_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters with a size, each once, by the name that the user knows."""
    return _by_name(module.named_parameters())


def held_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Likewise buffers."""
    return _by_name(module.named_buffers())


def storages_of(tensor: torch.Tensor) -> Mapping[int, int]:
    """Storages of a tensor: an address that no other living storage has → bytes."""
    with unnoticed():
        return memory_of(tensor).storages


def _by_name(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A name with its wrappers where two tensors have the same plain one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if not is_lazy(tensor):
            path = plain_path(name)
            found[name if path in found else path] = tensor
    return found
