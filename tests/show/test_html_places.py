"""Places in code: a click copies file:line or opens a known call stack. Needs Chromium."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.analysis.source.call_tree import CallNode
from lightning_modelprof.place import Place
from lightning_modelprof.report.charts.flames import _place
from lightning_modelprof.report.model import Column, Finding, Severity, Status, Table
from tests.show.test_html_browser import Keys, about, box, names, press, report_of, search, show
from tests.show.test_html_copying import REFUSE, TAKE
from tests.support.sample_flames import stacks_flame

pytestmark = pytest.mark.slow

SLOW_LINE = Place(
    file="/home/me/my code/train.py",
    line=40,
    function="Net.training_step",
    is_exact=True,
    inner=Place(file="/home/me/my code/loss.py", line=7, function="nll", is_exact=True),
    call=Place(file="/home/me/my code/main.py", line=3, function="main", is_exact=True),
)


def finding(*locations):
    return Finding(
        kind="k",
        status=Status.FOUND,
        severity=Severity.WARNING,
        title="t",
        summary="s",
        action="a",
        locations=locations,
    )


def table(*cells):
    columns = (Column("name", "Operator"), Column("called_from", "Called from"))
    return Table(id="lines", title="Lines", columns=columns, rows=cells)


def after(browser, selector):
    """The element's text, a moment later."""
    return browser.execute_async_script(
        "const done = arguments[1];"
        "setTimeout(() => done(document.querySelector(arguments[0])?.textContent ?? null), 100)",
        selector,
    )


def copied(browser):
    return browser.execute_script("return window.copied")


def stack(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('.stack:popover-open li')].map(e => e.textContent)"
    )


@pytest.mark.parametrize("clipboard", [TAKE, REFUSE], ids=["clipboard", "selection"])
def test_click_copies_place_of_finding(browser, tmp_path, clipboard):
    show(browser, tmp_path, report_of(findings=(finding(SLOW_LINE),)))
    browser.execute_script(clipboard)
    browser.find_element("css selector", ".line .at").click()
    assert after(browser, "output.copied") == "Copied"
    assert copied(browser) == "/home/me/my code/train.py:40"
    press(browser, ".inner .at")
    assert after(browser, "output.copied") == "Copied"
    assert copied(browser) == "/home/me/my code/loss.py:7"


def test_refused_copy_is_reported(browser, tmp_path):
    show(browser, tmp_path, report_of(findings=(finding(SLOW_LINE),)))
    browser.execute_script(REFUSE + "document.execCommand = () => false")
    press(browser, ".line .at")
    assert after(browser, "output.copied") == "The browser doesn't allow copying"


def test_finding_opens_call_stack(browser, tmp_path):
    alone = replace(SLOW_LINE, inner=None, call=None)
    show(browser, tmp_path, report_of(findings=(finding(SLOW_LINE, alone),)))
    browser.execute_script(TAKE)
    buttons = browser.find_elements("css selector", ".to-stack")
    assert len(buttons) == 1  # a single line has no stack
    buttons[0].send_keys(Keys.ENTER)
    assert stack(browser) == [
        "/home/me/my code/loss.py:7 in nll",
        "/home/me/my code/train.py:40 in Net.training_step",
        "/home/me/my code/main.py:3 in main",
    ]
    press(browser, ".stack li .at", 2)
    assert after(browser, ".stack output") == "Copied"
    assert copied(browser) == "/home/me/my code/main.py:3"
    press(browser, ".stack header button")
    after(browser, ".stack output")
    assert copied(browser).splitlines()[0] == "/home/me/my code/loss.py:7 in nll"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert stack(browser) == []
    assert browser.switch_to.active_element == buttons[0]
    buttons[0].click()
    assert len(stack(browser)) == 3
    assert browser.get_log("browser") == []


def test_click_copies_place_in_table(browser, tmp_path):
    long = "very_long_" * 40 + "name train.py:7"
    rows = (
        ("aten::mm", "net.py:12"),
        ("aten::add", "forward (net.py:3)"),
        ("127.0.0.1:80", None),
        (long, None),
    )
    show(browser, tmp_path, report_of(table(*rows)))
    shown = names(browser)
    browser.execute_script(TAKE)
    places = browser.find_elements("css selector", "td .at, tbody th .at")
    assert [place.text for place in places[:2]] == ["net.py:12", "net.py:3"]
    for place, text in zip(places, ("net.py:12", "net.py:3", "train.py:7"), strict=True):
        place.click()
        after(browser, "output.copied")
        assert copied(browser) == text
    assert names(browser) == shown
    press(browser, "[data-do=csv]")
    after(browser, "output")
    assert copied(browser).splitlines()[2] == "aten::add,forward (net.py:3)"


def test_search_finds_places_in_table(browser, tmp_path):
    show(browser, tmp_path, report_of(table(*((f"op {row}", f"net.py:{row}") for row in range(20)))))
    search(browser, "net.py:7")
    assert names(browser) == ["op 7"]


def test_flame_graph_copies_places_and_opens_stacks(browser, tmp_path):
    flame = stacks_flame()
    full = {"weighted_nll": "/home/me/train.py:12"}
    frames = tuple(replace(frame, place=full.get(frame.name, frame.place)) for frame in flame.frames)
    show(browser, tmp_path, report_of(flames=(replace(flame, frames=frames),)))
    browser.execute_script(TAKE)
    box(browser, "weighted_nll").click()
    line = about(browser)
    browser.find_element("css selector", ".about .at").click()
    assert after(browser, "output.copied") == "Copied"
    assert copied(browser) == "/home/me/train.py:12"
    assert about(browser) == line
    browser.find_element("css selector", "[data-do=stack]").click()
    assert stack(browser) == [
        "/home/me/train.py:12 weighted_nll",
        "train.py:12 Net.training_step",
        "Forward",
    ]
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert stack(browser) == []
    focused = browser.switch_to.active_element
    assert focused.text == "weighted_nll"  # with the same zoom
    assert about(browser) == line
    focused.send_keys("s")
    assert len(stack(browser)) == 3
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.execute_script("window.copied = null")
    browser.switch_to.active_element.send_keys("c")
    after(browser, "output.copied")
    assert copied(browser) == "/home/me/train.py:12"
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "at"
    assert browser.get_log("browser") == []


def test_users_files_keep_their_folders():
    fields = {"samples": 1, "own_ns": 1, "total_ns": 1, "children": ()}
    users = CallNode(function="f", file="/home/me/train.py", line=3, is_users=True, **fields)
    library = replace(users, file="/x/site-packages/torch/nn/module.py", is_users=False)
    assert [_place(users), _place(library)] == ["/home/me/train.py:3", "nn/module.py:3"]
    assert _place(replace(users, file=None)) == ""
