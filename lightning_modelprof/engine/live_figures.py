"""Figures while a loop runs, averaged over its newest steps."""

from __future__ import annotations

from typing import Final, Protocol

from lightning_modelprof.analysis.modules.model_flops import ModelRates
from lightning_modelprof.analysis.steps.benchmark import Averages, averages
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.memory import LoopMemory
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.plan import Plan
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.run.batches import BatchSizes
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import StepTimings

_MANY: Final = 256


class TakesSteps(Protocol):
    """Another consumer of steps."""

    def add(self, steps: StepTimings) -> None:
        """Take the steps that ended since the last call."""


class LiveFigures:
    """Averages over the steps since the last reading; each consumer has its own position.

    Args:
        unit: name of the samples.
        others: further consumers of the steps.
        sizes: of the batches; ``None`` if FLOPs aren't counted.

    Attributes:
        newest: averages of the last flush; ``None`` before the first, or if none of its steps was clean.
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
        """Take the new steps before they accumulate."""
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
        """Add FLOP/s to the figures from now on, and MFU if the device's peak is known."""
        self._rates = None if cost.count is None else ModelRates(cost)

    def scalars(self) -> dict[str, float]:
        """Return the figures to log at a flush, by tag; only measured ones."""
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
            # A phase's curve starts when it first takes time, and shows zeros from then on.
            if time_ns:
                self._phases_seen.add(phase.key)
            if phase.key in self._phases_seen:
                named[f"modelprof/phase_ms/{phase.key}"] = _ms(time_ns)
        return {name: value for name, value in named.items() if value is not None}

    def step_info(self, unit: str | None) -> str:
        """Return Paddle's line over all steps since the last call; ``""`` if there are none."""
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
    """Steps that a consumer hasn't seen, summed once there are many."""

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
        totals = StepTotals.merge([*self._sums, StepTotals.of(StepTimings.concatenate(self._unsummed))])
        self._unsummed, self._num_steps, self._sums = [], 0, []
        return totals


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


class ShownFigures:
    """Averages and logs the live figures from time to time."""

    def __init__(
        self,
        live: LiveFigures,
        plan: Plan,
        budget: Budget,
        *,
        outputs: Outputs,
        memory: LoopMemory,
        loop: Loop,
    ) -> None:
        self._live = live
        self._plan = plan
        self._budget = budget
        self._outputs = outputs
        self._memory = memory
        self._loop = loop
        self._cut_ns = 0  # duration of the newest cut

    def cut_if_affordable(self, step: int) -> None:
        """Average and log now if that's within limits, or else later over all steps until then."""
        budget, plan = self._budget, self._plan
        is_asked = plan.is_cut_asked_for
        if not is_asked and not self._cut_ns and plan.logs_scalars:
            self._live.poll()
            self._cut_ns = budget.most_logging_ns  # the user's own logging takes about as long
        wait = 0 if is_asked else budget.steps_to_wait(step, self._cut_ns)
        if not wait:
            with budget.asked_for(by_name=is_asked):
                begin_ns = budget.now()
                self._live.flush()
                self._log()
                self._cut_ns = budget.now() - begin_ns
        plan.cut(step, wait)

    def log_last(self) -> None:
        """Log the final averages, if figures were due and had to wait."""
        if self._plan.has_left_out:
            self._plan.has_left_out = False
            self._log()

    def _log(self) -> None:
        scalars = self._live.scalars()
        if scalars and self._plan.logs_scalars:
            self._outputs.log_scalars(scalars | self._memory.scalars(), self._loop.logger_step)
