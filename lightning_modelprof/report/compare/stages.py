"""Several runs become one table: how far each came, against the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.compare import DEFAULT_TOLERANCE, Comparison
from lightning_modelprof.report.compare.build_compare import build_comparison
from lightning_modelprof.report.compare.compared_run import ComparedRun
from lightning_modelprof.report.model import Cell, Report, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import three_digits

_INTERVAL: Final = "95% CI"


def build_stages(runs: Sequence[ComparedRun], tolerance: float = DEFAULT_TOLERANCE) -> Report:
    """The report of several runs, each compared with the first.

    Args:
        runs: of one loop, in the order in which they are shown; at least two.
        tolerance: change of the time, as a fraction, that does not matter.

    Raises:
        ArchiveError: when the runs are of different loops.
    """
    results = [build_comparison(runs[:1], [run], tolerance)[1] for run in runs[1:]]
    table = _stages_table(runs, results)
    speed = results[-1].times_as_fast
    found = (
        "too few steps to compare"
        if speed is None
        else f"{runs[-1].source} is {three_digits(speed)}× as fast as {runs[0].source}"
    )
    keys = [column.key for column in table.columns]
    return Report(
        title=f"{len(runs)} runs: {found}",
        facts=(),
        tables=(table,),
        notes=(),
        sections={"stages": [dict(zip(keys, row, strict=True)) for row in table.rows]},
    )


STAGES: Final = TableSpec(
    id="stages",
    title="Stages",
    help="One row per run, in the given order.",
    columns=(
        ColumnSpec("run", "run"),
        ColumnSpec("batch_cost_ns", "time per step", Unit.DURATION_NS, help="batch_cost."),
        ColumnSpec(
            "times_as_fast",
            "times as fast",
            Unit.RATE,
            help="speed relative to the first run, by time per step, or per sample if batch sizes differ.",
        ),
        ColumnSpec("low", "from", Unit.RATE, _INTERVAL, help="95% confidence interval, as in Compare."),
        ColumnSpec("high", "to", Unit.RATE, _INTERVAL, help="95% confidence interval, as in Compare."),
        ColumnSpec("ips", "steps/s", Unit.RATE, help="ips."),
        ColumnSpec("reader_ratio", "Reader Ratio", Unit.RATIO, help="Σr / Σb."),
        ColumnSpec(
            "gpu_busy",
            "GPU busy",
            Unit.RATIO,
            help="share of the recorded steps in which a kernel, copy or memset runs.",
        ),
        ColumnSpec(
            "peak_bytes",
            "peak memory",
            Unit.BYTES,
            help="memory allocated on the GPU; process memory without a GPU.",
        ),
        ColumnSpec("verdict", "verdict", help="what limits the run."),
    ),
)


def _stages_table(runs: Sequence[ComparedRun], results: Sequence[Comparison]) -> Table:
    loop = loop_of(runs[0].loop)
    rows = [_row(run, result) for run, result in zip(runs, [None, *results], strict=True)]
    notes = ["Each run is compared with the first. A dash means not measured."]
    if any(result.per_sample for result in results):
        notes.append("Batch sizes differ, so time per sample decides.")
    notes += [
        f"{run.source}: {result.reason}."
        for run, result in zip(runs[1:], results, strict=True)
        if result.reason
    ]
    return STAGES.table(
        labels={"batch_cost_ns": f"time per {loop.step}", "ips": f"{loop.steps}/s"},
        rows=tuple(rows),
        time_unit="ms",
        notes=tuple(notes),
    )


def _row(run: ComparedRun, result: Comparison | None) -> tuple[Cell, ...]:
    sections, card, verdict = run.report.sections, run.report.step_card, run.report.verdict
    figures, memory = sections.get("benchmark") or {}, sections.get("memory") or {}
    ips = figures.get("ips") or {}
    busy = next((value for label, value, _ in card.figures if label == "GPU busy"), None) if card else None
    known = result is not None and result.times_as_fast is not None
    return (
        run.source,
        run.batch_cost_ns,
        None if result is None else result.times_as_fast,
        result.low if result is not None and known else None,
        result.high if result is not None and known else None,
        ips.get("avg"),
        figures.get("reader_ratio"),
        busy,
        memory.get("peak_allocated_bytes") or memory.get("peak_rss_bytes"),
        "" if verdict is None else verdict.kind.replace("_", "-").upper(),
    )
