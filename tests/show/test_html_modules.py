"""Report parts on another page, with modules served as files, as in the dashboard."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightning_modelprof.show.html.colors import color_of
from lightning_modelprof.show.html.document import encode, page_document, table_data
from lightning_modelprof.show.html.page import SHARED_FILES, SHARED_FOLDER
from tests.show.test_html_browser import about, box, names, press
from tests.show.test_html_copying import TAKE, csv_of, group_by, groups
from tests.show.test_html_groups import operators_of
from tests.show.test_html_places import after
from tests.show.test_show_html import chart
from tests.support.sample_flames import stacks_flame

PAGE = """<!DOCTYPE html>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><link rel="stylesheet" href="parts.css"><main></main>
<script type="module" src="start.js"></script>
"""
START = """
import { drawDocument } from "./document.js";
const { charts, flames, tables } = drawDocument(await (await fetch("document.json")).json());
const drawn = [...tables, ...flames].map(({ element }) => element);
document.querySelector("main").append(...drawn, ...charts);
document.title = "ready";
"""
READY = """
const done = arguments[0];
const look = () => document.title === "ready" ? done() : setTimeout(look, 20);
look();
"""


class Quiet(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".js": "text/javascript"}

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def served(browser, tmp_path):
    for name in SHARED_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((SHARED_FOLDER / name).read_bytes())
    table = operators_of(90)
    tables = [table_data(table, no_slices=[table.rows[0][0]])]
    document = page_document([chart()], [stacks_flame()], tables)
    (tmp_path / "document.json").write_bytes(encode(document))
    (tmp_path / "start.js").write_text(START)
    (tmp_path / "index.html").write_text(PAGE)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get_log("browser")
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.execute_async_script(READY)
        yield browser
        assert browser.get_log("browser") == []
        browser.get("about:blank")
        server.shutdown()


def test_every_control_works(served):
    group_by(served, "Namespace")
    press(served, "[data-do=close]")
    assert len(names(served)) == len(groups(served)) == 4
    served.execute_script(TAKE)
    assert len(csv_of(served)) == 5
    box(served, "weighted_nll").click()
    assert about(served).startswith("weighted_nll, train.py:12")
    served.find_element("css selector", ".about .at").click()
    assert after(served, "output.copied") == "Copied"
    assert served.execute_script("return window.copied") == "train.py:12"
    served.execute_script(
        "document.querySelector('.field').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))"
    )
    assert served.execute_script("return document.querySelector('.point').textContent") == "step 2"


def test_rows_link_to_their_slices(served):
    links = served.execute_script(
        "return [...document.querySelectorAll('tbody tr')].slice(0, 3).map(row => {"
        "  row.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
        "  const link = row.querySelector('a.row-goto');"
        "  return [link.hidden, link.dataset.goto]})"
    )
    assert [is_hidden for is_hidden, _ in links] == [True, False, False]
    goto = [{"view": "trace", "find": {"name": row[0]}} for row in operators_of(90).rows[1:3]]
    assert [json.loads(one) for _, one in links[1:]] == goto


def test_styles_work_outside_report_page(served):
    colour = "return getComputedStyle(document.documentElement).getPropertyValue('--m-forward')"
    assert served.execute_script(colour) == color_of("m-forward")
    folded = "return getComputedStyle(document.querySelector('.tools')).display"
    assert served.execute_script(folded) == "flex"
