"""Critical path: step time by cause, and predicted step times if parts of it were faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.critical_path import CAUSES, Cause, CriticalPath, WhatIf
from lightning_modelprof.analysis.trace.step_account import StepAccount
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

_ROWS: Final = (
    (0, "step", "Step"),
    (0, "data loading", "Data loading"),
    (0, "host", "CPU"),
    (1, "after waits", "After waits"),
    (1, "late", "CPU late"),
    (0, "launch", "Launch"),
    (0, "copy", "Copy"),
    (0, "kernel", "Kernel"),
    (0, "communication", "Communication"),
    (0, "kernel gap", "Kernel gap"),
    (0, "other stream", "Other stream"),
    (0, "unexplained", "Unexplained"),
    (0, "other", "Other"),
)
"""Depth, cause and label."""

_FEW: Final = 10

_GRAPH: Final = (
    "The steps are replayed from a dependency graph of kernels, copies, memsets and the CPU work between"
    " them,"
    " with their measured durations. Each piece starts as soon as its dependencies have finished: earlier"
    " work on the same thread or stream, its launch (plus the trace's shortest launch latency), stream"
    " waits (`cudaStreamWaitEvent`), synchronization, copies of memory that isn't pinned, a full launch"
    " queue and the handover of backward to autograd's thread. Recorded gaps aren't dependencies,"
    " collectives take as long as on this rank, and unexplained waits count as CPU work."
)

_HALF: Final = "If it took half the time"
_NONE: Final = "If it took no time"
_PREDICTED: Final = (
    ColumnSpec("half_ns", "Step", Unit.DURATION_NS, _HALF, help="predicted step time."),
    ColumnSpec("half_ratio", "Saves(%)", Unit.RATIO, _HALF, help="share of the step."),
    ColumnSpec("none_ns", "Step", Unit.DURATION_NS, _NONE, help="predicted step time."),
    ColumnSpec("none_ratio", "Saves(%)", Unit.RATIO, _NONE, help="share of the step."),
)
_NAME: Final = ColumnSpec("name", "Name")
_PATH_COLUMNS: Final = (
    ColumnSpec(
        "step_ns", "Per step", Unit.DURATION_NS, "On the path", help="time on the path per mean step."
    ),
    ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, "On the path", help="share of the step.", share_of="step_ns"),
)
_RUNNING_COLUMNS: Final = (
    ColumnSpec(
        "running_ns",
        "Per step",
        Unit.DURATION_NS,
        "Running",
        help=(
            "what runs, by the categories of Step time breakdown: each moment counts once, GPU work first, so"
            " CPU work during GPU work isn't visible."
        ),
    ),
    ColumnSpec(
        "running_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "Running",
        help="share of the step.",
        share_of="running_ns",
    ),
)
_IDLE_COLUMNS: Final = (
    ColumnSpec(
        "idle_ns",
        "Per step",
        Unit.DURATION_NS,
        "GPU idle",
        help=(
            "time without a kernel, copy or memset on any stream of the busiest GPU. A gap's cause comes from"
            " the event that ends it (the one launched first, if there's more than one)."
        ),
    ),
    ColumnSpec(
        "idle_ratio", "Ratio(%)", Unit.RATIO, "GPU idle", help="share of the step.", share_of="idle_ns"
    ),
)
_WORK: Final = ColumnSpec(
    "work_ns",
    "Work",
    Unit.DURATION_NS,
    help="its time per step over all threads and streams, on the path or not.",
)

PATH: Final = TableSpec(
    id="critical_path",
    title="Critical path",
    help=(
        "Where the step goes, as a mean over complete steps. On the path is the longest chain of dependent"
        " work. Only work on it determines the step time; speeding up anything else gains nothing. Running is"
        " what the CPU and GPU do, and GPU idle is why the busiest GPU isn't working. On the path and Running"
        " add up to the step, and GPU idle to the step's idle time, which is the rest of GPU busy. With"
        " multiple ranks, it shows the rank with the longest steps, of those whose critical path is known if"
        f" there are any. {_GRAPH} If work were faster, the steps"
        " are replayed with its durations changed, so new critical paths and shorter waits are included."
        " Unexplained time stays the same. Side effects such as less contention aren't predicted."
    ),
    columns=(_NAME, *_PATH_COLUMNS, *_RUNNING_COLUMNS, *_IDLE_COLUMNS, _WORK, *_PREDICTED),
    rows={
        "Step": (
            "mean step between GPU-aware bounds, with what little time there is between two of them; in GPU"
            " idle, all idle time."
        ),
        "Data loading": (
            "CPU time in fetches, making batches or waiting for workers. The GPU is idle for it if nothing"
            " was queued while the launching thread waited for data."
        ),
        "CPU": (
            "other CPU work, such as Python, operators and runtime calls that launch nothing. The GPU is idle"
            " for it if nothing was queued, because the next work was launched after the gap started."
            " Running only knows operators and annotations, except those around whole steps, Lightning's"
            " `[pl]` ranges and our own."
        ),
        "After waits": (
            "the part of the idle time that would be saved if no call waited for the GPU; by place in CPU"
            " waits for the GPU."
        ),
        "CPU late": "the remaining idle time in which nothing was queued.",
        "Launch": (
            "calls that launch kernels or memsets, plus the shortest latency from the start of such a call to"
            " its kernel. In Running, all runtime calls; a dash without any."
        ),
        "Copy": "copies and memsets on the GPU, and blocking copy calls on the CPU (in Running, as Launch).",
        "Kernel": "compute kernels.",
        "Communication": (
            "communication kernels, and communication on the CPU (gloo, mpi). The GPU is idle for it before"
            " or after communication on another stream, or if nothing was queued while the launching thread"
            " communicated."
        ),
        "Kernel gap": (
            "idle before work launched earlier, for less than 30 µs (HolisticTraceAnalysis's limit)."
        ),
        "Other stream": "idle for longer before work launched earlier, after work on another stream.",
        "Unexplained": (
            "recorded minus replayed step time. The smaller it is, the more reliable the path is."
        ),
        "Other": (
            "nothing is running. The GPU is idle for it if the launch is unknown, or earlier launched work"
            " was delayed on its own stream."
        ),
    },
    views=("overview",),
    compared=CompareKey(keys=("step_ns", "running_ns")),
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
        ColumnSpec(
            "ratio", "Ratio(%)", Unit.RATIO, adds_up=True, help="share of the step.", share_of="step_ns"
        ),
    ),
    views=("overview", "kernels"),
    compared=CompareKey(keys=("step_ns",), names=("name", "cause", "kernel", "line")),
)

WHAT_IF: Final = TableSpec(
    id="what_if",
    title="What if",
    help=(
        "Predicted step time if an operator or kernel took half as long or no time, for those with the most"
        " time on the critical path. Critical path has the same by cause."
    ),
    columns=(
        ColumnSpec("name", "If this were faster", help="an operator or kernel."),
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
        *_PREDICTED,
    ),
    views=("overview",),
    compared=CompareKey(keys=("none_ns",)),
)


@trace_table(PATH, "critical_path", TraceFacts.step_account)
def critical_path_table(ranks: Ranks[StepAccount]) -> Table:
    """Split one rank's step time by cause, with the columns that its trace supports."""
    number, account = max(ranks.found.items(), key=lambda one: (one[1].path is not None, one[1].step_ns))
    longest_ns = max(one.step_ns for one in ranks.found.values())
    rows = list(_rows(account))
    return PATH.table(
        (cells for _, cells in rows),
        columns=(
            _NAME,
            *(_PATH_COLUMNS if account.path else ()),
            *_RUNNING_COLUMNS,
            *(_IDLE_COLUMNS if account.idle_ns else ()),
            *((_WORK, *_PREDICTED) if account.path else ()),
        ),
        wholes=dict.fromkeys(("ratio", "running_ratio", "idle_ratio"), account.step_ns),
        depths=tuple(depth for depth, _ in rows),
        notes=(
            *_rank_note(ranks, number, is_longest=account.step_ns == longest_ns),
            *_left_out_note(account.path),
            *_missing_notes(account),
        ),
    )


