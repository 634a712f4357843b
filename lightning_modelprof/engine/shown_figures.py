"""Figures of a loop that runs, for its loggers: at the steps of the plan, if there is time for them."""

from __future__ import annotations

from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.live_figures import LiveFigures
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.memory import LoopMemory
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.plan import Plan


class ShownFigures:
    """Cuts the live figures and logs them."""

    def __init__(
        self,
        live: LiveFigures,
        plan: Plan,
        budget: Budget,
        *,
        outputs: Outputs,
        memory: LoopMemory,
        loop: Loop,
    ) -> None:
        self._live = live
        self._plan = plan
        self._budget = budget
        self._outputs = outputs
        self._memory = memory
        self._loop = loop
        self._cut_ns = 0  # what the newest cut took

    def cut_if_affordable(self, step: int) -> None:
        """Show figures now if that is within bounds, or else later, over all steps until then."""
        budget, plan = self._budget, self._plan
        is_asked = plan.is_cut_asked_for
        if not is_asked and not self._cut_ns and plan.logs_scalars:
            self._live.poll()
            self._cut_ns = budget.most_logging_ns  # the user's own figures take as long
        wait = 0 if is_asked else budget.steps_to_wait(step, self._cut_ns)
        if not wait:
            with budget.asked_for(by_name=is_asked):
                begin_ns = budget.now()
                self._live.flush()
                self._log()
                self._cut_ns = budget.now() - begin_ns
        plan.cut(step, wait)

    def log_last(self) -> None:
        """The loop is over and was cut once more: log that if figures were due and had to wait."""
        if self._plan.has_left_out:
            self._plan.has_left_out = False
            self._log()

    def _log(self) -> None:
        scalars = self._live.scalars()
        if scalars and self._plan.logs_scalars:
            self._outputs.log_scalars(scalars | self._memory.scalars(), self._loop.logger_step)
