"""Specifications of tables, charts and flame graphs: definitions, position and what to compare.

Reports don't include them; a stored report's are looked up by ID.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, Literal, TypeVar, cast

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.tally import Tally, share
from lightning_modelprof.record import Record, field
from lightning_modelprof.report.model import Better, Cell, Column, Table, TimeUnit, Unit

_FactsT = TypeVar("_FactsT")
_DrawnT = TypeVar("_DrawnT")

_ONE_CALL: Final = "per call; for phases, per step."
_PERCENTILE: Final = "percentiles: 50, 90 and 99% of the values aren't above them; p50 is the median."

COMMON: Final[Mapping[str, str]] = {
    "Calls": "number of calls.",
    "Total": "total time of all calls.",
    "Avg": _ONE_CALL,
    "Max": _ONE_CALL,
    "Min": _ONE_CALL,
    "Ratio(%)": (
        "share of the first row, unless the table says otherwise. Shares of overlapping things can add up"
        " to more than 100%."
    ),
    "p50": _PERCENTILE,
    "p90": _PERCENTILE,
    "p99": _PERCENTILE,
}
"""Definitions of common column labels, for tables that don't define their own."""

WORDS: Final[Mapping[str, str]] = {
    "step": (
        "one training batch, from the start of its fetch to the start of the next fetch. The first step of"
        " an epoch also includes the end of the previous epoch (hooks, checkpoints) and the loader restart,"
        " so steps cover the whole training time. A batch that never finished (an exception, `return -1`)"
        " isn't a step; its time is in `outside_steps_ns`. In `trainer.validate`, `test` and `predict`,"
        " every batch is a step (see Evaluation loops)."
    ),
    "phase": (
        "one kind of work within a step. Phases don't overlap (self time), and they add up to the step"
        " exactly."
    ),
    "clean step": (
        "a step that counts in all averages. Excluded are the first step of an epoch (in evaluation loops,"
        " of a dataloader), the first `skip_first` steps, steps with validation, FLOP counting, module"
        " timing, profiler warm-up, a recorded or closing window or a saved archive, and steps whose batch"
        " was prefetched while the profiler worked (at most `num_workers` × `prefetch_factor` steps after a"
        " window closes or an archive is saved). On a GPU, steps where the CPU only queued work that the"
        " GPU ran later are excluded too. Steps that only accumulate gradients count, since a step is one"
        " batch."
    ),
    "complete steps": (
        "the recorded steps between GPU-aware bounds (see Step time breakdown), without incomplete ones at"
        " the end."
    ),
    "span": (
        "from the start of the first complete step to the end of the last one, without gaps between steps"
        " that aren't consecutive (multiple windows in one file, or a gap longer than 1 ms and than the"
        " median step). A note lists the parts."
    ),
}
"""Words used in definitions → their meaning."""


LAST: Final = 1_000
"""Default position."""


class CompareKey(Record, frozen=True, kw_only=True):
    """What to compare in a table.

    Attributes:
        keys: column keys; the first with numbers on both sides is compared.
        sum_over: what its figures are sums over, which may differ in length between sides; ``None`` for a
            mean or a figure per step.
        names: keys of the columns that identify a row; ``None`` for the first column alone.
        better: whether less or more is better, for all rows or by row name; without an entry, the unit
            decides.
    """

    keys: tuple[str, ...]
    sum_over: Literal["window", "run"] | None = None
    names: tuple[str, ...] | None = None
    better: Better | Mapping[str, Better] | None = None


class ColumnSpec(Column, frozen=True):
    """A column's definition, and how to get its cell from a row.

    Attributes:
        help: definition, in Markdown.
        of: cell of a row's object; ``None`` takes the attribute named ``key``. A ``dict`` row has its cells
            by key; missing keys give empty cells.
        share_of: key of the column that this one is the share of: of its sum over all rows, or of the whole
            given to the table.
        is_optional: whether to leave out the column if no row has it.
    """

    help: str = ""
    of: Callable[[Any], Cell] | None = None
    share_of: str = ""
    is_optional: bool = False

    def cell(self, row: object) -> Cell:
        if isinstance(row, dict):
            return cast("Cell", row.get(self.key))
        return cast("Cell", getattr(row, self.key)) if self.of is None else self.of(row)


