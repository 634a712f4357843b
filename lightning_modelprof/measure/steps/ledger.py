"""The phase ledger assigns every nanosecond of a loop to exactly one phase.

Each event reads the clock once; the time since the last event belongs to the phase that was current. So a
step's phases add up to its wall time by construction, and closures, gradient accumulation, LBFGS and several
optimizers need no special case.

An event's meaning is decided once, when its name is first seen (``lightning/classify.py``), and kept in an
``Action`` object: training pays for the clock reading and three additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.resources.cpu import CpuOfSteps
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.steps.repeated_samples import RepeatedSampleWatch
from lightning_modelprof.measure.steps.validation_parts import ValidationParts
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag

CALLBACKS: Final = PHASE_INDEX["callbacks"]
BACKWARD: Final = PHASE_INDEX["backward"]
DATALOADER: Final = PHASE_INDEX["dataloader"]
DATALOADER_INIT: Final = PHASE_INDEX["dataloader_init"]
EPOCH_TURN: Final = PHASE_INDEX["epoch_turn"]
LOGGING: Final = PHASE_INDEX["logging"]
OPTIMIZER: Final = PHASE_INDEX["optimizer"]
OTHER: Final = PHASE_INDEX["other"]
PREDICTIONS: Final = PHASE_INDEX["predictions"]
PROFILER: Final = PHASE_INDEX["profiler"]
USER_PROFILER: Final = PHASE_INDEX["user_profiler"]
VALIDATION: Final = PHASE_INDEX["validation"]

_ALWAYS_FIRST: Final = ~int(StepTag.FIRST_OF_EPOCH)
"""Meaningful tags where each step starts an epoch."""


class Ranges(Protocol):
    """Writes the phases as named ranges into a profiler trace."""

    def push(self, phase: int) -> None:
        """Open a phase's range inside the open ones."""

    def pop(self) -> None:
        """Close the innermost open range; does nothing when none is open."""


class DeviceMarks(Protocol):
    """Marks phase boundaries on the device's stream."""

    def mark(self, phase: int) -> None:
        """Assign the device's time from here on to ``phase``."""

    def close_step(self, step: int) -> None:
        """End step number ``step`` at the last mark."""

    def discard(self) -> None:
        """Drop the marks since the last step ended, except the last one."""


