"""Finds the phase and module that an operator runs in.

In forward, hooks know the innermost running module. In backward, the running node is looked up by the
sequence number that autograd gave it when it was created.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from types import CodeType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from lightning_modelprof.inspect.core.model_copies import find_compiled
from lightning_modelprof.measure.stored import derives, is_a, modules_of, named_modules, undisturbed

Phase: TypeAlias = Literal["forward", "backward", "recompute", "optimizer"]


_CHECKPOINT_FILE = CheckpointFunction.forward.__code__.co_filename


_NO_TASK = -1  # autograd's answer outside a backward pass


# Names that compile, sharding and checkpoint wrappers add to a module's path.
_WRAPPER_NAMES = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


class _Entered(NamedTuple):
    """A running module and the backward pass that called it, if any."""

    module: str
    task: int


class _Stepping(NamedTuple):
    """A running optimizer step: the number of modules running at its start, and its closure's code."""

    depth: int
    closure: CodeType | None


class Whereabouts:
    """Follows the modules below a root and a step's backward passes and optimizers.

    Args:
        root: module that the paths are relative to; names that wrappers add are left out.
        into_compiled: follow the modules of a model that has compiled parts. Only allowed while those run
            eagerly: hooks that exist when a part is compiled would break its graph for good.
        on_error: called with our errors; the step continues.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        into_compiled: bool,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._root = root
        self._on_error = on_error
        self._into_compiled = into_compiled
        self._paths: dict[int, str] = {}
        self._entered: list[_Entered] = []
        self._main_marks = SequenceMarks("")
        # Marks made by autograd engine threads, by thread: each numbers its own nodes.
        self._engine_marks: dict[int, tuple[int, SequenceMarks[str]]] = {}
        self._main_thread = 0
        self._stepping: list[_Stepping] = []
        self._cleanup: list[Callable[[], None]] = []

    def follow(self) -> None:
        """Start following; ``leave`` undoes it, also after an error here."""
        self._main_thread = threading.get_ident()
        self._paths = paths_below(self._root)
        self._main_marks = SequenceMarks("")
        self._mark()
        if self._into_compiled or find_compiled(self._root) is None:
            self._follow_modules()
        before, after = self._hook(self._enter_optimizer), self._hook(self._leave_optimizer)
        self._cleanup.append(register_optimizer_step_pre_hook(before).remove)
        self._cleanup.append(register_optimizer_step_post_hook(after).remove)

    def leave(self) -> None:
        while self._cleanup:
            self._cleanup.pop()()
        self._entered.clear()
        self._stepping.clear()

    def now(self) -> tuple[Phase, str]:
        """Return the phase and module path of the running operator."""
        module, task_of_module = self._entered[-1] if self._entered else ("", _NO_TASK)
        task = torch._C._current_graph_task_id()
        if task == _NO_TASK:
            return ("optimizer", "") if self._is_optimizer() else ("forward", module)
        if torch.is_grad_enabled() and (task_of_module == task or _checkpoint_is_running()):
            return "recompute", module
        return "backward", self._module_of_node(task)

    def _is_optimizer(self) -> bool:
        """Whether an optimizer itself runs: Lightning runs forward and backward inside its step."""
        if not self._stepping or torch.is_grad_enabled():
            return False
        depth, closure = self._stepping[-1]
        # Gradients may be off in a closure too: under no_grad, and in an autograd function's forward.
        return depth >= len(self._entered) and not (closure and _is_running(closure))

    def _hook(self, call: Callable[..., None]) -> ModuleHook:
        return ModuleHook(call, self._on_error)

    def _follow_modules(self) -> None:
        """Put hooks on the instances, except where hooks would change the computation.

        nn.TransformerEncoderLayer leaves its fast path when it or one of its parts has hooks. It ignores
        global module hooks, which are used instead.
        """
        hookless = {
            id(one)
            for layer in modules_of(self._root)
            if is_a(layer, nn.TransformerEncoderLayer) and not layer.training
            for one in modules_of(layer)
        }
        before, after = self._hook(self._enter_module), self._hook(self._leave_module)
        for module in modules_of(self._root):
            if id(module) in hookless or is_a(module, torch.jit.ScriptModule):
                continue
            self._cleanup.append(nn.Module.register_forward_pre_hook(module, before, prepend=True).remove)
            self._cleanup.append(nn.Module.register_forward_hook(module, after, always_call=True).remove)
        if hookless:
            self._cleanup += hooked_alone(hookless, before, after)

    def _mark(self) -> None:
        """Note that new nodes belong to the module on top."""
        number = torch._C._autograd._get_sequence_nr()
        module = self._entered[-1].module if self._entered else ""
        thread = threading.get_ident()
        if thread == self._main_thread:
            self._main_marks.add(number, module)
        else:
            task = torch._C._current_graph_task_id()
            known = self._engine_marks.get(thread)
            if known is None or known[0] != task:
                known = self._engine_marks[thread] = (task, SequenceMarks(""))
            known[1].add(number, module)

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._entered.append(_Entered(path, torch._C._current_graph_task_id()))
            self._mark()

    def _leave_module(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        path = self._paths.get(id(module))
        for index in range(len(self._entered) - 1, -1, -1):
            # A module that failed between its hooks has left its entry above this one.
            if self._entered[index].module == path:
                del self._entered[index:]
                self._mark()
                return

    def _enter_optimizer(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._stepping.append(_Stepping(len(self._entered), _code_of(closure)))

    def _leave_optimizer(self, *_arguments: Any) -> None:
        if self._stepping:
            self._stepping.pop()

    def _module_of_node(self, task: int) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        if number >= 2**63:  # accumulates a parameter's gradient; created once, belongs to no call
            return ""
        inner = self._engine_marks.get(threading.get_ident())
        # A pass inside a pass runs nodes that this engine thread has recomputed.
        marks = inner[1] if inner is not None and inner[0] < task else self._main_marks
        return marks.owner_of(number)


def paths_below(root: nn.Module) -> dict[int, str]:
    """Return each module's path by its id, without the names that wrappers add.

    A DistributedDataParallel root's ``module`` prefix is dropped too.
    """
    is_ddp = derives(type(root), DistributedDataParallel)
    paths = {}
    for path, module in named_modules(root):
        names = path.split(".")
        if is_ddp and names[0] == "module":
            names = names[1:]
        paths[id(module)] = ".".join(name for name in names if name not in _WRAPPER_NAMES)
    return paths


def _code_of(function: Any) -> CodeType | None:
    """Return the code that runs when a function, method or object is called; ``None`` if it isn't Python."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code or getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004 - not asked


