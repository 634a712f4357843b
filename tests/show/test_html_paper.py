"""The printed report.html and its first page. Needs Chromium, and pypdf to read pages."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import pytest

from lightning_modelprof.place import Place
from lightning_modelprof.report.model import (
    Chart,
    Evidence,
    Finding,
    Series,
    Severity,
    Status,
    StepCard,
    StepPart,
    Unit,
    Verdict,
)
from lightning_modelprof.report.summary import RunSummary, Summary, TraceSummary
from tests.show.test_html_browser import flat, modules, report_of, show
from tests.show.test_show_html import page_of
from tests.support.sample_reports import benchmark_of, statistics

pytestmark = pytest.mark.slow

POINTS_PER_MM = 96 / 25.4
WIDTH, HEIGHT = (round(mm * POINTS_PER_MM) for mm in (210 - 24, 297 - 24))
"""An A4 page without margins."""

CHARTS = (
    ("phase_shares", "Step time by phase", "stacked"),
    ("phases_per_step", "Phase times per step", "stacked"),
    ("step_time", "Step times", "histogram"),
    ("throughput", "Throughput", "line"),
    ("flops_by_phase", "FLOPs per step", "stacked"),
    ("memory_curve", "Memory by step", "line"),
)


def usual():
    """A typical run, with three findings of a few sentences each."""
    phases = ("Dataloader", "Transfer", "Forward", "Backward", "Optimization", "Logging", "Other phases")
    finding = Finding(
        kind="k",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="A finding",
        summary="What is so. " * 12,
        action="What to do. " * 12,
        locations=(Place(file="train.py", line=40, function="Net.training_step", is_exact=True),),
        evidence=tuple(Evidence(label=f"a figure {n}", value=n, unit=Unit.COUNT) for n in range(6)),
    )
    passed = Finding(kind="p", status=Status.CLEAN, title="A check that passed", summary="It did.")
    charts = []
    for name, title, kind in CHARTS:
        x = (0.0,) if name.endswith(("shares", "by_phase")) else tuple(map(float, range(200)))
        keys = phases if kind == "stacked" else ("steps",)
        charts.append(
            Chart(
                id=name,
                title=title,
                kind=kind,
                x_label="step",
                x=x,
                unit=Unit.DURATION_NS,
                series=tuple(
                    Series(key=key.lower(), label=key, values=tuple(1e6 + at for at in x)) for key in keys
                ),
                notes=("All finished steps, clean or not. Each point is the mean of 2 steps.",),
            )
        )
    parts = tuple(StepPart(key=key.lower(), label=key, ns=3e6) for key in phases)
    return report_of(
        flat(),
        modules(50),
        title="lightning-modelprof: Net, 450 training steps (finished)",
        verdict=Verdict(
            kind="input_bound",
            summary="The loop waits for its batches in 40% of its time, most of it in Digits.__getitem__.",
            accounted_ratio=0.9907,
        ),
        step_card=StepCard(step="mean of 87 clean steps", host=parts, device=parts[:3], better=parts[1:]),
        findings=(*(finding,) * 3, *(passed,) * 30),
        charts=tuple(charts),
        summary=Summary(
            run=RunSummary(created=""), benchmark=benchmark_of(12e6, reader_ratio=statistics(0.4))
        ),
    )


@pytest.fixture
def on_paper(browser):
    metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    yield browser
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_first_page_has_verdict_findings_and_charts(on_paper, tmp_path):
    show(on_paper, tmp_path, usual())
    on_paper.execute_script("dispatchEvent(new Event('beforeprint'))")
    ends = on_paper.execute_script(
        "const top = document.querySelector('main').getBoundingClientRect().top;"
        "return arguments[0].map("
        "  name => [...document.querySelectorAll(name)].at(-1).getBoundingClientRect().bottom - top)",
        [".verdict", "figure.step", ".finding", "dl.figures", ".charts"],
    )
    assert ends[0] > 0
    assert ends == sorted(set(ends))
    assert ends[-1] < HEIGHT
    wide = on_paper.execute_script(
        "return [...document.querySelectorAll('.chart, figure.step, .verdict')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_print_is_light_in_any_theme(on_paper, tmp_path, theme):
    show(on_paper, tmp_path, usual())
    colours = on_paper.execute_script(
        "document.documentElement.dataset.theme = arguments[0];"
        "const style = (name) => getComputedStyle(document.querySelector(name));"
        "return [style('body').color, style('body').backgroundColor, style('.finding p').color]",
        theme,
    )
    assert colours == ["rgb(27, 31, 36)", "rgb(255, 255, 255)", "rgb(27, 31, 36)"]


def test_passed_checks_take_one_line(on_paper, tmp_path):
    show(on_paper, tmp_path, usual())
    on_paper.execute_script("dispatchEvent(new Event('beforeprint'))")
    height, line, details = on_paper.execute_script(
        "const [checks] = document.querySelectorAll('.checks');"
        "return [checks.getBoundingClientRect().height, parseFloat(getComputedStyle(checks).lineHeight),"
        " checks.querySelector('dl').getBoundingClientRect().height]"
    )
    assert height < 1.5 * line
    assert details == 0


def test_pdf_has_expected_first_page(browser, tmp_path):
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    show(browser, tmp_path, usual())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    pages = pypdf.PdfReader(io.BytesIO(base64.b64decode(printed["data"]))).pages
    assert [round(float(one) / 72 * 25.4) for one in pages[0].mediabox[2:]] == [210, 297]
    first = " ".join(pages[0].extract_text().split())
    for text in (
        "INPUT-BOUND",
        "mean of 87 clean steps",
        "Warning",
        "Passed 30",
        *(title for _, title, _ in CHARTS),
    ):
        assert text in first, text


def test_page_without_javascript_has_head_and_notice(browser, tmp_path):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(browser, tmp_path, usual())
        text = browser.find_element("tag name", "body").text
        seen = [
            one.is_displayed() for one in browser.find_elements("css selector", "figure.step svg, .finding")
        ]
        drawn = browser.find_elements("css selector", ".drawn, .tools button")
        assert [one for one in drawn if one.is_displayed()] == []
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert seen.count(True) == 1 + 3
    for part in (
        "INPUT-BOUND",
        "A finding",
        "Passed 30",
        "83.3 steps/s",
        "need JavaScript",
        "report.txt next to this page, and lightning-modelprof report DIR --full prints them",
    ):
        assert part in text, part
    assert "Step times" not in text
    show(browser, tmp_path, usual())
    assert "need JavaScript" not in browser.find_element("tag name", "body").text


def notice_of(summary):
    return " ".join(page_of(replace(usual(), summary=summary)).all("noscript")[-1]["text"].split())


def test_javascript_notice_names_command_of_traces():
    assert "analyze TRACE --full" in notice_of(Summary(traces=(TraceSummary(source="a.json"),)))
    assert notice_of(Summary()).endswith("which is off or not allowed here."), (
        "a comparison has no such command"
    )


def test_report_without_charts_starts_with_findings(on_paper, tmp_path):
    show(on_paper, tmp_path, replace(usual(), charts=()))
    end = on_paper.execute_script("return document.querySelector('.finding').getBoundingClientRect().bottom")
    assert end < HEIGHT
