"""Why slow steps were slow: in which phase the time went, and what else happened meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.step_costs import StepCosts
from lightning_modelprof.run.slow_steps import SlowStep, SlowSteps
from lightning_modelprof.run.steps import StepTag

MOST: Final = 0.5
"""Share of the additional time from which on something is the cause of it."""

SPECIAL: Final = int(StepTag.FIRST_OF_EPOCH | StepTag.VALIDATION)

COLLECTOR: Final = "garbage collection"
MACHINE: Final = "the machine"

_PREEMPTIONS_PER_S: Final = 50.0
"""So often another process gets the CPU only if there are more that want it than CPUs."""

_COMPUTING: Final = ("forward", "backward", "optimizer", "zero_grad", "clip", "transfer", "other")
"""Phases in which a process that has lost its CPU cannot go on."""


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
    causes = tuple(_cause(slow, medians_ns) for slow in record.worst)
    clean = [one for one in causes if not one.slow.tags & SPECIAL]
    return SlowFacts(
        record=record,
        causes=causes,
        medians_ns=medians_ns,
        worst=max(clean or causes, key=lambda one: one.slow.duration_ns, default=None),
    )


def _cause(slow: SlowStep, medians_ns: Mapping[str, float]) -> SlowCause:
    excess_ns = slow.duration_ns - slow.usual_ns
    beyond_ns = {key: ns - medians_ns.get(key, 0.0) for key, ns in slow.phases_ns.items()}
    phase = max(beyond_ns, key=lambda key: beyond_ns[key], default="other")
    return SlowCause(
        slow=slow,
        excess_ns=excess_ns,
        phase=phase,
        phase_excess_ns=beyond_ns.get(phase, 0.0),
        cause=_name(slow, excess_ns, phase, beyond_ns.get(phase, 0.0)),
    )


def _name(slow: SlowStep, excess_ns: float, phase: str, phase_excess_ns: float) -> str:
    if slow.collector_ns >= MOST * excess_ns:
        return COLLECTOR
    is_most = phase_excess_ns >= MOST * excess_ns
    preemptions_per_s = 1e9 * (slow.preemptions or 0) / slow.watched_ns if slow.watched_ns else 0.0
    if preemptions_per_s >= _PREEMPTIONS_PER_S and (phase in _COMPUTING or not is_most):
        return MACHINE
    return phase if is_most else ""
