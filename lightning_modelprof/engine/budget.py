"""What the profiler has taken of a loop, and what it may still take."""

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
"""Of the loop's time so far, for work that was not asked for by name."""


LEAST_NS: Final = 100_000_000
"""Free in any loop of one process. With several ranks nothing is free: all of them wait for the slowest."""


LONGEST_WAIT: Final = 10**9
"""Steps; no loop has as many."""


RETRY_SHARE: Final = 8
"""What had to wait is looked at again after an eighth more steps at the earliest."""


WINDOW_NS: Final = 100_000_000


NS_PER_OPERATOR: Final = 20_000
"""What a window takes: so much, and so much for each operator call of each step; mostly to close it.

Source: benchmarks/short_fit.py, and the 19 windows of benchmarks/verdicts/trainings: an operator call becomes
two to six events, and closing a window takes 4 to 7 µs for each of them.
"""


USUAL_OPERATORS: Final = 15_000
"""Operator calls of a step whose operators weren't counted."""


COUNT_NS: Final = 10_000_000


NS_PER_MODULE: Final = 1_000_000


COUNT_STEPS: Final = 7
"""What counting a step takes: so much, and for each module so much, but no more than so many steps.

Source: as above.
"""

_IN_WINDOWS: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)


_SLOWED: Final = _IN_WINDOWS | int(StepTag.INSPECTED)


_LOGGING: Final = PHASE_INDEX["logging"]


