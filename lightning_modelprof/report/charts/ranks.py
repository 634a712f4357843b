"""Ranks side by side: what a clean step of each consists of."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.charts.bins import even_axis
from lightning_modelprof.report.charts.layers import split_layers
from lightning_modelprof.report.model import Chart, Series, Unit

_MOST: Final = 256
"""Bars that can be told apart across a page."""


def rank_phases(analysis: Analysis) -> Chart | None:
    """Which rank does what while the others wait; ``None`` with fewer than two ranks, or more than 256.

    Definition: mean self time by phase over each rank's own clean steps. The phases with the most time on the
    first rank have layers of their own, the rest is one layer.
    """
    skew = analysis.rank_skew
    if isinstance(skew, Absent) or len(skew.ranks) > _MOST:
        return None
    layers, _ = split_layers(analysis.phases)
    shown = [phase for phase in layers if all(pace.phases_ns[phase.key] is not None for pace in skew.ranks)]
    keys = {phase.key for phase in shown}
    rest = tuple(
        sum(ns or 0.0 for key, ns in pace.phases_ns.items() if key not in keys) for pace in skew.ranks
    )
    numbers = [pace.rank for pace in skew.ranks]
    first, x_label = even_axis(numbers, "rank", "ranks")
    series = [
        Series(
            key=phase.key,
            label=phase.label,
            values=tuple(pace.phases_ns[phase.key] for pace in skew.ranks),
        )
        for phase in shown
    ]
    if any(rest):
        series.append(Series(key="rest", label="Other phases", values=rest))
    return Chart(
        id="rank_phases",
        title="Phases of each rank",
        kind="stacked",
        x_label=x_label,
        x=tuple(float(first + place) for place in range(len(numbers))),
        unit=Unit.DURATION_NS,
        series=tuple(series),
        notes=(
            "Means over the clean steps of each rank. Ranks meet in every step: what one does for longer"
            " shows on the others where they wait, mostly in Backward.",
        ),
    )
