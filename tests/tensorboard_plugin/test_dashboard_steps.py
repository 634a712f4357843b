"""The Steps view in a real browser, under TensorBoard's policy. Needs Chromium, its driver and selenium."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product
from urllib.parse import quote

import numpy as np
import pytest

from lightning_modelprof.analysis.steps.benchmark import benchmark
from lightning_modelprof.report.build_dashboard_entry import step_columns
from lightning_modelprof.report.model import Unit
from lightning_modelprof.run.loops import FIT
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings
from lightning_modelprof.show.html.colors import color_of
from lightning_modelprof.show.tensorboard.profile_blob import pack_steps
from lightning_modelprof.units import format_amount, format_duration
from tests.support.dashboard_page import load, wait, watched
from tests.support.steps_page import page_files, sample_steps, with_profiler_time

pytestmark = pytest.mark.slow

ActionChains = pytest.importorskip(
    "selenium.webdriver.common.action_chains", reason="selenium is not installed"
).ActionChains
Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys


@pytest.fixture(autouse=True, scope="module")
def size(browser):
    browser.set_window_size(1300, 1000)


@pytest.fixture
def page(browser, site):
    """Opens the view."""

    def open_page(steps, options=None, columns=None):
        packed = pack_steps(step_columns(steps, FIT) if columns is None else columns)
        load(browser, site, page_files(packed), quote(json.dumps(options or {})))
        wait(browser, "return Boolean(window.view)")
        settle(browser)
        return browser

    with watched(browser, site[0]):
        yield open_page


def settle(browser):
    """Wait until the figures match the range."""
    wait(browser, "return document.querySelector('.steps-range[aria-busy=true]') === null")


def run(browser, body):
    """Result of JavaScript with imported modules and the view's ``steps``."""
    result = browser.execute_async_script(
        "const done = arguments[0];"
        "(async () => {"
        "  const [data, bins, statistics] = await Promise.all("
        "    ['steps/data', 'steps/bins', 'steps/statistics']"
        "      .map((name) => import(`/${name}.js`)));"
        "  const steps = window.unpacked && new data.Steps(window.unpacked);"
        f"  {body}"
        "})().then((value) => done(JSON.stringify(value)),"
        "  (error) => done(JSON.stringify({error: String(error)})))"
    )
    value = json.loads(result)
    assert not (isinstance(value, dict) and "error" in value), value
    return value


def press(browser, *keys):
    browser.execute_script("document.querySelector('.steps-field').focus({preventScroll: true})")
    for key in keys:
        ActionChains(browser).send_keys(key).perform()
    settle(browser)


def state(browser):
    return browser.execute_script("return window.view.state()")


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def figures(browser):
    return dict(
        browser.execute_script(
            "return [...document.querySelectorAll('.steps .figures div')]"
            ".map(d => [d.children[0].textContent, d.children[1].textContent])"
        )
    )


def rows(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))",
        selector,
    )


def has_color(browser, color, canvas=0, tolerance=0):
    """Whether a canvas has many opaque pixels of this color."""
    return browser.execute_script(
        "const canvas = document.querySelectorAll('.steps canvas')[arguments[1]];"
        "const {width, height} = canvas;"
        "const copy = new OffscreenCanvas(width, height).getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(canvas, 0, 0);"
        "const d = copy.getImageData(0, 0, width, height).data;"
        "let n = 0;"
        "for (let i = 0; i < d.length; i += 4)"
        "  n += d[i + 3] === 255 && "
        "arguments[0].every((v, k) => Math.abs(d[i + k] - v) <= arguments[2]);"
        "return n > 50",
        color,
        canvas,
        tolerance,
    )


BACKWARD, FORWARD = (list(bytes.fromhex(color_of(f"m-{key}")[1:])) for key in ("backward", "forward"))
STEPS = sample_steps(600)
LABELS = {phase.key: phase.label for phase in PHASES}
PROFILER = PHASE_INDEX["profiler"]
IN_REST, IN_LAYER = 400_000, 5_000_000
"""Time in the phase ``profiler`` that puts it among the other phases, and that gives it its own layer."""


# Numbers


def test_range_shows_its_benchmark(page):
    browser = page(STEPS)
    assert figures(browser) == {}  # Python writes those of the whole run
    browser = page(STEPS, {"initial": {"range": [30, 299]}})
    expected = benchmark(STEPS.select((STEPS.step >= 30) & (STEPS.step <= 299)))
    assert figures(browser) == {
        "steps": "270",
        "clean": str(expected.num_steps),
        "avg": format_duration(expected.batch_cost_ns.avg),
        "p50": format_duration(expected.batch_cost_ns.p50),
        "p99": format_duration(expected.batch_cost_ns.p99),
        "steps/s": f"{expected.steps_per_s.avg:.3g}",
        "samples/s": f"{expected.samples_per_s.avg:,.0f}",
        "Reader Ratio": format_amount(expected.reader_ratio.avg, Unit.RATIO),
    }
    press(browser, Keys.ESCAPE)
    assert figures(browser) == {}


