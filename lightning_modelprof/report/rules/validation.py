"""How much of the training goes into validation?"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
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
from lightning_modelprof.run.setup import CodePlace, TrainingSetup
from lightning_modelprof.units import milliseconds, percent


class ValidationShare(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Validation over the whole loop, and which part of it takes most.

    Validation is work that somebody wants, so its bands are wider than those of overhead: 15% and 50% are
    this package's own choice, and so are the 40% from which on a part is named.

    Attributes:
        part: share of the validations from which on their largest part is named, with its line and its fix;
            where it takes less, validating less often is all that can be said.
    """

    kind: ClassVar[str] = "validation_share"
    title: ClassVar[str] = "Validation takes much of the training"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "Validation. A part that takes at least 40% of it (table Validation) is named, with what"
            " helps there; else only validating less helps. On a device the parts' times on the device"
            " decide, of Dataloader no more than on the host. With workers, what first batches are"
            " waited for longer counts as Dataloader init"
        ),
        of="of the loop",
        where="the line that takes most of the part, else its functions; `validation_step`",
    )
    phase: ClassVar[str] = "validation"
    what: ClassVar[str] = "Validation"
    is_in_every_step: ClassVar[bool] = False

    warning: float = 0.15
    critical: float = 0.50
    part: float = 0.40

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated; what is found names the part that takes most."""
        [finding] = super().evaluate(analysis)
        if finding.status is not Status.FOUND or isinstance(analysis.validation, Absent):
            return (finding,)
        advice = part_advice(analysis, self.part)
        if advice is not None:
            return (_of_part(finding, advice),)
        summary = f"{finding.summary} No part of it stands out: see the table Validation."
        return (replace(finding, summary=summary),)

    def action(self, setup: TrainingSetup) -> str:
        """Validate less often, or on less."""
        batches = "all batches" if setup.num_val_batches is None else f"{setup.num_val_batches} batches"
        return (
            "Trainer(val_check_interval=..., check_val_every_n_epoch=...) to validate less often, or"
            f" limit_val_batches=... to validate on less: val_check_interval is {setup.val_check_interval:g},"
            f" check_val_every_n_epoch is {setup.check_every_n_epochs}, with {batches} now."
            if setup.val_check_interval is not None
            else f"Validate less often, or on less: it is {batches} now."
        )

    def places(self, setup: TrainingSetup) -> list[CodePlace]:
        """The module's ``validation_step``."""
        return hooks_named(setup, "validation_step")

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        """How much of it there is."""
        return [count("batches of a validation", setup.num_val_batches)]


def _of_part(finding: Finding, advice: PartAdvice) -> Finding:
    """The same finding about one part of the validations; less of all comes after what mends the part."""
    return replace(
        finding,
        title=f"{finding.title}, most of it in {advice.label}",
        summary=f"{finding.summary} {advice.summary}",
        action=f"{advice.action} If that is not enough: {finding.action}",
        locations=advice.locations or finding.locations,
        evidence=(*finding.evidence, *advice.evidence),
    )


class LongSanityCheck(ShareRule, frozen=True, kw_only=True):
    """The validation batches before training, over the whole loop.

    Where the sanity check was not measured, each of its batches is taken to last as long as the mean one of
    the fit, as they are the same.

    Attributes:
        usual: batches that are nothing to speak of: what Lightning runs by default.
    """

    kind: ClassVar[str] = "long_sanity_check"
    title: ClassVar[str] = "The sanity check before training takes long"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "validation batches before training, as measured (Around the loop), else each as long as"
            " the mean one inside it"
        ),
        of="of the loop",
        where="the line that makes the Trainer",
    )
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.10
    critical: float = 0.30
    usual: int = 2

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where it was not measured and no validation ran in the fit."""
        costs, setup, split = analysis.step_costs, analysis.setup, analysis.validation
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None or setup.num_sanity_batches is None:
            return self.not_evaluated("the number of its batches is not known")
        took_ns: float | None = None if isinstance(analysis.around, Absent) else analysis.around.sanity_ns
        about, whence = "", "measured"
        if took_ns is None:
            if isinstance(split, Absent):
                return self.not_evaluated(split.reason)
            if not split.num_batches or not analysis.num_steps:
                return self.not_evaluated("no validation batch ran in the fit")
            each_ns = (split.total_ns + split.callbacks_ns) / split.num_batches
            took_ns = each_ns * setup.num_sanity_batches
            about, whence = "about ", "by the mean batch of the fit's validations"
        cost_ns = took_ns / max(analysis.num_steps, 1)
        share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        evidence = [
            count("validation batches before training", setup.num_sanity_batches),
            duration(f"all of them, {whence}", took_ns),
            ratio("of the loop", share),
        ]
        is_asked_for = setup.num_sanity_batches > self.usual
        if share is None or not is_asked_for or not self.is_found(share, cost_ns):
            return self.clean(f"The sanity check has {setup.num_sanity_batches} batches.", evidence)
        return (
            self.found(
                f"Before training {setup.num_sanity_batches:,} validation batches run as a sanity check:"
                f" {about}{milliseconds(took_ns)}, {percent(share)} of the time of all steps.",
                "Trainer(num_sanity_val_steps=2), which is the default, shows as well that validation runs.",
                self.severity(share),
                places=lines_that_call(setup, "Trainer"),
                evidence=evidence,
            ),
        )


class SlowEpochTurns(ShareRule, frozen=True, kw_only=True):
    """The phase Epoch turn over the whole loop; hooks at an epoch's end are other rules'.

    The time of a turn is the same however many batches an epoch has. What is at stake is all of it: in epochs
    of many batches little is left.
    """

    kind: ClassVar[str] = "slow_epoch_turns"
    title: ClassVar[str] = "Short epochs: much of the time passes between them"
    help: ClassVar[RuleHelp] = RuleHelp("Epoch turn, where there is more than one epoch", of="of the loop")
    bound: ClassVar[str | None] = "overhead_bound"
    sampled_phases: ClassVar[tuple[str, ...]] = ("epoch_turn",)
    takes_time_there: ClassVar[bool] = False
    is_of_loop: ClassVar[bool] = True

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
            duration("per epoch", each_ns),
            count("epochs", num_turns + 1),
        ]
        if not self.is_found(share, cost_ns):
            return self.clean(f"The turn of an epoch takes {milliseconds(each_ns)}.", evidence)
        return (
            self.found(
                f"Lightning's own turn of an epoch takes {milliseconds(each_ns)}, and an epoch has"
                f" {_batches(batches)}: {COST}.",
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
