"""FLOPs: what a step computes, how fast, and with which operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.model_flops import (
    MODEL_PHASES,
    ModelFlops,
    OperatorFlops,
    UncountedOperator,
    Utilization,
    phases_of,
)
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.batches import Shapes
from lightning_modelprof.run.loops import loop_of

_LABELS: Final = {
    "forward": "Forward",
    "backward": "Backward",
    "recompute": "Recompute",
    "optimizer": "Optimizer",
}
_MAX_NAMED: Final = 5
_MAX_SIZES: Final = 20
_MAX_SHAPES: Final = 4
_NOTHING: Final = "no operator with FLOPs ran in the counted step"


FLOPS: Final = TableSpec(
    id="flops",
    title="FLOPs",
    help=(
        "FLOPs per step, counted during one real step and divided by the clean step time. What counts as a"
        " FLOP, and how fvcore, DeepSpeed, torchinfo and `FlopCounterMode` count the same 31 models, is in"
        " [flops.md](flops.md)."
    ),
    columns=(
        ColumnSpec("part", "Part of the step"),
        ColumnSpec(
            "flops",
            "FLOPs",
            Unit.FLOPS,
            help="FLOPs of the counted step, or of the mean clean step if batch sizes vary.",
        ),
        ColumnSpec(
            "macs",
            "MACs",
            Unit.MACS,
            help=(
                "multiply-adds (1 MAC is 2 FLOPs) of the counted step, or of the mean clean step if batch"
                " sizes vary."
            ),
        ),
        ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, help="share of Hardware FLOPs."),
        ColumnSpec(
            "flops_per_sample",
            "Per sample",
            Unit.FLOPS,
            help="FLOPs divided by that step's samples.",
        ),
        ColumnSpec("flops_per_s", "FLOP/s", Unit.FLOPS_PER_S, help="FLOPs of the clean steps / their time."),
        ColumnSpec(
            "share_of_peak",
            "MFU / HFU",
            Unit.RATIO,
            help=(
                "model or hardware FLOPs utilization (Chowdhery et al., *PaLM*, 2022, appendix B): time the"
                " FLOPs would take at the device's peak ÷ time of the clean steps. Each dtype uses its own"
                " peak, and all figures are for one rank. A dash means that a dtype has no known peak, as"
                " on CPUs without `peak_flops_per_s`. Uncounted operators make it too low."
            ),
        ),
    ),
    depth_of=itemgetter("depth"),
    rows={
        "Model": "forward and backward, the FLOPs needed per step, however they're computed.",
        "Forward": (
            "forward FLOPs of contractions (matmuls, convolutions, attention and recurrent gates)."
            " Norms, activations, biases, pooling and lookups count as 0."
        ),
        "Backward": (
            "backward FLOPs of contractions. This is twice the forward if all gradients are needed, and"
            " less if the first layer's input needs none."
        ),
        "Hardware": (
            "all FLOPs that ran, Model plus Recompute plus Optimizer. In FLOP/s, HFU and Per sample,"
            " optimizer FLOPs are scaled by the share of clean steps in which it stepped"
            " (`optimizer_share`). In `report.json`, `hardware_flops` is `null` if no operator has a"
            " formula, and 0 if only Fourier transforms ran."
        ),
        "Recompute": (
            "forward work done again, for checkpointed layers and for scores that a fused attention"
            " backward recomputes (one of its five products)."
        ),
        "Optimizer": (
            "contractions in the optimizer's step, as in Muon or Shampoo. The row is hidden if there are"
            " none."
        ),
    },
    place=140,
    views=("modules",),
)


@run_table(FLOPS, needs=Facts.cost)
def flops_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    flops, unit = facts.flops, facts.info.sample_unit
    if not flops.count.operators:
        raise NotMeasured(_NOTHING)
    figures = facts.get(Facts.benchmark)
    rows = _phase_rows(flops, None if figures is None else figures.samples_per_step)
    notes = _phase_notes(flops)
    if flops.count.samples is None and facts.samples_note:
        notes = (*notes, f"FLOPs per {unit.removesuffix('s')} are unknown: {facts.samples_note}.")
    yield FLOPS.table(
        rows,
        labels={"flops_per_sample": f"Per {unit.removesuffix('s')}"},
        notes=notes,
    )


def _phase_rows(facts: ModelFlops, samples_per_step: float | None) -> list[dict[str, Any]]:
    phases: dict[str, float] = dict(facts.phases)
    model: float | None = facts.model_flops
    hardware: float | None = facts.hardware_flops
    samples: float | None = facts.count.samples
    # With gradient accumulation, a mean step has only part of the optimizer's FLOPs.
    not_in_mean_step = phases.get("optimizer", 0) * (1 - facts.optimizer_share)
    if facts.mean is not None:
        optimizer_flops = {phase: flops for phase, flops in phases.items() if phase == "optimizer"}
        phases = phases_of(facts.mean.flops) | optimizer_flops
        model = sum(phases.get(phase, 0) for phase in MODEL_PHASES)
        hardware = sum(phases.values())
        samples = samples_per_step
    elif facts.why_no_mean:
        samples = None

    def row(
        label: str,
        flops: float | None,
        *,
        depth: int = 0,
        utilization: Utilization | None = None,
        left_out: float = 0,
    ) -> dict[str, Any]:
        whole = None if flops is None else round(flops)
        return {
            "part": label,
            "depth": depth,
            "flops": whole,
            "macs": None if whole is None else whole // 2,
            "ratio": share(flops, hardware),
            "flops_per_sample": None if flops is None else share(flops - left_out, samples),
            "flops_per_s": None if utilization is None else utilization.flops_per_s,
            "share_of_peak": None if utilization is None else utilization.share_of_peak,
        }

    parts = {
        phase: row(label, phases[phase], depth=1, left_out=not_in_mean_step if phase == "optimizer" else 0)
        for phase, label in _LABELS.items()
        if phase in phases
    }
    return [
        row("Model", model, utilization=facts.model),
        *(part for phase, part in parts.items() if phase in MODEL_PHASES),
        row("Hardware", hardware, utilization=facts.hardware, left_out=not_in_mean_step),
        *(part for phase, part in parts.items() if phase not in MODEL_PHASES),
    ]


def _phase_notes(facts: ModelFlops) -> tuple[str, ...]:
    count = facts.count
    if count.on_fake_tensors:
        why = f" because {count.copy_reason}" if count.copy_reason else ""
        where = f"Counted on a copy of the model without data and without the optimizer{why}."
    else:
        where = "Counted while the model ran." if count.step is None else f"Counted during step {count.step}."
    notes = [where, *_size_notes(facts)]
    if facts.uncounted:
        notes.append(
            f"Uncounted operators, which make these figures too low: {_names(facts.uncounted)}. Set"
            f' inspect={{"flop_formulas": ...}} to count them.'
        )
    if facts.fourier:
        total = sum(facts.fourier.values())
        notes.append(f"Fourier transforms (5 N log2 N) add {total:,} FLOPs, which no figure here includes.")
    notes += [f"A formula failed: {error}." for error in count.errors]
    if facts.phases.get("optimizer") and facts.optimizer_share < 1:
        notes.append(
            f"The optimizer stepped in {100 * facts.optimizer_share:.3g}% of the clean steps. Per sample,"
            " FLOP/s and HFU include that share of its FLOPs."
        )
    if facts.hardware.flops and facts.hardware.flops_per_s is None:
        notes.append("There are no clean steps, so FLOP/s and MFU are unknown.")
    notes += _peak_notes(facts)
    return tuple(notes)


def _size_notes(facts: ModelFlops) -> list[str]:
    mean = facts.mean
    if facts.why_no_mean:
        return [
            f"No FLOP/s and no shares: {facts.why_no_mean}. FLOPs and MACs are those of the counted step.",
        ]
    if mean is None and not facts.are_sizes_known and facts.model.flops_per_s is not None:
        return ["Batch sizes are unknown, so every step is assumed to cost as much as the counted one."]
    if mean is None:
        return []
    fitted = "each size was counted"
    if mean.num_fitted:
        fitted = (
            f"{mean.num_counted} sizes were counted and {mean.num_fitted} fitted (standard error"
            f" {_percent(mean.error)})"
        )
    return [f"Batch sizes vary, so all figures are for the mean clean step; {fitted}."]


def _percent(share: float) -> str:
    return "less than 0.1%" if share < 0.001 else f"{100 * share:.1f}%"


FLOPS_BY_SIZE: Final = TableSpec(
    id="flops_by_size",
    title="FLOPs by batch size",
    help="Shown if batch sizes vary. The 20 most frequent sizes come first.",
    columns=(
        ColumnSpec(
            "batch", "Batch", help="shapes of the batch's tensors.", of=lambda row: size_text(row.shapes)
        ),
        ColumnSpec(
            "clean_steps", "Clean steps", Unit.COUNT, adds_up=True, help="clean steps with this size."
        ),
        ColumnSpec(
            "flops",
            "FLOPs",
            Unit.FLOPS,
            help="forward, backward and recompute FLOPs per step.",
            of=lambda row: None if row.flops is None else round(row.flops),
        ),
        ColumnSpec("source", "From", help="counted, or fitted from the counted sizes (see FLOPs)."),
    ),
    place=150,
    views=("modules",),
)


@run_table(FLOPS_BY_SIZE, needs=Facts.flops)
def flops_by_size_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """List FLOPs per step by batch size, if batch sizes vary."""
    mean, step = facts.flops.mean, loop_of(facts.info.loop).step
    if mean is None:
        return
    shown, left_out = mean.rows[:_MAX_SIZES], mean.rows[_MAX_SIZES:]
    notes = []
    if left_out:
        steps = sum(row.clean_steps for row in left_out)
        notes.append(f"{len(left_out):,} more sizes ({steps:,} clean steps) aren't shown.")
    yield FLOPS_BY_SIZE.table(
        shown,
        of={
            "source": lambda row: (
                "fitted" if row.counted_step is None else f"counted in {step} {row.counted_step}"
            )
        },
        notes=tuple(notes),
        is_detail=True,
    )


def size_text(shapes: Shapes) -> str:
    """Format a batch's shapes for readers."""
    text = [" x ".join(map(str, shape)) or "a number" for shape in shapes[:_MAX_SHAPES]]
    more = len(shapes) - len(text)
    return ", ".join(text) + (f" and {more} more" if more else "")


