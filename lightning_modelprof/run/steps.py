"""Where the time of each step went: one row per step, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.record import Count, Int, Real, Record
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

PROFILER: Final = PHASE_INDEX["profiler"]


NOT_MEASURED: Final = -1
"""Stands for ``None`` in integer columns."""


class StepTag(IntFlag):
    """Special properties of a step, which may have several."""

    FIRST_OF_EPOCH = 1
    """Contains the epoch boundary: end-of-epoch hooks, worker shutdown and startup. In an evaluation loop,
    the first batch of a dataloader."""
    SKIP_FIRST = 2
    """Among the first ``skip_first`` steps of the loop."""
    PROFILER_WARMUP = 4
    """torch.profiler was warming up, here or on another rank."""
    PROFILED = 8
    """torch.profiler was recording, here or on another rank."""
    PROFILER_STOP = 16
    """Closed a profiler window and wrote its files (here or on another rank), or saved the archive."""
    VALIDATION = 32
    """A validation loop ran inside the step."""
    NO_OPTIMIZER_STEP = 64
    """The optimizer didn't step (gradient accumulation, and every batch of an evaluation loop). Still a clean
    step."""
    DRAINING = 128
    """The DataLoader's workers prefetched its batch while the profiler was busy."""
    INSPECTED = 256
    """Its FLOPs were counted or its modules timed."""
    WHOLE_EPOCH = 512
    """Replaces ``FIRST_OF_EPOCH`` if all steps have it, with epochs (or dataloaders) of one batch. Still a
    clean step, as there are no others."""
    RUN_AHEAD = 1024
    """The CPU only queued work that the device did later, so its wall time is too short."""


NOT_CLEAN: Final = (
    StepTag.FIRST_OF_EPOCH
    | StepTag.SKIP_FIRST
    | StepTag.PROFILER_WARMUP
    | StepTag.PROFILED
    | StepTag.PROFILER_STOP
    | StepTag.VALIDATION
    | StepTag.DRAINING
    | StepTag.INSPECTED
    | StepTag.RUN_AHEAD
)
"""Tags that exclude a step from benchmark figures."""


MAX_RUN_AHEAD: Final = 0.05
"""How much shorter clean steps' wall time may be, as a share of the device time."""


BEGINS_EPOCH: Final = int(StepTag.FIRST_OF_EPOCH | StepTag.WHOLE_EPOCH)
"""Tags of steps that contain the boundary between two epochs."""


SPECIAL: Final = int(StepTag.FIRST_OF_EPOCH | StepTag.VALIDATION)
"""Tags of steps that are longer because of work the user requested."""


class StepTimings:
    """Where the wall time of consecutive steps (batches) of one rank went, as columns.

    A step runs from the start of its fetch to the start of the next fetch. The first step of an epoch starts
    at the end of the step before it, so that the steps tile the loop without gaps.

    Attributes:
        step: int64, shape (n,): number of the batch in this loop, from 0.
        duration_ns: int64, shape (n,): wall time of the step.
        phases_ns: int64, shape (n, len(PHASES)): self time per phase, summing to ``duration_ns`` exactly;
            ``NOT_MEASURED`` for a phase that the measuring method can't see.
        device_phases_ns: int64, shape (n, len(PHASES)): time between device events recorded at the phase's
            boundaries, ``NOT_MEASURED`` without a device or if an event never completed.
        samples: int64, shape (n,): count by ``samples_fn``, ``NOT_MEASURED`` if unknown.
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
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def empty() -> StepTimings:
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
        if not parts:
            return StepTimings.empty()
        columns = [part.columns() for part in parts]
        return StepTimings(**{name: np.concatenate([c[name] for c in columns]) for name in columns[0]})

    def select(self, mask: NDArray[np.bool_]) -> StepTimings:
        """The steps where ``mask`` (bool, shape (n,)) is true."""
        return StepTimings(**{name: column[mask] for name, column in self.columns().items()})

    def clean(self) -> StepTimings:
        """The clean steps (those without a tag of ``NOT_CLEAN``), without this profiler's time.

        The profiler's work between two steps, such as sending scalars to loggers, is in the next step's phase
        ``profiler``; it's subtracted here.
        """
        return self.select((self.tags & int(NOT_CLEAN)) == 0).net()

    def net(self) -> StepTimings:
        """The same steps, without the time of the phase ``profiler``."""
        ours = self.phases_ns[:, PROFILER]
        if not (ours > 0).any():
            return self
        phases_ns = self.phases_ns.copy()
        phases_ns[:, PROFILER] = np.minimum(ours, 0)
        duration_ns = self.duration_ns - np.maximum(ours, 0)
        return StepTimings(**(self.columns() | {"phases_ns": phases_ns, "duration_ns": duration_ns}))


_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


_BITS: Final = 64


MAX_HALVED: Final = _BITS - 1


def is_kept(step: NDArray[np.int64], num_halved: int) -> NDArray[np.bool_]:
    """Whether each step remains after the steps were halved ``num_halved`` times.

    Multiples of the golden ratio spread evenly over an interval and don't align with any period: steps that
    are special every n-th time keep their share. A dropped step stays dropped.

    Args:
        step: step numbers, shape (n,).
        num_halved: 0 keeps all.

    Source: D. E. Knuth, The Art of Computer Programming, vol. 3, 2nd ed., section 6.4.
    """
    place = step.astype(np.uint64) * _GOLDEN
    kept: NDArray[np.bool_] = place <= np.uint64((1 << (_BITS - num_halved)) - 1)
    return kept


def few(step: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Mask of the remaining steps, halved until there are at most ``most``."""
    for num_halved in range(MAX_HALVED + 1):
        mask = is_kept(step, num_halved)
        if mask.sum() <= most:
            break
    return mask


