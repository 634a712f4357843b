"""The verdict and the findings of traces alone, whoever recorded them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.host_waits import NO_STEPS_TO_COMPARE
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.device_shares import (
    DeviceShares,
    device_shares,
    host_shares,
    lost_work,
    unaccounted,
    wait_shares,
)
from lightning_modelprof.report.model import Finding, Status, Verdict
from lightning_modelprof.report.rules.base import count, duration, milliseconds, percent, ratio
from lightning_modelprof.report.rules.communication_exposed import CommunicationExposed
from lightning_modelprof.report.rules.device import Circumstances, DeviceRule, pooled_waits
from lightning_modelprof.report.rules.host_to_device_copy import HostToDeviceCopy
from lightning_modelprof.report.rules.host_waits import HostDeviceSync
from lightning_modelprof.report.rules.input import InputBound
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
    shares, host = device_shares(traces), host_shares(traces)
    waits = pooled_waits(traces)
    circumstances = Circumstances(step_ns=None if shares is None else shares.step_ns)
    lost = lost_work(facts.launch_count for facts in traces)
    of_device = [finding for rule in _DEVICE_RULES for finding in rule.judge_known(traces, circumstances)]
    findings = [*_input_bound(traces, shares or host, lost if shares else ""), *of_device]
    findings.sort(key=lambda one: (_ORDER.index(one.status), -(one.saving_ns_per_step or 0.0)))
    if isinstance(waits, Absent) and waits in NO_STEPS_TO_COMPARE:
        reason = f"{waits.reason[:1].upper()}{waits.reason[1:]}."
        return Verdict(kind="cannot_tell", summary=reason, accounted_ratio=None), tuple(findings)
    if host is not None:
        return verdict_of_host_traces(host.fetch), tuple(findings)
    return verdict_of_traces(shares, wait_shares(waits), of_device, _DEVICE_RULES, lost), tuple(findings)


def _input_bound(
    traces: tuple[TraceFacts, ...], shares: DeviceShares | None, lost: str
) -> tuple[Finding, ...]:
    if shares is None:
        return _RULE.not_evaluated("the traces have no steps")
    if lost:
        return _RULE.not_evaluated(lost)
    waits = pooled_waits(traces)
    if isinstance(waits, Absent) and waits in NO_STEPS_TO_COMPARE:
        return _RULE.not_evaluated(waits.reason)
    loading = {
        one
        for facts in traces
        if not isinstance(facts.dataloader, Absent)
        for one in facts.dataloader.loading
    }
    if all(isinstance(facts.dataloader, Absent) for facts in traces):
        return _RULE.not_evaluated("the traces have no fetch of a batch")
    unknown = unaccounted(shares, wait_shares(waits))
    if shares.computing and 1.0 - unknown < LEAST_ACCOUNTED:
        return _RULE.not_evaluated(f"{percent(unknown)} of the steps is in no event")
    wait_ns = shares.fetch * shares.step_ns
    who = "device" if shares.computing else "loop"
    evidence = [duration("wait per step", wait_ns), ratio("share of the step", shares.fetch)]
    if not _RULE.is_found(shares.fetch, wait_ns):
        return _RULE.clean(f"The {who} waits {milliseconds(wait_ns)} a step for batches.", evidence)
    rest_ns = max(shares.step_ns - wait_ns, 1.0)
    action = "Make batches faster, or by more workers of the DataLoader."
    if loading == {"main thread"}:
        needed = math.ceil(wait_ns / rest_ns)
        evidence.append(count("num_workers advised", needed))
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