def _peak_notes(facts: ModelFlops) -> list[str]:
    notes = [f"Peak of {peak.dtype}: {_flop_rate(peak.flops_per_s)}, {peak.source}." for peak in facts.peaks]
    shares = (facts.model.share_of_peak, facts.hardware.share_of_peak)
    if any(share is not None and share > 1 for share in shares):
        notes.append(
            'MFU is above 100%, so the assumed peak is too low. Set inspect={"peak_flops_per_s": ...}.'
        )
    if facts.without_peak:
        notes.append(f"MFU and HFU require the device's peak for {', '.join(facts.without_peak)}.")
    if facts.note:
        notes.append(f"{facts.note[0].upper()}{facts.note[1:].removesuffix('.')}.")
    return notes


def _flop_rate(flops_per_s: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if flops_per_s >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops_per_s / scale:.4g} {unit}"


def _names(uncounted: tuple[UncountedOperator, ...]) -> str:
    named = [f"{entry.operator} ({entry.calls} calls)" for entry in uncounted[:_MAX_NAMED]]
    more = len(uncounted) - len(named)
    return ", ".join(named) + (f" and {more} more operators" if more else "")


def _flops_in(phase: str) -> Callable[[OperatorFlops], int | None]:
    return lambda one: one.flops.get(phase)