_OLDER: Final = "not recorded (an older version saved this run)"


class SlowStep(Record, frozen=True, kw_only=True):
    """One slow step, and what else happened in it.

    Attributes:
        tags: :class:`~lightning_modelprof.run.steps.StepTag` bits.
        duration_ns: wall time without the phase ``profiler``.
        usual_ns: median of the clean steps before it; for a loop's first step, of those around it.
        phases_ns: self time by phase key, without phases that took none or weren't measured.
        collector_ns: time in Python's garbage collector, in runs of at least a millisecond.
        generation: oldest generation collected; ``None`` without such a run.
        first_watched, last_watched: the steps over which the counts below were taken, including this one.
        watched_ns: time over which they were taken: of these steps, plus the time before the loop's first one
            or after its last.
        beyond_ns: the unusual part of that: of all steps, of any kind, longer than ``factor`` times the
            median, the excess over it, plus all time outside steps. ``None`` in runs of older versions.
        spread_ns: total excess of the other steps over the fastest of them, an upper limit of their waiting
            for a CPU. ``None`` in runs of older versions.
        major_faults: the process's page faults that read from disk; ``None`` if unknown.
        cpu_wait_ns: time the training thread was ready to run without a CPU; ``None`` for the reason in
            ``why_no_cpu_wait``.
    """

    step: Count
    tags: Count
    duration_ns: Int
    usual_ns: Real
    phases_ns: dict[str, Int]
    collector_ns: Int
    generation: Int | None
    first_watched: Count
    last_watched: Count
    watched_ns: Int
    beyond_ns: Int | None = None
    spread_ns: Int | None = None
    major_faults: Int | None = None
    cpu_wait_ns: Int | None = None


class SlowSteps(Record, frozen=True, kw_only=True):
    """Steps that took more than ``factor`` times the median of the clean steps before them.

    The first steps, and steps in which this profiler was at work, don't count.

    Attributes:
        factor: multiple of the median above which a step is slow.
        count: number of slow clean steps.
        excess_ns: their total excess over the median.
        num_special: further ones, with a validation or the start of an epoch in them.
        why_not_looked_for: why slow steps are unknown; ``""`` if known.
        usual_cpu_wait: share of time in which the training thread was ready to run without a CPU while no
            clean step was slow; ``None`` if there was always one, or if unknown.
        cpu_wait_share: the same over the whole loop, from its first step to the last check.
        why_no_cpu_wait: why that is unknown; ``""`` if known.
        worst: the slowest of both, in the order of the loop.
    """

    factor: Real
    count: Count = 0
    excess_ns: Int = 0
    num_special: Count = 0
    why_not_looked_for: str = ""
    usual_cpu_wait: Real | None = None
    cpu_wait_share: Real | None = None
    why_no_cpu_wait: str = _OLDER
    worst: tuple[SlowStep, ...] = ()
