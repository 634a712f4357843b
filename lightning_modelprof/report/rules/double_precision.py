"""Does the model compute in float64?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    ShareRule,
    Whole,
    duration,
    lines_that_call,
    milliseconds,
    percent,
    ratio,
    usual_step,
)

_HALF: Final = 0.5
"""float32 takes half the bytes, and twice as many fit into a CPU's vector. On most GPUs it saves far more."""


@dataclass(frozen=True, kw_only=True)
class DoublePrecision(ShareRule):
    """Most trainable parameters are float64.

    At stake is half of forward, backward and optimizer: what half the bytes and twice as wide vectors save.
    Where the Trainer was told ``precision="64-true"``, it is a hint.
    """

    kind: ClassVar[str] = "double_precision"
    title: ClassVar[str] = "The model computes in float64"
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.10
    critical: float = 0.30

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of a usual clean step."""
        return usual_step(costs, costs.typical)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where the parameters' types are not known."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.cost is None or analysis.cost.size is None:
            note = "" if analysis.cost is None else analysis.cost.size_note
            return self.not_evaluated(note or "the parameters' types are not known (flops=True looks)")
        sizes = [one for one in analysis.cost.size.sizes if one.kind.endswith("parameters")]
        every = sum(one.elements for one in sizes)
        double = sum(one.elements for one in sizes if one.dtype == "float64")
        if not every or double <= every / 2:
            return self.clean("Parameters are not float64.")
        phases = [costs.usual_ns(costs.typical, phase) or 0.0 for phase in self.phases]
        cost_ns, (wall_ns, whole) = _HALF * sum(phases), self.whole(analysis, costs)
        share = cost_ns / wall_ns if wall_ns else None
        evidence = [ratio("share of the parameters", double / every), duration("about half of it", cost_ns)]
        if share is None or not self.is_found(share, cost_ns):
            return self.clean(f"float64 costs about {milliseconds(cost_ns)} a step.", evidence)
        is_meant = analysis.info.precision.startswith("64")
        return (
            self.found(
                f"{percent(double / every)} of the parameters are float64. float32 takes half the bytes and"
                f" fits twice as often into a vector: about {milliseconds(cost_ns)} a step"
                f" ({percent(share)} of {whole}) less.",
                "Take out .double() and float64, and make the data float32 where they are loaded: .float() or"
                " astype('float32') of NumPy's arrays, which are float64 by default.",
                Severity.INFO if is_meant else self.severity(share),
                saving_ns=cost_ns,
                places=lines_that_call(setup, "double", "float64") or [setup.module],
                evidence=evidence,
            ),
        )
