"""How fast traces become tables: ours against json.loads, torch_tb_profiler, HolisticTraceAnalysis and torch.

    python benchmarks/trace_analysis.py a.pt.trace.json.gz b.pt.trace.json
    python benchmarks/trace_analysis.py --generate-mb 50 200 1000
    python benchmarks/trace_analysis.py a.pt.trace.json.gz --peers-python torch_tb_profiler=PEERS/bin/python

* Every measurement is a process of its own. What counts is CPU time (user and system, all threads and child
  processes) from the file to the tables, and the peak of resident memory in it. Starting Python and imports
  are before it, and are subtracted.
* All contenders take turns on all files, in rotating order. A ratio is taken within a round, as the speed of
  a machine drifts; figures are the median of the rounds with the lowest and the highest.
* Peers can live in another environment (``--peers-python NAME=PATH``). One that is not there is reported as
  not installed, one that fails as failed; neither has a number.
* ``key_averages`` is another comparison: a window of a CPU training is recorded in the process, then torch's
  ``key_averages().table()`` is compared with ours on the same window, export to a file included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generate_trace import generate_trace

WORKER = Path(__file__).with_name("trace_analysis_worker.py")
ROOT = Path(__file__).resolve().parents[1]
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who analyzes a trace file.

    Attributes:
        name: of the worker's function.
        label: in the table.
        peer: the package it needs, or "" for ours and the standard library.
    """

    name: str
    label: str
    peer: str = ""


CONTENDERS = (
    Contender(OURS, "lightning-modelprof, all tables to JSON and text"),
    Contender("reader", "lightning-modelprof, reading alone"),
    Contender("json_loads", "gzip and json.loads alone"),
    Contender("torch_tb_profiler", "torch_tb_profiler, all views", "torch_tb_profiler"),
    Contender("hta", "HolisticTraceAnalysis, 10 analyses", "HolisticTraceAnalysis"),
    Contender("hta_all", "HolisticTraceAnalysis, those and aten_op_kernels", "HolisticTraceAnalysis"),
)


@dataclass(slots=True)
class Outcome:
    """What one contender did on one file.

    Attributes:
        cpu_s, peak_bytes: one figure per round.
        details: what the worker said of its work, of the last round.
        problem: why there are no figures.
    """

    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def measure(paths: list[Path], options: argparse.Namespace) -> list[dict[str, Outcome]]:
    """All contenders on all files, in turns: a slow minute of the machine must not meet one file alone."""
    table = [{contender.name: Outcome() for contender in CONTENDERS} for _ in paths]
    for path, outcomes in zip(paths, table, strict=True):
        if uncompressed_bytes(path) > options.others_up_to_mb * 1e6:
            for name in outcomes.keys() - {OURS, "reader"}:
                outcomes[name].problem = f"left out above {options.others_up_to_mb:g} MB"
    for number in range(options.rounds):
        start = number % len(CONTENDERS)
        for path, outcomes in zip(paths, table, strict=True):
            for contender in CONTENDERS[start:] + CONTENDERS[:start]:
                if contender.name in options.leave_out:
                    outcomes[contender.name].problem = "left out"
                outcome, python = outcomes[contender.name], options.peers.get(contender.peer)
                if not outcome.problem:
                    run_worker(outcome, contender.name, python, [str(path)], options.timeout)
    return table


def run_worker(
    outcome: Outcome, name: str, python: str | None, arguments: list[str], timeout: float
) -> dict[str, Any] | None:
    """One measurement in a fresh process, added to the outcome; ``None`` if there was a problem."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "6"}
    command = [python or sys.executable, str(WORKER), name, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        outcome.problem = f"not finished after {timeout:g} s"
        return None
    except OSError as error:
        outcome.problem = f"not installed ({error.strerror}: {python})"
        return None
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.decode().splitlines() or [f"exit code {done.returncode}"])[-1]
        outcome.problem = f"failed: {reason}"
        return None
    answer: dict[str, Any] = json.loads(lines[-1])
    if missing := answer.get("not_installed"):
        outcome.problem = f"not installed ({missing})"
        return None
    if "cpu_s" in answer:
        outcome.cpu_s.append(answer["cpu_s"])
        outcome.peak_bytes.append(answer["peak_bytes"])
    outcome.details = answer["details"]
    return answer


def measure_key_averages(options: argparse.Namespace) -> dict[str, Any]:
    """Compare torch's key_averages() with ours, on windows of a CPU training."""
    rounds = []
    for number in range(options.rounds):
        outcome = Outcome()
        answer = run_worker(
            outcome, "key_averages", None, [str(options.window_steps), str(number % 2)], options.timeout
        )
        if answer is None:
            return {"problem": outcome.problem}
        rounds.append(answer["details"])
    return {"rounds": rounds, "num_events": rounds[-1]["num_events"], "json_bytes": rounds[-1]["json_bytes"]}