@trace_table(PARTS, "critical_path", TraceFacts.critical_path)
def critical_path_parts_table(ranks: Ranks[CriticalPath]) -> Table:
    """List the critical path by operator, kernel and line."""
    number, path = _slowest(ranks)
    return PARTS.table(
        (
            {
                "name": part.operator or None,
                "cause": _LABELS[part.cause],
                "kernel": part.kernel or None,
                "line": part.line or None,
                "step_ns": part.time_ns / len(path.steps),
            }
            for part in path.parts
        ),
        notes=(*_rank_note(ranks, number), *_left_out_note(path)),
        row_limit=_FEW,
        is_detail=True,
    )


@trace_table(WHAT_IF, "critical_path", TraceFacts.critical_path)
def what_if_table(ranks: Ranks[CriticalPath]) -> Table:
    """Predict the step time if an operator or kernel were faster, largest gain first."""
    number, path = _slowest(ranks)
    asked = sorted((one for one in path.what_ifs if one.kind != "cause"), key=lambda one: one.none_ns)
    if not asked:
        raise NotMeasured("no operator or kernel is on the critical path")
    replayed, measured = (
        format_duration(ns / len(path.steps)) for ns in (path.replayed_ns, path.recorded_ns)
    )
    simulated = (
        f"What if simulates the steps. For the unchanged steps it gives {replayed}; the measured mean is"
        f" {measured}."
    )
    return WHAT_IF.table(
        ({"name": one.name, **_predicted(one, path)} for one in asked),
        notes=(simulated, *_rank_note(ranks, number), *_left_out_note(path)),
        is_detail=True,
    )


