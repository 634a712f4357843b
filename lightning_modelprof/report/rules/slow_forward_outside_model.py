"""Does ``training_step`` spend its time outside of the model's modules: in the loss, in loops over rows?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.step_costs import PhaseMeans, StepCosts
from lightning_modelprof.report.advice.lines import advice_for
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.module_pace import module_pace
from lightning_modelprof.report.rules.base import (
    MEDIAN_STEP,
    NO_SETUP,
    ShareRule,
    Whole,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.setup import CodePlace

_ENOUGH_SAMPLES: Final = 20


@dataclass(frozen=True, kw_only=True)
class SlowForwardOutsideModel(ShareRule):
    """The median of the phase Forward, less the latency of the module tree's root in the timed steps.

    Both are times of the host, or both are times of the device. Modules are timed in three steps, so steps
    in which the machine was busy must not count: the time at stake is that of the median, and it is only
    found if three of four steps have so much of it that it would be found in them. The machine may also have
    been faster in those three steps than later: then the modules' time is scaled by Forward in the others
    over Forward in these. It is never scaled down, as timing the modules takes some of Forward there. Where
    there are at least 20 samples of the step's function in Forward, twice the standard error more than they
    say must be enough, too. What samples find below ``self.log`` and metrics is taken off, and in doubt two
    standard errors more: that is a cause of its own (``slow_logging_calls``).

    Some of Forward is Lightning's own code around the step method, which slows down with the machine like its
    loop does: what is less than the median of the phase Loop is not told apart from it.

    Source: 10 % and 20 % are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        What the step does in less than three of four steps is not seen. Timing modules costs them some time,
        so with very many small modules the rest comes out too small.
    """

    kind: ClassVar[str] = "slow_forward_outside_model"
    title: ClassVar[str] = "The step's own code takes long, outside of the model's modules"
    phases: ClassVar[tuple[str, ...]] = ("forward",)
    bound: ClassVar[str | None] = "host_bound"
    outside_modules: ClassVar[bool] = True

    warning: float = 0.10
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the median step."""
        return Whole(costs.typical.median_wall_ns, MEDIAN_STEP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where modules were not timed."""
        costs, setup, modules = analysis.step_costs, analysis.setup, analysis.modules
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        model_ns = modules.root.forward_ns
        if model_ns is None:
            return self.not_evaluated(
                "no module was timed" + (f": {modules.notes[0]}" if modules.notes else "")
            )
        forward_ns = _forward_ns(costs.typical, modules.clock)
        if forward_ns is None:
            return self.not_evaluated("the time of the forward was not seen on the clock of the modules")
        model_ns = round(model_ns * max(1.0, module_pace(analysis)))
        name = loop_of(analysis.info.loop).step_hook
        place = setup.module_hooks.get(name) or setup.module
        logging, logging_error = _logging_share(analysis.hot_lines, place)
        logging_ns = forward_ns * logging
        rest_ns = max(0.0, forward_ns - model_ns - logging_ns)
        share = rest_ns / costs.typical.median_wall_ns if costs.typical.median_wall_ns else None
        evidence = [
            duration("outside of the modules", rest_ns),
            ratio(f"share of {MEDIAN_STEP}", share),
            duration("forward", forward_ns),
            duration("in the modules", model_ns),
            *([duration("in logging calls", logging_ns)] if logging_ns else ()),
        ]
        spread_ns = forward_ns - costs.typical.quartiles_ns.get("forward", forward_ns)
        sure_ns = rest_ns - spread_ns - 2 * logging_error * forward_ns
        least_ns = min(sure_ns, _most_by_samples(analysis.hot_lines, place, forward_ns))
        if share is None or not (
            self.is_found(share, rest_ns)
            and self.is_found(least_ns / costs.typical.median_wall_ns, least_ns)
            and least_ns >= costs.typical.medians_ns.get("other", 0.0)
        ):
            return self.clean(f"The step's own code takes {milliseconds(rest_ns)} a step.", evidence)
        return (
            self.found(
                f"{name} takes {milliseconds(forward_ns)}, of which the model's modules take"
                f" {milliseconds(model_ns)}: {milliseconds(rest_ns)} ({percent(share)} of {MEDIAN_STEP}) are"
                " in its own code, such as the loss.",
                advice_for(
                    analysis,
                    None if place is None else place.file,
                    None if place is None else place.line,
                    f"{name} and what it calls",
                    outside_modules=True,
                ),
                self.severity(share),
                saving_ns=rest_ns,
                places=[place],
                evidence=evidence,
            ),
        )


def _most_by_samples(hot: HotLines | Absent, place: CodePlace | None, forward_ns: float) -> float:
    """The most time outside of modules that samples allow for; infinite where they say nothing."""
    if isinstance(hot, Absent) or place is None or place.file is None or place.line is None:
        return math.inf
    # Of manual optimization backward and optimizer are in the same function.
    sampled = hot.share_outside_modules(place.file, place.line, phases=("forward",))
    if sampled is None or sampled[1] < _ENOUGH_SAMPLES:
        return math.inf
    share, samples = sampled
    return forward_ns * (share + 2 * math.sqrt(share * (1 - share) / samples))


def _logging_share(hot: HotLines | Absent, place: CodePlace | None) -> tuple[float, float]:
    """Share of Forward in ``self.log`` and metrics, a cause of its own, and its standard error."""
    if isinstance(hot, Absent) or place is None or place.file is None or place.line is None:
        return 0.0, 0.0
    return hot.logging_share(place.file, place.line, phases=("forward",), outside_modules=True)


def _forward_ns(means: PhaseMeans, clock: str) -> float | None:
    return means.device_ns.get("forward") if clock == "device" else means.medians_ns.get("forward")
