"""The verdict: what limits the speed, in one line, with the number behind it.

Findings' savings are summed by ``Rule.bound``, as shares of the steps without profiler overhead. Device
figures come from profiler windows. The CPU clock and the device's idle time see the same time twice, so each
side is summed separately, and the largest share gives the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.analysis.trace.device_shares import DeviceShares, WaitShares, unaccounted
from lightning_modelprof.analysis.trace.host_waits import NO_STEPS_TO_COMPARE
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Finding, Status, Verdict
from lightning_modelprof.report.rules.rule import (
    HOST_LATE,
    LATE_PHASE,
    LATE_RANK,
    LATE_SHARE,
    LATE_WORK,
    PYTHON_CODE,
    Rule,
)
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.units import milliseconds, percent

OUT_OF_MEMORY: Final = "out_of_memory"
"""Verdict, and kind of the finding, of a loop that ran out of memory."""

MODEL: Final = ("forward", "backward", "optimizer")

LEAST_SHARE: Final[Mapping[str, float]] = {
    "input_bound": 0.20,
    "host_bound": 0.20,
    "optimizer_bound": 0.20,
    "sync_bound": 0.15,
    "communication_bound": 0.15,
    "straggler_bound": 0.15,
    "overhead_bound": 0.15,
}
"""Share of a step, by the CPU clock, from which a verdict applies.

Source: the upper bands of TensorFlow's profiler: 20% for input, 15% for everything else. The 20% for slow
Python code are TraceML's, and used for the optimizer as well.
"""

VERDICTS: Final[Mapping[str, str]] = {
    "out_of_memory": "an out-of-memory error ended the loop.",
    "cannot_tell": (
        "too little of the time is attributed; or, on a GPU, no profiler window has GPU events and no other"
        " verdict applies."
    ),
    "device_bound": (
        "kernels, copies and memsets (Step time breakdown) take at least 85% of the recorded steps. It shows"
        " Busy of the Device Summary."
    ),
    "input_bound": "`input_bound`, `worker_startup`",
    "optimizer_bound": "`slow_optimizer`; on the CPU `optimizer_not_fused` and `dense_embeddings`",
    "host_bound": (
        "`slow_forward_outside_model`, `slow_custom_module`, `slow_line_in_module`,"
        " `slow_layer_hooks`, `anomaly_detection`, `competing_thread`. On a GPU, `launch_bound` from 30%, or"
        " 50% GPU idle time because the CPU is late in any phase"
    ),
    "sync_bound": "`host_device_sync`, `host_to_device_copy`",
    "communication_bound": "`communication_exposed`",
    "straggler_bound": "`straggler_rank`",
    "overhead_bound": (
        "`slow_logging_calls`, `slow_callback`, `slow_module_hook`, `slow_logger`,"
        " `validation_share`, `checkpoint_share`, `slow_epoch_turns`, `slow_transfer`,"
        " `slow_lr_scheduler`, `zero_grad_cost`, `clip_cost`"
    ),
    "balanced": (
        "no other verdict applies, forward, backward and optimizer take at least half of the step time, and"
        " at least 95% of it is attributed. There may still be findings. A slow model on the CPU is"
        " BALANCED, since it has no GPU to be bound by."
    ),
    "compute_bound": (
        "like BALANCED, if forward, backward and optimizer are the largest part but take less than half, or"
        " less than 95% of the step time is attributed. If another part is larger, that part gives the"
        " verdict."
    ),
}
"""Verdict kind → definition, in Markdown; for kinds in ``LEAST_SHARE``, the findings whose time counts."""

LEAST_OF_DEVICE: Final[Mapping[str, float]] = {
    "sync_bound": LEAST_SHARE["sync_bound"],
    "communication_bound": LEAST_SHARE["communication_bound"],
    "host_bound": 0.30,
}
"""The same for device figures from traces; higher for CPU lateness, which a profiler increases."""

DEVICE_BUSY: Final = 0.85
"""Share of recorded steps with computing or copies from which the device limits the speed."""
DEVICE_IDLE: Final = 0.50
"""Share of CPU lateness, in any phase, from which the CPU limits the speed.

