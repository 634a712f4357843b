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
    return summary_table(summary, table_id, notes=(*_window_notes(window), *([reason] if reason else [])))


def summary_table(
    summary: ModelSummary, table_id: str, title_suffix: str = "", notes: tuple[str, ...] = ()
) -> Table:
    """A Model Summary as a table.

    Args:
        summary: what the table shows.
        table_id: key of the table in files.
        title_suffix: what follows the title, with its own space.
        notes: more notes, after those on what the figures mean.
    """
    steps = _steps_text(summary.step_numbers)
    return Table(
        id=table_id,
        title=f"Model Summary{title_suffix} ({steps})",
        columns=_COLUMNS,
        rows=tuple(
            (row.label, *(getattr(row, column.key) for column in _COLUMNS[1:])) for row in summary.rows
        ),
        depths=tuple(row.depth for row in summary.rows),
        notes=(
            f"The rows cover {steps} ({summary.num_steps} in total).",
            _CPU_NOTE,
            *(_GPU_NOTES if summary.has_device else ()),
            *summary.notes,
            *notes,
        ),
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


def _window_notes(window: Window) -> tuple[str, ...]:
    """What to keep in mind about this window."""
    if window.status is not WindowStatus.PARTIAL:
        return ()
    requested = _steps_text(range(window.first_step, window.last_step + 1))
    because = f": {window.note}" if window.note else "."
    return (f"The window is partial, {requested} were requested{because}",)


def _steps_text(numbers: Sequence[int]) -> str:
    """Steps in words: ``step 7``, ``steps 3 to 5`` or ``steps 3, 4, 8``."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):  # they are in order, and none comes twice
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers))
