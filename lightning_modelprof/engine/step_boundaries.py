"""What is done between two steps while a loop runs, and between which."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.budget import LONGEST_WAIT, RETRY_SHARE, USUAL_OPERATORS
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.inspection_plan import plan_later
from lightning_modelprof.engine.instruments import Instruments
from lightning_modelprof.engine.loop import Loop, num_prefetched
from lightning_modelprof.engine.step_timing import StepTiming
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.stored import modules_of
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.measure.window.other_profilers import is_profiling_anywhere
from lightning_modelprof.run.steps import StepTag

_DEFAULT_CUT: Final = 50
"""Steps between two cuts for a progress bar when nothing is logged: as often as Lightning logs by default."""


_LOOK_EVERY: Final = 500
"""Steps after which columns are made of them, and slow ones looked for, also where nobody watches."""


_WAITED: Final = "{what} would have taken more than 5% of {loop}; set {ask} to do it anyway"


_SEEN: Final = (
    "another torch profiler was recording and would have seen extra operators; set {ask} to do it anyway"
)


_NOT_AGREED: Final = "the ranks couldn't agree on a step for {what}; set {ask} to do it anyway"


_MISSED: Final = "this rank learned too late at which step the other ranks did it; set {ask} to do it anyway"


_LEAST_GAP: Final = 8
"""Steps between two looks at what the first rank has announced, and between its word and the deed."""


_GAP_SHARE: Final = 4
"""Such a gap is a quarter of the steps so far, so a million steps need fewer than 60 looks."""


_NOT_TO_COUNT: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)


# What is announced: its key, its name in a report, and what asks for it by name.
_WINDOW: Final = ("window", "a profiler window", "active=10")
_COUNT: Final = ("count", "inspecting a step", "flops=True")
_TIMES: Final = ("times", "timing modules", "flops=True")


class Announcements(Protocol):
    """How the first rank tells the others at which step something starts.

    Attributes:
        is_first: whether this is the rank that decides.
    """

    is_first: bool

    def announce(self, what: str, step: int) -> None:
        """Tell the other ranks; doesn't wait."""

    def announced(self, what: str) -> int | None:
        """The step that was announced, ``None`` so far; doesn't wait."""


