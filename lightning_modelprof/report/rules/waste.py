"""Does a step call a module twice with the same input?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.module_tree import ModuleCost
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt, location_at, module_pace
from lightning_modelprof.report.advice.source import ignores_weights, padding_lines
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.one_step import COST, per_step
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
from lightning_modelprof.run.model_cost import (
    MIXES_NOTHING,
    MIXES_PLACES,
    MIXES_ROWS,
    FrozenModule,
    ModuleRecord,
    RepeatedCall,
    UnusedGradients,
    UnusedOutput,
)
from lightning_modelprof.run.stacks import StackFrame
from lightning_modelprof.units import milliseconds, percent


class RepeatedForward(ShareRule, frozen=True, kw_only=True):
    """Modules that were called with the very same tensors more than once, none of them changed in between.

    Seen in the one counted step. A module with active dropout gives another output each time and is left out.
    The saving is that part of the module's forward and backward that computed the same again.

    Caveats:
        A BatchNorm inside updates its running statistics twice as well; with one call it does so once.
    """

    kind: ClassVar[str] = "repeated_forward"
    title: ClassVar[str] = "Module output is computed twice"
    healthy: ClassVar[str] = "Modules compute each output once"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "in the inspected step, a module without dropout is called again with the same tensors, and"
            " neither they nor its parameters and buffers changed; by that part of its forward and backward"
        ),
        of="of the loop",
        where="the calling lines",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.05
    critical: float = 0.20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each module."""
        costs, modules = analysis.step_costs, analysis.modules
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was inspected (set flops=True)")
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        times = {one.path: (one.forward_ns, one.backward_ns) for one in modules.modules}
        found = []
        for call in _outermost(analysis.cost.waste.repeated):
            forward_ns, backward_ns = times.get(call.path, (None, None))
            if forward_ns is None:
                continue
            again = call.repeated / call.calls
            cost_ns = again * (forward_ns + (backward_ns or 0))
            share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
            if share is None or not self.is_found(share, cost_ns):
                continue
            is_weight = _PARAMETRIZATIONS in f".{call.path}."
            action = (
                "Run the forward under torch.nn.utils.parametrize.cached()."
                if is_weight
                else f"Call {call.path} once and reuse its output."
                + (" BatchNorm then updates its statistics once." if call.updates_statistics else "")
            )
            found.append(
                self.found(
                    f"{call.path} is called {call.calls} times per step, {call.repeated} of them with the"
                    f" same tensors, which costs {COST}.",
                    action,
                    self.severity(share),
                    title=f"Output of {call.path} is computed twice",
                    saving_ns=cost_ns,
                    places=[one.exact(module=call.path) for one in reversed(call.lines)],
                    evidence=[
                        duration("repeated work per step", cost_ns),
                        count("calls per step", call.calls),
                        count("repeated calls per step", call.repeated),
                    ],
                )
            )
        return tuple(found) or self.clean("No module is called twice with the same tensors.")


_PARAMETRIZATIONS: Final = ".parametrizations."
"""In the path of a module of ``torch.nn.utils.parametrize``, which computes a weight at each access."""


def _outermost(calls: tuple[RepeatedCall, ...]) -> list[RepeatedCall]:
    """Without those inside of a module that repeats itself as often."""
    repeated = {one.path: one.repeated for one in calls}
    return [
        one
        for one in calls
        if not any(
            repeated.get(".".join(one.path.split(".")[:depth]), 0) >= one.repeated
            for depth in range(1, one.path.count(".") + 1)
        )
    ]


_OF_WEIGHTS: Final = 0.5
"""Of a layer's backward, what its weights' gradients take: one of two matrix products of the same size."""


