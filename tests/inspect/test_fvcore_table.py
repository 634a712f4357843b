"""fvcore's forward table against truths derived by hand; the traced call leaves no trace."""

from __future__ import annotations

import logging
import pickle
import random
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import library, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.flops.fvcore_handles import einsum_macs, may_hold_contractions
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
from lightning_modelprof.run.model_cost import ForwardCount


class Wrapped(nn.Module):
    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args):
        return self.function(*args)


def table_of(function, *args, **children):
    model = Wrapped(function, **children)
    return forward_table(model, lambda: model(*args))


def macs_of(table):
    """By operator, in all modules."""
    found = Counter()
    for count in table.counts:
        found[count.operator] += count.macs
    return dict(found)


def ones(*sizes, **options):
    return torch.ones(sizes, **options)


# ---- One rule at a time: what runs → fvcore's operator and its multiply-adds

CASES = {
    "linear": (lambda: F.linear(ones(2, 3, 4), ones(5, 4)), "linear", 2 * 3 * 4 * 5),
    "linear, one output": (lambda: F.linear(ones(2, 4), ones(4)), "linear", 2 * 4),
    "addmm": (lambda: torch.addmm(ones(3), ones(2, 4), ones(4, 3)), "addmm", 2 * 4 * 3),
    "addmm in place": (lambda: ones(2, 3).addmm_(ones(2, 4), ones(4, 3)), "addmm_", 2 * 4 * 3),
    "mm": (lambda: torch.mm(ones(2, 4), ones(4, 3)), "mm", 2 * 4 * 3),
    "bmm": (lambda: torch.bmm(ones(5, 2, 4), ones(5, 4, 3)), "bmm", 5 * 2 * 4 * 3),
    "matmul": (lambda: ones(5, 2, 4) @ ones(5, 4, 3), "matmul", 5 * 2 * 4 * 3),
    "matmul, broadcast": (lambda: ones(5, 6) @ ones(7, 6, 3), "matmul", 7 * 5 * 6 * 3),
    "matmul, vector first": (lambda: ones(6) @ ones(7, 6, 3), "matmul", 7 * 6 * 3),
    "matmul, vector last": (lambda: ones(7, 5, 6) @ ones(6), "matmul", 7 * 5 * 6),
    "matmul, vectors": (lambda: torch.matmul(ones(6), ones(6)), "matmul", 6),
    "linalg.matmul": (lambda: torch.linalg.matmul(ones(2, 4), ones(4, 3)), "matmul", 2 * 4 * 3),
    "inner": (lambda: torch.inner(ones(2, 3), ones(5, 3)), "inner", 2 * 5 * 3),
    "tensordot": (lambda: torch.tensordot(ones(3, 4, 5), ones(4, 5, 2), 2), "tensordot", 3 * 20 * 2),
    # A plain number of dimensions to sum over, and none at all.
    "tensordot, outer": (lambda: torch.tensordot(ones(3), ones(4), 0), "tensordot", 12),
    "mv": (lambda: torch.mv(ones(5, 6), ones(6)), "mv", 30),
    "addmv": (lambda: torch.addmv(ones(5), ones(5, 6), ones(6)), "addmv", 30),
    "dot": (lambda: torch.dot(ones(6), ones(6)), "dot", 6),
    "addr": (lambda: torch.addr(ones(2, 3), ones(2), ones(3)), "addr", 6),
    "baddbmm": (lambda: torch.baddbmm(ones(1), ones(5, 2, 4), ones(5, 4, 3)), "baddbmm", 5 * 2 * 4 * 3),
    "addbmm": (lambda: torch.addbmm(ones(1), ones(5, 2, 4), ones(5, 4, 3)), "addbmm", 5 * 2 * 4 * 3),
    "complex": (lambda: torch.mm(*[ones(4, 4, dtype=torch.cfloat)] * 2), "mm", 4 * 4**3),
    "convolution": (lambda: F.conv2d(ones(2, 4, 8, 8), ones(6, 2, 3, 3), groups=2), "conv", 2 * 36 * 6 * 18),
    "transposed": (lambda: F.conv_transpose1d(ones(2, 8, 64), ones(8, 4, 4)), "conv", 2 * 64 * 8 * 4 * 4),
    "padding same": (lambda: F.conv1d(ones(2, 4, 64), ones(8, 4, 5), padding="same"), "conv", 2 * 64 * 160),
    "without a batch": (lambda: F.conv2d(ones(4, 8, 8), ones(6, 4, 3, 3)), "conv", 36 * 6 * 36),
    # Scores of 3 queries of width 8 with 5 keys, then sums of values of width 4; 2 x 6 heads.
    "attention": (
        lambda: F.scaled_dot_product_attention(ones(2, 6, 3, 8), ones(2, 6, 5, 8), ones(2, 6, 5, 4)),
        "scaled_dot_product_attention",
        2 * 6 * 3 * 5 * (8 + 4),
    ),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", ones(5, 2, 4), ones(5, 4, 3)), "einsum", 5 * 2 * 4 * 3),
    # 7 rows, 3 outputs, all pairs of 4 and 5 features.
    "bilinear": (lambda: F.bilinear(ones(7, 4), ones(7, 5), ones(3, 4, 5)), "bilinear", 7 * 3 * 4 * 5),
    # More than 25 rows: by a matrix product with two more columns.
    "distances": (lambda: torch.cdist(ones(30, 6), ones(4, 6)), "cdist", 30 * 4 * (6 + 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule(name):
    function, operator, macs = CASES[name]
    table = table_of(function)
    assert macs_of(table) == {operator: macs}
    assert table.unsupported == {}
    assert table.activations[""] == function().numel()


RECURRENT = {
    # 3 sequences of 5 steps with 4 features and a state of 6; gates x state x (input + state) per step.
    "lstm": (nn.LSTM(4, 6), 4 * 6 * (4 + 6)),
    "two directions": (nn.LSTM(4, 6, bidirectional=True), 2 * 4 * 6 * (4 + 6)),
    "two layers": (nn.GRU(4, 6, 2, batch_first=True), 3 * 6 * (4 + 6 + 6 + 6)),
    # The state that goes round is projected to 2.
    "projected": (nn.LSTM(4, 6, proj_size=2), 4 * 6 * (4 + 2) + 6 * 2),
    "tanh": (nn.RNN(4, 6), 6 * (4 + 6)),
    "relu": (nn.RNN(4, 6, nonlinearity="relu"), 6 * (4 + 6)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name):
    layer, macs = RECURRENT[name]
    (count,) = forward_table(layer, lambda: layer(ones(5, 3, 4))).counts
    assert count.macs == 15 * macs
    rows = pack_sequence([ones(5, 4), ones(2, 4)])  # 7 steps in all
    table = forward_table(layer, lambda: layer(rows))
    assert [count.macs for count in table.counts] == [7 * macs]
    assert table.unsupported == {}


@pytest.mark.parametrize(
    ("equation", "shapes", "path", "macs"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)], None, 24),
        ("ij , jk", [(2, 3), (3, 4)], None, 24),  # without an arrow: what stands there once
        ("i,j->ij", [(20,), (30,)], None, 0),  # an outer product sums over nothing
        ("ij,ij->ij", [(2, 3), (2, 3)], None, 0),
        ("ij,jk->k", [(2, 3), (3, 4)], None, 12),  # i is summed before
        ("ij->i", [(2, 3)], None, 0),
        ("...ij,...jk->...ik", [(7, 2, 3), (5, 7, 3, 4)], None, 5 * 7 * 24),
        ("...i,i", [(7, 2, 3), (3,)], None, 42),
        ("bij,bjk->bik", [(1, 2, 3), (5, 3, 4)], None, 5 * 24),
        ("ij,jk->ik", [(2, 1), (1, 4)], None, 0),  # sums over one element: element-wise
        ("ij,jk->ik", [(0, 3), (3, 4)], None, 0),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)], None, 2 * 3 * 4 + 2 * 4 * 5),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)], [1, 2, 0, 1], 3 * 4 * 5 + 2 * 3 * 5),
        ("ii,ij->j", [(3, 3), (3, 4)], None, 12),
        # fvcore's own rule says 327,670: it rounds.
        ("bte,nhed->nbhtd", [(4, 5, 32), (2, 4, 32, 64)], None, 4 * 5 * 32 * 2 * 4 * 64),
    ],
)
def test_einsum_is_exact(equation, shapes, path, macs):
    assert einsum_macs(equation, shapes, path) == macs


