"""Test the package with combinations of Python, torch and Lightning, each in a virtual environment.

    python benchmarks/compat.py                            # all of ENVIRONMENTS; about 10 minutes each
    python benchmarks/compat.py --only oldest 3.13-newest  # some of them
    python benchmarks/compat.py --table                    # results as the table of docs/compatibility.md

Each environment has a wheel of this checkout, the versions named here, and the newest versions of all other
packages that pip finds (the oldest environment has the lower bounds of pyproject.toml). It runs the self-test
on the CPU and the test files of CORE. Results go to compat.json immediately, one entry per environment. If an
environment can't be created, its entry has the reason. A Python is found by its name (python3.12) or below
~/.pyenv/versions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "compat.json"
CORE = (
    "tests/lightning/test_contract_lightning.py",
    "tests/lightning/test_phases_fake_clock.py",
    "tests/inspect/test_fvcore_table.py",
    "tests/measure/test_window.py",
    "tests/measure/test_device_phases.py",
    "tests/trace/test_hostile_streams.py",
)
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "rich<15", "setuptools<81")
SHOWN = ("torch", "lightning", "torchmetrics", "numpy", "msgspec")


@dataclass(frozen=True)
class Environment:
    """A combination of versions: ``None`` is pip's newest, ``oldest`` the lower bound."""

    python: str
    torch: str = ""
    lightning: str = ""


ENVIRONMENTS = {
    "oldest": Environment("3.10", "oldest", "oldest"),
    "3.11-ci": Environment("3.11", "2.13.0", "2.6.6"),
    "3.12-torch2.11": Environment("3.12", "2.11.0", "2.6.6"),
    "3.12-lightning2.4": Environment("3.12", "2.13.0", "2.4.0"),
    "3.10-newest": Environment("3.10"),
    "3.13-newest": Environment("3.13"),
}


def lower_bounds() -> list[str]:
    """Return each dependency's oldest version that pyproject.toml allows."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("\ndependencies = [")[2].partition("]")[0]
    return [f"{name}=={least}" for name, least in re.findall(r'"([\w-]+)>=([\w.]+)"', block)]


def requirements(environment: Environment) -> list[str]:
    """Return the requirements to install with the wheel."""
    if environment.torch == "oldest":
        bounds = dict(one.split("==") for one in lower_bounds())
        return [*lower_bounds(), f"pytorch-lightning=={bounds['lightning']}"]
    pins = {"torch": environment.torch, "lightning": environment.lightning}
    pins["pytorch-lightning"] = environment.lightning
    return [f"{name}=={pin}" if pin else name for name, pin in pins.items()]


def find_python(version: str) -> str | None:
    """Find a version's interpreter; below ~/.pyenv, the newest patch."""
    found = list((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    if not found:
        return shutil.which(f"python{version}")
    return str(max(found, key=lambda one: [int(part) for part in re.findall(r"\d+", one.parts[-3])]))


def call(command: list[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Return exit code and output; 124 means that the command timed out."""
    environment = {key: one for key, one in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"stopped after {limit_s:.0f} s"
    return done.returncode, done.stdout


def try_environment(environment: Environment, folder: Path, wheel: Path) -> dict[str, Any]:
    """Create an environment, and run the self-test and the tests in it."""
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "asked": requirements(environment)}
    interpreter = find_python(environment.python)
    if interpreter is None:
        return result | {"reason": f"there is no Python {environment.python}"}
    home = folder / "environment"
    python = home / "bin" / "python"
    code, said = call([interpreter, "-m", "venv", str(home)], folder, 300)
    if not code:
        install = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", str(wheel)]
        code, said = call([*install, *requirements(environment), *TOOLS], folder, 2400)
    if code:
        return result | {"reason": f"pip: {last_line(said)}"}
    code, said = call([str(python), "-m", "pip", "list", "--format=json"], folder, 120)
    listed = next(line for line in said.splitlines() if line.startswith("["))
    result["versions"] = {one["name"].lower(): one["version"] for one in json.loads(listed)}
    code, said = call([str(python), "-c", "import platform; print(platform.python_version())"], folder, 60)
    result["python"] = said.strip()
    return result | selftest(python, folder) | run_tests(python)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()[:200]


def selftest(python: Path, folder: Path) -> dict[str, Any]:
    """Return each check's status, and what failed."""
    begin, file = time.monotonic(), folder / "selftest.json"
    command = [str(python), "-m", "lightning_modelprof", "selftest", "--device", "cpu", "--json", str(file)]
    code, said = call(command, folder, 900)
    if not file.exists():
        return {"selftest": {}, "selftest_reason": last_line(said)}
    checks = json.loads(file.read_text())["checks"]
    wrong = [one for one in checks if one["status"] == "FAIL"]
    return {
        "selftest": {one["name"]: one["status"] for one in checks},
        "selftest_failed": {
            one["name"]: [
                f"{c['name']}: {c['ours']}, expected {c['truth']}"
                for c in one["comparisons"]
                if not c["passes"]
            ]
            or [one["reason"]]
            for one in wrong
        },
        "selftest_s": round(time.monotonic() - begin),
        "selftest_exit_code": code,
    }


def run_tests(python: Path) -> dict[str, Any]:
    """Test the installed package with this checkout's tests."""
    with tempfile.TemporaryDirectory() as name:
        # Copy only the tests, so that the checkout's package isn't importable.
        folder = Path(name)
        for part in ("tests", "examples", "configs", "docs", "benchmarks"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / part, folder / part)
        files = [str(folder / one) for one in CORE]
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *files]
        code, said = call(command, folder, 2400)
    counts = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last_line(said))
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", said, re.MULTILINE)
    reasons = re.findall(r"^E  +(.+)$", said, re.MULTILINE) or [last_line(said)]
    why = {"tests_reason": reasons[0][:200]} if code else {}
    return {"tests": counts, "tests_failed": failed, "tests_exit_code": code} | why


def table(results: dict[str, Any]) -> str:
    """Format the results for the docs."""
    lines = [
        f"| Python | {' | '.join(SHOWN)} | self-test on the CPU | tests | date |",
        f"|{'---|' * (len(SHOWN) + 4)}",
    ]
    for name, one in results.items():
        if "reason" in one:
            asked = f"{', '.join(one['asked'])} {'| ' * (len(SHOWN) - 1)}"
            lines.append(
                f"| {ENVIRONMENTS[name].python} | {asked}| not run: {one['reason']} | | {one['date']} |"
            )
            continue
        versions = [one["versions"].get(package, "–") for package in SHOWN]
        states, counts = list(one["selftest"].values()), one["tests"]
        checks = f"{states.count('PASS')} of {len(states) - states.count('SKIP')} pass"
        failed = sum(counts.get(kind, 0) for kind in ("failed", "error", "errors"))
        tests = f"{counts.get('passed', 0)} passed, {failed} failed, {counts.get('skipped', 0)} skipped"
        seconds = one.get("selftest_s", "–")
        cells = [one["python"], *versions, f"{checks}, {seconds} s", tests, one["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument(
        "--folder", type=Path, help="where environments are made, one at a time; a temporary one"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of what ran")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.table:
        with tempfile.TemporaryDirectory() as name:
            build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", name, str(ROOT)]
            subprocess.run(build, check=True)
            [wheel] = Path(name).glob("*.whl")
            for one in options.only:
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    results[one] = try_environment(ENVIRONMENTS[one], Path(folder), wheel)
                ordered = {key: results[key] for key in ENVIRONMENTS if key in results}
                RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
                print(table({one: results[one]}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
