"""Are lines slow due to small operators, tensors made on the CPU, constants or code outside the model?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.module_tree import ModuleCost
from lightning_modelprof.analysis.source.hot_lines import HotLine, HotLines
from lightning_modelprof.analysis.source.line_times import LEAST_OPERATOR_NS, operator_time
from lightning_modelprof.analysis.source.source_lines import SourceLine
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import (
    LEAST_REDUCTIONS,
    MANY_OPERATORS,
    PointsAt,
    advice_for,
    location_at,
    module_pace,
    without_loop,
)
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import Found, Limits, Passed, count, duration, ratio, rule
from lightning_modelprof.report.rules.unused import timed_modules
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.sites import LineCount
from lightning_modelprof.units import milliseconds, time_per_step

# Most of these rules' thresholds, 10% and 20%, are TraceML's bands for time in a step but in none of its
# parts.

_MANY_TIMES: Final = 16
"""From this many operators at a line, or module calls, per call of the surrounding forward, it's a loop.

A stack of layers calls each of them once.
"""

_SMALL_NS: Final = 100_000.0
"""Maximum time of an operator that is mostly overhead.

Torch takes 5 to 10 µs per operator, and Python about as much; the rest is for slow and busy machines.
"""

_LEAST_OWN: Final = 0.25
_LEAST_SAMPLES: Final = 10
_ENOUGH_SAMPLES: Final = 20
_MOST_LINES: Final = 3
_STEP: Final = "training_step"
"""Stands for ``training_step``, which calls modules, in place of a path."""


class _Loop(NamedTuple):
    """Lines of one forward that run operators in a loop.

    Attributes:
        module: module path; ``""`` for the model.
        lines: slowest first.
        operators: operators per step, including those of modules called in the loop.
        calls_modules: whether the loop calls modules.
    """

    module: str
    lines: list[SourceLine]
    operators: int
    calls_modules: bool


@rule(
    "slow_line_in_module",
    title="Slow line in forward()",
    healthy="No slow lines in forward()",
    of="loop",
    where="the slow lines",
    bound="host_bound",
    points_at=PointsAt.CHANGE,
    phases=("forward", "backward"),
    warning=0.10,
    critical=0.20,
    least_samples=10,
)
def slow_line_in_module(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Samples at a line in the `forward` of a module with parameters, or in a function it calls, that creates
    or copies tensors on the CPU; or at all its lines that together run 64 small operators (at most 100 µs
    each) in a loop, at least 16 per call, themselves or in modules called at least 16 times (a quarter of the
    line's operators). At least 10 samples; the share minus two standard errors counts. A loop's share of
    Backward is added. Small operators are mostly overhead, but part of the work remains.
    """
    # Other rules cover training_step's own lines, and modules without parameters.
    costs, hot, lines, _ = facts.step_costs, facts.hot_lines, facts.source_lines, facts.sites
    yield Passed(what="No line in a module's forward() stands out.")
    for place, paths in _forwards(facts, lines).items():
        of_it = [one for one in lines if (one.file, one.function_line) == place]
        makers = [one for one in of_it if one.own_tensors and _first_path_at(one, paths) is not None]
        for one in makers:
            yield from _found_at(_Loop(_first_path_at(one, paths) or "", [one], 0, False), costs, hot, limits)
        loop = _loop(facts.cost, [one for one in of_it if one not in makers], paths)
        if loop is not None:
            yield from _found_at(loop, costs, hot, limits, _backward_ns(loop, lines, costs))


