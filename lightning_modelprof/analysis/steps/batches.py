"""Fixed cost per step, from batches of several sizes or from the work of one."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.statistics import theil_sen
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import BatchSizes
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings

MIN_OTHER: Final = 4
"""Steps of other sizes that a fit needs; with fewer, one fit in twenty could be far off by chance."""


MIN_RANGE: Final = 1.25
"""Smallest ratio of largest to smallest size that allows predicting twice the size."""


_MOST: Final = 200
"""Steps of the usual size, and as many of others, that are compared at most, since pairs grow fast."""


_SLOW_FLOPS_PER_S: Final = 4e9


_SLOW_BYTES_PER_S: Final = 2e9
"""Within reach of any CPU that torch trains on. Source: a Raspberry Pi 4 does about 8 GFLOP/s of float32
matrix products on one core, and copies 2 to 4 GB/s."""


_OPERATOR_NS: Final = 30_000
"""Upper bound for calling an operator. Source: 5 to 10 µs in torch, as much in the Python around it and
in autograd; the rest is for slow machines."""


_MODEL: Final = ("transfer", "forward", "backward")


_UPDATE: Final = ("zero_grad", "clip", "optimizer")


_AROUND: Final = ("callbacks", "module_hooks", "logging", "other")


_AFTER_VALIDATION: Final = int(NOT_CLEAN & ~StepTag.VALIDATION)


class BatchScaling(Record, frozen=True, kw_only=True):
    """Fixed part of a step.

    Attributes:
        num_samples: in a usual batch.
        sizes: smallest and largest batch compared.
        num_other: compared steps of other sizes.
        phases: phases compared; all other time counts as if it grew with the batch.
        step_ns: median of the clean steps of the usual size.
        compared_ns: part of it in ``phases``.
        per_sample_ns: time that each further sample adds (Theil-Sen).
        fixed_ns: part of ``compared_ns`` that is the same for any batch.
        least_fixed_ns, most_fixed_ns: 95% interval of ``fixed_ns``.
    """

    num_samples: int
    sizes: tuple[int, int]
    num_other: int
    phases: tuple[str, ...]
    step_ns: float
    compared_ns: float
    per_sample_ns: float
    fixed_ns: float
    least_fixed_ns: float
    most_fixed_ns: float

    def with_twice(self, fixed_ns: float) -> float:
        """Time of an epoch's steps with batches twice as large, as a share of their time now.

        There are half as many steps, each with the fixed part once and everything else twice.
        """
        return 1 - fixed_ns / (2 * self.step_ns)

    @property
    def most_with_twice(self) -> float:
        """The same if a sample's cost grows with the batch, as in a loss over all pairs.

        Needs steps of other sizes. Time that wasn't compared doubles.
        """
        usual, (smallest, largest) = self.num_samples, self.sizes
        other = smallest if smallest < usual else largest
        further_ns = max(self.compared_ns - self.least_fixed_ns, usual * self.per_sample_ns)
        further_ns *= max(1.0, 3 * usual / (usual + other))  # (2n)² - n² over the line through n² and m²
        return (2 * self.step_ns - self.compared_ns + further_ns) / (2 * self.step_ns)


def batch_scaling(steps: StepTimings, sizes: BatchSizes | None) -> BatchScaling:
    """Compare steps of other batch sizes with those of the usual one.

    Args:
        steps: the finished steps, or the saved ones.
        sizes: of the batches; ``None`` if not recorded.
    """
    if sizes is not None and not _only_samples_vary(sizes):
        raise NotMeasured("batches differ in more than their sample count")
    counted = steps.select((steps.samples > 0) & _is_comparable(steps))
    clean = counted.clean()
    if not len(clean):
        raise NotMeasured("no clean step has a sample count")
    numbers, counts = np.unique(clean.samples, return_counts=True)
    usual = int(numbers[counts.argmax()])
    is_clean = (counted.tags & int(NOT_CLEAN)) == 0
    # The first step of a size does one-time work for later ones.
    is_other = (counted.samples != usual) & ~_is_first(counted.samples)
    if int(is_other.sum()) < MIN_OTHER:
        raise NotMeasured(
            f"fewer than {MIN_OTHER} steps had a different batch size (train for a few more epochs so that"
            " the"
            " smaller last batch occurs more often)"
        )
    are_clean = int((is_other & is_clean).sum()) >= MIN_OTHER
    if are_clean:  # otherwise time around the model may be the validation's
        is_other &= is_clean
    phases = _phases(counted, has_all=are_clean)
    if not phases:
        raise NotMeasured("the model's phases weren't measured")
    usual_at = _thinned(np.flatnonzero((counted.samples == usual) & is_clean))
    other_at = _thinned(np.flatnonzero(is_other))
    at = np.sort(np.concatenate([usual_at, other_at]))
    samples = counted.samples[at].astype(np.float64)
    if samples.max() < MIN_RANGE * samples.min():
        raise NotMeasured("the batch sizes are too similar")
    columns = [PHASE_INDEX[phase] for phase in phases]
    compared = counted.phases_ns[:, columns].sum(axis=1)
    order = np.argsort(samples, kind="stable")
    slope, low, high = theil_sen(samples[order], compared[at][order].astype(np.float64))
    compared_ns = float(np.median(compared[usual_at]))
    fixed, least, most = (min(max(compared_ns - usual * one, 0.0), compared_ns) for one in (slope, high, low))
    return BatchScaling(
        num_samples=usual,
        sizes=(int(samples.min()), int(samples.max())),
        num_other=len(other_at),
        phases=phases,
        step_ns=float(np.median(clean.duration_ns[clean.samples == usual])),
        compared_ns=compared_ns,
        per_sample_ns=slope,
        fixed_ns=fixed,
        least_fixed_ns=least,
        most_fixed_ns=most,
    )


def fixed_by_work(steps: StepTimings, *, operators: int, flops: int, num_bytes: int) -> BatchScaling:
    """Part of a step that can't depend on its batch, since the batch's work is too little to take so long.

    Any CPU that torch trains on does the FLOPs and moves the bytes of one step at the rates of a slow one, or
    faster. The rest of forward and backward is the cost of calling operators, whose number doesn't depend on
    the batch. If the rest is too long for that, other Python code takes it, which may depend on the batch.

    Args:
        steps: the finished steps, or the saved ones.
        operators: calls per step.
        flops: of forward and backward per step.
        num_bytes: that the operators of forward and backward read and write.

    Returns:
        ``fixed_ns`` is the lower bound.
    """
    clean = steps.clean()
    counted = clean.select(clean.samples > 0)
    phases = _phases(counted, has_all=False)
    if not len(counted) or not phases:
        raise NotMeasured("no clean step has a sample count")
    columns = [PHASE_INDEX[phase] for phase in phases]
    compared_ns = float(np.median(counted.phases_ns[:, columns].sum(axis=1)))
    usual = int(np.median(counted.samples))
    grows_ns = min(compared_ns, 1e9 * (flops / _SLOW_FLOPS_PER_S + num_bytes / _SLOW_BYTES_PER_S))
    if compared_ns - grows_ns > operators * _OPERATOR_NS:
        raise NotMeasured("a step takes longer than calling its operators")
    return BatchScaling(
        num_samples=usual,
        sizes=(usual, usual),
        num_other=0,
        phases=phases,
        step_ns=float(np.median(counted.duration_ns)),
        compared_ns=compared_ns,
        per_sample_ns=grows_ns / max(1, usual),
        fixed_ns=compared_ns - grows_ns,
        least_fixed_ns=compared_ns - grows_ns,
        most_fixed_ns=compared_ns,
    )


def _is_comparable(steps: StepTimings) -> NDArray[np.bool_]:
    """Steps whose model phases are typical; a validation is fine, as it runs after the model's work."""
    comparable: NDArray[np.bool_] = (steps.tags & _AFTER_VALIDATION) == 0
    return comparable


