"""The charts of a report, in reading order. A new chart is one file here and one line in a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.charts.memory_curve import memory_curve
from lightning_modelprof.report.charts.model import flops_by_phase
from lightning_modelprof.report.charts.phases_per_step import phases_per_step
from lightning_modelprof.report.charts.ranks import rank_phases
from lightning_modelprof.report.charts.step_time import step_time
from lightning_modelprof.report.charts.steps import phase_shares
from lightning_modelprof.report.charts.throughput import throughput
from lightning_modelprof.report.charts.validation_shares import validation_shares
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
