"""Finds operators of the counted step that would compute the same in any other step.

Such an operator draws no random numbers, and all its tensors come, through operators of the same kind, from
sizes and from buffers, frozen parameters and other tensors of modules, none of which changed in the step. The
batch and trained parameters are excluded.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lightning_modelprof.measure.stored import is_trained, modules_of


class _Held(NamedTuple):
    """A module's tensor and its version at the step's start."""

    owner: nn.Module
    name: str
    tensor: weakref.ref[torch.Tensor]
    version: int

    def has_changed(self) -> bool:
        then = self.tensor()
        if then is None:
            return True
        return then._version != self.version or getattr(self.owner, self.name, None) is not then


class ConstantWatch:
    """Follows tensors from operator to operator through weak references."""

    def __init__(self, root: nn.Module | None) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._written: set[int] = set()  # storages that non-constant operators wrote to
        self._touched: set[int] = set()  # storages of tensors that any operator wrote to
        self._held: list[_Held] = []
        self._used: set[int] = set()
        for module in () if root is None else modules_of(root):
            for name, value in [
                *module._buffers.items(),
                *module._parameters.items(),
                *vars(module).items(),
            ]:
                if any(type(value) is one for one in (torch.Tensor, nn.Parameter)) and not is_trained(value):
                    self._held.append(_Held(module, name, weakref.ref(value), value._version))
                    self._learn(value)
        self._of_modules = {id(one.tensor()): one for one in self._held}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, *, is_view: bool) -> bool:
        """Whether an operator that ran computes the same in any step; ``False`` if unsure."""
        tensors = tensors_in_arguments((*args, *kwargs.values()))
        results = tensors_in_arguments(result if isinstance(result, (list, tuple)) else (result,))
        is_same = all(map(self._knows, tensors)) and not draws(func, args, kwargs)
        if func._schema.is_mutable:
            self._touched.update(map(storage_of, tensors_in_arguments(written_by(func, args, kwargs))))
            if not is_same:  # whatever it writes to
                self._written.update(map(storage_of, (*tensors, *results)))
            return is_same
        for one in results:
            if not is_view:
                self._written.discard(storage_of(one))  # its memory may be reused
            if is_same:
                self._learn(one)
        if is_same:
            self._used.update(id(one) for one in tensors if id(one) in self._of_modules)
        return is_same

    def is_sure(self) -> bool:
        """Whether no module tensor that counted as constant has changed since."""
        return not any(self._has_changed(self._of_modules[one]) for one in self._used)

    def _has_changed(self, held: _Held) -> bool:
        tensor = held.tensor()
        # A write to .data doesn't change the version.
        return tensor is None or held.has_changed() or storage_of(tensor) in self._touched

    def _learn(self, tensor: torch.Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor and storage_of(tensor) not in self._written


_CHANCES: Final = ("p", "dropout_p", "dropout")
"""Names of drop probability arguments."""


def draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; not if its drop probability is 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    chances = (
        args[number] if number < len(args) else kwargs.get(one.name, one.default_value)
        for number, one in enumerate(func._schema.arguments)
        if one.name in _CHANCES
    )
    return bool(next(chances, None) != 0)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    return [
        args[number] if number < len(args) else kwargs.get(one.name)
        for number, one in enumerate(func._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


def tensors_in_arguments(values: Any) -> list[torch.Tensor]:
    """List the tensors among values, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
