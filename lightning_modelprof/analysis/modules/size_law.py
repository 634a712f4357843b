"""FLOPs per step as a function of the batch's shapes: a fit through the counted sizes.

FLOPs of contractions are products of dimensions. So a law is a sum of a few products of the dimensions
that differ between the counted sizes, for example batch x length and batch x length^2. Leaving out each
counted size in turn decides which products: the law that predicts the left-out sizes best wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import BatchSizes, Shapes, SizeCount
from lightning_modelprof.units import percent

MIN_COUNTED: Final = 3
"""Sizes that a fit needs."""


MAX_MISS: Final = 0.06
"""A fit that misses left-out sizes by more is rejected."""


SURE_MISS: Final = 0.01
"""A fit that misses by less needs no more counted sizes."""


EXACT: Final = 1e-6
"""A law of dimensions predicts a left-out size to the last bits; chance comes nowhere near this."""


REACH: Final = 1.5
"""Sizes with a dimension this many times smaller or larger than in all counted ones get counted too."""


_FARTHEST: Final = {True: 4.0, False: 2.0}
"""How many times smaller or larger a dimension may be, for exact laws (True) and others."""


_ALIKE: Final = 1.25
"""Of laws whose errors differ by a smaller factor, the simplest one is taken."""


_MAX_VARIABLES: Final = 6


_RELATION: Final = 0.08
"""Relative error allowed for a dimension that depends on another; rounded sizes are off by 3%."""


Term = tuple[int, ...]
"""Powers of the variables."""


class _Relation(Record, frozen=True):
    """A dimension that depends on a variable: factor · variable + offset."""

    column: int
    variable: int
    factor: float
    offset: float


class _Candidate(NamedTuple):
    miss: float
    is_sure: bool
    columns: tuple[int, ...]
    terms: tuple[Term, ...]


class SizeLaw(Record, frozen=True, kw_only=True):
    """FLOPs as a sum of products of dimensions.

    Attributes:
        ranks: of the tensors; the law doesn't cover batches with other ranks.
        num_counted: sizes behind the fit.
        miss: root mean square error for left-out counted sizes, as a fraction of their mean FLOPs.
        is_sure: whether the counted sizes are enough to trust ``miss``.
    """

    ranks: tuple[int, ...]
    num_counted: int
    miss: float
    is_sure: bool
    _constant: NDArray[np.bool_]
    _values: NDArray[np.float64]  # all columns of the first counted size
    _columns: tuple[int, ...]  # of the variables used
    _relations: tuple[_Relation, ...]
    _lowest: NDArray[np.float64]
    _highest: NDArray[np.float64]
    _terms: tuple[Term, ...]
    _factors: NDArray[np.float64]  # terms × parts

    def covers(self, shapes: Shapes, reach: float | None = None) -> bool:
        """Whether a batch is similar enough to the counted ones.

        Args:
            reach: how many times smaller or larger a dimension may be; ``None`` for as far as the law holds.
        """
        reach = reach or _FARTHEST[self.miss <= EXACT]
        if tuple(map(len, shapes)) != self.ranks:
            return False
        row = _row(shapes)
        if (row[self._constant] != self._values[self._constant]).any():
            return False
        used = row[list(self._columns)]
        if (used * reach < self._lowest).any() or (used > self._highest * reach).any():
            return False
        return all(
            abs(one.factor * row[one.variable] + one.offset - row[one.column])
            <= _RELATION * row[one.column] + 1
            for one in self._relations
        )

    @property
    def common_share(self) -> float:
        """Squared error that all its predictions have in common, in units of ``miss`` squared."""
        return len(self._terms) / self.num_counted

    def flops(self, shapes: Shapes) -> NDArray[np.float64]:
        """FLOPs of each part of a step on this batch."""
        used = _row(shapes)[None, list(self._columns)]
        flops: NDArray[np.float64] = np.maximum(_products(used, self._terms) @ self._factors, 0.0)[0]
        return flops


def size_laws(counts: Sequence[SizeCount], parts: Sequence[tuple[str, str]]) -> tuple[SizeLaw, ...]:
    """Fit a law for each kind of batch with enough counted sizes.

    Args:
        counts: each size once.
        parts: (phase, dtype) of the FLOPs, in the order that :meth:`SizeLaw.flops` returns them.
    """
    kinds: dict[tuple[int, ...], list[SizeCount]] = {}
    for count in counts:
        kinds.setdefault(tuple(map(len, count.shapes)), []).append(count)
    found = (_law(ranks, alike, parts) for ranks, alike in kinds.items() if len(alike) >= MIN_COUNTED)
    return tuple(law for law in found if law is not None)


def _law(
    ranks: tuple[int, ...], counts: Sequence[SizeCount], parts: Sequence[tuple[str, str]]
) -> SizeLaw | None:
    table = np.array([_row(count.shapes) for count in counts])
    flops = np.array([[_flops_of(count, part) for part in parts] for count in counts], np.float64)
    constant = np.ptp(table, axis=0) == 0
    variables, relations = _variables(table, constant)
    found = []
    for columns in _subsets(variables):
        for terms in _candidates(len(columns)):
            miss = _left_out_miss(_products(table[:, list(columns)], terms), flops.sum(axis=1))
            spare = len(counts) - len(terms)
            # A law without some of the variables may fit by chance.
            is_whole = columns == variables
            is_sure = miss <= EXACT or (miss <= SURE_MISS and spare >= (2 if is_whole else 3))
            if is_sure or (is_whole and miss <= MAX_MISS):
                found.append(_Candidate(miss, is_sure, columns, terms))
    if not found:
        return None
    limit = max(EXACT, _ALIKE * min(one.miss for one in found))
    miss, is_sure, columns, terms = min(
        (one for one in found if one.miss <= limit), key=lambda one: len(one.terms)
    )
    used = table[:, list(columns)]
    return SizeLaw(
        ranks=ranks,
        num_counted=len(counts),
        miss=miss,
        is_sure=is_sure,
        _constant=constant,
        _values=table[0],
        _columns=columns,
        _relations=tuple(one for one in relations if one.variable in columns),
        _lowest=used.min(axis=0),
        _highest=used.max(axis=0),
        _terms=terms,
        _factors=_solved(_products(used, terms), flops),
    )


def _variables(
    table: NDArray[np.float64], constant: NDArray[np.bool_]
) -> tuple[tuple[int, ...], tuple[_Relation, ...]]:
    """Dimensions that vary; one that depends on an earlier one becomes a relation."""
    variables: list[int] = []
    relations: list[_Relation] = []
    for column in np.flatnonzero(~constant).tolist():
        for variable in variables:
            factor, offset = np.polyfit(table[:, variable], table[:, column], 1)
            if np.allclose(factor * table[:, variable] + offset, table[:, column], rtol=1e-9, atol=1e-6):
                relations.append(_Relation(column, variable, float(factor), float(offset)))
                break
        else:
            variables.append(column)
    return tuple(variables[:_MAX_VARIABLES]), tuple(relations)


def _subsets(variables: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for size in range(min(3, len(variables)), 0, -1):
        yield from combinations(variables, size)


def _candidates(num: int) -> Iterator[tuple[Term, ...]]:
    """Possible sums of products for a step's FLOPs, of all ``num`` variables."""
    for batch in (None, *range(num)):
        others = [one for one in range(num) if one != batch]
        if len(others) > 2:
            continue
        for inner in _inner_terms(len(others)):
            terms = []
            for powers in inner:
                term = [0] * num
                for one, power in zip(others, powers, strict=True):
                    term[one] = power
                if batch is not None:
                    term[batch] = 1
                terms.append(tuple(term))
            yield tuple(terms)
            nothing = (0,) * num
            if nothing not in terms:
                yield (nothing, *terms)