def uncompressed_bytes(path: Path) -> int:
    """Size of the JSON."""
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path.stat().st_size
    import gzip  # noqa: PLC0415 - this process stays small, as its children begin as copies of it

    size = 0
    with gzip.open(path) as text:
        while chunk := text.read(2**20):
            size += len(chunk)
    return size


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(path: Path, outcomes: dict[str, Outcome], truth: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of one file."""
    json_bytes = uncompressed_bytes(path)
    document: dict[str, Any] = {
        "file": path.name,
        "json_bytes": json_bytes,
        "generated": truth,
        "contenders": {},
    }
    ours = outcomes[OURS].cpu_s
    for name, outcome in outcomes.items():
        if outcome.problem or not outcome.cpu_s:
            document["contenders"][name] = {"problem": outcome.problem}
            continue
        document["contenders"][name] = {
            "cpu_s": spread(outcome.cpu_s),
            "mb_per_cpu_s": json_bytes / 1e6 / statistics.median(outcome.cpu_s),
            "peak_bytes": spread([float(value) for value in outcome.peak_bytes]),
            "peak_over_json": statistics.median(outcome.peak_bytes) / json_bytes,
            "times_ours": spread([theirs / our for theirs, our in zip(outcome.cpu_s, ours, strict=False)])
            if ours
            else None,
            "details": outcome.details,
        }
    return document


def print_file(document: dict[str, Any]) -> None:
    """One table per file."""
    print(f"\n{document['file']}: {document['json_bytes'] / 1e6:.1f} MB of JSON")
    print(
        f"{'':<50}{'CPU s':>8}{'min .. max':>17}{'MB/s':>8}{'peak MB':>9}{'/JSON':>7}"
        f"{'x ours':>9}{'min .. max':>17}"
    )
    for contender in CONTENDERS:
        figures = document["contenders"][contender.name]
        if "problem" in figures:
            print(f"{contender.label:<50}  {figures['problem']}")
            continue
        cpu, times = figures["cpu_s"], figures["times_ours"]
        extremes = f"{cpu['min']:.2f} .. {cpu['max']:.2f}"
        ratio, ratio_extremes = "–", "–"
        if times and contender.name != OURS:
            ratio, ratio_extremes = f"{times['median']:.2f}", f"{times['min']:.2f} .. {times['max']:.2f}"
        print(
            f"{contender.label:<50}{cpu['median']:>8.2f}{extremes:>17}{figures['mb_per_cpu_s']:>8.1f}"
            f"{figures['peak_bytes']['median'] / 1e6:>9.0f}{figures['peak_over_json']:>7.2f}"
            f"{ratio:>9}{ratio_extremes:>17}"
        )
    for contender in CONTENDERS:
        if said := document["contenders"][contender.name].get("details"):
            print(f"  {contender.name}: " + "; ".join(f"{key} {value}" for key, value in said.items()))


def print_growth(documents: list[dict[str, Any]]) -> None:
    """Whether the cost per megabyte stays the same when the file grows."""
    generated = [document for document in documents if document["generated"]]
    usable = [d for d in generated if "cpu_s" in d["contenders"][OURS]]
    if len(usable) < 2:
        return
    print("\nGrowth (generated traces, ours)")
    print(f"{'MB':>8}{'events':>11}{'CPU s':>8}{'ms/MB':>8}{'us/event':>10}{'peak MB':>9}{'/JSON':>7}")
    for document in usable:
        ours, megabytes = document["contenders"][OURS], document["json_bytes"] / 1e6
        seconds, events = ours["cpu_s"]["median"], document["generated"]["events"]
        print(
            f"{megabytes:>8.0f}{events:>11}{seconds:>8.2f}{seconds / megabytes * 1e3:>8.2f}"
            f"{seconds / events * 1e6:>10.2f}{ours['peak_bytes']['median'] / 1e6:>9.0f}"
            f"{ours['peak_over_json']:>7.2f}"
        )


def print_key_averages(document: dict[str, Any]) -> None:
    """Show torch's table against ours."""
    if "problem" in document:
        print(f"\nkey_averages: {document['problem']}")
        return
    rounds = document["rounds"]
    print(
        f"\nA recorded window ({document['num_events']} events, {document['json_bytes'] / 1e6:.1f} MB of"
        " JSON), CPU s: median (min .. max)"
    )
    rows = (
        ("torch: key_averages().table()", "torch_s"),
        ("ours: export_chrome_trace and all tables", "ours_s"),
        ("  of it export_chrome_trace", "export_s"),
    )
    for label, key in rows:
        figures = spread([entry[key] for entry in rounds])
        print(f"{label:<50}{figures['median']:>8.3f} ({figures['min']:.3f} .. {figures['max']:.3f})")
    ratio = spread([entry["torch_s"] / entry["ours_s"] for entry in rounds])
    print(f"{'torch over ours':<50}{ratio['median']:>8.2f} ({ratio['min']:.2f} .. {ratio['max']:.2f})")


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def parse_args() -> argparse.Namespace:
    """The command line, with ``peers`` as a mapping."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="traces of torch.profiler, plain or gzip")
    add("--generate-mb", nargs="+", type=float, default=[], metavar="N", help="also generated traces of N MB")
    add("--rounds", type=int, default=5, help="measurements of each contender on each file (default: 5)")
    add("--seed", type=int, default=0, help="of the generated traces (default: 0)")
    add(
        "--others-up-to-mb",
        type=float,
        default=250.0,
        metavar="N",
        help="leave json.loads and the peers out above this, as they need many times the size (default: 250)",
    )
    add("--peers-python", action="append", default=[], metavar="NAME=PATH", help="Python that has a peer")
    names = [contender.name for contender in CONTENDERS if contender.name != OURS]
    add("--leave-out", nargs="+", choices=names, default=[], metavar="NAME", help=f"of {', '.join(names)}")
    add("--window-steps", type=int, default=10, help="steps recorded for key_averages, 0: none (default: 10)")
    add("--timeout", type=float, default=900.0, metavar="S", help="for one measurement (default: 900)")
    add("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args()
    options.peers = dict(entry.partition("=")[::2] for entry in options.peers_python)
    known = {contender.peer for contender in CONTENDERS if contender.peer}
    if unknown := set(options.peers) - known:
        parser.error(
            f"expected --peers-python {' or '.join(sorted(known))}, got {', '.join(sorted(unknown))}"
        )
    if options.rounds < 1 or not (options.files or options.generate_mb or options.window_steps):
        parser.error("expected FILES, --generate-mb or --window-steps, and --rounds of at least 1")
    return options


def main() -> None:
    """Measure and print."""
    options = parse_args()
    about = environment()
    print(", ".join(f"{key} {value}" for key, value in about.items()) + f", {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        truths: list[dict[str, Any] | None] = [None] * len(options.files)
        paths = list(options.files)
        for megabytes in options.generate_mb:
            paths.append(Path(folder) / f"generated_{megabytes:g}MB.pt.trace.json")
            truth = generate_trace(paths[-1], int(megabytes * 1e6), seed=options.seed)
            truths.append({"events": truth.num_events, "steps": truth.num_steps, "seed": options.seed})
        outcomes = measure(paths, options)
        documents = [summarize(*of_file) for of_file in zip(paths, outcomes, truths, strict=True)]
    for document in documents:
        print_file(document)
    print_growth(documents)
    averages = measure_key_averages(options) if options.window_steps else None
    if averages:
        print_key_averages(averages)
    print(
        "\nCPU s: user and system time, all threads. MB/s: megabytes of uncompressed JSON per CPU second."
        "\npeak: of resident memory, over that after the imports. x ours: CPU time over ours of the same"
        "\nround."
    )
    if options.json:
        options.json.write_text(
            json.dumps({"environment": about, "files": documents, "key_averages": averages}, indent=1)
        )


if __name__ == "__main__":
    main()
