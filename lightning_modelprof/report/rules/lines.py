"""Does a line in a module's forward take long for many small operators or tensors made on the host?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Final, NamedTuple

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.module_tree import ModuleCost
from lightning_modelprof.analysis.source.hot_lines import HotLine, HotLines
from lightning_modelprof.analysis.source.line_times import LEAST_OPERATOR_NS, operator_time
from lightning_modelprof.analysis.source.source_lines import SourceLine
from lightning_modelprof.analysis.steps.step_costs import PhaseMeans, StepCosts
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
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    RuleHelp,
    ShareRule,
    count,
    duration,
    ratio,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.sites import LineCount
from lightning_modelprof.units import milliseconds, time_per_step

_LEAST_OWN: Final = 0.25


_MANY_TIMES: Final = 16
"""Operators at a line, or calls of a module, in one call of the forward around it: so many are a loop.

A stack of layers calls each of them once."""


_SMALL_NS: Final = 100_000.0
"""What an operator takes at most that is mostly overhead.

Torch takes 5 to 10 us for one, Python around it as much; the rest is for slow and busy machines."""


_MOST_LINES: Final = 3


_STEP: Final = "training_step"
"""In the place of a path: ``training_step``, in which modules are called."""


class _Loop(NamedTuple):
    """Lines of one forward that run operators again and again.

    Attributes:
        module: path of the module; ``""`` for the model.
        lines: most time first.
        operators: that they run in a step, with those of modules that they call again and again.
        calls_modules: whether there are such.
    """

    module: str
    lines: list[SourceLine]
    operators: int
    calls_modules: bool


class SlowLineInModule(ShareRule, frozen=True, kw_only=True):
    """Lines in the ``forward`` of a module with parameters, by their share of the samples.

    Only lines that make tensors on the host or copy them in every step; and all lines together that run at
    least 64 small operators in a loop: each at least 16 for a call of the forward, themselves or in modules
    that they call at least 16 times, which are at least a quarter of all at the line. What
    ``training_step`` runs itself, and modules without parameters, other rules are about.

    Attributes:
        least_samples: on the lines.

    Source: 10% and 20% are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        The saving is that of the host at these lines, and of a loop at least what backward takes for
        it; what they compute has to be computed still.
        The share less two standard errors must be worth a finding.
    """

    kind: ClassVar[str] = "slow_line_in_module"
    title: ClassVar[str] = "Slow line in forward()"
    healthy: ClassVar[str] = "No slow lines in forward()"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "samples at a line in the `forward` of a module with parameters, or in a function it calls, that"
            " creates or copies tensors on the CPU; or at all its lines that together run 64 small operators"
            " (at most 100 µs each) in a loop, at least 16 per call, themselves or in modules called at"
            " least 16 times (a quarter of the line's operators). At least 10 samples; the share minus two"
            " standard errors counts. A loop's share of Backward is added. Small operators are mostly"
            " overhead, but part of the work remains"
        ),
        of="of the loop",
        where="the slow lines",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    bound: ClassVar[str | None] = "host_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.20
    least_samples: int = 10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each line or loop."""
        costs, lines, hot = analysis.step_costs, analysis.source_lines, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(hot, Absent):
            return self.not_evaluated(hot.reason)
        if isinstance(lines, Absent) or analysis.cost is None or analysis.cost.sites is None:
            note = "" if analysis.cost is None else analysis.cost.sites_note
            return self.not_evaluated(note or "no step was inspected (set flops=True)")
        found = []
        for place, paths in _forwards(analysis, lines).items():
            of_it = [one for one in lines if (one.file, one.function_line) == place]
            makers = [one for one in of_it if one.own_tensors and _path_at(one, paths) is not None]
            candidates = [_Loop(_path_at(one, paths) or "", [one], 0, False) for one in makers]
            loop = _loop(analysis, [one for one in of_it if one not in makers], paths)
            candidates += [] if loop is None else [loop]
            judged = (
                self._judge(one, costs, hot, _backward_ns(one, lines, costs) if one.operators else 0.0)
                for one in candidates
            )
            found += [one for one in judged if one is not None]
        return tuple(found) or self.clean("No line in a module's forward() stands out.")

    def _judge(
        self, loop: _Loop, costs: StepCosts, hot: HotLines, backward_ns: float = 0.0
    ) -> Finding | None:
        samples = sum((one.samples or 0) - one.logging_samples for one in loop.lines)
        share = sum((one.share or 0.0) - one.logging_share for one in loop.lines)
        whole = None if loop.operators else _with_calls(loop.lines[0], hot)
        if whole is not None and whole.samples > samples:
            samples, share = whole.samples, whole.time_ns / hot.time_ns
        least = share - 2 * math.sqrt(max(0.0, share * (1 - share)) / hot.num_samples)
        took_ns, wall_ns = share * costs.loop.wall_ns, costs.loop.wall_ns
        least_ns = least * wall_ns + backward_ns
        if samples < self.least_samples or not self.is_found(least_ns / wall_ns, least_ns):
            return None
        if loop.operators and took_ns > _SMALL_NS * loop.operators:
            return None
        first, numbers = (
            loop.lines[0],
            [str(one.line) for one in sorted(loop.lines, key=lambda one: one.line)],
        )
        is_one = len(numbers) == 1
        where = f"Line {numbers[0]}" if is_one else f"Lines {', '.join(numbers[:-1])} and {numbers[-1]}"
        does = (
            f"run{'s' if is_one else ''} {loop.operators} operators per step"
            if loop.operators
            else f"creates or copies {first.own_tensors} tensor{'s' * (first.own_tensors != 1)} of Python"
            " numbers per step"
        )
        sequences = " Replace recurrent cells with nn.LSTM, nn.GRU or nn.RNN."
        return self.found(
            f"{where} of {first.function} in {loop.module or 'the model'} {does}, which costs {COST}"
            + (f", at least {milliseconds(backward_ns)} of it in backward." if backward_ns else "."),
            f"Use operations on whole tensors, or torch.compile.{sequences if loop.calls_modules else ''}"
            if loop.operators
            else "Create constant tensors once with register_buffer, others with torch.arange or torch.full.",
            self.severity((took_ns + backward_ns) / wall_ns),
            saving_ns=took_ns + backward_ns,
            places=[one.exact(module=loop.module) for one in loop.lines[:_MOST_LINES]],
            evidence=[
                duration("time per step at the line" if is_one else "time per step at these lines", took_ns),
                ratio("share of stack samples", share),
                count("operators per step", sum(one.own_operators for one in loop.lines)),
                count("stack samples", samples),
            ],
        )


