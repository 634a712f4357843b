"""Links between a fetch and its batch in the worker lanes, in a real browser. Needs Chromium."""

from __future__ import annotations

import pytest

from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.show.tensorboard.timeline_columns import pack_timeline
from tests.support.dashboard_page import wait
from tests.support.timeline_page import opened
from tests.support.worker_windows import loader, window

pytestmark = pytest.mark.slow

FOUND = timeline_of(window(loader((0, 6, 1_003, 8_003, 9_003), (1, 7, 2_003, 15_003, 20_603))))
PACKED = pack_timeline(FOUND)
NAMES = [FOUND.names[name] for name in FOUND.name.tolist()]
TEXT = "return document.getElementById('place').innerText"


def place_of_fetch(batch):
    launcher = NAMES.index(batch)
    return FOUND.launch.tolist().index(launcher)


def select(browser, place):
    browser.execute_script("window.view.select(arguments[0])", place)


def test_fetch_and_batch_link_to_each_other(browser, site):
    with opened(browser, site, PACKED):
        assert "DataLoader workers" in browser.execute_script(TEXT)
        select(browser, place_of_fetch("batch 7"))  # ready 600 µs before the end of the fetch in step 22
        wait(browser, f"{TEXT}.includes('Batch used')")
        text = browser.execute_script(TEXT)
        assert "Launched by" not in text
        assert "1.50 ms" in text
        browser.execute_script(
            "[...document.querySelectorAll('.tl-link')].find(b => b.textContent === 'batch 7').click()"
        )
        wait(browser, f"{TEXT}.includes('Used after')")
        text = browser.execute_script(TEXT)
        assert "Launches" not in text
        assert browser.execute_script("return window.view.state().selected") == NAMES.index("batch 7")
        for line in ("4 samples", "CPU 1.50 ms of 18.6 ms", "used by step 22"):
            assert line in text


ARROW = """
const [begin, end, done] = arguments;
const canvas = document.querySelector(".tl-canvas");
const context = canvas.getContext("2d");
const [moveTo, curveTo] = [context.moveTo.bind(context), context.bezierCurveTo.bind(context)];
let start, arrows = [];
context.moveTo = (...at) => moveTo(...(start = at));
context.bezierCurveTo = (...at) => {
  arrows.push([start[0], at[4]]);
  curveTo(...at);
};
view.zoomTo(begin, end);
const width = canvas.getBoundingClientRect().width;
requestAnimationFrame(() => requestAnimationFrame(() => done([arrows, width])));
"""


def test_arrow_connects_end_of_batch_to_end_of_fetch(browser, site):
    fetch, batch = place_of_fetch("batch 6"), NAMES.index("batch 6")
    end_ns = FOUND.slice_begin_ns + FOUND.slice_duration_ns
    with opened(browser, site, PACKED):
        for selected in (fetch, batch):
            select(browser, selected)
            arrows, width = browser.execute_async_script(ARROW, 0, 30_000_000)
            (from_x, to_x) = arrows[-1]
            assert from_x == pytest.approx(end_ns[batch] / 30_000_000 * width, abs=3)
            assert to_x + 4 == pytest.approx(end_ns[fetch] / 30_000_000 * width, abs=3)  # then its arrowhead
