"""Every dashboard view in real Chromium and a real TensorBoard, without any other server."""

from __future__ import annotations

import csv
import io
import itertools
import json
import time
import urllib.parse

import pytest

from lightning_modelprof.cli.main import main
from lightning_modelprof.report.definitions import column_definition, definition
from tests.support.chromium import requested, said
from tests.support.documents import raw_rows
from tests.support.traces import real_file

pytestmark = pytest.mark.slow

VIEWS = [
    "overview",
    "steps",
    "operators",
    "kernels",
    "modules",
    "workers",
    "memory",
    "trace",
    "distributed",
    "tables",
    "compare",
]
OF_TENSORBOARD = ("Three.js", "WebGL", "GroupMarkerNotSet", "favicon")
"""Console messages of TensorBoard's own page, with or without a plugin."""
PATIENCE_S = 60
LOADS = itertools.count()


class Page:
    """The dashboard as a reader uses it."""

    def __init__(self, browser, server):
        self.browser = browser
        self.server = server

    def open(self, **choice):
        """Open a link to the plugin's page alone, without TensorBoard's page around it."""
        self.load(f"{self.server.url}data/plugin_entry.html?name=modelprof", choice)
        self.settle()
        return self

    def open_tab(self, *, is_dark=False, **choice):
        """Open a link to the tab in TensorBoard's page."""
        self.load(f"{self.server.url}?darkMode={str(is_dark).lower()}", choice)
        self.wait("return document.querySelector('iframe') !== null")
        self.browser.switch_to.frame(self.browser.find_element("css selector", "iframe"))
        self.settle()
        return self

    def load(self, address, choice):
        self.browser.switch_to.default_content()
        parts = [f"p.modelprof.{name}={urllib.parse.quote(value, safe='')}" for name, value in choice.items()]
        fragment = "&".join(["modelprof", *parts])
        # Changing only the fragment would not reload the page.
        self.browser.get(f"{address}&{next(LOADS)}#{fragment}")

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, condition):
        until = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < until, (condition, self.text())
            time.sleep(0.02)

    def settle(self):
        """Wait until the view is complete."""
        self.wait(
            "const main = document.querySelector('main');"
            "return main !== null && !main.ariaBusy && main.children.length > 0"
        )

    def press(self, text, selector="button"):
        found = self.run(
            "const all = [...document.querySelectorAll(arguments[1])];"
            "const b = all.find(b => b.textContent === arguments[0]); b?.click();"
            " return b !== undefined",
            text,
            selector,
        )
        assert found, text
        self.settle()

    def choose(self, label, value):
        self.run(
            "const all = [...document.querySelectorAll('.chooser')];"
            "const list = all.find(c => c.firstChild.textContent === arguments[0]).querySelector('select');"
            "list.value = arguments[1]; list.dispatchEvent(new Event('change'))",
            label,
            value,
        )
        self.settle()

    def choosers(self):
        pairs = self.run(
            "return [...document.querySelectorAll('aside .chooser')].map(c =>"
            " [c.firstChild.textContent, c.querySelector('select').value])"
        )
        return dict(pairs)

    def text(self):
        return self.run("return document.querySelector('main')?.innerText ?? document.body.innerText")

    def titles(self):
        """Titles of all views, in menu order."""
        return self.run("return [...document.querySelectorAll('aside nav button')].map(b => b.textContent)")

    def title(self):
        return self.run("return document.querySelector('main > h1')?.textContent")

    def link(self):
        pairs = self.run("return parent.location.hash").split("&")[1:]
        return {
            name.removeprefix("p.modelprof."): urllib.parse.unquote(value)
            for name, _, value in (pair.partition("=") for pair in pairs)
        }


