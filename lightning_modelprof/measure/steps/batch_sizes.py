"""How many samples a batch holds, read from the batch itself without touching its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader

from lightning_modelprof.measure.steps.batch_parts import (
    Attribute,
    at_path,
    dtype_of,
    elements_of,
    fields_of,
    is_list,
    is_nested,
    is_tensor,
    length_of,
    shape_of,
    tensor_shape,
)
from lightning_modelprof.measure.stored import class_name, undisturbed, variables_of
from lightning_modelprof.record import Record
from lightning_modelprof.run.steps import NOT_MEASURED

_MOST_NAMED: Final = 3


_HELP: Final = "pass samples_fn to count samples yourself"


def check_count(count: Any) -> int:
    """What ``samples_fn`` returned, as a plain number.

    Raises:
        TypeError: when it is no integer; an integer in a tensor is none, as it may still be on the device.
        ValueError: when it is negative, or does not fit into 64 bits.
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
    """What counts a batch: the user's function with its results checked, or ours."""
    if samples_fn is None:
        return SampleCounter()
    return lambda batch: check_count(samples_fn(batch))


class NothingCounted:
    """Counts nothing any more.

    Attributes:
        note: why.
    """

    def __init__(self, note: str) -> None:
        self.note = note

    def __call__(self, _: Any) -> int:
        """Not measured."""
        return NOT_MEASURED


class Counted(NamedTuple):
    """What a batch says about its samples.

    Attributes:
        reading: what to go by from now on; ``None`` if it cannot be told.
        possible: all numbers that no part of the batch speaks against.
        note: why it cannot be told, or what else may be meant; ``""`` where nothing is in doubt.
    """

    reading: Reading | None
    possible: frozenset[int]
    note: str


class SampleCounter:
    """Counts the samples of batches: the one number that all parts of a batch allow.

    A tensor allows its first dimension; a list of samples that were not stacked its length; a list of tensors
    that share their first dimension, such as the ``[x, y]`` of a ``DataLoader``, that one too. Where most
    parts allow one number it counts, and the note says which part does not; otherwise nothing is counted.

    Where the number was found is remembered, so that later batches cost one look-up. The 2nd, 4th, 8th, ...
    are searched in full, and so is one of another shape.

    Attributes:
        note: why samples are not counted, or what speaks against the count; ``""`` otherwise.
        may_be_rows: whether the dataloader may hand out single samples (see :func:`may_be_rows`).
        is_combined: whether a batch holds one of each of several dataloaders (see :func:`is_combined`).
    """

    def __init__(self) -> None:
        self.note = ""
        self.may_be_rows = self.is_combined = False
        self._reading: Reading | None = None
        self._kind: type | None = None  # of the part that is looked at
        self._refused: type | None = None  # batches of this type were in doubt
        self._seen = 0
        self._next_search = 1

    def __call__(self, batch: Any) -> int:
        """The number of samples, ``NOT_MEASURED`` if it cannot be told."""
        self._seen = seen = self._seen + 1
        if type(batch) is self._refused:
            return NOT_MEASURED
        if self._reading is None:
            return self._search(batch)
        try:
            part = at_path(batch, self._reading.path)
        except (LookupError, TypeError):
            return self._search(batch)
        if type(part) is not self._kind:
            return self._search(batch)
        size = length_of(part) if self._reading.is_length else _rows_or_size(part)
        if size is None and is_tensor(part):
            return self._search(batch)
        count = NOT_MEASURED if size is None else size
        if seen < self._next_search:
            return count
        return self._check(batch, count)

    def _check(self, batch: Any, count: int) -> int:
        """Whether a batch, now and then, still speaks for what is remembered."""
        self._next_search = 2 * self._seen
        counted = self._count(batch)
        if count in counted.possible:
            if len(counted.possible) == 1:
                self.note = self.note or counted.note
            return count
        other = f"a later batch contradicts the first one, by which it has {count:,} samples"
        self._reading, self._refused = None, type(batch)
        self.note = counted.note if counted.reading is None and counted.note else f"{other}; {_HELP}"
        return NOT_MEASURED

    def _search(self, batch: Any) -> int:
        self._next_search = 2 * self._seen
        return self._take(batch, self._count(batch))

    def _count(self, batch: Any) -> Counted:
        return count_samples(batch, may_be_row=self.may_be_rows, is_combined=self.is_combined)

    def _take(self, batch: Any, counted: Counted) -> int:
        self.note = counted.note or self.note
        self._reading = reading = counted.reading
        if reading is None:
            if counted.note:
                self._refused = type(batch)
            return NOT_MEASURED
        self._kind = type(at_path(batch, reading.path))
        return reading.count


