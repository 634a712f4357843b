"""Distributed Summary: communication, computation and their overlap, and every collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.distributed import Distributed, Overlap, pool_collectives
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_COLUMNS: Final = (
    Column("name", "Name"),
    Column("total_ns", "Total Time", Unit.DURATION_NS, help="over the whole trace."),
    Column(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        help=(
            "how much of the first row (ProfileStep) each fills: the time inside the span of the kept"
            " steps / that span; without steps that of the operators or of the device events. What ran"
            " outside counts in Total Time only, so no ratio exceeds 100 %."
        ),
    ),
    Column("step_mean_ns", "Per step", Unit.DURATION_NS, help="the mean of the time inside the kept steps."),
)
DISTRIBUTED: Final = TableKind(
    id="distributed",
    title="Distributed Summary",
    help=(
        "Per rank, over the whole trace, what overlaps counted once. There is no table when the trace"
        " has no communication, nor when the host asked NCCL for it but no recorded kernel"
        " communicates: a job of one process, or, where the trace tells of several, kernels that were"
        " not recognised."
    ),
    columns=_COLUMNS,
    rows={
        "Communication": (
            "time in which at least one kernel that communicates runs, on any stream or device, the wait"
            " for other ranks included: by their names those of NCCL, RCCL, MSCCL, oneCCL, HCCL, NVSHMEM,"
            " DeepEP and other exchanges between experts, torch's symmetric memory and custom collectives"
            " (vLLM, FlashInfer, TensorRT-LLM), and kernels launched in a range of a backend"
            " (`xccl:all_reduce`) or an operator of symmetric memory, but neither torch's own"
            " (`at::native`), which copy around a collective, nor those of operators that also multiply."
            " Where a trace has none, it is the time of the backend's ranges on the host"
            " (`gloo:all_reduce`) on any thread, and a note says so."
        ),
        "Computation": (
            "time in which at least one other kernel runs (no copies, no sets); a dash without any kernels."
        ),
        "Overlap": "time in both; a dash without any kernels.",
        "Exposed": (
            "Communication − Overlap: what faster communication could save; a dash without any kernels."
        ),
    },
    views=("distributed",),
    compared=Figure(keys=("step_mean_ns",)),
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
    "device": "Span of the device events",
    None: "Whole trace",
}

_NOTES: Final = (
    "Communication is the time in which a kernel of NCCL or its like runs, Computation any other kernel"
    " (copies are none), Overlap both. Exposed is Communication without Overlap: the most that faster"
    " communication can save.",
    "The times are of the whole trace; what overlaps counts once. The wait for other ranks is Communication,"
    " too. Ratio is how much of the first row each fills, Per step the mean of the time inside the steps:"
    " what ran outside of them is in Total Time only.",
)
_HOST_NOTE: Final = (
    "Where a trace has no kernels that communicate, Communication is the time in ranges of the backend on the"
    " host, such as gloo:all_reduce, on any thread."
)
_ASYNCHRONOUS_NOTE: Final = (
    "Ranges of NCCL on the host only ask the device to communicate: record the device to see how long that"
    " takes."
)
_NO_KERNELS_NOTE: Final = (
    "Without kernels neither Computation is known nor how much of Communication it hides."
)

_OF_KERNELS: Final = (
    "of the kernels' times (host ranges where there are no such kernels); calls that overlap are added up."
)
_COLLECTIVE_COLUMNS: Final = (
    Column("name", "Name"),
    Column(
        "group",
        "Process group",
        help=(
            "name, group and size come from the kernel's own description, else from that of the operator"
            " around its launch, else the name comes from the `nccl:` range around the launch or from the"
            " kernel's name."
        ),
    ),
    Column("group_size", "Ranks", Unit.COUNT, help="in the group."),
    Column("calls", "Calls", Unit.COUNT, adds_up=True),
    Column(
        "total_ns",
        "Total",
        Unit.DURATION_NS,
        "Time",
        adds_up=True,
        help=_OF_KERNELS,
    ),
    Column(
        "avg_ns",
        "Avg",
        Unit.DURATION_NS,
        "Time",
        help=_OF_KERNELS,
    ),
    Column(
        "max_ns",
        "Max",
        Unit.DURATION_NS,
        "Time",
        help=_OF_KERNELS,
    ),
    Column(
        "min_ns",
        "Min",
        Unit.DURATION_NS,
        "Time",
        help=_OF_KERNELS,
    ),
    Column(
        "size_bytes",
        "Size",
        Unit.BYTES,
        adds_up=True,
        help=(
            "what the ranks put in, Σ elements × bytes per element over all ranks and calls, a dash when"
            " not every call recorded it."
        ),
    ),
)
COLLECTIVES: Final = TableKind(
    id="collectives",
    title="Collectives",
    help=(
        "By collective and process group, all ranks together. Absent together with the Distributed Summary."
    ),
    columns=_COLLECTIVE_COLUMNS,
    views=("distributed",),
    compared=Figure(keys=("total_ns",), sum_over="window", names=("name", "group")),
)

_COLLECTIVE_NOTES: Final = (
    "Calls and times are those of the kernels, or of ranges on the host where no kernel communicates. They"
    " contain the wait for other ranks; calls that overlap are added up.",
    "Size is what the ranks put in, the sum over ranks and calls; a dash means that not every call recorded"
    " it.",
)


def distributed_table(by_rank: Mapping[int, Distributed | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """How long each rank communicated, and how much of that computation did not hide."""
    ranks = split_ranks(by_rank)
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
            *(_NOTES if facts else ()),
            *((_HOST_NOTE,) if host else ()),
            *((_ASYNCHRONOUS_NOTE,) if any(fact.is_asynchronous for fact in facts) else ()),
            *((_NO_KERNELS_NOTE,) if any(fact.whole.computation_ns is None for fact in facts) else ()),
            *dict.fromkeys(note for fact in facts for note in fact.notes),
            *ranks.notes,
        ),
        absent_reason=ranks.absent_reason,
    )


def collectives_table(by_rank: Mapping[int, Distributed | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """Calls, time and size of every collective in every process group, all ranks together."""
    ranks = split_ranks(by_rank)
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
        notes=(*(_COLLECTIVE_NOTES if ranks.found else ()), *ranks.notes),
        absent_reason=ranks.absent_reason,
    )


def _cells(fact: Distributed, key: str) -> tuple[Cell, ...]:
    """Time, ratio and time per step of one of the parts."""

    def of(overlap: Overlap) -> int | None:
        part: int | None = getattr(overlap, key)
        return part

    in_base_ns = None if fact.in_base is None else of(fact.in_base)
    in_steps_ns = None if fact.in_steps is None else of(fact.in_steps)
    return of(fact.whole), share(in_base_ns, fact.base_ns), share(in_steps_ns, fact.num_steps)
