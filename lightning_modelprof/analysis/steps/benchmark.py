"""The benchmark: reader_cost, batch_cost, ips and Reader Ratio over the same steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.record import Record
from lightning_modelprof.run.loops import FIT, LoopKind
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import AllRanks, RankSteps
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_CLEAN, StepTag, StepTimings

DATALOADER: Final = PHASE_INDEX["dataloader"]
PERCENTILES: Final = (50, 90, 99)


class Statistics(Record, frozen=True, kw_only=True):
    """One figure over the clean steps.

    ``avg`` is the figure of the whole set: the mean of a cost; for a rate or ratio, total over total.
    ``max``, ``min`` and the percentiles (linear interpolation between the two nearest steps) are of the
    per-step values. ``standard_error`` is that of ``avg``, ``None`` for a single step. It doesn't assume that
    steps vary independently: batches of several workers come in bursts, slow steps in runs. Clean steps count
    as consecutive even if steps between them were left out.

    In a run with more steps than are saved, ``avg`` and a cost's ``max`` and ``min`` are over all clean
    steps; everything else is over the saved ones, which makes the standard error too large rather than too
    small.
    """

    avg: float
    max: float
    min: float
    p50: float
    p90: float
    p99: float
    standard_error: float | None


class Benchmark(Record, frozen=True, kw_only=True):
    """Throughput of the clean steps.

    Attributes:
        num_steps: clean steps; every figure below is over exactly these.
        batch_cost_ns: wall time per step.
        reader_cost_ns: time that the loop waited for its batch; ``None`` if the phase wasn't measured.
        reader_ratio: reader_cost / batch_cost, a fraction; ``None`` as above.
        steps_per_s: ips in steps; ``None`` only if the clock stood still.
        samples_per_s: ips in the unit of ``samples_fn``; ``None`` if any clean step's count is unknown.
        samples_per_step: mean number of samples per step; ``None`` as above.
    """

    num_steps: int
    batch_cost_ns: Statistics
    reader_cost_ns: Statistics | None
    reader_ratio: Statistics | None
    steps_per_s: Statistics | None
    samples_per_s: Statistics | None
    samples_per_step: float | None


class Averages(Record, frozen=True, kw_only=True):
    """The averages of :class:`Benchmark`, cheap enough to compute during training.

    Attributes:
        batch_cost_ns, reader_cost_ns, reader_ratio, steps_per_s, samples_per_s: as ``avg`` there.
        phases_ns: mean self time of each phase, in PHASES order; ``None`` if not measured.
    """

    num_steps: int
    batch_cost_ns: float
    reader_cost_ns: float | None
    reader_ratio: float | None
    steps_per_s: float | None
    samples_per_s: float | None
    phases_ns: tuple[float | None, ...]


class Exclusion(Record, frozen=True, kw_only=True):
    """Steps that the benchmark left out for one reason; a step with several counts for the first."""

    reason: str
    num_steps: int


_REASONS: Final = (
    (StepTag.SKIP_FIRST, "skip_first"),
    (StepTag.FIRST_OF_EPOCH, FIT.first_of),
    (StepTag.PROFILED, "recorded by torch.profiler"),
    (StepTag.PROFILER_WARMUP, "profiler warm-up"),
    (StepTag.PROFILER_STOP, "closing a window or saving the run"),
    (StepTag.INSPECTED, "counting FLOPs or timing modules"),
    (StepTag.DRAINING, "prefetched while the profiler worked"),
    (StepTag.VALIDATION, "with validation"),
    (StepTag.RUN_AHEAD, "CPU ahead of the GPU"),
)


def benchmark(steps: StepTimings, totals: StepTotals | None = None) -> Benchmark | None:
    """Figures of the clean steps; ``None`` if no step is clean, or no clean one was saved.

    Args:
        steps: the finished steps, or the saved ones.
        totals: over all finished steps; ``None`` if ``steps`` is all of them.
    """
    clean = steps.clean()
    if len(clean) == 0:
        return None
    whole = StepTotals.of(clean) if totals is None else totals.clean()
    num_steps, duration_ns = len(whole), int(whole.total("duration_ns"))
    duration, reader = clean.duration_ns, clean.phases_ns[:, DATALOADER]
    has_reader = bool(whole.measured_phases()[DATALOADER])
    reader_ns, samples = int(whole.total("phases_ns")[DATALOADER]), int(whole.total("samples"))
    # The totals are exact integers; only the divisions round.
    return Benchmark(
        num_steps=num_steps,
        batch_cost_ns=_cost(
            duration, duration_ns, whole.duration_max_ns.max(), whole.duration_min_ns.min(), num_steps
        ),
        reader_cost_ns=_cost(
            reader,
            reader_ns,
            whole.phases_max_ns[:, DATALOADER].max(),
            whole.phases_min_ns[:, DATALOADER].min(),
            num_steps,
        )
        if has_reader
        else None,
        reader_ratio=_quotient(reader, duration, (reader_ns, duration_ns)) if has_reader else None,
        steps_per_s=_quotient(np.ones_like(duration), duration, (num_steps, duration_ns), scale=1e9),
        samples_per_s=_quotient(clean.samples, duration, (samples, duration_ns), scale=1e9)
        if whole.has_samples
        else None,
        samples_per_step=samples / num_steps if whole.has_samples else None,
    )


def all_ranks(ranks: Sequence[RankSteps]) -> AllRanks | None:
    """Figures over the clean steps of several ranks; ``None`` with fewer, or without a clean step."""
    totals = [one.totals for one in ranks]
    num_steps = sum(map(len, totals))
    if len(ranks) < 2 or not num_steps:
        return None
    has_reader = all(bool(one.measured_phases()[DATALOADER]) for one in totals if len(one))
    has_samples = all(one.has_samples for one in totals)
    reader_ns = sum(int(one.total("phases_ns")[DATALOADER]) for one in totals)
    return AllRanks(
        world_size=len(ranks),
        num_steps=num_steps,
        batch_total_ns=sum(int(one.total("duration_ns")) for one in totals),
        batch_max_ns=max(int(one.duration_max_ns.max()) for one in totals if len(one)),
        batch_min_ns=min(int(one.duration_min_ns.min()) for one in totals if len(one)),
        reader_total_ns=reader_ns if has_reader else None,
        samples=sum(int(one.total("samples")) for one in totals) if has_samples else None,
    )


def averages(totals: StepTotals) -> Averages | None:
    """Averages over all steps of ``totals``, clean or not; ``None`` without a step."""
    num_steps = len(totals)
    if num_steps == 0:
        return None
    total_ns = int(totals.total("duration_ns"))
    is_measured = totals.measured_phases().tolist()
    sums = totals.total("phases_ns").tolist()
    phases_ns = tuple(
        value / num_steps if measured else None for measured, value in zip(is_measured, sums, strict=True)
    )
    reader_ns = sums[DATALOADER] if is_measured[DATALOADER] else None
    has_rate = totals.has_samples and total_ns > 0
    return Averages(
        num_steps=num_steps,
        batch_cost_ns=total_ns / num_steps,
        reader_cost_ns=phases_ns[DATALOADER],
        reader_ratio=None if reader_ns is None or total_ns == 0 else reader_ns / total_ns,
        steps_per_s=1e9 * num_steps / total_ns if total_ns else None,
        samples_per_s=1e9 * int(totals.total("samples")) / total_ns if has_rate else None,
        phases_ns=phases_ns,
    )


def exclusions(totals: StepTotals, loop: LoopKind = FIT) -> tuple[Exclusion, ...]:
    """Steps that :func:`benchmark` left out, by reason; the counts sum to all that were left out."""
    left = (totals.tags & int(NOT_CLEAN)) != 0
    found = []
    for tag, reason in _REASONS:
        mask = left & ((totals.tags & int(tag)) != 0)
        if mask.any():
            name = loop.first_of if tag is StepTag.FIRST_OF_EPOCH else reason
            found.append(Exclusion(reason=name, num_steps=int(totals.num_steps[mask].sum())))
        left &= ~mask
    return tuple(found)


def _cost(kept: NDArray[np.int64], total: int, most: np.int64, least: np.int64, num_steps: int) -> Statistics:
    error = standard_error(kept - int(kept.sum()) / len(kept))
    return _statistics(kept, total / num_steps, error, float(most), float(least))


def _quotient(
    above: NDArray[np.int64], below: NDArray[np.int64], totals: tuple[int, int], scale: float = 1.0
) -> Statistics | None:
    """Statistics of ``scale * above / below``, with the ratio of ``totals`` as average.

    Steps that took no time (on a coarse clock) have no ratio of their own. ``max`` and ``min`` are those of
    the saved steps.

    Source: standard error of a ratio of means by the delta method (linearization), e.g. Cochran,
    Sampling Techniques, 3rd ed., section 6.4.
    """
    kept_ns = int(below.sum())
    if totals[1] == 0 or kept_ns == 0:
        return None
    kept_avg = scale * int(above.sum()) / kept_ns
    error = standard_error((scale * above - kept_avg * below) / (kept_ns / len(below)))
    took_time = below > 0
    values = scale * above[took_time] / below[took_time]
    return _statistics(values, scale * totals[0] / totals[1], error, float(values.max()), float(values.min()))


def standard_error(residuals: NDArray[np.floating[Any]]) -> float | None:
    """Standard error of a series' mean, from the deviations from that mean; ``None`` for one value.

    Overlapping batch means: the spread of the means of √n consecutive values shows how much the mean of all n
    would vary from run to run, whether neighbors are alike, take turns or are independent. With batches of
    one value (n < 4) this is the sample deviation over √n.

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
    # The factor makes the variance unbiased if the steps are independent.
    long_run_variance = n * length / ((n - length) * num_batches) * float((means**2).sum())
    return math.sqrt(long_run_variance / n)


def _statistics(
    values: NDArray[np.int64] | NDArray[np.float64],
    avg: float,
    error: float | None,
    most: float,
    least: float,
) -> Statistics:
    p50, p90, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return Statistics(avg=avg, max=most, min=least, p50=p50, p90=p90, p99=p99, standard_error=error)