class StepBoundaries:
    """Windows, inspected steps, logged figures and saves: each at its steps, and nothing at all others.

    Args:
        check: called when the first step has ended.
        announcements: of the first of several ranks; ``None`` where they cannot talk.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        timing: StepTiming,
        instruments: Instruments,
        *,
        check: Callable[[], None],
        saves: SaveTimer,
        save: Callable[[], None],
        clock: HostClock,
        announcements: Announcements | None = None,
    ) -> None:
        self._config = config
        self._loop = loop
        self._announcements = announcements
        self._timing = timing
        self._instruments = instruments
        self._check = check
        self._saves = saves
        self._save = save
        self._clock = clock
        self._budget = timing.budget
        self._budget.begin_loop()
        self._inspection_began_ns = 0
        # Several ranks end at the same batch instead, on which they agree before training.
        self._stops_trainer = config.stop_after_profile and loop.kind.is_fit and loop.world_size == 1
        log_every = config.log_every_n_steps
        log_every = int(loop.log_every_n_steps if log_every is None else log_every)
        # 0 means that nothing is logged, in the Trainer's words and in ours; the progress bar still is fed.
        # The batches of an evaluation have no step number that loggers could show them at.
        self._logs_scalars = loop.kind.is_fit and log_every > 0 and instruments.outputs.has_loggers
        self._is_watched = instruments.has_bar or self._logs_scalars
        # Without the sampling thread memory is looked at between steps.
        is_often = self._is_watched or not config.inspect.sampling
        self._log_every = (log_every or _DEFAULT_CUT) if is_often else _LOOK_EVERY
        self._next_cut = self._log_every
        self._cut_ns = 0  # what the newest cut took
        self._has_left_out = False  # a cut since the newest one

    def begin_step(self) -> None:
        """A step begins at which there is something to do; ``ledger.steps_ended`` is its number."""
        timing, instruments = self._timing, self._instruments
        ledger, capture = timing.ledger, instruments.capture
        step, end_ns = ledger.steps_ended, ledger.step_end_ns
        now = self._budget.begin()
        if self._budget.is_step_slowed:
            is_inspected = ledger.inspection is not None
            self._budget.end_slowed_step(now, timing.recorder.newest_tags, is_inspected=is_inspected)
        if step == 1:
            self._budget.end_first_step()
            self._check()
        instruments.memory.growth.look(step)
        if instruments.sampling is None and ledger.ranges is None:
            instruments.memory.look(step)  # not in a window: torch's Python tracer would record it
        if capture is not None and step == capture.plan.next_step:
            with self._budget.asked_for(by_name=self._config.asks_for_window):
                self._step_window(capture, step)
        if instruments.inspection is not None:
            with self._budget.asked_for(by_name=self._config.asks_for_inspection):
                self._inspect(instruments.inspection, step)
            if step == instruments.inspection.again_at and timing.sizes is not None:
                timing.sizes.last = -1  # its size may be counted again, though it is that of the step before
        if self._is_watched and step >= self._next_cut:
            self._cut_if_affordable(step)
        elif step and step % _LOOK_EVERY == 0:
            timing.live.poll()
        if step and step % _LOOK_EVERY == 0:
            timing.slow.look(end_ns)
        if step:
            self._save_if_due(step)
        ledger.next_boundary = self._next_boundary(step)
        is_slowed = ledger.inspection is not None or (capture is not None and capture.is_open)
        self._budget.end(slows_step=is_slowed)

    def _step_window(self, capture: Capture, step: int) -> None:
        """Open or close a window, which the sampling thread is not to be seen in."""
        timing, sampling = self._timing, self._instruments.sampling
        if self._must_wait(capture, step):
            return
        if not capture.is_open:
            timing.live.poll()
            self._budget.begin_window(step)
        if sampling is not None:
            sampling.pause()
        tags = capture.begin_step(step)
        if sampling is not None and not tags & (StepTag.PROFILER_WARMUP | StepTag.PROFILED):
            sampling.resume()
        timing.ledger.tags |= tags
        if StepTag.PROFILER_STOP in tags:
            self._budget.end_window()
            timing.recorder.drain(step, num_prefetched(self._loop))
        timing.ledger.ranges = capture.ranges
        timing.phase_source.choose_table()
        if capture.plan.is_done and self._stops_trainer:
            self._loop.stop()

    def _inspect(self, inspection: Inspection, step: int) -> None:
        """Close the inspection of the step that ended, and begin that of the step that begins."""
        ledger = self._timing.ledger
        if ledger.inspection is not None:
            ledger.inspection = None
            begin_ns = self._budget.now()
            inspection.end_step()
            self._budget.end_inspection(begin_ns)
            ledger.tags |= StepTag.INSPECTED  # what was done just now is in the step that begins
            self._timing.live.set_flops(inspection.cost)
            # Meanwhile the workers went on, by no more batches than steps would have fitted in.
            self._drain(step, self._clock() - self._inspection_began_ns)
        if inspection.next_step <= step and not self._config.asks_for_inspection:
            if inspection.may_wait:
                if self._is_postponed(inspection, step):
                    return
            elif self._leaves_rest(inspection, step):
                return
        if inspection.begin_step(step):
            self._begin_inspected_step(inspection, step)

    def _begin_inspected_step(self, inspection: Inspection, step: int) -> None:
        ledger = self._timing.ledger
        ledger.inspection = inspection
        ledger.tags |= StepTag.INSPECTED
        self._inspection_began_ns = self._clock()
        self._timing.live.poll()
        self._budget.begin_inspected_step(step)

    def _must_wait(self, capture: Capture, step: int) -> bool:
        """Whether the window that is to begin comes later, as nobody has asked for it."""
        config, inspection = self._config, self._instruments.inspection
        if not capture.may_wait or config.asks_for_window:
            return False
        sites = None if inspection is None else inspection.cost.sites
        operators = USUAL_OPERATORS if sites is None else sum(line.calls for line in sites.lines)
        window_ns = self._budget.window_cost_ns(operators)
        wait = self._budget.steps_to_wait(step, window_ns)
        if inspection is not None and not inspection.is_done:  # whose count says how large a trace will be
            wait = max(1, inspection.next_step + 1 - step)
        wait, why = self._agree(_WINDOW, step, wait, window_ns)
        if wait:
            capture.plan.postpone(wait, why)
        return wait > 0

    def _is_postponed(self, inspection: Inspection, step: int) -> bool:
        """Whether the steps that are to be inspected come later, as nobody has asked for them."""
        config = self._config
        cost_ns = self._budget.expect(self._count_ns(step))
        wait = self._budget.steps_to_wait(step, cost_ns) or self._steps_unseen(step)
        wait, why = self._agree(_COUNT, step, wait, cost_ns)
        if wait:
            inspection.postpone(
                partial(
                    plan_later,
                    by=wait,
                    schedule=config.schedule if config.asks_for_window else None,
                    accumulate=self._loop.accumulate,
                ),
                why,
            )
        return wait > 0

    def _leaves_rest(self, inspection: Inspection, step: int) -> bool:
        """Whether modules are timed later, or not at all, because inspecting steps was dearer than expected.

        A rank that timed its modules later than the others would keep them waiting once more.
        """
        config = self._config
        cost_ns = self._budget.expect(self._budget.inspected_ns)
        wait = self._budget.steps_to_wait(step, cost_ns) or self._steps_unseen(step)
        if not wait:
            return False
        why = self._waited(_TIMES)
        if self._loop.world_size > 1:
            inspection.leave_rest(why)
            return True
        inspection.postpone(
            partial(
                plan_later,
                by=wait,
                schedule=config.schedule if config.asks_for_window else None,
                accumulate=1,
            ),
            why,
        )
        return True

    @staticmethod
    def _steps_unseen(step: int) -> int:
        """In how many steps to look again whether no other profiler records; 0 if none does."""
        return max(1, step // RETRY_SHARE) if is_profiling_anywhere() else 0

    def _waited(self, what: tuple[str, str, str]) -> str:
        _, named, ask = what
        if what is not _WINDOW and is_profiling_anywhere():
            return _SEEN.format(ask=ask)
        return _WAITED.format(what=named, loop=self._loop.kind.subject, ask=ask)

    def _agree(self, what: tuple[str, str, str], step: int, wait: int, cost_ns: float) -> tuple[int, str]:
        """In how many steps something starts, on all ranks at once, or is looked at again; and why not now.

        The first rank decides, and says so some steps ahead. The others look whether it has. Nobody waits: a
        rank that looks too late goes without.

        Args:
            what: of ``_WINDOW`` and ``_COUNT``.
            wait: after how many steps this rank has time for it.
        """
        key, named, ask = what
        if self._loop.world_size == 1:
            return wait, self._waited(what)
        others = self._announcements
        if others is None:
            return LONGEST_WAIT, _NOT_AGREED.format(what=named, ask=ask)
        start = others.announced(key)
        if start is not None and start < step:
            return LONGEST_WAIT, _MISSED.format(ask=ask)
        if start is not None:
            self._budget.reserve(0 if start == step else cost_ns)
            return start - step, self._waited(what)
        accumulate = max(1, self._loop.accumulate)
        gap = max(_LEAST_GAP, 2 * accumulate, step // _GAP_SHARE)
        gap = -(-gap // accumulate) * accumulate
        if others.is_first and not wait:
            others.announce(key, step + gap)
            self._budget.reserve(cost_ns)
        return gap, self._waited(what)

    def _count_ns(self, step: int) -> float:
        """What counting a step takes, about."""
        module = self._loop.module
        num_modules = sum(1 for _ in modules_of(module)) if module is not None else 0
        return self._budget.count_cost_ns(step, num_modules)

    def meet_size(self, size: int) -> None:
        """The running step has a batch of another size than the one before: count it, if that tells more."""
        ledger, inspection, sizes = self._timing.ledger, self._instruments.inspection, self._timing.sizes
        step = ledger.steps_ended
        if sizes is None:
            return
        sizes.begin(step, size)
        if inspection is None or not inspection.wants_size(step, size):
            return
        if (
            step == 0
            or ledger.inspection is not None
            or ledger.tags & _NOT_TO_COUNT
            or not self._may_count_size(step)
        ):
            sizes.last = -1  # look again at the next batch
            return
        inspection.begin_size(step, size)
        self._begin_inspected_step(inspection, step)
        ledger.next_boundary = step + 1
        self._budget.slow_running_step()

    def _may_count_size(self, step: int) -> bool:
        """Ranks count their sizes at steps of their own, and all wait for each."""
        if self._config.asks_for_inspection:
            return True
        if is_profiling_anywhere():
            return False
        num_waiting = self._loop.world_size if self._loop.kind.is_fit else 1
        cost_ns = self._budget.expect_count_again(self._count_ns(step), num_waiting)
        return not self._budget.steps_to_wait(step, cost_ns)

    def _cut_if_affordable(self, step: int) -> None:
        """Show figures now if that is within bounds, or else later, over all steps until then."""
        live, is_asked = self._timing.live, bool(self._config.log_every_n_steps)
        if not is_asked and not self._cut_ns and self._logs_scalars:
            live.poll()
            self._cut_ns = self._budget.most_logging_ns  # the user's own figures take as long
        wait = 0 if is_asked else self._budget.steps_to_wait(step, self._cut_ns)
        self._has_left_out = wait > 0
        if not wait:
            with self._budget.asked_for(by_name=is_asked):
                begin_ns = self._budget.now()
                self._cut()
                self._cut_ns = self._budget.now() - begin_ns
        self._next_cut = -(-(step + max(1, wait)) // self._log_every) * self._log_every

    def _cut(self) -> None:
        """Show the clean steps since the last cut to those who watch."""
        self._timing.live.flush()
        self._log_scalars()

    def _log_scalars(self) -> None:
        scalars, instruments = self._timing.live.scalars(), self._instruments
        if scalars and self._logs_scalars:
            instruments.outputs.log_scalars(scalars | instruments.memory.scalars(), self._loop.logger_step)

    def log_last(self) -> None:
        """The loop is over and was cut once more: log that if figures were due and had to wait."""
        if self._has_left_out:
            self._has_left_out = False
            self._log_scalars()

    def _save_if_due(self, step: int) -> None:
        """Save what was measured, so that not even a kill loses it; seldom enough to cost nothing."""
        if self._clock() < self._saves.next_ns:
            return
        save_ns = self._saves.save(self._save)
        self._timing.ledger.tags |= StepTag.PROFILER_STOP  # the step that begins pays for it
        # With slow steps and a long queue the next save would be due before a whole queue is used up, and
        # no step were clean; but a save is short.
        self._drain(step, save_ns)

    def _drain(self, step: int, paused_ns: int) -> None:
        """The next steps find batches that workers made while the loop stood still."""
        per_step_ns = self._budget.step_ns(self._clock() - paused_ns, step)
        most = num_prefetched(self._loop)
        self._timing.recorder.drain(step, min(most, paused_ns // per_step_ns))

    def _next_boundary(self, step: int) -> int:
        """The next step at whose start there is something to do."""
        capture, inspection = self._instruments.capture, self._instruments.inspection
        upcoming = [(step // _LOOK_EVERY + 1) * _LOOK_EVERY]
        if self._is_watched:
            upcoming.append(self._next_cut)
        else:  # memory is looked at
            upcoming.append((step // self._log_every + 1) * self._log_every)
        upcoming.append(max(step + 1, self._instruments.memory.growth.next_step))
        if step == 0:
            upcoming.append(1)  # are all names known?
        else:
            # Slow steps: the archive is due before the next cut.
            now = self._clock()
            upcoming.append(step + max(1, (self._saves.next_ns - now) // self._budget.step_ns(now, step)))
        if capture is not None:
            upcoming.append(capture.plan.next_step)
        if inspection is not None:
            upcoming.append(step + 1 if self._timing.ledger.inspection is not None else inspection.next_step)
            if inspection.again_at > step:
                upcoming.append(inspection.again_at)
        return min(upcoming)


# A save costs its time again only after this many times that time has passed.
_INTERVAL_FACTOR: Final = 200


_MIN_INTERVAL_NS: Final = 10_000_000_000


# A machine that sleeps during a save makes that look like hours; the next one comes all the same.
_MAX_INTERVAL_NS: Final = 3_600_000_000_000


class SaveTimer:
    """Says when a save is due, so that saves cost next to nothing."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self.next_ns = 0

    def save(self, save: Callable[[], None]) -> int:
        """Save something now, and again only after many times the nanoseconds that this took, or an hour.

        Returns:
            Those nanoseconds.
        """
        begin_ns = self._clock()
        save()
        now = self._clock()
        wanted_ns = (now - begin_ns) * _INTERVAL_FACTOR
        self.next_ns = now + max(_MIN_INTERVAL_NS, min(wanted_ns, _MAX_INTERVAL_NS))
        return now - begin_ns
