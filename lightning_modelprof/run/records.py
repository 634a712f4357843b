"""Measured facts: what a run is, before anything is derived from it.

All durations are integer nanoseconds of one monotonic clock. ``None`` means *not measured* and always
comes with a reason somewhere (a note, a column's documentation); ``0`` means measured and free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.memory import MemoryRecord
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.stack_samples import StackSamples
from lightning_modelprof.run.training_setup import TrainingSetup

RUN_SCHEMA_VERSION: Final = 1
"""Version of run.json; raised when a reader of the old one would go wrong. report.json has its own."""

NOT_MEASURED: Final = -1
"""How "not measured" is stored in integer columns, where ``None`` cannot be."""


class StepTag(IntFlag):
    """What was special about a step; a step may carry several tags."""

    FIRST_OF_EPOCH = 1
    """Contains the epoch boundary: end-of-epoch hooks, worker shut-down and start-up. In an evaluation loop:
    the first batch of a dataloader."""
    SKIP_FIRST = 2
    """Among the first ``skip_first`` steps of the loop."""
    PROFILER_WARMUP = 4
    """torch.profiler was warming up."""
    PROFILED = 8
    """torch.profiler was recording."""
    PROFILER_STOP = 16
    """Contains the closing of a profiler window, with its files, or a save of the archive."""
    VALIDATION = 32
    """A validation loop ran inside the step."""
    NO_OPTIMIZER_STEP = 64
    """The optimizer did not step (gradient accumulation, and every batch of an evaluation loop). Such a step
    is still a clean step."""
    DRAINING = 128
    """Its batch was prefetched while the profiler worked: the DataLoader's workers went on meanwhile."""
    INSPECTED = 256
    """Its FLOPs were counted or its modules timed."""


NOT_CLEAN: Final = (
    StepTag.FIRST_OF_EPOCH
    | StepTag.SKIP_FIRST
    | StepTag.PROFILER_WARMUP
    | StepTag.PROFILED
    | StepTag.PROFILER_STOP
    | StepTag.VALIDATION
    | StepTag.DRAINING
    | StepTag.INSPECTED
)
"""Tags that keep a step out of the benchmark figures."""


class StepTimings:
    """Where the wall-clock time of consecutive steps (batches) of one rank went, as columns.

    A step runs from the start of its fetch to the start of the next fetch. The first step of an epoch
    starts where the step before it ended, so that the steps tile the time of the loop without a gap.

    Attributes:
        step: int64, shape (n,): number of the batch in this loop, from 0.
        duration_ns: int64, shape (n,): wall time of the step.
        phases_ns: int64, shape (n, len(PHASES)): self time per phase, summing to ``duration_ns`` exactly;
            ``NOT_MEASURED`` where the measuring method cannot see the phase.
        device_phases_ns: int64, shape (n, len(PHASES)): time between device events recorded at the
            phase's boundaries, ``NOT_MEASURED`` without a device or when an event never completed.
        samples: int64, shape (n,): what ``samples_fn`` counted in the batch, ``NOT_MEASURED`` if unknown.
        tags: int64, shape (n,): :class:`StepTag` bits.
    """

    __slots__ = ("device_phases_ns", "duration_ns", "phases_ns", "samples", "step", "tags")

    def __init__(
        self,
        *,
        step: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        phases_ns: NDArray[np.int64],
        device_phases_ns: NDArray[np.int64],
        samples: NDArray[np.int64],
        tags: NDArray[np.int64],
    ) -> None:
        self.step = step
        self.duration_ns = duration_ns
        self.phases_ns = phases_ns
        self.device_phases_ns = device_phases_ns
        self.samples = samples
        self.tags = tags

    def __len__(self) -> int:
        return len(self.step)

    def columns(self) -> dict[str, NDArray[np.int64]]:
        """Column name → array."""
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def empty() -> StepTimings:
        """No steps at all."""
        none = np.zeros(0, np.int64)
        no_phases = np.zeros((0, len(PHASES)), np.int64)
        return StepTimings(
            step=none,
            duration_ns=none,
            phases_ns=no_phases,
            device_phases_ns=no_phases,
            samples=none,
            tags=none,
        )

    @staticmethod
    def concatenate(parts: Sequence[StepTimings]) -> StepTimings:
        """Join parts in the order given."""
        if not parts:
            return StepTimings.empty()
        columns = [part.columns() for part in parts]
        return StepTimings(**{name: np.concatenate([c[name] for c in columns]) for name in columns[0]})

    def select(self, mask: NDArray[np.bool_]) -> StepTimings:
        """The steps where ``mask`` (bool, shape (n,)) is true."""
        return StepTimings(**{name: column[mask] for name, column in self.columns().items()})

    def clean(self) -> StepTimings:
        """The steps that the benchmark uses: those without a tag of ``NOT_CLEAN``."""
        return self.select((self.tags & int(NOT_CLEAN)) == 0)


