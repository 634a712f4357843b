"""Compute what is due at each step of a loop, without measuring anything or reading a clock."""

from __future__ import annotations

import math
from typing import Final

from lightning_modelprof.config.options import DEFAULTS, ProfileConfig
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.measure.window.schedule import Schedule, WindowAction
from lightning_modelprof.measure.window.window_plan import NEVER, WindowPlan

DEFAULT_CUT: Final = 50
"""Steps between updates of a progress bar if nothing is logged: as often as Lightning logs by default."""


LOOK_EVERY: Final = 500
"""Steps after which they become columns, and slow ones are searched, even if nothing shows them."""


# Time between saves, as a multiple of what a save takes.
_INTERVAL_FACTOR: Final = 200


_MIN_INTERVAL_NS: Final = 10_000_000_000


# If the machine sleeps during a save, it seems to take hours.
_MAX_INTERVAL_NS: Final = 3_600_000_000_000


NUM_TIMED: Final = 3
"""Number of steps to time modules in, enough to recognize a single slow step."""


SKIPPED_SHARE: Final = 1 / 6
"""Maximum share of a short loop's steps to skip, so that enough are left for a verdict."""


SHORT_LOOP: Final = 30
"""Loops with fewer steps time modules in only one."""


_WARM: Final = 1
"""Avoid the first step if there are others: lazy modules, allocators and kernels start in it."""


class InspectedSteps:
    """Steps to inspect: one is counted, and some time modules.

    Attributes:
        counted: step whose FLOPs are counted; ``None`` if every step is in a profiler window.
        timed: steps in which modules are timed.
    """

    def __init__(self, counted: int | None, timed: tuple[int, ...] = ()) -> None:
        self.counted = counted
        self.timed = timed
        self._left = {step for step in (counted, *timed) if step is not None}

    @property
    def next_step(self) -> int:
        """Next step at whose start something is due."""
        return min(self._left, default=NEVER)

    @property
    def is_done(self) -> bool:
        """Whether no step is left to inspect, except for new batch sizes."""
        return not self._left

    @property
    def may_wait(self) -> bool:
        """Whether no step has been inspected yet."""
        return self.counted is not None and self.counted in self._left

    def begin_step(self, step: int) -> bool:
        """Start a step; return whether it's inspected."""
        if step not in self._left:
            return False
        self._left.discard(step)
        return True

    def leave_rest(self) -> None:
        self._left = set()

    def postpone(self, by: int, *, schedule: Schedule | None, accumulate: int) -> None:
        """Postpone the remaining steps by at least ``by`` steps.

        Args:
            schedule: of windows that aren't postponed; ``None`` without.
            accumulate: batches per optimizer step; the counted step keeps its position among them.
        """
        by = math.ceil(by / accumulate) * accumulate
        if schedule is not None and schedule.active:
            end = by + schedule.skip_first + 2 * accumulate * max(schedule.cycle, 1)
            free = (
                one
                for one in range(by, end, accumulate)
                if all(schedule.action(step + one) is WindowAction.WAIT for step in self._left)
            )
            by = next(free, end)
        if self.counted is not None and self.counted in self._left:
            self.counted += by
        self.timed = tuple(step + by for step in self.timed if step in self._left)
        self._left = {step + by for step in self._left}


