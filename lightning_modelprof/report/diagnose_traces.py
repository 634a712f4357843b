"""The verdict and the findings of traces alone, whoever recorded them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.host_waits import NO_STEP_RANGES
from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.report.device_shares import (
    DeviceShares,
    device_shares,
    host_shares,
    unaccounted,
    wait_shares,
)
from lightning_modelprof.report.model import Finding, Status, Verdict
from lightning_modelprof.report.rules.base import count, duration, milliseconds, percent, ratio
from lightning_modelprof.report.rules.communication_exposed import CommunicationExposed
from lightning_modelprof.report.rules.device_facts import Circumstances, DeviceRule, pooled_waits
from lightning_modelprof.report.rules.host_device_sync import HostDeviceSync
from lightning_modelprof.report.rules.host_to_device_copy import HostToDeviceCopy
from lightning_modelprof.report.rules.input_bound import InputBound
from lightning_modelprof.report.rules.launch_bound import LaunchBound
from lightning_modelprof.report.verdict import (
    LEAST_ACCOUNTED,
    verdict_of_host_traces,
    verdict_of_traces,
)

_RULE: Final = InputBound()
_DEVICE_RULES: Final[tuple[DeviceRule, ...]] = (
    HostDeviceSync(),
    HostToDeviceCopy(),
    LaunchBound(),
    CommunicationExposed(),
)
_ORDER: Final = (Status.FOUND, Status.CLEAN, Status.NOT_EVALUATED)


def diagnose_traces(traces: Iterable[TraceFacts]) -> tuple[Verdict, tuple[Finding, ...]]:
    """What limits the steps in traces of one job, over all ranks, and what each rule about them says.

    The wait for batches is what the Step time breakdown counts as Dataloader: fetches while no device works.
    The other rules are those that judge the windows of a run, with the same arithmetic.

    Args:
        traces: at least one.
    """
    traces = tuple(traces)
    breakdowns = [facts.step_breakdown for facts in traces]
    shares, host = device_shares(breakdowns), host_shares(breakdowns)
    waits = pooled_waits(traces)
    circumstances = Circumstances(step_ns=None if shares is None else shares.step_ns)
    lost = _lost_kernels(traces)
    of_device = [
        finding
        for rule in _DEVICE_RULES
        for finding in (rule.not_evaluated(lost) if lost else rule.judge(traces, circumstances))
    ]
    findings = [*_input_bound(traces, shares or host, lost if shares else ""), *of_device]
    findings.sort(key=lambda one: (_ORDER.index(one.status), -(one.saving_ns_per_step or 0.0)))
    if waits == NO_STEP_RANGES:
        reason = f"{NO_STEP_RANGES.reason[:1].upper()}{NO_STEP_RANGES.reason[1:]}."
        return Verdict(kind="cannot_tell", summary=reason, accounted_ratio=None), tuple(findings)
    if host is not None:
        return verdict_of_host_traces(host.fetch), tuple(findings)
    if lost:
        summary = f"{lost[:1].upper()}{lost[1:]}."
        return Verdict(kind="cannot_tell", summary=summary, accounted_ratio=None), tuple(findings)
    return verdict_of_traces(shares, wait_shares(waits), of_device, _DEVICE_RULES), tuple(findings)


def _lost_kernels(traces: tuple[TraceFacts, ...]) -> str:
    """Why nothing can be said of the device: more launches lack their kernel than kernels are there.

    Where as many kernels are there, it may be the links that are lost, or two calls stand for one launch.
    """
    counts = [facts.launch_count for facts in traces]
    launches, lost = sum(one.launches for one in counts), sum(one.lost for one in counts)
    summaries = [facts.kernel_launches for facts in traces]
    if lost <= sum(one.kernels.count for one in summaries if not isinstance(one, Absent)):
        return ""
    return (
        f"{lost:,} of {launches:,} kernel launches have no kernel in the trace: they were captured into a"
        " CUDA graph and did not run, or the profiler lost the device's events"
    )


def _input_bound(
    traces: tuple[TraceFacts, ...], shares: DeviceShares | None, lost: str
) -> tuple[Finding, ...]:
    if shares is None:
        return _RULE.not_evaluated("the traces have no steps")
    if lost:
        return _RULE.not_evaluated(lost)
    if all(facts.host_waits == NO_STEP_RANGES for facts in traces):
        return _RULE.not_evaluated(NO_STEP_RANGES.reason)
    loading = {
        one
        for facts in traces
        if not isinstance(facts.dataloader, Absent)
        for one in facts.dataloader.loading
    }
    if all(isinstance(facts.dataloader, Absent) for facts in traces):
        return _RULE.not_evaluated("the traces have no fetch of a batch")
    unknown = unaccounted(shares, wait_shares(pooled_waits(traces)))
    if shares.busy and 1.0 - unknown < LEAST_ACCOUNTED:
        return _RULE.not_evaluated(f"{percent(unknown)} of the steps is in no event")
    wait_ns = shares.fetch * shares.step_ns
    who = "device" if shares.busy else "loop"
    evidence = [duration("wait per step", wait_ns), ratio("share of the step", shares.fetch)]
    if not _RULE.is_found(shares.fetch, wait_ns):
        return _RULE.clean(f"The {who} waits {milliseconds(wait_ns)} a step for batches.", evidence)
    rest_ns = max(shares.step_ns - wait_ns, 1.0)
    action = "Make batches faster, or by more workers of the DataLoader."
    if loading == {"main thread"}:
        needed = math.ceil(wait_ns / rest_ns)
        evidence.append(count("workers needed", needed))
        action = (
            f"DataLoader(num_workers={needed} or more): the training thread makes its batches itself now."
        )
    return (
        _RULE.found(
            f"In a step of {milliseconds(shares.step_ns)} the {who} waits {milliseconds(wait_ns)}"
            f" ({percent(shares.fetch)}) for its batch.",
            action,
            _RULE.severity(shares.fetch),
            saving_ns=wait_ns,
            evidence=evidence,
        ),
    )
