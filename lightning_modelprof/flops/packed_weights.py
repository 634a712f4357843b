"""Weights that torch.ao keeps packed for its kernels, outside of parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class PackedTensor(NamedTuple):
    """One tensor inside of a packed object, as it is held there."""

    dtype: str
    elements: int
    num_bytes: int


def packed_objects(module: nn.Module) -> list[Any]:
    """What a module itself keeps packed, without its children; a scripted module is no packed weight."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, torch.ScriptObject) and not isinstance(value, torch._C.ScriptModule)
    ]


def packed_tensors(packed: Any) -> list[PackedTensor] | None:
    """Weights and biases in one packed object; ``None`` if it does not tell.

    Weights are copied for this call and dropped again: torch shows them in no other way. What packing adds
    (padding, sums of rows) is not in them.
    """
    try:
        return [_described(tensor) for tensor in _unpacked(packed)]
    except Exception:  # a class of another library, or of a backend that cannot unpack here
        return None


def packed_elements(module: nn.Module) -> int:
    """Elements of all that a module itself keeps packed, as far as it tells."""
    return sum(
        tensor.elements for packed in packed_objects(module) for tensor in packed_tensors(packed) or ()
    )


def _described(tensor: torch.Tensor) -> PackedTensor:
    # Of weights that are not quantised only float16 is packed, and it is shown as float32.
    is_half = tensor.dim() > 1 and tensor.dtype == torch.float32
    num_bytes = 2 * tensor.numel() if is_half else int(tensor.untyped_storage().nbytes())
    dtype = torch.float16 if is_half else tensor.dtype
    return PackedTensor(str(dtype).removeprefix("torch."), tensor.numel(), num_bytes)


def _unpacked(packed: Any) -> Iterator[torch.Tensor]:
    if hasattr(packed, "unpack"):
        yield from _tensors(packed.unpack())
        return
    # A cell of a recurrent layer: its biases, and its weights as packed objects that hold the biases again.
    state = packed.__getstate__()
    biases = list(_tensors(state))
    weights = [tensor for found in _objects(state) for tensor in _unpacked(found)]
    if not biases and not weights:
        raise ValueError("nothing in it is a tensor")
    yield from biases
    yield from (tensor for tensor in weights if tensor.dim() > 1 or not biases)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.ScriptObject):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _objects(item)