# ---- Models, by module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head, self.spare = nn.Dropout(), nn.Linear(8, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        y = self.drop(self.norm(self.conv(x)).mean((2, 3)))
        for block in self.blocks:
            y = block(y)
        return self.head(y)


CONV, BLOCK, HEAD = 4 * 8 * 8 * 8 * 3 * 9, 4 * 8 * 8, 4 * 8 * 2


def test_a_model_by_module_and_operator():
    model = Net()
    table = forward_table(model, lambda: model(ones(4, 3, 8, 8)))
    assert table.counts == (
        ForwardCount(module="conv", operator="conv", macs=CONV),
        ForwardCount(module="head", operator="linear", macs=HEAD),
        ForwardCount(module="blocks.0", operator="linear", macs=BLOCK),
        ForwardCount(module="blocks.1", operator="linear", macs=BLOCK),
    )
    linear, conv = 8 * 8 + 8, 8 * 27 + 8
    assert table.parameters == {
        "": conv + 16 + 18 + 6 + 2 * linear,
        "conv": conv,
        "norm": 16,
        "drop": 0,
        "head": 18,
        "spare": 6,
        "blocks": 2 * linear,
        "blocks.0": linear,
        "blocks.1": linear,
    }
    out, block = 4 * 8 * 64, 4 * 8
    assert {path: number for path, number in table.activations.items() if number} == {
        "": out + 2 * block + 4 * 2,
        "conv": out,
        "head": 8,
        "blocks": 2 * block,
        "blocks.0": block,
        "blocks.1": block,
    }
    assert list(table.activations) == list(table.parameters) == [name for name, _ in model.named_modules()]
    assert (table.unsupported, table.uncalled, table.notes) == ({}, ("spare",), ())


