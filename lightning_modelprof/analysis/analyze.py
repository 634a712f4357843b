"""Analysis: everything derived from a Run, each number once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis, WindowFacts
from lightning_modelprof.analysis.modules.forward_check import forward_facts
from lightning_modelprof.analysis.modules.model_flops import model_flops
from lightning_modelprof.analysis.modules.module_tree import module_tree
from lightning_modelprof.analysis.ranks import rank_skew
from lightning_modelprof.analysis.source.call_tree import call_tree
from lightning_modelprof.analysis.source.hot_lines import hot_lines, layer_hooks
from lightning_modelprof.analysis.source.logging_calls import logging_calls
from lightning_modelprof.analysis.source.source_lines import source_lines
from lightning_modelprof.analysis.source.worker_stacks import worker_stacks
from lightning_modelprof.analysis.steps.batch_cpu import batch_cpu
from lightning_modelprof.analysis.steps.batches import batch_scaling
from lightning_modelprof.analysis.steps.benchmark import Benchmark, all_ranks, benchmark, exclusions
from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue
from lightning_modelprof.analysis.steps.memory import memory_use
from lightning_modelprof.analysis.steps.phase_times import around_times, own_cost, phase_times
from lightning_modelprof.analysis.steps.slowdown import slowdown
from lightning_modelprof.analysis.steps.step_costs import slow_facts, step_costs
from lightning_modelprof.analysis.steps.validation import validation_split
from lightning_modelprof.analysis.steps.workers import workers_facts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.run.loops import LoopKind, loop_of
from lightning_modelprof.run.records import (
    RankRecord,
    Run,
)
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import BEGINS_EPOCH, MAX_RUN_AHEAD, StepTag, StepTimings
from lightning_modelprof.run.workers import LoaderWorkers
from lightning_modelprof.units import milliseconds

_NOT_INSPECTED: Final = Absent("not measured (set flops=True to inspect some steps)")


def _stepping_share(totals: StepTotals) -> float:
    """Share of the steps in which the optimizer stepped; 1 if there are none."""
    return 1 - totals.num_with(StepTag.NO_OPTIMIZER_STEP) / len(totals) if len(totals) else 1.0


def _num_workers(setup: TrainingSetup | None) -> int | None:
    """Of the first dataloader; ``None`` where that is not known."""
    return setup.loaders[0].num_workers if setup is not None and setup.loaders else None


def analyze(run: Run, facts: Mapping[int, TraceFacts], trace_notes: Mapping[int, str]) -> Analysis:
    """Derive the facts of a run's first rank.

    Args:
        facts: window index → what its trace says, for the windows whose trace was read.
        trace_notes: window index → why there is nothing of it.
    """
    record: RankRecord = run.ranks[0]
    steps, cost = record.steps, record.model_cost
    totals = StepTotals.of(steps) if record.totals is None else record.totals
    figures, hot = benchmark(steps, totals), hot_lines(record.stacks)
    ahead_ns = _device_step_ns_if_cpu_ran_ahead(figures, totals)
    wall_ns = int(totals.whole("duration_ns"))
    waited = None if record.slow is None else record.slow.cpu_wait_share
    costs = step_costs(
        steps,
        record.outside_ns,
        totals,
        cpu_wait_share=waited,
        num_workers=_num_workers(record.setup) or 0,
    )
    cpu = batch_cpu(
        record.cpu,
        num_workers=_num_workers(record.setup),
        usable_cpus=None if record.setup is None else record.setup.usable_cpus,
        cpu_wait_share=waited,
    )
    return Analysis(
        info=run.info,
        rank=record.rank,
        steps=steps,
        num_steps=len(totals),
        num_not_stepping=totals.num_with(StepTag.NO_OPTIMIZER_STEP),
        unfinished_steps=record.unfinished_steps,
        wall_ns=wall_ns,
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
            cost,
            None if figures is None else max(figures.batch_cost_ns.avg, ahead_ns or 0.0),
            _stepping_share(totals.clean()),
        ),
        modules=_NOT_INSPECTED
        if cost is None
        else module_tree(cost, run.info.config.get("ignore_modules") or ()),
        forward=_NOT_INSPECTED if cost is None else forward_facts(cost),
        cost=cost,
        step_costs=costs,
        around=around_times(record.around, record.setup, wall_ns + sum(record.outside_ns.values())),
        validation=validation_split(record.validation, totals, record.outside_ns, record.callbacks),
        setup=record.setup,
        memory=memory_use(record.memory, _epoch_starts(steps, len(totals))),
        rank_skew=rank_skew(run.rank_steps, run.info.world_size),
        slow=slow_facts(record.slow, costs),
        slowdown=slowdown(steps),
        batch_cpu=cpu,
        workers=workers_facts(record.workers, steps=steps, costs=costs, batch_cpu=cpu, setup=record.setup),
        fetch_queue=fetch_queue(steps, costs, batch_cpu=cpu, setup=record.setup, hot=hot),
        batch_scaling=batch_scaling(steps, None if cost is None else cost.batch_sizes),
        repeated=record.repeated,
        own_cost=own_cost(totals, record.outside_ns, costs, record.helper_cpu_ns, record.report_wait_ns),
        call_tree=call_tree(record.stacks),
        hot_lines=hot,
        layer_hooks=layer_hooks(hot),
        logging_calls=logging_calls(hot),
        source_lines=source_lines(None if cost is None else cost.sites, hot),
        worker_stacks=worker_stacks(record.workers),
        notes=(
            *record.notes,
            *_kept_notes(len(steps), len(totals), loop_of(run.info.loop)),
            *_setup_notes(record.setup),
            *_run_ahead_notes(figures, ahead_ns),
            *(() if record.stacks is None else record.stacks.notes),
            *_worker_notes(record.workers or ()),
        ),
    )


def _device_step_ns_if_cpu_ran_ahead(figures: Benchmark | None, totals: StepTotals) -> float | None:
    """Mean device time of a clean step where the CPU only queued work; ``None`` where host time is right."""
    clean = totals.clean()
    num_steps = int(clean.whole("num_on_device").min())
    if figures is None or not num_steps or num_steps < len(clean) / 2:
        return None
    device_ns = int(clean.whole("device_ns").sum()) / num_steps
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
    """The steps in which an epoch begins; none if not all steps were kept, as some would be missing."""
    if len(steps) < num_steps:
        return []
    return [int(step) for step in steps.step[(steps.tags & BEGINS_EPOCH) != 0]]


def _kept_notes(num_kept: int, num_steps: int, loop: LoopKind) -> tuple[str, ...]:
    """Which figures of a long run are of a part of its steps."""
    if num_kept == num_steps:
        return ()
    return (
        f"{num_kept:,} of {num_steps:,} {loop.steps} were saved, evenly spaced. Totals, averages and"
        " extremes cover all of them; percentiles, standard errors and charts only the saved ones.",
    )


def _worker_notes(loaders: tuple[LoaderWorkers, ...]) -> tuple[str, ...]:
    return tuple(
        f"Workers of the {one.kind}{f' {one.loader}' if len(loaders) > 1 else ''}: {note}"
        for one in loaders
        for note in (*one.notes, *(() if one.stacks is None else one.stacks.notes))
    )


def _setup_notes(setup: TrainingSetup | None) -> tuple[str, ...]:
    return () if setup is None else tuple(f"Training setup: {note}." for note in setup.notes)
