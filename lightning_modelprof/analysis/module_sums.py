"""What each module has of its own, and the sums of it over subtrees and classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lightning_modelprof.run.model_cost import FOURIER_OPERATORS, ModelCost, ModuleRecord

Half = Literal["forward", "backward"]

PHASES: Final[dict[Half, tuple[str, ...]]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
}
"""The phases of operators that run in the time of each half of a step."""

_SCRIPTS: Final = frozenset({"RecursiveScriptModule", "TracedModule"})
"""Classes of TorchScript modules, which nobody can look into."""


@dataclass(frozen=True, slots=True)
class OwnHalf:
    """What each module has of its own in one half of a step.

    Attributes:
        work: path → FLOPs that ran in that half.
        ns: path → time; without the modules that were not timed.
        mixed: paths whose time holds that of ignored modules.
    """

    work: dict[str, int]
    ns: dict[str, int]
    mixed: set[str]

    @classmethod
    def of(cls, cost: ModelCost, half: Half, known: set[str], kept: set[str]) -> OwnHalf:
        """Read one half, for the modules that are known; ``kept`` are those that are not ignored."""
        work: Counter[str] = Counter()
        for entry in cost.count.operators if cost.count is not None else ():
            if entry.phase in PHASES[half] and entry.flops and entry.operator not in FOURIER_OPERATORS:
                work[nearest(entry.module, known)] += entry.flops
        ns: Counter[str] = Counter()
        for time in cost.times.times if cost.times is not None else ():
            own_ns = time.forward_ns if half == "forward" else time.backward_ns
            # A module that ran in backward only has no forward, rather than one of 0 ns.
            if own_ns is not None and (half == "backward" or time.calls):
                ns[nearest(time.path, known)] += own_ns
        mixed = set()
        for path in known - kept:
            if work[path] and path not in ns:
                mixed.add(nearest(path, ns))
        return cls(work=dict(work), ns=dict(ns), mixed=mixed & kept & set(ns))


@dataclass(frozen=True, slots=True)
class OwnCount:
    """FLOPs of each module itself by phase, and which of them are not known."""

    flops: dict[str, dict[str, int]]
    unknown: set[str]

    @classmethod
    def of(cls, cost: ModelCost, known: set[str]) -> OwnCount | None:
        """Read the count; ``None`` if there is none."""
        if cost.count is None:
            return None
        # A phase that did not run has no operators; the forward ran, and may have none.
        phases = {entry.phase for entry in cost.count.operators} | {"forward"}
        if "backward" in phases:
            phases.add("recompute")
        flops: dict[str, Counter[str]] = {phase: Counter() for phase in phases}
        uncounted: set[str] = set()
        for entry in cost.count.operators:
            path = nearest(entry.module, known)
            if entry.flops is None:
                uncounted.add(path)
            elif entry.operator not in FOURIER_OPERATORS:
                flops[entry.phase][path] += entry.flops
        counted = {path for found in flops.values() for path in found}
        types = {record.path: record.type_name for record in cost.modules}
        # The outermost TorchScript module is seen from outside.
        scripts = {p for p in known if p and types[p] in _SCRIPTS and "Script" in types.get(above(p), "")}
        return cls({phase: dict(found) for phase, found in flops.items()}, (uncounted - counted) | scripts)


@dataclass(frozen=True, slots=True)
class SubtreeTime:
    """Time of a subtree in one half.

    Attributes:
        ns: of what was timed in it; ``None`` if nothing was, or if it holds that of ignored modules.
        is_mixed: whether it holds that of ignored modules.
        has_untimed_work: whether it has FLOPs that ran in somebody else's time.
    """

    ns: int | None
    is_mixed: bool
    has_untimed_work: bool


@dataclass(frozen=True, slots=True)
class ModuleSum:
    """Figures of a subtree, or of several, before they are related to anything."""

    parameters: int | None
    trainable: int | None
    flops: dict[str, int | None]
    times: dict[Half, SubtreeTime]

    @classmethod
    def of(
        cls,
        record: ModuleRecord,
        count: OwnCount | None,
        halves: Mapping[Half, OwnHalf],
        parts: Sequence[ModuleSum],
    ) -> ModuleSum:
        """A module with the subtrees of its children."""
        flops: dict[str, int | None] = {}
        for phase in ("forward", "backward", "recompute"):
            own = None
            if count is not None and phase in count.flops and record.path not in count.unknown:
                own = count.flops[phase].get(record.path, 0)
            flops[phase] = sum_of_known([own, *(part.flops[phase] for part in parts)])
        times = {
            half: _time_with_parts(record.path, own_half, [part.times[half] for part in parts])
            for half, own_half in halves.items()
        }
        return cls(
            parameters=_sum_of_all([record.parameters, *(part.parameters for part in parts)]),
            trainable=_sum_of_all([record.trainable, *(part.trainable for part in parts)]),
            flops=flops,
            times=times,
        )

    @classmethod
    def of_class(cls, members: Sequence[ModuleSum]) -> ModuleSum:
        """Several subtrees that have nothing in common."""
        times: dict[Half, SubtreeTime] = {}
        for half in PHASES:
            found = [member.times[half] for member in members]
            is_mixed = any(time.is_mixed for time in found)
            # Members that ran in somebody else's time make the sum of the others too small.
            lacks = any(time.ns is None and time.has_untimed_work for time in found)
            ns = None if is_mixed or lacks else sum_of_known([time.ns for time in found])
            times[half] = SubtreeTime(ns, is_mixed, any(time.has_untimed_work for time in found))
        return cls(
            parameters=_sum_of_all([member.parameters for member in members]),
            trainable=_sum_of_all([member.trainable for member in members]),
            flops={
                phase: sum_of_known([member.flops[phase] for member in members]) for phase in members[0].flops
            },
            times=times,
        )


def _time_with_parts(path: str, own: OwnHalf, parts: Sequence[SubtreeTime]) -> SubtreeTime:
    is_timed = path in own.ns
    is_mixed = path in own.mixed or any(part.is_mixed for part in parts)
    ns = None if is_mixed else sum_of_known([own.ns.get(path), *(part.ns for part in parts)])
    # What a timed module contains without a time of its own ran in the time of that module.
    inside = own.work.get(path, 0) > 0 or any(part.has_untimed_work for part in parts)
    return SubtreeTime(ns, is_mixed, has_untimed_work=inside and not is_timed)


def _sum_of_all(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def sum_of_known(values: Iterable[int | None]) -> int | None:
    """The sum of what is not ``None``; ``None`` if nothing is."""
    found = [value for value in values if value is not None]
    return sum(found) if found else None


def above(path: str) -> str:
    """Path of the module that holds this one."""
    return path.rpartition(".")[0]


def nearest(path: str, known: Collection[str]) -> str:
    """The path itself or the innermost known one above it; the root is above all."""
    while path and path not in known:
        path = above(path)
    return path