def _rows(account: StepAccount) -> Iterator[tuple[int, dict[str, Cell]]]:
    path = account.path
    path_ns: dict[str, int] = {}
    predicted: dict[str, dict[str, Cell]] = {}
    if path is not None:
        path_ns = {"step": path.recorded_ns, **{cause: path.cause_ns(cause) for cause in CAUSES}}
        predicted = {one.name: _predicted(one, path) for one in path.what_ifs if one.kind == "cause"}
    running_ns = {"step": account.recorded_ns, **account.running_ns}
    idle_ns = _idle_by_row(account)
    for depth, cause, label in _ROWS:
        times_ns = {
            "step_ns": path_ns.get(cause),
            "running_ns": running_ns.get(cause),
            "idle_ns": idle_ns.get(cause),
        }
        if any(times_ns.values()) or cause in predicted or (path is not None and cause == "unexplained"):
            per_step = {key: None if ns is None else ns / account.num_steps for key, ns in times_ns.items()}
            yield depth, {"name": label, **per_step, **predicted.get(cause, {})}


def _idle_by_row(account: StepAccount) -> dict[str, int]:
    if account.idle_ns is None:
        return {}
    idle_ns: dict[str, int] = {
        "other" if cause == "unknown" else cause: ns for cause, ns in account.idle_ns.items()
    }
    idle_ns["step"] = sum(idle_ns.values())
    if account.after_waits_ns is not None:
        idle_ns["after waits"] = account.after_waits_ns
        idle_ns["late"] = idle_ns["host"] - account.after_waits_ns
    return idle_ns


def _predicted(one: WhatIf, path: CriticalPath) -> dict[str, Cell]:
    count, recorded_ns = len(path.steps), path.recorded_ns
    return {
        "work_ns": one.work_ns / count,
        "path_ns": one.path_ns / count,
        "half_ns": one.half_ns / count,
        "half_ratio": share(recorded_ns - one.half_ns, recorded_ns),
        "none_ns": one.none_ns / count,
        "none_ratio": share(recorded_ns - one.none_ns, recorded_ns),
    }


def _slowest(ranks: Ranks[CriticalPath]) -> tuple[int, CriticalPath]:
    return max(ranks.found.items(), key=lambda one: one[1].recorded_ns / len(one[1].steps))


def _rank_note(
    ranks: Ranks[StepAccount] | Ranks[CriticalPath], number: int, *, is_longest: bool = True
) -> tuple[str, ...]:
    if not ranks.are_several:
        return ()
    of_those = "" if is_longest else " of those with a critical path"
    return (f"Rank {number}, which has the longest steps{of_those}.",)


def _left_out_note(path: CriticalPath | None) -> tuple[str, ...]:
    if path is None or not path.num_left_out:
        return ()
    return (
        f"First {_steps(len(path.steps))} only, because {path.num_left_out} more {_have(path.num_left_out)}.",
    )


def _missing_notes(account: StepAccount) -> tuple[str, ...]:
    notes = []
    if account.path is None:
        lacking = "critical path" if account.idle_ns else "critical path or GPU idle time"
        notes.append(f"No {lacking}: {account.why_not_path}.")
    if account.idle_ns and account.after_waits_ns is None:
        notes.append(f"No After waits and CPU late: {account.why_not_waits}.")
    if account.counted_step_ns is not None:
        notes.append(
            "Without the first step of a series, as in CPU waits for the GPU, the mean step is"
            f" {format_duration(account.counted_step_ns)}."
        )
    return tuple(notes)


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _have(count: int) -> str:
    return f"{'has' if count == 1 else 'have'} too many events"
