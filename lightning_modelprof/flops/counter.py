"""Counts the FLOPs of what really runs: by phase, module and operator, through a dispatch mode.

The step computes what it would compute without the counter. A formula that raises is noted, never raised;
operators without a formula that may hold contractions are listed; compiled frames run eagerly while the
counter is active and stay compiled afterwards.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_modelprof.flops.formulas import Formula, all_formulas, holds_no_contraction

Phase: TypeAlias = Literal["forward", "backward", "recompute", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")

_CHECKPOINT_FILE = CheckpointFunction.forward.__code__.co_filename
_NO_TASK = -1  # what autograd answers outside a backward pass
_COMPLEX_PRODUCTS = 4  # real multiply-adds in a complex one
# A fake tensor stands for a plain one: its operators count as they are.
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)


class Place(NamedTuple):
    """Where an operator ran: the key that everything is counted under.

    ``module`` is the path below the counter's root, empty for the root itself and what is outside of it;
    ``operator`` is the name without overload, as in ``aten::mm``.
    """

    phase: Phase
    module: str
    operator: str


class _Entered(NamedTuple):
    """A module that is running, and the backward pass that called it (or none)."""

    module: str
    task: int


class _Marks:
    """Which module was running from which autograd sequence number on; numbers only grow in a thread."""

    def __init__(self) -> None:
        self._numbers = [0]
        self._modules = [""]

    def add(self, number: int, module: str) -> None:
        """From the node with ``number`` on, nodes belong to ``module``."""
        if number == self._numbers[-1]:
            self._modules[-1] = module
        else:
            self._numbers.append(number)
            self._modules.append(module)

    def module_of(self, number: int) -> str:
        """The module that was running when the node with ``number`` was made."""
        return self._modules[bisect_right(self._numbers, number) - 1]


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Counts what runs inside ``with FlopCounter(model) as counter:``.

    Modules are followed by hooks on the instances, so two layers of one class stay two. Backward is
    attributed by the sequence numbers that autograd gave the nodes during forward.

    Args:
        root: the module whose children give the paths.
        formulas: formulas of the user by operator, before all others (see ``all_formulas``).

    Attributes:
        flops: FLOPs by place; Fourier transforms among them, by their operators' names.
        calls: calls of the operators in ``flops``.
        uncounted: calls of operators that may hold contractions and have no formula, or one that failed.
        errors: what formulas raised, with the number of times, by operator and message.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo keep the frames that it meets; otherwise it would mark them as never to be compiled."""
        return True

    def __init__(self, root: nn.Module, formulas: Mapping[Any, Formula] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[Place] = Counter()
        self.calls: Counter[Place] = Counter()
        self.uncounted: Counter[Place] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self._root = root
        self._formulas = all_formulas(formulas)
        self._paths: dict[int, str] = {}
        self._entered: list[_Entered] = []
        self._main_marks = _Marks()
        # Marks that threads of the autograd engine made, by thread: each counts its nodes on its own.
        self._engine_marks: dict[int, tuple[int, _Marks]] = {}
        self._main_thread = 0
        self._optimizer_depths: list[int] = []
        self._cleanup: list[Any] = []
        self._zero_cost: dict[Any, bool] = {}
        self._decomposes: dict[Any, bool] = {}

    # ---- Coming and going

    def __enter__(self) -> FlopCounter:
        self._main_thread = threading.get_ident()
        self._paths = {}
        for path, module in self._root.named_modules():
            # A compiled module sits in a wrapper that nobody wrote.
            parts = [part for part in path.split(".") if part != "_orig_mod"]
            self._paths[id(module)] = ".".join(parts)
        self._main_marks = _Marks()
        self._mark()
        try:
            stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
            if stance is not None:
                eager = stance("force_eager")
                self._cleanup.append(lambda: eager.__exit__(None, None, None))
            self._follow_modules()
            self._cleanup.append(register_optimizer_step_pre_hook(self._enter_optimizer).remove)
            self._cleanup.append(register_optimizer_step_post_hook(self._leave_optimizer).remove)
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        finally:
            self._clean_up()

    def _follow_modules(self) -> None:
        """Put hooks on the instances, except where hooks would change what the model computes.

        nn.TransformerEncoderLayer leaves its fast path when it or a part of it has hooks: those are seen by
        hooks for all modules, which it does not mind.
        """
        hookless = {
            id(part)
            for layer in self._root.modules()
            if isinstance(layer, nn.TransformerEncoderLayer) and not layer.training
            for part in layer.modules()
        }
        for module in self._root.modules():
            if id(module) in hookless or isinstance(module, torch.jit.ScriptModule):
                continue
            self._cleanup.append(module.register_forward_pre_hook(self._enter_module, prepend=True).remove)
            self._cleanup.append(module.register_forward_hook(self._leave_module, always_call=True).remove)
        if hookless:

            def enter(module: nn.Module, inputs: Any) -> None:
                if id(module) in hookless:
                    self._enter_module(module, inputs)

            def leave(module: nn.Module, inputs: Any, output: Any) -> None:
                if id(module) in hookless:
                    self._leave_module(module, inputs, output)

            self._cleanup.append(register_module_forward_pre_hook(enter).remove)
            self._cleanup.append(register_module_forward_hook(leave, always_call=True).remove)

    def _clean_up(self) -> None:
        while self._cleanup:
            self._cleanup.pop()()
        self._entered.clear()
        self._optimizer_depths.clear()

    # ---- Where it is

    def _mark(self) -> None:
        """Note that nodes made from now on belong to the module on top."""
        number = torch._C._autograd._get_sequence_nr()
        module = self._entered[-1].module if self._entered else ""
        thread = threading.get_ident()
        if thread == self._main_thread:
            self._main_marks.add(number, module)
        else:
            task = torch._C._current_graph_task_id()
            known = self._engine_marks.get(thread)
            if known is None or known[0] != task:
                known = self._engine_marks[thread] = (task, _Marks())
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

    def _enter_optimizer(self, *_arguments: Any) -> None:
        self._optimizer_depths.append(len(self._entered))

    def _leave_optimizer(self, *_arguments: Any) -> None:
        if self._optimizer_depths:
            self._optimizer_depths.pop()

    def _where(self) -> tuple[Phase, str]:
        """Phase and module path of the operator that is running."""
        module, task_of_module = self._entered[-1] if self._entered else ("", _NO_TASK)
        task = torch._C._current_graph_task_id()
        if task == _NO_TASK:
            stepping = self._optimizer_depths and self._optimizer_depths[-1] >= len(self._entered)
            # Closures run inside the optimizer's step, but with gradients on.
            if stepping and not torch.is_grad_enabled():
                return "optimizer", ""
            return "forward", module
        if torch.is_grad_enabled() and (task_of_module == task or _checkpoint_is_running()):
            return "recompute", module
        return "backward", self._module_of_node(task)

    def _module_of_node(self, task: int) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        if number >= 2**63:  # accumulates a parameter's gradient; made once, belongs to no call
            return ""
        inner = self._engine_marks.get(threading.get_ident())
        # A pass inside a pass goes through what this engine's thread has recomputed.
        marks = inner[1] if inner is not None and inner[0] < task else self._main_marks
        return marks.module_of(number)

    # ---- Counting

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN_TYPES for kind in types):
            return NotImplemented  # the tensor's own class takes it apart, and what it calls comes here
        higher_order = isinstance(func, torch._ops.HigherOrderOperator)
        operator = func if higher_order else func.overloadpacket
        formula = self._formulas.get(operator)
        if formula is None and not higher_order and self._is_to_decompose(func, args):
            return self._decompose(func, args, kwargs)
        result = func(*args, **kwargs)
        try:
            if formula is not None:
                self._count(operator, formula, args, kwargs, result)
            elif not self._costs_nothing(func):
                self.uncounted[Place(*self._where(), _name_of(operator))] += 1
        except Exception as error:
            self.errors[str(func), f"{type(error).__name__}: {error}"] += 1
        return result

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the operator apart with the mode on, so that its parts come here; hooks stay as they are."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _count(self, operator: Any, formula: Formula, args: Any, kwargs: Any, result: Any) -> None:
        place = Place(*self._where(), _name_of(operator))
        try:
            flops = formula(*args, **kwargs, out_val=result)
            if isinstance(flops, bool) or int(flops) != flops or flops < 0:
                raise ValueError(f"expected a whole number of FLOPs, got {flops!r}")
        except Exception as error:
            self.uncounted[place] += 1
            self.errors[place.operator, f"{type(error).__name__}: {error}"] += 1
            return
        if not place.operator.startswith("aten::_fft") and any(_is_complex(value) for value in args):
            flops *= _COMPLEX_PRODUCTS
        self.flops[place] += int(flops)
        self.calls[place] += 1

    def _costs_nothing(self, func: Any) -> bool:
        known = self._zero_cost.get(func)
        if known is None:
            known = self._zero_cost[func] = holds_no_contraction(func)
        return known

    def _is_to_decompose(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether torch itself would only take the operator apart, having no kernel for the device."""
        known = self._decomposes.get(func)
        if known is None and func.namespace == "prim":
            # What only reads a tensor, as prim::device does, is unknown to the dispatcher; and an error here
            # would end the process, as C++ asks for the device where it must not fail.
            known = self._decomposes[func] = False
        if known is None:
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            nested = any(value.is_nested for value in tensors)
            device = tensors[0].device.type if tensors else "cpu"
            backend = {"privateuseone": "PrivateUse1", "meta": "Meta"}.get(device, device.upper())
            known = has_kernel(func.name(), "CompositeImplicitAutograd") and not (
                nested or has_kernel(func.name(), backend)
            )
            if not nested:  # another call may bring plain tensors
                self._decomposes[func] = known
        return known


def _checkpoint_is_running() -> bool:
    """Whether a caller is torch's checkpoint: asked only where gradients are on during a backward pass."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the outermost, which mypy leaves out
    return False


def _name_of(operator: Any) -> str:
    """``aten::mm``; of a higher-order operator its own name."""
    return str(getattr(operator, "_qualified_op_name", operator))


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()
