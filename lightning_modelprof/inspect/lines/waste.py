"""Watches the counted step for wasted work; see ``run.step_waste``.

Hooks are on the model in that step only. They read tensors' shapes and versions, and whether outputs'
gradients are 0.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_modelprof.errors import describe_error
from lightning_modelprof.inspect.core.whereabouts import ModuleHook
from lightning_modelprof.inspect.flops.formulas import name_of
from lightning_modelprof.inspect.lines.frames import Spot, UserLines
from lightning_modelprof.inspect.lines.mixing import MixingWatch
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.inspect.modules.unused_outputs import OutputWatch
from lightning_modelprof.measure.stored import (
    buffers_of,
    is_a,
    modules_of,
    named_modules,
    named_parameters,
    parameters_of,
    undisturbed,
)
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.place import Place
from lightning_modelprof.run.model_cost import DenseTable, RepeatedCall, StepWaste, UnusedGradients

_TABLE_GRADIENT: Final = "aten::embedding_dense_backward"
_MOST_CALLS: Final = 64
"""Most calls per module whose tensors are remembered."""
_MOST_LINES: Final = 4
_NO_TASK: Final = -1
"""Autograd's answer outside a backward pass."""
_OUR_FRAMES: Final = 3

Where = Callable[[], tuple[str, str]]


class _Call(NamedTuple):
    """A call's tensors, held weakly, all tensors' versions, and the other arguments."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    rest: tuple[Any, ...]
    spot: Spot | None

    def is_same_as(self, other: _Call) -> bool:
        return (
            self.versions == other.versions
            and self.rest == other.rest
            and len(self.tensors) == len(other.tensors)
            and all(
                one() is not None and one() is two()
                for one, two in zip(self.tensors, other.tensors, strict=True)
            )
        )


class _Pass(NamedTuple):
    """A backward pass: the user's line that started it, and the parameters that got gradients, in order."""

    spot: Spot | None
    parameters: list[int]


