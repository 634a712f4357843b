"""Does the loop wait for its batches?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.analysis.step_costs import StepCosts
from lightning_modelprof.report.loader_advice import loader_advice, places_of_batches, sampler_advice
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.rules.base import (
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
    usual_step,
)


@dataclass(frozen=True, kw_only=True)
class InputBound(ShareRule):
    """The mean time per clean step in which the loop waits for its batch is more than a share of the step.

    Workers needed: if one worker makes a batch in T and the rest of a step takes C, w workers deliver one
    batch every T / w, so the wait ends at w = T / C, rounded up. Without workers T is the wait itself. With
    workers that are always behind, a step takes T / w, so T is w times the step.

    Source: 5 % and 20 % are the bands of TensorFlow's profiler for input.

    Caveats:
        T is that of one process alone; workers that share CPUs, a disk or a lock are slower together.
    """

    kind: ClassVar[str] = "input_bound"
    title: ClassVar[str] = "The loop waits for its batches"
    bound: ClassVar[str | None] = "input_bound"
    sampled_phases: ClassVar[tuple[str, ...]] = ("dataloader",)

    warning: float = 0.05
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of a usual clean step."""
        return usual_step(costs, costs.typical)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where fetches were not seen."""
        costs = analysis.step_costs
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        wait_ns, (wall_ns, whole) = costs.usual_wait_ns(), self.whole(analysis, costs)
        if wait_ns is None or not wall_ns:
            return self.not_evaluated("the fetches of batches were not seen")
        share = wait_ns / wall_ns
        evidence = [duration("wait per step", wait_ns), ratio(f"share of {whole}", share)]
        if not self.is_found(share, wait_ns, costs.least_of(wait_ns, costs.typical, "dataloader")):
            return self.clean(f"Batches are waited for {milliseconds(wait_ns)} a step.", evidence)
        setup = analysis.setup
        loaders = () if setup is None else setup.loaders
        cpus = None if setup is None else setup.usable_cpus
        advice, more = sampler_advice(analysis.hot_lines) or loader_advice(loaders, cpus, wait_ns, wall_ns)
        return (
            self.found(
                f"{whole[:1].upper()}{whole[1:]} of {milliseconds(wall_ns)} waits {milliseconds(wait_ns)}"
                f" ({percent(share)} of it) for its batch.",
                advice,
                self.severity(share),
                saving_ns=wait_ns,
                places=places_of_batches(loaders),
                evidence=[*evidence, *more],
            ),
        )
