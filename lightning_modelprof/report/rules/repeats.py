"""Does a step repeat a computation, or call a module many times?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.module_tree import ModuleCost, ModuleTree
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt, location_at
from lightning_modelprof.report.model import Severity
from lightning_modelprof.report.one_step import COST, per_step
from lightning_modelprof.report.rules.rule import NOT_A_FIT, Found, Limits, Passed, count, duration, rule
from lightning_modelprof.report.rules.unused import timed_modules, waste_of
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.model_cost import FrozenModule, RepeatedCall
from lightning_modelprof.run.stacks import StackFrame
from lightning_modelprof.units import milliseconds

_PARAMETRIZATIONS: Final = ".parametrizations."
"""Path part of ``torch.nn.utils.parametrize`` modules, which compute a weight at each access."""


@rule(
    "repeated_forward",
    title="Module output is computed twice",
    healthy="Modules compute each output once",
    of="loop",
    where="the calling lines",
    points_at=PointsAt.CHANGE,
    phases=("forward", "backward"),
    warning=0.05,
    critical=0.20,
)
def repeated_forward(facts: Facts) -> Iterator[Found | Passed]:
    """In the inspected step, a module without dropout is called again with the same tensors, and neither they
    nor its parameters and buffers changed; by that part of its forward and backward."""
    _ = facts.step_costs
    repeated = waste_of(facts).repeated
    times = {one.path: one for one in timed_modules(facts).modules}
    for call in _outermost(repeated):
        module = times.get(call.path)
        if module is None or module.forward_ns is None:
            continue
        cost_ns = call.repeated / call.calls * _both_ns(module)
        # With one call, an inner BatchNorm updates its running statistics once.
        once = " BatchNorm then updates its statistics once." if call.updates_statistics else ""
        yield Found(
            title=f"Output of {call.path} is computed twice",
            what=f"{call.path} is called {call.calls} times per step, {call.repeated} of them with the same"
            f" tensors, which costs {COST}.",
            do="Run the forward under torch.nn.utils.parametrize.cached()."
            if _PARAMETRIZATIONS in f".{call.path}."
            else f"Call {call.path} once and reuse its output.{once}",
            saves_ns=cost_ns,
            at=[one.exact(module=call.path) for one in reversed(call.lines)],
            evidence=[
                duration("repeated work per step", cost_ns),
                count("calls per step", call.calls),
                count("repeated calls per step", call.repeated),
            ],
        )
    yield Passed(what="No module is called twice with the same tensors.")


def _outermost(calls: tuple[RepeatedCall, ...]) -> list[RepeatedCall]:
    """Drop calls inside a module that is repeated as often."""
    repeated = {one.path: one.repeated for one in calls}
    return [
        one
        for one in calls
        if not any(
            repeated.get(".".join(one.path.split(".")[:depth]), 0) >= one.repeated
            for depth in range(1, one.path.count(".") + 1)
        )
    ]


def _both_ns(module: ModuleCost) -> int:
    return (module.forward_ns or 0) + (module.backward_ns or 0)


@rule(
    "frozen_forward",
    title="Frozen module recomputes outputs every epoch",
    healthy="Frozen modules are cheap",
    of_words="of the step time",
    where="`training_step`",
    points_at=PointsAt.CHANGE,
    phases=("forward",),
    warning=0.10,
    critical=0.30,
    least_compared=12,
)
def frozen_forward(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Forward time of the outermost modules without trainable parameters, if at least 12 sampled indices
    returned identical data every time. Not for modules that change during the run (EMA, BatchNorm in training
    mode), that draw or are given random numbers in the inspected step, or that get the output of trained
    modules."""
    # Random numbers from a NumPy Generator or another library, drawn in the step, go unnoticed.
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    wall_ns, modules = facts.step_costs.typical.wall_ns, timed_modules(facts)
    if modules.root.backward_ns is None:
        raise NotMeasured("backward wasn't timed by module")
    frozen = [one for one in _frozen(modules) if not _is_constant(facts, one.path)]
    taken_ns = _forward_ns(frozen)
    if not limits.is_found(taken_ns / wall_ns if wall_ns else None, taken_ns):
        yield Passed(what="Frozen modules take little of the forward pass.")
        return
    seen, cost, setup = facts.get(Facts.repeated), facts.get(Facts.cost), facts.get(Facts.setup)
    if seen is None or seen.num_compared < limits.least_compared:
        raise NotMeasured("too few samples were fetched twice")
    if seen.num_equal < seen.num_compared:
        yield Passed(what="Samples of the same index differ between epochs.")
        return
    # Runs of older versions lack this record.
    waste = None if cost is None else cost.waste
    known = {one.path: one for one in (() if waste is None else waste.frozen)}
    if not any(one.path in known for one in frozen):
        raise NotMeasured("it is unknown whether frozen modules change or get random input")
    frozen = [one for one in frozen if one.path in known and _repeats_itself(known[one.path])]
    names = ", ".join(one.path for one in frozen[:3])
    yield Found(
        title=f"Frozen {names} recomputes outputs every epoch",
        what=f"{names} is frozen, yet takes {COST} to recompute its outputs for the same samples every"
        " epoch.",
        do=f"Compute the outputs of {names} once, in the data set.",
        saves_ns=_forward_ns(frozen),
        at=[None if setup is None else setup.module_hooks.get("training_step")],
        evidence=[
            duration("frozen forward per step", _forward_ns(frozen)),
            count("samples compared", seen.num_compared),
        ],
    )
    yield Passed(what="Frozen modules change or get other input in each epoch.")


