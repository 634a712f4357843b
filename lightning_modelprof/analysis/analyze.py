"""Analysis: everything derived from a Run, each number once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.batch_cpu import BatchCpu, batch_cpu
from lightning_modelprof.analysis.batch_scaling import BatchScaling, batch_scaling
from lightning_modelprof.analysis.benchmark import Benchmark, Exclusion, all_ranks, benchmark, exclusions
from lightning_modelprof.analysis.call_tree import CallTree, call_tree
from lightning_modelprof.analysis.forward_check import ForwardFacts, forward_facts
from lightning_modelprof.analysis.hot_lines import FoundCalls, HotLines, hot_lines
from lightning_modelprof.analysis.layer_hooks import layer_hooks
from lightning_modelprof.analysis.logging_calls import LoggingCalls, logging_calls
from lightning_modelprof.analysis.memory_use import MemoryUse, memory_use
from lightning_modelprof.analysis.model_flops import ModelFlops, model_flops
from lightning_modelprof.analysis.module_tree import ModuleTree, module_tree
from lightning_modelprof.analysis.own_cost import OwnCost, own_cost
from lightning_modelprof.analysis.phase_times import PhaseTime, phase_times
from lightning_modelprof.analysis.rank_skew import RankSkew, rank_skew
from lightning_modelprof.analysis.slow_causes import SlowFacts, slow_facts
from lightning_modelprof.analysis.source_lines import SourceLine, source_lines
from lightning_modelprof.analysis.step_costs import StepCosts, step_costs
from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.analysis.validation_split import ValidationSplit, validation_split
from lightning_modelprof.run.loops import Loop, loop_of
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.process_loops import LoopLine, ShortLoops
from lightning_modelprof.run.records import (
    AbsentRank,
    AllRanks,
    CallbackTime,
    RankRecord,
    Run,
    RunInfo,
    Window,
)
from lightning_modelprof.run.repeated_samples import RepeatedSamples
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import BEGINS_EPOCH, StepTag, StepTimings
from lightning_modelprof.run.training_setup import TrainingSetup

_NOT_INSPECTED: Final = Absent("not measured (flops=True inspects some steps)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """One profiler window: what was asked for, and what its trace says (``None`` without a usable one)."""

    window: Window
    facts: TraceFacts | None
    trace_note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Derived facts of one rank's run.

    Attributes:
        benchmark: figures over the clean steps; ``None`` when no step is clean.
        exclusions: which steps are not clean, and why.
        samples_note: why samples were not counted, or what speaks against their number.
        steps: the finished steps; of a long run those that were kept, spread evenly over it.
        num_steps: finished steps, kept or not.
        num_not_stepping: finished steps in which the optimizer did not step.
        wall_ns: wall time of all finished steps; the phases sum to it exactly.
        outside_ns: training time that is in no finished step, by phase key.
        all_ranks: the benchmark over all known ranks; ``None`` when that is one.
        absent_ranks: of which nothing is known.
        short_loops, loops: what else the process ran.
        flops, modules, forward: what is derived from the model's cost.
        cost: what was measured of it; ``None`` when that was not asked for.
        step_costs: what a step costs without what this profiler does; every diagnosis rests on it.
        validation: what the validations inside a fit consist of.
        setup: how the training is set up; ``None`` in runs of versions that did not look.
        memory: over the loop, and in one step.
        rank_skew: the ranks of the job side by side.
        slow: steps that took much longer than usual, and why.
        batch_cpu: what batches and steps take of the CPUs.
        batch_scaling: how the time of a step depends on the size of its batch.
        repeated: whether samples are the same in each epoch; ``None`` where nobody looked.
        own_cost: what this profiler took of the loop.
        call_tree: in which functions the training thread was, from the phases on.
        hot_lines: which lines the training thread was at.
        layer_hooks: the time in hooks of modules and tensors.
        logging_calls: the time below ``self.log`` and metrics, by line.
        source_lines: what each line of the user's runs, and how much of the time it takes.
    """

    info: RunInfo
    rank: int
    steps: StepTimings
    num_steps: int
    num_not_stepping: int
    unfinished_steps: int
    wall_ns: int
    outside_ns: Mapping[str, int]
    benchmark: Benchmark | None
    exclusions: tuple[Exclusion, ...]
    samples_note: str
    all_ranks: AllRanks | None
    absent_ranks: tuple[AbsentRank, ...]
    short_loops: tuple[ShortLoops, ...]
    loops: tuple[LoopLine, ...]
    phases: tuple[PhaseTime, ...]
    callbacks: tuple[CallbackTime, ...]
    windows: tuple[WindowFacts, ...]
    flops: ModelFlops | Absent
    modules: ModuleTree | Absent
    forward: ForwardFacts | Absent
    cost: ModelCost | None
    step_costs: StepCosts | Absent
    validation: ValidationSplit | Absent
    setup: TrainingSetup | None
    memory: MemoryUse | Absent
    rank_skew: RankSkew | Absent
    slow: SlowFacts | Absent
    batch_cpu: BatchCpu | Absent
    batch_scaling: BatchScaling | Absent
    repeated: RepeatedSamples | None
    own_cost: OwnCost | Absent
    call_tree: CallTree | Absent
    hot_lines: HotLines | Absent
    layer_hooks: FoundCalls | Absent
    logging_calls: LoggingCalls | Absent
    source_lines: tuple[SourceLine, ...] | Absent
    notes: tuple[str, ...]


