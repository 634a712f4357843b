"""Visible columns and row order of a table, and the controls that change and restore them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.show.html.table import table_view
from tests.show.test_html_browser import Keys, names, press, search, show, size
from tests.show.test_show_html import report_of

__all__ = ["size"]  # a fixture

COLUMNS = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT, adds_up=True, is_main=True),
    Column("cpu", "Total", Unit.DURATION_NS, "CPU"),
    Column("cpu_self", "Self", Unit.DURATION_NS, "CPU", is_main=True),
    Column("gpu", "Total", Unit.DURATION_NS, "GPU"),
    Column("gpu_self", "Self", Unit.DURATION_NS, "GPU", is_main=True),
    Column("share", "Ratio(%)", Unit.RATIO, "GPU", is_main=True),
    Column("flops", "FLOPs", Unit.FLOPS, is_main=True),
    Column("where", "Called from"),
)
ROWS = tuple(
    (
        f"op{number:02}",
        100 - number % 7,
        10**6 * number,
        10**5 * number,
        10**9 - 10**7 * number,
        10**6,
        0.01,
        None,
        "x",
    )
    for number in range(20)
)
TABLE = Table(id="operators", title="Operators", columns=COLUMNS, rows=ROWS)


SPANS = "return [...document.querySelectorAll('.groups > *')].map(c => c.colSpan)"


def seen(browser):
    """Keys of the visible columns, from left to right."""
    return browser.execute_script(
        "return [...document.querySelectorAll('thead tr:last-child th')]"
        ".filter(c => c.offsetWidth > 0).map(c => c.dataset.key)"
    )


def arrows(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('th[aria-sort]')].map(c => [c.dataset.key, c.ariaSort,"
        " getComputedStyle(c.querySelector('button'), '::after').content.trim()])"
    )


def open_menu(browser):
    press(browser, "details.columns > summary")


def test_main_columns_and_sort_column_are_visible():
    """GPU Total orders the rows; FLOPs has no values."""
    view = table_view(TABLE)
    assert view.headers[view.sorted_by].key == "gpu"
    assert view.hidden == (2, 7, 8)
    assert view.groups == (("", 1), ("", 1), ("CPU", 2), ("GPU", 3), ("", 1), ("", 1))


def test_all_columns_are_visible_without_main_columns():
    columns = tuple(Column(one.key, one.label, one.unit, one.group) for one in COLUMNS)
    assert table_view(Table(id="t", title="T", columns=columns, rows=ROWS)).hidden == ()


@given(values=st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=7))
@example(values=[5, 4, 4, 4])
@example(values=[5, 4, 3, 3])
def test_sort_column_is_one_already_in_order(values):
    columns = (Column("name", "Name"), Column("n", "N", Unit.COUNT))
    rows = tuple((f"r{place}", value) for place, value in enumerate(values))
    if not rows:
        return
    view = table_view(Table(id="t", title="T", columns=columns, rows=rows))
    by_value = sorted(values, key=lambda value: (value is None, -(value or 0)))
    known = [value for value in values if value is not None]
    has_order = len(set(known)) > len(known) / 2  # other orders of mostly equal values would look the same
    expected = values == by_value and len(known) >= 3 and has_order
    assert (view.sorted_by == 1) == expected


@pytest.mark.slow
def test_menu_shows_and_hides_columns(browser, tmp_path):
    show(browser, tmp_path, report_of(tables=(TABLE,)))
    first = ["name", "calls", "cpu_self", "gpu", "gpu_self", "share"]
    assert seen(browser) == first
    assert browser.execute_script(SPANS) == [1, 1, 1, 3]
    assert arrows(browser) == [["gpu", "descending", '" ▾"']]
    open_menu(browser)
    boxes = "return [...document.querySelectorAll('.columns input')].filter(b => b.checked).map(b => b.value)"
    assert browser.execute_script(boxes) == first[1:]
    press(browser, ".columns input", 7)
    press(browser, ".columns input", 0)
    assert seen(browser) == ["name", "cpu_self", "gpu", "gpu_self", "share", "where"]
    assert browser.execute_script(SPANS) == [1, 1, 3, 1]
    press(browser, ".columns p button", 0)
    assert seen(browser) == [column.key for column in COLUMNS]
    press(browser, ".columns p button", 1)
    assert seen(browser) == first


@pytest.mark.slow
def test_menu_works_with_keyboard(browser, tmp_path):
    show(browser, tmp_path, report_of(tables=(TABLE,)))
    summary = browser.find_element("css selector", ".columns > summary")
    summary.send_keys("\ue007")
    box = browser.find_element("css selector", ".columns input[value=where]")
    box.send_keys(" ")
    assert "where" in seen(browser)
    box.send_keys("\ue00c")  # escape
    assert not browser.execute_script("return document.querySelector('.columns').open")
    assert browser.execute_script("return document.activeElement.textContent") == "Columns"


@pytest.mark.slow
def test_copies_hold_visible_columns(browser, tmp_path):
    show(browser, tmp_path, report_of(tables=(TABLE,)))
    browser.execute_script(
        "window.copied = [];"
        "navigator.clipboard.writeText = text => { copied.push(text); return Promise.resolve(); }"
    )
    press(browser, "[data-do=csv]")
    press(browser, "[data-do=markdown]")
    csv, markdown = browser.execute_script("return copied")
    assert csv.splitlines()[0] == "Name,Calls,CPU Self (ns),GPU Total (ns),GPU Self (ns),GPU Ratio (fraction)"
    assert csv.splitlines()[1] == "op00,100,0,1000000000,1000000,0.01"
    assert markdown.splitlines()[0].count("|") == 7
    title = "return document.querySelector('[data-do=csv]').title"
    assert "visible rows and columns" in browser.execute_script(title)


@pytest.mark.slow
def test_sorting_returns_to_first_order(browser, tmp_path):
    show(browser, tmp_path, report_of(tables=(TABLE,)))
    came = names(browser)
    press(browser, "th[data-key=gpu] button")
    assert arrows(browser)[0][:2] == ["gpu", "ascending"]
    assert names(browser) == came[::-1]
    press(browser, "th[data-key=gpu] button")
    assert arrows(browser)[0][:2] == ["gpu", "descending"]
    assert names(browser) == came
    for direction in ("descending", "ascending"):
        press(browser, "th[data-key=cpu_self] button")
        assert [one[:2] for one in arrows(browser)] == [["cpu_self", direction]]
    press(browser, "th[data-key=cpu_self] button")
    assert [one[:2] for one in arrows(browser)] == [["gpu", "descending"]]


@pytest.mark.slow
def test_changing_columns_keeps_search(browser, tmp_path):
    show(browser, tmp_path, report_of(tables=(TABLE,)))
    search(browser, "op07")
    open_menu(browser)
    press(browser, ".columns p button", 0)
    assert names(browser) == ["op07"]
    assert json.loads(json.dumps(seen(browser))) == [column.key for column in COLUMNS]


@pytest.mark.slow
def test_show_all_button_moves_focus_to_rows(browser, tmp_path):
    show(browser, tmp_path, report_of(tables=(replace(TABLE, row_limit=5),)))
    browser.find_element("css selector", "[data-do=all]").send_keys(Keys.ENTER)
    assert len(names(browser)) == len(ROWS)
    assert browser.execute_script("return document.activeElement.className") == "scroll"