class UnusedGradientsRule(ShareRule, frozen=True, kw_only=True):
    """Gradients that are thrown away, or that no optimizer uses in the step.

    Seen in the one counted step, by which parameters get gradients in which backward pass, and which of them
    an optimizer steps with. Where a pass goes on into a module after the last gradient that is used, all of
    it is the saving; where it has to go through a module, half of that: the gradients of its weights.

    Caveats:
        A pass takes as long as any other through the same module. Gradients that are kept for a later step
        while others are used at once would count as unused.
    """

    kind: ClassVar[str] = "unused_gradients"
    title: ClassVar[str] = "Unused gradients are computed"
    healthy: ClassVar[str] = "All gradients are used"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "in one process: in the inspected step, a backward pass computes gradients that no optimizer uses"
            " before they are recomputed or cleared. All of a module's backward counts if no used gradient is"
            " behind it, otherwise half"
        ),
        of="of the loop",
        where="the backward call",
    )
    phases: ClassVar[tuple[str, ...]] = ("backward", "forward")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.05
    critical: float = 0.20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, modules = analysis.step_costs, analysis.modules
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was inspected (set flops=True)")
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        if not (analysis.cost.waste.follows_gradients or analysis.cost.waste.unused):
            return self.not_evaluated("the optimizer didn't step while gradients were being checked")
        unused = {one.path: one for one in analysis.cost.waste.unused}
        with_parameters = {one.path for one in modules.modules if one.trainable}
        backward = {one.path: one.backward_ns or 0 for one in modules.modules}
        beyond = _outermost_unused({path: one for path, one in unused.items() if one.beyond}, with_parameters)
        within = _outermost_unused(
            {path: one for path, one in unused.items() if one.within and not one.beyond}, with_parameters
        )
        beyond_ns = sum(backward.get(path, 0) * one.beyond / one.passes for path, one in beyond.items())
        within_ns = sum(
            _OF_WEIGHTS * backward.get(path, 0) * one.within / one.passes for path, one in within.items()
        )
        cost_ns = beyond_ns + within_ns
        share = cost_ns / costs.loop.wall_ns if costs.loop.wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean("Optimizers use all gradients.")
        most = beyond if beyond_ns >= within_ns else within
        names = ", ".join(most)
        setup = analysis.setup
        is_alone = setup is not None and len(setup.optimizers) == 1 and not setup.manual_optimization
        action = (
            f"Freeze {names} with requires_grad_(False); the optimizer doesn't have its parameters."
            if is_alone
            else f"Detach the output of {names} in this loss, or use torch.no_grad()."
            if most is beyond
            else f"Freeze {names} for this backward with self.toggle_optimizer(optimizer)."
        )
        made = [one.lines for one in analysis.cost.waste.outputs if one.path in most]
        began = [one.lines for one in most.values()]
        lines = dict.fromkeys(line for lines in (*began, *made) for line in lines)
        return (
            self.found(
                f"Backward computes gradients of {names} that no optimizer uses, which costs {COST}.",
                action,
                self.severity(share),
                saving_ns=cost_ns,
                places=[one.exact() for one in lines],
                evidence=[
                    duration("unused backward per step", beyond_ns),
                    duration("unused weight gradients per step", within_ns),
                ],
                wants=dict.fromkeys(most, False) if is_alone else {},
            ),
        )


def _outermost_unused(
    unused: Mapping[str, UnusedGradients], with_parameters: set[str]
) -> dict[str, UnusedGradients]:
    """The highest modules below which all parameters' gradients are unused, by their paths."""
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


class FrozenLayersComputed(ShareRule, frozen=True, kw_only=True):
    """Backward time of modules without a trainable parameter that stand before all trainable ones.

    Nothing there needs a gradient: backward only comes there because an input requires one. Modules stand
    in the order in which they are registered; after the first trainable one a gradient may have to pass.

    Caveats:
        A model that runs in another order than it is registered in, or that wants the gradient of its input
        (as for adversarial examples), is found wrongly.
    """

    kind: ClassVar[str] = "frozen_layers_computed"
    title: ClassVar[str] = "Backward runs through frozen layers"
    healthy: ClassVar[str] = "Backward skips frozen layers"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "backward time of modules without trainable parameters that are registered before all trainable"
            " ones. Wrong for models that run in another order, or that need gradients of their input"
        ),
        where="the frozen modules",
    )
    phases: ClassVar[tuple[str, ...]] = ("backward",)
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup, modules = analysis.step_costs, analysis.setup, analysis.modules
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        frozen = _frozen_at_the_start(modules.modules)
        if not frozen:
            return self.clean("No frozen layer precedes the trainable ones.")
        known = [(one.backward_ns, one) for one in frozen if one.backward_ns is not None]
        if not known and modules.root.backward_ns is None:
            return self.not_evaluated("backward wasn't timed by module")
        cost_ns = sum(ns for ns, _ in known)
        share = cost_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean(f"Backward spends {milliseconds(cost_ns)} per step in frozen first layers.")
        worst = sorted(known, key=lambda pair: -pair[0])
        names = ", ".join(one.path for _, one in worst[:3])
        step = setup.module_hooks.get("training_step")
        return (
            self.found(
                f"Backward spends {COST} in {names}, although nothing up to there is trainable.",
                "Run these layers under torch.no_grad(), or remove requires_grad from the input.",
                self.severity(share),
                saving_ns=cost_ns,
                places=[(step or Place()).exact(module=one.path, is_exact=False) for _, one in worst],
                evidence=[duration("backward time per step", cost_ns)],
            ),
        )


