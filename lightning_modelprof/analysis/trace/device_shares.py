"""Composition of the recorded steps, as shares of their time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.trace.host_waits import MODEL_PHASES, HostWaits
from lightning_modelprof.analysis.trace.idle import CAUSES, CoveredIdle
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES, StepBreakdown
from lightning_modelprof.analysis.trace.trace_checks import KernelLaunchCount
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import Record


class DeviceShares(Record, frozen=True, kw_only=True):
    """Shares of recorded steps; all but ``busy`` and ``copying`` sum to 1.

    Attributes:
        step_ns: mean step length.
        busy: Busy of the Device Summary, averaged over the devices; 0 without any.
        computing: kernels, copies and sets, without pure communication.
        communication: communication that none of these hides.
        fetch: batch fetches while no device works.
        host: the runtime and operators on the host, without any of the above.
        other: none of the above.
        copying: copies within ``computing`` that no kernel hides.
    """

    step_ns: float
    busy: float
    computing: float
    communication: float
    fetch: float
    host: float
    other: float
    copying: float = 0.0


def device_shares(traces: Iterable[TraceFacts]) -> DeviceShares:
    """Shares over all steps of the traces with device events."""
    known = _breakdowns(traces)
    return _shares((facts, one) for facts, one in known if one.has_device)


def host_shares(traces: Iterable[TraceFacts]) -> DeviceShares:
    """Shares over all steps, if no trace has device events."""
    known = _breakdowns(traces)
    if any(one.has_device for _, one in known):
        raise NotMeasured("a trace has GPU events")
    return _shares(known)


def _breakdowns(traces: Iterable[TraceFacts]) -> list[tuple[TraceFacts, StepBreakdown]]:
    known = ((facts, facts.get(TraceFacts.step_breakdown)) for facts in traces)
    return [(facts, breakdown) for facts, breakdown in known if breakdown is not None]


def _shares(known: Iterable[tuple[TraceFacts, StepBreakdown]]) -> DeviceShares:
    num_steps, total_ns = 0, 0.0
    parts_ns = dict.fromkeys(STEP_CATEGORIES, 0.0)
    known = list(known)
    for _, breakdown in known:
        num_steps += len(breakdown.steps)
        total_ns += breakdown.mean_total_ns * len(breakdown.steps)
        for category, mean_ns in zip(STEP_CATEGORIES, breakdown.mean_parts_ns, strict=True):
            parts_ns[category] += mean_ns * len(breakdown.steps)
    if not total_ns:
        raise NotMeasured("the traces have no steps")
    idle = gpu_idle(facts for facts, _ in known)
    return DeviceShares(
        step_ns=total_ns / num_steps,
        busy=0.0 if idle is None else idle.busy,
        computing=sum(parts_ns[name] for name in ("kernel", "memcpy", "memset")) / total_ns,
        communication=parts_ns["communication"] / total_ns,
        fetch=parts_ns["dataloader"] / total_ns,
        host=sum(parts_ns[name] for name in ("runtime", "cpu_exec")) / total_ns,
        other=parts_ns["other"] / total_ns,
        copying=parts_ns["memcpy"] / total_ns,
    )


def recorded_step_ns(traces: Iterable[TraceFacts], waits: HostWaits | None) -> float:
    """Step time from traces alone: the mean of the steps that count for host waits, else of all.

    Args:
        traces: of one job.
        waits: of all of them.
    """
    if waits is not None and waits.steps_ns:
        return waits.steps_ns / waits.num_steps
    return _shares(_breakdowns(traces)).step_ns


class GpuIdle(Record, frozen=True, kw_only=True):
    """GPU busy and GPU idle: shares of the recorded steps, averaged over all devices.

    A device is busy while at least one kernel, copy or set runs on any of its streams, and idle otherwise.

    Attributes:
        busy: Busy of the Device Summary.
        by_cause: share of each idle cause (``CAUSES`` of ``analysis/trace/idle.py``); they and ``busy`` sum
            to 1.
        after_waits: share of the cause "host" that would be saved if no call waited for the device.
    """

    busy: float
    by_cause: Mapping[str, float]
    after_waits: float

    @property
    def idle(self) -> float:
        return sum(self.by_cause.values())


def gpu_idle(traces: Iterable[TraceFacts]) -> GpuIdle | None:
    """Over all devices of all traces; ``None`` without any, or if the recorded time is empty."""
    known: list[CoveredIdle] = []
    saves_ns = 0
    for facts in traces:
        idle, waits = facts.get(TraceFacts.idle), facts.get(TraceFacts.host_waits)
        known += [] if idle is None else [device.covered for device in idle.devices]
        saves_ns += 0 if waits is None else sum(waits.saves_by_step_ns)
    total_ns = sum(one.total_ns for one in known)
    if not total_ns:
        return None
    by_cause_ns = [sum(parts_ns) for parts_ns in zip(*(one.by_cause_ns for one in known), strict=True)]
    return GpuIdle(
        busy=sum(one.busy_ns for one in known) / total_ns,
        by_cause={cause: ns / total_ns for cause, ns in zip(CAUSES, by_cause_ns, strict=True)},
        after_waits=saves_ns / total_ns,
    )


class WaitShares(Record, frozen=True, kw_only=True):
    """Waits as shares of recorded steps, for the verdict; see :class:`HostWaits`.

    Attributes:
        late: device idle time in which the host was late, without fetches and the cost of waits.
        around_model: host time in waits that start in phases around the model, without copies.
        forward_saving: saving of waits that start in the forward.
        unexplained: device idle time without a known cause.
    """

    late: float
    around_model: float
    forward_saving: float
    unexplained: float = 0.0


def wait_shares(facts: HostWaits, device: DeviceShares | None) -> WaitShares:
    if not facts.steps_ns:
        raise NotMeasured("the recorded steps have no duration")
    around = [wait for wait in facts.waits if wait.place.phase not in ("", "dataloader", *MODEL_PHASES)]
    forward = [wait for wait in facts.waits if wait.place.phase == "forward"]
    copying = 0.0 if device is None else device.copying
    known_ns = facts.fetch_ns + facts.communication_ns + facts.saves_ns + facts.late_ns
    return WaitShares(
        late=facts.late_ns / facts.steps_ns,
        around_model=max(0.0, sum(wait.wait_ns for wait in around) / facts.steps_ns - copying),
        forward_saving=sum(wait.saves_ns for wait in forward) / facts.steps_ns,
        unexplained=(facts.idle_ns - known_ns) / facts.steps_ns,
    )


def unaccounted(shares: DeviceShares, waits: WaitShares | None) -> float:
    """Unaccounted share of the steps.

    That is time in no event, e.g. Python between operators. If the device waits for the host during it, the
    idle time is explained, whatever the host does.
    """
    return shares.other if waits is None else min(shares.other, waits.unexplained)


def lost_work(counts: Iterable[KernelLaunchCount]) -> str:
    """Why windows or ranks with these launches don't show the GPU's work; ``""`` if they do."""
    known = pool((KernelLaunchCount(launches=0, lost=0, kernels=0), *counts))
    if not known.tells_nothing:
        return ""
    return (
        f"{known.lost:,} of {known.launches:,} kernel launches have no kernel in the trace, because"
        " they were captured into a CUDA graph, or the profiler lost GPU events"
    )
