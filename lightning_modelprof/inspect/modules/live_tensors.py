"""Follows tensors that are alive on the model's device through one step, operator by operator.

Each storage has a weak reference, which torch lets die with the memory itself and not with earlier Python
objects. So nothing is kept alive, and what only autograd still holds counts. Only a tensor's place and size
are read.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import describe_error
from lightning_modelprof.inspect.flops.formulas import name_of
from lightning_modelprof.inspect.lines.sites import Where
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.inspect.modules.tensor_memory import local_part, memory_of, plain_tensors, unnoticed
from lightning_modelprof.measure.stored import buffers_of, named_buffers, named_parameters, parameters_of
from lightning_modelprof.run.memory import CATEGORIES, PhasePeak, StepMemory
from lightning_modelprof.run.model_cost import FLOP_PHASES

_NOT_YET: Final = 2**62


_MADE_IN: Final = {"forward": "activations", "recompute": "activations"}


_PASSING: Final = ("activations", "other")
"""Categories that may still turn out to be a gradient or optimizer state."""


_BACKWARD: Final = ("backward", "recompute")


class _Storage(weakref.ref):  # type: ignore[type-arg]  # generic only to type checkers
    """A weak reference to a storage, with its data.

    ``address`` is unique among living storages. ``made`` and ``died`` are operator numbers: the storage was
    alive for ``made <= number < died``.
    """

    __slots__ = ("address", "category", "died", "made", "num_bytes")

    address: int
    num_bytes: int
    category: str
    made: int
    died: int


@dataclass(slots=True)
class _Peak:
    """Peak of the living bytes after an operator of one phase, and that operator's number."""

    num_bytes: int = -1
    number: int = 0
    func: Any = None
    module: str = ""


