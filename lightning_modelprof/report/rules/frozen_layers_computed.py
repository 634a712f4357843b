"""Does backward go through frozen layers at the start of the model, for nothing?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.module_tree import ModuleCost
from lightning_modelprof.report.model import Finding, Location
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOT_A_FIT,
    ShareRule,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.loops import loop_of


@dataclass(frozen=True, kw_only=True)
class FrozenLayersComputed(ShareRule):
    """Backward time of modules without a trainable parameter that stand before all trainable ones.

    Nothing there needs a gradient: backward only comes there because an input requires one. Modules stand
    in the order in which they are registered; after the first trainable one a gradient may have to pass.

    Caveats:
        A model that runs in another order than it is registered in, or that wants the gradient of its input
        (as for adversarial examples), is found wrongly.
    """

    kind: ClassVar[str] = "frozen_layers_computed"
    title: ClassVar[str] = "Backward goes through frozen layers"
    phases: ClassVar[tuple[str, ...]] = ("backward",)
    takes_time_there: ClassVar[bool] = False

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where backward was not timed by module."""
        costs, setup, modules = analysis.step_costs, analysis.setup, analysis.modules
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        frozen = _frozen_at_the_start(modules.modules)
        if not frozen:
            return self.clean("No frozen layer stands before the trainable ones.")
        known = [(one.backward_ns, one) for one in frozen if one.backward_ns is not None]
        if not known and modules.root.backward_ns is None:
            return self.not_evaluated("the backward of modules was not timed")
        cost_ns = sum(ns for ns, _ in known)
        share = cost_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean(
                f"Backward spends {milliseconds(cost_ns)} a step in frozen layers at the start."
            )
        worst = sorted(known, key=lambda pair: -pair[0])
        names = ", ".join(one.path for _, one in worst[:3])
        step = setup.module_hooks.get("training_step")
        return (
            self.found(
                f"{names} and what is in it has no trainable parameter and nothing trainable before it, yet"
                f" backward takes {milliseconds(cost_ns)} ({percent(share)} of a clean step) there.",
                "Do not let the model's input require gradients (requires_grad), or run these layers under"
                " torch.no_grad().",
                self.severity(share),
                saving_ns=cost_ns,
                places=[
                    Location(
                        file=None if step is None else step.file,
                        line=None if step is None else step.line,
                        function=None if step is None else step.name,
                        module=one.path,
                    )
                    for _, one in worst
                ],
                evidence=[duration("backward per step", cost_ns), ratio("share of a clean step", share)],
            ),
        )


def _frozen_at_the_start(modules: tuple[ModuleCost, ...]) -> list[ModuleCost]:
    """The outermost modules without a trainable parameter, up to the first module that has one itself."""
    found: list[ModuleCost] = []
    for module in modules:
        if found and module.path.startswith(f"{found[-1].path}."):
            continue
        if _has_trainable_of_its_own(module, modules):
            return found
        if module.path and module.parameters and not module.trainable:
            found.append(module)
    return found


def _has_trainable_of_its_own(module: ModuleCost, modules: tuple[ModuleCost, ...]) -> bool:
    """Whether it trains more than its children do, as with the factors LoRA puts beside a frozen layer."""
    prefix = f"{module.path}." if module.path else ""
    children = (
        one
        for one in modules
        if one.path and one.path.startswith(prefix) and "." not in one.path[len(prefix) :]
    )
    return (module.trainable or 0) > sum(one.trainable or 0 for one in children)
