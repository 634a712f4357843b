"""What to change about a DataLoader, by the cause seen in its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.source.worker_stacks import busiest, worker_stacks
from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue
from lightning_modelprof.analysis.steps.fetches import is_of_sampler
from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue
from lightning_modelprof.analysis.steps.workers import (
    SLOW,
    CallFacts,
    Cause,
    WaitCause,
    WorkersFacts,
    measured_workers,
)
from lightning_modelprof.report.advice.loader import (
    CPU_BOUND,
    MOST_OF_IT,
    Fix,
    LoaderAdvice,
    arguments_of,
    fix_up_to,
    in_words,
)
from lightning_modelprof.report.advice.owners import Owner, owner_of_loader, written_call
from lightning_modelprof.report.advice.predicted import (
    bound_of,
    fetch_advice,
    predicted_arguments,
    predicted_call,
    predicted_evidence,
    saved_by_workers,
)
from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.rule import count, duration, ratio, text
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.run.workers import CallTimes
from lightning_modelprof.units import digits, milliseconds, percent

_WHY: Final = {
    Cause.START_UP: "worker startup every epoch",
    Cause.THREADS: "threads in workers compete for CPUs",
    Cause.PICKLING: "pickling large batches",
    Cause.COLLATE: "slow collate function",
    Cause.SLOW_SAMPLES: "a few slow samples",
    Cause.TOO_FEW_WORKERS: "too few workers",
    Cause.WAITS: "samples wait for I/O",
    Cause.COMPUTES: "samples are CPU-bound",
}
_OF_ALL_BATCHES: Final = (Cause.TOO_FEW_WORKERS, Cause.WAITS, Cause.COMPUTES)
"""Causes in batches as a whole: cheaper batches end the wait."""
_NEARLY_ALWAYS: Final = 0.9
_WORTH_SAYING: Final = 0.05
"""Minimum share: of a step, that other workers save in addition to another fix; of a batch, without a CPU."""
_MOST_TIMES: Final = 20
"""Largest speedup of batches worth suggesting."""


def busiest_workers(workers: tuple[WorkersFacts, ...] | None) -> WorkersFacts | None:
    """Return the busiest loader's workers; ``None`` if none made a batch."""
    seen = [one for one in workers or () if one.making_ns]
    found = busiest([one.record for one in seen])
    return next((one for one in seen if one.record is found), None)


def waited_for(facts: Facts) -> WorkersFacts | None:
    """Return the workers that training waits for; ``None`` if unknown, or if it waits for something else.

    That is the sampler in the main process, or the handover of ready batches: by both the training thread's
    view and the queue model, since a few long waits come from slow batches.
    """
    found = busiest_workers(facts.get(measured_workers))
    if found is None or is_of_sampler(facts.get(Facts.hot_lines)):
        return None
    cpu, queue = facts.get(Facts.batch_cpu), found.queue
    keep_up = cpu is not None and cpu.workers_keep_up
    is_ready = keep_up and (queue is None or queue.ready >= _NEARLY_ALWAYS)
    return None if is_ready else found


def worker_lines(facts: Facts) -> HotLines | None:
    """Return the stack samples of the busiest loader's workers."""
    stacks = facts.get(worker_stacks)
    return None if stacks is None else stacks.hot_lines


def loaders_from(loaders: Sequence[LoaderSetup], workers: WorkersFacts) -> Sequence[LoaderSetup]:
    """Return the loaders from these workers' own on; all if unknown."""
    return loaders[workers.record.loader :] or loaders


def busy_advice(
    facts: Facts, workers: WorkersFacts, loaders: Sequence[LoaderSetup], wait_ns: float
) -> LoaderAdvice:
    """Advise on workers that training waits for."""
    seen, setup, cpu = facts.get(measured_workers) or (), facts.get(Facts.setup), facts.get(Facts.batch_cpu)
    loader = next(iter(loaders), None)
    advice = cause_advice(
        workers,
        loader,
        None if setup is None else setup.usable_cpus,
        owner_of_loader(setup, loader),
        others_ns=longest_of_others(seen, workers),
    )
    advice = advice or fetch_advice(facts, loaders, wait_ns, facts.get(fetch_queue))
    ready = [] if cpu is None or cpu.ready is None else [ratio("batches ready when fetched", cpu.ready)]
    return advice._replace(
        told=f"{told_of(workers, len({one.record.loader for one in seen}))}{advice.told}",
        evidence=[*ready, *advice.evidence],
        loaders=loaders,
    )