Source: torch_tb_profiler, which advises when less than half of the time is used.
"""

LEAST_ACCOUNTED: Final = 0.90
UNACCOUNTED_FLOOR_NS: Final = 1_000_000
"""Unattributed time per step below which it is Lightning's own loop, however short the step.

That loop takes a few tenths of a millisecond, more in a thread that lacked a CPU: see
``StepCosts.cpu_share``.
"""
LEAST_STEPS: Final = 5

_MOSTLY_MODEL: Final = 0.5
"""Minimum share of the step time that the model takes in a balanced step."""
_LEAST_BALANCED: Final = 0.95
"""Minimum share of the step time in named phases in a balanced step."""

_EACH_STEP: Final = "each step"
_THE_LOOP: Final = "the loop"

_HOW: Final = {
    "input_bound": "{share} of {whole} is spent waiting for data",
    "host_bound": "{share} of {whole} is spent in slow Python code",
    "optimizer_bound": "{share} of {whole} is spent in an optimizer step that could be faster",
    "sync_bound": "{share} of {whole} is spent waiting for values from the GPU",
    "communication_bound": "{share} of {whole} is communication that isn't overlapped with compute",
    "straggler_bound": "{share} of {whole} is spent waiting for a slower rank",
    "overhead_bound": "{share} of {whole} is spent in {what}",
}
_HOW_OF_DEVICE: Final = {
    "sync_bound": "The GPU spends {share} of {whole} idle after the CPU waited for it",
    "communication_bound": _HOW["communication_bound"],
    "host_bound": "The GPU spends {share} of {whole} waiting for the CPU to launch work",
}


_HOW_OF_LATE_WORK: Final = "The GPU spends {share} of {whole} waiting while the CPU runs {work}"


class Accounting(Record, frozen=True, kw_only=True):
    """How much of the time is in named phases.

    Attributes:
        ratio: share of the steady steps in phases other than Loop, which holds the rest; ``None`` without
            steady steps.
        is_enough: whether anything can be judged.
        reason: why not, as a clause.
    """

    ratio: float | None
    is_enough: bool
    reason: str = ""


def account(facts: Facts) -> Accounting:
    """Return the share of the steady steps in named phases, and whether it suffices to judge."""
    try:
        costs = facts.step_costs
    except NotMeasured as why:
        return Accounting(ratio=None, is_enough=False, reason=why.reason)
    other_ns, share = costs.steady.total_ns("other"), costs.steady.share("other")
    if other_ns is None or share is None:
        return Accounting(ratio=None, is_enough=False, reason="the steps have no measurable duration")
    accounted = 1.0 - share
    if costs.steady.phases_ns.get("dataloader") is None:
        reason = "phases were read from hooks, which can't separate most of them"
        return Accounting(ratio=accounted, is_enough=False, reason=reason)
    if costs.steady.num_steps < LEAST_STEPS:
        reason = f"only {costs.steady.num_steps} steps ran without profiler or inspection"
        return Accounting(ratio=accounted, is_enough=False, reason=reason)
    if accounted < LEAST_ACCOUNTED and other_ns >= UNACCOUNTED_FLOOR_NS / costs.cpu_share:
        reason = f"{milliseconds(other_ns)} per step ({percent(share)}) is spent between phases"
        return Accounting(ratio=accounted, is_enough=False, reason=reason)
    return Accounting(ratio=accounted, is_enough=True)


def give_verdict(
    facts: Facts, findings: Sequence[Finding], rules: Sequence[Rule], accounting: Accounting
) -> Verdict:
    """Return what limits the speed, and mention CPU contention; ``rules`` made the findings."""
    verdict = _what_limits(facts, findings, rules, accounting)
    is_busy = any(one.kind == "busy_cpus" and one.status is Status.FOUND for one in findings)
    slow = facts.get(Facts.slow)
    if not is_busy or slow is None:
        return verdict
    share = percent(slow.record.cpu_wait_share)
    busy = f"CPU contention: training spent {share} of the time waiting for a CPU, so timings are inflated."
    return replace(verdict, summary=f"{verdict.summary} {busy}")


def _what_limits(
    facts: Facts, findings: Sequence[Finding], rules: Sequence[Rule], accounting: Accounting
) -> Verdict:
    ended = next((one for one in findings if one.kind == OUT_OF_MEMORY and one.status is Status.FOUND), None)
    if ended is not None:
        return _verdict(OUT_OF_MEMORY, ended.summary, accounting)
    if not accounting.is_enough:
        return _verdict("cannot_tell", f"{accounting.reason[:1].upper()}{accounting.reason[1:]}.", accounting)
    costs = facts.step_costs
    device, waits = facts.get(Facts.device_shares), facts.get(Facts.wait_shares)
    if device is not None and device.computing >= DEVICE_BUSY:
        return _device_bound(device, accounting)
    lost = facts.lost_work
    if lost:  # CPU figures include it anyway
        device = waits = None
    of_host = _host_shares(costs, findings, rules, waits)
    bounds = device_bounds(_device_shares_by_bound(findings, rules), device, waits)
    of_device = {kind: (share, _EACH_STEP) for kind, share in bounds.items()}
    over = {
        (kind, how[kind], name): share
        for shares, how, least in ((of_host, _HOW, LEAST_SHARE), (of_device, _HOW_OF_DEVICE, LEAST_OF_DEVICE))
        for kind, (share, name) in shares.items()
        if share >= least[kind]
    }
    if over:
        (kind, how, whole), share = max(over.items(), key=lambda one: one[1])
        more = _which_rank(facts) if kind == "straggler_bound" else ""
        what = _overhead_phases(findings, rules) if kind == "overhead_bound" else ""
        summary = f"{how.format(share=percent(share), whole=whole, what=what)}{more}."
        return _verdict(kind, summary, accounting)
    if facts.info.device_type != "cpu" and device is None:
        reason = lost or "No profiler window shows how busy the GPU was"
        return _verdict("cannot_tell", f"{reason}, and no CPU time stands out.", accounting)
    if device is not None:
        of_all = (*of_host.items(), *of_device.items())
        parts = dict.fromkeys(LEAST_SHARE, 0.0) | {"input_bound": device.fetch}
        for kind, (share, _) in of_all:
            parts[kind] = max(parts[kind], share)
        unexplained = 0.0 if waits is None else waits.unexplained
        return _no_bound_of_device(device, parts, unexplained, accounting)
    are_unlike = any(one.kind == "straggler_rank" and one.status is Status.FOUND for one in findings)
    return _largest_part(costs, findings, accounting, are_unlike=are_unlike)


def _which_rank(facts: Facts) -> str:
    skew = facts.get(Facts.rank_skew)
    late = None if skew is None else skew.straggler
    if late is None:
        return ""
    return f" (rank {late.rank} in {next(phase.label for phase in PHASES if phase.key == late.phase)})"


def _overhead_phases(findings: Sequence[Finding], rules: Sequence[Rule]) -> str:
    kinds = {rule.kind for rule in rules if rule.bound == "overhead_bound"}
    found = [one for one in findings if one.kind in kinds and one.status is Status.FOUND]
    found.sort(key=lambda one: -max(one.saving_ns_per_step or 0.0, one.verdict_ns or 0.0))
    labels = {phase.key: phase.label.lower() for phase in PHASES} | {"dataloader": "data loading"}
    named = list(dict.fromkeys(labels[one.phases[-1]] for one in found if one.phases))
    listed = " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))
    return listed or "work around the model"


def _host_shares(
    costs: StepCosts, findings: Sequence[Finding], rules: Sequence[Rule], waits: WaitShares | None
) -> dict[str, tuple[float, str]]:
    """Return each bound's share by the CPU clock, and what it's a share of.

    Waits for the device around the model, such as in a logger, are subtracted, since the device's shares
    include them. Waiting for a copy to end is the transfer's own time.
    """
    bounds = {rule.kind: rule.bound for rule in rules if not rule.is_of_device}
    shares: dict[str, tuple[float, str]] = {}
    for bound in LEAST_SHARE:
        some = [one for one in findings if one.status is Status.FOUND and bounds.get(one.kind) == bound]
        is_of_loop = any(one.share_of == "loop" for one in some if one.whole_ns)
        whole_ns = costs.loop.wall_ns if is_of_loop else costs.step_ns
        saves_ns = sum(map(_verdict_ns, some))
        if bound == "overhead_bound":  # a finding that includes another's time counts at least its own saving
            saves_ns = max(saves_ns, *(one.saving_ns_per_step or 0.0 for one in some), 0.0)
        share = saves_ns / whole_ns if whole_ns else 0.0
        if waits is not None and bound in ("overhead_bound", "host_bound"):
            share -= waits.around_model if bound == "overhead_bound" else waits.forward_saving
        shares[bound] = min(max(share, 0.0), 1.0), _THE_LOOP if is_of_loop else _EACH_STEP
    return shares


def _verdict_ns(finding: Finding) -> float:
    return (finding.saving_ns_per_step or 0.0) if finding.verdict_ns is None else finding.verdict_ns


def _device_shares_by_bound(findings: Sequence[Finding], rules: Sequence[Rule]) -> dict[str, float]:
    """Return each bound's share of the step by device rules; CPU lateness counts in full."""
    shares: dict[str, float] = {}
    bounds = {rule.kind: rule.bound for rule in rules if rule.is_of_device or rule.on_traces}
    for finding in findings:
        bound = bounds.get(finding.kind)
        if bound is not None and finding.status is Status.FOUND and finding.whole_ns:
            late = next((one.value for one in finding.evidence if one.label == HOST_LATE), None)
            lost_ns = late if isinstance(late, int | float) else finding.saving_ns_per_step or 0.0
            shares[bound] = shares.get(bound, 0.0) + lost_ns / finding.whole_ns
    return shares


