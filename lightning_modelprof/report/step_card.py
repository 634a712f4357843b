"""The mean step as a picture: what the CPU does, what the device does, and the step without savings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.analysis.trace.device_shares import gpu_idle
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.model_summary import ModelSummary
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Finding, Status, StepCard, StepPart, Unit
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASES

_INPUT: Final = "input_bound"

_LABELS: Final[Mapping[str, str]] = {
    **{phase.key: phase.label.lower() for phase in PHASES},
    "optimizer": "optimizer",
    "dataloader": "data",
    "lr_scheduler": "LR scheduler",
    "other": "loop",
    "profiler": "overhead",
}

_FIGURES: Final = (
    ("GPU busy", "busy"),
    ("SM efficiency", "sm_efficiency"),
    ("tensor cores", "tensor_cores"),
)
"""(label, field of the Device Summary)."""


_OF_DEVICE: Final = frozenset(
    rule.kind for rule in RULES if rule.is_of_device or rule.kind == "straggler_rank"
)
_OF_WAITS: Final = frozenset(rule.kind for rule in RULES if rule.bound == "sync_bound")


def step_card(facts: Facts, findings: Sequence[Finding]) -> StepCard | None:
    """Draw a run's mean clean step."""
    costs = facts.get(Facts.step_costs)
    host, step = ((), "") if costs is None else _host_of(costs, loop_of(facts.info.loop).steps)
    return _card(step, host, facts, findings) if host else None


def step_card_of_traces(facts: JobFacts, findings: Sequence[Finding]) -> StepCard | None:
    """Draw the mean recorded step over all ranks of one job's traces."""
    known = [one for trace in facts.traces if (one := trace.get(TraceFacts.model_summary)) is not None]
    num_steps = sum(one.num_steps for one in known)
    if not num_steps:
        return None
    host = _host_of_summaries(known, num_steps)
    if not host:
        return None
    waits, step_ns = facts.get(JobFacts.waits), facts.get(JobFacts.step_ns)
    if step_ns:  # the lanes show shares of it: device steps end later than CPU steps
        scale = step_ns / sum(part.ns for part in host)
        host = tuple(replace(part, ns=part.ns * scale) for part in host)
    num_steps = num_steps if waits is None else waits.num_steps
    return _card(f"mean of {num_steps} recorded steps", host, facts, findings)


def _card(step: str, host: tuple[StepPart, ...], facts: JobFacts, findings: Sequence[Finding]) -> StepCard:
    found = [
        one
        for one in findings
        if one.status is Status.FOUND and one.saving_ns_per_step and one.share_of == "step"
    ]
    if facts.lost_work:
        facts = JobFacts(())
    return StepCard(
        step=step,
        host=host,
        device=_device(sum(part.ns for part in host), facts, found),
        better=_without(host, found),
        figures=_figures(facts.traces),
    )


def _host_of(costs: StepCosts, steps: str) -> tuple[tuple[StepPart, ...], str]:
    step = f"mean of {costs.typical.num_steps:,} {'clean ' if costs.inner is not None else ''}{steps}"
    parts = [(phase.key, costs.typical.phases_ns.get(phase.key)) for phase in PHASES]
    parts.append(("profiler", costs.typical.profiler_ns))
    return tuple(StepPart(key=key, label=_LABELS[key], ns=ns) for key, ns in parts if ns), step


def _host_of_summaries(known: Sequence[ModelSummary], num_steps: int) -> tuple[StepPart, ...]:
    totals: dict[str, float] = {}
    for row in (row for one in known for row in one.rows if row.depth == 1):
        totals[row.key] = totals.get(row.key, 0.0) + row.host_total_ns / num_steps
    return tuple(
        StepPart(
            key="other" if key == "others" else key,
            label="other" if key == "others" else _LABELS.get(key, "other"),
            ns=ns,
        )
        for key, ns in totals.items()
        if ns
    )


