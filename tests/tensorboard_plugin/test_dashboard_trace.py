"""What the dashboard's timeline shows and hides in a trace: categories, idle time, links, ranks."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.show.tensorboard.packing import unpack_columns
from lightning_modelprof.show.tensorboard.timeline_columns import pack_timeline
from tests.support.dashboard_page import wait
from tests.support.timeline_page import opened
from tests.support.traces import event, load, make_trace

pytestmark = pytest.mark.slow

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys

US = 1000
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def launch(begin, correlation, tid=1):
    return event("cuda_runtime", "cudaLaunchKernel", begin, begin + 1, tid, correlation=correlation)


def work(begin, end, correlation, name="gemm", stream=7):
    known = {"device": 0, "stream": stream, "correlation": correlation}
    return event("kernel", name, begin, end, stream, 0, **known)


def events():
    """Two steps [100, 200) and [200, 300) after some setup; the device waits for a batch and for the host.

    Device: busy [120, 130), [160, 170) and on another stream [165, 180), [260, 300).
    Idle: [100, 120) host; [130, 160) of which [131, 150) a fetch; [180, 260) of which [201, 251) a fetch.
    """
    return [
        event("cpu_op", "set-up", 0, 50),
        event("python_function", "train.py(3): main", 60, 300),
        event("user_annotation", "ProfilerStep#5", 100, 200),
        event("python_function", "lightning/pytorch/loop.py(9): advance", 101, 199),
        event("python_function", "data.py(7): __getitem__", 131, 150),
        event("user_annotation", FETCH, 131, 150),
        event("cpu_op", "aten::mm", 102, 125),
        launch(119, 1),
        work(120, 130, 1),
        event("cpu_op", "aten::add", 151, 180),
        launch(158, 2),
        work(160, 170, 2, "add"),
        launch(161, 3),
        work(165, 180, 3, "copy", stream=9),
        event("user_annotation", "ProfilerStep#6", 200, 300),
        event("python_function", "data.py(7): __getitem__", 201, 251),
        event("user_annotation", FETCH, 201, 251),
        event("cpu_op", "aten::mm", 252, 299),
        launch(259, 4),
        work(260, 300, 4),
    ]


def packed(*more):
    return pack_timeline(timeline_of(make_trace([*events(), *more])))


@cache
def usual():
    return packed()


@pytest.fixture(autouse=True, scope="module")
def size(browser):
    browser.set_window_size(1400, 1000)


@pytest.fixture
def page(browser, site):
    with opened(browser, site, usual()):
        yield browser


def state(browser):
    return browser.execute_script("return view.state()")


def look(browser):
    return browser.execute_script("return view.look()")


def next_frame(browser):
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def mount(browser, **initial):
    browser.execute_script("window.mount({ initial: arguments[0] })", initial)
    next_frame(browser)


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )


def panel(browser):
    pairs = browser.execute_script(
        "return [...document.querySelectorAll('.tl-selection dl > div')].map("
        "d => [d.children[0].textContent, d.children[1].textContent])"
    )
    return dict(pairs)


def slices_of(columns):
    """Name, category, start and end in microseconds of each slice, by index."""
    meta, values = unpack_columns(columns)
    return [
        (meta["names"][name], meta["categories"][category], begin / US, (begin + duration) / US)
        for name, category, begin, duration in zip(
            *(values[key].tolist() for key in ("name", "category", "begin", "duration")), strict=True
        )
    ]


def place_of(name, begin=None, columns=None):
    """Index of a name's first slice outside the critical path, whose slices are parts of others."""
    every = slices_of(columns or usual())
    return next(
        at
        for at, (own, kind, since, _) in enumerate(every)
        if own == name and begin in {None, since} and not kind.startswith("critical path: ")
    )


def kinds(browser):
    pairs = browser.execute_script(
        "return [...document.querySelectorAll('.tl-kind')].map(b => [b.textContent, b.ariaPressed])"
    )
    return {kind: pressed == "true" for kind, pressed in pairs}


