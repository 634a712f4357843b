"""Do a few slow steps take much of the time?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import (
    ShareRule,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
    text,
)
from lightning_modelprof.report.slow_words import cause_words
from lightning_modelprof.run.steps import SPECIAL

_ADVICE: Final = {
    COLLECTOR: "gc.collect() and gc.freeze() after the first step, so that the collector does not walk"
    " through what stays; or gc.disable(), and gc.collect() at the end of each epoch.",
    MACHINE: "Give this job CPUs of its own, or run the others elsewhere.",
    "dataloader": "Some batches take long: look at what they read. With workers, a larger prefetch_factor"
    " evens them out.",
    "checkpoint": "Save less often, or asynchronously.",
    "callbacks": "Table Callbacks says which one; let it do less, or less often.",
    "logging": "Log less often, or hand the work to another thread.",
}
_USUAL_ADVICE: Final = "Table Slow steps says where each one's time went."


@dataclass(frozen=True, kw_only=True)
class SlowStepsCost(ShareRule):
    """What clean steps of more than three times the median take beyond the median, by step of all clean ones.

    A hint without time at stake, unless it is mostly the garbage collector, of which no other rule knows.
    """

    kind: ClassVar[str] = "slow_steps"
    title: ClassVar[str] = "A few steps are slow"

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where nobody looked."""
        facts, costs = analysis.slow, analysis.benchmark
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        if costs is None:
            return self.not_evaluated("no step is clean")
        record = facts.record
        if record.why_not_looked_for:
            return self.not_evaluated(record.why_not_looked_for)
        cost_ns = record.excess_ns / costs.num_steps
        share = cost_ns / costs.batch_cost_ns.avg if costs.batch_cost_ns.avg else None
        evidence = [
            count("slow steps", record.count),
            duration("beyond the median, by clean step", cost_ns),
            ratio("share of a clean step", share),
        ]
        if not record.count or not self.is_found(share, cost_ns):
            return self.clean(f"{record.count} clean steps were slow.", evidence)
        clean = [one for one in facts.causes if not one.slow.tags & SPECIAL]
        weights: Counter[str] = Counter()
        for one in clean:
            weights[one.cause] += round(one.excess_ns)
        cause = weights.most_common(1)[0][0]
        worst = max(clean, key=lambda one: one.slow.duration_ns)
        said = cause_words(max((one for one in clean if one.cause == cause), key=lambda one: one.excess_ns))
        # What other phases take is the business of other rules, which have the same time at stake, and a busy
        # machine is nobody's fault.
        is_ours_alone = cause == COLLECTOR
        return (
            self.found(
                f"{record.count} of {costs.num_steps} clean steps took more than {record.factor:g} times the"
                f" median: {milliseconds(cost_ns)} by step ({percent(share)} of a clean step). Main cause:"
                f" {said}; the worst is step {worst.slow.step} with {milliseconds(worst.slow.duration_ns)}.",
                _ADVICE.get(cause, _USUAL_ADVICE),
                Severity.WARNING if is_ours_alone else Severity.INFO,
                saving_ns=cost_ns if is_ours_alone else None,
                evidence=[*evidence, text("most common cause", said)],
            ),
        )
