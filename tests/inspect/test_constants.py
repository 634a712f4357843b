"""Operators that compute the same result in every step are found."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.lines.constants import ConstantWatch
from lightning_modelprof.inspect.lines.sites import SiteWatch
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.lines import constant_work
from lightning_modelprof.report.rules.repeats import frozen_forward
from lightning_modelprof.run.batches import RepeatedSamples
from lightning_modelprof.run.model_cost import FrozenModule, StepWaste
from lightning_modelprof.run.sites import LineCount, StepSites
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support.diagnosed import MS, analysis_of, cost_of, only, steps_of


class Stations(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True).requires_grad_(False)
        self.register_buffer("places", torch.arange(8.0).reshape(4, 2))
        self.plain = torch.ones(4)
        self.register_buffer("mean", torch.zeros(2))


BATCH = torch.ones(4, 2)


def distances(model, _batch):
    return torch.cdist(model.places, model.places)


def neighbours(model, batch):
    return distances(model, batch).topk(2).indices + torch.arange(2)


def positions(_model, batch):
    return torch.arange(batch.shape[0]).float()[:, None].sin()


def plain(model, _batch):
    return model.plain * 2


def of_frozen_module(model, _batch):
    return model.frozen(model.places)


def of_frozen_attention(model, _batch):
    """torch calls an operator with a dropout argument, which is 0."""
    return model.attention(*[model.places[None]] * 3, need_weights=False)[0] * 1


def of_averaged_module(model, batch):
    """A moving average of another model, written in a way that doesn't increase its version."""
    found = model.frozen(model.places)
    model.frozen.weight.data.mul_(0.9).add_(batch[:2], alpha=0.1)
    return found * 1


def of_scaled_buffer(model, _batch):
    found = model.places * 2
    model.places.data.mul_(0.9)
    return found * 1


def of_batch(model, batch):
    return model.places + batch


def of_parameter(model, _batch):
    return model.places @ model.linear.weight


def random(model, _batch):
    return model.places * torch.rand(4, 2)


def dropped(model, _batch):
    return nn.functional.dropout(model.places, 0.5)


def written(model, batch):
    out = torch.zeros(4, 2)
    out[1:] = batch[1:]
    return out * 2


def written_by_a_constant(model, _batch):
    out = torch.zeros(4, 2)
    out[1:] = model.places[1:]
    return out * 2


def changed(model, batch):
    model.mean.add_(batch.mean(0))
    return model.mean * 2


def changed_afterwards(model, batch):
    out = model.mean * 2
    model.mean = model.mean + batch.mean(0)
    return out


@pytest.mark.parametrize(
    "run",
    [
        distances,
        neighbours,
        positions,
        plain,
        written_by_a_constant,
        of_frozen_module,
        of_frozen_attention,
    ],
)
def test_constant_results_are_found(run):
    assert last_is_constant(run)


@pytest.mark.parametrize(
    "run",
    [
        of_batch,
        of_parameter,
        random,
        dropped,
        written,
        changed,
        changed_afterwards,
        of_averaged_module,
        of_scaled_buffer,
    ],
)
def test_varying_results_are_not_constant(run):
    assert not last_is_constant(run)


def last_is_constant(run):
    """Whether a run's last operator is constant, and certain to be so at the end of the step."""
    model, seen = Stations(), []
    watch = ConstantWatch(model)

    def look(func, args, kwargs, result, _where, **_):
        seen.append(watch(func, args, kwargs, result, is_view=bool(func.is_view)))

    with FlopCounter(model, force_eager=False, watches=(look,)):
        kept = run(model, BATCH)
        if run is changed_afterwards:
            seen.append(True)
    assert kept is not None
    return seen[-1] and watch.is_sure()


