"""Around the loop: what passes before its first step and after its last."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.phase_times import AroundRow, AroundTimes
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.words import milliseconds

_MIN_SHARE: Final = 1e-3

_UNTIL: Final = {True: "before", False: "after"}

_AFTER_UNSEEN: Final = (
    "What comes after the loop is not among it: Trainer(profiler=ModelProfiler(...)) sees that, and adds it"
    " to report and files when all is over."
)


def around_table(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """What takes long before and after the loop: setup, checkpoints, the sanity check, teardown.

    Definition: host time by Lightning's action, of nested ones the outermost, and the gap from its end to the
    next one; actions of less than 0.1 % with their gap are summed in one row for each side of the loop.
    """
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
        Table(
            id="around",
            title="Around the loop",
            columns=(
                Column("action", "Action"),
                Column("when", "When"),
                Column("calls", "Calls", Unit.COUNT, adds_up=True),
                Column("total_ns", "Total", Unit.DURATION_NS, adds_up=True),
                Column("after_ns", "Gap", Unit.DURATION_NS, adds_up=True),
                Column("ratio", "Ratio(%)", Unit.RATIO, adds_up=True),
                Column("place", "Line"),
            ),
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