class Step(nn.Module):
    """A step that calls children of one class, one of them twice, and whose result hangs on one of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.logged = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(16, 4)
        self.alias = self.a
        self.weight = nn.Parameter(torch.ones(16, 16))

    def training_step(self, batch):
        self.seen = self.logged(batch["x"]).sum()  # reaches no result
        return {"loss": self.b(self.alias(self.a(batch["x"])[:, :16])).sum(), "other": [None, batch]}


@pytest.mark.parametrize("result", [lambda out: out, lambda out: out["loss"], lambda out: None])
def test_a_step_with_any_result_counts_all_that_ran(result):
    model, batch = Step(), {"x": ones(4, 16), "names": ["a"] * 4}
    table = forward_table(model, lambda: result(model.training_step(batch)))
    found = {count.module: count.macs for count in table.counts}
    assert found == {"a": 2 * 4 * 16 * 32, "b": 4 * 32 * 8, "logged": 4 * 16 * 4}
    assert table.uncalled == ()
    assert table.activations[""] == 2 * 4 * 32 + 4 * 8 + 4 * 4
    assert not hasattr(model, "seen")


def test_work_of_the_model_itself_has_its_path():
    model = Step()
    table = forward_table(model, lambda: ones(2, 16) @ model.weight)
    assert table.counts == (ForwardCount(module="", operator="matmul", macs=2 * 16 * 16),)
    assert table.uncalled == ("a", "b", "logged")


@dataclass
class Batch:
    x: torch.Tensor


def test_dataclasses_and_other_objects():
    first, last = nn.Linear(16, 32), nn.Linear(32, 4)
    model = Wrapped(lambda batch: SimpleNamespace(y=Batch(last(first(batch.x)))), first=first, last=last)
    table = forward_table(model, lambda: model(Batch(ones(4, 16))))
    assert macs_of(table) == {"linear": 4 * 16 * 32 + 4 * 32 * 4}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    table = table_of(lambda x: checkpoint(block, x, use_reentrant=reentrant), ones(4, 8), block=block)
    assert {count.module: count.macs for count in table.counts} == {"block.0": 256, "block.2": 256}
    assert (table.unsupported, table.notes) == ({}, ())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        assert len(ctx.needs_input_grad) == 2
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, scale=2.0):
        return x @ weight * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, None


class Kernel(torch.autograd.Function):
    """A kernel of its own: torch sees only that room was made."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x).t().contiguous()
        np.multiply(x.numpy(), 2, out=out.t().numpy())
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


