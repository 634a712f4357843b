"""The benchmark: reader_cost, batch_cost, ips and Reader Ratio over one and the same set of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.loops import FIT, Loop
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings

DATALOADER: Final = PHASE_INDEX["dataloader"]
PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One figure over the clean steps.

    ``avg`` is the figure of the whole set: the mean of a cost, and for a rate or ratio total over total.
    ``max``, ``min`` and the percentiles (linear interpolation between the two nearest steps) are those of
    the per-step values. ``standard_error`` is that of ``avg``, ``None`` for a single step. It does not
    assume that steps vary independently: batches of several workers come in bursts, slow steps come in
    runs. Clean steps count as consecutive, also where steps between them were left out.
    """

    avg: float
    max: float
    min: float
    p50: float
    p90: float
    p99: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Throughput of the clean steps.

    Attributes:
        num_steps: clean steps; every figure below is over exactly these.
        batch_cost_ns: wall time of a step.
        reader_cost_ns: time the loop waited for its batch; ``None`` if the phase was not measured.
        reader_ratio: reader_cost / batch_cost, a fraction; ``None`` as above.
        steps_per_s: ips in steps; ``None`` only if the clock stood still.
        samples_per_s: ips in what ``samples_fn`` counts; ``None`` when any clean step's count is unknown.
        samples_per_step: mean number of samples in a step; ``None`` as above.
    """

    num_steps: int
    batch_cost_ns: Statistics
    reader_cost_ns: Statistics | None
    reader_ratio: Statistics | None
    steps_per_s: Statistics | None
    samples_per_s: Statistics | None
    samples_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """The averages of :class:`Benchmark` alone, cheap enough to be computed while training runs.

    Attributes:
        batch_cost_ns, reader_cost_ns, reader_ratio, steps_per_s, samples_per_s: as ``avg`` there.
        phases_ns: mean self time of each phase, in PHASES order; ``None`` where it was not measured.
    """

    num_steps: int
    batch_cost_ns: float
    reader_cost_ns: float | None
    reader_ratio: float | None
    steps_per_s: float | None
    samples_per_s: float | None
    phases_ns: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Steps that the benchmark left out for one reason; a step with several is counted at the first."""

    reason: str
    num_steps: int


_REASONS: Final = (
    (StepTag.SKIP_FIRST, "skip_first"),
    (StepTag.FIRST_OF_EPOCH, FIT.first_of),
    (StepTag.PROFILED, "recorded by torch.profiler"),
    (StepTag.PROFILER_WARMUP, "profiler warm-up"),
    (StepTag.PROFILER_STOP, "window closed or archive saved"),
    (StepTag.INSPECTED, "FLOPs counted or modules timed"),
    (StepTag.DRAINING, "prefetched while the profiler worked"),
    (StepTag.VALIDATION, "validation inside"),
)


def benchmark(steps: StepTimings) -> Benchmark | None:
    """The figures of the clean steps among ``steps``; ``None`` when none is clean."""
    clean = steps.clean()
    if len(clean) == 0:
        return None
    duration = clean.duration_ns
    reader = clean.phases_ns[:, DATALOADER]
    has_reader = bool((reader != NOT_MEASURED).all())
    has_samples = bool((clean.samples != NOT_MEASURED).all())
    ones = np.ones_like(duration)
    return Benchmark(
        num_steps=len(clean),
        batch_cost_ns=_cost(duration),
        reader_cost_ns=_cost(reader) if has_reader else None,
        reader_ratio=_quotient(reader, duration) if has_reader else None,
        steps_per_s=_quotient(ones, duration, scale=1e9),
        samples_per_s=_quotient(clean.samples, duration, scale=1e9) if has_samples else None,
        samples_per_step=int(clean.samples.sum()) / len(clean) if has_samples else None,
    )