def with_unknowns(steps):
    """Leave the samples of some steps and the fetches of others unmeasured."""
    steps.samples[300:310] = NOT_MEASURED
    steps.phases_ns[400:410, PHASE_INDEX["dataloader"]] = NOT_MEASURED
    return steps


RANGES = ((0, 599), (3, 57), (100, 100), (101, 101), (305, 420), (405, 599), (13, 19))


def near(value):
    return None if value is None else pytest.approx(value, rel=1e-12)


def test_range_figures_match_benchmark(page):
    steps = with_profiler_time(with_unknowns(sample_steps(600, seed=3)), IN_LAYER)
    steps.phases_ns[310:315, PROFILER] = NOT_MEASURED
    browser = page(steps)
    for first, last in RANGES:
        got = run(
            browser,
            f"const f = statistics.rangeFigures(steps, {first}, {last});"
            "return {...f, sorted: [...f.sorted]}",
        )
        inside = steps.select((steps.step >= first) & (steps.step <= last))
        expected = benchmark(inside)
        assert got["steps"] == last - first + 1
        if expected is None:
            assert (got["clean"], got["sorted"]) == (0, [])
            assert {got[name] for name in ("mean", "p50", "stepsPerS", "samplesPerS", "readerRatio")} == {
                None
            }
            continue
        assert got["clean"] == expected.num_steps
        durations = np.sort(inside.clean().duration_ns)
        assert got["sorted"] == durations.tolist()
        assert got["mean"] == near(durations.mean())
        for percent in (50, 90, 99):
            assert got[f"p{percent}"] == near(float(np.percentile(durations, percent)))
        assert got["stepsPerS"] == near(len(durations) / (durations.sum() / 1e9))
        samples = expected.samples_per_s
        assert got["samplesPerS"] == near(samples and samples.avg)
        ratio = expected.reader_ratio
        assert got["readerRatio"] == near(ratio and ratio.avg)