class WasteWatch:
    """Notes work that a step wastes between :meth:`begin` and :meth:`end`.

    A ``FlopCounter`` calls it with the operators.

    Args:
        follows_gradients: whether to find gradients that no optimizer uses.
        owners: the user's classes.
        outside: code that the step runs in (see ``user_code.loop_codes``).
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        follows_gradients: bool = True,
        owners: Iterable[type] = (),
        outside: Iterable[CodeType] = (),
    ) -> None:
        self._root = root
        self._follows_gradients = follows_gradients
        self._lines = UserLines(UserCode(owners), outside)
        self._calls: dict[str, list[_Call]] = {}
        self._num_calls: Counter[str] = Counter()
        self._repeats: dict[str, list[tuple[Spot | None, Spot | None]]] = {}
        self._with_statistics: set[str] = set()
        self._tables: Counter[tuple[str, int, int]] = Counter()
        self._passes: list[_Pass] = []
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor] | None, int]] = {}
        self._used: set[tuple[int, int]] = set()  # pass, parameter
        self._path_of: dict[int, str] = {}
        self._errors: Counter[str] = Counter()
        self._outputs = OutputWatch(root, self._note, lambda: self._lines.innermost(_OUR_FRAMES))
        self._mixing: MixingWatch | None = None
        self._cleanup: list[Callable[[], None]] = []

    def begin(self) -> None:
        for name, module in named_modules(self._root):
            path = plain_path(name)
            if path and not _is_random(module):
                hook = ModuleHook(partial(self._enter, path), self._note)
                self._cleanup.append(
                    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove
                )
        self._cleanup += self._outputs.begin()
        try:
            self._mixing = MixingWatch(self._root)
        except Exception as error:  # a parameter without a storage
            self._note(error)
        if self._follows_gradients:
            with undisturbed():
                self._follow_gradients()

    def end(self) -> None:
        """Remove the hooks; safe to call more than once."""
        while self._cleanup:
            self._cleanup.pop()()
        if self._mixing is not None:
            self._mixing.end()

    def before_backward(self) -> None:
        """Note the start of a backward pass on the training thread."""
        self._passes.append(_Pass(self._lines.innermost(_OUR_FRAMES), []))

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, where: Where, **_: int
    ) -> None:
        if self._mixing is not None:
            try:
                self._mixing(func, args, kwargs, result, where())
            except Exception:  # a tensor without a storage, or a higher-order operator without a schema
                self._mixing = None
        try:
            if name_of(getattr(func, "overloadpacket", func)) == _TABLE_GRADIENT:
                gradient, indices, rows = args[:3]
                self._tables[where()[1], int(rows), int(gradient.shape[-1])] += indices.numel()
        except Exception as error:  # no error may end the step
            self._note(error)

    def _note(self, error: Exception) -> None:
        self._errors[describe_error(error)] += 1

    # Repeated module calls

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != _NO_TASK:  # recomputing in backward is intended
            return
        self._num_calls[path] += 1
        tensors: list[torch.Tensor] = []
        rest: list[Any] = [torch.is_grad_enabled()]
        if not _flatten((args, tuple(sorted(kwargs.items()))), tensors, rest) or not tensors:
            return
        with torch._C.DisableTorchFunctionSubclass():  # don't ask a user's class for a version
            versions = (
                *(tensor._version for tensor in tensors),
                *(one._version for one in parameters_of(module)),
                *_buffer_versions(module),
            )
        call = _Call(
            tuple(map(weakref.ref, tensors)), versions, tuple(rest), self._lines.innermost(_OUR_FRAMES)
        )
        earlier = self._calls.setdefault(path, [])
        for one in earlier:
            if call.is_same_as(one):
                self._repeats.setdefault(path, []).append((one.spot, call.spot))
                if any(True for norm in _updating_norms(module) for _ in buffers_of(norm)):
                    self._with_statistics.add(path)
                return
        if len(earlier) < _MOST_CALLS:
            earlier.append(call)

    # Unused gradients

    def _follow_gradients(self) -> None:
        for name, parameter in named_parameters(self._root):
            if parameter.requires_grad:
                self._path_of[id(parameter)] = plain_path(name.rpartition(".")[0])
        for parameter in parameters_of(self._root):  # also those that are frozen for one of the passes
            add = getattr(parameter, "register_post_accumulate_grad_hook", None)
            if add is not None and parameter.is_leaf and parameter.requires_grad:
                self._cleanup.append(add(ModuleHook(self._take_gradient, self._note)).remove)
        # Lightning runs backward in the step's closure; some optimizers drop gradients in their step.
        hook = ModuleHook(lambda optimizer, *_: self._use(optimizer), self._note)
        self._cleanup.append(register_optimizer_step_pre_hook(hook).remove)
        self._cleanup.append(register_optimizer_step_post_hook(hook).remove)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        if not self._passes:
            return
        with torch._C.DisableTorchFunctionSubclass():
            key, gradient = id(parameter), parameter.grad
        known, began = self._gradients.get(key, (None, len(self._passes) - 1))
        # A gradient that is added to keeps its object; a new one means that the previous one was dropped.
        is_added = known is not None and gradient is not None and known() is gradient
        self._passes[-1].parameters.append(key)
        self._gradients[key] = (
            None if gradient is None else weakref.ref(gradient),
            began if is_added else len(self._passes) - 1,
        )

    def _use(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = self._gradients.get(id(parameter))
                if known is not None and parameter.grad is not None:
                    for number in range(known[1], len(self._passes)):
                        self._used.add((number, id(parameter)))

    # Results

    def result(self) -> StepWaste:
        return StepWaste(
            repeated=tuple(
                RepeatedCall(
                    path=path,
                    calls=self._num_calls[path],
                    repeated=len(pairs),
                    updates_statistics=path in self._with_statistics,
                    lines=self._places(spot for pair in pairs for spot in pair),
                )
                for path, pairs in self._repeats.items()
            ),
            tables=tuple(
                DenseTable(path=path, rows=rows, columns=columns, used=used)
                for (path, rows, columns), used in self._tables.items()
            ),
            unused=tuple(self._unused()),
            follows_gradients=bool(self._used),
            outputs=self._outputs.result(
                self._places, (lambda _: None) if self._mixing is None else self._mixing.of
            )
            if self._passes
            else (),
            notes=tuple(f"{message} ({number} times)" for message, number in self._errors.items()),
        )

    def _unused(self) -> Iterable[UnusedGradients]:
        passes: Counter[str] = Counter()
        beyond: Counter[str] = Counter()
        within: Counter[str] = Counter()
        spots: dict[str, list[Spot | None]] = {}
        for number, one in enumerate(self._passes):
            is_used = [(number, key) in self._used for key in one.parameters]
            if not any(is_used):  # gradients are accumulated over several batches
                continue
            last_used = max(place for place, used in enumerate(is_used) if used)
            of_module: dict[str, list[int]] = {}
            for place, key in enumerate(one.parameters):
                of_module.setdefault(self._path_of.get(key, ""), []).append(place)
            for path, places in of_module.items():
                passes[path] += 1
                if not any(is_used[place] for place in places):
                    (beyond if min(places) > last_used else within)[path] += 1
                    spots.setdefault(path, []).append(one.spot)
        return [
            UnusedGradients(
                path=path,
                passes=passes[path],
                beyond=beyond[path],
                within=within[path],
                lines=self._places(spots[path]),
            )
            for path in spots
        ]

    def _places(self, spots: Iterable[Spot | None]) -> tuple[Place, ...]:
        found = []
        for spot in dict.fromkeys(spots):
            if spot is not None:
                location, line = self._lines.locate(spot)
                found.append(Place(function=location.function, file=location.file, line=line))
        return tuple(dict.fromkeys(found))[:_MOST_LINES]


def _buffer_versions(module: nn.Module) -> list[int]:
    """Skip buffers that the output ignores: a training BatchNorm only writes its statistics."""
    written = {id(one) for norm in _updating_norms(module) for one in buffers_of(norm)}
    return [one._version for one in buffers_of(module) if id(one) not in written]


def _updating_norms(module: nn.Module) -> list[nn.Module]:
    return [one for one in modules_of(module) if is_a(one, nn.modules.batchnorm._BatchNorm) and one.training]


def _is_random(module: nn.Module) -> bool:
    """Whether equal calls may return different results, judged by the module classes."""
    return any(
        is_a(one, nn.modules.dropout._DropoutNd) and one.p > 0 and one.training for one in modules_of(module)
    ) or any(is_a(one, nn.RNNBase) and one.dropout > 0 and one.training for one in modules_of(module))


def _flatten(value: Any, tensors: list[torch.Tensor], rest: list[Any]) -> bool:
    """Collect the tensors in arguments; returns whether all other values are plain."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        rest.append("tensor")
        return True
    if isinstance(value, (tuple, list)):
        rest.append(len(value))
        return all(_flatten(one, tensors, rest) for one in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        rest.append(value)
        return True
    return False
