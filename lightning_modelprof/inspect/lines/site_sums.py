"""Sums a step's operators by source line, in bounded memory and without looking lines up during the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lightning_modelprof.inspect.lines.frames import Spot, UserLines
from lightning_modelprof.place import Place
from lightning_modelprof.run.sites import (
    DEVICE_TO_HOST,
    HOST_TENSOR,
    HOST_TO_DEVICE,
    SYNCHRONISATION,
    LineCount,
    SourceSite,
)

MOST_LINES: Final = 200


_MOST_PLACES: Final = 20_000


_MOST_SITES: Final = 1_000


Bucket: TypeAlias = tuple["Spot | None", str, str]
"""Spot, phase and module that operators are counted under. A plain tuple, as each operator creates one."""


class _Site(NamedTuple):
    """Key that calls are summed under; fields as in ``SourceSite``."""

    sighting: Sighting  # without its bytes
    place: Bucket
    callers: tuple[str, ...]
    operator: str


class _Tally:
    __slots__ = (
        "calls",
        "constant",
        "double",
        "double_ns",
        "elements",
        "gradients",
        "logging",
        "num_bytes",
        "operators",
        "reductions",
        "to_double",
        "took_ns",
        "unsized",
        "views",
    )

    def __init__(self) -> None:
        self.calls = self.views = self.logging = self.elements = self.num_bytes = self.unsized = 0
        self.constant = self.took_ns = self.gradients = self.reductions = 0
        self.double = self.to_double = self.double_ns = 0
        self.operators: set[str] = set()

    def add(self, other: _Tally) -> None:
        self.calls += other.calls
        self.views += other.views
        self.logging += other.logging
        self.constant += other.constant
        self.took_ns += other.took_ns
        self.gradients += other.gradients
        self.reductions += other.reductions
        self.double += other.double
        self.to_double += other.to_double
        self.double_ns += other.double_ns
        self.elements += other.elements
        self.num_bytes += other.num_bytes
        self.unsized += other.unsized
        self.operators |= other.operators


class SiteSums:
    """Sums of one step.

    Attributes:
        dropped: calls at places beyond the limit.
    """

    def __init__(self) -> None:
        self._tallies: dict[Bucket, _Tally] = {}
        self._sites: dict[_Site, list[int]] = {}  # calls, bytes, calls of unknown bytes
        self.dropped = 0

    def count(
        self,
        place: Bucket,
        operator: str,
        operands: Any,
        result: Any,
        *,
        is_view: bool,
        is_logging: bool = False,
        is_constant: bool = False,
        is_reduction: bool = False,
        took_ns: int = 0,
    ) -> None:
        tally = self._tally(place)
        if tally is None:
            return
        tally.calls += 1
        tally.operators.add(operator)
        if is_view:
            tally.views += 1
            return
        tally.took_ns += 0 if is_logging else took_ns
        tally.logging += is_logging
        tally.constant += is_constant
        tally.reductions += is_reduction and not is_logging
        results = result if isinstance(result, (list, tuple)) else (result,)
        try:
            tally.num_bytes += _num_bytes(operands) + _num_bytes(results)
            tally.elements += _elements(results)
        except Exception:  # a tensor without such a size
            tally.unsized += 1
        if not is_logging:
            given, made = _has_double(operands), _has_double(results)
            tally.double += given or made
            tally.to_double += made and not given
            tally.double_ns += took_ns * (given or made)

    def count_gradients(self, place: Bucket) -> None:
        tally = self._tally(place)
        if tally is not None:
            tally.gradients += 1

    def _tally(self, place: Bucket) -> _Tally | None:
        tally = self._tallies.get(place)
        if tally is None:
            if len(self._tallies) >= _MOST_PLACES:
                self.dropped += 1
                return None
            tally = self._tallies[place] = _Tally()
        return tally

    def note(self, sighting: Sighting, place: Bucket, callers: tuple[str, ...], operator: str) -> None:
        num_bytes = sighting.num_bytes
        site = _Site(sighting._replace(num_bytes=None), place, callers, operator)
        sums = self._sites.get(site)
        if sums is None:
            if len(self._sites) >= _MOST_SITES:
                self.dropped += 1
                return
            sums = self._sites[site] = [0, 0, 0]
        sums[0] += 1
        sums[1] += num_bytes or 0
        sums[2] += num_bytes is None

    def line_counts(self, lines: UserLines, *, constants_are_sure: bool = False) -> list[LineCount]:
        """Return the counts per line, most operators first; several instructions of a line add up."""
        merged: dict[tuple[Place, int | None, str, str], _Tally] = {}
        for (spot, phase, module), tally in self._tallies.items():
            merged.setdefault((*_located(spot, lines), phase, module), _Tally()).add(tally)
        counts = [
            LineCount(
                **_fields(at, first_line),
                module=module,
                phase=phase,
                calls=tally.calls,
                views=tally.views,
                operators=len(tally.operators),
                elements=tally.elements,
                num_bytes=tally.num_bytes,
                unsized=tally.unsized,
                logging=tally.logging,
                constant=tally.constant if constants_are_sure else 0,
                took_ns=tally.took_ns,
                gradients=tally.gradients,
                reductions=tally.reductions,
                double=tally.double,
                to_double=tally.to_double,
                double_ns=tally.double_ns,
            )
            for (at, first_line, phase, module), tally in merged.items()
        ]
        return sorted(counts, key=_rank)

    def source_sites(self, lines: UserLines) -> tuple[SourceSite, ...]:
        """Return the sites by line, most calls first."""
        merged: dict[tuple[Place, int | None, _Site], list[int]] = {}
        for site, sums in self._sites.items():
            spot, phase, module = site.place
            nowhere = site._replace(place=(None, phase, module))
            total = merged.setdefault((*_located(spot, lines), nowhere), [0, 0, 0])
            for index, one in enumerate(sums):
                total[index] += one
        sites = (_source_site(*key, sums) for key, sums in merged.items())
        return tuple(sorted(sites, key=_rank))


def _source_site(at: Place, first_line: int | None, site: _Site, sums: list[int]) -> SourceSite:
    sighting, (_, phase, module) = site.sighting, site.place
    return SourceSite(
        kind=sighting.kind,
        **_fields(at, first_line),
        callers=site.callers,
        module=module,
        phase=phase,
        operator=site.operator,
        device=sighting.device,
        calls=sums[0],
        num_bytes=None if sums[2] else sums[1],
        is_blocking=sighting.is_blocking,
        is_pinned=sighting.is_pinned,
        is_non_blocking=sighting.is_non_blocking,
    )


def _located(spot: Spot | None, lines: UserLines) -> tuple[Place, int | None]:
    if spot is None:
        return Place(), None
    function, line = lines.locate(spot)
    return replace(function, line=line), function.line


def _fields(at: Place, first_line: int | None) -> dict[str, Any]:
    return {"file": at.file, "line": at.line, "function": at.function, "function_line": first_line}


def _rank(one: LineCount | SourceSite) -> tuple[Any, ...]:
    """Sort by calls, most first; ties by place, so that the order is stable."""
    return -one.calls, one.file or "", one.line or 0, one.phase, one.module


_TENSOR, _SEQUENCE, _OTHER = range(3)


_KINDS: dict[type, int] = {}  # torch's own isinstance is slow for objects that aren't tensors


def _kind_of(value: Any) -> int:
    kind = _KINDS.get(type(value))
    if kind is None:
        is_tensor, is_sequence = isinstance(value, torch.Tensor), isinstance(value, (list, tuple))
        kind = _KINDS[type(value)] = _TENSOR if is_tensor else _SEQUENCE if is_sequence else _OTHER
    return kind


def _num_bytes(values: Iterable[Any]) -> int:
    """Sum the bytes of tensors, also in lists; raises for tensors that aren't strided."""
    total = 0
    for value in values:
        kind = _KINDS.get(type(value))
        if kind is None:
            kind = _kind_of(value)
        if kind == _TENSOR:
            total += value.nbytes
        elif kind == _SEQUENCE:
            total += _num_bytes(value)
    return total


