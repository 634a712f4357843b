"""The timeline in a real browser, compared with brute force. Needs Chromium, its driver and selenium."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from itertools import combinations
from typing import get_args

import numpy as np
import pytest

from lightning_modelprof.analysis.trace.critical_path import Cause
from lightning_modelprof.analysis.trace.idle import CAUSES
from lightning_modelprof.report.timeline.details import WORDS
from lightning_modelprof.units import NS_PER, UNIT_NAMES, format_duration
from tests.show import test_colors
from tests.support.dashboard_page import wait
from tests.support.sample_reports import HOSTILE_NAMES
from tests.support.timeline_page import make_trace, opened, packed_trace

pytestmark = pytest.mark.slow

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys

ROW_PIXELS = 18
SHIFT, CONTROL = 8, 2
META, COLUMNS = make_trace(num_operators=100, num_steps=4)  # several slices per pixel
PACKED = packed_trace(META, COLUMNS)
BEGIN, DURATION = COLUMNS["begin"], COLUMNS["duration"]
END = BEGIN + DURATION
ROWS = np.concatenate(([0], np.cumsum([count for _, _, count in META["rows"]])))
ROW_OF = np.repeat(np.arange(len(META["rows"])), [count for _, _, count in META["rows"]])
NAMES = np.array(META["names"])[COLUMNS["name"]]
NS_OF = {UNIT_NAMES[unit]: ns for unit, ns in NS_PER.items()}


@pytest.fixture(autouse=True, scope="module")
def size(browser):
    browser.set_window_size(1400, 1000)


@pytest.fixture
def page(browser, site):
    with opened(browser, site, PACKED):
        yield browser


def next_frame(browser):
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def state(browser):
    return browser.execute_script("return view.state()")


def box(browser, selector):
    return browser.execute_script(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return {x: b.x, y: b.y, width: b.width, height: b.height}",
        selector,
    )


def mouse(browser, kind, x, y, modifiers=0, **more):
    browser.execute_cdp_cmd(
        "Input.dispatchMouseEvent",
        {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1, "modifiers": modifiers, **more},
    )


def click(browser, x, y, clicks=1):
    for count in range(1, clicks + 1):
        mouse(browser, "mousePressed", x, y, clickCount=count)
        mouse(browser, "mouseReleased", x, y, clickCount=count)


def drag(browser, start, stop, modifiers=0):
    mouse(browser, "mousePressed", *start, modifiers)
    for part in (0.3, 0.7, 1):
        x, y = (a + (b - a) * part for a, b in zip(start, stop, strict=True))
        mouse(browser, "mouseMoved", x, y, modifiers, buttons=1)
    mouse(browser, "mouseReleased", *stop, modifiers)
    next_frame(browser)


def press(browser, *keys):
    canvas = browser.find_element("css selector", ".tl-canvas")
    browser.execute_script("arguments[0].focus()", canvas)
    for key in keys:
        canvas.send_keys(key)


def zoom(browser, begin, end):
    browser.execute_script("view.zoomTo(arguments[0], arguments[1])", int(begin), int(end))
    next_frame(browser)


def select(browser, index):
    browser.execute_script("view.select(arguments[0])", int(index))
    next_frame(browser)


def row_middles(browser):
    """Vertical position of each row's middle in the page, from the labels next to the rows."""
    tops = browser.execute_script(
        "return [...document.querySelectorAll('.tl-lane:not(.tl-group, .tl-counter)')].map("
        "l => l.getBoundingClientRect().y)"
    )
    return [tops[lane] + depth * ROW_PIXELS + 8 for lane, depth, _ in META["rows"]]


def pixel_lines(browser, heights):
    """Colors in lines of the canvas's pixels, from a copy, because reading slows a canvas down."""
    return browser.execute_script(
        "const c = document.querySelector('.tl-canvas'); const copy = new OffscreenCanvas(c.width, c.height);"
        "const context = copy.getContext('2d', { willReadFrequently: true }); context.drawImage(c, 0, 0);"
        "const line = (y) => new Uint32Array(context.getImageData(0, y, c.width, 1).data.buffer);"
        "return arguments[0].map(y => [...line(y)])",
        heights,
    )


def lines_of_rows(browser):
    """Vertical position of each row in the canvas, below the slices' names."""
    top = box(browser, ".tl-canvas")["y"]
    return [round(y - top) + 7 for y in row_middles(browser)]


def most_in(row, begin, end):
    """The slices of a row that take most of a time range, and how much, by looking at all of them."""
    own = np.arange(ROWS[row], ROWS[row + 1])
    overlap = np.minimum(END[own], end) - np.maximum(BEGIN[own], begin)
    most = overlap.max()
    return (set(own[overlap >= most - 1e-3].tolist()), most) if most > 0 else ({-1}, 0.0)


def busy_in(row, begin, end):
    own = np.arange(ROWS[row], ROWS[row + 1])
    return float(np.maximum(0, np.minimum(END[own], end) - np.maximum(BEGIN[own], begin)).sum())