class FrozenForward(ShareRule, frozen=True, kw_only=True):
    """Forward time of frozen modules that no gradient passes, where samples are the same in each epoch.

    The outermost modules without a trainable parameter, such as a teacher or a backbone, whose input depends
    on none either, so that backward has nothing to do there: for a sample each computes in every epoch what
    it has computed before. Samples are compared as for ``repeated_work``: one that differs, as of augmented
    data, ends it. So does a module that changes, such as a target network that follows the trained one, and
    one that is given random numbers of the step, or draws some (see ``FrozenModule``). Runs of versions that
    didn't record this have no such finding.

    Modules whose input is the same in each step, whatever the batch, are what ``constant_work`` is about.

    Caveats:
        Random numbers of a NumPy ``Generator`` or of another library, used in the step, aren't seen.

    Attributes:
        least_compared: samples that have to be the same.
    """

    kind: ClassVar[str] = "frozen_forward"
    title: ClassVar[str] = "Frozen module recomputes outputs every epoch"
    healthy: ClassVar[str] = "Frozen modules are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "forward time of the outermost modules without trainable parameters, if at least 12 sampled"
            " indices returned identical data every time. Not for modules that change during the run (EMA,"
            " BatchNorm in training mode), that draw or are given random numbers in the inspected step, or"
            " that get the output of trained modules"
        ),
        of="of the step time",
        where="`training_step`",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward",)
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.30
    least_compared: int = 12

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, modules, seen = analysis.step_costs, analysis.modules, analysis.repeated
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        if modules.root.backward_ns is None:
            return self.not_evaluated("backward wasn't timed by module")
        frozen = [one for one in _frozen(modules.modules) if not _is_constant(analysis, one.path)]
        cost_ns = sum(one.forward_ns or 0 for one in frozen)
        share = cost_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean("Frozen modules take little of the forward pass.")
        if seen is None or seen.num_compared < self.least_compared:
            return self.not_evaluated("too few samples were fetched twice")
        if seen.num_equal < seen.num_compared:
            return self.clean("Samples of the same index differ between epochs.")
        waste = None if analysis.cost is None else analysis.cost.waste
        known = {one.path: one for one in (() if waste is None else waste.frozen)}
        if not any(one.path in known for one in frozen):
            return self.not_evaluated("it is unknown whether frozen modules change or get random input")
        frozen = [one for one in frozen if one.path in known and _repeats_itself(known[one.path])]
        cost_ns = sum(one.forward_ns or 0 for one in frozen)
        share = cost_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
        if share is None or not self.is_found(share, cost_ns):
            return self.clean("Frozen modules change or get other input in each epoch.")
        names = ", ".join(one.path for one in frozen[:3])
        step = None if analysis.setup is None else analysis.setup.module_hooks.get("training_step")
        return (
            self.found(
                f"{names} is frozen, yet takes {COST} to recompute its outputs for the same samples"
                " every epoch.",
                f"Compute the outputs of {names} once, in the data set.",
                self.severity(share),
                title=f"Frozen {names} recomputes outputs every epoch",
                saving_ns=cost_ns,
                places=[] if step is None else [step],
                evidence=[
                    duration("frozen forward per step", cost_ns),
                    count("samples compared", seen.num_compared),
                ],
            ),
        )


