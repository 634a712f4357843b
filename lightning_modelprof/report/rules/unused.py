"""Does training compute unused gradients or outputs?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import NOT_INSPECTED, Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.module_tree import ModuleCost, ModuleTree
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.source import padding_lines
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
    NOT_A_FIT,
    Found,
    Limits,
    Passed,
    count,
    duration,
    ratio,
    rule,
)
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.model_cost import (
    MIXES_NOTHING,
    MIXES_PLACES,
    MIXES_ROWS,
    ModuleRecord,
    StepWaste,
    UnusedGradients,
    UnusedOutput,
)
from lightning_modelprof.units import milliseconds, percent


def waste_of(facts: Facts) -> StepWaste:
    waste = facts.cost.waste
    if waste is None:
        raise NotMeasured(NOT_INSPECTED)
    return waste


def timed_modules(facts: Facts) -> ModuleTree:
    modules = facts.get(Facts.modules)
    if modules is None:
        raise NotMeasured(f"modules: {facts.why_not(Facts.modules)}")
    return modules


_OF_WEIGHTS: Final = 0.5
"""Share of the weights' gradients in a layer's backward: one of two equal matrix products."""


@rule(
    "unused_gradients",
    title="Unused gradients are computed",
    healthy="All gradients are used",
    of="loop",
    where="the backward call",
    points_at=PointsAt.CHANGE,
    phases=("backward", "forward"),
    warning=0.05,
    critical=0.20,
)
def unused_gradients(facts: Facts) -> Iterator[Found | Passed]:
    """In one process: in the inspected step, a backward pass computes gradients that no optimizer uses before
    they are recomputed or cleared. All of a module's backward counts if no used gradient is behind it,
    otherwise half."""
    # A pass takes as long as any other through the module. Gradients kept for a later step while others are
    # used immediately would count as unused.
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    _ = facts.step_costs
    waste, modules, setup = waste_of(facts), timed_modules(facts).modules, facts.get(Facts.setup)
    if not (waste.follows_gradients or waste.unused):
        raise NotMeasured("the optimizer didn't step while gradients were being checked")
    with_parameters = {one.path for one in modules if one.trainable}
    backward = {one.path: one.backward_ns or 0 for one in modules}
    beyond = _outermost_unused({one.path: one for one in waste.unused if one.beyond}, with_parameters)
    within = _outermost_unused(
        {one.path: one for one in waste.unused if one.within and not one.beyond}, with_parameters
    )
    beyond_ns = sum(backward.get(path, 0) * one.beyond / one.passes for path, one in beyond.items())
    within_ns = sum(
        _OF_WEIGHTS * backward.get(path, 0) * one.within / one.passes for path, one in within.items()
    )
    most = beyond if beyond_ns >= within_ns else within
    names = ", ".join(most)
    is_alone = setup is not None and len(setup.optimizers) == 1 and not setup.manual_optimization
    made = [one.lines for one in waste.outputs if one.path in most]
    began = [one.lines for one in most.values()]
    yield Found(
        what=f"Backward computes gradients of {names} that no optimizer uses, which costs {COST}.",
        do=f"Freeze {names} with requires_grad_(False); the optimizer doesn't have its parameters."
        if is_alone
        else f"Detach the output of {names} in this loss, or use torch.no_grad()."
        if most is beyond
        else f"Freeze {names} for this backward with self.toggle_optimizer(optimizer).",
        saves_ns=beyond_ns + within_ns,
        at=[one.exact() for one in dict.fromkeys(line for lines in (*began, *made) for line in lines)],
        evidence=[
            duration("unused backward per step", beyond_ns),
            duration("unused weight gradients per step", within_ns),
        ],
        wants=dict.fromkeys(most, False) if is_alone else {},
    )
    yield Passed(what="Optimizers use all gradients.")


def _outermost_unused(
    unused: Mapping[str, UnusedGradients], with_parameters: set[str]
) -> dict[str, UnusedGradients]:
    """Return the highest modules whose parameters' gradients are all unused, by path."""
    found: dict[str, UnusedGradients] = {}
    for path in sorted(unused, key=lambda one: one.count(".")):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            above = ".".join(parts[:depth])
            below = [one for one in with_parameters if one == above or one.startswith(f"{above}.")]
            owners = [one for one in below if not any(other.startswith(f"{one}.") for other in below)]
            if above in found or all(one in unused for one in owners):
                found.setdefault(above, unused[path])
                break
    return found