def _inner_terms(num: int) -> Iterable[tuple[Term, ...]]:
    """Terms of one sample: its length, its height and width, or two lengths."""
    if num == 0:
        return (((),),)
    if num == 1:
        return (
            ((1,),),
            ((2,),),
            ((0,), (1,)),
            ((1,), (2,)),
            ((0,), (2,)),
            ((0,), (1,), (2,)),
        )
    return (
        ((1, 1),),
        ((1, 0), (0, 1)),
        ((0, 0), (1, 1)),
        ((1, 1), (2, 2)),
        ((0, 0), (1, 1), (2, 2)),
        ((1, 0), (0, 1), (1, 1)),
        ((0, 0), (1, 0), (0, 1), (1, 1)),
        ((1, 0), (0, 1), (2, 0), (0, 2)),
        ((1, 0), (0, 1), (2, 0), (0, 2), (1, 1)),
    )


def _products(used: NDArray[np.float64], terms: Sequence[Term]) -> NDArray[np.float64]:
    columns = [np.prod(used ** np.array(term, np.float64), axis=1) for term in terms]
    return np.stack(columns, axis=1)


def _left_out_miss(design: NDArray[np.float64], total: NDArray[np.float64]) -> float:
    """RMS error of the left-out sizes, as a fraction of the mean FLOPs; infinite if undefined."""
    num_rows, num_terms = design.shape
    if num_terms >= num_rows or not total.all():
        return float("inf")
    # Small sizes weigh less than large ones, but more than their share of all FLOPs.
    weight = np.sqrt(total)
    weighted = design / weight[:, None]
    basis, triangle = np.linalg.qr(weighted / np.abs(weighted).max(axis=0))
    diagonal = np.abs(np.diag(triangle))
    if diagonal.min() < 1e-9 * diagonal.max():
        return float("inf")  # two terms can't be distinguished
    free = 1.0 - (basis**2).sum(axis=1)
    if free.min() < 1e-6:
        return float("inf")  # one size alone decides a factor
    missed = (weight - basis @ (basis.T @ weight)) / free * weight
    return float(np.sqrt((missed**2).mean()) / total.mean())


