"""Groups and copies in a real browser, checked by plain loops. Needs Chromium and selenium."""

from __future__ import annotations

import csv
import html
import io
import re

import pytest

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.show.html.table import table_view
from tests.show.test_html_browser import names, press, report_of, search, show
from tests.show.test_html_groups import COLUMNS, key_of, operators_of
from tests.support.sample_reports import HOSTILE_NAMES, gpu_report

pytestmark = pytest.mark.slow

FORMULAS = (
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    '=HYPERLINK("http://x","y")',
    " =1+1",
    "\u00a0+1+cmd",
    "\u2003-1",
    "\uff1d1+1",
    "\uff0b1",
    "\uff0d1",
    "\uff20SUM(A1)",
    " \uff1d1",
    "a;=1+1",
    "a; @SUM(A1);-1;b",
    "'=1",
    '"=1"',
    "\t=1",
    "\r=1",
    "\n=1",
    'say "hi", you',
    " padded ",
    "a|b\\|c",
)

FORMULA_SIGNS = tuple("=+-@\uff1d\uff0b\uff0d\uff20")

TAKE = """
window.copied = null;
Object.defineProperty(navigator, "clipboard", {
  configurable: true, value: {writeText: async (text) => { window.copied = text; }}
});
"""
REFUSE = """
window.copied = null;
Object.defineProperty(navigator, "clipboard", {configurable: true, value: undefined});
document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
"""


def copied(browser, kind="csv"):
    """Clicks the button; returns the copied text and the page's message."""
    browser.find_element("css selector", f"[data-do={kind}]").click()
    said = browser.execute_async_script(
        "const done = arguments[0]; setTimeout(() => done(document.querySelector('output').value), 50)"
    )
    return browser.execute_script("return window.copied"), said


def csv_of(browser):
    text, said = copied(browser)
    lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert text.count("\n") == len(lines)
    assert said == f"Copied {len(lines) - 1:,} row{'s' * (len(lines) != 2)}"
    return lines


def group_by(browser, label):
    browser.execute_script(
        "const box = document.querySelector('.tools select');"
        "box.value = [...box.options].find(o => o.textContent === arguments[0]).value;"
        "box.dispatchEvent(new Event('change'))",
        label,
    )


def groups(browser):
    """Name, row count and cell texts of each visible heading, in order."""
    return browser.execute_script(
        "return [...document.querySelectorAll('tr.group')].filter(r => r.offsetParent !== null).map(r => ["
        "  r.querySelector('.twist + span').textContent, r.querySelector('.count').textContent,"
        "  [...r.cells].slice(1).map(c => c.textContent.trim())])"
    )


def raw(row):
    return ["" if cell is None else str(cell) if isinstance(cell, str) else float(cell) for cell in row]


def as_numbers(line, row):
    """A CSV line with numbers where the table has numbers."""
    return [
        float(text) if isinstance(cell, int | float) else text for text, cell in zip(line, row, strict=True)
    ]


HEADINGS = [
    "Name",
    "Calls",
    "CPU Total (ns)",
    "CPU Self (ns)",
    "CPU Ratio (fraction)",
    "Module",
    "Size (bytes)",
]


@pytest.mark.parametrize("clipboard", [TAKE, REFUSE], ids=["clipboard", "selection"])
def test_csv_copy_equals_table(browser, tmp_path, clipboard):
    table = operators_of(60)
    show(browser, tmp_path, report_of(table))
    browser.execute_script(clipboard)
    lines = csv_of(browser)
    assert lines[0] == HEADINGS
    assert [as_numbers(line, row) for line, row in zip(lines[1:], table.rows, strict=True)] == [
        raw(row) for row in table.rows
    ]
    assert browser.execute_script("return document.querySelectorAll('textarea').length") == 0


def test_copy_has_visible_rows_in_order(browser, tmp_path):
    table = operators_of(150)
    show(browser, tmp_path, report_of(table))
    browser.execute_script(TAKE)
    assert len(csv_of(browser)) == 1 + 100  # the row limit
    press(browser, "thead button", 1)
    largest = sorted(range(150), key=lambda row: (-table.rows[row][1], row))[:100]
    assert [line[0] for line in csv_of(browser)[1:]] == [table.rows[row][0] for row in largest]
    search(browser, "layer3")
    in_layer = [table.rows[row][0] for row in sorted(range(150), key=lambda row: (-table.rows[row][1], row))]
    module = {row[0]: row[5] for row in table.rows}
    assert [line[0] for line in csv_of(browser)[1:]] == [
        name for name in in_layer if "layer3" in (module[name] or "")
    ]


