"""Critical path: what the steps waited for, and how long they would be if some of it were faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.critical_path import CAUSES, Cause, CriticalPath
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import Ranks, split_ranks
from lightning_modelprof.units import format_duration

_LABELS: Final[Mapping[Cause, str]] = {
    "data loading": "Data loading",
    "host": "Host",
    "launch": "Launch",
    "copy": "Copy",
    "kernel": "Kernel",
    "communication": "Communication",
    "unexplained": "Unexplained",
}

_FEW: Final = 10
"""Rows that a person is shown where nobody asked for another number."""

_GRAPH: Final = (
    "The steps are replayed from a graph of their work. Nodes are kernels, copies and sets, and the stretches"
    " of each host thread between its launches and waits, with their measured durations. Each begins as soon"
    " as what it depends on has ended: what is before it on its thread or stream; its launch, and after that"
    " at least the least time that any kernel of the trace began after its launch; what its stream waits for"
    " (`cudaStreamWaitEvent`); for the host the device, where it synchronizes, copies to or from memory that"
    " is not pinned, or the launch queue is full; and backward, which the main thread hands to autograd's"
    " thread. A recorded gap is no dependency, and a collective takes the time that this rank recorded. Time"
    " of a host thread that is not known to wait is its work."
)

PATH: Final = TableKind(
    id="critical_path",
    title="Critical path",
    help=(
        "What a step waited for, as a mean of the kept steps: the longest chain of work in which each piece"
        " depends on the one before it. Work that is not on it can take longer without making the step"
        f" longer, and making it faster gains nothing. {_GRAPH} The rows sum to the step exactly. Several"
        " ranks: that of the rank with the longest steps. Absent without device events or steps."
    ),
    columns=(
        Column("name", "Name"),
        Column("step_ns", "Per step", Unit.DURATION_NS, help="on the path, of a mean step."),
        Column("ratio", "Ratio(%)", Unit.RATIO, help="of the step."),
    ),
    rows={
        "Step": "the mean step between device-aware bounds, which the others sum to.",
        "Data loading": "the host in a fetch of a batch, whether it makes the batch or waits for workers.",
        "Host": "other work of a host thread: Python, operators, calls of the runtime that launch nothing.",
        "Launch": (
            "calls that launch kernels or sets, from their begin, and the least time from the begin of such a"
            " call to the kernel's."
        ),
        "Copy": "copies and sets on the device, and the calls that copy on the host.",
        "Kernel": "kernels that compute.",
        "Communication": "kernels that move data between ranks, and communication on the host (gloo, mpi).",
        "Unexplained": (
            "the rest, which no dependency explains: the step as recorded less the step as replayed. The"
            " figures are to be believed as far as it is small."
        ),
    },
    views=("overview",),
    compared=Figure(keys=("step_ns",)),
)

PARTS: Final = TableKind(
    id="critical_path_parts",
    title="On the critical path",
    help=(
        "The critical path by operator, cause, kernel and calling function; its rows sum to the step. The 50"
        " longest parts are rows of their own, the others are put together by cause."
    ),
    columns=(
        Column(
            "name",
            "Operator",
            help=(
                "the innermost operator that the host was in, or that launched the kernel; else the innermost"
                " range; a dash where the host was in neither."
            ),
        ),
        Column("cause", "Cause", help="as in Critical path."),
        Column("kernel", "Kernel", help="or copy; a dash on the host."),
        Column(
            "line",
            "Called from",
            help="the innermost function outside of torch and Lightning; a dash if not recorded.",
        ),
        Column("step_ns", "Per step", Unit.DURATION_NS, adds_up=True, help="on the path, of a mean step."),
        Column("ratio", "Ratio(%)", Unit.RATIO, adds_up=True, help="of the step."),
    ),
    views=("overview", "kernels"),
    compared=Figure(keys=("step_ns",), names=("name", "cause", "kernel", "line")),
)

WHAT_IF: Final = TableKind(
    id="what_if",
    title="What if",
    help=(
        "How long a mean step would be if all work of one kind took half its time or none: the steps are"
        " replayed with these durations changed (see Critical path), so whatever else becomes the critical"
        " path then counts, and so do work that is hidden behind other work and waits that become shorter."
        " What no dependency explains is taken to stay. It is a prediction: what changes beside the durations"
        " (less contention, other kernels) is not in it."
    ),
    columns=(
        Column(
            "name", "If this were faster", help="a cause of the path, or an operator or kernel by its name."
        ),
        Column(
            "work_ns",
            "Work",
            Unit.DURATION_NS,
            "Per step",
            help=(
                "its time in the steps on all threads and streams; of an operator its own and that of its"
                " kernels."
            ),
        ),
        Column(
            "path_ns",
            "On the path",
            Unit.DURATION_NS,
            "Per step",
            help="what of that is on the critical path.",
        ),
        Column("half_ns", "Step", Unit.DURATION_NS, "In half the time", help="as predicted."),
        Column("half_ratio", "Saves(%)", Unit.RATIO, "In half the time", help="share of the step."),
        Column("none_ns", "Step", Unit.DURATION_NS, "In no time", help="as predicted."),
        Column("none_ratio", "Saves(%)", Unit.RATIO, "In no time", help="share of the step."),
    ),
    views=("overview",),
    compared=Figure(keys=("none_ns",)),
)


def critical_path_table(
    by_rank: Mapping[int, CriticalPath | Absent],
    options: TableOptions,  # noqa: ARG001
) -> Table:
    """What the steps waited for, by cause."""
    ranks = split_ranks(by_rank)
    path = _slowest(ranks)
    if path is None:
        return PATH.table(absent_reason=ranks.absent_reason)
    count = len(path.steps)
    causes = [(cause, path.cause_ns(cause)) for cause in CAUSES]
    return PATH.table(
        rows=(
            ("Step", path.recorded_ns / count, 1.0),
            *(
                (_LABELS[cause], time_ns / count, share(time_ns, path.recorded_ns))
                for cause, time_ns in causes
                if time_ns or cause == "unexplained"
            ),
        ),
        notes=(
            "The longest chain of work in which each piece depends on the one before it. Making anything else"
            " faster does not make the step shorter.",
            "Replayed from its dependencies, with nothing changed, a step takes"
            f" {format_duration(path.replayed_ns / count)} instead of"
            f" {format_duration(path.recorded_ns / count)}.",
            *_notes(ranks, path),
        ),
    )


def critical_path_parts_table(
    by_rank: Mapping[int, CriticalPath | Absent],
    options: TableOptions,  # noqa: ARG001
) -> Table:
    """The same by operator, kernel and line."""
    ranks = split_ranks(by_rank)
    path = _slowest(ranks)
    if path is None:
        return PARTS.table(absent_reason=ranks.absent_reason)
    rows: list[tuple[Cell, ...]] = [
        (
            part.operator or None,
            _LABELS[part.cause],
            part.kernel or None,
            part.line or None,
            part.time_ns / len(path.steps),
            share(part.time_ns, path.recorded_ns),
        )
        for part in path.parts
    ]
    return PARTS.table(rows=tuple(rows), notes=_notes(ranks, path), row_limit=_FEW)


def what_if_table(
    by_rank: Mapping[int, CriticalPath | Absent],
    options: TableOptions,  # noqa: ARG001
) -> Table:
    """How long a step would be if something were faster, most gain first."""
    ranks = split_ranks(by_rank)
    path = _slowest(ranks)
    if path is None:
        return WHAT_IF.table(absent_reason=ranks.absent_reason)
    count, recorded_ns = len(path.steps), path.recorded_ns
    rows: list[tuple[Cell, ...]] = [
        (
            _ALL.get(one.name, one.name) if one.kind == "cause" else one.name,
            one.work_ns / count,
            one.path_ns / count,
            one.half_ns / count,
            share(recorded_ns - one.half_ns, recorded_ns),
            one.none_ns / count,
            share(recorded_ns - one.none_ns, recorded_ns),
        )
        for one in sorted(path.what_ifs, key=lambda one: one.none_ns)
    ]
    return WHAT_IF.table(rows=tuple(rows), notes=_notes(ranks, path), row_limit=_FEW)


_ALL: Final[Mapping[str, str]] = {
    "data loading": "Data loading",
    "host": "All host work (without launches and copies)",
    "launch": "All launching calls",
    "copy": "All copies and sets",
    "kernel": "All kernels that compute",
    "communication": "All communication",
}


def _slowest(ranks: Ranks[CriticalPath]) -> CriticalPath | None:
    """That of the rank with the longest steps."""
    return max(ranks.found.values(), key=lambda path: path.recorded_ns / len(path.steps), default=None)


def _notes(ranks: Ranks[CriticalPath], path: CriticalPath) -> tuple[str, ...]:
    number = next(number for number, one in ranks.found.items() if one is path)
    return (
        *((f"Of rank {number}, whose steps are longest.",) if ranks.are_several else ()),
        *(
            (f"Of the first {_steps(len(path.steps))}: {path.num_left_out} more {_have(path.num_left_out)}.",)
            if path.num_left_out
            else ()
        ),
        *ranks.notes,
    )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _have(count: int) -> str:
    return f"{'has' if count == 1 else 'have'} too many events"
