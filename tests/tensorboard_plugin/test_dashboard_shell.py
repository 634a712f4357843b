"""Keyboard focus across views, and the page while it loads, is empty or gets no answer."""

from __future__ import annotations

import pytest

from tests.support.browser_keys import Keys
from tests.support.chromium import said
from tests.support.tensorboard_server import tensorboard
from tests.tensorboard_plugin.test_dashboard_address import add_link, shows
from tests.tensorboard_plugin.test_dashboard_browser import Page, page

__all__ = ["page"]  # a fixture

pytestmark = pytest.mark.slow

RUN = {"run": "net/version_0", "profile": "modelprof/run", "window": "modelprof/window_0"}


def focused(page):
    """Name of the focused element: a button's or heading's text, a list's label."""
    return page.run(
        "const e = document.activeElement; return e.closest('label')?.firstChild.textContent ?? "
        "(e === document.body ? 'the body' : e.textContent)"
    )


def test_focus_stays_in_menu(page):
    page.open(**RUN, view="overview")
    page.run("document.querySelectorAll('aside nav button')[2].focus()")
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    shows(page, "Operators")
    assert focused(page) == "Operators"
    page.run("document.querySelectorAll('.chooser select')[2].focus()")
    page.choose("Window", "modelprof/window_1")
    assert page.link()["window"] == "modelprof/window_1"
    assert focused(page) == "Window"


def test_focus_stays_in_comparison_controls(page):
    page.open(run="net/version_1", before_run="net/version_0", view="compare")
    page.run("document.querySelector('.sides select').focus()")
    page.run(
        "const s = document.querySelector('.sides select'); s.value = 'net/version_1';"
        "s.dispatchEvent(new Event('change'))"
    )
    page.settle()
    assert page.run("return document.activeElement.matches('.sides select')")
    assert focused(page) == "Run"
    page.run("document.querySelector('.sides button').focus(); document.activeElement.click()")
    page.settle()
    assert focused(page) == "Swap"


def test_focus_moves_from_view_to_next_heading(page):
    page.open(**RUN, view="operators")
    add_link(page, {"view": "memory"}).send_keys(Keys.ENTER)
    shows(page, "Memory")
    assert focused(page) == "Memory"
    page.run("document.querySelector('main .scroll, main summary').focus()")
    page.browser.switch_to.active_element.send_keys("2")
    shows(page, "Steps")
    assert focused(page) == "Steps"


HOLD = """
const [ask, held] = [window.fetch, []];
window.fetch = (...what) => new Promise((answer) => held.push(() => answer(ask(...what))));
window.release = () => {
  window.fetch = ask;
  for (const one of held) one();
};
"""
"""Holds back all requests until ``release()``."""


def test_focus_is_kept_while_view_loads(page):
    """A skeleton with its own heading is shown until the view replaces it."""
    page.open(**RUN, view="operators")
    page.run(HOLD)
    page.run("document.querySelector('main .table .scroll').focus()")
    page.browser.switch_to.active_element.send_keys("7")
    page.wait("return document.querySelectorAll('main .bone').length > 2")
    assert page.title() == "Memory"
    assert focused(page) == "Memory"
    page.run("release()")
    page.settle()
    assert page.run("return document.querySelectorAll('main .bone').length") == 0
    assert focused(page) == "Memory"


WIDTH = "return document.querySelector('main').getBoundingClientRect().width / window.innerWidth"


def test_empty_state_has_full_width(browser, tmp_path):
    with tensorboard(tmp_path) as server:
        page = Page(browser, server).open()
        assert page.run(WIDTH) > 0.95
        assert "No profiles in this log directory yet." in page.text()
        sentences = page.run("return [...document.querySelectorAll('main p')].map(p => p.textContent)")
        assert all(sentence.endswith(".") for sentence in sentences), sentences
        browser.switch_to.default_content()


def test_load_error_has_full_width(page):
    blocked = "Network.setBlockedURLs"
    page.browser.execute_cdp_cmd("Network.enable", {})
    page.browser.execute_cdp_cmd(blocked, {"urls": ["*/profiles*"]})
    try:
        page.open()
        assert page.text() == "Model Profile\n\nTensorBoard doesn't answer. Is it still running?"
        assert page.run(WIDTH) > 0.95
    finally:
        page.browser.execute_cdp_cmd(blocked, {"urls": []})
        said(page.browser)  # the browser itself logs failed requests
