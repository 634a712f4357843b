"""Simulate torch's DataLoader: when the loop gets each batch.

Each worker has its own queue of indices. At first, ``prefetch_factor`` indices per worker are handed out in
turn; whenever the loop gets a batch, the next index goes to the next worker. Batches are delivered in index
order, or as they get ready with ``in_order=False``; the next index then goes to the worker that made the
batch, since every other one has its full quota.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]


_Floats = NDArray[np.floating[Any]]


def simulate_loader(
    service_ns: _Ints,
    rest_ns: _Ints,
    settings: list[tuple[int, int]],
    *,
    handover_ns: int = 0,
    is_ordered: bool = True,
    factors: _Floats | None = None,
) -> _Ints:
    """Times when the loop gets each batch, if it asks for the first one at 0, when indices are handed out.

    Args:
        service_ns: by batch index, shape (batches, replications); without order there must be more of them,
            as many as are prefetched.
        rest_ns: from getting a batch to asking for the next one, shape (steps, replications).
        settings: worker count, prefetch factor. With 0 workers, a batch is made when it's requested.
        handover_ns: from when a batch is requested and ready until the loop has it; none without workers.
        is_ordered: whether batches are delivered in index order.
        factors: by setting, for the service times; 1 by default.

    Returns:
        Shape (len(rest_ns), settings, replications).
    """
    if not is_ordered:
        unordered = [
            _played_unordered(
                service_ns if factors is None else np.rint(service_ns * factors[place]).astype(np.int64),
                rest_ns,
                *setting,
                handover_ns,
            )
            for place, setting in enumerate(settings)
        ]
        return np.stack(unordered, axis=1)
    workers = np.array([one for one, _ in settings])
    ahead = np.array([one * each for one, each in settings])
    places = np.arange(len(settings))
    pad = int(ahead.max(initial=1))
    is_inline = (workers == 0)[:, None]
    handover = np.where(is_inline, 0, handover_ns)
    shape = (pad + len(rest_ns), len(settings), service_ns.shape[1])
    ready_ns, got_ns = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    asked_ns = np.zeros(shape[1:], np.int64)
    for number in range(len(rest_ns)):
        begin_ns = np.maximum(ready_ns[pad + number - workers, places], got_ns[pad + number - ahead, places])
        begin_ns = np.where(is_inline, asked_ns, begin_ns)
        took_ns = service_ns[number][None, :]
        if factors is not None:
            took_ns = np.rint(took_ns * factors[:, None]).astype(np.int64)
        ready_ns[pad + number] = begin_ns + took_ns
        got_ns[pad + number] = np.maximum(asked_ns, ready_ns[pad + number]) + handover
        asked_ns = got_ns[pad + number] + rest_ns[number]
    return got_ns[pad:]


def _played_unordered(
    service_ns: _Ints, rest_ns: _Ints, workers: int, factor: int, handover_ns: int
) -> _Ints:
    """One setting, with batches as they get ready; of two at the same time, the first worker's."""
    if workers == 0:
        return simulate_loader(service_ns, rest_ns, [(0, 1)])[:, 0]
    replications = np.arange(service_ns.shape[1])
    # A worker finishes its batches in order, so a ring holds their times.
    first_ns = service_ns[: workers * factor].reshape(factor, workers, -1).cumsum(axis=0)
    ring_ns, last_ns = first_ns.copy(), first_ns[-1].copy()
    delivered = np.zeros(last_ns.shape, np.int64)
    heads_ns = ring_ns[0].copy()
    asked_ns = np.zeros(len(replications), np.int64)
    got_ns = np.empty((len(rest_ns), len(replications)), np.int64)
    for number in range(len(rest_ns)):
        worker = heads_ns.argmin(axis=0)
        got_ns[number] = np.maximum(asked_ns, heads_ns[worker, replications]) + handover_ns
        asked_ns = got_ns[number] + rest_ns[number]
        ready_ns = np.maximum(last_ns[worker, replications], got_ns[number])
        ready_ns = ready_ns + service_ns[workers * factor + number]
        last_ns[worker, replications] = ready_ns
        slot = delivered[worker, replications]
        ring_ns[slot % factor, worker, replications] = ready_ns
        delivered[worker, replications] = slot + 1
        heads_ns[worker, replications] = ring_ns[(slot + 1) % factor, worker, replications]
    return got_ns