def _is_first(samples: NDArray[np.int64]) -> NDArray[np.bool_]:
    first = np.zeros(len(samples), bool)
    first[np.unique(samples, return_index=True)[1]] = True
    return first


def _phases(steps: StepTimings, *, has_all: bool) -> tuple[str, ...]:
    """Phases that can be compared; empty without the model's own phases.

    With accumulated gradients, only some steps have the optimizer's work.
    """
    always_steps = not (steps.tags & int(StepTag.NO_OPTIMIZER_STEP)).any()
    wanted = (*_MODEL, *(_UPDATE if always_steps else ()), *(_AROUND if has_all else ()))
    seen = [one for one in wanted if (steps.phases_ns[:, PHASE_INDEX[one]] != NOT_MEASURED).all()]
    return tuple(seen) if "forward" in seen and "backward" in seen else ()


def _thinned(at: NDArray[np.intp]) -> NDArray[np.intp]:
    if len(at) <= _MOST:
        return at
    thinned: NDArray[np.intp] = at[np.linspace(0, len(at) - 1, _MOST).round().astype(np.intp)]
    return thinned


def _only_samples_vary(sizes: BatchSizes) -> bool:
    """Whether all varying dimensions vary in proportion, as sample counts do."""
    if sizes.num_rounded or not sizes.shapes:
        return False
    if len({tuple(map(len, shapes)) for shapes in sizes.shapes}) > 1:
        return False
    table = np.array([[value for shape in shapes for value in shape] for shapes in sizes.shapes], np.int64)
    varying = table[:, np.ptp(table, axis=0) > 0] if table.size else table
    if not varying.size:
        return True
    # Proportional: the ratio a : b is the same for each size.
    return bool((varying * varying[0, 0] == varying[:, :1] * varying[0]).all())
