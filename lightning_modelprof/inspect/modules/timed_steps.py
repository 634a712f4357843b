"""Marks of timed steps, and the times between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_modelprof.inspect.core.model_copies import COMPILED_FROM, find_compiled
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.measure.clock import DeviceClock, HostClock
from lightning_modelprof.measure.stored import is_a, modules_of, named_modules
from lightning_modelprof.run.model_cost import ModuleTime, ModuleTimes
from lightning_modelprof.units import milliseconds


class TimedOwner(NamedTuple):
    """The owner of a time span.

    ``path`` is a module's, or ``None`` for nodes that no module's forward made. While an owner that
    ``hides_modules`` is innermost, modules that run are part of it.
    """

    path: str | None
    is_backward: bool
    hides_modules: bool = False


class HostMarks:
    """The host clock with a device clock's interface; its marks are nanoseconds and always reached."""

    def __init__(self, clock: HostClock) -> None:
        self.mark: Callable[[], Any] = clock

    def is_reached(self, mark: int) -> bool:  # noqa: ARG002
        return True

    def elapsed_ns(self, begin: int, end: int) -> int | None:
        return end - begin

    def release(self, mark: int) -> None: ...


class Track:
    """One thread's marks; the time from each mark on belongs to the mark's owner."""

    __slots__ = ("marks", "open")

    def __init__(self) -> None:
        self.open: list[TimedOwner] = []
        self.marks: list[tuple[Any, TimedOwner | None]] = []

    def begin(self, mark: Any, owner: TimedOwner) -> None:
        """Start the owner's time."""
        self.open.append(owner)
        self.marks.append((mark, owner))

    def end(self, mark: Any, owner: TimedOwner) -> None:
        """End the owner's time and continue that of the enclosing owner."""
        running = self.open
        if running and running[-1] is owner:
            running.pop()
        elif owner in running:
            # An owner that failed between start and end has left its entry above this one.
            while running.pop() != owner:
                pass
        self.marks.append((mark, running[-1] if running else None))


@dataclass(slots=True)
class TimedStep:
    """One armed step.

    Attributes:
        tracks: by thread, as autograd has its own threads on a device.
        calls: calls of modules in forward, by path.
        hidden: paths of modules whose backward is part of another owner's.
        has_backward: whether any node was timed.
    """

    tracks: dict[int, Track] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    hidden: set[str] = field(default_factory=set)
    has_backward: bool = False

    def track(self) -> Track:
        """Return the calling thread's track."""
        thread = threading.get_ident()
        track = self.tracks.get(thread)
        if track is None:
            track = self.tracks[thread] = Track()
        return track

    @property
    def is_complete(self) -> bool:
        return not any(track.open for track in self.tracks.values())


class TimedSteps:
    """Combines the steps whose marks are reached; others wait."""

    def __init__(self, clock: DeviceClock | HostMarks) -> None:
        self._clock = clock
        self._waiting: list[TimedStep] = []
        self._steps: list[Counter[TimedOwner]] = []
        self._calls: Counter[str] = Counter()
        self._hidden: set[str] = set()
        self._num_steps = 0
        self._num_with_backward = 0
        self._num_negative = 0

    def add(self, step: TimedStep) -> None:
        self._waiting.append(step)

    def collect(self) -> None:
        """Read the steps whose marks the device has passed, without waiting."""
        self._waiting = [step for step in self._waiting if not self._read(step)]

    def times(self, clock_name: str, notes: list[str]) -> ModuleTimes:
        """Combine the steps read so far."""
        self.collect()
        notes = list(notes)
        has_backward = self._num_with_backward == self._num_steps and self._num_steps > 0
        if self._num_with_backward and not has_backward:
            notes.append(
                f"Backward isn't measured, because it ran in only {self._num_with_backward} of"
                f" {self._num_steps} timed steps."
            )
        times = self._medians()
        if has_backward:
            notes += self._backward_notes(times)
        if self._waiting:
            notes.append(f"{len(self._waiting)} steps are left out, because the device hadn't finished them.")
        if self._num_negative:
            notes.append(f"{self._num_negative} steps are left out, because their streams overlapped.")
        backward_ns: Counter[str] = Counter()
        for owner, ns in times.items():
            if owner.path is not None and owner.is_backward:
                backward_ns[owner.path] += ns
        return ModuleTimes(
            steps=self._num_steps,
            clock=clock_name,
            times=tuple(
                ModuleTime(
                    path=path,
                    calls=self._calls[path],
                    forward_ns=times[TimedOwner(path, is_backward=False)],
                    backward_ns=backward_ns[path] if has_backward and path not in self._hidden else None,
                )
                for path in dict.fromkeys([*self._calls, *backward_ns])
            ),
            notes=tuple(notes),
        )

    def _medians(self) -> Counter[TimedOwner]:
        """Return each owner's median time per step; 0 in steps in which it didn't run."""
        owners = {owner for step in self._steps for owner in step}
        return Counter({owner: median_low([step[owner] for step in self._steps]) for owner in owners})

    def _backward_notes(self, times: Counter[TimedOwner]) -> list[str]:
        notes = []
        outside_ns = sum(ns for owner, ns in times.items() if owner.path is None)
        if outside_ns and any(owner.path is not None and owner.is_backward for owner in times):
            notes.append(
                "Backward for code outside any module, such as a loss function, takes"
                f" {milliseconds(outside_ns)} per step and isn't attributed to a module."
            )
        if self._hidden:
            notes.append(
                "Reentrant checkpoints run their own backward. Its time counts toward the module that called"
                " the checkpoint, not the modules inside."
            )
        return notes

    def _read(self, step: TimedStep) -> bool:
        clock = self._clock
        if not all(clock.is_reached(track.marks[-1][0]) for track in step.tracks.values()):
            return False
        times: Counter[TimedOwner] = Counter()
        for track in step.tracks.values():
            for (begin, owner), (end, _) in zip(track.marks, track.marks[1:], strict=False):
                if owner is None:
                    continue
                elapsed_ns = clock.elapsed_ns(begin, end)
                if elapsed_ns is None:  # another stream is behind
                    return False
                if elapsed_ns < 0:
                    self._num_negative += 1
                    return True
                times[owner] += elapsed_ns
        for track in step.tracks.values():
            for mark, _ in track.marks:
                clock.release(mark)
        self._steps.append(times)
        self._calls += step.calls
        self._hidden |= step.hidden
        self._num_steps += 1
        self._num_with_backward += step.has_backward
        return True


