"""The page in a real browser: what a parser can't check. Needs Chromium, its driver and selenium."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_modelprof.report.definitions import row_definition
from lightning_modelprof.report.model import Chart, Column, Report, Series, Table, Unit
from lightning_modelprof.show.html.page import render_html
from tests.show.test_show_html import hostile_everywhere
from tests.support.browser_keys import Keys
from tests.support.sample_flames import flame_of, stacks_flame, wide_flame
from tests.support.sample_reports import ALL_REPORTS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def size(browser):
    browser.set_window_size(1400, 1000)


def show(browser, folder, report):
    """Open the page; the console must stay empty, and only the page itself may be requested."""
    path = Path(folder) / "report.html"
    path.write_bytes(render_html(report))
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(path.as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    ]
    assert {url for url in sent if not url.startswith("data:")} == {path.as_uri()}
    assert browser.get_log("browser") == []


def names(browser):
    """Names of the visible rows, in order."""
    return browser.execute_script(
        "return [...document.querySelectorAll('tbody tr')].filter(r => r.offsetParent !== null)"
        ".map(r => r.cells[0].textContent)"
    )


def press(browser, selector, number=0):
    browser.execute_script(f"document.querySelectorAll({selector!r})[{number}].click()")


def until(is_true):
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def search(browser, text):
    browser.execute_script(
        "const box = document.querySelector('input[type=search]');"
        "box.value = arguments[0]; box.dispatchEvent(new Event('input'))",
        text,
    )


def modules(count=5_000):
    """A model with 500 layers of nine modules each."""
    depths = [0, *(1 if place % 10 == 0 else 2 for place in range(count - 1))]
    rows = tuple(
        (f"module_{place} (Linear)", place * 7919 % count, float(place), place / count, None)
        for place in range(count)
    )
    columns = (
        Column("module", "Module"),
        Column("params", "Params", Unit.COUNT),
        Column("ns", "Latency", Unit.DURATION_NS, "Forward"),
        Column("share", "%", Unit.RATIO, "Forward"),
        Column("flops", "FLOP/s", Unit.FLOPS_PER_S, "Forward"),
    )
    return Table(id="modules", title="Modules", columns=columns, rows=rows, depths=tuple(depths))


def flat(count=150):
    rows = tuple((f"row {place}", None if place == 3 else place * 37 % count) for place in range(count))
    columns = (Column("name", "Name"), Column("n", "N", Unit.COUNT))
    return Table(id="flat", title="Flat", columns=columns, rows=rows)


def report_of(*tables, **fields):
    return Report(**({"title": "t", "facts": (), "tables": tables, "notes": ()} | fields))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_sample_reports_log_nothing(browser, tmp_path, name):
    show(browser, tmp_path, ALL_REPORTS[name]())


def test_hostile_names_run_no_code(browser, tmp_path):
    show(browser, tmp_path, hostile_everywhere())
    assert browser.execute_script("return document.images.length") == 0
    # Even injected markup runs no code: the policy allows only the page's own script.
    browser.execute_script(
        "const s = document.createElement('script');"
        "s.textContent = 'window.ran = 1'; document.body.append(s);"
        "const d = document.createElement('div'); d.innerHTML = '<img src=x onerror=\"window.ran = 1\">';"
        "document.body.append(d)"
    )
    time.sleep(0.3)
    assert browser.execute_script("return window.ran === undefined")


def test_sorting_cycles_through_orders(browser, tmp_path):
    show(browser, tmp_path, report_of(flat()))
    as_it_came = names(browser)
    assert as_it_came == [f"row {place}" for place in range(100)]
    values = {f"row {place}": place * 37 % 150 for place in range(150) if place != 3}
    largest_first = sorted(values, key=lambda name: -values[name])
    press(browser, "thead button", 1)
    assert names(browser) == largest_first[:100]
    assert browser.execute_script("return document.querySelector('[aria-sort]').ariaSort") == "descending"
    press(browser, "[data-do=all]")
    assert names(browser) == [*largest_first, "row 3"]
    press(browser, "thead button", 1)
    assert names(browser) == [*largest_first[::-1], "row 3"]  # missing values come last either way
    press(browser, "thead button", 1)
    assert names(browser)[:100] == as_it_came
    press(browser, "thead button", 0)
    assert names(browser)[:3] == ["row 0", "row 1", "row 2"]  # 2 before 10


def test_search_matches_names_but_not_definitions(browser, tmp_path):
    rows = (("Forward",), *((f"row {place}",) for place in range(20)))
    show(browser, tmp_path, report_of(Table(id="phases", title="P", columns=(Column("n", "N"),), rows=rows)))
    search(browser, row_definition("phases", "Forward").split()[-1])
    assert names(browser) == []
    search(browser, "forward")
    assert names(browser) == ["Forward"]


def test_search_finds_hidden_rows(browser, tmp_path):
    show(browser, tmp_path, report_of(flat()))
    search(browser, "ROW 14")
    assert names(browser) == [f"row {place}" for place in (14, 114, *range(140, 150))]
    assert browser.execute_script("return document.querySelector('output').value") == "12 of 150 rows"
    search(browser, "")
    assert len(names(browser)) == 100


def test_rows_of_folded_tables_are_drawn_soon(browser, tmp_path):
    detail = replace(flat(30), id="detail", title="Detail", is_detail=True)
    show(browser, tmp_path, report_of(flat(), modules(), detail))

    def rows_in(table):
        return browser.execute_script(
            "return document.querySelectorAll(`#table-${arguments[0]} tbody tr`).length", table
        )

    assert [rows_in(table) for table in ("flat", "modules")] == [100, 101]
    press(browser, "#table-flat [data-do=all]")
    assert rows_in("flat") == 150
    until(lambda: rows_in("detail") == 30)  # soon, so that the browser's own search finds them
    is_open = "return document.querySelector('#table-detail details').open"
    assert not browser.execute_script(is_open)
    browser.execute_script("location.hash = '#table-detail'")
    until(lambda: browser.execute_script(is_open))
    assert len(names(browser)) == 150 + 101 + 30


def test_link_scrolls_to_its_table(browser, tmp_path):
    tables = (replace(flat(60), id=f"t{number}", title=f"T{number}") for number in range(5))
    show(browser, tmp_path, report_of(*tables))
    browser.get(browser.current_url + "#table-t4")
    browser.refresh()
    top = "return document.getElementById('table-t4').getBoundingClientRect().top"
    until(lambda: abs(browser.execute_script(top)) < 40)


def test_five_thousand_modules_stay_usable(browser, tmp_path):
    show(browser, tmp_path, report_of(modules()))
    assert names(browser)[:3] == ["module_0 (Linear)", "module_1 (Linear)", "module_11 (Linear)"]
    press(browser, "tbody .twist", 1)
    assert names(browser)[1:4] == ["module_1 (Linear)", "module_2 (Linear)", "module_3 (Linear)"]
    search(browser, "module_4321")
    assert names(browser) == ["module_0 (Linear)", "module_4321 (Linear)"]
    search(browser, "")
    press(browser, "thead button", 1)
    shown = names(browser)
    assert shown[0] == "module_0 (Linear)"  # the model stays above its modules
    press(browser, "[data-do=open]")
    press(browser, "[data-do=all]")
    assert len(names(browser)) == 5_000


def test_theme_follows_system_and_button(browser, tmp_path):
    show(browser, tmp_path, report_of(flat()))

    def background():
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    colours = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        colours[scheme] = background()
    assert colours["light"] == "rgb(255, 255, 255)"
    assert colours["dark"] != colours["light"]
    press(browser, "#theme")
    assert background() == colours["light"]
    press(browser, "#theme")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert background() == colours["dark"]
    press(browser, "#theme")


def test_print_shows_all_rows_and_no_controls(browser, tmp_path):
    detail = Table(id="detail", title="Detail", columns=flat().columns, rows=(("deep", 1),), is_detail=True)
    show(browser, tmp_path, report_of(flat(), modules(200), detail))
    assert len(names(browser)) < 150
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    try:
        assert len(names(browser)) == 150 + 200 + 1
        controls = "input, #theme, .tools, .twist, nav"
        shown = (
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent !== null).length"
        )
        assert browser.execute_script(shown, controls) == 0
    finally:
        browser.execute_script("dispatchEvent(new Event('afterprint'))")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert len(names(browser)) < 150


def test_chart_shows_values_by_keyboard(browser, tmp_path):
    series = (
        Series(key="forward", label="Forward", values=(1e6, 2e6, 3e6)),
        Series(key="backward", label="Backward", values=(4e6, None, 6e6)),
    )
    chart = Chart(
        id="c",
        title="C",
        kind="stacked",
        x_label="step",
        x=(5.0, 6.0, 7.0),
        unit=Unit.DURATION_NS,
        series=series,
    )
    show(browser, tmp_path, report_of(charts=(chart,)))

    def after(key):
        browser.execute_script(
            "document.querySelector('.field')"
            ".dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))",
            key,
        )
        return browser.execute_script(
            "return [...document.querySelectorAll('.legend li')].map(e => e.textContent.trim())"
        )

    assert after("ArrowRight") == ["step 5", "Backward 4.00", "Forward 1.00", "Total 5.00"]
    assert after("ArrowRight") == ["step 6", "Backward –", "Forward 2.00", "Total 2.00"]
    assert after("End") == ["step 7", "Backward 6.00", "Forward 3.00", "Total 9.00"]


def boxes(browser):
    """Text → (left, width) of the first graph's visible boxes, in percent."""
    return browser.execute_script(
        "const frame = document.querySelector('.boxes').getBoundingClientRect();"
        "return Object.fromEntries([...document.querySelector('.boxes').children]"
        ".filter(e => e.offsetParent !== null).map(e => {"
        "  const box = e.getBoundingClientRect();"
        "  const shares = [box.left - frame.left, box.width].map(v => Math.round(100 * v / frame.width));"
        "  return [e.textContent, shares];"
        "}))"
    )


