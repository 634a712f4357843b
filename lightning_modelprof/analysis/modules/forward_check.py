"""fvcore's count of a forward pass, checked against the count of a real step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.record import Record
from lightning_modelprof.run.model_cost import (
    FOURIER_OPERATORS,
    ForwardTable,
    ModelCost,
    StepCount,
)

_TOLERANCE: Final = 1e-3
"""Two counts agree when they differ by at most this fraction of the larger one."""


class ForwardModule(Record, frozen=True, kw_only=True):
    """One module, submodules included.

    Attributes:
        path: as in ``ForwardTable``; ``""`` is the model.
        type_name: class name; ``None`` if unknown.
        parameters: elements.
        activations: elements of the outputs of contractions.
        share: of the model's multiply-adds; ``None`` if it has none.
    """

    path: str
    type_name: str | None
    parameters: int
    macs: int
    activations: int
    share: float | None


class ForwardOperator(Record, frozen=True, kw_only=True):
    """Multiply-adds of one operator under fvcore's name; ``share`` as in ``ForwardModule``."""

    operator: str
    macs: int
    share: float | None


class Disagreement(Record, frozen=True, kw_only=True):
    """A module, submodules included, whose count differs between the step and fvcore.

    Attributes:
        ours_macs: multiply-adds in the counted step's forward phase.
        fvcore_macs: multiply-adds in fvcore's forward pass.
    """

    module: str
    ours_macs: int
    fvcore_macs: int


class ForwardFacts(Record, frozen=True, kw_only=True):
    """The forward table and its check.

    Attributes:
        modules: in the order of ``named_modules``.
        operators: by multiply-adds, most first.
        agrees: whether the step's count agrees; ``None`` when no step was counted.
        check_note: why nothing could be compared; ``""`` otherwise.
        disagreements: innermost modules that differ; empty unless ``agrees`` is false.
        placed_differently: modules that agree exactly while their submodules don't: the same work, attributed
            to other modules.
        unsupported: as in ``ForwardTable``.
        uncalled: outermost modules that didn't run.
    """

    modules: tuple[ForwardModule, ...]
    operators: tuple[ForwardOperator, ...]
    macs: int
    agrees: bool | None
    check_note: str
    disagreements: tuple[Disagreement, ...]
    placed_differently: tuple[str, ...]
    unsupported: Mapping[str, int]
    uncalled: tuple[str, ...]


def forward_facts(cost: ModelCost) -> ForwardFacts:
    """Total the forward table and check it against the step's count.

    The check compares each module's multiply-adds, submodules included: half the FLOPs of the step's forward
    phase, without Fourier transforms, against fvcore's. Two numbers within 0.1% of the larger one agree. Of
    those that don't, the innermost modules are reported, and an enclosing module only if its submodules don't
    explain the difference.
    """
    table = cost.forward_table
    if table is None:
        raise NotMeasured(cost.forward_table_note or "fvcore didn't run")
    totals = _with_parents((count.module, count.macs) for count in table.counts)
    whole = totals[""]
    types = {record.path: record.type_name for record in cost.modules}
    operators: Counter[str] = Counter()
    for count in table.counts:
        operators[count.operator] += count.macs
    check = _Check(table, cost.count) if cost.count is not None else None
    found = check.disagreements() if check is not None else ()
    return ForwardFacts(
        modules=tuple(
            ForwardModule(
                path=path,
                type_name=types.get(path),
                parameters=parameters,
                macs=totals[path],
                activations=table.activations.get(path, 0),
                share=totals[path] / whole if whole else None,
            )
            for path, parameters in table.parameters.items()
        ),
        operators=tuple(
            ForwardOperator(operator=operator, macs=macs, share=macs / whole if whole else None)
            for operator, macs in sorted(operators.items(), key=lambda item: (-item[1], item[0]))
        ),
        macs=whole,
        agrees=None if check is None else not found,
        check_note="" if check is not None else cost.count_note or "no step was counted",
        disagreements=found,
        placed_differently=tuple(check.placed_differently) if check is not None else (),
        unsupported=table.unsupported,
        uncalled=tuple(path for path in table.uncalled if _parent(path) not in set(table.uncalled)),
    )


class _Check:
    def __init__(self, table: ForwardTable, count: StepCount) -> None:
        self._ours = _macs_of(count)
        self._theirs = _with_parents((one.module, one.macs) for one in table.counts)
        self._children: dict[str, list[str]] = {}
        for path in sorted({*self._ours, *self._theirs} - {""}):
            self._children.setdefault(_parent(path), []).append(path)
        self.placed_differently: list[str] = []

    def disagreements(self) -> tuple[Disagreement, ...]:
        return tuple(
            Disagreement(module=path, ours_macs=self._ours[path], fvcore_macs=self._theirs[path])
            for path in self._differing("")
        )

    def _differing(self, path: str) -> list[str]:
        inside = [found for child in self._children.get(path, ()) for found in self._differing(child)]
        difference = self._ours[path] - self._theirs[path]
        if inside and difference == 0:
            self.placed_differently.append(path)
            return []
        explained = sum(self._ours[found] - self._theirs[found] for found in inside)
        largest = max(self._ours[path], self._theirs[path])
        if abs(difference - explained) > _TOLERANCE * largest:
            return [*inside, path]
        return inside


def _macs_of(count: StepCount) -> Counter[str]:
    """Forward multiply-adds (2 FLOPs each) per module, submodules included."""
    flops = _with_parents(
        (one.module, one.flops or 0)
        for one in count.operators
        if one.phase == "forward" and one.operator not in FOURIER_OPERATORS
    )
    return Counter({path: number // 2 for path, number in flops.items()})


def _with_parents(numbers: Iterable[tuple[str, int]]) -> Counter[str]:
    """Each module's sum, submodules included."""
    totals: Counter[str] = Counter({"": 0})
    for module, number in numbers:
        path = module
        while path:
            totals[path] += number
            path = _parent(path)
        totals[""] += number
    return totals


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
