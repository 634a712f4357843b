"""How batches are made, and what reduces the wait for them.

Measurements inside workers come first; without them, the advice rests on fetch and CPU times.
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
    waited_for,
    worker_lines,
    worker_starts,
)
from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.rule import duration
from lightning_modelprof.run.setup import LoaderSetup

_TENSORS: Final = "TensorDataset."
_MOSTLY: Final = 0.5


def wait_advice(facts: Facts, wait_ns: float) -> LoaderAdvice:
    """Advise on the loaders of a loop that waits for data."""
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
    """Advise where the training process loads data itself."""
    return fetch_advice(facts, (loader,), wait_ns, facts.get(fetch_queue))


def lines_waited_for(facts: Facts) -> HotLines | None:
    """Return the stack samples of the workers waited for; ``None`` if the training thread loads the data."""
    return None if waited_for(facts) is None else worker_lines(facts)


def batch_ns(facts: Facts) -> float:
    """Return one worker's time per batch, or its CPU time if not measured; 0 if unknown."""
    made, cpu = made_batches(facts), facts.get(Facts.batch_cpu)
    if made is not None:
        return made.making_ns
    return 0.0 if cpu is None else cpu.batch_ns or 0.0


def batch_cpu_ns(facts: Facts) -> float:
    """Return the CPU time per batch; 0 if only the workers' total is known, which includes startup."""
    made = made_batches(facts)
    return 0.0 if made is None else made.cpu_ns


def cpus_of_workers(facts: Facts) -> float:
    """Return how many CPUs this training's workers use; 0 if unknown."""
    setup, use = facts.get(Facts.setup), facts.record.cpu
    if setup is None or not any(one.num_workers for one in setup.loaders):
        return 0.0
    if use is not None and use.workers_ns is not None:
        return use.workers_ns / max(1, use.loop_ns)
    costs, loaders = facts.get(Facts.step_costs), facts.get(measured_workers)
    if costs is None or loaders is None:
        return 0.0
    times = [one.times for loader in loaders for one in loader.workers]
    used_ns = sum(one.cpu_ns + (one.other_cpu_ns or 0) for one in times)
    return used_ns / max(1.0, costs.loop.wall_ns * costs.loop.num_steps)


def first_batch(facts: Facts, extra_ns: float) -> tuple[float, list[Evidence]]:
    """Return a worker's part of the extra wait for an epoch's first batch, with evidence."""
    first_ns = min(extra_ns, max(0.0, batch_ns(facts) - (facts.step_costs.usual_wait_ns() or 0.0)))
    return first_ns, [*worker_starts(facts), duration("first batch of an epoch (not counted)", first_ns)]


def why_not_keep_samples(facts: Facts, loader: LoaderSetup, wait_ns: float) -> str:
    """Return a sentence on why caching the samples would save nothing; ``""`` if it would."""
    cpu, made, dataset = facts.get(Facts.batch_cpu), made_batches(facts), loader.dataset
    sample_ns = None if made is None else made.sample_ns
    is_tensors = dataset is not None and dataset.is_library and dataset.function.startswith(_TENSORS)
    is_cheap = sample_ns is not None and sample_ns < CHEAP_SAMPLE_NS
    if is_row_by_row(loader, wait_ns) or is_cheap or is_tensors:
        return "Samples are rows in memory, so caching them saves nothing."
    if loader.num_workers and cpu is not None and cpu.workers_keep_up:
        return "Workers have their batches ready before they're fetched."
    share = 0.0 if made is None else made.collate
    place, hot = loader.collate, facts.get(Facts.hot_lines)
    if not loader.num_workers and place is not None and place.file and place.line and hot is not None:
        share = hot.share_of("dataloader", place.file, place.line)
    return "Most of the wait is for collating samples, not for loading them." if share >= _MOSTLY else ""


def slow_fetches_advice(facts: Facts) -> str:
    """Advise on a few slow fetches."""
    setup, look = facts.get(Facts.setup), "Check what slow batches read."
    if any(one.queue is not None for one in facts.get(measured_workers) or ()):
        return f"{look} The table Number of workers shows whether prefetch_factor helps."
    has_workers = setup is not None and any(one.num_workers for one in setup.loaders)
    return f"{look} {'A' if has_workers else 'With workers, a'} larger prefetch_factor helps."
