"""A chart as shapes and texts: paths in a square of 1000 by 1000, and labels at shares of its sides.

The page stretches the square to its width, so one drawing works for every screen and the printer. Every
displayed number is formatted here, through ``units.py``; the page's script only moves and shows what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.definitions import definition
from lightning_modelprof.report.model import Chart, Unit
from lightning_modelprof.show.html.colors import color_classes, nameless_class
from lightning_modelprof.units import (
    DASH,
    NS_PER,
    UNIT_NAMES,
    choose_byte_unit,
    choose_time_unit,
    format_amount,
    format_cell,
    format_duration,
    format_tick,
    heading,
)

_SIDE: Final = 1000.0


_GAP: Final = 0.12
"""Share of a bar's slot that stays empty, if there are few bars."""


_FEW: Final = 80


_STROKE: Final = 4.0
"""Half the length of the stroke for a lone point of a curve; at least a quarter of its slot."""


_CROSS: Final = 70.0
"""Half the height of the cross for a curve's only point."""


_OUTLIER: Final = 3.0
"""If the largest value is this many times the 98th percentile, the axis ends near the percentile."""


_LEAST_FOR_OUTLIERS: Final = 10
"""With fewer points, each one matters and none is an outlier."""


_NUM_LINES: Final = 5
"""Number of colors without a meaning that a thin line can have."""


class Layer(Record, frozen=True):
    """One series: label, color class and path; with a single value, also its text and share."""

    label: str
    color: str
    path: str
    value: str
    percent: float | None


class ChartView(Record, frozen=True, kw_only=True):
    """Everything that a page needs for a chart.

    Attributes:
        form: ``bar`` for one stacked bar, ``area`` for bars side by side, ``line`` for curves.
        layers: lowest first.
        hover: tooltip texts: the points, and each layer's values.
        level: line across the chart, with its label.
    """

    id: str
    title: str
    about: str
    form: str
    y_label: str
    x_label: str
    layers: tuple[Layer, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    notes: tuple[str, ...]
    hover: dict[str, Any]
    level: Tick | None = None


def chart_view(chart: Chart) -> ChartView | None:
    """Draw a chart; ``None`` if it has no points."""
    if not chart.x or not chart.series:
        return None
    known = [[_known(value) for value in series.values] for series in chart.series]
    sums = [sum(column) for column in zip(*known, strict=True)]
    write, y_label, scale = _writer(chart, sums)
    notes = [printable(note) for note in chart.notes]
    is_bar = chart.kind == "stacked" and len(chart.x) == 1
    top, note = _axis_top(chart, sums if chart.kind == "stacked" else list(chain(*known)), write, scale)
    if note and not is_bar:
        notes.append(note)
    floors = _floors(chart, known)
    layers = tuple(
        Layer(
            label=printable(series.label),
            color=color,
            path=""
            if is_bar
            else _curve(chart, series.values, top)
            if chart.kind == "line"
            else _bars(floor, heights, top),
            value=format_amount(series.values[0], chart.unit) if is_bar else "",
            percent=100 * heights[0] / sums[0] if is_bar and sums[0] else None,
        )
        for series, heights, floor, color in zip(chart.series, known, floors, _colors(chart), strict=True)
    )
    return ChartView(
        id=chart.id,
        title=printable(chart.title),
        about=definition("chart", chart.id),
        form="bar" if is_bar else "line" if chart.kind == "line" else "area",
        y_label="" if is_bar else y_label,
        x_label=printable(chart.x_label),
        layers=layers,
        x_ticks=() if is_bar else x_ticks(chart),
        y_ticks=() if is_bar else tuple(y_ticks(top, scale)),
        notes=tuple(notes),
        hover={} if is_bar else _hover(chart, sums, write),
        level=None if is_bar else _level(chart, top),
    )


def _level(chart: Chart, top: float) -> Tick | None:
    if chart.level is None or not 0 <= chart.level <= top:
        return None
    return Tick(
        100 * chart.level / top, f"{printable(chart.level_label)}: {format_amount(chart.level, chart.unit)}"
    )


def _writer(chart: Chart, sums: Sequence[float]) -> tuple[Callable[[float | None], str], str, float]:
    """Return the value formatter, the axis label, and the size of the axis unit in raw units."""
    values = [value for series in chart.series for value in series.values if value is not None]
    if chart.unit is Unit.DURATION_NS:
        unit = choose_time_unit(sums if chart.kind == "stacked" else values)
        return (
            (lambda value: format_cell(value, chart.unit, time_unit=unit)),
            UNIT_NAMES[unit],
            float(NS_PER[unit]),
        )
    if chart.unit is Unit.RATIO:
        return (lambda value: format_cell(value, chart.unit)), "%", 0.01
    if chart.unit is Unit.BYTES:
        name, num_bytes = choose_byte_unit(values)
        return (lambda value: format_cell(value, chart.unit)), name, float(num_bytes)
    name = printable(chart.series[0].label).lower() if len(chart.series) == 1 else ""
    return (lambda value: format_cell(value, chart.unit)), heading(name, chart.unit), 1.0


def _known(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _colors(chart: Chart) -> list[str]:
    if len(chart.series) == 1:
        return [nameless_class(0)]
    if chart.kind == "line":
        return [nameless_class(place % _NUM_LINES) for place in range(len(chart.series))]
    return color_classes([series.key for series in chart.series])


def _floors(chart: Chart, known: Sequence[list[float]]) -> list[list[float]]:
    zeros = [0.0] * len(chart.x)
    if chart.kind != "stacked":
        return [zeros for _ in chart.series]
    above = accumulate(
        known[:-1],
        lambda low, high: [a + b for a, b in zip(low, high, strict=True)],
        initial=zeros,
    )
    return list(above)


def _axis_top(
    chart: Chart, heights: Sequence[float], write: Callable[[float | None], str], scale: float
) -> tuple[float, str]:
    """Return the upper end of the axis, and a sentence if it cuts values off."""
    ranked = sorted(heights)
    largest, usual = ranked[-1], ranked[int(0.98 * (len(ranked) - 1))]
    is_few = len(ranked) < _LEAST_FOR_OUTLIERS
    if chart.kind == "histogram" or is_few or usual <= 0 or largest <= _OUTLIER * usual:
        return (max(largest, 0.0) * 1.04 or scale), ""
    top = 1.3 * usual
    count = sum(height > top for height in heights)
    what = "One value is" if count == 1 else f"{format_cell(count, Unit.COUNT)} values are"
    most = format_duration(largest) if chart.unit is Unit.DURATION_NS else write(largest)
    return top, f"{what} above the chart{': ' if count == 1 else '; the largest is '}{most}."


def _curve(chart: Chart, values: Sequence[float | None], top: float) -> str:
    first, width = chart.x[0], point_width(chart)
    return _line([(x - first + width / 2) / (width * len(chart.x)) for x in chart.x], values, top)


def _bars(floor: Sequence[float], heights: Sequence[float], top: float) -> str:
    width = _SIDE / len(heights)
    gap = _GAP * width / 2 if len(heights) <= _FEW else 0.0
    return "".join(
        f"M{index * width + gap:.1f} {_y(low, top):.1f}H{(index + 1) * width - gap:.1f}"
        f"V{_y(low + height, top):.1f}H{index * width + gap:.1f}Z"
        for index, (low, height) in enumerate(zip(floor, heights, strict=True))
        if height > 0 and low < top
    )


def _line(places: Sequence[float], values: Sequence[float | None], top: float) -> str:
    """Draw a curve with gaps where nothing was measured; ``places`` are shares of the width.

    A point without neighbors is a short stroke, because a curve of one point would be invisible. If it's the
    only one among other curves' points, it's a cross, because a stroke along another curve would be invisible
    too.
    """
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(places, values, strict=True):
        if value is None or not math.isfinite(value):
            runs.append([])
        else:
            runs[-1].append((_SIDE * place, _y(value, top)))
    path, half = [], max(_STROKE, _SIDE / (4 * len(places)))
    for run in runs:
        if len(run) == 1:
            (x, y) = run[0]
            path.append(f"M{max(x - half, 0):.1f} {y:.1f}H{min(x + half, _SIDE):.1f}")
            if len(places) > sum(map(len, runs)) == 1:
                path.append(f"M{x:.1f} {max(y - _CROSS, 0):.1f}V{min(y + _CROSS, _SIDE):.1f}")
        elif run:
            path.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run))
    return "".join(path)