class MadeBatches(NamedTuple):
    """The busiest workers' batch times.

    Attributes:
        making_ns, cpu_ns: per batch in one worker.
        sample_ns: wall time of the fetch, per sample; ``None`` without samples.
        collate: share of the batch time in the collate function.
    """

    making_ns: float
    cpu_ns: float
    sample_ns: float | None
    collate: float


def made_batches(facts: Facts) -> MadeBatches | None:
    """Return the workers' batch times; ``None`` if no batch was seen."""
    workers = busiest_workers(facts.get(measured_workers))
    if workers is None:
        return None
    batches = max(sum(one.times.batches for one in workers.workers), 1)
    return MadeBatches(
        making_ns=workers.making_ns / batches,
        cpu_ns=sum(one.times.cpu_ns for one in workers.workers) / batches,
        sample_ns=workers.sample_ns,
        collate=workers.collate,
    )


def worker_starts(facts: Facts) -> list[Evidence]:
    """Return the mean worker startup time until its first sample, where measured."""
    loaders = facts.get(measured_workers) or ()
    known = [one.times for loader in loaders for one in loader.workers if one.times.start_ns is not None]
    number = sum(one.starts for one in known)
    total_ns = sum((one.start_ns or 0) * one.starts for one in known)
    return [duration("worker startup until its first sample", total_ns / number)] if number else []


def longest_of_others(seen: Sequence[WorkersFacts], facts: WorkersFacts) -> float:
    """Return the step time that the slowest other loader allows; 0 without a prediction."""
    others = [one.queue for one in seen if one.record.loader != facts.record.loader]
    return max((one.present.step_ns for one in others if one is not None), default=0.0)


def costliest(facts: WorkersFacts) -> CallFacts | None:
    """Return the worker call with the largest self time; ``None`` if none was timed."""
    own = [one for one in facts.calls if one.call.kind != "compose" and one.share]
    return max(own, key=lambda one: one.call.own_ns, default=None)


def told_of(facts: WorkersFacts, num_loaders: int = 1) -> str:
    """Name the slowest call in a sentence with a leading space; ``""`` without one."""
    one = costliest(facts)
    if one is None:
        return ""
    each = "batch" if one.call.kind == "collate" else "sample"
    whose = f" of DataLoader {facts.record.loader}" if num_loaders > 1 else ""
    return (
        f" In the workers{whose}, {named(one.call)} is slowest ({milliseconds(own_ns(facts, one))} per"
        f" {each}, {percent(one.share or 0.0)} of worker time)."
    )


def named(call: CallTimes) -> str:
    """Name a call in a sentence; tells the dataset's own code apart from the transforms it calls."""
    return f"{call.name} itself" if call.kind == "sample" and call.inner_ns else call.name


def own_ns(facts: WorkersFacts, one: CallFacts) -> float:
    """Return a call's self time per sample, or per batch for the collate function."""
    if one.call.kind == "collate":
        return one.call.own_ns / max(sum(worker.times.batches for worker in facts.workers), 1)
    return one.call.own_ns / max(sum(worker.times.samples for worker in facts.workers), 1)