def darkness(color):
    return sum(255 - (color >> shift & 255) for shift in (0, 8, 16))


def expected_at(row, begin, per_pixel, pixel):
    for offset in (0, 1, -1, 2, -2):
        start = begin + (pixel + offset) * per_pixel
        best, _ = most_in(row, start, start + per_pixel)
        if best != {-1}:
            return best
    return {-1}


def test_click_selects_slice_drawn_there(page):
    for share in (1, 0.1, 0.003):
        check_clicks(page, share)


def check_clicks(page, share):
    random = np.random.default_rng(int(1000 * share))
    length = META["end_ns"] - META["begin_ns"]
    begin = META["begin_ns"] if share == 1 else BEGIN[ROWS[3] + 40] - 0.2 * share * length  # many at once
    zoom(page, begin, begin + share * length)
    canvas = box(page, ".tl-canvas")
    now = state(page)
    per_pixel = (now["end"] - now["begin"]) / canvas["width"]
    found = []
    for row, y in enumerate(row_middles(page)):
        own = np.arange(ROWS[row], ROWS[row + 1])
        seen = own[(END[own] > now["begin"]) & (BEGIN[own] < now["end"])]
        edges = ((np.concatenate((BEGIN[seen], END[seen])) - now["begin"]) / per_pixel).astype(int)
        edges = random.permutation(edges[(edges >= 0) & (edges < int(canvas["width"]))])[:3]
        for pixel in [*edges.tolist(), *random.integers(0, int(canvas["width"]), 3).tolist()]:
            click(page, canvas["x"] + pixel + 0.5, y)
            selected = state(page)["selected"]
            found.append(selected)
            assert selected in expected_at(row, now["begin"], per_pixel, pixel), (row, pixel)
    assert len(set(found)) > 6


def test_pixels_show_busy_time(page):
    for share in (1, 0.02):
        check_pixels(page, share)


def check_pixels(page, share):
    length = META["end_ns"] - META["begin_ns"]
    begin = META["begin_ns"] + (1 - share) * 0.4 * length
    zoom(page, begin, begin + share * length)
    canvas = box(page, ".tl-canvas")
    now = state(page)
    per_pixel = (now["end"] - now["begin"]) / canvas["width"]
    pixels = pixel_lines(page, lines_of_rows(page))
    kinds: dict[tuple[int, int], set[int]] = {}
    partial: dict[tuple[int, int], list[tuple[float, int]]] = {}
    backgrounds = set()
    for row, line in enumerate(pixels):
        for pixel, color in enumerate(line):
            start = now["begin"] + pixel * per_pixel
            best, taken = most_in(row, start, start + per_pixel)
            if best == {-1}:
                backgrounds.add(color)
                continue
            index = min(best)
            key = (int(COLUMNS["category"][index]), int(COLUMNS["name"][index]))
            if taken < per_pixel * (1 - 1e-9):
                if len(best) == 1:
                    partial.setdefault(key, []).append((busy_in(row, start, start + per_pixel), color))
            elif (
                BEGIN[index] < start - 1.5 * per_pixel
            ):  # the first pixel may be the edge to the slice before
                kinds.setdefault(key, set()).add(color)
    assert len(backgrounds) == (2 if share == 1 else 1)  # of even and odd steps
    assert kinds
    assert all(len(colors) == 1 for colors in kinds.values())
    assert not backgrounds & {color for seen in partial.values() for _, color in seen}
    assert not backgrounds & set.union(*kinds.values())
    # The page is white, so less busy pixels are lighter.
    assert partial
    for seen in partial.values():
        shades = [darkness(color) for _, color in sorted(seen)]
        assert shades == sorted(shades)
    spread = [len({color for _, color in seen}) for seen in partial.values()]
    assert share < 1 or max(spread) > 5
    for category in {category for category, _ in kinds}:
        of_it = set.union(*(colors for (kind, _), colors in kinds.items() if kind == category))
        others = set().union(*(colors for (kind, _), colors in kinds.items() if kind != category))
        assert not of_it & others


def panel(browser):
    return dict(
        browser.execute_script(
            "return [...document.querySelectorAll('.tl-selection dl > div')].map("
            "d => [d.children[0].textContent, d.children[1].textContent])"
        )
    )


def test_panel_shows_slice_details(page):
    for row in (1, 2, 4, 9):
        check_panel(page, row)


