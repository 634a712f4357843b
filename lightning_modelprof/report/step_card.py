"""The mean step as a picture: what the host does, what the device does, and what would be left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.analysis.trace.host_waits import HostWaits
from lightning_modelprof.analysis.trace.model_summary import ModelSummary
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.report.device_shares import device_shares, gpu_idle, lost_work, recorded_step_ns
from lightning_modelprof.report.model import Finding, Status, StepCard, StepPart, Unit
from lightning_modelprof.report.rules.device import DeviceRule, pooled_waits
from lightning_modelprof.report.rules.host_waits import WaitRule
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
"""Label, and the field of the Device Summary."""


def step_card(analysis: Analysis, findings: Sequence[Finding]) -> StepCard | None:
    """Of a run: its mean clean step."""
    costs = analysis.step_costs
    if isinstance(costs, Absent):
        return None
    host, step = _host_of(costs, loop_of(analysis.info.loop).steps)
    if not host:
        return None
    traces = [window.facts for window in analysis.windows if window.facts is not None]
    return _card(step, host, traces, findings)


def step_card_of_traces(traces: Sequence[TraceFacts], findings: Sequence[Finding]) -> StepCard | None:
    """Of traces of one job: the mean recorded step of all ranks.

    Args:
        traces: at least one.
    """
    known = [one.model_summary for one in traces if not isinstance(one.model_summary, Absent)]
    num_steps = sum(one.num_steps for one in known)
    if not num_steps:
        return None
    host = _host_of_summaries(known, num_steps)
    if not host:
        return None
    waits = pooled_waits(traces)
    step_ns = recorded_step_ns(traces, waits)
    if step_ns:  # the lanes show shares of it: the device's steps end later than the CPU's
        scale = step_ns / sum(part.ns for part in host)
        host = tuple(replace(part, ns=part.ns * scale) for part in host)
    num_steps = num_steps if isinstance(waits, Absent) else waits.num_steps
    return _card(f"mean of {num_steps} recorded steps", host, traces, findings)


def _card(
    step: str, host: tuple[StepPart, ...], traces: Sequence[TraceFacts], findings: Sequence[Finding]
) -> StepCard:
    found = [
        one
        for one in findings
        if one.status is Status.FOUND and one.saving_ns_per_step and one.share_of == "step"
    ]
    if lost_work(one.launch_count for one in traces):
        traces = ()
    return StepCard(
        step=step,
        host=host,
        device=_device(sum(part.ns for part in host), traces, found),
        better=_without(host, found),
        figures=_figures(traces),
    )


def _host_of(costs: StepCosts, steps: str) -> tuple[tuple[StepPart, ...], str]:
    step = f"mean of {costs.typical.num_steps:,} {'clean ' if costs.inner is not None else ''}{steps}"
    parts = [(phase.key, costs.typical.phases_ns.get(phase.key)) for phase in PHASES]
    parts.append(("profiler", costs.typical.profiler_ns))
    return tuple(StepPart(key=key, label=_LABELS[key], ns=ns) for key, ns in parts if ns), step


def _host_of_summaries(known: Sequence[ModelSummary], num_steps: int) -> tuple[StepPart, ...]:
    """Phases and Others of the Model Summary, which sum to the step."""
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
    """The step without the savings: each finding's is taken from its phases, as far as it is there.

    The rules about the device and those about the host see the same time twice, so those with the larger
    saving count alone.
    """
    sides = [
        _taken(host, [one for one in found if (one.kind in _kinds(DeviceRule)) is of_device])
        for of_device in (False, True)
    ]
    best = min(sides, key=lambda side: sum(part.ns for part in side))
    return best if sum(part.ns for part in best) < sum(part.ns for part in host) else ()


def _taken(host: tuple[StepPart, ...], findings: Sequence[Finding]) -> tuple[StepPart, ...]:
    left = {part.key: part.ns for part in host}
    # Those that know their phases first: the others take from whatever is left.
    for one in sorted(findings, key=lambda finding: not finding.phases):
        keys = [key for key in one.phases or left if key in left]
        there_ns = sum(left[key] for key in keys)
        share = min(1.0, (one.saving_ns_per_step or 0.0) / there_ns) if there_ns else 0.0
        for key in keys:
            left[key] *= 1.0 - share
    return tuple(StepPart(key=part.key, label=part.label, ns=left[part.key]) for part in host)


def _device(wall_ns: float, traces: Sequence[TraceFacts], found: Sequence[Finding]) -> tuple[StepPart, ...]:
    """What the device does in the recorded steps, as shares of them, drawn as long as the host's lane."""
    shares = device_shares(traces)
    idle = gpu_idle(traces)
    if shares is None or idle is None:
        return ()
    parts: list[StepPart] = []

    def add(key: str, label: str, share: float, location: Place | None = None) -> None:
        if share > 0:
            is_idle = key.startswith("idle")
            parts.append(
                StepPart(key=key, label=label, ns=share * wall_ns, is_idle=is_idle, location=location)
            )

    # Communication on the host keeps no device busy.
    is_on_host = all(
        isinstance(one.distributed, Absent) or one.distributed.source == "host" for one in traces
    )
    communication = 0.0 if is_on_host else min(idle.busy, shares.communication)
    add("computing", "computing", idle.busy - communication)
    add("communication", "communication", communication)
    add("idle_input", "waiting for data", idle.by_cause["data loading"], _place_of(found, _INPUT))
    host = idle.by_cause["host"]
    for label, share, location in _idle_by_waits(pooled_waits(traces), wall_ns, found):
        add("idle_sync", label, min(host, share), location)
        host -= min(host, share)
    add("idle_host", "waiting for the CPU", host)
    add("idle_gap", "between queued kernels", idle.by_cause["kernel gap"])
    add("idle_stream", "waiting for another stream", idle.by_cause["other stream"])
    add("idle_communication", "waiting for communication", idle.by_cause["communication"])
    add("idle", "idle, unknown cause", idle.by_cause["unknown"])
    return tuple(parts)


