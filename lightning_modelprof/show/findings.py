"""The verdict and the findings in words, the same in every text output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_modelprof.errors import printable
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import (
    OTHER_TRACES,
    Evidence,
    Finding,
    Report,
    Severity,
    Status,
    Verdict,
)
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.show.step_card import StepNumbers
from lightning_modelprof.units import (
    format_amount,
    format_duration,
    milliseconds,
    percent,
    rate_with_error,
    three_digits,
)

MOST_FIGURES = 4
"""Figures shown with a finding; others are folded or left out."""

_MAX_PLACES = 3
"""Places shown per finding; files have all."""

_NAMED = 0.90
"""Share of the wall time in named phases that needs no mention."""

_WORDS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "WARNING", Severity.INFO: "HINT"}


class FindingText(Record, frozen=True):
    """One finding, line by line.

    Attributes:
        head: severity, title, and saving.
        severity: ``None`` if too little is known to judge.
        lines: the facts, the action, the key figures, the places.
    """

    head: str
    severity: Severity | None
    lines: tuple[str, ...]


def verdict_word(verdict: Verdict) -> str:
    """Return its kind for readers: ``INPUT-BOUND``, ``CANNOT TELL``."""
    return printable(verdict.word)


def verdict_line(verdict: Verdict) -> str:
    return printable(
        " ".join(filter(None, (f"{verdict_word(verdict)}:", verdict.summary, little_named(verdict))))
    )


def little_named(verdict: Verdict) -> str:
    """Return how much of the wall time is in named phases if that's little, else ``""``."""
    named = verdict.accounted_ratio
    return (
        ""
        if named is None or named >= _NAMED
        else f"Only {percent(named)} of the wall time is in named phases."
    )


def brief_line(report: Report, place: str = "") -> str:
    """Write the report in one line: its title, speed, verdict and place.

    Args:
        report: a report on a run, on traces or on a comparison.
        place: where its files are; ``""`` for none.
    """
    words = [report.title]
    if report.summary.run is not None:
        words = [f"{report.title}: {_rate(report.summary) or 'no clean step'}."]
    if report.verdict is not None:
        words.append(verdict_line(report.verdict))
    if place:
        words.append(f"Files: {place}")
    return printable(" ".join(words))


def brief_lines(report: Report) -> list[str]:
    """Return a line for the report, and one for each other group of traces with a verdict."""
    others = [f"lightning-modelprof: {value}" for label, value in report.facts if label == OTHER_TRACES]
    damaged = [one for one in report.summary.traces if one.is_damaged]
    damage = "".join(f" Warning: {one.source}: {one.checks[0]}" for one in damaged)
    return [printable(brief_line(report) + damage), *map(printable, others)]


def list_line(report: Report, place: str) -> str:
    """Write a saved run in one line: time, model, speed, verdict, directory."""
    run = report.summary.run
    assert run is not None
    verdict = "" if report.verdict is None else verdict_word(report.verdict)
    words = (
        f"{run.created[:16].replace('T', ' ')}",
        f"{run.model:<20}",
        f"{_rate(report.summary) or 'no clean step':<24}",
        f"{verdict:<20}",
        place,
    )
    return printable("  ".join(words))


def _rate(summary: Summary) -> str:
    """Return the steps per second with their error, ``19.7 ± 0.9 steps/s``; ``""`` if there are none."""
    rate = None if summary.benchmark is None else summary.benchmark.steps_per_s
    if summary.run is None or rate is None or not rate.avg:
        return ""
    return f"{rate_with_error(rate.avg, rate.standard_error)} {summary.run.steps_unit}"


def speed_line(report: Report) -> str:
    """Return the speed, its uncertainty, and what it covers."""
    run, figures = report.summary.run, report.summary.benchmark
    title = printable(report.title).removeprefix("lightning-modelprof: ")
    words = []
    if rate := _rate(report.summary):
        words.append(rate)
    if run is not None and figures is not None:
        if figures.samples_per_s is not None:
            words.append(f"{three_digits(figures.samples_per_s.avg)} {printable(run.samples_unit)}")
        words.append(f"p99 step time {format_duration(figures.batch_cost_ns.p99)}")
    if report.step_card is not None:
        words += [f"{label} {format_amount(value, unit)}" for label, value, unit in report.step_card.figures]
        if figures is None:
            words.insert(0, f"{StepNumbers(report.step_card).step} ms per step")
    return " · ".join([*words, title])


def saving_text(finding: Finding) -> str:
    """Return the possible saving: ``−12.3 ms/step``, ``up to −12% of the loop``, or ``""`` if unknown."""
    saving = finding.saving_ns_per_step
    if saving is None:
        return ""
    amount = (
        f"−{milliseconds(saving)}/step"
        if finding.share_of == "step"
        else f"−{percent(finding.share)} of the loop"
    )
    return f"{finding.saving_is} {amount}".strip()


def shown_evidence(finding: Finding) -> tuple[Evidence, ...]:
    """Return a finding's key figures, which are shown with it; report.json has all."""
    return tuple(one for one in finding.evidence if one.value is not None)[:MOST_FIGURES]


def evidence_text(finding: Finding) -> str:
    return " · ".join(f"{one.label} {format_amount(one.value, one.unit)}" for one in shown_evidence(finding))


def found_texts(findings: Sequence[Finding]) -> Iterator[FindingText]:
    """Yield the texts of the findings, in their order."""
    for finding in findings:
        if finding.status is Status.FOUND:
            yield _text(finding)


def passed_line(findings: Sequence[Finding]) -> str:
    """List the healthy states of the passed checks; ``""`` if there are none."""
    names = [one.title for one in findings if one.status is Status.CLEAN]
    return f"Passed: {' · '.join(names)}." if names else ""


def summary_line(findings: Sequence[Finding]) -> str:
    """Count the checks by result; ``""`` without checks."""
    if not findings:
        return ""
    found, clean, silent = (
        sum(finding.status is status for finding in findings)
        for status in (Status.FOUND, Status.CLEAN, Status.NOT_EVALUATED)
    )
    count = f"{found} finding{'' if found == 1 else 's'}"
    return f"{count}, {clean} passed, {silent} not checked; report.json lists all checks."


def _text(finding: Finding) -> FindingText:
    word = "not judged" if finding.severity is None else _WORDS[finding.severity]
    head = f"[{word}] {finding.title} ({finding.kind})"
    if gain := saving_text(finding):
        head += f": {gain}"
    lines = [finding.summary]
    if finding.action:
        lines.append(f"Fix: {finding.action}")
    if figures := evidence_text(finding):
        lines.append(f"Evidence: {figures}")
    places = [place for place in map(_place, finding.locations) if place]
    lines += [f"Where: {place}" for place in places[:_MAX_PLACES]]
    if len(places) > _MAX_PLACES:
        lines.append(f"Where: {len(places) - _MAX_PLACES} more places")
    return FindingText(printable(head), finding.severity, tuple(printable(line) for line in lines))


def _place(location: Place) -> str:
    text = str(location)
    if location.inner is not None and (inner := str(location.inner)):
        text += f" → {inner} (where most of the time goes)"
    if location.call is not None and (call := str(location.call)):
        text += f", called from {call}"
    return text
