"""Tree of a model's modules: parameters, FLOPs and time of each, submodules included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.size_law import why_not_by_size
from lightning_modelprof.analysis.pooling import sum_of_all, sum_of_known
from lightning_modelprof.record import Record
from lightning_modelprof.run.model_cost import FOURIER_OPERATORS, ModelCost, ModuleRecord

Figure = Literal["parameters", "forward_macs", "forward_ns", "backward_ns"]
"""What classes are ranked by."""


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


class ModuleCost(Record, frozen=True, kw_only=True):
    """One module, submodules included, or all modules of one class at one depth.

    ``None`` means not measured: no count or timing, a lazy parameter, a module inside a compiled one.

    Attributes:
        path: ``""`` for a class.
        depth: 0 for the model itself.
        modules: how many it stands for: 1, or all of a class.
        parameters: elements; a tied parameter counts at the first module that has it.
        forward_flops: of contractions in the counted step; 1 MAC is 2 FLOPs.
        backward_flops: the same for backward, without recomputation.
        recompute_flops: of forward work that backward recomputes.
        forward_ns: latency per step: sum of the medians of the parts inside.
        backward_ns: the same for backward, with recomputation.
        forward_flops_per_s: FLOPs over latency; ``None`` also if a part with FLOPs has no time.
        backward_flops_per_s: the same for backward, with recomputation.
        parameters_share: of the root's.
        macs_share: of the root's forward MACs.
        forward_share: of the root's latency.
    """

    path: str
    type_name: str
    depth: int
    modules: int
    parameters: int | None
    trainable: int | None
    forward_flops: int | None
    backward_flops: int | None
    recompute_flops: int | None
    forward_ns: int | None
    backward_ns: int | None
    forward_flops_per_s: float | None
    backward_flops_per_s: float | None
    parameters_share: float | None
    macs_share: float | None
    forward_share: float | None

    @property
    def forward_macs(self) -> int | None:
        return None if self.forward_flops is None else self.forward_flops // 2

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


class SlowModule(Record, frozen=True, kw_only=True):
    """A module with its self time, excluding submodules.

    Attributes:
        forward_ns, backward_ns: per step; ``None`` if not measured.
        share: of the model's forward and backward time.
    """

    module: ModuleCost
    forward_ns: int | None
    backward_ns: int | None
    share: float


class ModuleTree(Record, frozen=True, kw_only=True):
    """All modules, parents before their children.

    Attributes:
        modules: the first is the root.
        steps: number of timed steps; 0 without timing.
        clock: ``host`` or ``device``; ``""`` without timing.
        sums: totals behind the figures of ``modules``, in the same order.
        is_of_one_size: whether counted and timed steps had, to our knowledge, one batch size; otherwise there
            are no FLOP/s.
    """

    modules: tuple[ModuleCost, ...]
    steps: int
    clock: str
    notes: tuple[str, ...]
    sums: tuple[ModuleSum, ...]
    is_of_one_size: bool = True

    @property
    def root(self) -> ModuleCost:
        return self.modules[0]

    @property
    def depth(self) -> int:
        return max(module.depth for module in self.modules)

    def by_class(self, depth: int) -> dict[str, ModuleCost]:
        """Totals of each class at one depth."""
        members: dict[str, list[ModuleSum]] = {}
        for module, own in zip(self.modules, self.sums, strict=True):
            if module.depth == depth:
                members.setdefault(module.type_name, []).append(own)
        return {
            name: _cost(
                ModuleSum.of_class(found),
                self.sums[0],
                path="",
                type_name=name,
                depth=depth,
                modules=len(found),
                has_rate=self.is_of_one_size,
            )
            for name, found in members.items()
        }

    def slowest(self, count: int) -> list[SlowModule]:
        """Modules with the largest self time (forward and backward), largest first."""
        own: dict[str, list[int | None]] = {
            module.path: [module.forward_ns, module.backward_ns] for module in self.modules
        }
        for module in self.modules[1:]:
            outer = own[nearest(above(module.path), own)]
            for half, ns in enumerate((module.forward_ns, module.backward_ns)):
                outer_ns = outer[half]
                if outer_ns is not None and ns is not None:
                    outer[half] = outer_ns - ns
        total = sum(ns or 0 for ns in (self.root.forward_ns, self.root.backward_ns))
        found = [
            SlowModule(
                module=module,
                forward_ns=own[module.path][0],
                backward_ns=own[module.path][1],
                share=sum(ns or 0 for ns in own[module.path]) / total if total else 0.0,
            )
            for module in self.modules
        ]
        return sorted((slow for slow in found if slow.share > 0), key=lambda slow: -slow.share)[:count]

    def top_classes(self, depth: int, figure: Figure, count: int) -> list[tuple[str, int | float]]:
        """Classes at one depth with the largest figure, largest first; unmeasured ones are left out."""
        found = [(name, getattr(cost, figure)) for name, cost in self.by_class(depth).items()]
        measured = [(name, value) for name, value in found if value is not None]
        return sorted(measured, key=lambda item: (-item[1], item[0]))[:count]


def module_tree(cost: ModelCost, ignore: Collection[str] = ()) -> ModuleTree:
    """Combine everything recorded about each module.

    Args:
        ignore: class names or paths; these modules and their submodules are left out of every figure.
    """
    if not cost.modules:
        raise NotMeasured("the model's modules weren't recorded")
    kept = _kept(cost.modules, ignore)
    if not kept:
        raise NotMeasured("all modules are ignored")
    known = {record.path for record in cost.modules}
    kept_paths = {record.path for record in kept}
    halves = {half: OwnHalf.of(cost, half, known, kept_paths) for half in PHASES}
    count = OwnCount.of(cost, known)
    steps = 0 if cost.times is None else cost.times.steps
    parts: dict[str, list[ModuleSum]] = {path: [] for path in kept_paths}
    sums: dict[str, ModuleSum] = {}
    for record in reversed(kept):  # children before their parents
        path = record.path
        sums[path] = ModuleSum.of(record, count, halves, parts[path])
        if path != kept[0].path:
            parts[nearest(above(path), known)].append(sums[path])
    root = sums[kept[0].path]
    is_of_one_size = _is_of_one_size(cost)
    modules = [
        _cost(
            sums[r.path],
            root,
            path=r.path,
            type_name=r.type_name,
            depth=_depth(r.path),
            has_rate=is_of_one_size,
        )
        for r in kept
    ]
    return ModuleTree(
        modules=tuple(modules),
        steps=steps,
        clock="" if cost.times is None else cost.times.clock,
        notes=(*_ignored_notes(cost.modules, kept, ignore), *_notes(cost)),
        sums=tuple(sums[record.path] for record in kept),
        is_of_one_size=is_of_one_size,
    )


def _kept(records: Iterable[ModuleRecord], ignore: Collection[str]) -> list[ModuleRecord]:
    ignored: set[str] = set()
    kept = []
    for record in records:
        path = record.path
        is_inside = any(outer in ignored for outer in _all_above(path))
        if is_inside or record.type_name in ignore or path in ignore:
            ignored.add(path)
        else:
            kept.append(record)
    return kept


def _ignored_notes(
    records: Collection[ModuleRecord], kept: Collection[ModuleRecord], ignore: Collection[str]
) -> Iterable[str]:
    if len(kept) < len(records):
        yield (
            f"{len(records) - len(kept)} of {len(records)} modules are ignored. FLOPs, Model size and the"
            " fvcore tables include them."
        )
    names = {name for record in records for name in (record.path, record.type_name)}
    unknown = [name for name in ignore if name not in names]
    if unknown:
        yield f"No module to ignore has this class or path: {', '.join(unknown)}."


def _all_above(path: str) -> Iterable[str]:
    while path:
        path = above(path)
        yield path


def _is_of_one_size(cost: ModelCost) -> bool:
    """Whether FLOPs can be divided by latency."""
    count, sizes = cost.count, () if cost.times is None else cost.times.sizes
    counted = next((one.shapes for one in cost.size_counts if count and one.step == count.step), None)
    return counted is None or (
        all(size == counted for size in sizes) and not why_not_by_size(cost.size_counts)
    )


def _cost(
    own: ModuleSum,
    root: ModuleSum,
    *,
    path: str,
    type_name: str,
    depth: int,
    modules: int = 1,
    has_rate: bool,
) -> ModuleCost:
    forward, backward = own.times["forward"], own.times["backward"]
    in_backward = sum_of_known([own.flops["backward"], own.flops["recompute"]])
    return ModuleCost(
        path=path,
        type_name=type_name,
        depth=depth,
        modules=modules,
        parameters=own.parameters,
        trainable=own.trainable,
        forward_flops=own.flops["forward"],
        backward_flops=own.flops["backward"],
        recompute_flops=own.flops["recompute"],
        forward_ns=forward.ns,
        backward_ns=backward.ns,
        forward_flops_per_s=_rate(own.flops["forward"], forward) if has_rate else None,
        backward_flops_per_s=_rate(in_backward, backward) if has_rate else None,
        parameters_share=_share(own.parameters, root.parameters),
        macs_share=_share(own.flops["forward"], root.flops["forward"]),
        forward_share=_share(forward.ns, root.times["forward"].ns),
    )


def _rate(flops: int | None, time: SubtreeTime) -> float | None:
    if flops is None or not time.ns or time.has_untimed_work:
        return None
    return flops * 1e9 / time.ns


def _share(value: int | None, whole: int | None) -> float | None:
    return None if value is None or not whole else value / whole


def _notes(cost: ModelCost) -> Iterable[str]:
    if cost.count is None:
        yield f"FLOPs weren't measured: {cost.count_note or 'no step was counted'}."
    else:
        names = sorted({entry.operator for entry in cost.count.operators if entry.flops is None})
        if names:
            yield f"Operators without a formula, not included in FLOPs: {', '.join(names)}."
    if not _is_of_one_size(cost):
        yield (
            "Batch sizes vary. MACs are for the counted step and latency for the timed ones, which had"
            " other batch sizes, so there are no FLOP/s."
        )
    if cost.times is None:
        yield f"Latency wasn't measured: {cost.times_note or 'no step was timed'}."
    else:
        if cost.times.times and not any(time.calls for time in cost.times.times if not time.path):
            yield "The model itself wasn't called, only its submodules, so its latency is the sum of theirs."
        yield from cost.times.notes


Half = Literal["forward", "backward"]


PHASES: Final[dict[Half, tuple[str, ...]]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
}
"""Operator phases that run within the time of each half of a step."""


_SCRIPTS: Final = frozenset({"RecursiveScriptModule", "TracedModule"})
"""TorchScript module classes, whose insides can't be seen."""


