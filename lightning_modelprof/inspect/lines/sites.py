"""Notes a step's source lines that wait for the device, copy, or run many operators.

Reads only tensors' shapes, dtypes and places, and keeps no tensors. Errors here are counted and never reach
the step.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_modelprof.errors import describe_error
from lightning_modelprof.inspect.core.preserved import SameGradients, enter_mode, leave_mode
from lightning_modelprof.inspect.core.whereabouts import SequenceMarks
from lightning_modelprof.inspect.flops.formulas import name_of
from lightning_modelprof.inspect.lines.constants import ConstantWatch, tensors_in_arguments
from lightning_modelprof.inspect.lines.frames import Spot, UserLines
from lightning_modelprof.inspect.lines.frozen import VaryingWatch
from lightning_modelprof.inspect.lines.site_sums import (
    MOST_LINES,
    Bucket,
    Sighting,
    SiteProbe,
    SiteSums,
    probe_of,
)
from lightning_modelprof.measure.stored import is_trained, parameters_of, undisturbed
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.run.sites import PRINT, SYNCHRONISATION, StepSites


class ReductionWatch:
    """Finds reductions of trained parameters, which it follows through operators by weak references."""

    def __init__(self, root: nn.Module | None) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        with undisturbed():
            for one in () if root is None else parameters_of(root):
                if is_trained(one):
                    self._known[id(one)] = weakref.ref(one)

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, *, is_view: bool) -> bool:
        given = [one for one in tensors_in_arguments((*args, *kwargs.values())) if one.dim()]
        if not given or not all(map(self._knows, given)) or not isinstance(result, torch.Tensor):
            return False
        if not result.dim():
            return True
        if is_view or torch.Tag.pointwise in func.tags:
            self._known[id(result)] = weakref.ref(result)
        return False

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor


_MOST_MARKS: Final = 100_000
"""Most line changes that are remembered for the backward pass."""
_NO_NODE: Final = 2**63
"""From this sequence number on, nodes accumulate gradients of leaves: created once, by no line."""

_NO_TASK: Final = -1
"""Autograd's answer outside a backward pass; passes are numbered from 0."""
_OUR_FRAMES: Final = 4
"""From the search for the user's line up to the dispatch mode's caller."""

Where: TypeAlias = Callable[[], tuple[str, str]]
"""Phase and module path of the running operator."""


class _KnownCode(NamedTuple):
    """Facts determined once per operator; ``func`` is kept alive so that its id stays unique."""

    func: Any
    name: str
    is_view: bool
    probe: SiteProbe | None


