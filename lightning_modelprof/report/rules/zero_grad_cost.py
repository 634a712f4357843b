"""Are gradients filled with zeros instead of dropped?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOT_A_FIT,
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
    usual_step,
)
from lightning_modelprof.run.loops import loop_of


@dataclass(frozen=True, kw_only=True)
class ZeroGradCost(ShareRule):
    """The module's own ``optimizer_zero_grad`` takes more than a share of the step, or keeps the gradients.

    Without such a hook nothing can be saved: Lightning drops the tensors. Whether it keeps them is read from
    its source: ``set_to_none=False``.
    """

    kind: ClassVar[str] = "zero_grad_cost"
    title: ClassVar[str] = "Clearing gradients takes long"
    phases: ClassVar[tuple[str, ...]] = ("zero_grad",)
    bound: ClassVar[str | None] = "overhead_bound"

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of a usual clean step."""
        return usual_step(costs, costs.typical)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated under manual optimization."""
        costs, setup = analysis.step_costs, analysis.setup
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.manual_optimization:
            return self.not_evaluated("under manual optimization it is a part of the forward")
        cost_ns, (wall_ns, whole) = costs.usual_ns(costs.typical, "zero_grad"), self.whole(analysis, costs)
        if cost_ns is None or not wall_ns:
            return self.not_evaluated("the time of zero_grad was not seen")
        share = cost_ns / wall_ns
        evidence = [duration("per step", cost_ns), ratio(f"share of {whole}", share)]
        hook = setup.module_hooks.get("optimizer_zero_grad")
        is_slow = self.is_found(share, cost_ns, costs.least_of(cost_ns, costs.typical, "zero_grad"))
        if hook is None or not (is_slow or setup.keeps_gradients):
            return self.clean(f"Clearing gradients takes {milliseconds(cost_ns)} a step.", evidence)
        action = (
            f"{hook.name}: call optimizer.zero_grad() without set_to_none=False."
            if setup.keeps_gradients
            else f"Do less in {hook.name}; optimizer.zero_grad() alone only drops the tensors."
        )
        return (
            self.found(
                f"Clearing gradients takes {milliseconds(cost_ns)} ({percent(share)} of {whole})"
                + ("; they are filled with zeros, not dropped." if setup.keeps_gradients else "."),
                action,
                self.severity(share) if is_slow else Severity.INFO,
                saving_ns=cost_ns,
                places=[hook],
                evidence=evidence,
            ),
        )
