"""Sums over what a model holds in memory."""

from __future__ import annotations

from lightning_modelprof.run.model_cost import ModelSize, TensorSize


def total_size(size: ModelSize) -> TensorSize:
    """All that is held, of every kind and dtype; its ``kind`` is ``total``.

    Its bytes can be added since a storage counts once in a ``ModelSize``.
    """
    return TensorSize(
        kind="total",
        dtype="",
        tensors=sum(row.tensors for row in size.sizes),
        elements=sum(row.elements for row in size.sizes),
        num_bytes=sum(row.num_bytes for row in size.sizes),
    )