def _straggler_note(findings: Sequence[Finding]) -> str:
    late = next(one for one in findings if one.kind == "straggler_rank" and one.status is Status.FOUND)
    known = {one.label: one.value for one in late.evidence}
    phase = f" in {known[LATE_PHASE]}" if known[LATE_PHASE] else ""
    return f" (rank {known[LATE_RANK]}{phase})"


def _late_work(findings: Sequence[Finding]) -> tuple[str, float]:
    """Return the CPU work during idle GPU time, if it isn't launching, and its share of a step."""
    found = [one for one in findings if one.status is Status.FOUND and one.kind == "launch_bound"]
    known = {one.label: one.value for finding in found for one in finding.evidence}
    work, share = known.get(LATE_WORK), known.get(LATE_SHARE)
    return (work, share) if isinstance(work, str) and isinstance(share, float) else ("", 0.0)


def device_bounds(
    found: Mapping[str, float], device: DeviceShares | None, waits: WaitShares | None
) -> dict[str, float]:
    """Return each bound's share of a step by traces.

    The times are disjoint: each part of the device's idle time counts once, and communication is work. If CPU
    lateness leaves the device idle half of the time, the phase doesn't matter.

    Args:
        found: shares by the rules about the device.
        waits: CPU's effect on the device; without it, all idle time outside fetches is the CPU's.
    """
    shares = {kind: found.get(kind, 0.0) for kind in LEAST_OF_DEVICE}
    if device is not None:
        if "communication_bound" not in found:  # else the finding's share
            shares["communication_bound"] = device.communication
        idle = device.host + device.other if waits is None else waits.late
        if idle >= DEVICE_IDLE and shares["host_bound"] < LEAST_OF_DEVICE["host_bound"]:
            shares["host_bound"] = idle  # else the finding's share
    return shares