class Plan:
    """Schedules windows, inspected steps, live figures, saves and the search for slow steps.

    Args:
        windows: their plan; ``None`` without.
        inspected: steps to inspect; ``None`` without.
        has_loggers: whether a logger takes scalars.
        has_bar: whether a progress bar shows our figures.

    Attributes:
        is_cut_asked_for: whether the interval was set explicitly, so live figures never wait.
        logs_scalars: whether live figures go to loggers.
        next_save_ns: time of the next save, by the host clock.
        has_left_out: whether the newest live figures were due but had to wait.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        *,
        windows: WindowPlan | None,
        inspected: InspectedSteps | None,
        has_loggers: bool,
        has_bar: bool,
    ) -> None:
        self._windows = windows
        self._inspected = inspected
        log_every = config.log_every_n_steps
        self.is_cut_asked_for = bool(log_every)
        log_every = int(loop.log_every_n_steps if log_every is None else log_every)
        # 0 turns logging off, for the Trainer as for us, but not the progress bar. Batches of an evaluation
        # have no step number for loggers.
        self.logs_scalars = loop.kind.is_fit and log_every > 0 and has_loggers
        self._is_watched = has_bar or self.logs_scalars
        # Without the sampling thread, memory is read between steps.
        is_often = self._is_watched or not config.inspect.sampling
        self._log_every = (log_every or DEFAULT_CUT) if is_often else LOOK_EVERY
        self._next_cut = self._log_every
        self.has_left_out = False
        self.next_save_ns = 0

    def is_window_due(self, step: int) -> bool:
        """Whether a window opens, continues or closes."""
        return self._windows is not None and step == self._windows.next_step

    def is_cut_due(self, step: int) -> bool:
        return self._is_watched and step >= self._next_cut

    def cut(self, step: int, wait: int = 0) -> None:
        """Schedule the next live figures, either now done or delayed by ``wait`` steps."""
        self.has_left_out = wait > 0
        self._next_cut = -(-(step + max(1, wait)) // self._log_every) * self._log_every

    @staticmethod
    def is_look_due(step: int) -> bool:
        return step > 0 and step % LOOK_EVERY == 0

    def save(self, begin_ns: int, end_ns: int) -> int:
        """Schedule the next save; return the duration of this one in ns."""
        self.next_save_ns = end_ns + save_interval_ns(end_ns - begin_ns)
        return end_ns - begin_ns

    def next_due(self, step: int, others: list[int]) -> int:
        """Return the next step at whose start something is due.

        Args:
            others: further steps that are due.
        """
        upcoming = [(step // LOOK_EVERY + 1) * LOOK_EVERY]
        if self._is_watched:
            upcoming.append(self._next_cut)
        else:  # to read memory
            upcoming.append((step // self._log_every + 1) * self._log_every)
        if step == 0:
            upcoming.append(1)  # to check that all names are known
        if self._windows is not None:
            upcoming.append(self._windows.next_step)
        if self._inspected is not None:
            upcoming.append(self._inspected.next_step)
        return min([*upcoming, *others])

    def save_step(self, step: int, now: int, step_ns: int) -> int:
        """Return the step at which a save is due; with slow steps, it's before the next live figures."""
        return step + max(1, (self.next_save_ns - now) // step_ns)


def save_interval_ns(took_ns: int) -> int:
    """Return the time until the next save: a multiple of this one's, at most an hour."""
    return max(_MIN_INTERVAL_NS, min(took_ns * _INTERVAL_FACTOR, _MAX_INTERVAL_NS))


def steps_to_skip(config: ProfileConfig, num_steps: int | None) -> int:
    """Return the number of first steps that the benchmark skips: as requested, or fewer in a short loop.

    Args:
        config: its default isn't a request.
        num_steps: length of the loop; ``None`` if unknown.
    """
    if num_steps is None or config.skip_first != DEFAULTS.skip_first:
        return config.skip_first
    return max(1, math.floor(min(num_steps * SKIPPED_SHARE, config.skip_first)))


def num_timed(num_steps: int | None, *, is_asked_for: bool) -> int:
    """Return the number of steps in which to time modules."""
    is_short = num_steps is not None and num_steps < SHORT_LOOP
    return 1 if is_short and not is_asked_for else NUM_TIMED


def choose_inspected(
    schedule: Schedule,
    *,
    skip_first: int,
    accumulate: int = 1,
    num_steps: int | None = None,
    num_timed: int = NUM_TIMED,
) -> InspectedSteps:
    """Choose steps outside profiler windows, if possible among those that the benchmark skips.

    Args:
        accumulate: batches per optimizer step; the counted step ends with one, if possible.
    """
    wanted = accumulate + num_timed
    # All kinds of steps have occurred by then; without waits, free steps only follow the last window.
    cycles = 2 if schedule.wait else max(2, schedule.repeat)
    behind = skip_first + cycles * schedule.cycle + wanted + _WARM
    last = behind if num_steps is None else min(behind, num_steps)
    begin = max(_WARM, skip_first - wanted)
    if last <= begin:
        begin = max(0, min(_WARM, last - 1), last - wanted)
    free = [step for step in range(begin, last) if schedule.action(step) is WindowAction.WAIT]
    stepping = [step for step in free[:-num_timed] or free if (step + 1) % accumulate == 0]
    counted = next(iter(stepping or free), None)
    timed = [step for step in free if counted is not None and step > counted]
    return InspectedSteps(counted, tuple(timed[:num_timed]))