class WindowStatus(Enum):
    """How a torch.profiler window ended."""

    COMPLETE = "complete"
    """All requested steps were recorded."""
    PARTIAL = "partial"
    """Training ended, or an error came, before all requested steps were recorded."""
    EMPTY = "empty"
    """The window opened, but not one step was recorded to its end."""
    NOT_REACHED = "not_reached"
    """Training ended before the first step of the window."""
    REFUSED = "refused"
    """Another torch profiler was recording when the window was to open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One torch.profiler window: what was asked for and what became of it.

    Attributes:
        index: number of the window in the loop, from 0.
        first_step, last_step: the requested steps, both inclusive.
        recorded_steps: numbers of the steps recorded from start to end.
        status: how it ended.
        trace_file: path of the trace relative to the run's folder, ``None`` if none was written.
        note: why the status is not complete, or why there is no trace though there should be one; ``""``
            otherwise.
        close_ns: host time spent to stop, export, read and pack the window, without writing the report;
            ``None`` if it was not closed.
    """

    index: int
    first_step: int
    last_step: int
    recorded_steps: tuple[int, ...] = ()
    status: WindowStatus = WindowStatus.COMPLETE
    trace_file: str | None = None
    note: str = ""
    close_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackTime:
    """Host time spent in one hook of one other callback, over the whole loop (not only in finished steps)."""

    callback: str
    hook: str
    calls: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRanks:
    """Benchmark figures reduced over all ranks when the report was made.

    Over the clean steps of every rank; times in nanoseconds. ``reader_total_ns`` and ``samples`` are
    ``None`` when any rank could not measure or count them.
    """

    world_size: int
    num_steps: int
    batch_total_ns: int
    batch_max_ns: int
    batch_min_ns: int
    reader_total_ns: int | None
    samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Everything one rank measured during one loop.

    Attributes:
        steps: the finished steps.
        outside_ns: host time by phase key between the start and the end of the loop that is in no
            finished step (after the last step; steps that never finished).
        unfinished_steps: steps that began and did not end (an exception, a skipped epoch).
        callbacks: time by callback and hook.
        windows: the torch.profiler windows, in order.
        model_cost: what one step of the model costs; ``None`` when that was not asked for.
        setup: how the training is set up; ``None`` in runs of versions that did not look.
        stacks: which source lines the training thread was at; ``None`` when that was not asked for.
        memory: over the loop; ``None`` in runs of versions that did not look.
        notes: what could not be measured, or was measured in another way, and why.
    """

    rank: int
    steps: StepTimings
    outside_ns: dict[str, int] = field(default_factory=dict)
    unfinished_steps: int = 0
    callbacks: tuple[CallbackTime, ...] = ()
    windows: tuple[Window, ...] = ()
    model_cost: ModelCost | None = None
    setup: TrainingSetup | None = None
    stacks: StackSamples | None = None
    memory: MemoryRecord | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
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
    """

    created: str
    loop: str = "fit"
    status: str = "running"
    model: str = ""
    device_type: str = "cpu"
    device_name: str = ""
    num_threads: int | None = None
    world_size: int = 1
    precision: str = ""
    strategy: str = ""
    accumulate_grad_batches: int = 1
    sample_unit: str = "samples"
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measured facts of one loop: what is saved as run.json and read back by the command line."""

    info: RunInfo
    ranks: tuple[RankRecord, ...]
    all_ranks: AllRanks | None = None
    schema_version: int = RUN_SCHEMA_VERSION
