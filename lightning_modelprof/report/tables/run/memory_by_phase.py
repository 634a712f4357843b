"""Memory: its peaks over the loop, and what was alive in each phase of one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
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


def _peaks(record: MemoryRecord) -> Table:
    """How much memory the loop took at most.

    Definition: resident memory of the process (the most since it began), what torch's allocator gave to
    tensors and what it held of the device (most in this process, or since the user reset them); how often it
    had to give its cache back to go on, and how often it could not go on.
    """
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
    return Table(
        id="memory_peaks",
        title="Memory",
        columns=(Column("figure", "Figure"), Column("value", "Value", Unit.BY_ROW)),
        rows=tuple((label, value) for label, value, _ in known),
        row_units=tuple(unit for _, _, unit in known),
        absent_reason=None if known else "the system tells nothing about memory",
    )


def _by_phase(memory: StepMemory | None, notes: tuple[str, ...]) -> Table:
    """What takes the memory when it is at its most, in which operator of which module.

    Definition: of one step, after each operator the bytes of all storages that are alive; the row of a phase
    is the operator of it after which they are most. Begin is before the first one. The categories sum to the
    peak.
    """
    rows: tuple[tuple[Cell, ...], ...] = ()
    if memory is not None:
        begin = (_LABELS[BEGIN], memory.begin_bytes, *_sizes(memory.begin_by_category), None, None)
        rows = (begin, *map(_row, memory.peaks))
    return Table(
        id="memory_by_phase",
        title="Memory by phase",
        columns=(
            Column("phase", "Phase"),
            Column("peak", "Peak", Unit.BYTES),
            *(Column(_key(name), name.capitalize(), Unit.BYTES) for name in CATEGORIES),
            Column("operator", "Operator"),
            Column("module", "Module"),
        ),
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


def _key(category: str) -> str:
    return category.replace(" ", "_")


def _dropped(memory: StepMemory) -> tuple[str, ...]:
    return tuple(f"Not followed: {reason}." for reason in memory.dropped)
