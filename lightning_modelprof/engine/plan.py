"""What is due at which step of a loop: arithmetic alone, which measures nothing and reads no clock."""

from __future__ import annotations

import math
from typing import Final

from lightning_modelprof.config.options import DEFAULTS, ProfileConfig
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.measure.window.schedule import NEVER, Schedule, WindowAction, WindowPlan

DEFAULT_CUT: Final = 50
"""Steps between two cuts for a progress bar when nothing is logged: as often as Lightning logs by default."""


LOOK_EVERY: Final = 500
"""Steps after which columns are made of them, and slow ones looked for, also where nobody watches."""


# A save costs its time again only after this many times that time has passed.
_INTERVAL_FACTOR: Final = 200


_MIN_INTERVAL_NS: Final = 10_000_000_000


# A machine that sleeps during a save makes that look like hours; the next one comes all the same.
_MAX_INTERVAL_NS: Final = 3_600_000_000_000


NUM_TIMED: Final = 3
"""Steps in which modules are timed: enough to see one slow step for what it is."""


SKIPPED_SHARE: Final = 1 / 6
"""Of a loop that is known to be short no more is skipped, or too few steps would be left for a verdict."""


SHORT_LOOP: Final = 30
"""Steps; in a loop of fewer, modules are timed in one of them."""


_WARM: Final = 1
"""The first step is never taken if there are others: lazy modules, allocators and kernels start in it."""


class InspectedSteps:
    """Which steps are inspected: one is counted, and in some the modules are timed.

    Attributes:
        counted: the step whose FLOPs are counted; ``None`` when every step is in a profiler window.
        timed: the steps in which modules are timed.
    """

    def __init__(self, counted: int | None, timed: tuple[int, ...] = ()) -> None:
        self.counted = counted
        self.timed = timed
        self._left = {step for step in (counted, *timed) if step is not None}

    @property
    def next_step(self) -> int:
        """The next step at whose boundary there is something to do."""
        return min(self._left, default=NEVER)

    @property
    def is_done(self) -> bool:
        """Whether no step is left that is to be inspected, but for sizes that come."""
        return not self._left

    @property
    def may_wait(self) -> bool:
        """Whether nothing has been inspected yet."""
        return self.counted is not None and self.counted in self._left

    def begin_step(self, step: int) -> bool:
        """A step begins: whether it is inspected."""
        if step not in self._left:
            return False
        self._left.discard(step)
        return True

    def leave_rest(self) -> None:
        self._left = set()

    def postpone(self, by: int, *, schedule: Schedule | None, accumulate: int) -> None:
        """Those that are left come at least so many steps later.

        Args:
            schedule: of windows that do not wait as well; ``None`` if there are none.
            accumulate: batches per optimizer step: the counted step stays at the same place among them.
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
    """What is due at which step: windows, inspected steps, cuts for those who watch, saves and looks.

    Args:
        windows: when they come; ``None`` without.
        inspected: which steps are; ``None`` if none.
        has_loggers: whether there is one that scalars can go to.
        has_bar: whether a progress bar shows figures of ours.

    Attributes:
        is_cut_asked_for: whether somebody has said how often, so that no cut has to wait.
        logs_scalars: whether the figures of a cut go to loggers.
        next_save_ns: when the next save is due, by the host clock.
        has_left_out: whether the newest cut that was due had to wait.
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
        # 0 means that nothing is logged, in the Trainer's words and in ours; the progress bar still is fed.
        # The batches of an evaluation have no step number that loggers could show them at.
        self.logs_scalars = loop.kind.is_fit and log_every > 0 and has_loggers
        self._is_watched = has_bar or self.logs_scalars
        # Without the sampling thread memory is looked at between steps.
        is_often = self._is_watched or not config.inspect.sampling
        self._log_every = (log_every or DEFAULT_CUT) if is_often else LOOK_EVERY
        self._next_cut = self._log_every
        self.has_left_out = False
        self.next_save_ns = 0

    def is_window_due(self, step: int) -> bool:
        """Whether one opens, goes on or closes."""
        return self._windows is not None and step == self._windows.next_step

    def is_cut_due(self, step: int) -> bool:
        return self._is_watched and step >= self._next_cut

    def cut(self, step: int, wait: int = 0) -> None:
        """Figures were cut, or have to wait for so many steps."""
        self.has_left_out = wait > 0
        self._next_cut = -(-(step + max(1, wait)) // self._log_every) * self._log_every

    @staticmethod
    def is_look_due(step: int) -> bool:
        return step > 0 and step % LOOK_EVERY == 0

    def save(self, begin_ns: int, end_ns: int) -> int:
        """The run was saved; returns the nanoseconds that this took."""
        self.next_save_ns = end_ns + save_interval_ns(end_ns - begin_ns)
        return end_ns - begin_ns

    def next_due(self, step: int, others: list[int]) -> int:
        """The next step at whose start there is something to do.

        Args:
            others: steps that others have found to be due.
        """
        upcoming = [(step // LOOK_EVERY + 1) * LOOK_EVERY]
        if self._is_watched:
            upcoming.append(self._next_cut)
        else:  # memory is looked at
            upcoming.append((step // self._log_every + 1) * self._log_every)
        if step == 0:
            upcoming.append(1)  # are all names known?
        if self._windows is not None:
            upcoming.append(self._windows.next_step)
        if self._inspected is not None:
            upcoming.append(self._inspected.next_step)
        return min([*upcoming, *others])

    def save_step(self, step: int, now: int, step_ns: int) -> int:
        """At which step a save is due: with slow steps before the next cut."""
        return step + max(1, (self.next_save_ns - now) // step_ns)


def save_interval_ns(took_ns: int) -> int:
    """How long no other save comes: many times as long as this one took, at most an hour."""
    return max(_MIN_INTERVAL_NS, min(took_ns * _INTERVAL_FACTOR, _MAX_INTERVAL_NS))


def steps_to_skip(config: ProfileConfig, num_steps: int | None) -> int:
    """How many first steps the benchmark leaves out: what was asked for, or fewer in a short loop.

    Args:
        config: its default is no order.
        num_steps: length of the loop; ``None`` if unknown.
    """
    if num_steps is None or config.skip_first != DEFAULTS.skip_first:
        return config.skip_first
    return max(1, math.floor(min(num_steps * SKIPPED_SHARE, config.skip_first)))


def num_timed(num_steps: int | None, *, is_asked_for: bool) -> int:
    """In how many steps modules are timed.

    Args:
        num_steps: length of the loop; ``None`` if unknown.
    """
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
    """Choose steps that are in no profiler window, and if possible among those that the benchmark skips.

    Args:
        accumulate: batches per optimizer step; the counted step ends with one, if possible.
        num_steps: length of the fit; ``None`` if unknown.
    """
    wanted = accumulate + num_timed
    # Every kind of step has come by then; without waits, free steps come only after the last window.
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
