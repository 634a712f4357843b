"""Time every step of a loop, from ``setup`` to the loop's end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.instrument import Instrument
from lightning_modelprof.engine.live_figures import LiveFigures
from lightning_modelprof.engine.loop import Loop, batches_made, num_prefetched
from lightning_modelprof.measure.clock import HostClock, device_clock
from lightning_modelprof.measure.resources.cpu import CpuOfSteps
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.steps.device_phases import DevicePhases
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.measure.steps.repeated_samples import RepeatedSampleWatch
from lightning_modelprof.measure.steps.slow_steps import SlowStepWatch
from lightning_modelprof.measure.steps.validation_parts import ValidationParts
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.steps import NOT_MEASURED


class StepTimes(Instrument):
    """The phase source, the ledger that it feeds, and the consumers of its steps.

    Args:
        budget: receives the steps.
        on_boundary: called at the start of a step where something is due.

    Attributes:
        sizes: of the batches; ``None`` if FLOPs aren't counted.
        slow: keeps the slowest steps and what happened in them.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        clock: HostClock,
        budget: Budget,
        on_boundary: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._budget = budget
        self.sizes = BatchShapes() if config.wants_flops else None
        self.recorder = Recorder(config.skip_first, sizes=self.sizes)
        self.slow = SlowStepWatch()
        self.live = LiveFigures(self.recorder, config.unit, self.slow, budget, sizes=self.sizes)
        marks = device_clock(loop.device) if config.inspect.device_timing else None
        self._device = None if marks is None else DevicePhases(marks, self.recorder.add_device, clock)
        self.ledger = PhaseLedger(
            clock,
            self.recorder.add,
            on_boundary,
            device=self._device,
            validation=ValidationParts(marks),
            cpu=CpuOfSteps(config.skip_first, partial(batches_made, loop)),
        )
        self.ledger.sizes = self.sizes
        self._repeated = RepeatedSampleWatch(loop) if loop.kind.is_fit else None
        self.ledger.repeated = self._repeated
        self.skip_first = config.skip_first
        self.phase_source = loop.make_phase_source(self.ledger)

    def skip(self, skip_first: int) -> None:
        """Skip the first ``skip_first`` steps; to be called before the first."""
        self.skip_first = self.recorder.skip_first = skip_first
        self.ledger.cpu.skip(skip_first)

    def begin(self) -> None:
        self.slow.start()
        self.ledger.cpu.start()

    def stand_still(self, step: int, paused_ns: int) -> None:
        """Handle a pause before this step: the next ones find batches that workers made during it."""
        per_step_ns = self._budget.step_ns(self._clock() - paused_ns, step)
        self.recorder.drain(step, min(num_prefetched(self._loop), paused_ns // per_step_ns))

    def close_watches(self) -> None:
        """Stop watching the user's objects."""
        if self._repeated is not None:
            self._repeated.close()

    def close_device(self, *, has_finished: bool) -> None:
        if self._device is not None:
            if has_finished:
                self._device.finish()
            self._device.close()

    def fields(self) -> Mapping[str, Any]:
        ledger = self.ledger
        return {
            "steps": self.recorder.steps(),
            "totals": self.recorder.totals(),
            "outside_ns": {
                phase.key: int(time)
                for phase, time in zip(PHASES, ledger.outside_ns, strict=True)
                if time not in (0, NOT_MEASURED) and isfinite(time)  # a clock may fail
            },
            "validation": ledger.validation.times(),
            "unfinished_steps": ledger.unfinished_steps,
            "callbacks": self.phase_source.callback_times(),
            "slow": self.slow.record(),
            "cpu": ledger.cpu.record(),
            "repeated": None if self._repeated is None else self._repeated.record(),
        }

    def notes(self) -> list[str]:
        """Collect the device's times; return notes about missing ones."""
        notes, device = [], self._device
        if device is not None:
            device.collect()
            if device.num_given_up:
                notes.append(f"{device.num_given_up} steps have no device time: it couldn't be read.")
            if device.num_unmarked:
                notes.append(
                    f"{device.num_unmarked:,} of {self.recorder.num_steps:,} steps have no device time,"
                    " because timing every step would slow down training."
                )
        if self.ledger.validation.has_given_up:
            notes.append("The device time of validation's parts couldn't be read.")
        return notes
