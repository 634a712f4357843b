"""Which callbacks, hooks and logging calls take a noticeable part of training?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
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
from lightning_modelprof.report.advice.lines import PointsAt, location_at
from lightning_modelprof.report.model import Evidence, Severity
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
    NOTHING_SAMPLED,
    Found,
    Limits,
    Passed,
    count,
    duration,
    few_samples,
    lines_that_call,
    ratio,
    rule,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.records import CallbackTime
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.sites import LOG, LOGGER
from lightning_modelprof.run.stacks import StackFrame
from lightning_modelprof.units import milliseconds, percent, time_per_step

_ONCE: Final = {"setup", "teardown", "on_train_start", "on_train_end", "on_fit_start", "on_fit_end"}
"""Hooks that run once, however long training is."""


@rule(
    "slow_callback",
    title="Slow callback",
    healthy="Callbacks are cheap",
    of="loop",
    where="the callback's hooks",
    bound="overhead_bound",
    phases=("callbacks",),
)
def slow_callback(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """All hooks of one callback over the whole loop, except hooks that run once and ModelCheckpoint; a hint
    for progress bars.
    """
    costs, setup = facts.step_costs, facts.get(Facts.setup)
    if costs.loop.phases_ns.get("callbacks") is None:
        raise NotMeasured("callback hooks weren't timed")
    saving = {one.callback for one in setup.checkpoints} if setup is not None else set()
    hooks: dict[str, list[CallbackTime]] = {}
    for one in facts.callbacks:
        is_checkpoint = one.callback in saving or one.callback.startswith("ModelCheckpoint")
        if one.hook not in _ONCE and not is_checkpoint:
            hooks.setdefault(one.callback, []).append(one)
    if not hooks:
        yield Passed(what="No other callback runs during the steps.")
        return
    per_step_ns = {name: sum(one.total_ns for one in of) / facts.num_steps for name, of in hooks.items()}
    yield Passed(what=f"The slowest callback takes {time_per_step(max(per_step_ns.values()))}.")
    for name, times in hooks.items():
        if costs.loop.wall_ns and limits.is_found(per_step_ns[name] / costs.loop.wall_ns, per_step_ns[name]):
            yield _slow_callback(setup, name, times, per_step_ns[name])


def _slow_callback(
    setup: TrainingSetup | None, name: str, times: Sequence[CallbackTime], per_step_ns: float
) -> Found:
    worst = sorted(times, key=lambda one: -one.total_ns)
    callbacks = () if setup is None else setup.callbacks
    places = next((one.hooks for one in callbacks if one.callback == name), {})
    evidence = [duration("time per step", per_step_ns)]
    for one in worst[:3]:
        evidence += [
            duration(f"time per {one.hook} call", one.total_ns / one.calls),
            count(f"{one.hook} calls", one.calls),
        ]
    first = worst[0]
    is_bar = "ProgressBar" in name.partition("{")[0]
    return Found(
        title=f"Slow callback {name}",
        what=f"{name} takes {COST}, most of it in {first.hook} ({first.calls:,} calls,"
        f" {milliseconds(first.total_ns / first.calls)} each).",
        do="Use RichProgressBar(refresh_rate=20) or Trainer(enable_progress_bar=False)."
        if is_bar
        else f"Run {name} less often, or remove it."
        if first.hook in places and places[first.hook].is_library
        else f"Do less in {name}.{first.hook}, or run it less often.",
        saves_ns=per_step_ns,
        severity=Severity.INFO if is_bar else None,
        at=[places.get(one.hook) or Place(function=f"{name}.{one.hook}") for one in worst],
        evidence=evidence,
    )


# Calls found by stack samples. Their time minus two standard errors must be worth a finding. Thresholds are
# half of TraceML's for time in a step but in none of its parts, 10% and 20%.


def sampled(facts: Facts) -> HotLines:
    """Return the stack samples, if the step time is known."""
    _ = facts.step_costs
    hot = facts.get(Facts.hot_lines)
    if hot is None:
        raise NotMeasured(NOTHING_SAMPLED)
    return hot


def of_calls(
    facts: Facts, limits: Limits, calls: FoundCalls, *, what: str, do: str, passed: str
) -> Iterator[Found | Passed]:
    """Report the time of sampled calls; ``passed`` is their subject and verb in a sentence."""
    took_ns, least_ns = _time_of(facts, calls)
    _require_enough_samples(limits, facts, calls)
    yield Passed(what=f"{passed} {time_per_step(took_ns)}.")
    yield Found(
        what=what,
        do=do,
        saves_ns=took_ns,
        least_ns=least_ns,
        at=[location_at(line) for line in calls.lines],
        evidence=_evidence("time per step", took_ns, calls),
    )


def _time_of(facts: Facts, calls: FoundCalls | LoggingCalls) -> tuple[float, float]:
    """Return the calls' time per step, and its lower bound."""
    wall_ns = facts.step_costs.loop.wall_ns
    return calls.share * wall_ns, facts.hot_lines.least_of(calls.share) * wall_ns


