"""The verdict: what limits the speed, in one line, with the number that says so.

The savings of the findings is added up by what it speaks for (``Rule.bound``), as a share of the steps
in which this profiler does nothing of its own. What is said of a device comes from profiler windows. The
host's clock and the device's idle time see the same thing twice, so they are added up apart, and the largest
share says the verdict.
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
"""The verdict, and the kind of the finding, of a loop that ended because memory ran out."""

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
"""Share of a step, by the host's clock, from which on it is bound by something.

Source: the upper bands of TensorFlow's profiler: 20% for input, 15% for everything beside it. 20% for the
host's own code are TraceML's, and taken for the optimizer's as well.
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
"""Kind of a verdict → its definition, in Markdown; of those in ``LEAST_SHARE`` whose time it is."""

LEAST_OF_DEVICE: Final[Mapping[str, float]] = {
    "sync_bound": LEAST_SHARE["sync_bound"],
    "communication_bound": LEAST_SHARE["communication_bound"],
    "host_bound": 0.30,
}
"""The same of what traces say of the device. More of a late host, since a profiler makes it later."""

DEVICE_BUSY: Final = 0.85
"""Share of the recorded steps in which the device computes or copies, from which on it limits them."""
DEVICE_IDLE: Final = 0.50
"""Share in which the host is late, whatever it does, from which on the host limits them.

Source: torch_tb_profiler, which advises when less than half of the time is used."""

LEAST_ACCOUNTED: Final = 0.90
UNACCOUNTED_FLOOR_NS: Final = 1_000_000
"""Lightning's own loop takes a few tenths of a millisecond per step: as long as the unaccounted time is below
this, it is that loop, however short the step. A thread that lacked a CPU takes longer for it: see
``StepCosts.cpu_share``."""
LEAST_STEPS: Final = 5

_MOSTLY_MODEL: Final = 0.5
"""Share of the step time that the model takes at least in a balanced step."""
_LEAST_BALANCED: Final = 0.95
"""Share of the step time that is in named phases at least in a balanced step."""

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
        ratio: share of the steady steps that is in a phase other than Loop, which holds whatever nothing else
            explains; ``None`` without steady steps.
        is_enough: whether anything may be judged.
        reason: why not, as a clause.
    """

    ratio: float | None
    is_enough: bool
    reason: str = ""


def account(facts: Facts) -> Accounting:
    """What share of the steady steps is in named phases, and whether that is enough to judge."""
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
    """What limits the speed, and whether the machine was busy.

    Args:
        rules: that gave the findings, which know what verdict their time speaks for.
    """
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
    if lost:  # what the host's clock says holds all the same
        device = waits = None
    of_host = _host_shares(costs, findings, rules, waits)
    bounds = device_bounds(_by_bound(findings, rules), device, waits)
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
        what = _around_model(findings, rules) if kind == "overhead_bound" else ""
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


def _around_model(findings: Sequence[Finding], rules: Sequence[Rule]) -> str:
    """The phases around the model that the findings are about, those with the largest saving first."""
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
    """Share of each bound that the host's clock speaks for, and of what: of the loop where a finding is.

    What the host waits for the device around the model, in a logger say, is no work of its own: it is taken
    off, and what it costs is in the device's shares. Waiting for a copy to end is the transfer's own time.
    """
    bounds = {rule.kind: rule.bound for rule in rules if not rule.is_of_device}
    shares: dict[str, tuple[float, str]] = {}
    for bound in LEAST_SHARE:
        some = [one for one in findings if one.status is Status.FOUND and bounds.get(one.kind) == bound]
        is_of_loop = any(one.share_of == "loop" for one in some if one.whole_ns)
        whole_ns = costs.loop.wall_ns if is_of_loop else costs.step_ns
        saves_ns = sum(map(_speaking_ns, some))
        if bound == "overhead_bound":  # one that says another one's time too counts at least for itself
            saves_ns = max(saves_ns, *(one.saving_ns_per_step or 0.0 for one in some), 0.0)
        share = saves_ns / whole_ns if whole_ns else 0.0
        if waits is not None and bound in ("overhead_bound", "host_bound"):
            share -= waits.around_model if bound == "overhead_bound" else waits.forward_saving
        shares[bound] = min(max(share, 0.0), 1.0), _THE_LOOP if is_of_loop else _EACH_STEP
    return shares


def _speaking_ns(finding: Finding) -> float:
    """What of a finding's time speaks for the verdict."""
    return (finding.saving_ns_per_step or 0.0) if finding.verdict_ns is None else finding.verdict_ns


def _by_bound(findings: Sequence[Finding], rules: Sequence[Rule]) -> dict[str, float]:
    """Share of the step time of each bound that the rules about the device's side found.

    Of a late host it is all that this costs, of which the finding may name a part.
    """
    shares: dict[str, float] = {}
    bounds = {rule.kind: rule.bound for rule in rules if rule.is_of_device or rule.on_traces}
    for finding in findings:
        bound = bounds.get(finding.kind)
        if bound is not None and finding.status is Status.FOUND and finding.whole_ns:
            late = next((one.value for one in finding.evidence if one.label == HOST_LATE), None)
            lost_ns = late if isinstance(late, int | float) else finding.saving_ns_per_step or 0.0
            shares[bound] = shares.get(bound, 0.0) + lost_ns / finding.whole_ns
    return shares