def cause_advice(
    facts: WorkersFacts,
    loader: LoaderSetup | None,
    cpus: int | None,
    owner: Owner | None = None,
    *,
    others_ns: float = 0.0,
) -> LoaderAdvice | None:
    """Advise on a loader that training waits for; ``None`` if its workers don't show the cause.

    Args:
        owner: library that makes the loader; ``None`` if the user does.
        others_ns: step time that the slowest other loader allows.
    """
    cause, wait_ns = facts.cause, facts.wait_ns
    left_ns = max(0.0, facts.step_ns - others_ns)
    is_held = wait_ns is not None and left_ns < wait_ns
    wait_ns = left_ns if is_held else wait_ns  # the rest waits for the other loaders
    if cause is not None and cause.why is Cause.START_UP:
        # Clean steps never wait for startup: take the next cause if there is one.
        cause = next((one for one in facts.causes if one.why is not Cause.START_UP), cause)
    if cause is None or not wait_ns:
        return None
    queue = facts.queue
    gain_ns = 0.0 if queue is None else saved_by_workers(queue, wait_ns)
    fixes, advised, told = [], None, _ordered_loader_note(facts) if cause.why is Cause.SLOW_SAMPLES else ""
    is_worth_it = cause.why is Cause.TOO_FEW_WORKERS or gain_ns >= _WORTH_SAYING * facts.step_ns
    if queue is None or cause.why is Cause.START_UP:
        pass
    elif is_worth_it:
        arguments = predicted_arguments(queue, facts.record.is_persistent)
        fixes = [Fix(_more_workers(facts, queue, loader, owner, wait_ns), gain_ns, arguments)]
        advised = queue.advised
    else:
        told += f" {_no_number_helps(queue)}"
    if cause.why in _OF_ALL_BATCHES:
        # However cheap, a worker's batch still needs the handover.
        handover_ns = queue.handover_ns if queue is not None and facts.record.num_workers else 0.0
        cheaper_ns = max(0.0, wait_ns - handover_ns)
        if not fixes or gain_ns < MOST_OF_IT * cheaper_ns:
            fixes.append(fix_up_to(_cheaper(facts), cheaper_ns))
    else:
        own_ns, is_first = min(cause.saving_ns, wait_ns), True
        if cause.why is Cause.PICKLING and advised is not None and not advised.workers:
            own_ns, is_first = min(own_ns, gain_ns), False  # without workers nothing is pickled
        own = fix_up_to(_action(facts, cause, loader, owner), own_ns)
        fixes = [own, *fixes] if is_first else [*fixes, own]
    saving_ns = max(one.saving_ns for one in fixes)
    action = in_words(fixes)
    if is_held:
        told += " Other DataLoaders limit the saving."
    if facts.why is Cause.START_UP and cause.why is not Cause.START_UP:
        told += " Worker startup costs more (see worker_startup)."
    if owner is not None and cause.why is not Cause.TOO_FEW_WORKERS:
        action += owner.cheaper_batches
    return LoaderAdvice(
        action,
        _evidence(facts, cause, queue, cpus),
        saving_ns,
        None if advised is None else advised.workers,
        told=f"{told}{_cause_reason(facts, cause)}",
        arguments=arguments_of(fixes),
        saving_is=bound_of(fixes, queue),
    )


def _more_workers(
    facts: WorkersFacts,
    queue: LoaderQueue,
    loader: LoaderSetup | None,
    owner: Owner | None,
    wait_ns: float,
) -> str:
    return predicted_call(queue, _kind(facts, loader), facts.record.is_persistent, owner, wait_ns)


def _kind(facts: WorkersFacts, loader: LoaderSetup | None) -> str:
    """Return what takes ``num_workers``: the loaders in a CombinedLoader, not the loader itself."""
    return facts.record.kind if loader is None or loader.num_workers is None else loader.kind


def _cheaper(facts: WorkersFacts) -> str:
    if facts.is_computing:
        return f"Make {_most(facts)} cheaper. Cache results, decode whole batches, or use the GPU."
    return f"Make {_most(facts)} wait less. Cache reads, or read fewer, larger pieces."


def _most(facts: WorkersFacts) -> str:
    one = costliest(facts)
    return "batches" if one is None else named(one.call)


