"""Measured facts: what a run is, before anything is derived from it.

All durations are integer nanoseconds of one monotonic clock. ``None`` means *not measured* and always
comes with a reason somewhere (a note, a column's documentation); ``0`` means measured and free.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Final

from lightning_modelprof.record import Count, Int, Meta, Ranks, Record, field
from lightning_modelprof.run.batches import CpuUse, RepeatedSamples
from lightning_modelprof.run.loops import LoopLine, ShortLoops
from lightning_modelprof.run.memory import MemoryRecord
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.phases import ValidationTimes
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.stacks import StackSamples
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import SlowSteps, StepTimings
from lightning_modelprof.run.workers import LoaderWorkers, worker_notes

RUN_SCHEMA_VERSION: Final = 3
"""Version of run.json; raised when a reader of the old one would go wrong. report.json has its own."""

SANITY_CHECK: Final = "sanity_check"
REPORT: Final = "report"
"""What is an action in :class:`OutsideLoop` and none of Lightning's: the report of the loop itself."""


MAX_WINDOWS: Final = 10_000


IGNORED_CALLBACK: Final = "A second ModelProfCallback was ignored."
"""Note of a run whose Trainer had several."""


class WindowStatus(Enum):
    """How a torch.profiler window ended."""

    COMPLETE = "complete"
    """All requested steps were recorded."""
    PARTIAL = "partial"
    """Training ended, an error came or ``max_trace_mb`` was reached before all steps were recorded."""
    EMPTY = "empty"
    """The window opened, but not one step was recorded to its end."""
    NOT_REACHED = "not_reached"
    """Training ended before the first step of the window."""
    SKIPPED = "skipped"
    """It would have cost more time than ``max_overhead`` allows."""
    REFUSED = "refused"
    """Another torch profiler was recording when the window was to open."""


class Window(Record, frozen=True, kw_only=True):
    """One torch.profiler window: what was asked for and what became of it.

    Attributes:
        index: number of the window in the loop, from 0.
        first_step, last_step: the requested steps, both inclusive.
        recorded_steps: numbers of the steps recorded from start to end.
        trace_file: path of the trace relative to the run's directory, ``None`` if none was written.
        note: why the status is not complete, or why there is no trace though there should be one; ``""``
            otherwise.
        close_ns: host time that the training thread spent to stop and export it; older versions also read
            and packed it there. ``None`` if it was not closed.
    """

    index: Count
    first_step: Count
    last_step: Count
    recorded_steps: tuple[Count, ...] = ()
    status: WindowStatus = WindowStatus.COMPLETE
    trace_file: str | None = None
    note: str = ""
    close_ns: Int | None = None


class CallbackTime(Record, frozen=True, kw_only=True):
    """Host time spent in one hook of one other callback, over the whole loop (not only in finished steps).

    A hook that runs inside another one counts there and not here, but in runs of older versions.
    """

    callback: str
    hook: str
    calls: Count
    total_ns: Int


class ActionTime(Record, frozen=True, kw_only=True):
    """Host time in one action outside of the loop, with those inside it.

    Attributes:
        action: its name in Lightning's profiler, ``sanity_check`` or ``report``.
        after_ns: from its end to the begin of the next one, which is Lightning's own time.
    """

    action: str
    calls: Count
    total_ns: Int
    after_ns: Int


class OutsideLoop(Record, frozen=True, kw_only=True):
    """What passed around the loop: with the steps and ``outside_ns`` it sums to all that was seen.

    Attributes:
        after: those after it; ``None`` where nobody looked until they were over.
    """

    before: tuple[ActionTime, ...]
    after: tuple[ActionTime, ...] | None = None


class AllRanks(Record, frozen=True, kw_only=True):
    """Benchmark figures over all ranks that are known.

    Over the clean steps of each; times in nanoseconds. ``reader_total_ns`` and ``samples`` are
    ``None`` when any rank could not measure or count them.

    Attributes:
        world_size: the number of ranks that the figures are of.
    """

    world_size: Ranks
    num_steps: Count
    batch_total_ns: Int
    batch_max_ns: Int
    batch_min_ns: Int
    reader_total_ns: Int | None
    samples: Count | None

    @property
    def reader_ratio(self) -> float | None:
        """Reader Ratio: what the steps of all ranks waited for batches, of all their time."""
        if self.reader_total_ns is None or not self.batch_total_ns:
            return None
        return self.reader_total_ns / self.batch_total_ns