def _found_at(
    loop: _Loop, costs: StepCosts, hot: HotLines, limits: Limits, backward_ns: float = 0.0
) -> Iterator[Found]:
    samples = sum((one.samples or 0) - one.logging_samples for one in loop.lines)
    share = sum((one.share or 0.0) - one.logging_share for one in loop.lines)
    whole = None if loop.operators else _with_calls(loop.lines[0], hot)
    if whole is not None and whole.samples > samples:
        samples, share = whole.samples, whole.time_ns / hot.time_ns
    took_ns = share * costs.loop.wall_ns
    if samples < limits.least_samples or (loop.operators and took_ns > _SMALL_NS * loop.operators):
        return
    first, numbers = loop.lines[0], [str(number) for number in sorted(one.line for one in loop.lines)]
    is_one = len(numbers) == 1
    where = f"Line {numbers[0]}" if is_one else f"Lines {', '.join(numbers[:-1])} and {numbers[-1]}"
    does = (
        f"run{'s' if is_one else ''} {loop.operators} operators per step"
        if loop.operators
        else f"creates or copies {first.own_tensors} tensor{'s' * (first.own_tensors != 1)} of Python"
        " numbers per step"
    )
    sequences = " Replace recurrent cells with nn.LSTM, nn.GRU or nn.RNN." if loop.calls_modules else ""
    of_backward = f", at least {milliseconds(backward_ns)} of it in backward" if backward_ns else ""
    yield Found(
        what=f"{where} of {first.function} in {loop.module or 'the model'} {does}, which costs"
        f" {COST}{of_backward}.",
        do=f"Use operations on whole tensors, or torch.compile.{sequences}"
        if loop.operators
        else "Create constant tensors once with register_buffer, others with torch.arange or torch.full.",
        saves_ns=took_ns + backward_ns,
        least_ns=hot.least_of(share) * costs.loop.wall_ns + backward_ns,
        at=[one.exact(module=loop.module) for one in loop.lines[:_MOST_LINES]],
        evidence=[
            duration("time per step at the line" if is_one else "time per step at these lines", took_ns),
            ratio("share of stack samples", share),
            count("operators per step", sum(one.own_operators for one in loop.lines)),
            count("stack samples", samples),
        ],
    )


def _backward_ns(loop: _Loop, lines: Iterable[SourceLine], costs: StepCosts) -> float:
    """Return a lower bound of a loop's backward time, if most backward operators are the loop's.

    It is the loop's share of all operators in Backward, capped at what the CPU needs for that many of the
    smallest.
    """
    own = sum(one.backward_operators or 0 for one in loop.lines)
    most = sum(one.backward_operators or 0 for one in lines)
    backward_ns = costs.loop.phases_ns.get("backward")
    if not backward_ns or not own or own < 0.5 * most:
        return 0.0
    return min(own / most * backward_ns, own * LEAST_OPERATOR_NS)


def _with_calls(line: SourceLine, hot: HotLines) -> HotLine | None:
    """Return the line with the user functions it calls, unless another line of its function takes more."""
    if line.function_line is None:
        return None
    hottest = hot.inside(line.file, line.function_line, outside_modules=True)
    return hottest if hottest is not None and hottest.line == line.line else None


def _forwards(facts: Facts, lines: Iterable[SourceLine]) -> dict[tuple[str, int], list[str]]:
    """Map where forwards of modules with a parameter, and ``training_step``, are written to their paths.

    A function that only such modules run, such as a method that their forward calls, counts as a forward.
    """
    modules, setup = facts.get(Facts.modules), facts.get(Facts.setup)
    if modules is None:
        return {}
    with_parameters = {module.path for module in modules.modules if module.parameters}
    found: dict[tuple[str, int], list[str]] = {}
    for one in facts.cost.modules:
        place = one.forward
        if one.path in with_parameters and place is not None and place.file and place.line:
            found.setdefault((place.file, place.line), []).append(one.path)
    step = None if setup is None else setup.module_hooks.get("training_step")
    if step is not None and step.file and step.line:
        found.setdefault((step.file, step.line), [_STEP])
    forwards = {(one.forward.file, one.forward.line) for one in facts.cost.modules if one.forward is not None}
    called: dict[tuple[str, int], set[str]] = {}
    for line in lines:
        if line.function_line is not None and "forward" in line.phases:
            called.setdefault((line.file, line.function_line), set()).update(
                path for path, _ in line.by_module
            )
    for function, within in called.items():
        if function not in found and function not in forwards and within and within <= with_parameters - {""}:
            # The other modules are called there.
            found[function] = [path for path in within if _owner(path, [*within - {path}]) is None]
    return found


def _first_path_at(line: SourceLine, paths: list[str]) -> str | None:
    return next((path for path, _ in line.by_module if path in paths), None)


