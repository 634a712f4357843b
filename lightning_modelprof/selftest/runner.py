"""Run the checks one after the other, each in a process with a time limit, within a budget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.selftest.child import RESULTS, places
from lightning_modelprof.selftest.comparison import Compared, from_json

CHILD: Final = ("-m", "lightning_modelprof.selftest.child")

_LEAST_S: Final = 8.0
"""Minimum time left to start a check: enough to import torch."""

_ROOT: Final = Path(__file__).resolve().parents[2]

_STRANGE: Final = (
    "LIGHTNING_MODELPROF",
    "PL_",
    "SLURM_",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "NODE_RANK",
)
"""Prefixes of environment variables that would change a Trainer's behavior."""


@dataclass(frozen=True)
class Check:
    """A generator of comparisons, and its time limit.

    Attributes:
        function: its module and name, as ``module:name``.
        seconds: its time limit.
        kinds: of devices that it supports; empty for any.
    """

    name: str
    function: str
    seconds: float
    kinds: tuple[str, ...] = ()


_GPU: Final = ("cuda", "xpu", "mps")

_CHECKS: Final = "lightning_modelprof.selftest.checks"

CHECKS: Final = (
    Check("training", f"{_CHECKS}_fit:training", 90),
    Check("windows", f"{_CHECKS}_trace:window", 80),
    Check("cpu phases", f"{_CHECKS}_time:cpu_phases", 60),
    Check("gpu phases", f"{_CHECKS}_time:device_phases", 90, _GPU),
    Check("modules", f"{_CHECKS}_time:module_times", 60),
    Check("flops", f"{_CHECKS}_cost:flops", 60),
    Check("waits", f"{_CHECKS}_trace:waiting_calls", 80, ("cuda",)),
    Check("memory", f"{_CHECKS}_cost:memory", 80, ("cuda",)),
    Check("findings", f"{_CHECKS}_fit:findings", 90),
    Check("mfu", f"{_CHECKS}_cost:mfu", 60, ("cuda",)),
    Check("overhead", f"{_CHECKS}_time:overhead", 90),
    Check("variants", f"{_CHECKS}_fit:variants", 80, ("cuda",)),
    Check("ddp", f"{_CHECKS}_fit:ddp", 90),
    Check("compiled", f"{_CHECKS}_fit:compiled", 120, ("cuda",)),
)
"""Most valuable first; those that don't fit into the budget are skipped."""


@dataclass
class Result:
    """Outcome of a check.

    Attributes:
        status: ``PASS``, ``FAIL`` or ``SKIP``.
        reason: why all or the rest of it was skipped, or why it didn't finish.
    """

    name: str
    status: str
    seconds: float = 0.0
    comparisons: list[Compared] = field(default_factory=list)
    reason: str = ""


def run_checks(
    device: str, budget_s: float, on_start: Callable[[Check], None], on_result: Callable[[Result], None]
) -> None:
    """Run all checks in order.

    Args:
        on_start: called before each check that runs.
        on_result: called after each check.
    """
    ends = time.monotonic() + budget_s
    for check in CHECKS:
        left = ends - time.monotonic()
        if check.kinds and device not in check.kinds:
            needed = "GPU" if len(check.kinds) > 1 else "CUDA or ROCm device"
            on_result(Result(check.name, "SKIP", reason=f"needs a {needed}"))
            continue
        if left < _LEAST_S:
            on_result(Result(check.name, "SKIP", reason="no time left; raise --budget"))
            continue
        on_start(check)
        on_result(run_check(check, device, min(check.seconds, left)))


def run_check(check: Check, device: str, limit_s: float) -> Result:
    """Run one check; a limit below its own comes from the budget."""
    begin = time.monotonic()
    lines, ending = run_child(check.function, device, limit_s)
    result = Result(check.name, "PASS", time.monotonic() - begin)
    result.comparisons = [from_json(one["comparison"]) for one in lines if "comparison" in one]
    skips = [one["skip"] for one in lines if "skip" in one]
    errors = [f"{one['error']} ({one['place']})" for one in lines if "error" in one]
    result.reason = (skips or errors or [ending])[0]
    if errors or not all(one.passes for one in result.comparisons):
        result.status = "FAIL"
    elif (skips and not result.comparisons) or (ending.startswith("stopped") and limit_s < check.seconds):
        result.status = "SKIP"
        result.reason = skips[0] if skips else "no time left; raise --budget"
    elif ending or not result.comparisons:
        result.status, result.reason = "FAIL", ending or "compared nothing"
    return result


def run_child(function: str, device: str | None, limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """Run a check in a process; return the lines it wrote, and how it ended (``""`` if normally).

    Args:
        function: a check's, or ``machine``.
        device: a kind; ``None`` for the best one.
        limit_s: time until it's killed, with all its child processes.
    """
    # Not in the user's directory, where Python would import a file such as select.py as a module.
    paths = [str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    paths += [str(_ROOT)] if Path.cwd() == _ROOT else []  # a clone that isn't installed
    # Windows can't delete open files, and a process may still be exiting.
    with tempfile.TemporaryDirectory(prefix="selftest_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, *CHILD, function]
        command += ["--folder", name, "--seconds", f"{limit_s}", *(["--device", device] if device else [])]
        environment = {key: one for key, one in os.environ.items() if not key.startswith(_STRANGE)}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # reproducible sums
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=name,
                env=environment,
                start_new_session=True,
            )
            try:
                process.wait(limit_s)
                ending = f"ended with exit code {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                ending = f"stopped after {round(limit_s)} s"
            finally:
                _end(process)
        text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        if ending and (where := places(text.rpartition("most recent call first")[2])):
            ending += f" ({where})"
        file = folder / RESULTS
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")], ending


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, which are one process group."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
