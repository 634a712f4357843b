"""Number of workers: how long a step would take with more or fewer of them."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent, Analysis
from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue, PredictedStep
from lightning_modelprof.analysis.steps.workers import WorkersFacts
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import milliseconds

_ENDS: Final = "95% of simulated runs are between the two."
NUM_WORKERS: Final = TableSpec(
    id="num_workers",
    title="Number of workers",
    help=(
        "Simulated step time for other worker counts and prefetch factors, from measured batch times,"
        " in-order delivery and the free CPUs. *current* is the current setting, and *recommended* is the"
        " smallest worker count within 2% of the best. The current prefetch factor comes first."
    ),
    columns=(
        Column("workers", "num_workers", help="0 means that batches are made in the training process."),
        Column(
            "prefetch_factor",
            "prefetch_factor",
            Unit.COUNT,
            help="batches prefetched per worker. A dash means no workers.",
        ),
        Column("which", "Setting", help="*current*, *recommended* or both."),
        Column("step_ns", "Step", Unit.DURATION_NS, help="predicted mean step time."),
        Column("low_ns", "95% low", Unit.DURATION_NS, help=_ENDS),
        Column("high_ns", "95% high", Unit.DURATION_NS, help=_ENDS),
        Column("steps_per_s", "steps/s", Unit.RATE, help="1 / predicted step time."),
    ),
    views=("workers",),
    place=-1,
)


def num_workers_tables(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """How many workers are enough: a table for each loader of the run that has a prediction."""
    facts, step = analysis.workers, loop_of(analysis.info.loop).step
    if isinstance(facts, Absent) or not facts:
        queue = analysis.fetch_queue
        return () if isinstance(queue, Absent) else (_table(queue, step, 0, ""),)
    is_remade = len({one.record.loader for one in facts}) < len(facts)  # with other settings, in its place
    return tuple(
        _table(one.queue, step, number, _suffix(one, is_remade=is_remade) if len(facts) > 1 else "")
        for number, one in enumerate(facts)
    )


def _suffix(one: WorkersFacts, *, is_remade: bool) -> str:
    now = f" with the current num_workers={one.record.num_workers}" if is_remade else ""
    return f" for loader {one.record.loader}{now}"


def _table(queue: LoaderQueue | Absent, step: str, number: int, suffix: str) -> Table:
    name = f"num_workers_{number}" if suffix and number else "num_workers"
    title = NUM_WORKERS.title + suffix
    if isinstance(queue, Absent):
        return NUM_WORKERS.table(id=name, title=title, absent_reason=queue.reason, is_detail=True)
    factor = queue.present.prefetch_factor
    shown = sorted(queue.predictions, key=lambda one: (one.prefetch_factor != factor, one.prefetch_factor))
    return NUM_WORKERS.table(
        id=name,
        title=title,
        rows=tuple(_row(one, queue) for one in shown),
        notes=_notes(queue, step),
        row_limit=20,
        is_detail=True,
    )


def _row(one: PredictedStep, queue: LoaderQueue) -> tuple[Cell, ...]:
    return (
        str(one.workers),
        one.prefetch_factor if one.workers else None,
        ", ".join(
            name
            for name, other in (("current", queue.present), ("recommended", queue.advised))
            if one == other
        ),
        one.step_ns,
        one.low_ns,
        one.high_ns,
        one.steps_per_s,
    )


def _notes(queue: LoaderQueue, step: str) -> tuple[str, ...]:
    notes = [
        f"Measured: {milliseconds(queue.step_ns)} per {step}; simulated:"
        f" {milliseconds(queue.present.step_ns)} (from {queue.num_batches:,} measured batches, mean"
        f" {milliseconds(queue.service_ns)}).",
    ]
    if not queue.present.workers:
        notes.append(
            "num_workers is 0, so the predicted step time is extrapolated from fetch times. The"
            " extrapolation assumes that a worker takes as"
            f" long per batch as the training process, plus {milliseconds(queue.handover_ns)} for the"
            " transfer."
        )
    if queue.cpus is None:
        notes.append(
            "The number of free CPUs is unknown, so the simulation assumes that batches don't slow each"
            " other down."
        )
    return tuple(notes)