def _of_host_traces(fetch: float) -> Verdict:
    """``fetch``: share of the steps in which only a fetch runs."""
    if fetch < LEAST_SHARE["input_bound"]:
        reason = "This trace has no GPU events. Profile a run to see where CPU time goes."
        return Verdict(kind="cannot_tell", summary=reason, accounted_ratio=None)
    summary = f"{_HOW['input_bound'].format(share=percent(fetch), whole=_EACH_STEP)}."
    return Verdict(kind="input_bound", summary=summary, accounted_ratio=None)


def verdict_of_traces(facts: JobFacts, findings: Sequence[Finding], rules: Sequence[Rule]) -> Verdict:
    """Return what limits the speed of the steps in traces, without other data of the run."""
    reason = facts.why_not(JobFacts.waits)
    if reason in NO_STEPS_TO_COMPARE:
        summary = f"{reason[:1].upper()}{reason[1:]}."
        return Verdict(kind="cannot_tell", summary=summary, accounted_ratio=None)
    host, shares = facts.get(JobFacts.host_shares), facts.get(JobFacts.device_shares)
    if host is not None:
        return _of_host_traces(host.fetch)
    return of_device_traces(shares, facts.get(JobFacts.wait_shares), findings, rules, facts.lost_work)


def of_device_traces(
    shares: DeviceShares | None,
    waits: WaitShares | None = None,
    findings: Sequence[Finding] = (),
    rules: Sequence[Rule] = (),
    lost: str = "",
) -> Verdict:
    """Judge traces with a device.

    Args:
        findings: with times per step of the traces.
        lost: why the traces can't judge the device, unless it is busy anyway.
    """
    if shares is None:
        return Verdict(kind="cannot_tell", summary="The traces have no steps.", accounted_ratio=None)
    if lost and shares.computing < DEVICE_BUSY:
        return Verdict(kind="cannot_tell", summary=f"{lost}.", accounted_ratio=None)
    unknown = unaccounted(shares, waits)
    found = _device_shares_by_bound(findings, rules)
    bounds = device_bounds(found, shares, waits)
    if "straggler_bound" in found:  # time spent waiting for a slow rank is no transfer
        bounds |= {kind: found.get(kind, 0.0) for kind in ("straggler_bound", "communication_bound")}
    work, work_share = _late_work(findings)
    least = {**LEAST_OF_DEVICE, "straggler_bound": LEAST_SHARE["straggler_bound"]}
    if work and not work.startswith(PYTHON_CODE):  # a profiler slows launches and Python, but no operators
        least["host_bound"] = LEAST_SHARE["host_bound"]
    over = {kind: share for kind, share in bounds.items() if share >= least[kind]}
    if shares.fetch >= LEAST_SHARE["input_bound"]:
        over["input_bound"] = shares.fetch
    # Unknown time can't outweigh a larger known share.
    is_enough = 1.0 - unknown >= LEAST_ACCOUNTED or max(over.values(), default=0.0) > unknown
    accounting = Accounting(ratio=1.0 - unknown, is_enough=is_enough)
    if not accounting.is_enough:
        return _verdict(
            "cannot_tell", f"{percent(unknown)} of the recorded steps isn't covered by events.", accounting
        )
    if shares.computing >= DEVICE_BUSY:
        return _device_bound(shares, accounting)
    if over:
        kind = max(over, key=lambda one: over[one])
        share, how = over[kind], _HOW_OF_DEVICE.get(kind, _HOW[kind])
        if kind == "host_bound" and work:
            share, how = work_share, _HOW_OF_LATE_WORK
        if kind == "straggler_bound":
            how += _straggler_note(findings)
        how = how.replace("{work}", work.replace("{", "(").replace("}", ")"))
        return _verdict(kind, f"{how.format(share=percent(share), whole=_EACH_STEP)}.", accounting)
    late = shares.host + shares.other if waits is None else waits.late
    parts = {**bounds, "input_bound": shares.fetch, "host_bound": max(bounds["host_bound"], late)}
    parts["communication_bound"] = max(parts["communication_bound"], shares.communication)
    unexplained = 0.0 if waits is None else waits.unexplained
    return _no_bound_of_device(shares, parts, unexplained, accounting)