def _without(host: tuple[StepPart, ...], found: Sequence[Finding]) -> tuple[StepPart, ...]:
    """Return the step without the savings, each taken from its finding's phases while they last.

    Device and CPU rules see the same time twice, so only the side that saves more counts.
    """
    sides = [
        _taken(host, [one for one in found if (one.kind in _OF_DEVICE) is of_device])
        for of_device in (False, True)
    ]
    best = min(sides, key=lambda side: sum(part.ns for part in side))
    return best if sum(part.ns for part in best) < sum(part.ns for part in host) else ()


def _taken(host: tuple[StepPart, ...], findings: Sequence[Finding]) -> tuple[StepPart, ...]:
    left = {part.key: part.ns for part in host}
    # Findings with phases first: the others share whatever is left.
    for one in sorted(findings, key=lambda finding: not finding.phases):
        keys = [key for key in one.phases or left if key in left]
        there_ns = sum(left[key] for key in keys)
        share = min(1.0, (one.saving_ns_per_step or 0.0) / there_ns) if there_ns else 0.0
        for key in keys:
            left[key] *= 1.0 - share
    return tuple(StepPart(key=part.key, label=part.label, ns=left[part.key]) for part in host)


def _device(wall_ns: float, facts: JobFacts, found: Sequence[Finding]) -> tuple[StepPart, ...]:
    """Return the device's work in recorded steps, as shares of them, scaled to the length of the CPU lane."""
    shares = facts.get(JobFacts.device_shares)
    idle = gpu_idle(facts.traces)
    if shares is None or idle is None:
        return ()
    parts: list[StepPart] = []

    def add(key: str, label: str, share: float, location: Place | None = None) -> None:
        if share > 0:
            is_idle = key.startswith("idle")
            parts.append(
                StepPart(key=key, label=label, ns=share * wall_ns, is_idle=is_idle, location=location)
            )

    # CPU-side communication keeps no device busy.
    known = [one.get(TraceFacts.distributed) for one in facts.traces]
    is_on_host = all(one is None or one.source == "host" for one in known)
    communication = 0.0 if is_on_host else min(idle.busy, shares.communication)
    add("computing", "computing", idle.busy - communication)
    add("communication", "communication", communication)
    add("idle_input", "waiting for data", idle.by_cause["data loading"], _place_of(found, _INPUT))
    host = idle.by_cause["host"]
    for label, share, location in _idle_by_waits(idle.after_waits, wall_ns, found):
        add("idle_sync", label, min(host, share), location)
        host -= min(host, share)
    add("idle_host", "waiting for the CPU", host)
    add("idle_gap", "between queued kernels", idle.by_cause["kernel gap"])
    add("idle_stream", "waiting for another stream", idle.by_cause["other stream"])
    add("idle_communication", "waiting for communication", idle.by_cause["communication"])
    add("idle", "idle, unknown cause", idle.by_cause["unknown"])
    return tuple(parts)


def _idle_by_waits(
    left: float, wall_ns: float, found: Sequence[Finding]
) -> list[tuple[str, float, Place | None]]:
    result: list[tuple[str, float, Place | None]] = []
    for one in found:
        if one.kind in _OF_WAITS:
            share = min(left, (one.saving_ns_per_step or 0.0) / wall_ns)
            left -= share
            place = one.locations[0] if one.locations else None
            result.append(("idle after a CPU wait", share, place))
    return [*result, ("idle after a CPU wait", left, None)]


def _place_of(found: Sequence[Finding], kind: str) -> Place | None:
    return next((one.locations[0] for one in found if one.kind == kind and one.locations), None)


def _figures(traces: Sequence[TraceFacts]) -> tuple[tuple[str, float, Unit], ...]:
    devices = [
        (device, usage.covered_ns)
        for one in traces
        if (usage := one.get(TraceFacts.device_usage)) is not None
        for device in usage.devices
    ]
    figures: list[tuple[str, float, Unit]] = []
    for label, name in _FIGURES:
        known = [(getattr(device, name), ns) for device, ns in devices if getattr(device, name) is not None]
        whole_ns = sum(ns for _, ns in known)
        if whole_ns:
            figures.append((label, sum(value * ns for value, ns in known) / whole_ns, Unit.RATIO))
    return tuple(figures)