class UnusedOutputs(ShareRule, frozen=True, kw_only=True):
    """Modules much of whose output the loss does not depend on, as its gradient is 0 or none came.

    Such are logits of padding, experts that a sample was not sent to, a branch whose loss has the weight 0.
    Seen in the one counted step, row by row (see ``UnusedOutput``). The saving is the unused part of forward
    and backward of the innermost modules. Samples that got no gradient anywhere, as a hinge loss leaves those
    out that are right already, do not count: that is known only when they have been computed.

    A module with attention, a recurrent layer or BatchNorm in training mode makes a row of several rows.
    There a row counts only if the module's input gets no gradient in it either, as with masked padding.

    Caveats:
        Rows whose gradient happens to be 0 in this step count as unused. What else is computed of unused rows
        outside of modules, such as a softmax, is not in the time. A part of such a module that mixes no rows,
        such as the last block's MLP, is not advised by itself.

    Attributes:
        least_unused: of a module's rows, from which on its time counts.
    """

    kind: ClassVar[str] = "unused_outputs"
    title: ClassVar[str] = "Module computes unused output"
    healthy: ClassVar[str] = "Module outputs are used"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "forward and backward of the innermost modules, times the share of their rows (feature vectors,"
            " or samples) with zero gradient in the inspected step, without samples that got no gradient"
            " anywhere; from 30% of a module's rows. In modules that mix rows (attention, recurrent layers,"
            " BatchNorm), only rows whose input has zero gradient, such as masked padding. Gradients that are"
            " zero by chance count too"
        ),
        of="of the step time",
        where="the calling lines",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.30
    least_unused: float = 0.30

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, modules = analysis.step_costs, analysis.modules
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was inspected (set flops=True)")
        if isinstance(modules, Absent):
            return self.not_evaluated(f"modules: {modules.reason}")
        outputs = {one.path: one for one in analysis.cost.waste.outputs}
        if not outputs:
            return self.not_evaluated("no backward pass ran in the inspected step")
        layers = [one for one in outputs.values() if one.rows]
        everywhere = min((one.unused_samples / one.samples for one in layers), default=0.0)
        times = {one.path: (one.forward_ns or 0) + (one.backward_ns or 0) for one in modules.modules}
        unused = {one.path: one.unused / one.rows - everywhere for one in layers}
        wasted, cost_ns, share = self._wasted(unused, times, costs)
        if share is None or not self.is_found(share, cost_ns):
            return self.clean("The loss uses the modules' outputs.")
        kinds = {one.path: _mixed_in(one, analysis.cost.modules) for one in outputs.values()}
        name, within, is_mixed = _to_name(wasted, outputs, kinds)
        if is_mixed:
            unused = {
                path: min(part, _unused_input(outputs[path], name, outputs, kinds) - everywhere)
                for path, part in unused.items()
            }
            wasted, cost_ns, share = self._wasted(unused, times, costs)
            if share is None or not self.is_found(share, cost_ns):
                return self.clean("Used rows depend on the rows without gradient.")
            name, within, is_mixed = _to_name(wasted, outputs, kinds)
        rows = sum(one.rows for one in within)
        part = sum(round((unused[one.path] + everywhere) * one.rows) for one in within) / rows
        worst = sorted(wasted, key=lambda one: -wasted[one])
        called = name or " and ".join(worst[:2])
        if part == 1:
            action = f"Don't call {called}, or call it under torch.no_grad() every N steps."
        elif is_mixed:
            action = _shorter_input(called, within)
        elif _is_by_sample(within):
            action = f"Call {called} only with the samples that need it (y[i] = module(x[i]))."
        else:
            action = (
                f"Select the needed rows before {called} (module(x[mask]), labels[mask]). For padding, batch"
                " samples of similar length."
            )
        return (
            self.found(
                f"{percent(part)} of {called}'s output rows have zero gradient in the inspected step, which"
                f" costs {COST}.",
                action,
                self.severity(share),
                title=f"{percent(part)} of {called}'s output is unused",
                saving_ns=cost_ns,
                places=[
                    *(_padding_of(analysis, within) if is_mixed else ()),
                    *_calls_of(outputs, name, worst[0]),
                ],
                evidence=[
                    duration("time per step for unused rows", cost_ns),
                    ratio("unused rows", part),
                    count("output rows", rows),
                ],
            ),
        )

    def _wasted(
        self, unused: Mapping[str, float], times: Mapping[str, int], costs: StepCosts
    ) -> tuple[dict[str, float], float, float | None]:
        """Path → time of what is unused, where that is much; the sum; and its share of a step."""
        wasted = {
            path: part * times.get(path, 0) for path, part in unused.items() if part >= self.least_unused
        }
        cost_ns = sum(wasted.values())
        return wasted, cost_ns, cost_ns / costs.typical.wall_ns if costs.typical.wall_ns else None


def _to_name(
    wasted: Mapping[str, float], outputs: Mapping[str, UnusedOutput], kinds: Mapping[str, str]
) -> tuple[str, list[UnusedOutput], bool]:
    """The module to name, the layers in it, and whether leaving rows out before it changes the others."""
    name = _deepest_with(wasted, _MOST_OF_WASTE * sum(wasted.values()))
    within = [outputs[one] for one in wasted if not name or _is_in(one, name)]
    found = {kind for path, kind in kinds.items() if (_is_in(path, name) if name else path in wasted)}
    is_mixed = MIXES_ROWS in found or (MIXES_PLACES in found and not _is_by_sample(within))
    return name, within, is_mixed and any(one.unused < one.rows for one in within)


