"""Reads the user's objects and models as Python and torch store them, without running their code.

A property, a ``__getattr__`` or a metaclass's ``__hash__`` may draw a random number, count its calls or be
slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, TypeGuard, TypeVar

import torch
from torch import nn

_T = TypeVar("_T")

_KIND: Any = type.__dict__

mro_of: Final[Callable[[type], tuple[type, ...]]] = _KIND["__mro__"].__get__
"""A class and its bases, whatever its metaclass defines; the next three work alike."""

namespace_of: Final[Callable[[type], Mapping[str, Any]]] = _KIND["__dict__"].__get__
class_name: Final[Callable[[type], str]] = _KIND["__name__"].__get__
qualified_name: Final[Callable[[type], str]] = _KIND["__qualname__"].__get__

undisturbed: Final = torch._C.DisableTorchFunction
"""Context in which torch calls no user subclass or mode."""

_STORED: Final = (GetSetDescriptorType, MemberDescriptorType)


def derives(kind: type, base: type) -> bool:
    """Like ``issubclass`` without virtual bases: an abstract class would hash the user's."""
    return any(one is base for one in mro_of(kind))


def is_a(part: Any, kind: type[_T]) -> TypeGuard[_T]:
    """Like ``isinstance``, without reading the object's ``__class__``."""
    return issubclass(type(part), kind)


def variables_of(part: Any) -> dict[str, Any]:
    """Return an object's own variables; empty if its class has another ``__dict__``."""
    for kind in mro_of(type(part)):
        found = namespace_of(kind).get("__dict__")
        if found is not None:
            variables = found.__get__(part) if type(found) in _STORED else None
            return variables if type(variables) is dict else {}
    return {}


def class_attribute(kind: type, name: str) -> Any:
    """Return what a class or its bases store under a name; ``None`` without."""
    for one in mro_of(kind):
        namespace = namespace_of(one)
        if name in namespace:
            return namespace[name]
    return None


def is_trained(tensor: torch.Tensor) -> bool:
    """Like ``tensor.requires_grad``."""
    with undisturbed():
        return bool(torch._C.TensorBase.requires_grad.__get__(tensor))  # type: ignore[attr-defined]


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        children = [(f"{prefix}{name}", child) for name, child in named_children(module)]
        waiting += reversed(children)


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    return (module for _, module in named_modules(root))


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for name, child in _registered(module, "_modules"):
        if id(child) not in seen:
            seen.add(id(child))
            yield name, child


def named_parameters(root: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    return _named_members(root, "_parameters", remove_duplicate=remove_duplicate)


def parameters_of(root: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for _, parameter in named_parameters(root))


def named_buffers(root: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    return _named_members(root, "_buffers", remove_duplicate=remove_duplicate)


def buffers_of(root: nn.Module) -> Iterator[torch.Tensor]:
    return (buffer for _, buffer in named_buffers(root))


def _named_members(root: nn.Module, where: str, *, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in _paths(root) if not remove_duplicate else named_modules(root):
        prefix = f"{path}." if path else ""
        for name, member in _registered(module, where):
            if not (remove_duplicate and id(member) in seen):
                seen.add(id(member))
                yield f"{prefix}{name}", member


def _paths(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module once for each path that leads to it."""
    yield path, root
    for name, child in _registered(root, "_modules"):
        yield from _paths(child, f"{path}.{name}" if path else name)


def _registered(module: nn.Module, where: str) -> Iterator[tuple[str, Any]]:
    stored = variables_of(module).get(where, {})
    # A script module's are one of torch's own objects.
    items = dict.items(stored) if issubclass(type(stored), dict) else stored.items()
    return (one for one in list(items) if one[1] is not None)