class OwnHalf(Record, frozen=True):
    """Each module's self figures in one half of a step.

    Attributes:
        work: FLOPs by path.
        ns: time by path; untimed modules are missing.
        mixed: paths whose time includes that of ignored modules.
    """

    work: dict[str, int]
    ns: dict[str, int]
    mixed: set[str]

    @classmethod
    def of(cls, cost: ModelCost, half: Half, known: set[str], kept: set[str]) -> OwnHalf:
        """Read one half for the known modules; ``kept`` are those that aren't ignored."""
        work: Counter[str] = Counter()
        for entry in cost.count.operators if cost.count is not None else ():
            if entry.phase in PHASES[half] and entry.flops and entry.operator not in FOURIER_OPERATORS:
                work[nearest(entry.module, known)] += entry.flops
        ns: Counter[str] = Counter()
        for time in cost.times.times if cost.times is not None else ():
            own_ns = time.forward_ns if half == "forward" else time.backward_ns
            # A module that ran only in backward has no forward time, rather than 0 ns.
            if own_ns is not None and (half == "backward" or time.calls):
                ns[nearest(time.path, known)] += own_ns
        mixed = set()
        for path in known - kept:
            if work[path] and path not in ns:
                mixed.add(nearest(path, ns))
        return cls(work=dict(work), ns=dict(ns), mixed=mixed & kept & set(ns))