def _is_in(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _is_by_sample(layers: Sequence[UnusedOutput]) -> bool:
    """Whether most of what is unused is whole samples."""
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
    """What a module mixes; in runs that don't say, by the names of classes."""
    if output.mixes is not None:
        return output.mixes
    names = [one.type_name.lower() for one in modules if _is_in(one.path, output.path)]
    if any(part in name for name in names for part in _MIXERS):
        return MIXES_ROWS
    return MIXES_PLACES if any("conv" in name or "pool" in name for name in names) else MIXES_NOTHING


def _unused_input(
    output: UnusedOutput, name: str, outputs: Mapping[str, UnusedOutput], kinds: Mapping[str, str]
) -> float:
    """The share of rows on which no other row depends, for a layer in a module that is to be named.

    Of the outermost module around the layer that mixes rows; a layer that is in none is not bound by others.
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
"""Of the time, what has to be in a module for it to be named."""


def _deepest_with(wasted: Mapping[str, float], least: float) -> str:
    """The innermost module that holds so much; empty if it is the model."""
    parts = max(wasted, key=lambda one: wasted[one]).split(".")
    above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next(
        (
            one
            for one in above
            if sum(ns for path, ns in wasted.items() if f"{path}.".startswith(f"{one}.")) >= least
        ),
        "",
    )


def _calls_of(outputs: Mapping[str, UnusedOutput], name: str, worst: str) -> list[Place]:
    """The lines that call a module, or those in it; else the one that wastes most."""
    called = (
        [name] if name in outputs else [one for one in outputs if name and one.rpartition(".")[0] == name]
    )
    lines = dict.fromkeys(line for one in called or [worst] for line in outputs[one].lines)
    return [one.exact(module=name or worst) for one in lines]


def _padding_of(analysis: Analysis, layers: Sequence[UnusedOutput]) -> list[Place]:
    """Where the first loader's samples are made longer than they are, by the text of its functions."""
    setup = analysis.setup
    loader = setup.loaders[0] if setup is not None and setup.loaders else None
    is_padded = loader is not None and any(one.unused_places for one in layers)
    places = [loader.collate, loader.dataset] if loader is not None and is_padded else []
    return [
        one.exact(line=line)
        for one in places
        if one is not None and not one.is_library and one.file is not None and one.line is not None
        for line in padding_lines(one.file, one.line, analysis.info.created)
    ][:_MOST_PADDING]


_MOST_PADDING: Final = 2
"""Lines that are named."""


class ManyCalls(ShareRule, frozen=True, kw_only=True):
    """Modules that a step calls again and again, as one call for each sample, and what they take.

    The outermost that are called so often; a recurrent cell is the business of ``slow_line_in_module``. What
    one call with all inputs would save is not known.

    So with lines that call ``torch.autograd.grad`` so often, as once for each output: of the samples there
    all but one call's part is the most that one batched call can save.

    Caveats:
        Calls of which each needs the result of the one before, as of a decoder that writes word by word,
        cannot be put together.

    Attributes:
        least_calls: in a step.
    """

    kind: ClassVar[str] = "many_calls"
    title: ClassVar[str] = "Module called many times per step"
    healthy: ClassVar[str] = "Module calls are batched"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "the outermost module with parameters (no recurrent cell) with at least 16 calls per step, by"
            " the time of its calls. How much one batched call saves is unknown. Also lines with at least 16"
            " calls of `torch.autograd.grad` per step, by samples (at least 10, minus two standard errors)"
        ),
        of="of the step time",
        where="the slowest line of the surrounding forward",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.20
    critical: float = 0.50
    least_calls: int = 16

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, modules = analysis.step_costs, analysis.modules
        times = None if analysis.cost is None else analysis.cost.times
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        gradients = self._gradients(analysis, costs)
        if isinstance(modules, Absent) or times is None:
            return gradients or self.not_evaluated("modules weren't timed (set flops=True)")
        calls = {one.path: one.calls / max(times.steps, 1) for one in times.times}
        often = [
            one
            for one in modules.modules
            if one.path
            and one.parameters
            and not one.type_name.endswith("Cell")
            and calls.get(one.path, 0.0) >= self.least_calls
            and calls.get(one.path.rpartition(".")[0], 1.0) < self.least_calls
        ]
        worst = max(often, key=lambda one: (one.forward_ns or 0) + (one.backward_ns or 0), default=None)
        taken_ns = 0 if worst is None else (worst.forward_ns or 0) + (worst.backward_ns or 0)
        share = taken_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
        if worst is None or share is None or not self.is_found(share, taken_ns):
            return gradients or self.clean("Modules with many calls take little of the step time.")
        number = round(calls[worst.path])
        return (
            *gradients,
            self.found(
                f"{worst.path} is called {number:,} times per step, which takes"
                f" {per_step(taken_ns, costs.step_ns)}.",
                f"Batch independent inputs with torch.cat or torch.stack, and call {worst.path} once.",
                Severity.WARNING,
                title=f"{worst.path} called {number:,} times per step",
                places=_calling_line(analysis, worst.path),
                evidence=[
                    count("calls per step", number),
                    duration("time per step in these calls", taken_ns),
                ],
            ),
        )

    def _gradients(self, analysis: Analysis, costs: StepCosts) -> tuple[Finding, ...]:
        """Lines that compute gradients so often, by samples."""
        hot, sites = analysis.hot_lines, None if analysis.cost is None else analysis.cost.sites
        if isinstance(hot, Absent) or sites is None:
            return ()
        times = Counter[tuple[str | None, int | None]]()
        for one in sites.lines:
            times[one.file, one.line] += one.gradients
        often = {place: number for place, number in times.items() if number >= self.least_calls}
        calls = hot.found_by(lambda path: _gradient_call(path, often), self.phases)
        taken_ns, wall_ns = calls.share * costs.loop.wall_ns, costs.loop.wall_ns
        least = calls.share - 2 * math.sqrt(calls.share * (1 - calls.share) / max(hot.num_samples, 1))
        if calls.samples < _LEAST_SAMPLES or not self.is_found(calls.share, taken_ns, least * wall_ns):
            return ()
        number = sum(often.values())
        saving_ns = taken_ns * (1 - 1 / number)
        return (
            self.found(
                f"torch.autograd.grad is called {number:,} times per step, which takes"
                f" {per_step(taken_ns, costs.step_ns)}.",
                "Batch independent calls with is_grads_batched=True, torch.func.vmap or jacrev. That saves up"
                f" to {milliseconds(saving_ns)} per step.",
                Severity.WARNING,
                title=f"torch.autograd.grad called {number:,} times per step",
                saving_ns=saving_ns,
                saving_is="up to",
                places=[location_at(line) for line in calls.lines],
                evidence=[
                    count("calls per step", number),
                    duration("time per step in these calls", taken_ns),
                    count("stack samples", calls.samples),
                ],
            ),
        )


