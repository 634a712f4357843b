"""Floating-point operations of operators, derived from the recorded shapes of their inputs.

The formulas are those of ``torch.utils.flop_counter``: a multiplication with its addition is two operations,
biases and elementwise work count nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.pooling import Key
from lightning_modelprof.analysis.timeline.calls import (
    NestedCalls,
    innermost_at,
    nearest_around,
)
from lightning_modelprof.analysis.timeline.names import is_module
from lightning_modelprof.analysis.timeline.tally import (
    Groups,
    Tally,
    distinct,
    rows_named,
    sum_by,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.memory import CPU
from lightning_modelprof.record import Record, field
from lightning_modelprof.trace.model import NOT_RECORDED, Category, InputShapes, Trace

_Dims = Sequence[Any]


_Values = Sequence[Any]


def flops_of(operator: str, shapes: InputShapes) -> int | None:
    """Floating-point operations of one call; ``None`` without a formula or the inputs it needs.

    Args:
        operator: operator name, e.g. ``aten::mm``.
    """
    formula = FORMULAS.get(operator)
    if formula is None:
        return None
    try:
        flops = formula(json.loads(shapes.dims), json.loads(shapes.concrete or "[]"))
    except (ValueError, TypeError, IndexError, RecursionError, ZeroDivisionError):
        return None  # another operator's inputs, or values that weren't recorded (torch 1)
    return flops if flops >= 0 else None


def _sizes(dims: _Dims, index: int, rank: int | None = None) -> tuple[int, ...]:
    """Shape of one input; raises ``ValueError`` unless it's a shape of that rank."""
    shape = dims[index]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("not a tensor")
    if rank is not None and len(shape) != rank:
        raise ValueError("another number of dimensions")
    return tuple(shape)


def _matrix_product(first: int) -> Callable[[_Dims, _Values], int]:
    """Formula of a matrix product with the inputs ``first`` and ``first + 1`` as factors."""

    def flops(dims: _Dims, values: _Values) -> int:
        del values
        rows, inner = _sizes(dims, first, 2)
        other_inner, columns = _sizes(dims, first + 1, 2)
        if inner != other_inner:
            raise ValueError("factors that do not fit")
        return 2 * rows * inner * columns

    return flops


def _batched_product(first: int) -> Callable[[_Dims, _Values], int]:
    """Formula of batched matrix products with the inputs ``first`` and ``first + 1`` as factors."""

    def flops(dims: _Dims, values: _Values) -> int:
        del values
        batch, rows, inner = _sizes(dims, first, 3)
        other_batch, other_inner, columns = _sizes(dims, first + 1, 3)
        if (batch, inner) != (other_batch, other_inner):
            raise ValueError("factors that do not fit")
        return 2 * batch * rows * inner * columns

    return flops


def _integers(values: _Values, index: int, count: int) -> tuple[int, ...]:
    """Parse a recorded list such as ``"[2, 2]"``; one number stands for all dimensions."""
    found = json.loads(values[index])
    if not isinstance(found, list) or not all(type(value) is int for value in found):
        raise ValueError("not a list of integers")
    if len(found) not in {1, count}:
        raise ValueError("another number of dimensions")
    return tuple(found) * (count if len(found) == 1 else 1)


def _flag(text: object) -> bool:
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
"""Formulas by operator, from the shapes and values of its inputs.

``aten::linear``, ``aten::matmul`` and ``aten::conv2d`` call these, so they have no formula of their own.
"""


def flops_of_calls(trace: Trace, calls: NestedCalls) -> tuple[list[int], NDArray[np.int64]]:
    """Operations of each known pair of name and shape, and each call's pair, -1 if unknown."""
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