def test_devices_come_first_and_steps_fill_width(page):
    labels = texts(page, ".tl-lane .tl-name")
    assert labels[:4] == ["critical path", "GPU 0", "GPU 0 stream 7", "GPU 0 stream 9"]
    assert labels.index("host") > 3
    now = state(page)
    assert (now["begin"], now["end"]) == (100 * US, 300 * US)  # without the setup before them
    page.execute_script("document.querySelector('.tl-canvas').focus()")
    page.switch_to.active_element.send_keys("0")
    now = state(page)
    assert (now["begin"], now["end"]) == (0, 300 * US)


def rows_of(browser):
    """Names of the drawn slices, by lane and row."""
    return browser.execute_async_script(
        """
        const [hidden, done] = arguments;
        import("/timeline/shown.js").then(({ Shown }) => {
          const { slices, places, placeOf } = new Shown(unpacked, new Set(hidden));
          done(slices.lanes.map(({ rows }) => rows.map(({ first, last }) =>
            Array.from({ length: last - first }, (_, at) => slices.nameOf(first + at)))));
        });
        """,
        state(browser)["hidden"],
    )


def test_python_functions_are_hidden_without_empty_rows(page):
    assert state(page)["hidden"] == ["python function"]
    assert kinds(page)["python function"] is False
    assert set(kinds(page)) == {kind for _, kind, _, _ in slices_of(usual())}  # no others
    assert all(shown for kind, shown in kinds(page).items() if kind != "python function")
    (main,) = (lane for lane in rows_of(page) if any("ProfilerStep#5" in row for row in lane))
    step = "ProfilerStep#"
    assert main == [
        ["set-up", step + "5", step + "6"],
        ["aten::mm", FETCH, "aten::add", FETCH, "aten::mm"],
        ["cudaLaunchKernel"] * 4,
    ]
    button = "[...document.querySelectorAll('.tl-kind')].find(b => b.textContent === arguments[0])"
    page.execute_script(f"{button}.focus(); {button}.click()", "python function")
    assert state(page)["hidden"] == []
    assert page.execute_script(f"return document.activeElement === {button}", "python function")
    (main,) = (lane for lane in rows_of(page) if any("ProfilerStep#5" in row for row in lane))
    assert main[0] == ["set-up", "train.py(3): main"]
    assert len(main) > 4
    page.execute_script(f"{button}.click()", "operator")
    wait(page, "return window.changes.length && window.changes.at(-1).hidden.length")
    assert page.execute_script("return window.changes.at(-1).hidden") == ["operator"]
    mount(page, **look(page))
    assert (state(page)["hidden"], kinds(page)["operator"]) == (["operator"], False)


def test_search_counts_hidden_matches(page):
    field = page.find_element("css selector", ".tl-search input")
    field.send_keys("data")
    field.send_keys(Keys.ENTER)
    assert texts(page, ".tl-message") == ["2 more in hidden categories."]  # data.py
    assert texts(page, ".tl-count") == [
        "1 of 6"
    ]  # idle: data loading, enumerate(DataLoader), the critical path
    field.send_keys("x")
    field.send_keys(Keys.ENTER)
    assert texts(page, ".tl-message") == [""]


def test_folded_lanes_are_in_state(page):
    page.execute_script("document.querySelector('.tl-group .tl-toggle').click()")
    wait(page, "return window.changes.length && window.changes.at(-1).folded.length")
    kept = look(page)
    assert kept == {"folded": ["GPU 0"]}
    mount(page)
    assert "GPU 0 stream 7" in texts(page, ".tl-name")
    mount(page, **kept)
    assert "GPU 0 stream 7" not in texts(page, ".tl-name")
    page.execute_script("view.select(arguments[0])", place_of("gemm"))  # selecting a slice unfolds its lane
    assert "GPU 0 stream 7" in texts(page, ".tl-name")


