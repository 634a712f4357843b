"""Around the loop: what passes before its first step and after its last."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.phase_times import AroundRow, AroundTimes
from lightning_modelprof.report.kinds import TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.units import milliseconds

_MIN_SHARE: Final = 1e-3

_UNTIL: Final = {True: "before", False: "after"}

_AFTER_UNSEEN: Final = (
    "What comes after the loop is not among it: Trainer(profiler=ModelProfiler(...)) sees that, and adds it"
    " to report and files when all is over."
)


AROUND: Final = TableKind(
    id="around",
    title="Around the loop",
    help=(
        "What takes long before the loop and after it: with the time of the loop it sums to all"
        " that was seen, to the nanosecond. The callback sees from its own `setup` to the loop;"
        " `Trainer(profiler=ModelProfiler(...))` from `configure_callbacks`, before data are"
        " prepared, to the very end, and writes report and files once more then. After an"
        " exception in the loop nothing more is seen."
    ),
    columns=(
        Column(
            "action",
            "Action",
            help=(
                "one of Lightning's, of which it tells its profiler: a hook (`prepare_data`, `setup`,"
                " `configure_model`, `configure_optimizers`, `train_dataloader`, those of callbacks), and"
                " what of others runs inside it."
            ),
        ),
        Column("when", "When", help="before the loop, or after it."),
        Column("calls", "Calls", Unit.COUNT, adds_up=True),
        Column("total_ns", "Total", Unit.DURATION_NS, adds_up=True),
        Column(
            "after_ns",
            "Gap",
            Unit.DURATION_NS,
            adds_up=True,
            help=(
                "from its end to the next action, which is Lightning's own work: loading a checkpoint,"
                " moving the model to the device, starting the first dataloader's workers."
            ),
        ),
        Column(
            "ratio",
            "Ratio(%)",
            Unit.RATIO,
            adds_up=True,
            help="total and gap, of the loop and all around it.",
        ),
        Column("place", "Line", help="where your method is written."),
    ),
    rows={
        "sanity check": (
            "from the first callback's `on_sanity_check_start` to the last one's `on_sanity_check_end`."
        ),
        "this profiler's report": "lasts from the end of the loop to the next action.",
        "all other actions": "those that take less than 0.1 % each.",
    },
)


def around_table(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """What takes long before and after the loop: setup, checkpoints, the sanity check, teardown."""
    around = analysis.around
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: list[str] = []
    if not isinstance(around, Absent):
        rows = tuple(row for is_before in _UNTIL for row in _rows(around, is_before))
        after = around.after_ns
        notes.append(
            f"Before the loop {milliseconds(around.before_ns)} passed, in it {milliseconds(around.loop_ns)}"
            + ("." if after is None else f", after it {milliseconds(after)}.")
        )
        notes += [_AFTER_UNSEEN] if after is None else []
    return (
        AROUND.table(
            rows=rows,
            notes=tuple(notes),
            absent_reason=around.reason if isinstance(around, Absent) else None,
            is_detail=isinstance(around, Absent),
        ),
    )


def _rows(around: AroundTimes, is_before: bool) -> list[tuple[Cell, ...]]:
    side = [one for one in around.rows if one.is_before is is_before]
    shown = [one for one in side if around.share(one.whole_ns) >= _MIN_SHARE]
    small = [one for one in side if one not in shown]
    if small:
        shown.append(
            AroundRow(
                label="all other actions",
                is_before=is_before,
                calls=sum(one.calls for one in small),
                total_ns=sum(one.total_ns for one in small),
                after_ns=sum(one.after_ns for one in small),
            )
        )
    return [
        (
            one.label,
            _UNTIL[is_before],
            one.calls,
            one.total_ns,
            one.after_ns,
            around.share(one.whole_ns),
            None if one.place is None or one.place.is_library else f"{one.place.file}:{one.place.line}",
        )
        for one in shown
    ]
