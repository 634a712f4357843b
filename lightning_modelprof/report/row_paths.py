"""Which row of a table is which: its texts after those of the rows that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_modelprof.report.model import Table, Unit

RowPath = tuple[str, ...]
"""The texts of a row after those of the rows that it is in."""


def row_paths(table: Table, names: Sequence[int] | None = None) -> Mapping[RowPath, int]:
    """The path of each row → its position; a second such row gets a number.

    Args:
        table: any.
        names: positions of the columns that name a row; ``None`` for all texts.
    """
    rows: dict[RowPath, int] = {}
    path: list[str] = []
    if names is None:
        names = [position for position, column in enumerate(table.columns) if column.unit is Unit.TEXT]
    for index, row in enumerate(table.rows):
        depth = table.depths[index] if table.depths else 0
        text = " ".join(str(row[position]) for position in names if row[position])
        path[depth:] = [text]
        number = 2
        while tuple(path) in rows:
            path[-1], number = f"{text} ({number})", number + 1
        rows[tuple(path)] = index
    return rows