def _loop(cost: ModelCost, lines: list[SourceLine], paths: list[str]) -> _Loop | None:
    times = cost.times
    calls = {} if times is None else {one.path: one.calls / max(times.steps, 1) for one in times.times}
    looped, operators, calls_modules, owner = [], 0, False, ""
    for line in lines:
        own = inside = 0
        for path, number in line.by_module:
            around = _owner(path, paths)
            if around is None:
                continue
            is_itself = path == around
            often = calls.get(path, 0.0) >= _MANY_TIMES * max(1.0, calls.get(around, 1.0))
            if (is_itself and number >= _MANY_TIMES * max(1.0, calls.get(around, 1.0))) or often:
                own, inside = own + number * is_itself, inside + number * (not is_itself)
                owner = owner or around
        if own + inside and own + inside >= _LEAST_OWN * line.own_operators:
            looped.append(line)
            operators += own + inside
            calls_modules = calls_modules or inside > 0
    if operators < MANY_OPERATORS:
        return None
    looped.sort(key=lambda one: -(one.share or 0.0))
    return _Loop("" if owner == _STEP else owner, looped, operators, calls_modules)


def _owner(path: str, paths: list[str]) -> str | None:
    """Return the innermost of these modules around a path; all but the model's are in the step."""
    if paths == [_STEP]:
        return _STEP if path else None
    around = [one for one in paths if one in ("", path) or path.startswith(f"{one}.")]
    return max(around, key=len, default=None)


