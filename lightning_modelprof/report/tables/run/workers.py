"""Workers: what the workers of each DataLoader did, call by call and worker by worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.workers import (
    CallFacts,
    WorkersFacts,
    WorkerShares,
    measured_workers,
)
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.rows import common_folder
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.workers import CallTimes

_LOADER: Final = ColumnSpec("loader", "Loader", help="loader number, if there's more than one.")
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
        ColumnSpec("name", "Call", help="class or function; for data sets, with its method."),
        _LOADER,
        ColumnSpec(
            "kind",
            "Kind",
            help="`sample` (data set), `transform`, `compose` (contains others) or `collate`.",
        ),
        ColumnSpec(
            "avg_ns",
            "Avg",
            Unit.DURATION_NS,
            help="per sample including calls inside it; for `collate` per batch.",
        ),
        ColumnSpec(
            "error_ns",
            "Error",
            Unit.DURATION_NS,
            help=(
                "error of the average: in 19 of 20 runs, all averages are within twice their errors. A dash"
                " means timed directly."
            ),
        ),
        ColumnSpec("own_ns", "Own total", Unit.DURATION_NS, adds_up=True, help="without nested calls."),
        ColumnSpec(
            "ratio",
            "Ratio(%)",
            Unit.RATIO,
            help=(
                "share of the time workers spent making batches (fetch and collate), including nested calls."
            ),
        ),
        ColumnSpec("own_ratio", "Own(%)", Unit.RATIO, adds_up=True, help="the same without nested calls."),
        ColumnSpec(
            "cpu_ratio",
            "CPU(%)",
            Unit.RATIO,
            help=(
                "CPU share of its time. Near 100% it computes, near 0% it waits for a disk, a network or a"
                " lock. Transforms show a dash because their CPU time isn't measured."
            ),
        ),
        ColumnSpec("place", "Code", help="file and line. A dash means no Python code."),
    ),
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
        _LOADER,
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
    place=1,
)
_SHARES: Final = ("waiting", "late", "held_back")
_NOTHING: Final = "no worker activity was seen"


@run_table(WORKER_TRANSFORMS, WORKERS, needs=measured_workers)
def worker_tables(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """What the workers' time goes to."""
    loaders = facts.read(measured_workers)
    yield _calls_table(loaders)
    yield _workers_table(loaders)


def _calls_table(loaders: Sequence[WorkersFacts]) -> Table:
    calls = [(loader, one) for loader in loaders for one in loader.calls]
    folder = common_folder({one.call.file for _, one in calls if one.call.is_users and one.call.file})
    return WORKER_TRANSFORMS.table(
        columns=_columns(WORKER_TRANSFORMS, loaders),
        rows=_rows(loaders, [(loader, _call_row(loader, one, folder)) for loader, one in calls]),
        depths=tuple(one.call.depth for _, one in calls),
        notes=(*((f"Paths of your files are relative to {folder}.",) if folder else ()), *_dashes(loaders)),
        absent_reason=None if calls else _reason(loaders),
    )


def _dashes(loaders: Sequence[WorkersFacts]) -> tuple[str, ...]:
    """Why transforms have no times."""
    calls = [one for loader in loaders for one in loader.calls]
    if all(one.mean_ns is not None for one in calls):
        return ()
    if any(one.error_ns is not None for one in calls):
        return ("Transforms with dashes take less than 5% of the time, too little to sample.",)
    return (
        "Transforms have no times because there are too few samples or each takes less than 5% of the time.",
    )


def _call_row(loader: WorkersFacts, one: CallFacts, folder: str) -> tuple[Cell, ...]:
    call, is_known = one.call, one.call.total_ns is not None
    return (
        call.name,
        call.kind,
        one.mean_ns,
        one.error_ns,
        call.own_ns if is_known else None,
        (call.total_ns or 0) / loader.making_ns if is_known and loader.making_ns else None,
        one.share if loader.making_ns else None,
        one.computing,
        _place(call, folder),
    )


def _place(call: CallTimes, folder: str) -> str | None:
    """File and line: the user's without the folder that all are in, a library's with its own folder."""
    if not call.file:
        return None
    if call.is_users:
        file = call.file[len(folder) :].lstrip("/\\") if folder else call.file
    else:
        file = "/".join(PurePath(call.file).parts[-2:])
    return f"{file}:{call.line}"


def _workers_table(loaders: Sequence[WorkersFacts]) -> Table:
    rows = [(loader, _worker_row(one)) for loader in loaders for one in loader.workers]
    return WORKERS.table(
        columns=_columns(WORKERS, loaders),
        rows=_rows(loaders, rows),
        absent_reason=None if rows else _reason(loaders),
        is_detail=True,
    )


def _worker_row(one: WorkerShares) -> tuple[Cell, ...]:
    figures = (
        getattr(one if column.key in _SHARES else one.times, column.key) for column in WORKERS.columns[2:]
    )
    return (f"worker {one.times.worker}", *figures)


def _columns(kind: TableSpec, loaders: Sequence[WorkersFacts]) -> tuple[ColumnSpec, ...]:
    return tuple(one for one in kind.columns if one is not _LOADER or len(loaders) > 1)


def _rows(
    loaders: Sequence[WorkersFacts], rows: Sequence[tuple[WorkersFacts, tuple[Cell, ...]]]
) -> tuple[tuple[Cell, ...], ...]:
    """With the loader's number behind the name where there are several."""
    if len(loaders) < 2:
        return tuple(row for _, row in rows)
    return tuple((row[0], str(loader.record.loader), *row[1:]) for loader, row in rows)


def _reason(loaders: Sequence[WorkersFacts]) -> str:
    """Why there is nothing, by the loaders' own notes."""
    said = dict.fromkeys(note.rstrip(".") for loader in loaders for note in loader.record.notes)
    return "; ".join(said) or _NOTHING
