"""The profiler's overhead in a loop, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.measure.clock import HostClock, host_clock
from lightning_modelprof.measure.resources.cpu import cpu_wait_ns
from lightning_modelprof.record import LARGEST
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED, PROFILER, SPECIAL, StepTag, StepTimings
from lightning_modelprof.units import digits

SHARE: Final = 0.05
"""Share of the loop's time so far, for work that wasn't requested explicitly."""


LEAST_NS: Final = 100_000_000
"""Free in a single-process loop. With several ranks nothing is free, as all wait for the slowest."""


LONGEST_WAIT: Final = 10**9
"""In steps; no loop has as many."""


RETRY_SHARE: Final = 8
"""Retry delayed work after an eighth more steps at the earliest."""


WINDOW_NS: Final = 100_000_000


NS_PER_OPERATOR: Final = 20_000
"""Cost of a window per operator call of each step, mostly for closing it, in addition to ``WINDOW_NS``.

Source: benchmarks/short_fit.py, and the 19 windows of benchmarks/verdicts/trainings: an operator call becomes
two to six events, and closing a window takes 4 to 7 µs per event.
"""


USUAL_OPERATORS: Final = 15_000
"""Operator calls per step to assume if they weren't counted."""


COUNT_NS: Final = 10_000_000


NS_PER_MODULE: Final = 1_000_000


COUNT_STEPS: Final = 7
"""Counting a step costs ``COUNT_NS``, and ``NS_PER_MODULE`` per module up to this many steps' time.

Source: as for ``NS_PER_OPERATOR``.
"""

_IN_WINDOWS: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)


_SLOWED: Final = _IN_WINDOWS | int(StepTag.INSPECTED)


_LOGGING: Final = PHASE_INDEX["logging"]


