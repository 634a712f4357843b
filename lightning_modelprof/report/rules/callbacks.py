"""Which callback takes a noticeable part of the training?"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.analysis.source.logging_calls import (
    COMPUTE,
    FORWARD,
    RANKS,
    UPDATE,
    LoggingCalls,
    LoggingLine,
)
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Finding, Severity
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOTHING_SAMPLED,
    Rule,
    RuleHelp,
    SampledCallsRule,
    ShareRule,
    count,
    duration,
    few_samples,
    lines_that_call,
    location_of,
    ratio,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.records import CallbackTime
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.sites import LOG, LOGGER
from lightning_modelprof.run.stacks import StackFrame
from lightning_modelprof.units import milliseconds, percent, time_per_step

_ONCE: Final = {"setup", "teardown", "on_train_start", "on_train_end", "on_fit_start", "on_fit_end"}
"""Hooks that run once, however long the training."""


class SlowCallback(ShareRule, frozen=True, kw_only=True):
    """Time in all hooks of one callback, spread over all steps of the loop, is more than a share of it.

    One finding for each such callback. ModelCheckpoint has a rule of its own, and hooks that run once per
    training do not count.
    """

    kind: ClassVar[str] = "slow_callback"
    title: ClassVar[str] = "Slow callback"
    healthy: ClassVar[str] = "Callbacks are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "all hooks of one callback over the whole loop, except hooks that run once and ModelCheckpoint; a"
            " hint for progress bars"
        ),
        of="of the loop",
        where="the callback's hooks",
    )
    phases: ClassVar[tuple[str, ...]] = ("callbacks",)
    bound: ClassVar[str | None] = "overhead_bound"

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if costs.loop.phases_ns.get("callbacks") is None:
            return self.not_evaluated("callback hooks weren't timed")
        saving = {one.callback for one in setup.checkpoints} if setup is not None else set()
        hooks: dict[str, list[CallbackTime]] = {}
        for one in analysis.callbacks:
            is_checkpoint = one.callback in saving or one.callback.startswith("ModelCheckpoint")
            if one.hook not in _ONCE and not is_checkpoint:
                hooks.setdefault(one.callback, []).append(one)
        found = []
        slowest_ns = 0.0
        for name, times in hooks.items():
            per_step_ns = sum(one.total_ns for one in times) / analysis.num_steps
            share = per_step_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
            slowest_ns = max(slowest_ns, per_step_ns)
            if share is not None and self.is_found(share, per_step_ns):
                found.append(self._one(analysis, name, times, per_step_ns, share))
        if not hooks:
            return self.clean("No other callback runs during the steps.")
        return tuple(found) or self.clean(f"The slowest callback takes {time_per_step(slowest_ns)}.")

    def _one(
        self, analysis: Analysis, name: str, times: list[CallbackTime], per_step_ns: float, share: float
    ) -> Finding:
        worst = sorted(times, key=lambda one: -one.total_ns)
        places = {}
        if analysis.setup is not None:
            places = next((one.hooks for one in analysis.setup.callbacks if one.callback == name), {})
        locations = [
            location_of(places[one.hook]) if one.hook in places else Place(function=f"{name}.{one.hook}")
            for one in worst
        ]
        evidence: list[Evidence] = [duration("time per step", per_step_ns)]
        for one in worst[:3]:
            evidence += [
                duration(f"time per {one.hook} call", one.total_ns / one.calls),
                count(f"{one.hook} calls", one.calls),
            ]
        is_bar = "ProgressBar" in name.partition("{")[0]
        return self.found(
            f"{name} takes {COST}, most of it in {worst[0].hook} ({worst[0].calls:,} calls,"
            f" {milliseconds(worst[0].total_ns / worst[0].calls)} each).",
            "Use RichProgressBar(refresh_rate=20) or Trainer(enable_progress_bar=False)."
            if is_bar
            else f"Run {name} less often, or remove it."
            if worst[0].hook in places and places[worst[0].hook].is_library
            else f"Do less in {name}.{worst[0].hook}, or run it less often.",
            Severity.INFO if is_bar else self.severity(share),
            title=f"Slow callback {name}",
            saving_ns=per_step_ns,
            places=locations,
            evidence=evidence,
        )


_MOST_NAMES: Final = 3


class SlowLayerHooks(SampledCallsRule, frozen=True, kw_only=True):
    """Functions that torch calls as hooks of modules, tensors or their gradients.

    Such as are registered to look for NaN or to keep statistics of each layer, and forgotten.

    Caveats:
        A hook may change what the layer computes: then it is no surplus.
    """

    kind: ClassVar[str] = "slow_layer_hooks"
    title: ClassVar[str] = "Slow PyTorch hooks"
    healthy: ClassVar[str] = "PyTorch hooks are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "samples in hooks on modules and tensors (not in a GPU's backward), at least 10; the share minus"
            " two standard errors counts"
        ),
        of="of the loop",
        where="the hooks' lines",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    what: ClassVar[str] = "PyTorch hooks take"

    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:  # noqa: ARG002
        return analysis.layer_hooks

    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:  # noqa: ARG002
        names = ", ".join(calls.functions[:_MOST_NAMES])
        return f"Hooks on the model's modules or tensors ({names}) take {took}."

    def action(self, analysis: Analysis, calls: FoundCalls) -> str:  # noqa: ARG002
        return "Remove the hook with handle.remove(), or register it on fewer modules."


_IS_ON: Final = (
    "With anomaly detection, autograd records a stack per operator and checks every gradient for NaN."
)


class AnomalyDetection(SampledCallsRule, frozen=True, kw_only=True):
    """The mode is on, and samples are where the stacks of operators are written down.

    Caveats:
        More goes than is said: what looking for NaN takes is not told apart, and code that keeps the
        interpreter is sampled too seldom. In a model of 110 operators a step of 56 ms took 10 ms without it,
        where 27 were said.
    """

    kind: ClassVar[str] = "anomaly_detection"
    title: ClassVar[str] = "Anomaly detection is on"
    healthy: ClassVar[str] = "Anomaly detection is off"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "autograd's anomaly detection is on, by samples in its stack recording. A lower bound, because"
            " NaN checks aren't included; a hint if there are few samples"
        ),
        of="of the loop",
    )
    what: ClassVar[str] = "Recording operator stacks takes"
    is_lower_bound: ClassVar[bool] = True

    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent:
        """Python's own formatting of stacks."""
        setup = analysis.setup
        if setup is None or setup.detects_anomaly is None:
            return Absent("the anomaly detection setting is unknown")
        found = hot.found_by(_traceback, ("forward",)) if setup.detects_anomaly else _NOTHING
        return found._replace(lines=())  # of Python's own, which users can't change

    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:  # noqa: ARG002
        return f"{_IS_ON} The stacks alone take at least {took}."

    def action(self, analysis: Analysis, calls: FoundCalls | None = None) -> str:  # noqa: ARG002
        return "Remove Trainer(detect_anomaly=True) or torch.autograd.set_detect_anomaly(True)."

    def too_few(
        self,
        analysis: Analysis,
        calls: FoundCalls,  # noqa: ARG002
        took_ns: float,  # noqa: ARG002
    ) -> tuple[Finding, ...]:
        """A hint where it is on, whatever it takes."""
        if analysis.setup is None or not analysis.setup.detects_anomaly:
            return self.clean("Anomaly detection is off.")
        return (self.found(_IS_ON, self.action(analysis), Severity.INFO),)


