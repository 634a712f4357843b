"""Checks whether frozen modules compute the same for the same sample in every step.

A module without trained parameters may still change, such as a target network that follows a trained one. Its
inputs may be random or come from trained modules.
"""

from __future__ import annotations

import random
import sys
import weakref
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import dataloader, sampler

from lightning_modelprof.inspect.flops.formulas import name_of
from lightning_modelprof.inspect.lines.constants import draws, storage_of, tensors_in_arguments, written_by
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.measure.stored import (
    buffers_of,
    is_a,
    is_trained,
    modules_of,
    named_modules,
    parameters_of,
    undisturbed,
)
from lightning_modelprof.run.model_cost import FrozenModule

_READS: Final = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""Operators that return a value to Python, which may affect what runs next."""
_MOST_LOOKED_AT: Final = 8
"""Tensors per module whose values are compared."""
_MOST_VALUES: Final = 16
"""Numbers compared per tensor."""


class VaryingWatch:
    """Follows what is random, or depends on trained parameters, from operator to operator.

    A tensor varies if it shares memory with the result of an operator that draws random numbers or takes a
    varying tensor. After Python has read a random number, from a tensor or from Python's or NumPy's own
    generators, everything that follows may vary. Samplers' reads are exempt, as they only choose samples.

    Attributes:
        seen: paths of modules that ran an operator in forward.
        varying: those where an operator returned a varying tensor.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.seen: set[str] = set()
        self.varying: set[str] = set()
        self._random: dict[int, StorageWeakRef] = {}
        self._learned: dict[int, StorageWeakRef] = {}
        with undisturbed():
            for one in () if root is None else parameters_of(root):
                if is_trained(one) and _has_memory(one):
                    add_storage(self._learned, one)
        self._host = _host_random_states()
        self._has_read = False
        self._module: str | None = None

    def __call__(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        where: tuple[str, str],
    ) -> None:
        given = set(map(storage_of, tensors_in_arguments((*args, *kwargs.values()))))
        is_random = not given.isdisjoint(self._random) or draws(func, args, kwargs)
        is_learned = not given.isdisjoint(self._learned)
        if is_random and not is_learned and name_of(func.overloadpacket) in _READS:
            self._has_read |= not _is_of_sampler()
        if is_random or is_learned:
            results = result if isinstance(result, (list, tuple)) else (result,)
            made = written_by(func, args, kwargs) if func._schema.is_mutable else results
            for one in tensors_in_arguments(made):
                if is_random:
                    add_storage(self._random, one)
                if is_learned:
                    add_storage(self._learned, one)
        if where[0] == "forward":
            self._note(where[1], is_varying=is_random or is_learned)

    def end(self) -> None:
        self._random.clear()
        self._learned.clear()

    def _note(self, module: str, *, is_varying: bool) -> None:
        if module != self._module and not self._has_read:
            self._has_read = _host_random_states() != self._host
        self._module = module
        self.seen.add(module)
        if is_varying or self._has_read:
            self.varying.add(module)


def add_storage(storages: dict[int, StorageWeakRef], tensor: torch.Tensor) -> None:
    """Add a tensor's memory; the weak reference keeps its address from being reused."""
    if storage_of(tensor) not in storages:
        kept = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
        storages[storage_of(tensor)] = kept


def _host_random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


_SAMPLER_FILE: Final = sampler.RandomSampler.__iter__.__code__.co_filename
_LOADER_FILE: Final = dataloader._BaseDataLoaderIter.__init__.__code__.co_filename


def _is_of_sampler() -> bool:
    """Whether torch is choosing samples, or a seed for the workers."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _SAMPLER_FILE:
            return True
        if code.co_filename == _LOADER_FILE and code.co_name in ("__init__", "_reset", "__iter__"):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the outermost frame
    return False


class _State(NamedTuple):
    """A tensor's earlier state: weak reference, version, address and some of its values.

    The version alone isn't enough, as writes to ``.data`` don't change it.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int
    values: torch.Tensor | None


class FrozenWatch:
    """Notes which frozen modules change between construction and :meth:`result`.

    Compares tensors' versions and addresses, and a few values of some, which stay on the device.
    """

    def __init__(self, root: nn.Module) -> None:
        self._frozen: list[tuple[str, weakref.ref[nn.Module], list[_State]]] = []
        with undisturbed():
            for name, module in named_modules(root):
                path = plain_path(name)
                if not path or any(path.startswith(f"{one}.") for one, _, _ in self._frozen):
                    continue
                parameters = list(parameters_of(module))
                if parameters and not any(map(is_trained, parameters)):
                    self._frozen.append((path, weakref.ref(module), _states_of(module)))

    def result(self, root: nn.Module, varying: VaryingWatch) -> tuple[FrozenModule, ...]:
        """Return the record of the modules that ran in the watched step."""
        now = {plain_path(name): module for name, module in named_modules(root)}
        found = []
        with undisturbed():
            for path, held, states in self._frozen:
                module = now.get(path)
                if any(_is_within(one, path) for one in varying.seen):
                    is_same = module is not None and held() is module and not _has_changed(module, states)
                    found.append(
                        FrozenModule(
                            path=path,
                            changes=not is_same,
                            has_varying_input=any(_is_within(one, path) for one in varying.varying),
                        )
                    )
        return tuple(found)


def _is_within(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _states_of(module: nn.Module) -> list[_State]:
    tensors = [*parameters_of(module), *buffers_of(module)]
    every = max(1, len(tensors) // _MOST_LOOKED_AT)
    return [
        _State(weakref.ref(one), one._version, one.data_ptr(), None if number % every else _values_of(one))
        for number, one in enumerate(tensors)
    ]


def _values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy some values from the middle; ``None`` if the tensor isn't plain."""
    if not _has_memory(tensor) or not tensor.numel():
        return None
    data = tensor.detach()
    if not data.dim():
        return data.clone()
    return data[tuple(size // 2 for size in data.shape[:-1])][..., :_MOST_VALUES].clone()


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta


def _has_changed(module: nn.Module, states: list[_State]) -> bool:
    """Whether a tensor was replaced or written to, or BatchNorm uses batch statistics."""
    tensors = [*parameters_of(module), *buffers_of(module)]
    if len(tensors) != len(states) or any(map(is_trained, tensors)):
        return True
    if any(
        is_a(one, nn.modules.batchnorm._BatchNorm) and (one.training or one.running_mean is None)
        for one in modules_of(module)
    ):
        return True
    return any(
        then.tensor() is not now or then.version != now._version or then.address != now.data_ptr()
        for now, then in zip(tensors, states, strict=True)
    ) or any(
        then.values is not None and not _is_equal(then.values, now)
        for now, then in zip(tensors, states, strict=True)
    )


def _is_equal(values: torch.Tensor, tensor: torch.Tensor) -> bool:
    now = _values_of(tensor)
    return now is not None and torch.equal(now, values)