BOUND = Product.apply


@pytest.mark.parametrize("apply", [lambda *a: Product.apply(*a), NewStyle.apply, BOUND])  # noqa: PLW0108
def test_own_functions_count_by_what_is_inside(apply):
    layer = nn.Linear(32, 16, bias=False)  # its weight is 16 x 32
    weight = layer.weight
    table = table_of(lambda x: apply(x, weight), ones(4, 16), layer=layer)
    assert (macs_of(table), table.unsupported) == ({"matmul": 4 * 16 * 32}, {})
    x = ones(4, 16, requires_grad=True)
    apply(x, weight).sum()  # and have their gradients again
    Product.apply(x, weight).sum().backward()
    assert x.grad is not None


KEPT = Kernel.apply


@pytest.mark.parametrize("apply", [lambda x: Kernel.apply(x), KEPT])  # noqa: PLW0108
def test_own_kernels_are_listed_and_never_0(apply):
    table = table_of(lambda x: apply(apply(x)) @ x, ones(4, 4))
    assert table.unsupported == {"prim::PythonOp.Kernel": 2}
    assert macs_of(table) == {"matmul": 64}
    assert table.notes == ("fvcore can't see inside these autograd functions: Kernel.",)


def test_autograd_functions_are_as_before_a_trace():
    kinds = (torch.autograd.Function, torch.autograd.function._SingleLevelFunction)
    before = [dict(vars(kind)) for kind in kinds]
    table_of(Kernel.apply, ones(4, 4))
    assert [dict(vars(kind)) for kind in kinds] == before


