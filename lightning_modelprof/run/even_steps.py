"""Which steps of a long loop are kept: some of them, spread evenly, and the same ones on every rank."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_BITS: Final = 64
MAX_HALVED: Final = _BITS - 1


def is_kept(step: NDArray[np.int64], num_halved: int) -> NDArray[np.bool_]:
    """Whether a step is among the kept ones after their number was halved so many times.

    Multiples of the golden ratio are spread evenly over an interval, and out of step with every period: of
    steps that are special every n-th time the same share is kept as of all. A step that is dropped stays so.

    Args:
        step: numbers of steps, shape (n,).
        num_halved: 0 keeps all.

    Source: D. E. Knuth, The Art of Computer Programming, vol. 3, 2nd ed., section 6.4.
    """
    place = step.astype(np.uint64) * _GOLDEN
    kept: NDArray[np.bool_] = place <= np.uint64((1 << (_BITS - num_halved)) - 1)
    return kept


def few(step: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """The kept ones when they are halved until there are at most ``most``."""
    for num_halved in range(MAX_HALVED + 1):
        mask = is_kept(step, num_halved)
        if mask.sum() <= most:
            break
    return mask
