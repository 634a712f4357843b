"""Says of one operator whether the host waits in it, copies, or makes a tensor of its own."""

# ruff: noqa: ARG001 - every look is given the whole call

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lightning_modelprof.run.sites import DEVICE_TO_HOST, HOST_TENSOR, HOST_TO_DEVICE, SYNCHRONISATION

_HOST: Final = "cpu"


class Sighting(NamedTuple):
    """What one call does; fields as in ``SourceSite``."""

    kind: str
    device: str
    num_bytes: int | None = None
    is_blocking: bool | None = None
    is_pinned: bool | None = None
    is_non_blocking: bool | None = None


Look: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Any], "Sighting | None"]
"""``look(args, kwargs, result)`` of a call."""


def look_of(func: Any) -> Look | None:
    """How to look at the calls of an operator; ``None`` when they never wait and never copy.

    Which operators must know values, or how many there will be, is what torch says by their tags, and some
    that it does not tag.

    Source: torch's tags ``data_dependent_output`` and ``dynamic_output_shape``; for the others the kernels in
    ATen (``multinomial`` checks its probabilities, ``_linalg_check_errors`` the errors).
    """
    if isinstance(func, torch._ops.HigherOrderOperator) or func.namespace != "aten":
        return None
    name = func.overloadpacket.__name__
    if name in _LOOKS:
        return _LOOKS[name]
    return _wait if name in _WAITING or any(tag in func.tags for tag in _WAITING_TAGS) else None


def _wait(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    tensor = next(_tensors((*args, *kwargs.values())), None)
    return None if tensor is None else _waiting_for(tensor)


def _read_value(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    return _waiting_for(args[0], num_bytes=args[0].element_size())


def _waiting_for(tensor: torch.Tensor, num_bytes: int | None = None) -> Sighting:
    device = tensor.device.type
    return Sighting(
        SYNCHRONISATION, device, num_bytes=num_bytes, is_blocking=None if device == _HOST else True
    )


def _repeat(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """The sum of the repeats is the size of the result, unless the caller says it."""
    is_known = kwargs.get("output_size") is not None
    return None if is_known else _wait(args, kwargs, result)


def _index(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """A mask is turned into positions, and their number is the size of the result."""
    masks = _masks(args[1])
    return _waiting_for(masks[0]) if masks else None


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """As for reading; but one mask and one value on the host make a ``masked_fill``, which does not wait."""
    masks = _masks(args[1])
    value = args[2]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    is_fill = len(indices) == 1 and value.numel() == 1 and value.device.type == _HOST and not accumulates
    return _waiting_for(masks[0]) if masks and not is_fill else None


def _masks(indices: Iterable[Any]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _made_on_host(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """``torch.tensor(...)`` and its kin; with a device, what is made on the host has been copied there."""
    tensor = args[0]
    device = tensor.device.type
    if device == _HOST:
        return Sighting(HOST_TENSOR, _HOST, num_bytes=tensor.nbytes)
    return Sighting(
        HOST_TO_DEVICE, device, tensor.nbytes, is_blocking=True, is_pinned=False, is_non_blocking=False
    )


def _converted(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """``tensor.to(...)`` when it makes a new tensor."""
    is_asked = kwargs.get("non_blocking", False) or any(value is True for value in args[2:3])
    return _copy(args[0], result, is_non_blocking=bool(is_asked))


def _overwritten(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """``tensor.copy_(source)``."""
    is_asked = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return _copy(args[1], args[0], is_non_blocking=bool(is_asked))


def _copy(source: torch.Tensor, target: torch.Tensor, *, is_non_blocking: bool) -> Sighting | None:
    """A copy between the host and a device.

    From a device into memory that is not pinned the host waits, whatever was asked for.
    """
    is_from_host, is_to_host = source.device.type == _HOST, target.device.type == _HOST
    if is_from_host == is_to_host:
        return None
    on_host, on_device = (source, target) if is_from_host else (target, source)
    is_pinned = bool(on_host.is_pinned())
    return Sighting(
        kind=HOST_TO_DEVICE if is_from_host else DEVICE_TO_HOST,
        device=on_device.device.type,
        num_bytes=source.nbytes,
        is_blocking=not is_non_blocking or (is_to_host and not is_pinned),
        is_pinned=is_pinned,
        is_non_blocking=is_non_blocking,
    )


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


_WAITING: Final = frozenset(
    (
        *("is_nonzero", "argwhere", "nonzero_numpy", "masked_select", "multinomial", "_linalg_check_errors"),
        *("unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2", "bincount"),
    )
)
_WAITING_TAGS: Final = tuple(
    tag
    for tag in (getattr(torch.Tag, name, None) for name in ("data_dependent_output", "dynamic_output_shape"))
    if tag is not None
)
_LOOKS: Final[dict[str, Look]] = {
    "_local_scalar_dense": _read_value,
    "item": _read_value,
    "repeat_interleave": _repeat,
    "index": _index,
    "_unsafe_index": _index,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    "lift_fresh": _made_on_host,
    "_to_copy": _converted,
    "to": _converted,
    "copy_": _overwritten,
    "_copy_from": _overwritten,
}
