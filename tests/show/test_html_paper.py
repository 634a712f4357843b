"""report.html on paper: what is on its first page. Needs Chromium, and pypdf to read pages."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import pytest

from lightning_modelprof.report.model import (
    Chart,
    Finding,
    Series,
    Severity,
    Status,
    StepCard,
    StepPart,
    Unit,
    Verdict,
)
from lightning_modelprof.report.summary import RunSummary, Summary
from tests.show.test_html_browser import flat, modules, report_of, show
from tests.support.sample_reports import benchmark_of, statistics

pytestmark = pytest.mark.slow

POINTS_PER_MM = 96 / 25.4
WIDTH, HEIGHT = (round(mm * POINTS_PER_MM) for mm in (210 - 24, 297 - 24))
"""Of an A4 page without its margins."""

CHARTS = (
    ("phase_shares", "Step time by phase", "stacked"),
    ("phases_per_step", "Phase times per step", "stacked"),
    ("step_time", "Step times", "histogram"),
    ("throughput", "Throughput", "line"),
    ("flops_by_phase", "FLOPs per step", "stacked"),
    ("memory_curve", "Memory by step", "line"),
)


def usual():
    """A run with all that a usual one has, and long findings."""
    phases = ("Dataloader", "Transfer", "Forward", "Backward", "Optimization", "Logging", "Other phases")
    finding = Finding(
        kind="k",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="A finding",
        summary="What is so. " * 30,
        action="What to do. " * 30,
    )
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
        findings=(finding,) * 6,
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


def test_verdict_step_card_and_charts_are_on_the_first_page(on_paper, tmp_path):
    show(on_paper, tmp_path, usual())
    on_paper.execute_script("dispatchEvent(new Event('beforeprint'))")
    ends = on_paper.execute_script(
        "const top = document.querySelector('main').getBoundingClientRect().top;"
        "return Object.fromEntries(['.verdict', 'figure.step', 'dl.figures', '.charts', '.finding'].map("
        "  name => [name, document.querySelector(name).getBoundingClientRect().bottom - top]))"
    )
    assert 0 < ends[".verdict"] < ends["figure.step"] < ends["dl.figures"] < ends[".charts"] < HEIGHT
    assert ends[".finding"] > ends[".charts"]
    wide = on_paper.execute_script(
        "return [...document.querySelectorAll('.chart, figure.step, .verdict')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_paper_is_light_whatever_the_theme_is(on_paper, tmp_path, theme):
    show(on_paper, tmp_path, usual())
    colours = on_paper.execute_script(
        "document.documentElement.dataset.theme = arguments[0];"
        "const style = (name) => getComputedStyle(document.querySelector(name));"
        "return [style('body').color, style('body').backgroundColor, style('.finding p').color]",
        theme,
    )
    assert colours == ["rgb(27, 31, 36)", "rgb(255, 255, 255)", "rgb(27, 31, 36)"]


def test_the_pdf_says_so(browser, tmp_path):
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    show(browser, tmp_path, usual())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    pages = pypdf.PdfReader(io.BytesIO(base64.b64decode(printed["data"]))).pages
    assert [round(float(one) / 72 * 25.4) for one in pages[0].mediabox[2:]] == [210, 297]
    first = " ".join(pages[0].extract_text().split())
    for text in ("INPUT-BOUND", "mean of 87 clean steps", *(title for _, title, _ in CHARTS)):
        assert text in first, text


def test_a_report_without_charts_begins_with_its_findings(on_paper, tmp_path):
    show(on_paper, tmp_path, replace(usual(), charts=()))
    end = on_paper.execute_script("return document.querySelector('.finding').getBoundingClientRect().bottom")
    assert end < HEIGHT
