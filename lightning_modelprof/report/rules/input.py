"""Does training wait for data?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.analysis.trace.device_shares import unaccounted
from lightning_modelprof.analysis.trace.host_waits import NO_STEPS_TO_COMPARE
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.batches import (
    advice_without_workers,
    batch_cpu_ns,
    first_batch,
    lines_waited_for,
    wait_advice,
    why_not_keep_samples,
)
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.loader import FEWER_ITEMS, places_of_batches
from lightning_modelprof.report.advice.owners import loader_call, owner_of_loader
from lightning_modelprof.report.model import Evidence, Severity, Slices, Unit
from lightning_modelprof.report.one_step import COST, per_step
from lightning_modelprof.report.rules.phases import hooks_named, of_phase
from lightning_modelprof.report.rules.rule import (
    NOT_A_FIT,
    Found,
    Limits,
    Passed,
    count,
    duration,
    lines_that_call,
    rule,
    text,
)
from lightning_modelprof.report.verdict import LEAST_ACCOUNTED
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.setup import LoaderSetup, TrainingSetup
from lightning_modelprof.units import milliseconds, percent

_WAIT: Final = "data wait per step"
_IDLE: Final = (Slices(kind="idle: data loading"),)


class _Wait(NamedTuple):
    """The data wait per batch: text shows the mean, the median decides."""

    mean_ns: float
    usual_ns: float
    least_ns: float
    usual_step_ns: float

    @property
    def share(self) -> float:
        return self.usual_ns / self.usual_step_ns

    def is_found(self, limits: Limits) -> bool:
        return limits.is_found(self.share, self.usual_ns, self.least_ns)


def _wait(costs: StepCosts) -> _Wait:
    mean_ns, usual_ns = costs.typical.exposed_wait_ns, costs.usual_wait_ns()
    step_ns = costs.usual_wall_ns(costs.typical)
    if mean_ns is None or usual_ns is None or not step_ns:
        raise NotMeasured("fetches weren't recorded")
    return _Wait(mean_ns, usual_ns, costs.least_of(usual_ns, costs.typical, "dataloader"), step_ns)


# 5% and 20% are the input bands of TensorFlow's profiler.
@rule(
    "input_bound",
    title="Training waits for data",
    healthy="Data loading keeps up",
    where="data set, `collate_fn`; with workers, their busiest statement",
    bound="input_bound",
    points_at=PointsAt.TIME_IN_LIBRARIES,
    sampled_phases=("dataloader",),
    slices=_IDLE,
    on_traces=True,
    samples=lines_waited_for,
    warning=0.05,
    critical=0.20,
    least_samples=10,
)
def input_bound(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """Waiting for data, mean over the clean steps. On a GPU, the time between events around the fetch if that
    is shorter. Savings are upper bounds: workers that share a disk, a lock or CPUs with training are slower
    together, and predictions without workers are extrapolated from fetch times. Rows that are only indexed
    and joined, and batches that are ready before their fetch, are one level lower, because every DataLoader
    takes that long.
    """
    yield from _of_run(facts, limits) if isinstance(facts, Facts) else _of_traces(facts)


def _of_run(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    wait, step_ns = _wait(facts.step_costs), facts.step_ns
    evidence = [duration(_WAIT, wait.mean_ns)]
    if not wait.is_found(limits):
        yield Passed(what=_waits(wait.mean_ns), evidence=evidence)
        return
    advice, severity = wait_advice(facts, wait.mean_ns), limits.severity(wait.share)
    if advice.is_minor:
        severity = Severity.INFO if severity is Severity.WARNING else Severity.WARNING
    yield Found(
        what=f"Training waits {per_step(wait.mean_ns, step_ns)} for data.{advice.told}",
        do=advice.action,
        saves_ns=advice.saving_ns,
        saving_is=advice.saving_is,
        verdict_ns=wait.mean_ns,  # the loop is bound by the whole wait, whatever the gain
        severity=severity,
        at=_places(facts.get(Facts.setup), advice.loaders),
        evidence=[*evidence, *advice.evidence],
        wants=advice.arguments,
    )


def _waits(wait_ns: float) -> str:
    return f"Training waits {milliseconds(wait_ns)} per step for data."


def _places(setup: TrainingSetup | None, loaders: Sequence[LoaderSetup]) -> list[Place]:
    """Return what makes the batches; if that is torch code, the user's DataLoader lines come first."""
    places = list(places_of_batches(loaders))
    is_torchs = bool(places) and all(place.is_library and not place.package for place in places)
    return [*(lines_that_call(setup, "DataLoader") if is_torchs else ()), *places]


