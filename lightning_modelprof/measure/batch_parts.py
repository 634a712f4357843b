"""Takes a batch apart: which of its parts tell how many samples it holds, and which numbers each may mean.

Only types, lengths and shapes are looked at, never values, and of a large batch only the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from operator import index
from typing import Any, Final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

MAX_COUNT: Final = 2**63 - 1
"""The largest number that a column of counts holds."""

FEW: Final = 4
"""Lists of fewer elements are taken for fields, as the ``[x, y]`` of a DataLoader, if they may be."""
_MAX_DEPTH: Final = 8
_MOST_ELEMENTS: Final = 32
"""Of one list or mapping that are looked at."""
_MOST_PARTS: Final = 1_000
"""Of one batch that are looked at."""
_CHANNELS: Final = (1, 3, 4)
_TEXTS: Final = (str, bytes, type(None))
_PLAIN: Final = (*_TEXTS, int, float, complex)


class Attribute(str):
    """A step of a path that is the name of an attribute, and no key."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to count the samples of a batch.

    Attributes:
        count: what it gives for this batch.
        path: keys, positions and attributes that lead from the batch to where to look.
        is_length: whether the length of the list there counts; otherwise its size (see ``size_of``).
    """

    count: int
    path: tuple[Any, ...]
    is_length: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What tells how many samples there are: a tensor, an object that knows its size, or a list of samples.

    Attributes:
        path: where it is in the batch.
        text: what it is, for messages.
        readings: one, or two of a list: its length, and what all its elements share.
        is_weak: a list of numbers or text. It may be one for each sample; it may as well be a size or names.
        is_torn: the elements of this list share no size.
        is_image: every tensor in this list may be an image: three dimensions, the first of 1, 3 or 4.
        is_vector: a tensor of one dimension.
        inner: the parts of the elements of this list.
    """

    path: tuple[Any, ...]
    text: str
    readings: tuple[Reading, ...]
    is_weak: bool = False
    is_torn: bool = False
    is_image: bool = False
    is_vector: bool = False
    inner: tuple[Part, ...] = ()

    @property
    def counts(self) -> frozenset[int]:
        """The numbers of samples that it may mean."""
        return frozenset(reading.count for reading in self.readings)


def parts_of(batch: Any) -> list[Part]:
    """All parts of a batch that tell how many samples it has."""
    return _Search().parts(batch, ())


def size_of(part: Any) -> int | None:
    """Samples in one part by its own account: the first dimension of a tensor, or what an object says itself.

    That is ``num_graphs`` or ``batch_size``, if it is a number, and the sequences of a ``PackedSequence``.
    """
    if isinstance(part, torch.Tensor):
        return part.size(0) if part.dim() else None  # a nested tensor has no shape
    if isinstance(part, np.ndarray):
        return len(part) if part.ndim else None
    if isinstance(part, (*_PLAIN, list)):
        return None
    if isinstance(part, PackedSequence):
        return (
            len(part.sorted_indices) if part.sorted_indices is not None else int(part.batch_sizes.numpy()[0])
        )
    for name in ("num_graphs", "batch_size"):
        try:
            size = getattr(part, name, None)
        except Exception:  # whatever an object of the user's does there
            continue
        size = size[0] if isinstance(size, torch.Size) and size else size
        if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_COUNT:
            return index(size)
    return None


def name_of(path: tuple[Any, ...]) -> str:
    """A place in a batch as Python writes it."""
    return "batch" + "".join(f".{key}" if isinstance(key, Attribute) else f"[{key!r:.40}]" for key in path)


