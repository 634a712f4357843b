"""How fast the dashboard's timeline opens and moves, with a million slices in headless Chromium.

    python -m benchmarks.dashboard_timeline
    python -m benchmarks.dashboard_timeline --slices 100000 --levels 30 --seconds 3 --json timeline.json

Method:

* Chromium draws in software, without a graphics card, so a reader's machine is rarely slower.
* *open* runs from the arrival of the bytes to the first frame: inflating, decoding, preparing, drawing.
* A script pans and zooms in and out for some seconds at each of three zoom levels: the whole trace, one step,
  and a hundredth of a step. It requests a new frame as soon as the previous one is done.
* *frames/s* comes from the times between frames. Other programs lengthen these, and the screen's refresh rate
  limits them. *draw* is the main thread's time in one frame's callbacks, the part our code determines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from selenium import webdriver

from tests.support.dashboard_page import serve
from tests.support.timeline_page import make_trace, packed_trace, page_files

PLACES = {"whole trace": 1.0, "one step": 0.1, "hundredth of a step": 0.001}
MOVE = """
const [share, seconds, done] = arguments;
const { begin_ns, end_ns } = window.unpacked.meta;
const length = end_ns - begin_ns;
const original = window.requestAnimationFrame;
const drawn = [];
const between = [];
window.requestAnimationFrame = (callback) => original((now) => {
  const start = performance.now();
  callback(now);
  drawn.push(performance.now() - start);
});
const start = performance.now();
let last = 0;
const frame = (now) => {
  if (last) between.push(now - last);
  last = now;
  const part = (performance.now() - start) / (1000 * seconds);
  if (part >= 1) {
    window.requestAnimationFrame = original;
    done({ drawn, between });
    return;
  }
  const span = length * share * (0.75 + 0.25 * Math.cos(8 * Math.PI * part));
  const left = begin_ns + (length - span) * (0.5 - 0.5 * Math.cos(4 * Math.PI * part));
  window.view.zoomTo(left, left + span);
  original(frame);
};
original(frame);
"""


ONCE = """
const done = arguments[0];
(async () => {
  const { Slices } = await import("/timeline/slices.js");
  const { Found } = await import("/timeline/search.js");
  const { rangeSums } = await import("/timeline/range_sums.js");
  const slices = new Slices(window.unpacked);
  const times = {};
  const time = async (name, call) => {
    const start = performance.now();
    await call();
    times[name] = performance.now() - start;
  };
  await time("search that finds all", () => new Found(slices, "e"));
  await time("sums over the whole trace", () => rangeSums(slices, slices.traceBegin, slices.traceEnd));
  await time("first look for launches", () => slices.launchesOf(0));
  done(times);
})();
"""


def open_browser() -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1600,1000"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"), env=dict(os.environ))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(120)
    return driver


def measure(num_slices: int, num_levels: int, seconds: float) -> dict[str, Any]:
    one, two = (len(make_trace(num, num_levels=num_levels)[1]["begin"]) for num in (1, 2))
    meta, columns = make_trace(max(1, round(num_slices / (two - one))), num_levels=num_levels)
    packed = packed_trace(meta, columns)
    figures: dict[str, Any] = {
        "slices": len(columns["begin"]), "rows": len(meta["rows"]), "packed_bytes": len(packed),
        "cores": os.cpu_count(), "load_before": os.getloadavg()[0],
    }  # fmt: skip
    driver = open_browser()
    try:
        with serve(page_files(packed)) as address:
            driver.get(address)
            while not driver.execute_script("return window.ready === true"):
                time.sleep(0.1)
            figures["unpack_ms"] = driver.execute_script("return window.unpackMs")
            figures["open_ms"] = driver.execute_script("return window.openMs")
            figures["once_ms"] = driver.execute_async_script(ONCE)
            figures["places"] = {
                place: summarize(driver.execute_async_script(MOVE, share, seconds))
                for place, share in PLACES.items()
            }
    finally:
        driver.quit()
    figures["load_after"] = os.getloadavg()[0]
    return figures


def summarize(moved: dict[str, list[float]]) -> dict[str, float]:
    rates = sorted(1000 / ms for ms in moved["between"] if ms > 0)
    drawn = sorted(moved["drawn"])
    return {
        "frames": len(drawn),
        "rate_min": rates[0], "rate_p5": rates[len(rates) // 20], "rate_median": statistics.median(rates),
        "draw_ms_median": statistics.median(drawn), "draw_ms_p95": drawn[len(drawn) * 95 // 100],
        "draw_ms_max": drawn[-1],
    }  # fmt: skip


def print_figures(figures: dict[str, Any]) -> None:
    size = figures["packed_bytes"] / 2**20
    before, after = figures["load_before"], figures["load_after"]
    print(f"{figures['slices']:,} slices in {figures['rows']} rows, {size:.1f} MiB packed")
    print(f"{figures['cores']} cores, load {before:.1f} before and {after:.1f} after")
    print(f"open {figures['open_ms']:.0f} ms, of which unpacking {figures['unpack_ms']:.0f} ms")
    print(", ".join(f"{what} {ms:.0f} ms" for what, ms in figures["once_ms"].items()))
    print(f"{'':22}{'frames/s':>24}{'draw, ms':>24}")
    print(f"{'in view':22}{'min':>8}{'p5':>8}{'median':>8}{'median':>8}{'p95':>8}{'max':>8}")
    keys = ("rate_min", "rate_p5", "rate_median", "draw_ms_median", "draw_ms_p95", "draw_ms_max")
    for place, one in figures["places"].items():
        print(f"{place:22}" + "".join(f"{one[key]:8.1f}" for key in keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--levels", type=int, default=3, help="of operators in operators")
    parser.add_argument("--seconds", type=float, default=5.0, help="of moving at each place")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments.slices, arguments.levels, arguments.seconds)
    print_figures(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