@library.custom_op("modelprof_test_table::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def own_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def scripted(x):
    return x @ x if bool(x.sum() > 0) else x


def test_unknown_operators_are_listed_and_never_0():
    table = table_of(lambda x: own_product(x, own_product(x, x)).relu().softmax(-1), ones(4, 4))
    assert (table.unsupported, table.counts) == ({"modelprof_test_table::product": 2}, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = table_of(torch.jit.script(scripted), ones(4, 4))
    assert (table.unsupported, table.counts) == ({"prim::CallFunction": 1}, ())
    table = table_of(lambda x: torch.sparse.mm(x.to_sparse(), x), ones(4, 4))
    assert (table.unsupported, table.counts) == ({"aten::_sparse_mm": 1}, ())


def test_operands_without_shapes_are_listed():
    table = table_of(lambda x: x.to_sparse() @ x, ones(4, 4))
    assert table.unsupported == {"aten::matmul": 1}
    assert table.counts == ()
    assert table.notes == ("fvcore doesn't know the tensor shapes of aten::matmul.",)


NO_CONTRACTIONS = (
    "abs abs_ add_ avg_pool1d batch_norm binary_cross_entropy_with_logits cosine_similarity "
    "cross_entropy_loss dropout_ eq_ fft_rfft gelu interpolate layer_norm max_pool2d mse_loss mul ne "
    "nll_loss_nd outer pad reshape softmax sort stft to upsample_nearest2d view "
)


def test_what_cannot_hold_contractions_is_not_listed():
    assert [name for name in NO_CONTRACTIONS.split() if may_hold_contractions(f"aten::{name}")] == []
    # torch 2.11 lacks the last one.
    may = "chain_matmul linalg_multi_dot _sparse_mm _scaled_mm conv_tbc cov _foreach_mm"
    known = [name for name in may.split() if hasattr(torch.ops.aten, name)]
    assert len(known) >= 6
    assert all(may_hold_contractions(f"aten::{name}") for name in known)
    assert may_hold_contractions("torchvision::deform_conv2d")


def test_a_compiled_model_is_counted_and_stays_compiled():
    torch._dynamo.reset()
    events = Counter()

    def backend(graph, inputs):
        events["compiled"] += 1

        def run(*args):
            events["runs"] += 1
            return graph(*args)

        return run

    inner = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend=backend)
    other = nn.Linear(8, 8)
    other.compile(backend=backend)
    model, x = nn.Sequential(inner, other), ones(2, 8)
    model(x)
    before = dict(events)
    table = forward_table(model, lambda: model(x))
    assert {count.module: count.macs for count in table.counts} == {"0.0": 128, "1": 128}
    assert table.parameters == {"": 144, "0": 72, "0.0": 72, "1": 72}
    assert table.activations == {"": 32, "0": 16, "0.0": 16, "1": 16}
    assert table.uncalled == ()
    assert dict(events) == before
    model(x)
    assert events == {"compiled": before["compiled"], "runs": 2 * before["runs"]}


def test_the_fast_path_is_taken_apart():
    layer = 2 * 32 * 64 * (4 * 64 + 2 * 32 + 2 * 128)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    before = torch.backends.mha.get_fastpath_enabled()
    table = forward_table(model, lambda: model(ones(2, 32, 64)))
    assert sum(macs_of(table).values()) == 2 * layer
    assert table.unsupported == {}
    assert torch.backends.mha.get_fastpath_enabled() is before


# ---- Nothing is left behind


class Touchy(nn.Module):
    """Changes all that a forward pass can change."""

    def __init__(self, fails):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.register_buffer("lost", torch.zeros(2))
        self.plain, self.calls, self.list, self.dict = torch.zeros(2), 0, [], {}
        self.fails = fails
        self.conv.weight.grad = torch.ones_like(self.conv.weight)
        self.norm.register_forward_hook(hook)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.count += 1
        self.lost = self.lost + 1
        self.plain.add_(1)
        self.calls += 1
        self.list.append(x)
        self.dict["x"] = x
        self.eval()
        self.conv.bias.requires_grad = False
        self.conv.weight.grad = None
        self.metric.update(x.mean() + random.random() + np.random.rand() + torch.rand(()))
        self.norm.train()
        y = F.dropout(self.norm(self.conv(x)))
        if self.fails:
            raise RuntimeError("this batch")
        return y


def hook(module, inputs, output):
    return output * 1


def state_of(model):
    return {
        "hooks": [
            [list(value) for name, value in vars(m).items() if "hooks" in name] for m in model.modules()
        ],
        "training": [m.training for m in model.modules()],
        "tensors": [
            tensor.clone()
            for tensor in (*model.parameters(), *model.buffers(), model.plain, model.conv.weight.grad)
        ],
        "identities": [
            id(t) for t in (*model.parameters(), *model.buffers(), model.plain, model.conv.weight.grad)
        ],
        "attributes": [list(vars(m)) for m in model.modules()],
        "plain": (model.calls, model.list, model.dict, [p.requires_grad for p in model.parameters()]),
        "metric": (model.metric._update_count, model.metric._computed, float(model.metric.mean_value)),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "keys": list(model.state_dict()),
        "global hooks": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
        ),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), torch._C._get_tracing_state()),
        "functions": "apply" in vars(torch.autograd.function._SingleLevelFunction),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for one, other in zip(before.pop("tensors"), after.pop("tensors"), strict=True):
        assert torch.equal(one, other)
    for key in before:
        assert before[key] == after[key], key


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_everything_is_as_it_was(fails, kind):
    model = Touchy(fails)
    x = ones(2, 3, 8, 8)

    def call():
        try:
            return model(x)
        except RuntimeError as error:
            raise kind(*error.args) from None

    before = state_of(model)
    if not fails:
        table = forward_table(model, call)
        assert macs_of(table) == {"conv": 2 * 36 * 4 * 27}
        assert table.uncalled == ("metric",)  # updated, not called
    elif kind is RuntimeError:
        with pytest.raises(ModelProfError, match="RuntimeError: this batch"):
            forward_table(model, call)
    else:
        with pytest.raises(KeyboardInterrupt):
            forward_table(model, call)
    assert_same(before, state_of(model))
    assert pickle.loads(pickle.dumps(model)).calls == 0


