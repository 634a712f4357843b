"""DataLoader workers as timeline lanes: their batches, and the step that used each."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.worker_batches import MadeBatches, find_worker_batches
from lightning_modelprof.report.dashboard_entry import DrawnTimeline, Lane
from lightning_modelprof.report.timeline.idle_slices import with_texts
from lightning_modelprof.report.timeline.lanes import find_depths
from lightning_modelprof.report.timeline.layer import layer
from lightning_modelprof.units import format_duration

GROUP: Final = "DataLoader workers"

BATCH: Final = "batch"
"""Kind of the batch slices."""

_PARTS: Final = ("samples", "collate")


@layer()
def with_workers(
    drawn: DrawnTimeline, shared: Timeline, order: NDArray[np.int64]
) -> tuple[DrawnTimeline, NDArray[np.int64]]:
    """Add a lane for each worker below the others, if the trace has worker records.

    A batch is a slice, with slices for its samples and its collation inside. All are clipped to the trace. A
    batch launches the fetch of the step that used it; with multiple loaders, the batch that was ready last
    does.

    Args:
        drawn: k slices.
        order: each slice's row in the trace, other numbers for slices that aren't events, shape (k,).

    Returns:
        The timeline, and ``order`` with -1 for each added slice.
    """
    made = find_worker_batches(shared)
    if not len(made):
        notes = (f"No lanes for DataLoader workers: {made.problem}.",) if made.problem else ()
        return replace(drawn, notes=(*drawn.notes, *notes)), order
    keys, lane = np.unique(np.column_stack((made.loader, made.worker)), axis=0, return_inverse=True)
    several = len(set(keys[:, 0].tolist())) > 1
    lanes = tuple(
        Lane(
            label=f"loader {loader} worker {worker}" if several else f"worker {worker}",
            group=GROUP,
            is_device=False,
        )
        for loader, worker in keys.tolist()
    )
    count, end_ns = len(made), int(shared.trace.end_ns.max())
    cuts = np.clip(np.stack((made.begin_ns, made.fetched_ns, made.ready_ns)), 0, end_ns)
    begin_ns, until_ns = cuts[[0, 0, 1]].reshape(-1), cuts[[2, 1, 2]].reshape(-1)
    batch, part = np.tile(np.arange(count), 3), np.repeat(np.arange(3), count)
    lane = lane.reshape(-1)[batch]
    kept = np.flatnonzero((part == 0) | (begin_ns < until_ns))
    kept = kept[np.lexsort((part[kept], -until_ns[kept], begin_ns[kept]))]
    depth = find_depths(begin_ns[kept], until_ns[kept], lane[kept])
    row_order = np.lexsort((begin_ns[kept], depth, lane[kept]))
    kept, depth = kept[row_order], depth[row_order]
    batch, part = batch[kept], part[kept]

    texts, name = _names(made)
    name = np.where(part == 0, name[batch], len(texts) + part - 1)
    names, name = with_texts(drawn.names, drawn.name, (*texts, *_PARTS), name)
    categories, category = with_texts(
        drawn.categories, drawn.category, (BATCH,), np.zeros(len(kept), np.int64)
    )
    own_details = _details(made, end_ns)
    details, detail = with_texts(drawn.details, drawn.detail[:0], own_details, batch)
    place = len(drawn) + np.flatnonzero(part == 0)[np.argsort(batch[part == 0], kind="stable")]
    return (
        replace(
            drawn,
            lanes=(*drawn.lanes, *lanes),
            names=names,
            categories=categories,
            details=details,
            lane=np.append(drawn.lane, len(drawn.lanes) + lane[kept]),
            depth=np.append(drawn.depth, depth),
            slice_begin_ns=np.append(drawn.slice_begin_ns, begin_ns[kept]),
            slice_duration_ns=np.append(drawn.slice_duration_ns, (until_ns - begin_ns)[kept]),
            name=name,
            category=category,
            detail=np.append(drawn.detail, np.where(part == 0, detail, -1)),
            launch=np.append(_launch(drawn, made, order, place), np.full(len(kept), -1)),
        ),
        np.append(order, np.full(len(kept), -1)),
    )


def _names(made: MadeBatches) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    numbers, place = np.unique(made.index, return_inverse=True)
    return tuple(f"batch {number}" if number >= 0 else "batch" for number in numbers.tolist()), place.reshape(
        -1
    )


def _details(made: MadeBatches, end_ns: int) -> tuple[str, ...]:
    texts = []
    for place in range(len(made)):
        samples, waited_ns, step = (
            int(column[place]) for column in (made.samples, made.waited_ns, made.step)
        )
        begin_ns, ready_ns = int(made.begin_ns[place]), int(made.ready_ns[place])
        lines = [
            f"{samples:,} sample{'' if samples == 1 else 's'}",
            f"CPU {format_duration(int(made.cpu_ns[place]))} of {format_duration(ready_ns - begin_ns)}",
        ]
        if waited_ns >= 0:
            lines.append(f"the worker waited {format_duration(waited_ns)} before this batch")
        if step >= 0:
            lines.append(f"used by step {step}")
        if begin_ns < 0 or ready_ns > end_ns:
            lines.append("starts before the trace" if begin_ns < 0 else "ends after the trace")
        texts.append("\n".join(lines))
    return tuple(texts)


def _launch(
    drawn: DrawnTimeline, made: MadeBatches, order: NDArray[np.int64], place: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what launches each existing slice; for a fetch, the batch that its step used; shape (k,).

    Args:
        drawn: k slices.
        made: n batches.
        order: each slice's row in the trace, shape (k,).
        place: index of each batch's slice, shape (n,).
    """
    used = np.flatnonzero(made.fetch >= 0)
    used = used[np.argsort(made.ready_ns[used], kind="stable")]
    batch_of = dict(zip(made.fetch[used].tolist(), place[used].tolist(), strict=True))
    launch: NDArray[np.int64] = drawn.launch.copy()
    for at in np.flatnonzero(np.isin(order, made.fetch[used])).tolist():
        launch[at] = batch_of[int(order[at])]
    return launch
