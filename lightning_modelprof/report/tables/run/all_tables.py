"""All tables of a report, collected from this folder's files, in reading order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.discovery import found_beside
from lightning_modelprof.report.model import Table, apply_options
from lightning_modelprof.report.options import SHOWN_WINDOWS, TableOptions
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.run.module_tree import module_tables
from lightning_modelprof.report.tables.run.process_loops import LOOPS, loop_tables
from lightning_modelprof.report.tables.run.table import MADE, RunTable
from lightning_modelprof.report.tables.trace.model_summary import window_model_summary
from lightning_modelprof.report.tables.trace.trace_tables import TRACE_TABLES, trace_tables

__all__ = ["TABLES", "TRACE_TABLES", "loop_tables", "module_tables", "trace_tables"]


def window_summaries(facts: Facts, options: TableOptions) -> Iterator[Table]:
    """Yield the tables of the newest windows, in order; none if no window was requested."""
    shown = facts.windows[-SHOWN_WINDOWS:]
    newest = next((one for one in reversed(shown) if one.facts is not None), None)
    # Without any trace, the Model Summary gives the reason, whichever views were requested.
    if options.views is None or "model" in options.views or newest is None:
        num_earlier = len(facts.windows) - len(shown)
        note = f"{num_earlier} earlier windows have no tables here. report.json lists the saved ones."
        for one in shown:
            table = apply_options(window_model_summary(one), options)
            has_note = num_earlier and one is shown[0]
            yield replace(table, notes=(*table.notes, note)) if has_note else table
    if newest is None or newest.facts is None:
        return
    suffix = f" of window {newest.window.index}" if len(facts.windows) > 1 else ""
    rest = trace_tables(
        {facts.rank: newest.facts}, options, title_suffix=suffix, without=frozenset({"model"})
    )
    main = _main_tables(newest.facts)
    for table in rest:
        # Unless views were requested, most tables are folded.
        yield replace(table, is_detail=table.id not in main) if options.views is None else table


_MADE: Final = found_beside(__name__, MADE, lambda one: (one.kinds[0].place, one.build.__module__))
TABLES: Final = (
    *(one for one in _MADE if one.kinds[0] is not LOOPS),
    RunTable(window_summaries),
    *(one for one in _MADE if one.kinds[0] is LOOPS),
)
"""Tables of a run in reading order; those of a trace are in ``trace_tables.TRACE_TABLES``."""

KINDS: Final[Mapping[str, TableSpec]] = {
    kind.id: kind
    for kind in (*(kind for entry in TABLES for kind in entry.kinds), *(entry.kind for entry in TRACE_TABLES))
}
"""Id → specification."""

_NUMBER: Final = re.compile(r"_\d+$")


def kind_of(table_id: str) -> TableSpec | None:
    """Find a table's specification, whatever its window or trace; ``None`` for comparison tables."""
    return KINDS.get(_NUMBER.sub("", table_id))


def _main_tables(facts: TraceFacts) -> frozenset[str]:
    # Without a device, the critical path adds little to the phases.
    has_device = facts.get(TraceFacts.idle) is not None
    return frozenset({"device_usage", "critical_path"} if has_device else {"device_usage"})
