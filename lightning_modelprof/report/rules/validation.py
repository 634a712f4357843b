"""How much of training is validation?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.validation import part_advice
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.phases import hooks_named, of_phase
from lightning_modelprof.report.rules.rule import (
    Found,
    Limits,
    Passed,
    count,
    duration,
    lines_that_call,
    ratio,
    rule,
)
from lightning_modelprof.units import milliseconds, percent


# Validation is wanted work, so its levels are above those of overhead; they are our choice.
@rule(
    "validation_share",
    title="Slow validation",
    healthy="Validation is short",
    of="loop",
    where="the slowest line of that part, else its functions; `validation_step`",
    bound="overhead_bound",
    sampled_phases=("validation",),
    warning=0.15,
    critical=0.50,
    part=0.40,
)
def validation_share(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """The phase Validation. A part that takes at least 40% of it (table Validation) is named with its fix. On
    a GPU, its times on the GPU count; for Dataloader, at most those on the CPU. With workers, the extra wait
    for first batches counts as Dataloader init.
    """
    setup = facts.setup
    batches = "all batches" if setup.num_val_batches is None else f"{setup.num_val_batches} batches"
    for one in of_phase(
        facts,
        "validation",
        "Validation",
        "Validate less with Trainer(val_check_interval=..., check_val_every_n_epoch=...,"
        f" limit_val_batches=...) (currently {setup.val_check_interval:g}, {setup.check_every_n_epochs},"
        f" {batches})."
        if setup.val_check_interval is not None
        else f"Validate less often, or on fewer batches (currently {batches}).",
        at=hooks_named(setup, "validation_step"),
        evidence=[count("batches per validation", setup.num_val_batches)],
        is_in_every_step=False,
    ):
        yield _with_slowest_part(one, facts, limits.part) if isinstance(one, Found) else one


def _with_slowest_part(found: Found, facts: Facts, least_share: float) -> Found:
    if facts.get(Facts.validation) is None:
        return found
    advice = part_advice(facts, least_share)
    if advice is None:
        return replace(found, what=f"{found.what} No part of it stands out (see the table Validation).")
    time, *more = found.evidence
    return replace(
        found,
        title=f"Slow validation, mostly {advice.label}",
        what=f"{found.what} {advice.summary}",
        do=f"{advice.action} Alternatively, {found.do[:1].lower()}{found.do[1:]}",
        at=advice.locations or found.at,
        evidence=[time, *advice.evidence, *more],
    )


@rule(
    "long_sanity_check",
    title="Slow sanity check before training",
    healthy="Sanity check is short",
    of="loop",
    where="the `Trainer(...)` call",
    points_at=PointsAt.CHANGE,
    warning=0.10,
    critical=0.30,
    usual=2,
)
def long_sanity_check(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Time of the validation batches before training (Outside the loop), estimated from validation during
    training if it wasn't measured.
    """
    costs, setup, around = facts.step_costs, facts.get(Facts.setup), facts.get(Facts.outside_loop)
    batches = None if setup is None else setup.num_sanity_batches
    if batches is None:
        raise NotMeasured("the number of sanity check batches is unknown")
    took_ns: float | None = None if around is None else around.sanity_ns
    about = ""
    if took_ns is None:
        split, about = facts.validation, "about "
        if not split.num_batches or not facts.num_steps:
            raise NotMeasured("no validation ran")
        took_ns = (split.total_ns + split.callbacks_ns) / split.num_batches * batches
    cost_ns = took_ns / max(facts.num_steps, 1)
    share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
    evidence = [
        duration("estimated sanity check time" if about else "sanity check time", took_ns),
        ratio("share of the loop", share),
        count("validation batches before training", batches),
    ]
    passed = f"The sanity check has {batches} batches."
    if batches <= limits.usual:
        yield Passed(what=passed, evidence=evidence)
        return
    yield Found(
        what=f"The sanity check runs {batches:,} validation batches, which take {about}"
        f"{milliseconds(took_ns)} ({percent(share)} of the loop).",
        do="Set Trainer(num_sanity_val_steps=2), the default.",
        judged_ns=cost_ns,
        at=lines_that_call(setup, "Trainer"),
        evidence=evidence,
        passed=passed,
    )


@rule(
    "slow_epoch_turns",
    title="Slow epoch boundaries",
    healthy="Epoch boundaries are cheap",
    of="loop",
    bound="overhead_bound",
    points_at=PointsAt.CHANGE,
    sampled_phases=("epoch_turn",),
    is_between_steps=True,
)
def slow_epoch_turns(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Epoch boundary with more than one epoch. Smaller batches and samplers that repeat data change
    the training.
    """
    # A boundary takes the same time however many batches an epoch has.
    costs, _ = facts.step_costs, facts.setup
    num_turns, cost_ns = costs.boundaries.num_all, costs.loop.phases_ns.get("epoch_turn")
    if num_turns < 1:
        raise NotMeasured("there was only one epoch")
    if cost_ns is None or not costs.loop.wall_ns:
        raise NotMeasured("the time between epochs wasn't measured")
    batches = facts.num_steps / (num_turns + 1)
    each = milliseconds(cost_ns * batches)
    yield Found(
        what=f"Lightning takes {each} per epoch boundary, and an epoch has {_batches(batches)}. That costs"
        f" {COST}.",
        do="Make epochs longer, with a sampler such as RandomSampler(data, replacement=True,"
        " num_samples=...), and use max_steps. This changes training.",
        saves_ns=cost_ns,
        evidence=[
            duration("time per epoch boundary", cost_ns * batches),
            duration("time per step", cost_ns),
            count("epochs", num_turns + 1),
        ],
        passed=f"Going from one epoch to the next takes {each}.",
    )


def _batches(number: float) -> str:
    return "one batch" if number == 1 else f"{number:.3g} batches"
