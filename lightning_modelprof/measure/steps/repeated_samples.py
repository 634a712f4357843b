"""Checks in regular batches whether an index's sample is the same in each epoch.

Torch's own DataLoader iterator holds an iterator over the sampler, which is wrapped to see the batches'
indices. No user object is touched, no random number is drawn, and only hashes of a few samples are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.steps.batch_parts import elements_of
from lightning_modelprof.measure.stored import undisturbed
from lightning_modelprof.measure.window.other_profilers import unrecorded
from lightning_modelprof.run.batches import RepeatedSamples

NUM_WATCHED: Final = 16
"""Most indices whose samples are hashed."""

ENOUGH: Final = 64
"""Comparisons after which watching stops."""

MOST_BYTES: Final = 1 << 24
"""Largest sample that is compared."""

HASHED_BYTES: Final = 1 << 16
"""Bytes hashed of a larger tensor in a sample, spread evenly."""

_ITERATORS: Final = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
_MAX_DEPTH: Final = 4


class _UnseenError(Exception):
    """Raised when this loop can't be watched; the message gives the reason."""


class WatchedIndices:
    """Passes the sampler's indices on and notes which batches will contain watched ones.

    Args:
        inner: torch's iterator over the sampler.
        num_sent: batches whose indices it has returned already.
        watched: indices; each batch's first one is added while there are few.

    Attributes:
        num_indices: indices in all batches of the epoch so far; earlier batches count like the first one
            seen.
    """

    def __init__(self, inner: Iterator[Any], num_sent: int, watched: set[int]) -> None:
        self.inner = inner
        self.found: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # batch → (its size, [(place, index)])
        self._next = num_sent
        self._watched = watched
        self.num_indices = 0

    def __iter__(self) -> WatchedIndices:
        return self

    def __next__(self) -> Any:
        indices = next(self.inner)
        number, self._next = self._next, self._next + 1
        try:
            self._note(number, indices)
        except Exception:  # arbitrary samplers: their indices may be unusable
            self.found.clear()
        return indices

    def _note(self, number: int, indices: Any) -> None:
        if type(indices) is not list or not indices or type(indices[0]) is not int:
            return
        self.num_indices += len(indices) * (1 if self.num_indices else number + 1)
        if len(self._watched) < NUM_WATCHED:
            self._watched.add(indices[0])
        if not self._watched.isdisjoint(indices):
            places = [(place, index) for place, index in enumerate(indices) if index in self._watched]
            self.found[number] = (len(indices), places)


class FetchesBatches(Protocol):
    """Whatever runs the loop; both methods may raise anything."""

    def iterators(self) -> Sequence[Any]: ...

    def prefetched(self) -> Sequence[Any]: ...


