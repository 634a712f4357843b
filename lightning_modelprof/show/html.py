"""The report as one page for a browser: a single file that needs no network and asks nothing of one."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from lightning_modelprof.report.model import (
    Finding,
    Location,
    Report,
    Severity,
    Status,
    Unit,
    Verdict,
)
from lightning_modelprof.show.findings import place_of
from lightning_modelprof.show.format import DASH, format_amount, format_cell, format_duration, one_line
from lightning_modelprof.show.grid import part_absent
from lightning_modelprof.show.html_chart import chart_view
from lightning_modelprof.show.html_flame import flame_view
from lightning_modelprof.show.html_table import table_view

_FOLDER: Final = Path(__file__).with_name("html")

_SEVERITIES: Final = {
    Severity.CRITICAL: ("critical", "■", "Critical"),
    Severity.WARNING: ("warning", "▲", "Warning"),
    Severity.INFO: ("info", "●", "Info"),
    None: ("unjudged", "○", "Not judged"),
}
"""Class, symbol and word, so that neither colour nor sight is needed to tell them apart."""


def render_html(report: Report) -> bytes:
    """The whole report as one HTML file.

    The page holds its styles, its script and its data, and a policy that keeps the browser from loading,
    sending or running anything else. Every text of the report is escaped. Without the script it is
    complete, only nothing sorts, searches or folds.

    Args:
        report: what to write.

    Returns:
        UTF-8, the same bytes for the same report.
    """
    kept, shared = part_absent(report.tables)
    found = [finding for finding in report.findings if finding.status is Status.FOUND]
    script = _text("report.js") + _text("flame.js")
    page = _template().render(
        title=one_line(report.title),
        policy=_policy(script),
        style=_text("report.css"),
        script=script,
        verdict=None if report.verdict is None else _verdict(report.verdict),
        findings=[_finding(finding) for finding in found],
        others=_other_rules(report.findings),
        figures=_key_figures(report.sections),
        facts=[(one_line(label), one_line(value)) for label, value in report.facts],
        charts=[view for chart in report.charts if (view := chart_view(chart)) is not None],
        flames=[drawn for flame in report.flames if (drawn := flame_view(flame)) is not None],
        tables=[table_view(table) for table in kept if table.rows],
        absent=[
            *(
                (one_line(table.title), _sentence(table.absent_reason, table.notes))
                for table in kept
                if not table.rows
            ),
            *(("", one_line(sentence)) for sentence in shared),
        ],
        notes=_lines(report.notes),
        files=_files(report.sections),
    )
    # Half a surrogate pair, as in some file names, has no UTF-8.
    return page.encode("utf-8", "backslashreplace")


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing is loaded from anywhere, and only the page's own script runs: it is named by its hash.

    Source: Content Security Policy Level 3, W3C.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def _lines(notes: tuple[str, ...]) -> list[str]:
    """Notes on one line each, without the empty ones."""
    return [text for note in notes if (text := one_line(" ".join(note.split())))]


def _sentence(reason: str | None, notes: tuple[str, ...]) -> str:
    return " ".join([f"{one_line(reason or '')}.", *_lines(notes)])


def _verdict(verdict: Verdict) -> dict[str, str]:
    accounted = verdict.accounted_ratio
    return {
        "kind": one_line(verdict.kind),
        "word": one_line(verdict.kind).upper().replace("_BOUND", "-BOUND").replace("_", " "),
        "summary": one_line(verdict.summary),
        "accounted": ""
        if accounted is None
        else f"{format_cell(accounted, Unit.RATIO)} % of the wall time is in named phases.",
    }


def _finding(finding: Finding) -> dict[str, Any]:
    severity, symbol, word = _SEVERITIES[finding.severity]
    saving = finding.saving_ns_per_step
    return {
        "kind": one_line(finding.kind),
        "severity": severity,
        "symbol": symbol,
        "word": word,
        "title": one_line(finding.title),
        "summary": one_line(finding.summary),
        "action": one_line(finding.action),
        "saving": "" if saving is None else format_duration(saving),
        "locations": [_location(location) for location in finding.locations],
        "evidence": [
            (one_line(item.label), format_amount(item.value, item.unit)) for item in finding.evidence
        ],
    }


def _location(location: Location) -> dict[str, Any]:
    """``file:line``, as editors understand it, and where that is."""
    where = place_of(location)
    inner = None if location.inner is None else place_of(location.inner)
    return {"file": where.file, "where": where.where, "inner": inner}


def _other_rules(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """The rules that found nothing and those that could not say, each with its sentence."""
    groups = []
    for status, label in ((Status.CLEAN, "Clean"), (Status.NOT_EVALUATED, "Not evaluated")):
        rules = [
            (one_line(finding.title), one_line(finding.summary))
            for finding in findings
            if finding.status is status
        ]
        if rules:
            groups.append({"label": label, "rules": rules})
    return groups


@dataclass(frozen=True, slots=True)
class _Figure:
    """One of the numbers at the top."""

    label: str
    value: str
    unit: str
    detail: str


def _key_figures(sections: Mapping[str, Any]) -> list[_Figure]:
    """The figures that a reader looks for first; those that were not measured are not there."""
    benchmark = sections.get("benchmark") or {}
    cost, ips = benchmark.get("batch_cost_ns") or {}, benchmark.get("ips") or {}
    samples, flops = benchmark.get("samples_per_s") or {}, sections.get("flops") or {}
    figures = []
    if "avg" in cost:
        value, _, unit = format_duration(cost["avg"]).partition(" ")
        spread = f"p50 {format_duration(cost.get('p50'))}, p99 {format_duration(cost.get('p99'))}"
        figures.append(_Figure("batch_cost", value, unit, spread))
    if "avg" in ips:
        rate = f"{format_cell(samples['avg'], Unit.RATE)} {samples['unit']}" if "avg" in samples else ""
        figures.append(
            _Figure("ips", format_cell(ips["avg"], Unit.RATE), one_line(ips["unit"]), one_line(rate))
        )
    if benchmark.get("reader_ratio") is not None:
        waiting = f"{format_duration((benchmark.get('reader_cost_ns') or {}).get('avg'))} wait for a batch"
        share = format_cell(benchmark["reader_ratio"], Unit.RATIO)
        figures.append(_Figure("Reader Ratio", share, "%", "" if waiting.startswith(DASH) else waiting))
    if flops.get("flops_per_s") is not None:
        value, _, unit = format_cell(flops["flops_per_s"], Unit.FLOPS_PER_S).rpartition(" ")
        mfu, matmul = flops.get("mfu"), flops.get("share_of_matmul_rate")
        detail = f"MFU {format_cell(mfu, Unit.RATIO)} %" if mfu is not None else ""
        if not detail and matmul is not None:
            detail = f"{format_cell(matmul, Unit.RATIO)} % of the measured matmul rate"
        figures.append(_Figure("FLOP/s", value, unit, detail))
    return figures


def _files(sections: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What lies in the run's folder, or which traces were read, and what each is for."""
    traces = sections.get("traces") or ()
    files = [(one_line(str(trace["source"])), "the trace that was analyzed") for trace in traces]
    if "windows" not in sections:
        return files
    files += [
        ("report.json", "every figure of this page, not rounded, for scripts"),
        ("report.txt", "the tables as plain text"),
        ("run.json", "what was measured; lightning-modelprof report derives everything from it again"),
    ]
    for window in sections["windows"]:
        if window.get("trace_file"):
            what = f"profiler window {window.get('index')}, for Perfetto or chrome://tracing"
            files.append((one_line(window["trace_file"]), what))
    return files
