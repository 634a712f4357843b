"""How much of the training goes into validation?"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.validation import PartAdvice, part_advice
from lightning_modelprof.report.model import Evidence, Finding, Status
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    RuleHelp,
    ShareRule,
    count,
    duration,
    lines_that_call,
    ratio,
)
from lightning_modelprof.report.rules.phases import PhaseShareRule, hooks_named
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.units import milliseconds, percent


class ValidationShare(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Validation over the whole loop, and which part of it takes most.

    Validation is wanted work, so its bands are wider than those of overhead: 15% and 50% are
    this package's own choice, and so are the 40% from which on a part is named.

    Attributes:
        part: share of the validations from which on their largest part is named, with its line and its fix;
            where it takes less, validating less often is all that can be said.
    """

    kind: ClassVar[str] = "validation_share"
    title: ClassVar[str] = "Slow validation"
    healthy: ClassVar[str] = "Validation is short"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "the phase Validation. A part that takes at least 40% of it (table Validation) is named with its"
            " fix. On a GPU, its times on the GPU count; for Dataloader, at most those on the CPU. With"
            " workers, the extra wait for first batches counts as Dataloader init"
        ),
        of="of the loop",
        where="the slowest line of that part, else its functions; `validation_step`",
    )
    phase: ClassVar[str] = "validation"
    what: ClassVar[str] = "Validation"
    is_in_every_step: ClassVar[bool] = False

    warning: float = 0.15
    critical: float = 0.50
    part: float = 0.40

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """What is found names the part that takes most."""
        [finding] = super().evaluate(analysis)
        if finding.status is not Status.FOUND or isinstance(analysis.validation, Absent):
            return (finding,)
        advice = part_advice(analysis, self.part)
        if advice is not None:
            return (_of_part(finding, advice),)
        summary = f"{finding.summary} No part of it stands out (see the table Validation)."
        return (replace(finding, summary=summary),)

    def action(self, setup: TrainingSetup) -> str:
        batches = "all batches" if setup.num_val_batches is None else f"{setup.num_val_batches} batches"
        return (
            "Validate less with Trainer(val_check_interval=..., check_val_every_n_epoch=...,"
            f" limit_val_batches=...) (currently {setup.val_check_interval:g}, {setup.check_every_n_epochs},"
            f" {batches})."
            if setup.val_check_interval is not None
            else f"Validate less often, or on fewer batches (currently {batches})."
        )

    def places(self, setup: TrainingSetup) -> list[Place]:
        return hooks_named(setup, "validation_step")

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        return [count("batches per validation", setup.num_val_batches)]


def _of_part(finding: Finding, advice: PartAdvice) -> Finding:
    """The same finding about one part of the validations; validating less comes after the part's fix."""
    return replace(
        finding,
        title=f"{finding.title}, mostly {advice.label}",
        summary=f"{finding.summary} {advice.summary}",
        action=f"{advice.action} Alternatively, {finding.action[:1].lower()}{finding.action[1:]}",
        locations=advice.locations or finding.locations,
        evidence=(*finding.evidence[:1], *advice.evidence, *finding.evidence[1:]),
    )


class LongSanityCheck(ShareRule, frozen=True, kw_only=True):
    """The validation batches before training, over the whole loop.

    Where the sanity check was not measured, each of its batches is taken to last as long as the mean one of
    the fit, as they are the same.

    Attributes:
        usual: batches that are never found, as many as Lightning runs by default.
    """

    kind: ClassVar[str] = "long_sanity_check"
    title: ClassVar[str] = "Slow sanity check before training"
    healthy: ClassVar[str] = "Sanity check is short"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "time of the validation batches before training (Outside the loop), estimated from validation"
            " during training if it wasn't measured"
        ),
        of="of the loop",
        where="the `Trainer(...)` call",
    )
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.30
    usual: int = 2

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup, split = analysis.step_costs, analysis.setup, analysis.validation
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None or setup.num_sanity_batches is None:
            return self.not_evaluated("the number of sanity check batches is unknown")
        took_ns: float | None = None if isinstance(analysis.around, Absent) else analysis.around.sanity_ns
        about = ""
        if took_ns is None:
            if isinstance(split, Absent):
                return self.not_evaluated(split.reason)
            if not split.num_batches or not analysis.num_steps:
                return self.not_evaluated("no validation ran")
            each_ns = (split.total_ns + split.callbacks_ns) / split.num_batches
            took_ns = each_ns * setup.num_sanity_batches
            about = "about "
        cost_ns = took_ns / max(analysis.num_steps, 1)
        share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        evidence = [
            duration("estimated sanity check time" if about else "sanity check time", took_ns),
            ratio("share of the loop", share),
            count("validation batches before training", setup.num_sanity_batches),
        ]
        is_asked_for = setup.num_sanity_batches > self.usual
        if share is None or not is_asked_for or not self.is_found(share, cost_ns):
            return self.clean(f"The sanity check has {setup.num_sanity_batches} batches.", evidence)
        return (
            self.found(
                f"The sanity check runs {setup.num_sanity_batches:,} validation batches, which take"
                f" {about}{milliseconds(took_ns)} ({percent(share)} of the loop).",
                "Set Trainer(num_sanity_val_steps=2), the default.",
                self.severity(share),
                places=lines_that_call(setup, "Trainer"),
                evidence=evidence,
            ),
        )


class SlowEpochTurns(ShareRule, frozen=True, kw_only=True):
    """The phase Epoch turn over the whole loop; hooks at an epoch's end are other rules'.

    The time of a turn is the same however many batches an epoch has. The saving is all of it: in epochs
    of many batches little is left.
    """

    kind: ClassVar[str] = "slow_epoch_turns"
    title: ClassVar[str] = "Slow epoch boundaries"
    healthy: ClassVar[str] = "Epoch boundaries are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        "the phase Epoch boundary with more than one epoch. Smaller batches and samplers that repeat data"
        " change the training",
        of="of the loop",
    )
    bound: ClassVar[str | None] = "overhead_bound"
    sampled_phases: ClassVar[tuple[str, ...]] = ("epoch_turn",)
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE
    is_of_loop: ClassVar[bool] = True

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        num_turns = costs.boundaries.num_all
        if num_turns < 1:
            return self.not_evaluated("there was only one epoch")
        cost_ns = costs.loop.phases_ns.get("epoch_turn")
        if cost_ns is None or not costs.loop.wall_ns:
            return self.not_evaluated("the time between epochs wasn't measured")
        share = cost_ns / costs.loop.wall_ns
        each_ns = cost_ns * analysis.num_steps / (num_turns + 1)
        batches = analysis.num_steps / (num_turns + 1)
        evidence = [
            duration("time per epoch boundary", each_ns),
            duration("time per step", cost_ns),
            count("epochs", num_turns + 1),
        ]
        if not self.is_found(share, cost_ns):
            return self.clean(f"Going from one epoch to the next takes {milliseconds(each_ns)}.", evidence)
        return (
            self.found(
                f"Lightning takes {milliseconds(each_ns)} per epoch boundary, and an epoch has"
                f" {_batches(batches)}. That costs {COST}.",
                "Make epochs longer, with a sampler such as RandomSampler(data, replacement=True,"
                " num_samples=...), and use max_steps. This changes training.",
                self.severity(share),
                saving_ns=cost_ns,
                evidence=evidence,
            ),
        )


def _batches(number: float) -> str:
    return "one batch" if number == 1 else f"{number:.3g} batches"
