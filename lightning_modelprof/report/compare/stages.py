"""Build a report from multiple runs: one table with each run's speed relative to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.change import Comparison
from lightning_modelprof.analysis.compare import DEFAULT_TOLERANCE
from lightning_modelprof.analysis.steps.benchmark import Benchmark, Statistics
from lightning_modelprof.report.compare.build_compare import build_comparison
from lightning_modelprof.report.compare.compared_run import ComparedRun
from lightning_modelprof.report.compare.differences import (
    find_differences,
    why_no_speedup,
    world_size_warnings,
)
from lightning_modelprof.report.model import WARNING, Report, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import three_digits

_INTERVAL: Final = "95% CI"


def build_stages(runs: Sequence[ComparedRun], tolerance: float = DEFAULT_TOLERANCE) -> Report:
    """Compare each run with the first.

    Args:
        runs: at least two runs of one loop, in display order.
        tolerance: relative change of the time that doesn't matter.

    Raises:
        ArchiveError: If the runs are of different loops.
    """
    results = [build_comparison(runs[:1], [run], tolerance)[1] for run in runs[1:]]
    table = _stages_table(runs, results)
    differences = [find_differences(runs[:1], [run]) for run in runs[1:]]
    speed = results[-1].times_as_fast
    if speed is None:
        found = "too few steps to compare"
    elif differences[-1]:
        found = f"{why_no_speedup(differences[-1])} in {runs[-1].source}"
    else:
        found = f"{runs[-1].source} is {three_digits(speed)}× as fast as {runs[0].source}"
    return Report(
        title=f"{len(runs)} runs: {found}",
        facts=tuple(
            (WARNING, f"{run.source}: {sentence}")
            for run, found in zip(runs[1:], differences, strict=True)
            for sentence in (*(one.sentence for one in found), *world_size_warnings(runs[:1], [run]))
        ),
        tables=(table,),
        notes=(),
    )


class _Stage(NamedTuple):
    run: ComparedRun
    result: Comparison | None

    @property
    def benchmark(self) -> Benchmark | None:
        return self.run.report.summary.benchmark


def _average(figure: Statistics | None) -> float | None:
    return None if figure is None else figure.avg


def _interval(stage: _Stage) -> tuple[float | None, float | None]:
    result = stage.result
    return (None, None) if result is None or result.times_as_fast is None else (result.low, result.high)


def _gpu_busy(stage: _Stage) -> float | None:
    card = stage.run.report.step_card
    return next((value for label, value, _ in card.figures if label == "GPU busy"), None) if card else None


def _peak_bytes(stage: _Stage) -> int | None:
    memory = stage.run.report.summary.memory
    return None if memory is None else memory.peak_allocated_bytes or memory.peak_rss_bytes


def _verdict(stage: _Stage) -> str:
    verdict = stage.run.report.verdict
    return "" if verdict is None else verdict.kind.replace("_", "-").upper()


STAGES: Final = TableSpec(
    id="stages",
    title="Stages",
    help="One row per run, in the given order.",
    columns=(
        ColumnSpec("run", "run", of=lambda stage: stage.run.source),
        ColumnSpec(
            "batch_cost_ns",
            "time per step",
            Unit.DURATION_NS,
            help="batch_cost.",
            of=lambda stage: stage.run.batch_cost_ns,
        ),
        ColumnSpec(
            "times_as_fast",
            "times as fast",
            Unit.RATE,
            help="speed relative to the first run, by time per step, or per sample if batch sizes differ.",
            of=lambda stage: stage.result and stage.result.times_as_fast,
        ),
        ColumnSpec(
            "low",
            "from",
            Unit.RATE,
            _INTERVAL,
            help="95% confidence interval, as in Compare.",
            of=lambda stage: _interval(stage)[0],
        ),
        ColumnSpec(
            "high",
            "to",
            Unit.RATE,
            _INTERVAL,
            help="95% confidence interval, as in Compare.",
            of=lambda stage: _interval(stage)[1],
        ),
        ColumnSpec(
            "ips",
            "steps/s",
            Unit.RATE,
            help="ips.",
            of=lambda stage: _average(stage.benchmark and stage.benchmark.steps_per_s),
        ),
        ColumnSpec(
            "reader_ratio",
            "Reader Ratio",
            Unit.RATIO,
            help="Σr / Σb.",
            of=lambda stage: _average(stage.benchmark and stage.benchmark.reader_ratio),
        ),
        ColumnSpec(
            "gpu_busy",
            "GPU busy",
            Unit.RATIO,
            help="share of the recorded steps in which a kernel, copy or memset runs.",
            of=_gpu_busy,
        ),
        ColumnSpec(
            "peak_bytes",
            "peak memory",
            Unit.BYTES,
            help="memory allocated on the GPU; process memory without a GPU.",
            of=_peak_bytes,
        ),
        ColumnSpec("verdict", "verdict", help="what limits the run.", of=_verdict),
    ),
)


def _stages_table(runs: Sequence[ComparedRun], results: Sequence[Comparison]) -> Table:
    loop = loop_of(runs[0].loop)
    differ = any(result.per_sample for result in results)
    notes = ["Batch sizes differ, so time per sample decides."] if differ else []
    notes += [
        f"{run.source}: {result.reason}."
        for run, result in zip(runs[1:], results, strict=True)
        if result.reason
    ]
    return STAGES.table(
        map(_Stage, runs, [None, *results]),
        labels={"batch_cost_ns": f"time per {loop.step}", "ips": f"{loop.steps}/s"},
        time_unit="ms",
        notes=tuple(notes),
    )
