"""Runs the rules, ranks what they say, and gives the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.errors import ConfigError, told
from lightning_modelprof.report.advice.owners import with_owners
from lightning_modelprof.report.exact_lines import at_exact_lines
from lightning_modelprof.report.model import Finding, Severity, Status, Verdict
from lightning_modelprof.report.repeated_time import without_repeats
from lightning_modelprof.report.rules.base import Rule
from lightning_modelprof.report.rules.busy_cpus import BusyCpus
from lightning_modelprof.report.rules.configure import configure_rules
from lightning_modelprof.report.rules.out_of_memory import RanOutOfMemory
from lightning_modelprof.report.verdict import account, give_verdict

_THE_SAME: Final[Mapping[Severity | None, Severity]] = {one: one for one in Severity}
_LESS: Final[Mapping[Severity | None, Severity]] = {
    Severity.CRITICAL: Severity.WARNING,
    Severity.WARNING: Severity.INFO,
    Severity.INFO: Severity.INFO,
}
"""What becomes of a severity that rests on times, where the training thread waited for a CPU."""
_ORDER: Final = (Status.FOUND, Status.CLEAN, Status.NOT_EVALUATED)


def diagnose(analysis: Analysis, rules: Sequence[Rule] | None = None) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict, and what each rule says: found ones first, hints last of them, by time at stake.

    Args:
        analysis: of a run.
        rules: to ask; by default those that the run's own configuration says.
    """
    if rules is None:
        rules = _rules_of(analysis)
    accounting = account(analysis.step_costs)
    said = [(rule, _ask(rule, analysis)) for rule in rules]
    is_busy = any(
        one.kind == BusyCpus.kind and one.status is Status.FOUND for _, of_it in said for one in of_it
    )
    findings: list[Finding] = []
    for rule, of_it in said:
        # Whoever does not know where the time goes cannot say how much something matters.
        severities = {} if not accounting.is_enough else _LESS if is_busy else _THE_SAME
        findings += [
            replace(one, severity=severities.get(one.severity)) if rule.rests_on_time else one
            for one in of_it
        ]
    findings.sort(key=_rank)
    findings = sorted(without_repeats(findings, rules, analysis.hot_lines), key=_rank)
    return give_verdict(analysis, findings, rules, accounting), tuple(findings)


def _rank(finding: Finding) -> tuple[int, bool, bool, float, bool]:
    """Found ones first; what ended the loop before all others; hints last; then by time at stake.

    A warning with more at stake stands above a critical one. Severity decides between equals, such as those
    whose time is not known.
    """
    is_less, is_hint = finding.kind != RanOutOfMemory.kind, finding.severity is Severity.INFO
    saving = finding.saving_ns_per_step or 0.0
    is_mild = finding.severity is not Severity.CRITICAL
    return _ORDER.index(finding.status), is_less, is_hint, -saving, is_mild


def _ask(rule: Rule, analysis: Analysis) -> tuple[Finding, ...]:
    """What a rule says; a rule that fails costs its own finding, not the report."""
    try:
        findings = rule.evaluate(analysis)
        libraries = () if analysis.setup is None else [one.package for one in analysis.setup.libraries]
        if rule.takes_time_there:
            findings = tuple(
                at_exact_lines(
                    finding,
                    analysis.hot_lines,
                    outside_modules=rule.outside_modules,
                    phases=rule.sampled_phases,
                    libraries=libraries,
                    into_libraries=rule.into_libraries,
                )
                for finding in findings
            )
        return tuple(with_owners(finding, analysis.setup) for finding in findings)
    except Exception as error:
        return rule.not_evaluated(f"the rule failed, which is a fault of its own: {told(error)}")


def _rules_of(analysis: Analysis) -> tuple[Rule, ...]:
    """With the thresholds of the run, if this version knows all of them."""
    try:
        return configure_rules(analysis.info.config.get("rules"))
    except ConfigError:  # saved by another version
        return configure_rules(None)