def averages(steps: StepTimings) -> Averages | None:
    """Averages over all of ``steps``, whether clean or not; ``None`` without a step."""
    num_steps = len(steps)
    if num_steps == 0:
        return None
    total_ns = int(steps.duration_ns.sum())
    is_unmeasured = (steps.phases_ns == NOT_MEASURED).any(axis=0).tolist()
    sums = steps.phases_ns.sum(axis=0).tolist()
    phases_ns = tuple(
        None if missing else value / num_steps for missing, value in zip(is_unmeasured, sums, strict=True)
    )
    reader_ns = None if is_unmeasured[DATALOADER] else sums[DATALOADER]
    has_samples = bool((steps.samples != NOT_MEASURED).all())
    return Averages(
        num_steps=num_steps,
        batch_cost_ns=total_ns / num_steps,
        reader_cost_ns=phases_ns[DATALOADER],
        reader_ratio=None if reader_ns is None or total_ns == 0 else reader_ns / total_ns,
        steps_per_s=1e9 * num_steps / total_ns if total_ns else None,
        samples_per_s=1e9 * int(steps.samples.sum()) / total_ns if has_samples and total_ns else None,
        phases_ns=phases_ns,
    )


def exclusions(steps: StepTimings, loop: Loop = FIT) -> tuple[Exclusion, ...]:
    """Which steps of a loop :func:`benchmark` left out, and why; the counts sum to all that were left out."""
    left = (steps.tags & int(NOT_CLEAN)) != 0
    found = []
    for tag, reason in _REASONS:
        mask = left & ((steps.tags & int(tag)) != 0)
        if mask.any():
            name = loop.first_of if tag is StepTag.FIRST_OF_EPOCH else reason
            found.append(Exclusion(reason=name, num_steps=int(mask.sum())))
        left &= ~mask
    return tuple(found)


def _cost(values: NDArray[np.int64]) -> Statistics:
    n = len(values)
    # The sum is exact in integers; only the division rounds.
    avg = int(values.sum()) / n
    return _statistics(values, avg, standard_error(values - avg))


def _quotient(above: NDArray[np.int64], below: NDArray[np.int64], scale: float = 1.0) -> Statistics | None:
    """Statistics of ``scale * above / below`` with the ratio of the totals as its average.

    Steps that took no time (a clock too coarse to see them) have no ratio of their own.

    Source: standard error of a ratio of means by the delta method (linearisation), e.g. Cochran,
    Sampling Techniques, 3rd ed., section 6.4.
    """
    total = int(below.sum())
    if total == 0:
        return None
    avg = scale * int(above.sum()) / total
    error = standard_error((scale * above - avg * below) / (total / len(below)))
    took_time = below > 0
    return _statistics(scale * above[took_time] / below[took_time], avg, error)


def standard_error(residuals: NDArray[np.floating[Any]]) -> float | None:
    """Standard error of the mean of a series, from its deviations from that mean; ``None`` for one value.

    Overlapping batch means: from how far the means of √n consecutive values lie apart follows how far the
    mean of all n would from run to run, whether neighbours are alike, take turns or are independent. With
    batches of one value (n < 4) this is the sample deviation over √n.

    Source: Meketon and Schmeiser, Overlapping Batch Means: Something for Nothing?, Proceedings of the
    Winter Simulation Conference 1984.
    """
    n = len(residuals)
    if n == 1:
        return None
    length = math.isqrt(n)
    num_batches = n - length + 1
    sums = np.concatenate(([0.0], np.cumsum(residuals)))
    means = (sums[length:] - sums[:-length]) / length
    # The factor makes the variance unbiased where the steps are independent.
    long_run_variance = n * length / ((n - length) * num_batches) * float((means**2).sum())
    return math.sqrt(long_run_variance / n)


def _statistics(
    values: NDArray[np.int64] | NDArray[np.float64], avg: float, error: float | None
) -> Statistics:
    p50, p90, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return Statistics(
        avg=avg,
        max=float(values.max()),
        min=float(values.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        standard_error=error,
    )