def _backward_ns(loop: _Loop, lines: Iterable[SourceLine], costs: StepCosts) -> float:
    """At least what backward takes for the operators of a loop, if most of its operators are for them.

    Its part of all operators in Backward, but no more than the host needs for so many of the smallest.
    """
    own = sum(one.backward_operators or 0 for one in loop.lines)
    most = sum(one.backward_operators or 0 for one in lines)
    backward_ns = costs.loop.phases_ns.get("backward")
    if not backward_ns or not own or own < 0.5 * most:
        return 0.0
    return min(own / most * backward_ns, own * LEAST_OPERATOR_NS)


def _with_calls(line: SourceLine, hot: HotLines) -> HotLine | None:
    """A line with the functions of the user's that it calls, which make what it makes; not with modules.

    ``None`` where another line of the function takes more.
    """
    if line.function_line is None:
        return None
    hottest = hot.inside(line.file, line.function_line, outside_modules=True)
    return hottest if hottest is not None and hottest.line == line.line else None


def _forwards(analysis: Analysis, lines: Iterable[SourceLine]) -> dict[tuple[str, int], list[str]]:
    """Where forwards of modules with a parameter are written, and ``training_step``: place → paths.

    A function that only one of these modules runs, as a method that its forward calls, is as good as that.
    """
    if analysis.cost is None or isinstance(analysis.modules, Absent):
        return {}
    with_parameters = {module.path for module in analysis.modules.modules if module.parameters}
    found: dict[tuple[str, int], list[str]] = {}
    for one in analysis.cost.modules:
        place = one.forward
        if one.path in with_parameters and place is not None and place.file and place.line:
            found.setdefault((place.file, place.line), []).append(one.path)
    step = None if analysis.setup is None else analysis.setup.module_hooks.get("training_step")
    if step is not None and step.file and step.line:
        found.setdefault((step.file, step.line), [_STEP])
    forwards = {
        (one.forward.file, one.forward.line) for one in analysis.cost.modules if one.forward is not None
    }
    called: dict[tuple[str, int], set[str]] = {}
    for line in lines:
        if line.function_line is not None and "forward" in line.phases:
            called.setdefault((line.file, line.function_line), set()).update(
                path for path, _ in line.by_module
            )
    for function, within in called.items():
        if function not in found and function not in forwards and within and within <= with_parameters - {""}:
            # The others are called there.
            found[function] = [path for path in within if _owner(path, [*within - {path}]) is None]
    return found


