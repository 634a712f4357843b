"""Finds attributes of the user's objects that grow from step to step: lists, dictionaries, tensors."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_modelprof.measure.steps.batch_parts import is_dense, is_tensor, shape_of
from lightning_modelprof.measure.stored import (
    class_name,
    is_a,
    is_trained,
    modules_of,
    undisturbed,
    variables_of,
)
from lightning_modelprof.measure.user_code import absolute_file
from lightning_modelprof.place import Place
from lightning_modelprof.run.memory import GrowingAttribute

_NEVER: Final = 2**62
_MOST_LOOKS: Final = 24
_MOST_OBJECTS: Final = 200
_LEAST_LOOKS: Final = 4
"""Consecutive looks in which a thing must have grown."""
_SPACING: Final = 1.5
"""Factor between the steps of two looks, so that long loops have as few looks as short ones."""
_MOST_FOUND: Final = 4
_ADDS: Final = ("append", "extend", "add", "update", "setdefault", "insert", "appendleft")
_CONTAINERS: Final[tuple[Any, ...]] = (list, tuple, set, deque)
_OF_ALL_MODULES: Final = frozenset(vars(nn.Module()))


class _Look(NamedTuple):
    step: int
    size: int


class GrowthWatch:
    """Checks each attribute's size at a few steps; reads only lengths and sizes, and keeps nothing.

    Args:
        objects: returns the objects, such as the model and the callbacks; a model's modules are included.

    Attributes:
        next_step: next step at whose start to look; a large number after the last look.
    """

    def __init__(self, objects: Callable[[], Iterable[Any]]) -> None:
        self._objects = objects
        self._looks: dict[tuple[int, str], list[_Look]] = {}
        self._owners: dict[int, type] = {}
        self._element_bytes: dict[tuple[int, str], int | None] = {}
        self.next_step = 1
        self._left = _MOST_LOOKS

    def look(self, step: int) -> None:
        if step < self.next_step:
            return
        self._left -= 1
        self.next_step = max(step + 1, int(step * _SPACING)) if self._left else _NEVER
        try:
            for one in self._all():
                for name, value in list(variables_of(one).items()):
                    size = None if name in _OF_ALL_MODULES else _size(value)
                    if size is not None:
                        self._owners[id(one)] = type(one)
                        self._looks.setdefault((id(one), name), []).append(_Look(step, size))
                        self._element_bytes[id(one), name] = _element_bytes(value)
        except Exception:  # arbitrary objects
            self.next_step = _NEVER

    def _all(self) -> list[Any]:
        found: dict[int, Any] = {}
        for one in self._objects():
            for part in modules_of(one) if is_a(one, nn.Module) else (one,):
                found[id(part)] = part
                if len(found) >= _MOST_OBJECTS:
                    break
        return list(found.values())

    def result(self) -> tuple[GrowingAttribute, ...]:
        """Return what grew by at least one element per step at several consecutive looks, fastest first."""
        found = []
        for (owner, name), looks in self._looks.items():
            run = _longest_growth(looks)
            steps, more = run[-1].step - run[0].step, run[-1].size - run[0].size
            if len(run) >= _LEAST_LOOKS and steps and more >= steps:
                kind = self._owners[owner]
                found.append(
                    GrowingAttribute(
                        owner=class_name(kind),
                        name=name,
                        first_step=run[0].step,
                        last_step=run[-1].step,
                        first_size=run[0].size,
                        last_size=run[-1].size,
                        lines=_lines_that_add_to(kind, name),
                        element_bytes=self._element_bytes[owner, name],
                    )
                )
        found.sort(key=lambda one: (one.first_size - one.last_size) / (one.last_step - one.first_step))
        return tuple(found[:_MOST_FOUND])


def _size(value: Any) -> int | None:
    """Count the elements; ``None`` for objects without."""
    shape = shape_of(value)
    if shape is not None:
        return shape[-1] if is_tensor(value) and not is_dense(value) else math.prod(shape)
    if issubclass(type(value), dict):
        lengths = map(_length, list(dict.values(value)))
        return sum(1 if length is None else length for length in lengths)
    return None if issubclass(type(value), tuple) else _length(value)


_PLAIN: Final = (int, float, bool, complex, str, bytes, type(None))
_POINTER: Final = 8


def _element_bytes(value: Any) -> int | None:
    """Return the last element's bytes; ``None`` if it may hold more than is visible."""
    kind = type(value)
    if any(kind is one for one in (torch.Tensor, nn.Parameter)):
        with undisturbed():
            return None if is_trained(value) else int(value.element_size())
    if kind is np.ndarray:
        return int(value.itemsize) if value.dtype != object else None
    if issubclass(kind, dict):
        last = next(reversed(dict.values(value)), None)  # the other elements stay unread
        return _taken([last]) if _length(last) is None else _element_bytes(last)
    if issubclass(kind, set):
        return _taken([next(set.__iter__(value), None)])
    if issubclass(kind, list):
        return _taken(list.__getitem__(value, slice(-1, None)))
    return _taken([deque.__getitem__(value, -1)]) if issubclass(kind, deque) and value else None


def _taken(elements: list[Any]) -> int | None:
    """Return the bytes of the last element and the pointer to it."""
    last: Any = elements[-1] if elements else None
    kind: type = type(last)
    if any(kind is one for one in _PLAIN):
        return _POINTER + sys.getsizeof(last)
    if any(kind is one for one in (torch.Tensor, nn.Parameter)) and is_dense(last):
        with undisturbed():
            return None if is_trained(last) else _POINTER + int(last.untyped_storage().nbytes())
    return _POINTER + int(last.nbytes) if kind is np.ndarray and last.base is None else None


def _length(value: Any) -> int | None:
    """Return the length of one of Python's own containers or a subclass, without running user code."""
    kind = next((one for one in _CONTAINERS if issubclass(type(value), one)), None)
    return None if kind is None else int(kind.__len__(value))


def _longest_growth(looks: list[_Look]) -> list[_Look]:
    best = run = looks[:1]
    for before, one in pairwise(looks):
        run = [*run, one] if one.size > before.size else [one]
        best = max(best, run, key=len)
    return best


def _lines_that_add_to(kind: type, name: str) -> tuple[Place, ...]:
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = absolute_file(inspect.getfile(kind))
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        return ()
    found = []
    for method in ast.walk(tree):
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(method):
                if _adds_to(node, name):
                    line = getattr(node, "lineno", 1) + first - 1
                    found.append(Place(function=f"{kind.__name__}.{method.name}", file=file, line=line))
    return tuple(dict.fromkeys(found))[:2]


def _adds_to(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS:
        return _names(node.func.value, name)
    if isinstance(node, ast.AugAssign):
        return _names(node.target, name)
    if isinstance(node, ast.Assign):
        to_itself = any(_is_self(target, name) for target in node.targets)
        to_part = any(isinstance(one, ast.Subscript) and _names(one, name) for one in node.targets)
        return to_part or (to_itself and _names(node.value, name))
    return False


def _names(node: ast.AST, name: str) -> bool:
    return any(_is_self(one, name) for one in ast.walk(node))


def _is_self(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Name)
