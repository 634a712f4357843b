"""Batch sizes by the shapes of the tensors, without reading values or waiting."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from itertools import islice
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_modelprof.measure.steps.batch_parts import (
    element_of,
    elements_of,
    fields_of,
    is_dense,
    is_leaf,
    is_tensor,
    length_of,
    shape_of,
    tensor_shape,
)
from lightning_modelprof.measure.stored import class_attribute, mro_of, undisturbed
from lightning_modelprof.run.batches import BatchSizes, Shapes
from lightning_modelprof.run.steps import NOT_CLEAN

UNKNOWN: Final = 0
"""Size of all remaining batches."""

MAX_EXACT: Final = 1_024
"""Most exactly distinguished sizes; beyond them, varying dimensions are rounded."""

MAX_SIZES: Final = 4_096

_FEW: Final = 8
"""A list of more tensors than this holds unstacked samples, whose shapes are summed."""

_MOST_LOOKED_AT: Final = 64
"""Most elements inspected in a list of objects, dictionaries or lists; in a longer one this many, evenly
spread, stand for all. Lists of only tensors are read whole, as shapes are cheap."""

_MOST_PARTS: Final = 1_024
_MOST_DRY: Final = 32
"""Consecutive containers without a tensor after which part of a batch isn't searched further."""
_MOST_IN_OBJECT: Final = 64
_AS_CONTAINERS: Final = 16
"""Count of containers that an object of another class stands for, if it has no tensors."""
_MAX_DEPTH: Final = 8
_SIGNIFICANT_BITS: Final = 5

_TENSOR: Final = torch.Tensor
_FOREIGN: Final = frozenset(("torch", "lightning", "pytorch_lightning"))
"""Packages of a LightningModule's bases that construct tensors correctly."""


