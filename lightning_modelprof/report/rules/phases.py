"""Does one phase take too much of the step?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Severity
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
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
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.setup import CheckpointSetup, TrainingSetup
from lightning_modelprof.units import milliseconds, percent, time_per_step

_LESS_OFTEN: Final = "Do less in {names}, or run it less often."
_STEP_LESS_OFTEN: Final = "Do less in {names}, or step less often (interval='epoch' or frequency=...)."


def of_phase(
    facts: Facts,
    phase: str,
    what: str,
    do: str,
    *,
    less: str = "",
    at: Iterable[Place] = (),
    evidence: Iterable[Evidence] = (),
    is_in_every_step: bool = True,
) -> Iterator[Found | Passed]:
    """Report the time of one phase, as a share of the steps it is in.

    Args:
        what: the phase as a sentence's subject.
        less: advice where samples name the user's functions, ``{names}``; ``""`` if that makes no difference.
        is_in_every_step: whether every step does this work, so that a few long ones are accidents of the
            machine.
    """
    costs, setup = facts.step_costs, facts.setup
    # Phases around the model are a share of the whole loop.
    means = costs.typical if PHASES[PHASE_INDEX[phase]].every_step else costs.loop
    cost_ns = usual_ns = least_ns = means.phases_ns.get(phase)
    wall_ns = costs.loop.wall_ns
    if is_in_every_step and cost_ns is not None:
        usual_ns, wall_ns = costs.usual_ns(means, phase) or 0.0, costs.usual_wall_ns(means)
        least_ns = costs.least_of(usual_ns, means, phase)
    if cost_ns is None or usual_ns is None or not wall_ns:
        raise NotMeasured(f"{what.lower()} wasn't timed")
    time = duration("time per step", cost_ns)
    yield Passed(what=f"{what} takes {time_per_step(cost_ns)}.", evidence=[time])
    yield Found(
        what=f"{what} takes {COST}.",
        do=_less(facts, phase, less, setup) or do,
        saves_ns=cost_ns,
        judged_ns=usual_ns,
        least_ns=least_ns,
        whole_ns=wall_ns,
        at=at,
        evidence=[time, *evidence],
    )


def _less(facts: Facts, phase: str, less: str, setup: TrainingSetup) -> str:
    hot = facts.get(Facts.hot_lines)
    if hot is None or not less:
        return ""
    lines = hot.statements_in((phase,), [one.package for one in setup.libraries])
    names = ", ".join(dict.fromkeys(line.function for line in lines))
    return less.format(names=names) if names else ""


def hooks_named(setup: TrainingSetup, *names: str) -> list[Place]:
    return [setup.module_hooks[name] for name in names if name in setup.module_hooks]


@rule(
    "checkpoint_share",
    title="Slow checkpoints",
    healthy="Checkpoints are cheap",
    of="loop",
    where="your checkpoint plugin, `ModelCheckpoint(...)` calls",
    bound="overhead_bound",
    sampled_phases=("checkpoint",),
)
def checkpoint_share(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Checkpoint."""
    setup = facts.setup
    settings = "; ".join(map(_settings, setup.checkpoints))
    advice = "Save less often (every_n_train_steps, every_n_epochs), or use save_weights_only=True"
    plugin = setup.checkpoint_io
    own = [] if plugin is None or plugin.is_library else [plugin]
    yield from of_phase(
        facts,
        "checkpoint",
        "Saving checkpoints",
        f"{advice}{f' (currently {settings})' if settings else ''}.",
        at=[*own, *lines_that_call(setup, "ModelCheckpoint")],
        is_in_every_step=False,
    )


def _settings(setup: CheckpointSetup) -> str:
    words = {
        "every_n_train_steps": setup.every_n_train_steps,
        "every_n_epochs": setup.every_n_epochs,
        "save_top_k": setup.save_top_k,
        "save_last": setup.save_last,
        "save_weights_only": setup.save_weights_only,
    }
    arguments = ", ".join(f"{name}={value}" for name, value in words.items() if value is not None)
    return f"ModelCheckpoint({arguments})"


