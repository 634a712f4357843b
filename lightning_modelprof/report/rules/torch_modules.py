"""Do torch modules have options that cost time?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.module_tree import ModuleCost
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt, module_pace
from lightning_modelprof.report.advice.source import ignores_weights
from lightning_modelprof.report.model import Severity
from lightning_modelprof.report.one_step import COST, per_step
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
from lightning_modelprof.report.rules.unused import waste_of
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import milliseconds

_ITERATIONS: Final = "n_power_iterations="
_OF_ATTENTION: Final = 0.5
"""Share that fused attention saves, without the output projection. Source: a measurement on two CPUs."""


@rule(
    "slow_torch_module",
    title="Costly PyTorch module options",
    healthy="No costly PyTorch module options",
    of_words="of the step time",
    where="the costly modules",
    points_at=PointsAt.CHANGE,
    phases=("forward", "backward"),
    warning=0.20,
    critical=0.50,
)
def slow_torch_module(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Forward latency of torch's parametrizations, modules with torch's hooks and modules without parameters,
    by class and arguments, if an argument isn't the default. For `n_power_iterations`, the time above one
    iteration; other arguments are a hint from half of the step. Other arguments may change results. Also half
    of an `nn.MultiheadAttention` whose weights the calling line doesn't use."""
    costs, modules, cost = facts.step_costs, facts.get(Facts.modules), facts.get(Facts.cost)
    if modules is None or cost is None:
        raise NotMeasured("modules weren't timed (set flops=True)")
    yield from _unused_attention_weights(facts, modules.modules)
    times = {one.path: one.forward_ns or 0 for one in modules.modules}
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for one in cost.modules:
        iterates = any(argument.startswith(_ITERATIONS) for argument in one.arguments)
        if one.arguments and times.get(one.path) and (iterates or not one.parameters):
            groups.setdefault((one.type_name, one.arguments), []).append(one.path)
    for (type_name, arguments), paths in groups.items():
        took_ns = sum(times[path] for path in paths) * max(1.0, module_pace(facts))
        share = took_ns / costs.typical.wall_ns if costs.typical.wall_ns else 0.0
        iterations = next((one for one in arguments if one.startswith(_ITERATIONS)), "")
        number = int(iterations.removeprefix(_ITERATIONS)) if iterations else 0
        if number < 2 and not (limits.is_found(share, took_ns) and share >= limits.critical):
            continue
        paths.sort(key=lambda path: -times[path])
        options = ", ".join(arguments)
        # As if iterations took all of it; the cost of other arguments is unknown.
        saving_ns = took_ns * (1 - 1 / number) if number > 1 else None
        yield Found(
            title="A PyTorch module dominates the step" if saving_ns is None else "",
            what=f"{paths[0]} ({type_name}, {options}){_more(paths)} takes"
            f" {per_step(took_ns, costs.step_ns)}.",
            do=f"Use a cheaper module, or cheaper options than {options} (may change results)."
            if saving_ns is None
            else f"Try {_ITERATIONS}1, torch's default (currently {number}). This saves up to"
            f" {milliseconds(saving_ns)} per step (may change results).",
            saves_ns=saving_ns,
            saving_is="up to",
            judged_ns=took_ns,
            severity=Severity.INFO if saving_ns is None else None,
            at=[Place(module=path) for path in paths[:3]],
            evidence=[duration("forward time per step", took_ns), count("modules", len(paths))],
        )
    yield Passed(what="PyTorch modules with non-default options take little of the step time.")


def _more(paths: Sequence[str]) -> str:
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""


def _unused_attention_weights(facts: Facts, modules: Sequence[ModuleCost]) -> Iterator[Found]:
    sites = facts.get(Facts.sites)
    attention = {one.path: _own_ns(one, modules) for one in modules if one.type_name == "MultiheadAttention"}
    calls: dict[str, list[Place]] = {}
    for one in () if sites is None else sites.lines:
        is_call = one.phase == "forward" and one.module in attention
        if is_call and one.file is not None and one.line is not None:
            calls.setdefault(one.module, []).append(one.exact())
    created = facts.info.created
    unused = [
        path
        for path, places in calls.items()
        if all(ignores_weights(one.file or "", one.line or 0, created) for one in places)
    ]
    if not unused:
        return
    unused.sort(key=lambda path: -attention[path])
    own_ns = sum(attention[path] for path in unused) * max(1.0, module_pace(facts))
    saving_ns = _OF_ATTENTION * own_ns
    yield Found(
        title="Unused attention weights",
        what=f"Nothing uses the attention weights of {unused[0]}{_more(unused)} (MultiheadAttention), and"
        f" torch can't run its fused attention with them: up to {COST}.",
        do=f"Pass need_weights=False in this call. That saves up to {milliseconds(saving_ns)} per step."
        " Results differ by rounding.",
        saves_ns=saving_ns,
        saving_is="up to",
        at=list(dict.fromkeys(one for path in unused for one in calls[path]))[:3],
        evidence=[
            duration("attention per step in forward and backward", own_ns),
            count("modules", len(unused)),
        ],
    )