def _no_bound_of_device(
    shares: DeviceShares, parts: Mapping[str, float], unexplained: float, accounting: Accounting
) -> Verdict:
    """Decide if no bound is reached: BALANCED if the device mostly computes, else the largest other part.

    Args:
        parts: share of each step by bound, however small.
        unexplained: share of idle time without a known cause.
    """
    largest = max(parts, key=lambda one: parts[one])
    summary = f"The GPU is busy in {percent(shares.busy)} of the recorded steps"
    unknown = 1 - (1.0 if accounting.ratio is None else accounting.ratio)
    if unknown > 1 - _LEAST_BALANCED:
        return _verdict(
            "cannot_tell", f"{summary}; {percent(unknown)} of them isn't covered by events.", accounting
        )
    if shares.computing >= _MOSTLY_MODEL:
        return _verdict(
            "balanced", f"{summary}{_everything_else_note(max(parts[largest], unexplained))}.", accounting
        )
    if unexplained >= parts[largest]:
        told = f"{summary}; {percent(unexplained)} is idle time with unknown cause."
        return _verdict("cannot_tell", told, accounting)
    how = _HOW_OF_DEVICE.get(largest, _HOW[largest])
    told = how.format(share=percent(parts[largest]), whole=_EACH_STEP, what="work around the model")
    return _verdict(largest, f"{summary}. {told}.", accounting)