FLOPS_BY_OPERATOR: Final = TableSpec(
    id="flops_by_operator",
    title="FLOPs by operator",
    help=(
        "FLOPs by torch operator in each phase. Fourier transforms are listed here (5 N log2 N) but not in"
        " any total."
    ),
    columns=(
        ColumnSpec("operator", "Operator"),
        ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
        ColumnSpec(
            "flops",
            "FLOPs",
            Unit.FLOPS,
            adds_up=True,
            help="a dash means that no formula covers the operator.",
            of=lambda one: sum(one.flops.values()),
        ),
        ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, adds_up=True, help="share of Hardware FLOPs."),
        *(
            ColumnSpec(
                f"{phase}_flops",
                label,
                Unit.FLOPS,
                adds_up=True,
                help="FLOPs in this phase.",
                of=_flops_in(phase),
                is_optional=True,
            )
            for phase, label in _LABELS.items()
        ),
    ),
    place=160,
    views=("modules",),
    compared=CompareKey(keys=("flops",)),
)


@run_table(FLOPS_BY_OPERATOR, needs=Facts.cost)
def flops_by_operator_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    flops = facts.flops
    rows = [*flops.operators, *({"operator": one.operator, "calls": one.calls} for one in flops.uncounted)]
    if not rows:
        raise NotMeasured(_NOTHING)
    notes = []
    if flops.mean is not None or flops.why_no_mean:
        notes.append(f"FLOPs vary between steps; these are for step {flops.count.step}.")
    yield FLOPS_BY_OPERATOR.table(
        rows,
        of={
            "ratio": lambda one: (
                None if one.is_fourier else share(sum(one.flops.values()), flops.hardware_flops)
            )
        },
        notes=tuple(notes),
        is_detail=True,
    )