def _has_double(values: Iterable[Any]) -> bool:
    for value in values:
        kind = _kind_of(value)
        if kind == _TENSOR:
            if value.dtype is torch.float64:
                return True
        elif kind == _SEQUENCE and _has_double(value):
            return True
    return False


def _elements(values: Iterable[Any]) -> int:
    total = 0
    for value in values:
        kind = _kind_of(value)
        if kind == _TENSOR:
            total += value.numel()
        elif kind == _SEQUENCE:
            total += _elements(value)
    return total


# ruff: noqa: ARG001 - every probe gets the whole call


_HOST: Final = "cpu"


class Sighting(NamedTuple):
    """Effect of one call; fields as in ``SourceSite``."""

    kind: str
    device: str
    num_bytes: int | None = None
    is_blocking: bool | None = None
    is_pinned: bool | None = None
    is_non_blocking: bool | None = None


SiteProbe: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Any], "Sighting | None"]
"""Signature is ``probe(args, kwargs, result)`` of a call."""


def probe_of(func: Any) -> SiteProbe | None:
    """Return the probe for an operator's calls; ``None`` if they never wait and never copy.

    Torch's tags mark operators that must know values or their number; others are listed here.

    Source: torch's tags ``data_dependent_output`` and ``dynamic_output_shape``; for the others the kernels in
    ATen (``multinomial`` checks its probabilities, ``_linalg_check_errors`` the errors).
    """
    if isinstance(func, torch._ops.HigherOrderOperator) or func.namespace != "aten":
        return None
    name = func.overloadpacket.__name__
    if name in _PROBES:
        return _PROBES[name]
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
    """The result's size is the sum of the repeats, unless the caller passes it."""
    is_known = kwargs.get("output_size") is not None
    return None if is_known else _wait(args, kwargs, result)


def _index(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """A mask becomes positions, whose number is the result's size."""
    masks = _masks(args[1])
    return _waiting_for(masks[0]) if masks else None


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """As for reading, but one mask and one value on the CPU make a ``masked_fill``, which doesn't wait."""
    masks = _masks(args[1])
    value = args[2]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    is_fill = len(indices) == 1 and value.numel() == 1 and value.device.type == _HOST and not accumulates
    return _waiting_for(masks[0]) if masks and not is_fill else None


def _masks(indices: Iterable[Any]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _made_on_host(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """As in ``torch.tensor(...)``; with a device, data made on the CPU has been copied there."""
    tensor = args[0]
    device = tensor.device.type
    if device == _HOST:
        return Sighting(HOST_TENSOR, _HOST, num_bytes=tensor.nbytes)
    return Sighting(
        HOST_TO_DEVICE, device, tensor.nbytes, is_blocking=True, is_pinned=False, is_non_blocking=False
    )


def _converted(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    """``tensor.to(...)`` when it creates a new tensor."""
    is_asked = kwargs.get("non_blocking", False) or any(value is True for value in args[2:3])
    return _copy(args[0], result, is_non_blocking=bool(is_asked))


def _overwritten(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Sighting | None:
    is_asked = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return _copy(args[1], args[0], is_non_blocking=bool(is_asked))


def _copy(source: torch.Tensor, target: torch.Tensor, *, is_non_blocking: bool) -> Sighting | None:
    """A copy between CPU and device; into unpinned memory, the CPU always waits."""
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


_PROBES: Final[dict[str, SiteProbe]] = {
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