def _is_running(code: CodeType) -> bool:
    return _has_caller(lambda running: running is code)


def _checkpoint_is_running() -> bool:
    """Whether a caller is torch's checkpoint; asked only when gradients are on in a backward pass."""
    return _has_caller(lambda running: running.co_filename == _CHECKPOINT_FILE)


def _has_caller(is_wanted: Callable[[CodeType], bool]) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if is_wanted(frame.f_code):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the outermost frame
    return False


_Owner = TypeVar("_Owner")


class SequenceMarks(Generic[_Owner]):
    """Owners by the autograd sequence number they start at; numbers only grow within a thread.

    Args:
        outside: owner of the nodes created before the first mark.
    """

    def __init__(self, outside: _Owner) -> None:
        self._numbers = [0]
        self._owners = [outside]

    def add(self, number: int, owner: _Owner) -> None:
        """Assign the nodes from ``number`` on to ``owner``."""
        if number == self._numbers[-1]:
            self._owners[-1] = owner
        else:
            self._numbers.append(number)
            self._owners.append(owner)

    def owner_of(self, number: int) -> _Owner:
        return self._owners[bisect_right(self._numbers, number) - 1]


class ModuleHook:
    """A module hook that never fails and does nothing on a copy of its module.

    A step under inspection may save, pickle or copy the model. The copy must neither hold our instruments nor
    report to them.

    Args:
        call: the hook's action; ``None`` for nothing.
        on_error: called with the errors of ``call``.
    """

    def __init__(
        self,
        call: Callable[..., None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._call = call
        self._on_error = on_error

    def __call__(self, *arguments: Any) -> None:
        if self._call is None:
            return
        try:
            with undisturbed():
                self._call(*arguments)
        except Exception as error:  # the user's step must not notice
            if self._on_error is not None:
                self._on_error(error)

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        """Make copies and pickles no-ops that load where this package isn't installed."""
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, returns None


def hooked_alone(
    modules: Collection[int], before: ModuleHook, after: ModuleHook
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Hook some modules, given by id, through global hooks; returns callables that remove those."""

    def only(hook: ModuleHook) -> ModuleHook:
        return ModuleHook(lambda module, *rest: hook(module, *rest) if id(module) in modules else None)

    return (
        register_module_forward_pre_hook(only(before)).remove,
        register_module_forward_hook(only(after), always_call=True).remove,
    )
