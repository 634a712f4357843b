"""Links from findings and table rows to slices of a real trace, and from a slice to its row."""

from __future__ import annotations

import json

import pytest

from lightning_modelprof.report.model import Slices
from lightning_modelprof.tensorboard_plugin.selection import Selection
from tests.tensorboard_plugin.test_dashboard_browser import page

__all__ = ["page"]  # a fixture

pytestmark = pytest.mark.slow

NAME = "v100_resnet50_workers0"


def shows(page, title):
    page.wait(f"return document.querySelector('main > h1')?.textContent === {json.dumps(title)}")
    page.settle()


def selected(page):
    """Text of the timeline's panel, once a slice is selected."""
    page.wait("return document.querySelector('.tl-panel h2, .drawing h2') !== null")
    return page.run("return document.querySelector('.drawing').innerText")


def test_finding_links_to_longest_wait_with_cause_and_line(page):
    page.open(run=NAME, view="overview")
    finding = page.run("return document.querySelector('.finding h2').firstChild.textContent")
    assert finding == "Training waits for data"
    page.run("document.querySelector('.finding .goto').click()")
    shows(page, "Trace")
    assert json.loads(page.link()["find"]) == {"kind": "idle: data loading"}
    text = selected(page)
    assert "idle: data loading" in text
    assert "waited for data" in text
    assert "enumerate(DataLoader)" in text


@pytest.mark.parametrize("view", ["operators", "kernels"])
def test_pointer_follows_row_to_its_slices(page, view):
    page.open(run=NAME, view=view)
    row = page.run("return document.querySelectorAll(`#table-${arguments[0]} tbody tr`)[2]", view)
    name = "return arguments[0].querySelector('th > span')?.title || arguments[0].cells[0].textContent"
    full, text = page.run(name, row), page.run("return arguments[0].cells[0].textContent", row)
    page.run("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", row)
    link = page.run("return arguments[0].querySelector('a.row-goto')", row)
    assert page.run("return arguments[0].cells[0].textContent", row) == text, "copies and searches have it"
    page.run("arguments[0].click()", link)
    shows(page, "Trace")
    assert json.loads(page.link()["find"]) == {"name": full}
    assert full in selected(page)


def test_keyboard_follows_row_to_its_slices(page):
    page.open(run=NAME, view="operators")
    link = page.run("return document.querySelector('#table-operators a.row-goto')")
    name = "return document.activeElement.closest('tr').rowIndex"
    page.run("arguments[0].focus()", link)
    first = page.run(name)
    link.send_keys("\ue015")  # arrow down
    assert page.run(name) == first + 1
    assert page.run("return getComputedStyle(document.activeElement).opacity") == "1"
    page.run("return document.activeElement").send_keys("\ue007")  # enter
    shows(page, "Trace")


def test_keyboard_reaches_link_of_row_found_by_search(page):
    page.open(run=NAME, view="operators")
    field = page.browser.find_element("css selector", "#table-operators .tools input")
    seen = (
        "return [...document.querySelectorAll('#table-operators tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.cells[0].textContent)"
    )
    field.send_keys("addmm")
    row = "return document.querySelector('#table-operators a.row-goto').closest('tr').cells[0].textContent"
    assert page.run(row) == page.run(seen)[0]
    for _ in "addmm":
        field.send_keys("\ue003")  # backspace
    assert page.run(row) in page.run(seen)


def test_row_without_slices_has_no_link(page):
    page.open(run=NAME, view="operators")
    [profiles] = (run["profiles"] for run in page.server.ask("profiles")["runs"] if run["name"] == NAME)
    window = profiles[0]["tag"]
    [document] = page.server.ask("view", run=NAME, window=window, view="operators")["documents"]
    assert {table["id"]: table["no_slices"] for table in document["tables"]}["operators"] == ["(no operator)"]


def test_link_reveals_hidden_row(page):
    """A row after the first hundred, also in a folded table."""
    page.open(run=NAME, view="operators")
    last = "[...document.querySelectorAll('#table-operators tbody tr')].at(-1).cells[0].textContent"
    first = page.run(f"return {last}")
    page.run("document.querySelector('#table-operators [data-do=all]')?.click()")
    name = page.run(f"return {last}")
    assert name != first
    for view in ("operators", "tables"):
        page.open(run=NAME, view=view, row=json.dumps({"name": name}))
        row = page.run("return document.querySelector('tr[aria-current]')")
        assert page.run("return arguments[0].cells[0].textContent", row) == name
        place = page.run("const r = arguments[0].getBoundingClientRect(); return [r.height, r.top]", row)
        assert place[0] > 0
        assert 0 < place[1] < page.run("return innerHeight")


def test_missing_row_is_reported(page):
    page.open(run=NAME, view="operators", row=json.dumps({"name": "<b>none"}))
    assert (
        page.run("return document.querySelector('.parts > .note').textContent") == "No row is named <b>none."
    )


def test_no_link_has_slices_without_timeline():
    assert not Selection().has_slices(Slices(kind="operator"))


TABLE = "document.querySelector('#table-operators')"


def looks(page):
    """Names of visible rows, keys of visible columns, and sort arrows."""
    return page.run(
        f"const table = {TABLE}.querySelector('table');"
        "const heads = [...table.querySelectorAll('thead tr:last-child th')];"
        "return [[...table.tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[0].textContent),"
        " heads.filter(h => h.offsetWidth).map(h => h.dataset.key),"
        " heads.filter(h => h.ariaSort).map(h => [h.dataset.key, h.ariaSort])]"
    )


def test_address_holds_table_state(page):
    page.open(run=NAME, view="operators")
    page.run(f"{TABLE}.querySelector('th[data-key=calls] button').click()")
    page.run(f"{TABLE}.querySelector('.columns > summary').click()")
    page.wait(f"return {TABLE}.querySelector('.columns input') !== null")
    page.run(f"{TABLE}.querySelector('.columns input[value=host_max_ns]').click()")
    page.run(
        f"const box = {TABLE}.querySelector('input[type=search]'); box.value = 'conv';"
        "box.dispatchEvent(new Event('input'))"
    )
    page.wait("return parent.location.hash.includes('at_tables')")
    page.wait("return parent.location.hash.includes('conv%22')")
    before = looks(page)
    assert "host_max_ns" in before[1]
    assert before[2] == [["calls", "descending"]]
    link = page.link()
    page.open(**link)
    assert looks(page) == before
    page.press("Memory", "aside nav button")
    page.press("Operators", "aside nav button")
    assert looks(page) == before, "another view in between"


def test_address_holds_grouping_and_all_rows(page):
    page.open(run=NAME, view="operators")
    page.run(f"{TABLE}.querySelector('[data-do=all]').click()")
    page.run(
        f"const list = {TABLE}.querySelector('.tools select'); list.value = '0';"
        "list.dispatchEvent(new Event('change'))"
    )
    page.wait("return parent.location.hash.includes('Namespace')")
    before = looks(page)
    page.open(**page.link())
    assert looks(page) == before


@pytest.mark.parametrize(
    "looks",
    [
        "3",
        "[1]",
        '{"operators": 3}',
        '{"operators": {"sort": [["x"]], "columns": [3, {}], "search": {}, "group": 7, "all": "no"}}',
        '{"operators": {"sort": ["no such", "up"], "columns": ["no such"]}}',
        '{"__proto__": {"operators": {"search": "x"}}}',
    ],
)
def test_invalid_table_state_is_ignored(page, looks):
    page.open(run=NAME, view="operators", at_tables=looks, at_flames=looks)
    assert page.run(f"return {TABLE}.querySelectorAll('tbody tr:not([hidden])').length") >= 20
