"""How many samples a batch holds, read from the batch itself without touching its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any, Final

import torch

from lightning_modelprof.run.steps import NOT_MEASURED

MAX_COUNT: Final = 2**63 - 1
"""The largest number that a column of counts holds."""

_MAX_DEPTH: Final = 8


def check_count(count: Any) -> int:
    """What ``samples_fn`` returned, as a plain number.

    Raises:
        TypeError: when it is no integer; an integer in a tensor is none, as it may still be on the device.
        ValueError: when it is negative, or does not fit into 64 bits.
    """
    if isinstance(count, torch.Tensor):
        raise TypeError(
            "expected an int, got a torch.Tensor, whose value could only be read by waiting for the device in"
            " every step. Count by shapes, such as batch.shape[0] or batch.numel()"
        )
    number = index(count)
    if not 0 <= number <= MAX_COUNT:
        raise ValueError(f"expected a number of samples from 0 to 2**63 - 1, got {number}")
    return number


def make_counter(samples_fn: Callable[[Any], Any] | None) -> Callable[[Any], int]:
    """What counts a batch: the user's function with its results checked, or ours."""
    if samples_fn is None:
        return SampleCounter()
    return lambda batch: check_count(samples_fn(batch))


class SampleCounter:
    """Counts the samples of batches: the first dimension of the first tensor in them, depth first.

    Where that tensor is found is remembered from the first batch, so that later ones cost one look-up;
    a batch of another shape is searched again. Batches that know their size say it themselves
    (``num_graphs`` of PyTorch Geometric).
    """

    def __init__(self) -> None:
        self._path: tuple[Any, ...] = ()

    def __call__(self, batch: Any) -> int:
        """The number of samples, ``NOT_MEASURED`` if it cannot be told."""
        part = batch
        try:
            for key in self._path:
                if isinstance(part, torch.Tensor):  # its parts have other sizes than itself
                    return self._search(batch)
                part = part[key]
            if part.__class__ is torch.Tensor:
                size: int = part.shape[0]
                return size
        except (LookupError, TypeError):
            pass
        return self._search(batch)

    def _search(self, batch: Any) -> int:
        num_graphs = getattr(batch, "num_graphs", None)
        if isinstance(num_graphs, int) and 0 <= num_graphs <= MAX_COUNT:
            return num_graphs
        path = _find_tensor(batch)
        if path is None:
            return NOT_MEASURED
        self._path = path
        part = batch
        for key in path:
            part = part[key]
        return int(part.shape[0])


def _find_tensor(batch: Any, depth: int = 0) -> tuple[Any, ...] | None:
    """Keys that lead to the first tensor with a dimension, ``None`` if there is none."""
    if isinstance(batch, torch.Tensor):
        return () if batch.ndim else None
    if depth > _MAX_DEPTH:
        return None
    for key, part in _parts(batch):
        path = _find_tensor(part, depth + 1)
        if path is not None:
            return (key, *path)
    return None


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, (list, tuple)):
        return enumerate(batch)
    if isinstance(batch, Mapping):
        return batch.items()
    return ()