@rule(
    "frozen_layers_computed",
    title="Backward runs through frozen layers",
    healthy="Backward skips frozen layers",
    where="the frozen modules",
    points_at=PointsAt.CHANGE,
    phases=("backward",),
)
def frozen_layers_computed(facts: Facts) -> Iterator[Found | Passed]:
    """Backward time of modules without trainable parameters that are registered before all trainable ones.
    Wrong for models that run in another order, or that need gradients of their input."""
    # Backward only gets there because an input requires a gradient.
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    _, setup, modules = facts.step_costs, facts.setup, timed_modules(facts)
    frozen = _frozen_at_the_start(modules.modules)
    if not frozen:
        yield Passed(what="No frozen layer precedes the trainable ones.")
        return
    known = [(one.backward_ns, one) for one in frozen if one.backward_ns is not None]
    if not known and modules.root.backward_ns is None:
        raise NotMeasured("backward wasn't timed by module")
    cost_ns = sum(ns for ns, _ in known)
    worst = [one for _, one in sorted(known, key=lambda pair: -pair[0])]
    step = setup.module_hooks.get("training_step") or Place()
    yield Found(
        what=f"Backward spends {COST} in {', '.join(one.path for one in worst[:3])}, although nothing up to"
        " there is trainable.",
        do="Run these layers under torch.no_grad(), or remove requires_grad from the input.",
        saves_ns=cost_ns,
        at=[step.exact(module=one.path, is_exact=False) for one in worst],
        evidence=[duration("backward time per step", cost_ns)],
    )
    yield Passed(what=f"Backward spends {milliseconds(cost_ns)} per step in frozen first layers.")


def _frozen_at_the_start(modules: tuple[ModuleCost, ...]) -> list[ModuleCost]:
    """Return the outermost modules without a trainable parameter, before the first module that owns one."""
    found: list[ModuleCost] = []
    for module in modules:
        if found and module.path.startswith(f"{found[-1].path}."):
            continue
        if _has_trainable_of_its_own(module, modules):
            return found
        if module.path and module.parameters and not module.trainable:
            found.append(module)
    return found


def _has_trainable_of_its_own(module: ModuleCost, modules: tuple[ModuleCost, ...]) -> bool:
    """Return whether it trains more than its children do, such as LoRA factors next to a frozen layer."""
    prefix = f"{module.path}." if module.path else ""
    children = (
        one
        for one in modules
        if one.path and one.path.startswith(prefix) and "." not in one.path[len(prefix) :]
    )
    return (module.trainable or 0) > sum(one.trainable or 0 for one in children)