def _y(value: float, top: float) -> float:
    return _SIDE * (1 - min(max(value / top, 0.0), 1.0))


def _hover(chart: Chart, sums: Sequence[float], write: Callable[[float | None], str]) -> dict[str, Any]:
    width, label = point_width(chart), printable(chart.x_label)
    points = []
    for index, x in enumerate(chart.x):
        end = chart.x[index + 1] if index + 1 < len(chart.x) else x + width
        start = _place(x)
        if chart.kind == "histogram":
            start += f" to {format_cell(end, Unit.TEXT)}"
        elif width > 1 and width.is_integer():
            start += f" to {_place(end - 1)}"
        points.append(f"{label} {start}")
    hover: dict[str, Any] = {
        "points": points,
        "values": [[write(value) for value in series.values] for series in chart.series],
        "totals": [],
    }
    if chart.kind == "stacked":
        columns = zip(*(series.values for series in chart.series), strict=True)
        hover["totals"] = [
            DASH if all(value is None for value in column) else write(total)
            for column, total in zip(columns, sums, strict=True)
        ]
    return hover


@lru_cache(maxsize=1024)  # a run's charts share their places
def _place(x: float) -> str:
    return format_cell(without_noise(x), Unit.TEXT)


class Tick(Record, frozen=True):
    """A label on an axis, at a percentage from the left or the bottom."""

    at: float
    label: str


def _nice_step(span: float, most: int) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... that divides ``span`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)


def y_ticks(top: float, scale: float) -> list[Tick]:
    """Label round numbers from 0 to ``top``; ``scale`` is the size of the axis unit."""
    step = _nice_step(top / scale, 5)
    count = int(top / scale / step * (1 + 1e-9))
    return [
        Tick(100 * k * step * scale / top, format_tick(without_noise(k * step), step))
        for k in range(count + 1)
    ]


def without_noise(value: float) -> float | int:
    """Remove the binary rounding noise of multiples of 0.1."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def x_ticks(chart: Chart) -> tuple[Tick, ...]:
    """Label round numbers: at bar edges in histograms, else below the middle of a point."""
    first, width = chart.x[0], point_width(chart)
    span = width * len(chart.x)
    is_edge = chart.kind == "histogram"
    step = _nice_step(span, 7)
    if not is_edge and width >= 1:
        step = max(1.0, step)  # there are no half steps
    ticks = []
    for k in range(math.ceil(first / step - 1e-9), math.floor((first + span) / step + 1e-9) + 1):
        at = 100 * (k * step - first + (0 if is_edge else min(width, 1) / 2)) / span
        if 0 <= at <= 100:
            ticks.append(Tick(at, format_tick(without_noise(k * step), step, is_place=True)))
    return tuple(ticks)


def point_width(chart: Chart) -> float:
    """Return the distance between points; 1 if there is only one."""
    return (chart.x[-1] - chart.x[0]) / (len(chart.x) - 1) if len(chart.x) > 1 else 1.0
