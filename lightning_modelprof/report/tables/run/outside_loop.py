"""Time outside the loop: before its first step and after its last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.phase_times import OutsideRow, OutsideTimes
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.rows import common_folder, shortened
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.units import format_duration

_MIN_SHARE: Final = 1e-3

_AFTER_UNSEEN: Final = (
    "Time after the loop isn't included. To add it to the report and files, use"
    " Trainer(profiler=ModelProfiler(...))."
)


AROUND: Final = TableSpec(
    id="around",
    title="Outside the loop",
    help=(
        "Slow parts before and after the loop. Together with the loop, they add up to the total measured"
        " time. The callback measures from its own `setup` to the loop."
        " `Trainer(profiler=ModelProfiler(...))` measures from `configure_callbacks`, before data is"
        " prepared, to the very end, and then updates report and files. Nothing after an exception in the"
        " loop is measured."
    ),
    columns=(
        ColumnSpec(
            "action",
            "Action",
            help=(
                "a Lightning action that it reports to its profiler: a hook (`prepare_data`, `setup`,"
                " `configure_model`, `configure_optimizers`, `train_dataloader`, callback hooks) with"
                " everything inside it."
            ),
            of=lambda one: one.label,
        ),
        ColumnSpec(
            "when",
            "When",
            help="before or after the loop.",
            of=lambda one: "before loop" if one.is_before else "after loop",
        ),
        ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
        ColumnSpec("total_ns", "Total", Unit.DURATION_NS, adds_up=True),
        ColumnSpec(
            "after_ns",
            "Gap",
            Unit.DURATION_NS,
            adds_up=True,
            help=(
                "time from its end to the next action. This is Lightning's own work, such as loading a"
                " checkpoint, moving the model to the device or starting workers."
            ),
        ),
        ColumnSpec(
            "ratio",
            "Ratio(%)",
            Unit.RATIO,
            adds_up=True,
            help="total plus gap, as a share of the loop and everything around it.",
        ),
        ColumnSpec("place", "Line", help="location of your method."),
    ),
    rows={
        "sanity check": (
            "from the first callback's `on_sanity_check_start` to the last one's `on_sanity_check_end`."
        ),
        "this profiler's report": "from the end of the loop to the next action.",
        "all other actions": "actions below 0.1% each.",
    },
    place=100,
)


@run_table(AROUND)
def around_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    around = facts.outside_loop
    folder = common_folder({file for one in around.rows if (file := _own_file(one))})
    rows = [*_shown(around, is_before=True), *_shown(around, is_before=False)]
    notes = [f"Paths are relative to {folder}."] if folder and any(map(_own_file, rows)) else []
    after = around.after_ns
    notes.append(
        f"{format_duration(around.before_ns)} before the loop, {format_duration(around.loop_ns)} in it"
        + ("." if after is None else f", {format_duration(after)} after it.")
    )
    notes += [_AFTER_UNSEEN] if after is None else []
    yield AROUND.table(
        rows,
        of={
            "ratio": lambda one: around.share(one.whole_ns),
            "place": lambda one: (
                f"{shortened(file, folder)}:{one.place.line}" if (file := _own_file(one)) else None
            ),
        },
        notes=tuple(notes),
    )


def _own_file(one: OutsideRow) -> str:
    return "" if one.place is None or one.place.is_library else one.place.file or ""


def _shown(around: OutsideTimes, *, is_before: bool) -> list[OutsideRow]:
    side = [one for one in around.rows if one.is_before is is_before]
    shown = [one for one in side if around.share(one.whole_ns) >= _MIN_SHARE]
    small = [one for one in side if one not in shown]
    if small:
        shown.append(
            OutsideRow(
                label="all other actions",
                is_before=is_before,
                calls=sum(one.calls for one in small),
                total_ns=sum(one.total_ns for one in small),
                after_ns=sum(one.after_ns for one in small),
            )
        )
    return shown
