"""Tells which operators make one number of a trained parameter, as a penalty written by hand does.

An operator is one of these if it is given nothing but a parameter, or what was made of parameters element by
element, and its result has no dimension. What takes a list of parameters at a time is none.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from lightning_modelprof.inspect.lines.constants import tensors_in_arguments
from lightning_modelprof.measure.stored import is_trained, parameters_of, undisturbed


class ReductionWatch:
    """Follows trained parameters from operator to operator, weakly."""

    def __init__(self, root: nn.Module | None) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        with undisturbed():
            for one in () if root is None else parameters_of(root):
                if is_trained(one):
                    self._known[id(one)] = weakref.ref(one)

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, *, is_view: bool) -> bool:
        """An operator ran: whether it is such a reduction."""
        given = [one for one in tensors_in_arguments((*args, *kwargs.values())) if one.dim()]
        if not given or not all(map(self._knows, given)) or not isinstance(result, torch.Tensor):
            return False
        if not result.dim():
            return True
        if is_view or torch.Tag.pointwise in func.tags:
            self._known[id(result)] = weakref.ref(result)
        return False

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor
