"""Rules that ask one question of one phase: is it more than a share of the step?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.step_costs import PhaseMeans, StepCosts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Finding, Severity
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOT_A_FIT,
    Rule,
    RuleHelp,
    ShareRule,
    count,
    duration,
    lines_that_call,
    ratio,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.setup import CheckpointSetup, TrainingSetup
from lightning_modelprof.units import milliseconds, percent, time_per_step


class PhaseShareRule(ShareRule, frozen=True, kw_only=True):
    """One phase; what to do about it and where is the subclass's."""

    phase: ClassVar[str]
    what: ClassVar[str]
    """The phase as the subject of a sentence."""
    is_in_every_step: ClassVar[bool] = True
    """Whether it is work of every step; a few long ones are then an accident of the machine."""
    bound: ClassVar[str | None] = "overhead_bound"
    less: ClassVar[str] = ""
    """What to do where samples name the user's functions, ``{names}``; ``""`` where that changes nothing."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "phase"):
            cls.sampled_phases = (cls.phase,)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        means = self.means(costs)
        cost_ns = usual_ns = least_ns = means.phases_ns.get(self.phase)
        wall_ns = costs.loop.wall_ns
        if self.is_in_every_step and cost_ns is not None:
            usual_ns, wall_ns = costs.usual_ns(means, self.phase) or 0.0, costs.usual_wall_ns(means)
            least_ns = costs.least_of(usual_ns, means, self.phase)
        if cost_ns is None or usual_ns is None or not wall_ns:
            return self.not_evaluated(f"{self.what.lower()} wasn't timed")
        share = usual_ns / wall_ns
        evidence = [duration("time per step", cost_ns)]
        if not self.is_found(share, usual_ns, least_ns):
            return self.clean(f"{self.what} takes {time_per_step(cost_ns)}.", evidence)
        return (
            self.found(
                f"{self.what} takes {COST}.",
                self._less(analysis.hot_lines, setup) or self.action(setup),
                self.severity(share),
                saving_ns=cost_ns,
                places=self.places(setup),
                evidence=[*evidence, *self.more(setup)],
            ),
        )

    def _less(self, hot: HotLines | Absent, setup: TrainingSetup) -> str:
        if isinstance(hot, Absent) or not self.less:
            return ""
        lines = hot.statements_in(self.sampled_phases, [one.package for one in setup.libraries])
        names = ", ".join(dict.fromkeys(line.function for line in lines))
        return self.less.format(names=names) if names else ""

    def means(self, costs: StepCosts) -> PhaseMeans:
        """The steps that the share is of: for what surrounds the model the whole loop."""
        return costs.typical if PHASES[PHASE_INDEX[self.phase]].every_step else costs.loop

    @abstractmethod
    def action(self, setup: TrainingSetup) -> str: ...

    def places(self, setup: TrainingSetup) -> Sequence[Place]:  # noqa: ARG002  # of subclasses
        return []

    def more(self, setup: TrainingSetup) -> list[Evidence]:  # noqa: ARG002  # of subclasses
        return []


def hooks_named(setup: TrainingSetup, *names: str) -> list[Place]:
    return [setup.module_hooks[name] for name in names if name in setup.module_hooks]


class CheckpointShare(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Checkpoint over the whole loop, also after the last step."""

    kind: ClassVar[str] = "checkpoint_share"
    title: ClassVar[str] = "Slow checkpoints"
    healthy: ClassVar[str] = "Checkpoints are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        "the phase Checkpoint", of="of the loop", where="your checkpoint plugin, `ModelCheckpoint(...)` calls"
    )
    phase: ClassVar[str] = "checkpoint"
    what: ClassVar[str] = "Saving checkpoints"
    is_in_every_step: ClassVar[bool] = False

    def action(self, setup: TrainingSetup) -> str:
        settings = "; ".join(map(_settings, setup.checkpoints))
        advice = "Save less often (every_n_train_steps, every_n_epochs), or use save_weights_only=True"
        return f"{advice}{f' (currently {settings})' if settings else ''}."

    def places(self, setup: TrainingSetup) -> list[Place]:
        """The plugin that writes, if it is the user's own, and where ModelCheckpoint is made."""
        plugin = setup.checkpoint_io
        own = [] if plugin is None or plugin.is_library else [plugin]
        return [*own, *lines_that_call(setup, "ModelCheckpoint")]


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