def test_training_goes_on_bit_identically_under_autocast():
    """The cache of cast weights must not keep ones that have no gradient."""

    def train(counted):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
        x = torch.randn(16, 8)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)  # weights are in the cache
            if counted:
                assert sum(macs_of(forward_table(model, lambda: model(x))).values()) == 16 * 8 * 12
            loss = model(x).float().square().sum()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters()), *model.buffers()]

    plain, counted = train(False), train(True)
    assert len(plain) == 1 + 6 + 3  # loss, gradients, buffers
    for one, other in zip(plain, counted, strict=True):
        assert torch.equal(one, other)


def test_metrics_whose_hash_changes():
    metric = torchmetrics.classification.MulticlassAccuracy(4)
    layer = nn.Linear(8, 4)
    model = Wrapped(lambda x, y: metric(layer(x), y), layer=layer, metric=metric)
    batch = ones(6, 8), torch.zeros(6, dtype=torch.long)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(*batch)
        table = forward_table(model, lambda: model(*batch))
        assert macs_of(table) == {"linear": 6 * 8 * 4}
        assert table.unsupported == {}
        assert table.uncalled == ()


def test_a_lazy_model_is_refused():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelProfError, match=r"lazy 0\.weight"):
        forward_table(model, lambda: model(ones(2, 3)))
    assert nn.parameter.is_lazy(model[0].weight)


def test_a_step_that_asks_for_its_trainer_says_so_in_one_sentence():
    def step():
        raise RuntimeError("Net is not attached to a `Trainer`.")

    with pytest.raises(ModelProfError, match=r"`Trainer`\)\. The step uses its Trainer or optimizers"):
        forward_table(nn.Linear(2, 2), step)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x @ x).sum().backward(), "The step needs gradients"),
        (lambda x: x @ ones(4, 4).requires_grad_().detach_() @ LEAF, "isn't a parameter of the model"),
        (lambda x: nn.Linear(4, 4)(torch.nested.nested_tensor([x], layout=torch.jagged)), "nested tensor"),
        (torch.compile(lambda x: x @ x, backend="aot_eager"), "torch.compile wraps a function"),
        (
            lambda x: 1 / 0,
            r"ZeroDivisionError: division by zero\). The counted FLOPs don't depend on this table",
        ),
    ],
)
def test_what_cannot_be_traced_says_why(function, reason):
    model = nn.Linear(4, 4)
    with pytest.raises(ModelProfError, match=reason):
        forward_table(model, lambda: function(model(ones(4, 4))))
    assert pickle.dumps(model)
    assert not model._forward_hooks
    assert torch.is_grad_enabled()
    assert torch._C._get_tracing_state() is None


LEAF = torch.ones(4, 4, requires_grad=True)


def test_it_is_quiet(caplog, recwarn):
    model = Net()
    with caplog.at_level(logging.DEBUG):
        forward_table(model, lambda: model(ones(4, 3, 8, 8)) if bool(ones(1).sum() > 0) else None)
    assert not caplog.records
    assert not recwarn.list


def test_importing_fvcore_is_quiet_and_late():
    program = """
import sys
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
assert "fvcore" not in sys.modules
from torch import nn, ones
model = nn.Linear(4, 4)
print(sum(count.macs for count in forward_table(model, lambda: model(ones(2, 4))).counts))
"""
    command = [sys.executable, "-W", "error::DeprecationWarning:fvcore", "-W", "always", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "32"
    assert "fvcore" not in result.stderr
    assert "torch.jit" not in result.stderr