def _idle_by_waits(
    waits: HostWaits | Absent, wall_ns: float, found: Sequence[Finding]
) -> list[tuple[str, float, Place | None]]:
    """The idle time that waits of the host cause, that of each finding about them apart."""
    if isinstance(waits, Absent) or not waits.steps_ns:
        return []
    left = waits.saves_ns / waits.steps_ns
    result: list[tuple[str, float, Place | None]] = []
    for one in found:
        if one.kind in _kinds(WaitRule):
            share = min(left, (one.saving_ns_per_step or 0.0) / wall_ns)
            left -= share
            place = one.locations[0] if one.locations else None
            result.append(("idle after a CPU wait", share, place))
    return [*result, ("idle after a CPU wait", left, None)]


def _place_of(found: Sequence[Finding], kind: str) -> Place | None:
    return next((one.locations[0] for one in found if one.kind == kind and one.locations), None)


def _figures(traces: Sequence[TraceFacts]) -> tuple[tuple[str, float, Unit], ...]:
    """GPU busy, SM efficiency and tensor cores: means over the devices of all traces that tell."""
    devices = [
        (device, usage.covered_ns)
        for usage in (one.device_usage for one in traces)
        if not isinstance(usage, Absent)
        for device in usage.devices
    ]
    figures: list[tuple[str, float, Unit]] = []
    for label, name in _FIGURES:
        known = [(getattr(device, name), ns) for device, ns in devices if getattr(device, name) is not None]
        whole_ns = sum(ns for _, ns in known)
        if whole_ns:
            figures.append((label, sum(value * ns for value, ns in known) / whole_ns, Unit.RATIO))
    return tuple(figures)


def _kinds(of: type) -> set[str]:
    """The rules of a type, as far as they are imported: those that found something are."""
    kinds = {str(of.kind)} if hasattr(of, "kind") else set()
    return kinds.union(*map(_kinds, of.__subclasses__()))
