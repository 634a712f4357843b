"""What to change about a DataLoader, predicted by its queue model for other numbers of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu
from lightning_modelprof.analysis.steps.fetches import HANDOVER_NS, is_row_by_row
from lightning_modelprof.analysis.steps.loader_queue import WITHIN, LoaderQueue
from lightning_modelprof.report.advice.loader import (
    MOST_OF_IT,
    Fix,
    LoaderAdvice,
    arguments_of,
    best_first,
    cheaper_advice,
    cheaper_fix,
    handover_advice,
    handover_evidence,
    in_words,
    is_handed_over_no_faster,
    loader_advice,
    loader_evidence,
    were_ready,
)
from lightning_modelprof.report.advice.owners import Owner, owner_of_loader, written_call
from lightning_modelprof.report.model import Evidence, SavingIs
from lightning_modelprof.report.rules.rule import count, duration
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.units import digits, milliseconds

_MOSTLY_COMPUTES: Final = 0.5
"""Share of the batch time."""

_UNSEEN: Final = " num_workers is 0, so the predicted step time is extrapolated from fetch times."
_DEFAULT_PREFETCH: Final = 2


def fetch_advice(
    facts: Facts, loaders: Sequence[LoaderSetup], wait_ns: float, queue: LoaderQueue | None
) -> LoaderAdvice:
    """Advise on the first loader by its queue's prediction, else by :func:`loader_advice`."""
    setup, cpu, loader = facts.get(Facts.setup), facts.get(Facts.batch_cpu), next(iter(loaders), None)
    cpus, wall_ns = None if setup is None else setup.usable_cpus, facts.step_ns
    owner = owner_of_loader(setup, loader)
    if queue is None or loader is None or loader.num_workers is None or is_row_by_row(loader, wait_ns):
        return loader_advice(loaders, cpus, wait_ns, wall_ns, cpu, owner=owner)
    if cpu is not None and cpu.workers_keep_up:
        return _handover_advice(loader, wait_ns, cpu, queue, owner)
    gain_ns = saved_by_workers(queue, wait_ns)
    evidence = loader_evidence(loader, cpus, wait_ns, wall_ns, cpu)
    if gain_ns <= 0:
        is_short = is_handed_over_no_faster(loader.num_workers, wait_ns)
        is_short = is_short or wait_ns - HANDOVER_NS <= WITHIN * wall_ns
        return cheaper_advice(
            loader.num_workers, wait_ns, wall_ns, cpu, evidence, is_short=is_short, owner=owner
        )
    is_persistent = bool(loader.persistent_workers)
    fixes = [
        Fix(
            predicted_call(queue, loader.kind, is_persistent, owner, wait_ns),
            gain_ns,
            predicted_arguments(queue, is_persistent),
        )
    ]
    if gain_ns < MOST_OF_IT * wait_ns:
        fixes.append(cheaper_fix(wait_ns, owner))
    evidence[1:1] = predicted_evidence(queue)
    return LoaderAdvice(
        in_words(fixes),
        evidence,
        wait_ns,
        queue.advised.workers,
        told=_UNSEEN,
        arguments=arguments_of(fixes),
        saving_is=bound_of(fixes, queue),
    )


def _handover_advice(
    loader: LoaderSetup, wait_ns: float, cpu: BatchCpu, queue: LoaderQueue, owner: Owner | None
) -> LoaderAdvice:
    if queue.advised.workers or not queue.helps:
        return handover_advice(loader, wait_ns, cpu, may_try_none=False)
    return LoaderAdvice(
        predicted_call(queue, loader.kind, bool(loader.persistent_workers), owner, wait_ns),
        [*handover_evidence(loader, cpu), *predicted_evidence(queue)],
        saved_by_workers(queue, wait_ns),
        0,
        told=f"{were_ready(cpu)} Loading a batch takes only {milliseconds(queue.service_ns)}.",
        arguments=predicted_arguments(queue, bool(loader.persistent_workers)),
        saving_is="at least",
    )


def bound_of(fixes: Sequence[Fix], queue: LoaderQueue | None) -> SavingIs:
    """Return what bound the best fix's saving is: removing idle workers also returns their CPU time."""
    is_fewer = queue is not None and queue.advised.workers < queue.present.workers
    return "at least" if is_fewer and best_first(fixes)[0].arguments else "up to"


def saved_by_workers(queue: LoaderQueue, wait_ns: float) -> float:
    """Return the step time saved by the recommended number of workers; 0 if no other number helps."""
    return min(wait_ns, queue.present.step_ns - queue.advised.step_ns) if queue.helps else 0.0


def predicted_arguments(queue: LoaderQueue, is_persistent: bool) -> dict[str, Any]:
    present, advised = queue.present, queue.advised
    arguments: dict[str, Any] = {"num_workers": advised.workers}
    if advised.workers and advised.prefetch_factor != present.prefetch_factor:
        arguments["prefetch_factor"] = advised.prefetch_factor
    if bool(advised.workers) != is_persistent:  # DataLoader refuses persistent_workers without workers
        arguments["persistent_workers"] = bool(advised.workers)
    if not advised.workers and present.prefetch_factor != _DEFAULT_PREFETCH:  # as well as prefetch_factor
        arguments["prefetch_factor"] = None
    return arguments


def predicted_call(
    queue: LoaderQueue, kind: str, is_persistent: bool, owner: Owner | None, wait_ns: float
) -> str:
    """Name the recommended number of workers, the current one and the expected gain."""
    present, advised = queue.present, queue.advised
    arguments = predicted_arguments(queue, is_persistent)
    now = f"{'num_workers=' * (len(arguments) > 1)}{present.workers}"
    if advised.workers and advised.prefetch_factor != present.prefetch_factor and present.workers:
        now = f"num_workers={present.workers}, prefetch_factor={present.prefetch_factor}"
    before_ns = queue.step_ns
    after_ns = before_ns - saved_by_workers(queue, wait_ns)
    most = max(one.workers for one in queue.predictions)
    is_last = advised.workers == most and queue.computing < _MOSTLY_COMPUTES
    # Idle workers' CPU time comes on top.
    is_least = advised.workers < present.workers
    # The model ignores that computing workers slow down each other and training.
    is_bound = queue.computing >= _MOSTLY_COMPUTES and not is_least
    limit = "; the gain is smaller if workers compete with training for CPU" if is_bound else ""
    expect = "At best," if is_bound else "Expect about"
    return (
        f"{written_call(kind, arguments, owner)} (currently {now}). {expect}"
        f" {digits(before_ns / 1e6)} → {digits(after_ns / 1e6)} ms per step"
        f"{' or less' * is_least}{limit}."
        + (f" More than {most} workers may help further." if is_last and queue.needed_factor else "")
    )


def predicted_evidence(queue: LoaderQueue) -> list[Evidence]:
    advised = queue.advised
    return [
        count("recommended num_workers", advised.workers),
        duration("predicted step time", advised.step_ns),
        duration("lower bound of predicted step time", advised.low_ns),
        duration("upper bound of predicted step time", advised.high_ns),
        count("recommended prefetch_factor", advised.prefetch_factor if advised.workers else None),
    ]
