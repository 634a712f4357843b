#!/usr/bin/env python3
"""Compares reports of stored runs and traces with stored values.

    python tests/oracle/oracle.py check  [--only NAME] [--show 40]
    python tests/oracle/oracle.py freeze [--only NAME]

Inputs are the runs in ``inputs/`` (a packed run.json, some with traces) and ``tests/data/traces``.
``expected/`` holds every number of each report.json by its place and every finding by its kind.

``check`` rebuilds the reports with ``lightning-modelprof report`` and ``analyze`` and prints each
difference. Numbers agree within a relative error of 1e-9. Sentences aren't compared. ``freeze`` replaces
the stored values.

Add intentional renames to ``RENAMED`` and removed tables to ``DROPPED``, with the reason.
If the schema of report.json changes, convert the new one to the old places in ``adapted``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRACES = ROOT / "tests" / "data" / "traces"

CAUSES_OF_WHAT_IF = {
    "Data loading": "Data loading",
    "All CPU work (without launches and copies)": "CPU",
    "All launch calls": "Launch",
    "All copies and memsets": "Copy",
    "All compute kernels": "Kernel",
    "All communication": "Communication",
}
RENAMED: dict[str, str] = {
    # What if covers operators and kernels; Critical path has the same figures per cause.
    **{
        f"/tables/what_if/rows/{old}/": f"/tables/critical_path/rows/{new}/"
        for old, new in CAUSES_OF_WHAT_IF.items()
    },
    # Causes have the same name in all tables.
    "/tables/idle/rows/Dataloader/": "/tables/idle/rows/Data loading/",
}
"""Old prefix of places → new prefix."""
_OTHER_STEPS = "GPU idle in critical_path has it, over all steps and for the rank with the longest ones"
DROPPED: dict[str, str] = {
    **{
        f"/tables/what_if/rows/{old}/path_ns": "step_ns in critical_path, of launches without their latency"
        for old in CAUSES_OF_WHAT_IF
    },
    "/tables/idle/rows/Dataloader/name": "Data loading is text, which isn't compared",
    "/tables/idle/rows/Waiting for CPU/": "Data loading and CPU together",
    **{
        f"/tables/host_waits/rows/{name}/": _OTHER_STEPS
        for name in ("Idle", "Idle without the first step", "Dataloader", "Communication", "Other")
    },
}
"""Prefix of places removed on purpose → the reason."""
TEXT = (
    *("summary", "action", "title", "notes", "label", "note", "absent_reason", "settings", "errors"),
    *("reason", "columns", "group", "unit", "change"),
)
"""Keys of sentences and headings, which may change freely."""
NAMES = ("kind", "phase", "name", "part", "operator", "path", "batch", "label", "callback")
"""Keys that identify a row or a finding."""


def adapted(report: dict[str, Any]) -> dict[str, Any]:
    """A report of any schema, converted to the places of schema 1."""
    if report["schema_version"] == 1:
        return report
    summary, verdict = report["summary"], report["verdict"]
    names = ("kind", "summary", "accounted_ratio")
    return {
        "schema_version": 1,
        **(_traces(summary) if summary["run"] is None else _run(summary)),
        "verdict": verdict and {name: verdict[name] for name in names},
        "findings": [_finding(one) for one in report["findings"]],
        "tables": {name: _table(table) for name, table in report["tables"].items()},
        "notes": report["notes"],
    }


def _traces(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("traces", "others")}


def _run(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("run", "settings", "validation", "callbacks", "windows", "ranks", "own_cost")
    return {name: summary[name] for name in names} | {
        "benchmark": _benchmark(summary),
        "phases": [{"phase": one["key"], **_without(one, "key")} for one in summary["phases"]],
        "flops": _flops(summary["flops"]),
        "memory": _memory(summary["memory"]),
    }


def _benchmark(summary: dict[str, Any]) -> dict[str, Any] | None:
    figures, run = summary["benchmark"], summary["run"]
    if figures is None:
        return None
    ratio, steps, samples = (figures[name] for name in ("reader_ratio", "steps_per_s", "samples_per_s"))
    return {
        "steps": figures["num_steps"],
        "reader_ratio": ratio and ratio["avg"],
        "reader_ratio_per_step": ratio,
        "batch_cost_ns": figures["batch_cost_ns"],
        "reader_cost_ns": figures["reader_cost_ns"],
        "ips": steps and {"unit": "steps/s" if run["loop"] == "fit" else "batches/s", **steps},
        "samples_per_s": samples and {"unit": f"{run['sample_unit']}/s", **samples},
        "samples_per_step": figures["samples_per_step"],
    }


def _flops(figures: dict[str, Any] | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    mean = figures["mean_step"]
    if mean is not None and mean["note"]:
        mean = {name: mean[name] for name in ("model_flops", "hardware_flops", "note")}
    phases = {phase: {"flops": number, "macs": number // 2} for phase, number in figures["phases"].items()}
    return _without(figures, "phases") | {"mean_step": mean} | phases


def _memory(figures: dict[str, Any] | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    event = figures["out_of_memory"]
    if event is not None:
        left_out = ("module", "package", "is_library", "is_exact", "inner", "call")
        event = {"file": None, "line": None, "function": "", **_without(event, *left_out)}
    names = {"name": "function", "file": "file", "line": "line", "is_library": "is_library"}
    defaults = {"function": "", "is_library": False}
    growing = [
        one
        | {
            "lines": [
                {name: line.get(now, defaults.get(now)) for name, now in names.items()}
                | {"package": line.get("package", "")}
                for line in one["lines"]
            ]
        }
        for one in figures["growing"]
    ]
    return figures | {"out_of_memory": event, "growing": growing}


def _finding(finding: dict[str, Any]) -> dict[str, Any]:
    saving, share = finding["saving"], finding["share"]
    return _without(finding, "saving", "slices", "definition") | {
        "saving_ns_per_step": saving and saving["value"],
        "share": share and share["value"],
        "locations": [_place(one) for one in finding["locations"]],
        "evidence": [_without(one, "text") for one in finding["evidence"]],
    }


def _place(location: dict[str, Any]) -> dict[str, Any]:
    deeper = {name: one and _place(one) for name in ("inner", "call") for one in [location[name]]}
    known = _without(location, "at", "where", "is_library") | deeper
    return known | {name: location[name] or None for name in ("function", "module")}


def _table(table: dict[str, Any]) -> dict[str, Any]:
    rows = table["rows"]
    old = {name: table[name] for name in ("title", "columns", "notes", "absent_reason")}
    old["rows"] = [{key: cell["value"] for key, cell in row["cells"].items()} for row in rows]
    if any("depth" in row for row in rows):
        old["depths"] = [row["depth"] for row in rows]
    if any("unit" in row for row in rows):
        old["row_units"] = [row["unit"] for row in rows]
    return old


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def facts(value: object, place: str = "") -> dict[str, object]:
    """A report's leaves by place; rows and findings by name instead of index."""
    found: dict[str, object] = {}
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in TEXT:
                found |= facts(one, f"{place}/{key}")
    elif isinstance(value, list):
        seen: Counter[str] = Counter()
        for index, one in enumerate(value):
            name = str(index)
            if isinstance(one, dict):
                name = "|".join(str(one[key]) for key in NAMES if one.get(key) is not None) or name
            seen[name] += 1
            found |= facts(one, f"{place}/{name}" + (f"#{seen[name]}" if seen[name] > 1 else ""))
    elif not (isinstance(value, str) and ("/" in value or " " in value)):  # paths and sentences
        found[place] = value
    return found