_WRAPPER = "_orig_mod"


@dataclass(slots=True)
class Regions:
    """Where hooks go.

    Attributes:
        hooked: paths and modules that get their own hooks, in the order of ``named_modules``; a wrapper, such
            as FSDP's, has the path of the module inside.
        called: modules whose call is compiled (``module.compile()``): hooks would be compiled too, so the
            call itself is wrapped.
        watched: modules that hooks would take off their fast path; global hooks see them.
        notes: what isn't timed separately, and why.
    """

    hooked: list[tuple[str, nn.Module]] = field(default_factory=list)
    called: list[tuple[str, nn.Module]] = field(default_factory=list)
    watched: list[tuple[str, nn.Module]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_regions(root: nn.Module) -> Regions:
    """Decide how each module of a model is timed, if at all.

    The outermost compiled module is timed as a whole: hooks inside would not be called, break its graph or
    recompile it. A TorchScript module can't have hooks, so its time is its caller's.
    nn.TransformerEncoderLayer in eval mode keeps its fast path only without hooks.
    """
    regions = Regions()
    if getattr(root, "_compiler_ctx", None):  # Lightning's mark of torch.compile(LightningModule)
        regions.notes.append("The whole model is compiled, so its modules can't be timed.")
        return regions
    heads: dict[int, str] = {}
    scripts: list[str] = []
    inside: set[int] = set()
    for path, module in named_modules(root):
        is_script = is_a(module, torch.jit.ScriptModule)
        if id(module) in inside or not (is_script or _is_compiled(module)):
            continue
        inside.update(id(part) for part in modules_of(module))
        name = plain_path(path)
        if is_script:
            scripts.append(name or type(module).__name__)
        else:
            heads[id(module)] = name or type(module).__name__
    fast = _modules_with_a_fast_path(root)
    without_hooks = inside | fast
    # Global hooks make compiled modules complain, and would be compiled with them.
    can_watch = not heads and find_compiled(root) is None
    for path, module in named_modules(root):
        name = plain_path(path)
        if id(module) in heads:
            (regions.called if _has_compiled_call(module) else regions.hooked).append((name, module))
        elif id(module) not in without_hooks:
            regions.hooked.append((name, module))
        elif id(module) not in inside and can_watch:
            regions.watched.append((name, module))
    unseen: list[str] = []
    if not can_watch:
        layers = [(p, m) for p, m in named_modules(root) if is_a(m, nn.TransformerEncoderLayer)]
        unseen = [plain_path(path) for path, layer in layers if id(layer) in fast - inside]
    regions.notes += _notes(list(heads.values()), scripts, unseen)
    return regions


def _modules_with_a_fast_path(root: nn.Module) -> set[int]:
    return {
        id(part)
        for layer in modules_of(root)
        if is_a(layer, nn.TransformerEncoderLayer) and not layer.training
        for part in modules_of(layer)
    }


def _has_compiled_call(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module, or everything it does, is compiled."""
    if _WRAPPER in module._modules or _has_compiled_call(module):
        return True
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    return isinstance(forward, FunctionType) and COMPILED_FROM in vars(forward)


def _notes(wholes: list[str], scripts: list[str], unseen: list[str]) -> list[str]:
    notes = []
    if wholes:
        notes.append(f"Compiled modules are timed as a whole: {', '.join(wholes)}.")
    if scripts:
        notes.append(
            "TorchScript modules can't have hooks, so their time counts toward the module that calls them:"
            f" {', '.join(scripts)}."
        )
    if unseen:
        notes.append(
            "Hooks would turn off these layers' fast path, so their time counts toward the module that calls"
            f" them: {', '.join(unseen)}."
        )
    return notes
