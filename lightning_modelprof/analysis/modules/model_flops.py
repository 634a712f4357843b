"""FLOPs per step, and their share of the device's peak.

Source: PaLM (Chowdhery et al., 2022), appendix B: model FLOPs utilization (MFU) counts the forward and
backward pass once; hardware FLOPs utilization (HFU) also counts recomputation that saves memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.size_law import (
    FlopsBySize,
    MeanStep,
    Part,
    mean_step,
    why_not_by_size,
)
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import BatchSizes
from lightning_modelprof.run.model_cost import (
    FLOP_PHASES,
    FOURIER_OPERATORS,
    ModelCost,
    OperatorCount,
    PeakRate,
    StepCount,
)

MODEL_PHASES: Final = ("forward", "backward")
"""Phases that a step needs, however it's computed."""

_NO_PEAK: Final = 'the device\'s peak is unknown; set inspect={"peak_flops_per_s": ...}'


class OperatorFlops(Record, frozen=True, kw_only=True):
    """One operator in the counted step.

    Attributes:
        calls: in all phases.
        flops: FLOPs of each phase that has any.
        is_fourier: whether the totals exclude its FLOPs.
    """

    operator: str
    calls: int
    flops: dict[str, int]
    is_fourier: bool


class UncountedOperator(Record, frozen=True, kw_only=True):
    """An operator that may contain contractions and has no formula, or whose formula failed."""

    operator: str
    calls: int
    phases: tuple[str, ...]
    modules: tuple[str, ...]


class Utilization(Record, frozen=True, kw_only=True):
    """FLOPs relative to time and to the device's peak.

    Attributes:
        flops: of the mean clean step, with the optimizer's weighted by the share of steps in which it ran;
            ``None`` if batch sizes vary and it's unknown.
        flops_per_s: ``flops`` over the mean clean step time; ``None`` also without clean steps.
        share_of_peak: time needed at peak rates over time taken: MFU for model FLOPs, HFU for hardware
            FLOPs. ``None`` if a dtype has no peak.
    """

    flops: float | None
    flops_per_s: float | None
    share_of_peak: float | None


class ModelFlops(Record, frozen=True, kw_only=True):
    """FLOPs of one process's counted step by purpose, and FLOP/s of its clean steps.

    Attributes:
        phases: FLOPs without Fourier transforms, of each phase that ran.
        fourier: FLOPs of Fourier transforms by phase, 5 N log2 N.
        model_flops: forward and backward; ``None`` when no forward was counted.
        hardware_flops: all phases; ``None`` when nothing was counted.
        optimizer_share: share of clean steps with an optimizer step.
        operators: largest first.
        mean: mean clean step if steps differ in FLOPs; ``None`` if it's unknown, or if all clean steps are,
            to our knowledge, like the counted one.
        why_no_mean: why the mean clean step is unknown; ``""`` otherwise.
        are_sizes_known: whether each clean step's batch size is known; older versions didn't record it.
        without_peak: dtypes that compute and have no peak rate.
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
    mean: MeanStep | None
    why_no_mean: str
    are_sizes_known: bool
    model: Utilization
    hardware: Utilization
    peaks: tuple[PeakRate, ...]
    without_peak: tuple[str, ...]
    note: str


def model_flops(cost: ModelCost | None, step_ns: float | None, optimizer_share: float = 1.0) -> ModelFlops:
    """FLOPs of the counted step, and FLOP/s of the clean steps.

    Args:
        cost: result of counting; ``None`` when counting is off.
        step_ns: mean clean step time; ``None`` if there is none.
        optimizer_share: share of clean steps with an optimizer step. With accumulated gradients the counted
            step has all of the optimizer's FLOPs, the mean step only a part.
    """
    if cost is None:
        raise NotMeasured("not counted (set flops=True to count one step)")
    count = cost.count
    if count is None:
        raise NotMeasured(cost.count_note or "no step was counted")
    peaks = tuple(peak for peak in cost.peaks if not peak.is_measured)
    counted = [entry for entry in count.operators if not _is_fourier(entry)]
    phases = _by_phase(counted)
    mean, why_no_mean = None, ""
    try:
        mean = _mean_of_varying(cost, FlopsBySize(cost.size_counts), cost.batch_sizes)
    except NotMeasured as why:
        why_no_mean = why.reason
    alike = _by_part(counted)
    parts = None if why_no_mean else alike if mean is None else mean.flops
    optimizer = {part: flops * optimizer_share for part, flops in alike.items() if part[0] == "optimizer"}
    hardware = None if parts is None else _by_dtype({**parts, **optimizer})
    model = None if parts is None else _by_dtype({p: n for p, n in parts.items() if p[0] in MODEL_PHASES})
    # Fourier transforms count toward no total: if there is nothing else, the totals are 0, not unknown.
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
        mean=mean,
        why_no_mean=why_no_mean,
        are_sizes_known=cost.batch_sizes is not None and not cost.batch_sizes.other_steps,
        model=_utilization(model, peaks, step_ns),
        hardware=_utilization(hardware, peaks, step_ns),
        peaks=peaks,
        without_peak=tuple(sorted(_by_dtype(alike).keys() - {peak.dtype for peak in peaks})),
        note=cost.peak_note or (_NO_PEAK if len(peaks) < len(cost.peaks) else ""),
    )


def ideal_seconds(flops: Mapping[str, float], peaks: Sequence[PeakRate]) -> float | None:
    """Time at the device's peak rates; ``None`` if a dtype that computes has no peak."""
    rates = {peak.dtype: peak.flops_per_s for peak in peaks}
    if not flops or not flops.keys() <= rates.keys():
        return None
    return sum(amount / rates[dtype] for dtype, amount in flops.items())


