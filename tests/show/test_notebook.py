"""A fit's output in a notebook: one picture and a link, in a few kilobytes, in light and dark themes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from lightning_modelprof.report.model import Status
from lightning_modelprof.show.notebook import report_card, show_in_notebook
from tests.show.test_short_report import busy, found, two_ranks
from tests.support.fits import run_fit

PAGES = {
    "light": ("rgb(20, 20, 20)", "rgb(255, 255, 255)"),
    "dark": ("rgb(230, 230, 230)", "rgb(17, 17, 17)"),
}
NAMES = "x" * 10**6


@pytest.fixture
def cell(monkeypatch):
    """Outputs of the running cell."""
    shown = []
    shell = SimpleNamespace(kernel=object(), execution_count=1)
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    display = SimpleNamespace(display=lambda data, raw: shown.append(data))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def shown_by(report, cell, **arguments):
    assert show_in_notebook(report, **arguments)
    return cell.pop()["text/html"]


def endless(report):
    """The same report with a million characters in each text."""
    findings = tuple(
        replace(
            one,
            title=NAMES,
            action=NAMES,
            locations=tuple(replace(place, file=f"/{NAMES}", function=NAMES) for place in one.locations),
        )
        if one.status is Status.FOUND
        else one
        for one in report.findings
    )
    parts = tuple(replace(part, label=NAMES) for part in report.step_card.host)
    card = replace(report.step_card, step=NAMES, host=parts)
    verdict = replace(report.verdict, summary=NAMES)
    return replace(report, title=NAMES, findings=findings, step_card=card, verdict=verdict)


@pytest.mark.parametrize("make", [found, busy, two_ranks])
def test_fit_adds_one_small_picture(make, cell):
    html = shown_by(make(None), cell, page="modelprof/report.html")
    assert html.count("<svg") == 1
    assert "<iframe" not in html
    assert len(html.encode()) < 15_000
    assert len(shown_by(endless(make(None)), cell, page="x" * 4_096).encode()) < 30_000


def test_cell_value_is_whole_page():
    html = report_card(found(None))
    assert found(None)._repr_html_() == html
    assert html.partition("<iframe")[0].count("<svg") == 1
    assert "srcdoc=" in html


def test_output_names_and_links_page(cell, tmp_path):
    html = shown_by(found(None), cell, page="my runs/modelprof/report.html")
    assert 'href="my%20runs/modelprof/report.html"' in html
    assert ">my runs/modelprof/report.html</a>" in html
    assert "callback.report</code>" in html
    elsewhere = tmp_path / "it's & more" / "report.html"
    assert f'href="file://{quote(str(elsewhere))}"' in shown_by(found(None), cell, page=str(elsewhere))
    assert "<a " not in shown_by(found(None), cell)
    assert "profile.report</code>" in shown_by(found(None), cell, value="profile.report")


def test_pictures_in_one_notebook_keep_their_colours(cell):
    """Patterns with equal names are equal, because a page has only one per name."""
    pages = "".join(shown_by(make(None), cell) for make in (found, busy, two_ranks))
    patterns = re.findall(r'<pattern id="([^"]+)".*?</pattern>', pages, re.DOTALL)
    texts = re.findall(r'<pattern id="[^"]+".*?</pattern>', pages, re.DOTALL)
    assert len(set(texts)) == len(set(patterns))


@pytest.mark.slow
def test_fit_links_its_page(cell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_fit(tmp_path, active=0, terminal=True)
    html = cell.pop()["text/html"]
    assert 'href="modelprof/report.html"' in html
    assert (tmp_path / "modelprof" / "report.html").exists()
    assert len(html) < 15_000


@pytest.mark.slow
def test_fit_without_files_names_its_report(cell, tmp_path):
    run_fit(tmp_path, active=0, terminal=True, files=False)
    html = cell.pop()["text/html"]
    assert "<a " not in html
    assert "callback.report</code>" in html


@pytest.mark.slow
@pytest.mark.parametrize("theme", PAGES)
@pytest.mark.parametrize("width", [1000, 420])
def test_output_fits_width_and_theme(cell, tmp_path, browser, theme, width):
    color, background = PAGES[theme]
    html = shown_by(found(None), cell, page="modelprof/report.html")
    page = tmp_path / "cell.html"
    page.write_text(f'<body style="margin:0;color:{color};background:{background}">{html}</body>')
    browser.set_window_size(width, 900)
    try:
        browser.get(page.as_uri())
        pictures, colours, overflow = browser.execute_script(
            """const boxes = [...document.querySelectorAll("svg")].map((one) => one.getBoundingClientRect());
            const texts = [...document.querySelectorAll("a, code, div, svg text[fill=currentColor]")];
            const colours = new Set(texts.map((one) => getComputedStyle(one).color));
            const page = document.documentElement, overflow = page.scrollWidth - page.clientWidth;
            return [boxes.map((box) => [box.width, box.height]), [...colours], overflow];"""
        )
    finally:
        browser.set_window_size(1400, 1000)
    [(wide, high)] = pictures
    assert 0.6 * width < wide <= 820
    assert high < 240
    assert colours == [color]
    assert overflow <= 0
