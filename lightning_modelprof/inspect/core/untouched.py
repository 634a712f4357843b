"""Runs a model and leaves it as it was."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Give back what a forward and a backward pass change, whatever happens; gradients are away meanwhile.

    That is: random states; gradients of parameters and inputs, and whether they want them; and of every
    module its attributes (hooks, modes and buffers among them), the contents of those that are lists, dicts
    and sets, and the values of buffers and of other tensors among the attributes. Values of parameters, and
    what objects of other kinds hold, are not.

    Args:
        model: what is run.
        inputs: what it is run on, tensors in any containers.
    """
    leaves = [tensor for tensor in tensors_in(inputs) if tensor.is_leaf and tensor.requires_grad]
    wanting = {id(tensor): tensor for tensor in (*model.parameters(), *leaves)}.values()
    parameters = [(tensor, tensor.requires_grad, tensor.grad) for tensor in wanting]
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = {id(value): value for _, saved in attributes for value in saved.values()}
    containers = [(value, value.copy()) for value in held.values() if type(value) in _CONTAINERS]
    tensors = {id(b): b for b in model.buffers()}
    for value in held.values():
        if isinstance(value, torch.Tensor) and not value.is_meta and not isinstance(value, nn.Parameter):
            tensors[id(value)] = value
    values = [(t, t.detach().clone()) for t in tensors.values() if _can_be_written(t)]
    devices = {tensor.device for tensor in (*wanting, *tensors.values())}
    with random_states_kept(devices):
        try:
            for tensor in wanting:
                tensor.grad = None
            yield
        finally:
            for own, saved in attributes:
                own.clear()
                own.update(saved)
            for container, contents in containers:
                container.clear()
                _fill(container, contents)
            for parameter, requires_grad, gradient in parameters:
                parameter.requires_grad = requires_grad
                parameter.grad = gradient
            with torch.no_grad():
                for tensor, value in values:
                    tensor.detach().copy_(value)


_CONTAINERS: Final = (dict, OrderedDict, list, set)


def _fill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Not where several elements share a place in memory, which nothing else can change either."""
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        return True
    return all(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


@contextmanager
def random_states_kept(devices: Collection[torch.device] = ()) -> Iterator[None]:
    """Give back the random states of Python, NumPy, torch on the host, and of these devices."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} & {"cuda", "xpu"}:
            found = [d.index for d in devices if d.type == kind and d.index is not None]
            stack.enter_context(torch.random.fork_rng(devices=found, device_type=kind))
        if any(device.type == "mps" for device in devices):
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in dicts, sequences and dataclasses, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))
