"""Model Summary of one profiler window: Paddle's table, with what Others consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.model_summary import ModelSummary
from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.run.records import Window, WindowStatus

_COLUMNS: Final = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT),
    Column("host_total_ns", "Total", Unit.DURATION_NS, "CPU"),
    Column("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    Column("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    Column("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    Column("host_ratio", "Ratio(%)", Unit.RATIO, "CPU"),
    Column("device_total_ns", "Total", Unit.DURATION_NS, "GPU"),
    Column("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    Column("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    Column("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    Column("device_ratio", "Ratio(%)", Unit.RATIO, "GPU"),
)

_CPU_NOTE: Final = (
    "CPU time of a phase is the time in which it is the innermost one, so the phases and Others sum to"
    " ProfileStep; Avg, Max and Min are of one call's own time."
)
_GPU_NOTES: Final = (
    "GPU time is the sum of all device events (kernels, copies, sets) launched in the phase by any thread,"
    " whenever they ran; its ratio is the share of the GPU time launched in the steps.",
    "If two device events overlap on different streams, both are counted in full.",
)


NO_STEPS: Final = "the trace holds none of the recorded steps"
"""Why there is no Model Summary though there is a trace that can be read."""


def model_summary_table(window: Window, summary: ModelSummary | None, reason: str = "") -> Table:
    """The Model Summary of one window.

    Args:
        window: what was asked for and what became of it.
        summary: ``None`` when the window gave no step to summarize; the table then says why.
        reason: why there is no summary, ``""`` to take it from the window; a note when there is one.
    """
    table_id = "model_summary" if window.index == 0 else f"model_summary_{window.index}"
    if summary is None:
        requested = _steps_text(range(window.first_step, window.last_step + 1))
        return Table(
            id=table_id,
            title=f"Model Summary ({requested})",
            columns=_COLUMNS,
            rows=(),
            absent_reason=reason or _why_absent(window),
        )
    return Table(
        id=table_id,
        title=f"Model Summary ({_steps_text(summary.step_numbers)})",
        columns=_COLUMNS,
        rows=tuple(
            (row.label, *(getattr(row, column.key) for column in _COLUMNS[1:])) for row in summary.rows
        ),
        depths=tuple(row.depth for row in summary.rows),
        notes=(*_notes(window, summary), *([reason] if reason else [])),
    )


def _why_absent(window: Window) -> str:
    """In words, from what became of the window."""
    event = window.note.removesuffix(" first")
    if event == window.note:
        return event or NO_STEPS
    if window.status is WindowStatus.NOT_REACHED:
        return f"not recorded: {event} before step {window.first_step}"
    if window.status is WindowStatus.EMPTY:
        return f"not recorded: {event} before the end of step {window.first_step}"
    return window.note


def _notes(window: Window, summary: ModelSummary) -> tuple[str, ...]:
    """What the figures mean and what to keep in mind about this window."""
    notes = [f"The rows cover {_steps_text(summary.step_numbers)} ({summary.num_steps} in total)."]
    if window.status is WindowStatus.PARTIAL:
        requested = _steps_text(range(window.first_step, window.last_step + 1))
        because = f": {window.note}" if window.note else "."
        notes.append(f"The window is partial, {requested} were requested{because}")
    notes.append(_CPU_NOTE)
    if summary.has_device:
        notes.extend(_GPU_NOTES)
    return (*notes, *summary.notes)


def _steps_text(numbers: Sequence[int]) -> str:
    """Steps in words: ``step 7``, ``steps 3 to 5`` or ``steps 3, 4, 8``."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):  # they are in order, and none comes twice
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers))