def _is_sure(limits: Limits, facts: Facts, calls: FoundCalls | LoggingCalls) -> bool:
    return calls.samples >= limits.least_samples and limits.is_found(calls.share, *_time_of(facts, calls))


def _require_enough_samples(limits: Limits, facts: Facts, calls: FoundCalls | LoggingCalls) -> None:
    took_ns, _ = _time_of(facts, calls)
    if limits.is_found(calls.share, took_ns) and not _is_sure(limits, facts, calls):
        raise NotMeasured(few_samples(calls.samples, took_ns))


def _evidence(label: str, took_ns: float, calls: FoundCalls) -> list[Evidence]:
    return [
        duration(label, took_ns),
        ratio("share of stack samples", calls.share),
        count("stack samples", calls.samples),
    ]


_MOST_NAMES: Final = 3


@rule(
    "slow_layer_hooks",
    title="Slow PyTorch hooks",
    healthy="PyTorch hooks are cheap",
    of="loop",
    where="the hooks' lines",
    bound="host_bound",
    points_at=PointsAt.CHANGE,
    phases=("forward", "backward"),
    warning=0.05,
    critical=0.20,
    least_samples=10,
)
def slow_layer_hooks(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Samples in hooks on modules and tensors (not in a GPU's backward), at least 10; the share minus two
    standard errors counts.
    """
    # Such as forgotten hooks that look for NaN. A hook that changes its layer's output isn't overhead.
    _ = sampled(facts)
    calls = facts.layer_hooks
    names = ", ".join(calls.functions[:_MOST_NAMES])
    yield from of_calls(
        facts,
        limits,
        calls,
        what=f"Hooks on the model's modules or tensors ({names}) take {COST}.",
        do="Remove the hook with handle.remove(), or register it on fewer modules.",
        passed="PyTorch hooks take",
    )


@rule(
    "anomaly_detection",
    title="Anomaly detection is on",
    healthy="Anomaly detection is off",
    of="loop",
    bound="host_bound",
    points_at=PointsAt.CHANGE,
    warning=0.05,
    critical=0.20,
    least_samples=10,
)
def anomaly_detection(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Autograd's anomaly detection is on, by samples in its stack recording. A lower bound, because NaN
    checks aren't included; a hint if there are few samples.
    """
    # Samples also miss code that holds the interpreter: in a model of 110 operators, a 56 ms step took 10 ms
    # without anomaly detection, but the estimate was 27 ms.
    hot, setup = sampled(facts), facts.get(Facts.setup)
    if setup is None or setup.detects_anomaly is None:
        raise NotMeasured("the anomaly detection setting is unknown")
    if not setup.detects_anomaly:
        yield Passed(what="Anomaly detection is off.")
        return
    what = "With anomaly detection, autograd records a stack per operator and checks every gradient for NaN."
    do = "Remove Trainer(detect_anomaly=True) or torch.autograd.set_detect_anomaly(True)."
    calls = hot.found_by(_traceback, ("forward",))
    if not _is_sure(limits, facts, calls):
        yield Found(what=what, do=do, severity=Severity.INFO)
        return
    took_ns, least_ns = _time_of(facts, calls)
    yield Found(
        what=f"{what} The stacks alone take at least {COST}.",
        do=f"{do} Saves at least {milliseconds(took_ns)} per step.",
        saves_ns=took_ns,
        saving_is="at least",
        least_ns=least_ns,
        evidence=_evidence("minimum time per step", took_ns, calls),
    )


def _traceback(path: Sequence[StackFrame]) -> int | None:
    return next((at for at, frame in enumerate(path) if frame.python_module == "traceback"), None)


@rule(
    "profiler_left_on",
    title="Lightning's AdvancedProfiler is on",
    healthy="No Python profiler is active",
    where="the `Trainer(...)` call",
    points_at=PointsAt.NO_TIME,
    has_thresholds=False,
)
def profiler_left_on(facts: Facts) -> Iterator[Found | Passed]:
    """The Trainer has `profiler="advanced"`, which runs cProfile; its overhead is unknown."""
    if facts.setup.profiler != "AdvancedProfiler":
        yield Passed(what="The Trainer uses no profiler that slows down Python.")
        return
    yield Found(
        what="cProfile slows down every Python call, so all timings in this report are inflated.",
        do='Remove profiler="advanced" from the Trainer.',
        severity=Severity.WARNING,
        at=lines_that_call(facts.setup, "Trainer"),
    )


_MOST_LINES: Final = 5
_MOST_LOGGED_NAMES: Final = 4
_WORTH: Final = 0.1
"""Minimum share of the time for a kind of line to get its own advice."""

_HELP: Final = {
    FORWARD: "Call metric.update(...) in the step and metric.compute() once per epoch.",
    UPDATE: "Group metrics in a MetricCollection, or update them once per epoch.",
    COMPUTE: "Compute metrics in on_train_epoch_end, not in every step.",
    RANKS: "Log with on_step=False, on_epoch=True, and create metrics without dist_sync_on_step=True.",
}


@rule(
    "slow_logging_calls",
    title="Slow self.log, logger and metric calls",
    healthy="No slow metric logging found",
    of="loop",
    where="the slowest lines",
    bound="overhead_bound",
    points_at=PointsAt.CHANGE,
    phases=("forward", "module_hooks", "callbacks", "logging"),
    warning=0.10,
    critical=0.20,
    least_samples=10,
)
def slow_logging_calls(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Samples in `self.log`, `self.log_dict`, logger calls (`self.logger.log_metrics`,
    `self.logger.experiment`) and torchmetrics (update, compute, forward, sync) that your code makes anywhere,
    at least 10; the share minus two standard errors counts. `self.log` takes as long when no logger writes
    the value, and direct logger calls write every time, whatever `log_every_n_steps` is.
    """
    # All lines make one finding: thirty calls on thirty lines are one cause. 10% and 20% are TraceML's bands
    # for time in a step but in none of its parts.
    costs, calls, setup = facts.step_costs, facts.logging_calls, facts.get(Facts.setup)
    took_ns, least_ns = _time_of(facts, calls)
    _require_enough_samples(limits, facts, calls)
    in_step_ns = calls.share_in_step * costs.loop.wall_ns
    every = (setup.log_every_n_steps if setup is not None else None) or 1
    is_in_fit = bool(calls.share_in_step) and loop_of(facts.info.loop).is_fit
    yield Found(
        what=f"self.log, logger and metric calls take {COST}. {_where(calls.lines)}",
        do=_action(calls, every if is_in_fit else 0, _step_expression(calls.lines, setup)),
        saves_ns=took_ns,
        least_ns=least_ns,
        verdict_ns=in_step_ns,  # other rules cover other phases, such as Validation
        at=[line.exact() for line in calls.lines[:_MOST_LINES]],
        evidence=[
            duration("time per step", took_ns),
            ratio("share of stack samples", calls.share),
            duration("time inside training steps", in_step_ns),
            count("stack samples", calls.samples),
        ],
        passed=f"self.log, logger and metric calls take {time_per_step(took_ns)}.",
    )


def _where(lines: Sequence[LoggingLine]) -> str:
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
    return f" with {names} in a loop" if call.is_repeated else f" with {names}"


def _step_expression(lines: Sequence[LoggingLine], setup: TrainingSetup | None) -> str:
    callbacks = () if setup is None else setup.callbacks
    classes = {place.function.partition(".")[0] for one in callbacks for place in one.hooks.values()}
    of_callback = bool(lines) and lines[0].function.partition(".")[0] in classes
    return "trainer.global_step" if of_callback else "self.global_step"


def _action(calls: LoggingCalls, every: int, step: str) -> str:
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
    if every <= 1:  # 0 outside a fit's steps
        return per_epoch
    return (
        f"Make a single self.log_dict call every {every} steps (if ({step} + 1) % {every} == 0). {per_epoch}"
    )
