"""DataLoader workers: their time, late batches, and why the loop waits for them."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.pooling import sum_of_all
from lightning_modelprof.analysis.steps.fetch_queue import queue_of
from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.record import Record
from lightning_modelprof.run.workers import CallTimes, LoaderWorkers, WorkerBatches, WorkerTimes

SLOW: Final = 3
"""A sample or batch is slow at this many times the median."""


_LITTLE: Final = 0.03
"""Share of a step that may be waiting without a cause."""


_MOSTLY: Final = 0.5


_A_PART: Final = 1 / 3
"""Share of the wait that a cause must explain to be preferred over what all batches have in common."""


_NEARLY: Final = 0.9


_OWN_THREADS: Final = 4
"""Threads of any worker: its main thread, those that pickle batches and hand over memory, and ours."""


_SEVERAL: Final = 0.25
"""CPU time of other threads over batch-making time from which they count as computing."""


class Cause(Enum):
    """Why the loop waits for its batches."""

    NONE = "none"
    """It hardly waits."""
    START_UP = "start_up"
    """Each epoch starts workers, or fills their queues."""
    THREADS = "threads"
    """Workers compute in several threads each, more in total than there are CPUs."""
    PICKLING = "pickling"
    """Other threads of a worker, including the one that pickles batches, are slow."""
    COLLATE = "collate"
    """Collating samples is slow."""
    SLOW_SAMPLES = "slow_samples"
    """A few take much longer than the others, and ready ones wait behind them."""
    TOO_FEW_WORKERS = "too_few_workers"
    """By the queue model, another worker count or prefetch factor is enough."""
    WAITS = "waits"
    """Making a batch waits for a disk, a network or a lock, and more workers don't help."""
    COMPUTES = "computes"
    """Making a batch computes, and there is no free CPU for more workers."""


class WaitCause(Record, frozen=True, kw_only=True):
    """One cause, and the saving without it.

    Attributes:
        share: of the batch-making time, for collate and slow samples; CPU time of other threads over that
            time, for pickling and threads; of the loop's time, for the others.
        saving_ns: per step, without this cause alone; at most its wait.
    """

    why: Cause
    share: float
    saving_ns: float


class ServiceTimes(Record, frozen=True, kw_only=True):
    """Time per batch in a worker.

    Attributes:
        slow: share of batches that took more than three times the median.
        slow_time: share of all batch time in those batches.
    """

    count: int
    mean_ns: float
    p50_ns: float
    p99_ns: float
    max_ns: float
    slow: float
    slow_time: float


class CallFacts(Record, frozen=True, kw_only=True):
    """One call in the workers.

    Attributes:
        share: of the workers' batch-making time, without nested calls of the list; ``None`` if unknown.
        mean_ns: wall time including calls, per sample of the loader; for the collate function, per batch.
            ``None`` if not measured.
        error_ns: half-width of its error; ``None`` if it isn't from samples.
        computing: CPU time over wall time; ``None`` if CPU time wasn't read.
    """

    call: CallTimes
    share: float | None
    mean_ns: float | None
    error_ns: float | None
    computing: float | None