@rule(
    "unused_outputs",
    title="Module computes unused output",
    healthy="Module outputs are used",
    of_words="of the step time",
    where="the calling lines",
    points_at=PointsAt.CHANGE,
    phases=("forward", "backward"),
    warning=0.10,
    critical=0.30,
    least_unused=0.30,
)
def unused_outputs(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Forward and backward of the innermost modules, times the share of their rows (feature vectors, or
    samples) with zero gradient in the inspected step, without samples that got no gradient anywhere; from 30%
    of a module's rows. In modules that mix rows (attention, recurrent layers, BatchNorm), only rows whose
    input has zero gradient, such as masked padding. Gradients that are zero by chance count too."""
    # Samples without any gradient, such as those a hinge loss drops because they are already right, are only
    # known after computing them.
    _ = facts.step_costs
    waste, modules = waste_of(facts), timed_modules(facts).modules
    outputs = {one.path: one for one in waste.outputs}
    if not outputs:
        raise NotMeasured("no backward pass ran in the inspected step")
    layers = [one for one in outputs.values() if one.rows]
    everywhere = min((one.unused_samples / one.samples for one in layers), default=0.0)
    times = {one.path: (one.forward_ns or 0) + (one.backward_ns or 0) for one in modules}
    unused = {one.path: one.unused / one.rows - everywhere for one in layers}
    wasted = _wasted(unused, times, facts, limits)
    if not wasted:
        yield Passed(what="The loss uses the modules' outputs.")
        return
    kinds = {one.path: _mixed_in(one, facts.cost.modules) for one in outputs.values()}
    name, within, is_mixed = _to_name(wasted, outputs, kinds)
    if is_mixed:
        unused = {
            path: min(part, _unused_input(outputs[path], name, outputs, kinds) - everywhere)
            for path, part in unused.items()
        }
        wasted = _wasted(unused, times, facts, limits)
        if not wasted:
            yield Passed(what="Used rows depend on the rows without gradient.")
            return
        name, within, is_mixed = _to_name(wasted, outputs, kinds)
    rows = sum(one.rows for one in within)
    part = sum(round((unused[one.path] + everywhere) * one.rows) for one in within) / rows
    worst = sorted(wasted, key=lambda one: -wasted[one])
    called, cost_ns = name or " and ".join(worst[:2]), sum(wasted.values())
    yield Found(
        title=f"{percent(part)} of {called}'s output is unused",
        what=f"{percent(part)} of {called}'s output rows have zero gradient in the inspected step, which"
        f" costs {COST}.",
        do=_less_output(called, within, is_all=part == 1, is_mixed=is_mixed),
        saves_ns=cost_ns,
        at=[*(_padding_places(facts, within) if is_mixed else ()), *_calls_of(outputs, name, worst[0])],
        evidence=[
            duration("time per step for unused rows", cost_ns),
            ratio("unused rows", part),
            count("output rows", rows),
        ],
    )


def _wasted(
    unused: Mapping[str, float], times: Mapping[str, int], facts: Facts, limits: Limits
) -> dict[str, float]:
    """Return each path's wasted time if its unused share is large; empty if the total is too small."""
    wall_ns = facts.step_costs.typical.wall_ns
    wasted = {path: part * times.get(path, 0) for path, part in unused.items() if part >= limits.least_unused}
    whole_ns = sum(wasted.values())
    return wasted if limits.is_found(whole_ns / wall_ns if wall_ns else None, whole_ns) else {}


def _less_output(called: str, layers: Sequence[UnusedOutput], *, is_all: bool, is_mixed: bool) -> str:
    if is_all:
        return f"Don't call {called}, or call it under torch.no_grad() every N steps."
    if is_mixed:
        return _shorter_input(called, layers)
    if _is_mostly_whole_samples(layers):
        return f"Call {called} only with the samples that need it (y[i] = module(x[i]))."
    return (
        f"Select the needed rows before {called} (module(x[mask]), labels[mask]). For padding, batch"
        " samples of similar length."
    )


def _to_name(
    wasted: Mapping[str, float], outputs: Mapping[str, UnusedOutput], kinds: Mapping[str, str]
) -> tuple[str, list[UnusedOutput], bool]:
    """Return the module to name, its layers, and whether dropping rows before it changes the others."""
    name = _innermost_with(wasted, _MOST_OF_WASTE * sum(wasted.values()))
    within = [outputs[one] for one in wasted if not name or _is_in(one, name)]
    found = {kind for path, kind in kinds.items() if (_is_in(path, name) if name else path in wasted)}
    is_mixed = MIXES_ROWS in found or (MIXES_PLACES in found and not _is_mostly_whole_samples(within))
    return name, within, is_mixed and any(one.unused < one.rows for one in within)


def _is_in(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _is_mostly_whole_samples(layers: Sequence[UnusedOutput]) -> bool:
    part = sum(one.unused for one in layers) / sum(one.rows for one in layers)
    return sum(one.unused_samples / one.samples for one in layers) / len(layers) > 0.5 * part


def _shorter_input(called: str, layers: Sequence[UnusedOutput]) -> str:
    if any(one.unused_places for one in layers):
        return "Pad each batch only to its longest sample. Then batch samples of similar length."
    if any(one.unused_samples for one in layers) or not any(one.places for one in layers):
        return f"Leave the unused rows out of the input of {called}."
    return "Batch samples of similar length."


_MIXERS: Final = ("attention", "attn", "transformer", "rnn", "gru", "lstm", "batchnorm", "mixer")


def _mixed_in(output: UnusedOutput, modules: tuple[ModuleRecord, ...]) -> str:
    """Return what a module mixes; older runs lack the record, so class names decide there."""
    if output.mixes is not None:
        return output.mixes
    names = [one.type_name.lower() for one in modules if _is_in(one.path, output.path)]
    if any(part in name for name in names for part in _MIXERS):
        return MIXES_ROWS
    return MIXES_PLACES if any("conv" in name or "pool" in name for name in names) else MIXES_NOTHING


def _unused_input(
    output: UnusedOutput, name: str, outputs: Mapping[str, UnusedOutput], kinds: Mapping[str, str]
) -> float:
    """Return a layer's share of rows that no other row depends on, in the module to name.

    The outermost row-mixing module around the layer decides; without one, no row depends on others.
    """
    if output.unused == output.rows:
        return 1.0
    around = [
        one
        for one in outputs
        if kinds[one] != MIXES_NOTHING and _is_in(output.path, one) and (not name or _is_in(one, name))
    ]
    if not around:
        return 1.0
    outermost = outputs[min(around, key=len)]
    return outermost.unused_inputs / outermost.input_rows if outermost.input_rows else 0.0


_MOST_OF_WASTE: Final = 0.8
"""Minimum share of the wasted time inside a module for naming it."""


def _innermost_with(wasted: Mapping[str, float], least: float) -> str:
    parts = max(wasted, key=lambda one: wasted[one]).split(".")
    above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next(
        (one for one in above if sum(ns for path, ns in wasted.items() if _is_in(path, one)) >= least),
        "",
    )


def _calls_of(outputs: Mapping[str, UnusedOutput], name: str, worst: str) -> list[Place]:
    called = (
        [name] if name in outputs else [one for one in outputs if name and one.rpartition(".")[0] == name]
    )
    lines = dict.fromkeys(line for one in called or [worst] for line in outputs[one].lines)
    return [one.exact(module=name or worst) for one in lines]


def _padding_places(facts: Facts, layers: Sequence[UnusedOutput]) -> list[Place]:
    setup = facts.get(Facts.setup)
    loader = setup.loaders[0] if setup is not None and setup.loaders else None
    is_padded = loader is not None and any(one.unused_places for one in layers)
    places = [loader.collate, loader.dataset] if loader is not None and is_padded else []
    return [
        one.exact(line=line)
        for one in places
        if one is not None and not one.is_library and one.file is not None and one.line is not None
        for line in padding_lines(one.file, one.line, facts.info.created)
    ][:_MOST_PADDING]


_MOST_PADDING: Final = 2
"""Maximum number of lines shown."""