class ProfilerLeftOn(Rule, frozen=True, kw_only=True):
    """Lightning's AdvancedProfiler, which runs Python's own profiler around each action.

    Caveats:
        What it takes is not known: it makes every call of a Python function slower, wherever it is.
    """

    kind: ClassVar[str] = "profiler_left_on"
    title: ClassVar[str] = "Lightning's AdvancedProfiler is on"
    healthy: ClassVar[str] = "No Python profiler is active"
    help: ClassVar[RuleHelp] = RuleHelp(
        'the Trainer has `profiler="advanced"`, which runs cProfile; its overhead is unknown',
        where="the `Trainer(...)` call",
    )
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.profiler != "AdvancedProfiler":
            return self.clean("The Trainer uses no profiler that slows down Python.")
        return (
            self.found(
                "cProfile slows down every Python call, so all timings in this report are inflated.",
                'Remove profiler="advanced" from the Trainer.',
                Severity.WARNING,
                places=lines_that_call(setup, "Trainer"),
            ),
        )


_NOTHING: Final = FoundCalls(lines=(), share=0.0, samples=0, functions=())


def _traceback(path: Sequence[StackFrame]) -> int | None:
    return next((at for at, frame in enumerate(path) if frame.python_module == "traceback"), None)


_IN_STEP: Final = "time inside training steps"


