"""Does backward make gradients that no optimizer uses?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding, Location
from lightning_modelprof.report.rules.base import (
    NOT_A_FIT,
    THE_LOOP,
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.model_cost import UnusedGradients

_OF_WEIGHTS: Final = 0.5
"""Of a layer's backward, what its weights' gradients take: one of two matrix products of the same size."""


@dataclass(frozen=True, kw_only=True)
class UnusedGradientsRule(ShareRule):
    """With several optimizers: gradients that are thrown away, or that nobody uses in the step.

    Seen in the one counted step, by which parameters get gradients in which backward pass, and which of them
    an optimizer steps with. Where a pass goes on into a module after the last gradient that is used, all of
    it is at stake; where it has to go through a module, half of that: the gradients of its weights.

    Caveats:
        A pass takes as long as any other through the same module. Gradients that are kept for a later step
        while others are used at once would count as unused.
    """

    kind: ClassVar[str] = "unused_gradients"
    title: ClassVar[str] = "Backward makes gradients that no optimizer uses"
    phases: ClassVar[tuple[str, ...]] = ("backward", "forward")
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.05
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where no step was counted or timed."""
        costs, modules = analysis.step_costs, analysis.modules
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was counted as it ran (flops=True does)")
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        unused = {one.path: one for one in analysis.cost.waste.unused}
        with_parameters = {one.path for one in modules.modules if one.trainable}
        backward = {one.path: one.backward_ns or 0 for one in modules.modules}
        beyond = _outermost({path: one for path, one in unused.items() if one.beyond}, with_parameters)
        within = _outermost(
            {path: one for path, one in unused.items() if one.within and not one.beyond}, with_parameters
        )
        beyond_ns = sum(backward.get(path, 0) * one.beyond / one.passes for path, one in beyond.items())
        within_ns = sum(
            _OF_WEIGHTS * backward.get(path, 0) * one.within / one.passes for path, one in within.items()
        )
        cost_ns = beyond_ns + within_ns
        share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean("Gradients that are made are used.")
        most = beyond if beyond_ns >= within_ns else within
        names = ", ".join(most)
        action = (
            f"Cut the graph before {names} in this loss: use the .detach()ed output of {names}, or make it"
            " under torch.no_grad()."
            if most is beyond
            else f"Freeze {names} for this backward: self.toggle_optimizer(optimizer) of the other optimizer,"
            f" or {next(iter(names.split(', ')))}.requires_grad_(False)."
        )
        lines = dict.fromkeys(line for one in most.values() for line in one.lines)
        return (
            self.found(
                f"A backward pass makes gradients of {names} that no optimizer uses:"
                f" {milliseconds(cost_ns)} a step ({percent(share)} of {THE_LOOP}).",
                action,
                self.severity(share),
                saving_ns=cost_ns,
                places=[
                    Location(file=one.file, line=one.line, function=one.name, is_exact=True) for one in lines
                ],
                evidence=[
                    duration("of whole passes", beyond_ns),
                    duration("of weights alone", within_ns),
                    ratio(f"share of {THE_LOOP}", share),
                ],
            ),
        )


def _outermost(
    unused: Mapping[str, UnusedGradients], with_parameters: set[str]
) -> dict[str, UnusedGradients]:
    """The highest modules below which all parameters' gradients are unused, by their paths."""
    found: dict[str, UnusedGradients] = {}
    for path in sorted(unused, key=lambda one: one.count(".")):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            above = ".".join(parts[:depth])
            below = [one for one in with_parameters if one == above or one.startswith(f"{above}.")]
            owners = [one for one in below if not any(other.startswith(f"{one}.") for other in below)]
            if above in found or all(one in unused for one in owners):
                found.setdefault(above, unused[path])
                break
    return found
