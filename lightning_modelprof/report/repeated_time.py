"""Findings whose time is that of findings above them: each time is said once, and counts once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.report.model import Finding, Severity, Status
from lightning_modelprof.report.rules.base import Rule
from lightning_modelprof.report.rules.device import DeviceRule
from lightning_modelprof.run.stacks import SampledStack

_MOSTLY: Final = 0.8
"""Share of a finding's samples in another one's time, from which on it says the same time again."""
_LEAST_SAMPLES: Final = 10

_Claims = Callable[[SampledStack], bool]


def without_repeats(
    findings: Sequence[Finding], rules: Sequence[Rule], hot: HotLines | Absent
) -> list[Finding]:
    """The same findings, those that say the time of one above again as hints that name it.

    What time a finding is about samples tell: those of its phases if these are all its own, else those with
    one of its lines on the stack.

    Args:
        findings: in their order.
        rules: that gave them.
        hot: what samples of the training thread say.
    """
    if isinstance(hot, Absent):
        return list(findings)
    by_kind = {rule.kind: rule for rule in rules}
    above: list[tuple[Finding, _Claims]] = []
    result: list[Finding] = []
    for finding in findings:
        claims = _claims(finding, by_kind.get(finding.kind), hot)
        first = None if claims is None else _first_with(finding, claims, above, hot)
        if first is None:
            result.append(finding)
            above += [] if claims is None else [(finding, claims)]
            continue
        said = f"This time is part of what the finding {first.kind} is about."
        result.append(
            replace(
                finding,
                severity=Severity.INFO if finding.severity is not None else None,
                summary=f"{finding.summary} {said}",
                saving_ns_per_step=None,
            )
        )
    return result


def _claims(finding: Finding, rule: Rule | None, hot: HotLines) -> _Claims | None:
    """Whether a stack is of a finding's time; ``None`` where samples do not tell."""
    if rule is None or finding.status is not Status.FOUND or not finding.saving_ns_per_step:
        return None
    if isinstance(rule, DeviceRule):  # its time is the device's
        return None
    if rule.sampled_phases:
        return lambda stack: stack.phase in rule.sampled_phases
    lines = {(one.file, one.line) for one in finding.locations if one.is_exact}
    frames = {number for number, frame in enumerate(hot.samples.frames) if (frame.file, frame.line) in lines}
    return (lambda stack: not frames.isdisjoint(stack.frames)) if frames else None


def _first_with(
    finding: Finding, claims: _Claims, above: Sequence[tuple[Finding, _Claims]], hot: HotLines
) -> Finding | None:
    """The first finding above in whose time most of this one's is; several of one rule are several things."""
    stacks = [stack for stack in hot.samples.stacks if claims(stack)]
    whole_ns = sum(stack.time_ns for stack in stacks)
    if sum(stack.samples for stack in stacks) < _LEAST_SAMPLES:
        return None
    for other, is_its in above:
        inside_ns = sum(stack.time_ns for stack in stacks if is_its(stack))
        if other.kind != finding.kind and inside_ns >= _MOSTLY * whole_ns:
            return other
    return None