_MOST_LINES: Final = 5


_MOST_LOGGED_NAMES: Final = 4


_WORTH: Final = 0.1
"""Lines of a kind with less than this share of the time get no advice of their own."""


_HELP: Final = {
    FORWARD: "Call metric.update(...) in the step and metric.compute() once per epoch.",
    UPDATE: "Group metrics in a MetricCollection, or update them once per epoch.",
    COMPUTE: "Compute metrics in on_train_epoch_end, not in every step.",
    RANKS: "Log with on_step=False, on_epoch=True, and create metrics without dist_sync_on_step=True.",
}


class SlowLoggingCalls(ShareRule, frozen=True, kw_only=True):
    """Samples below ``self.log``, ``self.log_dict``, loggers and metrics that the user's code calls.

    All lines are one finding, as thirty calls on thirty lines are one cause. Where they run does not matter:
    in the step, in functions that it calls, in other hooks, in a validation.

    Attributes:
        least_samples: below such calls.

    Source: 10% and 20% are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        What Lightning does with logged values after the batch is the phase Logging (``slow_logger``). The
        share less two standard errors must be worth a finding. In a phase that another rule speaks of, such
        as Validation, the time does not speak for the verdict a second time. Metrics whose result goes on, as
        into the loss, are the training's own work and don't count; nor do waits for ranks inside a library.
    """

    kind: ClassVar[str] = "slow_logging_calls"
    title: ClassVar[str] = "Slow self.log, logger and metric calls"
    healthy: ClassVar[str] = "No slow metric logging found"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "samples in `self.log`, `self.log_dict`, logger calls (`self.logger.log_metrics`,"
            " `self.logger.experiment`) and torchmetrics (update, compute, forward, sync) that your code"
            " makes anywhere, at least 10; the share minus two standard errors counts. `self.log` takes as"
            " long when no logger writes the value, and direct logger calls write every time, whatever"
            " `log_every_n_steps` is"
        ),
        of="of the loop",
        where="the slowest lines",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "module_hooks", "callbacks", "logging")
    bound: ClassVar[str | None] = "overhead_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.20
    least_samples: int = 10

    def saves_ns(self, finding: Finding) -> float:
        """Only what is in the step's own phases."""
        return next((float(one.value or 0) for one in finding.evidence if one.label == _IN_STEP), 0.0)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, calls, hot = analysis.step_costs, analysis.logging_calls, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(calls, Absent) or isinstance(hot, Absent):
            return self.not_evaluated(calls.reason if isinstance(calls, Absent) else NOTHING_SAMPLED)
        wall_ns = costs.loop.wall_ns
        error = math.sqrt(calls.share * (1 - calls.share) / hot.num_samples)
        least = calls.share - 2 * error
        evidence = [
            duration("time per step", calls.share * wall_ns),
            ratio("share of stack samples", calls.share),
            duration(_IN_STEP, calls.share_in_step * wall_ns),
            count("stack samples", calls.samples),
        ]
        if calls.samples < self.least_samples or not self.is_found(least, least * wall_ns):
            took_ns = calls.share * wall_ns
            if self.is_found(calls.share, took_ns):
                return self.not_evaluated(few_samples(calls.samples, took_ns))
            return self.clean(f"self.log, logger and metric calls take {time_per_step(took_ns)}.", evidence)
        every = (analysis.setup.log_every_n_steps if analysis.setup is not None else None) or 1
        return (
            self.found(
                f"self.log, logger and metric calls take {COST}. {_where(calls.lines)}",
                _action(
                    calls,
                    every if calls.share_in_step and loop_of(analysis.info.loop).is_fit else 0,
                    _step_number(calls.lines, analysis.setup),
                ),
                self.severity(calls.share),
                saving_ns=calls.share * wall_ns,
                places=[_location(line) for line in calls.lines[:_MOST_LINES]],
                evidence=evidence,
            ),
        )