class _Search:
    """One walk through one batch."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def parts(self, part: Any, path: tuple[Any, ...]) -> list[Part]:
        if isinstance(part, _PLAIN):
            return []
        self._left -= 1
        if self._left < 0 or len(path) > _MAX_DEPTH:
            return []
        size = size_of(part)
        if size is not None:
            return [_sized(part, size, path)]
        return self._of_list(part, path) if _is_list(part) else self._inner(_children(part), path)

    def _inner(self, children: Iterable[tuple[Any, Any]], path: tuple[Any, ...]) -> list[Part]:
        """Of each child; none takes the share of those that follow, however deep it is."""
        found: list[Part] = []
        there = list(children)
        for behind, (key, child) in zip(range(len(there) - 1, -1, -1), there, strict=True):
            kept = self._left * behind // (behind + 1)
            self._left -= kept
            found += self.parts(child, (*path, key))
            self._left = max(0, self._left) + kept
        return found

    def _of_list(self, part: Any, path: tuple[Any, ...]) -> list[Part]:
        elements = list(islice(part, _MOST_ELEMENTS))
        length = Reading(len(part), path, is_length=True)
        text = f"a list of {len(part):,}"
        inner = self._inner(enumerate(elements), path)
        if not _are_alike(elements):
            return inner
        if not inner:
            return [Part(path, text, (length,), is_weak=True)]
        tensors = [one for one in inner if not one.is_weak] or inner
        shared = frozenset.intersection(*(one.counts for one in tensors))
        is_torn = not shared
        if not path and not is_torn and len(inner) < len(elements):
            return inner  # an optional field is not there
        if any(map(holds_number, elements)):
            shared, is_torn = frozenset(), False  # stacking would have made a tensor of it: these are samples
        elif _is_list(next(one for one in elements if one is not None)):
            has_lists = any(reading.is_length for one in inner for reading in one.readings)
            has_lists = has_lists and not (path and all(one.is_weak for one in inner))  # as token ids
            if (has_lists and not is_torn) or (len(part) < FEW and not (is_torn and path)):
                return inner  # fields, such as images and targets, or batches of several loaders
        readings = (length, *(one for one in tensors[0].readings if one.count in shared))
        return [
            Part(
                path,
                text,
                readings,
                is_weak=all(one.is_weak for one in inner),
                is_torn=is_torn,
                is_image=all(one.is_image for one in tensors),
                inner=tuple(inner),
            )
        ]


def _sized(part: Any, size: int, path: tuple[Any, ...]) -> Part:
    shape = () if getattr(part, "is_nested", False) else tuple(getattr(part, "shape", ()))
    return Part(
        path,
        str(shape) if shape else f"a {type(part).__name__}",
        (Reading(size, path, is_length=False),),
        is_image=len(shape) == 3 and size in _CHANNELS,
        is_vector=len(shape) == 1,
    )


def _children(part: Any) -> Iterable[tuple[Any, Any]]:
    """The named parts of a mapping, a dataclass, an attrs class, a named tuple or another object."""
    if isinstance(part, Mapping):
        return list(islice(part.items(), _MOST_ELEMENTS))
    if isinstance(part, (torch.nn.Module, type)):
        return ()
    names: Iterable[str]
    if is_dataclass(part):
        names = [one.name for one in fields(part)]
    else:
        attrs = getattr(type(part), "__attrs_attrs__", None)
        names = [one.name for one in attrs] if attrs else getattr(part, "_fields", None) or _variables(part)
    missing = object()
    found = ((Attribute(name), getattr(part, name, missing)) for name in islice(names, _MOST_ELEMENTS))
    return [(key, child) for key, child in found if child is not missing]


def _variables(part: Any) -> list[str]:
    return [name for name in getattr(part, "__dict__", {}) if isinstance(name, str)]


def _is_list(part: Any) -> bool:
    return isinstance(part, Sequence) and not isinstance(part, _PLAIN) and not hasattr(part, "_fields")


def _is_scalar(part: Any) -> bool:
    return isinstance(part, (*_PLAIN, np.generic)) or (isinstance(part, torch.Tensor) and not part.dim())


def holds_number(part: Any) -> bool:
    """Whether there is a number right in a mapping, an object, or a list that has more than numbers."""
    if _is_scalar(part) or size_of(part) is not None:
        return False
    children = list(islice(part, _MOST_ELEMENTS)) if _is_list(part) else [one for _, one in _children(part)]
    numbers = [_is_scalar(one) and not isinstance(one, _TEXTS) for one in children]
    return any(numbers) and not all(numbers)


def _are_alike(elements: list[Any]) -> bool:
    """Whether a list may be one of samples that were not stacked; ``None`` may stand for a missing one."""
    there = [element for element in elements if element is not None]
    if not there or (len(there) == 1 and len(elements) > 1):
        return False
    first = there[0]
    if any(map(_is_scalar, there)):
        return all(map(_is_scalar, there))
    if isinstance(first, (torch.Tensor, np.ndarray)):
        # Not the classes: a wrapper of a tensor may stand beside a plain one.
        return len({(getattr(one, "ndim", None), getattr(one, "dtype", None)) for one in there}) == 1
    if len({type(one) for one in there}) > 1:
        return False
    names = [{key for key, _ in _children(one)} for one in there]
    return _is_list(first) or all(not own or own & names[0] for own in names)
