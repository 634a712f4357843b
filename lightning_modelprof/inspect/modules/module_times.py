"""Times a model's modules in real steps: forward by module hooks, backward by node hooks.

Each start or end of a module or autograd node sets a mark: the host clock's time, or an event on the device's
stream. The time between two marks belongs to whatever is innermost then, so nothing counts twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn

from lightning_modelprof.errors import ModelProfError, describe_error
from lightning_modelprof.inspect.core.model_copies import nodes_behind
from lightning_modelprof.inspect.core.whereabouts import ModuleHook, SequenceMarks, hooked_alone
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.inspect.modules.timed_steps import (
    HostMarks,
    TimedOwner,
    TimedStep,
    TimedSteps,
    find_regions,
)
from lightning_modelprof.measure.clock import DeviceClock, HostClock, device_clock, host_clock
from lightning_modelprof.measure.stored import named_modules
from lightning_modelprof.run.model_cost import ModuleTimes

_NO_TASK = -1  # autograd's answer outside a backward pass


class ModuleTimer:
    """Times modules between ``arm`` and ``disarm``, one step at a time; several steps add up.

        timer = ModuleTimer(model)
        with timer:
            loss = model(batch).sum()
            timer.on_before_backward(loss)
            loss.backward()
        timer.times()

    A module's forward time is the time in its calls, minus the modules that these call. Its backward time is
    the time in the autograd nodes that its forward made, including checkpoint recomputation, and in the nodes
    that accumulate its parameters' gradients.

    The timer leaves nothing on the model or graph and doesn't change what the step computes. Its errors end
    the measurement, not the step. Arm it after a first step: if ``torch.compile`` meets a user's function
    while its modules have hooks, it compiles that function again when they are gone.

    Args:
        root: module that the paths are relative to.
        device: records the marks on its stream if it can be timed apart from the CPU; they are read later,
            without waiting.
    """

    def __init__(
        self,
        root: nn.Module,
        clock: HostClock = host_clock,
        device: DeviceClock | torch.device | None = None,
    ) -> None:
        self._root = root
        if isinstance(device, torch.device):
            device = device_clock(device)
        self._clock_name = "host" if device is None else "device"
        self._clock: DeviceClock | HostMarks = HostMarks(clock) if device is None else device
        self._steps = TimedSteps(self._clock)
        self._step: TimedStep | None = None
        self._is_armed = False
        self._thread = 0
        # The owners of each module's forward and backward.
        self._owners: dict[int, tuple[TimedOwner, TimedOwner]] = {}
        self._wrapped: set[int] = set()
        self._owner_of_parameter: dict[int, str] = {}
        self._marks: SequenceMarks[str | None] = SequenceMarks(None)
        self._nodes = NodeHooks(self._owner_of_node, self._begin, self._end)
        self._cleanup: list[Callable[[], Any]] = []
        self._notes: dict[str, None] = {}

    # ---- Arming and disarming

    def arm(self) -> None:
        """Prepare for one step.

        Raises:
            ModelProfError: when already armed.
        """
        if self._is_armed:
            raise ModelProfError("ModuleTimer.arm: already armed. Call disarm() first")
        self._is_armed = True
        self._step = TimedStep()
        self._marks = SequenceMarks(None)
        self._thread = threading.get_ident()
        try:
            self._follow_modules()
            self._find_parameters()
            self._mark_sequence(None)
        except BaseException:
            self.disarm(failed=True)
            raise

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Time the backward pass about to start at ``loss``; a step may have several."""
        if self._step is None:
            return
        try:
            if compiles_backward():
                self._notes["Autograd is compiled, so backward can't be timed by module."] = None
            elif self._nodes.attach(loss):
                self._step.has_backward = True
        except Exception as error:
            self._give_up(error)

    def disarm(self, *, failed: bool = False) -> None:
        """Remove all hooks; can be called at any time.

        Args:
            failed: whether the step didn't finish, so that it doesn't count.
        """
        self._nodes.remove()
        while self._cleanup:
            self._cleanup.pop()()
        self._owners = {}
        self._owner_of_parameter = {}
        self._marks = SequenceMarks(None)
        step, self._step = self._step, None
        self._is_armed = False
        if step is not None and step.is_complete and not failed:
            self._steps.add(step)

    def __enter__(self) -> ModuleTimer:
        self.arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disarm(failed=error is not None)

    def times(self) -> ModuleTimes:
        """Return times of the steps that the device has finished, leaving out others."""
        return self._steps.times(self._clock_name, list(self._notes))

    # ---- Hooks

    def _follow_modules(self) -> None:
        regions = find_regions(self._root)
        self._notes.update(dict.fromkeys(regions.notes))
        for path, module in (*regions.hooked, *regions.called, *regions.watched):
            self._owners[id(module)] = (
                TimedOwner(path, is_backward=False),
                TimedOwner(path, is_backward=True),
            )
        # A wrapper and its module share a path and count as one: the inner call isn't counted.
        outermost = {path: id(module) for path, module in reversed(regions.hooked)}
        self._wrapped = {id(module) for path, module in regions.hooked if outermost[path] != id(module)}
        before, after = ModuleHook(self._enter, self._give_up), ModuleHook(self._leave, self._give_up)
        for _, module in regions.hooked:
            self._cleanup.append(nn.Module.register_forward_pre_hook(module, before, prepend=True).remove)
            self._cleanup.append(nn.Module.register_forward_hook(module, after, always_call=True).remove)
        for _, module in regions.called:
            self._wrap_call(module)
        if regions.watched:
            watched = {id(module) for _, module in regions.watched}
            self._cleanup += hooked_alone(watched, before, after)

    def _wrap_call(self, module: nn.Module) -> None:
        original: Any = module._compiled_call_impl

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave(module, args, None)

        def restore() -> None:
            if module._compiled_call_impl is timed:
                module._compiled_call_impl = original

        module._compiled_call_impl = timed
        self._cleanup.append(restore)

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled function calls this module
            return
        step, owners = self._step, self._owners.get(id(module))
        if step is None or owners is None:  # no longer armed, or a copy of the module
            return
        try:
            track = step.track()
            is_backward = torch._C._current_graph_task_id() != _NO_TASK
            if not is_backward:
                step.calls[owners[0].path or ""] += id(module) not in self._wrapped
                self._mark_sequence(owners[0].path)
            elif track.open and track.open[-1].hides_modules:
                step.hidden.add(owners[1].path or "")
                return
            track.begin(self._clock.mark(), owners[is_backward])
        except Exception as error:
            self._give_up(error)

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        step, owners = self._step, self._owners.get(id(module))
        if step is None or owners is None:
            return
        try:
            mark = self._clock.mark()
            track = step.track()
            is_backward = torch._C._current_graph_task_id() != _NO_TASK
            if is_backward and track.open and track.open[-1].hides_modules:
                return
            track.end(mark, owners[is_backward])
            if not is_backward:
                self._mark_sequence(track.open[-1].path if track.open else None)
        except Exception as error:
            self._give_up(error)

    def _begin(self, owner: TimedOwner) -> None:
        if self._step is None:
            return
        try:
            self._step.track().begin(self._clock.mark(), owner)
        except Exception as error:
            self._give_up(error)

    def _end(self, owner: TimedOwner) -> None:
        if self._step is None:
            return
        try:
            mark = self._clock.mark()
            self._step.track().end(mark, owner)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._step = None
        self._notes[f"A step was left out: {describe_error(error)}."] = None

    # ---- Owners of nodes

    def _find_parameters(self) -> None:
        """Assign parameters to the first module that has them, or to the one that is timed for it."""
        timed = {owners[0].path for owners in self._owners.values()}
        for path, module in named_modules(self._root):
            owner: str | None = plain_path(path)
            while owner is not None and owner not in timed:
                owner = owner.rpartition(".")[0] if owner else None
            for parameter in module._parameters.values():
                if parameter is not None and owner is not None:
                    self._owner_of_parameter.setdefault(id(parameter), owner)

    def _mark_sequence(self, path: str | None) -> None:
        # Each thread has its own numbers.
        if threading.get_ident() == self._thread:
            self._marks.add(torch._C._autograd._get_sequence_nr(), path)

    def _owner_of_node(self, node: Any) -> TimedOwner:
        number = node._sequence_nr()
        if number >= NUMBERLESS:
            variable = getattr(node, "variable", None)
            return TimedOwner(self._owner_of_parameter.get(id(variable)), is_backward=True)
        hides = node.name() == REENTRANT_CHECKPOINT
        return TimedOwner(self._marks.owner_of(number), is_backward=True, hides_modules=hides)


