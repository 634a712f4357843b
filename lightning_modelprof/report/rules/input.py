"""Does the loop wait for its batches?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.loader import (
    loader_advice,
    places_of_batches,
    sampler_advice,
)
from lightning_modelprof.report.advice.owners import owner_of_loader
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import (
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
    usual_step,
)

_WAIT: Final = "wait per step"


@dataclass(frozen=True, kw_only=True)
class InputBound(ShareRule):
    """The mean time per clean step in which the loop waits for its batch is more than a share of the step.

    Workers advised: if one worker makes a batch in T and the rest of a step takes C, w workers deliver one
    batch every T / w, so the wait ends at w = T / C, rounded up. Without workers T is the wait itself. With
    workers that are always behind, a step takes T / w, so T is w times the step. Where batches compute, no
    step is shorter than the CPU time of a step and a batch over the CPUs that nobody else uses. The time at
    stake is what the advice would save, at best.

    Rows that are only indexed and joined, batches that a worker hands over no faster, and batches that were
    ready in nine of ten fetches are a hint, unless they are critical: any DataLoader takes so long.

    Source: 5 % and 20 % are the bands of TensorFlow's profiler for input.

    Caveats:
        T is that of one process alone; workers that share a disk or a lock are slower together.
    """

    kind: ClassVar[str] = "input_bound"
    title: ClassVar[str] = "The loop waits for its batches"
    bound: ClassVar[str | None] = "input_bound"
    sampled_phases: ClassVar[tuple[str, ...]] = ("dataloader",)
    into_libraries: ClassVar[bool] = True

    warning: float = 0.05
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of a usual clean step."""
        return usual_step(costs, costs.typical)

    def stake_ns(self, finding: Finding) -> float:
        """All of the wait: the loop is bound by it, whatever there is to gain."""
        waits = [one.value for one in finding.evidence if one.label == _WAIT]
        return float(waits[0]) if waits and isinstance(waits[0], int | float) else super().stake_ns(finding)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where fetches were not seen."""
        costs = analysis.step_costs
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        wait_ns, (wall_ns, whole) = costs.usual_wait_ns(), self.whole(analysis, costs)
        if wait_ns is None or not wall_ns:
            return self.not_evaluated("the fetches of batches were not seen")
        share = wait_ns / wall_ns
        evidence = [duration(_WAIT, wait_ns), ratio(f"share of {whole}", share)]
        if not self.is_found(share, wait_ns, costs.least_of(wait_ns, costs.typical, "dataloader")):
            return self.clean(f"Batches are waited for {milliseconds(wait_ns)} a step.", evidence)
        setup = analysis.setup
        loaders = () if setup is None else setup.loaders
        cpus = None if setup is None else setup.usable_cpus
        cpu = None if isinstance(analysis.batch_cpu, Absent) else analysis.batch_cpu
        advice = sampler_advice(analysis.hot_lines, wait_ns) or loader_advice(
            loaders,
            cpus,
            wait_ns,
            wall_ns,
            cpu,
            owner=owner_of_loader(setup, loaders[0] if loaders else None),
        )
        is_ready = cpu is not None and cpu.workers_keep_up
        severity = self.severity(share)
        if advice.is_minor:
            severity = Severity.INFO if severity is Severity.WARNING else Severity.WARNING
        return (
            self.found(
                f"{whole[:1].upper()}{whole[1:]} of {milliseconds(wall_ns)} waits {milliseconds(wait_ns)}"
                f" ({percent(share)} of it) for its batch.",
                advice.action,
                severity,
                saving_ns=advice.saving_ns,
                places=() if is_ready else places_of_batches(loaders),
                evidence=[*evidence, *advice.evidence],
            ),
        )
