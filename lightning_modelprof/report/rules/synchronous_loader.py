"""Does the training process make its batches itself, while nothing else runs?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.advice.loader import loader_advice
from lightning_modelprof.report.advice.owners import owner_of_loader
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    ShareRule,
    duration,
    milliseconds,
    percent,
    ratio,
    usual_step,
)


@dataclass(frozen=True, kw_only=True)
class SynchronousLoader(ShareRule):
    """``num_workers=0`` while the wait for batches is more than a share of the step.

    It names a cause of ``input_bound`` and has no time of its own, so that nothing counts twice.
    """

    kind: ClassVar[str] = "synchronous_loader"
    title: ClassVar[str] = "Batches are made in the training process"

    sampled_phases: ClassVar[tuple[str, ...]] = ("dataloader",)
    into_libraries: ClassVar[bool] = True

    warning: float = 0.01
    covered: float = 0.05

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where the loader is not torch's."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        loader = next((one for one in setup.loaders if one.num_workers is not None), None)
        if loader is None:
            return self.not_evaluated("there is no DataLoader of torch's")
        if loader.num_workers:
            return self.clean(f"num_workers is {loader.num_workers}.")
        wait_ns, (wall_ns, whole) = costs.usual_wait_ns(), usual_step(costs, costs.typical)
        if wait_ns is None or not wall_ns:
            return self.not_evaluated("the fetches of batches were not seen")
        share = wait_ns / wall_ns
        if not self.is_found(share, wait_ns, costs.least_of(wait_ns, costs.typical, "dataloader")):
            return self.clean(f"num_workers is 0, and a batch takes {milliseconds(wait_ns)} only.")
        if share >= self.covered:
            return self.clean("num_workers is 0: see the finding that the loop waits for its batches.")
        cpu = None if isinstance(analysis.batch_cpu, Absent) else analysis.batch_cpu
        advice = loader_advice(
            (loader,), setup.usable_cpus, wait_ns, wall_ns, cpu, owner=owner_of_loader(setup, loader)
        )
        if advice.num_workers is None:
            return self.clean("num_workers is 0, and workers would save little.")
        return (
            self.found(
                f"num_workers is 0: {whole} stands still for {milliseconds(wait_ns)} ({percent(share)} of it)"
                " while its batch is made.",
                advice.action,
                Severity.INFO,
                places=[loader.dataset],
                evidence=[
                    duration("wait per step", wait_ns),
                    ratio(f"share of {whole}", share),
                    *advice.evidence,
                ],
            ),
        )
