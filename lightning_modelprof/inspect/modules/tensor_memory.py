"""A tensor's memory: its storages in this process and their sizes.

Nothing is computed, copied or waited for: sizes and storages are known to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

_SPARSE_PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class TensorMemory(NamedTuple):
    """One tensor's memory in this process.

    ``storages`` maps addresses, unique among living storages, to bytes. ``elements`` are those of this
    process; for a sparse tensor, its stored values. ``unseen_bytes`` are the elements' size where torch shows
    no storage.
    """

    dtype: str
    elements: int
    storages: dict[int, int]
    unseen_bytes: int


@contextmanager
def unnoticed() -> Iterator[None]:
    """Inspect tensors without running their subclasses' Python code or building a graph."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        yield


def memory_of(tensor: torch.Tensor) -> TensorMemory:
    """Return a tensor's memory, for any kind of tensor; call while ``unnoticed``.

    Args:
        tensor: any but a lazy parameter.
    """
    local = local_part(tensor)
    storages: dict[int, int] = {}
    unseen_bytes = 0
    for one in plain_tensors(local):
        storage = _storage(one)
        if storage is None:
            unseen_bytes += one.numel() * one.element_size()
        else:
            storages[storage[0]] = storage[1]
    return TensorMemory(_dtype_name(local), _elements(local), storages, unseen_bytes)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a distributed tensor, or the tensor itself."""
    local: Any = tensor
    while is_distributed(local):
        # Not to_local(), which waits for pending communication.
        local = local._local_tensor
    return cast(torch.Tensor, local)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it's a DTensor; checks attributes, as torch may be built without DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage is hypothetical: meta and fake tensors."""
    local = local_part(tensor)
    return isinstance(local, FakeTensor) or local.device.type == "meta"


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether it stores only some of its elements."""
    return local_part(tensor).layout in _SPARSE_PARTS


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of a tensor that have a storage; the tensor itself if it has one."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in _inner_tensor_names(tensor):
            yield from plain_tensors(local_part(getattr(tensor, name)))
    elif tensor.layout in _SPARSE_PARTS:
        for name in _SPARSE_PARTS[tensor.layout]:
            yield getattr(tensor, name)()
    else:
        yield tensor
        if tensor.is_quantized and tensor.qscheme() in {
            torch.per_channel_affine,
            torch.per_channel_affine_float_qparams,
        }:
            yield tensor.q_per_channel_scales()
            yield tensor.q_per_channel_zero_points()


def _inner_tensor_names(tensor: torch.Tensor) -> list[str]:
    flatten: Any = tensor.__tensor_flatten__  # type: ignore[attr-defined]  # checked before
    names, _ = flatten()
    return [name for name in names if isinstance(getattr(tensor, name, None), torch.Tensor)]


def _storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return address and bytes of the storage; ``None`` for tensors that show none, such as mkldnn's."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def _elements(tensor: torch.Tensor) -> int:
    if tensor.layout in _SPARSE_PARTS:
        values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        return int(values.numel())
    return int(tensor.numel())


def _dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype that it computes in, and the class of a packed tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name} in {type(tensor).__name__}" if hasattr(tensor, "__tensor_flatten__") else name
