"""Time per step by phase, without profiler overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.benchmark import standard_error
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import (
    BEGINS_EPOCH,
    NOT_CLEAN,
    NOT_MEASURED,
    SPECIAL,
    SlowStep,
    SlowSteps,
    StepTag,
    StepTimings,
)

_OURS: Final = int(NOT_CLEAN & ~(StepTag.FIRST_OF_EPOCH | StepTag.VALIDATION))
"""Tags of steps that the profiler disturbed, or that are among the first ones."""


LITTLE_CPU_WAIT: Final = 0.02
"""Share of the loop that the training thread may wait for a CPU before outliers are ignored.

More could be most of the smallest share that a rule reports, 3%."""


_TRIMMED: Final = 0.2


_PROFILER: Final = PHASE_INDEX["profiler"]


_DATALOADER: Final = PHASE_INDEX["dataloader"]


_DATALOADER_INIT: Final = PHASE_INDEX["dataloader_init"]


class PhaseMeans(Record, frozen=True, kw_only=True):
    """Means over a set of steps.

    Attributes:
        wall_ns: per step, without the phase ``profiler``.
        phases_ns: self time by phase key, without ``profiler``; ``None`` if not measured.
        errors_ns: standard errors of these means, by phase key; without unmeasured phases, and empty for a
            single step.
        medians_ns, quartiles_ns: medians and first quartiles of the measured phases over the steps.
        trimmed_ns: trimmed means of the measured phases: see :func:`trimmed_mean`.
        median_wall_ns, trimmed_wall_ns: median and trimmed mean of ``wall_ns``.
        device_ns: time between events on the device by phase key; without phases that have none.
        profiler_ns: mean of the phase ``profiler``, which is in no other figure.
    """

    num_steps: int
    wall_ns: float
    phases_ns: Mapping[str, float | None]
    errors_ns: Mapping[str, float]
    medians_ns: Mapping[str, float]
    quartiles_ns: Mapping[str, float]
    trimmed_ns: Mapping[str, float]
    median_wall_ns: float
    trimmed_wall_ns: float
    device_ns: Mapping[str, float]
    profiler_ns: float

    @property
    def exposed_wait_ns(self) -> float | None:
        """Time that the loop waits for its batch without other work to hide it.

        On the host it's the fetch. On a device that keeps working during the fetch, it's the time between
        events around the fetch, which complete when all earlier work is done.
        """
        host_ns, device_ns = self.phases_ns.get("dataloader"), self.device_ns.get("dataloader")
        return host_ns if host_ns is None or device_ns is None else min(host_ns, device_ns)

    def share(self, *phases: str) -> float | None:
        """Share of the wall time; ``None`` if one of the phases wasn't measured."""
        total_ns = self.total_ns(*phases)
        return None if total_ns is None or not self.wall_ns else total_ns / self.wall_ns

    def total_ns(self, *phases: str) -> float | None:
        """Sum of phases per step; ``None`` if one of them wasn't measured."""
        times = [self.phases_ns.get(phase) for phase in phases]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None


class EpochBoundaries(Record, frozen=True, kw_only=True):
    """Time that each epoch after the first takes to start.

    Attributes:
        num_all: epoch starts but the first, among all finished steps.
        count: those among the saved steady steps; every figure below is their sum.
        init_ns: shutting workers down and starting them.
        extra_wait_ns: how much longer an epoch's first fetch waits than later ones; ``None`` if there are no
            later ones.
        extra_compute_ns: how much longer Forward and Backward take on the host in an epoch's first step than
            later, by the median of such steps: starting workers take CPU time.
    """

    num_all: int
    count: int
    init_ns: int
    extra_wait_ns: int | None
    extra_compute_ns: int = 0


