"""FLOPs of a step, and what share of the device's peak they are.

Source: PaLM (Chowdhery et al., 2022), appendix B: model FLOPs utilization (MFU) counts the forward and
backward pass once, hardware FLOPs utilization (HFU) also what is computed again to save memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.run.model_cost import (
    FLOP_PHASES,
    FOURIER_OPERATORS,
    ModelCost,
    OperatorCount,
    PeakRate,
    StepCount,
)

MODEL_PHASES: Final = ("forward", "backward")
"""What a step needs, however it is computed."""

_NO_PEAK: Final = "no peak of the device is known; give peak_flops_per_s=..."


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlops:
    """One operator in the counted step.

    Attributes:
        calls: in all phases.
        flops: phase → FLOPs, of the phases in which it has any.
        is_fourier: whether its FLOPs are kept out of the totals.
    """

    operator: str
    calls: int
    flops: dict[str, int]
    is_fourier: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedOperator:
    """An operator that may hold contractions and has no formula, or one that failed."""

    operator: str
    calls: int
    phases: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """FLOPs against time, and against what the device could do.

    Attributes:
        flops_per_s: FLOPs per step over the mean time of a clean step, those of the optimizer by the share of
            steps in which it stepped; ``None`` without clean steps.
        share_of_peak: time that the device would need at its peak rates over the time that it took: MFU of
            the model's FLOPs, HFU of the hardware's. ``None`` when a dtype has no peak.
    """

    flops_per_s: float | None
    share_of_peak: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one step of one process, by what they are for.

    Attributes:
        count: where they come from.
        phases: phase → FLOPs without Fourier transforms, of the phases that ran.
        fourier: phase → FLOPs of Fourier transforms, 5 N log2 N.
        model_flops: forward and backward; ``None`` when no forward was counted.
        hardware_flops: all phases; ``None`` when nothing was counted.
        optimizer_share: of the clean steps, those in which the optimizer stepped.
        operators: largest first.
        uncounted: what is in no total.
        ideal_step_s: time of the model's FLOPs at the peak rates; ``None`` when a dtype has none.
        model, hardware: rates and shares.
        peaks: the rates that the shares are of.
        without_peak: dtypes that compute and have no rate.
        note: why a share is missing; ``""`` if none is.
    """

    count: StepCount
    phases: dict[str, int]
    fourier: dict[str, int]
    model_flops: int | None
    hardware_flops: int | None
    optimizer_share: float
    operators: tuple[OperatorFlops, ...]
    uncounted: tuple[UncountedOperator, ...]
    ideal_step_s: float | None
    model: Utilization
    hardware: Utilization
    peaks: tuple[PeakRate, ...]
    without_peak: tuple[str, ...]
    note: str


def model_flops(
    cost: ModelCost | None, step_ns: float | None, optimizer_share: float = 1.0
) -> ModelFlops | Absent:
    """FLOPs of the counted step.

    Args:
        cost: what was counted; ``None`` when counting is switched off.
        step_ns: mean time of a clean step; ``None`` if there is none.
        optimizer_share: of the clean steps, those in which the optimizer stepped. With accumulated gradients
            the counted step has all of its FLOPs, while the mean step has a part of them.
    """
    if cost is None:
        return Absent("not counted (flops=True counts one step)")
    count = cost.count
    if count is None:
        return Absent(cost.count_note or "no step was counted")
    peaks = tuple(peak for peak in cost.peaks if not peak.is_measured)
    counted = [entry for entry in count.operators if not _is_fourier(entry)]
    phases = _by_phase(counted)
    in_model = [entry for entry in counted if entry.phase in MODEL_PHASES]
    # Fourier transforms have FLOPs in no total: where they are all there is, the totals are 0, not unknown.
    has_flops = {entry.phase for entry in count.operators if entry.flops is not None}
    return ModelFlops(
        count=count,
        phases=phases,
        fourier=_by_phase(entry for entry in count.operators if _is_fourier(entry)),
        model_flops=sum(phases.get(phase, 0) for phase in MODEL_PHASES) if "forward" in has_flops else None,
        hardware_flops=sum(phases.values()) if has_flops else None,
        optimizer_share=optimizer_share,
        operators=_operators(count.operators),
        uncounted=_uncounted(count.operators),
        ideal_step_s=ideal_seconds(in_model, peaks),
        model=_utilization(in_model, peaks, step_ns),
        hardware=_utilization(counted, peaks, step_ns, optimizer_share),
        peaks=peaks,
        without_peak=tuple(sorted(_by_dtype(counted, 1).keys() - {peak.dtype for peak in peaks})),
        note=cost.peak_note or (_NO_PEAK if len(peaks) < len(cost.peaks) else ""),
    )


