"""Verdicts of TraceML, gpuprof and this profiler on the same trainings, each with one known fault or none.

    python benchmarks/verdict_peers.py --json verdicts.json --markdown verdicts.md
    python benchmarks/verdict_peers.py --only slow_loss slow_logger --tools traceml ours
    python benchmarks/verdict_peers.py --every 5 --tools ours traceml gpuprof_first

The trainings are those of ``tests/support/scenarios.py``, with 200 steps instead of 40, because TraceML needs
20 steps for a critical verdict. Trainings with fixed data have 100 steps, those with several epochs
proportionally more epochs, and those about too few steps still 8. Each runs once per tool, in separate
processes, with the tool's defaults:

- TraceML runs as documented for Lightning: ``traceml run train.py``, which attaches its own callback.
- gpuprof runs with its ``LightningCallback`` and is read with ``gpuprof insights``. Its documentation doesn't
  specify a position in the list of callbacks, so with other callbacks it runs once as the first and once as
  the last one. Lightning itself moves checkpoints behind all of them. Without others, the one run counts for
  both.
- Ours runs between the scenario's callbacks, as in the tests.

The rule, written before the first run (`verdict_peers_rule.py` has it as code, and the meaning of each code):

- **right**: the primary finding names the category of the injected fault (input, callback, logger,
  checkpoint, validation, optimizer, transfer, model, own code of the step), and no warning names another one.
  A line of code isn't required. For a healthy training: no warning.
- **cannot name it**: the primary finding is unexplained time, or the tool reports that it cannot tell.
- **wrong**: a warning names another category; or a healthy training gets any warning; or the tool's only
  verdict, though not a warning, blames another category for the time.
- **silent**: a fault was injected and not reported. No better than wrong, but listed separately.

In the tools' favor: unexplained time next to a right finding does no harm; hints below a warning do no harm;
statements about the machine (CPU, memory, temperature, price) aren't judged; with only 8 steps, "cannot tell"
is right; if the fault's cost is unknown, a hint that names it is enough.

A busy machine may stop a process in a short step, or push a tool's shares over a threshold. Our own tests
allow three attempts for that reason, and ``--attempts 3`` gives them to every tool.

In our favor: the scenarios are our own, and our rules were made with them in view. The peers' weren't.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verdict_peers_fit import DEFAULT_STEPS, ROOT, TOOLS, load_scenarios
from verdict_peers_rule import Answer, gpuprof_answer, judge, own_answer, traceml_answer, truth_of

PACKAGES = {
    "ours": "lightning-modelprof",
    "traceml": "traceml-ai",
    "gpuprof_first": "gpuprof",
    "gpuprof_last": "gpuprof",
}
JUDGEMENTS = ("right", "cannot name it", "wrong", "silent")

DOCUMENTED_LIMITS = {
    ("traceml", "grandchild_call"): "deeper modules called without their direct parent are not seen",
    ("traceml", "validation_every_step"): "validation is not measured",
    ("traceml", "slow_validation"): "validation is not measured",
    ("traceml", "slow_lr_scheduler"): "its optimizer time includes the scheduler's",
    ("traceml", "slow_transfer"): "transfers are measured on CUDA only",
}
"""Documented limits: what a tool doesn't see, or reports elsewhere."""


def start(command: Sequence[str], folder: Path, timeout_s: float) -> str:
    """Run a command and return its output; raises ``RuntimeError`` if it fails or times out."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=timeout_s,
            check=False,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took longer than {timeout_s:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout


def installed_command(name: str) -> str:
    """Find a console script of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"the command {name} is not installed")
    return found


def run_tool(tool: str, name: str, steps: int, folder: Path, timeout_s: float) -> tuple[Answer, list[str]]:
    """Run one fit under one tool; returns its answer, and its printed lines about the fit."""
    script = str(Path(__file__).with_name("verdict_peers_fit.py"))
    arguments = [name, tool, str(folder), "--steps", str(steps)]
    if tool == "traceml":
        logs = str(folder / "traceml")
        command = [installed_command("traceml"), "run", script, "--logs-dir", logs, "--run-name", name]
        printed = start([*command, "--args", *arguments], folder, timeout_s)
        summary = json.loads((folder / "traceml" / name / "final_summary.json").read_text())
        lines = [line.strip(" |").split("||")[0].strip() for line in printed.split("\n")]
        starts = ("Verdict:", "Why:", "Next:", "Step Time ")
        return traceml_answer(summary), [line for line in lines if line.startswith(starts)]
    start([sys.executable, script, *arguments], folder, timeout_s)
    if tool == "ours":
        answer = own_answer(json.loads((folder / "fit.json").read_text())["report"])
        return answer, [answer.headline, *(f"{claim.text} [{claim.place}]" for claim in answer.claims)]
    printed = start([installed_command("gpuprof"), "insights", "gpuprof.db"], folder, timeout_s)
    starts = ("steps:", "phases", "inter-step", "[")
    lines = [line.strip() for line in printed.split("\n") if line.strip().startswith(starts)]
    return gpuprof_answer(lines), lines


