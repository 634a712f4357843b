"""A Model Summary for each of the newest profiler windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.tables.model_summary import model_summary_table

MAX_SHOWN: Final = 3
"""Windows with a table of their own: with one every hundred steps there can be thousands."""


def window_summaries(analysis: Analysis) -> tuple[Table, ...]:
    """The Model Summary of the newest windows, in order; none when no window was asked for."""
    shown = analysis.windows[-MAX_SHOWN:]
    tables = [model_summary_table(facts.window, facts.model_summary, facts.trace_note) for facts in shown]
    num_earlier = len(analysis.windows) - len(shown)
    if num_earlier:
        note = f"{num_earlier} earlier windows have their traces, and their place in report.json, alone."
        tables[0] = replace(tables[0], notes=(*tables[0].notes, note))
    return tuple(tables)
