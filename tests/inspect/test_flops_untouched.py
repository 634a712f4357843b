"""Counting a call leaves the model, random states and compiled code unchanged."""

from __future__ import annotations

import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.flops.count import count_flops
from tests.support.flop_models import CASES, SMALL, SMALL_BACKWARD, Small, Wrapped, total

pytestmark = pytest.mark.slow


def state_of(model):
    return {
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called))
            for m in model.modules()
        ],
        "training": [m.training for m in model.modules()],
        "tensors": [t.clone() for t in model.state_dict().values()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "pickles": bool(pickle.dumps(model)),
    }


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in ("hooks", "training", "pickles"):
        assert left[key] == right[key]
    assert left["random"][1:] == right["random"][1:]
    assert torch.equal(left["random"][0], right["random"][0])
    for one, other in zip(left["tensors"] + left["grads"], right["tensors"] + right["grads"], strict=True):
        assert one is other is None or torch.equal(one, other)


def draws(function):
    def loss_fn(output):
        random.random()
        np.random.rand()
        return function(output)

    return loss_fn


def fails(output):
    raise RuntimeError("the loss")


@pytest.mark.parametrize("loss_fn", [None, total, fails])
def test_count_flops_changes_nothing(loss_fn):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2)
    )
    model[1].eval()
    model[1].momentum = None
    model[1].train()
    model[2].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    before, grad, buffer = state_of(model), model[0].weight.grad, model[1].running_mean
    if loss_fn is fails:
        with pytest.raises(RuntimeError, match="the loss"):
            count_flops(model, x, loss_fn=draws(fails))
    else:
        count_flops(model, x, loss_fn=loss_fn and draws(loss_fn))
    assert_same(before, state_of(model))
    assert model[0].weight.grad is grad
    assert model[1].running_mean is buffer
    assert x.grad is None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["convolutional", "lstm", "fused attention", "checkpoint, re-entrant", "einsum", "own function"],
)
def test_counted_step_is_bit_identical(name, precision):
    if name == "own function" and precision is torch.bfloat16:
        pytest.skip("mixes types under autocast, with and without counting")

    def step(counted):
        torch.manual_seed(1)
        found = CASES[name]()
        optimizer = torch.optim.AdamW(found.model.parameters())
        counter = FlopCounter(found.model)
        if counted:
            counter.__enter__()
        try:
            with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
                loss = total(found.model(*found.args))
            loss.backward()
            optimizer.step()
        finally:
            if counted:
                counter.__exit__(None, None, None)
                assert counter.flops
        return loss, state_of(found.model)

    try:
        plain_loss, plain = step(False)
    except RuntimeError as error:  # oneDNN has no bfloat16 LSTM for some CPUs
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("torch cannot run this on this CPU, with and without counting")
    counted_loss, counted = step(True)
    assert torch.equal(plain_loss, counted_loss)
    assert_same(plain, counted)


@pytest.mark.parametrize("compiled_before", [True, False])
def test_compiled_model_runs_compiled_after_counting(compiled_before):
    torch._dynamo.reset()
    events = Counter()

    def backend(graph, inputs):
        events["compiled"] += 1

        def run(*args):
            events["runs"] += 1
            return graph(*args)

        return run

    model, x = torch.compile(Small(), backend=backend), torch.randn(4, 16)
    if compiled_before:
        model(x)
    before = events["runs"]
    assert count_flops(model, x, loss_fn=total).macs == {"forward": SMALL, "backward": SMALL_BACKWARD}
    assert events["runs"] == before  # the counted call was eager: a graph would hide operators
    for _ in range(3):
        model(x)
    assert events == {"compiled": 1, "runs": before + 3}


def test_lazy_model_is_rejected():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelProfError, match=r"0\.weight"):
        count_flops(model, torch.ones(2, 3))
    assert nn.parameter.is_lazy(model[0].weight)


def test_caught_module_error_does_not_shift_attribution():
    def fail(x):
        raise ValueError

    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Wrapped(fail), nn.Linear(8, 8)

        def forward(self, x):
            try:
                self.bad(x)
            except ValueError:
                return self.good(x)

    count = count_flops(Careful(), torch.ones(1, 8))
    assert count.by_module["forward"] == {"": 128, "good": 128}


# ---- A real step of a compiled model runs compiled while it is counted


def training(model, counted, steps=4):
    """Losses and final weights of a few steps, one of them under a counter that doesn't force eager."""
    torch.manual_seed(2)
    x, losses = torch.randn(4, 16), []
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        if step == counted:
            with FlopCounter(model, force_eager=False):
                loss = model(x).square().sum()
                loss.backward()
                optimizer.step()
        else:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def small_compiled(backend, how):
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Small()
    if how == "wrapped":
        return torch.compile(model, backend=backend)
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("counted", [0, 2])
def test_counted_step_runs_compiled(counted, how):
    events = Counter()

    def backend(graph, inputs):
        events["compiled"] += 1

        def run(*args):
            events["runs"] += 1
            return graph(*args)

        return run

    training(small_compiled(backend, how), counted)
    assert events == {"compiled": 1, "runs": 4}  # compiled once and never skipped, even when counted


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("counted", [0, 2])
def test_counting_changes_no_compiled_result_or_compilation(backend, counted):
    from torch._dynamo.utils import counters  # noqa: PLC0415 - with Dynamo only

    results, compilations = [], []
    for when in (None, counted):
        model = small_compiled(backend, "wrapped")
        counters.clear()
        results.append(training(model, when))
        compilations.append((counters["stats"]["unique_graphs"], dict(counters["frames"])))
    assert compilations[0] == compilations[1]
    assert compilations[0][0] == 1
    for one, other in zip(*(losses + weights for losses, weights in results), strict=True):
        assert torch.equal(one, other)