def run_row(scenario: Any, tool: str, steps: int, timeout_s: float) -> dict[str, Any]:
    """Make one row of the result; if a tool fails, the row has its error instead of a judgment."""
    row: dict[str, Any] = {"scenario": scenario.name, "tool": tool}
    truth = truth_of(scenario)
    row["injected"] = sorted(truth.categories)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            answer, lines = run_tool(tool, scenario.name, steps, folder, timeout_s)
            fit = json.loads((folder / "fit.json").read_text())
            row |= {
                key: fit[key]
                for key in ("steps", "injected_ms_per_step", "fit_ms_per_step", "other_callbacks")
            }
            row |= {"headline": answer.headline, "claims": [asdict(claim) for claim in answer.claims]}
            row |= {"printed": lines, "judgement": judge(answer, truth)}
            if tool == "ours" and scenario.finding is not None and getattr(scenario, "placed", True):
                places = " ".join(claim.place for claim in answer.claims[:1]).split()
                row["names_line"] = f"scenarios.py:{scenario.line}" in places
        except (RuntimeError, OSError, KeyError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
    row["documented_limit"] = DOCUMENTED_LIMITS.get((tool, scenario.name))
    row["seconds"] = round(time.perf_counter() - begin, 1)
    return row


def best_row(scenario: Any, tool: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the first right attempt, else the last one, because a busy machine may spoil one."""
    earlier: list[str] = []
    while True:
        row = run_row(scenario, tool, options.steps, options.timeout)
        if row.get("judgement") == "right" or len(earlier) + 1 >= options.attempts:
            return {**row, "earlier_attempts": earlier}
        earlier.append(cell(row))


def same_as_first(scenario: Any, tool: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Repeat gpuprof's row as the first callback if there are no others that it could follow."""
    if tool != "gpuprof_last":
        return None
    first = [row for row in rows if (row["tool"], row["scenario"]) == ("gpuprof_first", scenario.name)]
    if not first or first[0].get("other_callbacks", 1):
        return None
    return {**first[0], "tool": tool, "seconds": 0.0}


def available(tools: Sequence[str]) -> dict[str, str]:
    """Return the installed tools' versions, and report the missing tools."""
    known = {package: list(importlib.metadata.distributions(name=package)) for package in PACKAGES.values()}
    for tool in tools:
        if not known[PACKAGES[tool]]:
            print(f"{tool} is skipped: {PACKAGES[tool]} is not installed.", flush=True)
    return {tool: known[PACKAGES[tool]][0].version for tool in tools if known[PACKAGES[tool]]}


def counts_of(rows: Sequence[Mapping[str, Any]], tool: str) -> Counter[str]:
    return Counter(row.get("judgement", "failed") for row in rows if row["tool"] == tool)


def markdown(result: Mapping[str, Any]) -> str:
    """Make a row per scenario and a column per tool, and the counts."""
    rows, tools = result["rows"], list(result["versions"])
    lines = [f"| scenario | injected | {' | '.join(tools)} |", "|" + "---|" * (len(tools) + 2)]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        mine = {row["tool"]: row for row in rows if row["scenario"] == name}
        injected = ", ".join(next(iter(mine.values()))["injected"]) or "none"
        cells = (cell(mine[tool]) if tool in mine else "" for tool in tools)
        lines.append(f"| {name} | {injected} | {' | '.join(cells)} |")
    lines.append("")
    for tool in tools:
        counts = counts_of(rows, tool)
        said = ", ".join(f"{kind} {counts[kind]}" for kind in (*JUDGEMENTS, "failed") if counts[kind])
        lines.append(f"- {tool} {result['versions'][tool]}: {said}, of {sum(counts.values())}")
    lines.append(f"\n{result['machine']}; {result['date']}")
    return "\n".join(lines) + "\n"


def cell(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "failed"
    first = row["claims"][0]["text"] if row["claims"] else row["headline"] or "nothing"
    return f"**{row['judgement']}**: {first}".replace("|", "/").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="scenarios; by default all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th scenario of the list")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--attempts", type=int, default=1, help="at most, until one is right")
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="of each process")
    parser.add_argument("--json", type=Path, default=Path("verdict_peers.json"))
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    names = ("torch", "lightning")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, no GPU used, Python {platform.python_version()}"
    machine += "".join(f", {name} {importlib.metadata.version(name)}" for name in names)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "steps": options.steps,
        "versions": available(options.tools),
        "rows": [],
    }
    scenarios = load_scenarios(options.steps).SCENARIOS[:: options.every]
    for tool in result["versions"]:
        for scenario in scenarios:
            if options.only and scenario.name not in options.only:
                continue
            row = same_as_first(scenario, tool, result["rows"])
            row = row or best_row(scenario, tool, options)
            result["rows"].append(row)
            print(f"{tool:14} {scenario.name:30} {cell(row)[:130]} {row.get('error', '')}", flush=True)
            options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    text = markdown(result)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
