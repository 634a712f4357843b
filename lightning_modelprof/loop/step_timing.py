"""What times every step of a loop, from ``setup`` to the loop's end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.fit.live import LiveFigures
from lightning_modelprof.lightning.phases import make_delegate
from lightning_modelprof.lightning.rank_wait import next_is_ready
from lightning_modelprof.measure.clock import HostClock, device_clock
from lightning_modelprof.measure.own_budget import OwnBudget
from lightning_modelprof.measure.resources.cpu import CpuOfSteps
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.steps.recorder import DevicePhases, Recorder
from lightning_modelprof.measure.steps.repeated_samples import RepeatedSampleWatch
from lightning_modelprof.measure.steps.slow_steps import SlowStepWatch
from lightning_modelprof.measure.steps.validation_parts import ValidationParts
from lightning_modelprof.run.loops import Loop


class StepTiming:
    """The delegate that hears Lightning's actions, the ledger that it feeds, and those who keep its steps.

    Args:
        config: the checked configuration.
        loop: which loop it is.
        trainer: keeps its profiler, in whose place the delegate may be put.
        own_prefix: start of the profiler actions of the callback itself.
        clock: host clock.
        on_boundary: called where a step begins at which there is something to do.
        on_failure: called when an exception ends the loop.
        on_untold: called when Lightning will not tell our callback of it.

    Attributes:
        sizes: of the batches; ``None`` where no FLOPs are counted.
        repeated: compares samples of a few indices; ``None`` outside of a fit.
        recorder: keeps the steps.
        slow: keeps the slowest of them with what went on.
        budget: what this profiler takes.
        live: averages while the loop runs.
        device: device time by phase; ``None`` without device events.
        ledger: splits each step into phases.
        delegate: hears Lightning's actions.
        skip_first: steps that the benchmark leaves out.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        trainer: Any,
        *,
        own_prefix: str,
        clock: HostClock,
        on_boundary: Callable[[], None],
        on_failure: Callable[[], None],
        on_untold: Callable[[], None],
    ) -> None:
        self.sizes = BatchShapes() if config.wants_flops else None
        self.recorder = Recorder(config.skip_first, sizes=self.sizes)
        self.slow = SlowStepWatch()
        self.budget = OwnBudget(config.bounds.max_overhead)
        self.live = LiveFigures(self.recorder, config.unit, self.slow, self.budget, sizes=self.sizes)
        marks = device_clock(trainer.strategy.root_device) if config.inspect.device_timing else None
        self.device = None if marks is None else DevicePhases(marks, self.recorder.add_device)
        self.ledger = PhaseLedger(
            clock,
            self.recorder.add,
            on_boundary,
            device=self.device,
            validation=ValidationParts(marks),
            cpu=CpuOfSteps(config.skip_first, partial(next_is_ready, trainer, loop)),
        )
        self.ledger.on_failure, self.ledger.on_untold = on_failure, on_untold
        self.ledger.sizes = self.sizes
        self.repeated = RepeatedSampleWatch(trainer) if loop.is_fit else None
        self.ledger.repeated = self.repeated
        self.skip_first = config.skip_first
        self.delegate = make_delegate(trainer.profiler, self.ledger, trainer, own_prefix, loop)

    def skip(self, skip_first: int) -> None:
        """Leave out so many first steps; to be called before the first."""
        self.skip_first = self.recorder.skip_first = skip_first
        self.ledger.cpu.skip(skip_first)
