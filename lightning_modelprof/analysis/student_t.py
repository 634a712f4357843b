"""Quantiles of Student's t distribution."""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

# t.975 by degrees of freedom, from 1. Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def t_975(degrees: int) -> float:
    """How many standard errors a 95 % interval reaches to each side, right to three decimals.

    Args:
        degrees: of freedom, 1 or more.

    Source: up to 30 the table of the NIST/SEMATECH e-Handbook, section 1.3.6.7.2; beyond, ``t_quantile``.
    """
    return _T_975[degrees - 1] if degrees <= len(_T_975) else t_quantile(0.975, degrees)


def t_quantile(probability: float, degrees: float) -> float:
    """The quantile; 0.3 % too small or less with at least four degrees of freedom and 0.99, 3 % with 0.9998.

    Args:
        probability: of a value below it.
        degrees: of freedom, which need not be whole.

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