def _late_rank(findings: Sequence[Finding]) -> str:
    """Which rank the others wait for, and in which phase it takes longer."""
    late = next(one for one in findings if one.kind == "straggler_rank" and one.status is Status.FOUND)
    known = {one.label: one.value for one in late.evidence}
    phase = f" in {known[LATE_PHASE]}" if known[LATE_PHASE] else ""
    return f" (rank {known[LATE_RANK]}{phase})"


def _late_work(findings: Sequence[Finding]) -> tuple[str, float]:
    """What the CPU does while the device is idle, where that is no launching, and its share of a step."""
    found = [one for one in findings if one.status is Status.FOUND and one.kind == "launch_bound"]
    known = {one.label: one.value for finding in found for one in finding.evidence}
    work, share = known.get(LATE_WORK), known.get(LATE_SHARE)
    return (work, share) if isinstance(work, str) and isinstance(share, float) else ("", 0.0)


def device_bounds(
    found: Mapping[str, float], device: DeviceShares | None, waits: WaitShares | None
) -> dict[str, float]:
    """Share of a step of each bound that traces speak for.

    The times are disjoint: nothing of the device's idle time is in two of them, and communication is work.
    Where the device is idle for half of the time because the host is late, it does not matter in which phase.

    Args:
        found: by the rules about the device's side.
        waits: what the host does to the device; without that, all idle time without a fetch is the host's.
    """
    shares = {kind: found.get(kind, 0.0) for kind in LEAST_OF_DEVICE}
    if device is not None:
        if "communication_bound" not in found:  # else the share of the finding
            shares["communication_bound"] = device.communication
        idle = device.host + device.other if waits is None else waits.late
        if idle >= DEVICE_IDLE and shares["host_bound"] < LEAST_OF_DEVICE["host_bound"]:
            shares["host_bound"] = idle  # else the share of the finding
    return shares


def _of_host_traces(fetch: float) -> Verdict:
    """Of traces without a device: whether the steps wait for their batches, and no more.

    Args:
        fetch: share of the steps in which nothing but a fetch of a batch goes on.
    """
    if fetch < LEAST_SHARE["input_bound"]:
        reason = "This trace has no GPU events. Profile a run to see where CPU time goes."
        return Verdict(kind="cannot_tell", summary=reason, accounted_ratio=None)
    summary = f"{_HOW['input_bound'].format(share=percent(fetch), whole=_EACH_STEP)}."
    return Verdict(kind="input_bound", summary=summary, accounted_ratio=None)


def verdict_of_traces(facts: JobFacts, findings: Sequence[Finding], rules: Sequence[Rule]) -> Verdict:
    """What limits the speed of the steps in traces, without anything else of the run."""
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
    """Of traces with a device.

    Args:
        findings: in times per step of the traces.
        lost: why the traces tell nothing of the device, unless it is busy anyway.
    """
    if shares is None:
        return Verdict(kind="cannot_tell", summary="The traces have no steps.", accounted_ratio=None)
    if lost and shares.computing < DEVICE_BUSY:
        return Verdict(kind="cannot_tell", summary=f"{lost}.", accounted_ratio=None)
    unknown = unaccounted(shares, waits)
    found = _by_bound(findings, rules)
    bounds = device_bounds(found, shares, waits)
    if "straggler_bound" in found:  # what the others wait for a rank is no transfer
        bounds |= {kind: found.get(kind, 0.0) for kind in ("straggler_bound", "communication_bound")}
    work, work_share = _late_work(findings)
    least = {**LEAST_OF_DEVICE, "straggler_bound": LEAST_SHARE["straggler_bound"]}
    if work and not work.startswith(PYTHON_CODE):  # a profiler makes launches and Python longer, no operator
        least["host_bound"] = LEAST_SHARE["host_bound"]
    over = {kind: share for kind, share in bounds.items() if share >= least[kind]}
    if shares.fetch >= LEAST_SHARE["input_bound"]:
        over["input_bound"] = shares.fetch
    # What is not known cannot outweigh a larger share that is.
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
            how += _late_rank(findings)
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
    """Where no bound is reached: BALANCED if the device mostly computes, else the largest other part.

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
            "balanced", f"{summary}{_nothing_else(max(parts[largest], unexplained))}.", accounting
        )
    if unexplained >= parts[largest]:
        told = f"{summary}; {percent(unexplained)} is idle time with unknown cause."
        return _verdict("cannot_tell", told, accounting)
    how = _HOW_OF_DEVICE.get(largest, _HOW[largest])
    told = how.format(share=percent(parts[largest]), whole=_EACH_STEP, what="work around the model")
    return _verdict(largest, f"{summary}. {told}.", accounting)


def _nothing_else(largest: float) -> str:
    """What of the steps nothing but the device's work takes: the next one of the limits of this module."""
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
"""Largest part of a step in which nothing else stands out → the verdict; all other parts are overhead."""


def _largest_part(
    costs: StepCosts, findings: Sequence[Finding], accounting: Accounting, *, are_unlike: bool
) -> Verdict:
    """Where no bound is reached: BALANCED if that is mostly the model, else the largest part of the step."""
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
