"""Number of workers: predicted step time by worker count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue, queue_of
from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue
from lightning_modelprof.analysis.steps.workers import WorkersFacts, measured_workers
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
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
        ColumnSpec(
            "workers",
            "num_workers",
            help="0 means that batches are made in the training process.",
            of=lambda one: str(one.workers),
        ),
        ColumnSpec(
            "prefetch_factor",
            "prefetch_factor",
            Unit.COUNT,
            help="batches prefetched per worker. A dash means no workers.",
            of=lambda one: one.prefetch_factor if one.workers else None,
        ),
        ColumnSpec("which", "Setting", help="*current*, *recommended* or both."),
        ColumnSpec("step_ns", "Step", Unit.DURATION_NS, help="predicted mean step time."),
        ColumnSpec("low_ns", "95% low", Unit.DURATION_NS, help=_ENDS),
        ColumnSpec("high_ns", "95% high", Unit.DURATION_NS, help=_ENDS),
        ColumnSpec("steps_per_s", "steps/s", Unit.RATE, help="1 / predicted step time."),
    ),
    place=120,
    views=("workers",),
    place_in_views=-1,
)


@run_table(NUM_WORKERS)
def num_workers_tables(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Predict the step time by worker count, in a table per loader that has a prediction."""
    step, loaders = loop_of(facts.info.loop).step, facts.get(measured_workers)
    if loaders is None:
        queue = facts.get(fetch_queue)
        if queue is not None:
            yield _table(queue, step)
        return
    # A loader that was recreated with other settings appears more than once.
    is_remade = len({one.record.loader for one in loaders}) < len(loaders)
    for number, one in enumerate(loaders):
        name = f"{NUM_WORKERS.id}_{number}" if number else NUM_WORKERS.id
        title = NUM_WORKERS.title + (_suffix(one, is_remade=is_remade) if len(loaders) > 1 else "")
        try:
            queue = one.queue or queue_of(facts, one.record)
        except NotMeasured as why:
            yield NUM_WORKERS.table(id=name, title=title, absent_reason=why.reason)
        else:
            yield _table(queue, step, name, title)


def _suffix(one: WorkersFacts, *, is_remade: bool) -> str:
    now = f" with the current num_workers={one.record.num_workers}" if is_remade else ""
    return f" for loader {one.record.loader}{now}"


def _table(queue: LoaderQueue, step: str, name: str = "", title: str = "") -> Table:
    factor = queue.present.prefetch_factor
    settings = {"current": queue.present, "recommended": queue.advised}
    shown = sorted(queue.predictions, key=lambda one: (one.prefetch_factor != factor, one.prefetch_factor))
    return NUM_WORKERS.table(
        shown,
        id=name,
        title=title,
        of={"which": lambda one: ", ".join(name for name, other in settings.items() if one == other)},
        notes=_notes(queue, step),
        row_limit=20,
        is_detail=True,
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