def test_points_are_means_of_equal_numbers_of_steps(page):
    browser = page(STEPS)
    columns = step_columns(STEPS)
    for most, only_clean, (first, last) in product((1, 7, 50, 1_000), (False, True), RANGES):
        got = run(
            browser,
            f"const p = bins.joinSteps(steps, {first}, {last}, {most}, {str(only_clean).lower()});"
            "const list = (a) => Array.from(a, (v) => Number.isNaN(v) ? null : v);"
            "const names = ['start', 'end', 'count', 'mean', 'longest', 'slowest', 'leftOut', 'rate'];"
            "const columns = Object.fromEntries(names.map((name) => [name, list(p[name])]));"
            "return {...p, ...columns, layers: p.layers.map(list), of: steps.layers}",
        )
        size = -(-(last - first + 1) // most)
        assert got["size"] == size
        starts = list(range(first, last + 1, size))
        assert got["start"] == starts
        assert got["end"] == [min(start + size, last + 1) for start in starts]
        for point, start in enumerate(starts):
            place = slice(start, min(start + size, last + 1))
            left_out = columns.exclusion[place] != 0
            counted = ~left_out if only_clean else np.ones_like(left_out)
            assert got["count"][point] == counted.sum()
            assert got["leftOut"][point] == near(left_out.mean())
            if not counted.any():
                assert got["mean"][point] is got["longest"][point] is got["rate"][point] is None
                assert got["slowest"][point] == -1
                continue
            duration = STEPS.duration_ns[place][counted]
            assert got["mean"][point] == near(duration.mean())
            assert got["longest"][point] == duration.max() == STEPS.duration_ns[got["slowest"][point]]
            assert got["rate"][point] == near(1e9 * STEPS.samples[place][counted].sum() / duration.sum())
            layers = [
                columns.phases_ns[place][counted][:, layer["phases"]].sum(axis=1).mean()
                for layer in got["of"]
            ]
            assert [values[point] for values in got["layers"]] == [near(value) for value in layers]
            assert sum(layers) == near(duration.mean())  # the layers stack up to the whole step


def counted_steps(steps, only_clean, first, last):
    """Numbers, times and phases of the counted steps, with profiler time unless ``only_clean``."""
    places = [step for step in range(first, last + 1) if not (only_clean and steps.tags[step] & NOT_CLEAN)]
    phases = steps.phases_ns[places].astype(float)
    if only_clean:
        phases[:, PROFILER] = 0
    return places, phases.sum(axis=1), phases


@pytest.mark.parametrize("profiler_ns", [IN_REST, IN_LAYER])
@pytest.mark.parametrize("only_clean", [False, True])
def test_only_clean_steps_exclude_profiler_time(page, profiler_ns, only_clean):
    steps = with_profiler_time(sample_steps(600, seed=7), profiler_ns)
    browser = page(steps)
    clean = str(only_clean).lower()
    for first, last in RANGES:
        got = run(
            browser,
            f"const p = bins.joinSteps(steps, {first}, {last}, 1, {clean});"
            "const [mean, longest, slowest, rate] = [p.mean[0], p.longest[0], p.slowest[0], p.rate[0]];"
            "const layers = Object.fromEntries(steps.layers.map((one, n) => [one.key, p.layers[n][0]]));"
            f"const order = statistics.slowestSteps(steps, {first}, {last}, 20, {clean});"
            "const rest = steps.layers.find((one) => one.key === 'rest').phases;"
            "const inRest = rest.map((place) => steps.phases[place].key);"
            "return {mean, longest, slowest, rate, layers, inRest, order}",
        )
        assert ("profiler" in got["inRest"]) == (profiler_ns == IN_REST)
        places, times, phases = counted_steps(steps, only_clean, first, last)
        if not places:
            assert (got["mean"], got["rate"], got["order"]) == (None, None, [])
            continue
        assert got["mean"] == near(times.mean())
        assert got["longest"] == times.max()
        assert got["slowest"] == places[int(times.argmax())]
        assert got["rate"] == near(steps.samples[places].sum() / (times.sum() / 1e9))
        means = dict(zip((phase.key for phase in PHASES), phases.mean(axis=0), strict=True))
        means["rest"] = sum(means[key] for key in got["inRest"])
        assert got["layers"] == {key: near(means[key]) for key in got["layers"]}
        assert sum(got["layers"].values()) == near(times.mean())
        ranked = sorted(zip(-times, places, strict=True))
        assert got["order"] == [place for _, place in ranked[:20]]


@pytest.mark.parametrize("profiler_ns", [IN_REST, IN_LAYER])
def test_figures_causes_and_throughput_of_clean_steps_agree(page, profiler_ns):
    steps = with_profiler_time(sample_steps(600, seed=7), profiler_ns)
    browser = page(steps)
    for first, last in ((0, 599), (30, 99), (250, 420)):
        got = run(
            browser,
            f"const f = statistics.rangeFigures(steps, {first}, {last});"
            f"const p = bins.joinSteps(steps, {first}, {last}, 1, true);"
            f"const causes = statistics.causesOfSlowness(steps, {first}, {last}, f.p90);"
            "return {causes, mean: f.mean, samplesPerS: f.samplesPerS, p90: f.p90,"
            "  pointMean: p.mean[0], pointRate: p.rate[0]}",
        )
        expected = benchmark(steps.select((steps.step >= first) & (steps.step <= last)))
        assert got["mean"] == near(expected.batch_cost_ns.avg) == got["pointMean"]
        assert got["samplesPerS"] == near(expected.samples_per_s.avg) == got["pointRate"]
        assert got["p90"] == near(expected.batch_cost_ns.p90)
        _, times, phases = counted_steps(steps, True, first, last)
        slow = times > np.percentile(times, 90)
        causes = got["causes"]
        assert (causes["slow"], causes["others"]) == (slow.sum(), (~slow).sum())
        whole = times[slow].mean() - times[~slow].mean()
        assert causes["step"]["more"] == pytest.approx(whole)
        shown = {row["label"]: row for row in causes["phases"]}
        assert set(shown) == {
            LABELS[phase.key] for phase in PHASES if phases[:, PHASE_INDEX[phase.key]].any()
        }
        for phase in PHASES:
            if row := shown.get(LABELS[phase.key]):
                column = phases[:, PHASE_INDEX[phase.key]]
                means = column[slow].mean(), column[~slow].mean()
                assert (row["slow"], row["others"]) == near(means)
                assert row["more"] == pytest.approx(means[0] - means[1])
        assert sum(row["more"] for row in shown.values()) == pytest.approx(whole)
        # The sample's slow steps are slow because of this phase.
        assert causes["phases"][0]["label"] == LABELS["dataloader"]


def test_slowest_steps_are_found(page):
    steps = sample_steps(600, seed=5)
    steps.duration_ns[[40, 50, 60]] = steps.duration_ns[50] * 10  # equal ones are in order of their numbers
    browser = page(steps)
    exclusion = step_columns(steps).exclusion
    for only_clean, (first, last) in product((False, True), RANGES):
        got = run(
            browser, f"return statistics.slowestSteps(steps, {first}, {last}, 20, {str(only_clean).lower()})"
        )
        shown = [step for step in range(first, last + 1) if not (only_clean and exclusion[step])]
        assert got == sorted(shown, key=lambda step: (-steps.duration_ns[step], step))[:20]


def test_causes_need_slow_and_other_steps(page):
    browser = page(sample_steps(50))
    assert run(browser, "return statistics.causesOfSlowness(steps, 30, 49, 1e12)") is None
    assert run(browser, "return statistics.causesOfSlowness(steps, 30, 49, 0)") is None


def test_histogram_counts_every_step_once(page):
    browser = page(sample_steps(30))
    random = np.random.default_rng(1)
    samples = {
        "normal": random.normal(1e7, 1e6, 5_000).astype(int),
        "tail": np.append(random.normal(1e7, 1e6, 500).astype(int), [9e7, 3e8]).astype(int),
        "equal": np.full(40, 7_000_000),
        "one": np.array([3]),
    }
    for kind, values in samples.items():
        values.sort()
        got = run(browser, f"return statistics.histogram(new Float64Array({values.tolist()}))")
        tail = np.percentile(values, 99)
        end = tail if values[-1] > 2 * tail else values[-1]
        shown = values[values <= end]
        assert got["beyond"] == len(values) - len(shown), kind
        num_bars = len(got["counts"])
        assert 1 <= num_bars <= 60, kind
        edges = got["low"] + got["width"] * np.arange(num_bars + 1)
        edges[-1] += 1e-3  # the last bar contains the maximum, which rounding may put past its edge
        assert got["counts"] == np.histogram(shown, edges)[0].tolist(), kind
        assert sum(got["counts"]) == len(shown), kind
        if kind == "normal":  # as many as by numpy's rule, but at most 60
            assert num_bars == min(60, len(np.histogram_bin_edges(shown.astype(float), "auto")) - 1)
    assert run(browser, "return statistics.histogram(new Float64Array(0))") is None


def test_few_outliers_do_not_flatten_chart(page):
    browser = page(sample_steps(30))
    even, odd = [10.0] * 99, [*[10.0] * 99, 1e4]
    assert run(browser, f"return bins.axisTop({even}, {even})") == pytest.approx(10.4)
    assert run(browser, f"return bins.axisTop({odd}, {odd})") == 15
    often = [60.0] * 50 + [10.0] * 50  # slowest step of each bar, high in half of the bars
    assert run(browser, f"return bins.axisTop({even}, {often})") == 60
    assert run(browser, f"return bins.axisTop({even}, {[4 * one / 6 for one in often]})") == pytest.approx(44)
    assert run(browser, "return bins.axisTop([1, 2, 900], [1, 2, 900])") == pytest.approx(936)
    assert run(browser, "return bins.axisTop([NaN], [NaN])") == 1


# The page


def test_tables_and_readout_show_measured_times(page):
    browser = page(STEPS)
    table = rows(browser, ".steps-slowest")
    order = sorted(range(600), key=lambda step: (-STEPS.duration_ns[step], step))[:20]
    assert [row[0] for row in table] == [str(step) for step in order]
    median = np.percentile(STEPS.clean().duration_ns, 50)
    columns = step_columns(STEPS)
    # Phases are ordered by their time in these steps.
    largest = np.argsort(-columns.phases_ns[order].sum(axis=0))
    for row, step in zip(table, order, strict=True):
        times = columns.phases_ns[step, largest]
        assert row[1:] == [
            format_duration(int(STEPS.duration_ns[step])),
            f"{STEPS.duration_ns[step] / median:.2f}×",
            columns.exclusions[columns.exclusion[step]],
            *(format_duration(int(ns)) if ns else "0" for ns in times),
        ]
    press(browser, Keys.HOME)
    begin = f"step 0: {format_duration(int(STEPS.duration_ns[0]))}; "
    assert text(browser, ".steps-chart .steps-readout").startswith(begin)
    assert text(browser, ".steps-chart .steps-readout").endswith(
        "not clean (skip_first); also: first in an epoch, without an optimizer step"
    )
    layers = dict(
        browser.execute_script(
            "return [...document.querySelectorAll('.legend button')]"
            ".map(b => [b.childNodes[1].textContent, b.querySelector('b').textContent])"
        )
    )
    assert layers["Forward"] == format_duration(int(STEPS.phases_ns[0, PHASE_INDEX["forward"]]))
    assert len(layers) == 8


def test_page_says_which_times_include_profiler_overhead(page):
    steps = with_profiler_time(sample_steps(600, seed=7), IN_LAYER)
    steps.tags[5] = 0  # clean, with profiler time
    steps.phases_ns[5, PHASE_INDEX["forward"]] += 10**8
    steps.duration_ns[5] += 10**8
    time_ns, net_ns = int(steps.duration_ns[5]), int(steps.duration_ns[5]) - IN_LAYER
    browser = page(steps, {"initial": {"range": [0, 99]}})
    _, times, _ = counted_steps(steps, True, 0, 99)
    median = np.percentile(times, 50)

    def slowest():
        names = browser.execute_script(
            "return [...document.querySelectorAll('.steps-slowest thead th')].map(h => h.textContent)"
        )
        return dict(zip(names, rows(browser, ".steps-slowest")[0], strict=True))

    def readout():
        press(browser, Keys.HOME, *[Keys.ARROW_RIGHT] * 5)
        return text(browser, ".steps-chart .steps-readout")

    with_it = slowest()
    assert (with_it["step"], with_it["time"]) == ("5", format_duration(time_ns))
    assert with_it["× median"] == f"{time_ns / median:.2f}×"
    assert with_it["Profiler"] == format_duration(IN_LAYER)
    assert readout().startswith(f"step 5: {format_duration(time_ns)}; {32e9 / time_ns:.3g} ")
    assert "include profiler overhead" in text(browser, ".steps-chart .note")
    assert "include profiler overhead" in text(browser, ".steps-slowest .note")
    assert "without profiler overhead" in text(browser, ".steps-range > .note")
    assert LABELS["profiler"] not in {row[0] for row in rows(browser, ".steps-causes")}

    browser.find_element("css selector", ".steps .tools input").click()
    settle(browser)
    without = slowest()
    assert (without["step"], without["time"]) == ("5", format_duration(net_ns))
    assert without["× median"] == f"{net_ns / median:.2f}×"
    assert "Profiler" not in without
    assert readout().startswith(f"step 5: {format_duration(net_ns)}; {32e9 / net_ns:.3g} ")
    for note in (".steps-chart .note", ".steps-slowest .note"):
        assert "exclude profiler overhead" in text(browser, note)
        assert "include profiler overhead" not in text(browser, note)


def test_run_without_profiler_time_does_not_mention_it(page):
    steps = sample_steps(100)
    steps.duration_ns -= steps.phases_ns[:, PROFILER]
    steps.phases_ns[:, PROFILER] = 0
    assert "Profiler" not in text(page(steps), "main")


def test_keyboard_moves_zooms_pans_and_resets(page):
    browser = page(STEPS)
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.END, Keys.ARROW_LEFT)
    assert text(browser, ".steps-chart .steps-readout").startswith("step 598: ")
    press(browser, Keys.ESCAPE)
    assert state(browser)["range"] is None
    press(browser, Keys.HOME, "+")
    assert state(browser)["range"] == [0, 299]  # the step under the cursor keeps its place
    press(browser, "+")
    assert state(browser)["range"] == [0, 149]
    assert figures(browser)["steps"] == "150"
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    settle(browser)
    assert state(browser)["range"] == [38, 187]
    press(browser, "-", "-", "-")
    assert state(browser)["range"] is None
    for _ in range(12):
        press(browser, "+")
    first, last = state(browser)["range"]
    assert first == last
    press(browser, "-")
    assert state(browser)["range"] != [first, last]
    press(browser, Keys.ESCAPE)
    assert state(browser)["range"] is None
    assert browser.execute_script("return window.states.at(-1)") == state(browser)


