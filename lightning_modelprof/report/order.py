"""The order of findings: what the verdict is about first, then by severity, then by saving."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from lightning_modelprof.report.model import Finding, Severity, Status, Verdict
from lightning_modelprof.report.rules.rule import Rule

_STATUS: Final = (Status.FOUND, Status.CLEAN, Status.NOT_EVALUATED)

_SEVERITY: Final = (Severity.CRITICAL, Severity.WARNING, None, Severity.INFO)
"""``None`` is not judged: too little of the time is accounted for."""


def by_time(finding: Finding) -> tuple[int, bool, float, int]:
    """Found ones first; hints last of them; then largest saving first; of equals the critical one."""
    severity = _SEVERITY.index(finding.severity)
    is_hint = finding.severity is Severity.INFO
    return _STATUS.index(finding.status), is_hint, -(finding.saving_ns_per_step or 0.0), severity


def in_order(findings: Iterable[Finding], rules: Sequence[Rule], verdict: Verdict) -> tuple[Finding, ...]:
    """Findings as a reader gets them, so that the first one says what the verdict says.

    First comes the finding with the largest saving whose time speaks for the verdict (``Rule.bound``),
    or the one whose kind the verdict has, as of a loop that ran out of memory. The others follow by severity,
    and those of one severity by saving; one whose saving isn't known counts as the median of them.
    """
    speaking = {verdict.kind, *(rule.kind for rule in rules if rule.bound == verdict.kind)}
    ranked = sorted(findings, key=by_time)
    first = next((one for one in ranked if one.status is Status.FOUND and one.kind in speaking), None)
    if first is not None and first.severity is Severity.INFO and first.kind != verdict.kind:
        first = None

    known: dict[Severity | None, list[float]] = {}
    for one in ranked:
        if one.status is Status.FOUND and one.saving_ns_per_step is not None:
            known.setdefault(one.severity, []).append(one.saving_ns_per_step)

    def place(finding: Finding) -> tuple[bool, int, int, float]:
        is_first, saving = finding is first, finding.saving_ns_per_step
        if saving is None:
            saving = median(known.get(finding.severity, [0.0]))
        return not is_first, _STATUS.index(finding.status), _SEVERITY.index(finding.severity), -saving

    return tuple(sorted(ranked, key=place))
