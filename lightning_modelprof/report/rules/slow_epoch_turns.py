"""What does Lightning do between two epochs, and is that much beside what it does in them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
)


@dataclass(frozen=True, kw_only=True)
class SlowEpochTurns(ShareRule):
    """The phase Epoch turn over the whole loop; hooks at an epoch's end are other rules'.

    The time of a turn is the same however many batches an epoch has. What is at stake is all of it: in epochs
    of many batches little is left.
    """

    kind: ClassVar[str] = "slow_epoch_turns"
    title: ClassVar[str] = "Short epochs: much of the time passes between them"
    bound: ClassVar[str | None] = "overhead_bound"
    sampled_phases: ClassVar[tuple[str, ...]] = ("epoch_turn",)
    takes_time_there: ClassVar[bool] = False

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop, as it is in few steps only."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where no epoch but the first began."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        num_turns = costs.boundaries.num_all
        if num_turns < 1:
            return self.not_evaluated("no epoch but the first began")
        cost_ns = costs.loop.phases_ns.get("epoch_turn")
        if cost_ns is None or not costs.loop.wall_ns:
            return self.not_evaluated("the time between epochs was not seen")
        share = cost_ns / costs.loop.wall_ns
        each_ns = cost_ns * analysis.num_steps / (num_turns + 1)
        batches = analysis.num_steps / (num_turns + 1)
        evidence = [
            duration("per step", cost_ns),
            ratio(f"share of {THE_LOOP}", share),
            duration("per epoch", each_ns),
            count("epochs", num_turns + 1),
        ]
        if not self.is_found(share, cost_ns):
            return self.clean(f"The turn of an epoch takes {milliseconds(each_ns)}.", evidence)
        return (
            self.found(
                f"Lightning's own turn of an epoch takes {milliseconds(each_ns)}, and an epoch has"
                f" {_batches(batches)}: {milliseconds(cost_ns)} a step ({percent(share)} of {THE_LOOP}).",
                "Make epochs longer: more batches an epoch (smaller ones, or a sampler that repeats the data,"
                " such as RandomSampler(data, replacement=True, num_samples=...)) with max_steps=... in place"
                " of max_epochs. Smaller batches and such a sampler change the training. Fewer callbacks, and"
                " fewer metrics logged with on_epoch=True, make a turn shorter.",
                self.severity(share),
                saving_ns=cost_ns,
                evidence=evidence,
            ),
        )


def _batches(number: float) -> str:
    return "one batch" if number == 1 else f"{number:.3g} batches"
