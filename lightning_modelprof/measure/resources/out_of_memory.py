"""Facts about an out-of-memory error: where it happened, the requested size, and what holds the memory.

The exception belongs to the user: only words and numbers of it are kept, and inspecting it allocates nothing
on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lightning_modelprof.measure.resources.memory import DeviceBytes
from lightning_modelprof.measure.user_code import UserCode, absolute_file
from lightning_modelprof.run.memory import Holder, OutOfMemory

MOST_HOLDERS: Final = 20

StoragesOf: TypeAlias = Callable[[torch.Tensor], Mapping[int, int]]
"""Maps a tensor's storages to bytes, by an address unique to each."""

_MOST_CAUSES: Final = 20
_MOST_LETTERS: Final = 500
_UNITS: Final[dict[str, int]] = {"bytes": 1} | {
    f"{letter}B": 2 ** (10 * power) for power, letter in enumerate(("", *"KMGTPE"))
}
"""torch and NumPy write powers of 1024, as GiB or, for MPS, as GB."""
_SIZE: Final = r"(\d+(?:\.\d+)?)\s*(bytes|B|[KMGTPE]i?B)"
_REQUESTED: Final = (
    re.compile(rf"[Tt]ried to allocate\s+{_SIZE}"),
    re.compile(rf"Unable to allocate {_SIZE} for an array"),
)
_TOTAL: Final = (
    re.compile(rf"total capacity of\s+{_SIZE}"),
    re.compile(rf"{_SIZE} total capacity"),
    re.compile(rf"max allowed:\s*{_SIZE}"),
)
_ALLOCATED: Final = (
    re.compile(rf"{_SIZE} is allocated by PyTorch"),
    re.compile(rf"{_SIZE} already allocated"),
    re.compile(rf"MPS allocated:\s*{_SIZE}"),
)
_UNUSED: Final = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED: Final = re.compile(rf"{_SIZE} reserved in total by PyTorch")

_OF_THE_HOST: Final = re.compile(r"DefaultCPUAllocator|Unable to allocate .* for an array")
_ANY: Final = re.compile(
    r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Unable to allocate .* for an array"
)

_PHASE_OF: Final = (
    # (end of the file's path, function, phase)
    ("torch/autograd/__init__.py", "backward", "backward"),
    ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("", "clip_gradients", "clip"),
    ("", "configure_gradient_clipping", "clip"),
    ("", "zero_grad", "zero_grad"),
    ("", "validation_step", "validation"),
    ("", "training_step", "forward"),
    ("", "test_step", "forward"),
    ("", "predict_step", "forward"),
    ("", "batch_to_device", "transfer"),
    ("", "transfer_batch_to_device", "transfer"),
    ("torch/optim/optimizer.py", "wrapper", "optimizer"),
    ("torch/utils/data/dataloader.py", "__next__", "dataloader"),
)