def test_hiding_categories_keeps_rows_consistent(page):
    """Rows hold the remaining slices in order, without overlap, each directly below another one."""
    answers = page.execute_async_script(
        """
        const done = arguments[0];
        import("/timeline/shown.js").then(({ Shown }) => {
          const kinds = unpacked.meta.categories;
          done([...Array(1 << Math.min(5, kinds.length)).keys()].map((bits) => {
            const hidden = new Set(kinds.filter((_, place) => bits >> place & 1));
            const shown = new Shown(unpacked, hidden);
            const { slices } = shown;
            const all = [...Array(slices.count).keys()];
            return {
              hidden: [...hidden],
              places: all.map((index) => shown.placeOf(index)),
              back: all.map((index) => shown.indexOf(shown.placeOf(index))),
              rows: slices.rows.map(({ lane, depth, first, last }) => [lane, depth, first, last]),
              launch: [...slices.launch],
            };
          }));
        });
        """
    )
    meta, values = unpack_columns(usual())
    every = slices_of(usual())
    begin, duration = values["begin"], values["duration"]
    lane_of = np.repeat([lane for lane, _, _ in meta["rows"]], [count for _, _, count in meta["rows"]])
    assert len(answers) == 1 << min(5, len(meta["categories"]))
    for answer in answers:
        left = [at for at, one in enumerate(every) if one[1] not in answer["hidden"]]
        assert sorted(answer["places"]) == left
        assert answer["back"] == list(range(len(left)))
        for lane, depth, first, last in answer["rows"]:
            places = answer["places"][first:last]
            assert {int(lane_of[place]) for place in places} == {lane}
            ends = [int(begin[place] + duration[place]) for place in places]
            assert all(end <= begin[place] for end, place in zip(ends[:-1], places[1:], strict=True))
            if depth:
                (above,) = (row for row in answer["rows"] if row[:2] == [lane, depth - 1])
                for place in places:
                    assert any(
                        begin[one] <= begin[place] < begin[one] + max(1, duration[one])
                        for one in answer["places"][above[2] : above[3]]
                    )
        launches = [values["launch"][place] for place in answer["places"]]
        assert answer["launch"] == [
            answer["places"].index(host) if host in answer["places"] else -1 for host in launches
        ]


def test_link_finds_longest_slice(page):
    mount(page, find={"kind": "idle: data loading"})
    every = slices_of(usual())
    now = state(page)
    assert every[now["selected"]] == ("idle: data loading", "idle: data loading", 201, 251)
    assert texts(page, ".tl-count") == ["2 of 2"]
    assert now["begin"] <= 201 * US < 251 * US <= now["end"] < 303 * US
    assert texts(page, ".tl-message") == ["2 slices marked, the longest selected."]
    for find in ({"name": "gemm", "kind": "kernel"}, {"name": "gemm"}):  # not the critical path
        mount(page, find=find)
        assert every[state(page)["selected"]] == ("gemm", "kernel", 260, 300)
    mount(page, find={"name": "data.py(7): __getitem__"})  # hidden until then
    assert every[state(page)["selected"]][2:] == (201, 251)
    assert state(page)["hidden"] == []
    mount(page, find={"step": 6})
    assert (state(page)["begin"], state(page)["end"]) == (200 * US, 300 * US)
    for nothing in ({"name": "no such"}, {"kind": "idle: communication"}, {"step": 77}, {"name": "gem"}):
        mount(page, find=nothing)
        assert texts(page, ".tl-message")[0].startswith("This trace has no "), nothing
        assert state(page)["selected"] == -1
    for nonsense in (3, "x", {}, {"name": 5}, [], None):
        mount(page, find=nonsense)
        assert (state(page)["selected"], texts(page, ".tl-message")) == (-1, [""])


def test_state_overrides_link_on_return(page):
    find = {"kind": "kernel"}
    mount(page, find=find)
    page.execute_script("view.select(arguments[0]); view.zoomTo(0, 50000)", place_of("add"))
    kept, before = look(page), state(page)
    mount(page, find=find, **kept)
    assert state(page) == before
    assert texts(page, ".tl-count") == ["2 of 4"]
    mount(page, find={"kind": "idle: host"}, **kept)  # another link
    assert slices_of(usual())[state(page)["selected"]][1] == "idle: host"


def test_idle_time_shows_cause_and_line(page):
    mount(page, find={"kind": "idle: data loading"})
    shown = panel(page)
    assert "nothing was queued" in shown["Why"]
    assert shown["Meanwhile"] == f"main thread 1: data.py(7): __getitem__, in {FETCH}"
    assert shown["Line"] == "data.py:7 __getitem__ Call stack"
    assert (shown["Start"], shown["Duration"], shown["Step"]) == ("201.0 µs", "50.0 µs", "6")
    assert (shown["Ended by"], shown["Launched by"]) == ("gemm", "cudaLaunchKernel")  # the host was late, too
    place = place_of("idle: host", 251)
    page.execute_script("view.select(arguments[0])", place)
    shown = panel(page)
    assert (shown["Ended by"], shown["Launched by"]) == ("gemm", "cudaLaunchKernel")
    page.execute_script(
        "[...document.querySelectorAll('.tl-selection .tl-link')].find(b => b.textContent === 'gemm').click()"
    )
    assert slices_of(usual())[state(page)["selected"]] == ("gemm", "kernel", 260, 300)


