"""axe-core finds no violation in any dashboard view or in report.html, in light and dark."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_modelprof.cli.main import main
from tests.support.chromium import said
from tests.support.dashboard_looks import Pages
from tests.support.traces import real_file
from tests.tensorboard_plugin.test_dashboard_browser import VIEWS

pytestmark = pytest.mark.slow

TRACE = "v100_resnet50_workers0"
BEFORE = {"net/version_1": "net/version_1", TRACE: "net/version_1"}
"""Run → the run it's compared with: a run with one of its own windows, a trace with a run's."""

AXE = os.environ.get("AXE_CORE", "")
"""``axe.min.js`` of npm's axe-core; .ci/run fetches it."""

OPEN = """
    for (const details of document.querySelectorAll("details")) details.open = true;
    const field = document.querySelector(".tl-search input");
    if (field) {
      field.value = "a";
      field.dispatchEvent(new Event("input"));
      field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    }
"""
"""Unfolds everything, and selects a slice."""

CHECK = """
    const [rules, done] = arguments;
    axe.run(document, { resultTypes: ["violations"], ...(rules && { runOnly: rules }) }).then(
      ({ violations }) => done(violations.map(({ id, nodes }) => `${id}: ${nodes[0].html}`)),
      (error) => done([String(error)]));
"""


@pytest.fixture(scope="module")
def axe():
    if not Path(AXE).is_file():
        pytest.skip("axe-core isn't here: npm install axe-core, and set AXE_CORE to its axe.min.js")
    return Path(AXE).read_text(encoding="utf-8")


def violations(browser, axe):
    """Violations of all rules in light; in dark, where only colors differ, of the contrast rule."""
    if not browser.execute_script("return 'axe' in window"):
        browser.execute_script(axe)
    browser.execute_script(OPEN)
    found = []
    for theme, rules in (("light", None), ("dark", ["color-contrast"])):
        browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        found += [f"{theme}: {one}" for one in browser.execute_async_script(CHECK, rules)]
    return found


@pytest.mark.parametrize("run", BEFORE)
def test_dashboard_views_have_no_violations(browser, axe, server, run):
    pages, wrong = Pages(browser, server), {}
    try:
        for view in VIEWS:
            pages.show({"run": run, "before_run": BEFORE[run], "view": view}, 1280)
            if found := violations(browser, axe):
                wrong[view] = found
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        said(browser)
    assert wrong == {}


@pytest.mark.parametrize("what", ["run", "trace"])
def test_report_html_has_no_violations(browser, axe, logdir, tmp_path, what):
    page = tmp_path / "report.html"
    source = logdir / "net/version_1/modelprof" if what == "run" else real_file(TRACE)
    command = "report" if what == "run" else "analyze"
    assert main([command, str(source), "--html", str(page)]) == 0
    browser.get(page.as_uri())
    assert violations(browser, axe) == []
