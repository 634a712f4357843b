"""Counts the FLOPs of executed operators by phase, module, operator and dtype, with a dispatch mode.

The counter doesn't change what the step computes. A formula's error is recorded, never raised; operators
without a formula that may contain contractions are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)

from lightning_modelprof.errors import ModelProfError, describe_error, quoted
from lightning_modelprof.inspect.core.preserved import SameGradients, enter_mode, leave_mode
from lightning_modelprof.inspect.core.whereabouts import Phase, Whereabouts
from lightning_modelprof.inspect.flops.formulas import (
    Formula,
    WithRecompute,
    formula_of,
    name_of,
    own_formulas,
)
from lightning_modelprof.inspect.flops.zero_cost import communicates, holds_no_contraction
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.run.model_cost import FOURIER_OPERATORS

_COMPLEX_PRODUCTS = 4  # real multiply-adds per complex one


# Fake tensors stand for plain ones, so their operators count too.
_PLAIN_TYPES = frozenset(map(id, (torch.Tensor, nn.Parameter, FakeTensor)))


_MOST_FLOPS = 10**18  # per call: minutes on the fastest device; keeps a step's sum within a file's 64 bits


_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # of classes that leave operators to torch


class CountedPlace(NamedTuple):
    """Key of every count.

    ``module`` is the path below the counter's root, empty for the root and outside of it. ``operator`` has no
    overload, as in ``aten::mm``. ``dtype`` is that of the first floating-point or complex operand; empty
    without one.
    """

    phase: Phase
    module: str
    operator: str
    dtype: str


class _Action(NamedTuple):
    """How to treat an operator, determined once.

    ``func`` is the overload, kept alive so that its id stays unique. ``costs_nothing`` means certainly no
    contraction, ``is_composite`` that torch can decompose it, ``has_other_gradient`` that a mode would change
    its gradient.
    """

    func: Any
    name: str
    formula: Formula | None = None
    costs_nothing: bool = False
    communicates: bool = False
    is_composite: bool = False
    has_other_gradient: bool = False


# One per process. An operator without a formula may get one later, so it isn't cached.
_ACTIONS: dict[Any, _Action] = {}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch doesn't type it
    """Counts what runs inside ``with FlopCounter(model) as counter:``.

    Hooks on instances follow the modules, so two layers of one class stay separate. Backward is attributed by
    the sequence numbers that autograd gives nodes in forward.

    Args:
        root: module that the paths are relative to.
        formulas: the user's formulas by operator, which take precedence (see ``own_formulas``).
        force_eager: run compiled frames eagerly for now, so that everything in them is counted; they stay
            compiled afterwards. Otherwise they run compiled, bit for bit as usual: operators in their fused
            kernels aren't counted, and nothing is attributed to such a model's modules.
        refuse_collectives: raise ModelProfError before an operator communicates, for a model copy that runs
            in one process only.
        watches: called in order after each operator as ``watch(func, args, kwargs, result, where,
            took_ns=...)``. ``where()`` returns its phase and module, ``took_ns`` its wall time on the CPU.
            They must not raise. ``None`` is skipped.

    Attributes:
        flops: FLOPs by place, Fourier transforms included under their operators' names. A kernel that
            recomputes part of the forward has two places, that part being under ``recompute``.
        calls: calls of the operators in ``flops``; an operator with two places counts at the first.
        uncounted: calls of operators that may contain contractions but have no formula, or one that failed.
        errors: number of formula errors by operator and message.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo keep the frames it meets; otherwise it would mark them as never to be compiled."""
        return True

    def __init__(
        self,
        root: nn.Module,
        formulas: Mapping[Any, Formula] | None = None,
        *,
        force_eager: bool = True,
        refuse_collectives: bool = False,
        watches: Sequence[Callable[..., None] | None] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[CountedPlace] = Counter()
        self.calls: Counter[CountedPlace] = Counter()
        self.uncounted: Counter[CountedPlace] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self._gradients = SameGradients(self, on_error=partial(_note, self.errors, "gradient"))
        self._own = own_formulas(formulas)
        self._force_eager = force_eager
        self._refuse_collectives = refuse_collectives
        self._watches = tuple(one for one in watches if one is not None)
        self._whereabouts = Whereabouts(
            root, into_compiled=force_eager, on_error=partial(_note, self.errors, "module")
        )
        self._cleanup: list[Callable[[], None]] = []
        self._actions: dict[int, _Action] = {}
        self._decomposes: dict[tuple[Any, str], bool] = {}

    def __enter__(self) -> FlopCounter:
        try:
            stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
            if self._force_eager and stance is not None:
                eager = stance("force_eager")
                self._cleanup.append(lambda: eager.__exit__(None, None, None))
            self._cleanup.append(self._gradients.remove)
            self._cleanup.append(self._whereabouts.leave)
            self._whereabouts.follow()
            enter_mode(self)
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
            leave_mode(self)
        finally:
            self._clean_up()

    def before_backward(self) -> None:
        """Announce that a backward pass may start.

        Call it where none of the step's operators can run between the last one and the pass.
        """
        self._gradients.settle()

    def _clean_up(self) -> None:
        while self._cleanup:
            self._cleanup.pop()()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if id(kind) not in _PLAIN_TYPES and kind.__torch_dispatch__ is not _NO_DISPATCH:
                return NotImplemented  # the tensor's own class decomposes it, and its calls come here
        # Calling the operator from Python would repeat a class's __torch_function__, which is done.
        with torch._C.DisableTorchFunctionSubclass():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._gradients.waiting:
            self._gradients.settle()
        action = self._actions.get(id(func))  # an operator's own hash is slow Python
        if action is None:
            action = self._actions[id(func)] = self._find_out(func)
        if self._refuse_collectives and action.communicates:
            raise ModelProfError(
                f"the model communicates ({action.name}), and a copy counted in one process must not wait for"
                " the others"
            )
        may_cost = not action.costs_nothing
        if may_cost and action.formula is None and action.is_composite and self._is_to_decompose(func, args):
            return self._decompose(func, args, kwargs)
        began_ns = host_clock()
        result = func(*args, **kwargs)
        took_ns = host_clock() - began_ns
        if action.has_other_gradient:
            self._gradients.note(args, result)
        if may_cost:
            try:
                self._count(action, args, kwargs, result)
            except Exception as error:
                self.errors[action.name, describe_error(error)] += 1
        for watch in self._watches:
            watch(func, args, kwargs, result, self._whereabouts.now, took_ns=took_ns)
        return result

    def _find_out(self, func: Any) -> _Action:
        try:
            operator = _packet_of(func)
            if operator in self._own:
                return _action_of(func, self._own[operator])
            known = _ACTIONS.get(func)
            if known is None:
                known = _action_of(func, formula_of(operator))
                if known.formula is not None or known.costs_nothing:
                    _ACTIONS[func] = known
            return known
        except Exception as error:  # an unusual operator must not end the step
            self.errors[str(func), describe_error(error)] += 1
            return _Action(func, str(func))

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decompose the operator with the mode on, so that its parts come here; hooks stay."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _is_to_decompose(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether torch would only decompose the operator, as it has no kernel for the device."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if any(value.is_nested for value in tensors):
            return False
        device = tensors[0].device.type if tensors else "cpu"
        known = self._decomposes.get((func, device))
        if known is None:
            backend = {"privateuseone": "PrivateUse1", "meta": "Meta"}.get(device, device.upper())
            try:
                known = not _has_kernel(func, backend)
            except RuntimeError:  # the dispatcher's name for the device differs
                known = False
            self._decomposes[func, device] = known
        return known

    def _count(self, action: _Action, args: Any, kwargs: Any, result: Any) -> None:
        dtype = _first_inexact_dtype(args) or _first_inexact_dtype(kwargs.values())
        phase, module = self._whereabouts.now()
        place = CountedPlace(phase, module, action.name, _name_of_dtype(dtype))
        if action.formula is None:
            self.uncounted[place] += 1
            return
        try:
            counted = action.formula(*args, **kwargs, out_val=result)
            if not isinstance(counted, WithRecompute):
                counted = WithRecompute(counted, 0)
            flops, recompute = _checked(counted.gradients), _checked(counted.recompute)
        except Exception as error:
            self.uncounted[place] += 1
            self.errors[place.operator, describe_error(error)] += 1
            return
        if dtype is not None and dtype.is_complex and action.name not in FOURIER_OPERATORS:
            flops, recompute = flops * _COMPLEX_PRODUCTS, recompute * _COMPLEX_PRODUCTS
        self.flops[place] += flops
        self.calls[place] += 1
        if recompute:
            again = place._replace(phase="recompute")
            self.flops[again] += recompute
            self.calls[again] += 0


def _action_of(func: Any, formula: Formula | None) -> _Action:
    return _Action(
        func=func,
        name=name_of(_packet_of(func)),
        formula=formula,
        costs_nothing=formula is None and holds_no_contraction(func),
        communicates=communicates(func),
        is_composite=_has_kernel(func, "CompositeImplicitAutograd"),
        has_other_gradient=SameGradients.is_needed_for(name_of(_packet_of(func))),
    )


def _note(errors: Counter[tuple[str, str]], what: str, error: Exception) -> None:
    errors[what, describe_error(error)] += 1


def _checked(flops: Any) -> int:
    if isinstance(flops, bool | torch.Tensor):  # reading a tensor's value may synchronize
        raise TypeError(f"expected a whole number of FLOPs, got a {type(flops).__name__}")
    if int(flops) != flops or flops < 0:
        raise ValueError(f"expected a whole number of FLOPs, got {quoted(flops)}")
    if flops > _MOST_FLOPS:
        raise ValueError("expected at most 10**18 FLOPs in one call, got more")
    return int(flops)


def _first_inexact_dtype(arguments: Iterable[Any]) -> torch.dtype | None:
    for value in arguments:
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point or value.dtype.is_complex:
                return value.dtype
        elif isinstance(value, (list, tuple)):
            found = _first_inexact_dtype(value)
            if found is not None:
                return found
    return None


def _name_of_dtype(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _packet_of(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)


def _has_kernel(func: Any, key: str) -> bool:
    """Whether the dispatcher has a kernel under a key.

    It doesn't know operators that only read a tensor, such as ``prim::device``. Asking for those would end
    the process, because C++ requests the device where it must not fail.
    """
    if isinstance(func, torch._ops.HigherOrderOperator) or func.namespace == "prim":
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