def _solved(design: NDArray[np.float64], flops: NDArray[np.float64]) -> NDArray[np.float64]:
    weight = np.sqrt(flops.sum(axis=1, keepdims=True))
    scale = np.abs(design / weight).max(axis=0)
    factors, *_ = np.linalg.lstsq(design / weight / scale, flops / weight, rcond=None)
    solved: NDArray[np.float64] = factors / scale[:, None]
    return solved


def _row(shapes: Shapes) -> NDArray[np.float64]:
    return np.array([value for shape in shapes for value in shape], np.float64)


def _flops_of(count: SizeCount, part: tuple[str, str]) -> int:
    return sum(one.flops for one in count.flops if (one.phase, one.dtype) == part)


Part = tuple[str, str]
"""Phase and dtype."""


MAX_ERROR: Final = 0.03
"""Mean clean FLOPs with a larger relative standard error aren't shown."""


class SizeRow(Record, frozen=True, kw_only=True):
    """Clean steps of one size.

    Attributes:
        flops: per step, without the optimizer's; ``None`` if unknown.
        counted_step: counted step of this size; ``None`` if the FLOPs come from a fit.
    """

    shapes: Shapes
    clean_steps: int
    flops: float | None
    counted_step: int | None


class MeanStep(Record, frozen=True, kw_only=True):
    """Mean FLOPs per clean step.

    Attributes:
        flops: by phase and dtype, without the optimizer.
        error: relative standard error of the total; 0 if each size was counted. Errors of a fit are
            independent between sizes except for the part that comes from its factors.
        num_fitted: sizes whose FLOPs come from a fit.
        rows: by size, most steps first.
    """

    flops: dict[Part, float]
    error: float
    num_fitted: int
    num_counted: int
    rows: tuple[SizeRow, ...]


class FlopsBySize:
    """FLOPs per step by batch size.

    Args:
        counts: counted steps; the first count of a size is used.
    """

    def __init__(self, counts: Sequence[SizeCount]) -> None:
        self._counted = {count.shapes: count for count in reversed(counts)}
        self.parts = tuple(sorted({(one.phase, one.dtype) for count in counts for one in count.flops}))
        self.laws = size_laws(tuple(self._counted.values()), self.parts)
        self._found: dict[Shapes, tuple[NDArray[np.float64], SizeLaw | None] | None] = {}

    @property
    def num_counted(self) -> int:
        return len(self._counted)

    def counted_step(self, shapes: Shapes) -> int | None:
        count = self._counted.get(shapes)
        return None if count is None else count.step

    def of(self, shapes: Shapes) -> tuple[NDArray[np.float64], SizeLaw | None] | None:
        """FLOPs of each of ``parts`` and the fit behind them, if any; ``None`` if unknown."""
        if shapes not in self._found:
            self._found[shapes] = self._find(shapes)
        return self._found[shapes]

    def _find(self, shapes: Shapes) -> tuple[NDArray[np.float64], SizeLaw | None] | None:
        count = self._counted.get(shapes)
        if count is not None:
            flops = dict.fromkeys(self.parts, 0.0)
            for one in count.flops:
                flops[one.phase, one.dtype] += one.flops
            return np.array([flops[part] for part in self.parts]), None
        law = next((law for law in self.laws if law.covers(shapes)), None)
        return None if law is None else (law.flops(shapes), law)


