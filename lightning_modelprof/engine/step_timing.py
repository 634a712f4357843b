"""What times every step of a loop, from ``setup`` to the loop's end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from lightning_modelprof.analysis.modules.model_flops import ModelRates
from lightning_modelprof.analysis.steps.benchmark import Averages, averages
from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.loop import Loop, batches_made
from lightning_modelprof.measure.clock import HostClock, device_clock
from lightning_modelprof.measure.resources.cpu import CpuOfSteps
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.steps.device_phases import DevicePhases
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.measure.steps.repeated_samples import RepeatedSampleWatch
from lightning_modelprof.measure.steps.slow_steps import SlowStepWatch
from lightning_modelprof.measure.steps.validation_parts import ValidationParts
from lightning_modelprof.run.batches import BatchSizes
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import StepTimings


class StepTiming:
    """The phase source that hears of phases, the ledger that it feeds, and those who keep its steps.

    Args:
        on_boundary: called where a step begins at which there is something to do.
        on_failure: called when an exception ends the loop.
        on_missed_end: called when Lightning won't call our callback at the end.

    Attributes:
        sizes: of the batches; ``None`` where no FLOPs are counted.
        repeated: compares samples of a few indices; ``None`` outside of a fit.
        slow: keeps the slowest of them with what went on.
        device: device time by phase; ``None`` without device events.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        *,
        clock: HostClock,
        on_boundary: Callable[[], None],
        on_failure: Callable[[], None],
        on_missed_end: Callable[[], None],
    ) -> None:
        self.sizes = BatchShapes() if config.wants_flops else None
        self.recorder = Recorder(config.skip_first, sizes=self.sizes)
        self.slow = SlowStepWatch()
        self.budget = Budget(clock, config, is_alone=loop.world_size == 1)
        self.live = LiveFigures(self.recorder, config.unit, self.slow, self.budget, sizes=self.sizes)
        marks = device_clock(loop.device) if config.inspect.device_timing else None
        self.device = None if marks is None else DevicePhases(marks, self.recorder.add_device, clock)
        self.ledger = PhaseLedger(
            clock,
            self.recorder.add,
            on_boundary,
            device=self.device,
            validation=ValidationParts(marks),
            cpu=CpuOfSteps(config.skip_first, partial(batches_made, loop)),
        )
        self.ledger.on_failure, self.ledger.on_missed_end = on_failure, on_missed_end
        self.ledger.sizes = self.sizes
        self.repeated = RepeatedSampleWatch(loop) if loop.kind.is_fit else None
        self.ledger.repeated = self.repeated
        self.skip_first = config.skip_first
        self.phase_source = loop.make_phase_source(self.ledger)

    def skip(self, skip_first: int) -> None:
        """Leave out so many first steps; to be called before the first."""
        self.skip_first = self.recorder.skip_first = skip_first
        self.ledger.cpu.skip(skip_first)


_MANY: Final = 256


class TakesSteps(Protocol):
    """Somebody else who looks at the steps."""

    def add(self, steps: StepTimings) -> None:
        """Steps that ended since this was last called."""


class LiveFigures:
    """Averages over the steps since somebody last looked; every looker has a place of its own.

    Args:
        unit: what the samples are called.
        others: are told of the same steps.
        sizes: of the batches; ``None`` where no FLOPs are counted.

    Attributes:
        newest: averages of the last flush; ``None`` before the first, or when no step of it was clean.
    """

    def __init__(
        self, recorder: Recorder, unit: str, *others: TakesSteps, sizes: BatchShapes | None = None
    ) -> None:
        self._recorder = recorder
        self._others = others
        self._unit = unit
        self._for_logs = _Unseen()
        self._for_step_info = _Unseen()
        self._phases_seen: set[str] = set()
        self.newest: Averages | None = None
        self._rates: ModelRates | None = None
        self._sizes = sizes
        self._sizes_seen = None if sizes is None else sizes.clean_steps()
        self._newest_sizes: BatchSizes | None = None  # of the last flush

    def poll(self) -> None:
        """Take over the steps since the last time, before they become many."""
        steps = self._recorder.take_new()
        for other in self._others:
            other.add(steps)
        self._for_logs.add(steps.clean())
        self._for_step_info.add(steps)

    def flush(self) -> None:
        """Average the clean steps since the last flush."""
        self.poll()
        self.newest = averages(self._for_logs.take())
        if self._sizes is not None:
            self._newest_sizes = self._sizes.record(self._sizes_seen)
            self._sizes_seen = self._sizes.clean_steps()

    def set_flops(self, cost: ModelCost) -> None:
        """From now on, figures have FLOP/s, and MFU if the device has a known peak."""
        self._rates = None if cost.count is None else ModelRates(cost)

    def scalars(self) -> dict[str, float]:
        """What is logged at a flush: tag → value, only of what was measured."""
        figures = self.newest
        if figures is None:
            return {}
        named = {
            "modelprof/batch_cost_ms": _ms(figures.batch_cost_ns),
            "modelprof/reader_cost_ms": _ms(figures.reader_cost_ns),
            "modelprof/reader_ratio": figures.reader_ratio,
            "modelprof/ips": figures.steps_per_s,
            "modelprof/samples_per_s": figures.samples_per_s,
        }
        if self._rates is not None:
            model = self._rates.of(self._newest_sizes, figures.batch_cost_ns)
            named |= {"modelprof/flops_per_s": model.flops_per_s, "modelprof/mfu": model.share_of_peak}
        for phase, time_ns in zip(PHASES, figures.phases_ns, strict=True):
            # A phase's curve begins when it first takes time, and then shows its zeros too.
            if time_ns:
                self._phases_seen.add(phase.key)
            if phase.key in self._phases_seen:
                named[f"modelprof/phase_ms/{phase.key}"] = _ms(time_ns)
        return {name: value for name, value in named.items() if value is not None}

    def step_info(self, unit: str | None) -> str:
        """Paddle's line over the steps, clean or not, since the last call; ``""`` if there are none."""
        self.poll()
        figures = averages(self._for_step_info.take())
        if figures is None:
            return ""
        text = ""
        if figures.reader_cost_ns is not None:
            text += f" reader_cost: {figures.reader_cost_ns / 1e9:.5f} s"
        text += f" batch_cost: {figures.batch_cost_ns / 1e9:.5f} s"
        rate, name = figures.samples_per_s, unit or self._unit
        if rate is None:
            rate, name = figures.steps_per_s, "steps"
        return text if rate is None else f"{text} ips: {rate:.3f} {name}/s"


class _Unseen:
    """Steps that somebody has not looked at yet, summed as soon as they are many."""

    def __init__(self) -> None:
        self._unsummed: list[StepTimings] = []
        self._num_steps = 0
        self._sums: list[StepTotals] = []

    def add(self, steps: StepTimings) -> None:
        self._unsummed.append(steps)
        self._num_steps += len(steps)
        if self._num_steps > _MANY:
            self._sums = [self.take()]

    def take(self) -> StepTotals:
        """The sums over them all; from here on they have been seen."""
        totals = StepTotals.merge([*self._sums, StepTotals.of(StepTimings.concatenate(self._unsummed))])
        self._unsummed, self._num_steps, self._sums = [], 0, []
        return totals


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6
