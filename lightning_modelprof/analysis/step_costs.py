"""What a step costs by phase when this profiler does nothing of its own in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.benchmark import standard_error
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings

_OURS: Final = int(NOT_CLEAN & ~(StepTag.FIRST_OF_EPOCH | StepTag.VALIDATION))
"""Tags of steps that are not what they would be without this profiler, or are among the first ones."""

SURROUNDINGS: Final = frozenset(
    ("callbacks", "module_hooks", "logging", "validation", "checkpoint", "dataloader_init", "lr_scheduler")
)
"""Phases that may be in few steps only, and that a profiler or an inspection does not slow down."""

_PROFILER: Final = PHASE_INDEX["profiler"]
_DATALOADER: Final = PHASE_INDEX["dataloader"]
_DATALOADER_INIT: Final = PHASE_INDEX["dataloader_init"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMeans:
    """Means over a set of steps.

    Attributes:
        num_steps: how many.
        wall_ns: of a step, without the phase ``profiler``.
        phases_ns: self time by phase key, without ``profiler``; ``None`` where it could not be measured.
        errors_ns: standard error of these means, by phase key; without phases that were not measured and
            where there is one step only.
        medians_ns, quartiles_ns: medians and first quartiles of the phases over the steps, likewise.
        median_wall_ns: median of ``wall_ns``.
        device_ns: time between events on the device by phase key; without the phases that have none.
    """

    num_steps: int
    wall_ns: float
    phases_ns: Mapping[str, float | None]
    errors_ns: Mapping[str, float]
    medians_ns: Mapping[str, float]
    quartiles_ns: Mapping[str, float]
    median_wall_ns: float
    device_ns: Mapping[str, float]

    @property
    def exposed_wait_ns(self) -> float | None:
        """Time in which the loop waits for its batch and no work is left to hide that.

        On the host it is the fetch; on a device that works on while the host fetches it is the time between
        events around the fetch, which pass when all work before them is done.
        """
        host_ns, device_ns = self.phases_ns.get("dataloader"), self.device_ns.get("dataloader")
        return host_ns if host_ns is None or device_ns is None else min(host_ns, device_ns)

    def share(self, *phases: str) -> float | None:
        """Of the wall time; ``None`` if one of the phases was not measured."""
        total_ns = self.total_ns(*phases)
        return None if total_ns is None or not self.wall_ns else total_ns / self.wall_ns

    def total_ns(self, *phases: str) -> float | None:
        """Of phases together, in one step; ``None`` if one of them was not measured."""
        times = [self.phases_ns.get(phase) for phase in phases]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBoundaries:
    """What begins anew with each epoch after the first.

    Attributes:
        num_all: epochs that began, but for the first, among all finished steps.
        count: those of them among the steady steps that were kept; every figure below is their sum.
        init_ns: shutting workers down and starting them.
        extra_wait_ns: how much longer the first fetch of an epoch waits than one in the middle of it;
            ``None`` if there is none in the middle.
    """

    num_all: int
    count: int
    init_ns: int
    extra_wait_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Two sets of steps, and what lies between epochs.

    Attributes:
        steady: finished steps without the first ``skip_first`` ones and those in which this profiler was at
            work; validation and the starts of epochs are in it.
        inner: those of them without validation and without the start of an epoch, which are the clean
            steps of the benchmark; ``None`` if there is none.
        loop: a step of the loop as a whole. What surrounds the model comes from all finished steps and from
            the time in no step, such as a checkpoint after the last one; the rest from the steady steps.
        boundaries: the starts of epochs among the steady steps.
    """

    steady: PhaseMeans
    inner: PhaseMeans | None
    loop: PhaseMeans
    boundaries: EpochBoundaries

    @property
    def typical(self) -> PhaseMeans:
        """The clean steps, or where each step is special the steady ones."""
        return self.steady if self.inner is None else self.inner


