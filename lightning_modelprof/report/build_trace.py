"""Traces become a report: the tables of each file, one file after the other."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.report.model import Report, Table
from lightning_modelprof.report.tables import TRACE_TABLES


def build_trace_report(traces: Sequence[TraceFacts]) -> Report:
    """The report of one or several trace files.

    Args:
        traces: at least one; with several the titles of the tables carry the number of their file.
    """
    tables: list[Table] = []
    for number, facts in enumerate(traces):
        title_suffix = f" of trace {number}" if len(traces) > 1 else ""
        id_suffix = f"_{number}" if number else ""
        tables += [build(facts, id_suffix, title_suffix) for build in TRACE_TABLES]
    names = ", ".join(facts.source for facts in traces)
    return Report(
        title=f"lightning-modelprof: {'trace' if len(traces) == 1 else 'traces'} {names}",
        facts=tuple(
            (f"Trace {number}", f"{facts.source}, {facts.num_events} events")
            for number, facts in enumerate(traces)
        ),
        tables=tuple(tables),
        notes=tuple(
            f"{facts.source}: {facts.num_dropped} events had no usable time and are in no figure."
            for facts in traces
            if facts.num_dropped
        ),
        sections={
            "traces": [
                {
                    "source": facts.source,
                    "num_events": facts.num_events,
                    "num_dropped": facts.num_dropped,
                    "steps": [] if facts.model_summary is None else list(facts.model_summary.step_numbers),
                }
                for facts in traces
            ]
        },
    )
