"""FLOPs of the mean clean step where batches vary in size: each step's are those of its own size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.modules.size_law import MAX_MISS, MIN_COUNTED, SizeLaw, size_laws
from lightning_modelprof.run.batches import BatchSizes, Shapes, SizeCount

Part = tuple[str, str]
"""Phase and dtype."""

MAX_ERROR: Final = 0.03
"""FLOPs of all clean steps whose standard error is a larger share are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """The clean steps of one size.

    Attributes:
        shapes: of the batch.
        clean_steps: how many there are.
        flops: of one of them, without the optimizer's; ``None`` if not known.
        counted_step: the step of this size that was counted; ``None`` if the FLOPs come from a fit.
    """

    shapes: Shapes
    clean_steps: int
    flops: float | None
    counted_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """FLOPs of the clean steps over their number.

    Attributes:
        flops: by phase and dtype, without the optimizer.
        error: standard error of all of them together, as a share; 0 where each size was counted. The misses
            of a fit differ from size to size, but for what its factors share.
        num_fitted: sizes whose FLOPs come from a fit.
        num_counted: sizes that were counted.
        rows: by size, those of most steps first.
    """

    flops: dict[Part, float]
    error: float
    num_fitted: int
    num_counted: int
    rows: tuple[SizeRow, ...]


class FlopsBySize:
    """FLOPs of a step by the size of its batch.

    Args:
        counts: what counted steps have cost; of a size that was counted again the first one holds.
    """

    def __init__(self, counts: Sequence[SizeCount]) -> None:
        self._counted = {count.shapes: count for count in reversed(counts)}
        self.parts = tuple(sorted({(one.phase, one.dtype) for count in counts for one in count.flops}))
        self.laws = size_laws(tuple(self._counted.values()), self.parts)
        self._found: dict[Shapes, tuple[NDArray[np.float64], SizeLaw | None] | None] = {}

    @property
    def num_counted(self) -> int:
        """Sizes that were counted."""
        return len(self._counted)

    def counted_step(self, shapes: Shapes) -> int | None:
        """The step of this size that was counted."""
        count = self._counted.get(shapes)
        return None if count is None else count.step

    def of(self, shapes: Shapes) -> tuple[NDArray[np.float64], SizeLaw | None] | None:
        """FLOPs of each of ``parts``, and the fit that they are from; ``None`` if they are unknown."""
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
    """Which two steps on batches of one size differ in FLOPs, so that no step's follow from its size.

    Returns:
        ``""`` if none do.
    """
    first: dict[Shapes, SizeCount] = {}
    for count in counts:
        before = first.setdefault(count.shapes, count)
        flops, flops_before = count.total, before.total
        if abs(flops - flops_before) > MAX_ERROR * max(flops, flops_before):
            return (
                f"batches of one size differ in FLOPs: {flops_before:,} in step {before.step} and {flops:,}"
                f" in step {count.step}, without the optimizer's"
            )
    return ""


def mean_step(by_size: FlopsBySize, sizes: BatchSizes) -> MeanStep | Absent:
    """The FLOPs of the clean steps over their number.

    Args:
        by_size: what is known of each size.
        sizes: how many clean steps have each size.
    """
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
        return Absent(_why_missing(by_size, sizes, missing, num_steps))
    whole = float(total.sum())
    error = _standard_error(fitted) / whole if whole else 0.0
    if error > MAX_ERROR:
        return Absent(
            f"batches vary in size, and a fit through the {by_size.num_counted} counted sizes tells FLOPs to"
            f" {100 * error:.2g} % only"
        )
    return MeanStep(
        flops={part: value / num_steps for part, value in zip(by_size.parts, total.tolist(), strict=True)},
        error=error,
        num_fitted=len(fitted),
        num_counted=by_size.num_counted,
        rows=tuple(sorted(rows, key=lambda row: -row.clean_steps)),
    )


_CHOSEN: Final = 1.5
"""A law is the best of several, so that its misses are larger where it was not chosen by."""


def _standard_error(fitted: Sequence[tuple[SizeLaw, float]]) -> float:
    """Of the sum of FLOPs that fits tell: (fit, FLOPs of all steps of one size)."""
    variance = 0.0
    for law in {id(law): law for law, _ in fitted}.values():
        flops = np.array([one for its, one in fitted if its is law])
        variance += (_CHOSEN * law.miss) ** 2 * float((flops**2).sum() + law.common_share * flops.sum() ** 2)
    return math.sqrt(variance)


def _why_missing(by_size: FlopsBySize, sizes: BatchSizes, missing: int, num_steps: int) -> str:
    of_steps = f"{missing:,} of {num_steps:,} clean steps"
    num = by_size.num_counted
    if missing == sizes.other_steps:
        return f"the size of the batch is not known in {of_steps}"
    if num < MIN_COUNTED:
        counted = "1 size was" if num == 1 else f"{num or 'no'} sizes were"
        return (
            f"batches vary in size, {counted} counted, and {of_steps} have others (a fit needs {MIN_COUNTED})"
        )
    if not by_size.laws:
        return (
            f"batches vary in size, no fit through the {num} counted sizes tells one that was left out to"
            f" {100 * MAX_MISS:.0f} %, and {of_steps} have others"
        )
    return f"batches vary in size, and those of {of_steps} are unlike the {num} counted sizes"
