"""Cost of report.html: time to write, bytes, and time to open, sort, search and zoom in a browser.

    python benchmarks/html_page.py
    python benchmarks/html_page.py --rounds 9 --json html_page.json

Writing is CPU time of this process. Opening is the browser's own navigation timing, until the page's load
event ends, which includes its script, and its content is painted first. Sort, search and zoom are measured
from the event until the new layout is known. All figures are medians over the rounds, in which the pages
alternate, and ratios to the page of an empty report of the same run. Without Chromium, chromedriver and
selenium, only writing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import (
    Chart,
    Column,
    FlameFrame,
    FlameGraph,
    Report,
    Series,
    Table,
    Unit,
)
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import StepTimings
from lightning_modelprof.show.html.page import render_html

EMPTY: Final = "empty"

OPENED: Final = """
const [page] = performance.getEntriesByType('navigation');
const paints = performance.getEntriesByType('paint').map(one => one.startTime);
return Math.max(page.loadEventEnd, ...paints);
"""

TIMED: Final = """
const settled = () => document.documentElement.scrollHeight;
settled();
const begin = performance.now();
%s
settled();
return performance.now() - begin;
"""

TYPE: Final = "box.value = '17'; box.dispatchEvent(new Event('input'));"

ACTIONS: Final = {
    "sort": ("thead th.n button", "document.querySelector('thead th.n button').click();"),
    "search": (
        ".table input[type=search]",
        f"const box = document.querySelector('.table input[type=search]'); {TYPE}",
    ),
    "zoom": (".box", "document.querySelectorAll('.box')[1].click();"),
    "find": (".flame input", f"const box = document.querySelector('.flame input'); {TYPE}"),
}
"""Element that an action needs, and its script, for the first table and for the flame graph."""


def report_of(title: str, **fields: Any) -> Report:
    usual: dict[str, Any] = {"facts": (), "tables": (), "notes": ()}
    return Report(title=title, **(usual | fields))


def no_steps() -> Report:
    """Report on a run that ended in its first step, so each table says why it's empty."""
    record = RankRecord(rank=0, steps=StepTimings.empty())
    run = Run(info=RunInfo(created="2026-01-01T00:00:00+00:00", model="Net"), ranks=(record,))
    return build_report(Facts(run))


def modules(count: int) -> Report:
    """Report on a model's tree of ``count`` modules, ten per layer."""
    columns = (
        Column("module", "Module"),
        Column("params", "Params", Unit.COUNT),
        Column("forward_ns", "Latency", Unit.DURATION_NS, "Forward"),
        Column("forward_ratio", "%", Unit.RATIO, "Forward"),
        Column("backward_ns", "Latency", Unit.DURATION_NS, "Backward"),
    )
    rows = tuple(
        (f"layer_{place} (Linear)", place * 7919 % count, 1e3 * place, place / count, 2e3 * place)
        for place in range(count)
    )
    depths = (0, *(1 if place % 10 == 0 else 2 for place in range(count - 1)))
    return report_of(
        f"{count:,} modules",
        tables=(Table(id="modules", title="Modules", columns=columns, rows=rows, depths=depths),),
    )


def boxes(count: int) -> Report:
    """Report with a flame graph of ``count`` boxes; each contains up to four."""
    frames: list[FlameFrame] = []
    waiting: list[tuple[int | None, int, float, float]] = [(None, 0, 0.0, 1e9)]
    for place in range(count):
        parent, depth, begin, total = waiting.pop(0)
        frames.append(
            FlameFrame(
                name=f"package.function_{place}",
                detail=f"package/file_{place % 50}.py:{place}",
                parent=parent,
                depth=depth,
                begin=begin,
                total=total,
                own=total * 0.05,
                is_users=place % 3 == 0,
            )
        )
        for part in (0.5, 0.25, 0.15, 0.05):
            waiting.append((place, depth + 1, begin, total * part))
            begin += total * part
    flame = FlameGraph(id="stacks", title="Lines", unit=Unit.DURATION_NS, frames=tuple(frames))
    return report_of(f"{count:,} boxes", flames=(flame,))


