"""Runs all benchmarks against the peers within 25 minutes and writes ``benchmarks/README.md``.

    python benchmarks/peers.py --environments peers
    python benchmarks/peers.py --environments peers --only overhead window --results results
    python benchmarks/peers.py --results results --render

The peers live in virtual environments below the folder ``--environments``. Missing ones are created first
(about 3 GB, not included in the 25 minutes). The packages that read traces have their own environment. If a
peer can't be installed, it's left out with a note. ``--results`` keeps each benchmark's output, and
``--render`` creates the tables from it without running anything.

Verdicts and FLOPs aren't costs and take seven minutes, so they only run if ``--only`` names them. Parts that
don't run keep their tables.

Minutes on two idle cores: overhead 10, processes 3.5, startup 1, window 3, many_windows 1, traces 3, and a
quarter for all others together.

Nothing else should run on the machine. The run's table has the load before and after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers_tables as tables

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
README = HERE / "README.md"

ENVIRONMENTS = {
    # torch first, so that no other package installs another build of it.
    "main": (
        ["torch==2.13.0"],
        [
            *(
                "-c",
                str(ROOT / "constraints.txt"),
                "-e",
                str(ROOT),
                "lightning==2.6.6",
                "pytorch-lightning==2.6.6",
            ),
            *(
                "traceml-ai==0.5.0",
                "gpuprof==0.7.1",
                "fvcore",
                "torchinfo==1.8.0",
                "transformers",
                "scikit-learn",
            ),
        ],
    ),
    # HolisticTraceAnalysis fails with pandas 3 on larger traces.
    "hta": (["HolisticTraceAnalysis==0.5.0", "torch_tb_profiler==0.4.3", "setuptools", "pandas<3"],),
}
"""Packages of each virtual environment, in the order of pip's calls."""

