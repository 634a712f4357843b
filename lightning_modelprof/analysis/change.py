"""One figure of a comparison: both values, the change and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.statistics import (
    CONFIDENCE,
    NORMAL_QUANTILE,
    block_lengths,
    drift_within,
    resampled_means,
    small_sample_factor,
    t_975,
)
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings

FEW_STEPS: Final = 20
"""Clean steps that each side needs for an interval."""

ASSUMED_RUN_SPREAD: Final = 0.01
"""Relative standard deviation between identical runs, added where one run per side can't show it.

Source: an assumption, and a low one. T. Mytkowicz et al., Producing Wrong Data Without Doing Anything
Obviously Wrong, ASPLOS 2009, found several percent from link order and environment size alone;
``benchmarks/compare_power.py`` prints how much identical fits differ on a machine."""

Floats = NDArray[np.floating[Any]]
Figure = Callable[[Floats], Floats]
"""Map the means of a run's columns, shape (..., columns), to a figure, shape (...)."""

_DURATION: Final = len(PHASES)
SAMPLES: Final = len(PHASES) + 1
"""Column with the samples per step; the phase columns come first, in phase order."""


class Change(Record, frozen=True, kw_only=True):
    """One figure on both sides.

    Attributes:
        before, after: the figure, from the mean of the runs' means; ``None`` if not measured.
        change: after / before - 1, or after - before if ``is_difference``; ``None`` if not measured, or if a
            side is 0 and there is no quotient.
        low, high: ends of the 95% interval of ``change``; ``None`` as above, or with too few steps.
    """

    key: str
    before: float | None
    after: float | None
    change: float | None
    low: float | None
    high: float | None
    is_difference: bool = False


