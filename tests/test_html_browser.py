"""The page in a real browser: what a parser cannot tell. Needs Chromium, its driver and selenium."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from lightning_modelprof.report.model import Chart, Column, Report, Series, Table, Unit
from lightning_modelprof.show.html import render_html
from tests.sample_reports import ALL_REPORTS
from tests.test_show_html import hostile_everywhere

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="Chromium or chromedriver is not installed"
)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER, env=dict(os.environ))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def show(browser, folder, report):
    """Open the page; nothing may be said in the console and nothing requested but the page itself."""
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
    """The names of the rows that are seen, in order."""
    return browser.execute_script(
        "return [...document.querySelectorAll('tbody tr')].filter(r => r.offsetParent !== null)"
        ".map(r => r.cells[0].textContent)"
    )


def press(browser, selector, number=0):
    browser.execute_script(f"document.querySelectorAll({selector!r})[{number}].click()")


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
    return Report(**({"title": "t", "facts": (), "tables": tables, "notes": (), "sections": {}} | fields))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_sample_reports_are_quiet(browser, tmp_path, name):
    show(browser, tmp_path, ALL_REPORTS[name]())


def test_hostile_names_run_nothing(browser, tmp_path):
    show(browser, tmp_path, hostile_everywhere())
    assert browser.execute_script("return document.images.length") == 0
    # Not even if markup got in: the policy names the page's own script alone.
    browser.execute_script(
        "const s = document.createElement('script');"
        "s.textContent = 'window.ran = 1'; document.body.append(s);"
        "const d = document.createElement('div'); d.innerHTML = '<img src=x onerror=\"window.ran = 1\">';"
        "document.body.append(d)"
    )
    time.sleep(0.3)
    assert browser.execute_script("return window.ran === undefined")


def test_sorting_goes_round(browser, tmp_path):
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
    assert names(browser) == [*largest_first[::-1], "row 3"]  # not measured is last either way
    press(browser, "thead button", 1)
    assert names(browser)[:100] == as_it_came
    press(browser, "thead button", 0)
    assert names(browser)[:3] == ["row 0", "row 1", "row 2"]  # 2 before 10


def test_searching_finds_rows_that_are_not_shown(browser, tmp_path):
    show(browser, tmp_path, report_of(flat()))
    search(browser, "ROW 14")
    assert names(browser) == [f"row {place}" for place in (14, 114, *range(140, 150))]
    assert browser.execute_script("return document.querySelector('output').value") == "12 of 150 rows"
    search(browser, "")
    assert len(names(browser)) == 100


def test_five_thousand_modules_answer(browser, tmp_path):
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


def test_themes_follow_the_system_and_the_button(browser, tmp_path):
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


def test_paper_shows_everything_and_no_controls(browser, tmp_path):
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


def test_a_chart_tells_its_values_to_the_keyboard(browser, tmp_path):
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
