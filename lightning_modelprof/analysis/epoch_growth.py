"""Memory that grows within each epoch and falls at its end: what a loop collects and then clears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.theil_sen import theil_sen

_LEAST_POINTS: Final = 4
"""Points that an epoch needs to count; the halves of an epoch have a slope of their own."""
_LEAST_IN_ALL: Final = 20
_MOST_GROUPS: Final = 40
"""Neighbouring points are taken together, into about so many in all epochs."""
_FALLS: Final = 0.5
"""Share of what an epoch grows by that has to be gone after it."""

_Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochGrowth:
    """How one kind of memory grows within epochs; every figure compares points of one epoch only.

    Attributes:
        level_bytes: median over epochs of the highest level.
        num_epochs: with enough points.
        num_steps: median length of these in steps.
        bytes_per_step: Theil-Sen slope over the pairs of points of the same epoch.
        low, high: its 95 % interval.
        first, second: slopes of the first and of the second halves of the epochs alone.
        fallen_bytes: median over the ends of epochs: the last level before less the first one after.
    """

    level_bytes: float
    num_epochs: int
    num_steps: float
    bytes_per_step: float
    low: float
    high: float
    first: float
    second: float
    fallen_bytes: float

    @property
    def grown_bytes(self) -> float:
        """By how much it grows in an epoch."""
        return self.bytes_per_step * self.num_steps

    @property
    def falls(self) -> bool:
        """Whether it grows in each epoch, surely, and at least half of that is gone after it."""
        return self.low > 0 and self.fallen_bytes >= _FALLS * self.grown_bytes


def within_epochs(steps: _Floats, sizes: _Floats, starts: Sequence[int]) -> EpochGrowth | None:
    """How memory grows within epochs; ``None`` with fewer than two epochs that have enough points.

    Args:
        steps: shape (n,), rising: where memory was looked at.
        sizes: shape (n,), in bytes.
        starts: the steps in which an epoch begins, rising. Their own points are left out: what an epoch kept
            is cleared within them, before or after memory was looked at.
    """
    bounds = np.asarray(starts, float)
    inside = ~np.isin(steps, bounds)
    steps, sizes = steps[inside], sizes[inside]
    of_epoch = np.searchsorted(bounds, steps)
    epochs = [one for one in np.unique(of_epoch) if (of_epoch == one).sum() >= _LEAST_POINTS]
    if len(epochs) < 2 or np.isin(of_epoch, epochs).sum() < _LEAST_IN_ALL:
        return None
    num_groups = max(_LEAST_POINTS, _MOST_GROUPS // len(epochs))
    curves = [_medians(steps[of_epoch == one], sizes[of_epoch == one], num_groups) for one in epochs]
    slope, low, high = _slope(curves)
    lengths = [curve[0][-1] - curve[0][0] for curve in curves]
    return EpochGrowth(
        level_bytes=float(np.median([curve[1].max() for curve in curves])),
        num_epochs=len(epochs),
        num_steps=float(np.median(lengths)),
        bytes_per_step=slope,
        low=low,
        high=high,
        first=_slope([(x[: len(x) // 2], y[: len(x) // 2]) for x, y in curves])[0],
        second=_slope([(x[len(x) // 2 :], y[len(x) // 2 :]) for x, y in curves])[0],
        fallen_bytes=float(np.median([one[1][-1] - other[1][0] for one, other in pairwise(curves)])),
    )


def without_growth(
    steps: _Floats, sizes: _Floats, starts: Sequence[int], growth: EpochGrowth
) -> tuple[_Floats, _Floats]:
    """The points without those of the steps in which an epoch begins, less what it grew by in its epoch."""
    bounds = np.asarray(starts, float)
    inside = ~np.isin(steps, bounds)
    steps, sizes = steps[inside], sizes[inside]
    begins = np.concatenate([steps[:1], bounds])[np.searchsorted(bounds, steps)]
    return steps, sizes - growth.bytes_per_step * (steps - begins)


def _medians(x: _Floats, y: _Floats, most: int) -> tuple[_Floats, _Floats]:
    num = min(most, len(x))
    return (
        np.array([np.median(one) for one in np.array_split(x, num)]),
        np.array([np.median(one) for one in np.array_split(y, num)]),
    )


def _slope(curves: Sequence[tuple[_Floats, _Floats]]) -> tuple[float, float, float]:
    strata = np.repeat(np.arange(len(curves)), [len(x) for x, _ in curves])
    return theil_sen(np.concatenate([x for x, _ in curves]), np.concatenate([y for _, y in curves]), strata)
