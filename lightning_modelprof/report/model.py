"""What a reader sees: tables, notes and machine-readable sections, all with raw numbers.

Nothing here is rounded, cut, escaped or given a unit suffix; that is the business of ``show``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Cell = str | int | float | None
"""A raw value; ``None`` is *not measured* and prints as a dash, never as zero."""


class Unit(Enum):
    """What a number means; how it is written is decided from this, in ``show/format.py`` alone."""

    TEXT = "text"
    COUNT = "count"
    DURATION_NS = "ns"
    RATIO = "ratio"
    """A fraction of 1, shown as a percentage."""
    RATE = "rate"
    """Something per second; the row's or column's label says what."""
    BYTES = "bytes"
    BY_ROW = "by_row"
    """The unit stands in ``Table.row_units``."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; columns of the same ``group`` are one packed column in Paddle's layout.

    With ``group="CPU"`` and labels Total, Avg, Max, Min, Ratio(%) a text table shows one column headed
    ``CPU Total / Avg / Max / Min / Ratio(%)`` with cells like ``138.99 / 12.64 / 17.91 / 10.65 / 100.00``.
    """

    key: str
    label: str
    unit: Unit = Unit.TEXT
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A complete, sorted, unformatted table. Outputs may show fewer rows and then say so.

    Attributes:
        id: stable key in files, ``snake_case``.
        title: heading.
        columns: the columns; the first is the row's name.
        rows: one tuple of cells per row, as many as there are columns.
        depths: indentation level of each row's name; empty when all are 0.
        row_units: unit of the ``BY_ROW`` columns for each row; empty when no column is ``BY_ROW``.
        notes: sentences under the table, or under its reason to be absent: definitions, caveats, why a
            column is empty.
        absent_reason: why there are no rows; ``None`` when there are.

    Raises:
        ValueError: when rows, depths or units do not fit the columns.
    """

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    depths: tuple[int, ...] = ()
    row_units: tuple[Unit, ...] = ()
    notes: tuple[str, ...] = ()
    absent_reason: str | None = None

    def __post_init__(self) -> None:
        keys = ", ".join(column.key for column in self.columns)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.id!r}: expected {len(self.columns)} cells per row ({keys}),"
                    f" got {len(row)}: {row!r}"
                )
        for label, extra in (("depths", self.depths), ("row_units", self.row_units)):
            if extra and len(extra) != len(self.rows):
                raise ValueError(f"table {self.id!r}: expected {len(self.rows)} {label}, got {len(extra)}")
        if not self.rows and self.absent_reason is None:
            raise ValueError(f"table {self.id!r}: a table without rows needs an absent_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that an output ever sees.

    Attributes:
        title: one line: what ran.
        facts: label → value pairs for the head of the report, in order.
        tables: in reading order.
        notes: what was not measured and why; what was left out.
        sections: the machine-readable part of report.json besides the tables
            (``run``, ``benchmark``, ``phases``, ``windows``, ...), plain JSON values only.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    sections: Mapping[str, Any]