def _path_at(line: SourceLine, paths: list[str]) -> str | None:
    """The first of these modules that ran something at a line itself."""
    return next((path for path, _ in line.by_module if path in paths), None)


def _loop(analysis: Analysis, lines: list[SourceLine], paths: list[str]) -> _Loop | None:
    """The lines of one forward that run operators again and again, if these are many."""
    times = None if analysis.cost is None else analysis.cost.times
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
    """The innermost of these modules that a module is or is in; all but the model itself are in the step."""
    if paths == [_STEP]:
        return _STEP if path else None
    around = [one for one in paths if one in ("", path) or path.startswith(f"{one}.")]
    return max(around, key=len, default=None)


class ConstantWork(ShareRule, frozen=True, kw_only=True):
    """Lines all of whose operators compute the same in every step, by their share of the samples.

    They depend on nothing but sizes and tensors that modules hold, of which none changed in the inspected
    step: a graph of fixed positions, a mask, a frozen tower over fixed prompts. Lines of one function count
    together. The place is the line that calls it, as far out as all that is called there is constant.

    Caveats:
        What changes by a way that torch does not see, such as a write to ``.data`` or to a NumPy array, or in
        other steps than the inspected one, counts as the same. So do sizes and numbers of Python's.

    Attributes:
        least_samples: on the lines.
    """

    kind: ClassVar[str] = "constant_work"
    title: ClassVar[str] = "Constant result is recomputed every step"
    healthy: ClassVar[str] = "No constants recomputed every step"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "samples at lines of one function whose operators depend only on sizes and on module tensors that"
            " didn't change in the inspected step, at least 10; the share minus two standard errors counts."
            " Changes through NumPy or `.data`, or in other steps, aren't seen"
        ),
        of="of the loop",
        where="the line that calls them",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "dataloader", "callbacks", "module_hooks")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.05
    critical: float = 0.20
    least_samples: int = 10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding, for the function that takes most."""
        costs, lines, hot = analysis.step_costs, analysis.source_lines, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(hot, Absent):
            return self.not_evaluated(hot.reason)
        if isinstance(lines, Absent) or analysis.cost is None or analysis.cost.sites is None:
            note = "" if analysis.cost is None else analysis.cost.sites_note
            return self.not_evaluated(note or "no step was inspected (set flops=True)")
        by_function: dict[tuple[str, int | None], list[SourceLine]] = {}
        for one in lines:
            if one.constant_operators and one.constant_operators == one.operators:
                by_function.setdefault((one.file, one.function_line), []).append(one)
        found = max(by_function.values(), key=lambda some: sum(one.share or 0.0 for one in some), default=[])
        share, samples = sum(one.share or 0.0 for one in found), sum(one.samples or 0 for one in found)
        least = share - 2 * math.sqrt(max(0.0, share * (1 - share)) / hot.num_samples)
        took_ns, wall_ns = share * costs.loop.wall_ns, costs.loop.wall_ns
        if samples < self.least_samples or not self.is_found(share, took_ns, least * wall_ns):
            return self.clean("No slow line recomputes a constant result.")
        found.sort(key=lambda one: -(one.share or 0.0))
        constant = {(one.file, one.line) for some in by_function.values() for one in some}
        others = {(one.file, one.line) for one in lines if one.operators} - constant
        caller = hot.caller_of_all((found[0].file, found[0].line), constant, others)
        inner = None if caller is None else caller.inner
        name = found[0].function if inner is None else inner.function
        return (
            self.found(
                f"{name} takes {COST} for a result that doesn't depend on the batch or on"
                " trainable parameters.",
                "Compute it once in __init__ and keep it with register_buffer.",
                self.severity(share),
                title=f"Constant result of {name} is recomputed every step",
                saving_ns=took_ns,
                places=[location_at(caller)]
                if caller is not None
                else [one.exact(module=one.module) for one in found[:_MOST_LINES]],
                evidence=[
                    duration("time per step at these lines", took_ns),
                    ratio("share of stack samples", share),
                    count("operators per step", sum(one.constant_operators for one in found)),
                    count("stack samples", samples),
                ],
            ),
        )


class SlowCustomModule(ShareRule, frozen=True, kw_only=True):
    """Forward latency of modules that the user wrote, and that are no layers.

    A module is one if nothing in it has a parameter, it ran no contraction (matrix product, convolution,
    attention) in the counted step, and its ``forward`` is the user's. Such a module moves data about or
    computes a loss; on a device that should be little beside the layers.

    Source: 10% and 20% are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        Not all of the time can be saved: whatever the module computes still has to be computed. Its
        latency is the sum of medians of the timed steps, scaled by Forward in these and in the others.
    """

    kind: ClassVar[str] = "slow_custom_module"
    title: ClassVar[str] = "Slow module without parameters"
    healthy: ClassVar[str] = "Parameter-free modules are fast"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "forward latency of your modules that have no parameters and run no matmul, convolution or"
            " attention, such as a loss, without torch operators over 100 µs each, and without sampled time"
            " in logging, in gradients and in modules that aren't their children. Part of the work remains"
        ),
        of="of the median step",
        where="the module's `forward`",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    bound: ClassVar[str | None] = "host_bound"

    warning: float = 0.10
    critical: float = 0.20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each such module."""
        costs, modules, cost = analysis.step_costs, analysis.modules, analysis.cost
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(modules, Absent) or cost is None:
            return self.not_evaluated(
                f"modules: {modules.reason}" if isinstance(modules, Absent) else "modules weren't timed"
            )
        if modules.root.forward_ns is None or modules.root.forward_flops is None:
            return self.not_evaluated("modules weren't timed, or their operators weren't counted")
        written = {record.path: record.forward for record in cost.modules if record.forward is not None}
        pace, slowest_ns, found = module_pace(analysis), 0, []
        for module in _without_layers(modules.modules):
            place = written.get(module.path)
            if place is None or module.forward_ns is None:
                continue
            is_leaf = not any(one.path.startswith(f"{module.path}.") for one in modules.modules)
            others = _share_of_others(analysis, place, is_leaf=is_leaf)
            took_ns = round(module.forward_ns * pace * (1 - others))
            if modules.clock != "device":
                took_ns = max(0, took_ns - round(sum(_torch_work(analysis, module.path).values())))
            slowest_ns = max(slowest_ns, took_ns)
            share = took_ns / costs.typical.median_wall_ns if costs.typical.median_wall_ns else None
            if share is not None and self.is_found(share, took_ns):
                found.append(self._one(analysis, module, place, took_ns, share))
        return tuple(found) or self.clean(
            f"Your slowest module without parameters takes {time_per_step(slowest_ns)}."
            if slowest_ns
            else "None of your own module classes is parameter-free."
        )

    def _one(
        self, analysis: Analysis, module: ModuleCost, place: Place, took_ns: float, share: float
    ) -> Finding:
        return self.found(
            f"The forward of {module.path} ({module.type_name}) takes {COST}, although it has no parameters"
            " and runs no matmul.",
            advice_for(analysis, place.file, place.line, module.type_name),
            self.severity(share),
            title=f"Slow module without parameters: {module.type_name}",
            saving_ns=took_ns,
            places=[place.exact(module=module.path, is_exact=False)],
            evidence=[duration("forward time per step", took_ns)],
        )