def box(browser, name):
    return browser.execute_script(
        "return [...document.querySelectorAll('.box')].find(e => e.textContent === arguments[0])", name
    )


def about(browser):
    return browser.execute_script("return document.querySelector('.about').textContent")


WHOLE = {
    "Dataloader": [0, 30],
    "Digits.__getitem__": [0, 30],
    "Image.convert": [0, 28],
    "Forward": [30, 50],
    "Net.training_step": [30, 49],
    "Net.forward": [30, 9],
    "Module._call_impl": [30, 8],
    "weighted_nll": [39, 40],
    "log_softmax": [39, 15],
    "Optimizer": [80, 20],
    "Adam.step": [80, 20],
}
IN_LOSS = {  # 15 of 40 ms
    "Forward": [0, 100],
    "Net.training_step": [0, 100],
    "weighted_nll": [0, 100],
    "log_softmax": [0, 38],
}


def test_flame_graph_zooms_on_click(browser, tmp_path):
    show(browser, tmp_path, report_of(flames=(stacks_flame(),)))
    assert boxes(browser) == WHOLE
    assert about(browser).startswith("Hover to see the time")
    box(browser, "weighted_nll").click()
    assert boxes(browser) == IN_LOSS
    assert about(browser) == "weighted_nll, train.py:12 (your code): 40.0 ms, 40%; self 25.0 ms"
    box(browser, "Forward").click()  # an enclosing box
    assert boxes(browser)["weighted_nll"] == [18, 80]
    press(browser, "[data-do=reset]")
    assert boxes(browser) == WHOLE
    assert browser.execute_script("return document.querySelector('[data-do=reset]').disabled")
    assert browser.get_log("browser") == []


