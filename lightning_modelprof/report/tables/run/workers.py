"""Workers: activity of each DataLoader's workers, by call and by worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.workers import (
    CallFacts,
    WorkersFacts,
    measured_workers,
)
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.rows import common_folder, shortened
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.workers import CallTimes


class _Call(Record, frozen=True):
    """A call in one loader's workers; ``number`` is ``None`` if there's only one loader."""

    loader: WorkersFacts
    number: str | None
    facts: CallFacts


_LOADER: Final = "loader number, if there's more than one."
_OF_BATCHES: Final = "while making batches"
WORKER_TRANSFORMS: Final = TableSpec(
    id="worker_transforms",
    title="Worker calls",
    help=(
        "The steps a sample goes through in the workers, in order, all workers of a loader together. Nested"
        " calls are indented. Fetch and collate are timed directly. Transforms are sampled; a dash means"
        " below 5% of the time or too few samples."
    ),
    columns=(
        ColumnSpec(
            "name",
            "Call",
            help="class or function; for data sets, with its method.",
            of=lambda one: one.facts.call.name,
        ),
        ColumnSpec("loader", "Loader", help=_LOADER, of=lambda one: one.number, is_optional=True),
        ColumnSpec(
            "kind",
            "Kind",
            help="`sample` (data set), `transform`, `compose` (contains others) or `collate`.",
            of=lambda one: one.facts.call.kind,
        ),
        ColumnSpec(
            "avg_ns",
            "Avg",
            Unit.DURATION_NS,
            help="per sample including calls inside it; for `collate` per batch.",
            of=lambda one: one.facts.mean_ns,
        ),
        ColumnSpec(
            "error_ns",
            "Error",
            Unit.DURATION_NS,
            help=(
                "error of the average: in 19 of 20 runs, all averages are within twice their errors. A dash"
                " means timed directly."
            ),
            of=lambda one: one.facts.error_ns,
        ),
        ColumnSpec(
            "own_ns",
            "Own total",
            Unit.DURATION_NS,
            adds_up=True,
            help="without nested calls.",
            of=lambda one: None if one.facts.call.total_ns is None else one.facts.call.own_ns,
        ),
        ColumnSpec(
            "ratio",
            "Ratio(%)",
            Unit.RATIO,
            help=(
                "share of the time workers spent making batches (fetch and collate), including nested calls."
            ),
            of=lambda one: share(one.facts.call.total_ns, one.loader.making_ns),
        ),
        ColumnSpec(
            "own_ratio",
            "Own(%)",
            Unit.RATIO,
            adds_up=True,
            help="the same without nested calls.",
            of=lambda one: one.facts.share if one.loader.making_ns else None,
        ),
        ColumnSpec(
            "cpu_ratio",
            "CPU(%)",
            Unit.RATIO,
            help=(
                "CPU share of its time. Near 100% it computes, near 0% it waits for a disk, a network or a"
                " lock. Transforms show a dash because their CPU time isn't measured."
            ),
            of=lambda one: one.facts.computing,
        ),
        ColumnSpec("place", "Code", help="file and line. A dash means no Python code."),
    ),
    depth_of=lambda one: one.facts.call.depth,
    place=130,
    views=("workers",),
)
WORKERS: Final = TableSpec(
    id="workers",
    title="Workers",
    help=(
        "Each worker of each loader; restarted workers are added up under their number. A dash means that"
        " the system doesn't report the figure."
    ),
    columns=(
        ColumnSpec("name", "Worker", help="worker number within the loader."),
        ColumnSpec("loader", "Loader", help=_LOADER, is_optional=True),
        ColumnSpec("batches", "Batches", Unit.COUNT, adds_up=True, help="batches made."),
        ColumnSpec("samples", "Samples", Unit.COUNT, adds_up=True, help="samples in those batches."),
        ColumnSpec(
            "fetch_ns", "Fetch", Unit.DURATION_NS, adds_up=True, help="wall time spent making samples."
        ),
        ColumnSpec(
            "collate_ns",
            "Collate",
            Unit.DURATION_NS,
            adds_up=True,
            help="wall time spent in the collate function.",
        ),
        ColumnSpec(
            "wait_ns",
            "Waiting",
            Unit.DURATION_NS,
            adds_up=True,
            help=(
                "wall time between two batches of an epoch. The queue is full, so it waits for the next"
                " index."
            ),
        ),
        ColumnSpec("waiting", "Waiting(%)", Unit.RATIO, help="Waiting as a share of the worker's time."),
        ColumnSpec(
            "late",
            "Late",
            Unit.COUNT,
            adds_up=True,
            help="batches of this worker that were ready after later ones (of the saved batches).",
        ),
        ColumnSpec(
            "held_back",
            "Held back",
            Unit.COUNT,
            adds_up=True,
            help=(
                "finished batches of any worker that waited for this worker's late ones (of the saved"
                " batches)."
            ),
        ),
        ColumnSpec(
            "cpu_ns",
            "CPU",
            Unit.DURATION_NS,
            adds_up=True,
            help=f"CPU time of its main thread {_OF_BATCHES}.",
        ),
        ColumnSpec(
            "other_cpu_ns",
            "Other threads",
            Unit.DURATION_NS,
            adds_up=True,
            help=(
                "CPU time of its other threads, such as the one that pickles batches, plus its main thread"
                " between batches."
            ),
        ),
        ColumnSpec(
            "cpu_wait_ns",
            "CPU wait",
            Unit.DURATION_NS,
            adds_up=True,
            help="time its main thread was ready to run but waited for a CPU.",
        ),
        ColumnSpec("read_bytes", "Read", Unit.BYTES, adds_up=True, help="bytes read from files and sockets."),
        ColumnSpec("disk_bytes", "From disk", Unit.BYTES, adds_up=True, help="bytes of that read from disk."),
        ColumnSpec(
            "page_faults", "Page faults", Unit.COUNT, adds_up=True, help="page faults that required reading."
        ),
        ColumnSpec(
            "memory_bytes",
            "Memory",
            Unit.BYTES,
            help="resident memory at the end; shared pages count in each worker.",
        ),
        ColumnSpec("threads", "Threads", Unit.COUNT, help="peak thread count."),
        ColumnSpec(
            "starts", "Starts", Unit.COUNT, adds_up=True, help="number of processes with this number."
        ),
        ColumnSpec(
            "start_ns",
            "Start",
            Unit.DURATION_NS,
            help=(
                "mean time from process start to its first sample: interpreter, imports and data set, where"
                " they're loaded again."
            ),
        ),
        ColumnSpec(
            "dropped",
            "Dropped",
            Unit.COUNT,
            adds_up=True,
            help="batches missing from per-batch figures because they came too fast to be read.",
        ),
    ),
    views=("workers",),
    place_in_views=1,
)
_NOTHING: Final = "no worker activity was seen"


@run_table(WORKER_TRANSFORMS, WORKERS, needs=measured_workers)
def worker_tables(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Show where the workers' time goes."""
    loaders = facts.read(measured_workers)
    yield _calls_table(loaders)
    yield _workers_table(loaders)


