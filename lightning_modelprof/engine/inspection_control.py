"""Decide when to inspect steps: as planned but not before there's time, and for new batch sizes."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.agreement import COUNT, TIMES, RankAgreement, steps_unseen
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.plan import choose_inspected, num_timed
from lightning_modelprof.engine.step_times import StepTimes
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.stored import modules_of
from lightning_modelprof.measure.window.other_profilers import is_profiling_anywhere
from lightning_modelprof.run.steps import StepTag

_NOT_TO_COUNT: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)


class InspectionControl:
    """Starts and ends the inspection of steps."""

    def __init__(
        self,
        inspection: Inspection,
        steps: StepTimes,
        budget: Budget,
        agreement: RankAgreement,
        *,
        loop: Loop,
        config: ProfileConfig,
    ) -> None:
        self.inspection = inspection
        self._steps = steps
        self._budget = budget
        self._agreement = agreement
        self._loop = loop
        self._config = config
        self._began_ns = 0

    def begin_step(self, step: int) -> None:
        """End the inspection of the last step, and start that of the next one if it's due."""
        self._end_and_begin(step)
        sizes = self._steps.sizes
        if step == self.inspection.again_at and sizes is not None:
            sizes.last = -1  # count its size again, even if it's the same as the last step's

    def _end_and_begin(self, step: int) -> None:
        inspection, ledger, budget = self.inspection, self._steps.ledger, self._budget
        planned = inspection.steps
        if ledger.inspection is not None:
            ledger.inspection = None
            begin_ns = budget.now()
            inspection.end_step()
            budget.end_inspection(begin_ns)
            ledger.tags |= StepTag.INSPECTED  # the work just now is part of the step that starts
            self._steps.live.set_flops(inspection.cost)
            # Workers continued during it, at most by the number of steps that would have fit.
            self._steps.stand_still(step, ledger.clock() - self._began_ns)
        is_late = planned.next_step <= step and not self._config.asks_for_inspection
        if is_late and (self._is_postponed(step) if planned.may_wait else self._leaves_rest(step)):
            return
        if inspection.begin_step(step):
            self._begin_inspected_step(step)

    def next_due(self, step: int) -> list[int]:
        """Steps at whose start something is due in addition to the plan."""
        upcoming = [step + 1] if self._steps.ledger.inspection is not None else []
        if self.inspection.again_at > step:
            upcoming.append(self.inspection.again_at)
        return upcoming

    def meet_size(self, step: int, size: int) -> None:
        """Count the running step if its batch has a new size and that's worthwhile."""
        ledger, inspection, sizes = self._steps.ledger, self.inspection, self._steps.sizes
        if sizes is None or not inspection.wants_size(step, size):
            return
        if (
            step == 0
            or ledger.inspection is not None
            or ledger.tags & _NOT_TO_COUNT
            or not self._may_count_size(step)
        ):
            sizes.last = -1  # try again with the next batch
            return
        inspection.begin_size(step, size)
        self._begin_inspected_step(step)
        ledger.next_boundary = step + 1
        self._budget.slow_running_step()

    def _begin_inspected_step(self, step: int) -> None:
        ledger = self._steps.ledger
        ledger.inspection = self.inspection
        ledger.tags |= StepTag.INSPECTED
        self._began_ns = ledger.clock()
        self._steps.live.poll()
        self._budget.begin_inspected_step(step)

    def _is_postponed(self, step: int) -> bool:
        """Postpone inspections that weren't requested, if there's no time; return whether it did."""
        cost_ns = self._budget.expect(self._count_ns(step))
        wait = self._budget.steps_to_wait(step, cost_ns) or steps_unseen(step)
        wait, why = self._agreement.steps_to_wait(COUNT, step, wait, cost_ns)
        if wait:
            self._postpone(wait, why, accumulate=self._loop.accumulate)
        return wait > 0

    def _leaves_rest(self, step: int) -> bool:
        """Postpone or drop timing modules if inspecting was slower than expected; return whether it did.

        A rank that timed its modules later than the others would make them wait again.
        """
        cost_ns = self._budget.expect(self._budget.inspected_ns)
        wait = self._budget.steps_to_wait(step, cost_ns) or steps_unseen(step)
        if not wait:
            return False
        why = self._agreement.why_late(TIMES)
        if self._loop.world_size > 1:
            self.inspection.leave_rest(why)
        else:
            self._postpone(wait, why, accumulate=1)
        return True

    def _postpone(self, steps: int, why: str, *, accumulate: int) -> None:
        schedule = self._config.schedule if self._config.asks_for_window else None
        self.inspection.postpone(steps, why, schedule=schedule, accumulate=accumulate)

    def _may_count_size(self, step: int) -> bool:
        """Whether there's time; ranks count sizes at different steps, and all wait for each."""
        if self._config.asks_for_inspection:
            return True
        if is_profiling_anywhere():
            return False
        num_waiting = self._loop.world_size if self._loop.kind.is_fit else 1
        cost_ns = self._budget.expect_count_again(self._count_ns(step), num_waiting)
        return not self._budget.steps_to_wait(step, cost_ns)

    def _count_ns(self, step: int) -> float:
        module = self._loop.module
        num_modules = sum(1 for _ in modules_of(module)) if module is not None else 0
        return self._budget.count_cost_ns(step, num_modules)


def make_inspection(
    config: ProfileConfig, loop: Loop, steps: StepTimes, clock: HostClock
) -> Inspection | None:
    """Make the inspection of a loop about to start; ``None`` if it isn't wanted."""
    if not config.wants_flops or loop.module is None:
        return None
    planned = choose_inspected(
        config.schedule,
        skip_first=steps.skip_first,
        accumulate=loop.accumulate,
        num_steps=loop.num_steps,
        num_timed=num_timed(loop.num_steps, is_asked_for=bool(config.flops)),
    )
    return Inspection(
        planned,
        loop,
        steps.ledger,
        options=config.inspect,
        follows_memory=config.profile_memory,
        clock=clock,
    )
