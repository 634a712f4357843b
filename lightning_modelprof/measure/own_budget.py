"""Keeps what this profiler takes of a loop within a budget, by leaving out windows."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.steps import NOT_MEASURED, PROFILER, SPECIAL, StepTag, StepTimings

_IN_WINDOWS: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)
_SLOWED: Final = _IN_WINDOWS | int(StepTag.INSPECTED)


class OwnBudget:
    """Counts the time that is this profiler's, and says when another window would be too much.

    Args:
        max_overhead: share of the loop that may be ours; ``None`` sets no limit.
    """

    def __init__(self, max_overhead: float | None) -> None:
        self._max_overhead = max_overhead
        self._loop_ns = self._work_ns = self._opening_ns = self._closing_ns = 0
        self._slowed, self._in_windows, self._clean = _Steps(), _Steps(), _Steps()
        self._num_windows = 0

    def add(self, steps: StepTimings) -> None:
        """Steps that ended since this was last called."""
        work_ns = steps.phases_ns[:, PROFILER]
        work_ns = work_ns * (work_ns != NOT_MEASURED)
        others_ns = steps.duration_ns - work_ns
        is_usual = (steps.tags & SPECIAL) == 0
        is_in_window = (steps.tags & _IN_WINDOWS) != 0
        self._loop_ns += int(steps.duration_ns.sum())
        self._work_ns += int(work_ns.sum())
        self._opening_ns += int(work_ns[is_in_window].sum())
        self._slowed.add(others_ns[is_usual & ((steps.tags & _SLOWED) != 0)])
        self._in_windows.add(others_ns[is_usual & is_in_window])
        self._clean.add(steps.clean().duration_ns)

    def add_window(self, close_ns: int) -> None:
        """A window was recorded and took so long to close; the rest of what it takes is in its steps."""
        self._num_windows += 1
        self._closing_ns += close_ns

    @property
    def own_ns(self) -> float:
        """Work between steps, and how much longer than clean ones the steps took that were slowed down."""
        return self._work_ns + self._slowed.beyond(self._clean)

    @property
    def window_ns(self) -> float:
        """What a window has taken in the mean; 0 before the first."""
        if not self._num_windows:
            return 0.0
        in_steps_ns = self._opening_ns + self._in_windows.beyond(self._clean)
        return (in_steps_ns + self._closing_ns) / self._num_windows

    def why_not(self, pending_ns: int = 0) -> str:
        """Why another window would be too much, ``""`` if it would not; the first one is always recorded.

        Args:
            pending_ns: what has been done in the step that is about to begin, such as closing a window.
        """
        limit, loop_ns = self._max_overhead, self._loop_ns + pending_ns + self.window_ns
        if limit is None or not self._num_windows or not loop_ns:
            return ""
        with_another_ns = self.own_ns + pending_ns + self.window_ns
        if with_another_ns <= limit * loop_ns:
            return ""
        return (
            f"max_overhead={limit:g}: with another window the profiler would have taken"
            f" {100 * with_another_ns / loop_ns:.3g} % of the loop so far"
        )


class _Steps:
    """How many steps of a kind there were, and how long they took together."""

    def __init__(self) -> None:
        self._count = self._ns = 0

    def add(self, durations_ns: NDArray[np.int64]) -> None:
        self._count += len(durations_ns)
        self._ns += int(durations_ns.sum())

    def beyond(self, usual: _Steps) -> float:
        """Nanoseconds more than as many usual steps take; 0 while there is none of these."""
        if not usual._count:
            return 0.0
        return max(0.0, self._ns - self._count * usual._ns / usual._count)