class RepeatedSampleWatch:
    """Compares samples of a few indices with earlier ones of the same index.

    Args:
        loop: a fit's loop, with its dataloader.
    """

    def __init__(self, loop: FetchesBatches) -> None:
        self._loop = loop
        self._watched: set[int] = set()
        self._hashes: dict[int, bytes] = {}
        self._again: set[int] = set()
        self._num_compared = self._num_equal = self._sample_bytes = 0
        self._num_samples: int | None = None
        # Weak, as the workers end with torch's iterator of an epoch.
        self._iterator: weakref.ref[Any] | None = None
        self._indices: WatchedIndices | None = None
        self._note = ""
        self.is_over = False

    def begin_batch(self, batch: Any) -> None:
        try:
            self._look(batch)
        except _UnseenError as why:
            self._give_up(str(why))
        except Exception as error:  # arbitrary batches and loaders, or another torch or Lightning
            self._give_up(f"samples couldn't be compared: {describe_error(error)}")

    def close(self) -> None:
        """Restore torch's iterator; may be called more than once."""
        self._count_samples()
        iterator = None if self._iterator is None else self._iterator()
        indices, self._indices = self._indices, None
        self.is_over = True
        if iterator is not None and indices is not None and iterator._sampler_iter is indices:
            iterator._sampler_iter = indices.inner

    def record(self) -> RepeatedSamples:
        self._count_samples()
        note = self._note
        if not note and not self._num_compared:
            note = "no dataset index came twice while samples were compared"
        return RepeatedSamples(
            num_indices=len(self._again),
            num_compared=self._num_compared,
            num_equal=self._num_equal,
            sample_bytes=self._sample_bytes,
            num_samples=self._num_samples,
            note=note,
        )

    def _count_samples(self) -> None:
        if self._indices is not None and self._indices.num_indices:
            self._num_samples = max(self._num_samples or 0, self._indices.num_indices)

    def _give_up(self, why: str) -> None:
        self._note = why
        self.close()

    def _look(self, batch: Any) -> None:
        iterator = self._running_iterator()
        indices = self._indices
        if indices is None or iterator._sampler_iter is not indices:
            self._watch(iterator)  # an epoch has started
            return
        prefetched = self._loop.prefetched()
        found = indices.found.pop(iterator._num_yielded - 1 - len(prefetched), None)
        if found is None:
            return
        size, places = found
        with _disable_current_modes(), undisturbed(), unrecorded():  # hides our work from others
            for place, index in places:
                self._compare(index, _hash(batch, size, place))
        if self._num_compared >= ENOUGH or self._num_equal < self._num_compared:
            self.close()  # one that differs is enough

    def _compare(self, index: int, sample: tuple[bytes, int]) -> None:
        digest, self._sample_bytes = sample
        before = self._hashes.setdefault(index, digest)
        if before is digest:
            return
        self._again.add(index)
        self._num_compared += 1
        self._num_equal += before == digest

    def _running_iterator(self) -> Any:
        iterators = self._loop.iterators()
        if len(iterators) != 1:
            raise _UnseenError("there's more than one dataloader")
        return iterators[0]

    def _watch(self, iterator: Any) -> None:
        if not any(type(iterator) is kind for kind in _ITERATORS):
            raise _UnseenError("the batches don't come from a torch DataLoader")
        if iterator._dataset_kind != dataloader._DatasetKind.Map:
            raise _UnseenError("the dataset is iterable, so it has no indices")
        if not iterator._auto_collation:
            raise _UnseenError("the DataLoader doesn't build batches from single samples")
        if not getattr(iterator, "_in_order", True):
            raise _UnseenError("batches arrive out of order")
        self._count_samples()
        num_sent = getattr(iterator, "_send_idx", iterator._num_yielded)
        self._iterator = weakref.ref(iterator)
        self._indices = WatchedIndices(iterator._sampler_iter, num_sent, self._watched)
        iterator._sampler_iter = self._indices


def _hash(batch: Any, size: int, place: int) -> tuple[bytes, int]:
    digest, num_bytes = blake2b(digest_size=16), 0
    for part in _parts(batch, 0):
        if type(part) is not torch.Tensor or not part.shape or part.shape[0] != size:
            raise _UnseenError("a batch doesn't consist of tensors with one row per sample")
        if part.device.type != "cpu":
            raise _UnseenError("batches reach the device before they can be compared")
        rows = part.numpy()
        row = np.asarray(rows[place])
        num_bytes += row.nbytes
        if num_bytes > MOST_BYTES:
            raise _UnseenError("a sample is too large to compare")
        flat = row.reshape(-1)
        step = max(1, -(-row.nbytes // HASHED_BYTES))
        digest.update(f"{row.dtype}{row.shape}".encode())
        digest.update(np.ascontiguousarray(flat[::step]).tobytes())
    if not num_bytes:
        raise _UnseenError("a batch has no tensors")
    return digest.digest(), num_bytes


def _parts(batch: Any, depth: int) -> Iterator[Any]:
    if issubclass(type(batch), dict):
        children: Any = dict.values(batch)
    elif issubclass(type(batch), (list, tuple)):
        children = elements_of(batch)
    else:
        yield batch
        return
    if depth >= _MAX_DEPTH:
        raise _UnseenError("a batch is nested too deeply")
    for child in children:
        yield from _parts(child, depth + 1)