def test_reset_button_moves_focus_to_charts(page):
    browser = page(STEPS)
    press(browser, Keys.HOME, "+")
    browser.find_element("css selector", ".steps > .tools button").send_keys(Keys.ENTER)
    settle(browser)
    assert state(browser)["range"] is None
    assert browser.execute_script("return document.activeElement.className") == "steps-field"


def drag(browser, start, end, chart=0):
    over = browser.find_elements("css selector", ".steps-field .u-over")[chart]
    width = over.size["width"]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    (
        ActionChains(browser, duration=50)
        .move_to_element_with_offset(over, round((start - 0.5) * width), 0)
        .click_and_hold()
        .move_to_element_with_offset(over, round((end - 0.5) * width), 0)
        .release()
        .perform()
    )
    settle(browser)
    return over


@pytest.mark.parametrize("chart", [0, 1])
def test_drag_zooms_and_double_click_resets(page, chart):
    browser = page(STEPS)
    over = drag(browser, 0.25, 0.5, chart)
    first, last = state(browser)["range"]
    assert abs(first - 150) <= 2
    assert abs(last - 300) <= 2
    assert text(browser, ".tools output") == f"steps {first} to {last}"
    drag(browser, 0.5, 0.25, chart)  # backwards, within the visible range
    again = state(browser)["range"]
    assert abs(again[0] - (first + 0.25 * (last - first))) <= 2
    assert abs(again[1] - (first + 0.5 * (last - first))) <= 2
    ActionChains(browser, duration=50).double_click(over).perform()
    settle(browser)
    assert state(browser)["range"] is None
    drag(browser, 0.1, 0.2, chart)
    browser.find_element("css selector", ".steps .tools button").click()
    assert state(browser)["range"] is None


