"""A loader's workers over time: how many make a batch, and how many ready batches are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.steps.workers import epochs_of
from lightning_modelprof.record import Record
from lightning_modelprof.run.workers import LoaderWorkers

MOST_PARTS: Final = 200


class WorkerCurve(Record, frozen=True, kw_only=True):
    """Means over equal parts of the time from the first saved batch to the last.

    Attributes:
        making: workers making a batch.
        held_back: ready batches behind one that isn't; 0 without order.
    """

    part_ns: float
    making: tuple[float, ...]
    held_back: tuple[float, ...]


def worker_curve(loader: LoaderWorkers) -> WorkerCurve | None:
    """The workers over time; ``None`` with fewer than two batches.

    Definition: per part, the total time that workers make batches in it, over its length; and the total time
    that batches spend in it between being ready and all earlier ones being ready.
    """
    batches = loader.batches
    if len(batches) < 2:
        return None
    made = list(zip(batches.begin_ns, batches.ready_ns, strict=True))
    begin_ns, end_ns = min(batches.begin_ns), max(batches.ready_ns)
    if end_ns <= begin_ns:
        return None
    edges = np.linspace(begin_ns, end_ns, min(MOST_PARTS, len(batches)) + 1)
    ahead = loader.num_workers * (loader.prefetch_factor or 2)
    held: list[tuple[int, int]] = []
    for epoch in epochs_of(batches, ahead) if loader.is_ordered else ():
        last_ns = 0
        for ready_ns, _ in epoch:
            if ready_ns < last_ns:
                held.append((ready_ns, last_ns))
            last_ns = max(last_ns, ready_ns)
    return WorkerCurve(
        part_ns=float(edges[1] - edges[0]), making=_means(made, edges), held_back=_means(held, edges)
    )


def _means(intervals: Sequence[tuple[int, int]], edges: NDArray[np.float64]) -> tuple[float, ...]:
    """Mean number of intervals at a time in each part between two edges."""
    if not intervals:
        return (0.0,) * (len(edges) - 1)
    begins, ends = np.array(intervals, np.float64).T
    inside = np.clip(edges[:, None] - begins, 0, ends - begins).sum(axis=1)
    means: list[float] = (np.diff(inside) / np.diff(edges)).tolist()
    return tuple(means)