class SiteWatch:
    """Notes what runs between :meth:`begin` and :meth:`end`.

    A ``FlopCounter`` or a :class:`BatchSites` calls it with the operators. Torch hides those that format a
    tensor as text, so ``torch._tensor_str._str`` is replaced in the meantime by a function that notes the
    call and then calls the original.

    Args:
        owners: the user's classes.
        outside: code that the step runs in (see ``user_code.loop_codes``).
        root: the model, whose tensors may stay the same from step to step; ``None`` without one.

    Attributes:
        errors: number of our errors by message.
        varying: finds results that differ between steps; ``None`` once they're unknown.
    """

    def __init__(
        self,
        owners: Iterable[type] = (),
        outside: Iterable[CodeType] = (),
        root: nn.Module | None = None,
    ) -> None:
        self.where: Where = _in_forward
        self._constants = ConstantWatch(root)
        self._reductions = ReductionWatch(root)
        self._newest_pass = _NO_TASK
        self.varying = _varying_watch(root)
        self.errors: Counter[str] = Counter()
        self._lines = UserLines(UserCode(owners), outside)
        self._known: dict[int, _KnownCode] = {}
        self._sums = SiteSums()
        self._thread = threading.get_ident()
        self._recomputing: set[int] = set()  # other threads, which number their own nodes
        self._marks: SequenceMarks[Spot | None] = SequenceMarks(None)
        self._marked: Spot | None = None
        self._num_marks = 0
        self._number = 0
        self._print: tuple[Any, Any] | None = None

    def begin(self) -> None:
        self._number = torch._C._autograd._get_sequence_nr()
        original = getattr(torch._tensor_str, "_str", None)
        if original is None or self._print is not None:
            return

        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if _get_current_dispatch_mode() is not None:  # otherwise another thread's
                self._note_print(tensor)
            return original(tensor, *args, **kwargs)

        self._print = (original, noted)
        torch._tensor_str._str = noted  # type: ignore[assignment]  # the same to callers

    def end(self) -> None:
        """Restore torch's function; safe to call more than once."""
        if self._print is not None and torch._tensor_str._str is self._print[1]:
            torch._tensor_str._str = self._print[0]
        self._print = None

    def __call__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        where: Where,
        *,
        took_ns: int = 0,
    ) -> None:
        """Note an operator that ran in the phase and module of ``where()``, and its wall time on the CPU."""
        try:
            known = self._known.get(id(func))
            if known is None:
                known = self._known[id(func)] = _find_out(func)
            self.where = where
            phase, module = where()
            if phase == "backward":
                self._note_pass()
            self._follow(func, args, kwargs, result, (phase, module))
            place = (self._spot(phase), phase, module)
            call = (func, args, kwargs, result)
            operands = (*args, *kwargs.values()) if kwargs else args
            self._sums.count(
                place,
                known.name,
                operands,
                result,
                is_view=known.is_view,
                is_constant=self._is(self._constants, call, known.is_view),
                is_reduction=self._is(self._reductions, call, known.is_view),
                is_logging=self._lines.is_logging,
                took_ns=took_ns,
            )
            if known.probe is not None:
                sighting = known.probe(args, kwargs, result)
                if sighting is not None:
                    self._note(sighting, place, known.name)
        except Exception as error:  # no error may end the step
            self.note_error(error)

    def _note_pass(self) -> None:
        """At an autograd pass's first operator, count the pass where ``torch.autograd.grad`` started it."""
        number = torch._C._current_graph_task_id()
        if number <= self._newest_pass:
            return
        self._newest_pass = number
        # A device's part of a pass runs in another thread, which this one waits for.
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
            if frame.f_code is torch.autograd.grad.__code__:
                spot = self._lines.above(frame)
                if spot is not None:
                    self._sums.count_gradients((spot, "forward", ""))
                return
            frame = frame.f_back

    @staticmethod
    def _is(watch: Callable[..., bool], call: tuple[Any, ...], is_view: bool) -> bool:
        try:
            return watch(*call, is_view=is_view)
        except Exception:  # a tensor without a storage, or a higher-order operator without a schema
            return False

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any, where: tuple[str, str]) -> None:
        if self.varying is None:
            return
        try:
            self.varying(func, args, kwargs, result, where)
        except Exception:  # a tensor without a storage, or a higher-order operator without a schema
            self.varying = None

    def note_error(self, error: Exception) -> None:
        self.errors[describe_error(error)] += 1

    def _spot(self, phase: str) -> Spot | None:
        """Return the user's running line; in backward, the line whose gradient is computed."""
        spot = self._lines.innermost(_OUR_FRAMES)
        thread = threading.get_ident()
        if phase == "backward":
            return self._spot_of_node() if spot is None and thread not in self._recomputing else spot
        if thread != self._thread:
            self._recomputing.add(thread)
            return spot
        number = torch._C._autograd._get_sequence_nr()
        if number != self._number:
            # Autograd numbers a node just before its operator runs, so newer nodes belong to this line.
            if spot != self._marked and self._num_marks < _MOST_MARKS:
                self._marks.add(self._number, spot)
                self._marked = spot
                self._num_marks += 1
            self._number = number
        return spot

    def _spot_of_node(self) -> Spot | None:
        node = torch._C._current_autograd_node()
        number = _NO_NODE if node is None else node._sequence_nr()
        return None if number >= _NO_NODE else self._marks.owner_of(number)

    def _note(self, sighting: Sighting, place: Bucket, operator: str) -> None:
        spot, callers = self._lines.with_callers()
        self._sums.note(sighting, (spot or place[0], *place[1:]), callers, operator)

    def _note_print(self, tensor: Any) -> None:
        try:
            device = tensor.device.type
            sighting = Sighting(SYNCHRONISATION, device, is_blocking=None if device == "cpu" else True)
            self._note(sighting, (None, *self.where()), PRINT)
        except Exception as error:  # the user's print continues
            self.note_error(error)

    def result(self, *, step: int | None = None, device: str = "cpu") -> StepSites:
        """Return the record; ``device`` is the model's device type."""
        lines = self._sums.line_counts(self._lines, constants_are_sure=self._constants.is_sure())
        dropped = [f"{message} ({count} times)" for message, count in self.errors.items()]
        if self._sums.dropped:
            dropped.append(f"{self._sums.dropped} calls from too many different places")
        if self._num_marks >= _MOST_MARKS:
            dropped.append("some lines of the backward pass, because the forward changed lines too often")
        if len(lines) > MOST_LINES:
            dropped.append(f"{len(lines) - MOST_LINES} lines with fewer operators")
        return StepSites(
            step=step,
            device=device,
            sites=self._sums.source_sites(self._lines),
            lines=tuple(lines[:MOST_LINES]),
            dropped=tuple(dropped),
        )


class BatchSites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch doesn't type it
    """Shows a watch what runs in the step before and after its batch, which no counter sees.

    Args:
        phase: ``BATCH_START`` or ``BATCH_END``.
        is_over: whether something else is running by now, such as a validation loop, which isn't shown.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo keep the frames it meets; otherwise it would mark them as never to be compiled."""
        return True

    def __init__(self, watch: SiteWatch, phase: str, is_over: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self._where = (phase, "")
        self._is_over = is_over
        self._gradients = SameGradients(self, on_error=watch.note_error)

    def __enter__(self) -> BatchSites:
        enter_mode(self)
        self._watch.where = self._now
        _ACTIVE.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.remove(self)
        self._gradients.remove()
        self._watch.where = _in_forward
        leave_mode(self)

    def _now(self) -> tuple[str, str]:
        return self._where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._gradients.waiting:
            self._gradients.settle()
        result = func(*args, **kwargs)
        if SameGradients.is_needed_for(name_of(getattr(func, "overloadpacket", func))):
            self._gradients.note(args, result)
        if not self._is_over():
            self._watch(func, args, kwargs, result, self._now)
        return result


_ACTIVE: Final[list[BatchSites]] = []


def _leave_in_child() -> None:
    while _ACTIVE:
        _ACTIVE[-1].__exit__(None, None, None)


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(after_in_child=_leave_in_child)


def _varying_watch(root: nn.Module | None) -> VaryingWatch | None:
    try:
        return VaryingWatch(root)
    except Exception:  # a parameter without a storage
        return None


def _in_forward() -> tuple[str, str]:
    return "forward", ""


def _find_out(func: Any) -> _KnownCode:
    packet = getattr(func, "overloadpacket", func)
    return _KnownCode(func, name_of(packet), bool(getattr(func, "is_view", False)), probe_of(func))
