"""How long the dashboard takes to open with many runs, and what the plugin adds to TensorBoard's startup.

    PYTHONPATH=. python benchmarks/dashboard_open.py
    PYTHONPATH=. python benchmarks/dashboard_open.py --runs 50 --windows 20 --mb 10 --json dashboard_open.json

The log directory contains many copies of one run profile and one window profile. TensorBoard reads it in a
separate process. Opening time is measured by the clock of a headless Chromium, from the start of the tab's
frame until its view is drawn. The first view also opens over a network that adds 100 ms to each answer. A
clone serves modules. If ``static/`` has a bundle, as in a wheel, that is measured instead, and the first line
says so. Startup time is the time to import the plugin after TensorBoard, in fresh processes. Needs Chromium,
chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from generate_trace import generate_trace

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_dashboard_entry import run_profile, window_profile
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings
from lightning_modelprof.show.tensorboard.event_file import write_event_file
from lightning_modelprof.trace.reader import read_trace
from tests.support.chromium import start_chromium
from tests.support.slow_network import slow_network
from tests.support.tensorboard_server import Server, tensorboard

STEPS: Final = 1_000
VIEWS: Final = ("overview", "steps", "operators", "trace", "compare")
LATENCY_MS: Final = 100

IMPORT: Final = (
    "import time, tensorboard.program, tensorboard.default; begin = time.perf_counter();"
    " import lightning_modelprof.tensorboard_plugin.plugin; print(time.perf_counter() - begin)"
)

OPENED: Final = """
const [done] = arguments;
const look = () => {
  const frame = document.querySelector("iframe")?.contentWindow;
  const main = frame?.document.querySelector("main");
  if (main && main.children.length && !main.ariaBusy) {
    frame.requestAnimationFrame(() => done(frame.performance.now()));
  } else setTimeout(look, 5);
};
look();
"""


def a_run() -> DashboardEntry:
    """Make a run of 1,000 steps with three phases."""
    random = np.random.default_rng(0)
    phases_ns = np.zeros((STEPS, len(PHASES)), np.int64)
    for phase, mean in (("dataloader", 2e6), ("forward", 5e6), ("backward", 9e6)):
        phases_ns[:, PHASE_INDEX[phase]] = random.gamma(9, mean / 9, STEPS)
    steps = StepTimings(
        step=np.arange(STEPS),
        duration_ns=phases_ns.sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=np.full_like(phases_ns, NOT_MEASURED),
        samples=np.full(STEPS, 32),
        tags=np.zeros(STEPS, np.int64),
    )
    info = RunInfo(created="2026-01-01T00:00:00.000000+00:00", status="finished", model="Net")
    run = Run(info=info, ranks=(RankRecord(rank=0, steps=steps),))
    return run_profile(run, build_report(Facts(run)))


def write_logs(root: Path, runs: int, windows: int, mb: float) -> None:
    """Write a folder of runs, each with a run profile and window profiles."""
    trace_file = root / "trace.json"
    generate_trace(trace_file, int(mb * 1e6))
    trace = read_trace(trace_file)
    trace_file.unlink()
    window, whole = window_profile([(trace, TraceFacts(trace))], window=0), a_run()
    first = root / "run_00"
    write_event_file(
        first,
        [*((f"modelprof/window_{number}", window) for number in range(windows)), ("modelprof/run", whole)],
    )
    (file,) = first.iterdir()
    for number in range(1, runs):
        folder = root / f"run_{number:02}"
        folder.mkdir()
        (folder / file.name).write_bytes(file.read_bytes())


def wait_until_read(server: Server, runs: int, profiles: int) -> float:
    """Return the seconds until TensorBoard knows every profile."""
    begin = time.perf_counter()
    while True:
        known = server.ask("profiles")["runs"]
        if len(known) == runs and all(len(run["profiles"]) == profiles for run in known):
            return time.perf_counter() - begin
        time.sleep(0.2)


def opening_times(server: Server, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds each view takes to open; views alternate."""
    browser = start_chromium()
    times: dict[str, list[float]] = {view: [] for view in VIEWS}
    try:
        for _ in range(rounds):
            for view in VIEWS:
                times[view].append(open_view(browser, server, view))
            with slow_network(browser, LATENCY_MS):
                slow = open_view(browser, server, VIEWS[0])
            times.setdefault(f"{VIEWS[0]}, {LATENCY_MS} ms of latency", []).append(slow)
    finally:
        browser.quit()
    return times


def open_view(browser: Any, server: Server, view: str) -> float:
    """Return the milliseconds from the frame's start until the view is drawn."""
    browser.get("about:blank")
    browser.get(f"{server.url}#modelprof&p.modelprof.view={view}")
    return float(browser.execute_async_script(OPENED))


def scripts_of(server: Server) -> str:
    """Return how the page's scripts are served."""
    first = server.raw("plugin/modelprof/static/index.js")[2]
    return "one bundle" if first.startswith(b"// Made of the modules beside it") else "modules"


def import_times(rounds: int) -> list[float]:
    """Return the milliseconds that importing the plugin adds to TensorBoard's own import."""
    command = [sys.executable, "-c", IMPORT]
    return [
        1e3 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(rounds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--windows", type=int, default=20, help="of each run")
    parser.add_argument("--mb", type=float, default=5.0, help="of JSON, of the trace of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_logs(root, options.runs, options.windows, options.mb)
        size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        with tensorboard(root) as server:
            scripts = scripts_of(server)
            read_s = wait_until_read(server, options.runs, options.windows + 1)
            opened = opening_times(server, options.rounds)
    figures: dict[str, Any] = {
        "machine": platform.platform(),
        "runs": options.runs,
        "windows": options.windows,
        "scripts": scripts,
        "event_files_mb": size / 1e6,
        "tensorboard_read_s": read_s,
        "open_ms": opened,
        "import_ms": import_times(options.rounds),
    }
    print(f"{options.runs} runs of {options.windows} windows, {size / 1e6:.0f} MB of event files; {scripts}")
    print(f"TensorBoard has read them after {read_s:.1f} s")
    for view, times in opened.items():
        print(f"  {view:28} median {statistics.median(times):6.0f} ms, {min(times):.0f} to {max(times):.0f}")
    imported = figures["import_ms"]
    print(f"import of the plugin: median {statistics.median(imported):.1f} ms, at most {max(imported):.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
