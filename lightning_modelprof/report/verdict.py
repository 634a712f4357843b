"""The verdict: what limits the speed, in one line, with the number that says so.

The time at stake in the findings is added up by what it speaks for (``Rule.bound``), as a share of the steps
in which this profiler does nothing of its own. What is said of a device comes from profiler windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.analysis.step_breakdown import STEP_CATEGORIES, StepBreakdown
from lightning_modelprof.analysis.step_costs import PhaseMeans, StepCosts
from lightning_modelprof.report.model import Finding, Status, Verdict
from lightning_modelprof.report.rules.base import Rule, milliseconds, percent
from lightning_modelprof.run.phases import PHASES

MODEL: Final = ("forward", "backward", "optimizer")

LEAST_SHARE: Final[Mapping[str, float]] = {
    "input_bound": 0.20,
    "host_bound": 0.20,
    "sync_bound": 0.15,
    "communication_bound": 0.15,
    "overhead_bound": 0.15,
}
"""Share of a step from which on it is bound by something.

Source: the upper bands of TensorFlow's profiler: 20 % for input, 15 % for everything beside it. 20 % for the
host's own code are TraceML's.
"""

DEVICE_BUSY: Final = 0.85
"""Share of the recorded steps with work on the device, from which on nothing but the device limits them."""
DEVICE_IDLE: Final = 0.50
"""Share without, and without a fetch, from which on the host limits them.

