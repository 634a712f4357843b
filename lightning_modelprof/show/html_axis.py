"""The labels along the sides of a chart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_modelprof.report.model import Chart
from lightning_modelprof.show.format import format_tick


@dataclass(frozen=True, slots=True)
class Tick:
    """A label at a share of an axis, in percent from the left or from the bottom."""

    at: float
    label: str


def _nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that divides ``span`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)


def y_ticks(top: float, scale: float) -> list[Tick]:
    """Labels at round numbers from 0 up to ``top``, counted in ``scale`` of the values' own unit."""
    step = _nice_step(top / scale, 5)
    count = int(top / scale / step * (1 + 1e-9))
    return [
        Tick(100 * k * step * scale / top, format_tick(without_noise(k * step), step))
        for k in range(count + 1)
    ]


def without_noise(value: float) -> float | int:
    """Without the noise that a multiple of 0.1 has in binary."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def x_ticks(chart: Chart) -> tuple[Tick, ...]:
    """Labels at round numbers: at the edges of a histogram's bars, else below the middle of a point."""
    first, width = chart.x[0], point_width(chart)
    span = width * len(chart.x)
    is_edge = chart.kind == "histogram"
    step = _nice_step(span, 7)
    if not is_edge and width >= 1:
        step = max(1.0, step)  # a step has no half
    ticks = []
    for k in range(math.ceil(first / step - 1e-9), math.floor((first + span) / step + 1e-9) + 1):
        at = 100 * (k * step - first + (0 if is_edge else min(width, 1) / 2)) / span
        if 0 <= at <= 100:
            ticks.append(Tick(at, format_tick(without_noise(k * step), step, is_place=True)))
    return tuple(ticks)


def point_width(chart: Chart) -> float:
    """Distance of two points; 1 where there is only one."""
    return (chart.x[-1] - chart.x[0]) / (len(chart.x) - 1) if len(chart.x) > 1 else 1.0