def _share_of_others(analysis: Analysis, place: Place, *, is_leaf: bool) -> float:
    """Share of a forward's time in logging, in gradients, and in modules that can't be its own children."""
    hot = analysis.hot_lines
    if isinstance(hot, Absent) or place.file is None or place.line is None:
        return 0.0
    logging = hot.logging_share(place.file, place.line)[0]
    own = hot.share_outside_modules(place.file, place.line, phases=("forward",)) if is_leaf else None
    if own is not None and own[1] >= _ENOUGH_SAMPLES:
        return max(logging, 1 - own[0])
    return logging + hot.gradient_share(place.file, place.line, phases=("forward",))[0]


def _without_layers(modules: tuple[ModuleCost, ...]) -> list[ModuleCost]:
    """The outermost modules, below the model, in which nothing has a parameter or a contraction."""
    found: list[ModuleCost] = []
    for module in modules:
        is_inside = found and module.path.startswith(f"{found[-1].path}.")
        if module.path and not is_inside and module.parameters == 0 and module.forward_flops == 0:
            found.append(module)
    return found


_ENOUGH_SAMPLES: Final = 20


_PENALTY: Final = "A loop reduces parameters one by one"


class SlowForwardOutsideModel(ShareRule, frozen=True, kw_only=True):
    """The median of the phase Forward, less the latency of the module tree's root in the timed steps.

    Both are times of the host, or both are times of the device. Modules are timed in three steps, so steps
    in which the machine was busy must not count: the saving is that of the median, and it is only
    found if three of four steps have so much of it that it would be found in them. The machine may also have
    been faster in those three steps than later: then the modules' time is scaled by Forward in the others
    over Forward in these. It is never scaled down, as timing the modules takes some of Forward there. Where
    there are at least 20 samples of the step's function in Forward, twice the standard error more than they
    say must be enough, too. What samples find below ``self.log`` and metrics is taken off, and in doubt two
    standard errors more: that is a cause of its own (``slow_logging_calls``).

    Operators that take long are torch's work and no loop in Python: their time in the inspected step is taken
    off, of each line no more than samples of all steps allow for. So are gradients that the step computes, by
    samples: what ``torch.autograd.grad``, ``backward`` and ``torch.func`` take. On a device, what is left is
    split like the samples outside of modules. Of lines that run many small operators, backward's part counts,
    too.

    A line that makes a number of each of some parameters, as a penalty written by hand does, is a finding of
    its own where its operators take long: by samples, with its part of Backward. Adding its gradients to the
    loss's is not in it.

    Some of Forward is Lightning's own code around the step method, which slows down with the machine like its
    loop does: what is less than the median of the phase Loop is not told apart from it.

    Source: 10% and 20% are the bands of TraceML for what is in a step and in none of its parts.

    Caveats:
        What the step does in less than three of four steps is not seen. Timing modules costs them some time,
        so with very many small modules the rest comes out too small.
    """

    kind: ClassVar[str] = "slow_forward_outside_model"
    title: ClassVar[str] = "Slow code in training_step outside the model"
    healthy: ClassVar[str] = "training_step adds little overhead"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "median of Forward minus the model's forward latency (Modules, scaled up if Forward was faster"
            " in the timed steps), minus sampled time in `self.log`, loggers and metrics and in gradients"
            " that the step computes (`torch.autograd.grad`, `backward`, `torch.func`), minus torch"
            " operators over 100 µs each (no more per line than samples allow). The first quartile is above"
            " the threshold too, and the result above the median of Loop. Backward of lines that run at"
            " least 64 small operators is added, less its spread. Work in fewer than three of four"
            " steps isn't seen. Lines of long operators that reduce 2 or more parameters one by one, such as"
            " a penalty on their norm, are a finding of their own, by samples (at least 10) and their part of"
            " Backward"
        ),
        of="of the median step",
        where="`training_step`",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    bound: ClassVar[str | None] = "host_bound"
    points_at: ClassVar[PointsAt] = PointsAt.TIME_OUTSIDE_MODULES

    warning: float = 0.10
    critical: float = 0.20

    def saves_ns(self, finding: Finding) -> float:
        """Nothing of a penalty: it is the time of torch's long operators, and no slow Python."""
        return 0.0 if finding.title == _PENALTY else super().saves_ns(finding)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup, modules = analysis.step_costs, analysis.setup, analysis.modules
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        model_ns = modules.root.forward_ns
        if model_ns is None:
            return self.not_evaluated(
                "modules weren't timed" + (f": {modules.notes[0]}" if modules.notes else "")
            )
        forward_ns = _forward_ns(costs.typical, modules.clock)
        if forward_ns is None:
            return self.not_evaluated("Forward and modules were timed on different clocks")
        model_ns = round(model_ns * max(1.0, module_pace(analysis)))
        name = loop_of(analysis.info.loop).step_hook
        place = setup.module_hooks.get(name) or setup.module
        logging, logging_error = _logging_share_of_forward(analysis.hot_lines, place)
        logging_ns = forward_ns * logging
        gradients, gradients_error = _gradient_share_of_forward(analysis.hot_lines, place)
        torch_ns, gradients_ns = 0.0, forward_ns * gradients
        if modules.clock == "device":
            own = _own_share_of_forward(analysis.hot_lines, place)
            left_ns = max(0.0, forward_ns - model_ns - logging_ns)
            gradients_ns = left_ns * gradients / (gradients + own) if gradients else 0.0
        else:
            torch_ns = sum(_torch_work(analysis, "").values())
        rest_ns = max(0.0, forward_ns - model_ns - logging_ns - gradients_ns - torch_ns)
        backward_ns = 0.0
        if modules.clock != "device":
            backward_ns = _backward_of_loops_ns(analysis, costs.typical, modules.root.backward_ns)
        penalty = self._penalty(analysis, costs) if modules.clock != "device" else ()
        wall_ns = costs.typical.median_wall_ns
        share = (rest_ns + backward_ns) / wall_ns if wall_ns else None
        evidence = [
            duration("time outside modules", rest_ns),
            duration("median Forward", forward_ns),
            duration("time in modules", model_ns),
            *([duration("backward of that code", backward_ns)] if backward_ns else ()),
            *([duration("time in logging calls", logging_ns)] if logging_ns else ()),
            *([duration("time in gradients", gradients_ns)] if gradients_ns else ()),
            *([duration("time in long torch operators", torch_ns)] if torch_ns else ()),
        ]
        spread_ns = forward_ns - costs.typical.quartiles_ns.get("forward", forward_ns)
        sure_ns = rest_ns - spread_ns - 2 * math.hypot(logging_error, gradients_error) * forward_ns
        least_ns = min(sure_ns, _most_by_samples(analysis.hot_lines, place, forward_ns) - torch_ns)
        medians_ns, quartiles_ns = costs.typical.medians_ns, costs.typical.quartiles_ns
        spread_ns = medians_ns.get("backward", 0.0) - quartiles_ns.get("backward", 0.0)
        least_backward_ns = max(0.0, backward_ns - spread_ns)
        if share is None or not (
            self.is_found(share, rest_ns + backward_ns, least_ns + least_backward_ns)
            and least_ns >= medians_ns.get("other", 0.0)
        ):
            return penalty or self.clean(f"Code outside the model takes {time_per_step(rest_ns)}.", evidence)
        return (
            *penalty,
            self.found(
                f"Code in {name} outside the model's modules, such as the loss, takes {COST}"
                + (f", about {milliseconds(backward_ns)} of it in backward." if backward_ns else "."),
                advice_for(
                    analysis,
                    None if place is None else place.file,
                    None if place is None else place.line,
                    f"{name} and its callees",
                    outside_modules=True,
                ),
                self.severity(share),
                saving_ns=rest_ns + backward_ns,
                places=[place],
                evidence=evidence,
            ),
        )

    def _penalty(self, analysis: Analysis, costs: StepCosts) -> tuple[Finding, ...]:
        """The step's own lines that make a number of each parameter, if operators there take long."""
        lines, hot = analysis.source_lines, analysis.hot_lines
        sites = None if analysis.cost is None else analysis.cost.sites
        if isinstance(lines, Absent) or isinstance(hot, Absent) or sites is None:
            return ()
        long = {(one.file, one.line) for one in _torch_work(analysis, "") if one.module == ""}
        found = {
            (one.file, one.line)
            for one in lines
            if one.reductions >= LEAST_REDUCTIONS and (one.file, one.line) in long
        }
        time = operator_time(
            lambda one: float((one.file, one.line) in found), sites=sites, lines=lines, hot=hot, costs=costs
        )
        share = time.whole_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        if time.samples < _LEAST_SAMPLES or not self.is_found(share, time.whole_ns, time.least_ns):
            return ()
        first = time.lines[0]
        return (
            self.found(
                f"A loop over the parameters in {first.function} takes about {COST}"
                + (f", {milliseconds(time.backward_ns)} of it in backward." if time.backward_ns else "."),
                without_loop(first),
                self.severity(time.whole_ns / costs.loop.wall_ns),
                title=_PENALTY,
                saving_ns=time.whole_ns,
                places=[one.exact() for one in time.lines[:_MOST_LINES]],
                evidence=[
                    duration("forward time per step", time.forward_ns),
                    duration("backward time per step", time.backward_ns),
                    count("parameters", sum(one.reductions for one in time.lines)),
                    count("stack samples", time.samples),
                ],
            ),
        )