class StepCosts(Record, frozen=True, kw_only=True):
    """Two sets of steps, and the time between epochs.

    Attributes:
        steady: finished steps without the first ``skip_first`` ones and those that the profiler disturbed;
            includes validation and epoch starts.
        inner: steady steps without validation and epoch starts, which are the benchmark's clean steps;
            ``None`` without any.
        loop: the loop's mean step. Phases around the model include all finished steps and the time outside
            steps, e.g. a checkpoint after the last one; the rest is from the steady steps.
        boundaries: epoch starts among the steady steps.
        cpu_wait_share: share of the loop that the training thread lacked a CPU when ready; ``None`` if
            unknown.
    """

    steady: PhaseMeans
    inner: PhaseMeans | None
    loop: PhaseMeans
    boundaries: EpochBoundaries
    cpu_wait_share: float | None = None

    @property
    def typical(self) -> PhaseMeans:
        """The clean steps, or the steady ones if there are none."""
        return self.steady if self.inner is None else self.inner

    @property
    def step_ns(self) -> float:
        """Step time: mean over the clean steps from fetch to fetch, including profiler work."""
        return self.typical.wall_ns + self.typical.profiler_ns

    def in_step_ns(self, phases: Sequence[str] = ()) -> float:
        """Time of phases in a typical step; without phases, the step time."""
        known = self.typical.phases_ns
        return sum(known.get(phase) or 0.0 for phase in phases) if phases else self.step_ns

    @property
    def had_its_cpu(self) -> bool:
        return self.cpu_wait_share is not None and self.cpu_wait_share < LITTLE_CPU_WAIT

    @property
    def cpu_share(self) -> float:
        """Share of the time that the training thread had a CPU when ready, at least a tenth; 1 if unknown.

        Divide a threshold in wall time by it.
        """
        return max(0.1, 1.0 - (self.cpu_wait_share or 0.0))

    def usual_ns(self, means: PhaseMeans, phase: str) -> float | None:
        """Typical time of a phase that is in every step; ``None`` if not measured.

        It's the mean if the thread had its CPU. If it had to wait for one, or if that's unknown, a few long
        steps say nothing about the training: then it's the trimmed mean if that's less.
        """
        mean_ns = means.phases_ns.get(phase)
        if mean_ns is None or self.had_its_cpu:
            return mean_ns
        return min(mean_ns, means.trimmed_ns.get(phase, mean_ns))

    def usual_wall_ns(self, means: PhaseMeans) -> float:
        return means.wall_ns if self.had_its_cpu else min(means.wall_ns, means.trimmed_wall_ns)

    def usual_wait_ns(self) -> float | None:
        """Typical time that the loop waits for its batch without other work to hide it."""
        host_ns, exposed_ns = self.usual_ns(self.typical, "dataloader"), self.typical.exposed_wait_ns
        return host_ns if host_ns is None or exposed_ns is None else min(host_ns, exposed_ns)

    def least_of(self, usual_ns: float, means: PhaseMeans, phase: str) -> float:
        """Lower end of the interval around a typical time: two standard errors of the mean below it."""
        return max(0.0, usual_ns - 2 * means.errors_ns.get(phase, 0.0))


def step_costs(
    steps: StepTimings,
    outside_ns: Mapping[str, int],
    totals: StepTotals | None = None,
    *,
    cpu_wait_share: float | None = None,
    num_workers: int = 0,
) -> StepCosts:
    """Means of the steady steps, and of the clean steps among them.

    Args:
        steps: the finished steps, or the saved ones; medians, quartiles and errors are theirs.
        outside_ns: time of the loop outside finished steps, by phase key.
        totals: over all finished steps; ``None`` if ``steps`` is all of them.
        cpu_wait_share: share of the loop in which the training thread was ready without a CPU.
        num_workers: that make the batches: this many batches may arrive together.
    """
    totals = StepTotals.of(steps) if totals is None else totals
    if len(steps) == 0:
        raise NotMeasured("no step finished")
    steady = steps.select((steps.tags & _OURS) == 0)
    if len(steady) == 0:
        raise NotMeasured(
            "every step after the first ones was profiled or inspected (train for longer, or set smaller"
            " skip_first=... and active=...)"
        )
    clean = steady.clean()
    of_steady = _means(steady, totals.without(_OURS), num_workers)
    of_clean = _means(clean, totals.clean(), num_workers) if len(clean) else None
    return StepCosts(
        steady=of_steady,
        inner=of_clean,
        loop=_of_the_loop(of_steady, of_clean or of_steady, totals, outside_ns),
        boundaries=_boundaries(steps, steady, clean, totals),
        cpu_wait_share=cpu_wait_share,
    )


