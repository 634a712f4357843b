"""What is derived from a run: the record that ``analyze`` fills, and all reports are made of.

What its fields are is imported for types alone, so whoever only handles the record imports nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_modelprof.record import Record

if TYPE_CHECKING:
    from lightning_modelprof.analysis.absent import Absent
    from lightning_modelprof.analysis.modules.forward_check import ForwardFacts
    from lightning_modelprof.analysis.modules.model_flops import ModelFlops
    from lightning_modelprof.analysis.modules.module_tree import ModuleTree
    from lightning_modelprof.analysis.ranks import RankSkew
    from lightning_modelprof.analysis.source.call_tree import CallTree
    from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
    from lightning_modelprof.analysis.source.logging_calls import LoggingCalls
    from lightning_modelprof.analysis.source.source_lines import SourceLine
    from lightning_modelprof.analysis.source.worker_stacks import WorkerStacks
    from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu
    from lightning_modelprof.analysis.steps.batches import BatchScaling
    from lightning_modelprof.analysis.steps.benchmark import Benchmark, Exclusion
    from lightning_modelprof.analysis.steps.loader_queue import LoaderQueue
    from lightning_modelprof.analysis.steps.memory import MemoryUse
    from lightning_modelprof.analysis.steps.phase_times import AroundTimes, OwnCost, PhaseTime
    from lightning_modelprof.analysis.steps.slowdown import Slowdown
    from lightning_modelprof.analysis.steps.step_costs import SlowFacts, StepCosts
    from lightning_modelprof.analysis.steps.validation import ValidationSplit
    from lightning_modelprof.analysis.steps.workers import WorkersFacts
    from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
    from lightning_modelprof.run.batches import RepeatedSamples
    from lightning_modelprof.run.loops import LoopLine, ShortLoops
    from lightning_modelprof.run.model_cost import ModelCost
    from lightning_modelprof.run.records import (
        AbsentRank,
        AllRanks,
        CallbackTime,
        RunInfo,
        Window,
    )
    from lightning_modelprof.run.setup import TrainingSetup
    from lightning_modelprof.run.steps import StepTimings


class WindowFacts(Record, frozen=True, kw_only=True):
    """One profiler window: what was asked for, and what its trace says (``None`` without a usable one)."""

    window: Window
    facts: TraceFacts | None
    trace_note: str = ""


class Analysis(Record, frozen=True, kw_only=True):
    """Derived facts of one rank's run.

    Attributes:
        benchmark: figures over the clean steps; ``None`` when no step is clean.
        samples_note: why samples were not counted; in older runs also what speaks against their number.
        steps: the finished steps; of a long run those that were kept, spread evenly over it.
        num_steps: finished steps, kept or not.
        num_not_stepping: finished steps in which the optimizer did not step.
        wall_ns: wall time of all finished steps; the phases sum to it exactly.
        outside_ns: training time that is in no finished step, by phase key.
        all_ranks: the benchmark over all known ranks; ``None`` when that is one.
        short_loops, loops: what else the process ran.
        cost: what was measured of it; ``None`` when that was not asked for.
        step_costs: what a step costs without what this profiler does; every diagnosis rests on it.
        setup: how the training is set up; ``None`` in runs of versions that did not look.
        fetch_queue: what steps would take with workers where the loop has none, by its fetches.
        repeated: whether samples are the same in each epoch; ``None`` where nobody looked.
        layer_hooks: the time in hooks of modules and tensors.
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
    around: AroundTimes | Absent
    validation: ValidationSplit | Absent
    setup: TrainingSetup | None
    memory: MemoryUse | Absent
    rank_skew: RankSkew | Absent
    slow: SlowFacts | Absent
    slowdown: Slowdown | Absent
    batch_cpu: BatchCpu | Absent
    workers: tuple[WorkersFacts, ...] | Absent
    fetch_queue: LoaderQueue | Absent
    batch_scaling: BatchScaling | Absent
    repeated: RepeatedSamples | None
    own_cost: OwnCost | Absent
    call_tree: CallTree | Absent
    hot_lines: HotLines | Absent
    layer_hooks: FoundCalls | Absent
    logging_calls: LoggingCalls | Absent
    source_lines: tuple[SourceLine, ...] | Absent
    worker_stacks: WorkerStacks | Absent
    notes: tuple[str, ...]