def _frozen(tree: ModuleTree) -> list[ModuleCost]:
    """Return the outermost modules that ran forward, have no trainable parameter and pass no gradient."""
    found: list[ModuleCost] = []
    for module in tree.modules:
        if found and module.path.startswith(f"{found[-1].path}."):
            continue
        is_frozen = bool(module.path and module.parameters) and not module.trainable
        if is_frozen and module.forward_ns and not module.backward_ns:
            found.append(module)
    return sorted(found, key=lambda one: -(one.forward_ns or 0))


def _forward_ns(modules: Sequence[ModuleCost]) -> int:
    return sum(one.forward_ns or 0 for one in modules)


def _is_constant(facts: Facts, path: str) -> bool:
    """Return whether a module runs the same in each step, which ``constant_work`` reports."""
    sites = facts.get(Facts.sites)
    lines = [
        one
        for one in (() if sites is None else sites.lines)
        if one.phase == "forward" and (one.module == path or one.module.startswith(f"{path}."))
    ]
    return bool(lines) and all(one.constant == one.own_calls for one in lines)


def _repeats_itself(seen: FrozenModule) -> bool:
    return not (seen.changes or seen.has_varying_input)


_FORWARD_AND_BACKWARD: Final = ("forward", "backward")
_LEAST_SAMPLES: Final = 10
_GRADIENT: Final = ("torch.autograd", "grad")
"""Python module and function that compute gradients on behalf of the caller."""


