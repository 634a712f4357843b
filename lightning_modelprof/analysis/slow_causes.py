"""Why slow steps were slow: in which phase the time went, and what else happened meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.run.steps import SPECIAL, SlowStep, SlowSteps

MOST: Final = 0.5
"""Share of the additional time from which on something is the cause of it."""

COLLECTOR: Final = "garbage collection"
MACHINE: Final = "the machine"

_COMPUTING: Final = ("forward", "backward", "optimizer", "zero_grad", "clip", "transfer", "other")
"""Phases in which a thread that has no CPU cannot go on. Others wait for data or a disk, or do what is rare:
the waiting for a CPU, of which only the sum over many steps is known, need not have been in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCause:
    """One slow step and why.

    Attributes:
        slow: what was measured.
        excess_ns: how much longer than usual it took.
        phase: key of the phase with the most additional time.
        phase_excess_ns: how much that is.
        cause: ``COLLECTOR``, the key of a phase, ``MACHINE``, or ``""`` where nothing explains half of it.
    """

    slow: SlowStep
    excess_ns: float
    phase: str
    phase_excess_ns: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """The slow steps of a loop.

    Attributes:
        record: what was measured.
        causes: of the kept ones, in the order of the loop.
        medians_ns: phase key → median over the typical steps.
        worst: the slowest that is a clean step, else the slowest; ``None`` if there is none.
    """

    record: SlowSteps
    causes: tuple[SlowCause, ...]
    medians_ns: Mapping[str, float]
    worst: SlowCause | None


def slow_facts(record: SlowSteps | None, costs: StepCosts | Absent) -> SlowFacts | Absent:
    """Causes of the slow steps that were kept.

    Args:
        record: what was measured; ``None`` in runs of versions that did not look.
        costs: what a typical step costs.
    """
    if record is None:
        return Absent("not looked for (the run was saved by an older version)")
    if isinstance(costs, Absent):
        return Absent(costs.reason)
    medians_ns = costs.typical.medians_ns
    usual_wait = record.usual_cpu_wait or 0.0
    causes = tuple(_cause(slow, medians_ns, usual_wait) for slow in record.worst)
    clean = [one for one in causes if not one.slow.tags & SPECIAL]
    return SlowFacts(
        record=record,
        causes=causes,
        medians_ns=medians_ns,
        worst=max(clean or causes, key=lambda one: one.slow.duration_ns, default=None),
    )


def _cause(slow: SlowStep, medians_ns: Mapping[str, float], usual_wait: float) -> SlowCause:
    excess_ns = slow.duration_ns - slow.usual_ns
    beyond_ns = {key: ns - medians_ns.get(key, 0.0) for key, ns in slow.phases_ns.items()}
    phase = max(beyond_ns, key=lambda key: beyond_ns[key], default="other")
    return SlowCause(
        slow=slow,
        excess_ns=excess_ns,
        phase=phase,
        phase_excess_ns=beyond_ns.get(phase, 0.0),
        cause=_name(slow, excess_ns, phase, beyond_ns.get(phase, 0.0), usual_wait),
    )


def _name(slow: SlowStep, excess_ns: float, phase: str, phase_excess_ns: float, usual_wait: float) -> str:
    if slow.collector_ns >= MOST * excess_ns:
        return COLLECTOR
    is_most = phase_excess_ns >= MOST * excess_ns
    if _lacked_cpu(slow, usual_wait) and (phase in _COMPUTING or not is_most):
        return MACHINE
    return phase if is_most else ""


def _lacked_cpu(slow: SlowStep, usual_wait: float) -> bool:
    """Whether waiting for a CPU explains what the slow steps that were looked at together took beyond usual.

    Only the sum of the waiting is known: what is usual is taken off, or what steps that were not slow may
    have waited, whichever is more.
    """
    if slow.cpu_wait_ns is None or slow.beyond_ns is None or slow.spread_ns is None:
        return False
    in_others_ns = max(usual_wait * slow.watched_ns, slow.spread_ns)
    return slow.cpu_wait_ns - in_others_ns >= MOST * slow.beyond_ns
