"""Links from a step in the Steps view to its bar and, if a window recorded it, to its trace."""

from __future__ import annotations

import json

import pytest

from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.show.tensorboard.profile_blob import unpack_head, unpack_steps
from tests.support.browser_keys import ActionChains, Keys
from tests.tensorboard_plugin.test_dashboard_address import shows
from tests.tensorboard_plugin.test_dashboard_browser import page

__all__ = ["page"]  # a fixture

pytestmark = pytest.mark.slow

RUN = {"run": "net/version_0", "profile": "modelprof/run", "window": "modelprof/window_0"}


@pytest.fixture(scope="module")
def recorded(server):
    """Steps that a window recorded, according to the run."""
    steps = unpack_steps(server.columns(run=RUN["run"], tag=RUN["profile"], kind="steps"))
    return steps.step[(steps.tags & int(StepTag.PROFILED)) != 0].tolist()


def trace_of_step(page, step, recorded):
    """Check that a link led to the trace of the window that recorded this step, and found the step."""
    shows(page, "Trace")
    assert json.loads(page.link()["find"]) == {"step": step}
    assert page.choosers()["Window"] == f"modelprof/window_{recorded.index(step) // 2}"
    page.wait("return document.querySelector('.tl-canvas') !== null")
    assert "has no step" not in page.text()


def test_windows_list_recorded_steps(server, recorded):
    run = next(one for one in server.ask("profiles")["runs"] if one["name"] == RUN["run"])
    windows = [one["recorded"] for one in run["profiles"] if one["kind"] == "window"]
    assert [list(range(first, last + 1)) for ((first, last),) in windows] == [recorded[:2], recorded[2:]]


def test_head_of_older_version_has_no_recorded_steps():
    old = b'{"schema_version":1,"kind":"window","loop":"fit","window":0,"label":"steps 3 to 4","ranks":[]}'
    assert unpack_head(old).recorded == ()


def test_slowest_step_links_to_its_trace(page, recorded):
    page.open(**RUN, view="steps")
    page.wait("return document.querySelector('.steps-slowest .goto') !== null")
    linked = page.run(
        "return [...document.querySelectorAll('.steps-slowest tbody tr')].map(r =>"
        " [Number(r.cells[0].textContent), r.querySelector('a.goto')?.dataset.goto ?? null])"
    )
    assert {step for step, goto in linked if goto} == {step for step, _ in linked} & set(recorded)
    step = max(step for step, goto in linked if goto)
    assert step in recorded[2:], "of the window that is not chosen"
    page.run(
        "[...document.querySelectorAll('.steps-slowest tbody tr')].find(r =>"
        " Number(r.cells[0].textContent) === arguments[0]).querySelector('a.goto').click()",
        step,
    )
    trace_of_step(page, step, recorded)
    page.run("history.back()")
    shows(page, "Steps")


def test_clicked_bar_links_to_zoom_and_trace(page, recorded):
    page.open(**RUN, view="steps")
    over = page.browser.find_element("css selector", ".steps-plot .u-over")
    count = 32
    place = (recorded[0] + 0.5) / count - 0.5
    ActionChains(page.browser, duration=50).move_to_element_with_offset(
        over, round(place * over.size["width"]), 0
    ).click().perform()
    picked = page.browser.find_element("css selector", ".steps-picked")
    assert picked.text.startswith(f"Selected step {recorded[0]} ")
    ActionChains(page.browser, duration=50).move_to_element(
        picked.find_element("css selector", "button")
    ).click().perform()
    first, last = json.loads(page.link()["at_steps"])["range"]
    assert first <= recorded[0] <= last
    assert last - first < count - 1
    picked.find_element("css selector", "a.goto").click()
    trace_of_step(page, recorded[0], recorded)


def test_enter_selects_bar_at_cursor(page, recorded):
    page.open(**RUN, view="steps")
    field = page.browser.find_element("css selector", ".steps-field")
    field.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * recorded[1], Keys.ENTER)
    assert page.run("return document.activeElement.textContent") == "Zoom in"
    page.browser.switch_to.active_element.send_keys(Keys.TAB)
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    trace_of_step(page, recorded[1], recorded)


def test_unrecorded_step_has_no_link(page):
    page.open(**RUN, view="steps")
    page.browser.find_element("css selector", ".steps-field").send_keys(Keys.HOME, Keys.ENTER)
    assert page.run("return document.querySelector('.steps-picked').innerText").endswith(
        "not recorded by a window."
    )
