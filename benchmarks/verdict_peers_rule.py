"""How a profiler's answer is judged: the rule of `verdict_peers.py`, and the meaning of each tool's codes.

Written before the first run. Machine pressure (CPU, memory, temperature, price) is recorded but not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

UNEXPLAINED = "unexplained"
"""Time that a tool cannot explain."""

OWN_FINDINGS = {
    "input_bound": "input",
    "synchronous_loader": "input",
    "worker_startup": "input",
    "slow_callback": "callback",
    "slow_logger": "logger",
    "checkpoint_share": "checkpoint",
    "validation_share": "validation",
    "slow_forward_outside_model": "own code of the step",
    "slow_module_hook": "own code of the step",
    "slow_transfer": "transfer",
    "clip_cost": "optimizer",
    "slow_lr_scheduler": "optimizer",
    "zero_grad_cost": "optimizer",
    "optimizer_not_fused": "optimizer",
    "frozen_layers_computed": "model",
    "slow_steps": UNEXPLAINED,  # like gpuprof's "high tail latency" below
}
"""Category of each kind of our findings; any other kind is its own category. The scenarios use the same kinds
for the faults they inject."""

ALSO_RIGHT = {
    "slow_save_hook": {"checkpoint"},  # the hook runs during a checkpoint
    "slow_transfer": {"own code of the step"},  # a hook of the module
    "too_few_steps": {"own code of the step"},
}
"""Other correct categories for a scenario's fault."""

OF_THE_MACHINE = {"memory_near_capacity", "single_cpu_thread", "cpu_threads_oversubscribed"}

OWN_VERDICTS = {"input_bound": "input", "host_bound": UNEXPLAINED, "overhead_bound": UNEXPLAINED}
"""Category of our verdict if no finding supports it."""

TRACEML_KINDS = {"INPUT_BOUND": "input", "H2D_BOUND": "transfer", "RESIDUAL_HEAVY": UNEXPLAINED}
TRACEML_PHASES = {"optimizer": "optimizer", "forward": "model", "backward": "model"}

GPUPROF_TITLES = (
    (r"waiting on the loader|Prefetch queue starved|Dataloader|Cold-cache|Cache thrashing", "input"),
    (r"unaccounted|high tail latency", UNEXPLAINED),
    (r"backward/forward|arithmetic intensity|Attention appears unfused", "model"),
    (r"Kernel drift", "model"),
)
"""Titles of gpuprof's insights, which have no codes. All others are about the machine, the first steps (true
of any run), or a GPU, which it invents on machines without one."""


LEVELS = ("warning", "verdict", "hint")


@dataclass(frozen=True)
class Claim:
    """One statement of a tool on where time goes.

    Attributes:
        category: such as ``input``, or ``unexplained``.
        level: ``warning``; ``verdict``, which is the tool's answer but not a warning; or ``hint``.
        text: in the tool's words.
        place: file, line and function, if the tool names them.
    """

    category: str
    level: str
    text: str
    place: str = ""


@dataclass(frozen=True)
class Answer:
    """A tool's answer for one run.

    Attributes:
        headline: its verdict, or its first line.
        claims: most important first.
        abstains: whether it reports that it cannot tell.
    """

    headline: str
    claims: tuple[Claim, ...] = ()
    abstains: bool = False


@dataclass(frozen=True)
class Truth:
    """The injected fault.

    Attributes:
        categories: correct ones; empty for a healthy training.
        is_costly: whether it takes a known time; otherwise a hint is enough.
        may_abstain: whether there is too little to judge.
    """

    categories: frozenset[str]
    is_costly: bool = True
    may_abstain: bool = False


def truth_of(scenario: Any) -> Truth:
    """Return the truth of a test ``Scenario``."""
    finding = scenario.finding
    named = set() if finding is None else {OWN_FINDINGS.get(finding, finding)}
    return Truth(
        frozenset(named | ALSO_RIGHT.get(scenario.name, set())),
        is_costly=scenario.severe,
        may_abstain=scenario.verdict == "cannot_tell",
    )


