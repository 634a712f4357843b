"""The verdict and the findings of traces alone, whoever recorded them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.report.model import Finding, Verdict
from lightning_modelprof.report.rules.base import count, duration, milliseconds, percent, ratio
from lightning_modelprof.report.rules.input_bound import InputBound
from lightning_modelprof.report.verdict import LEAST_ACCOUNTED, DeviceShares, device_shares, verdict_of_traces

_RULE: Final = InputBound()


def diagnose_traces(traces: Iterable[TraceFacts]) -> tuple[Verdict, tuple[Finding, ...]]:
    """What limits the steps in traces of one job, over all ranks, and whether they wait for batches.

    The wait is what the Step time breakdown counts as Dataloader: fetches while no device works.
    """
    traces = tuple(traces)
    shares = device_shares(facts.step_breakdown for facts in traces)
    return verdict_of_traces(shares), _input_bound(traces, shares)


def _input_bound(traces: tuple[TraceFacts, ...], shares: DeviceShares | None) -> tuple[Finding, ...]:
    if shares is None:
        return _RULE.not_evaluated("the traces have no device events, or no steps")
    loading = {
        one
        for facts in traces
        if not isinstance(facts.dataloader, Absent)
        for one in facts.dataloader.loading
    }
    if all(isinstance(facts.dataloader, Absent) for facts in traces):
        return _RULE.not_evaluated("the traces have no fetch of a batch")
    if 1.0 - shares.other < LEAST_ACCOUNTED:
        return _RULE.not_evaluated(f"{percent(shares.other)} of the steps is in no event")
    wait_ns = shares.fetch * shares.step_ns
    evidence = [duration("wait per step", wait_ns), ratio("share of the step", shares.fetch)]
    if not _RULE.is_found(shares.fetch, wait_ns):
        return _RULE.clean(f"The device waits {milliseconds(wait_ns)} a step for batches.", evidence)
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
            f"In a step of {milliseconds(shares.step_ns)} the device waits {milliseconds(wait_ns)}"
            f" ({percent(shares.fetch)}) for its batch.",
            action,
            _RULE.severity(shares.fetch),
            saving_ns=wait_ns,
            evidence=evidence,
        ),
    )
