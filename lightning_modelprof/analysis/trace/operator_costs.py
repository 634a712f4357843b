"""Floating-point operations of operators, worked out from the recorded shapes of their inputs.

The formulas are those of ``torch.utils.flop_counter``: a multiplication with its addition is two operations,
biases and elementwise work count nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.grouping import distinct
from lightning_modelprof.analysis.nested_calls import NestedCalls
from lightning_modelprof.trace.model import InputShapes, Trace

_Dims = Sequence[Any]
_Values = Sequence[Any]


def flops_of(operator: str, shapes: InputShapes) -> int | None:
    """Floating-point operations of one call; ``None`` without a formula or without the inputs it needs.

    Args:
        operator: name of the operator, such as ``aten::mm``.
        shapes: what the call got.
    """
    formula = FORMULAS.get(operator)
    if formula is None:
        return None
    try:
        flops = formula(json.loads(shapes.dims), json.loads(shapes.concrete or "[]"))
    except (ValueError, TypeError, IndexError, RecursionError, ZeroDivisionError):
        return None  # not the inputs of this operator, or values that were not recorded (torch 1)
    return flops if flops >= 0 else None


def _sizes(dims: _Dims, index: int, rank: int | None = None) -> tuple[int, ...]:
    """Shape of one input.

    Raises:
        ValueError: when it is no shape of that many dimensions.
    """
    shape = dims[index]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("not a tensor")
    if rank is not None and len(shape) != rank:
        raise ValueError("another number of dimensions")
    return tuple(shape)


def _matrix_product(first: int) -> Callable[[_Dims, _Values], int]:
    """Formula of a product of matrices whose factors are the inputs ``first`` and ``first + 1``."""

    def flops(dims: _Dims, values: _Values) -> int:
        del values
        rows, inner = _sizes(dims, first, 2)
        other_inner, columns = _sizes(dims, first + 1, 2)
        if inner != other_inner:
            raise ValueError("factors that do not fit")
        return 2 * rows * inner * columns

    return flops


def _batched_product(first: int) -> Callable[[_Dims, _Values], int]:
    """Formula of products of matrices whose factors are the inputs ``first`` and ``first + 1``."""

    def flops(dims: _Dims, values: _Values) -> int:
        del values
        batch, rows, inner = _sizes(dims, first, 3)
        other_batch, other_inner, columns = _sizes(dims, first + 1, 3)
        if (batch, inner) != (other_batch, other_inner):
            raise ValueError("factors that do not fit")
        return 2 * batch * rows * inner * columns

    return flops


def _integers(values: _Values, index: int, count: int) -> tuple[int, ...]:
    """A recorded list such as ``"[2, 2]"``; one number stands for all dimensions.

    Raises:
        ValueError: when it is no such list.
    """
    found = json.loads(values[index])
    if not isinstance(found, list) or not all(type(value) is int for value in found):
        raise ValueError("not a list of integers")
    if len(found) not in {1, count}:
        raise ValueError("another number of dimensions")
    return tuple(found) * (count if len(found) == 1 else 1)


def _flag(text: object) -> bool:
    """A recorded truth value.

    Raises:
        ValueError: when it is none.
    """
    if text not in {"True", "False"}:
        raise ValueError("not a truth value")
    return text == "True"


def _convolution(dims: _Dims, values: _Values) -> int:
    """Formula of ``aten::convolution`` (input, weight, bias, stride, padding, dilation, transposed, ...)."""
    image, weight = _sizes(dims, 0), _sizes(dims, 1)
    count = len(image) - 2
    if count < 1 or len(weight) != len(image):
        raise ValueError("not a batch of images")
    if _flag(values[6]):
        points = prod(image[2:])
    else:
        settings = zip(
            image[2:],
            weight[2:],
            _integers(values, 3, count),
            _integers(values, 4, count),
            _integers(values, 5, count),
            strict=True,
        )
        points = prod(
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in settings
        )
    return 2 * image[0] * points * prod(weight)


def _convolution_backward(dims: _Dims, values: _Values) -> int:
    """Formula of ``aten::convolution_backward`` (gradient, input, weight, ..., transposed, ..., mask)."""
    gradient, image, weight = _sizes(dims, 0), _sizes(dims, 1), _sizes(dims, 2)
    if len(image) < 3 or not len(weight) == len(image) == len(gradient):
        raise ValueError("not a batch of images")
    for_image, for_weight, _ = (_flag(word) for word in values[10].strip("[]").split(", "))
    points = prod(image[2:] if _flag(values[7]) else gradient[2:])
    return 2 * (for_image + for_weight) * image[0] * points * prod(weight)


FORMULAS: Final[Mapping[str, Callable[[_Dims, _Values], int]]] = {
    "aten::mm": _matrix_product(0),
    "aten::addmm": _matrix_product(1),
    "aten::_addmm_activation": _matrix_product(1),
    "aten::bmm": _batched_product(0),
    "aten::baddbmm": _batched_product(1),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
"""Formula of each operator that has one, of the shapes and of the values of its inputs.

``aten::linear``, ``aten::matmul`` and ``aten::conv2d`` call these, so they have none of their own.
"""


def flops_of_calls(trace: Trace, calls: NestedCalls) -> tuple[list[int], NDArray[np.int64]]:
    """Operations of each known pair of name and shape, and the pair of each call, -1 without a known one."""
    shape = trace.shape[calls.row].astype(np.int64)
    known = np.flatnonzero(trace.is_named(FORMULAS.__contains__)[calls.row] & (shape >= 0))
    name = trace.name[calls.row[known]].astype(np.int64)
    keys, place = distinct(name * len(trace.shapes) + shape[known], len(trace.names) * len(trace.shapes))
    flops: list[int] = []
    pair_of_key = np.full(len(keys), -1, np.int64)
    for one, key in enumerate(keys.tolist()):
        found = flops_of(trace.names[key // len(trace.shapes)], trace.shapes[key % len(trace.shapes)])
        if found is not None:
            pair_of_key[one] = len(flops)
            flops.append(found)
    pair = np.full(len(calls), -1, np.int64)
    pair[known] = pair_of_key[place]
    return flops, pair