_Owner = TypeVar("_Owner")


NUMBERLESS: Final = 2**63
"""From this sequence number on, nodes accumulate a tensor's gradient."""


REENTRANT_CHECKPOINT: Final = "CheckpointFunctionBackward"
"""Name of the node that reruns part of the forward, with its own backward inside."""


def compiles_backward() -> bool:
    """Whether autograd itself is being compiled: hooks would become part of the compiled code."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


class NodeHooks(Generic[_Owner]):
    """Calls ``begin(owner)`` before and ``end(owner)`` after each node of a graph runs.

    The hooks are on the nodes only and hold none of them, so the graph is still freed.

    Args:
        begin: called with the owner, in the node's thread and stream.
        end: called in the same way, except for nodes that failed.
    """

    def __init__(
        self,
        owner_of: Callable[[Any], _Owner],
        begin: Callable[[_Owner], None],
        end: Callable[[_Owner], None],
    ) -> None:
        self._owner_of = owner_of
        self._begin = begin
        self._end = end
        self._handles: list[Any] = []

    def attach(self, loss: torch.Tensor) -> int:
        """Put hooks on all nodes that lead to ``loss`` and on no others; returns their number."""
        self.remove()
        for node in nodes_behind(loss):
            owner = self._owner_of(node)
            self._handles.append(node.register_prehook(partial(self._before, owner)))
            self._handles.append(node.register_hook(partial(self._after, owner)))
        return len(self._handles) // 2

    def remove(self) -> None:
        """Remove all hooks whose nodes still exist."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, owner: _Owner, _gradients: Any) -> None:
        self._begin(owner)

    def _after(self, owner: _Owner, _results: Any, _gradients: Any) -> None:
        self._end(owner)
