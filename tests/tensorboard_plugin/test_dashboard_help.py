"""The help of the dashboard in a real browser, on the parts of a real report. Needs Chromium and selenium."""

from __future__ import annotations

import json
import time

import pytest

from lightning_modelprof.report.model import Column, Finding, Report, Severity, Status, Table, Unit, Verdict
from lightning_modelprof.show.html.help.definitions import definitions_document
from lightning_modelprof.show.html.parts import (
    chart_html,
    figures_html,
    findings_html,
    table_html,
    verdict_html,
)
from tests.support.dashboard_page import HTML, SCRIPT, serve, watched
from tests.support.fits import loader, run_fit

ActionChains = pytest.importorskip(
    "selenium.webdriver.common.action_chains", reason="selenium is not installed"
).ActionChains
Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys

PAGE = """<!DOCTYPE html><html lang="en" data-theme="light"><meta charset="utf-8"><title>help</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="html/parts.css">
<link rel="stylesheet" href="html/help/help.css"><link rel="stylesheet" href="help_page.css">
<style>body {{ background: var(--page); color: var(--text); font: 14px/1.5 var(--sans) }}</style>
<div id="root">{body}</div><script type="module" src="start.js"></script>"""

START = """import {{ connectParts }} from "./html/parts.js";
import {{ attachHelp }} from "./html/help/help.js"; import {{ HelpPage }} from "./help_page.js";
const root = document.getElementById("root"); connectParts(root);
window.attach = () => attachHelp(root, known, (anchor, from) => page.open(anchor, from));
const known = {definitions}; const page = new HelpPage(known); window.attach();"""

HOSTILE = "<img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    return run_fit(folder, data=loader(200), flops=True, skip_first=6, active=0).report


@pytest.fixture(autouse=True, scope="module")
def size(browser):
    browser.set_window_size(1300, 900)


@pytest.fixture(scope="module")
def site():
    """Address of the page, and its files."""
    files = {}
    with serve(files) as address:
        yield address, files


@pytest.fixture
def show(browser, site):
    """Opens a page with these parts."""
    address, files = site

    def opened(*parts):
        files[""] = (PAGE.format(body="".join(parts)).encode(), HTML)
        files["start.js"] = (START.format(definitions=json.dumps(definitions_document())).encode(), SCRIPT)
        browser.get(address)
        wait(lambda: browser.execute_script("return typeof window.attach") == "function")
        return browser

    with watched(browser, address):
        yield opened


def wait(is_so, seconds=10):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def table(report, name):
    return next(one for one in report.tables if one.id == name)


def card(browser):
    """Heading and text of the open card; ``None`` if there is none."""
    return browser.execute_script(
        "const card = document.querySelector('.help-card:popover-open');"
        "return card && [card.querySelector('h3').textContent, card.querySelector('.help-text').textContent]"
    )


def focused(browser):
    return browser.execute_script(
        "const one = document.activeElement; return one.getAttribute('aria-label') || one.textContent"
    )


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


def labels(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('.help')].map(one => one.getAttribute('aria-label'))"
    )


def test_every_heading_has_its_button_once(show, report):
    parts = [table_html(one, is_open=one.id != "callbacks") for one in report.tables if one.rows]
    charts = [chart_html(one) for one in report.charts]
    browser = show(figures_html(report), verdict_html(report), findings_html(report), *charts, *parts)
    browser.execute_script("window.attach()")
    found = labels(browser)
    for one in (*report.tables, *report.charts):
        if not hasattr(one, "rows") or one.rows:
            assert f"What is {one.title}?" in found
    assert {"What is batch_cost?", "What is ips?", "What is Reader Ratio?"} <= set(found)
    buttons = browser.execute_script("return document.querySelectorAll('section.table .help').length")
    assert buttons == len(parts)


def test_by_keyboard(show, report):
    browser = show(table_html(table(report, "perf_summary")))
    browser.execute_script("document.querySelector('.help').focus()")
    assert focused(browser) == "What is Perf Summary?"
    press(browser, Keys.ENTER)
    heading, text = card(browser)
    assert heading == "Perf Summary"
    assert "overlapping batch means" in text
    topics = browser.execute_script(
        "return [...document.querySelectorAll('.help-topics button')].map(one => one.textContent)"
    )
    assert {"avg", "std. error", "ips (steps/s)", "Reader Ratio (%)"} <= set(topics)
    browser.execute_script(
        "[...document.querySelectorAll('.help-topics button')]"
        ".find(one => one.textContent === 'std. error').focus()"
    )
    press(browser, Keys.ENTER)
    assert card(browser)[0] == "std. error"
    assert card(browser)[1].startswith("std. error: standard error of avg.")
    press(browser, Keys.ESCAPE)
    assert card(browser) is None
    assert focused(browser) == "What is Perf Summary?"


