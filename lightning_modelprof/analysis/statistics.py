"""How much the mean of consecutive steps would vary from run to run, estimated from the steps themselves.

Steps aren't independent: a DataLoader's workers take turns, a machine is slow for a while. So the bootstrap
draws whole blocks of neighboring steps instead of single steps.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.95


RESAMPLES: Final = 2_000
"""Bootstrap draws; each end of a 95% interval then has 50 draws beyond it."""


MAX_BLOCKS: Final = 500
"""Blocks that a series is split into at most: more cost time and add nothing."""


_SHORT_PARTS: Final = 40


_LONG_PARTS: Final = 10


_F_95: Final = 2.124
"""F.95 with 9 and 40 degrees of freedom."""


_SEED: Final = 20_041_101


_Floats = NDArray[np.floating[Any]]


NORMAL_QUANTILE: Final = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def automatic_block_length(values: _Floats) -> float:
    """Best block length for a circular block bootstrap of a series' mean.

    Args:
        values: shape (n,), in order of time.

    Returns:
        At least 1, not rounded; 1 for a series that doesn't vary.

    Source: Politis and White, Automatic Block-Length Selection for the Dependent Bootstrap, Econometric
    Reviews 23 (2004), with the correction of Patton, Politis and White, Econometric Reviews 28 (2009).

    Caveats: for series that take turns the optimum isn't defined; the source's limit applies then, the
    smaller of 3 √n and n/3.
    """
    n = len(values)
    deviations = np.asarray(values, float) - np.mean(values)
    variance = float(deviations @ deviations) / n
    if n < 4 or variance == 0.0:
        return 1.0
    run = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(math.ceil(math.sqrt(n)) + run, n - 1)
    covariances = np.array([float(deviations[: n - lag] @ deviations[lag:]) / n for lag in range(most + 1)])
    last = max(1, _last_lag(covariances / variance, run, n))
    lags = np.arange(1, min(2 * last, most) + 1)
    taper = np.clip(2 - lags / last, 0, 1)
    weighted = taper * covariances[lags]
    spread = variance + 2 * float(weighted.sum())
    slope = 2 * float((weighted * lags).sum())
    longest = min(3 * math.sqrt(n), n / 3)
    if spread == 0.0:
        return max(1.0, longest)
    optimum = (2 * slope**2 / (4 / 3 * spread**2) * n) ** (1 / 3)
    return float(min(max(optimum, 1.0), max(1.0, longest)))


def _last_lag(correlations: _Floats, run: int, n: int) -> int:
    """Last significant lag: the next ``run`` lags are all within chance."""
    is_large = np.abs(correlations[1:]) > 2 * math.sqrt(math.log10(n) / n)
    for lag in range(len(is_large) - run + 1):
        if not is_large[lag : lag + run].any():
            return lag
    return len(is_large)


def block_lengths(values: _Floats) -> tuple[int, ...]:
    """Three block lengths to try: automatic, n/20 and n/10. The one with the widest spread counts.

    The automatic length covers short-range correlation; a machine that is slow for a while shows only in long
    blocks.

    Args:
        values: shape (n,), in order of time.

    Source: ten to thirty blocks are enough: Schmeiser, Batch Size Effects in the Analysis of Simulation
    Output, Operations Research 30 (1982).
    """
    n = len(values)
    shortest = math.ceil(n / MAX_BLOCKS)
    return (
        max(shortest, round(automatic_block_length(values))),
        max(shortest, math.ceil(n / 20)),
        max(shortest, math.ceil(n / 10)),
    )


def drift_within(values: _Floats) -> float:
    """Relative standard deviation of slow changes within a run, which also occur between runs.

    A machine that is slower for seconds makes tenths of a run differ by more than its fortieths explain if
    these were independent. Assume at least as much drift from one run to the next.

    Args:
        values: shape (n,), in order of time.

    Returns:
        0 for fewer than 40 values, and unless tenths vary by more than chance explains (the 5% point of F).

    Source: the analysis of variance, with the table of F in the NIST/SEMATECH e-Handbook, section 1.3.6.7.3.
    """
    n = len(values)
    if n < _SHORT_PARTS or not values.any():
        return 0.0
    in_short, in_long = n // _SHORT_PARTS, n // _LONG_PARTS
    short = values[: in_short * _SHORT_PARTS].reshape(_SHORT_PARTS, in_short).mean(axis=1)
    long = values[: in_long * _LONG_PARTS].reshape(_LONG_PARTS, in_long).mean(axis=1)
    explained = float(short.var(ddof=1)) * in_short / in_long
    found = float(long.var(ddof=1))
    return math.sqrt(found - explained) / float(values.mean()) if found > _F_95 * explained else 0.0


def resampled_means(columns: _Floats, length: int, *, resamples: int = RESAMPLES) -> _Floats:
    """Means of the columns in runs resampled from blocks of consecutive steps.

    All columns of a step stay together, so that quotients of two means are resampled correctly. The same
    steps always give the same result.

    Args:
        columns: shape (n, c), in order of time.
        length: steps per block. Blocks wrap around at the end of the series.

    Returns:
        Shape (resamples, c).

    Source: the circular block bootstrap of Politis and Romano, in: Exploring the Limits of Bootstrap (1992).
    """
    n = len(columns)
    is_used = columns.any(axis=0)  # most phases take no time in most runs
    used = columns[:, is_used]
    wrapped = np.concatenate([np.zeros((1, used.shape[1])), used, used[: length - 1]]).cumsum(axis=0)
    blocks = (wrapped[length:] - wrapped[:-length]) / length
    # Seed with the data, so that two sides are independent and swapping them doesn't change the result.
    generator = np.random.default_rng([_SEED, n, length, int(abs(columns).sum())])
    num_blocks = math.ceil(n / length)
    total = np.zeros((resamples, used.shape[1]))
    for _ in range(num_blocks):
        total += blocks[generator.integers(0, n, resamples)]
    means = np.zeros((resamples, columns.shape[1]))
    means[:, is_used] = total / num_blocks
    return means


def small_sample_factor(num_blocks: float) -> float:
    """Factor that widens a bootstrapped interval, since few blocks vary too little.

    Args:
        num_blocks: steps over block length, of the side with fewer blocks.

    Source: the variance of n drawn from n is (n-1)/n of the true one; Student's t for a variance that is
    itself estimated, with 1.5 degrees of freedom per block, since blocks overlap: Meketon and Schmeiser,
    Overlapping Batch Means: Something for Nothing?, Proceedings of the Winter Simulation Conference 1984.
    """
    blocks = max(num_blocks, 2.0)
    quantile = t_975(round(1.5 * (blocks - 1)))
    return math.sqrt(blocks / (blocks - 1)) * quantile / NORMAL_QUANTILE


# t.975 by degrees of freedom, from 1. Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def t_975(degrees: int) -> float:
    """Half-width of a 95% interval in standard errors, correct to three decimals.

    Args:
        degrees: degrees of freedom, 1 or more.

    Source: up to 30, the table of the NIST/SEMATECH e-Handbook, section 1.3.6.7.2; beyond, ``t_quantile``.
    """
    return _T_975[degrees - 1] if degrees <= len(_T_975) else t_quantile(0.975, degrees)


def t_quantile(probability: float, degrees: float) -> float:
    """Student's quantile; with at least four degrees, at most 0.3% too small for 0.99 and 3% for 0.9998.

    Args:
        probability: of a smaller value.
        degrees: degrees of freedom, not necessarily whole.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def theil_sen(
    x: _Floats, y: _Floats, strata: NDArray[np.integer[Any]] | None = None
) -> tuple[float, float, float]:
    """Median of the slopes between all pairs of points, and its 95% interval.

    Args:
        x: shape (n,), never falling, not all equal; points with equal x don't form a pair.
        y: shape (n,).
        strata: shape (n,), whole numbers from 0: only points of one stratum form a pair; by default all do.

    Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, Journal of the American
    Statistical Association 63 (1968); the variance of Kendall's statistic, which is the sum over strata minus
    the contribution of pairs with equal x.
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


def medians(values: NDArray[Any], most: int) -> _Floats:
    """Medians of up to ``most`` groups of neighbors, as equal in size as possible, by column.

    Args:
        values: shape (n, ...), n at least 1.
    """
    return np.array([np.median(part, axis=0) for part in np.array_split(values, min(most, len(values)))])
