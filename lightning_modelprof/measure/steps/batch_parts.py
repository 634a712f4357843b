"""A batch's parts and its tensors' shapes, read without running user code.

A property, a ``__getitem__`` or a ``__torch_function__`` may draw a random number, count its calls or be
slow. So types are compared by ``type(part)``, and everything is read from where Python, torch and NumPy store
it.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from types import MemberDescriptorType
from typing import Any, Final

import numpy as np
import torch

from lightning_modelprof.measure.stored import (
    class_attribute,
    derives,
    mro_of,
    namespace_of,
    undisturbed,
    variables_of,
)

Shape = tuple[int, ...]

_BASE: Any = torch._C.TensorBase
_ARRAY: Any = np.ndarray

tensor_shape: Final[Callable[[Any], torch.Size]] = _BASE.shape.__get__
"""Shape of a tensor that isn't nested; call within ``undisturbed``."""

is_nested: Final[Callable[[Any], bool]] = _BASE.is_nested.__get__
"""Whether a tensor has no shape; call within ``undisturbed``."""

LEAVES: Final = (str, bytes, bytearray, int, float, complex, type(None), type, torch.nn.Module)
"""Types that aren't searched for tensors."""


def is_leaf(part: Any) -> bool:
    return issubclass(type(part), LEAVES)


def is_tensor(part: Any) -> bool:
    return issubclass(type(part), torch.Tensor)


def is_list(part: Any) -> bool:
    """Whether it's a list, or a tuple without named fields."""
    kind = type(part)
    return kind is list or kind is tuple or (issubclass(kind, (list, tuple)) and not _is_named(kind))


def shape_of(part: Any) -> Shape | None:
    """Return the shape of a tensor or an array.

    For a nested tensor, its samples and elements; for a sparse one, also its number of values. ``None`` for
    anything else, and for a tensor of a class that may compute its shape.
    """
    kind = type(part)
    if issubclass(kind, np.ndarray):
        return tuple(_ARRAY.shape.__get__(part))
    if kind is not torch.Tensor and (not issubclass(kind, torch.Tensor) or _dispatches(kind)):
        return None
    with undisturbed():
        if kind is not torch.Tensor and "_ragged_idx" in (inner := variables_of(part)):
            return (tensor_shape(inner["_offsets"])[0] - 1, _BASE.numel(inner["_values"]))
        if is_nested(part):
            return (_BASE.size(part, 0), _BASE.numel(part))
        shape = tuple(tensor_shape(part))
        return shape if _BASE.layout.__get__(part) is torch.strided else (*shape, _num_values(part))


def is_dense(part: Any) -> bool:
    """Whether the tensor's shape determines its size."""
    if type(part) is not torch.Tensor and "_ragged_idx" in variables_of(part):
        return False
    with undisturbed():
        return not is_nested(part) and _BASE.layout.__get__(part) is torch.strided


def dtype_of(part: Any) -> Any:
    """Return the element type of a tensor or an array; ``None`` for anything else."""
    if issubclass(type(part), np.ndarray):
        return _ARRAY.dtype.__get__(part)
    if not is_tensor(part):
        return None
    with undisturbed():
        return _BASE.dtype.__get__(part)


def elements_of(part: Any) -> Iterator[Any]:
    return (list if issubclass(type(part), list) else tuple).__iter__(part)


def length_of(part: Any) -> int:
    return (list if issubclass(type(part), list) else tuple).__len__(part)


def element_of(part: Any, place: int) -> Any:
    return (list if issubclass(type(part), list) else tuple).__getitem__(part, place)


def fields_of(part: Any) -> Iterable[tuple[Any, Any]]:
    """Return the named parts of a mapping, dataclass, named tuple or other object, with their keys or names.

    A mapping that keeps its items neither in a ``dict`` nor in its variables has none.
    """
    kind = type(part)
    if issubclass(kind, dict):
        return dict.items(part)
    if issubclass(kind, (list, tuple)):
        names = class_attribute(kind, "_fields")
        return zip(names, elements_of(part), strict=False) if type(names) is tuple else ()
    if issubclass(kind, (*LEAVES, torch.Tensor, np.ndarray)):
        return ()
    variables = variables_of(part)
    if derives(kind, UserDict):
        data: Any = variables.get("data")
        return dict.items(data) if issubclass(type(data), dict) else ()
    found = [
        *_in_slots(part),
        *((name, value) for name, value in dict.items(variables) if type(name) is str),
    ]
    names = class_attribute(kind, "__dataclass_fields__")
    return [one for one in found if one[0] in names] if type(names) is dict else found


def _in_slots(part: Any) -> Iterator[tuple[str, Any]]:
    for kind in mro_of(type(part)):
        namespace = namespace_of(kind)
        names = namespace.get("__slots__", ())
        for name in (names,) if type(names) is str else names if type(names) in (tuple, list, dict) else ():
            slot = namespace.get(name) if type(name) is str else None
            if type(slot) is MemberDescriptorType:
                try:
                    yield name, slot.__get__(part)
                except AttributeError:  # empty
                    continue


def _is_named(kind: type) -> bool:
    return type(class_attribute(kind, "_fields")) is tuple


def _dispatches(kind: type) -> bool:
    """Whether a class that isn't torch's has ``__torch_dispatch__``, where it may compute the shape."""
    for one in mro_of(kind):
        namespace = namespace_of(one)
        if "__torch_dispatch__" in namespace:
            return str(namespace.get("__module__")).partition(".")[0] != "torch"
    return False


def _num_values(tensor: Any) -> int:
    with torch._C._DisableTorchDispatch():  # hides it from the user's modes
        return int(_BASE._nnz(tensor))
