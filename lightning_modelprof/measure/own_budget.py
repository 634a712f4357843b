"""Keeps what this profiler takes of a loop within a budget, by leaving out windows."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings

_PROFILER: Final = PHASE_INDEX["profiler"]
_SLOWED: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP | StepTag.INSPECTED)
_USERS: Final = int(StepTag.VALIDATION | StepTag.FIRST_OF_EPOCH)


class OwnBudget:
    """Counts the time that is this profiler's, and says when another window would be too much.

    Args:
        max_overhead: share of the loop that may be ours; ``None`` sets no limit.
    """

    def __init__(self, max_overhead: float | None) -> None:
        self._max_overhead = max_overhead
        self._loop_ns = self._work_ns = 0
        self._num_slowed = self._slowed_ns = 0
        self._num_clean = self._clean_ns = 0
        self._num_windows = 0

    def add(self, steps: StepTimings) -> None:
        """Steps that ended since this was last called."""
        work_ns = steps.phases_ns[:, _PROFILER]
        work_ns = work_ns * (work_ns != NOT_MEASURED)
        is_slowed = ((steps.tags & _SLOWED) != 0) & ((steps.tags & _USERS) == 0)
        clean = steps.clean()
        self._loop_ns += int(steps.duration_ns.sum())
        self._work_ns += int(work_ns.sum())
        self._num_slowed += int(is_slowed.sum())
        self._slowed_ns += int((steps.duration_ns - work_ns)[is_slowed].sum())
        self._num_clean += len(clean)
        self._clean_ns += int(clean.duration_ns.sum())

    def add_window(self) -> None:
        """A window was recorded; what it takes is in the steps."""
        self._num_windows += 1

    @property
    def own_ns(self) -> float:
        """Work between steps, and how much longer than clean ones the steps took that were slowed down."""
        if not self._num_clean:
            return float(self._work_ns)
        usual_ns = self._clean_ns / self._num_clean
        return self._work_ns + max(0.0, self._slowed_ns - self._num_slowed * usual_ns)

    def why_not(self, pending_ns: int = 0) -> str:
        """Why another window would be too much, ``""`` if it would not; the first one is always recorded.

        Args:
            pending_ns: what has been done in the step that is about to begin, such as closing a window.
        """
        limit, loop_ns = self._max_overhead, self._loop_ns + pending_ns
        if limit is None or not self._num_windows or not loop_ns:
            return ""
        with_another_ns = (self.own_ns + pending_ns) * (1 + 1 / self._num_windows)
        if with_another_ns <= limit * loop_ns:
            return ""
        return (
            f"max_overhead={limit:g}: with another window the profiler would have taken"
            f" {100 * with_another_ns / loop_ns:.2g} % of the loop so far"
        )
