"""Passes over findings after their rules; each pass is noted on the findings it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.errors import describe_error
from lightning_modelprof.report.advice.idioms import with_idiom
from lightning_modelprof.report.advice.lines import PointsAt, at_exact_lines
from lightning_modelprof.report.advice.owners import with_owners
from lightning_modelprof.report.model import Finding, Severity, Status, Verdict
from lightning_modelprof.report.one_step import of_run, of_step
from lightning_modelprof.report.rules.rule import FAILED, HOST_WAIT, MADE, Rule, unfound
from lightning_modelprof.report.verdict import account
from lightning_modelprof.run.stacks import SampledStack
from lightning_modelprof.units import milliseconds

_STATUS: Final = (Status.FOUND, Status.CLEAN, Status.NOT_EVALUATED)

_SEVERITY: Final = (Severity.CRITICAL, Severity.WARNING, None, Severity.INFO)
"""``None`` wasn't judged, since too little of the time is attributed."""


def by_time(finding: Finding) -> tuple[int, bool, float, int]:
    """Sort key: found first, hints last among them, then by saving, then by severity."""
    severity = _SEVERITY.index(finding.severity)
    is_hint = finding.severity is Severity.INFO
    return _STATUS.index(finding.status), is_hint, -(finding.saving_ns_per_step or 0.0), severity


def in_order(findings: Iterable[Finding], rules: Sequence[Rule], verdict: Verdict) -> tuple[Finding, ...]:
    """Sort findings for readers, so that the first matches the verdict.

    The first is the finding with the largest saving that supports the verdict (``Rule.bound``), or whose kind
    is the verdict, such as running out of memory. The rest follow by severity, then by saving; an unknown
    saving counts as the median of its severity.
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


Said = list[tuple[Rule, Finding]]
"""Findings with their rules."""


def placed(said: Iterable[tuple[Rule, Iterable[Finding]]], facts: JobFacts) -> list[Finding]:
    """Apply all passes to the findings of all rules."""
    pairs = [(rule, one) for rule, findings in said for one in findings]
    for change in PASSES:
        pairs = change(pairs, facts)
    return [finding for _, finding in pairs]


def _noted(old: Finding, new: Finding, name: str) -> Finding:
    return old if new == old else replace(new, passes=(*old.passes, name))


def _each(said: Said, name: str, change: Callable[[Rule, Finding], Finding]) -> Said:
    """Change each finding separately; one whose change fails becomes not evaluated."""

    def changed(rule: Rule, one: Finding) -> Finding:
        try:
            return _noted(one, change(rule, one), name)
        except Exception as error:
            return unfound(rule, Status.NOT_EVALUATED, f"{FAILED}: {describe_error(error)}")

    return [(rule, changed(rule, one)) for rule, one in said]


def _at_lines(said: Said, facts: JobFacts) -> Said:
    if not isinstance(facts, Facts):
        return said
    return _each(said, "lines", lambda rule, one: _at_its_lines(rule, one, facts))


def _at_its_lines(rule: Rule, finding: Finding, facts: Facts) -> Finding:
    if rule.points_at in (PointsAt.CHANGE, PointsAt.NO_TIME):
        return finding
    setup = facts.get(Facts.setup)
    libraries = () if setup is None else [one.package for one in setup.libraries]
    samples = None if rule.samples is None else rule.samples(facts)
    placed = at_exact_lines(
        finding,
        facts.get(Facts.hot_lines) if samples is None else samples,
        points_at=rule.points_at,
        phases=rule.sampled_phases,
        libraries=libraries,
    )
    return placed if samples is None else _with_top_line(placed, samples, rule.limits["least_samples"])


def _with_top_line(placed: Finding, hot: HotLines, least_samples: float) -> Finding:
    """Put a worker's slowest line first, unless the first place or a line in it is that line."""
    top = next(iter(hot.lines), None)
    if placed.status is not Status.FOUND or top is None or top.samples < least_samples:
        return placed
    first = top.exact()
    known = [part for one in placed.locations[:1] for part in (one, one.inner) if part is not None]
    if any((one.file, one.line) == (top.file, top.line) for one in known):
        return placed
    return replace(placed, locations=(first, *(one for one in placed.locations if one != first)))


def _idioms(said: Said, facts: JobFacts) -> Said:
    if not isinstance(facts, Facts):
        return said
    others = [rule.samples(facts) for rule in MADE if rule.samples is not None]
    sampled = (facts.get(Facts.hot_lines), *others)

    def changed(rule: Rule, one: Finding) -> Finding:
        if rule.points_at in (PointsAt.CHANGE, PointsAt.NO_TIME):
            return one
        return with_idiom(one, facts.info.created, *sampled)

    return _each(said, "idiom", changed)


def _owners(said: Said, facts: JobFacts) -> Said:
    """Trace library code back to the user line that runs it."""
    setup = facts.get(JobFacts.setup)
    return _each(said, "owner", lambda _, one: with_owners(one, setup))


_LESS: Final[Mapping[Severity | None, Severity]] = {
    Severity.CRITICAL: Severity.WARNING,
    Severity.WARNING: Severity.INFO,
    Severity.INFO: Severity.INFO,
}
"""Severities that rest on times, when the training thread waited for a CPU."""


def _busy_machine(said: Said, facts: JobFacts) -> Said:
    """Lower severities on a busy machine, and drop them if too little time is attributed."""
    if not isinstance(facts, Facts):
        return said
    is_enough = account(facts).is_enough
    is_busy = any(rule.kind == "busy_cpus" and one.status is Status.FOUND for rule, one in said)

    def changed(rule: Rule, one: Finding) -> Finding:
        if rule.points_at is PointsAt.NO_TIME or (is_enough and not is_busy):
            return one
        return replace(one, severity=_LESS.get(one.severity) if is_enough else None)

    return _each(said, "busy machine", changed)


