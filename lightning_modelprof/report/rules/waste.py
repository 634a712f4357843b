"""Does a step call a module twice with the same input?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding, Location
from lightning_modelprof.report.rules.base import (
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.model_cost import RepeatedCall


@dataclass(frozen=True, kw_only=True)
class RepeatedForward(ShareRule):
    """Modules that were called with the very same tensors more than once, none of them changed in between.

    Seen in the one counted step. A module with active dropout gives another output each time and is left out.
    The time at stake is that part of the module's forward and backward that computed the same again.

    Caveats:
        A BatchNorm inside updates its running statistics twice as well; with one call it does so once.
    """

    kind: ClassVar[str] = "repeated_forward"
    title: ClassVar[str] = "A module computes the same output again"
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.05
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each module, clean, or not evaluated where no step was counted or timed."""
        costs, modules = analysis.step_costs, analysis.modules
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was counted as it ran (flops=True does)")
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        times = {one.path: (one.forward_ns, one.backward_ns) for one in modules.modules}
        found = []
        for call in _outermost(analysis.cost.waste.repeated):
            forward_ns, backward_ns = times.get(call.path, (None, None))
            if forward_ns is None:
                continue
            again = call.repeated / call.calls
            cost_ns = again * (forward_ns + (backward_ns or 0))
            share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
            if share is None or not self.is_found(share, cost_ns):
                continue
            found.append(
                self.found(
                    f"{call.path} is called {call.calls} times in a step, {call.repeated} of them with"
                    f" tensors that it had before: {milliseconds(cost_ns)} a step ({percent(share)} of"
                    f" {THE_LOOP}).",
                    f"Call {call.path} once, keep its output in a variable, and use that for both.",
                    self.severity(share),
                    title=f"{call.path} computes the same output again",
                    saving_ns=cost_ns,
                    places=[
                        Location(
                            file=one.file, line=one.line, function=one.name, module=call.path, is_exact=True
                        )
                        for one in reversed(call.lines)
                    ],
                    evidence=[
                        duration("computed again per step", cost_ns),
                        ratio(f"share of {THE_LOOP}", share),
                        count("calls in a step", call.calls),
                        count("with tensors that it had before", call.repeated),
                    ],
                )
            )
        return tuple(found) or self.clean("No module is called twice with the same tensors.")


def _outermost(calls: tuple[RepeatedCall, ...]) -> list[RepeatedCall]:
    """Without those inside of a module that repeats itself as often."""
    repeated = {one.path: one.repeated for one in calls}
    return [
        one
        for one in calls
        if not any(
            repeated.get(".".join(one.path.split(".")[:depth]), 0) >= one.repeated
            for depth in range(1, one.path.count(".") + 1)
        )
    ]
