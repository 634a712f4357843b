"""How closely a loop is looked at where nobody has asked for it: as far as its own length allows."""

from __future__ import annotations

import math
from typing import Final

from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.run.ranges import LARGEST

SHARE: Final = 0.05
"""Of the time that the loop has run so far."""

LEAST_NS: Final = 100_000_000
"""What may be taken of any loop."""

WINDOW_NS: Final = 100_000_000
NS_PER_OPERATOR: Final = 600_000
"""What a window takes: so much, and so much for each operator with FLOPs of each step; mostly to close it.

Source: benchmarks/short_fit.py.
"""

COUNT_NS: Final = 10_000_000
NS_PER_MODULE: Final = 1_000_000
COUNT_STEPS: Final = 7
"""What counting a step takes: so much, and for each module so much, but no more than so many steps.

Source: as above.
"""


class Allowance:
    """What was taken of a loop beside its timing, and how long it must run until more may be.

    Args:
        clock: host clock; the loop begins now.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._began_ns = clock()
        self._spent_ns = 0

    def spend(self, ns: int) -> None:
        """So much was taken."""
        self._spent_ns += max(0, ns)

    def wait_ns(self, cost_ns: float) -> int:
        """How much longer the loop must run until something of this cost is within bounds; 0 if it is."""
        wanted_ns = self._spent_ns + cost_ns
        if wanted_ns <= LEAST_NS:
            return 0
        passed_ns = self._clock() - self._began_ns
        return max(0, min(LARGEST, math.ceil(wanted_ns / SHARE) - passed_ns))