def histogram_texts(browser):
    """Readout of each bar of the histogram, from left to right."""
    return browser.execute_script(
        "const [field, point] = ['.field', '.point'].map(s => document.querySelector(`.steps-pair ${s}`));"
        "const press = (key) => field.dispatchEvent(new KeyboardEvent('keydown', {key}));"
        "const texts = [];"
        "for (press('Home'); texts.at(-1) !== point.textContent; press('ArrowRight'))"
        "  texts.push(point.textContent);"
        "return texts"
    )


def test_dragged_range_shows_histogram_and_slowest_tenth(page):
    steps = sample_steps(600)
    steps.tags[200:400] = 0
    steps.phases_ns[:, PHASE_INDEX["forward"]] += 10**8  # three digits can't tell two bars' edges apart
    steps.duration_ns += 10**8
    steps.phases_ns[300] *= 20
    steps.duration_ns[300] *= 20
    browser = page(steps)
    assert text(browser, ".steps-pair") == ""  # for the whole run, both come from Python
    drag(browser, 0.25, 0.75)
    first, last = state(browser)["range"]
    _, times, _ = counted_steps(steps, True, first, last)
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    beyond = int((times > p99).sum())
    about = f"Clean steps in the range. {beyond} slower steps past the right edge."
    assert beyond > 1
    assert text(browser, ".steps-pair .chart .note") == about

    said = [one.rpartition(": ") for one in histogram_texts(browser)]
    counts = [int(count.split()[0]) for _, _, count in said]
    assert len(said) > 5
    assert all(len(set(edges.split(" to "))) == 2 for edges, _, _ in said)
    assert sum(counts) == len(times) - beyond
    drawn = browser.execute_script(
        "const {x, width, height} = document.querySelector('.steps-pair path').getBBox();"
        "const percent = (mark) => parseFloat(mark.style.left);"
        "const marks = [...document.querySelectorAll('.steps-mark')];"
        "const ticks = (axis, side) => [...document.querySelectorAll(`.steps-pair .${axis} span`)]"
        "  .map((one) => [one.textContent, parseFloat(one.style[side])]);"
        "return {x, width, height, places: marks.map(percent), texts: marks.map((mark) => mark.textContent),"
        "  xs: ticks('xs', 'left'), ys: ticks('ys', 'bottom')}"
    )
    assert (drawn["x"], drawn["width"]) == pytest.approx((0.06, len(counts) - 0.12), rel=1e-4)
    assert drawn["height"] == pytest.approx(max(counts))
    percentiles = {"p50": p50, "p90": p90, "p99": p99}
    assert drawn["texts"] == [f"{name} {format_duration(time)}" for name, time in percentiles.items()]

    def place(time):
        return pytest.approx(100 * (time - times.min()) / (p99 - times.min()), abs=1e-3)

    assert drawn["places"] == [place(time) for time in percentiles.values()]
    assert min(len(drawn["xs"]), len(drawn["ys"])) >= 3
    for label, at in drawn["xs"]:
        number, unit = label.split()
        assert (at, unit) == (place(1e6 * float(number)), "ms")
    for label, at in drawn["ys"]:
        assert at == pytest.approx(100 * int(label) / (1.25 * max(counts)), abs=1e-3)

    slow = times > p90
    means = times[slow].mean(), times[~slow].mean()
    assert f"the {slow.sum()} clean steps above p90 ({format_duration(p90)})" in text(
        browser, ".steps-causes"
    )
    assert rows(browser, ".steps-causes")[-1] == [
        "Whole step", *map(format_duration, means), f"+{format_duration(means[0] - means[1])}", "100%",
    ]  # fmt: skip
    press(browser, Keys.ESCAPE)
    assert text(browser, ".steps-pair") == ""