def _own_ns(module: ModuleCost, modules: Sequence[ModuleCost]) -> int:
    inside = [one for one in modules if one.path.rpartition(".")[0] == module.path]
    own_ns = (module.forward_ns or 0) + (module.backward_ns or 0)
    return own_ns - sum((one.forward_ns or 0) + (one.backward_ns or 0) for one in inside)


@rule(
    "conv_bias_before_batchnorm",
    title="Redundant conv bias before BatchNorm",
    healthy="No redundant conv biases",
    where="the convolutions",
    points_at=PointsAt.CHANGE,
    has_thresholds=False,
    least=1,
)
def conv_bias_before_batchnorm(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """A convolution with a bias, followed (in a Sequential, or by name) by a BatchNorm with as many channels,
    which subtracts the bias with the mean and has its own; a hint."""
    pairs = facts.setup.convolution_biases
    if not pairs or len(pairs) < limits.least:
        yield Passed(what="No convolution with a bias is known to precede a BatchNorm.")
        return
    first, others = pairs[0], len(pairs) - 1
    more = f" ({others} other convolution{'s are' if others > 1 else ' is'} affected)" if others else ""
    is_certain = all(pair.is_sequential for pair in pairs)
    yield Found(
        what=f"{first.normalisation} cancels out the bias of {first.convolution}{more}"
        + ("." if is_certain else ", assuming that their names reflect their order."),
        do="Set bias=False.",
        severity=Severity.INFO,
        at=[(pair.owner or Place()).exact(module=pair.convolution, is_exact=False) for pair in pairs],
        evidence=[count("affected convolutions", len(pairs))],
    )


_OF_UPDATES: Final = ("optimizer", "zero_grad")


@rule(
    "dense_embeddings",
    title="Unused embedding rows are updated",
    healthy="Embedding updates are cheap",
    where="`Embedding(...)` calls",
    bound="optimizer_bound",
    points_at=PointsAt.CHANGE,
    phases=_OF_UPDATES,
    warning=0.05,
    critical=0.20,
    most_used=0.25,
)
def dense_embeddings(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """CPU training: embeddings with dense gradients where the inspected step looks up at most a quarter of
    the rows, by the unused rows' share of all trainable parameters, of Optimization and Zero grad. With
    sparse gradients, Adam's averages of other rows don't decay, which may change results."""
    # Making the mostly zero gradient comes on top and isn't counted.
    if not loop_of(facts.info.loop).is_fit:
        raise NotMeasured(NOT_A_FIT)
    costs = facts.step_costs
    if not facts.is_on_cpu:
        raise NotMeasured("only checked for CPU training")
    tables = [one for one in waste_of(facts).tables if one.used <= limits.most_used * one.rows]
    modules = facts.get(Facts.modules)
    if modules is None or not modules.root.trainable:
        raise NotMeasured("the model's parameters are unknown")
    if tables:
        unused = sum((one.rows - one.used) * one.columns for one in tables)
        part = min(1.0, unused / modules.root.trainable)
        cost_ns, first = (
            part * costs.in_step_ns(_OF_UPDATES),
            max(tables, key=lambda one: one.rows * one.columns),
        )
        yield Found(
            what=f"The optimizer updates all {first.rows:,} rows of {first.path}, but a step uses at most"
            f" {first.used:,}. Unused rows take {COST}.",
            do="Use nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, SGD or Adagrad (may change"
            " results).",
            saves_ns=cost_ns,
            judged_ns=part * sum(costs.usual_ns(costs.typical, phase) or 0.0 for phase in _OF_UPDATES),
            whole_ns=costs.usual_wall_ns(costs.typical),
            at=lines_that_call(facts.get(Facts.setup), "Embedding", "EmbeddingBag"),
            evidence=[
                duration("time per step for unused rows", cost_ns),
                ratio("parameters in unused rows", part),
                count("rows in the largest table", first.rows),
                count("rows used per step", first.used),
            ],
        )
    yield Passed(what="Updating unused embedding rows takes little time.")
