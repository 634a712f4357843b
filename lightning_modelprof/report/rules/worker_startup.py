"""What do the loader's workers cost when each epoch begins?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.owners import loader_call
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    lines_that_call,
    milliseconds,
    percent,
    ratio,
)


@dataclass(frozen=True, kw_only=True)
class WorkerStartup(ShareRule):
    """Stopping and starting workers at the epochs' boundaries, spread over all steps.

    It is the phase Dataloader init, and what the first fetch of an epoch waits longer than one in the
    middle of it. The very first start is left out: nothing can save it.

    Caveats:
        Persistent workers begin an epoch with an empty queue as well, so its first batch is still waited for.
    """

    kind: ClassVar[str] = "worker_startup"
    title: ClassVar[str] = "Workers are started anew with each epoch"
    phases: ClassVar[tuple[str, ...]] = ("dataloader", "dataloader_init")
    bound: ClassVar[str | None] = "input_bound"
    takes_time_there: ClassVar[bool] = False

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop, as it is spread over all of it."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated within a single epoch."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        loader = next((one for one in setup.loaders if one.num_workers), None)
        if loader is None:
            return self.clean("There are no workers.")
        bounds = costs.boundaries
        if bounds.count == 0:
            return self.not_evaluated("no epoch but the first began after the first steps")
        each_ns = (bounds.init_ns + (bounds.extra_wait_ns or 0)) / bounds.count
        total_ns = each_ns * bounds.num_all / analysis.num_steps
        share = total_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        evidence = [
            duration("per step", total_ns),
            ratio("share of the loop", share),
            duration("per epoch", each_ns),
            count("epochs begun", bounds.num_all),
        ]
        if share is None or not self.is_found(share, total_ns) or loader.persistent_workers:
            return self.clean(f"The start of an epoch costs {milliseconds(each_ns)}.", evidence)
        return (
            self.found(
                f"{loader.num_workers} workers are stopped and started in each epoch, which takes"
                f" {milliseconds(each_ns)}: {milliseconds(total_ns)} a step ({percent(share)} of the loop).",
                f"{loader_call(setup, loader, persistent_workers=True)}: False now.",
                self.severity(share),
                saving_ns=total_ns,
                places=[loader.worker_init, *lines_that_call(setup, "DataLoader"), loader.dataset],
                evidence=evidence,
            ),
        )
