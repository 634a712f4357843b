"""How batches are made and what helps against waiting for them.

Workers that were looked into say it best. Without them, fetches and CPU times tell what they can.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue
from lightning_modelprof.analysis.steps.fetches import CHEAP_SAMPLE_NS, is_row_by_row
from lightning_modelprof.analysis.steps.workers import measured_workers
from lightning_modelprof.report.advice.loader import LoaderAdvice, sampler_advice
from lightning_modelprof.report.advice.predicted import fetch_advice
from lightning_modelprof.report.advice.workers import (
    busiest_workers,
    busy_advice,
    loaders_from,
    made_batches,
    own_workers_advice,
    waited_for,
    worker_lines,
    worker_starts,
)
from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.rule import duration
from lightning_modelprof.run.setup import LoaderSetup

_BUSY_MACHINE: Final = "Re-run on an idle machine, or reserve CPUs for this job."


def wait_advice(facts: Facts, wait_ns: float) -> LoaderAdvice:
    """What to change about the loaders of a loop that waits for its batches."""
    setup, cpu, workers = facts.get(Facts.setup), facts.get(Facts.batch_cpu), waited_for(facts)
    loaders = () if setup is None else setup.loaders
    if workers is not None:
        return busy_advice(facts, workers, loaders_from(loaders, workers), wait_ns)
    is_ready = cpu is not None and cpu.workers_keep_up
    advice = sampler_advice(facts.get(Facts.hot_lines), wait_ns)
    if advice is None:
        idle = busiest_workers(facts.get(measured_workers)) if is_ready else None
        queue = facts.get(fetch_queue) if idle is None else idle.queue
        advice = fetch_advice(facts, loaders if idle is None else loaders_from(loaders, idle), wait_ns, queue)
    return advice._replace(loaders=() if is_ready else loaders)


def advice_without_workers(facts: Facts, loader: LoaderSetup, wait_ns: float) -> LoaderAdvice:
    """What to change where the training process makes its batches itself."""
    return fetch_advice(facts, (loader,), wait_ns, facts.get(fetch_queue))


def lines_waited_for(facts: Facts) -> HotLines | None:
    """The samples of whoever makes the batches that are waited for; ``None`` of the training thread."""
    return None if waited_for(facts) is None else worker_lines(facts)


def batch_ns(facts: Facts) -> float:
    """What one worker takes for a batch; its CPU time where that wasn't seen, 0 if unknown."""
    made, cpu = made_batches(facts), facts.get(Facts.batch_cpu)
    if made is not None:
        return made.making_ns
    return 0.0 if cpu is None else cpu.batch_ns or 0.0


def batch_cpu_ns(facts: Facts) -> float:
    """CPU time of a batch that a worker makes; 0 if unknown."""
    made = made_batches(facts)
    return 0.0 if made is None else made.cpu_ns


def are_rows(facts: Facts, loader: LoaderSetup, wait_ns: float) -> bool:
    """Whether samples are only indexed: nothing is saved by keeping them."""
    made = made_batches(facts)
    sample_ns = None if made is None else made.sample_ns
    return is_row_by_row(loader, wait_ns) or (sample_ns is not None and sample_ns < CHEAP_SAMPLE_NS)


def collate_share(facts: Facts, loader: LoaderSetup) -> float:
    """Of the time that batches take, in the collate function; 0 if unknown."""
    made, place, hot = made_batches(facts), loader.collate, facts.get(Facts.hot_lines)
    if not loader.num_workers and place is not None and place.file and place.line and hot is not None:
        return hot.share_of("dataloader", place.file, place.line)
    return 0.0 if made is None else made.collate


def first_batch_evidence(facts: Facts, first_ns: float) -> list[Evidence]:
    """What workers take at the begin of an epoch, until the first batch is there."""
    return [*worker_starts(facts), duration("first batch of an epoch (not counted)", first_ns)]


def contention_advice(facts: Facts) -> str:
    """What to do where the training thread waits for a CPU."""
    return own_workers_advice(facts) or _BUSY_MACHINE


def slow_fetches_advice(facts: Facts) -> str:
    """What to do about a few fetches that take long."""
    is_predicted = any(one.queue is not None for one in facts.get(measured_workers) or ())
    return "Check what slow batches read. " + (
        "The table Number of workers shows whether prefetch_factor helps."
        if is_predicted
        else "With workers, a larger prefetch_factor helps."
    )
