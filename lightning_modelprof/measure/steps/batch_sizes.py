"""Samples per batch: the first batch shows where to read the number in later ones."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from itertools import islice
from operator import index
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader

from lightning_modelprof.measure.steps.batch_parts import (
    LEAVES,
    dtype_of,
    elements_of,
    fields_of,
    is_list,
    length_of,
    shape_of,
)
from lightning_modelprof.measure.stored import class_attribute, derives
from lightning_modelprof.run.steps import NOT_MEASURED

MAX_COUNT: Final = 2**63 - 1
"""The largest number that fits in a column of counts."""

NOT_COUNTED: Final = "the number of samples per batch couldn't be counted (pass samples_fn=...)"
SOME_DISAGREE: Final = (
    "steps whose batches have parts of different lengths aren't counted (to count them, pass samples_fn=...)"
)

_FEW: Final = 4
"""A shorter list of same-kind tensors holds fields if possible, such as a DataLoader's ``[x, y]``."""

_MAX_DEPTH: Final = 4
_MOST_CHILDREN: Final = 16
"""Most inspected elements per list or mapping."""

_CHANNELS: Final = frozenset((1, 3, 4))


def check_count(count: Any) -> int:
    """Return the result of ``samples_fn`` as a plain number.

    Raises:
        TypeError: when it isn't an integer; a tensor isn't accepted, as it may still be on the device.
        ValueError: when it is negative, or doesn't fit into 64 bits.
    """
    if isinstance(count, torch.Tensor):
        raise TypeError(
            "expected an int, got a torch.Tensor, which would make every step wait for the device. Count by"
            " shape, such as batch.shape[0] or batch.numel()"
        )
    number = index(count)
    if not 0 <= number <= MAX_COUNT:
        raise ValueError(f"expected a sample count from 0 to 2**63 - 1, got {number}")
    return number


def make_counter(samples_fn: Callable[[Any], Any] | None) -> Callable[[Any], int]:
    """Return the function that counts a batch: the user's with checked results, or ours."""
    if samples_fn is None:
        return SampleCounter()
    return lambda batch: check_count(samples_fn(batch))


