"""What fvcore says of a forward pass, and whether the count of a real step agrees with it."""

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
"""Two counts agree when they differ by at most this share of the larger one."""


class ForwardModule(Record, frozen=True, kw_only=True):
    """One module with all modules inside of it.

    Attributes:
        path: as in ``ForwardTable``; ``""`` is the model.
        type_name: its class; ``None`` if unknown.
        parameters: elements.
        activations: elements of the outputs of contractions.
        share: of the model's multiply-adds; ``None`` when it has none.
    """

    path: str
    type_name: str | None
    parameters: int
    macs: int
    activations: int
    share: float | None


class ForwardOperator(Record, frozen=True, kw_only=True):
    """Multiply-adds of one operator by fvcore's name, and their share as in ``ForwardModule``."""

    operator: str
    macs: int
    share: float | None


class Disagreement(Record, frozen=True, kw_only=True):
    """A module for which the count of the step and fvcore differ, with all modules inside of it.

    Attributes:
        ours_macs: multiply-adds of the forward phase of the counted step.
        fvcore_macs: of fvcore's forward pass.
    """

    module: str
    ours_macs: int
    fvcore_macs: int


class ForwardFacts(Record, frozen=True, kw_only=True):
    """The forward table and its check.

    Attributes:
        modules: in the order of ``named_modules``.
        operators: by multiply-adds, most first.
        agrees: whether the count of the step says the same; ``None`` when no step was counted.
        check_note: why there was nothing to compare with; ``""`` when there was.
        disagreements: the innermost modules that differ; empty unless ``agrees`` is false.
        placed_differently: modules that agree exactly while the modules inside of them do not: the same work,
            attributed to other modules.
        unsupported: as in ``ForwardTable``.
        uncalled: the outermost modules that did not run.
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
    """Add up the forward table and check it against the count of the step.

    Compared are multiply-adds of each module with the modules inside of it: half the FLOPs of the step's
    forward phase, without Fourier transforms, against fvcore's. Two numbers within 0.1 % of the larger agree.
    Of those that do not, the innermost modules are named; a module around them only when more differs than
    theirs explain.
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
    """Compares the multiply-adds of two counts by module."""

    def __init__(self, table: ForwardTable, count: StepCount) -> None:
        self._ours = _macs_of(count)
        self._theirs = _with_parents((one.module, one.macs) for one in table.counts)
        self._children: dict[str, list[str]] = {}
        for path in sorted({*self._ours, *self._theirs} - {""}):
            self._children.setdefault(_parent(path), []).append(path)
        self.placed_differently: list[str] = []

    def disagreements(self) -> tuple[Disagreement, ...]:
        """The innermost modules that differ."""
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
    """Multiply-adds of the forward by module with those inside; one is two FLOPs."""
    flops = _with_parents(
        (one.module, one.flops or 0)
        for one in count.operators
        if one.phase == "forward" and one.operator not in FOURIER_OPERATORS
    )
    return Counter({path: number // 2 for path, number in flops.items()})


def _with_parents(numbers: Iterable[tuple[str, int]]) -> Counter[str]:
    """Every module's number with those of the modules inside of it."""
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