class Outcome(Enum):
    """Verdict of a comparison; see :func:`decide`."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    CANNOT_TELL = "cannot_tell"


class Comparison(Record, frozen=True, kw_only=True):
    """Difference between two sides, and the verdict.

    Attributes:
        reason: why there is no clearer verdict; ``""`` where the interval is enough.
        per_sample: whether the time per sample decides, because steps hold different numbers of samples.
        times_as_fast: time before / time after; ``None`` when a side has no clean step.
        low, high: ends of its 95% interval; ``None`` with too few steps.
        detectable: smallest relative change in time that four of five such comparisons would show; ``None``
            without an interval.
        num_steps: clean steps before and after, over all runs.
        num_runs: runs before and after.
        paired: whether the runs of both sides took turns and are compared in pairs.
        phases: difference in time per step of each phase that took time on either side.
        block_lengths: tried block lengths in steps, one tuple per run, before first.
    """

    outcome: Outcome
    reason: str
    tolerance: float
    per_sample: bool
    times_as_fast: float | None
    low: float | None
    high: float | None
    detectable: float | None
    num_steps: tuple[int, int]
    num_runs: tuple[int, int]
    paired: bool
    figures: tuple[Change, ...]
    phases: tuple[Change, ...]
    block_lengths: tuple[tuple[int, ...], ...]


class Side(Record, frozen=True):
    """Clean steps of one side's runs.

    Attributes:
        columns: per run, shape (clean steps, columns): time in each phase, step time, samples.
        measured: shape (columns,): whether a column is measured in every clean step of every run.
        lengths: per run, the tried block lengths.
        draws: per tried length, shape (resamples, columns): the side's resampled means.
        blocks: per tried length, the number of blocks.
        run_spread: relative standard deviation assumed between runs with one run per side.
    """

    columns: tuple[Floats, ...]
    measured: NDArray[np.bool_]
    lengths: tuple[tuple[int, ...], ...]
    draws: tuple[Floats, ...]
    blocks: tuple[float, ...]
    run_spread: float = ASSUMED_RUN_SPREAD

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.columns))

    @property
    def run_means(self) -> Floats:
        """Shape (runs, columns); every run has the same weight, however long it is."""
        return np.array([columns.mean(axis=0) for columns in self.columns])


class Sides(NamedTuple):
    """Both sides; ``paired`` means that run i before and run i after are neighbors in time."""

    before: Side
    after: Side
    paired: bool

    @property
    def both(self) -> tuple[Side, Side]:
        return self.before, self.after


def side_of(runs: Sequence[StepTimings]) -> Side:
    """Summarize the runs of a side, without draws if they have too few clean steps.

    Args:
        runs: those without a clean step are left out.
    """
    clean = [steps.clean() for steps in runs]
    columns = [
        np.column_stack([steps.phases_ns, steps.duration_ns, steps.samples]).astype(float) for steps in clean
    ]
    columns = [run for run in columns if len(run)]
    measured = np.all([(run != NOT_MEASURED).all(axis=0) for run in columns] or [[False]], axis=0)
    if sum(map(len, columns)) < FEW_STEPS:
        return Side(tuple(columns), measured, (), (), ())
    lengths = tuple(block_lengths(run[:, _DURATION]) for run in columns)
    tried = range(len(lengths[0]))
    return Side(
        columns=tuple(columns),
        measured=measured,
        lengths=lengths,
        draws=tuple(
            np.mean(
                [resampled_means(run, length[i]) for run, length in zip(columns, lengths, strict=True)],
                axis=0,
            )
            for i in tried
        ),
        blocks=tuple(
            sum(len(run) / length[i] for run, length in zip(columns, lengths, strict=True)) for i in tried
        ),
        run_spread=math.hypot(ASSUMED_RUN_SPREAD, *(drift_within(run[:, _DURATION]) for run in columns)),
    )


def step_time(means: Floats) -> Floats:
    return means[..., _DURATION]


def _reader_cost(means: Floats) -> Floats:
    return means[..., PHASE_INDEX["dataloader"]]


def _steps_per_s(means: Floats) -> Floats:
    return 1e9 / means[..., _DURATION]


def _samples_per_s(means: Floats) -> Floats:
    return 1e9 * means[..., SAMPLES] / means[..., _DURATION]


def time_per_sample(means: Floats) -> Floats:
    """Nanoseconds per sample of this rank; needs ``SAMPLES``."""
    return means[..., _DURATION] / means[..., SAMPLES]


def _reader_ratio(means: Floats) -> Floats:
    return means[..., PHASE_INDEX["dataloader"]] / means[..., _DURATION]


def _phase_time(index: int) -> Figure:
    return lambda means: means[..., index]


def speed_figures(sides: Sides) -> tuple[Change, ...]:
    reader, samples = PHASE_INDEX["dataloader"], SAMPLES
    return (
        change_of("batch_cost", sides, step_time),
        change_of("reader_cost", sides, _reader_cost, needs=reader),
        change_of("steps_per_s", sides, _steps_per_s),
        change_of("samples_per_s", sides, _samples_per_s, needs=samples),
        change_of("reader_ratio", sides, _reader_ratio, needs=reader, is_difference=True),
    )


def phase_changes(sides: Sides) -> tuple[Change, ...]:
    """Changes of the phases that took time on either side, even if unmeasured on the other."""
    found = []
    for index, phase in enumerate(PHASES):
        took_time = any((run[:, index] != 0).any() for side in sides.both for run in side.columns)
        if took_time:
            found.append(change_of(phase.key, sides, _phase_time(index), needs=index, is_difference=True))
    return tuple(found)


def change_of(
    key: str, sides: Sides, figure: Figure, *, needs: int = _DURATION, is_difference: bool = False
) -> Change:
    """Change of one figure between the sides, with its interval.

    Args:
        needs: column that the figure needs in addition to the step time.
        is_difference: whether the change is a difference; otherwise it's a quotient, and the interval is
            made on its logarithm, so that swapping the sides gives the inverse.
    """
    before, after = (_value(side, figure, needs) for side in sides.both)
    nothing = Change(
        key=key, before=before, after=after, change=None, low=None, high=None, is_difference=is_difference
    )
    if before is None or after is None or (not is_difference and (before <= 0 or after <= 0)):
        return nothing
    scale: Figure = np.asarray if is_difference else np.log
    back: Callable[[float], float] = float if is_difference else math.expm1
    estimate = float(scale(np.array(after)) - scale(np.array(before)))
    changed = replace(nothing, change=back(estimate))
    if not all(side.draws for side in sides.both):
        return changed
    below, above = _within(sides, figure, scale, estimate)
    half = _between(sides, figure, scale)
    if half is None:
        sizes = (before, after) if is_difference else (1.0, 1.0)
        spreads = (side.run_spread * size for side, size in zip(sides.both, sizes, strict=True))
        assumed = NORMAL_QUANTILE * math.hypot(*spreads)
        below, above = math.hypot(below, assumed), math.hypot(above, assumed)
    else:
        below, above = max(below, half), max(above, half)
    if not math.isfinite(below + above):
        return changed
    return replace(changed, low=back(estimate - below), high=back(estimate + above))


def _value(side: Side, figure: Figure, needs: int) -> float | None:
    if not side.columns or not side.measured[needs]:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(side.run_means.mean(axis=0)))
    return value if math.isfinite(value) else None


def _within(sides: Sides, figure: Figure, scale: Figure, estimate: float) -> tuple[float, float]:
    """Widest reach of the bootstrapped intervals below and above: spread of the steps."""
    below, above = 0.0, 0.0
    tail = 50 * (1 - CONFIDENCE)
    for before, after, *blocks in zip(
        sides.before.draws, sides.after.draws, sides.before.blocks, sides.after.blocks, strict=True
    ):
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = scale(figure(after)) - scale(figure(before))
        if not np.isfinite(drawn).all():  # a side that is 0 in a draw has no quotient
            return math.inf, math.inf
        low, high = (float(end) for end in np.percentile(drawn, (tail, 100 - tail)))
        factor = small_sample_factor(min(blocks))
        below, above = max(below, factor * (estimate - low)), max(above, factor * (high - estimate))
    return below, above


def _between(sides: Sides, figure: Figure, scale: Figure) -> float | None:
    """Half of Student's t interval: spread of the runs; ``None`` with one run per side."""
    with np.errstate(divide="ignore", invalid="ignore"):
        runs = [scale(figure(side.run_means)) for side in sides.both]
    if sides.paired:
        runs = [runs[1] - runs[0]]
    freedom = sum(len(values) - 1 for values in runs)
    if freedom == 0:
        return None
    variance = sum(float(((values - values.mean()) ** 2).sum()) for values in runs) / freedom
    return t_975(freedom) * math.sqrt(variance * sum(1 / len(values) for values in runs))
