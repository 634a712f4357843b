"""The tables of a trace file that belongs to no run of ours."""

from __future__ import annotations

from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.report.model import Column, Table
from lightning_modelprof.report.tables.model_summary import summary_table
from lightning_modelprof.report.tables.step_breakdown import step_breakdown_table


def trace_model_summary(facts: TraceFacts, id_suffix: str, title_suffix: str) -> Table:
    """The Model Summary of a trace."""
    if facts.model_summary is not None:
        return summary_table(facts.model_summary, f"model_summary{id_suffix}", title_suffix)
    return Table(
        id=f"model_summary{id_suffix}",
        title=f"Model Summary{title_suffix}",
        columns=(Column("name", "Name"),),
        rows=(),
        absent_reason="the trace has no ProfilerStep ranges (profiler.step() was not called)",
    )


def trace_step_breakdown(facts: TraceFacts, id_suffix: str, title_suffix: str) -> Table:
    """The step time breakdown of a trace."""
    return step_breakdown_table(facts.step_breakdown, f"step_breakdown{id_suffix}", title_suffix)
