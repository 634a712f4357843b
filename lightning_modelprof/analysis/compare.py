"""Compare two runs, or several per side: which is faster, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from lightning_modelprof.analysis.change import (
    FEW_STEPS,
    SAMPLES,
    Change,
    Comparison,
    Outcome,
    Sides,
    change_of,
    phase_changes,
    side_of,
    speed_figures,
    step_time,
    time_per_sample,
)
from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.statistics import NORMAL_QUANTILE
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings

POWER: Final = 0.8


DEFAULT_TOLERANCE: Final = 0.05


_OVERWHELMING_STEPS: Final = 5


_OVERWHELMING_RATIO: Final = 1.5


def compare(
    before: Sequence[StepTimings],
    after: Sequence[StepTimings],
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    per_sample: bool = False,
    ranks: tuple[int, int] = (1, 1),
    paired: bool = False,
) -> Comparison:
    """Compare the clean steps of two sides.

    Args:
        before: steps of one or more runs, in order of time.
        after: the same for the other side.
        tolerance: relative change in time that doesn't matter.
        per_sample: let the time per sample over all ranks decide instead of the step time.
        ranks: world size before and after; matters only for the time per sample.
        paired: run i before and run i after ran back to back, so that a machine that slows down or speeds up
            over all runs doesn't count.

    Definition: the time of a side is the mean over its runs of each run's mean over clean steps. The interval
    is the widest of these. For each of three block lengths: the percentiles of quotients of resampled means
    (circular block bootstrap), which reflect how much the steps vary. With more than one run on either side:
    Student's t for the logarithms of the runs' means, which reflects how much the runs vary, over the pairs
    if ``paired``, else with one relative spread for both sides. With one run per side,
    ``ASSUMED_RUN_SPREAD`` and the drift within the runs (``drift_within``) are added to the first in
    quadrature, since runs differ by more than their steps show.

    Source: T. Kalibera and R. Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013 (repeat at the
    highest level that varies, report an interval of the quotient); T. J. DiCiccio and B. Efron, Bootstrap
    Confidence Intervals, Statistical Science 11 (1996); taking turns: A. Abedi and T. Brecht, Conducting
    Repeatable Experiments in Highly Variable Cloud Computing Environments, ICPE 2017; for blocks see
    ``analysis/statistics.py``.

    Raises:
        ValueError: when ``paired`` and the sides have different numbers of runs.

    Caveats: with one run per side, a slower machine can't be distinguished from slower code.
    """
    sides = _sides_of(before, after, paired=paired)
    num_steps = (sides.before.num_steps, sides.after.num_steps)
    deciding = _deciding_change(sides, ranks, per_sample=per_sample)
    outcome, reason = decide(deciding, num_steps, tolerance)
    if outcome is Outcome.CANNOT_TELL and deciding.change is not None and min(num_steps) < FEW_STEPS:
        outcome, reason = _overwhelming(sides, ranks, reason, per_sample=per_sample)
    return Comparison(
        outcome=outcome,
        reason=reason,
        tolerance=tolerance,
        per_sample=per_sample,
        times_as_fast=_times_as_fast(deciding.change),
        low=_times_as_fast(deciding.high),
        high=_times_as_fast(deciding.low),
        detectable=detectable_change(deciding),
        num_steps=num_steps,
        num_runs=(len(before), len(after)),
        paired=sides.paired,
        figures=speed_figures(sides),
        phases=phase_changes(sides),
        block_lengths=sides.before.lengths + sides.after.lengths,
    )


def _times_as_fast(change: float | None) -> float | None:
    """From the change in time; ``None`` if unknown, or if all time is gone but for rounding."""
    return None if change is None or change <= -1 else 1 / (1 + change)


def _sides_of(before: Sequence[StepTimings], after: Sequence[StepTimings], *, paired: bool) -> Sides:
    if paired and len(before) != len(after):
        raise ValueError(
            f"compare: expected as many runs before as after, got {len(before)} and {len(after)}"
        )
    sides = Sides(side_of(before), side_of(after), paired=paired)
    if len(sides.before.columns) != len(before) or len(sides.after.columns) != len(after):
        sides = sides._replace(paired=False)  # a run without a clean step has no partner
    return sides


def _deciding_change(sides: Sides, ranks: tuple[int, int], *, per_sample: bool) -> Change:
    if not per_sample:
        return change_of("step_time", sides, step_time)
    of_a_rank = change_of("time_per_sample", sides, time_per_sample, needs=SAMPLES)
    return _times(of_a_rank, ranks[0] / ranks[1])


def decide(change: Change, num_steps: tuple[int, int], tolerance: float) -> tuple[Outcome, str]:
    """Verdict, and the reason if there is none.

    Args:
        change: of the time: after / before - 1.
        tolerance: fraction of the time before for slower, of the time after for faster, so that swapping
            the sides gives the opposite.

    Definition: *same* if the whole interval is within the tolerance; otherwise *slower* (*faster*) if the
    interval excludes 0 and the change itself exceeds the tolerance; otherwise *cannot tell*.
    """
    if change.change is None:
        which = " and ".join(name for name, n in zip(("before", "after"), num_steps, strict=True) if n == 0)
        if which:
            return Outcome.CANNOT_TELL, f"no clean step {which}"
        if change.before is None or change.after is None:
            return Outcome.CANNOT_TELL, "the sample count of one side is unknown"
        return Outcome.CANNOT_TELL, "one side took no measurable time"
    if change.low is None or change.high is None:
        return Outcome.CANNOT_TELL, (
            f"{num_steps[0]} and {num_steps[1]} clean steps are too few to know how much they vary; each"
            f" side needs {FEW_STEPS}"
        )
    slower, faster = tolerance, 1 / (1 + tolerance) - 1
    if faster <= change.low and change.high <= slower:
        return Outcome.SAME, ""
    if change.low > 0:
        if change.change > slower:
            return Outcome.SLOWER, ""
        return Outcome.CANNOT_TELL, "slower, but the interval includes changes below and above the tolerance"
    if change.high < 0:
        if change.change < faster:
            return Outcome.FASTER, ""
        return Outcome.CANNOT_TELL, "faster, but the interval includes changes below and above the tolerance"
    return (
        Outcome.CANNOT_TELL,
        "too noisy: the interval includes both no change and a change beyond the tolerance",
    )


def detectable_change(change: Change) -> float | None:
    """Smallest relative change in time that such runs show in four of five comparisons.

    Source: H. S. Bloom, Minimum Detectable Effects, Evaluation Review 19 (1995): the sum of the quantiles of
    confidence and of power, times the standard error; here on the logarithm of the quotient.
    """
    if change.low is None or change.high is None:
        return None
    half = (math.log1p(change.high) - math.log1p(change.low)) / 2
    return math.expm1(half * (1 + NormalDist().inv_cdf(POWER) / NORMAL_QUANTILE))


def _times(change: Change, factor: float) -> Change:
    """Change after multiplying the time after by ``factor``."""

    def scaled(value: float | None) -> float | None:
        return None if value is None else (1 + value) * factor - 1

    return replace(change, change=scaled(change.change), low=scaled(change.low), high=scaled(change.high))


def _overwhelming(
    sides: Sides, ranks: tuple[int, int], reason: str, *, per_sample: bool
) -> tuple[Outcome, str]:
    """Verdict from few steps, if every step of one side is far from every step of the other."""
    if min(side.num_steps for side in sides.both) < _OVERWHELMING_STEPS:
        return Outcome.CANNOT_TELL, reason
    figure = time_per_sample if per_sample else step_time
    before, after = (np.concatenate([figure(run) for run in side.columns]) for side in sides.both)
    if per_sample:
        after = after * ranks[0] / ranks[1]  # of all ranks, as in _deciding_change
    said = f"despite few steps, every one is over {_OVERWHELMING_RATIO:g} times "
    if after.min() > _OVERWHELMING_RATIO * before.max():
        return Outcome.SLOWER, said + "as long as any before"
    if before.min() > _OVERWHELMING_RATIO * after.max():
        return Outcome.FASTER, said + "as short as any before"
    return Outcome.CANNOT_TELL, reason


UNKNOWN: Final = "unknown"


_SETUP_NUMBERS: Final = (
    "usable_cpus",
    "local_world_size",
    "manual_optimization",
    "num_trainable_tensors",
    "log_every_n_steps",
    "val_check_interval",
    "check_every_n_epochs",
    "num_val_batches",
    "gradient_clip_val",
    "matmul_precision",
)
"""Fields of ``TrainingSetup`` with a single value; dataloaders and optimizers are handled below."""


_WHERE_FILES_GO: Final = frozenset({"dirpath"})
"""Callback arguments that differ between any two runs without any effect."""


def batch_size(steps: StepTimings) -> float | None:
    """Samples per typical step: the median over the clean steps; ``None`` if unknown."""
    samples = steps.clean().samples
    if len(samples) == 0 or (samples == NOT_MEASURED).any():
        return None
    return float(np.median(samples))


def run_settings(facts: Facts) -> dict[str, str]:
    """Settings that may explain a difference between runs, in reading order."""
    info = facts.info
    tree = facts.get(Facts.modules)
    root = None if tree is None else tree.root
    samples = batch_size(facts.steps)
    values: dict[str, Any] = {
        "model": info.model or UNKNOWN,
        "model parameters": UNKNOWN if root is None else root.parameters,
        "trainable parameters": UNKNOWN if root is None else root.trainable,
        f"{info.sample_unit} per step": UNKNOWN if samples is None else samples,
        "accumulate_grad_batches": info.accumulate_grad_batches,
        "precision": info.precision or UNKNOWN,
        "device": f"{info.device_type} {info.device_name}".strip(),
        "threads": UNKNOWN if info.num_threads is None else info.num_threads,
        "world size": info.world_size,
        "strategy": info.strategy or UNKNOWN,
        **dict(_setup(facts)),
        **{f"{name} version": version for name, version in info.versions.items()},
        **{f"callback: {key}": value for key, value in info.config.items() if key not in _WHERE_FILES_GO},
    }
    return {name: _text(value) for name, value in values.items()}


def setting_differences(
    before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]
) -> tuple[tuple[str, str, str], ...]:
    """Settings that differ between the sides, as (name, before, after) with several values joined."""
    names = dict.fromkeys(name for run in (*before, *after) for name in run)
    found = []
    for name in names:
        sides = [tuple(dict.fromkeys(run.get(name, UNKNOWN) for run in side)) for side in (before, after)]
        # A setting missing on one side (another version or other arguments) is no difference.
        if set(sides[0]) != set(sides[1]) and (UNKNOWN,) not in sides:
            found.append((name, " | ".join(sides[0]), " | ".join(sides[1])))
    return tuple(found)


def _setup(facts: Facts) -> Iterator[tuple[str, Any]]:
    known = facts.get(Facts.setup)
    if known is None:
        return
    setup = asdict(known)
    for kind, members in (("dataloader", setup["loaders"]), ("optimizer", setup["optimizers"])):
        for index, member in enumerate(members):
            label = kind if len(members) == 1 else f"{kind} {index}"
            for key, value in member.items():
                yield f"{label}: {key}", value["function"] if isinstance(value, dict) else value
    yield "callbacks", ", ".join(callback["callback"] for callback in setup["callbacks"]) or "none"
    yield "loggers", ", ".join(logger["function"] for logger in setup["loggers"]) or "none"
    for name in _SETUP_NUMBERS:
        yield name, setup[name]
    yield "torch.compile", "no" if setup["compiled"] is None else "yes"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