@rule(
    "many_calls",
    title="Module called many times per step",
    healthy="Module calls are batched",
    of_words="of the step time",
    where="the slowest line of the surrounding forward",
    points_at=PointsAt.CHANGE,
    phases=_FORWARD_AND_BACKWARD,
    warning=0.20,
    critical=0.50,
    least_calls=16,
)
def many_calls(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """The outermost module with parameters (no recurrent cell) with at least 16 calls per step, by the time
    of its calls. How much one batched call saves is unknown. Also lines with at least 16 calls of
    `torch.autograd.grad` per step, by samples (at least 10, minus two standard errors)."""
    # Calls that depend on the previous one, such as a decoder's, can't be batched.
    costs = facts.step_costs
    yield from _many_gradients(facts, limits)
    modules, cost = facts.get(Facts.modules), facts.get(Facts.cost)
    if modules is None or cost is None or cost.times is None:
        raise NotMeasured("modules weren't timed (set flops=True)")
    calls = {one.path: one.calls / max(cost.times.steps, 1) for one in cost.times.times}
    often = [
        one
        for one in modules.modules
        if one.path
        and one.parameters
        and not one.type_name.endswith("Cell")
        and calls.get(one.path, 0.0) >= limits.least_calls
        and calls.get(one.path.rpartition(".")[0], 1.0) < limits.least_calls
    ]
    worst, wall_ns = max(often, key=_both_ns, default=None), costs.typical.wall_ns
    taken_ns = 0 if worst is None else _both_ns(worst)
    if worst is None or not limits.is_found(taken_ns / wall_ns if wall_ns else None, taken_ns):
        yield Passed(what="Modules with many calls take little of the step time.")
        return
    number = round(calls[worst.path])
    yield Found(
        title=f"{worst.path} called {number:,} times per step",
        what=f"{worst.path} is called {number:,} times per step, which takes"
        f" {per_step(taken_ns, costs.step_ns)}.",
        do=f"Batch independent inputs with torch.cat or torch.stack, and call {worst.path} once.",
        severity=Severity.WARNING,
        at=_calling_line(facts, worst.path),
        evidence=[count("calls per step", number), duration("time per step in these calls", taken_ns)],
    )


def _many_gradients(facts: Facts, limits: Limits) -> Iterator[Found]:
    hot, sites, costs = facts.get(Facts.hot_lines), facts.get(Facts.sites), facts.step_costs
    if hot is None or sites is None:
        return
    times = Counter[tuple[str | None, int | None]]()
    for one in sites.lines:
        times[one.file, one.line] += one.gradients
    often = {place: number for place, number in times.items() if number >= limits.least_calls}
    calls = hot.found_by(lambda path: _gradient_call(path, often), _FORWARD_AND_BACKWARD)
    taken_ns, wall_ns = calls.share * costs.loop.wall_ns, costs.loop.wall_ns
    least_ns = hot.least_of(calls.share) * wall_ns
    if calls.samples < _LEAST_SAMPLES or not limits.is_found(calls.share, taken_ns, least_ns):
        return
    number = sum(often.values())
    saving_ns = taken_ns * (1 - 1 / number)
    yield Found(
        title=f"torch.autograd.grad called {number:,} times per step",
        what=f"torch.autograd.grad is called {number:,} times per step, which takes"
        f" {per_step(taken_ns, costs.step_ns)}.",
        do="Batch independent calls with is_grads_batched=True, torch.func.vmap or jacrev. That saves up to"
        f" {milliseconds(saving_ns)} per step.",
        severity=Severity.WARNING,
        saves_ns=saving_ns,
        saving_is="up to",
        at=[location_at(line) for line in calls.lines],
        evidence=[
            count("calls per step", number),
            duration("time per step in these calls", taken_ns),
            count("stack samples", calls.samples),
        ],
    )


def _gradient_call(
    path: Sequence[StackFrame], lines: Collection[tuple[str | None, int | None]]
) -> int | None:
    """Return the position on a stack where one of these lines computes gradients."""
    called = [(one.python_module, one.function) for one in path]
    if _GRADIENT not in called:
        return None
    before = path[: called.index(_GRADIENT)]
    caller = max((number for number, one in enumerate(before) if one.is_users), default=None)
    if caller is None:
        return None
    return caller if (path[caller].file, path[caller].line) in lines else None


def _calling_line(facts: Facts, path: str) -> list[Place]:
    """Return the slowest line of the forward that calls a module."""
    hot, cost, setup = facts.get(Facts.hot_lines), facts.get(Facts.cost), facts.get(Facts.setup)
    if hot is None or cost is None:
        return []
    forwards = {one.path: one.forward for one in cost.modules}
    step = None if setup is None else setup.module_hooks.get("training_step")
    for place in (forwards.get(path.rpartition(".")[0]), forwards.get(""), step):
        if place is not None and place.file is not None and place.line is not None:
            found = hot.inside(place.file, place.line)
            if found is not None:
                return [replace(location_at(found), inner=None, module=path)]
    return []
