"""Memory of a model and its optimizers: parameters, gradients, optimizer state, buffers.

A tensor counts once, by identity, however many names it has. Bytes are those of whole storages, as that is
what the process holds. A storage shared by several tensors counts once, for the first of them in the order of
kinds. A tensor that uses part of a storage keeps all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.inspect.core.preserved import tensors_in
from lightning_modelprof.inspect.modules.modules import packed_objects, packed_tensors, plain_path
from lightning_modelprof.inspect.modules.tensor_memory import (
    has_no_memory,
    is_distributed,
    is_sparse,
    memory_of,
    unnoticed,
)
from lightning_modelprof.measure.stored import named_buffers, named_modules, named_parameters
from lightning_modelprof.run.model_cost import ModelSize, TensorSize

_PACKED: Final = "packed weights"
_KINDS: Final = (
    *("trainable parameters", "frozen parameters", _PACKED, "gradients", "optimizer state", "buffers"),
)
_MOST_NAMES: Final = 3


@dataclass(slots=True)
class _SizeSums:
    tensors: int = 0
    elements: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _Inventory:
    """All tensors seen so far, kept alive because ids and addresses are unique only among living tensors."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    packed: dict[int, Any] = field(default_factory=dict)
    storages: set[int] = field(default_factory=set)
    sums: dict[tuple[str, str], _SizeSums] = field(default_factory=dict)
    sharing: int = 0
    unseen: int = 0

    def add(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = tensor
                self._count(kind, tensor)

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        new = {address: size for address, size in memory.storages.items() if address not in self.storages}
        self.storages.update(new)
        sums = self.sums.setdefault((kind, memory.dtype), _SizeSums())
        sums.tensors += 1
        sums.elements += memory.elements
        sums.num_bytes += sum(new.values()) + memory.unseen_bytes
        self.sharing += len(new) < len(memory.storages)
        self.unseen += memory.unseen_bytes > 0

    def add_packed(self, packed: Any) -> bool:
        """Count a packed object once; returns whether its contents are known."""
        if id(packed) in self.packed:
            return True
        tensors = packed_tensors(packed)
        if tensors is None:
            return False
        self.packed[id(packed)] = packed
        for tensor in tensors:
            sums = self.sums.setdefault((_PACKED, tensor.dtype), _SizeSums())
            sums.tensors += 1
            sums.elements += tensor.elements
            sums.num_bytes += tensor.num_bytes
        return True

    def has(self, kind: str) -> bool:
        return any(found == kind for found, _ in self.sums)

    def sizes(self) -> tuple[TensorSize, ...]:
        return tuple(
            TensorSize(
                kind=kind,
                dtype=dtype,
                tensors=sums.tensors,
                elements=sums.elements,
                num_bytes=sums.num_bytes,
            )
            for (kind, dtype), sums in sorted(
                self.sums.items(), key=lambda item: (_KINDS.index(item[0][0]), item[0][1])
            )
        )


@dataclass(slots=True)
class _Named:
    """Tensors by their first name; ``lazy`` and ``tied`` are names."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    lazy: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)


def model_size(root: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> ModelSize:
    """Measure the model's current memory.

    Elements and bytes are those of this process: a sharded tensor's shard, a sparse tensor's stored values
    (bytes include its indices). What doesn't exist yet has a note instead of a row: gradients before the
    first backward, optimizer state before the first step. Meta and fake tensors have the bytes that they
    would need.

    Args:
        root: the model; wrappers' parts of names are left out.
        optimizers: the fit's optimizers. Their state is every tensor in ``optimizer.state``, at any depth of
            dicts, lists and tuples.

    Caveats:
        Tensors outside parameters, buffers and optimizer state aren't seen: plain attributes, states of
        torchmetrics, activations.
    """
    parameters = _by_name(named_parameters(root, remove_duplicate=False))
    buffers = _by_name(named_buffers(root, remove_duplicate=False))
    with unnoticed():
        trainable = [parameter for parameter in parameters.tensors.values() if parameter.requires_grad]
        inventory = _Inventory()
        inventory.add("trainable parameters", trainable)
        inventory.add("frozen parameters", parameters.tensors.values())  # the remaining ones
        inventory.add("gradients", _gradients(parameters.tensors.values()))
        for optimizer in optimizers:
            inventory.add("optimizer state", tensors_in(getattr(optimizer, "state", {})))
        inventory.add("buffers", buffers.tensors.values())
        modules = tuple(_notes_on_modules(root, inventory))
        return ModelSize(
            sizes=inventory.sizes(),
            lazy=(*parameters.lazy, *buffers.lazy),
            tied=(*parameters.tied, *buffers.tied),
            notes=(
                *_notes_on_gradients(trainable, inventory),
                *_notes_on_optimizers(parameters, optimizers, inventory),
                *_notes_on_tensors(inventory),
                *modules,
            ),
        )


def _by_name(named: Iterable[tuple[str, torch.Tensor]]) -> _Named:
    """Sort into first names, lazy and tied ones; a wrapper's second path to the same name isn't a tie."""
    found = _Named()
    seen: set[int] = set()
    names: set[str] = set()
    for name, tensor in named:
        path = plain_path(name)
        if id(tensor) in seen:
            if path not in names:
                found.tied.append(path)
        elif is_lazy(tensor):
            found.lazy.append(path)
        else:
            # Two tensors may have the same plain name; then the name with wrappers distinguishes them.
            found.tensors[name if path in found.tensors else path] = tensor
        seen.add(id(tensor))
        names.add(path)
    return found


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        # FSDP shows views as parameters; reading the gradient of a non-leaf would warn.
        if parameter.is_leaf and parameter.grad is not None:
            yield parameter.grad


def _notes_on_gradients(trainable: Sequence[torch.Tensor], inventory: _Inventory) -> Iterator[str]:
    if not inventory.has("gradients"):
        yield "no gradients at this moment"
        return
    missing = sum(parameter.is_leaf and parameter.grad is None for parameter in trainable)
    if missing:
        yield f"{missing} of {len(trainable)} trainable parameters have no gradient at this moment"


def _notes_on_optimizers(
    parameters: _Named, optimizers: Sequence[torch.optim.Optimizer], inventory: _Inventory
) -> Iterator[str]:
    if not optimizers:
        yield "no optimizer was given, so its state is unknown"
        return
    if not inventory.has("optimizer state"):
        yield "no optimizer state at this moment"
    known = {id(parameter) for parameter in parameters.tensors.values()}
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    steps = [parameter for group in groups for parameter in group["params"]]
    others = {id(p): p for p in steps if id(p) not in known and not is_lazy(p)}
    if others:
        yield (
            f"the optimizers update {len(others):,} tensors that aren't parameters of the model"
            f" ({sum(p.numel() for p in others.values()):,} elements); only their state is counted"
        )


def _notes_on_tensors(inventory: _Inventory) -> Iterator[str]:
    tensors = inventory.tensors.values()
    sharded = [tensor for tensor in tensors if is_distributed(tensor)]
    if sharded:
        local = sum(memory_of(tensor).elements for tensor in sharded)
        yield (
            f"{len(sharded):,} sharded tensors count the {local:,} elements in this process,"
            f" of {sum(tensor.numel() for tensor in sharded):,} in all"
        )
    without = sum(has_no_memory(tensor) for tensor in tensors)
    if without:
        yield f"{without:,} fake or meta tensors count the bytes they would need"
    sparse = sum(is_sparse(tensor) for tensor in tensors)
    if sparse:
        yield f"{sparse:,} sparse tensors count their stored values as elements"
    if inventory.sharing:
        yield f"{inventory.sharing:,} tensors share memory with earlier ones; shared memory counts once"
    if inventory.unseen:
        yield f"{inventory.unseen:,} tensors have no visible storage; their bytes are elements × element size"


def _notes_on_modules(root: nn.Module, inventory: _Inventory) -> Iterator[str]:
    """Count packed weights, which aren't Python tensors; note flat shards and weights in no row."""
    unknown: list[str] = []
    flat = False
    for name, module in named_modules(root):
        flat |= type(module).__name__ == "FullyShardedDataParallel"
        are_known = [inventory.add_packed(packed) for packed in packed_objects(module)]
        if not all(are_known):
            unknown.append(plain_path(name) or type(module).__name__)
    if flat:
        yield "with FSDP, parameters are the flat shards in this process"
    if inventory.packed:
        yield "packed weights are quantized for inference and not trainable; sizes exclude scales and padding"
    if unknown:
        more = f" and {len(unknown) - _MOST_NAMES} more" if len(unknown) > _MOST_NAMES else ""
        yield (
            "no row includes quantized weights packed outside parameters and buffers:"
            f" {', '.join(unknown[:_MOST_NAMES])}{more}"
        )
