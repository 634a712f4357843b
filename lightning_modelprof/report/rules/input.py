"""Does the loop wait for its batches?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.fetch_queue import CHEAP_SAMPLE_NS, is_row_by_row
from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.analysis.steps.workers import WorkersFacts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.loader import (
    FEWER_ITEMS,
    loader_advice,
    places_of_batches,
    sampler_advice,
)
from lightning_modelprof.report.advice.owners import loader_call, owner_of_loader
from lightning_modelprof.report.advice.workers import (
    busiest_workers,
    cause_advice,
    longest_of_others,
    told_of,
    waited_for,
)
from lightning_modelprof.report.model import Evidence, Finding, Severity, Slices, Status, Unit
from lightning_modelprof.report.one_step import COST, per_step
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOT_A_FIT,
    RuleHelp,
    ShareRule,
    count,
    duration,
    lines_that_call,
    ratio,
    text,
)
from lightning_modelprof.report.rules.phases import PhaseShareRule, hooks_named
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.setup import LoaderSetup, TrainingSetup
from lightning_modelprof.units import milliseconds

WAIT: Final = "data wait per step"


class WaitForData(ShareRule, frozen=True, kw_only=True):
    """A rule about the wait for data; robust means decide, means are said."""

    def share_of_wait(self, costs: StepCosts) -> float | None:
        """Of a usual step; ``None`` where fetches were not seen."""
        wait_ns, wall_ns = costs.usual_wait_ns(), costs.usual_wall_ns(costs.typical)
        return wait_ns / wall_ns if wait_ns is not None and wall_ns else None

    def is_wait_found(self, costs: StepCosts, share: float) -> bool:
        wait_ns = costs.usual_wait_ns() or 0.0
        return self.is_found(share, wait_ns, costs.least_of(wait_ns, costs.typical, "dataloader"))


class InputBound(WaitForData, frozen=True, kw_only=True):
    """The mean time per clean step in which the loop waits for its batch is more than a share of the step.

    Workers advised: if one worker makes a batch in T and the rest of a step takes C, w workers deliver one
    batch every T / w, so the wait ends at w = T / C, rounded up. Without workers T is the wait itself. With
    workers that are always behind, a step takes T / w, so T is w times the step. Where batches compute, no
    step is shorter than the CPU time of a step and a batch over the CPUs that nobody else uses. The
    saving is what the advice would save, at best. Where workers were looked into, a model of their queue says
    how many are enough, and the cause of the wait decides what is advised (``advice/workers.py``). Without
    workers that model plays what fetches took.

    Rows that are only indexed and joined, batches that a worker hands over no faster, and batches that were
    ready in nine of ten fetches are a hint, unless they are critical: any DataLoader takes so long.

    Source: 5% and 20% are the bands of TensorFlow's profiler for input.

    Caveats:
        T is that of one process alone; workers that share a disk or a lock are slower together.

    Attributes:
        least_samples: at a line of the workers' that comes before the others.
    """

    kind: ClassVar[str] = "input_bound"
    title: ClassVar[str] = "Training waits for data"
    healthy: ClassVar[str] = "Data loading keeps up"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "waiting for data, mean over the clean steps. On a GPU, the time between events around the fetch"
            " if that is shorter. Savings are upper bounds: workers that share a disk, a lock or CPUs with"
            " training are slower together, and predictions without workers are extrapolated from fetch"
            " times. Rows that are only indexed and joined, and batches that are ready before their fetch,"
            " are one level lower, because every DataLoader takes that long"
        ),
        where="data set, `collate_fn`; with workers, their busiest statement",
    )
    bound: ClassVar[str | None] = "input_bound"
    sampled_phases: ClassVar[tuple[str, ...]] = ("dataloader",)
    slices: ClassVar[tuple[Slices, ...]] = (Slices(kind="idle: data loading"),)
    points_at: ClassVar[PointsAt] = PointsAt.TIME_IN_LIBRARIES

    warning: float = 0.05
    critical: float = 0.20
    least_samples: int = 10

    def saves_ns(self, finding: Finding) -> float:
        """All of the wait: the loop is bound by it, whatever there is to gain."""
        waits = [one.value for one in finding.evidence if one.label == WAIT]
        return float(waits[0]) if waits and isinstance(waits[0], int | float) else super().saves_ns(finding)

    def at_lines(self, finding: Finding, analysis: Analysis, hot: HotLines | Absent | None = None) -> Finding:
        """In the workers where these were sampled: they make the batches that the training thread waits for.

        Where no function below the first place takes half of its time, as of a list of transforms, the line
        of the user's that most time is spent at comes first.
        """
        stacks = analysis.worker_stacks
        if isinstance(stacks, Absent) or waited_for(analysis) is None:
            return super().at_lines(finding, analysis, hot)
        placed = super().at_lines(finding, analysis, stacks.hot_lines)
        top = next(iter(stacks.hot_lines.lines), None)
        if finding.status is not Status.FOUND or top is None or top.samples < self.least_samples:
            return placed
        first = top.exact()
        known = [part for one in placed.locations[:1] for part in (one, one.inner) if part is not None]
        if any((one.file, one.line) == (top.file, top.line) for one in known):
            return placed
        return replace(placed, locations=(first, *(one for one in placed.locations if one != first)))

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs = analysis.step_costs
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        wait_ns, wall_ns = costs.typical.exposed_wait_ns, costs.step_ns
        share = self.share_of_wait(costs)
        if wait_ns is None or share is None:
            return self.not_evaluated("fetches weren't recorded")
        evidence = [duration(WAIT, wait_ns)]
        if not self.is_wait_found(costs, share):
            return self.clean(f"Training waits {milliseconds(wait_ns)} per step for data.", evidence)
        setup = analysis.setup
        loaders = () if setup is None else setup.loaders
        cpus = None if setup is None else setup.usable_cpus
        cpu = None if isinstance(analysis.batch_cpu, Absent) else analysis.batch_cpu
        seen = () if isinstance(analysis.workers, Absent) else analysis.workers
        workers = waited_for(analysis)
        is_ready = workers is None and cpu is not None and cpu.workers_keep_up
        idle = busiest_workers(analysis.workers) if is_ready else None
        busiest = workers or idle
        loaders = loaders[0 if busiest is None else busiest.record.loader :] or loaders
        loader = next(iter(loaders), None)
        owner = owner_of_loader(setup, loader)
        advice = sampler_advice(analysis.hot_lines, wait_ns)
        if advice is None and workers is not None:
            others_ns = longest_of_others(seen, workers)
            advice = cause_advice(workers, loader, cpus, owner, others_ns=others_ns)
        if advice is None:
            queue = _queue(analysis, idle)
            advice = loader_advice(loaders, cpus, wait_ns, wall_ns, cpu, queue=queue, owner=owner)
        if workers is not None and cpu is not None and cpu.ready is not None:
            evidence.append(ratio("batches ready when fetched", cpu.ready))
        numbers = {one.record.loader for one in seen}
        told = "" if workers is None else told_of(workers, len(numbers))
        severity = self.severity(share)
        if advice.is_minor:
            severity = Severity.INFO if severity is Severity.WARNING else Severity.WARNING
        return (
            self.found(
                f"Training waits {per_step(wait_ns, wall_ns)} for data.{told}{advice.told}",
                advice.action,
                severity,
                saving_ns=advice.saving_ns,
                saving_is=advice.saving_is,
                places=() if is_ready else _places(setup, loaders),
                evidence=[*evidence, *advice.evidence],
                wants=advice.arguments,
            ),
        )


def _queue(analysis: Analysis, idle: WorkersFacts | None = None) -> LoaderQueue | None:
    """What is predicted with workers where there are none, or with other numbers of them where they idle."""
    found = analysis.fetch_queue if idle is None else idle.queue
    return None if isinstance(found, Absent) else found


def _places(setup: TrainingSetup | None, loaders: Sequence[LoaderSetup]) -> list[Place]:
    """What makes batches; where that is torch's own code, the user's line that makes the DataLoader first."""
    places = list(places_of_batches(loaders))
    is_torchs = bool(places) and all(place.is_library and not place.package for place in places)
    return [*(lines_that_call(setup, "DataLoader") if is_torchs else ()), *places]


class SynchronousLoader(WaitForData, frozen=True, kw_only=True):
    """``num_workers=0`` while the wait for batches is more than a share of the step.

    It names a cause of ``input_bound`` and has no time of its own, so that nothing counts twice.
    """

    kind: ClassVar[str] = "synchronous_loader"
    title: ClassVar[str] = "Data loading runs in the main process"
    healthy: ClassVar[str] = "Main-process data loading is cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "`num_workers=0`, waiting for data takes less than the threshold of `input_bound`, and workers"
            " would save time; a hint"
        ),
        levels="1%",
        where="data set",
    )

    slices: ClassVar[tuple[Slices, ...]] = (Slices(kind="idle: data loading"),)
    sampled_phases: ClassVar[tuple[str, ...]] = ("dataloader",)
    points_at: ClassVar[PointsAt] = PointsAt.TIME_IN_LIBRARIES

    warning: float = 0.01
    covered: float = 0.05

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        loader = next((one for one in setup.loaders if one.num_workers is not None), None)
        if loader is None:
            return self.not_evaluated("no torch DataLoader is used")
        if loader.num_workers:
            return self.clean(f"num_workers is {loader.num_workers}.")
        wait_ns, wall_ns = costs.typical.exposed_wait_ns, costs.step_ns
        share = self.share_of_wait(costs)
        if wait_ns is None or share is None:
            return self.not_evaluated("fetches weren't recorded")
        if not self.is_wait_found(costs, share):
            return self.clean(f"num_workers is 0, but a batch takes only {milliseconds(wait_ns)}.")
        if share >= self.covered:
            return tuple(
                replace(one, title="No further main-process loading delay")
                for one in self.clean("num_workers is 0; the finding about waiting for data covers this.")
            )
        cpu = None if isinstance(analysis.batch_cpu, Absent) else analysis.batch_cpu
        advice = loader_advice(
            (loader,),
            setup.usable_cpus,
            wait_ns,
            wall_ns,
            cpu,
            queue=_queue(analysis),
            owner=owner_of_loader(setup, loader),
        )
        if advice.num_workers is None:
            return self.clean("num_workers is 0, but workers would save little.")
        return (
            self.found(
                f"num_workers is 0, so training waits {per_step(wait_ns, wall_ns)} for data.{advice.told}",
                advice.action,
                Severity.INFO,
                places=[loader.dataset],
                evidence=[
                    duration(WAIT, wait_ns),
                    *advice.evidence,
                ],
                wants=advice.arguments,
            ),
        )


class WorkerStartup(ShareRule, frozen=True, kw_only=True):
    """Stopping and starting workers at the epochs' boundaries, spread over all steps.

    It is the phase Dataloader init, and what the first fetch of an epoch waits longer than one in the
    middle of it. The very first start is left out: nothing can save it. So is the first batch of an epoch,
    which persistent workers begin with an empty queue as well.

    Caveats:
        Where workers weren't looked into, only the CPU time of that batch is left out.
    """

    kind: ClassVar[str] = "worker_startup"
    title: ClassVar[str] = "Workers restart every epoch"
    healthy: ClassVar[str] = "Worker startup is cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "Dataloader init plus the extra wait of each epoch's first fetch, in all epochs except the first,"
            " without persistent workers. One worker's time for the first batch is excluded, because training"
            " waits for that batch anyway. On the CPU, if the training thread waited for one, the extra"
            " compute time of each epoch's first step is added, at most as much again"
        ),
        of="of the loop",
        where="`DataLoader(...)` calls, `worker_init_fn`, data set",
    )
    phases: ClassVar[tuple[str, ...]] = ("dataloader", "dataloader_init")
    bound: ClassVar[str | None] = "input_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE
    is_of_loop: ClassVar[bool] = True

    def saves_ns(self, finding: Finding) -> float:
        """Without what the first step of an epoch computes longer, in which nothing waits for data."""
        told = {
            one.label: float(one.value or 0.0) for one in finding.evidence if one.unit is Unit.DURATION_NS
        }
        slowed = told.get(_SLOWED, 0.0) / (told.get(_PER_EPOCH) or 1.0)
        return (finding.saving_ns_per_step or 0.0) * (1 - slowed)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        loader = next((one for one in setup.loaders if one.num_workers), None)
        if loader is None:
            return self.clean("num_workers is 0.")
        bounds = costs.boundaries
        if bounds.count == 0:
            return self.not_evaluated("there was only one epoch")
        extra_ns = (bounds.extra_wait_ns or 0) / bounds.count
        first_ns = min(extra_ns, max(0.0, _batch_ns(analysis) - (costs.usual_wait_ns() or 0.0)))
        start_ns = bounds.init_ns / bounds.count + extra_ns - first_ns
        slowed_ns = _slowed_ns(analysis, costs, loader.num_workers or 0, start_ns)
        each_ns = start_ns + slowed_ns
        total_ns = each_ns * bounds.num_all / analysis.num_steps
        share = total_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        evidence = [
            duration(_PER_EPOCH, each_ns),
            duration("restart time per step", total_ns),
            count("restarts", bounds.num_all),
            *([duration(_SLOWED, slowed_ns)] if slowed_ns else ()),
            *_starts(analysis),
            duration("first batch of an epoch (not counted)", first_ns),
        ]
        if share is None or not self.is_found(share, total_ns) or loader.persistent_workers:
            return self.clean(f"Starting an epoch takes {milliseconds(each_ns)}.", evidence)
        return (
            self.found(
                f"Stopping and starting {loader.num_workers} workers takes at least"
                f" {milliseconds(each_ns)} per epoch, which costs {COST}.",
                f"{loader_call(setup, loader, persistent_workers=True)} (currently False).",
                self.severity(share),
                saving_ns=total_ns,
                saving_is="at least",
                places=[loader.worker_init, *lines_that_call(setup, "DataLoader"), loader.dataset],
                evidence=evidence,
            ),
        )


def _slowed_ns(analysis: Analysis, costs: StepCosts, num_workers: int, start_ns: float) -> float:
    """How much longer the first step of an epoch computes because workers start, beyond filling their queue.

    Only on the CPU, if the training thread had to wait for one; as much as the start takes at most, as the
    user's code may do something else in that step.
    """
    bounds = costs.boundaries
    if analysis.info.device_type != "cpu" or costs.cpu_wait_share is None or costs.had_its_cpu:
        return 0.0
    workers = busiest_workers(analysis.workers)
    times = [] if workers is None else [one.times for one in workers.workers]
    batch_ns = sum(one.cpu_ns for one in times) / max(sum(one.batches for one in times), 1)
    cpus = None if analysis.setup is None else analysis.setup.usable_cpus
    filling_ns = num_workers * _PREFETCHED * batch_ns / (cpus or 1)
    return max(0.0, min(bounds.extra_compute_ns / bounds.count - filling_ns, start_ns))


_SLOWED: Final = "extra compute of its first step"
_PER_EPOCH: Final = "restart time per epoch"
_PREFETCHED: Final = 2
"""Batches that each worker makes ahead by default: persistent ones make them when an epoch begins, too."""


def _batch_ns(analysis: Analysis) -> float:
    """What one worker takes for a batch; its CPU time where workers weren't looked into, 0 if unknown."""
    workers, cpu = busiest_workers(analysis.workers), analysis.batch_cpu
    if workers is not None:
        return workers.making_ns / max(sum(one.times.batches for one in workers.workers), 1)
    return 0.0 if isinstance(cpu, Absent) else cpu.batch_ns or 0.0


