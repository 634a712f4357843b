"""How accurately ours, fvcore, FlopCounterMode, DeepSpeed and torchinfo count FLOPs on 31 models.

    python benchmarks/flops.py
    python benchmarks/flops.py --only lenet "fused attention" --tools ours fvcore
    python benchmarks/flops.py --write docs/flops.md

* A cell is a tool's multiply-adds divided by the truth, which is derived by hand next to the model in
  ``flop_models.py``.
* Each cell runs in its own process with a time limit, so a tool's crash or hang only affects that cell.
* The tools are the packages of the Python that runs this; missing ones are "not installed". To get all, run
  ``pip install fvcore torchinfo transformers`` and ``DS_BUILD_OPS=0 pip install deepspeed``.
* Everything runs on the CPU with one thread. No figure depends on speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flop_models import MODELS
from flop_peers import TOOLS

WORKER = Path(__file__).with_name("flop_peers.py")
BEGIN = "<!-- made by benchmarks/flops.py: begin -->"
END = "<!-- made by benchmarks/flops.py: end -->"
NOTHING = "–"
EXACT = 5e-4  # relative error up to which a ratio is written as 1
PACKAGES = ("torch", "fvcore", "deepspeed", "torchinfo", "transformers", "lightning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One tool's result on one model.

    Attributes:
        forward, backward: reported over truth; ``None`` without a figure.
        recompute: multiply-adds that backward repeats; ``None`` if none, or not reported separately.
        truths: multiply-adds forward and backward; ``None`` if the model didn't get that far.
        changed: what the tool changed and didn't restore.
        problem: why there are no figures, in a few words.
        message: of the tool's exception.
    """

    forward: float | None = None
    backward: float | None = None
    recompute: int | None = None
    truths: tuple[int, int] | None = None
    changed: tuple[str, ...] = ()
    problem: str = ""
    message: str = field(default="", compare=False)


Row = dict[str, Cell]


def count_cell(tool: str, model: str, timeout_s: float, worker: Path = WORKER) -> Cell:
    """Run one tool on one model, in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(worker), tool, model]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Cell(problem=f"fails: over {timeout_s:g} s")
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode or not lines:
        errors = done.stderr.decode(errors="replace").splitlines() or [""]
        return Cell(problem=f"fails: exit code {done.returncode}", message=errors[-1])
    return cell_of(json.loads(lines[-1]))


def cell_of(answer: dict[str, object]) -> Cell:
    """Convert the worker's answer to ratios."""
    if "not_installed" in answer:
        return Cell(problem="not installed", message=f"no package {answer['not_installed']}")
    truths: tuple[int, int] = tuple(answer["truths"])
    changed = tuple(answer["changed"])
    if "failed" in answer:
        problem = f"fails: {answer['failed']}"
        return Cell(truths=truths, changed=changed, problem=problem, message=str(answer["message"]))
    backward = answer["backward"]
    return Cell(
        forward=answer["forward"] / truths[0],
        backward=None if backward is None else backward / truths[1],
        recompute=answer["recompute"],
        truths=truths,
        changed=changed,
    )


# ---- As Markdown


def ratio_text(ratio: float | None) -> str:
    """Format with three digits; exact values are 1 or 0."""
    if ratio is None:
        return NOTHING
    if abs(ratio - 1) <= EXACT:
        return "1"
    if ratio == 0:
        return "0"
    if ratio < 0.001:
        return "<0.001"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Make a table whose columns after the first are right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def models_table(rows: dict[str, Row], tools: list[str]) -> str:
    """Make a table with one line per model."""
    both = [tool for tool in tools if any(row[tool].backward is not None for row in rows.values())]
    header = ["model", "forward MACs", *(TOOLS[tool].label for tool in tools)]
    header += ["backward MACs", *(f"{TOOLS[tool].label}, backward" for tool in both)]
    header += ["recomputed MACs, ours", "changed"]
    lines = []
    for model, row in rows.items():
        truths = next((cell.truths for cell in row.values() if cell.truths), None)
        forward, backward = (f"{truth:,}" for truth in truths) if truths else (NOTHING, NOTHING)
        changes = (
            f"{TOOLS[tool].label}: {', '.join(row[tool].changed)}" for tool in tools if row[tool].changed
        )
        recomputed = row["ours"].recompute if "ours" in row else None
        lines.append(
            [model, forward]
            + [row[tool].problem or ratio_text(row[tool].forward) for tool in tools]
            + [backward, *(row[tool].problem or ratio_text(row[tool].backward) for tool in both)]
            + [NOTHING if recomputed is None else f"{recomputed:,}", "; ".join(changes) or "nothing"]
        )
    return table(header, lines)


