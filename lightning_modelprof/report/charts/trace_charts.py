"""The charts of traces, in reading order. A new one is one file beside this and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.device import trace_steps
from lightning_modelprof.report.charts.kernel_types import kernel_types
from lightning_modelprof.report.charts.operator_shares import operator_shares
from lightning_modelprof.report.charts.rank_shares import rank_shares
from lightning_modelprof.report.model import Chart

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
