"""A table for other programs: CSV, and pandas where it is installed."""

from __future__ import annotations

import csv
import io
from typing import Any

from lightning_modelprof.errors import MissingExtraError
from lightning_modelprof.report.model import Cell, Table


def table_csv(table: Table) -> str:
    """Raw values below the keys of the columns; ``None`` is empty."""
    text = io.StringIO()
    header, rows = _raw(table)
    csv.writer(text).writerows([header, *rows])
    return text.getvalue()


def table_dataframe(table: Table) -> Any:
    """The same as a DataFrame, with the units of the columns in ``attrs["units"]``.

    Raises:
        MissingExtraError: when pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415  # nothing else needs it
    except ImportError:
        raise MissingExtraError(
            "to_dataframe: expected pandas to be installed, got no pandas. Install it: pip install pandas;"
            " to_csv() and to_markdown() work without it."
        ) from None
    header, rows = _raw(table)
    frame = pd.DataFrame(rows, columns=header)
    frame.attrs["units"] = {column.key: column.unit.value for column in table.columns}
    return frame


def _raw(table: Table) -> tuple[list[str], list[tuple[Cell, ...]]]:
    header = [column.key for column in table.columns]
    if not table.depths:
        return header, list(table.rows)
    return ["depth", *header], [(depth, *row) for depth, row in zip(table.depths, table.rows, strict=True)]