class OperatorMemory:
    """Attributes each allocation and release to the innermost call around it on its thread.

    Source: ``cpu_memory_usage`` and ``self_cpu_memory_usage`` of torch.autograd.profiler_util, and those of
    devices; but a call inside one of the same name counts once in the total, as its time does.

    Args:
        end_ns: ends of all events from ``calls.clipped_ends``.
    """

    def __init__(self, timeline: Timeline, calls: NestedCalls, end_ns: NDArray[np.int64]) -> None:
        events = timeline.trace.allocations
        index = np.full(len(timeline.trace) + 1, -1, np.int64)  # the last one stands for no event
        index[calls.row] = np.arange(len(calls))
        payer = index[innermost_at(timeline, events.track, events.time_ns, timeline.is_operator, end_ns)]
        self.is_known = bool(len(events))
        self._self_bytes: list[NDArray[np.int64]] = []
        self._bytes: list[NDArray[np.int64]] = []
        is_host = events.device_type == CPU
        for is_there in (is_host, ~is_host):
            own = (payer >= 0) & is_there
            self_bytes = sum_by(payer[own], events.size_bytes[own], len(calls))
            before = np.concatenate((np.zeros(1, np.int64), np.cumsum(self_bytes)))
            self._self_bytes.append(self_bytes)
            self._bytes.append(before[calls.stop] - before[:-1])

    def changes(self, group: Groups, is_outer: NDArray[np.bool_], size: int) -> list[MemoryChange | None]:
        """Memory change of each group's calls.

        Args:
            is_outer: which calls are in no other one of their group.
        """
        if not self.is_known:
            return [None] * size
        columns = []
        for whole, own in zip(self._bytes, self._self_bytes, strict=True):
            columns += [sum_by(group[is_outer], whole[is_outer], size), sum_by(group, own, size)]
        return [MemoryChange(*row) for row in np.stack(columns, axis=1).tolist()]


_FRAME: Final = re.compile(r"(?P<file>[^<].*?)\(\d+\): ")
"""``train.py(12): training_step``, but neither ``<built-in method ...>`` nor ``nn.Module: Linear_0``."""


_NOT_THE_USERS: Final = re.compile(
    r"(?:^|(?:.*/)?(?:site|dist)-packages/)"
    r"(?:torch|lightning/pytorch|lightning/fabric|pytorch_lightning|lightning_fabric)/"
    r"|(?:.*/)?lightning_modelprof/"
)
"""Code between the user's and every operator, with or without the folders that Kineto cuts off."""


def is_user_frame(frame: str) -> bool:
    """Whether a call stack frame is Python code outside torch, Lightning and this package."""
    match = _FRAME.match(frame)
    return match is not None and not _NOT_THE_USERS.match(match["file"].replace("\\", "/"))


_OF_INSTALLATION: Final = re.compile(
    r"(?:.*/)?(?:(?:site|dist)-packages|lib/python3[\d.]*t?|python3\d*/lib)/", re.IGNORECASE
)


def is_project_frame(frame: str) -> bool:
    """Whether it's also outside the standard library and installed packages, judging by its path."""
    match = _FRAME.match(frame)
    if match is None or not is_user_frame(frame):
        return False
    file = match["file"].replace("\\", "/")
    package = file.split("/")[0].removesuffix(".py")  # Kineto cuts off the library's folder
    return not _OF_INSTALLATION.match(file) and package not in sys.stdlib_module_names


def modules_of(
    timeline: Timeline, rows: NDArray[np.int64]
) -> tuple[tuple[str, ...], NDArray[np.int64]] | None:
    """The innermost module whose call contains each host event.

    Returns:
        Names, and each event's index, -1 outside modules, shape (k,); ``None`` without module calls.
    """
    trace = timeline.trace
    is_range = timeline.is_annotation | (trace.category == Category.PYTHON_FUNCTION)
    calls = rows_named(trace, np.flatnonzero(is_range), is_module)
    if not len(calls):
        return None
    return trace.names, _name_of_nearest(timeline, calls, rows)


