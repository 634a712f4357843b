"""One Model Summary for each profiler window."""

from __future__ import annotations

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.tables.model_summary import model_summary_table


def window_summaries(analysis: Analysis) -> tuple[Table, ...]:
    """The Model Summary of every window, in order; none when no window was asked for."""
    return tuple(
        model_summary_table(facts.window, facts.model_summary, facts.trace_note) for facts in analysis.windows
    )