def test_reused_memory_is_not_constant():
    """A batch may be placed where a constant was."""
    model = Stations()
    watch = ConstantWatch(model)
    calls = []

    def look(func, args, kwargs, result, _where, **_):
        calls.append(watch(func, args, kwargs, result, is_view=bool(func.is_view)))

    with FlopCounter(model, force_eager=False, watches=(look,)):
        for _ in range(50):
            distances(model, BATCH)  # freed immediately
            torch.from_numpy(BATCH.numpy()) + 1
    assert calls == [True, *[False] * (len(calls) // 50 - 1)] * 50


def test_lines_count_constant_operators():
    model = Stations()
    watch = SiteWatch(root=model)
    watch.begin()
    with FlopCounter(model, force_eager=False, watches=(watch,)):
        distances(model, BATCH)
        of_batch(model, BATCH)
    watch.end()
    found = {one.function: (one.constant, one.calls) for one in watch.result().lines}
    assert found["of_batch"] == (0, 1)
    constant, calls = found["distances"]
    assert constant == calls > 0


def judged(*, constant, samples=40, callers=((), ())):
    """Judge a line with 3 operators, some of them constant, and some of 100 samples of steps of 20 ms.

    The frames in ``callers`` call the two lines.
    """
    frames = tuple(
        StackFrame(
            file="net.py", line=line, function=name, function_line=5, python_module="net", is_users=True
        )
        for line, name in ((7, "knn"), (9, "knn"), (20, "graph"), (30, "training_step"))
    )
    stacks = StackSamples(
        frames=frames,
        stacks=tuple(
            SampledStack(
                phase="forward", frames=(*callers[index], index), samples=number, time_ns=number * MS
            )
            for index, number in enumerate((samples, 100 - samples))
        ),
        samples=100,
    )
    line = LineCount(
        file="net.py",
        line=7,
        function="knn",
        function_line=5,
        module="graph",
        phase="forward",
        calls=4,
        views=1,
        operators=3,
        elements=1,
        num_bytes=1,
        constant=constant,
    )
    cost = replace(cost_of(("", 0, 0, 0)), sites=StepSites(step=3, device="cpu", sites=(), lines=(line,)))
    return only(judge(constant_work, analysis_of(steps_of(forward=20), cost=cost, stacks=stacks)))


def test_saving_of_constant_line():
    """40 of 100 samples of 20 ms."""
    found = judged(constant=3)
    assert found.saving_ns_per_step == pytest.approx(8 * MS)
    assert found.severity is Severity.CRITICAL
    assert found.title == "Constant result of knn is recomputed every step"
    assert [(one.line, one.module) for one in found.locations] == [(7, "graph")]


@pytest.mark.parametrize(
    ("others", "place"),
    [((3,), (20, 7)), ((), (30, 20)), ((3, 2), (7, None))],
    ids=["training_step calls another line", "all of training_step", "its caller calls another line"],
)
def test_location_is_outermost_exclusive_caller(others, place):
    """The outermost caller that calls nothing else that takes time; line 9 is the other line."""
    [found] = judged(constant=3, callers=((3, 2), others)).locations
    assert (found.line, found.inner and found.inner.line) == place


def frozen(*constant):
    """A tower of two untrainable layers; the given number of each layer's 3 operators is constant."""
    lines = tuple(
        LineCount(
            file="net.py",
            line=7,
            function="forward",
            function_line=5,
            module=f"tower.{number}",
            phase="forward",
            calls=4,
            views=1,
            operators=3,
            elements=1,
            num_bytes=1,
            constant=one,
        )
        for number, one in enumerate(constant)
    )
    cost = replace(
        cost_of(("", 0, 0, 0), ("tower", 0, 8, 0), ("head", 5, 4, 6)),
        sites=StepSites(step=3, device="cpu", sites=(), lines=lines),
        waste=StepWaste(frozen=(FrozenModule(path="tower", changes=False, has_varying_input=False),)),
    )
    repeated = RepeatedSamples(num_indices=9, num_compared=20, num_equal=20, sample_bytes=8)
    analysis = analysis_of(steps_of(forward=12, backward=6), cost=cost, repeated=repeated)
    return only(judge(frozen_forward, analysis))


def test_frozen_module_with_constant_input_is_not_cacheable():
    assert frozen(3, 2).status is Status.FOUND
    assert frozen(3, 3).status is Status.CLEAN


@pytest.mark.parametrize("given", [{"constant": 2}, {"constant": 3, "samples": 9}], ids=["one is not", "few"])
def test_small_saving_is_clean(given):
    assert judged(**given).status is Status.CLEAN
