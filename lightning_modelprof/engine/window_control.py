"""When windows open and close: by their plan, but the first not before there is time for it."""

from __future__ import annotations

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.agreement import WINDOW, RankAgreement
from lightning_modelprof.engine.budget import USUAL_OPERATORS, Budget
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.loop import Loop, num_prefetched
from lightning_modelprof.engine.step_times import StepTimes
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.run.steps import StepTag


class WindowControl:
    """Opens and closes windows between steps."""

    def __init__(
        self,
        capture: Capture,
        steps: StepTimes,
        budget: Budget,
        agreement: RankAgreement,
        *,
        loop: Loop,
        config: ProfileConfig,
    ) -> None:
        self.capture = capture
        self._steps = steps
        self._budget = budget
        self._agreement = agreement
        self._loop = loop
        self._is_asked_for = config.asks_for_window
        # Several ranks end at the same batch instead, on which they agree before training.
        self._stops_loop = config.stop_after_profile and loop.kind.is_fit and loop.world_size == 1

    def must_wait(self, step: int, inspection: Inspection | None) -> bool:
        """Whether the window that is to begin comes later, as nobody has asked for it.

        Args:
            inspection: its count says how large a trace will be; ``None`` without.
        """
        if self._is_asked_for or not self.capture.may_wait:
            return False
        sites = None if inspection is None else inspection.cost.sites
        operators = USUAL_OPERATORS if sites is None else sum(line.calls for line in sites.lines)
        cost_ns = self._budget.window_cost_ns(operators)
        wait = self._budget.steps_to_wait(step, cost_ns)
        if inspection is not None and not inspection.steps.is_done:
            wait = max(1, inspection.steps.next_step + 1 - step)
        wait, why = self._agreement.steps_to_wait(WINDOW, step, wait, cost_ns)
        if wait:
            self.capture.plan.postpone(wait, why)
        return wait > 0

    def begin_step(self, step: int) -> StepTag:
        """Open, go on with or close a window; returns the tags that it gives the step that begins."""
        steps, capture = self._steps, self.capture
        if not capture.is_open:
            steps.live.poll()
            self._budget.begin_window(step)
        tags = capture.begin_step(step)
        steps.ledger.tags |= tags
        if StepTag.PROFILER_STOP in tags:
            self._budget.end_window()
            steps.recorder.drain(step, num_prefetched(self._loop))
        steps.ledger.ranges = capture.ranges
        steps.phase_source.choose_table()
        if capture.plan.is_done and self._stops_loop:
            self._loop.stop()
        return tags