class ClipCost(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Gradient clipping."""

    kind: ClassVar[str] = "clip_cost"
    title: ClassVar[str] = "Slow gradient clipping"
    healthy: ClassVar[str] = "Gradient clipping is cheap"
    help: ClassVar[RuleHelp] = RuleHelp("the phase Gradient clipping", where="your hook")
    phase: ClassVar[str] = "clip"
    what: ClassVar[str] = "Clipping gradients"

    def action(self, setup: TrainingSetup) -> str:
        own = hooks_named(setup, "configure_gradient_clipping")
        if own:
            return f"Do less in {own[0].function}, or call torch.nn.utils.clip_grad_norm_(foreach=True)."
        return "Clip by value with gradient_clip_algorithm='value' (may change results)."

    def places(self, setup: TrainingSetup) -> list[Place]:
        return hooks_named(setup, "configure_gradient_clipping")

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        return [count("parameters with gradients", setup.num_trainable_tensors)]


def rarer_logging(setup: TrainingSetup) -> int:
    """A cheaper ``log_every_n_steps``: ten times the present one, at least Lightning's own 50."""
    return max(50, 10 * (setup.log_every_n_steps or 1))


class SlowLogger(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Logging: collecting metrics after the batch, and the loggers' ``log_metrics``."""

    kind: ClassVar[str] = "slow_logger"
    title: ClassVar[str] = "Slow logger writes"
    healthy: ClassVar[str] = "Logger writes are cheap"
    help: ClassVar[RuleHelp] = RuleHelp("the phase Logging", of="of the loop", where="`log_metrics`")
    phase: ClassVar[str] = "logging"
    what: ClassVar[str] = "Writing to loggers"

    def action(self, setup: TrainingSetup) -> str:
        every = setup.log_every_n_steps or 1
        names = ", ".join(one.function.rpartition(".")[0] for one in setup.loggers)
        return (
            f"Set Trainer(log_every_n_steps={rarer_logging(setup)}) (currently {every}), or log in another"
            f" thread. The logger is {names}."
            if names
            else "Compute and log less in self.log(...) calls; no logger uses it."
        )

    def places(self, setup: TrainingSetup) -> list[Place]:
        return sorted(setup.loggers, key=lambda one: one.is_library)

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        return [count("log_every_n_steps", setup.log_every_n_steps)]


class SlowLearningRateScheduler(PhaseShareRule, frozen=True, kw_only=True):
    """The phase LR scheduler."""

    kind: ClassVar[str] = "slow_lr_scheduler"
    title: ClassVar[str] = "Slow learning-rate scheduler"
    healthy: ClassVar[str] = "Learning-rate scheduling is cheap"
    help: ClassVar[RuleHelp] = RuleHelp("the phase LR scheduler", where="your hook")
    phase: ClassVar[str] = "lr_scheduler"
    what: ClassVar[str] = "Stepping learning-rate schedulers"
    less: ClassVar[str] = "Do less in {names}, or step less often (interval='epoch' or frequency=...)."

    def action(self, setup: TrainingSetup) -> str:
        own = hooks_named(setup, "lr_scheduler_step")
        if own:
            return f"Do less in {own[0].function}, or step less often (interval='epoch' or frequency=...)."
        return "Step the scheduler less often (interval='epoch' or frequency=...)."

    def places(self, setup: TrainingSetup) -> list[Place]:
        """The module's ``lr_scheduler_step``, and where schedulers are made."""
        return hooks_named(setup, "lr_scheduler_step", "configure_optimizers")


class SlowModuleHook(PhaseShareRule, frozen=True, kw_only=True):
    """The phase Module hooks. The phase has all hooks in one: with several, all of them are named."""

    kind: ClassVar[str] = "slow_module_hook"
    title: ClassVar[str] = "Slow LightningModule hooks"
    healthy: ClassVar[str] = "LightningModule hooks are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        "the phase Module hooks",
        of="of the loop",
        where="all your hooks; the phase doesn't distinguish them",
    )
    phase: ClassVar[str] = "module_hooks"
    what: ClassVar[str] = "Running LightningModule hooks"
    is_in_every_step: ClassVar[bool] = False
    less: ClassVar[str] = "Do less in {names}, or run it less often."

    def action(self, setup: TrainingSetup) -> str:
        names = (
            ", ".join(one.function for one in self.places(setup)) or "the DataModule's or Strategy's hooks"
        )
        return f"Do less in {names}, or run it less often."

    def places(self, setup: TrainingSetup) -> list[Place]:
        """The module's own hooks that run in a step, and those that it has from a library."""
        return [
            place
            for name, place in setup.module_hooks.items()
            if name.startswith("on_")
            and "batch_transfer" not in name
            and (place.package or not place.is_library)
        ]


class ZeroGradCost(ShareRule, frozen=True, kw_only=True):
    """The module's own ``optimizer_zero_grad`` takes more than a share of the step, or keeps the gradients.

    Without such a hook nothing can be saved: Lightning drops the tensors. Whether it keeps them is read from
    its source: ``set_to_none=False``.
    """

    kind: ClassVar[str] = "zero_grad_cost"
    title: ClassVar[str] = "Slow gradient zeroing"
    healthy: ClassVar[str] = "Zeroing gradients is cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        "your `optimizer_zero_grad` hook, by its time; a hint if it passes `set_to_none=False`",
        where="the hook",
    )
    phases: ClassVar[tuple[str, ...]] = ("zero_grad",)
    bound: ClassVar[str | None] = "overhead_bound"

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.manual_optimization:
            return self.not_evaluated("part of Forward with manual optimization")
        usual_ns, wall_ns = costs.usual_ns(costs.typical, "zero_grad"), costs.usual_wall_ns(costs.typical)
        cost_ns = costs.typical.phases_ns.get("zero_grad")
        if usual_ns is None or cost_ns is None or not wall_ns:
            return self.not_evaluated("zero_grad wasn't timed")
        share = usual_ns / wall_ns
        evidence = [duration("time per step", cost_ns)]
        hook = setup.module_hooks.get("optimizer_zero_grad")
        is_slow = self.is_found(share, usual_ns, costs.least_of(usual_ns, costs.typical, "zero_grad"))
        if hook is None or not (is_slow or setup.keeps_gradients):
            return self.clean(f"Zeroing gradients takes {time_per_step(cost_ns)}.", evidence)
        action = (
            f"Remove set_to_none=False from {hook.function}."
            if setup.keeps_gradients
            else f"Only call optimizer.zero_grad() in {hook.function}."
        )
        return (
            self.found(
                f"Zeroing gradients takes {COST}"
                + (", because they're filled with zeros." if setup.keeps_gradients else "."),
                action,
                self.severity(share) if is_slow else Severity.INFO,
                saving_ns=cost_ns,
                places=[hook],
                evidence=evidence,
            ),
        )


