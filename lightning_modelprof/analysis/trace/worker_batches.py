"""Batches that DataLoader workers made while a window was recorded, on the trace's clock.

The batches are in the trace's metadata, by the training process's clock. That clock was read just after each
step's range was opened, and just after it was closed: a reading is later than the start or end in the trace
by the difference of the clocks, and a little more. The smallest of all is the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import locate
from lightning_modelprof.analysis.timeline.tally import rows_named
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.dataloader import OWN_FETCH
from lightning_modelprof.record import LARGEST, Count, Int, Record
from lightning_modelprof.run.archive import record_of
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.run.workers import WorkerBatches

MOST_APART_NS: Final = 200_000
"""Largest difference between the median and the smallest reading for a reliable match."""

_DAMAGED: Final = "the trace's worker data is damaged"
_APART: Final = (
    "worker clocks can't be matched to the trace's, because readings of both differ by more than"
    f" {MOST_APART_NS // 1000} µs"
)
_COLUMNS: Final = WorkerBatches.__struct_fields__


class MadeBatches(Record, frozen=True, kw_only=True, eq=False):
    """The n batches that workers made while the window was recorded, by loader, worker and start.

    Columns are int64, shape (n,); times are the trace's and may be before its first event.

    Attributes:
        loader, worker, index, begin_ns, fetched_ns, ready_ns, cpu_ns, samples: as in WorkerBatches.
        waited_ns: since the worker's previous batch; -1 if unknown.
        step: number of the step that used it; -1 if unknown.
        fetch: row of the fetch in that step; -1 if unknown. It got that batch, unless the loop fetches ahead.
        problem: a clause on why there are none although workers were inspected; ``""`` otherwise.
    """

    loader: NDArray[np.int64]
    worker: NDArray[np.int64]
    index: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    fetched_ns: NDArray[np.int64]
    ready_ns: NDArray[np.int64]
    cpu_ns: NDArray[np.int64]
    samples: NDArray[np.int64]
    waited_ns: NDArray[np.int64]
    step: NDArray[np.int64]
    fetch: NDArray[np.int64]
    problem: str = ""

    def __len__(self) -> int:
        return len(self.loader)


class _Noted(Record, frozen=True, kw_only=True):
    recorded_steps: tuple[Count, ...] = ()
    step_marks: tuple[tuple[Int, Int, Int], ...] = ()
    workers: tuple[tuple[Count, WorkerBatches], ...] | str = ()


def find_worker_batches(timeline: Timeline) -> MadeBatches:
    """Worker batches that reach into the trace's time; none if it has no worker data."""
    ours = timeline.trace.metadata.get(TRACE_METADATA_KEY)
    if not isinstance(ours, dict) or "workers" not in ours:
        return _none()
    try:
        noted = record_of(ours, _Noted)
    except ValueError:
        return _none(_DAMAGED)
    if isinstance(noted.workers, str):
        return _none(noted.workers)
    columns = _columns(noted.workers)
    if columns is None or len(noted.recorded_steps) != len(noted.step_marks):
        return _none(_DAMAGED)
    marks = dict(zip(noted.recorded_steps, noted.step_marks, strict=True))
    offset_ns = _offset_ns(timeline, marks)
    if offset_ns is None:
        return _none(_APART)
    for name in ("begin_ns", "fetched_ns", "ready_ns"):
        columns[name] -= offset_ns
    end_ns = int(timeline.trace.end_ns.max(initial=0))
    chosen = np.flatnonzero((columns["ready_ns"] > 0) & (columns["begin_ns"] < end_ns))
    order = chosen[np.lexsort([columns[name][chosen] for name in ("begin_ns", "worker", "loader")])]
    kept: dict[str, Any] = {name: column[order] for name, column in columns.items()}
    step, fetch = _used_by(timeline, {number: mark[0] for number, mark in marks.items()}, kept)
    return MadeBatches(**kept, waited_ns=_waited_ns(kept), step=step, fetch=fetch)


def _none(problem: str = "") -> MadeBatches:
    empty = np.zeros(0, np.int64)
    columns: dict[str, Any] = {name: empty for name in MadeBatches.__struct_fields__ if name != "problem"}
    return MadeBatches(**columns, problem=problem)


def _columns(loaders: tuple[tuple[int, WorkerBatches], ...]) -> dict[str, NDArray[np.int64]] | None:
    """The batches of all loaders, concatenated; ``None`` if columns don't fit together."""
    if any(len({len(getattr(made, name)) for name in _COLUMNS}) > 1 for _, made in loaders):
        return None
    columns = {
        name: np.array([value for _, made in loaders for value in getattr(made, name)], np.int64)
        for name in _COLUMNS
    }
    columns["loader"] = np.array([loader for loader, made in loaders for _ in range(len(made))], np.int64)
    is_backwards = (columns["fetched_ns"] < columns["begin_ns"]) | (
        columns["ready_ns"] < columns["fetched_ns"]
    )
    return None if is_backwards.any() or (columns["worker"] < 0).any() else columns


def _offset_ns(timeline: Timeline, marks: Mapping[int, tuple[int, int, int]]) -> int | None:
    """Offset to subtract from a clock reading; ``None`` if the marks don't agree on it."""
    steps = timeline.steps
    if steps is None or not steps.has_ranges or len(steps.rows):
        return None
    late_ns = sorted(
        mark_ns - range_ns
        for number, (begin_ns, end_ns) in zip(steps.numbers, steps.intervals.tolist(), strict=True)
        if number in marks
        for mark_ns, range_ns in zip(marks[number][1:], (begin_ns, end_ns), strict=True)
    )
    agree = late_ns and late_ns[len(late_ns) // 2] - late_ns[0] <= MOST_APART_NS
    return late_ns[0] if agree and abs(late_ns[0]) <= LARGEST else None


def _waited_ns(columns: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    waited_ns = np.full(len(columns["worker"]), -1, np.int64)
    same = (np.diff(columns["worker"]) == 0) & (np.diff(columns["loader"]) == 0)
    between_ns = columns["begin_ns"][1:] - columns["ready_ns"][:-1]
    waited_ns[1:][same] = np.maximum(between_ns[same], 0)
    return waited_ns


def _used_by(
    timeline: Timeline, in_epoch: Mapping[int, int], columns: Mapping[str, NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The step that used each batch, and the row of its fetch, shape (n,) each; -1 if unknown.

    Batches are delivered in index order, so the step has the number of its batch in the epoch. Of several
    epochs, it's the first such step whose fetch doesn't end before the batch is ready. Steps that don't fetch
    exactly once are left out.
    """
    steps, trace = timeline.steps, timeline.trace
    assert steps is not None
    on_thread = timeline.is_annotation & (trace.track == steps.track)
    fetches = rows_named(trace, np.flatnonzero(on_thread), OWN_FETCH.__eq__)
    inside = locate(trace.begin_ns[fetches], steps.intervals)
    fetches_of: dict[int, list[tuple[int, int]]] = {}  # number in the epoch → (step, row), in order of time
    for place, number in enumerate(steps.numbers):
        own = fetches[inside == place]
        if len(own) == 1 and number in in_epoch:
            fetches_of.setdefault(in_epoch[number], []).append((number, int(own[0])))
    found = np.full((len(columns["index"]), 2), -1, np.int64)
    for batch, (index, ready_ns) in enumerate(
        zip(columns["index"].tolist(), columns["ready_ns"].tolist(), strict=True)
    ):
        later = (one for one in fetches_of.get(index, ()) if trace.end_ns[one[1]] + MOST_APART_NS >= ready_ns)
        found[batch] = next(later, (-1, -1))
    return found[:, 0], found[:, 1]