class BatchShapes:
    """Gives a loop's batches their size: a small number for each set of shapes.

    A step is reported only if its size differs from the previous one, so that a loop of equal batches pays
    for one comparison.

    Attributes:
        last: size of the newest batch; ``-1`` reports the next one whatever its size.
        odd_class: a tensor class in the batches that torch's constructor creates; ``None`` without one.
    """

    def __init__(self) -> None:
        self.last = -1
        self.odd_class: type | None = None
        self._known: dict[Hashable, int] = {}  # a batch's quick key → its size
        self._shapes: dict[Shapes, int] = {}
        self._by_size: list[Shapes] = []  # the same, in order
        self._num_exact = 0
        self._varying: dict[tuple[int, ...], NDArray[np.bool_]] = {}  # ranks → which dimensions vary
        self._is_plain = True
        self._changes: list[tuple[int, int]] = []  # (step, its size), where it differs from the previous step
        self._current = UNKNOWN
        self._clean_steps = np.zeros(MAX_SIZES + 1, np.int64)

    def __call__(self, batch: Any) -> int:
        """Return a batch's size; never raises."""
        try:
            if self._is_plain:
                with undisturbed():
                    kind = type(batch)
                    if (kind is list or kind is tuple) and len(batch) <= _FEW:
                        key: Hashable = tuple(
                            [tensor_shape(p) if type(p) is _TENSOR else _key(p) for p in batch]
                        )
                    else:
                        key = tensor_shape(batch) if kind is _TENSOR else _key(batch)
            else:
                key = shapes_of(batch)
            size = self._known.get(key)
            return self._add(batch, key) if size is None else size
        except Exception:  # arbitrary tensors and objects; the batch's size is unknown
            return self._add_odd(batch)

    def __len__(self) -> int:
        return len(self._shapes)

    def shapes(self, size: int) -> Shapes | None:
        """Return the shapes of a size; ``None`` if unknown."""
        return self._by_size[size - 1] if 0 < size <= len(self._by_size) else None

    def begin(self, step: int, size: int) -> None:
        self.last = size
        self._changes.append((step, size))

    def end(self, first_step: int, tags: NDArray[np.int64]) -> None:
        """Note ended steps; each is reported once, in order."""
        sizes = np.full(len(tags), self._current, np.int64)
        behind = first_step + len(tags)
        for step, size in self._changes:
            if step < behind:
                sizes[max(0, step - first_step) :] = size
        self._changes = [change for change in self._changes if change[0] >= behind]
        self._current = int(sizes[-1])
        clean = sizes[(tags & int(NOT_CLEAN)) == 0]
        self._clean_steps += np.bincount(clean, minlength=MAX_SIZES + 1)

    def clean_steps(self) -> NDArray[np.int64]:
        """Return the number of clean steps by size so far; the first are those of unknown size."""
        steps: NDArray[np.int64] = self._clean_steps[: len(self._shapes) + 1].copy()
        return steps

    def record(self, seen: NDArray[np.int64] | None = None) -> BatchSizes:
        """Return the record so far, or since ``clean_steps()`` returned ``seen``."""
        steps = self.clean_steps()
        if seen is not None:
            steps[: len(seen)] -= seen
        other, *clean_steps = steps.tolist()
        return BatchSizes(
            shapes=tuple(self._shapes),
            clean_steps=tuple(clean_steps),
            num_rounded=len(self._shapes) - (self._num_exact or len(self._shapes)),
            other_steps=other,
        )

    def _add(self, batch: Any, key: Hashable) -> int:
        exact = shapes_of(batch)
        self._note_odd_class(batch)
        if self._is_plain and _has_sparse(batch):
            self._is_plain = False
            key = exact
        if len(self._shapes) >= MAX_EXACT and exact not in self._shapes:
            return self._number_of(self._rounded(exact))
        size = self._number_of(exact)
        if len(self._known) < MAX_SIZES:
            self._known[key] = size
        return size

    def _add_odd(self, batch: Any) -> int:
        self._is_plain = False
        try:
            self._note_odd_class(batch)
            return self._number_of(shapes_of(batch))
        except Exception:  # as above
            return UNKNOWN

    def _note_odd_class(self, batch: Any) -> None:
        if self.odd_class is None:
            self.odd_class = _odd_class(batch)

    def _number_of(self, shapes: Shapes) -> int:
        size = self._shapes.get(shapes) if shapes else UNKNOWN
        if size is None:
            if len(self._shapes) >= MAX_SIZES:
                return UNKNOWN
            size = self._shapes[shapes] = len(self._shapes) + 1
            self._by_size.append(shapes)
        return size

    def _rounded(self, shapes: Shapes) -> Shapes:
        self._num_exact = self._num_exact or len(self._shapes)
        ranks = tuple(map(len, shapes))
        varying = self._varying.get(ranks)
        if varying is None:
            alike = [_flat(one) for one in self._shapes if tuple(map(len, one)) == ranks]
            varying = np.ptp(np.array(alike), axis=0) > 0 if alike else np.ones(sum(ranks), bool)
            self._varying[ranks] = varying
        rounded = iter(
            [_round(value) if varies else value for value, varies in zip(_flat(shapes), varying, strict=True)]
        )
        return tuple(tuple(islice(rounded, rank)) for rank in ranks)


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of all tensors and arrays in a batch; empty without any."""
    return tuple(_walk(batch, 0, [_MOST_PARTS]))


def _walk(part: Any, depth: int, left: list[int]) -> Iterable[tuple[int, ...]]:
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        return
    shape = shape_of(part)
    if shape is not None:
        yield shape
        return
    children = _children(part)
    if depth == 0 and 1 < len(children) <= _FEW:  # a field of nested lists must not use up the others' share
        inner = [list(_walk(one, 1, [_MOST_PARTS // len(children)])) for one in children]
    else:
        inner = [list(_walk(one, depth + 1, left)) for one in children]
    is_long = len(inner) > _FEW and _is_sequence(part)
    if is_long or _is_list_of_fields(part):
        yield from _summed(inner, length_of(part))
        return
    for shapes in inner:
        yield from shapes


def _summed(inner: list[list[tuple[int, ...]]], length: int) -> Iterable[tuple[int, ...]]:
    """Sum samples that weren't stacked, yielding one entry per place in a sample.

    Args:
        inner: shapes of each sample, or of some that stand for all.
    """
    share = Fraction(length, max(len(inner), 1))
    for place in range(max(map(len, inner), default=0)):
        shapes = [one[place] for one in inner if len(one) > place]
        rank = max(map(len, shapes))
        padded = [(*shape, *(1,) * (rank - len(shape))) for shape in shapes]
        elements = sum(int(np.prod(shape, dtype=object)) for shape in shapes)
        yield (round(len(shapes) * share), round(elements * share), *map(max, zip(*padded, strict=True)))


def _is_sequence(part: Any) -> bool:
    return issubclass(type(part), (list, tuple))


def _is_list_of_fields(part: Any) -> bool:
    if not _is_sequence(part) or not length_of(part):
        return False
    return all(issubclass(type(one), dict) for one in _some_of(part))


def _some_of(part: Any) -> Sequence[Any]:
    elements = list(elements_of(part))
    if len(elements) <= _MOST_LOOKED_AT or all(type(one) is _TENSOR for one in elements):
        return elements
    last = len(elements) - 1
    return [elements[place * last // (_MOST_LOOKED_AT - 1)] for place in range(_MOST_LOOKED_AT)]


def _children(part: Any) -> Sequence[Any]:
    if is_tensor(part):
        return ()
    if _is_sequence(part):
        return () if _is_of_numbers(part) else _some_of(part)[:_MOST_PARTS]
    return [value for _, value in islice(fields_of(part), _MOST_PARTS)]


def _is_of_numbers(part: Any) -> bool:
    """Whether it's a list of numbers or text: token ids that weren't stacked are many in every batch."""
    return length_of(part) > _FEW and is_leaf(element_of(part, 0)) and is_leaf(element_of(part, -1))


def _key(part: Any, dry: list[int] | None = None) -> Hashable:
    """Return a key that differs between batch sizes, quickly for the usual containers.

    Args:
        dry: number of further containers that are searched for a tensor: Python lists of events and the like
            are many and hold none. ``None`` for the batch itself, whose parts each get their own.
    """
    if dry is not None:
        if dry[0] <= 0:
            return None
        dry[0] -= 1
    kind = type(part)
    is_dict = kind is dict
    if is_dict or kind is list or kind is tuple:
        if not is_dict and _is_of_numbers(part):
            return None
        some = part.values() if is_dict else _some_of(part)
        shapes: list[Hashable] = []
        for one in some:
            if type(one) is _TENSOR:
                shapes.append(tensor_shape(one))
                if dry is not None:
                    dry[0] = _MOST_DRY
            else:
                shapes.append(None if is_leaf(one) else _key(one, dry or [_MOST_DRY]))
        return tuple(shapes) if len(some) == len(part) else (len(part), *shapes)
    if is_leaf(part):
        return None
    found = tuple(_walk(part, 1, [_MOST_PARTS if dry is None else _MOST_IN_OBJECT]))
    if dry is not None:
        dry[0] = _MOST_DRY if found else dry[0] - _AS_CONTAINERS
    return found


def _has_sparse(part: Any, depth: int = 0) -> bool:
    if is_tensor(part):
        return not is_dense(part)
    return depth <= _MAX_DEPTH and any(_has_sparse(one, depth + 1) for one in _children(part))


def _odd_class(part: Any, depth: int = 0) -> type | None:
    """Return the class of the first tensor whose own class torch's constructor creates."""
    if is_tensor(part):
        return type(part) if _calls_torchs(type(part)) else None
    found = (_odd_class(one, depth + 1) for one in _children(part)) if depth <= _MAX_DEPTH else ()
    return next((one for one in found if one is not None), None)


def own_tensors(owner: type) -> type | None:
    """Find such a class in a package of the module's class or its bases."""
    packages = {_package(kind) for kind in mro_of(owner)} - _FOREIGN
    waiting: list[type] = [_TENSOR]
    while waiting:
        classes: list[type] = type.__subclasses__(waiting.pop())
        waiting += classes
        for kind in classes:
            if _package(kind) in packages and _calls_torchs(kind):
                return kind
    return None


def _package(kind: type) -> str:
    return str(class_attribute(kind, "__module__")).partition(".")[0]


def _calls_torchs(kind: type) -> bool:
    """Whether its ``__new__`` calls another, rather than ``_make_subclass`` or ``as_subclass`` as usual."""
    made_by = class_attribute(kind, "__new__")
    function = made_by.__func__ if type(made_by) is staticmethod else made_by
    return type(function) is FunctionType and "__new__" in function.__code__.co_names


def _flat(shapes: Shapes) -> list[int]:
    return [value for shape in shapes for value in shape]


def _round(value: int) -> int:
    step = 1 << max(0, value.bit_length() - _SIGNIFICANT_BITS)
    return (value + step // 2) // step * step
