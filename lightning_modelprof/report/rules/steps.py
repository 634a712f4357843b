"""Do a few slow steps take much of the time, or do steps become slower and slower?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt, location_at
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.one_step import COST, per_step
from lightning_modelprof.report.rules.base import (
    NOT_A_FIT,
    RuleHelp,
    ShareRule,
    count,
    duration,
    text,
)
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import SPECIAL
from lightning_modelprof.units import milliseconds

_ADVICE: Final = {
    COLLECTOR: "Call gc.collect() and gc.freeze() after the first step, or gc.disable().",
    MACHINE: "Reserve CPUs, or move other jobs off this machine.",
    "dataloader": "Check what slow batches read. With workers, a larger prefetch_factor helps.",
    "checkpoint": "Save less often, or asynchronously.",
    "callbacks": "Make the slow callback cheaper, or run it less often (see the table Callbacks).",
    "logging": "Log less often, or log in another thread.",
}


_USUAL_ADVICE: Final = "See the table Slow steps for each step's cause."


def _advice(analysis: Analysis, cause: str) -> str:
    workers = () if isinstance(analysis.workers, Absent) else analysis.workers
    if cause == "dataloader" and any(not isinstance(one.queue, Absent) for one in workers):
        return (
            "Check what slow batches read. The table Number of workers shows whether prefetch_factor helps."
        )
    return _ADVICE.get(cause, _USUAL_ADVICE)


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


class SlowStepsCost(ShareRule, frozen=True, kw_only=True):
    """What clean steps of more than three times the median take beyond the median, by step of all clean ones.

    A hint without a saving, unless it is mostly the garbage collector, of which no other rule knows, or
    one step of so many takes long in Forward: what is done there every ten steps, say.
    """

    kind: ClassVar[str] = "slow_steps"
    title: ClassVar[str] = "Occasional slow steps"
    healthy: ClassVar[str] = "No extreme step times"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "time that slow clean steps (Slow steps) take above the median, spread over all clean steps. A"
            " hint unless the garbage collector is the main cause, or every Nth step is slow in Forward"
        ),
        levels="3% of the step time",
    )

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        facts, costs = analysis.slow, analysis.benchmark
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        if costs is None:
            return self.not_evaluated("there is no clean step")
        record = facts.record
        if record.why_not_looked_for:
            return self.not_evaluated(record.why_not_looked_for)
        cost_ns = record.excess_ns / costs.num_steps
        share = cost_ns / costs.batch_cost_ns.avg if costs.batch_cost_ns.avg else None
        evidence = [
            count("slow steps", record.count),
            duration("time above the median per step", cost_ns),
        ]
        if not record.count or not self.is_found(share, cost_ns):
            return self.clean(
                f"{record.count or 'No'} clean step{'s' if record.count > 1 else ''} took more than"
                f" {record.factor:g} times the median.",
                evidence,
            )
        clean = [one for one in facts.causes if not one.slow.tags & SPECIAL]
        weights: Counter[str] = Counter()
        for one in clean:
            weights[one.cause] += round(one.excess_ns)
        cause = weights.most_common(1)[0][0]
        worst = max(clean, key=lambda one: one.slow.duration_ns)
        said = cause_words(max((one for one in clean if one.cause == cause), key=lambda one: one.excess_ns))
        # What other phases take is the business of other rules, which have the same saving, and a busy
        # machine is no fault of the training.
        is_ours_alone = cause == COLLECTOR
        every = _period([one.slow.step for one in clean], record.count, costs.num_steps)
        hook = None if analysis.setup is None else analysis.setup.module_hooks.get("training_step")
        if cause == "forward" and every is not None and hook is not None:
            return (
                self.found(
                    f"Every {every} steps, one takes over {record.factor:g} times the median, which costs"
                    f" {COST}. The slowest is step {worst.slow.step}"
                    f" ({milliseconds(worst.slow.duration_ns)}).",
                    f"Look for code in training_step that runs every {every} steps; run it less often.",
                    self.severity(share or 0.0),
                    title=f"Slow forward every {every} steps",
                    saving_ns=cost_ns,
                    places=[hook],
                    evidence=evidence,
                ),
            )
        return (
            self.found(
                f"{record.count} of {costs.num_steps} clean steps took over {record.factor:g} times the"
                f" median, which costs {per_step(cost_ns, costs.batch_cost_ns.avg)}. Main cause: {said}. The"
                f" slowest is step {worst.slow.step} ({milliseconds(worst.slow.duration_ns)}).",
                _advice(analysis, cause),
                Severity.WARNING if is_ours_alone else Severity.INFO,
                saving_ns=cost_ns if is_ours_alone else None,
                evidence=[*evidence, text("main cause", said)],
            ),
        )


_LEAST_GROWTH: Final = 0.15
"""Of an early step."""
_OF_THE_REST: Final = 0.25
"""Other phases grow by no more than so much of what the phase does, or it is the machine or the batches."""
_STEADY: Final = 0.25
"""The second half grows by at least so much of what the first does: what levels off is warm-up."""


class GrowingSteps(ShareRule, frozen=True, kw_only=True):
    """One phase takes longer and longer, by the slope over the whole loop, and the others do not.

    The saving is what the phase takes in the mean beyond its median in the first quarter.

    Caveats:
        Batches that become larger in the loader alone, as for a curriculum, look the same.
    """

    kind: ClassVar[str] = "growing_steps"
    title: ClassVar[str] = "Steps get slower over time"
    healthy: ClassVar[str] = "Steps don't slow down"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "one phase grows steadily over the clean steps (Theil-Sen slope over medians of 20 groups, lower"
            " bound at least 15% of an early step) and the other phases grow by at most a quarter of that."
            " It could save the phase's mean above its first quarter. Batches that get larger in the loader,"
            " as in a curriculum, look the same"
        ),
        of="of the loop",
        where="the slowest line of the phase; in Forward, outside modules",
    )
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.05
    critical: float = 0.20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
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
            return self.clean("Steps don't get slower.")
        return (
            replace(
                self.found(
                    f"{label} takes {milliseconds(seen.early_ns)} per step in the first quarter and"
                    f" {milliseconds(seen.late_ns)} in the last, while other phases stay flat. Averaged over"
                    f" the run, this costs {COST}.",
                    "Use a running sum instead of a list that grows every step.",
                    self.severity(share),
                    saving_ns=seen.excess_ns,
                    places=[*_growing_line(analysis, seen.phase), *_growing_attributes(analysis)],
                    evidence=[
                        duration(f"{label.lower()} per step in first quarter", seen.early_ns),
                        duration(f"{label.lower()} per step in last quarter", seen.late_ns),
                        duration("extra time per step vs. first quarter", seen.excess_ns),
                    ],
                ),
                phases=(seen.phase,),
            ),
        )


def _growing_attributes(analysis: Analysis) -> list[Place]:
    growing = () if isinstance(analysis.memory, Absent) else analysis.memory.record.growing
    return [line.exact() for one in growing for line in one.lines]


def _growing_line(analysis: Analysis, phase: str) -> list[Place]:
    """The line of the user's that takes most of the phase; in Forward, outside of the model's modules."""
    hot, setup = analysis.hot_lines, analysis.setup
    if isinstance(hot, Absent):
        return []
    step = None if setup is None else setup.module_hooks.get("training_step")
    if phase == "forward" and step is not None and step.file is not None and step.line is not None:
        found = hot.inside(step.file, step.line, outside_modules=True)
        return [] if found is None else [location_at(found)]
    return [location_at(line) for line in hot.statements_in((phase,), ())[:1]]
