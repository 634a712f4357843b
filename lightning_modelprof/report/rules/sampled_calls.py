"""Rules about calls that no phase of their own tells apart: how many of the samples are in them?"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.exact_lines import location_at
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.rules.base import (
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
)

NOTHING_SAMPLED: Final = "nothing was sampled"


@dataclass(frozen=True, kw_only=True)
class SampledCallsRule(ShareRule):
    """The share of samples in some calls; less two standard errors it must be worth a finding.

    Attributes:
        least_samples: in the calls.

    Source: half of what TraceML takes for what is in a step and in none of its parts, 10 % and 20 %.
    """

    what: ClassVar[str]
    """The calls as the subject of a sentence, with its verb."""
    bound: ClassVar[str | None] = "host_bound"
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.05
    critical: float = 0.20
    least_samples: int = 10

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop, as samples are of all of it."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without samples."""
        costs, hot = analysis.step_costs, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(hot, Absent):
            return self.not_evaluated(NOTHING_SAMPLED)
        calls = self.calls(analysis, hot)
        if isinstance(calls, Absent):
            return self.not_evaluated(calls.reason)
        took_ns = calls.share * costs.loop.wall_ns
        least = calls.share - 2 * math.sqrt(calls.share * (1 - calls.share) / max(hot.num_samples, 1))
        took = f"{milliseconds(took_ns)} a step"
        if calls.samples < self.least_samples or not self.is_found(least, least * costs.loop.wall_ns):
            return self.too_few(analysis, f"{self.what} {took}.")
        return (
            self.found(
                self.summary(analysis, calls, f"{took} ({percent(calls.share)} of {THE_LOOP})"),
                self.action(analysis, calls),
                self.severity(calls.share),
                saving_ns=took_ns,
                places=[location_at(line) for line in calls.lines],
                evidence=[
                    duration("per step", took_ns),
                    ratio("share of the samples", calls.share),
                    count("samples", calls.samples),
                ],
            ),
        )

    @abstractmethod
    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:
        """The calls that it is about."""

    @abstractmethod
    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:
        """What is so, as sentences; ``took`` is how long they take."""

    @abstractmethod
    def action(self, analysis: Analysis, calls: FoundCalls) -> str:
        """What to change."""

    def too_few(self, analysis: Analysis, summary: str) -> tuple[Finding, ...]:  # noqa: ARG002
        """What is said where the calls take next to nothing."""
        return self.clean(summary)
