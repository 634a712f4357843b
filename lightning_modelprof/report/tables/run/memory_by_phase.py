"""Memory: its peaks over the loop, and what was alive in each phase of one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.run.memory import BEGIN, CATEGORIES, MemoryRecord, PhasePeak, StepMemory

_LABELS: Final = {
    BEGIN: "Begin",
    "forward": "Forward",
    "backward": "Backward",
    "recompute": "Recompute",
    "optimizer": "Optimization",
}
_NOTE: Final = (
    "Whole storages of tensors on the model's device, each once. What operators need within themselves and"
    " what the allocator rounds up is not in it."
)


def memory_tables(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """Both tables; none in runs of versions that did not look."""
    if isinstance(analysis.memory, Absent):
        return ()
    record = analysis.memory.record
    was_asked_for = bool(analysis.info.config.get("profile_memory"))
    by_phase = _by_phase(record.step_memory, record.notes)
    return (_peaks(record), by_phase if was_asked_for else replace(by_phase, is_detail=True))


MEMORY_PEAKS: Final = TableKind(
    id="memory_peaks",
    title="Memory",
    help=("The most memory that the loop took. Nothing is reset and no device is started or waited for."),
    columns=(Column("figure", "Figure"), Column("value", "Value", Unit.BY_ROW, help="bytes, or how often.")),
    rows={
        "Process, most resident": ("the most memory of the process that was in RAM since it began."),
        "Host, memory to be used": "of the machine or its container.",
        "Device, most allocated": (
            "what torch's allocator gave to tensors at most, in this process or since you last reset the"
            " peaks."
        ),
        "Device, most reserved": (
            "what torch's allocator held of the device at most, in this process or since you last reset"
            " the peaks."
        ),
        "Device, memory": "what the device has.",
        "Allocator gave its cache back": "how often, to go on.",
        "Allocator found no memory": "how often.",
    },
    views=("memory",),
)


def _peaks(record: MemoryRecord) -> Table:
    """How much memory the loop took at most."""
    figures: tuple[tuple[str, Cell, Unit], ...] = (
        ("Process, most resident", record.peak_rss_bytes, Unit.BYTES),
        ("Host, memory to be used", record.host_total_bytes, Unit.BYTES),
        ("Device, most allocated", record.peak_allocated_bytes, Unit.BYTES),
        ("Device, most reserved", record.peak_reserved_bytes, Unit.BYTES),
        ("Device, memory", record.total_bytes, Unit.BYTES),
        ("Allocator gave its cache back", record.num_retries, Unit.COUNT),
        ("Allocator found no memory", record.num_ooms, Unit.COUNT),
    )
    known = tuple(figure for figure in figures if figure[1] is not None)
    return MEMORY_PEAKS.table(
        rows=tuple((label, value) for label, value, _ in known),
        row_units=tuple(unit for _, _, unit in known),
        absent_reason=None if known else "the system tells nothing about memory",
    )


_CATEGORIES: Final = dict.fromkeys(CATEGORIES, "the model's.") | {
    "batch": "what the step was given.",
    "activations": "made in forward or recomputation.",
    "other": "what backward and the optimizer made on the way, and tensors whose owner is unknown.",
}
MEMORY_BY_PHASE: Final = TableKind(
    id="memory_by_phase",
    title="Memory by phase",
    help=(
        "With `profile_memory=True` and `flops=True`: of the counted step, after each operator the"
        " bytes of all storages that are alive on the model's device. Begin is before the first"
        " operator; Optimization is clipping too. A storage counts once and whole, from the operator"
        " on that made it or used it first, until its memory is given back, also when only autograd"
        " holds it. The categories sum to the peak. Gradients of the step before are there in Forward,"
        " because Lightning clears them after it. Not seen: what operators need within themselves,"
        " rounding by the allocator; tensors that show no storage (sparse) are noted."
    ),
    columns=(
        Column("phase", "Phase"),
        Column("peak", "Peak", Unit.BYTES, help="the most in the phase."),
        *(
            Column(name.replace(" ", "_"), name.capitalize(), Unit.BYTES, help=text)
            for name, text in _CATEGORIES.items()
        ),
        Column("operator", "Operator", help="after which operator they are most."),
        Column("module", "Module", help="in which module that operator ran."),
    ),
    views=("memory",),
    compared=Figure(keys=("peak",)),
)


def _by_phase(memory: StepMemory | None, notes: tuple[str, ...]) -> Table:
    """What takes the memory when it is at its most, in which operator of which module."""
    rows: tuple[tuple[Cell, ...], ...] = ()
    if memory is not None:
        begin = (_LABELS[BEGIN], memory.begin_bytes, *_sizes(memory.begin_by_category), None, None)
        rows = (begin, *map(_row, memory.peaks))
    return MEMORY_BY_PHASE.table(
        rows=rows,
        notes=notes
        if memory is None
        else (_NOTE, f"Step {memory.step}, on {memory.device}.", *_dropped(memory)),
        absent_reason=None if memory is not None else "no step's tensors were followed",
    )


def _row(peak: PhasePeak) -> tuple[Cell, ...]:
    label = _LABELS.get(peak.phase, peak.phase)
    return (label, peak.num_bytes, *_sizes(peak.by_category), peak.operator, peak.module)


def _sizes(by_category: dict[str, int]) -> tuple[int, ...]:
    return tuple(by_category.get(name, 0) for name in CATEGORIES)


def _dropped(memory: StepMemory) -> tuple[str, ...]:
    return tuple(f"Not followed: {reason}." for reason in memory.dropped)
