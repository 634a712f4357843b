"""Rules that ask one question of one phase: is it more than a share of the step?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.step_costs import SURROUNDINGS, PhaseMeans, StepCosts
from lightning_modelprof.report.model import Evidence, Finding, Location
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    THE_LOOP,
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
    usual_step,
)
from lightning_modelprof.run.setup import CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class PhaseShareRule(ShareRule):
    """One phase; what to do about it and where is the subclass's."""

    phase: ClassVar[str]
    what: ClassVar[str]
    """The phase as the subject of a sentence."""
    is_in_every_step: ClassVar[bool] = True
    """Whether it is work of every step; a few long ones are then an accident of the machine."""
    bound: ClassVar[str | None] = "overhead_bound"
    less: ClassVar[str] = ""
    """What to do where samples name the user's functions, ``{names}``; ``""`` where that changes nothing."""

    def __init_subclass__(cls) -> None:
        """All the time of its phase is that of its findings."""
        super().__init_subclass__()
        if hasattr(cls, "phase"):
            cls.sampled_phases = (cls.phase,)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where the phase was not seen."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        means, (wall_ns, whole) = self.means(costs), self.whole(analysis, costs)
        cost_ns = least_ns = means.phases_ns.get(self.phase)
        if self.is_in_every_step and cost_ns is not None:
            cost_ns = costs.usual_ns(means, self.phase) or 0.0
            least_ns = costs.least_of(cost_ns, means, self.phase)
        if cost_ns is None or not wall_ns:
            return self.not_evaluated(f"the time of {self.what.lower()} was not seen")
        share = cost_ns / wall_ns
        evidence = [duration("per step", cost_ns), ratio(f"share of {whole}", share)]
        if not self.is_found(share, cost_ns, least_ns):
            return self.clean(f"{self.what} takes {milliseconds(cost_ns)} a step.", evidence)
        return (
            self.found(
                f"{self.what} takes {milliseconds(cost_ns)} a step ({percent(share)} of {whole}).",
                self._less(analysis.hot_lines, setup) or self.action(setup),
                self.severity(share),
                saving_ns=cost_ns,
                places=self.places(setup),
                evidence=[*evidence, *self.more(setup)],
            ),
        )

    def _less(self, hot: HotLines | Absent, setup: TrainingSetup) -> str:
        if isinstance(hot, Absent) or not self.less:
            return ""
        lines = hot.statements_in(self.sampled_phases, [one.package for one in setup.libraries])
        names = ", ".join(dict.fromkeys(line.function for line in lines))
        return self.less.format(names=names) if names else ""

    def means(self, costs: StepCosts) -> PhaseMeans:
        """The steps that the share is of: for what surrounds the model the whole loop."""
        return costs.loop if self.phase in SURROUNDINGS else costs.typical

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """What its time is a share of; what is not in every step is always in the loop."""
        if not self.is_in_every_step:
            return Whole(costs.loop.wall_ns, THE_LOOP)
        return usual_step(costs, self.means(costs))

    @abstractmethod
    def action(self, setup: TrainingSetup) -> str:
        """What to change."""

    def places(self, setup: TrainingSetup) -> Sequence[CodePlace | Location]:  # noqa: ARG002  # of subclasses
        """Where."""
        return []

    def more(self, setup: TrainingSetup) -> list[Evidence]:  # noqa: ARG002  # of subclasses
        """Further numbers."""
        return []


def hooks_named(setup: TrainingSetup, *names: str) -> list[CodePlace]:
    """The module's own hooks of these names."""
    return [setup.module_hooks[name] for name in names if name in setup.module_hooks]