def test_flame_graph_keeps_focus_after_reset(browser, tmp_path):
    show(browser, tmp_path, report_of(flames=(stacks_flame(),)))
    box(browser, "weighted_nll").click()
    browser.find_element("css selector", "[data-do=reset]").send_keys(Keys.ENTER)
    assert boxes(browser) == WHOLE
    focused = "setTimeout(() => arguments[0](document.activeElement.textContent), 100)"
    assert browser.execute_async_script(focused) == "weighted_nll"


def test_flame_graph_works_with_keyboard(browser, tmp_path):
    show(browser, tmp_path, report_of(flames=(stacks_flame(),)))
    stops = "return document.querySelectorAll('.box[tabindex=\"0\"]').length"
    focused = "return document.activeElement.textContent"
    browser.execute_script("document.querySelector('.box[tabindex=\"0\"]').focus()")
    visited = []
    for key in ("ARROW_RIGHT", "ARROW_DOWN", "ARROW_DOWN", "ARROW_LEFT", "ARROW_UP", "HOME", "ARROW_LEFT"):
        browser.switch_to.active_element.send_keys(getattr(Keys, key))
        visited.append(browser.execute_script(focused))
        assert browser.execute_script(stops) == 1  # Tab leaves the graph
    assert visited == [
        *("Forward", "Net.training_step", "weighted_nll", "Net.forward", "Net.training_step"),
        *("Dataloader", "Dataloader"),
    ]
    for key in ("ARROW_RIGHT", "ARROW_DOWN", "ARROW_DOWN", "ENTER"):
        browser.switch_to.active_element.send_keys(getattr(Keys, key))
    assert boxes(browser) == IN_LOSS
    assert about(browser).startswith("weighted_nll, train.py:12")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert boxes(browser) == WHOLE
    assert browser.execute_script(focused) == "weighted_nll"
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    assert boxes(browser) == IN_LOSS
    roles = "return [...new Set([...document.querySelectorAll('.boxes, .box')].map(e => e.role))]"
    assert browser.execute_script(roles) == ["tree", "treeitem"]