def _everything_else_note(largest: float) -> str:
    limits = [one for one in (*LEAST_SHARE.values(), *LEAST_OF_DEVICE.values(), DEVICE_IDLE) if one > largest]
    return f"; everything else takes less than {percent(min(limits))} of them" if limits else ""


def _device_bound(shares: DeviceShares, accounting: Accounting) -> Verdict:
    return _verdict(
        "device_bound", f"The GPU is busy in {percent(shares.busy)} of the recorded steps.", accounting
    )


_NO_BOUND: Final[Mapping[str, str]] = {
    "model": "compute_bound",
    "dataloader": "input_bound",
    "other": "cannot_tell",
}
"""Largest part of a step where nothing stands out → verdict; all other parts are overhead."""


def _largest_part(
    costs: StepCosts, findings: Sequence[Finding], accounting: Accounting, *, are_unlike: bool
) -> Verdict:
    """Decide if no bound is reached: BALANCED if the model takes most of it, else by the largest part."""
    step_ns, phases = costs.step_ns, costs.typical.phases_ns
    labels = {phase.key: phase.label.lower() for phase in PHASES} | {"dataloader": "data loading"}
    parts = {key: ns for key, ns in phases.items() if ns and key not in MODEL}
    rest = sorted(parts, key=lambda key: -parts[key])
    model = costs.in_step_ns(MODEL) / step_ns if step_ns else 0.0
    other = parts.get("other", 0.0) / step_ns if step_ns else 1.0
    kind = "balanced"
    if model < _MOSTLY_MODEL or 1 - other < _LEAST_BALANCED:
        is_model = not rest or costs.in_step_ns(MODEL) >= parts[rest[0]]
        kind = _NO_BOUND.get("model" if is_model else rest[0], "overhead_bound")
    summary = f"Forward, backward and optimizer take {percent(model)} of each step"
    named = [f"{labels[key]} takes {percent(parts[key] / step_ns)}" for key in rest if key != "other"][:1]
    if other > 1 - _LEAST_BALANCED:
        named.append(f"{percent(other)} is spent between phases")
    summary = "; ".join([summary, ", and ".join(named)] if named else [summary])
    saved = [one.share or 0.0 for one in findings if one.status is Status.FOUND and one.share_of == "step"]
    if sum(saved) > 1 - _LEAST_BALANCED:
        summary += f". Findings could save up to {percent(min(1.0, sum(saved)))}"
    if are_unlike:
        summary += ". Ranks differ (see straggler_rank)"
    return _verdict(kind, f"{summary}.", accounting)


def _verdict(kind: str, summary: str, accounting: Accounting) -> Verdict:
    return Verdict(kind=kind, summary=summary, accounted_ratio=accounting.ratio)
