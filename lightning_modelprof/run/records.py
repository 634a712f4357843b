"""Measured facts of a run, before anything is derived from them.

All durations are integer nanoseconds of one monotonic clock. ``None`` means *not measured* and always comes
with a reason somewhere (a note, a column's documentation); ``0`` means measured and free.
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
"""Version of run.json, increased when older readers would misread it. report.json has its own."""

SANITY_CHECK: Final = "sanity_check"
REPORT: Final = "report"
"""Actions in :class:`OutsideLoop` that aren't Lightning's; this one is the loop's own report."""


MAX_WINDOWS: Final = 10_000


IGNORED_CALLBACK: Final = "A second ModelProfCallback was ignored."
"""Note in a run whose Trainer had several."""


class WindowStatus(Enum):
    """How a torch.profiler window ended."""

    COMPLETE = "complete"
    """All requested steps were recorded."""
    PARTIAL = "partial"
    """Training ended, an error occurred or ``max_trace_mb`` was reached before all steps were recorded."""
    EMPTY = "empty"
    """The window opened, but no step was recorded completely."""
    NOT_REACHED = "not_reached"
    """Training ended before the first step of the window."""
    SKIPPED = "skipped"
    """It would have taken more time than ``max_overhead`` allows."""
    REFUSED = "refused"
    """Another torch profiler was recording, was warming up, or ran while this window was prepared."""


class Window(Record, frozen=True, kw_only=True):
    """One torch.profiler window, as requested and as recorded.

    Attributes:
        index: number of the window in the loop, from 0.
        first_step, last_step: the requested steps, both inclusive.
        recorded_steps: numbers of the steps recorded from start to end.
        trace_file: path of the trace relative to the run's directory, ``None`` if none was written.
        note: why the status isn't complete, or why a trace is missing; ``""`` otherwise.
        close_ns: CPU-side wall time that the training thread spent on stopping and exporting it; older
            versions also read and packed it there. ``None`` if it wasn't closed.
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
    """Time in one hook of another callback, over the whole loop (not only in finished steps).

    A hook that runs inside another one counts there and not here, except in runs of older versions.
    """

    callback: str
    hook: str
    calls: Count
    total_ns: Int


class ActionTime(Record, frozen=True, kw_only=True):
    """Time in one action outside the loop, with the actions inside it.

    Attributes:
        action: its name in Lightning's profiler, ``sanity_check`` or ``report``.
        after_ns: from its end to the start of the next one, which is Lightning's own time.
    """

    action: str
    calls: Count
    total_ns: Int
    after_ns: Int


class OutsideLoop(Record, frozen=True, kw_only=True):
    """Actions before and after the loop; with the steps and ``outside_ns`` they sum to all measured time.

    Attributes:
        after: ``None`` if they weren't recorded to their end.
    """

    before: tuple[ActionTime, ...]
    after: tuple[ActionTime, ...] | None = None


class AllRanks(Record, frozen=True, kw_only=True):
    """Benchmark figures over the clean steps of all known ranks, in nanoseconds.

    ``reader_total_ns`` and ``samples`` are ``None`` if any rank couldn't measure or count them.

    Attributes:
        world_size: number of ranks in the figures.
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
        """Reader Ratio: share of all ranks' step time spent waiting for data."""
        if self.reader_total_ns is None or not self.batch_total_ns:
            return None
        return self.reader_total_ns / self.batch_total_ns


class RankRecord(Record, frozen=True, kw_only=True):
    """Everything one rank measured during one loop.

    Attributes:
        steps: the finished steps; in a long run a sample spread evenly over it.
        totals: over all finished steps; ``None`` if ``steps`` has them all.
        outside_ns: wall time by phase key between the start and the end of the loop outside finished steps
            (after the last step; steps that never finished).
        around: time before and after the loop; ``None`` if unknown, as in a user's own loop, and in runs of
            older versions.
        validation: parts of the validation loops inside a fit; ``None`` if none ran or was seen, and in runs
            of older versions.
        unfinished_steps: steps that started and didn't end (an exception, a skipped epoch).
        windows: the first and the newest torch.profiler windows, in order.
        model_cost: cost of one step of the model; ``None`` if not requested.
        setup: ``None`` in runs of older versions.
        stacks: source lines of the training thread; ``None`` if not requested.
        memory: over the loop; ``None`` in runs of older versions.
        slow: much slower steps than usual; ``None`` in runs of older versions.
        cpu: CPU time of some steps; ``None`` if none was read, before the loop has ended, and in runs of
            older versions.
        repeated: whether an index gives the same sample in every epoch; ``None`` outside a fit, and in runs
            of older versions.
        workers: of each DataLoader that has some; ``None`` if they weren't inspected.
        helper_cpu_ns: CPU time of the background process that packed and analyzed traces; ``None`` without
            one.
        report_wait_ns: time training waited for its report after the loop, until this was saved; ``None``
            before, and in runs of older versions.
        samples_note: why batches' samples weren't counted; in runs of older versions also doubts about their
            number; ``""`` otherwise.
        notes: what couldn't be measured, or was measured in another way, and why.
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
        """Finished steps, saved or not."""
        return len(self.steps) if self.totals is None else len(self.totals)

    @property
    def sampling_notes(self) -> tuple[str, ...]:
        """What couldn't be sampled in the training thread and in workers, and why."""
        return (
            *(() if self.stacks is None else self.stacks.notes),
            *worker_notes(self.workers or ()),
        )


class RankSteps(Record, frozen=True, kw_only=True):
    """One rank's message about its steps; small, as there may be a thousand ranks.

    Attributes:
        host: name of its machine; ``""`` if unknown.
        num_steps: its finished steps, clean or not.
        totals: over its clean steps.
        steps: some of its clean steps, spread evenly over the loop; the same ones for every rank.
    """

    rank: Count
    host: str
    num_steps: Count
    totals: StepTotals
    steps: StepTimings


class AbsentRank(Record, frozen=True, kw_only=True):
    """A rank without a message, and why, such as ``has no ModelProfCallback``."""

    rank: Count
    reason: str


class RunInfo(Record, frozen=True, kw_only=True):
    """What ran, and on which hardware and versions.

    Attributes:
        created: local time of the start of the loop, ISO 8601 with microseconds and zone.
        loop: the Trainer's method: ``fit``, ``validate``, ``test`` or ``predict``.
        status: how the loop ended: ``running``, ``finished``, ``interrupted``, ``failed``, or ``aborted`` by
            an error of this package.
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
    """Measured facts of one loop, saved as run.json.

    Attributes:
        ranks: whole records, of the rank that wrote the file.
        all_ranks: only in runs of older versions; newer ones derive it from ``rank_steps``.
        rank_steps: the steps of all known ranks, in order; empty with a single rank, or if they couldn't be
            gathered.
        absent_ranks: the other ranks, in order; empty before they were asked.
        short_loops: of the same process, too short for their own archive; saved with its first loop.
        loops: of the same process, this one first; empty while there is no other, and in all but the first.
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