@rule(
    "clip_cost",
    title="Slow gradient clipping",
    healthy="Gradient clipping is cheap",
    where="your hook",
    bound="overhead_bound",
    sampled_phases=("clip",),
)
def clip_cost(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Gradient clipping."""
    setup = facts.setup
    own = hooks_named(setup, "configure_gradient_clipping")
    yield from of_phase(
        facts,
        "clip",
        "Clipping gradients",
        f"Do less in {own[0].function}, or call torch.nn.utils.clip_grad_norm_(foreach=True)."
        if own
        else "Clip by value with gradient_clip_algorithm='value' (may change results).",
        at=own,
        evidence=[count("parameters with gradients", setup.num_trainable_tensors)],
    )


def rarer_logging(setup: TrainingSetup) -> int:
    """Return a cheaper ``log_every_n_steps``: ten times the current one, at least Lightning's default 50."""
    return max(50, 10 * (setup.log_every_n_steps or 1))


@rule(
    "slow_logger",
    title="Slow logger writes",
    healthy="Logger writes are cheap",
    of="loop",
    where="`log_metrics`",
    bound="overhead_bound",
    sampled_phases=("logging",),
)
def slow_logger(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Logging."""
    setup = facts.setup
    every = setup.log_every_n_steps or 1
    names = ", ".join(one.function.rpartition(".")[0] for one in setup.loggers)
    yield from of_phase(
        facts,
        "logging",
        "Writing to loggers",
        f"Set Trainer(log_every_n_steps={rarer_logging(setup)}) (currently {every}), or log in another"
        f" thread. The logger is {names}."
        if names
        else "Compute and log less in self.log(...) calls; no logger uses it.",
        at=sorted(setup.loggers, key=lambda one: one.is_library),
        evidence=[count("log_every_n_steps", setup.log_every_n_steps)],
    )


@rule(
    "slow_lr_scheduler",
    title="Slow learning-rate scheduler",
    healthy="Learning-rate scheduling is cheap",
    where="your hook",
    bound="overhead_bound",
    sampled_phases=("lr_scheduler",),
)
def slow_lr_scheduler(facts: Facts) -> Iterator[Found | Passed]:
    """The phase LR scheduler."""
    own = hooks_named(facts.setup, "lr_scheduler_step")
    yield from of_phase(
        facts,
        "lr_scheduler",
        "Stepping learning-rate schedulers",
        _STEP_LESS_OFTEN.format(names=own[0].function)
        if own
        else "Step the scheduler less often (interval='epoch' or frequency=...).",
        less=_STEP_LESS_OFTEN,
        at=hooks_named(facts.setup, "lr_scheduler_step", "configure_optimizers"),
    )


@rule(
    "slow_module_hook",
    title="Slow LightningModule hooks",
    healthy="LightningModule hooks are cheap",
    of="loop",
    where="all your hooks; the phase doesn't distinguish them",
    bound="overhead_bound",
    sampled_phases=("module_hooks",),
)
def slow_module_hook(facts: Facts) -> Iterator[Found | Passed]:
    """The phase Module hooks."""
    own = [
        place
        for name, place in facts.setup.module_hooks.items()
        if name.startswith("on_")
        and "batch_transfer" not in name
        and (place.package or not place.is_library)  # its own, and those inherited from a library
    ]
    names = ", ".join(one.function for one in own) or "the DataModule's or Strategy's hooks"
    yield from of_phase(
        facts,
        "module_hooks",
        "Running LightningModule hooks",
        _LESS_OFTEN.format(names=names),
        less=_LESS_OFTEN,
        at=own,
        is_in_every_step=False,
    )


@rule(
    "zero_grad_cost",
    title="Slow gradient zeroing",
    healthy="Zeroing gradients is cheap",
    where="the hook",
    bound="overhead_bound",
    phases=("zero_grad",),
)
def zero_grad_cost(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Your `optimizer_zero_grad` hook, by its time; a hint if it passes `set_to_none=False`."""
    # Without such a hook nothing can be saved: Lightning drops the tensors.
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    costs, setup = facts.step_costs, facts.setup
    if setup.manual_optimization:
        raise NotMeasured("part of Forward with manual optimization")
    usual_ns, wall_ns = costs.usual_ns(costs.typical, "zero_grad"), costs.usual_wall_ns(costs.typical)
    cost_ns = costs.typical.phases_ns.get("zero_grad")
    if usual_ns is None or cost_ns is None or not wall_ns:
        raise NotMeasured("zero_grad wasn't timed")
    share, evidence = usual_ns / wall_ns, [duration("time per step", cost_ns)]
    hook = setup.module_hooks.get("optimizer_zero_grad")
    is_slow = limits.is_found(share, usual_ns, costs.least_of(usual_ns, costs.typical, "zero_grad"))
    if hook is None or not (is_slow or setup.keeps_gradients):
        yield Passed(what=f"Zeroing gradients takes {time_per_step(cost_ns)}.", evidence=evidence)
        return
    because = ", because they're filled with zeros." if setup.keeps_gradients else "."
    yield Found(
        what=f"Zeroing gradients takes {COST}{because}",
        do=f"Remove set_to_none=False from {hook.function}."
        if setup.keeps_gradients
        else f"Only call optimizer.zero_grad() in {hook.function}.",
        saves_ns=cost_ns,
        severity=limits.severity(share) if is_slow else Severity.INFO,
        at=[hook],
        evidence=evidence,
    )


@rule(
    "slow_setup",
    title="Slow startup",
    healthy="Startup is fast",
    levels="20% of the total time, and 5 s",
    where="your slowest method",
    points_at=PointsAt.CHANGE,
    has_thresholds=False,
    share=0.20,
    least_ns=5e9,
)
def slow_setup(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Time before the first step (Outside the loop); a hint."""
    # Both thresholds are our choice.
    around = facts.outside_loop
    share, took = around.share(around.before_ns), milliseconds(around.before_ns)
    evidence = [duration("time before the first step", around.before_ns), ratio("share of total time", share)]
    if share <= limits.share or around.before_ns <= limits.least_ns:
        yield Passed(what=f"Startup takes {took}.", evidence=evidence)
        return
    most = max((one for one in around.rows if one.is_before), key=lambda one: one.whole_ns)
    is_gap = most.after_ns > most.total_ns
    yield Found(
        what=f"Startup takes {took} ({percent(share)} of the total time), of which"
        f" {milliseconds(max(most.after_ns, most.total_ns))}"
        f" {'follow' if is_gap else 'are in'} {most.label}.",
        do="Check checkpoint loading, moving the model to the GPU and worker startup."
        if is_gap
        else f"Cache the result of {most.label} on disk, or skip it.",
        severity=Severity.INFO,
        at=[] if is_gap else [most.place],
        evidence=evidence,
    )