def trimmed_mean(values: NDArray[np.int64], period: int = 1) -> float:
    """Mean without the largest and smallest fifth.

    Args:
        values: one per step, in order; at least one.
        period: number of neighbors to average first, so that events once per period aren't trimmed.

    Source: a fifth on either side is customary; Wilcox, Introduction to Robust Estimation and Hypothesis
    Testing, 2012, section 3.3.
    """
    period = min(max(period, 1), len(values))
    whole = len(values) // period * period
    means = np.sort(values[:whole].reshape(-1, period).mean(axis=1))
    cut = int(_TRIMMED * len(means))
    return float(means[cut : len(means) - cut].mean())


def _of_the_loop(
    steady: PhaseMeans, typical: PhaseMeans, totals: StepTotals, outside_ns: Mapping[str, int]
) -> PhaseMeans:
    """The steady steps, with rare phases counted as often as in all steps.

    Trimmed means are those of the typical steps.
    """
    phases, num_steps = dict(steady.phases_ns), len(totals)
    is_measured, sums_ns = totals.measured_phases(), totals.total("phases_ns")
    for key, ns in phases.items():
        index = PHASE_INDEX[key]
        if ns is None or not is_measured[index]:
            continue
        inside_ns = int(sums_ns[index]) / num_steps if not PHASES[index].every_step else ns
        phases[key] = inside_ns + outside_ns.get(key, 0) / num_steps
    known = [ns for ns in phases.values() if ns is not None]
    return replace(
        steady,
        wall_ns=sum(known),
        phases_ns=phases,
        trimmed_ns=typical.trimmed_ns,
        trimmed_wall_ns=typical.trimmed_wall_ns,
    )


def _means(steps: StepTimings, totals: StepTotals, num_workers: int) -> PhaseMeans:
    """Means from the totals, and the variation of the saved steps."""
    count, wall_ns = len(totals), _wall_ns(steps)
    sums_ns, is_measured = totals.total("phases_ns").tolist(), totals.measured_phases().tolist()
    device_ns, num_on_device = totals.total("device_ns").tolist(), totals.total("num_on_device").tolist()
    phases: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    medians: dict[str, float] = {}
    quartiles: dict[str, float] = {}
    trimmed: dict[str, float] = {}
    device: dict[str, float] = {}
    for index, phase in enumerate(PHASES):
        if index == _PROFILER:
            continue
        column = steps.phases_ns[:, index]
        phases[phase.key] = None
        if is_measured[index]:
            error_ns = standard_error(column - int(column.sum()) / len(column))
            phases[phase.key] = sums_ns[index] / count
            quartiles[phase.key], medians[phase.key] = map(float, np.percentile(column, (25, 50)))
            trimmed[phase.key] = trimmed_mean(column, num_workers if index == _DATALOADER else 1)
            if error_ns is not None:
                errors[phase.key] = error_ns
        if num_on_device[index]:
            device[phase.key] = device_ns[index] / num_on_device[index]
    return PhaseMeans(
        num_steps=count,
        wall_ns=(int(totals.total("duration_ns")) - sums_ns[_PROFILER]) / count,
        phases_ns=phases,
        errors_ns=errors,
        medians_ns=medians,
        quartiles_ns=quartiles,
        trimmed_ns=trimmed,
        median_wall_ns=float(np.median(wall_ns)),
        trimmed_wall_ns=trimmed_mean(wall_ns, num_workers),
        device_ns=device,
        profiler_ns=sums_ns[_PROFILER] / count,
    )


def _wall_ns(steps: StepTimings) -> NDArray[np.int64]:
    ours = steps.phases_ns[:, _PROFILER]
    wall: NDArray[np.int64] = steps.duration_ns - np.where(ours == NOT_MEASURED, 0, ours)
    return wall