def _of_traces(facts: JobFacts) -> Iterator[Found | Passed]:
    shares = facts.get(JobFacts.device_shares)
    lost = facts.lost_work if shares is not None else ""
    shares = shares or facts.get(JobFacts.host_shares)
    if shares is None:
        raise NotMeasured("the traces have no steps")
    if lost or facts.why_not(JobFacts.waits) in NO_STEPS_TO_COMPARE:
        raise NotMeasured(lost or facts.why_not(JobFacts.waits))
    loaders = [one for trace in facts.traces if (one := trace.get(TraceFacts.dataloader)) is not None]
    if not loaders:
        raise NotMeasured("the traces have no fetches")
    unknown = unaccounted(shares, facts.get(JobFacts.wait_shares))
    if shares.computing and 1.0 - unknown < LEAST_ACCOUNTED:
        raise NotMeasured(f"{percent(unknown)} of the steps has no events")
    wait_ns = shares.fetch * facts.step_ns
    evidence = [duration(_WAIT, wait_ns)]
    yield Passed(what=_waits(wait_ns), evidence=evidence)
    action = "Make batches faster, or use more DataLoader workers."
    if {by for one in loaders for by in one.loading} == {"main thread"}:
        needed = math.ceil(wait_ns / max(facts.step_ns - wait_ns, 1.0))
        evidence = [*evidence, count("recommended num_workers", needed)]
        action = f"Set num_workers={needed} or more (currently 0)."
    yield Found(
        what=f"{'The GPU' if shares.computing else 'Training'} waits {COST} for data.",
        do=action,
        saves_ns=wait_ns,
        saving_is="up to",
        evidence=evidence,
    )