class OwnCount(Record, frozen=True):
    """Each module's own FLOPs by phase, and the modules where they're unknown."""

    flops: dict[str, dict[str, int]]
    unknown: set[str]

    @classmethod
    def of(cls, cost: ModelCost, known: set[str]) -> OwnCount | None:
        if cost.count is None:
            return None
        # A phase that didn't run has no operators; the forward ran, and may have none.
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
        # The outermost TorchScript module is visible from outside.
        scripts = {p for p in known if p and types[p] in _SCRIPTS and "Script" in types.get(above(p), "")}
        return cls({phase: dict(found) for phase, found in flops.items()}, (uncounted - counted) | scripts)


class SubtreeTime(Record, frozen=True):
    """Time of a subtree in one half.

    Attributes:
        ns: timed parts; ``None`` if there are none, or if they include ignored modules.
        is_mixed: whether it includes the time of ignored modules.
        has_untimed_work: whether it has FLOPs that ran within another module's time.
    """

    ns: int | None
    is_mixed: bool
    has_untimed_work: bool


class ModuleSum(Record, frozen=True):
    """Figures of one or more subtrees, before they become shares or rates."""

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
        """Sum of a module and its children's subtrees."""
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
            parameters=sum_of_all([record.parameters, *(part.parameters for part in parts)]),
            trainable=sum_of_all([record.trainable, *(part.trainable for part in parts)]),
            flops=flops,
            times=times,
        )

    @classmethod
    def of_class(cls, members: Sequence[ModuleSum]) -> ModuleSum:
        """Sum of several disjoint subtrees."""
        times: dict[Half, SubtreeTime] = {}
        for half in PHASES:
            found = [member.times[half] for member in members]
            is_mixed = any(time.is_mixed for time in found)
            # Members that ran within another module's time make the sum too small.
            lacks = any(time.ns is None and time.has_untimed_work for time in found)
            ns = None if is_mixed or lacks else sum_of_known([time.ns for time in found])
            times[half] = SubtreeTime(ns, is_mixed, any(time.has_untimed_work for time in found))
        return cls(
            parameters=sum_of_all([member.parameters for member in members]),
            trainable=sum_of_all([member.trainable for member in members]),
            flops={
                phase: sum_of_known([member.flops[phase] for member in members]) for phase in members[0].flops
            },
            times=times,
        )


def _time_with_parts(path: str, own: OwnHalf, parts: Sequence[SubtreeTime]) -> SubtreeTime:
    is_timed = path in own.ns
    is_mixed = path in own.mixed or any(part.is_mixed for part in parts)
    ns = None if is_mixed else sum_of_known([own.ns.get(path), *(part.ns for part in parts)])
    # Untimed parts of a timed module ran within that module's time.
    inside = own.work.get(path, 0) > 0 or any(part.has_untimed_work for part in parts)
    return SubtreeTime(ns, is_mixed, has_untimed_work=inside and not is_timed)


def above(path: str) -> str:
    return path.rpartition(".")[0]


def nearest(path: str, known: Collection[str]) -> str:
    """The path itself or its innermost known ancestor; the root is above everything."""
    while path and path not in known:
        path = above(path)
    return path
