"""Columns that many tables have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from lightning_modelprof.analysis.timeline.tally import Tally
from lightning_modelprof.report.model import Cell, Unit
from lightning_modelprof.report.specs import ColumnSpec

_Four = tuple[ColumnSpec, ColumnSpec, ColumnSpec, ColumnSpec]
_FIGURES: Final = ("total_ns", "avg_ns", "max_ns", "min_ns")


def tally_columns(
    prefix: str,
    group: str,
    of: Callable[[Any], Tally | None],
    *,
    help: str = "",  # noqa: A002  # as the column calls it
    each: str = "",
    adds_up: bool = False,
    is_main: bool = False,
) -> _Four:
    """Total, Avg, Max and Min of a tally, whose keys begin with ``prefix``.

    Args:
        of: the tally of what a row is about; empty cells where it's ``None``.
        help: definition of the total.
        each: definition of the other three.
        adds_up: whether the totals of rows may be summed.
        is_main: whether a page shows the total at first.
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
    """The cells of these columns, for a row that is a ``dict``."""
    return {} if tally is None else {prefix + figure: getattr(tally, figure) for figure in _FIGURES}