class Budget:
    """Counts the time that is this profiler's, and says how long the loop must run before it may take more.

    What nobody asked for by name keeps to a share of the loop so far, and has to wait until it fits. Both are
    wall time without the time in which this thread was ready to run and had no CPU. Other programs on the
    machine make our work and the loop longer by that time, but not by the same share: a loop that sleeps or
    waits for a device loses little of it, and a prediction of our costs knows nothing of it. CPU time alone
    would not do: a logger that waits for a network uses none, and neither does a loop that waits for its
    data. Where the system doesn't count the time without a CPU, this is plain wall time.

    ``max_overhead`` is of all that is ours, asked for or not, by the steps that have ended; a window that
    would be too much is left out.

    Args:
        clock: host clock.
        config: what was asked for by name, and ``max_overhead``.
        is_alone: whether no other rank waits for this one.
        cpu_wait: nanoseconds this thread has waited for a CPU, ``None`` if unknown. The default asks the
            system, unless the clock isn't the system's.

    Attributes:
        most_logging_ns: the most a step's own logging took.
        inspected_ns: how much longer than a usual one the newest inspected step took.
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
        self._armed_ns = self._warm_ns = self._began_ns = 0  # the loop begins, its first step ends
        self._spent_ns = self._reserved_ns = 0
        self._since_ns: int | None = None  # our work has gone on since then
        self._slowed_since_ns: int | None = None  # when the running step began, if we make it slower
        self._unslowed_ns = 0.0  # what it would take otherwise
        self._open_window_ns = 0.0  # how much longer than that the steps of the open window took
        self._expected_ns = 0.0  # what we think the inspection of the running step costs
        self._num_waiting = 1  # ranks that wait for it
        self._counted_ns = 0.0  # what an inspected step took with what is done after it, the most so far
        self.inspected_ns = 0.0
        self._loop_ns = self._work_ns = self._opening_ns = self._closing_ns = 0
        self._slowed, self._in_windows, self._clean = _Steps(), _Steps(), _Steps()
        self._plain = _Steps()  # with those that the benchmark skips
        self._num_windows = 0
        self.most_logging_ns = 0

    # The loop's time

    def begin_loop(self) -> None:
        self._armed_ns = self._clock()
        self._began_ns = self.now()

    def end_first_step(self) -> None:
        """In which much is done once."""
        self._warm_ns = self._clock()

    def now(self) -> int:
        """Nanoseconds by the host clock, without those in which this thread had no CPU."""
        wait_ns = self._cpu_wait()
        if wait_ns is not None:
            self._wait_ns = wait_ns
        return self._clock() - self._wait_ns

    @property
    def elapsed_ns(self) -> int:
        """How long the loop has run; while our work goes on, until its last part."""
        return (self.now() if self._since_ns is None else self._since_ns) - self._began_ns

    def step_ns(self, now: int, step: int) -> int:
        """What a step took so far by the host clock, at least 1; without the first one."""
        first, begin_ns = (1, self._warm_ns) if step > 1 and self._warm_ns else (0, self._armed_ns)
        return max(1, (now - begin_ns) // max(1, step - first))

    def _mean_step_ns(self, step: int) -> int:
        """What a step took so far as we count here, at least 1."""
        return max(1, self.elapsed_ns // max(step, 1))

    def _usual_step_ns(self, step: int) -> float:
        """What a step takes in which nothing of ours or special happens, as we count here."""
        usual_ns = self._plain.mean_ns
        elapsed_ns, passed_ns = self.elapsed_ns, self._clock() - self._armed_ns
        if not usual_ns or passed_ns <= 0:
            return self._mean_step_ns(step)
        return usual_ns * elapsed_ns / passed_ns

    # What we take

    def begin(self) -> int:
        """Our work starts; returns the time."""
        self._since_ns = self.now()
        return self._since_ns

    def end(self, *, slows_step: bool = False) -> int:
        """Our work ends; returns the time.

        Args:
            slows_step: whether the step that begins takes longer because of us.
        """
        now = self._settle()
        self._since_ns = None
        self._slowed_since_ns = now if slows_step else None
        return now

    @contextmanager
    def asked_for(self, *, by_name: bool) -> Iterator[None]:
        """A part of our work; it costs nothing if it was asked for by name."""
        if by_name:
            self._settle()
        try:
            yield
        finally:
            if by_name and self._since_ns is not None:
                self._since_ns = self.now()

    def spend(self, ns: float) -> None:
        """Count time that we took outside of our own work, such as in a step that we made slower."""
        self._spent_ns += max(0, round(ns))

    def reserve(self, ns: float) -> None:
        """Keep so much for what was announced to other ranks; 0 when it starts."""
        self._reserved_ns = round(ns)

    def _settle(self) -> int:
        now = self.now()
        if self._since_ns is not None:
            self.spend(now - self._since_ns)
            self._since_ns = now
        return now

    # Steps that we make slower

    def begin_window(self, step: int) -> None:
        """The steps from here on take longer than usual ones by what is the window's."""
        self._unslowed_ns, self._open_window_ns = self._usual_step_ns(step), 0.0

    def end_window(self) -> None:
        if not self._config.asks_for_window:
            self.spend(self._open_window_ns)
        self._open_window_ns = 0.0

    def begin_inspected_step(self, step: int) -> None:
        self._unslowed_ns = self._usual_step_ns(step)

    def slow_running_step(self) -> None:
        """The running step is inspected from here on."""
        self._slowed_since_ns = self.now()

    @property
    def is_step_slowed(self) -> bool:
        return self._slowed_since_ns is not None

    def end_slowed_step(self, now: int, tags: int, *, is_inspected: bool) -> None:
        """The step that ended was slower because of us: count that as ours.

        Args:
            now: when it ended, as we count here.
            tags: a validation or the turn of an epoch in it takes longer by what the user does.
            is_inspected: or else it was in a window.
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
        """What is done after an inspected step is done, since ``begin_ns`` as we count here."""
        longer_ns = self.inspected_ns + self.now() - begin_ns
        self._counted_ns = max(self._counted_ns, longer_ns)

    # What we may still take

    def window_cost_ns(self, operators: int = USUAL_OPERATORS) -> float:
        """What a window takes, about, by the operator calls of a step."""
        return WINDOW_NS + self._config.schedule.active * operators * NS_PER_OPERATOR

    def count_cost_ns(self, step: int, num_modules: int) -> float:
        """What counting a step takes, about."""
        return COUNT_NS + min(COUNT_STEPS * self._mean_step_ns(step), NS_PER_MODULE * num_modules)

    def expect(self, cost_ns: float, num_waiting: int = 1) -> float:
        """The inspection that begins takes about so much; returns what that is for all ranks.

        Args:
            num_waiting: ranks that wait while this one inspects a step by itself.
        """
        self._expected_ns, self._num_waiting = cost_ns, num_waiting
        return cost_ns * num_waiting

    def expect_count_again(self, cost_ns: float, num_waiting: int) -> float:
        """As :meth:`expect`, of a step that is counted when another one was."""
        return self.expect(max(cost_ns, self._counted_ns), num_waiting)

    def wait_ns(self, cost_ns: float) -> int:
        """How much longer the loop must run before it has time for this cost; 0 if it has."""
        now = self._settle()
        wanted_ns = self._spent_ns + self._reserved_ns + cost_ns
        if self._is_alone and wanted_ns <= LEAST_NS:
            return 0
        return max(0, min(LARGEST, math.ceil(wanted_ns / SHARE) - (now - self._began_ns)))

    def steps_to_wait(self, step: int, cost_ns: float) -> int:
        """In how many steps something of such cost is within bounds; 0 if it is now."""
        wait_ns = self.wait_ns(cost_ns)
        if not wait_ns:
            return 0
        wait = -(-wait_ns // self._mean_step_ns(step))
        return min(LONGEST_WAIT, max(wait, step // RETRY_SHARE))  # to ask again costs time, too

    def why_no_window(self, pending_ns: int = 0) -> str:
        """Why another window would be too much, ``""`` if it would not; the first one is always recorded.

        Args:
            pending_ns: what has been done in the step that is about to begin, such as closing a window.
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

    # What we took, by the steps

    def add(self, steps: StepTimings) -> None:
        """Steps that have ended."""
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


class _Steps:
    """How many steps of a kind there were, and how long they took together."""

    def __init__(self) -> None:
        self._count = self._ns = 0

    def add(self, durations_ns: NDArray[np.int64]) -> None:
        self._count += len(durations_ns)
        self._ns += int(durations_ns.sum())

    @property
    def mean_ns(self) -> float:
        return self._ns / self._count if self._count else 0.0

    def beyond(self, usual: _Steps) -> float:
        """Nanoseconds more than as many usual steps take; 0 while there is none of these."""
        if not usual._count:
            return 0.0
        return max(0.0, self._ns - self._count * usual._ns / usual._count)


def _no_wait() -> int:
    return 0