def _location(line: LoggingLine) -> Place:
    return line.exact()


def _where(lines: Sequence[LoggingLine]) -> str:
    """The lines with most of the time, each with its keys."""
    several_files = len({line.file for line in lines}) > 1
    shown = [
        f"line {line.line}{f' of {os.path.basename(line.file)}' * several_files}"  # noqa: PTH119 - no path here
        f"{_names(line)} ({percent(line.share)})"
        for line in lines[:_MOST_LINES]
    ]
    others = len(lines) - len(shown)
    more = f", and {others} more" if others else ""
    return f"Slowest: {', '.join(shown)}{more}."


def _names(line: LoggingLine) -> str:
    call = line.logs
    if call is None:
        return ""
    names = ", ".join(call.names[:_MOST_LOGGED_NAMES])
    left = len(call.names) - _MOST_LOGGED_NAMES
    names += f" and {left} more" if left > 0 else ""
    if not call.is_repeated:
        return f" with {names}"
    return f" with {names} in a loop"


def _step_number(lines: Sequence[LoggingLine], setup: TrainingSetup | None) -> str:
    """How the code of the slowest line gets the number of the step, which a callback doesn't have itself."""
    callbacks = () if setup is None else setup.callbacks
    classes = {place.function.partition(".")[0] for one in callbacks for place in one.hooks.values()}
    of_callback = bool(lines) and lines[0].function.partition(".")[0] in classes
    return "trainer.global_step" if of_callback else "self.global_step"


def _action(calls: LoggingCalls, every: int, step: str) -> str:
    """What helps against what takes at least a tenth of it, most first."""
    shares: dict[str, float] = {}
    for line in calls.lines:
        shares[line.kind] = shares.get(line.kind, 0.0) + line.share
    kinds = sorted(shares, key=lambda kind: -shares[kind])
    told = [_help(kind, every, step) for kind in kinds if shares[kind] >= _WORTH * calls.share]
    given = [(option, line) for line in calls.lines if line.logs is not None for option in line.logs.options]
    if RANKS not in kinds and any(option == "sync_dist" and not line.package for option, line in given):
        told.append("Use sync_dist=True only with on_step=False.")
    if any(option == "prog_bar" for option, _ in given):
        told.append("Use prog_bar=True for at most two values.")
    return " ".join(told)


def _help(kind: str, every: int, step: str) -> str:
    if kind == LOGGER:
        steps = every if every > 1 else 50
        return f"Use self.log_dict, or call the logger only every {steps} steps (if {step} % {steps} == 0)."
    if kind != LOG:
        return _HELP[kind]
    per_epoch = "Log per-epoch values once per epoch, with on_step=False, on_epoch=True."
    if every <= 1:  # 0 outside of a fit's steps
        return per_epoch
    return (
        f"Make a single self.log_dict call every {every} steps (if ({step} + 1) % {every} == 0). {per_epoch}"
    )
