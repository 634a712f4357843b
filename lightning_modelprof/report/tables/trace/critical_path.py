"""Critical path: what the steps waited for, and how long they would be if some of it were faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.critical_path import CAUSES, Cause, CriticalPath
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table
from lightning_modelprof.units import format_duration

_LABELS: Final[Mapping[Cause, str]] = {
    "data loading": "Data loading",
    "host": "CPU",
    "launch": "Launch",
    "copy": "Copy",
    "kernel": "Kernel",
    "communication": "Communication",
    "unexplained": "Unexplained",
}

_FEW: Final = 10
"""Rows that a person is shown where nobody asked for another number."""

_GRAPH: Final = (
    "The steps are replayed from a dependency graph of kernels, copies, memsets and the CPU work between"
    " them,"
    " with their measured durations. Each piece starts as soon as its dependencies have finished: earlier"
    " work on the same thread or stream, its launch (plus the trace's shortest launch latency), stream"
    " waits (`cudaStreamWaitEvent`), synchronization, copies of memory that isn't pinned, a full launch"
    " queue and the handover of backward to autograd's thread. Recorded gaps aren't dependencies,"
    " collectives take as long as on this rank, and unexplained waits count as CPU work."
)

PATH: Final = TableSpec(
    id="critical_path",
    title="Critical path",
    help=(
        "The longest chain of dependent work, as a mean over complete steps. Only work on this path"
        f" determines the step time; speeding up anything else gains nothing. {_GRAPH} The rows add up to"
        " the step exactly. With multiple ranks, it shows the rank with the longest steps."
    ),
    columns=(
        ColumnSpec("name", "Name"),
        ColumnSpec("step_ns", "Per step", Unit.DURATION_NS, help="time on the path per mean step."),
        ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, help="share of the step."),
    ),
    rows={
        "Step": "mean step between GPU-aware bounds; the other rows add up to it.",
        "Data loading": "CPU time in fetches, making batches or waiting for workers.",
        "CPU": "other CPU work, such as Python, operators and runtime calls that launch nothing.",
        "Launch": (
            "calls that launch kernels or memsets, plus the shortest latency from the start of such a call to"
            " its kernel."
        ),
        "Copy": "copies and memsets on the GPU, and blocking copy calls on the CPU.",
        "Kernel": "compute kernels.",
        "Communication": "communication kernels, and communication on the CPU (gloo, mpi).",
        "Unexplained": (
            "recorded minus replayed step time. The smaller it is, the more reliable the other rows are."
        ),
    },
    views=("overview",),
    compared=CompareKey(keys=("step_ns",)),
)

PARTS: Final = TableSpec(
    id="critical_path_parts",
    title="On the critical path",
    help=(
        "The critical path by operator, cause, kernel and calling function, adding up to the step. The 50"
        " longest parts have their own rows, and the rest are grouped by cause."
    ),
    columns=(
        ColumnSpec(
            "name",
            "Operator",
            help=(
                "the innermost operator on the CPU, or the one that launched the kernel; without one, the"
                " innermost range. A dash means neither."
            ),
        ),
        ColumnSpec("cause", "Cause", help="as in Critical path."),
        ColumnSpec("kernel", "Kernel", help="kernel or copy; a dash on the CPU."),
        ColumnSpec(
            "line",
            "Called from",
            help="the innermost function outside torch and Lightning; a dash if not recorded.",
        ),
        ColumnSpec(
            "step_ns", "Per step", Unit.DURATION_NS, adds_up=True, help="time on the path per mean step."
        ),
        ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, adds_up=True, help="share of the step."),
    ),
    views=("overview", "kernels"),
    compared=CompareKey(keys=("step_ns",), names=("name", "cause", "kernel", "line")),
)

WHAT_IF: Final = TableSpec(
    id="what_if",
    title="What if",
    help=(
        "Predicted step time if one kind of work took half as long or no time. The steps are replayed with"
        " these durations changed (see Critical path), so new critical paths and shorter waits are"
        " included. Unexplained time stays the same. Side effects such as less contention aren't predicted."
    ),
    columns=(
        ColumnSpec("name", "If this were faster", help="a cause on the path, or an operator or kernel."),
        ColumnSpec(
            "work_ns",
            "Work",
            Unit.DURATION_NS,
            "Per step",
            help=(
                "its time in the steps over all threads and streams; for an operator, its own and its"
                " kernels' time."
            ),
        ),
        ColumnSpec(
            "path_ns",
            "On the path",
            Unit.DURATION_NS,
            "Per step",
            help="the part of that on the critical path.",
        ),
        ColumnSpec(
            "half_ns", "Step", Unit.DURATION_NS, "If it took half the time", help="predicted step time."
        ),
        ColumnSpec(
            "half_ratio", "Saves(%)", Unit.RATIO, "If it took half the time", help="share of the step."
        ),
        ColumnSpec("none_ns", "Step", Unit.DURATION_NS, "If it took no time", help="predicted step time."),
        ColumnSpec("none_ratio", "Saves(%)", Unit.RATIO, "If it took no time", help="share of the step."),
    ),
    views=("overview",),
    compared=CompareKey(keys=("none_ns",)),
)


@trace_table(PATH, "critical_path", TraceFacts.critical_path)
def critical_path_table(
    ranks: Ranks[CriticalPath],
) -> Table:
    """What the steps waited for, by cause."""
    path = _slowest(ranks)
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
            "This is the longest chain of dependent work; speeding up anything else doesn't shorten the"
            " step.",
            *_notes(ranks, path),
        ),
    )


@trace_table(PARTS, "critical_path", TraceFacts.critical_path)
def critical_path_parts_table(
    ranks: Ranks[CriticalPath],
) -> Table:
    """The same by operator, kernel and line."""
    path = _slowest(ranks)
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


@trace_table(WHAT_IF, "critical_path", TraceFacts.critical_path)
def what_if_table(
    ranks: Ranks[CriticalPath],
) -> Table:
    """How long a step would be if something were faster, most gain first."""
    path = _slowest(ranks)
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
    replayed, measured = (format_duration(ns / count) for ns in (path.replayed_ns, recorded_ns))
    simulated = (
        f"What if simulates the steps. For the unchanged steps it gives {replayed}; the measured mean is"
        f" {measured}."
    )
    return WHAT_IF.table(rows=tuple(rows), notes=(simulated, *_notes(ranks, path)), row_limit=_FEW)


_ALL: Final[Mapping[str, str]] = {
    "data loading": "Data loading",
    "host": "All CPU work (without launches and copies)",
    "launch": "All launch calls",
    "copy": "All copies and memsets",
    "kernel": "All compute kernels",
    "communication": "All communication",
}


def _slowest(ranks: Ranks[CriticalPath]) -> CriticalPath:
    """That of the rank with the longest steps."""
    return max(ranks.found.values(), key=lambda path: path.recorded_ns / len(path.steps))


def _notes(ranks: Ranks[CriticalPath], path: CriticalPath) -> tuple[str, ...]:
    number = next(number for number, one in ranks.found.items() if one is path)
    return (
        *((f"Rank {number}, which has the longest steps.",) if ranks.are_several else ()),
        *(
            (
                (
                    f"First {_steps(len(path.steps))} only, because {path.num_left_out} more"
                    f" {_have(path.num_left_out)}."
                ),
            )
            if path.num_left_out
            else ()
        ),
    )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _have(count: int) -> str:
    return f"{'has' if count == 1 else 'have'} too many events"