@rule(
    "synchronous_loader",
    title="Data loading runs in the main process",
    healthy="Main-process data loading is cheap",
    levels="1%",
    where="data set",
    points_at=PointsAt.TIME_IN_LIBRARIES,
    sampled_phases=("dataloader",),
    slices=_IDLE,
    warning=0.01,
    covered=0.05,
)
def synchronous_loader(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """`num_workers=0`, waiting for data takes less than the threshold of `input_bound`, and workers would
    save time; a hint.
    """
    # No saving: input_bound has the same time.
    costs, setup = facts.step_costs, facts.setup
    loader = next((one for one in setup.loaders if one.num_workers is not None), None)
    if loader is None:
        raise NotMeasured("no torch DataLoader is used")
    if loader.num_workers:
        yield Passed(what=f"num_workers is {loader.num_workers}.")
        return
    wait = _wait(costs)
    if not wait.is_found(limits):
        yield Passed(what=f"num_workers is 0, but a batch takes only {milliseconds(wait.mean_ns)}.")
        return
    if wait.share >= limits.covered:
        yield Passed(
            what="num_workers is 0; the finding about waiting for data covers this.",
            title="No further main-process loading delay",
        )
        return
    advice = advice_without_workers(facts, loader, wait.mean_ns)
    if advice.num_workers is None:
        yield Passed(what="num_workers is 0, but workers would save little.")
        return
    waits = per_step(wait.mean_ns, costs.step_ns)
    yield Found(
        what=f"num_workers is 0, so training waits {waits} for data.{advice.told}",
        do=advice.action,
        severity=Severity.INFO,
        at=[loader.dataset],
        evidence=[duration(_WAIT, wait.mean_ns), *advice.evidence],
        wants=advice.arguments,
    )


@rule(
    "worker_startup",
    title="Workers restart every epoch",
    healthy="Worker startup is cheap",
    of="loop",
    where="`DataLoader(...)` calls, `worker_init_fn`, data set",
    bound="input_bound",
    points_at=PointsAt.CHANGE,
    phases=("dataloader", "dataloader_init"),
    is_between_steps=True,
)
def worker_startup(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Dataloader init plus the extra wait of each epoch's first fetch, in all epochs except the
    first, without persistent workers. One worker's time for the first batch is excluded, because training
    waits for that batch anyway. On the CPU, if the training thread waited for one, the extra compute time of
    each epoch's first step is added, at most as much again.
    """
    # Without worker measurements, only the first batch's CPU time is excluded.
    costs, setup = facts.step_costs, facts.setup
    loader = next((one for one in setup.loaders if one.num_workers), None)
    if loader is None:
        yield Passed(what="num_workers is 0.")
        return
    bounds = costs.boundaries
    if bounds.count == 0:
        raise NotMeasured("there was only one epoch")
    extra_ns = (bounds.extra_wait_ns or 0) / bounds.count
    first_ns, of_first = first_batch(facts, extra_ns)
    start_ns = bounds.init_ns / bounds.count + extra_ns - first_ns
    slowed_ns = _slowed_ns(facts, loader.num_workers or 0, start_ns)
    each_ns, per_step_of = start_ns + slowed_ns, bounds.num_all / facts.num_steps
    evidence = [
        duration("restart time per epoch", each_ns),
        duration("restart time per step", each_ns * per_step_of),
        count("restarts", bounds.num_all),
        *([duration("extra compute of its first step", slowed_ns)] if slowed_ns else ()),
        *of_first,
    ]
    passed = f"Starting an epoch takes {milliseconds(each_ns)}."
    if loader.persistent_workers:
        yield Passed(what=passed, evidence=evidence)
        return
    yield Found(
        what=f"Stopping and starting {loader.num_workers} workers takes at least {milliseconds(each_ns)} per"
        f" epoch, which costs {COST}.",
        do=f"{loader_call(setup, loader, persistent_workers=True)} (currently False).",
        saves_ns=each_ns * per_step_of,
        saving_is="at least",
        # Nothing waits for data while the first step computes longer.
        verdict_ns=start_ns * per_step_of if slowed_ns else None,
        at=[loader.worker_init, *lines_that_call(setup, "DataLoader"), loader.dataset],
        evidence=evidence,
        passed=passed,
    )


_PREFETCHED: Final = 2
"""Default number of batches that each worker prefetches; persistent ones do so at each epoch start, too."""


def _slowed_ns(facts: Facts, num_workers: int, start_ns: float) -> float:
    """Return how much worker startup slows down an epoch's first step, apart from filling the queue.

    Capped at the startup time, since user code may do something else in that step.
    """
    costs = facts.step_costs
    if not facts.is_on_cpu or costs.cpu_wait_share is None or costs.had_its_cpu:
        return 0.0
    filling_ns = num_workers * _PREFETCHED * batch_cpu_ns(facts) / (facts.setup.usable_cpus or 1)
    return max(0.0, min(costs.boundaries.extra_compute_ns / costs.boundaries.count - filling_ns, start_ns))


_INTO_WORKERS: Final = "Move work from {names} into the DataLoader's workers."


@rule(
    "slow_transfer",
    title="Slow batch transfer",
    healthy="Batch transfer is fast",
    where="your transfer hooks",
    bound="overhead_bound",
    sampled_phases=("transfer",),
)
def slow_transfer(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Transfer."""
    setup = facts.setup
    own = hooks_named(
        setup, "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
    )
    parts = [_INTO_WORKERS.format(names=", ".join(one.function for one in own))] if own else []
    unpinned = next((one for one in setup.loaders if one.pin_memory is False), None)
    if setup.cuda is not None and unpinned is not None:
        parts.append(f"{loader_call(setup, unpinned, pin_memory=True)} (currently False).")
    pinned = [one.pin_memory for one in setup.loaders if one.pin_memory is not None]
    yield from of_phase(
        facts,
        "transfer",
        "Moving the batch to the device",
        " ".join(parts) or FEWER_ITEMS,
        less=_INTO_WORKERS,
        at=own,
        evidence=[text("pin_memory", str(one)) for one in pinned],
    )


_MIB: Final = 1 << 20


@rule(
    "repeated_work",
    title="Samples are recomputed every epoch",
    healthy="No samples recomputed every epoch",
    levels="5%",
    where="data set, `collate_fn`",
    points_at=PointsAt.CHANGE,
    warning=0.05,
    critical=0.20,
    least_compared=12,
)
def repeated_work(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Training waits for more than indexing rows, and at least 12 sampled indices returned identical data
    every time (Repeated samples); a hint. Large tensors are compared by some of their values, so rare changes
    may be missed.
    """
    # The part of the wait that a cache saves is unknown, and input_bound has the same time.
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    costs, setup = facts.step_costs, facts.setup
    if not setup.loaders:
        raise NotMeasured("the DataLoader is unknown")
    wait, loader = _wait(costs), setup.loaders[0]
    if not wait.is_found(limits):
        yield Passed(what="Not investigated, because data loading is fast enough.")
        return
    if why := why_not_keep_samples(facts, loader, wait.mean_ns):
        yield Passed(what=why)
        return
    seen = facts.repeated
    compared = [count("samples compared", seen.num_compared), count("identical samples", seen.num_equal)]
    if seen.num_equal < seen.num_compared:
        yield Passed(what="Samples of the same index differ between epochs.", evidence=compared)
        return
    if seen.note or seen.num_compared < limits.least_compared:
        few = f"only {seen.num_compared} samples were fetched twice while being compared"
        raise NotMeasured(seen.note or few)
    memory, total = f"Each takes {seen.sample_bytes:,} bytes", seen.sample_bytes * (seen.num_samples or 0)
    if seen.num_samples:
        memory += f"; all {seen.num_samples:,} take {_mebibytes(total)}"
        compared.append(Evidence(label="cache size for all samples", value=total, unit=Unit.BYTES))
    owner = owner_of_loader(setup, loader)
    yield Found(
        what=f"All {seen.num_indices} sampled indices returned identical data every time"
        f" ({seen.num_compared} comparisons). Training waits {per_step(wait.mean_ns, costs.step_ns)} for"
        " data.",
        do=f"Cache each sample, in memory or on disk. {memory}{' per worker' if loader.num_workers else ''}."
        " Apply random augmentation after reading from the cache."
        f"{'' if owner is None else owner.cheaper_batches}",
        severity=Severity.INFO,
        at=places_of_batches(setup.loaders),
        evidence=[duration(_WAIT, wait.mean_ns), *compared],
    )


def _mebibytes(size: int) -> str:
    return f"{size / _MIB:,.{0 if size >= 10 * _MIB else 2}f} MiB"
