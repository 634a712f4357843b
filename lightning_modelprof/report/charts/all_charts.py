"""The charts of a report, in reading order. A new chart is one file here and one line in a tuple."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.device import kernel_types, operator_shares, trace_steps
from lightning_modelprof.report.charts.model import flops_by_phase, memory_curve
from lightning_modelprof.report.charts.ranks import rank_phases, rank_shares
from lightning_modelprof.report.charts.steps import (
    phase_shares,
    phases_per_step,
    step_time,
    throughput,
    validation_shares,
)
from lightning_modelprof.report.model import Chart

__all__ = ["CHARTS", "ChartBuilder"]


ChartBuilder = Callable[[Analysis], Chart | None]
"""``None`` where there is nothing to draw: what was not measured stands in the tables and notes."""


CHARTS: Final[tuple[ChartBuilder, ...]] = (
    phase_shares,
    validation_shares,
    phases_per_step,
    step_time,
    throughput,
    rank_phases,
    flops_by_phase,
    memory_curve,
)


TraceChartBuilder = Callable[[Mapping[int, TraceFacts]], Chart | None]
"""From the facts of each rank of one job; ``None`` where there is nothing to draw."""


TRACE_CHARTS: Final[tuple[TraceChartBuilder, ...]] = (
    trace_steps,
    rank_shares,
    operator_shares,
    kernel_types,
)


def trace_charts(
    by_rank: Mapping[int, TraceFacts], *, id_suffix: str = "", title_suffix: str = ""
) -> tuple[Chart, ...]:
    """The charts of one set of ranks.

    Args:
        by_rank: rank → facts of its trace; of the same time.
        id_suffix: what follows each chart's id.
        title_suffix: what follows each chart's title.
    """
    return tuple(
        replace(chart, id=chart.id + id_suffix, title=chart.title + title_suffix)
        for draw in TRACE_CHARTS
        if (chart := draw(by_rank)) is not None
    )