@pytest.fixture
def page(browser, server):
    """A page; checks afterwards that no other server got a request and that the console is empty."""
    requested(browser)
    said(browser)
    yield Page(browser, server)
    browser.switch_to.default_content()
    foreign = {url for url in requested(browser) if not url.startswith(server.url)}
    assert foreign == set()
    assert [line for line in said(browser) if not any(word in line for word in OF_TENSORBOARD)] == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_every_view_of_run_is_drawn(page, is_dark):
    page.open_tab(is_dark=is_dark, run="net/version_1", view="overview")  # compared with version_0
    theme = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (theme == "rgb(255, 255, 255)") is not is_dark
    for view, title in zip(VIEWS, page.titles(), strict=True):
        page.press(title, "aside nav button")
        assert page.title() == title
        assert page.link()["view"] == view
        assert len(page.text()) > 40, view
        drawn = page.run(
            "return [...document.querySelectorAll('main canvas')].every(c => c.width > 100 && c.height > 10)"
        )
        assert drawn
    assert page.run("return document.querySelectorAll('.problem').length") == 0


COPY_TABLES = """
const done = arguments[0], texts = [];
const clipboard = {writeText: async (text) => { texts.push(text); }};
Object.defineProperty(navigator, "clipboard", {configurable: true, value: clipboard});
const sections = [...document.querySelectorAll("section.table")];
for (const details of document.querySelectorAll("section.table > details")) details.open = true;
const copy = () => {
  // What was folded is filled a moment later.
  if (!sections.every((section) => section.querySelector("tbody"))) return setTimeout(copy, 1);
  for (const section of sections) {
    const rows = ["[data-do=all]", "[data-do=open]:not([hidden])"];
    const columns = [".columns > summary", ".columns p button"];
    for (const selector of [...rows, ...columns, "[data-do=csv]"]) section.querySelector(selector)?.click();
  }
  done(Object.fromEntries(sections.map((section, place) => {
    const heads = [...section.querySelectorAll("thead tr:last-child th")];
    return [section.id.slice(6), [heads.map((head) => head.dataset.key), texts[place]]];
  })));
};
copy();
"""