def test_copies_escape_hostile_names(browser, tmp_path):
    """Text that starts like a formula gets an apostrophe; everything else is unchanged."""
    cells = (*FORMULAS, *HOSTILE_NAMES)
    columns = (Column("name", "=Name"), Column("where", "a,b"), Column("n", "|N|", Unit.COUNT))
    rows = tuple((name, name[::-1], -place) for place, name in enumerate(cells))
    show(browser, tmp_path, report_of(Table(id="t", title="T", columns=columns, rows=rows)))
    browser.execute_script(TAKE)

    def guarded(text):
        """OWASP's rule, by hand: no cell, and no part between semicolons, starts with a sign."""
        parts = printable(text).split(";")
        return ";".join(f"'{part}" if part.strip()[:1] in FORMULA_SIGNS else part for part in parts)

    lines = csv_of(browser)
    assert lines[0] == ["'=Name", "a,b", "|N|"]
    assert [line[2] for line in lines[1:]] == [str(-place) for place in range(len(cells))]
    for line, name in zip(lines[1:], cells, strict=True):
        shown = [guarded(one).replace("' ", "'").strip() for one in (name, name[::-1])]
        assert [re.sub(r"(^|;)'\s+", r"\1'", one.strip()) for one in line[:2]] == shown
        for cell in ";".join(line[:2]).split(";"):
            assert cell.strip()[:1] not in (*FORMULA_SIGNS, "\t", "\r")
    text, _ = copied(browser, "markdown")
    for row, name in zip(text.splitlines()[2:], cells, strict=True):
        first, _, number = (cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", row)[1:-1])
        assert first[:1] not in FORMULA_SIGNS
        assert html.unescape(first)[:1] == printable(name).strip()[:1] or first[:1] == "\\"
        assert number == "0" or number[0] == "-"  # numbers stay numbers
    assert len(text.splitlines()) == 2 + len(cells)
    for line in text.splitlines():
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == 4
        assert "<" not in line


def test_markdown_copy_has_shown_texts(browser, tmp_path):
    columns = (
        Column("name", "Name"),
        Column("ns", "Total", Unit.DURATION_NS, "CPU"),
        Column("share", "%", Unit.RATIO, "CPU"),
    )
    rows = (("aten::_mm", 1_500_000, 0.25), ("b", None, 0.5))
    show(browser, tmp_path, report_of(Table(id="t", title="T", columns=columns, rows=rows)))
    browser.execute_script(TAKE)
    assert copied(browser, "markdown") == (
        "| Name | CPU Total (ms) | CPU Total (%) |\n"
        "| :--- | ---: | ---: |\n"
        "| aten::\\_mm | 1.50 | 25.00 |\n"
        "| b | – | 50.00 |\n",
        "Copied 2 rows",
    )
    assert csv_of(browser) == [
        ["Name", "CPU Total (ns)", "CPU Total (fraction)"],
        ["aten::_mm", "1500000", "0.25"],
        ["b", "", "0.5"],
    ]


def test_copy_names_unit_of_each_row(browser, tmp_path):
    table = gpu_report().tables[0]
    show(browser, tmp_path, report_of(table))
    browser.execute_script(TAKE)
    lines = csv_of(browser)
    assert [float(cell) for cell in lines[1][1:] if cell] == [
        one for one in table.rows[0][1:] if one is not None
    ]
    units = {Unit.DURATION_NS: " (ns)", Unit.RATIO: " (fraction)"}
    assert [line[0] for line in lines[1:]] == [
        row[0] + units.get(unit, "") for row, unit in zip(table.rows, table.row_units, strict=True)
    ]


def test_tree_copy_has_depths(browser, tmp_path):
    columns = (Column("module", "Module"), Column("n", "N", Unit.COUNT))
    depths = (0, 1, 2, 1)
    rows = tuple((f"m{place}", place) for place in range(4))
    table = Table(id="t", title="T", columns=columns, rows=rows, depths=depths)
    show(browser, tmp_path, report_of(table))
    browser.execute_script(TAKE)
    assert csv_of(browser) == [
        ["Depth", "Module", "N"],
        *([str(depth), f"m{place}", str(place)] for place, depth in enumerate(depths)),
    ]


def test_refused_copy_is_reported(browser, tmp_path):
    show(browser, tmp_path, report_of(operators_of(20)))
    browser.execute_script(REFUSE + "document.execCommand = () => false;")
    assert copied(browser) == (None, "The browser doesn't allow copying")


@pytest.mark.parametrize("label", ["Namespace", "Module"])
def test_groups_show_sums_of_their_rows(browser, tmp_path, label):
    table = operators_of(300)
    show(browser, tmp_path, report_of(table))
    press(browser, "[data-do=all]")
    group_by(browser, label)
    seen = groups(browser)
    assert {name for name, _, _ in seen} == {key_of(label, row) for row in table.rows}
    [grouping] = [one for one in table_view(table).groupings if one.label == label]
    written = {one.name: [cell.text.strip() if cell else "" for cell in one.sums] for one in grouping.groups}
    shown = browser.execute_script(
        "return [...document.querySelectorAll('tbody tr')].map(r =>"
        " [r.classList.contains('group'), (r.querySelector('.twist + span') ?? r.cells[0]).textContent])"
    )
    key, members = None, {}
    for is_heading, name in shown:
        key = name if is_heading else key
        members.setdefault(key, [])
        if not is_heading:
            members[key].append(name)
    for name, words, sums in seen:
        rows = [row for row in table.rows if key_of(label, row) == name]
        assert members[name] == [row[0] for row in rows]
        assert words == f"{len(rows)} row{'s' * (len(rows) != 1)}"
        assert sums == written[name]
    browser.execute_script(TAKE)
    press(browser, "[data-do=close]")
    lines = {line[0]: line[2:] for line in csv_of(browser)[1:]}
    for name in members:
        rows = [row for row in table.rows if key_of(label, row) == name]
        for place, column in enumerate(COLUMNS[1:], 1):
            known = [row[place] for row in rows if row[place] is not None]
            text = lines[name][place - 1]
            expected = pytest.approx(sum(known), rel=1e-12) if column.adds_up and known else ""
            assert (float(text) if text else text) == expected
    titles = browser.execute_script("return [...document.querySelectorAll('tr.group td')].map(c => c.title)")
    assert any(re.fullmatch(r"Sum of \d+ of \d+ rows; the others have no value.", title) for title in titles)
    assert browser.get_log("browser") == []


def test_sorting_orders_groups_and_their_rows(browser, tmp_path):
    table = operators_of(90)
    show(browser, tmp_path, report_of(table))
    group_by(browser, "Module")
    modules = list(dict.fromkeys(key_of("Module", row) for row in table.rows))

    def of(module, place):
        return [
            row[place] for row in table.rows if key_of("Module", row) == module and row[place] is not None
        ]

    press(browser, "thead button", 3)  # Self adds up
    assert [name for name, _, _ in groups(browser)] == sorted(modules, key=lambda one: -sum(of(one, 3)))
    press(browser, "thead button", 2)  # Total doesn't: the first row decides
    largest_first = sorted(modules, key=lambda one: -max(of(one, 2)))
    assert [name for name, _, _ in groups(browser)] == largest_first
    rows = [row for row in table.rows if key_of("Module", row) == largest_first[0]]
    assert names(browser)[1 : 1 + len(rows)] == [row[0] for row in sorted(rows, key=lambda row: -row[2])]
    press(browser, "thead button", 0)
    assert [name for name, _, _ in groups(browser)] == sorted(modules, key=lambda one: (one != "–", one))
    group_by(browser, "none")
    assert groups(browser) == []
    assert len(names(browser)) == 90
    press(browser, "thead button", 0)
    press(browser, "thead button", 0)
    assert names(browser) == [row[0] for row in table.rows]


def test_groups_can_be_folded_and_searched(browser, tmp_path):
    table = operators_of(90)
    show(browser, tmp_path, report_of(table))
    output = "return document.querySelector('output').value"
    group_by(browser, "Namespace")
    assert browser.execute_script(output) == "4 groups, 90 of 90 rows"
    press(browser, "[data-do=close]")
    assert len(names(browser)) == len(groups(browser)) == 4
    press(browser, "tr.group .twist")
    first = key_of("Namespace", table.rows[0])
    num_first = sum(key_of("Namespace", row) == first for row in table.rows)
    assert len(names(browser)) == 4 + num_first
    search(browser, "op_17")  # in a folded group, whose heading isn't searched
    found = [row for row in table.rows if "op_17" in row[0]]
    assert [name for name, _, _ in groups(browser)] == [key_of("Namespace", row) for row in found]
    assert browser.execute_script(output) == f"4 groups, {len(found)} of 90 rows"


def test_copy_of_groups_has_no_duplicates(browser, tmp_path):
    """A folded group is copied as its heading, an open one as its rows."""
    table = operators_of(90)
    show(browser, tmp_path, report_of(table))
    browser.execute_script(TAKE)
    group_by(browser, "Namespace")
    lines = csv_of(browser)
    assert lines[0] == ["Group", *HEADINGS]
    assert len(lines) == 91
    assert all(line[0] == key_of("Namespace", (line[1],)) for line in lines[1:])
    calls = sum(row[1] for row in table.rows)
    assert sum(float(line[2]) for line in lines[1:]) == calls
    press(browser, "[data-do=close]")
    lines = csv_of(browser)
    assert len(lines) == 5
    assert [line[1] for line in lines[1:]] == [""] * 4
    assert sum(float(line[2]) for line in lines[1:]) == calls
    text, _ = copied(browser, "markdown")
    name, words, _ = groups(browser)[0]
    assert text.splitlines()[2].startswith(f"| **{name}** ({words}) | ")


def test_five_thousand_grouped_rows_stay_usable(browser, tmp_path):
    table = operators_of(5_000)
    show(browser, tmp_path, report_of(table))
    group_by(browser, "Module")
    press(browser, "thead button", 3)
    press(browser, "[data-do=all]")
    assert len(names(browser)) == 5_000 + 8
    browser.execute_script(TAKE)
    assert len(csv_of(browser)) == 5_001
