"""Everything derived from a run, each number once and only on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.modules.forward_check import ForwardFacts, forward_facts
from lightning_modelprof.analysis.modules.model_flops import ModelFlops, model_flops
from lightning_modelprof.analysis.modules.module_tree import ModuleTree, module_tree
from lightning_modelprof.analysis.ranks import RankSkew, rank_skew
from lightning_modelprof.analysis.source.call_tree import CallTree, call_tree
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines, hot_lines, layer_hooks
from lightning_modelprof.analysis.source.logging_calls import LoggingCalls, logging_calls
from lightning_modelprof.analysis.source.source_lines import SourceLine, source_lines
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu, batch_cpu
from lightning_modelprof.analysis.steps.batches import BatchScaling, batch_scaling
from lightning_modelprof.analysis.steps.benchmark import (
    Benchmark,
    Exclusion,
    all_ranks,
    benchmark,
    exclusions,
)
from lightning_modelprof.analysis.steps.memory import MemoryUse, memory_use
from lightning_modelprof.analysis.steps.phase_times import (
    OutsideTimes,
    OwnCost,
    PhaseTime,
    outside_times,
    own_cost,
    phase_times,
)
from lightning_modelprof.analysis.steps.slowdown import Slowdown, slowdown
from lightning_modelprof.analysis.steps.step_costs import SlowFacts, StepCosts, slow_facts, step_costs
from lightning_modelprof.analysis.steps.validation import ValidationSplit, validation_split
from lightning_modelprof.analysis.trace.job_facts import NOT_COMPARED, JobFacts
from lightning_modelprof.analysis.trace.rank_waits import WaitsOfRanks
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import RepeatedSamples
from lightning_modelprof.run.loops import LoopKind, loop_of
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.records import AllRanks, Run, Window
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.sites import StepSites
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import BEGINS_EPOCH, MAX_RUN_AHEAD, StepTag, StepTimings
from lightning_modelprof.units import milliseconds

T = TypeVar("T")

NO_SETUP: Final = "the run was saved by an older version, without the training setup"
NOT_INSPECTED: Final = "no step was inspected (set flops=True)"
_NOT_MEASURED: Final = "not measured (set flops=True to inspect some steps)"


class WindowFacts(Record, frozen=True, kw_only=True):
    """One profiler window and the facts of its trace (``None`` without a usable trace)."""

    window: Window
    facts: TraceFacts | None
    trace_note: str = ""


class Facts(JobFacts):
    """Derived facts of a run's first rank.

    Args:
        traces: facts of each trace that was read, by window index.
        trace_notes: why a window's trace is missing, by window index.

    Attributes:
        steps: finished steps; in a long run only the saved ones, evenly spaced.
        unfinished_steps: batches that started and aren't in any step.
        outside_ns: training time outside finished steps, by phase key.
        samples_note: why samples weren't counted; in older runs also doubts about their number.
        short_loops, loops: other loops that the process ran.
    """

    def __init__(
        self,
        run: Run,
        traces: Mapping[int, TraceFacts] | None = None,
        trace_notes: Mapping[int, str] | None = None,
    ) -> None:
        record, traces, trace_notes = run.ranks[0], traces or {}, trace_notes or {}
        self.run = run
        self.record = record
        self.info = run.info
        self.is_on_cpu = run.info.device_type == "cpu"
        self.rank = record.rank
        self.steps: StepTimings = record.steps
        self.unfinished_steps = record.unfinished_steps
        self.outside_ns = record.outside_ns
        self.samples_note = record.samples_note
        self.absent_ranks = run.absent_ranks
        self.short_loops, self.loops = run.short_loops, run.loops
        self.callbacks = record.callbacks
        self.windows = tuple(
            WindowFacts(
                window=window,
                facts=traces.get(window.index),
                trace_note=trace_notes.get(window.index, ""),
            )
            for window in record.windows
        )
        super().__init__(one.facts for one in self.windows if one.facts is not None)

    # What was measured, if it was

    @fact
    def setup(self) -> TrainingSetup:
        return _measured(self.record.setup, NO_SETUP)

    @fact
    def cost(self) -> ModelCost:
        """Result of the inspected steps."""
        return _measured(self.record.model_cost, NOT_INSPECTED)

    @fact
    def sites(self) -> StepSites:
        """Work of each source line in one step."""
        return _measured(self.cost.sites, self.cost.sites_note or NOT_INSPECTED)

    @fact
    def repeated(self) -> RepeatedSamples:
        """Whether samples are the same in each epoch."""
        return _measured(
            self.record.repeated, "the run was saved by an older version, without sample comparisons"
        )

    @fact
    def totals(self) -> StepTotals:
        return StepTotals.of(self.steps) if self.record.totals is None else self.record.totals

    @fact
    def num_steps(self) -> int:
        """Finished steps, saved or not."""
        return len(self.totals)

    @fact
    def num_not_stepping(self) -> int:
        """Finished steps without an optimizer step."""
        return self.totals.num_with(StepTag.NO_OPTIMIZER_STEP)

    @fact
    def wall_ns(self) -> int:
        """Wall time of all finished steps; the phases sum to it exactly."""
        return int(self.totals.total("duration_ns"))

    # Time per step

    @fact
    def step_ns(self) -> float:
        return self.step_costs.step_ns

    @fact
    def benchmark(self) -> Benchmark:
        """Benchmark over the clean steps."""
        return _measured(benchmark(self.steps, self.totals), "there is no clean step")

    @fact
    def exclusions(self) -> tuple[Exclusion, ...]:
        return exclusions(self.totals, loop_of(self.info.loop))

    @fact
    def all_ranks(self) -> AllRanks:
        """The benchmark over all known ranks."""
        return _measured(self.run.all_ranks or all_ranks(self.run.rank_steps), "there's only one rank")

    @fact
    def rank_skew(self) -> RankSkew:
        return rank_skew(self.run.rank_steps, self.info.world_size)

    @fact
    def phases(self) -> tuple[PhaseTime, ...]:
        return phase_times(self.totals)

    @fact
    def step_costs(self) -> StepCosts:
        """Step time without profiler overhead; every diagnosis uses it."""
        return step_costs(
            self.steps,
            self.outside_ns,
            self.totals,
            cpu_wait_share=self._cpu_wait_share,
            num_workers=self._num_workers or 0,
        )

    @fact
    def rank_waits(self) -> WaitsOfRanks:
        """Never measured: a run's traces are windows of one rank; see ``rank_skew``."""
        raise NotMeasured(NOT_COMPARED)

    @fact
    def outside_loop(self) -> OutsideTimes:
        loop_ns = self.wall_ns + sum(self.outside_ns.values())
        return outside_times(self.record.around, self.get(Facts.setup), loop_ns)

    @fact
    def validation(self) -> ValidationSplit:
        return validation_split(self.record.validation, self.totals, self.outside_ns, self.callbacks)

    @fact
    def memory(self) -> MemoryUse:
        return memory_use(self.record.memory, _epoch_starts(self.steps, self.num_steps))

    @fact
    def slow(self) -> SlowFacts:
        record = _measured(self.record.slow, "not recorded (an older version saved this run)")
        return slow_facts(record, self.step_costs)

    @fact
    def slowdown(self) -> Slowdown:
        return slowdown(self.steps)

    @fact
    def own_cost(self) -> OwnCost:
        record = self.record
        return own_cost(
            self.totals, self.outside_ns, self.step_costs, record.helper_cpu_ns, record.report_wait_ns
        )

    # Batches

    @fact
    def batch_cpu(self) -> BatchCpu:
        setup = self.get(Facts.setup)
        return batch_cpu(
            self.record.cpu,
            num_workers=self._num_workers,
            usable_cpus=None if setup is None else setup.usable_cpus,
            cpu_wait_share=self._cpu_wait_share,
        )

    @fact
    def batch_scaling(self) -> BatchScaling:
        cost = self.get(Facts.cost)
        return batch_scaling(self.steps, None if cost is None else cost.batch_sizes)

    # The model

    @fact
    def flops(self) -> ModelFlops:
        figures = self.get(Facts.benchmark)
        step_ns = None if figures is None else max(figures.batch_cost_ns.avg, self._run_ahead_ns or 0.0)
        return model_flops(self.get(Facts.cost), step_ns, _share_with_optimizer_step(self.totals.clean()))

    @fact
    def modules(self) -> ModuleTree:
        ignored = self.info.config.get("ignore_modules") or ()
        return module_tree(_measured(self.get(Facts.cost), _NOT_MEASURED), ignored)

    @fact
    def forward(self) -> ForwardFacts:
        """fvcore's count."""
        return forward_facts(_measured(self.get(Facts.cost), _NOT_MEASURED))

    # Source lines

    @fact
    def call_tree(self) -> CallTree:
        return call_tree(self.record.stacks)

    @fact
    def hot_lines(self) -> HotLines:
        return hot_lines(self.record.stacks)

    @fact
    def layer_hooks(self) -> FoundCalls:
        """Time in hooks of modules and tensors."""
        return layer_hooks(self.hot_lines)

    @fact
    def logging_calls(self) -> LoggingCalls:
        return logging_calls(self.hot_lines)

    @fact
    def source_lines(self) -> tuple[SourceLine, ...]:
        cost = self.get(Facts.cost)
        return source_lines(None if cost is None else cost.sites, self.get(Facts.hot_lines))

    @fact
    def notes(self) -> tuple[str, ...]:
        """Caveats to show next to the figures."""
        record = self.record
        return (
            *record.notes,
            *_kept_notes(len(self.steps), self.num_steps, loop_of(self.info.loop)),
            *_setup_notes(record.setup),
            *_run_ahead_notes(self.get(Facts.benchmark), self._run_ahead_ns),
            *record.sampling_notes,
        )

    @property
    def _cpu_wait_share(self) -> float | None:
        return None if self.record.slow is None else self.record.slow.cpu_wait_share

    @property
    def _num_workers(self) -> int | None:
        """Worker count of the first dataloader; ``None`` if unknown."""
        setup = self.record.setup
        return setup.loaders[0].num_workers if setup is not None and setup.loaders else None

    @property
    def _run_ahead_ns(self) -> float | None:
        return _device_step_ns_if_cpu_ran_ahead(self.get(Facts.benchmark), self.totals)


