"""Would larger batches use the processor better?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from lightning_modelprof.analysis.facts import NOT_INSPECTED, Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.batches import BatchScaling, fixed_by_work
from lightning_modelprof.report.model import Evidence, Severity
from lightning_modelprof.report.rules.rule import (
    FLOOR_NS,
    NOT_A_FIT,
    Found,
    Limits,
    Passed,
    count,
    duration,
    lines_that_call,
    ratio,
    rule,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import milliseconds, percent


@rule(
    "small_batches",
    title="Fixed per-step overhead dominates",
    healthy="Batches are large enough",
    levels="50% of the median step",
    where="`DataLoader(...)` calls",
    has_thresholds=False,
    least_share=0.5,
    least_accumulated=0.15,
    tiny=4,
    floor_ns=FLOOR_NS,
)
def small_batches(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """CPU training in one process: the part of the step that doesn't depend on the batch size, by a line
    through step times and sizes, also at the lower bound of its interval. If all batches have one size, it is
    the time of forward, backward and optimizer above the counted step's FLOPs and bytes at 4 GFLOP/s and 2
    GB/s, at most 30 µs per operator, without a promise. A hint, since larger batches change the training:
    learning rate, its schedule and max_steps need retuning.
    """
    # No saving per step: steps with twice the batch aren't the same steps. Beyond the observed sizes a step
    # may grow faster, and without recorded sizes, samples may differ in length too.
    every, samples = facts.info.accumulate_grad_batches, facts.steps.clean().samples
    usual = int(np.median(samples)) if len(samples) else 0
    is_tiny = every > 1 and 0 < usual <= limits.tiny
    found: Found | Passed | None = None
    try:
        found = _fixed_part(facts, limits)
    except NotMeasured:
        if not is_tiny:
            raise
    if found is None or (is_tiny and not (isinstance(found, Found) and found.do)):
        found = _tiny_batches(facts, usual, is_costly=isinstance(found, Found))
    yield found


def _tiny_batches(facts: Facts, usual: int, *, is_costly: bool) -> Found:
    """``is_costly``: whether a large part of the step doesn't depend on the batch."""
    every, unit = facts.info.accumulate_grad_batches, facts.info.sample_unit
    return _found(
        facts,
        f"Each optimizer step accumulates {every} batches of {usual} {unit}.",
        f"Try batches of {2 * usual} {unit} or more, with accumulate_grad_batches={-(-every // 2)} or less."
        " BatchNorm then sees larger batches (may change results).",
        [count(f"batch size ({unit})", usual), count("batches per optimizer step", every)],
        title="Gradients are accumulated over tiny batches",
        severity=Severity.WARNING if is_costly else Severity.INFO,
    )


def _found(
    facts: Facts,
    what: str,
    do: str,
    evidence: list[Evidence],
    *,
    title: str = "",
    severity: Severity = Severity.INFO,
) -> Found:
    at = lines_that_call(facts.get(Facts.setup), "DataLoader")
    return Found(what=what, do=do, title=title, severity=severity, at=at, evidence=evidence)


def _fixed_part(facts: Facts, limits: Limits) -> Found | Passed:
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    if not facts.is_on_cpu:
        raise NotMeasured("only checked for CPU training")
    if facts.info.world_size > 1:
        raise NotMeasured("only checked with one rank")
    every = facts.info.accumulate_grad_batches
    # With gradient accumulation, twice the batch size can mean the same training.
    least_share = limits.least_accumulated if every > 1 else limits.least_share
    by_size = facts.get(Facts.batch_scaling)
    if by_size is not None:
        return _by_size(facts, by_size, least_share, limits.floor_ns)
    return _by_work(facts, _scaling_by_work(facts), least_share, limits.floor_ns)


def _by_size(facts: Facts, seen: BatchScaling, least_share: float, floor_ns: float) -> Found | Passed:
    said = (
        f"About {percent(seen.fixed_ns / seen.step_ns)} of a step with {seen.num_samples:,}"
        f" {facts.info.sample_unit} ({milliseconds(seen.fixed_ns)}) doesn't depend on the batch size"
    )
    smallest, largest = seen.sizes
    evidence = [
        duration("fixed time per step", seen.fixed_ns),
        ratio("fixed share of the median step", seen.fixed_ns / seen.step_ns),
        duration("time per additional sample", seen.per_sample_ns),
        ratio("epoch time with twice the batch size", seen.with_twice(seen.fixed_ns)),
        ratio("maximum epoch time with twice the batch size", seen.most_with_twice),
        duration("lower bound of fixed time per step", seen.least_fixed_ns),
        duration("upper bound of fixed time per step", seen.most_fixed_ns),
        count("steps with other batch sizes", seen.num_other),
        count("smallest batch", smallest),
        count("largest batch", largest),
    ]
    if seen.least_fixed_ns / seen.step_ns < least_share or seen.least_fixed_ns < floor_ns:
        return Passed(what=f"{said} (at least {milliseconds(seen.least_fixed_ns)}).", evidence=evidence)
    gains = seen.most_with_twice < 1
    promise = (
        f" With twice the batch size, an epoch takes about {percent(seen.with_twice(seen.fixed_ns))} of its"
        f" time (at most {percent(seen.most_with_twice)})."
    )
    return _found(
        facts, f"{said}.{promise if gains else ''}", _action(facts, seen) if gains else "", evidence
    )


def _action(facts: Facts, seen: BatchScaling) -> str:
    every = facts.info.accumulate_grad_batches
    try_it = f"Try batches of {2 * seen.num_samples:,} {facts.info.sample_unit}"
    if every > 1 and every % 2 == 0:
        return (
            f"{try_it} with accumulate_grad_batches={every // 2}. BatchNorm then sees larger batches"
            " (may change results)."
        )
    return f"{try_it}. This changes training; learning rate, its schedule and max_steps need retuning."


def _scaling_by_work(facts: Facts) -> BatchScaling:
    """Estimate fixed operator call time, from the counted step's FLOPs and bytes."""
    with suppress(NotMeasured):
        counted, sites = facts.cost.count, facts.sites
        lines = [one for one in sites.lines if one.phase != "optimizer"]
        are_known = not (any(one.unsized for one in lines) or sites.dropped)
        if counted is None or counted.on_fake_tensors or not are_known:
            raise NotMeasured(NOT_INSPECTED)
        return fixed_by_work(
            facts.steps,
            operators=sum(one.calls for one in sites.lines),
            flops=sum(one.flops or 0 for one in counted.operators if one.phase != "optimizer"),
            num_bytes=sum(one.num_bytes for one in lines),
        )
    return facts.batch_scaling  # raises with the reason


def _by_work(facts: Facts, seen: BatchScaling, least_share: float, floor_ns: float) -> Found | Passed:
    share = seen.fixed_ns / seen.step_ns
    overhead = f"{percent(share)} of each step ({milliseconds(seen.fixed_ns)})"
    evidence = [
        duration("minimum fixed time per step", seen.fixed_ns),
        ratio("fixed share of the median step", share),
    ]
    if share < least_share or seen.fixed_ns < floor_ns:
        return Passed(what=f"Operator calls take at least {overhead}.", evidence=evidence)
    needed = milliseconds(seen.compared_ns - seen.fixed_ns)
    return _found(
        facts,
        f"Operator calls take at least {overhead}; the FLOPs need at most {needed}.",
        "",
        evidence,
        title="Operator call overhead dominates",
    )