_LEAST_SAMPLES: Final = 10


def _gradient_call(
    path: Sequence[StackFrame], lines: Collection[tuple[str | None, int | None]]
) -> int | None:
    """Where on a stack one of these lines has gradients computed."""
    at = next((n for n, one in enumerate(path) if (one.python_module, one.function) == _GRADIENT), len(path))
    caller = max((n for n, one in enumerate(path[:at]) if one.is_users), default=None)
    if at == len(path) or caller is None:
        return None
    return caller if (path[caller].file, path[caller].line) in lines else None


_GRADIENT: Final = ("torch.autograd", "grad")
"""Python module and function that compute gradients of what the caller names."""


def _calling_line(analysis: Analysis, path: str) -> list[Place]:
    """The line that takes most of the forward in which a module is called."""
    hot, cost, setup = analysis.hot_lines, analysis.cost, analysis.setup
    if isinstance(hot, Absent) or cost is None:
        return []
    forwards = {one.path: one.forward for one in cost.modules}
    around = [path.rpartition(".")[0], ""]
    places = [forwards.get(one) for one in around]
    places += [None if setup is None else setup.module_hooks.get("training_step")]
    for place in places:
        if place is not None and place.file is not None and place.line is not None:
            found = hot.inside(place.file, place.line)
            if found is not None:
                return [replace(location_at(found), inner=None, module=path)]
    return []