class RankRecord(Record, frozen=True, kw_only=True):
    """Everything one rank measured during one loop.

    Attributes:
        steps: the finished steps; of a long run those that were kept, spread evenly over it.
        totals: over all finished steps; ``None`` when ``steps`` are all.
        outside_ns: host time by phase key between the start and the end of the loop that is in no
            finished step (after the last step; steps that never finished).
        around: what passed before and after the loop; ``None`` where nobody tells of it, as in a loop of the
            user's own, and in runs of older versions.
        validation: what the validation loops inside a fit consist of; ``None`` where none ran or was seen,
            and in runs of versions that did not look.
        unfinished_steps: steps that began and did not end (an exception, a skipped epoch).
        windows: the first and the newest torch.profiler windows, in order.
        model_cost: what one step of the model costs; ``None`` when that was not asked for.
        setup: how the training is set up; ``None`` in runs of versions that did not look.
        stacks: which source lines the training thread was at; ``None`` when that was not asked for.
        memory: over the loop; ``None`` in runs of versions that did not look.
        slow: steps that took much longer than usual; ``None`` as above.
        cpu: CPU time of some steps; ``None`` where none was read, before the loop has ended, and as above.
        repeated: whether samples of an index are the same in each epoch; ``None`` outside of a fit, and in
            runs of older versions.
        workers: of each DataLoader that has some; ``None`` where nobody looked into them.
        helper_cpu_ns: CPU time of the process that packed and analyzed traces beside the training; ``None``
            if there was none.
        report_wait_ns: for which the training waited for its report after the loop, until this was saved;
            ``None`` before, and in runs of versions that did not count it.
        samples_note: why the samples of batches were not counted; in runs of older versions also what speaks
            against their number; ``""`` without.
        notes: what could not be measured, or was measured in another way, and why.
    """

    rank: Count
    steps: StepTimings
    totals: StepTotals | None = None
    outside_ns: dict[str, Int] = field(default_factory=dict)
    around: OutsideLoop | None = None
    validation: ValidationTimes | None = None
    unfinished_steps: Count = 0
    callbacks: tuple[CallbackTime, ...] = ()
    windows: Annotated[tuple[Window, ...], Meta(max_length=MAX_WINDOWS)] = ()
    model_cost: ModelCost | None = None
    setup: TrainingSetup | None = None
    stacks: StackSamples | None = None
    memory: MemoryRecord | None = None
    slow: SlowSteps | None = None
    cpu: CpuUse | None = None
    repeated: RepeatedSamples | None = None
    workers: tuple[LoaderWorkers, ...] | None = None
    helper_cpu_ns: Count | None = None
    report_wait_ns: Count | None = None
    samples_note: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Finished steps, kept or not."""
        return len(self.steps) if self.totals is None else len(self.totals)

    @property
    def sampling_notes(self) -> tuple[str, ...]:
        """What could not be sampled in the training thread and in workers, and why."""
        return (
            *(() if self.stacks is None else self.stacks.notes),
            *worker_notes(self.workers or ()),
        )


class RankSteps(Record, frozen=True, kw_only=True):
    """What the other ranks of a job are told of one rank's steps; small, as there may be a thousand of them.

    Attributes:
        host: name of the machine it ran on; ``""`` if unknown.
        num_steps: its finished steps, clean or not.
        totals: over its clean steps.
        steps: some of its clean steps, spread evenly over the loop, the same ones as of every other rank.
    """

    rank: Count
    host: str
    num_steps: Count
    totals: StepTotals
    steps: StepTimings


class AbsentRank(Record, frozen=True, kw_only=True):
    """A rank of the job of which nothing is known, and why, such as ``has no ModelProfCallback``."""

    rank: Count
    reason: str


class RunInfo(Record, frozen=True, kw_only=True):
    """What ran, on what.

    Attributes:
        created: local time of the start of the loop, ISO 8601 with microseconds and zone.
        loop: the Trainer's method: ``fit``, ``validate``, ``test`` or ``predict``.
        status: how the loop ended: ``running``, ``finished``, ``interrupted``, ``failed``, or ``aborted`` by
            an error of ours.
        device_type: ``cpu``, ``cuda``, ``mps`` or ``xpu``.
        device_name: the device's own name; ``""`` if unknown.
        versions: package name → version.
        config: the callback's arguments.
        sample_unit: what ``StepTimings.samples`` counts.
        host: name of the machine; ``""`` if unknown.
    """

    created: str
    loop: str = "fit"
    status: str = "running"
    model: str = ""
    device_type: str = "cpu"
    device_name: str = ""
    num_threads: Int | None = None
    world_size: Ranks = 1
    precision: str = ""
    strategy: str = ""
    accumulate_grad_batches: Int = 1
    sample_unit: str = "samples"
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Run(Record, frozen=True, kw_only=True):
    """Measured facts of one loop: what is saved as run.json and read back by the command line.

    Attributes:
        ranks: whole records; of the rank that wrote the file.
        all_ranks: in runs of older versions; what newer ones save follows from ``rank_steps``.
        rank_steps: the steps of all known ranks side by side, in order; empty when there is one rank, or when
            they could not be brought together.
        absent_ranks: those that are not among them, in order; empty before they were asked.
        short_loops: of the same process, too short for an archive of their own; with its first loop.
        loops: of the same process, this one first; empty while there is no other, and with all but the first.
    """

    info: RunInfo
    ranks: Annotated[tuple[RankRecord, ...], Meta(min_length=1)]
    all_ranks: AllRanks | None = None
    rank_steps: tuple[RankSteps, ...] = ()
    absent_ranks: tuple[AbsentRank, ...] = ()
    short_loops: tuple[ShortLoops, ...] = ()
    loops: tuple[LoopLine, ...] = ()
    schema_version: Count = RUN_SCHEMA_VERSION

    def __repr__(self) -> str:
        steps = ", ".join(str(one.num_steps) for one in self.ranks[:1]) or "no"
        return (
            f"<Run: {self.info.loop} of {self.info.model or 'a model'}, {self.info.status};"
            f" {steps} steps, ranks {self.info.world_size}, of {self.info.created}>"
        )