def tools_table(rows: dict[str, Row], tools: list[str]) -> str:
    """Make a table with one line per tool, counting its results."""
    header = [
        "of all models",
        "forward within 0.1 %",
        "within 2 %",
        "fails",
        "backward within 0.1 %",
        "left as it was",
    ]
    lines = []
    for tool in tools:
        cells = [row[tool] for row in rows.values()]
        if all(cell.problem == "not installed" for cell in cells):
            lines.append([TOOLS[tool].label, "not installed", *[NOTHING] * (len(header) - 2)])
            continue
        backward = [cell.backward for cell in cells if cell.backward is not None]
        counts = [
            sum(cell.forward is not None and abs(cell.forward - 1) <= 0.001 for cell in cells),
            sum(cell.forward is not None and abs(cell.forward - 1) <= 0.02 for cell in cells),
            sum(cell.problem.startswith("fails") for cell in cells),
            sum(abs(ratio - 1) <= 0.001 for ratio in backward) if backward else NOTHING,
            sum(bool(cell.truths) and not cell.changed for cell in cells),
        ]
        lines.append([TOOLS[tool].label, *map(str, counts)])
    return table(header, lines)


def failures(rows: dict[str, Row], tools: list[str]) -> list[str]:
    """List the tools' errors; models with the same error share a line."""
    models_of: dict[tuple[str, str], list[str]] = {}
    for model, row in rows.items():
        for tool in tools:
            if row[tool].problem.startswith("fails"):
                said = f"{row[tool].problem.removeprefix('fails: ')}: {row[tool].message[:110]}"
                models_of.setdefault((TOOLS[tool].label, said), []).append(model)
    return [f"* {tool} ({'; '.join(models)}): `{said}`" for (tool, said), models in models_of.items()]


def version_of(package: str) -> str:
    """Return the version from the package's metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def environment_text() -> str:
    """Describe the environment of the figures."""
    versions = [f"{package} {version_of(package)}" for package in PACKAGES]
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    date = datetime.now(timezone.utc).date().isoformat()
    system = f"Python {platform.python_version()}, {platform.system()}, {cpu}, on the CPU with one thread"
    return f"{', '.join(versions)}; {system}; {date}."


def render(rows: dict[str, Row], tools: list[str]) -> str:
    """Return the whole generated part as Markdown."""
    parts = [environment_text(), tools_table(rows, tools), models_table(rows, tools)]
    if lines := failures(rows, tools):
        parts.append("\n".join(["What failed said:", "", *lines]))
    return "\n\n".join(parts)


def write_between_markers(path: Path, generated: str) -> None:
    """Replace the text between a file's markers.

    Raises:
        ValueError: If the file doesn't contain each marker once, in this order.
    """
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or END in before:
        raise ValueError(f"{path}: expected one {BEGIN} and one {END} after it")
    path.write_text(f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    add("--every", type=int, default=1, metavar="N", help="every N-th model of the list")
    add("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS), metavar="TOOL", help=", ".join(TOOLS))
    add("--jobs", type=int, default=1, metavar="N", help="cells at the same time (default: 1)")
    add("--timeout", type=float, default=180.0, metavar="S", help="for one cell (default: 180)")
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help=f"put the tables between the file's lines {BEGIN} and {END}",
    )
    options = parser.parse_args()
    if options.write and (options.only or options.every > 1 or options.tools != list(TOOLS)):
        parser.error("expected --write without --only, --every and --tools: a document has the whole table")
    return options


def main() -> None:
    options = parse_args()
    models = (options.only or list(MODELS))[:: options.every]
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = {
            model: {tool: pool.submit(count_cell, tool, model, options.timeout) for tool in options.tools}
            for model in models
        }
        rows: dict[str, Row] = {}
        for model, row in pending.items():
            rows[model] = {tool: cell.result() for tool, cell in row.items()}
            print(f"{len(rows)} of {len(models)}: {model}", file=sys.stderr, flush=True)
    generated = render(rows, options.tools)
    print(generated)
    if options.write:
        write_between_markers(options.write, generated)


if __name__ == "__main__":
    main()