def _measured(value: T | None, reason: str) -> T:
    if value is None:
        raise NotMeasured(reason)
    return value


def _share_with_optimizer_step(totals: StepTotals) -> float:
    return 1 - totals.num_with(StepTag.NO_OPTIMIZER_STEP) / len(totals) if len(totals) else 1.0


def _device_step_ns_if_cpu_ran_ahead(figures: Benchmark | None, totals: StepTotals) -> float | None:
    """Mean device time per clean step if the CPU ran ahead; ``None`` if host time is right."""
    clean = totals.clean()
    num_steps = int(clean.total("num_on_device").min())
    if figures is None or not num_steps or num_steps < len(clean) / 2:
        return None
    device_ns = int(clean.total("device_ns").sum()) / num_steps
    return device_ns if device_ns > (1 + MAX_RUN_AHEAD) * figures.batch_cost_ns.avg else None


def _run_ahead_notes(figures: Benchmark | None, device_step_ns: float | None) -> tuple[str, ...]:
    if figures is None or device_step_ns is None:
        return ()
    return (
        f"The CPU ran ahead of the GPU. A step takes {milliseconds(device_step_ns)} on the GPU, not"
        f" {milliseconds(figures.batch_cost_ns.avg)}. FLOP/s and MFU use GPU time. Train for more steps to"
        " get the same step time from both.",
    )


def _epoch_starts(steps: StepTimings, num_steps: int) -> list[int]:
    """Steps that start an epoch; none if steps were dropped, as some starts would be missing."""
    if len(steps) < num_steps:
        return []
    return [int(step) for step in steps.step[(steps.tags & BEGINS_EPOCH) != 0]]


def _kept_notes(num_kept: int, num_steps: int, loop: LoopKind) -> tuple[str, ...]:
    if num_kept == num_steps:
        return ()
    return (
        f"{num_kept:,} of {num_steps:,} {loop.steps} were saved, evenly spaced. Totals, averages and"
        " extremes cover all of them; percentiles, standard errors and charts only the saved ones.",
    )


def _setup_notes(setup: TrainingSetup | None) -> tuple[str, ...]:
    return () if setup is None else tuple(f"Training setup: {note}." for note in setup.notes)
