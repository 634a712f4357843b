"""One figure of two sides of runs: both values, the change, and the interval that the change is in."""

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
"""Clean steps that a side needs for an interval."""

ASSUMED_RUN_SPREAD: Final = 0.01
"""Relative standard deviation between runs of the same thing, added where one run a side cannot show it.

Source: an assumption, and a low one. T. Mytkowicz et al., Producing Wrong Data Without Doing Anything
Obviously Wrong, ASPLOS 2009, found several per cent from the order of linking and the size of the environment
alone; ``benchmarks/compare_power.py`` prints what fits of the same thing differ on a machine."""

Floats = NDArray[np.floating[Any]]
Figure = Callable[[Floats], Floats]
"""From the means of a run's columns, shape (..., columns), to a figure, shape (...)."""

_DURATION: Final = len(PHASES)
SAMPLES: Final = len(PHASES) + 1
"""Column of the samples of a step; those of the phases come first, in their order."""


class Change(Record, frozen=True, kw_only=True):
    """One figure on both sides.

    Attributes:
        before, after: the figure, of several runs from the mean of their means; ``None`` if not measured.
        change: after / before - 1, or after - before where ``is_difference``; ``None`` if not measured, or if
            there is no quotient because a side is 0.
        low, high: ends of the 95 % interval of ``change``; ``None`` as above, or with too few steps.
    """

    key: str
    before: float | None
    after: float | None
    change: float | None
    low: float | None
    high: float | None
    is_difference: bool = False


class Outcome(Enum):
    """What a comparison says; see :func:`decide`."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    CANNOT_TELL = "cannot_tell"


class Comparison(Record, frozen=True, kw_only=True):
    """How two sides differ, and what follows from it.

    Attributes:
        reason: why the decision is not another one; ``""`` where the interval says it all.
        per_sample: whether the time per sample decides, because the steps hold different numbers of samples.
        times_as_fast: time before / time after; ``None`` when a side has no clean step.
        low, high: ends of its 95 % interval; ``None`` with too few steps.
        detectable: smallest change of the time, as a fraction, that would be seen in four of five such
            comparisons; ``None`` without an interval.
        num_steps: clean steps before and after, of all runs.
        num_runs: runs before and after.
        paired: whether the runs of both sides took turns and are compared pair by pair.
        phases: difference in time per step of each phase that took time on any side.
        block_lengths: tried lengths of blocks in steps, one tuple for each run before, then after.
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
    """What the clean steps of the runs of one side say.

    Attributes:
        columns: per run, shape (clean steps, columns): time in each phase, step time, samples.
        measured: shape (columns,): whether a column is measured in every clean step of every run.
        lengths: per run, the tried lengths of blocks.
        draws: per tried length, shape (resamples, columns): means of the side, drawn anew.
        blocks: per tried length, the number of blocks.
        run_spread: relative standard deviation that is assumed between runs when there is one a side.
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
        """Shape (runs, columns); every run counts the same, however long it is."""
        return np.array([columns.mean(axis=0) for columns in self.columns])


class Sides(NamedTuple):
    """What is compared; ``paired`` says that run i of both sides are neighbours in time."""

    before: Side
    after: Side
    paired: bool

    @property
    def both(self) -> tuple[Side, Side]:
        return self.before, self.after


def side_of(runs: Sequence[StepTimings]) -> Side:
    """What the runs of a side say; without draws when their clean steps are too few.

    Args:
        runs: of which those without a clean step are left out.
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
    """Phases that took time on any side, with what is not measured on one."""
    found = []
    for index, phase in enumerate(PHASES):
        took_time = any((run[:, index] != 0).any() for side in sides.both for run in side.columns)
        if took_time:
            found.append(change_of(phase.key, sides, _phase_time(index), needs=index, is_difference=True))
    return tuple(found)


def change_of(
    key: str, sides: Sides, figure: Figure, *, needs: int = _DURATION, is_difference: bool = False
) -> Change:
    """One figure on both sides, its change and the interval of that.

    Args:
        needs: column that it needs besides the step's time.
        is_difference: whether the change is a difference; else it is a quotient, on whose logarithm the
            interval is made, so that exchanged sides give the inverse.
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
    """How far the bootstrapped intervals reach below and above: what the spread of the steps says."""
    below, above = 0.0, 0.0
    tail = 50 * (1 - CONFIDENCE)
    for before, after, *blocks in zip(
        sides.before.draws, sides.after.draws, sides.before.blocks, sides.after.blocks, strict=True
    ):
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = scale(figure(after)) - scale(figure(before))
        if not np.isfinite(drawn).all():  # a side that is 0 in some draw has no quotient there
            return math.inf, math.inf
        low, high = (float(end) for end in np.percentile(drawn, (tail, 100 - tail)))
        factor = small_sample_factor(min(blocks))
        below, above = max(below, factor * (estimate - low)), max(above, factor * (high - estimate))
    return below, above


def _between(sides: Sides, figure: Figure, scale: Figure) -> float | None:
    """Half of the interval by Student's t: what the spread of the runs says; ``None`` with one run a side."""
    with np.errstate(divide="ignore", invalid="ignore"):
        runs = [scale(figure(side.run_means)) for side in sides.both]
    if sides.paired:
        runs = [runs[1] - runs[0]]
    freedom = sum(len(values) - 1 for values in runs)
    if freedom == 0:
        return None
    variance = sum(float(((values - values.mean()) ** 2).sum()) for values in runs) / freedom
    return t_975(freedom) * math.sqrt(variance * sum(1 / len(values) for values in runs))