class Budget:
    """Tracks the profiler's overhead, and says how long the loop must run before it may do more.

    Work that wasn't requested explicitly is limited to a share of the loop's time so far, and waits until it
    fits. Both are wall time minus the time in which this thread was ready to run but had no CPU. Other
    programs on the machine make our work and the loop longer by that time, but not by the same share: a loop
    that sleeps or waits for a device loses little of it, and our cost estimates don't include it. CPU time
    alone wouldn't do: a logger that waits for a network uses none, and neither does a loop that waits for its
    data. Where the system doesn't count the time without a CPU, this is plain wall time.

    ``max_overhead`` limits all our work, requested or not, over the finished steps; a window that would
    exceed it is skipped.

    Args:
        clock: host clock.
        config: what was requested explicitly, and ``max_overhead``.
        is_alone: whether no other rank waits for this one.
        cpu_wait: nanoseconds this thread has waited for a CPU, ``None`` if unknown. The default asks the
            system, unless the clock isn't the system's.

    Attributes:
        most_logging_ns: longest time that a step's own logging took.
        inspected_ns: extra time of the newest inspected step over a usual one.
    """

    def __init__(
        self,
        clock: HostClock,
        config: ProfileConfig,
        *,
        is_alone: bool = True,
        cpu_wait: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock = clock
        self._config = config
        self._is_alone = is_alone
        self._cpu_wait = cpu_wait or (cpu_wait_ns if clock is host_clock else _no_wait)
        self._wait_ns = 0
        self._armed_ns = self._warm_ns = self._began_ns = 0  # start, first step's end, start by now()
        self._spent_ns = self._reserved_ns = 0
        self._since_ns: int | None = None  # start of our current work
        self._slowed_since_ns: int | None = None  # start of the running step, if we slow it down
        self._unslowed_ns = 0.0  # its duration otherwise
        self._open_window_ns = 0.0  # the open window's extra time in its steps
        self._expected_ns = 0.0  # estimated cost of inspecting the running step
        self._num_waiting = 1  # ranks that wait for it
        self._counted_ns = 0.0  # most extra time of an inspected step, including the work after it
        self.inspected_ns = 0.0
        self._loop_ns = self._work_ns = self._opening_ns = self._closing_ns = 0
        self._slowed, self._in_windows, self._clean = _Steps(), _Steps(), _Steps()
        self._plain = _Steps()  # including those that the benchmark skips
        self._num_windows = 0
        self.most_logging_ns = 0

    # Loop time

    def begin_loop(self) -> None:
        self._armed_ns = self._clock()
        self._began_ns = self.now()

    def end_first_step(self) -> None:
        """Mark the end of the first step, which has one-time costs."""
        self._warm_ns = self._clock()

    def now(self) -> int:
        """Host clock in ns, minus the time this thread waited for a CPU."""
        wait_ns = self._cpu_wait()
        if wait_ns is not None:
            self._wait_ns = wait_ns
        return self._clock() - self._wait_ns

    @property
    def elapsed_ns(self) -> int:
        """Loop time so far; while we work, up to the last settled part of our work."""
        return (self.now() if self._since_ns is None else self._since_ns) - self._began_ns

    def step_ns(self, now: int, step: int) -> int:
        """Mean step time so far by the host clock, at least 1 ns; excludes the first step."""
        first, begin_ns = (1, self._warm_ns) if step > 1 and self._warm_ns else (0, self._armed_ns)
        return max(1, (now - begin_ns) // max(1, step - first))

    def _mean_step_ns(self, step: int) -> int:
        """Mean step time so far without CPU waits, at least 1 ns."""
        return max(1, self.elapsed_ns // max(step, 1))

    def _usual_step_ns(self, step: int) -> float:
        """Step time without CPU waits, our work or special events."""
        usual_ns = self._plain.mean_ns
        elapsed_ns, passed_ns = self.elapsed_ns, self._clock() - self._armed_ns
        if not usual_ns or passed_ns <= 0:
            return self._mean_step_ns(step)
        return usual_ns * elapsed_ns / passed_ns

    # Our overhead

    def begin(self) -> int:
        """Start our work; return the time."""
        self._since_ns = self.now()
        return self._since_ns

    def end(self, *, slows_step: bool = False) -> int:
        """End our work; return the time.

        Args:
            slows_step: whether the step that starts takes longer because of us.
        """
        now = self._settle()
        self._since_ns = None
        self._slowed_since_ns = now if slows_step else None
        return now

    @contextmanager
    def asked_for(self, *, by_name: bool) -> Iterator[None]:
        """Don't count a part of our work if it was requested explicitly."""
        if by_name:
            self._settle()
        try:
            yield
        finally:
            if by_name and self._since_ns is not None:
                self._since_ns = self.now()

    def spend(self, ns: float) -> None:
        """Count overhead outside our own work, such as in a step that we slowed down."""
        self._spent_ns += max(0, round(ns))

    def reserve(self, ns: float) -> None:
        """Reserve time for work announced to other ranks; 0 when it starts."""
        self._reserved_ns = round(ns)

    def _settle(self) -> int:
        now = self.now()
        if self._since_ns is not None:
            self.spend(now - self._since_ns)
            self._since_ns = now
        return now

    # Steps that we slow down

    def begin_window(self, step: int) -> None:
        """Count the extra time of the following steps as the window's."""
        self._unslowed_ns, self._open_window_ns = self._usual_step_ns(step), 0.0

    def end_window(self) -> None:
        if not self._config.asks_for_window:
            self.spend(self._open_window_ns)
        self._open_window_ns = 0.0

    def begin_inspected_step(self, step: int) -> None:
        self._unslowed_ns = self._usual_step_ns(step)

    def slow_running_step(self) -> None:
        """Count the running step as inspected from now on."""
        self._slowed_since_ns = self.now()

    @property
    def is_step_slowed(self) -> bool:
        return self._slowed_since_ns is not None

    def end_slowed_step(self, now: int, tags: int, *, is_inspected: bool) -> None:
        """Count the extra time of a step that we slowed down.

        Args:
            now: its end, as by :meth:`now`.
            tags: of the step; one with a validation or an epoch's turn takes longer because of user code.
            is_inspected: whether it was inspected rather than in a window.
        """
        since_ns, self._slowed_since_ns = self._slowed_since_ns, None
        if since_ns is None:
            return
        longer_ns = now - since_ns - self._unslowed_ns
        if not is_inspected:
            self._open_window_ns += 0 if tags & SPECIAL else longer_ns
            return
        self.inspected_ns = self._expected_ns if tags & SPECIAL else max(0.0, longer_ns)
        if not self._config.asks_for_inspection:
            self.spend(self.inspected_ns * self._num_waiting)

    def end_inspection(self, begin_ns: int) -> None:
        """Count the work after an inspected step, since ``begin_ns`` as by :meth:`now`."""
        longer_ns = self.inspected_ns + self.now() - begin_ns
        self._counted_ns = max(self._counted_ns, longer_ns)

    # Remaining budget

    def window_cost_ns(self, operators: int = USUAL_OPERATORS) -> float:
        return WINDOW_NS + self._config.schedule.active * operators * NS_PER_OPERATOR

    def count_cost_ns(self, step: int, num_modules: int) -> float:
        return COUNT_NS + min(COUNT_STEPS * self._mean_step_ns(step), NS_PER_MODULE * num_modules)

    def expect(self, cost_ns: float, num_waiting: int = 1) -> float:
        """Set the estimated cost of the inspection that starts; return its cost for all ranks.

        Args:
            num_waiting: ranks that wait while this one inspects a step.
        """
        self._expected_ns, self._num_waiting = cost_ns, num_waiting
        return cost_ns * num_waiting

    def expect_count_again(self, cost_ns: float, num_waiting: int) -> float:
        """Like :meth:`expect`, for a step after another was counted."""
        return self.expect(max(cost_ns, self._counted_ns), num_waiting)

    def wait_ns(self, cost_ns: float) -> int:
        """Return how much longer the loop must run to afford this cost; 0 if it can now."""
        now = self._settle()
        wanted_ns = self._spent_ns + self._reserved_ns + cost_ns
        if self._is_alone and wanted_ns <= LEAST_NS:
            return 0
        return max(0, min(LARGEST, math.ceil(wanted_ns / SHARE) - (now - self._began_ns)))

    def steps_to_wait(self, step: int, cost_ns: float) -> int:
        """Return the steps until this cost is within limits; 0 if it is now."""
        wait_ns = self.wait_ns(cost_ns)
        if not wait_ns:
            return 0
        wait = -(-wait_ns // self._mean_step_ns(step))
        return min(LONGEST_WAIT, max(wait, step // RETRY_SHARE))  # asking again costs time, too

    def why_no_window(self, pending_ns: int = 0) -> str:
        """Explain why another window would exceed ``max_overhead``; ``""`` if it wouldn't or is the first.

        Args:
            pending_ns: work already done in the step that is about to start, such as closing a window.
        """
        limit = self._config.bounds.max_overhead
        loop_ns = self._loop_ns + pending_ns + self.window_ns
        if limit is None or not self._num_windows or not loop_ns:
            return ""
        with_another_ns = self.own_ns + pending_ns + self.window_ns
        if with_another_ns <= limit * loop_ns:
            return ""
        return (
            f"another window would have raised the overhead to {digits(100 * with_another_ns / loop_ns)}%"
            f' (bounds={{"max_overhead": {limit:g}}})'
        )

    # Overhead from finished steps

    def add(self, steps: StepTimings) -> None:
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
        self._plain.add(others_ns[is_usual & ((steps.tags & _SLOWED) == 0) & (steps.step > 0)])
        self.most_logging_ns = max(self.most_logging_ns, int(steps.phases_ns[:, _LOGGING].max(initial=0)))

    def add_window(self, close_ns: int) -> None:
        """Count a recorded window and its closing time; the rest of its cost is in its steps."""
        self._num_windows += 1
        self._closing_ns += close_ns

    @property
    def own_ns(self) -> float:
        """Work between steps, and the extra time of slowed steps over clean ones."""
        return self._work_ns + self._slowed.beyond(self._clean)

    @property
    def window_ns(self) -> float:
        """Mean cost of a window; 0 before the first."""
        if not self._num_windows:
            return 0.0
        in_steps_ns = self._opening_ns + self._in_windows.beyond(self._clean)
        return (in_steps_ns + self._closing_ns) / self._num_windows


class _Steps:
    def __init__(self) -> None:
        self._count = self._ns = 0

    def add(self, durations_ns: NDArray[np.int64]) -> None:
        self._count += len(durations_ns)
        self._ns += int(durations_ns.sum())

    @property
    def mean_ns(self) -> float:
        return self._ns / self._count if self._count else 0.0

    def beyond(self, usual: _Steps) -> float:
        """Extra nanoseconds over as many usual steps; 0 if there are none of these."""
        if not usual._count:
            return 0.0
        return max(0.0, self._ns - self._count * usual._ns / usual._count)


def _no_wait() -> int:
    return 0
