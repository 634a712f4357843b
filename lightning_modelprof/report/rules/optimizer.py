"""Does the optimizer step its parameters one by one?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.owners import owner_of_optimizer
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.one_step import per_step
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOT_A_FIT,
    RuleHelp,
    SampledCallsRule,
    ShareRule,
    count,
    duration,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.setup import OptimizerSetup, TrainingSetup
from lightning_modelprof.run.stacks import StackFrame

_FUSED_ON_CPU: Final = 0.25
"""What is left of the step of an optimizer on the CPU when it is fused."""


class OptimizerNotFused(ShareRule, frozen=True, kw_only=True):
    """The phase Optimization is more than a share of the step, and an optimizer that could be fused is not.

    On the CPU the saving is three quarters of the phase, and severity is by that; below 10% of the step
    it is a hint. What fusing would save on another device is not known before it is tried, so there is no
    saving.

    Attributes:
        least_tensors: parameters from which on it is worth a word.
        cpu_warning, cpu_critical: shares of the step that fusing saves on the CPU.

    Source: 3% and 15% as for all overheads. On one CPU, ``fused=True`` took 13 to 43% of the time of Adam
    and AdamW, and 19 to 63% of that of SGD with momentum, for 40 to 480 tensors of 16 to 262,144 numbers.
    """

    kind: ClassVar[str] = "optimizer_not_fused"
    title: ClassVar[str] = "Optimizer isn't fused"
    healthy: ClassVar[str] = "No optimizer needs fusing"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "Optimization is above the threshold and an optimizer with at least 32 parameters could be"
            " fused. On the CPU, fusing could save three quarters of the phase; a hint below 10%, critical"
            " from 20%. On other devices the saving is unknown"
        ),
        where="`configure_optimizers`",
    )
    phases: ClassVar[tuple[str, ...]] = ("optimizer",)
    bound: ClassVar[str | None] = "optimizer_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    least_tensors: int = 32
    cpu_warning: float = 0.10
    cpu_critical: float = 0.20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        usual_ns, wall_ns = costs.usual_ns(costs.typical, "optimizer"), costs.usual_wall_ns(costs.typical)
        cost_ns = costs.typical.phases_ns.get("optimizer")
        if usual_ns is None or cost_ns is None or not wall_ns:
            return self.not_evaluated("the optimizer wasn't timed")
        on_cpu = analysis.info.device_type == "cpu"
        slow = [
            one
            for one in setup.optimizers
            if one.num_tensors >= self.least_tensors and _is_one_by_one(one, on_cpu)
        ]
        share = usual_ns / wall_ns
        evidence = [duration("optimizer time per step", cost_ns)]
        if not slow or not self.is_found(
            share, usual_ns, costs.least_of(usual_ns, costs.typical, "optimizer")
        ):
            return self.clean(f"The optimizer takes {per_step(cost_ns, costs.step_ns)}.", evidence)
        one = slow[0]
        saving_ns = (1 - _FUSED_ON_CPU) * cost_ns if on_cpu else None
        return (
            self.found(
                f"{one.kind} updates {one.num_tensors} parameters one by one, which takes"
                f" {per_step(cost_ns, costs.step_ns)}.",
                f"{_call(setup, one)} (currently foreach={one.foreach}, fused={one.fused}). May change"
                " results slightly.",
                self._severity_on_cpu((1 - _FUSED_ON_CPU) * share) if on_cpu else self.severity(share),
                saving_ns=saving_ns,
                places=[setup.module_hooks.get("configure_optimizers")],
                evidence=[*evidence, count("parameters", one.num_tensors)],
            ),
        )

    def _severity_on_cpu(self, saved: float) -> Severity:
        if saved >= self.cpu_critical:
            return Severity.CRITICAL
        return Severity.WARNING if saved >= self.cpu_warning else Severity.INFO


def _is_one_by_one(one: OptimizerSetup, on_cpu: bool) -> bool:
    """On the CPU torch never takes foreach by itself; elsewhere it may, unless it is told not to."""
    if one.fused:
        return False
    return one.has_fused if on_cpu else one.has_foreach and one.foreach is False


def _call(setup: TrainingSetup, one: OptimizerSetup) -> str:
    argument = "fused" if one.has_fused else "foreach"
    owner = owner_of_optimizer(setup)
    if owner is None:
        return f"Use {one.kind}(..., {argument}=True)"
    return owner.optimizer(one.kind, **{argument: True})


_TORCHS: Final = "torch.optim"


class SlowOptimizer(SampledCallsRule, frozen=True, kw_only=True):
    """Code of the user's in the phase Optimization, with all that it calls but torch's own optimizers.

    An optimizer of the user's own, a ``step`` around torch's, or ``optimizer_step`` of the module.

    Caveats:
        How much of it a better way leaves is not known: the saving is all of it.
    """

    kind: ClassVar[str] = "slow_optimizer"
    title: ClassVar[str] = "Slow custom optimizer code"
    healthy: ClassVar[str] = "Custom optimizer code is cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        "samples of your code in Optimization, without torch's own optimizers, at least 10; the share minus"
        " two standard errors counts",
        of="of the loop",
        where="the statement",
    )
    phases: ClassVar[tuple[str, ...]] = ("optimizer",)
    what: ClassVar[str] = "Your code in the optimizer step takes"
    bound: ClassVar[str | None] = "optimizer_bound"

    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:
        """The user's, outside of torch's optimizers."""
        if not loop_of(analysis.info.loop).is_fit:
            return Absent(NOT_A_FIT)
        return hot.found_by(_own_code, ("optimizer",))

    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:  # noqa: ARG002
        return f"{calls.functions[0]} takes {took} in the optimizer step."

    def action(self, analysis: Analysis, calls: FoundCalls) -> str:  # noqa: ARG002
        return "Update whole tensors with torch._foreach_* functions, or use a fused optimizer."


def _own_code(path: Sequence[StackFrame]) -> int | None:
    """The user's outermost call below which no optimizer of torch's runs."""
    start = (
        max((at for at, frame in enumerate(path) if frame.python_module.startswith(_TORCHS)), default=-1) + 1
    )
    return next((at for at in range(start, len(path)) if path[at].is_users), None)