def test_charts_share_one_cursor(page):
    browser = page(STEPS)
    over = browser.find_elements("css selector", ".steps-field .u-over")[1]
    ActionChains(browser, duration=50).move_to_element(over).perform()
    wait(browser, "return document.querySelector('.steps-chart .steps-readout').textContent !== ''")
    moved = browser.execute_script(
        "return [...document.querySelectorAll('.steps-field .u-cursor-x')].map(c => c.style.transform)"
    )
    places = [float(one.partition("(")[2].partition("px")[0]) for one in moved]
    assert places[0] > 100
    assert abs(places[0] - places[1]) < 2


def test_row_zooms_to_its_step(page):
    browser = page(STEPS)
    slowest = int(rows(browser, ".steps-slowest")[0][0])
    browser.execute_script("document.querySelector('.steps-slowest tbody button').click()")
    settle(browser)
    first, last = state(browser)["range"]
    assert first <= slowest <= last
    assert last - first == 30
    assert text(browser, ".steps-chart .steps-readout").startswith(f"step {slowest}: ")
    assert len(browser.execute_script("return window.states")) == 1


def legend(browser, label, key=""):
    browser.execute_script(
        "const button = [...document.querySelectorAll('.legend button')]"
        ".find(b => b.childNodes[1].textContent === arguments[0]);"
        "button.dispatchEvent(new MouseEvent('click', {bubbles: true, [arguments[1] || 'x']: true}))",
        label,
        key,
    )
    settle(browser)
    time.sleep(0.1)  # the canvas is drawn in a later frame


