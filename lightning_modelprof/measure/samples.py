"""How many samples a batch holds, read from the batch itself without touching its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from lightning_modelprof.run.records import NOT_MEASURED

_MAX_DEPTH = 8


def count_samples(batch: Any, depth: int = 0) -> int:
    """The first dimension of the first tensor in ``batch``, depth first; ``NOT_MEASURED`` if there is none.

    Batches that know their size say it themselves (``num_graphs`` of PyTorch Geometric).
    """
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else NOT_MEASURED
    if depth > _MAX_DEPTH or isinstance(batch, str | bytes):
        return NOT_MEASURED
    num_graphs = getattr(batch, "num_graphs", None)
    if isinstance(num_graphs, int):
        return num_graphs
    for part in _parts(batch):
        size = count_samples(part, depth + 1)
        if size != NOT_MEASURED:
            return size
    return NOT_MEASURED


def _parts(batch: Any) -> Any:
    if isinstance(batch, list | tuple):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch):
        return (getattr(batch, field.name) for field in fields(batch))
    return ()