class SlowSetup(Rule, frozen=True, kw_only=True):
    """What passes before the first step, over all that was seen of the loop and around it.

    Both thresholds are this package's own choice.

    Attributes:
        share: of the whole from which on it is found.
        least_ns: below which nothing is found, whatever its share.
    """

    kind: ClassVar[str] = "slow_setup"
    title: ClassVar[str] = "Slow startup"
    healthy: ClassVar[str] = "Startup is fast"
    help: ClassVar[RuleHelp] = RuleHelp(
        "time before the first step (Outside the loop); a hint",
        levels="20% of the total time, and 5 s",
        where="your slowest method",
    )
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    share: float = 0.20
    least_ns: float = 5e9

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        around = analysis.around
        if isinstance(around, Absent):
            return self.not_evaluated(around.reason)
        share, took = around.share(around.before_ns), milliseconds(around.before_ns)
        evidence = [
            duration("time before the first step", around.before_ns),
            ratio("share of total time", share),
        ]
        if share <= self.share or around.before_ns <= self.least_ns:
            return self.clean(f"Startup takes {took}.", evidence)
        most = max((one for one in around.rows if one.is_before), key=lambda one: one.whole_ns)
        is_gap = most.after_ns > most.total_ns
        return (
            self.found(
                f"Startup takes {took} ({percent(share)} of the total time), of which"
                f" {milliseconds(max(most.after_ns, most.total_ns))} {'follow' if is_gap else 'are in'}"
                f" {most.label}.",
                "Check checkpoint loading, moving the model to the GPU and worker startup."
                if is_gap
                else f"Cache the result of {most.label} on disk, or skip it.",
                Severity.INFO,
                places=[] if is_gap else [most.place],
                evidence=evidence,
            ),
        )
