"""FLOPs: what a step computes, how fast, and which operators it is made of."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.analysis.model_flops import ModelFlops, UncountedOperator, Utilization
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import ReportOptions
from lightning_modelprof.run.model_cost import FLOP_PHASES

_LABELS: Final = {
    "forward": "Forward",
    "backward": "Backward",
    "recompute": "Recompute",
    "optimizer": "Optimizer",
}
_MAX_NAMED: Final = 5
_DEFINITION: Final = (
    "Contractions only: matrix products, convolutions, attention, recurrent gates. 1 MAC is 2 FLOPs."
)
_NOTHING: Final = "no operator with FLOPs ran in the counted step"
_RATIO: Final = "Ratio: of all that the hardware computes."


def flop_tables(analysis: Analysis, options: ReportOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """FLOPs of a step by what they are for, and by operator.

    Definition: counted on one real step while it ran. FLOP/s are FLOPs of that step over the mean time of a
    clean step; MFU and HFU the share of the device's dense peak in the dtypes that were used.
    """
    if analysis.cost is None:
        return ()
    return _phases(analysis.flops, analysis.info.sample_unit), _operators(analysis.flops)


def _phases(facts: ModelFlops | Absent, unit: str) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = ()
    depths: tuple[int, ...] = ()
    share = "MFU / HFU"
    notes: tuple[str, ...] = ()
    if not isinstance(facts, Absent) and facts.count.operators:
        rows, depths = _phase_rows(facts)
        notes = _phase_notes(facts)
        share = share if facts.is_mfu else "Of matmul rate"
    return Table(
        id="flops",
        title="FLOPs",
        columns=(
            Column("part", "Part of a step"),
            Column("flops", "FLOPs", Unit.FLOPS),
            Column("macs", "MACs", Unit.MACS),
            Column("ratio", "Ratio(%)", Unit.RATIO),
            Column("flops_per_sample", f"Per {unit.removesuffix('s')}", Unit.FLOPS),
            Column("flops_per_s", "FLOP/s", Unit.FLOPS_PER_S),
            Column("share_of_peak", share, Unit.RATIO),
        ),
        rows=rows,
        depths=depths,
        notes=notes,
        absent_reason=facts.reason if isinstance(facts, Absent) else None if rows else _NOTHING,
    )


def _phase_rows(facts: ModelFlops) -> tuple[tuple[tuple[Cell, ...], ...], tuple[int, ...]]:
    samples, hardware = facts.count.samples, facts.hardware_flops

    def row(label: str, flops: int | None, utilization: Utilization | None) -> tuple[Cell, ...]:
        return (
            label,
            flops,
            None if flops is None else flops // 2,
            flops / hardware if hardware and flops is not None else None,
            flops / samples if samples and flops is not None else None,
            utilization.flops_per_s if utilization else None,
            utilization.share_of_peak if utilization else None,
        )

    rows = [(0, row("Model: forward and backward", facts.model_flops, facts.model))]
    rows += [
        (1, row(_LABELS[phase], facts.phases[phase], None))
        for phase in FLOP_PHASES[:2]
        if phase in facts.phases
    ]
    rows.append((0, row("Hardware: all that ran", hardware, facts.hardware)))
    rows += [
        (1, row(_LABELS[phase], facts.phases[phase], None))
        for phase in FLOP_PHASES[2:]
        if phase in facts.phases
    ]
    return tuple(cells for _, cells in rows), tuple(depth for depth, _ in rows)


def _phase_notes(facts: ModelFlops) -> tuple[str, ...]:
    count = facts.count
    if count.on_fake_tensors:
        where = "Counted on a copy of the model without data, as compiled models are."
    else:
        where = (
            "Counted while the model ran." if count.step is None else f"Counted while step {count.step} ran."
        )
    notes = [f"{where} {_DEFINITION}"]
    if facts.uncounted:
        notes.append(
            f"Not in these figures, which are too low by as much: {_names(facts.uncounted)}."
            " Give flop_formulas={operator: formula} to count them."
        )
    if facts.fourier:
        total = sum(facts.fourier.values())
        notes.append(f"Fourier transforms, 5 N log2 N, are {total:,} FLOPs more, in no figure here.")
    notes += [f"A formula failed: {error}." for error in count.errors]
    notes += _peak_notes(facts)
    return tuple(notes)


def _peak_notes(facts: ModelFlops) -> list[str]:
    notes = [
        f"{'Matmul rate' if peak.is_measured else 'Peak'} of {peak.dtype}: {peak.source}."
        for peak in facts.peaks
    ]
    if facts.peaks and not facts.is_mfu:
        notes.append("The share is of the matmul rate that was measured here, so it is no MFU.")
    if facts.note:
        notes.append(f"{facts.note[0].upper()}{facts.note[1:].removesuffix('.')}.")
    return notes


def _names(uncounted: tuple[UncountedOperator, ...]) -> str:
    named = [f"{entry.operator} ({entry.calls} calls)" for entry in uncounted[:_MAX_NAMED]]
    more = len(uncounted) - len(named)
    return ", ".join(named) + (f" and {more} more operators" if more else "")


def _operators(facts: ModelFlops | Absent) -> Table:
    rows: list[tuple[Cell, ...]] = []
    notes: tuple[str, ...] = ()
    if not isinstance(facts, Absent):
        for entry in facts.operators:
            total = sum(entry.flops.values())
            is_in = not entry.is_fourier and facts.hardware_flops > 0
            rows.append(
                (
                    entry.operator,
                    entry.calls,
                    total,
                    total / facts.hardware_flops if is_in else None,
                    *(entry.flops.get(phase) for phase in FLOP_PHASES),
                )
            )
        rows += [(entry.operator, entry.calls, *[None] * (2 + len(FLOP_PHASES))) for entry in facts.uncounted]
        notes = (f"{_RATIO} A dash in FLOPs: no formula knows the operator.",)
    return Table(
        id="flops_by_operator",
        title="FLOPs by operator",
        columns=(
            Column("operator", "Operator"),
            Column("calls", "Calls", Unit.COUNT),
            Column("flops", "FLOPs", Unit.FLOPS),
            Column("ratio", "Ratio(%)", Unit.RATIO),
            *(Column(f"{phase}_flops", _LABELS[phase], Unit.FLOPS) for phase in FLOP_PHASES),
        ),
        rows=tuple(rows),
        notes=notes,
        absent_reason=facts.reason if isinstance(facts, Absent) else None if rows else _NOTHING,
        is_detail=True,
    )
