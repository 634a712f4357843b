"""Do a few slow steps take much of the time, or do steps become slower over time?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.slowdown import Slowdown
from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.batches import slow_fetches_advice
from lightning_modelprof.report.advice.lines import PointsAt, location_at
from lightning_modelprof.report.model import Severity
from lightning_modelprof.report.one_step import COST, per_step
from lightning_modelprof.report.rules.rule import (
    NOT_A_FIT,
    Found,
    Limits,
    Passed,
    count,
    duration,
    rule,
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
    "checkpoint": "Save less often, or asynchronously.",
    "callbacks": "Make the slow callback cheaper, or run it less often (see the table Callbacks).",
    "logging": "Log less often, or log in another thread.",
}


_USUAL_ADVICE: Final = "See the table Slow steps for each step's cause."


@rule(
    "slow_steps",
    title="Occasional slow steps",
    healthy="No extreme step times",
    levels="3% of the step time",
)
def slow_steps(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Time that slow clean steps (Slow steps) take above the median, spread over all clean steps. A hint
    unless the garbage collector is the main cause, or every Nth step is slow in Forward.
    """
    slow, clean = facts.slow, facts.benchmark
    record, step_ns = slow.record, clean.batch_cost_ns.avg
    if record.why_not_looked_for:
        raise NotMeasured(record.why_not_looked_for)
    cost_ns = record.excess_ns / clean.num_steps
    share = cost_ns / step_ns if step_ns else 0.0
    factor = f"{record.factor:g} times"
    evidence = [count("slow steps", record.count), duration("time above the median per step", cost_ns)]
    if not record.count or not limits.is_found(share, cost_ns):
        yield Passed(
            what=f"{record.count or 'No'} clean step{'s' if record.count > 1 else ''} took more than {factor}"
            " the median.",
            evidence=evidence,
        )
        return
    causes = [one for one in slow.causes if not one.slow.tags & SPECIAL]
    weights: Counter[str] = Counter()
    for one in causes:
        weights[one.cause] += round(one.excess_ns)
    cause = weights.most_common(1)[0][0]
    said = cause_words(max((one for one in causes if one.cause == cause), key=lambda one: one.excess_ns))
    worst = max(causes, key=lambda one: one.slow.duration_ns).slow
    slowest = f"The slowest is step {worst.step} ({milliseconds(worst.duration_ns)})."
    every, setup = (
        _period([one.slow.step for one in causes], record.count, clean.num_steps),
        facts.get(Facts.setup),
    )
    hook = None if setup is None else setup.module_hooks.get("training_step")
    if cause == "forward" and every is not None and hook is not None:
        yield Found(
            title=f"Slow forward every {every} steps",
            what=f"Every {every} steps, one takes over {factor} the median, which costs {COST}. {slowest}",
            do=f"Look for code in training_step that runs every {every} steps; run it less often.",
            saves_ns=cost_ns,
            severity=limits.severity(share),
            at=[hook],
            evidence=evidence,
        )
        return
    # Other rules cover other phases, with the same saving, and a busy machine isn't training's fault.
    is_ours_alone = cause == COLLECTOR
    yield Found(
        what=f"{record.count} of {clean.num_steps} clean steps took over {factor} the median, which costs"
        f" {per_step(cost_ns, step_ns)}. Main cause: {said}. {slowest}",
        do=_advice(facts, cause),
        saves_ns=cost_ns if is_ours_alone else None,
        severity=Severity.WARNING if is_ours_alone else Severity.INFO,
        evidence=[*evidence, text("main cause", said)],
    )


def _advice(facts: Facts, cause: str) -> str:
    return slow_fetches_advice(facts) if cause == "dataloader" else _ADVICE.get(cause, _USUAL_ADVICE)


def _period(steps: Sequence[int], number: int, num_steps: int) -> int | None:
    """Return the period of slow steps, if regular; ``steps`` may be only some of the ``number``."""
    every = math.gcd(*(later - earlier for earlier, later in itertools.pairwise(sorted(steps))))
    is_regular = len(steps) >= 4 and every > 1 and 0.75 <= number * every / num_steps <= 1.33
    return every if is_regular else None


_LEAST_GROWTH: Final = 0.15
"""Share of an early step."""
_OF_THE_REST: Final = 0.25
"""Maximum growth of other phases, relative to this phase's; beyond it's the machine or the batches."""
_STEADY: Final = 0.25
"""Minimum growth in the second half, relative to the first: warm-up levels off."""


@rule(
    "growing_steps",
    title="Steps get slower over time",
    healthy="Steps don't slow down",
    of="loop",
    where="the slowest line of the phase; in Forward, outside modules",
    points_at=PointsAt.CHANGE,
    warning=0.05,
    critical=0.20,
)
def growing_steps(facts: Facts) -> Iterator[Found | Passed]:
    """One phase grows steadily over the clean steps (Theil-Sen slope over medians of 20 groups, lower bound
    at least 15% of an early step) and the other phases grow by at most a quarter of that. It could save the
    phase's mean above its first quarter. Batches that get larger in the loader, as in a curriculum, look the
    same.
    """
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    _, seen = facts.step_costs, facts.slowdown
    yield Passed(what="Steps don't get slower.")
    if not _is_growth(seen):
        return
    label = PHASES[PHASE_INDEX[seen.phase]].label
    yield Found(
        what=f"{label} takes {milliseconds(seen.early_ns)} per step in the first quarter and"
        f" {milliseconds(seen.late_ns)} in the last, while other phases stay flat. Averaged over the run,"
        f" this costs {COST}.",
        do="Use a running sum instead of a list that grows every step.",
        saves_ns=seen.excess_ns,
        at=[*_slowest_line_of(facts, seen.phase), *_growing_attributes(facts)],
        evidence=[
            duration(f"{label.lower()} per step in first quarter", seen.early_ns),
            duration(f"{label.lower()} per step in last quarter", seen.late_ns),
            duration("extra time per step vs. first quarter", seen.excess_ns),
        ],
        phases=(seen.phase,),
    )


def _is_growth(seen: Slowdown) -> bool:
    first, second = seen.halves_ns
    is_of_phase = seen.rest_ns <= _OF_THE_REST * seen.least_ns
    is_steady = first > 0 and second >= _STEADY * first
    return seen.least_ns >= _LEAST_GROWTH * seen.step_ns and is_of_phase and is_steady


def _growing_attributes(facts: Facts) -> list[Place]:
    memory = facts.get(Facts.memory)
    growing = () if memory is None else memory.record.growing
    return [line.exact() for one in growing for line in one.lines]


def _slowest_line_of(facts: Facts, phase: str) -> list[Place]:
    hot, setup = facts.get(Facts.hot_lines), facts.get(Facts.setup)
    if hot is None:
        return []
    step = None if setup is None else setup.module_hooks.get("training_step")
    if phase == "forward" and step is not None and step.file is not None and step.line is not None:
        found = hot.inside(step.file, step.line, outside_modules=True)
        return [] if found is None else [location_at(found)]
    return [location_at(line) for line in hot.statements_in((phase,), ())[:1]]
