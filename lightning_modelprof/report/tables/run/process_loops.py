"""Loops and Short loops: what else the process ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.report.words import to_the_second
from lightning_modelprof.run.loops import LoopLine, ShortLoops

_LOOP_COLUMNS: Final = (
    ColumnSpec("loop", "Loop"),
    ColumnSpec("created", "Started", help="start time.", of=lambda one: to_the_second(one.created)),
    ColumnSpec("model", "Model", help="LightningModule class."),
    ColumnSpec("status", "Status", help="how the loop ended."),
    ColumnSpec("steps", "Steps", Unit.COUNT, help="number of steps."),
    ColumnSpec("steps_per_s", "Steps/s", Unit.RATE, help="over clean steps."),
    ColumnSpec("standard_error", "std. error", Unit.RATE, help="standard error of Steps/s."),
    ColumnSpec(
        "verdict",
        "Verdict",
        help="what limits the loop.",
        of=lambda one: one.verdict.replace("_", "-").upper(),
    ),
    ColumnSpec("folder", "Directory", help="directory of its files.", of=lambda one: one.folder or None),
)
LOOPS: Final = TableSpec(
    id="loops",
    title="Loops",
    help=(
        "Other loops of the same process that have their own report, shown in the report of its first loop."
        " Files of later loops with the same directory go to a subdirectory (`modelprof/fit_2`,"
        " `modelprof/test`). The terminal shows one line for each after the first of its kind (per cell in"
        " a notebook)."
    ),
    columns=_LOOP_COLUMNS,
)

_SHORT_COLUMNS: Final = (
    ColumnSpec("loop", "Loop"),
    ColumnSpec("model", "Model", help="LightningModule class."),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
    ColumnSpec("batches", "Batches", Unit.COUNT, adds_up=True, help="batches in all calls."),
    ColumnSpec("total_ns", "Total", Unit.DURATION_NS, adds_up=True),
    ColumnSpec(
        "mean_ns",
        "Avg",
        Unit.DURATION_NS,
        help="mean per call.",
        of=lambda one: share(one.total_ns, one.calls),
    ),
    ColumnSpec(
        "p99_ns",
        "p99",
        Unit.DURATION_NS,
        help="over calls. For more than 4,096 calls it's over an evenly spaced sample.",
        of=lambda one: float(np.percentile(one.durations_ns, 99)) if one.durations_ns else None,
    ),
    ColumnSpec("failed", "Failed", Unit.COUNT, adds_up=True, help="calls that ended with an exception."),
)
SHORT_LOOPS: Final = TableSpec(
    id="short_loops",
    title="Short loops",
    help=(
        "Fits of fewer than 5 steps, and validations, tests and predictions of fewer than 20 batches,"
        " unless `steps`, `active` or `flops` request one of their steps. Only their total time is"
        " measured, from the loop's first hook to its last. They're written at program exit or with the"
        " next loop that has a report."
    ),
    columns=_SHORT_COLUMNS,
)


@run_table(LOOPS, SHORT_LOOPS)
def process_loop_tables(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """List the process's loops: those with reports, and those that were too short for one."""
    yield from loop_tables(facts.loops, facts.short_loops)


def loop_tables(loops: Sequence[LoopLine], short: Sequence[ShortLoops]) -> tuple[Table, ...]:
    """Build the tables of the given loops; none if there is nothing to show."""
    tables = [LOOPS.table(loops)] if len(loops) > 1 else []
    return (*tables, SHORT_LOOPS.table(short)) if short else tuple(tables)