class TableSpec(Record, frozen=True, kw_only=True):
    """What all tables of one kind have in common.

    Attributes:
        id: as in ``Table``, without a window or trace number.
        title: as in ``Table``; a table's own may be longer.
        help: definition, in Markdown.
        columns: all possible columns.
        depth_of: a row object's indentation level; ``None`` if rows don't nest.
        unit_of: a row object's unit in ``BY_ROW`` columns; ``None`` without such columns.
        better_of: whether less or more of a row object's figure is better; ``None`` if neither.
        rows: row label → definition, if rows are our own named figures.
        names_slices: whether rows, except those in ``rows``, are named like timeline slices.
        has_phases: whether rows are phases as well.
        place: position in reading order, ascending. Trace tables follow the order of their views.
        views: keys of the dashboard views it is in, in addition to the one of all tables.
        place_in_views: position there if not in reading order, ascending.
        compared: figure to compare; ``None`` for the first.
        heading: heading in the reference, if not its title.
    """

    id: str
    title: str
    help: str
    columns: tuple[ColumnSpec, ...]
    depth_of: Callable[[Any], int] | None = None
    unit_of: Callable[[Any], Unit] | None = None
    better_of: Callable[[Any], Better] | None = None
    rows: Mapping[str, str] = field(default_factory=dict)
    names_slices: bool = False
    has_phases: bool = False
    place: int = LAST
    views: tuple[str, ...] = ()
    place_in_views: int = 0
    compared: CompareKey | None = None
    heading: str = ""

    def table(
        self,
        rows: Iterable[object] = (),
        *,
        of: Mapping[str, Callable[[Any], Cell]] | None = None,
        wholes: Mapping[str, float | None] | None = None,
        id: str = "",  # noqa: A002  # named as in Table
        title: str = "",
        columns: tuple[ColumnSpec, ...] = (),
        labels: Mapping[str, str] | None = None,
        depths: tuple[int, ...] = (),
        row_units: tuple[Unit, ...] = (),
        notes: tuple[str, ...] = (),
        absent_reason: str | None = None,
        time_unit: TimeUnit | None = None,
        row_limit: int | None = None,
        is_detail: bool = False,
    ) -> Table:
        """Make a table of this kind, without definitions; other arguments as in ``Table``.

        Args:
            rows: the row objects that columns read cells from.
            of: replaces columns' ``of``, by key, where cells depend on more than the row.
            wholes: key of a share column → its whole, if that isn't the sum over the rows.
            columns: by default all of the kind's.
            labels: column key → label, where it isn't the kind's.
        """
        labels, of, rows = labels or {}, of or {}, list(rows)
        columns = tuple(replace(one, of=of.get(one.key, one.of)) for one in columns or self.columns)
        shown = [
            (column, cells)
            for column, cells in self._cells(columns, rows, wholes or {})
            if not rows or not column.is_optional or any(cell is not None for cell in cells)
        ]
        if self.depth_of is not None:
            depths = tuple(map(self.depth_of, rows))
        if self.unit_of is not None and any(column.unit is Unit.BY_ROW for column, _ in shown):
            row_units = tuple(map(self.unit_of, rows))
        return Table(
            id=id or self.id,
            title=title or self.title,
            columns=tuple(
                Column(
                    column.key,
                    labels.get(column.key, column.label),
                    column.unit,
                    column.group,
                    column.adds_up,
                    column.change,
                    column.is_main,
                )
                for column, _ in shown
            ),
            rows=tuple(zip(*(cells for _, cells in shown), strict=True)),
            depths=depths,
            row_units=row_units,
            row_better=() if self.better_of is None else tuple(map(self.better_of, rows)),
            notes=notes,
            absent_reason=absent_reason,
            time_unit=time_unit,
            row_limit=row_limit,
            is_detail=is_detail,
        )

    def _cells(
        self, columns: tuple[ColumnSpec, ...], rows: list[object], wholes: Mapping[str, float | None]
    ) -> Iterator[tuple[ColumnSpec, Sequence[Cell]]]:
        by_key = {column.key: column for column in (*self.columns, *columns)}
        for column in columns:
            if column.share_of:
                parts = [_number(by_key[column.share_of].cell(row)) for row in rows]
                whole = wholes.get(column.key, sum(part for part in parts if part is not None))
                yield column, [share(part, whole) for part in parts]
            else:
                yield column, [column.cell(row) for row in rows]


def _number(cell: Cell) -> float | None:
    return None if isinstance(cell, str) else cell


class ChartSpec(Record, Generic[_FactsT, _DrawnT], frozen=True, kw_only=True):
    """The specification of a chart or a flame graph.

    Attributes:
        id, title: as in the chart; its title may name the loop's steps.
        draw: makes the chart; returns ``None`` if there is nothing to draw.
        help: definition, in Markdown.
        place: position in reading order, ascending.
        views: keys of the dashboard views it is in.
    """

    id: str
    title: str
    draw: Callable[[_FactsT], _DrawnT | None]
    help: str
    place: int = LAST
    views: tuple[str, ...] = ()

    def of(self, facts: _FactsT) -> _DrawnT | None:
        """Draw the chart; ``None`` also if it wasn't measured, which the tables explain."""
        try:
            return self.draw(facts)
        except NotMeasured:
            return None


_Four = tuple[ColumnSpec, ColumnSpec, ColumnSpec, ColumnSpec]
_FIGURES: Final = ("total_ns", "avg_ns", "max_ns", "min_ns")


def tally_columns(
    prefix: str,
    group: str,
    of: Callable[[Any], Tally | None],
    *,
    help: str = "",  # noqa: A002  # named as in ColumnSpec
    each: str = "",
    adds_up: bool = False,
    is_main: bool = False,
) -> _Four:
    """Make the columns Total, Avg, Max and Min of a tally, with keys that start with ``prefix``.

    Args:
        of: tally of a row's object; ``None`` gives empty cells.
        help: definition of the total.
        each: definition of the other three.
        adds_up: whether totals may be summed over rows.
        is_main: whether a page shows the total initially.
    """

    def column(label: str, figure: str, help: str) -> ColumnSpec:  # noqa: A002
        def cell(row: object) -> Cell:
            tally = of(row)
            return None if tally is None else getattr(tally, figure)

        return ColumnSpec(prefix + figure, label, Unit.DURATION_NS, group, help=help, of=cell)

    return (
        replace(column("Total", "total_ns", help), adds_up=adds_up, is_main=is_main),
        column("Avg", "avg_ns", each),
        column("Max", "max_ns", each),
        column("Min", "min_ns", each),
    )


def tally_cells(prefix: str, tally: Tally | None) -> dict[str, Cell]:
    """Return the cells of these columns for a ``dict`` row."""
    return {} if tally is None else {prefix + figure: getattr(tally, figure) for figure in _FIGURES}
