"""Per-line counts besides operators: computed gradients, reduced parameters and float64 operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.lines.sites import SiteWatch
from lightning_modelprof.run.archive import decode_record, encode_record
from lightning_modelprof.run.sites import StepSites

NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
WEIGHTS = list(NET.parameters())


def counted(name, run):
    """The named count, summed over all lines in forward."""
    watch = SiteWatch(root=NET)
    with FlopCounter(NET, force_eager=False, watches=(watch,)):
        run()
    result = watch.result()
    assert result.dropped == ()
    assert decode_record(encode_record(result), StepSites) == result
    return sum(getattr(one, name) for one in result.lines if one.phase == "forward")


def one_by_one():
    inputs = torch.ones(2, 4, requires_grad=True)
    outputs = NET(inputs)
    return [torch.autograd.grad(outputs[:, n].sum(), inputs, create_graph=True)[0] for n in range(3)]


def by_a_function():
    return torch.autograd.functional.jacobian(lambda inputs: NET(inputs).sum(0), torch.ones(2, 4))


def batched():
    inputs = torch.ones(2, 4, requires_grad=True)
    outputs = NET(inputs).sum(0)
    return torch.autograd.grad(outputs, inputs, torch.eye(3), is_grads_batched=True)


def backward():
    for _ in range(3):
        NET(torch.ones(2, 4)).sum().backward()
    NET.zero_grad()


@pytest.mark.parametrize(("run", "calls"), [(one_by_one, 3), (by_a_function, 3), (batched, 1), (backward, 0)])
def test_calls_of_autograd_grad(run, calls):
    assert counted("gradients", run) == calls


@pytest.mark.parametrize(
    ("run", "reductions"),
    [
        (lambda: sum(one.pow(2).sum() for one in NET.parameters()), 4),
        (lambda: sum(one.norm() for one in NET.parameters()), 4),
        (lambda: sum(one.detach().flatten().abs().mean() for one in NET.parameters()), 4),
        (lambda: sum((one * one).sum() for one in NET[0].parameters()), 2),
        (lambda: torch._foreach_norm(WEIGHTS), 0),
        (lambda: NET(torch.ones(2, 4)).square().sum(), 0),
        (lambda: torch.sum(WEIGHTS[0] * torch.rand(8, 4)), 0),
        (lambda: WEIGHTS[0].sum(dim=1), 0),
    ],
    ids=["squares", "norms", "views", "products", "foreach", "of outputs", "with other numbers", "rows"],
)
def test_reductions_of_parameters(run, reductions):
    assert counted("reductions", run) == reductions


def test_frozen_parameters_are_not_reduced():
    NET[0].requires_grad_(False)
    try:
        assert counted("reductions", lambda: sum(one.square().sum() for one in WEIGHTS)) == 2
    finally:
        NET[0].requires_grad_(True)


def in_double():
    outputs = NET(torch.ones(2, 4)).double()
    return (outputs.log_softmax(1) * 2).float()


@pytest.mark.parametrize(
    ("run", "double", "to_double"),
    [
        (in_double, 4, 1),  # to float64, softmax, product, and back
        (lambda: torch.ones(3, dtype=torch.float64) + 1, 2, 1),
        (lambda: NET(torch.ones(2, 4)).log_softmax(1) * 2, 0, 0),
    ],
    ids=["converted", "made", "float32"],
)
def test_operators_in_float64(run, double, to_double):
    assert counted("double", run) == double
    assert counted("to_double", run) == to_double
    assert (counted("double_ns", run) > 0) is (double > 0)
