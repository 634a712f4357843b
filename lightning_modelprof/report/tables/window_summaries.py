"""The profiler windows of a run: a Model Summary for each of the newest, all tables for the very newest."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.trace.model_summary import window_model_summary
from lightning_modelprof.report.tables.trace.trace_tables import trace_tables

MAX_SHOWN: Final = 3
"""Windows with a table of their own: with one every hundred steps there can be thousands."""


def window_summaries(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:
    """The tables of the newest windows, in order; none when no window was asked for."""
    shown = analysis.windows[-MAX_SHOWN:]
    if not shown:
        return ()
    newest = next((one for one in reversed(shown) if one.facts is not None), None)
    tables = []
    # Without any trace the Model Summary says why, whatever was asked for.
    if options.views is None or "model" in options.views or newest is None:
        tables = [
            window_model_summary(one.window, one.facts.model_summary if one.facts else None, one.trace_note)
            for one in shown
        ]
        num_earlier = len(analysis.windows) - len(shown)
        if num_earlier:
            note = f"{num_earlier} earlier windows have no table here; report.json lists those that are kept."
            tables[0] = replace(tables[0], notes=(*tables[0].notes, note))
        tables = [apply_options(table, options) for table in tables]
    if newest is None or newest.facts is None:
        return tuple(tables)
    suffix = f" of window {newest.window.index}" if len(analysis.windows) > 1 else ""
    rest = trace_tables(
        {analysis.rank: newest.facts}, options, title_suffix=suffix, without=frozenset({"model"})
    )
    if options.views is None:  # nobody asked for one of them
        main = _main_tables(newest.facts)
        rest = tuple(replace(table, is_detail=table.id not in main) for table in rest)
    return (*tables, *rest)


def _main_tables(facts: TraceFacts) -> frozenset[str]:
    """Of the trace tables those that a short report has, beside the Model Summary."""
    breakdown = facts.step_breakdown
    # Of a step without a device it knows little that the phases do not tell.
    has_device = not isinstance(breakdown, Absent) and breakdown.has_device
    return frozenset({"device_usage", "step_breakdown"} if has_device else {"device_usage"})