def phases_of(parts: Mapping[Part, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for (phase, _), flops in parts.items():
        found[phase] = found.get(phase, 0) + flops
    return found


class ModelRates:
    """FLOP/s and MFU for one part of a loop's clean steps after another."""

    def __init__(self, cost: ModelCost) -> None:
        operators = () if cost.count is None else cost.count.operators
        self._cost = cost
        self._by_size = FlopsBySize(cost.size_counts)
        self._counted = _by_part(entry for entry in operators if not _is_fourier(entry))
        self._peaks = tuple(peak for peak in cost.peaks if not peak.is_measured)

    def of(self, sizes: BatchSizes | None, step_ns: float | None) -> Utilization:
        try:
            mean = _mean_of_varying(self._cost, self._by_size, sizes)
        except NotMeasured:
            return _utilization(None, self._peaks, step_ns)
        parts = self._counted if mean is None else mean.flops
        in_model = {part: flops for part, flops in parts.items() if part[0] in MODEL_PHASES}
        return _utilization(_by_dtype(in_model), self._peaks, step_ns)


def _mean_of_varying(cost: ModelCost, by_size: FlopsBySize, sizes: BatchSizes | None) -> MeanStep | None:
    """Mean clean step; ``None`` if all are like the counted one.

    Raises:
        NotMeasured: if they differ and some are unknown.
    """
    count = cost.count
    if sizes is None or count is None:
        return None
    differ = why_not_by_size(cost.size_counts)
    if differ:
        raise NotMeasured(differ)
    seen = [shapes for shapes, num in zip(sizes.shapes, sizes.clean_steps, strict=False) if num > 0]
    counted = next((one.shapes for one in cost.size_counts if one.step == count.step), None)
    if not seen or (seen == [counted] and not sizes.other_steps):
        return None
    try:
        return mean_step(by_size, sizes)
    except NotMeasured as why:
        note = cost.size_counts_note
        raise NotMeasured(f"{why.reason}; {note}" if note else why.reason) from None


def _utilization(
    flops: Mapping[str, float] | None, peaks: Sequence[PeakRate], step_ns: float | None
) -> Utilization:
    if flops is None:
        return Utilization(flops=None, flops_per_s=None, share_of_peak=None)
    total = sum(flops.values())
    if not step_ns or not total:
        return Utilization(flops=total, flops_per_s=None, share_of_peak=None)
    seconds, ideal = step_ns / 1e9, ideal_seconds(flops, peaks)
    return Utilization(
        flops=total,
        flops_per_s=total / seconds,
        share_of_peak=None if ideal is None else ideal / seconds,
    )


def _is_fourier(entry: OperatorCount) -> bool:
    return entry.operator in FOURIER_OPERATORS


def _by_phase(operators: Iterable[OperatorCount]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for entry in operators:
        if entry.flops is not None:
            totals[entry.phase] += entry.flops
    return {phase: totals[phase] for phase in FLOP_PHASES if phase in totals}


def _by_part(operators: Iterable[OperatorCount]) -> dict[Part, float]:
    totals: dict[Part, float] = {}
    for entry in operators:
        part = (entry.phase, entry.dtype)
        totals[part] = totals.get(part, 0) + (entry.flops or 0)
    return totals


def _by_dtype(parts: Mapping[Part, float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for (_, dtype), flops in parts.items():
        totals[dtype] = totals.get(dtype, 0) + flops
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