@pytest.mark.parametrize("name", ["v100_resnet50_workers0", "a100_nccl"])
def test_every_view_of_real_trace_matches_report(page, logdir, name, tmp_path):
    assert main(["analyze", str(real_file(name)), "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    seen = set()
    page.open(run=name)
    for view, title in list(zip(VIEWS, page.titles(), strict=True))[:-1]:
        page.press(title, "aside nav button")
        assert page.run("return document.querySelectorAll('.problem').length") == 0
        shown = page.browser.execute_async_script(COPY_TABLES)
        for table, (keys, text) in shown.items():
            columns = [c["key"] for c in report["tables"][table]["columns"][1:] if c["unit"] != "text"]
            truth = [
                [float(row[key]) for key in columns if isinstance(row[key], int | float)]
                for row in raw_rows(report["tables"][table])
            ]
            lines = list(csv.reader(io.StringIO(text, newline="")))[1:]
            rows = [
                [
                    float(cell)
                    for key, cell in zip(keys, line[-len(keys) :], strict=True)
                    if key in columns and cell
                ]
                for line in lines
            ]
            assert rows == truth, (view, table)
        seen |= set(shown)
    filled = {table for table, value in report["tables"].items() if value["rows"]}
    assert seen == filled
    assert {"operators", "kernels", "step_breakdown", "device_usage"} <= seen


def test_ranks_share_one_timeline(page):
    page.open(run="two_ranks", view="trace", find=json.dumps({"kind": "idle: host", "rank": 1}))
    page.wait("return document.querySelectorAll('.tl-canvas').length === 1")
    groups = page.run("return [...document.querySelectorAll('.tl-group .tl-name')].map(g => g.textContent)")
    hosts = [f"rank {rank} {group}" for rank in (0, 1) for group in ("critical path", "host", "other")]
    assert groups == ["rank 0 GPU 0", "rank 1 GPU 1", *hosts]
    lane = page.run(
        "return [...document.querySelectorAll('.tl-selection dt')].find(d => d.textContent === 'Lane')"
        ".nextSibling.textContent"
    )
    assert lane == "GPU 1 stream 7"
    page.open(run="two_ranks", view="trace", rank="1")
    assert "rank 0" not in page.text()


def test_links_lead_from_idle_time_to_row_and_back(page):
    """From idle time to the copy that ended it, to the copy's row in Kernels, and back."""
    name = "v100_resnet50_workers0"
    page.open(run=name, view="trace", find=json.dumps({"kind": "idle: data loading"}))
    page.wait("return document.querySelector('.tl-selection h2') !== null")
    assert page.run("return document.querySelector('.tl-count').value") == "1 of 6"
    assert "waited for data" in page.text()
    assert "_SingleProcessDataLoaderIter.__next__" in page.text()
    page.run("document.querySelector('.tl-selection .tl-link').click()")
    kernel = page.run("return document.querySelector('.tl-selection h2').textContent")
    assert kernel == "Memcpy HtoD (Pageable -> Device)"
    page.press("In Kernels", ".tl-selection a")
    assert page.title() == "Kernels"
    assert json.loads(page.link()["row"]) == {"name": kernel}
    page.run("history.back()")
    page.wait("return document.querySelector('.tl-selection h2') !== null")
    assert page.run("return document.querySelector('.tl-selection h2').textContent") == kernel


def test_changing_run_keeps_window_if_it_exists(page):
    page.open()
    runs = page.run("return [...document.querySelector('aside select').options].map(o => o.value)")
    assert {"net/version_0", "net/version_1", "<b>hostile</b>"} < set(runs)
    page.open(run="net/version_1", window="modelprof/window_0")
    page.choose("Run", "net/version_0")
    assert page.choosers() == {
        "Run": "net/version_0",
        "Loop": "modelprof/run",
        "Window": "modelprof/window_0",
    }
    assert page.link()["run"] == "net/version_0"


def test_fit_and_newest_window_are_selected_by_default(page):
    page.open(run="net/version_0")
    assert page.choosers()["Loop"] == "modelprof/run", "and not the validation after it"
    assert page.choosers()["Window"] == "modelprof/window_1"


def test_link_restores_selection(page):
    wanted = {
        "run": "net/version_0",
        "profile": "modelprof/run",
        "window": "modelprof/window_0",
        "view": "operators",
    }
    page.open_tab(**wanted)
    assert page.title() == "Operators"
    assert page.link() == wanted
    page.press("Memory", "aside nav button")
    page.open_tab(**page.link())
    assert page.title() == "Memory"
    assert page.choosers()["Window"] == "modelprof/window_0"


def test_missing_parts_of_link_are_replaced(page):
    page.open(run="no such run", window="modelprof/window_99", view="nothing", rank="7")
    assert page.title() == "Overview"
    said = page.run("return document.querySelector('aside .problem').textContent")
    assert said == "This link's run no such run no longer exists."
    assert page.link()["run"] in page.run(
        "return [...document.querySelectorAll('aside .chooser option')].map(o => o.value)"
    )


def test_changed_address_is_followed(page):
    page.open(run="net/version_0", view="overview")
    page.run("parent.location.hash = parent.location.hash.replace('view=overview', 'view=memory')")
    page.wait("return document.querySelector('main > h1')?.textContent === 'Memory'")


def test_digits_switch_view_unless_typed_into_field(page):
    page.open(run="net/version_1", view="overview")
    page.run("document.querySelector('main').focus()")
    page.browser.switch_to.active_element.send_keys("3")
    page.wait("return document.querySelector('main > h1')?.textContent === 'Operators'")
    page.settle()
    page.browser.find_element("css selector", "main input[type=search]").send_keys("2")
    page.settle()
    assert page.title() == "Operators"
    page.run("document.querySelector('main').focus()")
    page.browser.switch_to.active_element.send_keys("-")
    page.wait("return document.querySelector('main > h1')?.textContent === 'Compare'")


def test_two_runs_are_compared_and_swapped(page):
    page.open(run="net/version_1", window="modelprof/window_0", view="compare")
    assert page.link()["before_run"] == "net/version_0", "the newest of those before it"
    page.open(run="net/version_0", view="compare")
    assert page.link()["before_run"] != "newer head", "it cannot be read"
    page.browser.switch_to.default_content()
    said(page.browser)  # the remaining runs are only partly readable
    page.open(run="net/version_1", before_run="net/version_0", view="compare")
    assert page.run("return document.getElementById('table-comparison_phases') !== null")
    assert page.run("return document.getElementById('table-comparison_steps') !== null")
    page.press("Swap", ".sides button")
    page.wait("return decodeURIComponent(parent.location.hash).includes('before_run=net/version_1')")
    assert page.link()["run"] == "net/version_0"


def test_address_holds_table_state_of_both_comparisons(page):
    page.open(run="net/version_1", before_run="net/version_0", view="compare")
    names = page.run(
        "return [...document.querySelectorAll('.comparison')].map((one) => {"
        " const table = one.querySelector('section.table:has(thead button)');"
        " table.querySelector('thead button').click();"
        " return table.id.replace('table-', ''); })"
    )
    assert len(set(names)) == 2
    page.wait(f"return {json.dumps(names)}.every((name) => parent.location.hash.includes(name))")


def test_evaluation_loop_has_no_window(page):
    page.open(run="net/version_0", profile="modelprof_1/validate/run", view="operators")
    assert "Window" not in page.choosers()
    assert "ModelProfCallback(active=10)" in page.text()


def test_newer_profile_is_reported_and_others_work(page):
    page.open(run="newer", view="overview")
    assert "A newer lightning-modelprof wrote it" in page.run(
        "return document.querySelector('.problem').textContent"
    )
    page.browser.switch_to.default_content()
    said(page.browser)  # the browser itself logs answers with 404
    page.open(run="newer head", view="overview")
    assert "newer lightning-modelprof" in page.run("return document.querySelector('.problem').textContent")
    page.choose("Run", "net/version_0")
    assert page.run("return document.querySelectorAll('.problem').length") == 0


def test_damaged_columns_are_reported_and_other_parts_shown(page):
    page.open(run="damaged steps", view="steps")
    told = page.run("return document.querySelector('.problem').textContent")
    assert "can't read its steps: damaged bytes: cut off." in told
    said(page.browser)  # the browser itself logs answers with 404
    assert page.run("return document.getElementById('table-phases') !== null")
    page.press("Overview", "aside nav button")
    assert page.run("return document.querySelectorAll('.problem').length") == 0


def test_hostile_names_are_text(page):
    page.open(run="<b>hostile</b>", view="tables")
    assert page.run("return document.querySelectorAll('main img, main b b, aside b, aside i').length") == 0
    assert "<img src=x" in page.text()
    assert page.choosers()["Run"] == "<b>hostile</b>"


def test_empty_view_says_what_to_do(page):
    page.open(run="<b>hostile</b>", view="steps")
    assert "ModelProfCallback" in page.run("return document.querySelector('.empty').textContent")


def test_headings_have_definitions(page):
    page.open(run="net/version_0", view="tables")
    page.browser.execute_async_script(COPY_TABLES)  # opens all and shows all columns
    titles = "return [...document.querySelectorAll('h2, thead th')].map(one => one.title).filter(Boolean)"
    assert {definition("table", "phases"), column_definition("phases", "max_ns")} < set(page.run(titles))


def test_theme_follows_tensorboard(page):
    page.open_tab(run="net/version_0", view="overview")
    read = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(read)
    page.run("parent.document.body.classList.add('dark-mode')")
    page.wait("return document.documentElement.dataset.theme === 'dark'")
    assert page.run(read) != light
