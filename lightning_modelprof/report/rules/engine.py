"""Run the rules: apply thresholds, locate findings and sort them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.errors import ConfigError, describe_error
from lightning_modelprof.report.model import Finding, Severity, Slices, Status, Verdict
from lightning_modelprof.report.rules.all_rules import RULES, configure_rules
from lightning_modelprof.report.rules.passes import in_order, placed
from lightning_modelprof.report.rules.rule import (
    FAILED,
    ON_THE_CPU,
    Found,
    Limits,
    Passed,
    Rule,
    location_of,
    unfound,
)
from lightning_modelprof.report.verdict import account, give_verdict, verdict_of_traces
from lightning_modelprof.run.phases import RANGE_PREFIX


def diagnose(facts: Facts, rules: Sequence[Rule] | None = None) -> tuple[Verdict, tuple[Finding, ...]]:
    """Return a run's verdict and findings, by default for the rules that its configuration selects."""
    rules = _rules_of(facts) if rules is None else rules
    costs = facts.get(Facts.step_costs)
    accounting = account(facts)
    if costs is not None:
        rules = [_with_floor(one, costs.cpu_share) for one in rules]
    findings = placed([(one, judge(one, facts)) for one in rules], facts)
    verdict = give_verdict(facts, findings, rules, accounting)
    return verdict, in_order(findings, rules, verdict)


def diagnose_traces(facts: JobFacts) -> tuple[Verdict, tuple[Finding, ...]]:
    """Return the verdict and findings over all ranks of one job's traces."""
    rules = [one for one in RULES if one.on_traces]
    findings = placed([(one, judge(one, facts)) for one in rules], facts)
    verdict = verdict_of_traces(facts, findings, rules)
    return verdict, in_order(findings, rules, verdict)


def judge(rule: Rule, facts: JobFacts, limits: Mapping[str, float] | None = None) -> tuple[Finding, ...]:
    """Run one rule and return at least one finding; a rule that fails loses only its own."""
    thresholds = Limits({**rule.limits, **(limits or {})})
    found: list[Finding] = []
    passed: Finding | None = None
    try:
        if rule.is_of_device:
            _require_device(facts)
        for one in rule.ask(facts, thresholds):
            severity = _severity(rule, one, facts, thresholds) if isinstance(one, Found) else None
            if severity is not None and isinstance(one, Found):
                found.append(_finding(rule, one, severity))
            elif isinstance(one, Passed):
                passed = unfound(rule, Status.CLEAN, one.what, one.evidence, one.title)
            elif one.passed:
                passed = unfound(rule, Status.CLEAN, one.passed, one.evidence)
    except NotMeasured as why:
        passed = unfound(rule, Status.NOT_EVALUATED, why.reason)
    except Exception as error:
        found.clear()
        reason = f"{FAILED}: {describe_error(error)}"
        passed = unfound(rule, Status.NOT_EVALUATED, reason)
    if found:
        return tuple(found)
    return (passed or unfound(rule, Status.CLEAN, f"{rule.healthy}."),)


def _severity(rule: Rule, found: Found, facts: JobFacts, limits: Limits) -> Severity | None:
    if found.severity is not None:
        return found.severity
    ns = found.saves_ns if found.judged_ns is None else found.judged_ns
    whole_ns = _whole_ns(rule, facts) if found.whole_ns is None else found.whole_ns
    if ns is None or not whole_ns:
        return None
    share = ns / whole_ns
    return limits.severity(share) if limits.is_found(share, ns, found.least_ns) else None


def _require_device(facts: JobFacts) -> None:
    _ = facts.step_costs if isinstance(facts, Facts) else None
    if facts.is_on_cpu:
        raise NotMeasured(ON_THE_CPU)
    if facts.lost_work:
        raise NotMeasured(facts.lost_work)


def _whole_ns(rule: Rule, facts: JobFacts) -> float:
    """Return the rule's denominator."""
    if rule.is_of_device or not isinstance(facts, Facts):
        return facts.step_ns
    costs = facts.step_costs
    return costs.loop.wall_ns if rule.of == "loop" else costs.typical.wall_ns


def _finding(rule: Rule, found: Found, severity: Severity) -> Finding:
    return Finding(
        kind=rule.kind,
        status=Status.FOUND,
        severity=severity,
        title=found.title or rule.title,
        summary=found.what,
        action=found.do,
        saving_ns_per_step=found.saves_ns,
        saving_is="" if found.saves_ns is None else found.saving_is,
        phases=rule.phases if found.phases is None else found.phases,
        locations=tuple(location_of(place) for place in found.at if place),
        evidence=tuple(found.evidence),
        slices=(
            *found.slices,
            *rule.slices,
            *(Slices(name=RANGE_PREFIX + phase) for phase in rule.phases),
        ),
        wants=tuple((found.wants or {}).items()),
        verdict_ns=found.verdict_ns,
    )


def _with_floor(rule: Rule, cpu_share: float) -> Rule:
    """Scale ``floor_ns`` for a thread that had a CPU only part of the time."""
    if "floor_ns" not in rule.limits:
        return rule
    return replace(rule, limits={**rule.limits, "floor_ns": rule.limits["floor_ns"] / cpu_share})


def _rules_of(facts: Facts) -> tuple[Rule, ...]:
    try:
        return configure_rules(facts.info.config.get("rules"))
    except ConfigError:  # saved by another version
        return configure_rules(None)
