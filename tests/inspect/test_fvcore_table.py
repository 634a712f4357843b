"""fvcore's counts and its unsupported operators come from a copy that leaves the model unchanged."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
from lightning_modelprof.run.model_cost import ForwardCount
from tests.support.fits import run_script


def table_of(model, *batch):
    return forward_table(model, lambda copied, arguments: copied(*arguments), batch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head, self.spare = nn.Dropout(), nn.Linear(8, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.weight = nn.Parameter(torch.ones(2, 5))

    def forward(self, batch):
        y = self.drop(self.norm(self.conv(batch["x"])).mean((2, 3)))
        for block in self.blocks:
            y = block(y)
        self.seen = self.head(y) @ self.weight  # reaches no result


CONV, BLOCK, HEAD, OWN = 4 * 8 * 8 * 8 * 3 * 9, 4 * 8 * 8, 4 * 8 * 2, 4 * 2 * 5


def test_counts_by_module_and_operator():
    table = table_of(Net(), {"x": torch.ones(4, 3, 8, 8), "names": ["a"] * 4})
    assert table.counts == (
        ForwardCount(module="", operator="matmul", macs=OWN),
        ForwardCount(module="conv", operator="conv", macs=CONV),
        ForwardCount(module="head", operator="linear", macs=HEAD),
        ForwardCount(module="blocks.0", operator="linear", macs=BLOCK),
        ForwardCount(module="blocks.1", operator="linear", macs=BLOCK),
    )
    linear, conv = 8 * 8 + 8, 8 * 27 + 8
    assert table.parameters == {
        "": conv + 16 + 18 + 6 + 2 * linear + 10,
        "conv": conv,
        "norm": 16,
        "drop": 0,
        "head": 18,
        "spare": 6,
        "blocks": 2 * linear,
        "blocks.0": linear,
        "blocks.1": linear,
    }
    assert list(table.activations) == list(table.parameters)
    out, block = 4 * 8 * 64, 4 * 8
    assert {path: number for path, number in table.activations.items() if number} == {
        "": out + 2 * block + 4 * 2 + 4 * 5,
        "conv": out,
        "head": 8,
        "blocks": 2 * block,
        "blocks.0": block,
        "blocks.1": block,
    }
    assert table.uncalled == ("spare",)
    assert table.unsupported["aten::mean"] == 1
    assert not table.unsupported.keys() & {"aten::batch_norm", "aten::dropout", "aten::linear"}


def test_compiled_parts_are_counted_uncompiled():
    model = nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager"))
    assert table_of(model, torch.ones(2, 8)).counts == (
        ForwardCount(module="0", operator="linear", macs=128),
    )


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.metric = nn.Linear(8, 4), torchmetrics.classification.MulticlassAccuracy(4)

    def forward(self, x, y):
        self.metric(self.layer(x), y)


def test_model_with_changing_metric_hash_is_counted():
    model, batch = Scored(), (torch.ones(6, 8), torch.zeros(6, dtype=torch.long))
    model(*batch)
    assert table_of(model, *batch).counts == (ForwardCount(module="layer", operator="linear", macs=192),)
    assert type(model.metric) is torchmetrics.classification.MulticlassAccuracy


class Attending(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)


def test_no_subclass_is_created_of_user_class():
    known = []

    class Registered(torchmetrics.MeanMetric):
        def __init_subclass__(cls):
            known.append(cls)

    model = nn.Sequential(nn.Linear(2, 2))
    model.metric = Registered()
    with pytest.raises(KeyError):  # fvcore loses track of it
        table_of(model, torch.ones(1, 2))
    assert known == []


def test_unsupported_operators_are_listed_like_in_fvcore():
    table = table_of(Attending(8, 2), torch.ones(3, 2, 8))
    assert table.unsupported["aten::scaled_dot_product_attention"] == 1
    assert table.uncalled == ("out_proj",)  # its weights are used without calling it


def raises(_copied, _arguments):
    raise RuntimeError("this batch")


def test_errors_propagate_and_failed_copies_are_explained():
    with pytest.raises(RuntimeError, match=r"^this batch$"):
        forward_table(nn.Linear(2, 2), raises, ())
    assert torch._C._get_tracing_state() is None
    with pytest.raises(ModelProfError, match="the batch can't be copied: TypeError"):
        table_of(nn.Linear(2, 2), (n for n in range(3)))


class Touchy(nn.Module):
    """Changes everything that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.metric, self.calls, self.seen = torchmetrics.MeanMetric(), 0, []
        self.norm.register_forward_hook(keep)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.mul_(2))
        self.layer.bias.requires_grad = False
        self.metric.update(random.random() + np.random.rand() + torch.rand(()))
        return nn.functional.dropout(self.norm(self.layer(x)))


def keep(_module, _inputs, output):
    return output * 1


def state_of(model, x):
    return {
        "tensors": [tensor.tolist() for tensor in (x, *model.parameters(), *model.buffers())],
        "attributes": [list(vars(module)) for module in model.modules()],
        "hooks": [
            list(value)
            for module in model.modules()
            for name, value in vars(module).items()
            if "hooks" in name
        ],
        "own": (model.calls, list(model.seen), model.layer.bias.requires_grad, model.layer.weight.grad),
        "metric": (model.metric._update_count, float(model.metric.mean_value)),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "global hooks": len(nn.modules.module._global_forward_pre_hooks),
        "modes": (torch.is_grad_enabled(), torch._C._get_tracing_state()),
    }


def test_model_batch_and_random_states_are_unchanged():
    model, x = Touchy(), torch.rand(6, 4)
    before = state_of(model, x)
    table = table_of(model, x)
    assert table.counts == (ForwardCount(module="layer", operator="linear", macs=96),)
    after = state_of(model, x)
    for key, value in before.items():
        assert after[key] == value, key


def test_fvcore_is_imported_late_and_quietly(tmp_path):
    program = """
import sys, warnings
warnings.simplefilter("always")
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
assert "fvcore" not in sys.modules
from torch import nn, ones
table = forward_table(nn.MultiheadAttention(4, 2), lambda model, batch: model(*batch), (ones(2, 4),) * 3)
assert "fvcore" in sys.modules and table.unsupported
"""
    result = run_script(program, cwd=tmp_path, has_ours=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