def _boundaries(
    steps: StepTimings, steady: StepTimings, clean: StepTimings, totals: StepTotals
) -> EpochBoundaries:
    """Epoch starts among the saved steps; only their number is over all steps."""
    first = steady.select(_begins_an_epoch(steady))
    num_first = totals.num_with(BEGINS_EPOCH)
    is_step_0 = (steps.step == 0) & ((steps.tags & BEGINS_EPOCH) != 0)
    init, wait = first.phases_ns[:, _DATALOADER_INIT], first.phases_ns[:, _DATALOADER]
    clean = clean.select((clean.tags & BEGINS_EPOCH) == 0)
    inside = clean.phases_ns[:, _DATALOADER]
    is_measured = bool((init != NOT_MEASURED).all() and (wait != NOT_MEASURED).all())
    extra = None
    if len(clean) and is_measured and (inside != NOT_MEASURED).all():
        usual = int(inside.sum()) // len(clean)
        extra = int(np.maximum(wait - usual, 0).sum())
    return EpochBoundaries(
        num_all=num_first - int(is_step_0.any()),
        count=len(first),
        init_ns=int(init.sum()) if is_measured else 0,
        extra_wait_ns=extra,
        extra_compute_ns=_extra_compute_ns(first, clean),
    )


def _extra_compute_ns(first: StepTimings, clean: StepTimings) -> int:
    columns = [PHASE_INDEX[key] for key in ("forward", "backward")]
    ours, theirs = first.phases_ns[:, columns], clean.phases_ns[:, columns]
    if not len(ours) or not len(theirs) or (ours == NOT_MEASURED).any() or (theirs == NOT_MEASURED).any():
        return 0
    usual = float(theirs.sum(axis=1).mean())
    return int(max(0.0, float(np.median(ours.sum(axis=1))) - usual) * len(ours))


def _begins_an_epoch(steps: StepTimings) -> NDArray[np.bool_]:
    begins: NDArray[np.bool_] = ((steps.tags & BEGINS_EPOCH) != 0) & (steps.step != 0)
    return begins


MOST: Final = 0.5
"""Share of the excess time that makes something its cause."""


COLLECTOR: Final = "garbage collection"


MACHINE: Final = "the machine"


_COMPUTING: Final = ("forward", "backward", "optimizer", "zero_grad", "clip", "transfer", "other")
"""Phases that can't go on without a CPU. Others wait for data or a disk, or are rare: only the sum of
CPU waits over many steps is known, and it needn't have been in them."""


class SlowCause(Record, frozen=True, kw_only=True):
    """A slow step and its cause.

    Attributes:
        excess_ns: time beyond the usual.
        phase: key of the phase with most of the excess.
        phase_excess_ns: its excess.
        cause: ``COLLECTOR``, a phase key, ``MACHINE``, or ``""`` if nothing explains half of the excess.
    """

    slow: SlowStep
    excess_ns: float
    phase: str
    phase_excess_ns: float
    cause: str


class SlowFacts(Record, frozen=True, kw_only=True):
    """The slow steps of a loop.

    Attributes:
        causes: of the saved ones, in loop order.
        medians_ns: median over the typical steps, by phase key.
        worst: slowest clean step, else the slowest; ``None`` without any.
    """

    record: SlowSteps
    causes: tuple[SlowCause, ...]
    medians_ns: Mapping[str, float]
    worst: SlowCause | None


def slow_facts(record: SlowSteps, costs: StepCosts) -> SlowFacts:
    """Find the causes of the saved slow steps."""
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
    """Whether waiting for a CPU explains the excess of the watched slow steps together.

    Only the sum of the waits is known. The usual wait, or what the other steps may have waited, is
    subtracted, whichever is more.
    """
    if slow.cpu_wait_ns is None or slow.beyond_ns is None or slow.spread_ns is None:
        return False
    in_others_ns = max(usual_wait * slow.watched_ns, slow.spread_ns)
    return slow.cpu_wait_ns - in_others_ns >= MOST * slow.beyond_ns
