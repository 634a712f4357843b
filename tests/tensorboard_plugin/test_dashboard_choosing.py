"""Choosing a run and its baseline: search, defaults and warnings."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from lightning_modelprof.report.build_dashboard_entry import step_columns
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.report.summary import RunSummary, Summary
from lightning_modelprof.show.tensorboard.event_file import write_event_file
from lightning_modelprof.show.tensorboard.profile_blob import pack_head, unpack_head
from tests.support.browser_keys import Keys
from tests.support.chromium import said
from tests.support.dashboard_profiles import fit, report_of
from tests.support.sample_reports import benchmark_of
from tests.support.steps_page import sample_steps
from tests.support.tensorboard_server import tensorboard
from tests.tensorboard_plugin.test_dashboard_browser import Page

pytestmark = pytest.mark.slow

NUM_COPIES = 12
EARLY, LATE = "2026-01-01T09:00:00+00:00", "2026-01-02T09:00:00+00:00"


def run_of(model, **info):
    """The profile of a run with a known model."""
    report = report_of()
    known = {"status": "finished", "created": info.pop("created", "")}
    samples = info.pop("samples", 8)
    steps = sample_steps(50)
    steps.samples[:] = samples
    settings = {"model": model, "device": info.get("device_name", "cpu")}
    summary = Summary(
        run=RunSummary(**known, model=model, **info),
        benchmark=benchmark_of(1e6, samples_per_step=samples),
        settings=settings,
    )
    return DashboardEntry(
        kind="run",
        loop="fit",
        window=None,
        label="x",
        report=replace(report, summary=summary),
        steps=step_columns(steps),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A fit with two windows, twelve copies of it, and runs of two other models between them in time."""
    root = tmp_path_factory.mktemp("logs")
    write_event_file(root / "first", [("modelprof/run", run_of("Net"))])
    wide = {"device_name": "A100", "samples": 64}
    write_event_file(root / "wide", [("modelprof/run", run_of("Wide", created=LATE, **wide))])
    fit(root)
    for number in range(NUM_COPIES):
        shutil.copytree(root / "net" / "version_0", root / f"trial_{number:02}", symlinks=True)
    write_event_file(root / "imported", [("modelprof/run", run_of("Wide", created=EARLY, **wide))])
    with tensorboard(root) as running:
        yield running.wait_for("first", "wide", "imported", "net/version_0", f"trial_{NUM_COPIES - 1:02}")


@pytest.fixture
def page(browser, server):
    said(browser)
    yield Page(browser, server)
    browser.switch_to.default_content()
    assert [line for line in said(browser) if "favicon" not in line] == []


def shown_runs(page, place="aside"):
    return page.run(
        f"return [...document.querySelector('{place} [data-key$=run]').options].map(o => o.value)"
    )


def test_search_finds_run_by_words(page):
    page.open(run="net/version_0", view="memory")
    assert len(shown_runs(page)) == NUM_COPIES + 4
    field = page.browser.find_element("css selector", "aside input[type=search]")
    field.send_keys("trial 1")
    assert shown_runs(page) == ["net/version_0", "trial_01", "trial_10", "trial_11"], "the chosen one stays"
    count = "return document.querySelector('aside .filter output').textContent"
    assert page.run(count) == f"3 of {NUM_COPIES + 4}"
    assert page.link()["filter"] == "trial 1"
    field.send_keys(Keys.ENTER)
    page.wait("return document.querySelector('aside [data-key=run]').value === 'trial_01'")
    page.settle()
    assert page.title() == "Memory"
    assert page.run("return document.activeElement.type") == "search", "the focus stays"
    page.open(**page.link())
    assert shown_runs(page) == ["trial_01", "trial_10", "trial_11"]
    page.browser.find_element("css selector", "aside input[type=search]").send_keys(Keys.ARROW_DOWN)
    assert page.run("return document.activeElement.dataset.key") == "run"


def test_enter_in_empty_search_keeps_run(page):
    page.open(run="trial_03", view="memory")
    field = page.browser.find_element("css selector", "aside input[type=search]")
    field.send_keys(" ", Keys.ENTER)
    page.settle()
    assert page.link()["run"] == "trial_03"


def test_search_finds_baseline(page):
    page.open(run="net/version_0", view="compare")
    page.browser.find_element("css selector", ".sides input[type=search]").send_keys("wide")
    assert set(shown_runs(page, ".sides")) == {"wide", page.link()["before_run"]}


def test_window_is_compared_with_previous_window(page):
    page.open(run="trial_03", window="modelprof/window_1", view="compare")
    link = page.link()
    assert (link["before_run"], link["before_window"]) == ("trial_03", "modelprof/window_0")
    assert page.run("return document.querySelectorAll('main section.comparison').length") == 1


def test_baseline_follows_run_unless_chosen(page):
    page.open(run="trial_03", window="modelprof/window_1", view="compare")
    page.choose("Run", "trial_05")
    wanted = {"run": "trial_05", "before_run": "trial_05", "before_window": "modelprof/window_0"}
    assert wanted.items() <= page.link().items()
    page.press("Memory", "aside nav button")
    page.choose("Run", "trial_06")
    page.press("Compare", "aside nav button")
    assert page.link()["before_run"] == "trial_06"
    page.open(run="trial_03", window="modelprof/window_1", before_run="wide", view="compare")
    page.choose("Run", "trial_05")
    assert page.link()["before_run"] == "wide"


def test_first_window_is_compared_with_last_run_of_its_model(page):
    page.open(run="net/version_0", window="modelprof/window_0", view="compare")
    assert page.link()["before_run"] == "first", "not the run of another model, though that is newer"


def test_before_is_the_run_that_started_first(page):
    """``imported`` was written to the log last, as by ``lightning-modelprof tensorboard``, but ran first."""
    order = "return [...document.querySelectorAll('main .facts dt')].some(one => one.textContent === 'Order')"
    page.open(run="wide", view="compare")
    assert page.link()["before_run"] == "imported"
    assert not page.run(order)
    page.open(run="imported", view="compare")
    assert page.link()["before_run"] == "wide", "no run is older"
    assert page.run(order)


def test_differences_between_sides_are_named(page):
    page.open(run="first", before_run="wide", view="compare")
    lines = "return [...document.querySelectorAll('main .parts [role=status]')].map(one => one.textContent)"
    assert page.run(lines) == [
        "Model differs: Wide before, Net after.",
        "Device differs: A100 before, cpu after.",
        "Batch size differs: 64 before, 8 after.",
    ]
    title = page.run("return document.querySelector('main .comparison h2').textContent")
    assert "no speedup shown because model, device and batch size differ" in title
    page.open(run="trial_03", before_run="trial_02", view="compare")
    assert page.run("return document.querySelector('main .parts [role=status]')") is None


def test_head_of_older_version_has_no_model():
    packed = pack_head(run_of("Net"))
    assert unpack_head(packed).model == "Net"
    assert unpack_head(packed.replace(b',"model":"Net"', b"")).model == ""