def _numbered(loaders: Sequence[WorkersFacts]) -> list[tuple[str | None, WorkersFacts]]:
    return [(str(one.record.loader) if len(loaders) > 1 else None, one) for one in loaders]


def _calls_table(loaders: Sequence[WorkersFacts]) -> Table:
    calls = [_Call(loader, number, one) for number, loader in _numbered(loaders) for one in loader.calls]
    folder = common_folder(
        {one.call.file for loader in loaders for one in loader.calls if one.call.is_users and one.call.file}
    )
    return WORKER_TRANSFORMS.table(
        calls,
        of={"place": lambda one: _place(one.facts.call, folder)},
        notes=(*((f"Paths of your files are relative to {folder}.",) if folder else ()), *_dashes(loaders)),
        absent_reason=None if calls else _reason(loaders),
    )


def _dashes(loaders: Sequence[WorkersFacts]) -> tuple[str, ...]:
    calls = [one for loader in loaders for one in loader.calls]
    if all(one.mean_ns is not None for one in calls):
        return ()
    if any(one.error_ns is not None for one in calls):
        return ("Transforms with dashes take less than 5% of the time, too little to sample.",)
    return (
        "Transforms have no times because there are too few samples or each takes less than 5% of the time.",
    )


def _place(call: CallTimes, folder: str) -> str | None:
    """Return file and line; user files are relative to ``folder``, library files keep their own folder."""
    if not call.file:
        return None
    file = shortened(call.file, folder) if call.is_users else "/".join(PurePath(call.file).parts[-2:])
    return f"{file}:{call.line}"


def _workers_table(loaders: Sequence[WorkersFacts]) -> Table:
    rows = [
        {
            "name": f"worker {one.times.worker}",
            "loader": number,
            "waiting": one.waiting,
            "late": one.late,
            "held_back": one.held_back,
            **asdict(one.times),
        }
        for number, loader in _numbered(loaders)
        for one in loader.workers
    ]
    return WORKERS.table(rows, absent_reason=None if rows else _reason(loaders), is_detail=True)


def _reason(loaders: Sequence[WorkersFacts]) -> str:
    said = dict.fromkeys(note.rstrip(".") for loader in loaders for note in loader.record.notes)
    return "; ".join(said) or _NOTHING
