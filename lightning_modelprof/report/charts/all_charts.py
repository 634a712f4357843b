"""The charts and flame graphs of a report, in reading order: those of every file beside this one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts import chart
from lightning_modelprof.report.model import Chart
from lightning_modelprof.report.specs import ChartSpec

_NO_CHARTS: Final = ("all_charts", "bins", "chart")

_ORDER: Final = (
    *("phase_shares", "validation_shares", "phases_per_step", "step_time", "throughput"),
    *("num_workers", "worker_queue", "queue_depth", "rank_phases", "flops_by_phase"),
    *("memory_curve", "window_memory", "step_breakdown", "rank_shares", "operator_shares"),
    *("kernel_types", "call_stacks", "worker_stacks", "modules"),
)
"""New ones follow."""


def _in_order(made: list[ChartSpec[Any, Any]]) -> tuple[ChartSpec[Any, Any], ...]:
    place = {id_: number for number, id_ in enumerate(_ORDER)}
    return tuple(sorted(made, key=lambda one: (place.get(one.id, len(place)), one.draw.__module__)))


for _file in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if _file.name not in _NO_CHARTS:
        importlib.import_module(f"{__package__}.{_file.name}")
if not chart.CHARTS:
    raise ImportError(f"no charts in {Path(__file__).parent}")

CHARTS: Final = _in_order(chart.CHARTS)
TRACE_CHARTS: Final = _in_order(chart.TRACE_CHARTS)
FLAMES: Final = _in_order(chart.FLAMES)


def trace_charts(
    by_rank: Mapping[int, TraceFacts], *, id_suffix: str = "", title_suffix: str = ""
) -> tuple[Chart, ...]:
    """The charts of one set of ranks.

    Args:
        by_rank: rank → facts of its trace; of the same time.
    """
    return tuple(
        replace(chart, id=chart.id + id_suffix, title=chart.title + title_suffix)
        for entry in TRACE_CHARTS
        if (chart := entry.of(by_rank)) is not None
    )