_LEAST_SAMPLES: Final = 10


def _lines_of(analysis: Analysis, module: str) -> list[LineCount]:
    """What the lines of one module ran in the inspected step, with the modules in it; ``""`` without any."""
    sites = None if analysis.cost is None else analysis.cost.sites
    lines = () if sites is None else sites.lines
    inside = f"{module}." if module else ""
    return [one for one in lines if one.module == module or (inside and one.module.startswith(inside))]


def _torch_work(analysis: Analysis, module: str) -> dict[LineCount, float]:
    """Forward's lines of one module whose operators take long each, and their time; ``""`` as above.

    There torch works, and no loop in Python is to blame. Operators were timed in one step, where a pause may
    have come between: of each line no more counts than samples of all steps allow for.
    """
    hot, costs = analysis.hot_lines, analysis.step_costs
    most = None if isinstance(hot, Absent) else hot.most_at_lines("forward")
    forward_ns = None if isinstance(costs, Absent) else costs.typical.medians_ns.get("forward")
    found = {}
    for one in _lines_of(analysis, module):
        took_ns = float(one.took_ns)
        if most is not None and forward_ns is not None:
            took_ns = min(took_ns, forward_ns * most(one.file, one.line))
        if one.phase == "forward" and took_ns > _SMALL_NS * max(1, one.own_calls):
            found[one] = took_ns
    return found