def _no_number_helps(queue: LoaderQueue) -> str:
    most = max(one.workers for one in queue.predictions)
    said = f"No value of num_workers from 0 to {most} helps"
    factor = queue.needed_factor
    if factor is None:
        return f"{said}."
    if factor > _MOST_TIMES:
        return f"{said}, and training would still wait if batches were {_MOST_TIMES} times cheaper."
    return f"{said}; batches must get {digits(factor)} times cheaper."


def _action(
    facts: WorkersFacts,
    cause: WaitCause,
    loader: LoaderSetup | None,
    owner: Owner | None,
) -> str:
    if cause.why is Cause.START_UP:
        call = written_call(_kind(facts, loader), {"persistent_workers": True}, owner)
        return (
            "Make epochs longer, or the first samples cheaper."
            if facts.record.is_persistent
            else f"{call} (currently False)."
        )
    if cause.why is Cause.THREADS:
        return (
            "Use one thread per worker, such as cv2.setNumThreads(0) in worker_init_fn or OMP_NUM_THREADS=1."
        )
    if cause.why is Cause.PICKLING:
        return "Return few tensors from the collate function, not lists or arrays."
    if cause.why is Cause.COLLATE:
        return "Collate whole arrays (torch.stack, np.stack, pad_sequence), or use samples of one size."
    return "Make slow samples cheaper, or drop them."


def _cause_reason(facts: WorkersFacts, cause: WaitCause) -> str:
    share = percent(cause.share)
    if cause.why is Cause.START_UP:
        return " The queue is empty at the start of an epoch."
    if cause.why is Cause.THREADS:
        threads = max(one.times.threads or 0 for one in facts.workers)
        return f" Each of {facts.record.num_workers} workers has up to {threads} threads."
    if cause.why is Cause.PICKLING:
        return f" Pickling a batch takes {share} as much CPU time as loading it."
    if cause.why is Cause.COLLATE:
        return f" Collating takes {share} of worker time."
    if cause.why is Cause.SLOW_SAMPLES:
        return f" {_slow(facts)}"
    return (
        f" Loading a batch {'is CPU-bound' if facts.is_computing else 'mostly waits'} ({_cpu_time(facts)})."
    )


def _cpu_time(facts: WorkersFacts) -> str:
    said = f"{percent(facts.computing)} of its time is CPU time"
    wait = min(facts.cpu_wait or 0.0, 1 - facts.computing)  # it may also wait for one between batches
    return f"{said}, {percent(wait)} is waiting for a CPU" if wait >= _WORTH_SAYING else said


def _ordered_loader_note(facts: WorkersFacts) -> str:
    if not facts.record.is_ordered or facts.record.num_workers < 2:
        return ""
    return (
        " Ready batches wait behind slow ones; DataLoader(in_order=False) (torch 2.6+) returns ready batches"
        " first, which changes their order."
    )


def _slow(facts: WorkersFacts) -> str:
    batch = facts.batch
    if batch is None:
        return "A few samples are much slower than the others."
    return (
        f"{percent(batch.slow)} of batches take over {SLOW} times the median ({milliseconds(batch.p50_ns)})."
    )


def _evidence(
    facts: WorkersFacts, cause: WaitCause, queue: LoaderQueue | None, cpus: int | None
) -> list[Evidence]:
    one = costliest(facts)
    told = [text("cause", _WHY[cause.why]), count("num_workers", facts.record.num_workers)]
    if facts.batch is not None:
        told.append(duration("batch time per worker", facts.batch.mean_ns))
    told.append(ratio(CPU_BOUND, facts.computing))
    if facts.cpu_wait is not None:
        told.append(ratio("share of batch time waiting for a CPU", facts.cpu_wait))
    if one is not None:
        told += [
            text("slowest call in the workers", one.call.name),
            duration(
                "its time per " + ("batch" if one.call.kind == "collate" else "sample"),
                own_ns(facts, one),
            ),
            ratio("share of worker time", one.share or 0.0),
        ]
    if cpus is not None:
        told.append(count("usable CPUs", cpus))
    if facts.record.start_method:
        told.append(text("start method", facts.record.start_method))
    if queue is not None and queue.advised != queue.present:
        told += predicted_evidence(queue)
    return told