def _costs(said: Said, facts: JobFacts) -> Said:
    if not isinstance(facts, Facts):
        step_ns = facts.get(JobFacts.step_ns) or 0.0
        return _each(said, "cost", lambda _, one: of_step(one, step_ns))
    costs = facts.get(Facts.step_costs)
    if costs is None:
        return said
    return _each(
        said,
        "cost",
        lambda rule, one: of_run(one, costs, facts.num_steps, is_of_loop=rule.is_between_steps),
    )


_MOSTLY: Final = 0.8
"""Minimum share of a finding's samples in another's time for it to repeat that time."""

_LEAST_SAMPLES: Final = 10
"""Minimum samples of a finding; with fewer it's unclear whose time it is."""

_OF_HOOKS: Final = frozenset(("callbacks", "module_hooks"))
"""Phases that consist of whole hooks."""

_Claims = Callable[[SampledStack], bool]


def _repeats(said: Said, facts: JobFacts) -> Said:
    """Turn findings that repeat an earlier one's time into hints that name it, without a saving.

    Samples decide which time a finding is about: all of its phases if they are entirely its own, else the
    stacks with one of its lines.
    """
    # The part yields to the whole, whatever the severities.
    said = sorted(said, key=lambda pair: by_time(pair[1]))
    hot = facts.get(Facts.hot_lines) if isinstance(facts, Facts) else None
    if hot is None:
        return said
    above: list[tuple[Finding, _Claims]] = []
    result: Said = []
    for rule, finding in said:
        claims = _claims(finding, rule, hot)
        first = None if claims is None else _first_with(finding, claims, above, hot)
        if first is None:
            result.append((rule, finding))
            above += [] if claims is None else [(finding, claims)]
            continue
        hint = replace(
            finding,
            severity=Severity.INFO if finding.severity is not None else None,
            summary=f"{finding.summary} This time is already included in {first.kind}.",
            saving_ns_per_step=None,
        )
        result.append((rule, _noted(finding, hint, "repeats")))
    return result


def _claims(finding: Finding, rule: Rule, hot: HotLines) -> _Claims | None:
    """Return a test whether a stack is part of a finding's time; ``None`` if samples can't decide."""
    if finding.status is not Status.FOUND or not finding.saving_ns_per_step or rule.is_of_device:
        return None
    if rule.sampled_phases:
        return lambda stack: stack.phase in rule.sampled_phases
    exact = [one for one in finding.locations if one.is_exact]
    lines = {(one.file, one.line) for one in exact}
    # A hook's whole time counts, not only that of its slowest line.
    is_of_hooks = bool(rule.phases) and set(rule.phases) <= _OF_HOOKS
    hooks = {(one.file, one.function) for one in exact} if is_of_hooks else set()
    frames = {
        number
        for number, frame in enumerate(hot.samples.frames)
        if (frame.file, frame.line) in lines or (frame.file, frame.function) in hooks
    }
    return (lambda stack: not frames.isdisjoint(stack.frames)) if frames else None


def _first_with(
    finding: Finding, claims: _Claims, above: Sequence[tuple[Finding, _Claims]], hot: HotLines
) -> Finding | None:
    """Return the first earlier finding with most of this one's time; findings of one rule are distinct."""
    stacks = [stack for stack in hot.samples.stacks if claims(stack)]
    whole_ns = sum(stack.time_ns for stack in stacks)
    if sum(stack.samples for stack in stacks) < _LEAST_SAMPLES:
        return None
    for other, is_its in above:
        inside_ns = sum(stack.time_ns for stack in stacks if is_its(stack))
        if other.kind != finding.kind and inside_ns >= _MOSTLY * whole_ns:
            return other
    return None


def _copies(said: Said, facts: JobFacts) -> Said:  # noqa: ARG001  # same signature as the other passes
    """Subtract copy waits that have their own finding from slow transfers."""
    copies_ns = sum(
        float(one.value or 0.0)
        for _, finding in said
        if finding.kind == "host_to_device_copy" and finding.status is Status.FOUND
        if finding.phases == ("transfer",)
        for one in finding.evidence
        if one.label == HOST_WAIT
    )
    return [
        (rule, _noted(one, _less_copies(one, copies_ns), "copies"))
        if copies_ns and one.kind == "slow_transfer" and one.status is Status.FOUND
        else (rule, one)
        for rule, one in said
    ]


def _less_copies(finding: Finding, copies_ns: float) -> Finding:
    whole_ns = finding.saving_ns_per_step or 0.0
    left_ns = whole_ns - copies_ns
    said = f"{milliseconds(min(copies_ns, whole_ns))} of that is already included in host_to_device_copy."
    is_hint = left_ns < (1 - _MOSTLY) * whole_ns
    return replace(
        finding,
        severity=Severity.INFO if is_hint and finding.severity is not None else finding.severity,
        summary=f"{finding.summary} {said}",
        saving_ns_per_step=None if is_hint else left_ns,
        verdict_ns=whole_ns,
    )


PASSES: Final[tuple[Callable[[Said, JobFacts], Said], ...]] = (
    _at_lines,
    _idioms,
    _owners,
    _busy_machine,
    _costs,
    _repeats,
    _copies,
)
"""In order of application; findings list the passes that changed them."""
