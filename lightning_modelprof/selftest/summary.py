"""Print the results in at most 40 lines, and make the file for an issue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from lightning_modelprof.selftest.runner import CHECKS, Result
from lightning_modelprof.units import size

MOST_LINES: Final = 40

_WIDTH: Final = 118

_FAIL_MEANS: Final = (
    "FAIL: the profiler's number and an independent measurement differ by more than the limit, or the",
    "check didn't finish. Another program on the GPU or the CPU can cause this: run again on an idle",
    "machine. If it fails again, don't rely on that number here, and please open an issue.",
)


def heading(machine: dict[str, Any]) -> list[str]:
    """Describe the machine in one line."""
    versions = machine.get("versions", {})
    known = {"driver": machine.get("driver"), "CUDA": machine.get("cuda"), "ROCm": machine.get("hip")}
    parts = [
        f"{machine.get('devices')} × {machine['card']}" if "card" in machine else machine.get("device", "")
    ]
    parts += [size(machine["memory_bytes"])] if "memory_bytes" in machine else []
    parts += [f"{name} {value}" for name, value in known.items() if value]
    parts += [f"{name} {versions[name]}" for name in ("torch", "lightning") if versions.get(name)]
    return [f"Selftest of lightning-modelprof {versions.get('lightning-modelprof', '')}: {', '.join(parts)}"]


def line_of(result: Result) -> str:
    """Describe a check in one line: how many numbers, and both of the one nearest to its limit."""
    text = result.reason
    if result.comparisons and result.status == "PASS":
        nearest = max(result.comparisons, key=lambda one: one.used())
        count = len(result.comparisons)
        rest = f"; {result.reason}" if result.reason else ""
        text = f"{count} agree{rest}, such as {nearest.sentence()}"
    elif result.status == "FAIL" and not text:
        wrong = sum(not one.passes for one in result.comparisons)
        text = f"{wrong} of {len(result.comparisons)} numbers differ"
    return _cut(f"{result.status}  {result.name:<10}  {round(result.seconds):3d} s  {text}")


def closing(results: Sequence[Result], file: str) -> list[str]:
    """The lines after the checks: differing numbers, their meaning, and the file."""
    counts = {status: sum(one.status == status for one in results) for status in ("PASS", "FAIL", "SKIP")}
    last = [", ".join(f"{count} {status}" for status, count in counts.items())]
    last += [f"Wrote {file}: the results, the card and versions, to attach to an issue. No names or paths."]
    if not counts["FAIL"]:
        return ["", *last]
    room = MOST_LINES - len(CHECKS) - len(_FAIL_MEANS) - len(last) - 5
    wrong = list(_wrong(results))
    more = [f"  and {len(wrong) - room} more in {file}"] if len(wrong) > room else []
    return ["", *wrong[:room], *more, "", *_FAIL_MEANS, "", *last]


def _wrong(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        for one in result.comparisons:
            if not one.passes:
                yield _cut(f"FAIL  {result.name}: {one.sentence()}")


def attachment(machine: dict[str, Any], results: Sequence[Result]) -> bytes:
    """The file for an issue, without names of users, machines, directories or files."""
    checks = [
        {
            "name": one.name,
            "status": one.status,
            "seconds": round(one.seconds, 1),
            "reason": one.reason,
            "comparisons": [comparison.as_json() for comparison in one.comparisons],
        }
        for one in results
    ]
    return json.dumps({"machine": machine, "checks": checks}, indent=1).encode()


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
