"""The cost of findings: per step, or of the training time."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding, Status
from lightning_modelprof.units import format_duration, milliseconds, percent

COST: Final = "{cost}"
"""Placeholder for a finding's cost in a rule's sentences: ``12.3 ms per step (45%)``."""

_MOSTLY: Final = 0.5
"""Minimum share of a finding's time that its phases take in clean steps for it to be about each step."""


def of_step(finding: Finding, step_ns: float, most_ns: float | None = None) -> Finding:
    """Give a finding about each step its share of the step time, which caps its saving.

    ``most_ns`` is its phases' part of the step time, by default all.
    """
    saving_ns = finding.saving_ns_per_step
    if finding.status is not Status.FOUND or saving_ns is None or step_ns <= 0:
        return finding
    saving_ns = min(saving_ns, step_ns if most_ns is None else most_ns)
    found = replace(finding, saving_ns_per_step=saving_ns, whole_ns=step_ns)
    return _with_cost(found, per_step(saving_ns, step_ns))


def per_step(ns: float, step_ns: float) -> str:
    """Format a time per step with its share of the step time: ``12.3 ms per step (45%)``."""
    return f"{milliseconds(ns)} per step ({percent(ns / step_ns if step_ns else None)})"


def of_run(finding: Finding, costs: StepCosts, num_steps: int, *, is_of_loop: bool) -> Finding:
    """Relate a run's finding to each step, or to the whole loop if its time isn't in the clean steps.

    Args:
        finding: a rule's result; its ``saving_ns_per_step`` is a mean over the loop's steps.
        num_steps: the loop's finished steps.
        is_of_loop: whether the rule is about the time between steps.
    """
    saving_ns = finding.saving_ns_per_step
    if finding.status is not Status.FOUND or saving_ns is None:
        return finding
    inside_ns = costs.in_step_ns(finding.phases)
    if not is_of_loop and inside_ns >= _MOSTLY * saving_ns:
        return of_step(finding, costs.step_ns, inside_ns)
    found = replace(finding, share_of="loop", whole_ns=costs.loop.wall_ns)
    return _with_cost(
        found, f"{format_duration(saving_ns * num_steps)} in all ({percent(found.share)} of the loop)"
    )


def _with_cost(finding: Finding, cost: str) -> Finding:
    return replace(
        finding,
        summary=finding.summary.replace(COST, cost),
        action=finding.action.replace(COST, cost),
    )
