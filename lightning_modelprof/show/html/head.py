"""The head of a report as texts for pages: verdict, findings, key figures, notes and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.definitions import definition
from lightning_modelprof.report.model import (
    CodeChange,
    Evidence,
    Finding,
    Report,
    Severity,
    Slices,
    Status,
    Table,
    Unit,
    Verdict,
)
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.show.findings import little_named, saving_text, shown_evidence, verdict_word
from lightning_modelprof.show.layout import part_absent
from lightning_modelprof.units import format_amount, format_cell, format_duration, percent, three_digits

_SEVERITIES: Final = {
    Severity.CRITICAL: ("critical", "■", "Critical"),
    Severity.WARNING: ("warning", "▲", "Warning"),
    Severity.INFO: ("info", "●", "Hint"),
    None: ("unjudged", "○", "Not judged"),
}
"""Class, symbol and word, so that telling them apart requires neither color nor sight."""


def note_lines(notes: tuple[str, ...]) -> list[str]:
    """Put each note on one line, without the empty ones."""
    return [text for note in notes if (text := printable(" ".join(note.split())))]


def fact_lines(report: Report) -> list[tuple[str, str]]:
    return [(printable(label), printable(value)) for label, value in report.facts]


def setting_lines(report: Report) -> list[tuple[str, str]]:
    """Return name and text of the run's settings; empty for traces, which don't record them."""
    return [(printable(name), printable(value)) for name, value in report.summary.settings.items()]


def absent_lines(tables: Sequence[Table]) -> list[tuple[str, str]]:
    """Return title and reason of tables without rows; tables that share a reason share an untitled line."""
    kept, shared = part_absent([table for table in tables if not table.rows])
    return [
        *((printable(table.title), absent_sentence(table)) for table in kept),
        *(("", printable(sentence)) for sentence in shared),
    ]


def absent_sentence(table: Table) -> str:
    return " ".join([f"{printable(table.absent_reason or '')}.", *note_lines(table.notes)])


def verdict_view(verdict: Verdict | None) -> dict[str, str] | None:
    """Return the first line's word and sentence, and how much of the time is accounted for."""
    if verdict is None:
        return None
    return {
        "kind": printable(verdict.kind),
        "word": verdict_word(verdict),
        "summary": printable(verdict.summary),
        "accounted": little_named(verdict),
        "about": definition("verdict", verdict.kind),
    }


def found_views(
    findings: Sequence[Finding], has_slices: Callable[[Slices], bool] = lambda _: False
) -> list[dict[str, Any]]:
    """Format what the checks found.

    Args:
        has_slices: whether the page's timeline has the slices; by default there is no timeline.
    """
    return [_finding(finding, has_slices) for finding in findings if finding.status is Status.FOUND]


def _finding(finding: Finding, has_slices: Callable[[Slices], bool]) -> dict[str, Any]:
    severity, symbol, word = _SEVERITIES[finding.severity]
    shown = shown_evidence(finding)
    return {
        "kind": printable(finding.kind),
        "severity": severity,
        "symbol": symbol,
        "word": word,
        "title": printable(finding.title),
        "about": definition("rule", finding.kind),
        "summary": printable(finding.summary),
        "action": printable(finding.action),
        "change": None if finding.change is None else _change(finding.change),
        "saving": saving_text(finding),
        "goto": next((_goto(slices) for slices in finding.slices if has_slices(slices)), None),
        "locations": [_location(location) for location in finding.locations],
        "evidence": list(map(_figure, shown)),
        "more_evidence": [_figure(one) for one in finding.evidence if one not in shown],
    }


def _figure(one: Evidence) -> tuple[str, str]:
    return printable(one.label), format_amount(one.value, one.unit)


def _change(change: CodeChange) -> dict[str, Any]:
    """Return what to paste: the lines that a reader sees, and the text that the button copies."""
    lines = change.shown_lines or (("", change.text),)
    label = f"YAML file · {change.label}" if change.is_yaml else change.label
    is_text = all(char.isprintable() or char in "\r\n\t" for char in change.diff)
    return {
        "where": Place(file=change.file, line=change.line).at,
        "label": label,
        "lines": [{"sign": sign, "text": printable(text)} for sign, text in lines],
        "copied": change.diff if change.diff and is_text else printable(change.text),
    }


