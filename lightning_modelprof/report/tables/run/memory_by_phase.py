"""Memory: peaks over the loop, and memory in use in each phase of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.memory import BEGIN, CATEGORIES, PhasePeak

_LABELS: Final = {
    BEGIN: "Start",
    "forward": "Forward",
    "backward": "Backward",
    "recompute": "Recompute",
    "optimizer": "Optimization",
}
MEMORY_PEAKS: Final = TableSpec(
    id="memory_peaks",
    title="Memory",
    help="Peak memory of the run. Measuring it resets nothing, starts no device and waits for none.",
    columns=(
        ColumnSpec("figure", "Metric"),
        ColumnSpec("value", "Value", Unit.BY_ROW, help="bytes or count."),
    ),
    unit_of=itemgetter("unit"),
    rows={
        "Peak resident memory": "peak RAM of the process (RSS) since it started.",
        "Total host memory": "memory of the machine or its container.",
        "Peak device memory allocated": (
            "peak memory torch's allocator gave to tensors, since the process started or you last reset the"
            " peaks."
        ),
        "Peak device memory reserved": (
            "peak memory torch's allocator reserved on the device, since the process started or you last"
            " reset the peaks."
        ),
        "Device memory": "total memory of the device.",
        "Allocator cache flushes": "how often the allocator freed its cache and retried.",
        "Allocator out-of-memory errors": "how often an allocation failed.",
    },
    place=180,
    views=("memory",),
    compared=CompareKey(
        keys=("value",),
        better={
            "Total host memory": "",
            "Device memory": "",
            "Allocator cache flushes": "less",
            "Allocator out-of-memory errors": "less",
        },
    ),
)


@run_table(MEMORY_PEAKS, needs=Facts.memory)
def memory_peaks_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    record = facts.memory.record
    figures: tuple[tuple[str, Cell, Unit], ...] = (
        ("Peak resident memory", record.peak_rss_bytes, Unit.BYTES),
        ("Total host memory", record.host_total_bytes, Unit.BYTES),
        ("Peak device memory allocated", record.peak_allocated_bytes, Unit.BYTES),
        ("Peak device memory reserved", record.peak_reserved_bytes, Unit.BYTES),
        ("Device memory", record.total_bytes, Unit.BYTES),
        ("Allocator cache flushes", record.num_retries, Unit.COUNT),
        ("Allocator out-of-memory errors", record.num_ooms, Unit.COUNT),
    )
    rows = [
        {"figure": label, "value": value, "unit": unit} for label, value, unit in figures if value is not None
    ]
    if not rows:
        raise NotMeasured("the system reports no memory figures")
    yield MEMORY_PEAKS.table(rows)


def _bytes_of(category: str) -> Callable[[PhasePeak], int]:
    return lambda peak: peak.by_category.get(category, 0)


_CATEGORIES: Final = dict.fromkeys(CATEGORIES, "tensors of the model.") | {
    "batch": "inputs of the step.",
    "activations": "made in forward or recompute.",
    "other": "temporary tensors of backward and the optimizer, and tensors with an unknown owner.",
}
MEMORY_BY_PHASE: Final = TableSpec(
    id="memory_by_phase",
    title="Memory by phase",
    help=(
        "Requires `profile_memory=True` and `flops=True`. Bytes of all live storages on the model's device"
        " after each operator of the counted step, and the peak in each phase. Each storage counts once and"
        " in full until it's freed, even if only autograd holds it, and the categories add up to the peak."
        " Start is before the first operator, and Optimization includes clipping. Forward includes the"
        " previous step's gradients, because Lightning clears them after forward. Operator workspace and"
        " allocator rounding aren't included; tensors without a storage (sparse) are noted."
    ),
    columns=(
        ColumnSpec("phase", "Phase", of=lambda peak: _LABELS.get(peak.phase, peak.phase)),
        ColumnSpec("peak", "Peak", Unit.BYTES, help="peak in the phase.", of=lambda peak: peak.num_bytes),
        *(
            ColumnSpec(
                name.replace(" ", "_"),
                name.capitalize(),
                Unit.BYTES,
                help=text,
                of=_bytes_of(name),
            )
            for name, text in _CATEGORIES.items()
        ),
        ColumnSpec(
            "operator",
            "Operator",
            help="operator after which memory peaked.",
            of=lambda peak: None if peak.phase == BEGIN else peak.operator,
        ),
        ColumnSpec(
            "module",
            "Module",
            help="module in which that operator ran.",
            of=lambda peak: None if peak.phase == BEGIN else peak.module,
        ),
    ),
    place=190,
    views=("memory",),
    compared=CompareKey(keys=("peak",)),
)


@run_table(MEMORY_BY_PHASE, needs=Facts.memory)
def memory_by_phase_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Show what holds memory at each phase's peak, in which operator of which module."""
    record = facts.memory.record
    memory = record.step_memory
    if memory is None:
        yield MEMORY_BY_PHASE.table(notes=record.notes, absent_reason="not tracked")
        return
    begin = PhasePeak(
        phase=BEGIN,
        num_bytes=memory.begin_bytes,
        by_category=memory.begin_by_category,
        operator="",
        module="",
    )
    yield MEMORY_BY_PHASE.table(
        (begin, *memory.peaks),
        notes=(
            f"Step {memory.step}, on {memory.device}.",
            *(f"Not tracked: {reason}." for reason in memory.dropped),
        ),
        is_detail=not facts.info.config.get("profile_memory"),
    )
