"""What is known of a table, a chart or a flame graph before it is made: definitions, place, what is compared.

Nothing of it is in a report: of a stored one it is found by the id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Generic, Literal, TypeVar

from lightning_modelprof.record import Record, field
from lightning_modelprof.report.model import Cell, Column, Table, TimeUnit, Unit

_FactsT = TypeVar("_FactsT")
_DrawnT = TypeVar("_DrawnT")

_ONE_CALL: Final = "of one call; of phases, of one step."
_PERCENTILE: Final = (
    "percentiles, the values that 50, 90 and 99% of the others do not exceed; p50 is the median."
)

COMMON: Final[Mapping[str, str]] = {
    "Calls": "how often it happened.",
    "Total": "time of all calls.",
    "Avg": _ONE_CALL,
    "Max": _ONE_CALL,
    "Min": _ONE_CALL,
    "Ratio(%)": (
        "share of the table's whole, which is its first row, or what the table's definition says; shares of"
        " things that happen at the same time can sum to more than 100%."
    ),
    "p50": _PERCENTILE,
    "p90": _PERCENTILE,
    "p99": _PERCENTILE,
}
"""Label of a column of many tables → its definition, where its own table says nothing else."""

WORDS: Final[Mapping[str, str]] = {
    "step": (
        "one training batch through the loop. A step runs from the start of its fetch to the start of"
        " the next fetch. The first step of an epoch starts where the step before it ended, so it also"
        " holds the end of the last epoch (hooks, checkpoints) and the exchange of the loader's"
        " workers; the first step of a fit starts with its first epoch. So the steps tile the training"
        " time. A batch that never ended (an exception, `return -1`) is no step; its time is"
        " `outside_steps_ns`. In `trainer.validate`, `test` and `predict` every batch is a step: see"
        " Evaluation loops."
    ),
    "phase": (
        "one kind of work inside a step. Phases are exclusive (self time) and tile the step: they sum"
        " to it to the nanosecond."
    ),
    "clean step": (
        "a step that the benchmark uses: not the first of an epoch (in an evaluation loop: of a"
        " dataloader), not among the first `skip_first`, no FLOPs counted or modules timed in it, no"
        " profiler warm-up, not recorded, no window closed and no archive saved in it, no validation"
        " in it, and its batch not prefetched while the profiler worked. The last: training stands"
        " still while a window closes, the DataLoader's workers do not, so the next `num_workers` ×"
        " `prefetch_factor` steps (of several dataloaders the largest number) find their batches ready"
        " and are left out. After a save of the archive these are no more than the batches that steps"
        " would have taken in the time of the save. On a GPU, steps in which the CPU only queued work"
        " that the GPU did later aren't clean either: they look much faster than training is. Steps that"
        " only accumulate gradients are clean: a step is one batch."
    ),
    "kept steps": (
        "the steps between device-aware bounds (see Step time breakdown), without last ones that are"
        " incomplete."
    ),
    "span": (
        "from the begin of the first kept step to the end of the last, without the time between steps"
        " that do not follow each other (several windows in one file, numbers left out, a gap longer"
        " than 1 ms and than the median step); a note names the stretches."
    ),
}
"""Words that definitions use → what they mean."""


class Figure(Record, frozen=True, kw_only=True):
    """What is compared of a table.

    Attributes:
        keys: of columns; the first that has numbers on both sides is compared.
        sum_over: what it is a sum over, which may be longer on one side than on the other; ``None`` for a
            mean or a figure per step.
        names: of the columns that say which row is which; ``None`` for the first column alone.
    """

    keys: tuple[str, ...]
    sum_over: Literal["window", "run"] | None = None
    names: tuple[str, ...] | None = None


class TableKind(Record, frozen=True, kw_only=True):
    """What all tables of one kind have in common.

    Attributes:
        id: as of ``Table``, without the number of a window or trace.
        title: as of ``Table``; a table may have a longer one.
        help: its definition, in Markdown.
        columns: all that such a table may have, each with its definition.
        rows: label of a row → its definition, where rows are figures with names of ours.
        names_slices: whether rows, but for those in ``rows``, have the names of slices of the timeline.
        has_phases: whether rows are phases as well.
        views: keys of the dashboard's views that it is in, beside the one of all tables.
        place: in these views, where not in reading order: less is further up.
        compared: which figure; ``None`` leaves it to the first.
        heading: of its section in the reference, where that is not its title.
    """

    id: str
    title: str
    help: str
    columns: tuple[Column, ...]
    rows: Mapping[str, str] = field(default_factory=dict)
    names_slices: bool = False
    has_phases: bool = False
    views: tuple[str, ...] = ()
    place: int = 0
    compared: Figure | None = None
    heading: str = ""

    def table(
        self,
        rows: tuple[tuple[Cell, ...], ...] = (),
        *,
        id: str = "",  # noqa: A002  # as the table calls it
        title: str = "",
        columns: tuple[Column, ...] = (),
        labels: Mapping[str, str] | None = None,
        depths: tuple[int, ...] = (),
        row_units: tuple[Unit, ...] = (),
        notes: tuple[str, ...] = (),
        absent_reason: str | None = None,
        time_unit: TimeUnit | None = None,
        row_limit: int | None = None,
        is_detail: bool = False,
    ) -> Table:
        """A table of this kind, without its definitions; what is given is as of ``Table``.

        Columns are by default all of the kind's. ``labels`` has those, by key, that are not the kind's.
        """
        labels = labels or {}
        return Table(
            id=id or self.id,
            title=title or self.title,
            columns=tuple(
                replace(column, label=labels.get(column.key, column.label), help="")
                for column in columns or self.columns
            ),
            rows=rows,
            depths=depths,
            row_units=row_units,
            notes=notes,
            absent_reason=absent_reason,
            time_unit=time_unit,
            row_limit=row_limit,
            is_detail=is_detail,
        )


class Drawing(Record, Generic[_FactsT, _DrawnT], frozen=True, kw_only=True):
    """What is known of a chart or a flame graph.

    Attributes:
        id, title: as of it; its title may name the steps of its loop.
        draw: makes it; ``None`` where there is nothing to draw: what was not measured stands in the tables.
        help: its definition, in Markdown.
        views: keys of the dashboard's views that it is in.
    """

    id: str
    title: str
    draw: Callable[[_FactsT], _DrawnT | None]
    help: str
    views: tuple[str, ...] = ()