class NothingCounted:
    """Counts nothing more; ``note`` gives the reason."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __call__(self, _: Any) -> int:
        return NOT_MEASURED


class SampleCounter:
    """Counts samples where the first batch showed them.

    A tensor counts by its first dimension, a list of unstacked samples by its length. All parts of the first
    batch must agree. A later batch is read in full only if it has nothing in that place, or another number.
    By then, parts that agreed by accident, such as eight nodes in a batch of eight graphs, no longer agree.

    Attributes:
        note: why samples aren't counted; ``""`` once they are.
    """

    def __init__(self) -> None:
        self.note = NOT_COUNTED
        self._place: _SizePlace | None = None
        self._last = NOT_MEASURED
        self._refused: type | None = None  # batches of this type have no readable count
        self._may_be_rows = self._is_combined = False

    def __call__(self, batch: Any) -> int:
        """Return the number of samples, ``NOT_MEASURED`` if unknown."""
        if self._place is not None:
            try:
                count = _read(batch, self._place)
            except (LookupError, TypeError):  # another kind of batch
                self._place = None
            else:
                if count != self._last and not self._allows(batch, count):
                    self.note = SOME_DISAGREE
                    return NOT_MEASURED
                self._last = count
                return count
        if type(batch) is self._refused:
            return NOT_MEASURED
        self._place = place = _find(batch, may_be_row=self._may_be_rows, is_combined=self._is_combined)
        if place is None:
            self._refused = type(batch)
            return NOT_MEASURED
        self.note = ""
        self._last = _read(batch, place)
        return self._last

    def _allows(self, batch: Any, count: int) -> bool:
        sizes = _Search(is_combined=self._is_combined).sizes(batch, ())
        return sizes is None or count in sizes

    def look_at_loaders(self, loop: Any) -> None:
        """Learn what a batch alone doesn't show, from the dataloaders of one of Lightning's loops.

        A loader that doesn't make batches (``batch_size=None``) may return single samples. Each of several
        combined loaders supplies one part of the batch.
        """
        combined: Any = getattr(loop, "_combined_loader", None)
        loaders = [] if combined is None else list(combined.flattened)
        self._may_be_rows = bool(loaders) and not any(map(_makes_batches, loaders))
        self._is_combined = len(loaders) > 1 and combined._mode != "sequential"


def _makes_batches(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
    return isinstance(getattr(loader, "batch_size", None), int)


class _SizePlace(NamedTuple):
    """Where to read a number of samples.

    Attributes:
        path: keys, positions and names that lead there from the batch.
        is_length: whether it's a list's length rather than a tensor's first dimension.
        is_sure: whether nothing else is as likely; a short list may hold samples or fields.
    """

    path: tuple[Any, ...]
    is_length: bool
    is_sure: bool


_Sizes: TypeAlias = dict[int, _SizePlace]
"""Possible sample counts of part of a batch; empty if its own parts disagree."""


def _read(batch: Any, place: _SizePlace) -> int:
    part = batch
    for key in place.path:
        kind = type(part)
        part = part[key] if kind is list or kind is tuple or kind is dict else dict(_children(part))[key]
    if place.is_length and is_list(part):
        return length_of(part)
    shape = None if place.is_length else shape_of(part)
    if not shape:
        raise LookupError
    return shape[0]


def _find(batch: Any, *, may_be_row: bool, is_combined: bool) -> _SizePlace | None:
    """Find where to read the number of samples, if all parts of the batch agree on exactly one."""
    search = _Search(is_combined=is_combined)
    sizes = search.sizes(batch, ())
    if sizes is None or len(sizes) > 1:  # lists of numbers and text may help too
        narrowed = _Search(is_combined=is_combined, with_plain=True).sizes(batch, ())
        sizes = narrowed or sizes
    place = _surest(sizes or {}, search.ranks)
    is_label_beside = len(search.ranks) == 1 and _holds_number(batch)
    if place is None or (
        may_be_row and not place.is_length and (set(search.ranks) == {1} or is_label_beside)
    ):
        return None  # a feature vector, or an image with its label
    return place


def _surest(sizes: _Sizes, ranks: list[int]) -> _SizePlace | None:
    by_length = [place for place in sizes.values() if place.is_length]
    by_dimension = {size for size, place in sizes.items() if not place.is_length}
    may_be_images = len(by_length) == len(by_dimension) == 1 and by_dimension <= _CHANNELS and 3 in ranks
    if may_be_images and by_length[0].path:
        return by_length[0]  # fields that are lists of images, and of their targets
    sure = [place for place in sizes.values() if place.is_sure]
    return sure[0] if len(sure) == 1 else None


class _Search:
    """One walk through one batch.

    Args:
        is_combined: whether the batch combines batches of several dataloaders: a list of one tensor is then
            one of these, not a sample.
        with_plain: whether a list of numbers or text has one per sample; it may also be an image's size.

    Attributes:
        ranks: numbers of dimensions of the tensors found.
    """

    def __init__(self, *, is_combined: bool, with_plain: bool = False) -> None:
        self._is_combined, self._with_plain = is_combined, with_plain
        self.ranks: list[int] = []

    def sizes(self, part: Any, path: tuple[Any, ...]) -> _Sizes | None:
        """Return the possible sample counts of a part; ``None`` if it shows none."""
        shape = shape_of(part)
        if shape:
            self.ranks.append(len(shape))
            return {shape[0]: _SizePlace(path, is_length=False, is_sure=True)}
        if shape is not None or len(path) >= _MAX_DEPTH:
            return None
        return self._of_list(part, path) if is_list(part) else self._shared(_children(part), path)

    def _shared(self, children: Iterable[tuple[Any, Any]], path: tuple[Any, ...]) -> _Sizes | None:
        each = (self.sizes(child, (*path, key)) for key, child in islice(children, _MOST_CHILDREN))
        known = [sizes for sizes in each if sizes is not None]
        if not known:
            return None
        shared = {
            size: place
            for size, place in min(known, key=len).items()
            if all(size in sizes for sizes in known)
        }
        if len(shared) == 1 < len(known):
            return {size: place._replace(is_sure=True) for size, place in shared.items()}
        return shared

    def _of_list(self, part: Any, path: tuple[Any, ...]) -> _Sizes | None:
        """Count by the length of a list of samples, by what its fields share, or by either."""
        some = list(islice(elements_of(part), _MOST_CHILDREN))
        elements = [one for one in some if one is not None]
        length, has_none, before = length_of(part), len(elements) < len(some), len(self.ranks)
        of_samples = {length: _SizePlace(path, is_length=True, is_sure=True)}
        if not elements or all(map(_is_plain, elements)):
            return of_samples if self._with_plain and elements and not has_none else None
        shared = self._shared(_children(part), path)
        if shared is None or not _are_alike(elements) or (shared and has_none):
            return shared
        if any(map(_holds_number, elements)):
            return of_samples  # otherwise stacking would have made it a tensor
        ranks = set(self.ranks[before:])
        if (length == 1 and self._is_combined) or (ranks and any(one.is_length for one in shared.values())):
            return shared
        if ranks == {3} and shared.keys() <= _CHANNELS and (length >= _FEW or length in shared):
            return of_samples  # images
        return {length: _SizePlace(path, is_length=True, is_sure=length >= _FEW)} | shared


def _children(part: Any) -> Iterable[tuple[Any, Any]]:
    """Return the children of a list, mapping, dataclass or named tuple, with positions, keys or names.

    Looking up keys other than text and whole numbers might run user code.
    """
    kind = type(part)
    if issubclass(kind, PackedSequence):
        return ()
    if issubclass(kind, (list, tuple)):
        return enumerate(elements_of(part))
    is_mapping = issubclass(kind, dict) or derives(kind, UserDict)
    if is_mapping or type(class_attribute(kind, "__dataclass_fields__")) is dict:
        return [one for one in fields_of(part) if type(one[0]) is str or type(one[0]) is int]
    return ()  # the user's other objects


def _is_plain(part: Any) -> bool:
    return issubclass(type(part), (*LEAVES, np.generic)) or shape_of(part) == ()


def _holds_number(part: Any) -> bool:
    """Whether a sample or a batch has both numbers and other parts."""
    children = [child for _, child in islice(_children(part), _MOST_CHILDREN)]
    numbers = [_is_plain(one) and not issubclass(type(one), (str, bytes, type(None))) for one in children]
    return any(numbers) and not all(numbers)


def _are_alike(elements: list[Any]) -> bool:
    """Whether list elements may be samples: same-kind tensors or same-type containers."""
    first = elements[0]
    if (shape := shape_of(first)) is not None:
        # Not their classes: a tensor's wrapper may be next to a plain one.
        return all(
            dtype_of(one) is dtype_of(first) and len(shape_of(one) or ()) == len(shape) for one in elements
        )
    return all(type(one) is type(first) for one in elements)
