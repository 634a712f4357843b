"""Finds modules that make one output row from several input rows, as attention does.

Dropping rows before such a module would change the other rows. An operator that may mix rows counts as
mixing.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_modelprof.inspect.flops.formulas import name_of
from lightning_modelprof.inspect.lines.constants import storage_of, tensors_in_arguments, written_by
from lightning_modelprof.inspect.lines.frozen import add_storage
from lightning_modelprof.measure.stored import buffers_of, parameters_of, undisturbed
from lightning_modelprof.run.model_cost import MIXES_NOTHING, MIXES_PLACES, MIXES_ROWS

_ROWS: Final = frozenset(
    (
        *("bmm", "baddbmm", "roll", "flip", "index", "index_select", "index_put", "index_add", "gather"),
        *("transpose", "permute", "_sparse_mm", "_sparse_addmm", "_sparse_softmax"),
    )
)
_ROWS_BY_PART: Final = (
    "scaled_dot_product",
    "attention",
    "rnn",
    "lstm",
    "gru",
    "scatter",
    "cumsum",
    "cumprod",
)
_PLACES_BY_PART: Final = (
    "convolution",
    "pool",
    "fft",
    "upsample",
    "im2col",
    "col2im",
    "grid_sampler",
    "group_norm",
)
_PRODUCTS: Final = {"mm": 1, "addmm": 2}
"""Position of the second factor by operator: a linear layer's weight."""
_REDUCTIONS: Final = frozenset(
    (
        *("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"),
        *("logsumexp", "linalg_vector_norm", "_softmax", "median", "argmax", "argmin", "norm"),
    )
)


class MixingWatch:
    def __init__(self, root: nn.Module) -> None:
        self._weights: dict[int, StorageWeakRef] = {}  # and what is made only of them
        with undisturbed():
            for one in (*parameters_of(root), *buffers_of(root)):
                if not one.is_meta and one.layout is torch.strided:
                    add_storage(self._weights, one)
        self._mixing: dict[str, set[str]] = {MIXES_ROWS: set(), MIXES_PLACES: set()}

    def __call__(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, where: tuple[str, str]
    ) -> None:
        if where[0] != "forward":
            return
        given = tensors_in_arguments((*args, *kwargs.values()))
        if given and all(storage_of(one) in self._weights for one in given):
            results = result if isinstance(result, (list, tuple)) else (result,)
            for one in tensors_in_arguments(
                written_by(func, args, kwargs) if func._schema.is_mutable else results
            ):
                add_storage(self._weights, one)
            return
        kind = self._kind_of(func, args, kwargs)
        if kind != MIXES_NOTHING:
            self._mixing[kind].add(where[1])

    def _kind_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        name = name_of(func.overloadpacket).removeprefix("aten::")
        if name in _PRODUCTS:
            return MIXES_NOTHING if storage_of(args[_PRODUCTS[name]]) in self._weights else MIXES_ROWS
        if "batch_norm" in name:
            is_of_batch = _argument(func, args, kwargs, ("training", "train"), not name.endswith("no_update"))
            return MIXES_ROWS if is_of_batch else MIXES_NOTHING
        if name in _REDUCTIONS:
            return MIXES_ROWS if _is_over_rows(args[0], _argument(func, args, kwargs, ("dim",), None)) else ""
        if name == "native_layer_norm":
            return MIXES_ROWS if len(args[1]) > 1 else MIXES_NOTHING
        if name in _ROWS or any(part in name for part in _ROWS_BY_PART):
            return MIXES_ROWS
        return MIXES_PLACES if any(part in name for part in _PLACES_BY_PART) else MIXES_NOTHING

    def end(self) -> None:
        self._weights.clear()

    def of(self, path: str) -> str:
        return next(
            (
                kind
                for kind in (MIXES_ROWS, MIXES_PLACES)
                if any(f"{one}.".startswith(f"{path}.") for one in self._mixing[kind])
            ),
            MIXES_NOTHING,
        )


def _argument(func: Any, args: Any, kwargs: dict[str, Any], names: tuple[str, ...], default: Any) -> Any:
    for number, one in enumerate(func._schema.arguments):
        if one.name in names:
            return args[number] if number < len(args) else kwargs.get(one.name, one.default_value)
    return default


def _is_over_rows(tensor: Any, dims: Any) -> bool:
    """Whether a dimension other than the last is reduced; never for vectors."""
    last = tensor.dim() - 1
    if last < 1:
        return False
    if dims is None or dims == []:
        return True
    return any(one % (last + 1) != last for one in (dims if isinstance(dims, (list, tuple)) else (dims,)))