class SlowTorchModule(ShareRule, frozen=True, kw_only=True):
    """Torch's own modules without layers that dominate the step, with the arguments that aren't the defaults.

    Parametrizations, modules with a hook of torch's, such as spectral norm, and modules without parameters.
    Modules of one class with the same arguments are one finding. Of ``n_power_iterations`` the time beyond
    one iteration is the saving, as if all of it were iterations; of other arguments it isn't known.

    Caveats:
        Other arguments may change the results of the training.
    """

    kind: ClassVar[str] = "slow_torch_module"
    title: ClassVar[str] = "Costly PyTorch module options"
    healthy: ClassVar[str] = "No costly PyTorch module options"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "forward latency of torch's parametrizations, modules with torch's hooks and modules without"
            " parameters, by class and arguments, if an argument isn't the default. For `n_power_iterations`,"
            " the time above one iteration; other arguments are a hint from half of the step. Other arguments"
            " may change results. Also half of an `nn.MultiheadAttention` whose weights the calling"
            " line doesn't use"
        ),
        of="of the step time",
        where="the costly modules",
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.20
    critical: float = 0.50

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each class with its arguments."""
        costs, modules, cost = analysis.step_costs, analysis.modules, analysis.cost
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(modules, Absent) or cost is None:
            return self.not_evaluated("modules weren't timed (set flops=True)")
        times = {one.path: one.forward_ns or 0 for one in modules.modules}
        groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for one in cost.modules:
            iterates = any(argument.startswith(_ITERATIONS) for argument in one.arguments)
            if one.arguments and times.get(one.path) and (iterates or not one.parameters):
                groups.setdefault((one.type_name, one.arguments), []).append(one.path)
        found = self._unused_weights(analysis, costs, modules.modules)
        for (type_name, arguments), paths in groups.items():
            took_ns = sum(times[path] for path in paths) * max(1.0, module_pace(analysis))
            share = took_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
            if share is None or not self.is_found(share, took_ns):
                continue
            iterations = next((one for one in arguments if one.startswith(_ITERATIONS)), "")
            number = int(iterations.removeprefix(_ITERATIONS)) if iterations else 0
            if number < 2 and share < self.critical:
                continue
            paths.sort(key=lambda path: -times[path])
            told = ", ".join(arguments)
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            saving_ns = took_ns * (1 - 1 / number) if number > 1 else None
            found.append(
                self.found(
                    f"{paths[0]} ({type_name}, {told}){more} takes {per_step(took_ns, costs.step_ns)}.",
                    f"Use a cheaper module, or cheaper options than {told} (may change results)."
                    if saving_ns is None
                    else f"Try {_ITERATIONS}1, torch's default (currently {number}). This saves up to"
                    f" {milliseconds(saving_ns)} per step (may change results).",
                    Severity.INFO if saving_ns is None else self.severity(share),
                    title="A PyTorch module dominates the step" if saving_ns is None else "",
                    saving_ns=saving_ns,
                    saving_is="up to",
                    places=[Place(module=path) for path in paths[:3]],
                    evidence=[
                        duration("forward time per step", took_ns),
                        count("modules", len(paths)),
                    ],
                )
            )
        return tuple(found) or self.clean(
            "PyTorch modules with non-default options take little of the step time."
        )

    def _unused_weights(
        self, analysis: Analysis, costs: StepCosts, modules: tuple[ModuleCost, ...]
    ) -> list[Finding]:
        """Attention that makes weights nobody uses, which keeps torch from its fused kernels."""
        sites = None if analysis.cost is None else analysis.cost.sites
        attention = {one.path: one for one in modules if one.type_name == "MultiheadAttention"}
        lines = [one for one in (() if sites is None else sites.lines) if one.phase == "forward"]
        calls: dict[str, list[Place]] = {}
        for one in lines:
            if one.module in attention and one.file is not None and one.line is not None:
                place = one.exact(module=one.module)
                calls.setdefault(one.module, []).append(place)
        created = analysis.info.created
        unused = {
            path: places
            for path, places in calls.items()
            if all(ignores_weights(one.file or "", one.line or 0, created) for one in places)
        }
        own_ns = sum(_own_ns(attention[path], modules) for path in unused) * max(1.0, module_pace(analysis))
        saving_ns = _OF_ATTENTION * own_ns
        share = saving_ns / costs.typical.wall_ns if costs.typical.wall_ns else None
        if not unused or share is None or not self.is_found(share, saving_ns):
            return []
        paths = sorted(unused, key=lambda path: -_own_ns(attention[path], modules))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        places = list(dict.fromkeys(replace(one, module="") for path in paths for one in unused[path]))
        return [
            self.found(
                f"Nothing uses the attention weights of {paths[0]}{more} (MultiheadAttention), and torch"
                f" can't run its fused attention with them: up to {COST}.",
                "Pass need_weights=False in this call. That saves up to"
                f" {milliseconds(saving_ns)} per step. Results differ by rounding.",
                self.severity(share),
                title="Unused attention weights",
                saving_ns=saving_ns,
                saving_is="up to",
                places=places[:3],
                evidence=[
                    duration("attention per step in forward and backward", own_ns),
                    count("modules", len(paths)),
                ],
            )
        ]


_OF_ATTENTION: Final = 0.5
"""What fused attention saves of one without its output projection. Source: a measurement on two CPUs."""


def _own_ns(module: ModuleCost, modules: tuple[ModuleCost, ...]) -> int:
    """Forward and backward of a module without the modules in it."""
    inside = [one for one in modules if one.path.rpartition(".")[0] == module.path]
    return (
        (module.forward_ns or 0)
        + (module.backward_ns or 0)
        - sum((one.forward_ns or 0) + (one.backward_ns or 0) for one in inside)
    )


_ITERATIONS: Final = "n_power_iterations="


def _is_constant(analysis: Analysis, path: str) -> bool:
    """Whether all that a module runs is the same in each step, of which ``constant_work`` tells."""
    sites = None if analysis.cost is None else analysis.cost.sites
    lines = [
        one
        for one in (() if sites is None else sites.lines)
        if one.phase == "forward" and (one.module == path or one.module.startswith(f"{path}."))
    ]
    return bool(lines) and all(one.constant == one.own_calls for one in lines)


def _repeats_itself(seen: FrozenModule) -> bool:
    """Whether a frozen module computes the same for the same sample in every step."""
    return not (seen.changes or seen.has_varying_input)


def _frozen(modules: tuple[ModuleCost, ...]) -> list[ModuleCost]:
    """The outermost modules that ran forward, have no trainable parameter and let no gradient pass."""
    found: list[ModuleCost] = []
    for module in modules:
        if found and module.path.startswith(f"{found[-1].path}."):
            continue
        is_frozen = bool(module.path and module.parameters) and not module.trainable
        if is_frozen and module.forward_ns and not module.backward_ns:
            found.append(module)
    return sorted(found, key=lambda one: -(one.forward_ns or 0))


def _frozen_at_the_start(modules: tuple[ModuleCost, ...]) -> list[ModuleCost]:
    """The outermost modules without a trainable parameter, up to the first module that has one itself."""
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
    """Whether it trains more than its children do, as with the factors LoRA puts beside a frozen layer."""
    prefix = f"{module.path}." if module.path else ""
    children = (
        one
        for one in modules
        if one.path and one.path.startswith(prefix) and "." not in one.path[len(prefix) :]
    )
    return (module.trainable or 0) > sum(one.trainable or 0 for one in children)


class ConvolutionBiasBeforeBatchNorm(Rule, frozen=True, kw_only=True):
    """A convolution with a bias right before a BatchNorm of as many channels.

    What it costs is not measured: no saving, and never a warning.
    """

    kind: ClassVar[str] = "conv_bias_before_batchnorm"
    title: ClassVar[str] = "Redundant conv bias before BatchNorm"
    healthy: ClassVar[str] = "No redundant conv biases"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "a convolution with a bias, followed (in a Sequential, or by name) by a BatchNorm with as many"
            " channels, which subtracts the bias with the mean and has its own; a hint"
        ),
        where="the convolutions",
    )
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    least: int = 1
    """So many of them are a finding."""

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        if analysis.setup is None:
            return self.not_evaluated(NO_SETUP)
        pairs = analysis.setup.convolution_biases
        if len(pairs) < self.least:
            return self.clean("No convolution with a bias is known to precede a BatchNorm.")
        first = pairs[0]
        certain = all(pair.is_sequential for pair in pairs)
        return (
            self.found(
                f"{first.normalisation} cancels out the bias of {first.convolution}"
                + (
                    f" ({len(pairs) - 1} other convolution{'s are' if len(pairs) > 2 else ' is'} affected)"
                    if len(pairs) > 1
                    else ""
                )
                + ("." if certain else ", assuming that their names reflect their order."),
                "Set bias=False.",
                Severity.INFO,
                places=[
                    (pair.owner or Place()).exact(module=pair.convolution, is_exact=False) for pair in pairs
                ],
                evidence=[count("affected convolutions", len(pairs))],
            ),
        )


class DenseEmbeddings(ShareRule, frozen=True, kw_only=True):
    """Embeddings with dense gradients, of which a step looks up few rows, and the time of the optimizer.

    The saving is the share of the phases Optimization and Zero grad that unused rows have of all trainable
    parameters. Making the gradient, which is mostly zeros, comes on top and is not counted.

    Attributes:
        most_used: share of a table's rows that a step looks up at most.
    """

    kind: ClassVar[str] = "dense_embeddings"
    title: ClassVar[str] = "Unused embedding rows are updated"
    healthy: ClassVar[str] = "Embedding updates are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "CPU training: embeddings with dense gradients where the inspected step looks up at most a"
            " quarter of the rows, by the unused rows' share of all trainable parameters, of Optimization"
            " and Zero grad. With sparse gradients, Adam's averages of other rows don't decay, which may"
            " change results"
        ),
        where="`Embedding(...)` calls",
    )
    phases: ClassVar[tuple[str, ...]] = ("optimizer", "zero_grad")
    bound: ClassVar[str | None] = "optimizer_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.05
    critical: float = 0.20
    most_used: float = 0.25

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, modules = analysis.step_costs, analysis.modules
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("only checked for CPU training")
        if analysis.cost is None or analysis.cost.waste is None:
            return self.not_evaluated("no step was inspected (set flops=True)")
        if isinstance(modules, Absent) or not modules.root.trainable:
            return self.not_evaluated("the model's parameters are unknown")
        tables = [one for one in analysis.cost.waste.tables if one.used <= self.most_used * one.rows]
        unused = sum((one.rows - one.used) * one.columns for one in tables)
        part = min(1.0, unused / modules.root.trainable)
        usual_ns = part * sum(costs.usual_ns(costs.typical, phase) or 0.0 for phase in self.phases)
        wall_ns, cost_ns = costs.usual_wall_ns(costs.typical), part * costs.in_step_ns(self.phases)
        share = usual_ns / wall_ns if wall_ns else None
        if share is None or not self.is_found(share, usual_ns):
            return self.clean("Updating unused embedding rows takes little time.")
        first = max(tables, key=lambda one: one.rows * one.columns)
        return (
            self.found(
                f"The optimizer updates all {first.rows:,} rows of {first.path}, but a step uses at most"
                f" {first.used:,}. Unused rows take {COST}.",
                "Use nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, SGD or Adagrad (may"
                " change results).",
                self.severity(share),
                saving_ns=cost_ns,
                places=lines_that_call(analysis.setup, "Embedding", "EmbeddingBag"),
                evidence=[
                    duration("time per step for unused rows", cost_ns),
                    ratio("parameters in unused rows", part),
                    count("rows in the largest table", first.rows),
                    count("rows used per step", first.used),
                ],
            ),
        )
