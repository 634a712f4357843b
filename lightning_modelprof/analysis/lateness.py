"""Which ranks are late by more than chance explains, from what each did on its own in the same steps."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.steps.benchmark import standard_error
from lightning_modelprof.analysis.student_t import t_quantile

SIGNIFICANCE: Final = 0.01
"""Probability that any rank is called late though none is, in each try of what ranks do on their own."""

_MOST_ALIKE: Final = 0.9
"""Neighbouring steps that are more alike than that are not told from a rank that became slower on the way."""

_BY_CHANCE: Final = NormalDist().inv_cdf(0.95)
"""Independent steps have a correlation of more than this over √n in one of twenty cases."""

_LEAST_INDEPENDENT: Final = 5.0
"""Steps count as so many at least, so that a great lateness is seen however alike they are."""

RankTimes = NDArray[np.float64]
"""Nanoseconds; shape (ranks, steps)."""


def lateness(own_ns: RankTimes) -> RankTimes:
    """By rank and step, how much longer a rank takes on its own than the others in the mean.

    Not than their median: where times are skewed, as they are, every rank is longer than that.
    """
    late: RankTimes = own_ns - (own_ns.sum(axis=0) - own_ns) / (len(own_ns) - 1)
    return late


def late_ranks(own_ns: RankTimes) -> dict[int, float]:
    """Mean lateness of the ranks that are late for sure, by their place; the latest first.

    Definition: the mean lateness is more than each of two standard errors, times Student's quantile for
    ``SIGNIFICANCE`` divided among the ranks (Bonferroni). One makes no assumption how steps depend on each
    other, but hardly sees what lasts longer than √n steps: overlapping batch means. The other counts only
    where neighbouring steps are alike by more than chance explains: the more so, the fewer are independent.
    """
    num_ranks, num_steps = own_ns.shape
    probability = 1 - SIGNIFICANCE / num_ranks
    late = lateness(own_ns)
    means_ns = late.mean(axis=1)
    residuals = late - means_ns[:, None]
    of_batches = t_quantile(probability, 1.5 * (num_steps / math.isqrt(num_steps) - 1))
    found = {}
    for place in np.argsort(-means_ns, kind="stable").tolist():
        mean_ns = float(means_ns[place])
        if mean_ns <= 0:
            break
        if mean_ns <= of_batches * (standard_error(residuals[place]) or 0.0):
            continue
        independent = _independent_steps(residuals[place])
        if independent is not None:
            error_ns = math.sqrt(float((residuals[place] ** 2).mean()) / (independent - 1))
            if mean_ns <= t_quantile(probability, independent - 1) * error_ns:
                continue
        found[place] = mean_ns
    return found


def _independent_steps(residuals: NDArray[np.float64]) -> float | None:
    """As many independent steps would tell the mean as well as these, of which each is like the one before.

    ``None`` where neighbours are not alike. Then it is not n: lateness that comes in every tenth step tells
    its mean better than chance would.

    Source: n (1 - φ) / (1 + φ) for an autoregression of first order: Bayley and Hammersley, The "Effective"
    Number of Independent Observations in an Autocorrelated Time Series, 1946. Its φ is estimated too low by
    (1 + 3 φ) / n: Kendall, Note on Bias in the Estimation of Autocorrelation, 1954.
    """
    n, squares = len(residuals), float(residuals @ residuals)
    if squares == 0:
        return None
    alike = float(residuals[1:] @ residuals[:-1]) / squares
    if alike <= _BY_CHANCE / math.sqrt(n):
        return None
    alike = min(alike + (1 + 3 * alike) / n, _MOST_ALIKE)
    return max(n * (1 - alike) / (1 + alike), _LEAST_INDEPENDENT)
