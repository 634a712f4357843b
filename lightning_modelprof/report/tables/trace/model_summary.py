"""Model Summary of one profiler window: Paddle's table, with what Others consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import WindowFacts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.model_summary import NO_STEPS, ModelSummary, pool_model_summaries
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table
from lightning_modelprof.run.records import Window, WindowStatus

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, help="number of calls. Others has no calls."),
    ColumnSpec(
        "host_total_ns",
        "Total",
        Unit.DURATION_NS,
        "CPU",
        help=(
            "time with the phase's range as our innermost range, within the steps. Rows of one level add up"
            " to the row above exactly."
        ),
    ),
    ColumnSpec("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU", help="per call; for ProfileStep, per step."),
    ColumnSpec("host_max_ns", "Max", Unit.DURATION_NS, "CPU", help="per call; for ProfileStep, per step."),
    ColumnSpec("host_min_ns", "Min", Unit.DURATION_NS, "CPU", help="per call; for ProfileStep, per step."),
    ColumnSpec("host_ratio", "Ratio(%)", Unit.RATIO, "CPU", help="share of ProfileStep."),
    ColumnSpec(
        "device_total_ns",
        "Total",
        Unit.DURATION_NS,
        "GPU",
        help=(
            "summed durations of the GPU events (kernels, copies, memsets) *launched* during the phase by any"
            " thread, whenever they ran. Overlapping events count in full, as in Paddle."
        ),
    ),
    ColumnSpec("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        help="share of ProfileStep's GPU total, which isn't utilization.",
    ),
)
MODEL_SUMMARY: Final = TableSpec(
    id="model_summary",
    title="Model Summary",
    help=(
        "From the trace of one profiler window (the newest three have a table), in Paddle's layout."
        " Profiling slows the recorded steps, so compare shares with Phases and take speeds from Perf"
        " Summary. Traces recorded by torch.profiler alone get their phases from torch's own ranges, as a"
        " note explains."
    ),
    columns=_COLUMNS,
    rows={
        "ProfileStep": "recorded steps.",
        "Others": "everything not in other rows of its level, with its parts below.",
        "Not in any range": "step time in none of our ranges, which is Lightning's loop.",
    },
    has_phases=True,
    views=("overview",),
    compared=CompareKey(keys=("host_total_ns",), sum_over="window"),
)


_CPU_NOTE: Final = (
    "A phase's CPU time is the time in which it's the innermost phase, so the phases and Others add up to"
    " ProfileStep. Avg, Max and Min are self times of single calls."
)
_GPU_NOTES: Final = (
    "GPU time is the sum of all GPU events (kernels, copies, memsets) launched in the phase by any thread,"
    " whenever they ran. Its ratio is the share of GPU time launched in the steps.",
    "Overlapping GPU events on different streams all count in full.",
)


@trace_table(MODEL_SUMMARY, "model", TraceFacts.model_summary)
def model_summary_table(ranks: Ranks[ModelSummary]) -> Table:
    return _table(pool_model_summaries(list(ranks.found.values())))


def window_model_summary(one: WindowFacts) -> Table:
    """The Model Summary of one window of a run."""
    window = one.window
    table_id = MODEL_SUMMARY.id if window.index == 0 else f"{MODEL_SUMMARY.id}_{window.index}"
    try:
        if one.facts is None:
            raise NotMeasured(one.trace_note or _why_absent(window))
        table = _table(one.facts.model_summary)
    except NotMeasured as why:
        requested = _steps_text(range(window.first_step, window.last_step + 1))
        title = f"{MODEL_SUMMARY.title} ({requested})"
        return MODEL_SUMMARY.table(id=table_id, title=title, absent_reason=why.reason)
    about = (*_window_notes(window), *([one.trace_note] if one.trace_note else []))
    return replace(table, id=table_id, notes=(*table.notes, *about))


def _table(summary: ModelSummary) -> Table:
    steps = _steps_text(summary.step_numbers)
    return MODEL_SUMMARY.table(
        title=f"{MODEL_SUMMARY.title} ({steps})",
        rows=tuple(
            (row.label, *(getattr(row, column.key) for column in _COLUMNS[1:])) for row in summary.rows
        ),
        depths=tuple(row.depth for row in summary.rows),
        notes=(
            f"Covers {steps} ({summary.num_steps} in total).",
            _CPU_NOTE,
            *(_GPU_NOTES if summary.has_device else ()),
            *summary.notes,
        ),
    )


def _why_absent(window: Window) -> str:
    event = window.note.removesuffix(" first")
    if event == window.note:
        return event or NO_STEPS
    if window.status is WindowStatus.NOT_REACHED:
        return f"not recorded: {event} before step {window.first_step}"
    if window.status is WindowStatus.EMPTY:
        return f"not recorded: {event} before the end of step {window.first_step}"
    return window.note


def _window_notes(window: Window) -> tuple[str, ...]:
    if window.status is not WindowStatus.PARTIAL:
        return ()
    requested = _steps_text(range(window.first_step, window.last_step + 1))
    because = f": {window.note}" if window.note else "."
    return (f"The window is partial; {requested} were requested{because}",)


def _steps_text(numbers: Sequence[int]) -> str:
    """Steps in words: ``step 7``, ``steps 3 to 5`` or ``steps 3, 4, 8``."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):  # they are in order, and none comes twice
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers))
