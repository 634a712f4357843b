"""Distributed Summary: communication, computation, their overlap, and each collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from lightning_modelprof.analysis.pooling import pool_alike
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.distributed import Distributed, Overlap
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_columns
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
    compared=CompareKey(keys=("step_mean_ns",), better={"Overlap": ""}),
)

_PARTS: Final[Mapping[str, Callable[[Overlap], int | None]]] = {
    "Communication": lambda overlap: overlap.communication_ns,
    "Computation": lambda overlap: overlap.computation_ns,
    "Overlap": lambda overlap: overlap.overlap_ns,
    "Exposed": lambda overlap: overlap.exposed_ns,
}
_BASES: Final = {
    "steps": "ProfileStep",
    "operators": "Span of the operators",
    "device": "Span of the GPU events",
    None: "Whole trace",
}

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
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, of=lambda one: one.time.calls),
    *tally_columns("", "Time", lambda one: one.time, help=_OF_KERNELS, each=_OF_KERNELS, adds_up=True),
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


@trace_table(DISTRIBUTED, "distributed", TraceFacts.distributed)
def distributed_table(ranks: Ranks[Distributed]) -> Table:
    """Show each rank's communication time and how much of it computation didn't hide."""
    rows: list[Mapping[str, Cell]] = []
    depths: list[int] = []
    for rank, fact in ranks.found.items():
        prefix = ranks.prefix(rank)
        if fact.base_ns is not None:
            rows.append(
                {
                    "name": prefix + _BASES[fact.base],
                    "total_ns": fact.base_ns,
                    "ratio": share(fact.base_ns, fact.base_ns),
                    "step_mean_ns": None if fact.in_steps is None else fact.base_ns / fact.num_steps,
                }
            )
            depths.append(0)
        rows += [_part(fact, prefix + label, getter) for label, getter in _PARTS.items()]
        depths += [0 if fact.base_ns is None else 1] * len(_PARTS)
    facts = tuple(ranks.found.values())
    return DISTRIBUTED.table(
        rows,
        depths=tuple(depths),
        notes=(
            *((_HOST_NOTE,) if any(fact.source == "host" for fact in facts) else ()),
            *((_ASYNCHRONOUS_NOTE,) if any(fact.is_asynchronous for fact in facts) else ()),
            *((_NO_KERNELS_NOTE,) if any(fact.whole.computation_ns is None for fact in facts) else ()),
            *dict.fromkeys(note for fact in facts for note in fact.notes),
        ),
    )


def _part(fact: Distributed, name: str, of: Callable[[Overlap], int | None]) -> Mapping[str, Cell]:
    return {
        "name": name,
        "total_ns": of(fact.whole),
        "ratio": None if fact.in_base is None else share(of(fact.in_base), fact.base_ns),
        "step_mean_ns": None if fact.in_steps is None else share(of(fact.in_steps), fact.num_steps),
    }


@trace_table(COLLECTIVES, "distributed", TraceFacts.distributed)
def collectives_table(ranks: Ranks[Distributed]) -> Table:
    """List calls, time and size per collective and process group, over all ranks."""
    pooled = pool_alike(one for fact in ranks.found.values() for one in fact.collectives)
    longest_first = sorted(pooled, key=lambda one: (-one.time.total_ns, one.name, one.group or ""))
    return COLLECTIVES.table(longest_first)