def _goto(slices: Slices) -> dict[str, str]:
    find = {key: value for key, value in (("name", slices.name), ("kind", slices.kind)) if value}
    return {"to": json.dumps({"view": "trace", "find": find}), "name": printable(slices.name or slices.kind)}


def _location(place: Place) -> dict[str, Any]:
    inner, call = (
        None if one is None else {"file": one.at, "where": one.where} for one in (place.inner, place.call)
    )
    return {"file": place.at, "where": place.where, "inner": inner, "call": call}


def other_rules(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Group passed checks and those that don't apply, each with its code, healthy state and sentence."""
    groups = []
    for status, label in ((Status.CLEAN, "Passed"), (Status.NOT_EVALUATED, "Not checked")):
        rules = [
            (finding.kind, printable(finding.title), _sentence(printable(finding.summary)))
            for finding in findings
            if finding.status is status
        ]
        if rules:
            groups.append({"label": label, "rules": rules})
    return groups


def _sentence(clause: str) -> str:
    """Capitalize a reason, unless it starts with code such as ``torch.compile``, and add a full stop."""
    first = clause.partition(" ")[0].replace("'", "")
    capital = f"{clause[0].upper()}{clause[1:]}" if first.isalpha() else clause
    return capital if capital.endswith((".", "!", "?")) else f"{capital}."


class Headline(Record, frozen=True):
    """A number at the top of the page."""

    label: str
    value: str
    unit: str
    detail: str

    @property
    def about(self) -> str:
        return definition("figure", self.label)


def key_figures(summary: Summary) -> list[Headline]:
    """Return the figures that readers look for first, without those that weren't measured."""
    run, benchmark, flops = summary.run, summary.benchmark, summary.flops
    figures = []
    if benchmark is not None:
        cost, waited = benchmark.batch_cost_ns, benchmark.reader_cost_ns
        value, _, unit = format_duration(cost.avg).partition(" ")
        spread = f"p50 {format_duration(cost.p50)}, p99 {format_duration(cost.p99)}"
        figures.append(Headline("batch_cost", value, unit, spread))
        if run is not None and benchmark.steps_per_s is not None:
            samples = benchmark.samples_per_s
            rate = "" if samples is None else f"{three_digits(samples.avg)} {printable(run.samples_unit)}"
            figures.append(Headline("ips", three_digits(benchmark.steps_per_s.avg), run.steps_unit, rate))
        if benchmark.reader_ratio is not None:
            waiting = "" if waited is None else f"{format_duration(waited.avg)} waiting for data"
            figures.append(Headline("Reader Ratio", percent(benchmark.reader_ratio.avg), "", waiting))
    if flops is not None and flops.flops_per_s is not None:
        value, _, unit = format_cell(flops.flops_per_s, Unit.FLOPS_PER_S).rpartition(" ")
        is_share = flops.mfu is not None and flops.mfu <= 1  # above 1, the peak is too low
        detail = f"MFU {percent(flops.mfu)}" if is_share else ""
        figures.append(Headline("FLOP/s", value, unit, detail))
    return figures


def file_lines(summary: Summary) -> list[tuple[str, str]]:
    """List the files in the run's directory, or the analyzed traces, and what each is for."""
    files = [(printable(trace.source), "the analyzed trace") for trace in summary.traces]
    if summary.run is None:
        return files
    files += [
        ("report.json", "all figures on this page at full precision, for scripts"),
        ("report.txt", "the tables as plain text"),
        ("run.json", "the measurements; lightning-modelprof report rebuilds everything from them"),
    ]
    for window in summary.windows:
        if window.trace_file:
            what = f"profiler window {window.index}, for Perfetto or chrome://tracing"
            files.append((printable(window.trace_file), what))
    return files