def _starts(analysis: Analysis) -> list[Evidence]:
    """How long a worker takes from its start until its first sample, on average, where that was measured."""
    facts = () if isinstance(analysis.workers, Absent) else analysis.workers
    known = [one.times for loader in facts for one in loader.workers if one.times.start_ns is not None]
    number = sum(one.starts for one in known)
    total_ns = sum((one.start_ns or 0) * one.starts for one in known)
    return [duration("worker startup until its first sample", total_ns / number)] if number else []


class SlowTransfer(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Transfer on the host, with the batch-transfer hooks."""

    kind: ClassVar[str] = "slow_transfer"
    title: ClassVar[str] = "Slow batch transfer"
    healthy: ClassVar[str] = "Batch transfer is fast"
    help: ClassVar[RuleHelp] = RuleHelp("the phase Transfer", where="your transfer hooks")
    phase: ClassVar[str] = "transfer"
    what: ClassVar[str] = "Moving the batch to the device"
    less: ClassVar[str] = "Move work from {names} into the DataLoader's workers."

    def action(self, setup: TrainingSetup) -> str:
        hooks = ", ".join(one.function for one in self.places(setup))
        parts = [self.less.format(names=hooks)] if hooks else []
        unpinned = next((one for one in setup.loaders if one.pin_memory is False), None)
        if setup.cuda is not None and unpinned is not None:
            parts.append(f"{loader_call(setup, unpinned, pin_memory=True)} (currently False).")
        return " ".join(parts) or FEWER_ITEMS

    def places(self, setup: TrainingSetup) -> list[Place]:
        return hooks_named(
            setup, "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
        )

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        return [
            text("pin_memory", str(one.pin_memory)) for one in setup.loaders if one.pin_memory is not None
        ]


_MIB: Final = 1 << 20
_TENSORS: Final = "TensorDataset."
_MOSTLY: Final = 0.5


class RepeatedWork(WaitForData, frozen=True, kw_only=True):
    """A few samples of the data set, hashed in batches of several epochs, where the loop waits for batches.

    It is found where all of them had the same bytes each time their index came. One that differs, as of
    augmented data, ends it. The wait is what making batches costs; how much of it keeping samples would save
    is not known, and ``input_bound`` speaks of the same time.

    Caveats:
        Of large tensors some values are hashed, spread evenly. A change that is made to few samples of a
        hundred may not come by.

    Attributes:
        least_compared: samples that have to be the same.
    """

    kind: ClassVar[str] = "repeated_work"
    title: ClassVar[str] = "Samples are recomputed every epoch"
    healthy: ClassVar[str] = "No samples recomputed every epoch"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "training waits for more than indexing rows, and at least 12 sampled indices returned identical"
            " data every time (Repeated samples); a hint. Large tensors are compared by some of their values,"
            " so rare changes may be missed"
        ),
        levels="5%",
        where="data set, `collate_fn`",
    )
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.05
    critical: float = 0.20
    least_compared: int = 12

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup, seen = analysis.step_costs, analysis.setup, analysis.repeated
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None or not setup.loaders:
            return self.not_evaluated(NO_SETUP if setup is None else "the DataLoader is unknown")
        wait_ns, share = costs.typical.exposed_wait_ns, self.share_of_wait(costs)
        if wait_ns is None or share is None:
            return self.not_evaluated("fetches weren't recorded")
        if not self.is_wait_found(costs, share):
            return self.clean("Not investigated, because data loading is fast enough.")
        if why := _nothing_to_keep(analysis, setup.loaders[0], wait_ns):
            return self.clean(why)
        if seen is None:
            return self.not_evaluated("the run was saved by an older version, without sample comparisons")
        compared = [
            count("samples compared", seen.num_compared),
            count("identical samples", seen.num_equal),
        ]
        if seen.num_equal < seen.num_compared:
            return self.clean("Samples of the same index differ between epochs.", compared)
        if seen.note or seen.num_compared < self.least_compared:
            return self.not_evaluated(
                seen.note or f"only {seen.num_compared} samples were fetched twice while being compared"
            )
        evidence = [duration(WAIT, wait_ns), *compared]
        memory = f"Each takes {seen.sample_bytes:,} bytes"
        if seen.num_samples:
            total = seen.sample_bytes * seen.num_samples
            memory += f"; all {seen.num_samples:,} take {_mebibytes(total)}"
            evidence.append(Evidence(label="cache size for all samples", value=total, unit=Unit.BYTES))
        owner = owner_of_loader(setup, setup.loaders[0])
        each = " per worker" if setup.loaders[0].num_workers else ""
        return (
            self.found(
                f"All {seen.num_indices} sampled indices returned identical data every time"
                f" ({seen.num_compared} comparisons). Training waits {per_step(wait_ns, costs.step_ns)} for"
                " data.",
                f"Cache each sample, in memory or on disk. {memory}{each}. Apply random augmentation after"
                f" reading from the cache.{'' if owner is None else owner.cheaper_batches}",
                Severity.INFO,
                places=places_of_batches(setup.loaders),
                evidence=evidence,
            ),
        )


def _nothing_to_keep(analysis: Analysis, loader: LoaderSetup, wait_ns: float) -> str:
    """Why making the samples once would save nothing, as a sentence; ``""`` where it would."""
    cpu, workers = analysis.batch_cpu, busiest_workers(analysis.workers)
    sample_ns = None if workers is None else workers.sample_ns
    dataset = loader.dataset
    is_tensors = dataset is not None and dataset.is_library and dataset.function.startswith(_TENSORS)
    is_cheap = sample_ns is not None and sample_ns < CHEAP_SAMPLE_NS
    if is_row_by_row(loader, wait_ns) or is_cheap or is_tensors:
        return "Samples are rows in memory, so caching them saves nothing."
    if loader.num_workers and not isinstance(cpu, Absent) and cpu.workers_keep_up:
        return "Workers have their batches ready before they're fetched."
    share = 0.0 if workers is None else workers.collate
    place, hot = loader.collate, analysis.hot_lines
    if (
        not loader.num_workers
        and place is not None
        and place.file
        and place.line
        and not isinstance(hot, Absent)
    ):
        share = hot.share_of("dataloader", place.file, place.line)
    return "Most of the wait is for collating samples, not for loading them." if share >= _MOSTLY else ""


def _mebibytes(size: int) -> str:
    return f"{size / _MIB:,.{0 if size >= 10 * _MIB else 2}f} MiB"
