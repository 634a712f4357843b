"""Callbacks: hook times of each other callback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table

_MIN_SHARE: Final = 1e-3


CALLBACKS: Final = TableSpec(
    id="callbacks",
    title="Callbacks",
    help=(
        "Time in each hook of the other callbacks over the whole fit, including everything it calls (a"
        " ModelCheckpoint's saving is here and in the phase `checkpoint`). If a hook triggers another"
        " callback's hook, such as `on_save_checkpoint`, that time only counts in the inner hook's row."
        " Findings exclude profiler overhead, so their figures may be lower."
    ),
    columns=(
        ColumnSpec("callback", "Callback"),
        ColumnSpec("hook", "Hook", help="hook name."),
        ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, help="calls of the hook."),
        ColumnSpec("total_ns", "Total", Unit.DURATION_NS, help="time of all calls."),
        ColumnSpec(
            "ratio",
            "Ratio(%)",
            Unit.RATIO,
            help=(
                "share of the whole fit, from the first hook after this callback's own to the end. The rows"
                " never add up to more than 100%."
            ),
            share_of="total_ns",
        ),
    ),
    rows={
        "all other hooks": "hooks below 0.1% each, added up.",
    },
    place=90,
    views=("steps",),
    compared=CompareKey(keys=("total_ns",), sum_over="run", names=("callback", "hook")),
)


@run_table(CALLBACKS)
def callback_times(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    # Hooks also run outside steps, such as on_train_epoch_end after the last one.
    loop_ns = facts.wall_ns + sum(facts.outside_ns.values())
    names = _short_names({time.callback for time in facts.callbacks})
    small = [time for time in facts.callbacks if loop_ns and time.total_ns / loop_ns < _MIN_SHARE]
    rows: list[object] = [time for time in facts.callbacks if time not in small]
    if any(time.calls for time in small):
        rows.append(
            {
                "callback": "all other hooks",
                "calls": sum(time.calls for time in small),
                "total_ns": sum(time.total_ns for time in small),
            }
        )
    if not rows:
        raise NotMeasured("none other than lightning-modelprof's own")
    yield CALLBACKS.table(
        rows,
        of={"callback": lambda time: names[time.callback]},
        wholes={"ratio": loop_ns},
    )


def _short_names(names: set[str]) -> dict[str, str]:
    """Shorten names to the class where it's unique; Lightning's names include the callback's whole state."""
    class_of = {name: name.partition("{")[0] for name in names}
    classes = list(class_of.values())
    return {name: kind if classes.count(kind) == 1 else name for name, kind in class_of.items()}