def pressed(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('.legend [aria-pressed=true]')]"
        ".map(b => b.childNodes[1].textContent)"
    )


def test_legend_hides_layers_and_restacks_others(page):
    browser = page(sample_steps(60))
    everything = pressed(browser)
    assert has_color(browser, BACKWARD)
    assert has_color(browser, FORWARD)
    legend(browser, "Backward")
    assert not has_color(browser, BACKWARD)
    assert has_color(browser, FORWARD)
    assert state(browser)["hidden"] == ["backward"]
    legend(browser, "Backward")
    assert has_color(browser, BACKWARD)
    for key in ("altKey", "shiftKey"):
        legend(browser, "Backward", key)
        assert pressed(browser) == ["Backward"]
        assert not has_color(browser, FORWARD)
        legend(browser, "Backward", key)  # already alone, so show all again
        assert pressed(browser) == everything


def test_excluded_steps_are_pale(page):
    steps = sample_steps(40)
    steps.tags[:] = 0
    assert has_color(page(steps), BACKWARD)
    steps.tags[:] = StepTag.VALIDATION
    browser = page(steps)
    assert not has_color(browser, BACKWARD)
    assert has_color(browser, [(color + 255) / 2 for color in BACKWARD], tolerance=1)


def test_checkbox_shows_only_clean_steps(page):
    browser = page(STEPS)
    assert "shaded" in text(browser, ".steps-chart .note")
    browser.find_element("css selector", ".steps .tools input").click()
    settle(browser)
    assert state(browser)["clean"] is True
    assert {row[3] for row in rows(browser, ".steps-slowest")} == {""}
    press(browser, Keys.HOME)
    assert text(browser, ".steps-chart .steps-readout").startswith("step 0: ")
    assert text(browser, ".legend b") == ""


def test_link_restores_state(page):
    wanted = {"range": [120, 310], "clean": True, "hidden": ["forward", "rest"]}
    browser = page(STEPS, {"initial": wanted})
    assert state(browser) == wanted
    assert browser.execute_script("return window.states") == []


def test_invalid_link_shows_all_steps(page):
    browser = page(STEPS)
    for broken in (
        {"range": [-5, 10**9], "hidden": ["<b>", 7]},
        {"range": 3, "hidden": 4},
        {"range": ["a", None]},
        None,
        7,
    ):
        browser.execute_script("window.mount({ initial: arguments[0] })", broken)
        assert state(browser) == {"range": None, "clean": False, "hidden": []}, broken


def test_long_run_says_how_many_steps_a_bar_joins(page):
    random = np.random.default_rng(0)
    steps = sample_steps(10)
    places = random.integers(0, 10, 100_000)
    many = StepTimings(**{name: column[places] for name, column in steps.columns().items()})
    many.step = np.arange(100_000)
    many.tags = np.zeros(100_000, np.int64)
    browser = page(many)
    size = run(browser, "return document.querySelector('.steps canvas').width")
    assert "Each bar is the mean of " in text(browser, ".steps-chart .note")
    assert has_color(browser, BACKWARD)
    assert size < 1_300
    press(browser, Keys.HOME)
    assert text(browser, ".steps-chart .steps-readout").startswith("steps 0 to ")
    press(browser, "+")
    assert figures(browser)["steps"] == "50,000"
    assert figures(browser)["p50"] == format_duration(float(np.percentile(many.duration_ns[:50_000], 50)))


