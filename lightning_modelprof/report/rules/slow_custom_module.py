"""Does a module of the user's take long that has no parameters and computes no contraction: a loss, say?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.module_tree import ModuleCost
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.lines import advice_for
from lightning_modelprof.report.model import Finding, Location
from lightning_modelprof.report.module_pace import module_pace
from lightning_modelprof.report.rules.base import (
    MEDIAN_STEP,
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.setup import CodePlace


@dataclass(frozen=True, kw_only=True)
class SlowCustomModule(ShareRule):
    """Forward latency of modules that the user wrote, and that are no layers.

    A module is one if nothing in it has a parameter, it ran no contraction (matrix product, convolution,
    attention) in the counted step, and its ``forward`` is the user's. Such a module moves data about or
    computes a loss; on a device that should be little beside the layers.

    Source: 10 % and 20 % are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        Not all of the time can be saved: whatever the module computes still has to be computed. Its
        latency is the sum of medians of the timed steps, scaled by Forward in these and in the others.
    """

    kind: ClassVar[str] = "slow_custom_module"
    title: ClassVar[str] = "A module without parameters takes long"
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    bound: ClassVar[str | None] = "host_bound"

    warning: float = 0.10
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the median step."""
        return Whole(costs.typical.median_wall_ns, MEDIAN_STEP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each such module, clean, or not evaluated where modules were not timed."""
        costs, modules, cost = analysis.step_costs, analysis.modules, analysis.cost
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(modules, Absent) or cost is None:
            return self.not_evaluated(
                f"modules: {modules.reason}" if isinstance(modules, Absent) else "no module was timed"
            )
        if modules.root.forward_ns is None or modules.root.forward_flops is None:
            return self.not_evaluated("modules were not timed, or their operators not counted")
        written = {record.path: record.forward for record in cost.modules if record.forward is not None}
        pace, slowest_ns, found = module_pace(analysis), 0, []
        for module in _without_layers(modules.modules):
            place = written.get(module.path)
            if place is None or module.forward_ns is None:
                continue
            took_ns = round(module.forward_ns * pace * (1 - _logging_share(analysis, place)))
            slowest_ns = max(slowest_ns, took_ns)
            share = took_ns / costs.typical.median_wall_ns if costs.typical.median_wall_ns else None
            if share is not None and self.is_found(share, took_ns):
                found.append(self._one(analysis, module, place, took_ns, share))
        return tuple(found) or self.clean(
            f"The slowest of your modules without parameters takes {milliseconds(slowest_ns)} a step."
            if slowest_ns
            else "No module of yours is without parameters."
        )

    def _one(
        self, analysis: Analysis, module: ModuleCost, place: CodePlace, took_ns: float, share: float
    ) -> Finding:
        return self.found(
            f"{module.path} ({module.type_name}) has no parameters and multiplies no matrices, and its"
            f" forward takes {milliseconds(took_ns)} ({percent(share)} of {MEDIAN_STEP}).",
            advice_for(analysis, place.file, place.line, "it")
            + " Perhaps a module of torch's own does the same.",
            self.severity(share),
            title=f"{module.type_name} takes long, without a parameter",
            saving_ns=took_ns,
            places=[Location(file=place.file, line=place.line, function=place.name, module=module.path)],
            evidence=[duration("forward per step", took_ns), ratio(f"share of {MEDIAN_STEP}", share)],
        )


def _logging_share(analysis: Analysis, place: CodePlace) -> float:
    hot = analysis.hot_lines
    if isinstance(hot, Absent) or place.file is None or place.line is None:
        return 0.0
    return hot.logging_share(place.file, place.line)[0]


def _without_layers(modules: tuple[ModuleCost, ...]) -> list[ModuleCost]:
    """The outermost modules, below the model, in which nothing has a parameter or a contraction."""
    found: list[ModuleCost] = []
    for module in modules:
        is_inside = found and module.path.startswith(f"{found[-1].path}.")
        if module.path and not is_inside and module.parameters == 0 and module.forward_flops == 0:
            found.append(module)
    return found