def callers_of(
    timeline: Timeline, rows: NDArray[np.int64]
) -> tuple[tuple[str, ...], NDArray[np.int64]] | None:
    """The innermost frame outside torch and Lightning that called each host event.

    Returns:
        Frames, and each event's index into them, -1 without one, shape (k,); ``None`` without call stacks.
    """
    trace = timeline.trace
    calls = np.flatnonzero(trace.category == Category.PYTHON_FUNCTION)
    stack = trace.stack[rows]
    if not len(calls) and (stack == NOT_RECORDED).all():
        return None
    is_users = cache(is_user_frame)
    frames = list(trace.names)
    caller = _name_of_nearest(timeline, rows_named(trace, calls, is_users), rows)
    # Torch 1 wrote the whole stack into each operator; many stacks share their frames.
    of_stack = np.full(len(trace.stacks) + 1, -1, np.int64)  # the last one stands for no stack
    for index, text in enumerate(trace.stacks):
        frame = next(filter(is_users, text.split(";")), None)
        if frame is not None:
            of_stack[index] = len(frames)
            frames.append(frame)
    return tuple(frames), np.where(of_stack[stack] >= 0, of_stack[stack], caller)


def _name_of_nearest(
    timeline: Timeline, wanted: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Name id of the innermost wanted event around each row, -1 without one, shape (k,)."""
    if not len(wanted):
        return np.full(len(rows), -1, np.int64)
    is_wanted = np.zeros(len(timeline.trace), np.bool_)
    is_wanted[wanted] = True
    nearest = nearest_around(timeline, rows, is_wanted)
    return np.where(nearest >= 0, timeline.trace.name[nearest], -1).astype(np.int64)


class MemoryChange(Record, frozen=True):
    """Allocated minus released bytes during calls on their thread; negative if more was released.

    Attributes:
        host, device: host and device memory, including nested calls.
        host_self, device_self: the same without nested operators.
    """

    host: int
    host_self: int
    device: int
    device_self: int


class Child(Record, frozen=True, kw_only=True):
    """Operators of one name called directly by those of another name.

    Attributes:
        calls: number of calls, including those nested in another of them.
        host: host times of the outermost calls, including everything they call.
        device: summed times of the device events launched in each outermost call, at any depth; ``None``
            without device events.
        kernels: device events that they launched themselves, by name.
    """

    name: Key[str]
    calls: int
    host: Tally
    device: Tally | None
    kernels: Mapping[str, Tally] = field(default_factory=dict)


class Operator(Record, frozen=True, kw_only=True):
    """All calls of one operator on one host thread, or those with inputs of one shape.

    Attributes:
        shape: input shapes as JSON text; ``None`` if calls aren't separated by shape, or not recorded.
        calls: number of calls, including those nested in another of them.
        host: host times of the outermost calls, including everything they call.
        host_self_ns: time of the calls outside nested operators and runtime calls.
        device: summed times of the device events launched in each outermost call, at any depth; ``None``
            without device events.
        device_self_ns: time of the device events that the calls launched themselves; ``None`` as above.
        counted_flops: floating-point operations of the counted calls.
        num_counted: calls with known operations that are in no other such call.
        num_uncounted: calls without known operations that are in no call with known ones.
        memory: memory change of its calls; ``None`` if memory wasn't recorded.
        modules: host time by the innermost module around the calls.
        callers: number of calls by the Python line that made them.
        children: operators that it calls directly, by name.
        kernels: device events that it launched itself, by name.
    """

    name: Key[str]
    shape: Key[str | None] = None
    calls: int
    host: Tally
    host_self_ns: int
    device: Tally | None
    device_self_ns: int | None
    counted_flops: int = 0
    num_counted: int = 0
    num_uncounted: int = 0
    memory: MemoryChange | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    callers: Mapping[str, int] = field(default_factory=dict)
    children: Mapping[str, Child] = field(default_factory=dict)
    kernels: Mapping[str, Tally] = field(default_factory=dict)

    @property
    def flops(self) -> int | None:
        """Operations of all calls; ``None`` if some are unknown or all belong to an outer call."""
        return self.counted_flops if self.num_counted and not self.num_uncounted else None