class LiveTensors:
    """Follows a step's storages from :meth:`begin` to :meth:`end`.

    Called after each operator, as a watch of ``FlopCounter``. A storage counts from the operator that made it
    or first used it, and in full however many tensors view it. The role of a tensor made in backward is only
    known after backward. So each storage's creation and death are recorded, and a peak's contents are
    classified at the end.

    Args:
        device: only storages on it count.

    Attributes:
        errors: number of our errors by message.

    Caveats:
        Memory that an operator allocates and frees internally isn't seen, nor what a library keeps (cuBLAS's
        workspace); the allocator may round sizes up. The new size of a storage resized without an operator is
        seen at the next operator that uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self.errors: Counter[str] = Counter()
        self._device = device
        self._module: nn.Module | None = None
        self._optimizers: Sequence[Any] = ()
        self._alive: dict[int, _Storage] = {}
        self._storages: list[_Storage] = []
        self._dead: deque[_Storage] = deque()  # they may die on autograd's thread
        self._number = 0
        self._total = self._begin_bytes = 0
        self._peaks: dict[str, _Peak] = {}
        self._phase = ""
        self._had_backward = False
        self._unseen: Counter[str] = Counter()

    def begin(self, module: nn.Module, optimizers: Sequence[Any], batch: Any) -> None:
        """Start once the batch is there, before its work."""
        self._module, self._optimizers = module, optimizers
        with unnoticed():
            self._add_all(parameters_of(module), "parameters")
            self._add_all(buffers_of(module), "buffers")
            self._add_all(_gradients(module), "gradients")
            self._add_all(_states(optimizers), "optimizer state")
            self._add_all(_tensors_in(batch), "batch")
        self._begin_bytes = self._total

    def __call__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        where: Where,
        **_: int,
    ) -> None:
        try:
            self._take_dead()
            self._number += 1
            phase, module = self._place(where)
            for value in args:
                self._see(value, "other")
            if kwargs:
                for value in kwargs.values():
                    self._see(value, "other")
            self._see(result, _MADE_IN.get(phase, "other"))
            peak = self._peaks.get(phase)
            if peak is None:
                peak = self._peaks[phase] = _Peak()
            if self._total > peak.num_bytes:
                peak.num_bytes, peak.number, peak.func, peak.module = self._total, self._number, func, module
        except Exception as error:  # no error may end the step
            self.errors[describe_error(error)] += 1

    def end(self) -> None:
        """End after the step's work, while its gradients and the optimizer state still exist."""
        module, self._module = self._module, None
        if module is None:
            return
        self._take_dead()
        try:
            with unnoticed():
                self._name(_gradients(module), "gradients")
                self._name(_states(self._optimizers), "optimizer state")
                self._name(buffers_of(module), "buffers")
        finally:
            self._optimizers = ()
            self._alive.clear()

    def result(self, step: int) -> StepMemory:
        """Return the record, after :meth:`end`."""
        dropped = [f"{message} ({count} times)" for message, count in self.errors.items()]
        dropped += [
            f"tensors of {kind}, whose memory PyTorch doesn't show ({count} times)"
            for kind, count in self._unseen.items()
        ]
        return StepMemory(
            step=step,
            device=self._device.type,
            begin_bytes=self._begin_bytes,
            begin_by_category=self._by_category(0),
            peaks=tuple(
                PhasePeak(
                    phase=phase,
                    num_bytes=peak.num_bytes,
                    by_category=self._by_category(peak.number),
                    operator=name_of(getattr(peak.func, "overloadpacket", peak.func)),
                    module=peak.module,
                )
                for phase in FLOP_PHASES
                if (peak := self._peaks.get(phase)) is not None
            ),
            dropped=tuple(dropped),
        )

    def _by_category(self, number: int) -> dict[str, int]:
        """Return the bytes alive after an operator, 0 being before the first."""
        sums = dict.fromkeys(CATEGORIES, 0)
        for storage in self._storages:
            if storage.made <= number < storage.died:
                sums[storage.category] += storage.num_bytes
        return sums

    def _place(self, where: Where) -> tuple[str, str]:
        """Return phase and module; names gradients when a backward pass is over."""
        phase, module = where()
        if phase == self._phase:
            return phase, module
        if phase == "forward" and self._had_backward and not module and not torch.is_grad_enabled():
            phase = "optimizer"  # clipping, and other work on the gradients
        if phase in _BACKWARD:
            self._had_backward = True
        elif self._phase in _BACKWARD and self._module is not None:
            with unnoticed():
                self._name(_gradients(self._module), "gradients")
        self._phase = phase
        return phase, module

    def _take_dead(self) -> None:
        dead = self._dead
        while dead:
            storage = dead.popleft()
            if self._alive.get(storage.address) is storage:
                self._remove(storage, self._number + 1)

    def _remove(self, storage: _Storage, died: int) -> None:
        del self._alive[storage.address]
        storage.died = died
        self._total -= storage.num_bytes

    def _see(self, value: Any, category: str) -> None:
        if isinstance(value, torch.Tensor):
            self._add(value, category)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._see(item, category)

    def _add_all(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        for tensor in tensors:
            for one in self._plain_tensors(tensor):
                self._add(one, category)

    def _add(self, tensor: torch.Tensor, category: str) -> None:
        if tensor.device != self._device:
            return
        storage = self._storage_of(tensor)
        if storage is None:
            return
        address, num_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(address)
        if known is not None:
            if known.num_bytes == num_bytes:
                return
            self._remove(known, self._number)
            category = known.category
        if not num_bytes:
            return
        followed = _Storage(storage, self._dead.append)
        followed.address, followed.num_bytes, followed.category = address, num_bytes, category
        followed.made, followed.died = self._number, _NOT_YET
        self._alive[address] = followed
        self._storages.append(followed)
        self._total += num_bytes

    def _name(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of storages made in the step."""
        for tensor in tensors:
            for one in self._plain_tensors(tensor):
                storage = self._storage_of(one)
                known = None if storage is None else self._alive.get(storage._cdata)
                if known is not None and known.category in _PASSING:
                    known.category = category

    def _storage_of(self, tensor: torch.Tensor) -> Any:
        """Return the storage; ``None``, with a note, where torch shows none."""
        try:
            return tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            self._unseen[str(tensor.layout)] += 1
            return None

    @staticmethod
    def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter(()) if is_lazy(tensor) else plain_tensors(local_part(tensor))


def _gradients(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in parameters_of(module):
        # FSDP shows views as parameters; reading the gradient of a non-leaf would warn.
        if parameter.is_leaf and parameter.grad is not None:
            yield parameter.grad


def _states(optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        yield from _tensors_in(getattr(optimizer, "state", None))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in list(value.values()):
            yield from _tensors_in(item)
    elif isinstance(value, Sequence | set) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None))


def held_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return initialised parameters, each once, by the user's name for it."""
    return _by_name(named_parameters(module))


def held_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return _by_name(named_buffers(module))


def storages_of(tensor: torch.Tensor) -> Mapping[int, int]:
    """Return a tensor's storage sizes in bytes by address, unique among living storages."""
    with unnoticed():
        return memory_of(tensor).storages


def _by_name(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Key tensors by plain name, or by the name with wrappers if that is taken."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if not is_lazy(tensor):
            path = plain_path(name)
            found[name if path in found else path] = tensor
    return found
