"""The slope of a line that single points cannot bend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.statistics import NORMAL_QUANTILE

_Floats = NDArray[np.floating[Any]]


def theil_sen(
    x: _Floats, y: _Floats, strata: NDArray[np.integer[Any]] | None = None
) -> tuple[float, float, float]:
    """The median of the slopes between all pairs of points, and its 95 % interval.

    Args:
        x: shape (n,), never falling, not all the same; points of the same x make no pair.
        y: shape (n,).
        strata: shape (n,), whole numbers from 0: only points of the same number make a pair; by default all.

    Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, Journal of the American
    Statistical Association 63 (1968); the variance of Kendall's statistic, which is the sum of the strata's
    less what pairs of the same x would add to it.
    """
    strata = np.zeros(len(x), int) if strata is None else strata
    first, second = np.triu_indices(len(x), k=1)
    is_pair = (strata[first] == strata[second]) & (x[first] < x[second])
    first, second = first[is_pair], second[is_pair]
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    ties = np.unique(np.stack([strata, x]), axis=1, return_counts=True)[1]
    count, spread = len(slopes), _spread(np.bincount(strata)) - _spread(ties)
    reach = NORMAL_QUANTILE * math.sqrt(spread / 18)
    low, high = math.floor((count - reach) / 2) - 1, math.ceil((count + reach) / 2)
    return (
        float(np.median(slopes)),
        float(slopes[max(0, low)]),
        float(slopes[min(count - 1, high)]),
    )


def _spread(n: NDArray[np.integer[Any]]) -> int:
    return int((n * (n - 1) * (2 * n + 5)).sum())