def why_not_by_size(counts: Sequence[SizeCount]) -> str:
    """Two steps of one batch size that differ in FLOPs, which rules out a law by size.

    Returns:
        ``""`` if no steps do.
    """
    first: dict[Shapes, SizeCount] = {}
    for count in counts:
        before = first.setdefault(count.shapes, count)
        flops, flops_before = count.total, before.total
        if abs(flops - flops_before) > MAX_ERROR * max(flops, flops_before):
            return (
                f"batches of the same size differ in FLOPs without the optimizer: {flops_before:,} in step"
                f" {before.step} and {flops:,} in step {count.step}"
            )
    return ""


def mean_step(by_size: FlopsBySize, sizes: BatchSizes) -> MeanStep:
    seen = [(shapes, num) for shapes, num in zip(sizes.shapes, sizes.clean_steps, strict=False) if num > 0]
    num_steps = sum(num for _, num in seen) + sizes.other_steps
    total = np.zeros(len(by_size.parts))
    missing, fitted, rows = sizes.other_steps, [], []
    for shapes, num in seen:
        found = by_size.of(shapes)
        step = by_size.counted_step(shapes)
        if found is None:
            missing += num
        else:
            total += num * found[0]
            if found[1] is not None:
                fitted.append((found[1], num * float(found[0].sum())))
        flops = None if found is None else float(found[0].sum())
        rows.append(SizeRow(shapes=shapes, clean_steps=num, flops=flops, counted_step=step))
    if missing:
        raise NotMeasured(_why_missing(by_size, sizes, missing, num_steps))
    whole = float(total.sum())
    error = _standard_error(fitted) / whole if whole else 0.0
    if error > MAX_ERROR:
        raise NotMeasured(
            f"batch sizes vary, and a fit through the {by_size.num_counted} counted sizes predicts FLOPs"
            f" only within {percent(error)}"
        )
    return MeanStep(
        flops={part: value / num_steps for part, value in zip(by_size.parts, total.tolist(), strict=True)},
        error=error,
        num_fitted=len(fitted),
        num_counted=by_size.num_counted,
        rows=tuple(sorted(rows, key=lambda row: -row.clean_steps)),
    )


_CHOSEN: Final = 1.5
"""Factor for ``miss``: a law is the best of several, so its true error is larger."""


def _standard_error(fitted: Sequence[tuple[SizeLaw, float]]) -> float:
    """Standard error of a sum of fitted FLOPs: (fit, FLOPs of all steps of one size)."""
    variance = 0.0
    for law in {id(law): law for law, _ in fitted}.values():
        flops = np.array([one for its, one in fitted if its is law])
        variance += (_CHOSEN * law.miss) ** 2 * float((flops**2).sum() + law.common_share * flops.sum() ** 2)
    return math.sqrt(variance)


def _why_missing(by_size: FlopsBySize, sizes: BatchSizes, missing: int, num_steps: int) -> str:
    of_steps = f"{missing:,} of {num_steps:,} clean steps"
    num = by_size.num_counted
    if missing == sizes.other_steps:
        return f"the batch size is unknown in {of_steps}"
    if num < MIN_COUNTED:
        counted = "1 size was" if num == 1 else f"{num or 'no'} sizes were"
        return (
            f"batch sizes vary, {counted} counted, and {of_steps} have other sizes (a fit needs"
            f" {MIN_COUNTED})"
        )
    if not by_size.laws:
        return (
            f"batch sizes vary, no fit through the {num} counted sizes predicts a left-out size within"
            f" {percent(MAX_MISS)}, and {of_steps} have other sizes"
        )
    return f"batch sizes vary, and those of {of_steps} are unlike the {num} counted sizes"
