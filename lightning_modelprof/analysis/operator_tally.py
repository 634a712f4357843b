"""What the calls of one operator cost together, and how such figures of threads and ranks add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lightning_modelprof.analysis.timeline.tally import Tally, add_up


class MemoryChange(NamedTuple):
    """Bytes allocated less bytes released while calls ran on their thread; negative where more was released.

    Attributes:
        host, device: of memory on the host and on devices, with all that the calls call.
        host_self, device_self: the same without the operators inside.
    """

    host: int
    host_self: int
    device: int
    device_self: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The operators of one name that the operators of another name call directly.

    Attributes:
        name: of the called operators.
        calls: how many, those inside another of them included.
        host: times on the host of the outermost of them, with all that they call.
        device: times of the device events launched in each of the outermost, at any depth, added up by call;
            ``None`` when the trace has no device events.
        kernels: the device events that they launched themselves, by name.
    """

    name: str
    calls: int
    host: Tally
    device: Tally | None
    kernels: Mapping[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """All calls of one operator on one host thread, or those of them that got inputs of one shape.

    Attributes:
        name: as recorded.
        shape: shapes of its inputs as JSON text; ``None`` when calls are not told apart by it, or when it was
            not recorded.
        calls: how many, those inside another of them included.
        host: times on the host of the outermost of them, with all that they call.
        host_self_ns: time of the calls in which neither an operator nor a runtime call inside was running.
        device: times of the device events launched in each of the outermost, at any depth, added up by call;
            ``None`` when the trace has no device events.
        device_self_ns: time of the device events that the calls launched themselves; ``None`` as above.
        counted_flops: floating-point operations of the counted calls.
        num_counted: calls with known operations that are in no other such call.
        num_uncounted: calls without known operations that are in no call with known ones.
        memory: what its calls changed; ``None`` when no memory was recorded.
        modules: time on the host by the innermost module around the calls.
        callers: number of calls by the line of Python that they came from.
        children: the operators that it calls directly, by name.
        kernels: the device events that it launched itself, by name.
    """

    name: str
    shape: str | None = None
    calls: int
    host: Tally
    host_self_ns: int
    device: Tally | None
    device_self_ns: int | None
    counted_flops: int = 0
    num_counted: int = 0
    num_uncounted: int = 0
    memory: MemoryChange | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    callers: Mapping[str, int] = field(default_factory=dict)
    children: Mapping[str, Child] = field(default_factory=dict)
    kernels: Mapping[str, Tally] = field(default_factory=dict)

    @property
    def flops(self) -> int | None:
        """Floating-point operations of all calls; ``None`` if some are unknown or all are an outer call's."""
        return self.counted_flops if self.num_counted and not self.num_uncounted else None


def pool_operators(operators: Iterable[Operator]) -> list[Operator]:
    """One for all of the same name and shape, of whatever thread and rank."""
    parts: dict[tuple[str, str | None], list[Operator]] = {}
    for operator in operators:
        parts.setdefault((operator.name, operator.shape), []).append(operator)
    return [same[0] if len(same) == 1 else _pool_same(same) for same in parts.values()]


def _pool_same(parts: list[Operator]) -> Operator:
    self_ns = [part.device_self_ns for part in parts if part.device_self_ns is not None]
    return Operator(
        name=parts[0].name,
        shape=parts[0].shape,
        calls=sum(part.calls for part in parts),
        host=add_up(part.host for part in parts),
        host_self_ns=sum(part.host_self_ns for part in parts),
        device=_add_up_known(part.device for part in parts),
        device_self_ns=sum(self_ns) if self_ns else None,
        counted_flops=sum(part.counted_flops for part in parts),
        num_counted=sum(part.num_counted for part in parts),
        num_uncounted=sum(part.num_uncounted for part in parts),
        memory=_add_memory(part.memory for part in parts),
        modules=_add_counts(part.modules for part in parts),
        callers=_add_counts(part.callers for part in parts),
        children=_pool_children(chain.from_iterable(part.children.values() for part in parts)),
        kernels=_pool_kernels(part.kernels for part in parts),
    )


def _pool_children(children: Iterable[Child]) -> dict[str, Child]:
    parts: dict[str, list[Child]] = {}
    for child in children:
        parts.setdefault(child.name, []).append(child)
    return {
        name: Child(
            name=name,
            calls=sum(child.calls for child in same),
            host=add_up(child.host for child in same),
            device=_add_up_known(child.device for child in same),
            kernels=_pool_kernels(child.kernels for child in same),
        )
        for name, same in parts.items()
    }


def _pool_kernels(parts: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    pooled: dict[str, list[Tally]] = {}
    for kernels in parts:
        for name, tally in kernels.items():
            pooled.setdefault(name, []).append(tally)
    return {name: add_up(tallies) for name, tallies in pooled.items()}


def _add_up_known(tallies: Iterable[Tally | None]) -> Tally | None:
    """``None`` when none is known."""
    known = [tally for tally in tallies if tally is not None]
    return add_up(known) if known else None


def _add_memory(parts: Iterable[MemoryChange | None]) -> MemoryChange | None:
    """``None`` when none is known."""
    known = [part for part in parts if part is not None]
    return MemoryChange(*map(sum, zip(*known, strict=True))) if known else None


def _add_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