def step_costs(
    steps: StepTimings, outside_ns: Mapping[str, int], totals: StepTotals | None = None
) -> StepCosts | Absent:
    """Means of the steady steps, and of those among them that nothing special happens in.

    Args:
        steps: the finished steps, or those of them that were kept; medians, quartiles and errors are theirs.
        outside_ns: time of the loop that is in no finished step, by phase key.
        totals: over all finished steps; ``None`` when ``steps`` are all.
    """
    totals = StepTotals.of(steps) if totals is None else totals
    steady = steps.select((steps.tags & _OURS) == 0)
    if len(steady) == 0:
        return Absent(
            "no step after the first ones is without profiler or inspection (train for longer, or lower"
            " skip_first and active)"
        )
    clean = steady.clean()
    of_steady = _means(steady, totals.without(_OURS))
    return StepCosts(
        steady=of_steady,
        inner=_means(clean, totals.clean()) if len(clean) else None,
        loop=_of_the_loop(of_steady, totals, outside_ns),
        boundaries=_boundaries(steps, steady, clean, totals),
    )


def _of_the_loop(steady: PhaseMeans, totals: StepTotals, outside_ns: Mapping[str, int]) -> PhaseMeans:
    """The steady steps, with what is not in every step as often as it is in all of them."""
    phases, num_steps = dict(steady.phases_ns), len(totals)
    is_measured, sums_ns = totals.measured_phases(), totals.whole("phases_ns")
    for key, ns in phases.items():
        index = PHASE_INDEX[key]
        if ns is None or not is_measured[index]:
            continue
        inside_ns = int(sums_ns[index]) / num_steps if key in SURROUNDINGS else ns
        phases[key] = inside_ns + outside_ns.get(key, 0) / num_steps
    known = [ns for ns in phases.values() if ns is not None]
    return replace(steady, wall_ns=sum(known), phases_ns=phases)


def _means(steps: StepTimings, totals: StepTotals) -> PhaseMeans:
    """Means by the totals, and how the kept ones of these steps vary."""
    count, wall_ns = len(totals), _wall_ns(steps)
    sums_ns, is_measured = totals.whole("phases_ns").tolist(), totals.measured_phases().tolist()
    device_ns, num_on_device = totals.whole("device_ns").tolist(), totals.whole("num_on_device").tolist()
    phases: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    medians: dict[str, float] = {}
    quartiles: dict[str, float] = {}
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
            if error_ns is not None:
                errors[phase.key] = error_ns
        if num_on_device[index]:
            device[phase.key] = device_ns[index] / num_on_device[index]
    return PhaseMeans(
        num_steps=count,
        wall_ns=(int(totals.whole("duration_ns")) - sums_ns[_PROFILER]) / count,
        phases_ns=phases,
        errors_ns=errors,
        medians_ns=medians,
        quartiles_ns=quartiles,
        median_wall_ns=float(np.median(wall_ns)),
        device_ns=device,
    )


def _wall_ns(steps: StepTimings) -> NDArray[np.int64]:
    ours = steps.phases_ns[:, _PROFILER]
    wall: NDArray[np.int64] = steps.duration_ns - np.where(ours == NOT_MEASURED, 0, ours)
    return wall


def _boundaries(
    steps: StepTimings, steady: StepTimings, clean: StepTimings, totals: StepTotals
) -> EpochBoundaries:
    """What the kept steps show of the starts of epochs; only their number is of all steps."""
    first = steady.select(_begins_an_epoch(steady))
    num_first = totals.num_with(StepTag.FIRST_OF_EPOCH)
    is_step_0 = (steps.step == 0) & ((steps.tags & int(StepTag.FIRST_OF_EPOCH)) != 0)
    init, wait = first.phases_ns[:, _DATALOADER_INIT], first.phases_ns[:, _DATALOADER]
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
    )


def _begins_an_epoch(steps: StepTimings) -> NDArray[np.bool_]:
    """Which steps hold the boundary between two epochs."""
    begins: NDArray[np.bool_] = ((steps.tags & int(StepTag.FIRST_OF_EPOCH)) != 0) & (steps.step != 0)
    return begins
