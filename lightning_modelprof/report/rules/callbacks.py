"""Which callback takes a noticeable part of the training?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Evidence, Finding, Location, Severity
from lightning_modelprof.report.rules.base import (
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    location_of,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.records import CallbackTime

_ONCE: Final = {"setup", "teardown", "on_train_start", "on_train_end", "on_fit_start", "on_fit_end"}
"""Hooks that run once, however long the training."""


@dataclass(frozen=True, kw_only=True)
class SlowCallback(ShareRule):
    """Time in all hooks of one callback, spread over all steps of the loop, is more than a share of it.

    One finding for each such callback. ModelCheckpoint has a rule of its own, and hooks that run once per
    training do not count.
    """

    kind: ClassVar[str] = "slow_callback"
    title: ClassVar[str] = "A callback takes long"
    phases: ClassVar[tuple[str, ...]] = ("callbacks",)
    bound: ClassVar[str | None] = "overhead_bound"

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each slow callback, or clean."""
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if costs.loop.phases_ns.get("callbacks") is None:
            return self.not_evaluated("the hooks of callbacks were not seen")
        saving = {one.callback for one in setup.checkpoints} if setup is not None else set()
        hooks: dict[str, list[CallbackTime]] = {}
        for one in analysis.callbacks:
            is_checkpoint = one.callback in saving or one.callback.startswith("ModelCheckpoint")
            if one.hook not in _ONCE and not is_checkpoint:
                hooks.setdefault(one.callback, []).append(one)
        found = []
        slowest_ns = 0.0
        for name, times in hooks.items():
            per_step_ns = sum(one.total_ns for one in times) / analysis.num_steps
            share = per_step_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
            slowest_ns = max(slowest_ns, per_step_ns)
            if share is not None and self.is_found(share, per_step_ns):
                found.append(self._one(analysis, name, times, per_step_ns, share))
        return tuple(found) or self.clean(f"The slowest callback takes {milliseconds(slowest_ns)} a step.")

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop, as hooks run where no step is."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def _one(
        self, analysis: Analysis, name: str, times: list[CallbackTime], per_step_ns: float, share: float
    ) -> Finding:
        worst = sorted(times, key=lambda one: -one.total_ns)
        places = {}
        if analysis.setup is not None:
            places = next((one.hooks for one in analysis.setup.callbacks if one.callback == name), {})
        locations = [
            location_of(places[one.hook]) if one.hook in places else Location(function=f"{name}.{one.hook}")
            for one in worst
        ]
        evidence: list[Evidence] = [duration("per step", per_step_ns), ratio("share of the loop", share)]
        for one in worst[:3]:
            evidence += [
                duration(f"{one.hook} per call", one.total_ns / one.calls),
                count(f"{one.hook} calls", one.calls),
            ]
        is_bar = "ProgressBar" in name.partition("{")[0]
        return self.found(
            f"{name} takes {milliseconds(per_step_ns)} a step ({percent(share)} of the loop), most of it in"
            f" {worst[0].hook}, which ran {worst[0].calls} times for"
            f" {milliseconds(worst[0].total_ns / worst[0].calls)}.",
            "Draw the progress bar less often: RichProgressBar(refresh_rate=20), or none:"
            " Trainer(enable_progress_bar=False)."
            if is_bar
            else f"Let {name} run in fewer steps, or leave it out: it is a library's."
            if worst[0].hook in places and places[worst[0].hook].is_library
            else f"Do less in {name}.{worst[0].hook}, or do it in fewer steps.",
            Severity.INFO if is_bar else self.severity(share),
            title=f"The callback {name} takes long",
            saving_ns=per_step_ns,
            places=locations,
            evidence=evidence,
        )