def may_be_rows(loop: Any) -> bool:
    """Whether nothing says that the dataloaders of one of Lightning's loops make batches.

    So it is of a ``DataLoader`` with ``batch_size=None``, unless its sampler chooses whole batches, and of
    any other iterable without a ``batch_size``: they hand out what they are given, samples or batches.
    """
    combined = getattr(loop, "_combined_loader", None)
    loaders = [] if combined is None else list(combined.flattened)
    return bool(loaders) and not any(map(_makes_batches, loaders))


def is_combined(loop: Any) -> bool:
    """Whether one of Lightning's loops takes a batch from each of several dataloaders in every step."""
    combined = getattr(loop, "_combined_loader", None)
    return combined is not None and len(combined.flattened) > 1 and combined._mode != "sequential"


def _makes_batches(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
    return isinstance(getattr(loader, "batch_size", None), int)


def count_samples(batch: Any, *, may_be_row: bool = False, is_combined: bool = False) -> Counted:
    """What one batch alone says about its samples.

    Args:
        batch: from a dataloader.
        may_be_row: whether it may be a single sample. Then vectors alone do not tell, as they may hold
            features, nor does one tensor beside a number, which may be its label.
        is_combined: whether it is made of batches of several dataloaders. Then a list of one tensor is the
            whole batch of one of them, and not one sample.
    """
    parts = parts_of(batch)
    if is_combined:
        parts = [inner for part in parts for inner in (part.inner if _is_list_of_one(part) else (part,))]
    voters = [part for part in parts if not part.is_weak] or parts
    if not voters:
        return Counted(None, frozenset(), "")
    if may_be_row and (all(one.is_vector for one in voters) or (len(voters) == 1 and holds_number(batch))):
        return _row_or_batch(voters[0])
    shared = frozenset.intersection(*(part.counts for part in voters))
    if not shared:
        return _by_most(parts, voters)
    for part in parts:  # where there are several, numbers and texts may tell which
        shared = shared & part.counts or shared
    alone = voters[0]
    if len(voters) == 1 and alone.is_torn and len(shared) == 1 and min(shared) < FEW:
        # Two batches of two loaders, or two samples? Nothing else in the batch tells.
        inner = list(alone.inner)
        return _by_most(inner, inner) if min(shared) == 1 else _disagreeing(inner)
    reading = _which(voters, shared)
    if reading is None:
        return _in_doubt(alone)
    count = reading.count
    note = _against([part for part in parts if count not in part.counts], count)
    if not note and count > 1 and len(shared) > 1 and len(voters) == 1 and alone.is_image:
        note = _otherwise(alone, reading, max(shared - {count}))
    return Counted(reading, shared, note)


def _is_list_of_one(part: Part) -> bool:
    return bool(part.inner) and part.readings[0].is_length and part.readings[0].count == 1


def _which(voters: list[Part], shared: frozenset[int]) -> Reading | None:
    """How to count on: by a part that can be read in one way only, if there is one."""
    sure = [part for part in voters if len(part.readings) == 1]
    if sure:
        return sure[0].readings[0]
    by_length, *by_size = (one for one in voters[0].readings if one.count in shared)
    if not by_size or not by_length.is_length:
        return by_length
    are_images = [part.is_image for part in voters]
    if (all(are_images) and by_length.count >= FEW) or (any(are_images) and len(voters) > 1):
        return by_length
    if by_length.count < FEW:
        return by_size[0]
    return by_length if len(voters) > 1 and len(shared) == 1 else None


def _by_most(parts: list[Part], voters: list[Part]) -> Counted:
    """What more than half of the parts allow, if they do."""
    votes = Counter(count for part in voters for count in part.counts)
    (count, most), *others = votes.most_common(2)
    if 2 * most <= len(voters) or (others and others[0][1] == most):
        return _disagreeing(voters)
    reading = next(one for part in voters for one in part.readings if one.count == count)
    against = _against([part for part in parts if count not in part.counts], count)
    return Counted(reading, frozenset((count,)), against)


def _disagreeing(voters: list[Part]) -> Counted:
    first: dict[frozenset[int], Part] = {}  # of each size, to show the disagreement
    for part in voters:
        first.setdefault(part.counts, part)
    shown = list(first.values())[:_MOST_NAMED]
    named = ", ".join(f"{name_of(one.path)} is {one.text}" for one in shown)
    return Counted(None, frozenset(), f"the parts of a batch disagree ({named}); {_HELP}")


def _against(parts: list[Part], count: int) -> str:
    """Which parts do not have the number that counts; a few numbers may be anything."""
    telling = [one for one in parts if not (one.is_weak and max(one.counts) < FEW)][:_MOST_NAMED]
    named = ", ".join(f"{name_of(one.path)} is {one.text}" for one in telling)
    return f"a batch counts as {count:,} samples, but {named}; if that's wrong, {_HELP}" if named else ""


def _otherwise(part: Part, reading: Reading, other: int) -> str:
    first, length = "the first dimension of the tensors in", "the length of"
    return (
        f"a batch counts as {reading.count:,} samples, but as {other:,} by"
        f" {first if reading.is_length else length} {name_of(part.path)} ({part.text}); if that's wrong,"
        f" {_HELP}"
    )


def _row_or_batch(part: Part) -> Counted:
    reason = (
        f"the dataloader doesn't batch, so {name_of(part.path)} ({part.text}) may be one sample or"
        f" {max(part.counts):,}; {_HELP}"
    )
    return Counted(None, frozenset(), reason)


def _in_doubt(part: Part) -> Counted:
    stacked = part.readings[-1].count
    reason = (
        f"each element of {name_of(part.path)} ({part.text}) may be one sample or a stack of {stacked:,};"
        f" {_HELP}"
    )
    return Counted(None, frozenset(), reason)


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


_KEYS: Final = (str, int, Attribute)
"""Types of keys that are looked up again in later batches: others may run code of the user's."""


_OWN_COUNTS: Final = ("num_graphs", "_num_graphs", "batch_size", "_batch_size")
"""Variables in which objects keep how many samples they hold."""


class Reading(Record, frozen=True):
    """One way to count the samples of a batch.

    Attributes:
        count: what it gives for this batch.
        path: keys, positions and attributes that lead from the batch to where to look.
        is_length: whether the length of the list there counts; otherwise its size (see ``size_of``).
    """

    count: int
    path: tuple[Any, ...]
    is_length: bool


class Part(Record, frozen=True):
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
    """Samples in one part by its own account: the first dimension of a tensor, or what an object keeps.

    That is a number in its variable ``num_graphs`` or ``batch_size``, or the sequences of a
    ``PackedSequence``.
    """
    kind = type(part)
    if issubclass(kind, (torch.Tensor, np.ndarray)):
        shape = shape_of(part)
        return shape[0] if shape else None
    if issubclass(kind, PackedSequence):
        return _num_sequences(part)
    if issubclass(kind, (*_PLAIN, list, tuple, dict, type)):
        return None
    variables = variables_of(part)
    for name in _OWN_COUNTS:
        size = variables.get(name)
        size = size[0] if type(size) is torch.Size and size else size
        if type(size) is int and 0 <= size <= MAX_COUNT:
            return size
    return None


def _rows_or_size(part: Any) -> int | None:
    """As :func:`size_of`, fast for the usual tensor."""
    if type(part) is torch.Tensor:
        with undisturbed():
            if not is_nested(part):
                shape = tensor_shape(part)
                return shape[0] if shape else None
    return size_of(part)


def _num_sequences(packed: Any) -> int | None:
    _, batch_sizes, order, _ = elements_of(packed)
    if order is not None:
        return size_of(order)
    if type(batch_sizes) is not torch.Tensor:
        return None
    with undisturbed():  # torch keeps these on the CPU
        return int(batch_sizes.numpy()[0])


def name_of(path: tuple[Any, ...]) -> str:
    """A place in a batch as Python writes it."""
    return "batch" + "".join(f".{key}" if type(key) is Attribute else f"[{key!r:.40}]" for key in path)


class _Search:
    """One walk through one batch."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def parts(self, part: Any, path: tuple[Any, ...]) -> list[Part]:
        if issubclass(type(part), _PLAIN):
            return []
        self._left -= 1
        if self._left < 0 or len(path) > _MAX_DEPTH:
            return []
        size = size_of(part)
        if size is not None:
            return [_sized(part, size, path)]
        return self._of_list(part, path) if is_list(part) else self._inner(_children(part), path)

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
        elements = list(islice(elements_of(part), _MOST_ELEMENTS))
        length = Reading(length_of(part), path, is_length=True)
        text = f"a list of {length.count:,}"
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
        elif is_list(next(one for one in elements if one is not None)):
            has_lists = any(reading.is_length for one in inner for reading in one.readings)
            has_lists = has_lists and not (path and all(one.is_weak for one in inner))  # as token ids
            if (has_lists and not is_torn) or (length.count < FEW and not (is_torn and path)):
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
    shape = shape_of(part) or ()
    return Part(
        path,
        str(shape) if shape else f"a {class_name(type(part))}",
        (Reading(size, path, is_length=False),),
        is_image=len(shape) == 3 and size in _CHANNELS,
        is_vector=len(shape) == 1,
    )


def _children(part: Any) -> list[tuple[Any, Any]]:
    """The named parts of a mapping, a dataclass, a named tuple or another object."""
    some = islice(fields_of(part), _MOST_ELEMENTS)
    return [one for one in some if any(type(one[0]) is kind for kind in _KEYS)]


def _is_scalar(part: Any) -> bool:
    kind = type(part)
    return issubclass(kind, (*_PLAIN, np.generic)) or (issubclass(kind, torch.Tensor) and not shape_of(part))


def holds_number(part: Any) -> bool:
    """Whether there is a number right in a mapping, an object, or a list that has more than numbers."""
    if _is_scalar(part) or size_of(part) is not None:
        return False
    children = (
        list(islice(elements_of(part), _MOST_ELEMENTS))
        if is_list(part)
        else [one for _, one in _children(part)]
    )
    numbers = [_is_scalar(one) and not issubclass(type(one), _TEXTS) for one in children]
    return any(numbers) and not all(numbers)


def _are_alike(elements: list[Any]) -> bool:
    """Whether a list may be one of samples that were not stacked; ``None`` may stand for a missing one."""
    there = [element for element in elements if element is not None]
    if not there or (len(there) == 1 and len(elements) > 1):
        return False
    first = there[0]
    if any(map(_is_scalar, there)):
        return all(map(_is_scalar, there))
    if dtype_of(first) is not None:
        # Not the classes: a wrapper of a tensor may stand beside a plain one.
        return len({(len(shape_of(one) or ()), dtype_of(one)) for one in there}) == 1
    if any(type(one) is not type(first) for one in there):
        return False
    names = [{key for key, _ in _children(one)} for one in there]
    return is_list(first) or all(not own or own & names[0] for own in names)