def _backward_of_loops_ns(analysis: Analysis, means: PhaseMeans, model_ns: int | None) -> float:
    """Backward of the step's own lines that run many small operators.

    Their part of Backward: each operator counts with its time and what the host needs for calling it. No more
    than what the backward of the model leaves, where that was timed.
    """
    backward_ns = means.medians_ns.get("backward")
    if not backward_ns or analysis.cost is None or analysis.cost.sites is None:
        return 0.0
    own, long = _lines_of(analysis, ""), _torch_work(analysis, "")
    loops = {
        (one.file, one.line)
        for one in own
        if one.phase == "forward" and one.own_calls >= MANY_OPERATORS and one not in long
    }

    def cost_ns(lines: Iterable[LineCount]) -> int:
        return sum(
            one.took_ns + LEAST_OPERATOR_NS * one.own_calls for one in lines if one.phase == "backward"
        )

    whole_ns = cost_ns(analysis.cost.sites.lines)
    of_loops_ns = cost_ns(one for one in own if one.file is not None and (one.file, one.line) in loops)
    taken_ns = backward_ns * of_loops_ns / whole_ns if whole_ns else 0.0
    return taken_ns if model_ns is None else min(taken_ns, max(0.0, backward_ns - model_ns))


def _most_by_samples(hot: HotLines | Absent, place: Place | None, forward_ns: float) -> float:
    """The most time outside of modules that samples allow for; infinite where they say nothing."""
    if isinstance(hot, Absent) or place is None or place.file is None or place.line is None:
        return math.inf
    # Of manual optimization backward and optimizer are in the same function.
    sampled = hot.share_outside_modules(place.file, place.line, phases=("forward",))
    if sampled is None or sampled[1] < _ENOUGH_SAMPLES:
        return math.inf
    share, samples = sampled
    return forward_ns * (share + 2 * math.sqrt(share * (1 - share) / samples))