def test_kernel_shows_call_stack_of_its_launch(page):
    page.execute_script(
        "Object.defineProperty(navigator, 'clipboard',"
        " { value: { writeText: async (text) => (window.copied = text) } })"
    )
    page.execute_script("view.select(arguments[0])", place_of("gemm", 120))
    assert panel(page)["Line"] == "train.py:3 main Call stack"  # not Lightning's
    page.execute_script("document.querySelector('.tl-selection .at').click()")
    wait(page, "return window.copied !== undefined")
    assert page.execute_script("return window.copied") == "train.py:3"
    wait(page, "return document.querySelector('output.copied').textContent === 'Copied'")
    page.execute_script("document.querySelector('.to-stack').click()")
    assert texts(page, ".stack li .at") == ["lightning/pytorch/loop.py:9", "train.py:3"]
    assert texts(page, ".stack li bdi") == ["advance", "main"]
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(page, "return document.querySelector('.stack') === null")
    assert state(page)["selected"] == place_of("gemm", 120)


def test_overlapping_range_does_not_cut_call_stack(browser, site):
    """A range starts in a function and ends after it; the functions around both are still shown."""
    columns = pack_timeline(
        timeline_of(
            make_trace(
                [
                    event("python_function", "train.py(3): main", 0, 100),
                    event("python_function", "loop.py(4): fetch", 10, 30),
                    event("user_annotation", "mine", 20, 90),
                    event("python_function", "net.py(5): forward", 40, 80),
                    event("cpu_op", "aten::mm", 50, 60),
                ]
            )
        )
    )
    with opened(browser, site, columns):
        browser.execute_script("view.select(arguments[0])", place_of("aten::mm", columns=columns))
        browser.execute_script("document.querySelector('.to-stack').click()")
        assert texts(browser, ".stack li .at") == ["net.py:5", "train.py:3"]


@pytest.mark.parametrize(
    ("name", "view"), [("gemm", "kernels"), ("aten::add", "operators"), ("nn.Module: Linear_0", "modules")]
)
def test_slice_links_to_its_row(browser, site, name, view):
    columns = packed(event("user_annotation", "nn.Module: Linear_0", 252, 298))
    with opened(browser, site, columns):
        browser.execute_script("view.select(arguments[0])", place_of(name, columns=columns))
        (goto,) = browser.execute_script(
            "return [...document.querySelectorAll('.tl-selection a.goto')].map(a => a.dataset.goto)"
        )
        assert json.loads(goto) == {"view": view, "row": {"name": name}}
        browser.execute_script("view.select(arguments[0])", place_of("ProfilerStep#6", columns=columns))
        assert texts(browser, ".tl-selection a.goto") == []


def device_rows(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('.tl-by-device tbody tr')].map(r =>"
        " [...r.cells].map(c => c.textContent))"
    )


def test_panel_links_and_buttons_return_focus_to_timeline(page):
    """They disappear with their panel; on the canvas, arrow keys continue from the slice."""
    focused = "return document.activeElement.className"
    page.execute_script("window.mount({ initial: { find: { kind: 'kernel' } } })")
    page.find_element("css selector", ".tl-selection .tl-link").send_keys(Keys.ENTER)
    assert "cudaLaunchKernel" in page.execute_script(
        "return document.querySelector('.tl-selection').innerText"
    )
    assert page.execute_script(focused) == "tl-canvas"
    page.find_element("css selector", ".tl-canvas").send_keys("r")
    wait(page, "return document.querySelector('.tl-range .tl-small') !== null")
    zoom, clear = page.find_elements("css selector", ".tl-range .tl-small")
    zoom.send_keys(Keys.ENTER)
    assert page.execute_script(focused) == "tl-small"
    clear.send_keys(Keys.ENTER)
    wait(page, "return document.querySelector('.tl-range .tl-small') === null")
    assert page.execute_script(focused) == "tl-canvas"