def test_a_question_mark_at_a_column(show, report):
    browser = show(table_html(table(report, "phases")))
    browser.execute_script(
        "[...document.querySelectorAll('thead button')].find(one => one.textContent === 'Steps').focus()"
    )
    press(browser, "?")
    assert card(browser) == ["Steps", "Steps: steps in which the phase took any time."]
    press(browser, Keys.ESCAPE)
    assert focused(browser) == "Steps"
    # Elsewhere in the table it is that of the table.
    browser.execute_script("document.querySelector('.scroll').focus()")
    press(browser, "?")
    assert card(browser)[0] == "Phases"


def test_a_pointer_that_rests_on_a_phase(show, report):
    browser = show(table_html(table(report, "phases")))
    row = browser.execute_script(
        "return [...document.querySelectorAll('tbody th')].find(one => one.textContent.trim() === 'Forward')"
    )
    ActionChains(browser).move_to_element(row).perform()
    wait(lambda: card(browser) is not None)
    assert card(browser)[0] == "Forward"
    assert card(browser)[1].startswith("Forward: training_step")
    assert "What" not in focused(browser)  # the focus stays where it was
    ActionChains(browser).move_by_offset(500, 300).perform()
    wait(lambda: card(browser) is None)


def test_the_button_in_a_summary_does_not_fold(show, report):
    browser = show(table_html(table(report, "perf_summary"), is_open=False))
    browser.execute_script("document.querySelector('summary .help').click()")
    assert card(browser)[0] == "Perf Summary"
    assert not browser.execute_script("return document.querySelector('details').open")


def test_all_definitions_and_their_search(show, report):
    browser = show(table_html(table(report, "flops")))
    browser.execute_script("document.querySelector('.help').click()")
    browser.execute_script("document.querySelector('.help-more').click()")
    shown = (
        "return [...document.querySelectorAll('.help-body section')].filter(one => !one.hidden)"
        ".map(one => one.querySelector('h3').textContent)"
    )
    everything = browser.execute_script(shown)
    assert {"Words", "FLOPs", "Kernel Summary", "Stages"} <= set(everything)
    at_top = browser.execute_script(
        "const body = document.querySelector('.help-body'), top = body.getBoundingClientRect().top;"
        "return Math.abs(body.querySelector('[data-anchor=flops]').getBoundingClientRect().top - top)"
    )
    assert at_top < 5
    press(browser, *"nccl")  # the search has the focus
    found = browser.execute_script(shown)
    assert "Distributed Summary" in found
    assert set(found) < set(everything)
    assert browser.execute_script("return CSS.highlights.get('help-found').size") > 0
    press(browser, Keys.ESCAPE)  # empties the search, as browsers do
    press(browser, Keys.ESCAPE)
    wait(lambda: not browser.execute_script("return document.querySelector('.help-page').open"))
    wait(lambda: focused(browser) == "What is FLOPs?")


def test_rules_and_verdicts(show):
    finding = Finding(
        kind="launch_bound",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="The host is late",
        summary="",
    )
    verdict = Verdict(kind="host_bound", summary="", accounted_ratio=None)
    report = Report(
        title="", facts=(), tables=(), notes=(), sections={}, findings=(finding,), verdict=verdict
    )
    browser = show(verdict_html(report), findings_html(report))
    assert labels(browser) == ["What is HOST-BOUND?", "What is The host is late?"]
    browser.execute_script("document.querySelector('article .help').click()")
    assert "GPU idle time while the CPU hasn't launched work" in card(browser)[1]


def test_hostile_labels_and_tables_nobody_defined(show):
    columns = (Column("a", HOSTILE), Column("b", "Calls", Unit.COUNT))
    own = Table(id="kernels", title=HOSTILE, columns=columns, rows=((HOSTILE, 1),))
    unknown = Table(id="constructor", title="Own", columns=columns, rows=((HOSTILE, 1),))
    browser = show(table_html(own), table_html(unknown))
    assert labels(browser) == [f"What is {HOSTILE}?"]
    browser.execute_script("document.querySelector('.help').click()")
    assert card(browser)[0] == HOSTILE
    assert browser.execute_script("return document.images.length") == 0
    assert browser.title == "help"


def test_no_definitions_no_help(show, report, monkeypatch):
    monkeypatch.setattr(
        "tests.tensorboard_plugin.test_dashboard_help.definitions_document",
        lambda: {"sections": {}, "figures": {}},
    )
    browser = show(table_html(table(report, "phases")))
    assert labels(browser) == []
    assert browser.execute_script("return document.querySelectorAll('.has-help').length") == 0


def test_the_card_stays_in_the_page(show, report):
    """Wherever the button is, at the bottom of a small page too."""
    browser = show("<div style='height: 70rem'></div>", table_html(table(report, "perf_summary")))
    browser.execute_script("document.querySelector('.help').scrollIntoView({block: 'end'})")
    browser.execute_script("document.querySelector('.help').click()")
    box = browser.execute_script(
        "const box = document.querySelector('.help-card').getBoundingClientRect();"
        "return [box.left >= 0, box.top >= 0, box.right <= innerWidth, box.bottom <= innerHeight,"
        "box.height > 100]"
    )
    assert all(box)