def inputs() -> list[Path]:
    """All runs, then all traces."""
    return [*sorted((HERE / "inputs").iterdir()), *sorted(TRACES.glob("*.json.gz"))]


def expected_file(source: Path) -> Path:
    """The file with the stored values of an input."""
    return HERE / "expected" / f"{source.name.removesuffix('.gz').removesuffix('.json')}.json.gz"


def expected_facts(source: Path) -> dict[str, object]:
    """The stored values of an input."""
    stored: dict[str, object] = json.loads(gzip.decompress(expected_file(source).read_bytes()))
    return stored


def current_facts(source: Path) -> dict[str, object]:
    """The values of an input now."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["analyze", str(source)]
        if source.is_dir():
            command = ["report", str(unpacked(source, folder / "modelprof"))]
        out = folder / "report.json"
        run = subprocess.run(
            [sys.executable, "-m", "lightning_modelprof", *command, "--json", str(out)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if run.returncode not in (0, 1) or not out.exists():
            return {"failed": (run.stderr.strip().splitlines() or ["no message"])[-1][:200]}
        return facts(adapted(json.loads(out.read_text())))


def unpacked(source: Path, target: Path) -> Path:
    """A stored run as a run folder."""
    (target / "traces").mkdir(parents=True)
    for file in source.iterdir():
        if file.name == "run.json.gz":
            (target / "run.json").write_bytes(gzip.decompress(file.read_bytes()))
        else:
            (target / "traces" / file.name).write_bytes(file.read_bytes())
    return target


def differences(expected: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """One line for each leaf that is missing, new or different."""
    moved = {
        _renamed(place): value for place, value in expected.items() if not place.startswith(tuple(DROPPED))
    }
    lines = [f"gone       {place} = {value!r}" for place, value in moved.items() if place not in now]
    for place, value in now.items():
        if place in moved:
            if not _same(moved[place], value):
                lines.append(f"different  {place}: {moved[place]!r} → {value!r}")
        elif not place.startswith(tuple(DROPPED)):
            lines.append(f"new        {place} = {value!r}")
    return lines


def _renamed(place: str) -> str:
    old = next((prefix for prefix in RENAMED if place.startswith(prefix)), None)
    return place if old is None else RENAMED[old] + place.removeprefix(old)


def _same(one: object, two: object) -> bool:
    numbers = (int, float)
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, numbers) and isinstance(two, numbers):
        return math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-12)
    return one == two


def _print_differences(lines: list[str], most: int) -> None:
    for line in lines[:most]:
        print(f"    {line}")
    if len(lines) > most:
        about = Counter("/".join(line.split()[1].split("/")[:4]) for line in lines)
        print(f"    ... {len(lines)}: " + ", ".join(f"{name} {n}" for name, n in about.most_common(12)))


def main() -> int:
    """Runs one of the two commands; returns 1 if a value differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["check", "freeze"])
    parser.add_argument("--only", default="", metavar="NAME", help="inputs whose name contains this")
    parser.add_argument("--show", type=int, default=40, metavar="N", help="differences per input to print")
    args = parser.parse_args()
    chosen = [source for source in inputs() if args.only in source.name]
    if not chosen:
        parser.error(f"no input has {args.only!r} in its name")
    total = wrong = 0
    for source in chosen:
        now = current_facts(source)
        if args.command == "freeze":
            if "failed" in now:
                raise SystemExit(f"{source.name}: {now['failed']}")
            packed = gzip.compress(json.dumps(now, indent=0, sort_keys=True).encode(), mtime=0)
            expected_file(source).write_bytes(packed)
            print(f"{source.name}: {len(now)} values")
            continue
        expected = expected_facts(source)
        lines = differences(expected, now)
        total, wrong = total + len(expected), wrong + len(lines)
        print(f"{source.name}: {len(expected)} values, {len(lines)} differ")
        _print_differences(lines, args.show)
    if args.command == "check":
        print(f"{len(chosen)} inputs, {total} values, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
