"""Fetches of the training thread, and the queue model of a loader that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.loader_queue import (
    ASSUMED_HANDOVER_NS,
    LoaderQueue,
    PredictedStep,
    loader_queue,
)
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.run.stacks import StackFrame
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings
from lightning_modelprof.run.workers import LoaderWorkers, WorkerBatches

CHEAP_SAMPLE_NS: Final = 50_000
"""A sample below this time is only indexed and collated: reading, decoding or transforming takes longer.

Source: measured with 20,000 rows of 32 numbers in batches of 64 on one CPU: 6.7 µs per sample row by row and
1.9 µs by slices of whole batches; with a worker, the training thread took 16 µs per sample to get its
batches.
"""

HANDOVER_NS: Final = 500_000
"""Time for the training thread to get a batch from a worker, if none was observed.

Source: less than measured on a virtual machine with two CPUs: 1.3 ms of CPU time for a batch of one tensor,
1.8 for two and 4.6 for eight. No other machine was tried.
"""


_NEXT_INDICES: Final = ("torch.utils.data.dataloader", "_next_index")
"""Where torch's DataLoader asks its sampler or batch sampler for the next indices."""

_SHUFFLES: Final = "random"
"""The standard library module that draws one index at a time."""

_MOSTLY: Final = 0.5


def sampler_share(hot: HotLines | None) -> float:
    """Share of the training thread's Dataloader time spent choosing indices."""
    return 0.0 if hot is None else hot.share_in("dataloader", *_NEXT_INDICES)


def is_of_sampler(hot: HotLines | None) -> bool:
    return sampler_share(hot) >= _MOSTLY


class SamplerCode(NamedTuple):
    """The code that chooses indices.

    Attributes:
        function: the user's or a library's function that takes most of the time; ``""`` for torch's samplers.
        shuffles: whether Python's ``random`` takes most of the time.
    """

    function: str
    shuffles: bool


def sampler_code(hot: HotLines | None) -> SamplerCode:
    """Find the code that chooses indices, from samples of the training thread in Dataloader."""
    if hot is None:
        return SamplerCode("", shuffles=False)
    every = hot.found_by(_next_indices_position, ("dataloader",))
    own = hot.found_by(lambda path: _below(path, own=True), ("dataloader",))
    if not every.share or own.share < _MOSTLY * every.share:
        return SamplerCode("", shuffles=False)
    line = own.lines[0] if own.lines else None
    shuffling = hot.found_by(lambda path: _below(path, own=False), ("dataloader",))
    return SamplerCode(
        own.functions[0] if line is None else (line.inner or line).function,
        shuffles=shuffling.share >= _MOSTLY * every.share,
    )


def _next_indices_position(path: Sequence[StackFrame]) -> int | None:
    module, function = _NEXT_INDICES
    for number, one in enumerate(path):
        if one.python_module == module and one.function.rpartition(".")[2] == function:
            return number
    return None


def _below(path: Sequence[StackFrame], *, own: bool) -> int | None:
    """Position of the first user or library frame below that call, or else of Python's ``random``."""
    begin = _next_indices_position(path)
    if begin is None:
        return None
    return next(
        (
            number
            for number, one in enumerate(path[begin:], begin)
            if (one.is_users or one.package if own else one.python_module == _SHUFFLES)
        ),
        None,
    )


def is_row_by_row(loader: LoaderSetup, wait_ns: float) -> bool:
    """Whether a batch only takes indexing and collating rows in memory, without work on samples."""
    return (
        loader.num_workers == 0
        and loader.dataset is not None
        and loader.dataset.function.endswith(".__getitem__")
        and loader.batch_size is not None
        and loader.batch_size > 1
        and wait_ns < CHEAP_SAMPLE_NS * loader.batch_size
    )


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
