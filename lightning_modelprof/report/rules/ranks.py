"""Does one rank make the others wait?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.ranks import LEAST_STEPS, OPTIMIZER, RankSkew, Straggler
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.loader import places_of_batches
from lightning_modelprof.report.advice.owners import loader_call
from lightning_modelprof.report.exact_lines import at_exact_lines
from lightning_modelprof.report.model import Evidence, Finding, Severity
from lightning_modelprof.report.rules.base import (
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.ranks import rank_file

_ADVICE: Final = {
    "dataloader": "Look at what makes batches slow on {rank} alone: what its part of the data is, where it"
    " reads from, how many CPUs its workers have. Give ranks equal parts, or it more workers.",
    "dataloader_init": "Keep the workers between epochs: {persistent}.",
    "callbacks": "Let the callback do less, less often, or on all ranks alike: what one rank alone does, all"
    " wait for.",
    "logging": "Log less often: what one rank alone writes, all wait for.",
    "checkpoint": "Save less often, or asynchronously: what one rank alone writes, all wait for.",
    "forward": "Look at what {rank} alone does in training_step. If it does the same as the others, give"
    " ranks equally large batches of equally long samples; else its device or CPU is slower.",
    "optimizer": "Look at what the optimizer of {rank} does and the others' do not: more parameters, state"
    " that is kept on the host, a slower CPU.",
}
_MAY_COST_NOTHING: Final = (
    " Or it costs nothing: in {phase} and in Rank wait the host may only wait for its own device."
)
_USUAL_ADVICE: Final = "Look at what {rank} does there and the others do not."


@dataclass(frozen=True, kw_only=True)
class StragglerRank(ShareRule):
    """One rank takes longer than the others for what it does on its own, and they wait for it.

    The time at stake is how much earlier the last rank would be ready to meet, were the late ones as early as
    the others: no more than they are late, nor than the others take longer where ranks meet.

    Caveats:
        The host's clock is used. On a device that lags behind the host, a late host may cost nothing; then
        nobody is seen to wait, or only before the next step.
    """

    kind: ClassVar[str] = "straggler_rank"
    title: ClassVar[str] = "The ranks wait for one of them"
    bound: ClassVar[str | None] = "straggler_bound"
    takes_time_there: ClassVar[bool] = False  # it does on the late rank, whose lines only itself has seen

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:
        """Of the mean step of all ranks."""
        skew = analysis.rank_skew
        return super().whole(analysis, costs) if isinstance(skew, Absent) else Whole(skew.step_ns, "a step")

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without the steps of other ranks."""
        skew = analysis.rank_skew
        if isinstance(skew, Absent):
            return self.not_evaluated(skew.reason)
        if skew.imbalance_ns is None:
            return self.not_evaluated(f"fewer than {LEAST_STEPS} steps are clean on all ranks")
        late = skew.straggler
        evidence = [
            count("ranks", len(skew.ranks)),
            count("steps compared", skew.num_common),
            duration("longest own time less the mean of ranks", skew.imbalance_ns),
        ]
        share = None if late is None else late.cost_ns / skew.step_ns
        if late is None or not self.is_found(share, late.cost_ns):
            return self.clean(_clean_summary(skew), evidence)
        evidence += [
            duration(f"later than the others by, rank {late.rank}", late.late_ns),
            duration("the others wait where ranks meet", late.waited_ns),
            duration("a step would be shorter by", late.cost_ns),
            ratio("share of the step", share),
        ]
        if late.is_ambiguous:
            return (self._either(skew, late, evidence),)
        phase, rank = _label(late.phase), f"rank {late.rank}"
        loaders = () if analysis.setup is None else analysis.setup.loaders
        advice = _ADVICE.get(late.phase, _USUAL_ADVICE)
        persistent = "DataLoader(persistent_workers=True)"
        if analysis.setup is not None and loaders:
            persistent = loader_call(analysis.setup, loaders[0], persistent_workers=True)
        too = f" Late as well: {_listed(late.others)}." if late.others else ""
        may_cost_nothing = late.phase in OPTIMIZER and analysis.info.device_type != "cpu"
        found = (
            self.found(
                f"{_takes(skew, late)}. They wait for it {milliseconds(late.awaited_ns)}, most of it in"
                f" {_label(late.waiting_phase)}.{too} Without that a step would take"
                f" {milliseconds(late.cost_ns)} ({percent(share)}) less."
                + (_MAY_COST_NOTHING.format(phase=phase) if may_cost_nothing else ""),
                f"{advice.format(rank=rank, persistent=persistent)} Its own lines:"
                f" lightning-modelprof report RUN/{rank_file(late.rank)}",
                Severity.INFO if may_cost_nothing else self.severity(late.cost_ns / skew.step_ns),
                title=f"The ranks wait for {rank}: {phase}",
                saving_ns=None if may_cost_nothing else late.cost_ns,
                places=places_of_batches(loaders) if late.phase == "dataloader" else (),
                evidence=evidence,
            ),
        )
        if late.rank != analysis.rank:
            return found
        return tuple(at_exact_lines(one, analysis.hot_lines, outside_modules=False) for one in found)

    def _either(self, skew: RankSkew, late: Straggler, evidence: list[Evidence]) -> Finding:
        """A hint that accuses nobody, as it may be either way round."""
        phase, waiting, rank = _label(late.phase), _label(late.waiting_phase), f"rank {late.rank}"
        alike = f" Alike: {_listed(late.others)}." if late.others else ""
        return self.found(
            f"{_takes(skew, late)}, and those take {milliseconds(late.awaited_ns)} more in {waiting}.{alike}"
            f" Either they wait there for {rank}. Or, if ranks meet in {phase}: the others are late in"
            f" {waiting}, and {rank} waits for them. It costs a step {milliseconds(late.cost_ns)}"
            f" ({percent(late.cost_ns / skew.step_ns)}).",
            f"Traces of all ranks tell who waits (Waiting for other ranks). Then look at {phase} on {rank},"
            f" or at {waiting} on the others.",
            Severity.INFO,
            title=f"Ranks differ: {rank} in {phase}, the others in {waiting}",
            evidence=evidence,
        )


def _takes(skew: RankSkew, late: Straggler) -> str:
    return (
        f"Rank {late.rank}{_host(skew, late)} takes {milliseconds(late.phase_ns)} a step in"
        f" {_label(late.phase)}, the others {milliseconds(late.usual_ns)}"
    )


def _clean_summary(skew: RankSkew) -> str:
    if skew.straggler is None:
        return f"No one of {len(skew.ranks)} ranks is later than the others."
    late = skew.straggler
    return (
        f"Rank {late.rank} is {milliseconds(late.late_ns)} a step later than the others, which wait"
        f" {milliseconds(late.awaited_ns)} for it; without that a step would take"
        f" {milliseconds(late.cost_ns)} less."
    )


def _host(skew: RankSkew, late: Straggler) -> str:
    """Where it runs, if that tells it from others."""
    hosts = {pace.rank: pace.host for pace in skew.ranks}
    return f" (on {hosts[late.rank]})" if hosts[late.rank] and len(set(hosts.values())) > 1 else ""


def _label(key: str) -> str:
    return PHASES[PHASE_INDEX[key]].label


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