def check_panel(page, row):
    index = int(ROWS[row]) + 3
    select(page, index)
    lane, depth, _ = META["rows"][row]
    children = [
        child
        for child in range(len(BEGIN))
        if META["rows"][ROW_OF[child]][:2] == [lane, depth + 1]
        and BEGIN[index] <= BEGIN[child]
        and END[child] <= END[index]
    ]
    steps = [number for number, begin, end in META["steps"] if begin <= BEGIN[index] < end]
    shown = panel(page)
    assert (
        page.execute_script("return document.querySelector('.tl-selection h2').textContent") == NAMES[index]
    )
    assert shown["Category"] == META["categories"][COLUMNS["category"][index]]
    assert shown["Lane"] == META["lanes"][lane]["label"]
    number, unit = shown["Start"].split()
    lie = abs(Decimal(number) * NS_OF[unit] - (int(BEGIN[index]) - META["begin_ns"]))
    assert lie <= max(1, int(DURATION[index]) // 100)
    assert shown["Duration"] == format_duration(int(DURATION[index]))
    assert shown["Self time"] == format_duration(int(DURATION[index] - DURATION[children].sum()))
    assert [shown["Step"]] == [str(number) for number in steps]
    assert bool(children) == (row in (1, 2))
    live = page.execute_script("return document.querySelector('.tl-live').textContent")
    assert NAMES[index] in live
    assert shown["Duration"] in live
    detail = page.execute_script("return document.querySelector('.tl-detail')?.textContent ?? null")
    number = COLUMNS["detail"][index]
    assert detail == (META["details"][number] if number >= 0 else None)


def test_kernel_and_launch_link_to_each_other(page):
    kernel = int(ROWS[9]) + 20
    launcher = int(COLUMNS["launch"][kernel])
    zoom(page, BEGIN[kernel] - 1000, END[kernel] + 1000)
    select(page, kernel)
    page.execute_script("document.querySelector('.tl-link').click()")
    now = state(page)
    assert now["selected"] == launcher
    assert now["begin"] <= BEGIN[launcher] <= END[launcher] <= now["end"]
    assert panel(page)["Launches"].count(NAMES[kernel]) >= 1
    links = page.execute_script("return document.querySelectorAll('.tl-link').length")
    assert links == np.count_nonzero(COLUMNS["launch"] == launcher)
    press(page, "l")
    assert state(page)["selected"] == np.flatnonzero(COLUMNS["launch"] == launcher)[0]
    press(page, "l")
    assert state(page)["selected"] == launcher


def search(browser, text):
    field = browser.find_element("css selector", ".tl-search input")
    browser.execute_script("arguments[0].value = arguments[1]", field, text)
    field.send_keys(Keys.ENTER)


def test_search_counts_matches_and_visits_them_by_time(page):
    for text in ("gemm", "OPERATOR_1", "aten _1", "no such name"):
        page.execute_script("window.mount()")
        check_search(page, text)


def check_search(page, text):
    words = text.lower().split()
    matches = [index for index, name in enumerate(NAMES) if all(word in name.lower() for word in words)]
    in_order = sorted(matches, key=lambda index: (BEGIN[index], index))
    search(page, text)
    count = page.execute_script("return document.querySelector('.tl-count').value")
    if not matches:
        assert count == "0"
        assert state(page)["selected"] == -1
        return
    assert count == f"1 of {len(matches):,}"
    gone = [state(page)["selected"]]
    for _ in range(4):
        page.execute_script("document.querySelectorAll('.tl-found')[1].click()")
        gone.append(state(page)["selected"])
    assert gone == in_order[:5]
    for _ in range(5):
        page.execute_script("document.querySelectorAll('.tl-found')[0].click()")
    assert state(page)["selected"] == in_order[-1]  # wraps around
    press(page, "n")
    assert state(page)["selected"] == in_order[0]
    assert page.execute_script("return document.querySelector('.tl-count').value") == f"1 of {len(matches):,}"


def test_enter_zooms_to_match_and_its_launch(page):
    field = page.find_element("css selector", ".tl-search input")
    field.send_keys("gemm", Keys.ENTER)
    for _ in range(3):
        now = state(page)
        found = now["selected"]
        launcher = int(COLUMNS["launch"][found])
        assert "gemm" in NAMES[found]
        assert now["begin"] < BEGIN[launcher] <= END[found] < now["end"]
        assert now["end"] - now["begin"] < 1.3 * (END[found] - BEGIN[launcher])
        field.send_keys(Keys.ENTER)
    select(page, launcher)
    press(page, Keys.ENTER)
    now = state(page)
    assert (now["selected"], now["begin"] < BEGIN[launcher], now["end"] > END[found]) == (
        launcher,
        True,
        True,
    )


LEAST = 6
"""Minimum Lab distance between two swatches in the legend."""


def test_every_category_has_its_own_color(browser, site):
    paths = (f"critical path: {cause}" for cause in get_args(Cause))
    categories = [*WORDS, "batch", *(f"idle: {cause}" for cause in CAUSES), *paths, "unknown", "another"]
    columns = COLUMNS | {"category": np.arange(len(BEGIN)) % len(categories)}
    with opened(browser, site, packed_trace(META | {"categories": categories}, columns)):
        for theme in ("light", "dark"):
            browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
            swatches = browser.execute_script(
                "const context = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });"
                "return [...document.querySelectorAll('.tl-legend li')].map(item => {"
                "context.fillStyle = getComputedStyle(item.querySelector('i')).backgroundColor;"
                "context.fillRect(0, 0, 1, 1);"
                "return [item.textContent, [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)]})"
            )
            colors = {name: "#" + bytes(color).hex() for name, color in swatches}
            assert set(colors) == set(categories)
            lab = {name: test_colors.seen(color, "full") for name, color in colors.items()}
            near = [
                (theme, one, other)
                for one, other in combinations(lab, 2)
                if np.linalg.norm(lab[one] - lab[other]) < LEAST
            ]
            assert near == []


def test_notes_are_never_cut(browser, site):
    notes = ["A long note. " * 40, "Another long note. " * 40]
    with opened(browser, site, packed_trace(META | {"notes": notes}, COLUMNS)):
        cut = browser.execute_script(
            "const place = document.querySelector('.tl-notes'); const root = document.querySelector('.tl');"
            "return [place.textContent, place.scrollHeight > place.clientHeight,"
            " place.getBoundingClientRect().bottom > root.getBoundingClientRect().bottom + 1]"
        )
        select(browser, 20)
        assert cut == ["".join(notes), False, False]
        assert box(browser, ".tl-notes")["height"] > 100


def test_search_dims_other_slices(page):
    zoom(page, META["begin_ns"], META["begin_ns"] + 2_000_000)
    lines = lines_of_rows(page)
    background = set(pixel_lines(page, [3])[0])  # of the group's heading
    before = pixel_lines(page, lines)
    page.execute_script(
        "const field = document.querySelector('.tl-search input');"
        "field.value = 'gemm'; field.dispatchEvent(new Event('input'))"
    )
    wait(page, "return view.state().search === 'gemm'")
    next_frame(page)
    after = pixel_lines(page, lines)
    kernels = [row for row, (lane, _, _) in enumerate(META["rows"]) if lane in (2, 3)]
    assert len(lines) > len(kernels) > 0
    for row in range(len(lines)):
        full = [pixel for pixel, color in enumerate(before[row]) if color not in background]
        assert full
        changed = sum(before[row][pixel] != after[row][pixel] for pixel in full)
        is_kernel = row in kernels
        assert (changed < 0.5 * len(full)) if is_kernel else (changed > 0.5 * len(full)), row


def brute_sums(labels, begin, end):
    sums: dict[str, list[float]] = {}
    for index, label in enumerate(labels):
        if END[index] > begin and BEGIN[index] < end:
            one = sums.setdefault(str(label), [0, 0.0])
            one[0] += 1
            one[1] += min(END[index], end) - max(BEGIN[index], begin)
    return sums


def test_range_sums_its_slices(page):
    canvas = box(page, ".tl-canvas")
    y = canvas["y"] + 40
    drag(page, (canvas["x"] + 200, y), (canvas["x"] + 531, y), SHIFT)
    begin, end = state(page)["range"]
    now = state(page)
    per_pixel = (now["end"] - now["begin"]) / canvas["width"]
    assert abs(begin - (now["begin"] + 200 * per_pixel)) < per_pixel
    assert abs(end - (now["begin"] + 531 * per_pixel)) < per_pixel
    for what, labels in (
        ("category", np.array(META["categories"])[COLUMNS["category"]]),
        ("name", NAMES),
    ):
        sums = brute_sums(labels, begin, end)
        rows = page.execute_script(
            f"return [...document.querySelectorAll('.tl-by-{what} tbody tr')].map("
            "r => [...r.cells].map(c => c.textContent))"
        )
        assert len(rows) == min(30, len(sums))
        largest = sorted(sums, key=lambda label: -sums[label][1])[: len(rows)]
        assert [label for label, _, _ in rows] == largest
        for label, count, text in rows:
            assert count == f"{sums[label][0]:,}"
            # Sums of doubles in another order differ in their last digits.
            close = {format_duration(sums[label][1] * (1 + tiny)) for tiny in (-1e-9, 0, 1e-9)}
            assert text in close, label
    heading = page.execute_script("return document.querySelector('.tl-range h2').textContent")
    assert heading.startswith(format_duration(end - begin))
    press(page, Keys.ESCAPE)
    next_frame(page)
    assert state(page)["range"] is None
    assert "Drag" in page.execute_script("return document.querySelector('.tl-range').textContent")


def test_dragging_axis_selects_range(page):
    head = box(page, ".tl-head-canvas")
    drag(page, (head["x"] + 100, head["y"] + 46), (head["x"] + 300, head["y"] + 46))
    begin, end = state(page)["range"]
    assert begin < end
    press(page, "z")
    now = state(page)
    assert (now["begin"], now["end"]) == pytest.approx((begin, end))


def test_keys_move_between_neighbors(page):
    press(page, Keys.ARROW_RIGHT)
    first = state(page)["selected"]
    assert first == 0  # of the first row
    press(page, Keys.ARROW_RIGHT)
    assert state(page)["selected"] == 1
    press(page, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert state(page)["selected"] == 0  # nothing comes before
    press(page, Keys.ARROW_DOWN)
    inside = state(page)["selected"]
    assert inside == min(i for i in range(len(BEGIN)) if META["rows"][ROW_OF[i]][:2] == [0, 1])
    press(page, Keys.ARROW_UP)
    assert state(page)["selected"] == 0
    press(page, Keys.ARROW_DOWN, Keys.ENTER)
    now = state(page)
    assert now["begin"] < BEGIN[inside] < END[inside] < now["end"]
    assert now["end"] - now["begin"] == pytest.approx(1.2 * DURATION[inside])
    press(page, "w")
    assert state(page)["end"] - state(page)["begin"] == pytest.approx(1.2 * DURATION[inside] / 1.4)
    press(page, "s", "0")
    now = state(page)
    assert (now["begin"], now["end"]) == pytest.approx((META["begin_ns"], META["end_ns"]))
    press(page, "r")
    assert state(page)["range"] == [BEGIN[inside], END[inside]]
    press(page, Keys.ESCAPE)
    now = state(page)
    assert (now["selected"], now["range"]) == (-1, None)
    press(page, "?")
    assert page.execute_script("return document.querySelector('.tl-help').open")
    page.execute_script("document.querySelector('.tl-help').close()")


def test_arrows_move_to_nearest_slice_in_next_lane(page):
    (row,) = (row for row, (lane, _, _) in enumerate(META["rows"]) if lane == 3)
    own = np.arange(ROWS[row], ROWS[row + 1])
    for kernel in (ROWS[9] + place for place in (7, 50, 51, 52, 300)):
        select(page, kernel)
        press(page, Keys.ARROW_DOWN)
        away = np.maximum(0, np.maximum(BEGIN[own] - BEGIN[kernel], BEGIN[kernel] - END[own]))
        assert state(page)["selected"] in own[away == away.min()]
        press(page, Keys.ARROW_UP, Keys.ARROW_UP)
        assert META["rows"][ROW_OF[state(page)["selected"]]][0] == 1


def test_wheel_zooms_at_pointer(page):
    canvas = box(page, ".tl-canvas")
    before = state(page)
    x = 300
    mouse(page, "mouseWheel", canvas["x"] + x, canvas["y"] + 40, CONTROL, deltaX=0, deltaY=-240)
    wait(
        page,
        "return view.state().end - view.state().begin < 0.9 * arguments[0]",
        before["end"] - before["begin"],
    )
    after = state(page)

    def at(now):
        return now["begin"] + x / canvas["width"] * (now["end"] - now["begin"])

    assert at(after) == pytest.approx(at(before), abs=2 * (after["end"] - after["begin"]) / canvas["width"])
    mouse(page, "mouseWheel", canvas["x"] + x, canvas["y"] + 40, deltaX=100, deltaY=0)
    wait(page, "return view.state().begin > arguments[0]", after["begin"])
    assert state(page)["end"] - state(page)["begin"] == pytest.approx(after["end"] - after["begin"])


def test_drag_pans_and_double_click_zooms(page):
    zoom(page, BEGIN[10], BEGIN[10] + 1_000_000)
    canvas = box(page, ".tl-canvas")
    before = state(page)
    drag(page, (canvas["x"] + 400, canvas["y"] + 100), (canvas["x"] + 300, canvas["y"] + 100))
    after = state(page)
    moved = (after["begin"] - before["begin"]) / (before["end"] - before["begin"]) * canvas["width"]
    assert moved == pytest.approx(100)
    assert after["selected"] == -1  # a drag isn't a click
    index = int(ROWS[1]) + 1
    zoom(page, BEGIN[index] - 100_000, END[index] + 100_000)
    now = state(page)
    middle = (BEGIN[index] + END[index]) / 2
    x = canvas["x"] + (middle - now["begin"]) / (now["end"] - now["begin"]) * canvas["width"]
    click(page, x, row_middles(page)[1], clicks=2)
    now = state(page)
    assert now["selected"] == index
    assert now["end"] - now["begin"] == pytest.approx(1.2 * DURATION[index])


def test_double_click_zooms_to_slice_in_lowest_row(page):
    """The first click shows the slice's details, but nothing moves, even in the lowest visible row."""
    top = "return document.querySelector('.tl-scroller').scrollTop"
    page.set_window_size(1400, 640)
    try:
        row = len(META["rows"]) - 1  # of the last stream
        index = int(ROWS[row]) + 40
        zoom(page, BEGIN[index] - 5_000, END[index] + 5_000)
        page.execute_script("document.querySelector('.tl-scroller').scrollTop = arguments[0]", 0)
        height = box(page, ".tl-canvas")["height"]
        y = row_middles(page)[row] - box(page, ".tl-canvas")["y"]
        page.execute_script(
            "document.querySelector('.tl-scroller').scrollTop = arguments[0]", y - height + ROW_PIXELS
        )
        next_frame(page)
        assert page.execute_script(top) > 0
        canvas, now = box(page, ".tl-canvas"), state(page)
        x = (BEGIN[index] + END[index]) / 2 - now["begin"]
        x = canvas["x"] + x / (now["end"] - now["begin"]) * canvas["width"]
        click(page, x, row_middles(page)[row], clicks=2)
        next_frame(page)
        now = state(page)
        assert now["selected"] == index
        assert now["end"] - now["begin"] == pytest.approx(1.2 * DURATION[index])
        assert box(page, ".tl-canvas") == canvas
    finally:
        page.set_window_size(1400, 1000)


def test_timeline_keys_do_not_switch_view(page):
    page.execute_async_script(
        "const done = arguments[0]; import('/menu.js').then(({ listenToDigits }) => {"
        "const views = [...'1234567890'].map((key) => ({ key, title: key }));"
        "listenToDigits({ runs: [], views }, (view) => (window.chosen = view)); done(); })"
    )
    for place in (".tl-canvas", ".tl-buttons button:last-child", ".tl-toggle"):
        zoom(page, BEGIN[10], BEGIN[10] + 1_000_000)
        page.execute_script("document.querySelector(arguments[0]).focus()", place)
        page.switch_to.active_element.send_keys("0")
        now = state(page)
        assert (now["begin"], now["end"]) == pytest.approx((META["begin_ns"], META["end_ns"])), place
        assert page.execute_script("return window.chosen ?? null") is None
    page.find_element("css selector", ".tl-search input").send_keys("0")
    assert page.execute_script("return window.chosen ?? null") is None
    page.execute_script("document.activeElement.blur()")
    page.find_element("css selector", "body").send_keys("0")
    assert page.execute_script("return window.chosen") == "0"


def test_times_have_enough_digits_to_differ(page):
    """A slice of 367 µs, 158 ms after the trace's start; marks near its start are never "-0 ms"."""
    begin = "return format.formatBegin(arguments[0], arguments[1])"
    assert page.execute_script(begin, 158_123_456, 3_670) == "158.123 ms"
    index = int(ROWS[3]) + 2
    select(page, index)
    number, unit = panel(page)["Start"].split()
    lie = abs(Decimal(number) * NS_OF[unit] - (int(BEGIN[index]) - META["begin_ns"]))
    assert lie <= max(1, int(DURATION[index]) // 100)
    labels = page.execute_async_script(
        "const done = arguments[0]; import('/timeline/axis.js').then(({ axisOf }) => done("
        "[1, 700, 5e3, 2e5, 1.3e6, 4e7].flatMap((perPixel) => [0.3, 0.499, 0.501, 1].flatMap((part) => {"
        "const first = 1_000_003; const begin = first - part * 100 * perPixel;"
        "return axisOf({ first, begin, end: begin + 1000 * perPixel, perPixel }).marks.map((m) => m.label);"
        "}))))"
    )
    assert labels
    assert not [label for label in labels if label.startswith("-0") and not label.strip("-0. munsh")]


def test_clicks_on_steps_and_overview_move_view(page):
    head = box(page, ".tl-head-canvas")
    click(page, head["x"] + head["width"] * 0.4, head["y"] + 66)
    now = state(page)
    _, begin, end = META["steps"][1]
    assert (now["begin"], now["end"]) == (begin, end)
    press(page, "]")
    assert state(page)["begin"] == META["steps"][2][1]
    press(page, "[")
    assert state(page)["begin"] == begin
    click(page, head["x"] + head["width"] * 0.8, head["y"] + 15)
    now = state(page)
    middle = META["begin_ns"] + 0.8 * (META["end_ns"] - META["begin_ns"])
    assert (now["begin"] + now["end"]) / 2 == pytest.approx(middle, rel=1e-3)


def test_folded_lanes_show_only_outermost_slices(page):
    toggle = "document.querySelector('.tl-lane:not(.tl-group) .tl-toggle')"
    heights = "return [...document.querySelectorAll('.tl-lane')].map(l => l.offsetHeight)"
    before = page.execute_script(heights)
    page.execute_script(f"{toggle}.focus(); {toggle}.click()")
    assert page.execute_script(f"return {toggle}.getAttribute('aria-expanded')") == "false"
    assert page.execute_script(f"return document.activeElement === {toggle}")
    after = page.execute_script(heights)
    rows = sum(lane == 0 for lane, _, _ in META["rows"])
    assert before[1] - after[1] == (rows - 1) * ROW_PIXELS
    select(page, int(ROWS[2]))  # in the folded lane, which opens
    assert page.execute_script(heights) == before
    group = "document.querySelector('.tl-group .tl-toggle')"
    page.execute_script(f"{group}.click()")
    assert len(page.execute_script(heights)) == len(before) - 2


def test_counters_show_value_at_pointer(page):
    canvas = box(page, ".tl-canvas")
    mouse(page, "mouseMoved", canvas["x"] + 700.5, canvas["y"] + 60, button="none")
    next_frame(page)
    now = state(page)
    at = now["begin"] + 700.5 / canvas["width"] * (now["end"] - now["begin"])
    last = np.flatnonzero(COLUMNS["counter_0_time"] <= at)[-1]
    expected = f"{COLUMNS['counter_0_value'][last] / 2**20:.3g} MiB"
    assert page.execute_script("return document.querySelector('.tl-value').textContent") == expected
    tooltip = page.execute_script(
        "const t = document.querySelector('.tl-tooltip'); return t.hidden ? '' : t.textContent"
    )
    assert "operator" in tooltip or "Launch" in tooltip or "ProfilerStep" in tooltip


TRACE = """
window.loads = 0;
const load = async () => { window.loads += 1; return new Blob(["trace"]); };
window.mount({ trace: { file: "rank0.json.gz", where: "", which: "", load, ...arguments[0] } });
"""
BUTTONS = "return [...document.querySelectorAll('.tl-buttons button')].map(b => b.textContent)"


def test_trace_elsewhere_is_named_and_has_no_buttons(page):
    assert "Open in Perfetto" not in page.execute_script(BUTTONS)  # no trace file is known
    page.execute_script(TRACE, {"file": "", "where": "<b>there</b>"})
    assert "Open in Perfetto" not in page.execute_script(BUTTONS)
    assert page.execute_script("return document.querySelector('.tl-where').textContent") == "<b>there</b>"
    page.execute_script(TRACE, {"which": " (rank 3)"})
    assert {"Open in Perfetto (rank 3)", "Download .json.gz (rank 3)"} < set(page.execute_script(BUTTONS))


def test_download_is_the_trace_file(page):
    page.execute_script(TRACE, {})
    page.execute_script(
        "URL.createObjectURL = (blob) => { window.saved = blob; return 'blob:x'; };"
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; };"
        "[...document.querySelectorAll('.tl-buttons button')].find(b => b.title.includes('rank0')).click()"
    )
    wait(page, "return window.named === 'rank0.json.gz'")
    saved = page.execute_async_script("window.saved.text().then(arguments[0])")
    assert (saved, page.execute_script("return window.loads")) == ("trace", 1)


STUB = """
window.sent = [];
window.tab = { postMessage: (data, origin) => window.sent.push([data, origin]) };
window.open = (url) => { window.asked = url; return arguments[0] ? window.tab : null; };
window.answer = (data, origin, source) => {
  const event = new MessageEvent("message", { data, origin });
  Object.defineProperty(event, "source", { value: source });
  window.dispatchEvent(event);
};
[...document.querySelectorAll(".tl-buttons button")].find(b => b.textContent.includes("Perfetto")).click();
"""
MESSAGE = "return document.querySelector('.tl-message').textContent"


def test_perfetto_gets_trace_once_it_answers(page):
    page.execute_script(TRACE, {})
    page.execute_script(STUB, True)
    assert page.execute_script("return window.asked") == "https://ui.perfetto.dev"
    wait(page, "return window.sent.length > 1")
    assert page.execute_script(
        "return window.sent.every(([d, o]) => d === 'PING' && o === 'https://ui.perfetto.dev')"
    )
    page.execute_script(
        "answer('PONG', 'https://evil.example', tab); answer('PONG', 'https://ui.perfetto.dev', window)"
    )
    page.execute_script("answer('PING', 'https://ui.perfetto.dev', tab)")
    time.sleep(0.5)
    assert page.execute_script("return window.sent.every(([d]) => d === 'PING')")  # no other window gets it
    page.execute_script(
        "answer('PONG', 'https://ui.perfetto.dev', tab); answer('PONG', 'https://ui.perfetto.dev', tab)"
    )
    wait(page, "return window.sent.some(([d]) => d.perfetto)")
    count = page.execute_script("return window.sent.length")
    time.sleep(0.4)
    assert page.execute_script("return window.sent.length") == count  # sent once, then no more pings
    got = page.execute_script(
        "const [d, o] = window.sent.at(-1); return [o, d.perfetto.title,"
        "new TextDecoder().decode(d.perfetto.buffer), window.loads]"
    )
    assert got == ["https://ui.perfetto.dev", "test", "trace", 1]
    assert "opened in Perfetto" in page.execute_script(MESSAGE)


def test_unreachable_perfetto_is_reported(page):
    page.execute_script(TRACE, {})
    page.execute_script(STUB, False)
    assert "pop-ups" in page.execute_script(MESSAGE)
    said = page.execute_async_script(
        "const done = arguments[0]; window.open = () => ({ postMessage: () => {} });"
        "import('/timeline/perfetto.js').then(({ openInPerfetto }) =>"
        " openInPerfetto(async () => new Blob([]), 't',"
        " (text) => text.includes('answer. Download') && done(text), 300))"
    )
    assert "Download" in said


def test_hostile_names_are_text(browser, site):
    meta, columns = make_trace(num_operators=3, num_steps=2)
    hostile = [*HOSTILE_NAMES, "<img src=x onerror='window.ran=1'>", "__proto__", "\u202eevil", "a" * 5_000]
    meta = json.loads(json.dumps(meta))
    meta["names"] = [hostile[place % len(hostile)] for place in range(len(meta["names"]))]
    meta["details"] = ["<script>window.ran = 1</script>"]
    meta["categories"] = ["<b>step</b>", "__proto__", "constructor", "kernel", "memcpy"]
    meta["lanes"][0]["label"] = meta["lanes"][0]["group"] = "<img src=x onerror='window.ran=1'>"
    meta["counters"][0]["unit"] = "<i>x</i>"
    with opened(browser, site, packed_trace(meta, columns)):
        for index in range(0, len(columns["begin"]), 7):
            browser.execute_script("view.select(arguments[0])", index)
            shown = "document.querySelector('.tl-selection h2').textContent"
            name = int(columns["name"][index])  # compared in the browser, as a lone surrogate can't be sent
            assert browser.execute_script(f"return {shown} === unpacked.meta.names[{name}]")
        press(browser, "r")
        next_frame(browser)
        time.sleep(0.2)
        assert browser.execute_script("return window.ran === undefined && document.images.length === 0")


def test_empty_timeline_says_so(browser, site):
    meta, columns = make_trace(num_operators=1, num_steps=1)
    empty = {name: values[:0] for name, values in columns.items()}
    with opened(browser, site, packed_trace(meta | {"rows": [], "steps": []}, empty)):
        assert "no slices" in browser.execute_script("return document.getElementById('place').textContent")
        assert state(browser)["selected"] == -1


def test_link_restores_view(page):
    zoom(page, BEGIN[20], BEGIN[20] + 3_000_000)
    select(page, 20)
    wait(page, "return window.changes.length && window.changes.at(-1).selected === 20")
    kept, before = page.execute_script("return window.changes.at(-1)"), state(page)
    assert kept == {
        "selected": 20,
        "zoom": [round(BEGIN[20] - META["begin_ns"]) + at for at in (0, 3_000_000)],
    }
    page.execute_script(
        "view.zoomTo(0, 1e12); view.select(-1); window.mount({ initial: arguments[0] })", kept
    )
    assert state(page) == before
    page.execute_script("window.mount()")
    assert page.execute_script("return view.look()") == {}, "nothing differs from what is shown at first"
    nonsense = {"zoom": ["x", None], "selected": 10**9, "range": [3], "search": 5}
    page.execute_script("window.mount({ initial: arguments[0] })", nonsense)
    now = state(page)
    assert (now["begin"], now["end"]) == (META["steps"][0][1], META["steps"][-1][2])
    assert (now["selected"], now["range"], now["search"]) == (-1, None, "")
    page.execute_script("window.mount({ initial: null })")


def test_theme_changes_canvas_and_destroy_cleans_up(page):
    light = pixel_lines(page, [2])[0][5]
    page.execute_script(
        "document.documentElement.dataset.theme = 'dark';"
        "document.dispatchEvent(new CustomEvent('themechange'))"
    )
    next_frame(page)
    dark = pixel_lines(page, [2])[0][5]
    assert (light, dark) == (0xFFFFFFFF, 0xFF1C1815)
    page.execute_script("view.destroy(); document.dispatchEvent(new CustomEvent('themechange'))")
    next_frame(page)
    assert page.execute_script("return document.getElementById('place').children.length") == 0


def test_high_dpi_screen_gets_all_its_pixels(page):
    metrics = {"width": 1200, "height": 900, "deviceScaleFactor": 2, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        size = (
            "const c = document.querySelector('.tl-canvas'); return c.width / c.getBoundingClientRect().width"
        )
        wait(page, f"return (() => {{ {size} }})() === 2")
        canvas = box(page, ".tl-canvas")
        now = state(page)
        y = row_middles(page)[1]
        click(page, canvas["x"] + 300.25, y)
        half = (now["end"] - now["begin"]) / canvas["width"] / 2
        assert state(page)["selected"] in expected_at(1, now["begin"], half, 600)
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_range_maximum_and_searches_match_brute_force(page):
    random = np.random.default_rng(3)
    for size in (1, 16, 17, 255, 257, 5_000):
        values = random.integers(0, max(2, size // 4), size)
        ranges = np.sort(random.integers(0, size + 1, (200, 2)), axis=1).tolist()
        limits = random.integers(-1, size // 4 + 2, 200).tolist()
        script = """
            const [values, ranges, limits, done] = arguments;
            const modules = ["/timeline/range_max.js", "/sorted.js"].map((name) => import(name));
            Promise.all(modules).then(([{ RangeMax }, { firstAbove, firstFrom }]) => {
              const tree = new RangeMax(values);
              const sorted = Float64Array.from(values).sort();
              done([
                ranges.map(([from, to]) => tree.largest(from, to)),
                ranges.map(([from, to], i) => firstAbove(sorted, from, to, limits[i])),
                ranges.map(([from, to], i) => firstFrom(sorted, from, to, limits[i])),
              ]);
            });
        """
        largest, above, least = page.execute_async_script(script, values.tolist(), ranges, limits)
        ascending = np.sort(values)
        assert len(largest) == 200
        for (start, stop), limit, place, first, at_least in zip(
            ranges, limits, largest, above, least, strict=True
        ):
            assert (place == -1) == (start == stop)
            if start < stop:
                assert start <= place < stop
                assert values[place] == values[start:stop].max()
            own = ascending[start:stop]
            assert first == start + np.count_nonzero(own <= limit)
            assert at_least == start + np.count_nonzero(own < limit)