@rule(
    "constant_work",
    title="Constant result is recomputed every step",
    healthy="No constants recomputed every step",
    of="loop",
    where="the line that calls them",
    points_at=PointsAt.CHANGE,
    phases=("forward", "dataloader", "callbacks", "module_hooks"),
    warning=0.05,
    critical=0.20,
    least_samples=10,
)
def constant_work(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Samples at lines of one function whose operators depend only on sizes and on module tensors that didn't
    change in the inspected step, at least 10; the share minus two standard errors counts. Changes through
    NumPy or `.data`, or in other steps, aren't seen.
    """
    # Such as a graph of fixed positions, a mask, or a frozen tower over fixed prompts. One finding, for the
    # slowest function. Python sizes and numbers also count as constant.
    costs, hot, lines, _ = facts.step_costs, facts.hot_lines, facts.source_lines, facts.sites
    by_function: dict[tuple[str, int | None], list[SourceLine]] = {}
    for one in lines:
        if one.constant_operators and one.constant_operators == one.operators:
            by_function.setdefault((one.file, one.function_line), []).append(one)
    most = max(by_function.values(), key=lambda some: sum(one.share or 0.0 for one in some), default=[])
    share, samples = sum(one.share or 0.0 for one in most), sum(one.samples or 0 for one in most)
    yield Passed(what="No slow line recomputes a constant result.")
    if not most or samples < limits.least_samples:
        return
    most.sort(key=lambda one: -(one.share or 0.0))
    constant = {(one.file, one.line) for some in by_function.values() for one in some}
    others = {(one.file, one.line) for one in lines if one.operators} - constant
    # The outermost calling line below which everything is constant.
    caller = hot.caller_of_all((most[0].file, most[0].line), constant, others)
    name = most[0].function if caller is None or caller.inner is None else caller.inner.function
    took_ns = share * costs.loop.wall_ns
    yield Found(
        title=f"Constant result of {name} is recomputed every step",
        what=f"{name} takes {COST} for a result that doesn't depend on the batch or on trainable parameters.",
        do="Compute it once in __init__ and keep it with register_buffer.",
        saves_ns=took_ns,
        least_ns=hot.least_of(share) * costs.loop.wall_ns,
        at=[one.exact(module=one.module) for one in most[:_MOST_LINES]]
        if caller is None
        else [location_at(caller)],
        evidence=[
            duration("time per step at these lines", took_ns),
            ratio("share of stack samples", share),
            count("operators per step", sum(one.constant_operators for one in most)),
            count("stack samples", samples),
        ],
    )


@rule(
    "slow_custom_module",
    title="Slow module without parameters",
    healthy="Parameter-free modules are fast",
    of_words="of the median step",
    where="the module's `forward`",
    bound="host_bound",
    phases=("forward", "backward"),
    warning=0.10,
    critical=0.20,
)
def slow_custom_module(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Forward latency of your modules that have no parameters and run no matmul, convolution or attention,
    such as a loss, without torch operators over 100 µs each, and without sampled time in logging, in
    gradients and in modules that aren't their children. Part of the work remains.
    """
    # The time is the sum of medians over the timed steps, scaled by Forward in these and in other steps.
    costs, modules = facts.step_costs, timed_modules(facts)
    if modules.root.forward_ns is None or modules.root.forward_flops is None:
        raise NotMeasured("modules weren't timed, or their operators weren't counted")
    written = {record.path: record.forward for record in facts.cost.modules if record.forward is not None}
    pace, slowest_ns, wall_ns = module_pace(facts), 0, costs.typical.median_wall_ns
    for module in _without_layers(modules.modules):
        place = written.get(module.path)
        if place is None or module.forward_ns is None:
            continue
        is_leaf = not any(one.path.startswith(f"{module.path}.") for one in modules.modules)
        others = _share_of_others(facts.get(Facts.hot_lines), place, is_leaf=is_leaf)
        took_ns = round(module.forward_ns * pace * (1 - others))
        if modules.clock != "device":
            took_ns = max(0, took_ns - round(sum(_torch_work(facts, module.path).values())))
        slowest_ns = max(slowest_ns, took_ns)
        if wall_ns and limits.is_found(took_ns / wall_ns, took_ns):
            yield Found(
                title=f"Slow module without parameters: {module.type_name}",
                what=f"The forward of {module.path} ({module.type_name}) takes {COST}, although it has no"
                " parameters and runs no matmul.",
                do=advice_for(facts, place.file, place.line, module.type_name),
                saves_ns=took_ns,
                whole_ns=wall_ns,
                at=[place.exact(module=module.path, is_exact=False)],
                evidence=[duration("forward time per step", took_ns)],
            )
    yield Passed(
        what=f"Your slowest module without parameters takes {time_per_step(slowest_ns)}."
        if slowest_ns
        else "None of your own module classes is parameter-free."
    )


def _share_of_others(hot: HotLines | None, place: Place, *, is_leaf: bool) -> float:
    """Return a forward's share in logging, gradients, and modules that can't be its children."""
    if hot is None or place.file is None or place.line is None:
        return 0.0
    logging = hot.logging_share(place.file, place.line)[0]
    own = hot.share_outside_modules(place.file, place.line, phases=("forward",)) if is_leaf else None
    if own is not None and own[1] >= _ENOUGH_SAMPLES:
        return max(logging, 1 - own[0])
    return logging + hot.gradient_share(place.file, place.line, phases=("forward",))[0]


def _without_layers(modules: Sequence[ModuleCost]) -> list[ModuleCost]:
    """Return the outermost modules below the model without any parameter or contraction inside."""
    found: list[ModuleCost] = []
    for module in modules:
        is_inside = found and module.path.startswith(f"{found[-1].path}.")
        if module.path and not is_inside and module.parameters == 0 and module.forward_flops == 0:
            found.append(module)
    return found


@rule(
    "slow_forward_outside_model",
    title="Slow code in training_step outside the model",
    healthy="training_step adds little overhead",
    of_words="of the median step",
    where="`training_step`",
    bound="host_bound",
    points_at=PointsAt.TIME_OUTSIDE_MODULES,
    phases=("forward", "backward"),
    warning=0.10,
    critical=0.20,
)
def slow_forward_outside_model(facts: Facts) -> Iterator[Found | Passed]:
    """Median of Forward minus the model's forward latency (Modules, scaled up if Forward was faster in the
    timed steps), minus sampled time in `self.log`, loggers and metrics and in gradients that the step
    computes (`torch.autograd.grad`, `backward`, `torch.func`), minus torch operators over 100 µs each (no
    more per line than samples allow). The first quartile is above the threshold too, and the result above the
    median of Loop. Backward of lines that run at least 64 small operators is added, less its spread. Work in
    fewer than three of four steps isn't seen. Lines of long operators that reduce 2 or more parameters one by
    one, such as a penalty on their norm, are a finding of their own, by samples (at least 10) and their part
    of Backward.
    """
    costs, setup, modules = facts.step_costs, facts.setup, timed_modules(facts)
    means, on_device = costs.typical, modules.clock == "device"
    if modules.root.forward_ns is None:
        raise NotMeasured("modules weren't timed" + (f": {modules.notes[0]}" if modules.notes else ""))
    forward_ns = (means.device_ns if on_device else means.medians_ns).get("forward")
    if forward_ns is None:
        raise NotMeasured("Forward and modules were timed on different clocks")
    # The machine may have been faster in the timed steps. Never scale down: module timing takes part of
    # Forward there, and with very many small modules the rest would be too small.
    model_ns = round(modules.root.forward_ns * max(1.0, module_pace(facts)))
    name = loop_of(facts.info.loop).step_hook
    place = setup.module_hooks.get(name) or setup.module
    sampled = _sampled(facts.get(Facts.hot_lines), place)
    logging_ns, gradients_ns = forward_ns * sampled.logging[0], forward_ns * sampled.gradients[0]
    torch_ns = backward_ns = 0.0
    if on_device:
        left_ns = max(0.0, forward_ns - model_ns - logging_ns)
        outside = sampled.gradients[0] + sampled.own
        gradients_ns = left_ns * sampled.gradients[0] / outside if gradients_ns else 0.0
    else:
        torch_ns = sum(_torch_work(facts, "").values())
        backward_ns = _backward_of_loops_ns(facts, modules.root.backward_ns)
        yield from _penalty(facts)
    rest_ns = max(0.0, forward_ns - model_ns - logging_ns - gradients_ns - torch_ns)
    evidence = [
        duration("time outside modules", rest_ns),
        duration("median Forward", forward_ns),
        duration("time in modules", model_ns),
        *([duration("backward of that code", backward_ns)] if backward_ns else ()),
        *([duration("time in logging calls", logging_ns)] if logging_ns else ()),
        *([duration("time in gradients", gradients_ns)] if gradients_ns else ()),
        *([duration("time in long torch operators", torch_ns)] if torch_ns else ()),
    ]
    yield Passed(what=f"Code outside the model takes {time_per_step(rest_ns)}.", evidence=evidence)
    # Steps on a busy machine must not count, so use the lower quartile: three of four steps take at least
    # that.
    error_ns = 2 * math.hypot(sampled.logging[1], sampled.gradients[1]) * forward_ns
    spread_ns = forward_ns - means.quartiles_ns.get("forward", forward_ns)
    least_ns = min(rest_ns - spread_ns - error_ns, sampled.most_ns(forward_ns) - torch_ns)
    spread_ns = means.medians_ns.get("backward", 0.0) - means.quartiles_ns.get("backward", 0.0)
    # Lightning's own code around the step is in Forward too, and slows down with the machine like its loop.
    if least_ns < means.medians_ns.get("other", 0.0):
        return
    of_backward = f", about {milliseconds(backward_ns)} of it in backward" if backward_ns else ""
    file, line = (None, None) if place is None else (place.file, place.line)
    yield Found(
        what=f"Code in {name} outside the model's modules, such as the loss, takes {COST}{of_backward}.",
        do=advice_for(facts, file, line, f"{name} and its callees", outside_modules=True),
        saves_ns=rest_ns + backward_ns,
        least_ns=least_ns + max(0.0, backward_ns - spread_ns),
        whole_ns=means.median_wall_ns,
        at=[place],
        evidence=evidence,
    )


def _penalty(facts: Facts) -> Iterator[Found]:
    """Report the step's own lines that reduce each parameter to a number, if their operators are slow."""
    sites, lines = facts.get(Facts.sites), facts.get(Facts.source_lines)
    hot, costs = facts.get(Facts.hot_lines), facts.step_costs
    if sites is None or lines is None or hot is None:
        return
    long = {(one.file, one.line) for one in _torch_work(facts, "") if one.module == ""}
    found = {
        (one.file, one.line)
        for one in lines
        if one.reductions >= LEAST_REDUCTIONS and (one.file, one.line) in long
    }
    time = operator_time(
        lambda one: float((one.file, one.line) in found), sites=sites, lines=lines, hot=hot, costs=costs
    )
    if not time.lines or time.samples < _LEAST_SAMPLES:
        return
    of_backward = f", {milliseconds(time.backward_ns)} of it in backward" if time.backward_ns else ""
    yield Found(
        title="A loop reduces parameters one by one",
        what=f"A loop over the parameters in {time.lines[0].function} takes about {COST}{of_backward}.",
        do=without_loop(time.lines[0]),
        saves_ns=time.whole_ns,
        least_ns=time.least_ns,
        whole_ns=costs.loop.wall_ns,
        verdict_ns=0.0,  # slow torch operators aren't slow Python
        at=[one.exact() for one in time.lines[:_MOST_LINES]],
        evidence=[
            duration("forward time per step", time.forward_ns),
            duration("backward time per step", time.backward_ns),
            count("parameters", sum(one.reductions for one in time.lines)),
            count("stack samples", time.samples),
        ],
    )


def _lines_of(facts: Facts, module: str) -> list[LineCount]:
    """Return the inspected lines of a module and its submodules; ``""`` for code outside modules."""
    sites = facts.get(Facts.sites)
    lines = () if sites is None else sites.lines
    inside = f"{module}." if module else ""
    return [one for one in lines if one.module == module or (inside and one.module.startswith(inside))]


def _torch_work(facts: Facts, module: str) -> dict[LineCount, float]:
    """Return a module's Forward lines with slow operators, where torch works and no Python loop is to blame.

    Operators were timed in one step, possibly with a pause in between, so all steps' samples cap each line's
    time.
    """
    hot = facts.get(Facts.hot_lines)
    most = None if hot is None else hot.most_at_lines("forward")
    forward_ns = facts.step_costs.typical.medians_ns.get("forward")
    found = {}
    for one in _lines_of(facts, module):
        took_ns = float(one.took_ns)
        if most is not None and forward_ns is not None:
            took_ns = min(took_ns, forward_ns * most(one.file, one.line))
        if one.phase == "forward" and took_ns > _SMALL_NS * max(1, one.own_calls):
            found[one] = took_ns
    return found


def _backward_of_loops_ns(facts: Facts, model_ns: int | None) -> float:
    """Return the backward time of the step's own lines that run many small operators.

    Operators count with their time and call overhead; what the model leaves of Backward is the cap.
    """
    backward_ns, sites = facts.step_costs.typical.medians_ns.get("backward"), facts.get(Facts.sites)
    if not backward_ns or sites is None:
        return 0.0
    own, long = _lines_of(facts, ""), _torch_work(facts, "")
    loops = {
        (one.file, one.line)
        for one in own
        if one.phase == "forward" and one.own_calls >= MANY_OPERATORS and one not in long
    }

    def cost_ns(lines: Iterable[LineCount]) -> int:
        return sum(
            one.took_ns + LEAST_OPERATOR_NS * one.own_calls for one in lines if one.phase == "backward"
        )

    whole_ns = cost_ns(sites.lines)
    of_loops_ns = cost_ns(one for one in own if one.file is not None and (one.file, one.line) in loops)
    taken_ns = backward_ns * of_loops_ns / whole_ns if whole_ns else 0.0
    return taken_ns if model_ns is None else min(taken_ns, max(0.0, backward_ns - model_ns))


class _Sampled(NamedTuple):
    """Sampled shares of a function's time in Forward; with manual optimization that includes other phases.

    Attributes:
        logging: share in ``self.log`` and metrics, a separate cause, and its standard error.
        gradients: share in gradients that it computes itself, and its standard error.
        own: share in its own code: no modules, gradients or logging.
        samples: number of the function's samples.
    """

    logging: tuple[float, float] = (0.0, 0.0)
    gradients: tuple[float, float] = (0.0, 0.0)
    own: float = 0.0
    samples: int = 0

    def most_ns(self, forward_ns: float) -> float:
        if self.samples < _ENOUGH_SAMPLES:
            return math.inf
        return forward_ns * (self.own + 2 * math.sqrt(self.own * (1 - self.own) / self.samples))


def _sampled(hot: HotLines | None, place: Place | None) -> _Sampled:
    if hot is None or place is None or place.file is None or place.line is None:
        return _Sampled()
    at, phases = (place.file, place.line), ("forward",)
    own, samples = hot.share_outside_modules(*at, phases=phases) or (0.0, 0)
    return _Sampled(
        logging=hot.logging_share(*at, phases=phases, outside_modules=True),
        gradients=hot.gradient_share(*at, phases=phases),
        own=own,
        samples=samples,
    )
