"""All charts and flame graphs of a report, collected from this folder's files, in reading order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts import chart
from lightning_modelprof.report.discovery import found_beside
from lightning_modelprof.report.model import Chart
from lightning_modelprof.report.specs import ChartSpec


def _all_made(made: Sequence[ChartSpec[Any, Any]]) -> tuple[ChartSpec[Any, Any], ...]:
    return found_beside(__name__, made, lambda one: (one.place, one.draw.__module__))


CHARTS: Final = _all_made(chart.CHARTS)
TRACE_CHARTS: Final = _all_made(chart.TRACE_CHARTS)
FLAMES: Final = _all_made(chart.FLAMES)


def trace_charts(
    by_rank: Mapping[int, TraceFacts], *, id_suffix: str = "", title_suffix: str = ""
) -> tuple[Chart, ...]:
    """Build the charts of one set of ranks.

    Args:
        by_rank: rank → facts of its trace; all cover the same time.
    """
    return tuple(
        replace(chart, id=chart.id + id_suffix, title=chart.title + title_suffix)
        for entry in TRACE_CHARTS
        if (chart := entry.of(by_rank)) is not None
    )