def tables(count: int, rows: int) -> Report:
    """Report with ``count`` tables of ``rows`` rows and nine columns."""
    columns = (
        Column("name", "Name"),
        *(Column(f"ns_{place}", f"Time {place}", Unit.DURATION_NS) for place in range(7)),
        Column("share", "Share", Unit.RATIO),
    )
    cells = tuple(
        (f"aten::operator_{row}", *(1e6 * (row * 37 % 101) / (1 + place) for place in range(7)), row / rows)
        for row in range(rows)
    )
    made = (Table(id=f"t{n}", title=f"Table {n}", columns=columns, rows=cells) for n in range(count))
    return report_of(f"{count} tables of {rows} rows", tables=tuple(made))


def charts(points: int) -> Report:
    """Report with eight layers over ``points`` steps, the maximum that a report draws."""
    series = tuple(
        Series(
            key=f"s{n}", label=f"Phase {n}", values=tuple(1e6 * (1 + (x * 7 + n) % 5) for x in range(points))
        )
        for n in range(8)
    )
    chart = Chart(
        id="phases",
        title="Phase times per step",
        kind="stacked",
        x_label="step",
        x=tuple(map(float, range(points))),
        unit=Unit.DURATION_NS,
        series=series,
    )
    return report_of(f"chart of {points} points", charts=(chart,))


CASES: Final[dict[str, Callable[[], Report]]] = {
    EMPTY: lambda: report_of("empty"),
    "0 steps": no_steps,
    "5,000 modules": lambda: modules(5_000),
    "2,000 boxes": lambda: boxes(2_000),
    "50 tables of 100 rows": lambda: tables(50, 100),
    "chart, 400 points": lambda: charts(400),
}


def start_browser() -> Any | None:
    """Start Chromium; ``None`` if it, its driver or selenium is missing."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    try:
        from selenium import webdriver  # noqa: PLC0415
    except ImportError:
        return None
    if binary is None or driver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))


def measure(report: Report, browser: Any | None, path: Path) -> dict[str, float]:
    """Measure one page once, in milliseconds and bytes."""
    begin = time.process_time()
    page = render_html(report)
    found = {"write_ms": 1e3 * (time.process_time() - begin), "num_bytes": float(len(page))}
    if browser is None:
        return found
    path.write_bytes(page)
    browser.get(path.as_uri())
    found["open_ms"] = browser.execute_script(OPENED)
    for name, (needed, action) in ACTIONS.items():
        if browser.execute_script("return document.querySelector(arguments[0]) !== null", needed):
            found[f"{name}_ms"] = browser.execute_script(TIMED % action)
    return found


def run(rounds: int) -> dict[str, dict[str, float]]:
    """Return each case's median figures, and their ratios to the empty page if that has them."""
    reports = {name: build() for name, build in CASES.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    browser = start_browser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            measure(reports[EMPTY], browser, path)  # compiles the templates and warms up the browser
            for _ in range(rounds):
                for name, report in reports.items():
                    found[name].append(measure(report, browser, path))
    finally:
        if browser is not None:
            browser.quit()
    medians = {
        name: {key: statistics.median(one[key] for one in many) for key in many[0]}
        for name, many in found.items()
    }
    for figures in medians.values():
        figures |= {
            f"{key}_over_empty": figures[key] / value
            for key, value in list(medians[EMPTY].items())[:3]
            if value
        }
    return medians


def print_table(results: dict[str, dict[str, float]]) -> None:
    """Print milliseconds and KiB, with the ratio to the empty page in brackets."""
    actions = [
        key
        for key in ("sort_ms", "search_ms", "zoom_ms", "find_ms")
        if any(key in one for one in results.values())
    ]
    heads = ("write, ms", "KiB", "open, ms")
    print(f"{'':<24}{''.join(f'{head:>18}' for head in heads)}{''.join(f'{key[:-3]:>9}' for key in actions)}")
    for name, one in results.items():
        cells = []
        for key, scale in (("write_ms", 1), ("num_bytes", 1024), ("open_ms", 1)):
            value = f"{one[key] / scale:.1f} ({one[f'{key}_over_empty']:.1f}x)" if key in one else "–"
            cells.append(f"{value:>18}")
        cells += [f"{one[key]:>9.1f}" if key in one else f"{'–':>9}" for key in actions]
        print(f"{name:<24}{''.join(cells)}")
    print(
        "\nsort, search: of the first table; zoom, find: of the flame graph; milliseconds until the new"
        "\nlayout. In brackets: times the empty page."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="times that each page is made (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    arguments = parser.parse_args()
    results = run(arguments.rounds)
    print_table(results)
    if arguments.json is not None:
        system = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.platform()}
        arguments.json.write_text(json.dumps({"environment": system, "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