VERSIONS = {
    "main": (
        *("torch", "lightning", "pytorch-lightning", "lightning-modelprof", "traceml-ai", "gpuprof"),
        *("fvcore", "torchinfo", "transformers"),
    ),
    "hta": ("HolisticTraceAnalysis", "torch_tb_profiler", "pandas"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark.

    Attributes:
        name: of the section, and of its files in the results folder.
        environment: that it runs in.
        script, arguments: the command; it writes JSON to an additional argument's file.
        table: converts the JSON or the output to Markdown.
    """

    name: str
    environment: str
    script: str
    arguments: Sequence[str]
    table: Callable[[Any], str]
    writes_json: bool = True


def parts(environments: Path, traces: Sequence[Path]) -> list[Part]:
    """List the short configurations, those that measure time first."""
    reader = str(environments / "hta" / "bin" / "python")
    peers = [f"--peers-python={name}={reader}" for name in ("torch_tb_profiler", "HolisticTraceAnalysis")]
    files = [str(path.resolve()) for path in traces]
    analysis = (*files, "--generate-mb", "2", "50", "1000", "--rounds", "5", "--window-steps", "4", *peers)
    trainings = ("--every", "5", "--tools", "ours", "traceml", "gpuprof_first")
    counters = ("--every", "2", "--jobs", "2", "--tools", "ours", "fvcore", "flop_counter_mode", "torchinfo")
    ranks = ("--ranks", "64", "--steps", "5000")
    processes = ("--rounds", "5", "--fits", "3", "--steps", "1000")
    return [
        Part("overhead", "main", "overhead.py", ("--rounds", "40", "--steps", "3000"), tables.overhead_table),
        Part("processes", "main", "overhead_processes.py", processes, tables.overhead_table),
        Part("startup", "main", "startup.py", (), tables.startup_table),
        Part("window", "main", "window.py", ("--rounds", "5"), tables.window_table),
        Part("many_windows", "main", "many_windows.py", ("--rounds", "10"), tables.many_windows_table),
        Part("traces", "main", "trace_analysis.py", analysis, tables.traces_table),
        Part("steps", "main", "many_steps.py", ("--steps", "200000"), tables.as_printed, writes_json=False),
        Part("ranks", "main", "many_ranks.py", ranks, tables.as_printed, writes_json=False),
        Part("verdicts", "main", "verdict_peers.py", trainings, tables.verdicts_table),
        Part("flops", "main", "flops.py", counters, tables.flops_table, writes_json=False),
    ]


ON_REQUEST = ("verdicts", "flops")


def make_environments(folder: Path) -> None:
    """Create missing environments, and report those that can't be installed."""
    for name, steps in ENVIRONMENTS.items():
        home = folder / name
        ready = home / "ready"
        if ready.exists():
            continue
        print(f"making {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
        if all(subprocess.run([*pip, *packages], check=False).returncode == 0 for packages in steps):
            ready.touch()
        else:
            print(f"left out: the packages of {name} cannot be installed here", flush=True)


def versions_in(folder: Path) -> dict[str, str]:
    """Return the package versions of all environments."""
    code = "import sys, importlib.metadata as m\nfor p in sys.argv[1:]: print(p, m.version(p))"
    found: dict[str, str] = {}
    for name, packages in VERSIONS.items():
        if (folder / name / "ready").exists():
            python = str(folder / name / "bin" / "python")
            done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
            found |= dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return found


def about_machine(environments: Path) -> dict[str, str]:
    """Describe the environment of the figures."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or platform.machine()
    return {
        "Date": time.strftime("%Y-%m-%d, %H:%M UTC", time.gmtime()),
        "Machine": f"{cpu}, {os.cpu_count()} cores, no GPU used, {platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions_in(environments).items()),
    }


def run_part(part: Part, environments: Path, results: Path) -> dict[str, Any]:
    """Run a benchmark, and keep its output in the results folder."""
    about: dict[str, Any] = {"name": part.name, "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
    about["load_before"] = os.getloadavg()[0]
    begin = time.perf_counter()
    if (environments / part.environment / "ready").exists():
        python = str((environments / part.environment / "bin" / "python").absolute())
        command = [python, str(HERE / part.script), *part.arguments]
        command += ["--json", str(results / f"{part.name}.json")] if part.writes_json else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "6"}
        print(f"{part.name}: {part.script} {' '.join(part.arguments)}", flush=True)
        with (results / f"{part.name}.txt").open("w") as printed, tempfile.TemporaryFile("w+") as errors:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    command, cwd=folder, env=environment, stdout=printed, stderr=errors, check=False
                )
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
        about["problem"] = f"failed: {last}" if done.returncode else ""
    else:
        about["problem"] = "left out: its packages are not installed"
    about |= {"seconds": time.perf_counter() - begin, "load_after": os.getloadavg()[0]}
    print(f"  {about['seconds']:.0f} s {about['problem']}", flush=True)
    return about


def render(all_parts: Sequence[Part], results: Path) -> None:
    """Write the tables into the README."""
    run = json.loads((results / "run.json").read_text())
    tables.put_between_markers(README, "run", tables.run_table(run))
    problems = {one["name"]: one["problem"] for one in run["parts"]}
    for part in all_parts:
        if part.name not in problems:
            continue
        if problems[part.name]:
            tables.put_between_markers(README, part.name, f"Not in this run: {problems[part.name]}.")
            continue
        path = results / f"{part.name}.{'json' if part.writes_json else 'txt'}"
        content = json.loads(path.read_text()) if part.writes_json else path.read_text()
        tables.put_between_markers(README, part.name, part.table(content))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts(Path(), ())]
    parser.add_argument("--environments", type=Path, default=Path("peers"), help="(default: peers)")
    parser.add_argument(
        "--results", type=Path, default=Path("peers/results"), help="(default: peers/results)"
    )
    parser.add_argument(
        "--traces", type=Path, nargs="+", default=[], metavar="FILE", help="analyse these, too"
    )
    usual = [name for name in names if name not in ON_REQUEST]
    parser.add_argument("--only", nargs="+", choices=names, default=usual, metavar="PART", help=f"of {names}")
    parser.add_argument("--render", action="store_true", help="only write the tables of an earlier run")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    options.environments = options.environments.absolute()  # the commands run in other folders
    all_parts = parts(options.environments, options.traces)
    if not options.render:
        make_environments(options.environments)
        options.results.mkdir(parents=True, exist_ok=True)
        results = options.results.resolve()
        about = about_machine(options.environments)
        done = [
            run_part(part, options.environments, results) for part in all_parts if part.name in options.only
        ]
        path, ran = results / "run.json", {one["name"] for one in done}
        earlier = json.loads(path.read_text())["parts"] if path.exists() else []
        done += [one for one in earlier if one["name"] not in ran]
        path.write_text(json.dumps({"about": about, "parts": done}, indent=1))
    render(all_parts, options.results)


if __name__ == "__main__":
    main()
