"""A loader's queue model, fed with the loop's steps; works without workers, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.steps.fetches import (
    HANDOVER_NS,
    is_of_sampler,
    is_row_by_row,
)
from lightning_modelprof.analysis.steps.loader_queue import (
    ASSUMED_HANDOVER_NS,
    LoaderQueue,
    PredictedStep,
    loader_queue,
)
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings
from lightning_modelprof.run.workers import LoaderWorkers, WorkerBatches

_LEAST_SHARE: Final = 0.01
"""Least share of the steps that making batches must take for a prediction to be worthwhile."""


@fact
def fetch_queue(facts: Facts) -> LoaderQueue:
    """Predicted step time with workers, if the training process makes its batches itself.

    A step's fetch is then the making of its batch, and the sampled fetches show how much of it computes.
    """
    costs, computing, setup = facts.step_costs, facts.batch_cpu.computing, facts.get(Facts.setup)
    loaders = () if setup is None else setup.loaders
    if len(loaders) != 1 or loaders[0].num_workers != 0:
        raise NotMeasured("there isn't exactly one torch DataLoader with num_workers=0")
    if computing is None:
        raise NotMeasured("no fetch's CPU time was read")
    if is_row_by_row(loaders[0], costs.usual_wait_ns() or 0.0):
        raise NotMeasured("samples are rows in memory, so handing over a worker's batch would take longer")
    if is_of_sampler(facts.get(Facts.hot_lines)):
        raise NotMeasured("a fetch mostly chooses indices, which always runs in the main process")
    all_fetches_ns, rests_ns = _clean_fetches(facts.steps)
    if all_fetches_ns.sum() < _LEAST_SHARE * (all_fetches_ns.sum() + rests_ns.sum()):
        raise NotMeasured("making batches takes less than 1% of the steps")
    fetches_ns = all_fetches_ns.tolist()
    ends_ns = np.cumsum(fetches_ns).tolist()
    batches = WorkerBatches(
        worker=(0,) * len(fetches_ns),
        index=tuple(range(1, len(fetches_ns) + 1)),  # none is an epoch's first
        begin_ns=tuple(end - one for end, one in zip(ends_ns, fetches_ns, strict=True)),
        fetched_ns=tuple(ends_ns),
        ready_ns=tuple(ends_ns),
        cpu_ns=tuple(round(computing * one) for one in fetches_ns),
        samples=(0,) * len(fetches_ns),
    )
    return queue_of(facts, LoaderWorkers(num_workers=0, batches=batches), handover_ns=HANDOVER_NS)


def _clean_fetches(steps: StepTimings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Fetch and remaining time of each clean step with a measured fetch."""
    clean = steps.clean()
    fetches_ns = clean.phases_ns[:, PHASE_INDEX["dataloader"]]
    is_seen = fetches_ns != NOT_MEASURED
    return fetches_ns[is_seen], (clean.duration_ns - fetches_ns)[is_seen]


def queue_of(facts: Facts, record: LoaderWorkers, *, handover_ns: float = ASSUMED_HANDOVER_NS) -> LoaderQueue:
    """Prediction from a loader's batches and the clean steps of its loop.

    Args:
        handover_ns: per batch, if the steps don't show the hand-over.
    """
    costs, setup = facts.get(Facts.step_costs), facts.get(Facts.setup)
    if costs is None:
        raise NotMeasured("no step is clean")
    wait_ns, step_ns = costs.typical.exposed_wait_ns, costs.step_ns
    cpus = None if setup is None else setup.usable_cpus
    fetches_ns, rests_ns = _clean_fetches(facts.steps)
    if wait_ns is None or not len(fetches_ns):
        raise NotMeasured("fetches weren't measured")
    batch_cpu = facts.get(Facts.batch_cpu)
    free = None if batch_cpu is None else batch_cpu.free_cpus
    if free is not None and cpus is not None and setup is not None:
        # A process that competes for CPUs gets its share, however much the others demand.
        free = max(free, cpus / max(2, setup.local_world_size))
    found = loader_queue(
        record.batches,
        num_workers=record.num_workers,
        prefetch_factor=record.prefetch_factor,
        rests_ns=_scaled(rests_ns, max(0.0, step_ns - wait_ns)),
        waits_ns=_scaled(fetches_ns, wait_ns),  # a device may hide part of the fetch
        is_ordered=record.is_ordered,
        cpus=free or cpus,
        num_cpus=cpus,
        rest_cpu_ns=0.0 if batch_cpu is None else batch_cpu.rest_ns,
        cpu_wait=record.cpu_wait,
        assumed_handover_ns=handover_ns,
    )
    return _calibrated(found)


def _calibrated(queue: LoaderQueue) -> LoaderQueue:
    """Scale the predictions by the present step's measured over predicted time."""
    factor = queue.step_ns / queue.present.step_ns if queue.present.step_ns > 0 else 1.0

    def scaled(one: PredictedStep) -> PredictedStep:
        times = (one.step_ns, one.low_ns, one.high_ns)
        step_ns, low_ns, high_ns = (factor * ns for ns in times)
        return replace(one, step_ns=step_ns, low_ns=low_ns, high_ns=high_ns)

    return replace(
        queue,
        predictions=tuple(map(scaled, queue.predictions)),
        present=scaled(queue.present),
        best=scaled(queue.best),
        advised=scaled(queue.advised),
        order_cost_ns=None if queue.order_cost_ns is None else factor * queue.order_cost_ns,
    )


def _scaled(times_ns: NDArray[np.int64], mean_ns: float) -> NDArray[np.float64]:
    total_ns = float(times_ns.mean())
    scaled: NDArray[np.float64] = times_ns.astype(np.float64) * (mean_ns / total_ns if total_ns > 0 else 0.0)
    return scaled
