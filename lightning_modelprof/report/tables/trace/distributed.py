"""Distributed Summary: communication, computation and their overlap, and every collective."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.distributed import Distributed, Overlap, pool_collectives
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("total_ns", "Total Time", Unit.DURATION_NS, help="time over the whole trace."),
    ColumnSpec(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        help=(
            "time within the complete steps / their length; without steps, relative to the operators or GPU"
            " events. Time outside the steps only counts in Total Time, so no ratio exceeds 100%."
        ),
    ),
    ColumnSpec("step_mean_ns", "Per step", Unit.DURATION_NS, help="mean time within the complete steps."),
)
DISTRIBUTED: Final = TableSpec(
    id="distributed",
    title="Distributed Summary",
    help=(
        "Per rank over the whole trace; overlaps count once. There's no table without communication, or if"
        " NCCL was called but no recorded kernel communicates (a single-process job, or unrecognized"
        " kernels)."
    ),
    columns=_COLUMNS,
    rows={
        "Communication": (
            "time with at least one communication kernel running on any stream or device, including waiting"
            " for other ranks. Kernels are recognized by name (NCCL, RCCL, MSCCL, oneCCL, HCCL, NVSHMEM,"
            " DeepEP, other expert-parallel kernels, torch's symmetric memory, custom collectives of vLLM,"
            " FlashInfer and TensorRT-LLM) or by a launch in a backend's range (`xccl:all_reduce`) or a"
            " symmetric memory operator. torch's own copy kernels (`at::native`) around a collective and"
            " kernels of operators that also multiply don't count. Without such kernels, it's the backend's"
            " CPU ranges (`gloo:all_reduce`) on any thread, and a note says so."
        ),
        "Computation": (
            "time with at least one other kernel running (no copies or sets); a dash without kernels."
        ),
        "Overlap": "time in both; a dash without kernels.",
        "Exposed": (
            "Communication − Overlap, the most that faster communication could save; a dash without kernels."
        ),
    },
    views=("distributed",),
    compared=CompareKey(keys=("step_mean_ns",)),
)

_PARTS: Final = (
    ("Communication", "communication_ns"),
    ("Computation", "computation_ns"),
    ("Overlap", "overlap_ns"),
    ("Exposed", "exposed_ns"),
)
_BASES: Final = {
    "steps": "ProfileStep",
    "operators": "Span of the operators",
    "device": "Span of the GPU events",
    None: "Whole trace",
}

_NOTES: Final = (
    "Communication is time with a communication kernel (such as NCCL) running, Computation with any other"
    " kernel (not copies), and Overlap with both. Exposed is Communication without Overlap, the most that"
    " faster communication can save.",
    "Times cover the whole trace and include waiting for other ranks. Ratio and Per step cover only time"
    " within the steps.",
)
_HOST_NOTE: Final = (
    "For traces without communication kernels, Communication is the time in the backend's CPU ranges, such"
    " as gloo:all_reduce, on any thread."
)
_ASYNCHRONOUS_NOTE: Final = (
    "NCCL ranges on the CPU only launch communication. Record the GPU to see how long it takes."
)
_NO_KERNELS_NOTE: Final = "Without kernels, Computation and Overlap are unknown."

_OF_KERNELS: Final = "kernel time (CPU ranges if there are no such kernels); overlapping calls are added up."
_COLLECTIVE_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec(
        "group",
        "Process group",
        help=(
            "name, group and size from the kernel's own description, or from the operator that launched it."
            " Otherwise the name is that of the `nccl:` range around the launch or of the kernel."
        ),
    ),
    ColumnSpec("group_size", "Ranks", Unit.COUNT, help="number of ranks in the group."),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
    ColumnSpec(
        "total_ns",
        "Total",
        Unit.DURATION_NS,
        "Time",
        adds_up=True,
        help=_OF_KERNELS,
    ),
    ColumnSpec(
        "avg_ns",
        "Avg",
        Unit.DURATION_NS,
        "Time",
        help=_OF_KERNELS,
    ),
    ColumnSpec(
        "max_ns",
        "Max",
        Unit.DURATION_NS,
        "Time",
        help=_OF_KERNELS,
    ),
    ColumnSpec(
        "min_ns",
        "Min",
        Unit.DURATION_NS,
        "Time",
        help=_OF_KERNELS,
    ),
    ColumnSpec(
        "size_bytes",
        "Size",
        Unit.BYTES,
        adds_up=True,
        help=(
            "bytes the ranks put in: Σ elements × bytes per element over all ranks and calls. A dash means"
            " that not every call recorded it."
        ),
    ),
)
COLLECTIVES: Final = TableSpec(
    id="collectives",
    title="Collectives",
    help="Grouped by collective and process group, all ranks together.",
    columns=_COLLECTIVE_COLUMNS,
    views=("distributed",),
    compared=CompareKey(keys=("total_ns",), sum_over="window", names=("name", "group")),
)

_COLLECTIVE_NOTES: Final = (
    "Calls and times are of the kernels, or of CPU ranges if no kernel communicates. They include waiting"
    " for other ranks; overlapping calls are added up.",
    "Size is what the ranks put in, summed over ranks and calls. A dash means that not every call recorded"
    " it.",
)


@trace_table(DISTRIBUTED, "distributed", TraceFacts.distributed)
def distributed_table(ranks: Ranks[Distributed]) -> Table:
    """How long each rank communicated, and how much of that computation did not hide."""
    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    for rank, fact in ranks.found.items():
        prefix = ranks.prefix(rank)
        if fact.base_ns is not None:
            step_ns = None if fact.in_steps is None else fact.base_ns / fact.num_steps
            whole = share(fact.base_ns, fact.base_ns)
            rows.append((prefix + _BASES[fact.base], fact.base_ns, whole, step_ns))
            depths.append(0)
        for label, key in _PARTS:
            rows.append((prefix + label, *_cells(fact, key)))
            depths.append(0 if fact.base_ns is None else 1)
    facts = tuple(ranks.found.values())
    host = any(fact.source == "host" for fact in facts)
    return DISTRIBUTED.table(
        rows=tuple(rows),
        depths=tuple(depths),
        notes=(
            *_NOTES,
            *((_HOST_NOTE,) if host else ()),
            *((_ASYNCHRONOUS_NOTE,) if any(fact.is_asynchronous for fact in facts) else ()),
            *((_NO_KERNELS_NOTE,) if any(fact.whole.computation_ns is None for fact in facts) else ()),
            *dict.fromkeys(note for fact in facts for note in fact.notes),
        ),
    )


@trace_table(COLLECTIVES, "distributed", TraceFacts.distributed)
def collectives_table(ranks: Ranks[Distributed]) -> Table:
    """Calls, time and size of every collective in every process group, all ranks together."""
    return COLLECTIVES.table(
        rows=tuple(
            (
                one.name,
                one.group,
                one.group_size,
                one.time.calls,
                one.time.total_ns,
                one.time.avg_ns,
                one.time.max_ns,
                one.time.min_ns,
                one.size_bytes,
            )
            for one in pool_collectives(one for fact in ranks.found.values() for one in fact.collectives)
        ),
        notes=_COLLECTIVE_NOTES,
    )


def _cells(fact: Distributed, key: str) -> tuple[Cell, ...]:
    """Time, ratio and time per step of one of the parts."""

    def of(overlap: Overlap) -> int | None:
        part: int | None = getattr(overlap, key)
        return part

    in_base_ns = None if fact.in_base is None else of(fact.in_base)
    in_steps_ns = None if fact.in_steps is None else of(fact.in_steps)
    return of(fact.whole), share(in_base_ns, fact.base_ns), share(in_steps_ns, fact.num_steps)