def test_range_shows_busy_and_idle_time_first(page):
    """[110, 260): busy 10 + 20 of 150; idle 10 + 11 + 30 for the host, and 19 + 50 for fetches."""
    mount(page, range=[110 * US, 260 * US])
    assert device_rows(page) == [
        ["GPU 0 busy", "30.0 µs", "20%"],
        ["GPU 0 idle", "120 µs", "80%"],
        ["idle: data loading", "69.0 µs", "46%"],
        ["idle: host", "51.0 µs", "34%"],
    ]
    assert page.execute_script("return document.querySelector('.tl-range table').className") == "tl-by-device"


def test_range_of_real_trace_matches_device_times(browser, site):
    trace = load("v100_resnet50_workers0")
    begin, end = 200_000_000, 700_000_000
    rows = trace.device.event
    busy = np.zeros(end - begin >> 10, bool)  # slots of 1.024 µs
    for since, until in zip(trace.begin_ns[rows].tolist(), trace.end_ns[rows].tolist(), strict=True):
        busy[max(0, since - begin >> 10) : max(0, until - begin >> 10)] = True
    with opened(browser, site, pack_timeline(timeline_of(trace))):
        mount(browser, range=[begin, end])
        shares = {name: float(share.removesuffix("%")) for name, _, share in device_rows(browser)}
    assert shares["GPU 0 busy"] == pytest.approx(100 * busy.mean(), abs=1.5)
    causes = [share for name, share in shares.items() if name.startswith("idle: ")]
    assert sum(causes) == pytest.approx(shares["GPU 0 idle"], abs=len(causes))  # each is a rounded percent


RANKS = """
const [shift, done] = arguments;
import("/timeline/ranks.js").then(({ mergeRanks }) => {
  const { meta, columns } = unpacked;
  const later = new Map(columns);
  for (const name of ["begin"]) later.set(name, columns.get(name).map((ns) => ns + shift));
  const steps = meta.steps.map(([number, begin, end]) => [number, begin + shift, end + shift]).slice(1);
  const [begin_ns, end_ns] = [meta.begin_ns + shift, meta.end_ns + shift];
  const other = { columns: later, meta: { ...meta, begin_ns, end_ns,
    steps, details: meta.details.map((text) => text + "!"), names: meta.names.toReversed() } };
  const whole = mergeRanks([{ rank: 0, unpacked }, { rank: 3, unpacked: other }]);
  window.unpacked = whole;
  window.mount();
  done(whole.meta);
});
"""


def test_ranks_share_one_axis(page):
    """Rank 3 is rank 0 shifted in time, without its first step; both have step 6."""
    alone = slices_of(usual())
    merged = page.execute_async_script(RANKS, 1_234_567)
    assert [lane["group"] for lane in merged["lanes"]][:4] == ["rank 0 GPU 0"] * 2 + ["rank 3 GPU 0"] * 2
    assert "step 6" in merged["notes"][0]
    count = len(alone)
    begins = page.execute_script("return [...unpacked.columns.get('begin')]")
    assert begins[count:] == begins[:count]
    page.execute_script("view.select(arguments[0])", count + place_of("gemm", 260))
    now = state(page)
    assert now["selected"] == count + place_of("gemm", 260)
    shown = panel(page)
    assert (shown["Lane"], shown["Step"]) == ("GPU 0 stream 7", "6")
    page.execute_script("view.select(arguments[0])", count + place_of("gemm", 120))
    assert panel(page)["Step"] == "outside steps"  # of rank 3, which has no step 5
    page.execute_script("document.querySelector('.tl-link').click()")
    assert state(page)["selected"] == count + place_of("cudaLaunchKernel", 119)
    page.execute_script("window.mount({ initial: { find: { kind: 'kernel', rank: 3 } } })")
    assert state(page)["selected"] == count + place_of("gemm", 260)
    assert texts(page, ".tl-count") == ["4 of 4"]
    page.execute_script(
        "const range = [110000, 260000].map((ns) => ns - window.unpacked.meta.begin_ns);"
        "window.mount({ initial: { range } })"
    )
    next_frame(page)
    assert [row[0] for row in device_rows(page)][::4] == ["rank 0 GPU 0 busy", "rank 3 GPU 0 busy"]