def _logging_share_of_forward(hot: HotLines | Absent, place: Place | None) -> tuple[float, float]:
    """Share of Forward in ``self.log`` and metrics, a cause of its own, and its standard error."""
    if isinstance(hot, Absent) or place is None or place.file is None or place.line is None:
        return 0.0, 0.0
    return hot.logging_share(place.file, place.line, phases=("forward",), outside_modules=True)


def _gradient_share_of_forward(hot: HotLines | Absent, place: Place | None) -> tuple[float, float]:
    """Share of Forward in gradients that the step computes itself, and its standard error."""
    if isinstance(hot, Absent) or place is None or place.file is None or place.line is None:
        return 0.0, 0.0
    return hot.gradient_share(place.file, place.line, phases=("forward",))


def _own_share_of_forward(hot: HotLines | Absent, place: Place | None) -> float:
    """Share of Forward in the step's own code: no modules, no gradients, no logging."""
    if isinstance(hot, Absent) or place is None or place.file is None or place.line is None:
        return 0.0
    sampled = hot.share_outside_modules(place.file, place.line, phases=("forward",))
    return 0.0 if sampled is None else sampled[0]


def _forward_ns(means: PhaseMeans, clock: str) -> float | None:
    return means.device_ns.get("forward") if clock == "device" else means.medians_ns.get("forward")