def judge(answer: Answer, truth: Truth) -> str:
    """Return ``right``, ``cannot name it``, ``wrong`` or ``silent``, by the rule in `verdict_peers.py`."""
    warnings = {claim.category for claim in answer.claims if claim.level == "warning"}
    if not truth.categories:
        return "wrong" if warnings else "right"
    if warnings - truth.categories - {UNEXPLAINED}:
        return "wrong"
    if not truth.is_costly:
        if any(claim.category in truth.categories for claim in answer.claims):
            return "right"
        return "cannot name it" if warnings else "silent"
    if answer.abstains:
        return "right" if truth.may_abstain else "cannot name it"
    if not answer.claims:
        return "silent"
    first = min(answer.claims, key=lambda claim: LEVELS.index(claim.level))  # the first of the most severe
    if first.category in truth.categories:
        return "right"
    if first.category == UNEXPLAINED:
        return "cannot name it"
    if first.level == "verdict":
        return "wrong"
    return "right" if any(claim.category in truth.categories for claim in answer.claims) else "silent"


def own_answer(report: Mapping[str, Any]) -> Answer:
    """Convert our report, as written by `verdict_peers_fit.py`."""
    claims = [
        Claim(
            OWN_FINDINGS.get(finding["kind"], finding["kind"]),
            "warning" if finding["severity"] in ("warning", "critical") else "hint",
            f"{finding['kind']}, {finding['severity']}: {finding['summary']}",
            finding["place"],
        )
        for finding in report["findings"]
        if finding["kind"] not in OF_THE_MACHINE
    ]
    verdict = report["verdict"]
    if not claims and verdict in OWN_VERDICTS:
        claims = [Claim(OWN_VERDICTS[verdict], "warning", report["headline"])]
    return Answer(f"{verdict}: {report['headline']}", tuple(claims), abstains=verdict == "cannot_tell")


def traceml_answer(summary: Mapping[str, Any]) -> Answer:
    """Convert TraceML's ``final_summary.json``: the primary diagnosis, then all others about the step time.

    Its sections on system, process and memory are about the machine.
    """
    primary = summary["primary_diagnosis"]
    issues = [primary, *(one for one in summary["step_time"]["issues"] if one["kind"] != primary["kind"])]
    headline = f"{primary['status']} ({primary['severity']}): {primary['summary']}"
    return Answer(
        headline,
        tuple(claim for issue in issues for claim in _traceml_claim(issue, is_primary=issue is primary)),
        abstains=primary["kind"] == "INSUFFICIENT_STEP_TIME_DATA",
    )


def _traceml_claim(issue: Mapping[str, Any], *, is_primary: bool) -> Iterable[Claim]:
    category = TRACEML_KINDS.get(issue["kind"])
    if issue["kind"] == "COMPUTE_BOUND":
        # "Compute-bound; optimizer is the largest phase."
        named = re.search(r"(forward|backward|optimizer) is the largest", issue["summary"], re.IGNORECASE)
        category = TRACEML_PHASES[named[1].lower()] if named else "model"
    if category is None:
        return
    is_warning = issue["severity"] in ("warn", "crit")
    level = "warning" if is_warning else "verdict" if is_primary else "hint"
    yield Claim(category, level, f"{issue['status']} ({issue['severity']}): {issue['summary']}")


def gpuprof_answer(lines: Iterable[str]) -> Answer:
    """Convert the lines of ``gpuprof insights``, such as ``[HIGH]  34% of step time waiting ...``.

    It has no verdict, so its most severe insight comes first.
    """
    order = ("HIGH", "MED", "LOW")
    found = [match for line in lines if (match := re.match(r"\[(HIGH|MED|LOW)\]\s+(.*)", line))]
    found.sort(key=lambda match: order.index(match[1]))
    claims = []
    for match in found:
        category = next((name for title, name in GPUPROF_TITLES if re.search(title, match[2])), None)
        if category is not None:
            claims.append(
                Claim(category, "hint" if match[1] == "LOW" else "warning", f"[{match[1]}] {match[2]}")
            )
    return Answer("; ".join(f"[{match[1]}] {match[2]}" for match in found), tuple(claims))