class Named(NamedTuple):
    """A loop's tensors by category; names are those of parameters and buffers."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    optimizers: Sequence[Any]


def out_of_memory_error(exception: BaseException) -> BaseException | None:
    """Return the out-of-memory error among an exception and its causes; ``None`` without one."""
    current: BaseException | None = exception
    for _ in range(_MOST_CAUSES):
        if current is None or _says_so(current):
            return current
        current = current.__cause__ or current.__context__
    return None


def _says_so(error: BaseException) -> bool:
    classes = tuple(
        kind
        for owner in (torch, torch.cuda)
        if isinstance(kind := getattr(owner, "OutOfMemoryError", None), type)  # torch.…: 2.5
    )
    if isinstance(error, (*classes, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _ANY.search(str(error)) is not None


def describe(
    exception: BaseException,
    error: BaseException,
    *,
    step: int,
    device: torch.device,
    read_device: Callable[[torch.device], DeviceBytes],
    total_bytes: Callable[[], int | None],
    named: Named,
    storages_of: StoragesOf,
) -> OutOfMemory:
    """Return the record; ``error`` is what :func:`out_of_memory_error` found for ``exception``."""
    text = str(error)
    on_host = isinstance(error, MemoryError) or _OF_THE_HOST.search(text) is not None
    try:
        by_category, holders = holders_of(named, storages_of)
    except Exception:  # any optimizer, in mid-step; the message is still useful
        by_category, holders = {}, ()
    counters = DeviceBytes() if on_host else read_device(device)
    allocated = _first(_ALLOCATED, text)
    reserved = _first((_RESERVED,), text)
    unused = _first((_UNUSED,), text)
    if reserved is None and allocated is not None and unused is not None:
        reserved = allocated + unused
    total = _first(_TOTAL, text)
    file, line, function = _place_of(error.__traceback__ or exception.__traceback__)
    return OutOfMemory(
        step=step,
        phase=_phase_of(error.__traceback__) or _phase_of(exception.__traceback__),
        device="cpu" if on_host else device.type,
        message=(text.strip().partition("\n")[0] or type(error).__name__)[:_MOST_LETTERS],
        requested_bytes=_first(_REQUESTED, text),
        total_bytes=total if total is not None or on_host else total_bytes(),
        allocated_bytes=counters.allocated if allocated is None else allocated,
        reserved_bytes=counters.reserved if reserved is None else reserved,
        by_category=by_category,
        holders=holders,
        file=file,
        line=line,
        function=function,
    )


def _place_of(traceback: TracebackType | None) -> tuple[str | None, int | None, str]:
    user_code = UserCode()
    file, line, function = None, None, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if user_code.is_users(traceback.tb_frame):
            file, line = absolute_file(code.co_filename), traceback.tb_lineno
            function = getattr(code, "co_qualname", code.co_name)
        traceback = traceback.tb_next
    return file, line, function


def _first(patterns: Iterable[re.Pattern[str]], text: str) -> int | None:
    """Return the size in bytes that the first matching pattern finds."""
    for pattern in patterns:
        found = pattern.search(text)
        if found is not None:
            unit: int = _UNITS[found[2].replace("i", "")]
            return int(found[1]) * unit if found[1].isdigit() else round(float(found[1]) * unit)
    return None


def _phase_of(traceback: TracebackType | None) -> str:
    """Return the phase of the innermost frame that has one; the loop has left it by now."""
    phase = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        path = code.co_filename.replace("\\", "/")
        for file, function, key in _PHASE_OF:
            if code.co_name == function and path.endswith(file):
                phase = key
        traceback = traceback.tb_next
    return phase


def holders_of(named: Named, storages_of: StoragesOf) -> tuple[dict[str, int], tuple[Holder, ...]]:
    """Return bytes by category and the largest holders: modules' own parameters, gradients and state.

    A storage counts once, where it is met first: parameters, gradients, optimizer state, buffers.
    """
    seen: set[int] = set()
    sums: dict[tuple[str, str], int] = {}

    def add(name: str, category: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for address, num_bytes in storages_of(tensor).items():
                if address not in seen:
                    seen.add(address)
                    sums[name, category] = sums.get((name, category), 0) + num_bytes

    parameters = named.parameters.items()
    owners = {id(parameter): _owner(name) for name, parameter in parameters}
    for name, parameter in parameters:
        add(_owner(name), "parameters", (parameter,))
    for name, parameter in parameters:
        if parameter.is_leaf and parameter.grad is not None:
            add(_owner(name), "gradients", (parameter.grad,))
    for optimizer in named.optimizers:
        for parameter, state in list(getattr(optimizer, "state", {}).items()):
            add(owners.get(id(parameter), "?"), "optimizer state", _tensors_in(state))
    for name, buffer in named.buffers.items():
        add(_owner(name), "buffers", (buffer,))

    by_category: dict[str, int] = {}
    for (_, category), num_bytes in sums.items():
        by_category[category] = by_category.get(category, 0) + num_bytes
    largest = sorted(sums.items(), key=lambda item: -item[1])[:MOST_HOLDERS]
    return by_category, tuple(
        Holder(name=name, category=category, num_bytes=num_bytes) for (name, category), num_bytes in largest
    )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in list(value.values()):
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