def test_flame_graph_search_shows_share(browser, tmp_path):
    """Twenty functions of 4%; two contain a call of the same name, and one function contains them all."""
    calls = [(f"load_{place}", 4.0, True, ()) for place in range(18)]
    calls += [("save", 1.0, True, (("save", 3.0, True, ()),)) for _ in range(2)]
    show(browser, tmp_path, report_of(flames=(flame_of((("all", 20.0, None, tuple(calls)),)),)))
    result = "return document.querySelector('.flame output').value"
    found = "return [...document.querySelectorAll('.box.found')].length"
    for text, boxes_found, share in (
        ("SAVE", 4, "8.00"),
        ("load_1", 9, "36.00"),
        ("all", 1, "100.00"),
        ("ms", 0, "0"),
    ):
        search(browser, text)
        word = "box" if boxes_found == 1 else "boxes"
        assert browser.execute_script(result) == f"{boxes_found} {word}, {share}%"
        assert browser.execute_script(found) == boxes_found
    search(browser, "")
    assert (browser.execute_script(result), browser.execute_script(found)) == ("", 0)


def test_two_thousand_boxes_stay_usable(browser, tmp_path):
    show(browser, tmp_path, report_of(flames=(wide_flame(),)))
    assert browser.execute_script("return document.querySelectorAll('.box').length") == 2_000
    for depth in range(4):  # into the widest box of each row
        browser.execute_script(
            "const all = [...document.querySelectorAll('.box')];"
            "all.find(e => !e.hidden && e.ariaLevel === arguments[0]).click()",
            str(depth + 2),
        )
    seen = boxes(browser)
    assert seen["function_7"] == [0, 100]
    assert "function_2" not in seen
    narrow = "return [...document.querySelectorAll('.box.narrow')].filter(e => e.offsetWidth >= 26).length"
    assert browser.execute_script(narrow) == 0
    assert browser.get_log("browser") == []


def test_print_shows_whole_flame_graph(browser, tmp_path):
    show(browser, tmp_path, report_of(flames=(stacks_flame(),)))
    box(browser, "log_softmax").click()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    try:
        assert boxes(browser) == WHOLE
        controls = (
            "return [...document.querySelectorAll('.flame .tools, .about')].filter(e => e.offsetParent)"
        )
        assert browser.execute_script(controls) == []
    finally:
        browser.execute_script("dispatchEvent(new Event('afterprint'))")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert boxes(browser)["log_softmax"] == [0, 100]
