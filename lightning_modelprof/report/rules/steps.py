"""Do a few slow steps take much of the time?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.batches import BatchScaling, fixed_by_work
from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE, StepCosts
from lightning_modelprof.report.advice.lines import location_at
from lightning_modelprof.report.model import Evidence, Finding, Location, Severity, Status
from lightning_modelprof.report.rules.base import (
    FLOOR_NS,
    NOT_A_FIT,
    THE_LOOP,
    Rule,
    RuleHelp,
    ShareRule,
    Whole,
    count,
    duration,
    lines_that_call,
    ratio,
    text,
)
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import SPECIAL
from lightning_modelprof.units import milliseconds, percent

_ADVICE: Final = {
    COLLECTOR: "gc.collect() and gc.freeze() after the first step, so that the collector does not walk"
    " through what stays; or gc.disable(), and gc.collect() at the end of each epoch.",
    MACHINE: "Give this job CPUs of its own, or run the others elsewhere.",
    "dataloader": "Some batches take long: look at what they read. With workers, a larger prefetch_factor"
    " evens them out.",
    "checkpoint": "Save less often, or asynchronously.",
    "callbacks": "Table Callbacks says which one; let it do less, or less often.",
    "logging": "Log less often, or hand the work to another thread.",
}


_USUAL_ADVICE: Final = "Table Slow steps says where each one's time went."


def _period(steps: Sequence[int], number: int, num_steps: int) -> int | None:
    """Every how many steps one is slow; ``None`` where there is no such rule.

    Args:
        steps: numbers of slow steps, which may not be all.
        number: of all slow steps.
        num_steps: of all steps.
    """
    every = math.gcd(*(later - earlier for earlier, later in itertools.pairwise(sorted(steps))))
    is_regular = len(steps) >= 4 and every > 1 and 0.75 <= number * every / num_steps <= 1.33
    return every if is_regular else None


@dataclass(frozen=True, kw_only=True)
class SlowStepsCost(ShareRule):
    """What clean steps of more than three times the median take beyond the median, by step of all clean ones.

    A hint without time at stake, unless it is mostly the garbage collector, of which no other rule knows, or
    one step of so many takes long in Forward: what is done there every ten steps, say.
    """

    kind: ClassVar[str] = "slow_steps"
    title: ClassVar[str] = "A few steps are slow"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "what slow clean steps (Slow steps) take beyond the median, by clean step; a hint, unless"
            " it is mostly the garbage collector, or one step of so many takes long in Forward"
        ),
        levels="3 % of the mean clean step",
    )

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where nobody looked."""
        facts, costs = analysis.slow, analysis.benchmark
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        if costs is None:
            return self.not_evaluated("no step is clean")
        record = facts.record
        if record.why_not_looked_for:
            return self.not_evaluated(record.why_not_looked_for)
        cost_ns = record.excess_ns / costs.num_steps
        share = cost_ns / costs.batch_cost_ns.avg if costs.batch_cost_ns.avg else None
        evidence = [
            count("slow steps", record.count),
            duration("beyond the median, by clean step", cost_ns),
            ratio("share of a clean step", share),
        ]
        if not record.count or not self.is_found(share, cost_ns):
            return self.clean(f"{record.count} clean steps were slow.", evidence)
        clean = [one for one in facts.causes if not one.slow.tags & SPECIAL]
        weights: Counter[str] = Counter()
        for one in clean:
            weights[one.cause] += round(one.excess_ns)
        cause = weights.most_common(1)[0][0]
        worst = max(clean, key=lambda one: one.slow.duration_ns)
        said = cause_words(max((one for one in clean if one.cause == cause), key=lambda one: one.excess_ns))
        # What other phases take is the business of other rules, which have the same time at stake, and a busy
        # machine is nobody's fault.
        is_ours_alone = cause == COLLECTOR
        every = _period([one.slow.step for one in clean], record.count, costs.num_steps)
        hook = None if analysis.setup is None else analysis.setup.module_hooks.get("training_step")
        if cause == "forward" and every is not None and hook is not None:
            return (
                self.found(
                    f"Every {every} steps one takes more than {record.factor:g} times the median:"
                    f" {milliseconds(cost_ns)} by step ({percent(share)} of a clean step), in Forward; the"
                    f" worst is step {worst.slow.step} with {milliseconds(worst.slow.duration_ns)}.",
                    "Look for what is done in every so many steps only, under an if, and do it less often.",
                    self.severity(share or 0.0),
                    title=f"Every {every} steps one takes long in the forward",
                    saving_ns=cost_ns,
                    places=[hook],
                    evidence=evidence,
                ),
            )
        return (
            self.found(
                f"{record.count} of {costs.num_steps} clean steps took more than {record.factor:g} times the"
                f" median: {milliseconds(cost_ns)} by step ({percent(share)} of a clean step). Main cause:"
                f" {said}; the worst is step {worst.slow.step} with {milliseconds(worst.slow.duration_ns)}.",
                _ADVICE.get(cause, _USUAL_ADVICE),
                Severity.WARNING if is_ours_alone else Severity.INFO,
                saving_ns=cost_ns if is_ours_alone else None,
                evidence=[*evidence, text("most common cause", said)],
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SmallBatches(Rule):
    """The part of a step that its batch does not change, from steps whose batches have other sizes.

    A line through the times of the steps by their number of samples (Theil-Sen); it is found where the lower
    end of its interval says so. Fetches, and what was not compared, count as if they grew with the batch.
    Where all batches are of one size, the part is what no CPU would need for the FLOPs and bytes of a batch.

    Caveats:
        Beyond the sizes that were seen a step may grow faster: memory and caches are finite. There is no time
        at stake per step, as steps of twice the batch are other steps. Where the sizes of batches were not
        recorded, samples may also differ in length.

    Attributes:
        least_share: of a step, that the fixed part is at least.
        least_accumulated: the same where gradients are accumulated over several batches, so that batches of
            twice the size are the same training.
        tiny: samples in a batch up to which it is always said then.
        floor_ns: a fixed part below which nothing is found.
    """

    kind: ClassVar[str] = "small_batches"
    title: ClassVar[str] = "Most of a step does not depend on its batch"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "on the CPU, one process: the part of a step that is the same for any batch (below), also"
            " at the lower end of its interval. Where all batches have one size: what forward,"
            " backward and optimizer take beyond the FLOPs and bytes of the counted step at 4 GFLOP/s"
            " and 2 GB/s, and no more than 30 us for each operator; a hint"
        ),
        levels="50 % of the median step",
        where="lines that make a `DataLoader`",
    )

    least_share: float = 0.5
    least_accumulated: float = 0.15
    tiny: int = 4
    floor_ns: float = FLOOR_NS

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where no other sizes came, and on a device."""
        [finding] = self._judge(analysis)
        tiny = None if finding.status is Status.FOUND else self._tiny(analysis)
        return (tiny or finding,)

    def _judge(self, analysis: Analysis) -> tuple[Finding, ...]:
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated(
                "the device works on while the host goes on, so times are not the step's"
            )
        if analysis.info.world_size > 1:
            return self.not_evaluated("ranks wait for each other, whatever their batches are")
        found = analysis.batch_scaling
        if isinstance(found, Absent):
            found = _by_work(analysis) or found
        if isinstance(found, Absent):
            return self.not_evaluated(found.reason)
        if not found.num_other:
            return self._judge_work(found, analysis)
        share, least = found.fixed_ns / found.step_ns, found.least_fixed_ns / found.step_ns
        said = (
            f"A step with {found.num_samples:,} {analysis.info.sample_unit} takes"
            f" {milliseconds(found.step_ns)}, of which {milliseconds(found.fixed_ns)} ({percent(share)} of"
            " the median step) would be the same with any batch"
        )
        evidence = _evidence(found)
        if least < self._least(analysis) or found.least_fixed_ns < self.floor_ns:
            return self.clean(f"{said}; at least {milliseconds(found.least_fixed_ns)}.", evidence)
        low, high = found.with_twice(found.most_fixed_ns), found.with_twice(found.least_fixed_ns)
        return (
            self.found(
                f"{said}. With twice the batch the steps of an epoch would take about"
                f" {found.with_twice(found.fixed_ns):.2f} of their time ({low:.2f} to {high:.2f}).",
                _action(found, analysis),
                Severity.INFO,
                places=lines_that_call(analysis.setup, "DataLoader"),
                evidence=evidence,
            ),
        )

    def _tiny(self, analysis: Analysis) -> Finding | None:
        """Gradients are accumulated over batches of so few samples that no processor is used well."""
        every, samples = analysis.info.accumulate_grad_batches, analysis.steps.clean().samples
        usual = int(np.median(samples)) if len(samples) else 0
        if every == 1 or not 0 < usual <= self.tiny:
            return None
        unit = analysis.info.sample_unit
        return self.found(
            f"An optimizer step takes {every} batches of {usual} {unit}.",
            f"Try batches of {2 * usual}, {4 * usual} and more {unit} with fewer of them"
            f" (accumulate_grad_batches={-(-every // 2)}, {-(-every // 4)}, ...), as far as memory allows:"
            " the optimizer steps as often and with as many samples as now. Layers that look at the whole"
            " batch, such as BatchNorm, see another one.",
            Severity.INFO,
            title="Gradients are accumulated over tiny batches",
            places=lines_that_call(analysis.setup, "DataLoader"),
            evidence=[count("in a batch", usual), count("batches of an optimizer step", every)],
        )

    def _least(self, analysis: Analysis) -> float:
        return self.least_accumulated if analysis.info.accumulate_grad_batches > 1 else self.least_share

    def _judge_work(self, found: BatchScaling, analysis: Analysis) -> tuple[Finding, ...]:
        """Where all batches are of one size: of calling operators, which does not depend on it."""
        share = found.fixed_ns / found.step_ns
        said = (
            f"A step with {found.num_samples:,} {analysis.info.sample_unit} takes"
            f" {milliseconds(found.step_ns)}. Its batch is work for at most"
            f" {milliseconds(found.compared_ns - found.fixed_ns)}: at least {milliseconds(found.fixed_ns)}"
            f" ({percent(share)} of the median step) is what calling so many operators takes, whatever the"
            " batch"
        )
        evidence = _evidence(found)
        if share < self._least(analysis) or found.fixed_ns < self.floor_ns:
            return self.clean(f"{said}.", evidence)
        return (
            self.found(
                f"{said}. With twice the batch the steps of an epoch would take at most"
                f" {found.with_twice(found.fixed_ns):.2f} of their time.",
                _action(found, analysis),
                Severity.INFO,
                places=lines_that_call(analysis.setup, "DataLoader"),
                evidence=evidence,
            ),
        )


def _by_work(analysis: Analysis) -> BatchScaling | None:
    """From the FLOPs and bytes of the counted step; ``None`` where they are not all known."""
    cost = analysis.cost
    if cost is None or cost.count is None or cost.sites is None or cost.count.on_fake_tensors:
        return None
    flops = sum(one.flops or 0 for one in cost.count.operators if one.phase != "optimizer")
    lines = [one for one in cost.sites.lines if one.phase != "optimizer"]
    if any(one.unsized for one in lines) or cost.sites.dropped:
        return None
    found = fixed_by_work(
        analysis.steps,
        operators=sum(one.calls for one in cost.sites.lines),
        flops=flops,
        num_bytes=sum(one.num_bytes for one in lines),
    )
    return None if isinstance(found, Absent) else found


def _action(found: BatchScaling, analysis: Analysis) -> str:
    accumulated = analysis.info.accumulate_grad_batches
    try_it = f"Try batches of {2 * found.num_samples:,} {analysis.info.sample_unit}"
    if accumulated > 1 and accumulated % 2 == 0:
        return (
            f"{try_it} with accumulate_grad_batches={accumulated // 2}: the optimizer steps as often and"
            " with as many samples as now. Layers that look at the whole batch, such as BatchNorm, see"
            " another one."
            " A batch takes twice the memory."
        )
    return (
        f"{try_it}. This changes the training: an epoch has half as many optimizer steps, so the learning"
        " rate, its schedule and max_steps have to be chosen anew, and it may take more epochs or end up"
        " worse. Compare by the time to the same validation loss. A batch takes twice the memory."
    )


def _evidence(found: BatchScaling) -> list[Evidence]:
    smallest, largest = found.sizes
    if not found.num_other:
        return [
            duration("fixed part of a step, at least", found.fixed_ns),
            ratio("share of the median step", found.fixed_ns / found.step_ns),
            ratio("an epoch's steps with twice the batch, at most", found.with_twice(found.fixed_ns)),
        ]
    return [
        duration("fixed part of a step", found.fixed_ns),
        duration("at least", found.least_fixed_ns),
        duration("at most", found.most_fixed_ns),
        duration("each further sample", found.per_sample_ns),
        ratio("share of the median step", found.fixed_ns / found.step_ns),
        ratio("an epoch's steps with twice the batch", found.with_twice(found.fixed_ns)),
        count("steps of other sizes", found.num_other),
        count("smallest batch", smallest),
        count("largest batch", largest),
    ]


_LEAST_GROWTH: Final = 0.15
"""Of an early step."""
_OF_THE_REST: Final = 0.25
"""Other phases grow by no more than so much of what the phase does, or it is the machine or the batches."""
_STEADY: Final = 0.25
"""The second half grows by at least so much of what the first does: what levels off is warm-up."""


@dataclass(frozen=True, kw_only=True)
class GrowingSteps(ShareRule):
    """One phase takes longer and longer, by the slope over the whole loop, and the others do not.

    The time at stake is what the phase takes in the mean beyond its median in the first quarter.

    Caveats:
        Batches that become larger in the loader alone, as for a curriculum, look the same.
    """

    kind: ClassVar[str] = "growing_steps"
    title: ClassVar[str] = "Steps get slower and slower"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "one phase grows over the clean steps (Theil-Sen over medians of 20 groups; its lower end"
            " 15 % of an early step), steadily, and the others grow by no more than a quarter of that;"
            " at stake is its mean beyond the first quarter"
        ),
        of="of the loop",
        where="the line that takes most of the phase, in Forward outside of modules",
    )
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.05
    critical: float = 0.20

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where the loop is short."""
        costs, seen = analysis.step_costs, analysis.slowdown
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(seen, Absent):
            return self.not_evaluated(seen.reason)
        wall_ns, first, second = costs.loop.wall_ns, *seen.halves_ns
        share = seen.excess_ns / wall_ns if wall_ns else 0.0
        label = PHASES[PHASE_INDEX[seen.phase]].label
        is_growth = (
            seen.least_ns >= _LEAST_GROWTH * seen.step_ns
            and seen.rest_ns <= _OF_THE_REST * seen.least_ns
            and first > 0
            and second >= _STEADY * first
        )
        if not is_growth or not self.is_found(share, seen.excess_ns):
            return self.clean("Steps do not take longer and longer.")
        return (
            replace(
                self.found(
                    f"{label} takes {milliseconds(seen.early_ns)} in the first quarter of the steps and"
                    f" {milliseconds(seen.late_ns)} in the last, and other phases stay as they are:"
                    f" {milliseconds(seen.excess_ns)} a step ({percent(share)} of {THE_LOOP}) so far.",
                    "Look for a list, history or cache that becomes longer in each step and is gone through"
                    " each time: keep a running sum, or the last few values.",
                    self.severity(share),
                    saving_ns=seen.excess_ns,
                    places=[*_growing_line(analysis, seen.phase), *_growing_attributes(analysis)],
                    evidence=[
                        duration(f"{label.lower()}, first quarter", seen.early_ns),
                        duration(f"{label.lower()}, last quarter", seen.late_ns),
                        duration("by step beyond the first quarter", seen.excess_ns),
                        ratio(f"share of {THE_LOOP}", share),
                    ],
                ),
                phases=(seen.phase,),
            ),
        )


def _growing_attributes(analysis: Analysis) -> list[Location]:
    """The lines that add to what grows."""
    growing = () if isinstance(analysis.memory, Absent) else analysis.memory.record.growing
    return [
        Location(file=line.file, line=line.line, function=line.name, is_exact=True)
        for one in growing
        for line in one.lines
    ]


def _growing_line(analysis: Analysis, phase: str) -> list[Location]:
    """The line of the user's that takes most of the phase; in Forward, outside of the model's modules."""
    hot, setup = analysis.hot_lines, analysis.setup
    if isinstance(hot, Absent):
        return []
    step = None if setup is None else setup.module_hooks.get("training_step")
    if phase == "forward" and step is not None and step.file is not None and step.line is not None:
        found = hot.inside(step.file, step.line, outside_modules=True)
        return [] if found is None else [location_at(found)]
    return [location_at(line) for line in hot.statements_in((phase,), ())[:1]]
