"""Does the optimizer step its parameters one by one?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.owners import owner_of_optimizer
from lightning_modelprof.report.model import Severity
from lightning_modelprof.report.one_step import COST, per_step
from lightning_modelprof.report.rules.callbacks import of_calls, sampled
from lightning_modelprof.report.rules.rule import NOT_A_FIT, Found, Limits, Passed, count, duration, rule
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.setup import OptimizerSetup, TrainingSetup
from lightning_modelprof.run.stacks import StackFrame

_FUSED_ON_CPU: Final = 0.25
"""Fused share of an optimizer's step time on the CPU.

On one CPU, ``fused=True`` took 13 to 43% of the time of Adam and AdamW, and 19 to 63% of that of SGD with
momentum, for 40 to 480 tensors of 16 to 262,144 numbers.
"""


@rule(
    "optimizer_not_fused",
    title="Optimizer isn't fused",
    healthy="No optimizer needs fusing",
    where="`configure_optimizers`",
    bound="optimizer_bound",
    points_at=PointsAt.CHANGE,
    phases=("optimizer",),
    least_tensors=32,
    cpu_warning=0.10,
    cpu_critical=0.20,
)
def optimizer_not_fused(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """The phase Optimization is above the threshold and an optimizer with at least 32 parameters could be
    fused. On the CPU, fusing could save three quarters of the phase; a hint below 10%, critical from 20%.
    On other devices the saving is unknown.
    """
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    costs, setup = facts.step_costs, facts.setup
    usual_ns, wall_ns = costs.usual_ns(costs.typical, "optimizer"), costs.usual_wall_ns(costs.typical)
    cost_ns = costs.typical.phases_ns.get("optimizer")
    if usual_ns is None or cost_ns is None or not wall_ns:
        raise NotMeasured("the optimizer wasn't timed")
    share, least_ns = usual_ns / wall_ns, costs.least_of(usual_ns, costs.typical, "optimizer")
    took, evidence = per_step(cost_ns, costs.step_ns), [duration("optimizer time per step", cost_ns)]
    yield Passed(what=f"The optimizer takes {took}.", evidence=evidence)
    slow = [
        one
        for one in setup.optimizers
        if one.num_tensors >= limits.least_tensors and _is_one_by_one(one, facts.is_on_cpu)
    ]
    if not slow or not limits.is_found(share, usual_ns, least_ns):
        return
    one, saved = slow[0], 1 - _FUSED_ON_CPU
    yield Found(
        what=f"{one.kind} updates {one.num_tensors} parameters one by one, which takes {took}.",
        do=f"{_call(setup, one)} (currently foreach={one.foreach}, fused={one.fused}). May change results"
        " slightly.",
        saves_ns=saved * cost_ns if facts.is_on_cpu else None,
        severity=_severity_on_cpu(limits, saved * share) if facts.is_on_cpu else limits.severity(share),
        at=[setup.module_hooks.get("configure_optimizers")],
        evidence=[*evidence, count("parameters", one.num_tensors)],
    )


def _severity_on_cpu(limits: Limits, saved: float) -> Severity:
    if saved >= limits.cpu_critical:
        return Severity.CRITICAL
    return Severity.WARNING if saved >= limits.cpu_warning else Severity.INFO


def _is_one_by_one(one: OptimizerSetup, on_cpu: bool) -> bool:
    """On the CPU torch never chooses foreach itself; elsewhere it may, unless turned off."""
    if one.fused:
        return False
    return one.has_fused if on_cpu else one.has_foreach and one.foreach is False


def _call(setup: TrainingSetup, one: OptimizerSetup) -> str:
    argument = "fused" if one.has_fused else "foreach"
    owner = owner_of_optimizer(setup)
    if owner is None:
        return f"Use {one.kind}(..., {argument}=True)"
    return owner.optimizer(one.kind, **{argument: True})


@rule(
    "slow_optimizer",
    title="Slow custom optimizer code",
    healthy="Custom optimizer code is cheap",
    of="loop",
    where="the statement",
    bound="optimizer_bound",
    points_at=PointsAt.CHANGE,
    phases=("optimizer",),
    warning=0.05,
    critical=0.20,
    least_samples=10,
)
def slow_optimizer(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Samples of your code in Optimization, without torch's own optimizers, at least 10; the share minus two
    standard errors counts.
    """
    # The user's own optimizer, a ``step`` around torch's, or the module's ``optimizer_step``. What remains
    # after a fix is unknown, so the saving is all of it.
    hot = sampled(facts)
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    calls = hot.found_by(_own_code, ("optimizer",))
    yield from of_calls(
        facts,
        limits,
        calls,
        what=f"{', '.join(calls.functions[:1])} takes {COST} in the optimizer step.",
        do="Update whole tensors with torch._foreach_* functions, or use a fused optimizer.",
        passed="Your code in the optimizer step takes",
    )


def _own_code(path: Sequence[StackFrame]) -> int | None:
    """Return the user's outermost call that doesn't run a torch optimizer."""
    torchs = [at for at, frame in enumerate(path) if frame.python_module.startswith("torch.optim")]
    start = max(torchs, default=-1) + 1
    return next((at for at in range(start, len(path)) if path[at].is_users), None)
