"""All ranks: the benchmark reduced over every rank of a distributed run."""

from __future__ import annotations

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions


def all_ranks(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """How fast all ranks were together; no table when there is one rank.

    Definition: totals over totals of every rank's clean steps. The rate of all ranks is the mean rate of a
    rank times their number, since they work at the same time.
    """
    ranks = analysis.all_ranks
    if ranks is None:
        return ()
    rate = 1e9 * ranks.world_size / ranks.batch_total_ns if ranks.batch_total_ns else None
    unit = analysis.info.sample_unit
    reader = ranks.reader_total_ns
    named: tuple[tuple[str, Cell, Unit], ...] = (
        ("clean steps", ranks.num_steps, Unit.COUNT),
        ("batch_cost avg", ranks.batch_total_ns / ranks.num_steps, Unit.DURATION_NS),
        ("batch_cost max", ranks.batch_max_ns, Unit.DURATION_NS),
        ("batch_cost min", ranks.batch_min_ns, Unit.DURATION_NS),
        ("reader_cost avg", None if reader is None else reader / ranks.num_steps, Unit.DURATION_NS),
        ("Reader Ratio", reader / ranks.batch_total_ns if reader is not None and rate else None, Unit.RATIO),
        (
            f"{unit}/s of {'all' if ranks.world_size == analysis.info.world_size else 'these'} ranks",
            None if rate is None or ranks.samples is None else rate * ranks.samples,
            Unit.RATE,
        ),
    )
    return (
        Table(
            id="all_ranks",
            title=f"All {ranks.world_size} ranks"
            if ranks.world_size == analysis.info.world_size
            else f"{ranks.world_size} of {analysis.info.world_size} ranks",
            columns=(Column("figure", "Figure"), Column("value", "Value", Unit.BY_ROW)),
            rows=tuple((label, value) for label, value, _ in named),
            row_units=tuple(row_unit for _, _, row_unit in named),
            notes=("Over the clean steps of every one of these ranks.",),
        ),
    )
