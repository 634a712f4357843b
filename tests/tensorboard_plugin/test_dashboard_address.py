"""The address holds what the reader sees, and the browser's Back and Forward move between views."""

from __future__ import annotations

import json
import re

import pytest

from tests.tensorboard_plugin.test_dashboard_browser import page

__all__ = ["page"]  # a fixture

pytestmark = pytest.mark.slow

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys

RUN = {"run": "net/version_0", "profile": "modelprof/run", "window": "modelprof/window_0"}
FIND = {"name": "aten::linear", "kind": "operator"}


def shows(page, title):
    page.wait(f"return document.querySelector('main > h1')?.textContent === {json.dumps(title)}")
    page.settle()


def uses(page, title):
    """Wait for the view, and click in it.

    Once it has fifty history entries of a page, Chromium drops those without a click.
    """
    shows(page, title)
    page.browser.find_element("css selector", "main > h1").click()


def add_link(page, goto, place="main .parts"):
    """Add a link like those that parts of the page write, as not every view has one."""
    page.run(
        "const a = document.createElement('a'); a.href = ''; a.className = 'goto'; a.id = 'link';"
        "a.textContent = 'there'; a.setAttribute('data-goto', arguments[0]);"
        "document.querySelector(arguments[1]).append(a)",
        json.dumps(goto),
        place,
    )
    return page.browser.find_element("id", "link")


@pytest.mark.parametrize("is_tab", [False, True], ids=["alone", "in TensorBoard"])
def test_back_and_forward_move_between_views(page, is_tab):
    (page.open_tab if is_tab else page.open)(**RUN, view="overview")
    uses(page, "Overview")
    page.press("Operators", "aside nav button")
    uses(page, "Operators")
    page.press("Memory", "aside nav button")
    uses(page, "Memory")
    page.choose("Window", "modelprof/window_1")
    page.run("parent.history.back()")
    page.wait("return document.querySelectorAll('.chooser select')[2].value === 'modelprof/window_0'")
    shows(page, "Memory")
    page.run("parent.history.back()")
    shows(page, "Operators")
    page.run("parent.history.back()")
    shows(page, "Overview")
    page.run("parent.history.forward()")
    shows(page, "Operators")
    assert page.link() == RUN | {"view": "operators"}


def test_back_keeps_tensorboard_state(page):
    page.open_tab(**RUN, view="overview")
    uses(page, "Overview")
    page.run("parent.location.hash += '&other=1'")
    state = page.run("return JSON.stringify(parent.history.state)")
    assert "namespaceId" in state
    page.press("Operators", "aside nav button")
    uses(page, "Operators")
    assert page.run("return JSON.stringify(parent.history.state)") == state
    page.run("parent.history.back()")
    shows(page, "Overview")
    assert page.run("return JSON.stringify(parent.history.state)") == state
    assert page.run("return parent.location.hash").startswith("#modelprof&other=1&")
    assert "?darkMode=false" in page.run("return parent.location.href")


def test_back_from_another_tab_returns_to_last_view(page):
    page.open_tab(**RUN, view="overview")
    uses(page, "Overview")
    page.press("Operators", "aside nav button")
    uses(page, "Operators")
    page.run("parent.document.location.hash = parent.location.hash.replace('modelprof&', 'timeseries&')")
    page.run("parent.history.back()")
    page.wait("return parent.location.hash.startsWith('#modelprof')")
    shows(page, "Operators")
    page.run("parent.history.back()")
    shows(page, "Overview")


def test_changing_options_adds_no_history_entry(page):
    page.open(**RUN, view="steps")
    before = page.run("return parent.history.length")
    page.run("document.querySelector('.steps .tools input').click()")
    page.wait("return parent.location.hash.includes('at_steps')")
    assert page.run("return parent.history.length") == before


def test_link_opens_other_view(page):
    page.open(**RUN, view="operators")
    uses(page, "Operators")
    link = add_link(page, {"view": "trace", "find": FIND})
    link.click()
    shows(page, "Trace")
    assert json.loads(page.link()["find"]) == FIND
    page.run("parent.history.back()")
    shows(page, "Operators")
    assert "find" not in page.link()
    page.run("parent.history.forward()")
    shows(page, "Trace")
    assert json.loads(page.link()["find"]) == FIND
    page.press("Memory", "aside nav button")
    uses(page, "Memory")
    assert "find" not in page.link(), "it points into a view that is no longer shown"


def test_link_has_address_of_its_destination(page):
    """So that it can be opened in a new tab."""
    page.open_tab(**RUN, view="operators")
    link = add_link(page, {"view": "memory", "row": {"name": "aten::linear"}})
    page.run("arguments[0].focus()", link)
    address = page.run("return arguments[0].href", link)
    assert address.startswith(page.server.url)
    assert "p.modelprof.view=memory" in address
    assert "p.modelprof.row=%7B%22name%22%3A%22aten%3A%3Alinear%22%7D" in address


def test_malformed_link_parameters_are_ignored(page):
    page.open(**RUN, view="trace", find="{", at_time="[", at_tables="7")
    assert page.title() == "Trace"
    assert page.run("return document.querySelectorAll('.problem').length") == 0


def test_changing_window_resets_zoom_but_not_tables(page):
    looks = {"at_time": json.dumps({"search": "linear"}), "at_tables": json.dumps({"operators": {}})}
    page.open(**RUN, view="operators", **looks)
    page.press("Memory", "aside nav button")
    assert json.loads(page.link()["at_time"])["search"] == "linear"
    page.choose("Window", "modelprof/window_1")
    assert "at_time" not in page.link()
    assert page.link()["at_tables"] == looks["at_tables"], "how a table is sorted is of no window"


@pytest.mark.parametrize("is_tab", [False, True], ids=["alone", "in TensorBoard"])
def test_copied_link_is_short_and_restores_view(page, is_tab):
    shown = (
        "return [...document.querySelectorAll("
        "'.tl-selection h2, .tl-count, .tl-base')].map(e => e.value ?? e.textContent)"
    )
    (page.open_tab if is_tab else page.open)(**RUN, view="trace", at_tables='{"operators":{"search":"x"}}')
    page.run("parent.location.hash += '&runSelectionState=abc'")
    field = page.browser.find_element("css selector", ".tl-search input")
    field.send_keys("linear", Keys.ENTER)
    page.wait("return document.querySelector('.tl-selection h2') !== null")
    before = page.run(shown)
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.press("Copy link", ".tl-bar button")
    page.wait("return document.querySelector('.tl-message').textContent === 'Link copied.'")
    link = page.run("return window.copied")
    assert len(re.sub(r"&\d+#", "#", link)) <= 300, link  # without the number of this load
    assert not {"runSelectionState", "at_tables"} & set(re.split(r"[.&=]", link))
    page.browser.switch_to.default_content()
    page.browser.get("about:blank")
    page.browser.get(link)
    if is_tab:
        page.wait("return document.querySelector('iframe') !== null")
        page.browser.switch_to.frame(page.browser.find_element("css selector", "iframe"))
    page.settle()
    page.wait("return document.querySelector('.tl-selection h2') !== null")
    assert page.run(shown) == before