def _stepping_share(totals: StepTotals) -> float:
    """Share of the steps in which the optimizer stepped; 1 if there are none."""
    return 1 - totals.num_with(StepTag.NO_OPTIMIZER_STEP) / len(totals) if len(totals) else 1.0


def _num_workers(setup: TrainingSetup | None) -> int | None:
    """Of the first dataloader; ``None`` where that is not known."""
    return setup.loaders[0].num_workers if setup is not None and setup.loaders else None


def analyze(run: Run, facts: Mapping[int, TraceFacts], trace_notes: Mapping[int, str]) -> Analysis:
    """Derive the facts of a run's first rank.

    Args:
        run: what was measured.
        facts: window index → what its trace says, for the windows whose trace was read.
        trace_notes: window index → why there is nothing of it.
    """
    record: RankRecord = run.ranks[0]
    steps, cost = record.steps, record.model_cost
    totals = StepTotals.of(steps) if record.totals is None else record.totals
    figures, hot = benchmark(steps, totals), hot_lines(record.stacks)
    waited = None if record.slow is None else record.slow.cpu_wait_share
    costs = step_costs(
        steps,
        record.outside_ns,
        totals,
        cpu_wait_share=waited,
        num_workers=_num_workers(record.setup) or 0,
    )
    return Analysis(
        info=run.info,
        rank=record.rank,
        steps=steps,
        num_steps=len(totals),
        num_not_stepping=totals.num_with(StepTag.NO_OPTIMIZER_STEP),
        unfinished_steps=record.unfinished_steps,
        wall_ns=int(totals.whole("duration_ns")),
        outside_ns=record.outside_ns,
        benchmark=figures,
        exclusions=exclusions(totals, loop_of(run.info.loop)),
        samples_note=record.samples_note,
        all_ranks=run.all_ranks or all_ranks(run.rank_steps),
        absent_ranks=run.absent_ranks,
        short_loops=run.short_loops,
        loops=run.loops,
        phases=phase_times(totals),
        callbacks=record.callbacks,
        windows=tuple(
            WindowFacts(
                window=window,
                facts=facts.get(window.index),
                trace_note=trace_notes.get(window.index, ""),
            )
            for window in record.windows
        ),
        flops=model_flops(
            cost, None if figures is None else figures.batch_cost_ns.avg, _stepping_share(totals.clean())
        ),
        modules=_NOT_INSPECTED
        if cost is None
        else module_tree(cost, run.info.config.get("ignore_modules") or ()),
        forward=_NOT_INSPECTED if cost is None else forward_facts(cost),
        cost=cost,
        step_costs=costs,
        validation=validation_split(record.validation, totals, record.outside_ns, record.callbacks),
        setup=record.setup,
        memory=memory_use(record.memory, _epoch_starts(steps, len(totals))),
        rank_skew=rank_skew(run.rank_steps, run.info.world_size),
        slow=slow_facts(record.slow, costs),
        batch_cpu=batch_cpu(
            record.cpu,
            num_workers=_num_workers(record.setup),
            usable_cpus=None if record.setup is None else record.setup.usable_cpus,
            cpu_wait_share=waited,
        ),
        batch_scaling=batch_scaling(steps, None if cost is None else cost.batch_sizes),
        repeated=record.repeated,
        own_cost=own_cost(totals, record.outside_ns, costs),
        call_tree=call_tree(record.stacks),
        hot_lines=hot,
        layer_hooks=layer_hooks(hot),
        logging_calls=logging_calls(hot),
        source_lines=source_lines(None if cost is None else cost.sites, hot),
        notes=(
            *record.notes,
            *_kept_notes(len(steps), len(totals), loop_of(run.info.loop)),
            *_setup_notes(record.setup),
            *(() if record.stacks is None else record.stacks.notes),
        ),
    )


def _epoch_starts(steps: StepTimings, num_steps: int) -> list[int]:
    """The steps in which an epoch begins; none if not all steps were kept, as some would be missing."""
    if len(steps) < num_steps:
        return []
    return [int(step) for step in steps.step[(steps.tags & BEGINS_EPOCH) != 0]]


def _kept_notes(num_kept: int, num_steps: int, loop: Loop) -> tuple[str, ...]:
    """Which figures of a long run are of a part of its steps."""
    if num_kept == num_steps:
        return ()
    return (
        f"{num_kept:,} of the {num_steps:,} {loop.steps} were kept, spread evenly over the loop. Totals,"
        " averages and the most and least of a cost are of all; percentiles, standard errors and charts of"
        " the kept ones.",
    )


def _setup_notes(setup: TrainingSetup | None) -> tuple[str, ...]:
    """What could not be read of the training's setup."""
    return () if setup is None else tuple(f"Of the training's setup, {note}." for note in setup.notes)
