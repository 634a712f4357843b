"""What is done between two steps while a loop runs, and between which."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.loop.host import Host, num_prefetched
from lightning_modelprof.loop.inspection import Inspection
from lightning_modelprof.loop.inspection_plan import plan_later
from lightning_modelprof.loop.parts import LoopParts
from lightning_modelprof.loop.step_timing import StepTiming
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.window.capture import NEVER, Capture
from lightning_modelprof.record import LARGEST
from lightning_modelprof.run.steps import StepTag

_DEFAULT_CUT: Final = 50
"""Steps between two cuts for a progress bar when nothing is logged: as often as Lightning logs by default."""


_LOOK_EVERY: Final = 500
"""Steps after which columns are made of them, and slow ones looked for, also where nobody watches."""


_USUAL_OPERATORS: Final = 500
"""Of a step, where none was counted."""


_LONGEST_WAIT: Final = 10**9
"""Steps; no loop has as many."""


_WAITED: Final = "{what} would have taken more than 5 % of {loop} ({ask} does it in any case)"


_NOT_TO_COUNT: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)


class StepBoundaries:
    """Windows, inspected steps, logged figures and saves: each at its steps, and nothing at all others.

    Args:
        config: the checked configuration.
        host: who runs the loop.
        timing: of its steps.
        parts: of the loop.
        check: called when the first step has ended.
        saves: when the archive is saved.
        save: saves it.
        clock: host clock.
    """

    def __init__(
        self,
        config: ProfileConfig,
        host: Host,
        timing: StepTiming,
        parts: LoopParts,
        *,
        check: Callable[[], None],
        saves: SaveTimer,
        save: Callable[[], None],
        clock: HostClock,
    ) -> None:
        self._config = config
        self._host = host
        self._loop = loop = host.loop
        self._timing = timing
        self._parts = parts
        self._check = check
        self._saves = saves
        self._save = save
        self._clock = clock
        self._armed_ns = clock()
        self._warm_ns = 0  # when the first step ended
        self._usual_ns = 0  # what a step took before the one that is looked into
        self._inspection_began_ns = 0
        self._window_began = self._window_began_ns = self._window_step_ns = 0
        self._allowance = Allowance(clock)
        # Several ranks end at the same batch instead: see ScheduledStop.
        self._stops_trainer = config.stop_after_profile and loop.is_fit and host.world_size == 1
        log_every = config.log_every_n_steps
        log_every = int(host.log_every_n_steps if log_every is None else log_every)
        # 0 means that nothing is logged, in the Trainer's words and in ours; the progress bar still is fed.
        # The batches of an evaluation have no step number that loggers could show them at.
        self._logs_scalars = loop.is_fit and log_every > 0 and parts.outputs.has_loggers
        self._is_watched = parts.has_bar or self._logs_scalars
        # Without the sampling thread memory is looked at between steps.
        is_often = self._is_watched or not config.inspect.sampling
        self._log_every = (log_every or _DEFAULT_CUT) if is_often else _LOOK_EVERY

    def begin_step(self) -> None:
        """A step begins at which there is something to do; ``ledger.steps_ended`` is its number."""
        timing, parts = self._timing, self._parts
        ledger, capture = timing.ledger, parts.capture
        step, end_ns = ledger.steps_ended, ledger.step_end_ns
        if step == 1:
            self._warm_ns = self._clock()
            self._check()
        parts.memory.growth.look(step)
        if parts.sampling is None and ledger.ranges is None:
            parts.memory.look(step)  # not in a window: torch's Python tracer would record it
        if capture is not None and step == capture.next_step:
            self._step_window(capture, step)
        if parts.inspection is not None:
            self._inspect(parts.inspection, step)
            if step == parts.inspection.again_at and timing.sizes is not None:
                timing.sizes.last = -1  # its size may be counted again, though it is that of the step before
        if step and step % self._log_every == 0 and self._is_watched:
            self._cut()
        elif step and step % _LOOK_EVERY == 0:
            timing.live.take()
        if step and step % _LOOK_EVERY == 0:
            timing.slow.look(end_ns)
        if step:
            self._save_if_due(step)
        ledger.next_boundary = self._next_boundary(step)

    def _step_window(self, capture: Capture, step: int) -> None:
        """Open or close a window, which the sampling thread is not to be seen in."""
        timing, sampling = self._timing, self._parts.sampling
        if self._must_wait(capture, step):
            return
        if not capture.is_open:
            self._note_window(step)
        if sampling is not None:
            sampling.pause()
        tags = capture.begin_step(step)
        if sampling is not None and not tags & (StepTag.PROFILER_WARMUP | StepTag.PROFILED):
            sampling.resume()
        timing.ledger.tags |= tags
        if StepTag.PROFILER_STOP in tags:
            passed_ns = self._clock() - self._window_began_ns
            self._allowance.spend(passed_ns - (step - self._window_began) * self._window_step_ns)
            self._note_window(step)  # the next one may have begun
            timing.recorder.drain(step, num_prefetched(self._host))
        timing.ledger.ranges = capture.ranges
        timing.seam.choose_table()
        if capture.is_done and self._stops_trainer:
            self._host.stop()

    def _inspect(self, inspection: Inspection, step: int) -> None:
        """Close the inspection of the step that ended, and begin that of the step that begins."""
        ledger = self._timing.ledger
        if ledger.inspection is not None:
            ledger.inspection = None
            inspection.end_step()
            ledger.tags |= StepTag.INSPECTED  # what was done just now is in the step that begins
            self._timing.live.set_flops(inspection.cost)
            # Meanwhile the workers went on, by no more batches than steps would have fitted in.
            passed_ns = self._clock() - self._inspection_began_ns
            self._drain(step, passed_ns)
            self._allowance.spend(passed_ns - self._usual_ns)
        if (
            inspection.next_step <= step
            and self._may_wait(inspection)
            and self._is_postponed(inspection, step)
        ):
            return
        if inspection.begin_step(step):
            ledger.inspection = inspection
            ledger.tags |= StepTag.INSPECTED
            self._inspection_began_ns = self._clock()
            self._usual_ns = self._step_ns(self._inspection_began_ns, max(step, 1))

    def _note_window(self, step: int) -> None:
        """A window may open now: how long steps take without one."""
        now = self._clock()
        self._window_began, self._window_began_ns = step, now
        self._window_step_ns = self._step_ns(now, max(step, 1))

    def _must_wait(self, capture: Capture, step: int) -> bool:
        """Whether the window that is to begin comes later, as nobody has asked for it."""
        config, inspection = self._config, self._parts.inspection
        if not capture.may_wait or config.asks_for_window:
            return False
        cost = None if inspection is None else inspection.cost.count
        operators = _USUAL_OPERATORS if cost is None else sum(one.calls for one in cost.operators)
        window_ns = WINDOW_NS + config.schedule.active * operators * NS_PER_OPERATOR
        wait = self._steps_to_wait(step, window_ns)
        if inspection is not None and not inspection.is_done:  # whose count says how large a trace will be
            wait = max(1, inspection.next_step + 1 - step)
        if wait:
            capture.postpone(
                wait, _WAITED.format(what="a profiler window", loop=self._loop.subject, ask="active=10")
            )
        return wait > 0

    def _may_wait(self, inspection: Inspection) -> bool:
        return inspection.may_wait and not self._is_asked()

    def _is_asked(self) -> bool:
        """Whether looking into steps is asked for by name; several ranks have to do so in the same steps."""
        config = self._config
        is_asked = config.flops or config.inspect.fvcore or config.profile_memory
        return is_asked or self._host.world_size > 1

    def _is_postponed(self, inspection: Inspection, step: int) -> bool:
        """Whether the steps that are to be inspected come later, as nobody has asked for them."""
        config = self._config
        wait = self._steps_to_wait(step, self._count_ns(step))
        if wait:
            inspection.postpone(
                partial(
                    plan_later,
                    by=wait,
                    schedule=config.schedule if config.asks_for_window else None,
                    accumulate=self._host.accumulate,
                ),
                _WAITED.format(what="looking into a step", loop=self._loop.subject, ask="flops=True"),
            )
        return wait > 0

    def _count_ns(self, step: int) -> float:
        """What counting a step takes, about."""
        module = self._host.module
        num_modules = sum(1 for _ in module.modules()) if module is not None else 0
        steps_ns = COUNT_STEPS * self._step_ns(self._clock(), max(step, 1))
        return COUNT_NS + min(steps_ns, NS_PER_MODULE * num_modules)

    def _steps_to_wait(self, step: int, cost_ns: float) -> int:
        """In how many steps something of such cost is within bounds; 0 if it is now."""
        wait_ns = self._allowance.wait_ns(cost_ns)
        return min(_LONGEST_WAIT, -(-wait_ns // self._step_ns(self._clock(), max(step, 1))))

    def meet_size(self, size: int) -> None:
        """The running step has a batch of another size than the one before: count it, if that tells more."""
        ledger, inspection, sizes = self._timing.ledger, self._parts.inspection, self._timing.sizes
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
            or (not self._is_asked() and self._steps_to_wait(step, self._count_ns(step)))
        ):
            sizes.last = -1  # look again at the next batch
            return
        inspection.begin_size(step, size)
        ledger.inspection = inspection
        ledger.tags |= StepTag.INSPECTED
        ledger.next_boundary = step + 1
        self._inspection_began_ns = self._clock()
        self._usual_ns = self._step_ns(self._inspection_began_ns, step)

    def _cut(self) -> None:
        """Show the clean steps since the last cut to those who watch."""
        live, parts = self._timing.live, self._parts
        live.cut()
        scalars = live.scalars()
        if scalars and self._logs_scalars:
            parts.outputs.log_scalars(scalars | parts.memory.scalars(), self._host.logger_step)

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
        per_step_ns = self._step_ns(self._clock() - paused_ns, step)
        most = num_prefetched(self._host)
        self._timing.recorder.drain(step, min(most, paused_ns // per_step_ns))

    def _next_boundary(self, step: int) -> int:
        """The next step at whose start there is something to do."""
        capture, inspection = self._parts.capture, self._parts.inspection
        upcoming = [(step // every + 1) * every for every in (self._log_every, _LOOK_EVERY)]
        upcoming.append(max(step + 1, self._parts.memory.growth.next_step))
        if step == 0:
            upcoming.append(1)  # are all names known?
        else:
            # Slow steps: the archive is due before the next cut.
            now = self._clock()
            upcoming.append(step + max(1, (self._saves.next_ns - now) // self._step_ns(now, step)))
        if capture is not None and capture.next_step != NEVER:
            upcoming.append(capture.next_step)
        if inspection is not None:
            upcoming.append(step + 1 if self._timing.ledger.inspection is not None else inspection.next_step)
            if inspection.again_at > step:
                upcoming.append(inspection.again_at)
        return min(upcoming)

    def _step_ns(self, now: int, step: int) -> int:
        """What a step took so far, at least 1; without the first one, in which much is done once."""
        first, begin_ns = (1, self._warm_ns) if step > 1 and self._warm_ns else (0, self._armed_ns)
        return max(1, (now - begin_ns) // max(1, step - first))


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


# A save costs its time again only after this many times that time has passed.
_INTERVAL_FACTOR: Final = 200


_MIN_INTERVAL_NS: Final = 10_000_000_000


# A machine that sleeps during a save makes that look like hours; the next one comes all the same.
_MAX_INTERVAL_NS: Final = 3_600_000_000_000


class SaveTimer:
    """Says when a save is due, so that saves cost next to nothing.

    Args:
        clock: host clock.

    Attributes:
        next_ns: when the next one is due.
    """

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
