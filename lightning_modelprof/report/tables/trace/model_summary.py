"""Model Summary of one profiler window: Paddle's table, with Others split up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import WindowFacts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.trace.model_summary import NO_STEPS, ModelSummary
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.discovery import place_in
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_columns
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import Window, WindowStatus

_COLUMNS: Final = (
    ColumnSpec("name", "Name", of=lambda row: row.label),
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
    *tally_columns("host_", "CPU", lambda row: row.host_calls, each="per call; for ProfileStep, per step.")[
        1:
    ],
    ColumnSpec(
        "host_ratio", "Ratio(%)", Unit.RATIO, "CPU", help="share of ProfileStep.", share_of="host_total_ns"
    ),
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
    *tally_columns("device_", "GPU", lambda row: row.device_calls if row.calls else None)[1:],
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        help="share of ProfileStep's GPU total, which isn't utilization.",
        share_of="device_total_ns",
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


_ORDER: Final = (
    "profile_step",
    *(phase.key for phase in PHASES if phase.is_core),
    "others",
    *(phase.key for phase in PHASES if not phase.is_core),
)
"""Row keys in order; others follow, and "unattributed" is last."""

_NO_DEVICE_NOTE: Final = "The trace has no GPU events, so GPU figures are dashes."
_SOME_DEVICES_NOTE: Final = "Some ranks have no GPU events, so GPU figures only cover the others."


@trace_table(MODEL_SUMMARY, "model", TraceFacts.model_summary)
def model_summary_table(ranks: Ranks[ModelSummary]) -> Table:
    return _table(*ranks.found.values())


def window_model_summary(one: WindowFacts) -> Table:
    """Build the Model Summary of one window of a run."""
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


def _table(*ranks: ModelSummary) -> Table:
    summary = pool(ranks)
    steps = _steps_text(summary.step_numbers)
    rows = sorted(summary.rows, key=lambda row: (row.key == "unattributed", place_in(_ORDER, row.key)))
    whole = rows[0]
    some = _SOME_DEVICES_NOTE if summary.has_device else _NO_DEVICE_NOTE
    return MODEL_SUMMARY.table(
        rows,
        wholes={"host_ratio": whole.host_total_ns, "device_ratio": whole.device_total_ns},
        title=f"{MODEL_SUMMARY.title} ({steps})",
        depths=tuple(row.depth for row in rows),
        notes=(
            f"Covers {steps} ({summary.num_steps} in total).",
            *summary.notes,
            *(() if all(one.has_device for one in ranks) else (some,)),
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
    """Format as ``step 7``, ``steps 3 to 5`` or ``steps 3, 4, 8``."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):  # numbers are sorted and unique
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers))