class StepInspection(Protocol):
    """Inspects the running step; the callback's hooks announce its stages."""

    def begin_batch(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def before_backward(self, loss: Any) -> None: ...

    def end_batch(self, *, failed: bool = False) -> None:
        """End the batch, finished or failed."""


class PhaseLedger:
    """Self time per phase of the running step.

    Args:
        on_step: takes an ended step: (nanoseconds per phase in PHASES order, tags, samples).
        on_boundary: called at the step boundary at which ``next_boundary`` steps have ended; its time counts
            toward the phase ``profiler`` of the step that starts.

    Attributes:
        self_ns: nanoseconds per phase since the last step ended.
        outside_ns: nanoseconds per phase outside finished steps.
        epoch_step: first step of the running epoch, or of an evaluation's dataloader.
        step_end_ns: when the last step ended, by the host clock.
        unfinished_steps: batches that started and didn't end.
        hooks_ns: time in other callbacks' finished hooks, counting nested ones once.
        inspection: inspects the running step; ``None`` in nearly all steps.
        on_failure: called when the loop ends with an exception, before other callbacks learn of it.
        on_missed_end: called when such a callback raises too, so that ours isn't called.
        repeated: compares samples of some batches with earlier epochs; ``None`` if off.
        sizes: assigns batches their size; ``None`` if off.
        samples: number of samples in the running batch, ``NOT_MEASURED`` if unknown; set by the callback.
        tags: :class:`StepTag` bits of the running step.
    """

    __slots__ = (
        "backward_outer",
        "batch_began",
        "batch_ended",
        "clock",
        "cpu",
        "current",
        "device",
        "epoch_step",
        "epochs_begun",
        "gap_range_open",
        "hooks_ns",
        "in_validation",
        "inspection",
        "last_ns",
        "next_boundary",
        "on_boundary",
        "on_failure",
        "on_missed_end",
        "on_step",
        "on_validation_change",
        "outside_ns",
        "ranges",
        "repeated",
        "samples",
        "self_ns",
        "sizes",
        "step_end_ns",
        "steps_ended",
        "tags",
        "unfinished_steps",
        "validation",
    )

    def __init__(
        self,
        clock: HostClock,
        on_step: Callable[[tuple[list[int], int, int]], None],
        on_boundary: Callable[[], None],
        device: DeviceMarks | None = None,
        validation: ValidationParts | None = None,
        *,
        cpu: CpuOfSteps | None = None,
    ) -> None:
        self.clock = clock
        self.on_step = on_step
        self.on_boundary = on_boundary
        self.on_validation_change: Callable[[], None] = _nothing
        self.on_failure: Callable[[], None] = _nothing
        self.on_missed_end: Callable[[], None] = _nothing
        self.device = device
        self.validation = validation or ValidationParts()
        self.cpu = cpu or CpuOfSteps()
        self.ranges: Ranges | None = None
        self.inspection: StepInspection | None = None
        self.sizes: BatchShapes | None = None
        self.repeated: RepeatedSampleWatch | None = None
        self.next_boundary = 0
        self.steps_ended = 0
        self.epochs_begun = self.epoch_step = 0
        self.unfinished_steps = 0
        self.hooks_ns = 0
        self.outside_ns = [0] * len(PHASES)
        self.restart()

    def restart(self) -> None:
        """Start counting now; earlier counts are kept in ``outside_ns``."""
        self.self_ns = [0] * len(PHASES)
        self.current = OTHER
        self.last_ns = self.step_end_ns = self.clock()
        self.tags = 0
        self.samples = NOT_MEASURED
        self.batch_began = self.batch_ended = False
        self.in_validation = False
        self.backward_outer: int | None = None
        self.gap_range_open = False

    def charge(self, phase: int | None = None) -> None:
        """Add the time since the last event to ``phase``, or to the current one."""
        now = self.clock()
        self.self_ns[self.current if phase is None else phase] += now - self.last_ns
        self.last_ns = now

    # Steps. The caller has charged the time so far.

    def end_step(self) -> None:
        """End the running step and start the next one, at the last event."""
        if self.in_validation:
            self.leave_validation()
        if self.gap_range_open:
            self.close_gap_range()
        if self.device is not None:
            self.device.mark(DATALOADER)
            self.device.close_step(self.steps_ended)
        if self.cpu.is_reading:
            is_each_an_epoch = self.epochs_begun > self.steps_ended
            self.cpu.end_step(self.self_ns, self.tags & _ALWAYS_FIRST if is_each_an_epoch else self.tags)
        phases_ns, self.self_ns = self.self_ns, [0] * len(PHASES)
        self.on_step((phases_ns, self.tags, self.samples))
        self.step_end_ns = self.last_ns
        self.steps_ended += 1
        self.tags = 0
        self.samples = NOT_MEASURED
        self.batch_began = self.batch_ended = False
        self.current = OTHER
        if self.steps_ended >= self.next_boundary:
            self._do_boundary()

    def _do_boundary(self) -> None:
        """Run the boundary callback in the profiler phase, also for code that checks the current phase."""
        outer, self.current = self.current, PROFILER
        self.on_boundary()
        self.current = outer
        self.charge(PROFILER)

    @property
    def needs_batch_start(self) -> bool:
        """Whether a batch starts without a prior fetch: ``training_step`` takes a ``dataloader_iter``."""
        return self.batch_ended or not self.batch_began

    def begin_batch(self) -> None:
        """Start a batch without a prior fetch; the previous step ends here."""
        self.charge()
        if self.batch_ended:
            self.end_step()
        if self.device is not None:
            self.device.mark(OTHER)  # the fetch comes later, inside training_step
        self.close_gap_range()
        self.current = OTHER
        self.batch_began = True

    def discard(self) -> None:
        """Move the counts since the last step ended to ``outside_ns``."""
        if self.in_validation:
            self.validation.end_run(self.self_ns[VALIDATION])
        self.cpu.is_reading = False
        self.outside_ns = [a + b for a, b in zip(self.outside_ns, self.self_ns, strict=True)]
        self.self_ns = [0] * len(PHASES)
        if self.batch_began:
            self.unfinished_steps += 1
        self.tags = 0
        self.batch_began = self.batch_ended = False
        self.in_validation = False
        if self.device is not None:
            self.device.discard()

    def begin_epoch(self) -> None:
        """Start ``run_training_epoch``: until the first fetch, the loader's workers are replaced."""
        self.charge()
        if self.device is not None:
            self.device.mark(DATALOADER_INIT)
        if self.steps_ended == 0:
            self._start_steps()
        self.tags |= StepTag.FIRST_OF_EPOCH
        self.epochs_begun += 1
        self.epoch_step = self.steps_ended
        self.open_gap(DATALOADER_INIT)

    def begin_evaluation(self) -> None:
        """Start a batch of an evaluation loop; the first one starts step 0."""
        if self.steps_ended or self.batch_began:
            return
        self.charge()
        if self.device is not None:
            self.device.mark(DATALOADER)
        self._start_steps()
        self.tags |= StepTag.FIRST_OF_EPOCH

    def _start_steps(self) -> None:
        """Start step 0; everything before it is in no step."""
        self.discard()
        if self.next_boundary == 0:
            self._do_boundary()

    def end_epoch(self) -> None:
        """End the loop over batches and its last step; an unfinished batch isn't a step.

        Lightning's epoch turn follows, until the next epoch starts.
        """
        self.charge()
        self.close_gap_range()
        ends_step = self.batch_ended
        if ends_step:
            self.end_step()
        if self.device is not None:
            self.device.mark(EPOCH_TURN)
        if self.batch_began and not ends_step:
            if self.in_validation:
                self.leave_validation()
            self.discard()
        self.current = EPOCH_TURN

    # Gaps: phases that no action encloses.

    def open_gap(self, phase: int) -> None:
        """Assign the time until the next event at this level to ``phase``."""
        if self.gap_range_open:
            self.close_gap_range()
        self.current = phase
        if self.ranges is not None:
            self.ranges.push(phase)
            self.gap_range_open = True

    def close_gap_range(self) -> None:
        if self.gap_range_open and self.ranges is not None:
            self.ranges.pop()
        self.gap_range_open = False

    def enter_validation(self, part: int) -> None:
        """Start the validation loop with this part; excludes callbacks and checkpoints inside it."""
        self.in_validation = True
        self.validation.begin_run(part, self.self_ns[VALIDATION])
        self.tags |= StepTag.VALIDATION
        self.open_gap(VALIDATION)
        if self.device is not None:
            self.device.mark(VALIDATION)
        self.on_validation_change()

    def begin_part(self, part: int) -> None:
        """Start another part of the validation loop; does nothing if none is running."""
        if self.in_validation:
            self.charge()
            self.validation.begin(part, self.self_ns[VALIDATION])

    def leave_validation(self) -> None:
        """End the validation loop; loggers and schedulers follow."""
        self.in_validation = False
        self.validation.end_run(self.self_ns[VALIDATION])
        if self.device is not None:
            self.device.mark(LOGGING)
        self.on_validation_change()
        self.open_gap(LOGGING)


def _nothing() -> None:
    pass