Source: torch_tb_profiler, which advises when less than half of the time is used."""

LEAST_ACCOUNTED: Final = 0.90
UNACCOUNTED_FLOOR_NS: Final = 1_000_000
"""Lightning's own loop takes a few tenths of a millisecond per step: as long as the unaccounted time is below
this, it is that loop, however short the step."""
LEAST_STEPS: Final = 5

_MOSTLY_MODEL: Final = 0.5
"""Share of the model below which a step without findings is rather short than well balanced; words only."""

_HOW: Final = {
    "input_bound": "waiting for batches",
    "host_bound": "Python on the host that keeps the model waiting",
    "sync_bound": "waiting for the device to hand over values",
    "communication_bound": "communication that no computation hides",
    "overhead_bound": "what surrounds the model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """How much of the time is in named phases.

    Attributes:
        ratio: 1 less the share of the phase Loop, which is whatever nothing else explains; ``None`` without
            steady steps.
        is_enough: whether anything may be judged.
        reason: why not, as a clause.
    """

    ratio: float | None
    is_enough: bool
    reason: str = ""


def account(costs: StepCosts | Absent) -> Accounting:
    """What share of the steady steps is in named phases, and whether that is enough to judge."""
    if isinstance(costs, Absent):
        return Accounting(ratio=None, is_enough=False, reason=costs.reason)
    other_ns, share = costs.steady.total_ns("other"), costs.steady.share("other")
    if other_ns is None or share is None:
        return Accounting(ratio=None, is_enough=False, reason="the steps took no time that could be measured")
    accounted = 1.0 - share
    if costs.steady.phases_ns.get("dataloader") is None:
        reason = "the phases were read from hooks, so most of them are not told apart"
        return Accounting(ratio=accounted, is_enough=False, reason=reason)
    if costs.steady.num_steps < LEAST_STEPS:
        reason = f"only {costs.steady.num_steps} steps are without profiler or inspection"
        return Accounting(ratio=accounted, is_enough=False, reason=reason)
    if accounted < LEAST_ACCOUNTED and other_ns >= UNACCOUNTED_FLOOR_NS:
        reason = f"{milliseconds(other_ns)} a step ({percent(share)}) are in no phase that has a name"
        return Accounting(ratio=accounted, is_enough=False, reason=reason)
    return Accounting(ratio=accounted, is_enough=True)


def give_verdict(
    analysis: Analysis, findings: Sequence[Finding], rules: Sequence[Rule], accounting: Accounting
) -> Verdict:
    """What limits the speed.

    Args:
        analysis: of the run.
        findings: of all rules.
        rules: that gave them, which know what verdict their time speaks for.
        accounting: whether anything may be judged.
    """
    costs = analysis.step_costs
    if isinstance(costs, Absent) or not accounting.is_enough:
        return _verdict("cannot_tell", f"{accounting.reason[:1].upper()}{accounting.reason[1:]}.", accounting)
    device = device_shares(
        None if window.facts is None else window.facts.step_breakdown for window in analysis.windows
    )
    if device is not None and device.busy >= DEVICE_BUSY:
        return _device_bound(device, accounting)
    shares = _shares(costs, findings, rules)
    if device is not None:
        shares["communication_bound"] = max(shares["communication_bound"], device.communication)
        idle = device.host + device.other
        if idle >= DEVICE_IDLE:
            shares["host_bound"] = max(shares["host_bound"], idle)
    over = {kind: share for kind, share in shares.items() if share >= LEAST_SHARE[kind]}
    if over:
        kind = max(over, key=lambda one: over[one])
        return _verdict(kind, f"{percent(over[kind])} of a step is {_HOW[kind]}.", accounting)
    if analysis.info.device_type != "cpu" and device is None:
        reason = "No profiler window says how busy the device was, and nothing on the host stands out."
        return _verdict("cannot_tell", reason, accounting)
    return _verdict("balanced", _balanced(costs.steady), accounting)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """Shares of recorded steps; they sum to 1.

    Attributes:
        step_ns: mean length of a step.
        busy: kernels, copies and sets.
        communication: communication that nothing of these hides.
        fetch: fetches of batches while no device works.
        host: the runtime and operators on the host, without either.
        other: nothing of all that.
    """

    step_ns: float
    busy: float
    communication: float
    fetch: float
    host: float
    other: float


def device_shares(breakdowns: Iterable[StepBreakdown | Absent | None]) -> DeviceShares | None:
    """Of all steps of those that have device events; ``None`` without any."""
    num_steps, total_ns = 0, 0.0
    parts_ns = dict.fromkeys(STEP_CATEGORIES, 0.0)
    for breakdown in breakdowns:
        if breakdown is None or isinstance(breakdown, Absent) or not breakdown.has_device:
            continue
        num_steps += len(breakdown.steps)
        total_ns += breakdown.mean_total_ns * len(breakdown.steps)
        for category, mean_ns in zip(STEP_CATEGORIES, breakdown.mean_parts_ns, strict=True):
            parts_ns[category] += mean_ns * len(breakdown.steps)
    if not total_ns:
        return None
    return DeviceShares(
        step_ns=total_ns / num_steps,
        busy=sum(parts_ns[name] for name in ("kernel", "memcpy", "memset")) / total_ns,
        communication=parts_ns["communication"] / total_ns,
        fetch=parts_ns["dataloader"] / total_ns,
        host=sum(parts_ns[name] for name in ("runtime", "cpu_exec")) / total_ns,
        other=parts_ns["other"] / total_ns,
    )


def verdict_of_traces(shares: DeviceShares | None) -> Verdict:
    """What limits the speed of the steps in traces, without anything else of the run."""
    if shares is None:
        reason = "The traces have no device events, or no steps."
        return Verdict(kind="cannot_tell", summary=reason, accounted_ratio=None)
    accounting = Accounting(ratio=1.0 - shares.other, is_enough=1.0 - shares.other >= LEAST_ACCOUNTED)
    if not accounting.is_enough:
        return _verdict("cannot_tell", f"{percent(shares.other)} of the steps is in no event.", accounting)
    if shares.busy >= DEVICE_BUSY:
        return _device_bound(shares, accounting)
    over = {
        kind: share
        for kind, share, least in (
            ("input_bound", shares.fetch, LEAST_SHARE["input_bound"]),
            ("communication_bound", shares.communication, LEAST_SHARE["communication_bound"]),
            ("host_bound", shares.host, DEVICE_IDLE),
        )
        if share >= least
    }
    if over:
        kind = max(over, key=lambda one: over[one])
        return _verdict(kind, f"{percent(over[kind])} of a step is {_HOW[kind]}.", accounting)
    summary = (
        f"The device works in {percent(shares.busy)} of the recorded steps; no one thing fills the rest."
    )
    return _verdict("balanced", summary, accounting)


def _device_bound(shares: DeviceShares, accounting: Accounting) -> Verdict:
    return _verdict(
        "device_bound", f"The device works in {percent(shares.busy)} of the recorded steps.", accounting
    )


def _shares(costs: StepCosts, findings: Sequence[Finding], rules: Sequence[Rule]) -> dict[str, float]:
    """Share of each bound in a step: the time at stake in the findings that speak for it."""
    shares = dict.fromkeys(LEAST_SHARE, 0.0)
    by_kind = {rule.kind: rule for rule in rules}
    for finding in findings:
        rule = by_kind.get(finding.kind)
        if rule is None or rule.bound is None or finding.status is not Status.FOUND:
            continue
        base_ns = rule.base_ns(costs)
        if base_ns:
            shares[rule.bound] += (finding.saving_ns_per_step or 0.0) / base_ns
    return {kind: min(share, 1.0) for kind, share in shares.items()}


def _balanced(steady: PhaseMeans) -> str:
    labels = {phase.key: phase.label for phase in PHASES}
    rest = {key: ns for key, ns in steady.phases_ns.items() if ns and key not in MODEL}
    model = steady.share(*(key for key in MODEL if steady.phases_ns.get(key) is not None))
    summary = (
        f"Forward, backward and optimizer take {percent(model)} of a step of {milliseconds(steady.wall_ns)}"
    )
    if rest:
        largest = max(rest, key=lambda key: rest[key])
        summary += f"; the most beside them is {labels[largest]} with {milliseconds(rest[largest])}"
    if model is not None and model < _MOSTLY_MODEL:
        return f"Nothing takes long enough to stand out. {summary}."
    return f"{summary}."


def _verdict(kind: str, summary: str, accounting: Accounting) -> Verdict:
    return Verdict(kind=kind, summary=summary, accounted_ratio=accounting.ratio)
