"""Help cards of report.html: those of the dashboard, with the definitions that its own parts need."""

from __future__ import annotations

import json
import re

import pytest

from lightning_modelprof.show.html.head import key_figures
from lightning_modelprof.show.html.help.definitions import (
    as_data_block,
    definitions_document,
    report_definitions,
)
from lightning_modelprof.show.html.page import render_html
from tests.show.test_html_browser import Keys, flat, report_of, show
from tests.support.fits import loader, run_fit

MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    return run_fit(folder, data=loader(200), flops=True, skip_first=6, active=3).report


def plain(html):
    return " ".join(re.sub("<[^>]+>", " ", html).split())


def test_definitions_are_those_of_the_dashboard(report):
    """A term without its name, a section without its terms; nothing that no part of the page is about."""
    shown = [table for table in report.tables if table.rows]
    own, whole = report_definitions(report, shown), definitions_document()
    assert len(own["figures"]) > 60
    for key, anchor in own["figures"].items():
        text = plain(own["sections"][anchor]["html"])
        assert text in plain(whole["sections"][whole["figures"][key]]["html"]), key
        assert ("#" in anchor) == ("#" in whole["figures"][key])
    assert set(own["figures"].values()) == set(own["sections"])
    tables = {re.sub(r"_\d+$", "", table.id) for table in shown}
    names = {key.split(":")[1] for key in own["figures"] if key.startswith(("table:", "column:", "row:"))}
    assert names <= tables
    wanted = {
        f"figure:{one.label.lower().replace(' ', '_').replace('/', '_')}"
        for one in key_figures(report.sections)
    }
    assert wanted <= set(own["figures"])


def test_a_usual_report_grows_by_little(report):
    with_help = render_html(report)
    block = re.search(
        rb'<script type="application/json" id="definitions">(.*?)</script>', with_help, re.DOTALL
    )
    assert len(block[1]) < MOST_BYTES
    assert with_help == render_html(report)


def test_a_report_of_nothing_defined_has_no_definitions():
    assert b'id="definitions"' not in render_html(report_of(flat()))


def test_no_text_ends_the_block():
    hostile = {"a": "</script><script>alert(1)</script><!-- <SCRIPT> ]]> \u2028"}
    block = as_data_block(hostile)
    assert json.loads(block) == hostile
    assert not re.search("</|<!|<s", block, re.IGNORECASE)


@pytest.mark.slow
def test_a_card_in_the_report(browser, tmp_path, report):
    show(browser, tmp_path, report)
    card = "return document.querySelector('.help-card:popover-open')?.innerText ?? ''"
    button = browser.find_element("css selector", "#table-phases .help")
    assert button.accessible_name == "What is Phases?"
    button.send_keys(Keys.ENTER)
    text = " ".join(browser.execute_script(card).split())
    figures = definitions_document()["figures"]
    whole = definitions_document()["sections"][figures["table:phases"]]["html"]
    assert plain(whole.partition("<ul>")[0]) in text  # the terms are in the cards of their columns
    assert "All definitions" not in text  # this page has its own alone
    assert browser.find_elements("css selector", ".help-card .help-topics button")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.execute_script(card) == ""
    assert browser.switch_to.active_element == button
    heading = browser.find_element("css selector", "#table-phases thead th:nth-child(3) button")
    heading.send_keys("?")
    assert browser.execute_script(card) != ""
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    for place in ("p.verdict", "dl.figures dt", "figure.chart"):
        assert browser.find_elements("css selector", f"{place} .help"), place
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_there_is_no_help_on_paper(browser, tmp_path, report):
    show(browser, tmp_path, report)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.help')].filter(e => e.offsetParent !== null).length"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert shown == 0
