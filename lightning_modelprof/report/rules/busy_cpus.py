"""Did the training thread wait for a CPU?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import Rule, percent, ratio


@dataclass(frozen=True, kw_only=True)
class BusyCpus(Rule):
    """Time of the loop in which the training thread was ready to run and had no CPU.

    Every phase is longer for it, and so is a comparison with a run that had the CPUs to itself. What it costs
    is more than this wait, as other threads of the process waited as well.

    Attributes:
        hint: share of the loop from which on it is a hint.
        warning: share from which on it is a warning.

    Source: on two CPUs with a convolution network on two threads, the share was 0.0 % on a quiet machine and
    44 % beside one busy process, with steps 3.7 times as long.
    """

    kind: ClassVar[str] = "busy_cpus"
    title: ClassVar[str] = "The training thread waits for a CPU"
    rests_on_time: ClassVar[bool] = False

    hint: float = 0.1
    warning: float = 0.25

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where nobody counts."""
        facts = analysis.slow
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        share = facts.record.cpu_wait_share
        if share is None:
            return self.not_evaluated(facts.record.why_no_cpu_wait or "no step was looked at")
        evidence = [ratio("share of the loop", share)]
        if share < self.hint:
            return self.clean(f"It waited for a CPU in {percent(share)} of the time.", evidence)
        return (
            self.found(
                f"In {percent(share)} of the time the training thread was ready to run and had no CPU. All"
                " times of this report are longer for it, those of the model as well.",
                "Measure again while nothing else runs here, or give this job CPUs of its own.",
                Severity.WARNING if share >= self.warning else Severity.INFO,
                evidence=evidence,
            ),
        )
