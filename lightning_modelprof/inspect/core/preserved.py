"""Runs a model without changing it."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from lightning_modelprof.inspect.modules.module_times import compiles_backward
from lightning_modelprof.measure.stored import buffers_of, modules_of, parameters_of


class DeeperStack:
    """Makes room on Python's stack for the frames of our hooks and modes.

    A module with hooks takes four frames instead of three, so a deeply nested or recursive model could
    otherwise end in a RecursionError.
    """

    def __init__(self) -> None:
        self._limit: int | None = None

    def deepen(self) -> None:
        """Raise the limit by half; does nothing the second time."""
        if self._limit is None:
            self._limit = sys.getrecursionlimit()
            sys.setrecursionlimit(_deeper(self._limit))

    def restore(self) -> None:
        """Restore the limit unless other code has changed it; does nothing without :meth:`deepen`."""
        limit, self._limit = self._limit, None
        if limit is not None and sys.getrecursionlimit() == _deeper(limit):
            with suppress(RecursionError):  # the stack is deeper than that
                sys.setrecursionlimit(limit)


def _deeper(limit: int) -> int:
    return min(limit + limit // 2 + 100, 2**31 - 1)


@contextmanager
def preserved(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Restore what a forward and backward pass change, even after errors; gradients are cleared inside.

    Restored are random states; gradients and ``requires_grad`` of parameters and inputs; and each module's
    attributes (including hooks, modes and buffers), the contents of those that are lists, dicts and sets, and
    the values of buffers and other tensors among them. Parameter values and the contents of other objects
    aren't.

    Args:
        inputs: the model's inputs, tensors in any containers.
    """
    leaves = [tensor for tensor in tensors_in(inputs) if tensor.is_leaf and tensor.requires_grad]
    wanting = {id(tensor): tensor for tensor in (*parameters_of(model), *leaves)}.values()
    parameters = [(tensor, tensor.requires_grad, tensor.grad) for tensor in wanting]
    attributes = [(vars(module), dict(vars(module))) for module in modules_of(model)]
    held = {id(value): value for _, saved in attributes for value in saved.values()}
    containers = [
        (value, value.copy()) for value in held.values() if any(type(value) is kind for kind in _CONTAINERS)
    ]
    tensors = {id(b): b for b in buffers_of(model)}
    for value in held.values():
        if isinstance(value, torch.Tensor) and not value.is_meta and not isinstance(value, nn.Parameter):
            tensors[id(value)] = value
    values = [(t, t.detach().clone()) for t in tensors.values() if _can_be_written(t)]
    devices = {tensor.device for tensor in (*wanting, *tensors.values())}
    with random_states_kept(devices):
        try:
            for tensor in wanting:
                tensor.grad = None
            yield
        finally:
            for own, saved in attributes:
                own.clear()
                own.update(saved)
            for container, contents in containers:
                container.clear()
                _fill(container, contents)
            for parameter, requires_grad, gradient in parameters:
                parameter.requires_grad = requires_grad
                parameter.grad = gradient
            with torch.no_grad():
                for tensor, value in values:
                    tensor.detach().copy_(value)


_CONTAINERS: Final = (dict, OrderedDict, list, set)


def _fill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Return False where elements share memory, which no operator can write to either."""
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        return True
    return all(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


@contextmanager
def random_states_kept(devices: Collection[torch.device] = ()) -> Iterator[None]:
    """Restore the random states of Python, NumPy, torch on the CPU, and the given devices."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} & {"cuda", "xpu"}:
            found = [d.index for d in devices if d.type == kind and d.index is not None]
            stack.enter_context(torch.random.fork_rng(devices=found, device_type=kind))
        if any(device.type == "mps" for device in devices):
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, sequences and dataclasses at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in list(value.values()):
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


_OTHER_BACKWARD: Final = frozenset(("aten::prod", "aten::masked_fill", "aten::masked_fill_"))
"""Operators whose gradient differs in its last bits under any mode.

Torch takes another path there, depending on ``isTensorSubclassLike``. None of them contains a contraction, so
no FLOPs are missed while the mode is off.
"""


_IN_A_VIEW: Final = "CopySlices"
"""Suffix of the name of the node that runs the gradient of a write to a view."""


class SameGradients:
    """Turns a mode off while autograd runs the nodes whose gradients the mode would change.

    A node can be reached only after its operator has returned, so results wait here for :meth:`settle`,
    called by the next operator or before a backward pass.

    Args:
        on_error: called with our errors; the step continues.

    Attributes:
        waiting: results whose nodes haven't been found yet.
    """

    def __init__(self, mode: TorchDispatchMode, on_error: Callable[[Exception], None]) -> None:
        self.waiting: list[torch.Tensor] = []
        self._mode = mode
        self._on_error = on_error
        self._handles: list[Any] = []

    @staticmethod
    def is_needed_for(operator: str) -> bool:
        """Whether :meth:`note` must see the results of an operator, such as ``aten::prod``."""
        return operator in _OTHER_BACKWARD

    def note(self, args: tuple[Any, ...], result: Any) -> None:
        """Keep the result of such an operator, unless it needs no gradient."""
        wants_gradient = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in args
        )
        if wants_gradient and isinstance(result, torch.Tensor) and not compiles_backward():
            self.waiting.append(result)

    def settle(self) -> None:
        """Put hooks on the nodes of all waiting results."""
        results, self.waiting = self.waiting, []
        try:
            for result in results:
                self._put_hooks(result)
        except Exception as error:  # the user's step must not notice
            self._on_error(error)

    def _put_hooks(self, result: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            node = result.grad_fn
        if node is None:
            return
        before_it = [found for found, _ in node.next_functions if found is not None]
        for found in (node, *(one for one in before_it if one.name().endswith(_IN_A_VIEW))):
            before, after = self._hooks()
            self._handles.append(found.register_prehook(before))
            self._handles.append(found.register_hook(after))

    def remove(self) -> None:
        """Remove all hooks whose nodes still exist."""
        self.waiting.clear()
        while self._handles:
            self._handles.pop().remove()

    def _hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return a node's hooks, which run in its thread; a node that fails leaves the mode off."""
        taken_off = False

        def before(_gradients: Any) -> None:
            nonlocal taken_off
            taken_off = self._mode in modes_on()
            leave_mode(self._mode)

        def after(_results: Any, _gradients: Any) -> None:
            nonlocal taken_off
            if taken_off:
                taken_off = False
                enter_mode(self._mode)

        return before, after


def modes_on() -> list[Any]:
    """List the active modes, outermost first, without torch's own such as fake tensors'."""
    return [one for one in _get_current_dispatch_mode_stack() if getattr(one, "_mode_key", None) is None]


def enter_mode(mode: TorchDispatchMode) -> None:
    """Enter our mode outside all others, so that leaving those doesn't leave ours.

    Torch's own ``__enter__`` and ``__exit__`` also save and restore whether any mode is on. Leaving the modes
    in another order than entering them would get this wrong for good, and nothing would be compiled any more.
    """
    others = modes_on()
    for _ in others:
        _pop_mode()
    _push_mode(mode)
    for one in others:
        _push_mode(one)


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave our mode and keep the others; does nothing if it isn't on."""
    stack = modes_on()
    if mode not in stack:
        return
    later = stack[stack.index(mode) + 1 :]
    for _ in (mode, *later):
        _pop_mode()
    for one in later:
        _push_mode(one)