class WorkerShares(Record, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        waiting: share of its time waiting for an index, since enough batches were ready.
        late: its batches that were ready after later ones.
        held_back: those later ones; a batch that waits behind two counts for the last of them.
    """

    times: WorkerTimes
    waiting: float
    late: int
    held_back: int


class WorkersFacts(Record, frozen=True, kw_only=True):
    """The workers of one loader.

    Attributes:
        making_ns: wall time of making batches, over all workers.
        calls: in the order of the record.
        batch: of single batches; ``None`` if none were timed.
        sample_ns: wall time of the fetch per sample; ``None`` without samples.
        waiting: share of the workers' time waiting for an index; ``None`` without workers.
        collate: share of ``making_ns`` in the collate function.
        computing: CPU time of the batch-making thread over ``making_ns``.
        other_cpu: CPU time of the workers' other threads over ``making_ns``; ``None`` if unknown.
        cpu_wait: time that workers were ready without a CPU over ``making_ns``; ``None`` if unknown.
        wait_ns: wait for the batch in a typical step; ``None`` if fetches weren't measured.
        start_up_ns: per step, the wait of epochs after the first for workers to start and fill their queues.
        step_ns: of a typical step.
        queue: prediction; ``None`` if :func:`queue_of` can't make one.
        why: the cause to report.
        causes: all that explain something, largest saving first.
    """

    record: LoaderWorkers
    making_ns: int
    calls: tuple[CallFacts, ...]
    workers: tuple[WorkerShares, ...]
    batch: ServiceTimes | None
    sample_ns: float | None
    waiting: float | None
    collate: float
    computing: float
    other_cpu: float | None
    cpu_wait: float | None
    wait_ns: float | None
    start_up_ns: float
    step_ns: float
    queue: LoaderQueue | None
    why: Cause
    causes: tuple[WaitCause, ...]

    @property
    def is_computing(self) -> bool:
        """Whether making a batch mostly computes; workers that lack CPUs also wait for these."""
        known = self.computing if self.queue is None else self.queue.computing
        return known >= _MOSTLY

    @property
    def cause(self) -> WaitCause | None:
        """Details of ``why``; ``None`` if nothing waits."""
        return next((one for one in self.causes if one.why is self.why), None)


@fact
def measured_workers(facts: Facts) -> tuple[WorkersFacts, ...]:
    """Facts of a loop's loaders.

    If several loaders feed one step, the wait is for all of them, and each queue is simulated as if the
    others never caused a wait.
    """
    records = facts.record.workers
    if records is None:
        raise NotMeasured('not measured (inspect={"workers": False}, or an older version saved this run)')
    if not records:
        raise NotMeasured("the loop has no DataLoader whose workers can be measured")
    return tuple(_of_loader(facts, record) for record in records)


def _of_loader(facts: Facts, record: LoaderWorkers) -> WorkersFacts:
    times = record.workers
    fetch_ns, collate_ns = sum(one.fetch_ns for one in times), sum(one.collate_ns for one in times)
    making_ns, samples = fetch_ns + collate_ns, sum(one.samples for one in times)
    batches = sum(one.batches for one in times)
    waited_ns, cpu_ns = sum(one.wait_ns for one in times), sum(one.cpu_ns for one in times)
    other_ns = sum_of_all(one.other_cpu_ns for one in times)
    costs, setup = facts.get(Facts.step_costs), facts.get(Facts.setup)
    late, held = _late(record.batches, record.num_workers * (record.prefetch_factor or 2))
    found = WorkersFacts(
        record=record,
        making_ns=making_ns,
        calls=tuple(
            _call(one, making_ns, batches if one.kind == "collate" else samples) for one in record.calls
        ),
        workers=tuple(
            WorkerShares(
                times=one,
                waiting=_ratio(one.wait_ns, one.fetch_ns + one.collate_ns + one.wait_ns),
                late=late.get(one.worker, 0),
                held_back=held.get(one.worker, 0),
            )
            for one in times
        ),
        batch=_service(record.batches),
        sample_ns=fetch_ns / samples if samples else None,
        waiting=_ratio(waited_ns, making_ns + waited_ns) if record.num_workers else None,
        collate=_ratio(collate_ns, making_ns),
        computing=min(1.0, _ratio(cpu_ns, making_ns)),
        other_cpu=None if other_ns is None else _ratio(other_ns, making_ns),
        cpu_wait=record.cpu_wait,
        wait_ns=None if costs is None else costs.typical.exposed_wait_ns,
        start_up_ns=0.0 if costs is None else _start_up_ns_per_step(costs),
        step_ns=0.0 if costs is None else costs.step_ns,
        queue=_queue(facts, record),
        why=Cause.NONE,
        causes=(),
    )
    causes = _causes(found, None if setup is None else setup.usable_cpus)
    return replace(found, causes=causes, why=_why(found, causes))


def _queue(facts: Facts, record: LoaderWorkers) -> LoaderQueue | None:
    try:
        return queue_of(facts, record)
    except NotMeasured:
        return None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _call(call: CallTimes, making_ns: int, number: int) -> CallFacts:
    """Facts of one call; ``number`` is the samples or batches that its times cover."""
    is_known = call.total_ns is not None and number > 0
    return CallFacts(
        call=call,
        share=None if call.total_ns is None else _ratio(call.own_ns, making_ns),
        mean_ns=_ratio(call.total_ns or 0, number) if is_known else None,
        error_ns=None if call.error_ns is None or not is_known else call.error_ns / number,
        computing=None if call.cpu_ns is None else min(1.0, _ratio(call.cpu_ns, call.total_ns or 0)),
    )


def _service(batches: WorkerBatches) -> ServiceTimes | None:
    times = np.asarray(batches.ready_ns, np.int64) - np.asarray(batches.begin_ns, np.int64)
    if not len(times):
        return None
    median, high = (float(one) for one in np.quantile(times, (0.5, 0.99)))
    is_slow = times > SLOW * median
    return ServiceTimes(
        count=len(times),
        mean_ns=float(times.mean()),
        p50_ns=median,
        p99_ns=high,
        max_ns=float(times.max()),
        slow=float(is_slow.mean()),
        slow_time=_ratio(float(times[is_slow].sum()), float(times.sum())),
    )


def _start_up_ns_per_step(costs: StepCosts) -> float:
    boundaries = costs.boundaries
    return (boundaries.init_ns + (boundaries.extra_wait_ns or 0)) / max(1, costs.steady.num_steps)


def _late(batches: WorkerBatches, num_ahead: int) -> tuple[dict[int, int], dict[int, int]]:
    """By worker: batches that were ready after later ones, and the number of those.

    A ready batch counts for the last unready one before it, which is the one that it waited for.
    """
    late: dict[int, int] = {}
    held: dict[int, int] = {}
    for epoch in epochs_of(batches, num_ahead):
        last: tuple[int, int] | None = None  # the one ready last so far: its time and worker
        waiting = 0
        for ready_ns, worker in epoch:
            if last is None or ready_ns >= last[0]:
                _count(late, held, last, waiting)
                last, waiting = (ready_ns, worker), 0
            else:
                waiting += 1
        _count(late, held, last, waiting)
    return late, held


def _count(late: dict[int, int], held: dict[int, int], last: tuple[int, int] | None, waiting: int) -> None:
    if last is not None and waiting:
        late[last[1]] = late.get(last[1], 0) + 1
        held[last[1]] = held.get(last[1], 0) + waiting


def epochs_of(batches: WorkerBatches, num_ahead: int) -> list[list[tuple[int, int]]]:
    """When batches were ready, and their workers, in delivery order by epoch.

    Indices of two batches in progress differ by less than the number prefetched, and none comes twice;
    otherwise a new epoch has started.
    """
    epochs: list[dict[int, tuple[int, int]]] = []
    highest = -1
    for index, ready_ns, worker in zip(batches.index, batches.ready_ns, batches.worker, strict=True):
        if index < 0:
            continue
        if not epochs or index in epochs[-1] or highest - index >= max(1, num_ahead):
            epochs.append({})
            highest = -1
        epochs[-1][index] = (ready_ns, worker)
        highest = max(highest, index)
    return [[epoch[index] for index in sorted(epoch)] for epoch in epochs]


def _causes(facts: WorkersFacts, cpus: int | None) -> tuple[WaitCause, ...]:
    """Causes of the wait, each taken alone: a batch that takes less shortens the step."""
    wait_ns = facts.wait_ns or 0.0
    found: list[WaitCause] = []

    def add(why: Cause, share: float, saving_ns: float) -> None:
        if share > 0 and saving_ns > 0:
            found.append(WaitCause(why=why, share=share, saving_ns=saving_ns))

    add(Cause.START_UP, _ratio(facts.start_up_ns, facts.step_ns + facts.start_up_ns), facts.start_up_ns)
    workers, queue = facts.record.num_workers, facts.queue
    other = facts.other_cpu or 0.0
    others_ns = min(wait_ns, other / (1 + other) * facts.step_ns)
    more_threads = max((one.times.threads or 0 for one in facts.workers), default=0) - _OWN_THREADS
    is_crowded = more_threads >= 1 and cpus is not None and workers * (1 + more_threads) > cpus
    if is_crowded and other >= _SEVERAL:
        add(Cause.THREADS, other, others_ns)
    elif workers and other >= _MOSTLY:
        add(Cause.PICKLING, other, others_ns)
    add(Cause.COLLATE, facts.collate, min(wait_ns, facts.collate * facts.step_ns))
    # A worker that waits for a CPU is slow in some batches, whatever they contain.
    own = slow = 0.0
    if facts.batch is not None and facts.batch.slow > 0:
        slow = facts.batch.slow_time - facts.batch.slow * facts.batch.p50_ns / facts.batch.mean_ns
        own = max(0.0, slow - (facts.cpu_wait or 0.0))
    order_ns = 0.0 if queue is None else queue.order_cost_ns or 0.0
    slow_ns = max(own * facts.step_ns, _ratio(own, slow) * order_ns)
    add(Cause.SLOW_SAMPLES, own, min(wait_ns, slow_ns))
    left_ns = wait_ns
    if queue is not None and queue.helps:
        gained_ns = min(wait_ns, queue.present.step_ns - queue.advised.step_ns)
        add(Cause.TOO_FEW_WORKERS, _ratio(gained_ns, facts.step_ns), gained_ns)
        left_ns -= gained_ns
    add(
        Cause.COMPUTES if facts.is_computing else Cause.WAITS,
        _ratio(left_ns, facts.step_ns),
        left_ns,
    )
    return tuple(sorted(found, key=lambda one: -one.saving_ns))


def _why(facts: WorkersFacts, causes: tuple[WaitCause, ...]) -> Cause:
    """Choose a cause: of those nearly as strong as the strongest, the first in ``Cause``.

    What all batches have in common, waiting or computing, is chosen only if no other explains a third.
    """
    waited_ns = (facts.wait_ns or 0.0) + facts.start_up_ns
    if waited_ns <= _LITTLE * (facts.step_ns + facts.start_up_ns):
        return Cause.NONE
    common = (Cause.WAITS, Cause.COMPUTES)
    special = [one for one in causes if one.why not in common and one.saving_ns >= _A_PART * waited_ns]
    if special:
        order = list(Cause)
        enough_ns = _NEARLY * special[0].saving_ns
        return min((one.why for one in special if one.saving_ns >= enough_ns), key=order.index)
    return Cause.COMPUTES if facts.is_computing else Cause.WAITS
