"""Which figure of two tables to compare row by row, and how many steps it sums over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.report.model import Cell, Column, Report, Table, Unit
from lightning_modelprof.report.specs import CompareKey
from lightning_modelprof.report.tables.run.all_tables import kind_of

_CALLS: Final = ("calls", "count", "gaps", "allocations", "num_steps")
"""Keys of columns that count what the figure is about."""

_NUMBER: Final = re.compile(r"_\d+$")


def figure_of(table: Table) -> CompareKey:
    kind = kind_of(table.id)
    if kind is not None and kind.compared is not None:
        return kind.compared
    position = first_figure(table)
    return CompareKey(
        keys=() if position is None else (table.columns[position].key,),
        names=tuple(column.key for column in table.columns if column.unit is Unit.TEXT),
    )


def first_figure(table: Table) -> int | None:
    """Return the position of the first average, else the first time, else the first number.

    Totals depend on the run's length, so they come last.
    """
    numbers = [
        position
        for position, column in enumerate(table.columns)
        if column.unit is not Unit.TEXT and any(is_number(row[position]) for row in table.rows)
    ]
    averages = [position for position in numbers if "avg" in table.columns[position].key]
    times = [position for position in numbers if table.columns[position].unit is Unit.DURATION_NS]
    return next(iter((*averages, *times, *numbers)), None)


def calls_column(table: Table) -> Column | None:
    return next((column for key in _CALLS for column in table.columns if column.key == key), None)


def is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float)


def num_steps(report: Report, table: Table) -> int | None:
    """Return how many steps of all ranks a table's compared figure sums over.

    Returns:
        ``None`` if the figure isn't a sum, or the number is unknown.
    """
    over = figure_of(table).sum_over
    if over == "run":
        steps = None if report.summary.run is None else report.summary.run.num_steps
        return steps or None
    if over is None:
        return None
    if table.id.startswith("model_summary"):  # a run has one per window
        return _calls_of_step(table)
    number = _NUMBER.search(table.id)
    suffix = number.group() if number else ""
    traces = [one for one in report.summary.traces if one.tables_suffix == suffix]
    if traces:
        numbers = [len(one.steps) for one in traces]
        return sum(numbers) if all(numbers) else None
    overview = next((one for one in report.tables if one.id == f"overview{suffix}"), None)
    return None if overview is None else _calls_of_step(overview)


def _calls_of_step(table: Table) -> int | None:
    position = column_position(table, "calls")
    calls = None if position is None or not table.rows else table.rows[0][position]
    return calls if isinstance(calls, int) and calls > 0 else None


def column_position(table: Table, key: str) -> int | None:
    return next((index for index, column in enumerate(table.columns) if column.key == key), None)


def heading_of(column: Column) -> str:
    """Return a column's heading outside its table, with its group."""
    if not column.group:
        return column.label
    if column.group.startswith("By "):
        return f"{column.group[3:].capitalize()} {column.label.lower()}"
    return f"{column.group} {column.label}"


def comparable(table: Table) -> Table:
    """Reduce the Device Summary to one figure per row, and the step time breakdown to the mean step."""
    base = _NUMBER.sub("", table.id)
    if not table.rows or base not in ("device_usage", "step_breakdown"):
        return table
    if base == "device_usage":
        return _one_figure_per_row(table)
    total, *parts = zip(table.columns[1:], table.rows[0][1:], strict=True)  # the first row is the mean
    return replace(
        table,
        columns=(Column("name", "Part of the step"), Column("mean", "Mean", Unit.DURATION_NS)),
        rows=(("Step", total[1]), *((column.label, cell) for column, cell in parts)),
        depths=(0, *[1] * len(parts)),
        row_units=(),
    )


def _one_figure_per_row(table: Table) -> Table:
    figures: Sequence[int] = [
        position for position, column in enumerate(table.columns) if column.unit is not Unit.TEXT
    ]
    places = [(row, position) for row in table.rows for position in figures]
    labels = [table.columns[position].label.removesuffix(" (%)") for _, position in places]
    return replace(
        table,
        columns=(table.columns[0], Column("figure", "Metric"), Column("value", "Value", Unit.BY_ROW)),
        rows=tuple((row[0], label, row[at]) for (row, at), label in zip(places, labels, strict=True)),
        row_units=tuple(table.columns[position].unit for _, position in places),
    )
