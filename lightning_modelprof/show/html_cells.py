"""Cells and headings of a table as the page shows them, and as they are copied from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Cell, TimeUnit, Unit
from lightning_modelprof.show.format import DASH
from lightning_modelprof.show.grid import Strip

_RAW_UNITS: Final = {
    Unit.DURATION_NS: "ns",
    Unit.RATIO: "fraction",
    Unit.BYTES: "bytes",
    Unit.BYTES_PER_S: "bytes/s",
    Unit.FLOPS: "FLOP",
    Unit.FLOPS_PER_S: "FLOP/s",
    Unit.MACS: "MAC",
}
"""What raw numbers count, as far as their unit has a name."""

_PERCENT: Final = re.compile(r"\s*\(%\)$|^%$")


@dataclass(frozen=True, slots=True)
class Header:
    """The heading of one column.

    Attributes:
        label: as shown.
        is_number: whether it belongs to the right.
        is_sortable: whether its cells have an order.
        raw: the heading of the raw numbers, with the group and their unit: ``CPU Total (ns)``.
        full: the heading of the numbers as shown, where nothing else says group and unit: ``CPU Total (ms)``.
    """

    label: str
    is_number: bool
    is_sortable: bool
    raw: str
    full: str


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell.

    Attributes:
        text: as in the terminal, padded so that decimal points stand below each other.
        value: the raw number to sort by; ``None`` for text and for what was not measured.
        bar: share of the cell that is filled, 0..1; ``None`` without a bar.
        is_number: whether it belongs to the right.
        is_missing: whether it is the dash of what was not measured.
        full: the whole name where ``text`` is cut; ``""`` otherwise.
    """

    text: str
    value: float | None
    bar: float | None
    is_number: bool
    is_missing: bool
    full: str


def write_header(
    strip: Strip, group: str, before: str, time_unit: TimeUnit | None, *, has_order: bool
) -> Header:
    """The heading of a column.

    Args:
        strip: the column.
        group: heading above it; ``""`` without one.
        before: label of the column before it, of which a column that is called ``%`` alone is the share.
        time_unit: of the table's durations.
        has_order: whether there are rows to sort.
    """
    name = " ".join(filter(None, (group, _PERCENT.sub("", strip.label) or before)))
    shown = "%" if strip.unit is Unit.RATIO else time_unit if strip.unit is Unit.DURATION_NS else None
    return Header(
        label=strip.label,
        is_number=strip.is_number,
        is_sortable=has_order and strip.unit is not Unit.BY_ROW and strip.label != "",
        raw=with_raw_unit(name, strip.unit),
        full=f"{name} ({shown})" if shown else name,
    )


def with_raw_unit(name: str, unit: Unit) -> str:
    """A name with what the raw numbers of ``unit`` count, unless it says so itself, as ``FLOPs`` does."""
    raw = _RAW_UNITS.get(unit)
    if raw is None or re.search(rf"\b{re.escape(raw)}", name):
        return name
    return f"{name} ({raw})"


def is_share(unit: Unit, values: Iterable[Cell]) -> bool:
    """Whether a column holds shares of something, which a bar shows well; a change may be below 0."""
    return unit is Unit.RATIO and not any(isinstance(value, int | float) and value < 0 for value in values)


def write_cell(text: str, raw: Cell, unit: Unit, *, has_bar: bool) -> CellView:
    """A cell of a column of ``unit``; spaces at the left do nothing in a cell that belongs to the right."""
    if isinstance(raw, str) or raw is None:
        full = one_line(raw) if isinstance(raw, str) else ""
        full = full if len(full) > len(text) else ""
        shown = text if unit is Unit.TEXT else text.lstrip()
        return CellView(shown, None, None, unit is not Unit.TEXT, text.strip() == DASH, full)
    value = float(raw) if math.isfinite(raw) else None
    bar = min(max(value, 0.0), 1.0) if has_bar and value is not None else None
    return CellView(text.lstrip(), value, bar, unit is not Unit.TEXT, False, "")