def ideal_seconds(
    operators: Iterable[OperatorCount], peaks: Sequence[PeakRate], optimizer_share: float = 1.0
) -> float | None:
    """Time of the FLOPs at the device's peak; ``None`` when a dtype that computes has none."""
    rates = {peak.dtype: peak.flops_per_s for peak in peaks}
    flops = _by_dtype(operators, optimizer_share)
    if not flops or not flops.keys() <= rates.keys():
        return None
    return sum(amount / rates[dtype] for dtype, amount in flops.items())


def _utilization(
    operators: Sequence[OperatorCount],
    peaks: Sequence[PeakRate],
    step_ns: float | None,
    optimizer_share: float = 1.0,
) -> Utilization:
    total = sum(_by_dtype(operators, optimizer_share).values())
    if not step_ns or not total:
        return Utilization(flops_per_s=None, share_of_peak=None)
    seconds = step_ns / 1e9
    ideal = ideal_seconds(operators, peaks, optimizer_share)
    return Utilization(flops_per_s=total / seconds, share_of_peak=None if ideal is None else ideal / seconds)


def _is_fourier(entry: OperatorCount) -> bool:
    return entry.operator in FOURIER_OPERATORS


def _by_phase(operators: Iterable[OperatorCount]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for entry in operators:
        if entry.flops is not None:
            totals[entry.phase] += entry.flops
    return {phase: totals[phase] for phase in FLOP_PHASES if phase in totals}


def _by_dtype(operators: Iterable[OperatorCount], optimizer_share: float) -> dict[str, float]:
    """FLOPs of a mean step."""
    totals: dict[str, float] = {}
    for entry in operators:
        share = optimizer_share if entry.phase == "optimizer" else 1
        totals[entry.dtype] = totals.get(entry.dtype, 0) + (entry.flops or 0) * share
    return {dtype: flops for dtype, flops in totals.items() if flops}


def _operators(operators: Iterable[OperatorCount]) -> tuple[OperatorFlops, ...]:
    calls: Counter[str] = Counter()
    flops: dict[str, Counter[str]] = {}
    for entry in operators:
        if entry.flops is not None:
            calls[entry.operator] += entry.calls
            flops.setdefault(entry.operator, Counter())[entry.phase] += entry.flops
    found = (
        OperatorFlops(
            operator=name,
            calls=calls[name],
            flops={phase: by_phase[phase] for phase in FLOP_PHASES if phase in by_phase},
            is_fourier=name in FOURIER_OPERATORS,
        )
        for name, by_phase in flops.items()
    )
    return tuple(sorted(found, key=lambda entry: (-sum(entry.flops.values()), entry.operator)))


def _uncounted(operators: Iterable[OperatorCount]) -> tuple[UncountedOperator, ...]:
    missing: dict[str, list[OperatorCount]] = {}
    for entry in operators:
        if entry.flops is None:
            missing.setdefault(entry.operator, []).append(entry)
    return tuple(
        UncountedOperator(
            operator=name,
            calls=sum(entry.calls for entry in entries),
            phases=tuple(phase for phase in FLOP_PHASES if any(entry.phase == phase for entry in entries)),
            modules=tuple(dict.fromkeys(entry.module for entry in entries)),
        )
        for name, entries in sorted(missing.items())
    )