def test_theme_changes_charts(page):
    browser = page(STEPS)
    dim = {"light": [0x5B, 0x64, 0x70], "dark": [0x9A, 0xA4, 0xB0]}
    for theme, other in (("light", "dark"), ("dark", "light")):
        browser.execute_script(
            "document.documentElement.dataset.theme = arguments[0];"
            "document.dispatchEvent(new CustomEvent('themechange'))",
            theme,
        )
        time.sleep(0.2)
        for canvas in range(2):
            assert has_color(browser, dim[theme], canvas), (theme, canvas)
            assert not has_color(browser, dim[other], canvas), (theme, canvas)


def test_charts_follow_page_width(page):
    browser = page(STEPS)
    assert "One bar per step." in text(browser, ".steps-chart .note")
    browser.execute_script("document.querySelector('main').style.width = '700px'")
    fits = (
        "return [...document.querySelectorAll('.steps-plot')]"
        ".every(p => p.querySelector('.uplot').offsetWidth === p.clientWidth && p.clientWidth < 700)"
    )
    wait(browser, fits)
    settle(browser)
    assert "Each bar is the mean of 2 neighboring steps." in text(browser, ".steps-chart .note")


def test_run_without_steps_says_why(page):
    browser = page(StepTimings.empty())
    assert text(browser, "main").startswith("No step finished")
    assert state(browser) == {"range": None, "clean": False, "hidden": []}


def test_single_step_that_is_not_clean_is_shown(page):
    browser = page(sample_steps(1))
    assert [row[2] for row in rows(browser, ".steps-slowest")] == ["–"]
    press(browser, Keys.HOME, "+", "-", Keys.ARROW_RIGHT)
    assert text(browser, ".steps-chart .steps-readout").startswith("step 0: ")


@pytest.mark.parametrize(
    ("last", "texts", "why"),
    [(9, 0, "No clean step in this range."), (10, 1, "No clean step took longer than p90.")],
)
def test_range_without_slow_steps_says_so(page, last, texts, why):
    browser = page(STEPS, {"initial": {"range": [2, last]}})
    assert figures(browser)["clean"] == str(texts)
    assert text(browser, ".steps-causes .note") == why
    assert rows(browser, ".steps-causes") == []
    if texts:
        assert [one.partition(": ")[2] for one in histogram_texts(browser)] == ["1 step"]
    else:
        assert text(browser, ".steps-pair .chart .note") == why


def test_unmeasured_phase_is_named(page):
    steps = with_unknowns(sample_steps(600))
    browser = page(steps, {"initial": {"range": [200, 599]}})
    notes = browser.execute_script("return [...document.querySelectorAll('.note')].map(n => n.textContent)")
    assert "Not measured: Dataloader." in notes
    assert (figures(browser)["Reader Ratio"], figures(browser)["samples/s"]) == ("–", "–")
    *_, last, whole = rows(browser, ".steps-causes")
    assert (last[0], last[2:]) == (LABELS["dataloader"], ["–"] * 3)
    assert whole[-1] == "100%"
    assert "Dataloader" not in pressed(browser)


def test_hostile_names_are_text(page):
    hostile = "<img src=x onerror=alert(1)>"
    columns = step_columns(STEPS)
    phases = tuple((key, hostile) for key, _ in columns.phases)
    browser = page(STEPS, columns=replace(columns, phases=phases, exclusions=(hostile,) * 9))
    press(browser, Keys.HOME, "+")
    assert browser.execute_script("return document.images.length") == 0
    assert hostile in text(browser, ".legend")
    assert hostile in text(browser, ".steps-causes")
    assert hostile in text(browser, ".steps-slowest")


def test_destroy_leaves_nothing_behind(page):
    browser = page(STEPS)
    looked = (
        "let looks = 0;"
        "const look = window.getComputedStyle;"
        "window.getComputedStyle = (...what) => { looks += 1; return look(...what); };"
        "document.dispatchEvent(new CustomEvent('themechange'));"
        "return looks"
    )
    assert browser.execute_script(looked) > 0
    browser.execute_script("window.view.destroy()")
    assert browser.execute_script(looked) == 0
    browser.execute_script("document.querySelector('main').style.width = '500px'")
    time.sleep(0.2)
    assert browser.execute_script("return document.querySelector('main').children.length") == 0
