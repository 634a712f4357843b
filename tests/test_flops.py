"""FLOPs of real calls against truths derived by hand; the counted call leaves no trace."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import custom_op
from torch.utils.checkpoint import checkpoint

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.flops.count import count_flops, summarize
from lightning_modelprof.flops.counter import FlopCounter


def case(model, *args, forward, backward=None, recompute=None, **kwargs):
    """Truths are multiply-adds of contractions; backward is None where nobody can derive it exactly."""
    return SimpleNamespace(**locals())


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Batch):
        output = vars(output)
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for item in output if not isinstance(item, (str, type(None))) for tensor in tensors(item)]


def total(output):
    return sum(tensor.abs().sum() for tensor in tensors(output) if tensor.requires_grad)


def convolution(batch, inputs, outputs, kernel, positions, groups=1):
    """Every output element sums over the kernel and the input channels of its group."""
    return batch * prod(positions) * outputs * inputs // groups * prod(kernel)


# ---- The models


def convolutional():
    c1 = convolution(8, 3, 32, (3, 3), (32, 32))
    c2 = convolution(8, 32, 64, (3, 3), (16, 16))
    forward = c1 + c2 + 8 * 64 * 8 * 8 * 10
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1)]
    model = nn.Sequential(
        *layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(64 * 8 * 8, 10)
    )
    # The batch needs no gradient, so the first convolution has only its weight's.
    return case(model, torch.randn(8, 3, 32, 32), forward=forward, backward=2 * forward - c1)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)

    def forward(self, x):
        return F.relu_(self.body(x) + self.shortcut(x))


def resnet50():
    """64 x 64 pixels: the stem leaves 32, its pool 16, the stages 16, 8, 4 and 2."""
    stem = convolution(1, 3, 64, (7, 7), (32, 32))
    forward, channels, side, blocks = stem, 64, 16, []
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            stride = 1 if index else first_stride
            after = side // stride
            forward += convolution(1, channels, width, (1, 1), (side, side))
            forward += convolution(1, width, width, (3, 3), (after, after))
            forward += convolution(1, width, 4 * width, (1, 1), (after, after))
            if index == 0:
                forward += convolution(1, channels, 4 * width, (1, 1), (after, after))
            blocks.append(Bottleneck(channels, width, stride))
            channels, side = 4 * width, after
    forward += 2048 * 1000
    first = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    model = nn.Sequential(*first, *blocks, *last).eval()  # one image: no statistics of a batch at 2 x 2
    return case(model, torch.randn(1, 3, 64, 64), forward=forward, backward=2 * forward - stem)


def mlp():
    first = 32 * 784 * 512
    forward = first + 32 * 512 * 10
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    return case(model, torch.randn(32, 784), forward=forward, backward=2 * forward - first)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(32, 64, 2, batch_first=True, **options)
        self.last = nn.Linear(64 * (1 + options.get("bidirectional", False)), 5)

    def forward(self, x):
        return self.last(self.layers(x)[0][:, -1])


def lstm():
    # Batch 4, 20 steps; 4 gates of 64 on an input of 32, then of 64, and on the state of 64.
    forward = 4 * 20 * 4 * 64 * (32 + 64 + 64 + 64) + 4 * 64 * 5
    # oneDNN's kernel computes the input's gradient though nobody needs it: exactly twice.
    return case(Recurrent(nn.LSTM), torch.randn(4, 20, 32), forward=forward, backward=2 * forward)


def gru():
    # Two directions, 3 gates; the second layer reads both directions: 128.
    first = 2 * 4 * 20 * 3 * 64 * 32
    forward = first + 2 * 4 * 20 * 3 * 64 * (64 + 128 + 64) + 4 * 128 * 5
    # No gradients for the batch, nor for the state before the first step of 2 layers and 2 directions.
    backward = 2 * forward - first - 2 * 2 * 4 * 3 * 64 * 64
    model = Recurrent(nn.GRU, bidirectional=True)
    return case(model, torch.randn(4, 20, 32), forward=forward, backward=backward)


class SelfAttention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def attention(need_weights):
    # Batch 2, 32 positions, width 64: query, key, value and output; scores and weighted sum.
    qkv = 3 * 2 * 32 * 64**2
    core = 2 * 2 * 32**2 * 64
    forward = qkv + 2 * 32 * 64**2 + core
    # The fused kernel computes the scores once more in backward.
    backward = 2 * forward - qkv + (0 if need_weights else core // 2)
    return case(SelfAttention(need_weights), torch.randn(2, 32, 64), forward=forward, backward=backward)


def transformer_encoder(fast):
    layer = 4 * 2 * 32 * 64**2 + 2 * 2 * 32**2 * 64 + 2 * 2 * 32 * 64 * 128
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    if fast:
        return case(model.eval().requires_grad_(False), torch.randn(2, 32, 64), forward=2 * layer)
    return case(model, torch.randn(2, 32, 64), forward=2 * layer)


class OneAndThreeDimensions(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Sequential(
            nn.Conv1d(4, 8, 5, padding="same"),
            nn.Conv1d(8, 8, 3, padding=1, groups=2),
            nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1),
        )
        self.volume = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2))

    def forward(self, line, volume):
        return self.line(line), self.volume(volume)


def one_and_three_dimensions():
    c1, c3 = convolution(2, 4, 8, (5,), (64,)), convolution(2, 1, 4, (3, 3, 3), (8, 8, 8))
    # A transposed convolution spreads each input element over the kernel and the output channels.
    forward = c1 + c3 + convolution(2, 8, 8, (3,), (64,), 2) + 2 * 64 * 8 * 4 * 4 + 2 * 8**3 * 4 * 2 * 8
    batch = torch.randn(2, 4, 64), torch.randn(2, 1, 8, 8, 8)
    return case(OneAndThreeDimensions(), *batch, forward=forward, backward=2 * forward - c1 - c3)


def depthwise_and_grouped():
    stem = convolution(2, 3, 16, (3, 3), (32, 32))
    forward = stem + convolution(2, 16, 16, (3, 3), (32, 32), 16) + convolution(2, 16, 32, (1, 1), (32, 32))
    forward += convolution(2, 32, 32, (3, 3), (32, 32), 4)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 32, 1),
        nn.Conv2d(32, 32, 3, padding=1, groups=4),
    )
    return case(model, torch.randn(2, 3, 64, 64), forward=forward, backward=2 * forward - stem)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(1000, 32, mode="mean"), nn.Linear(32, 4)

    def forward(self, words, offsets):
        return self.last(self.bag(words, offsets))


def embedding_bag():
    # Looking up and averaging are no contractions; the linear layer's input needs its gradient.
    words = torch.randint(0, 1000, (80,)), torch.arange(0, 80, 5)
    return case(Bag(), *words, forward=16 * 32 * 4, backward=2 * 16 * 32 * 4)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 32, 8))

    def forward(self, x):
        q, k, v = torch.einsum("bte,nhed->nbhtd", x, self.weight).unbind(0)
        return torch.einsum("bhts,bhsd->bhtd", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1), v)


def einsum():
    qkv, core = 3 * 4 * 16 * 32 * 32, 2 * 4 * 16 * 16 * 32
    return case(Einsum(), torch.randn(4, 16, 32), forward=qkv + core, backward=2 * (qkv + core) - qkv)


class ControlFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.loop = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x):
        y, rounds = self.first(x), 0
        while y.norm() > 1e-6 and rounds < 3:
            y, rounds = self.loop(y).tanh(), rounds + 1
        chosen = (x[:, 0] > 0).nonzero().flatten()
        return y.index_add(0, chosen, self.loop(y[chosen]))


def control_flow():
    x = torch.randn(4, 16)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    forward = 4 * 16 * 32 + 3 * 4 * 32**2 + 2 * 32**2  # three rounds, then two chosen rows
    return case(ControlFlow(), x, forward=forward, backward=2 * forward - 4 * 16 * 32)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(16, 32), nn.Linear(32, 32)
        self.alias = self.twice

    def forward(self, x):
        return self.alias(self.twice(self.first(x)).relu())


def shared():
    forward = 4 * 16 * 32 + 2 * 4 * 32**2
    return case(Shared(), torch.randn(4, 16), forward=forward, backward=2 * forward - 4 * 16 * 32)


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "batch"


SMALL = 4 * 16 * 32 + 4 * 32 * 4
SMALL_BACKWARD = 2 * SMALL - 4 * 16 * 32


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, batch):
        if isinstance(batch, dict):
            return {"logits": self.last(self.first(batch["x"]).relu()), "other": None}
        if isinstance(batch, Batch):
            return Batch(self.last(self.first(batch.x).relu()))
        return self.last(self.first(batch).relu())


def small(batch):
    return case(Small(), batch, forward=SMALL, backward=SMALL_BACKWARD)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


def checkpointed(reentrant):
    forward = SMALL + 2 * 4 * 32**2
    # Without re-entering, recomputing stops at the last tensor that backward needs: before the second layer.
    recompute = (2 if reentrant else 1) * 4 * 32**2
    backward = 2 * forward - 4 * 16 * 32
    model = Checkpointed(reentrant)
    return case(model, torch.randn(4, 16), forward=forward, backward=backward, recompute=recompute)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return Product.apply(x, self.weight)


def own_function():
    # Its backward computes both gradients whoever asks.
    return case(OwnFunction(), torch.randn(4, 16), forward=4 * 16 * 32, backward=2 * 4 * 16 * 32)


def compiled():
    found = convolutional()
    found.model = torch.compile(found.model, backend="aot_eager")
    return found


class Products(nn.Module):
    """What torch's registry lacks."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(8, 16, 4)

    def forward(self, matrix, vector):
        y = torch.mv(matrix, vector) + torch.addmv(vector[:8], matrix, vector)
        y = y.sum() + torch.dot(vector, vector) + torch.addbmm(matrix[:, :8], matrix[None], matrix.t()[None])
        return y.sum() + self.bilinear(matrix.t()[:, :8], matrix.t() @ matrix).sum()


def products():
    # Two matrix-vector products, a scalar product, an 8 x 16 x 8 and a 16 x 8 x 16 product;
    # the bilinear layer's 16 rows in 4 outputs sum over 8 x 16 pairs, one multiply-add a pair.
    forward = 2 * 8 * 16 + 16 + 8 * 16 * 8 + 16 * 8 * 16 + 16 * 4 * 8 * 16
    return case(Products(), torch.randn(8, 16), torch.randn(16), forward=forward)


CASES = {
    "convolutional": convolutional,
    "resnet50": resnet50,
    "mlp": mlp,
    "lstm": lstm,
    "gru": gru,
    "attention with weights": lambda: attention(True),
    "fused attention": lambda: attention(False),
    "transformer encoder": lambda: transformer_encoder(False),
    "transformer encoder, fast path": lambda: transformer_encoder(True),
    "1d and 3d": one_and_three_dimensions,
    "depthwise and grouped": depthwise_and_grouped,
    "embedding bag": embedding_bag,
    "einsum": einsum,
    "control flow": control_flow,
    "shared": shared,
    "dict": lambda: small({"x": torch.randn(4, 16), "meta": {"name": "a"}}),
    "dataclass": lambda: small(Batch(torch.randn(4, 16))),
    "checkpoint, re-entrant": lambda: checkpointed(True),
    "checkpoint": lambda: checkpointed(False),
    "own function": own_function,
    "compiled": compiled,
    "products": products,
}


@pytest.mark.parametrize("name", CASES)
def test_multiply_adds_are_the_derived_ones(name):
    torch.manual_seed(0)
    truth = CASES[name]()
    trains = any(parameter.requires_grad for parameter in truth.model.parameters())
    count = count_flops(truth.model, *truth.args, loss_fn=total if trains else None, **truth.kwargs)
    assert count.macs["forward"] == pytest.approx(truth.forward, rel=1e-3)
    if truth.backward is not None:
        assert count.macs["backward"] == pytest.approx(truth.backward, rel=1e-3)
    assert count.macs.get("recompute") == truth.recompute
    assert count.flops["forward"] == 2 * count.macs["forward"] == sum(count.by_operator["forward"].values())
    assert (count.errors, count.uncounted) == ((), {})


def test_the_fast_path_is_taken_and_counted():
    truth = transformer_encoder(True)
    count = count_flops(truth.model, *truth.args)
    assert list(count.by_operator["forward"]) == ["aten::_transformer_encoder_layer_fwd"]
    assert count.by_module["forward"] == {"": 2 * truth.forward} | {
        path: truth.forward * (2 if path == "layers" else 1) for path in ("layers", "layers.0", "layers.1")
    }


def test_inference_mode_arrives_undecomposed():
    with torch.inference_mode():
        count = count_flops(
            nn.Sequential(nn.Linear(8, 4), nn.Bilinear(4, 4, 2, bias=False))[0], torch.ones(3, 8)
        )
        product = count_flops(Wrapped(lambda x: torch.matmul(x, x)), torch.ones(5, 4, 4))
    assert count.macs == {"forward": 3 * 8 * 4}
    assert product.macs == {"forward": 5 * 4 * 4 * 4}


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_fourier_transforms_stand_apart():
    count = count_flops(Wrapped(torch.fft.fft), torch.ones(3, 64, dtype=torch.cfloat))
    assert count.fourier_flops == {"forward": 3 * 5 * 64 * 6}  # log2 64 = 6
    assert count.macs == {}
    assert count.by_operator == {"forward": {"aten::_fft_c2c": 3 * 5 * 64 * 6}}


def test_a_complex_product_is_four():
    count = count_flops(Wrapped(torch.mm), *[torch.ones(4, 4, dtype=torch.cfloat)] * 2)
    assert count.macs == {"forward": 4 * 4**3}


def test_nested_tensors_pass_through():
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    layer = nn.Linear(8, 4)
    expected = layer(nested)
    results = []
    with FlopCounter(layer) as counter:
        results.append(layer(nested))
    assert torch.equal(results[0].values(), expected.values())
    assert summarize(counter).macs == {"forward": 5 * 8 * 4}


# ---- What cannot be counted


@custom_op("modelprof_test::product", mutates_args=())
def own_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


OWN_PRODUCT = torch.ops.modelprof_test.product


def test_unknown_operators_are_listed_and_never_0():
    count = count_flops(Wrapped(lambda x: OWN_PRODUCT(x, OWN_PRODUCT(x, x)).relu()), torch.ones(4, 4))
    assert count.uncounted == {"forward": {"modelprof_test::product": 2}}
    assert count.flops == {}


@pytest.mark.parametrize("key", [OWN_PRODUCT, OWN_PRODUCT.default, "modelprof_test::product"])
def test_formulas_of_the_user(key):
    formulas = {key: lambda a, b, out_val: 2 * a.numel() * out_val.shape[-1]}
    count = count_flops(Wrapped(OWN_PRODUCT), torch.ones(4, 4), torch.ones(4, 3), formulas=formulas)
    assert (count.macs, count.uncounted) == ({"forward": 4 * 4 * 3}, {})


@pytest.mark.parametrize("wrong", [lambda *a, **k: 1 / 0, lambda *a, **k: -1, lambda *a, **k: None])
def test_a_formula_that_fails_never_reaches_the_step(wrong):
    x = torch.randn(4, 4)
    with FlopCounter(nn.Identity(), {"aten::mm": wrong}) as counter:
        result = x @ x
    assert torch.equal(result, x @ x)
    count = summarize(counter)
    assert count.uncounted == {"forward": {"aten::mm": 1}}
    assert len(count.errors) == 1
    assert count.errors[0].startswith("aten::mm: ")
    assert count.flops == {}


def test_an_unknown_name_is_refused():
    with pytest.raises(KeyError, match="no_such"):
        FlopCounter(nn.Identity(), {"aten::no_such": len})


# ---- Where it happened


class Step(nn.Module):
    """Children of one class, called by a step and not by forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

    def training_step(self, x):
        return self.b(self.a(x).relu()).sum()


def test_attribution_to_modules_of_a_step():
    model = Step()
    with FlopCounter(model) as counter:
        model.training_step(torch.randn(4, 16)).backward()
    count = summarize(counter)
    a, b = 2 * 4 * 16 * 32, 2 * 4 * 32 * 8
    assert count.by_module == {
        "forward": {"": a + b, "a": a, "b": b},
        "backward": {"": a + 2 * b, "a": a, "b": 2 * b},
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_attribution_through_checkpoints(reentrant):
    truth = checkpointed(reentrant)
    count = count_flops(truth.model, *truth.args, loss_fn=total)
    layer, first, last = 2 * 4 * 32**2, 2 * 4 * 16 * 32, 2 * 4 * 32 * 4
    block = {"block.0": 2 * layer, "block.2": 2 * layer}
    expected = {
        "": first + 4 * layer + 2 * last,
        "first": first,
        "last": 2 * last,
        "block": 4 * layer,
    } | block
    assert count.by_module["backward"] == expected
    recomputed = ["block.0", "block.2"] if reentrant else ["block.0"]
    assert count.by_module["recompute"] == dict.fromkeys(recomputed, layer) | dict.fromkeys(
        ("", "block"), len(recomputed) * layer
    )


def test_paths_of_compiled_and_shared_modules():
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="aot_eager"), nn.ReLU())
    count = count_flops(model, torch.ones(2, 8))
    assert count.by_module["forward"] == dict.fromkeys(("", "0", "0.0"), 2 * 2 * 8 * 8)
    truth = shared()
    assert count_flops(truth.model, *truth.args).by_module["forward"]["twice"] == 2 * 2 * 4 * 32**2


class Multiplying(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weight = self.param_groups[0]["params"][0]
        weight.sub_(weight @ weight.t() @ weight, alpha=0.1)
        return loss


@pytest.mark.parametrize("with_closure", [True, False])
def test_the_optimizer_is_a_phase_of_its_own(with_closure):
    model, x = nn.Linear(16, 4, bias=False), torch.ones(2, 16)
    optimizer = Multiplying(model.parameters(), lr=0.1)

    def closure():
        loss = model(x).sum()
        loss.backward()
        return loss

    with FlopCounter(model) as counter:
        if not with_closure:
            closure()
        optimizer.step(closure if with_closure else None)
        model(x)
    one = 2 * 16 * 4
    assert summarize(counter).macs == {"forward": 2 * one, "backward": one, "optimizer": 2 * 4 * 16 * 4}


def test_gradients_of_gradients_are_backward():
    x = torch.randn(4, 16, requires_grad=True)
    model = nn.Linear(16, 8, bias=False)
    with FlopCounter(model) as counter:
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
    count = summarize(counter)
    one = 4 * 16 * 8
    # dX; then backward of it and of the layer: the slope's two gradients, the layer's two.
    assert count.macs == {"forward": one, "backward": 5 * one}


def test_transformed_functions_are_no_recomputing():
    model, x = nn.Linear(8, 4), torch.randn(5, 8)

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row,)).sum()

    with FlopCounter(model) as counter:
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    assert summarize(counter).macs == {"forward": 5 * 8 * 4, "backward": 5 * 8 * 4}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_a_plain_function(reentrant):
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with FlopCounter(nn.Identity()) as counter:
        y = checkpoint(lambda w: (x @ w).relu().exp(), weight, use_reentrant=reentrant)
        y.sum().backward()
    assert summarize(counter).macs == dict.fromkeys(("forward", "backward", "recompute"), 4 * 8 * 8)


def test_fake_tensors_count_as_plain_ones():
    with torch._subclasses.FakeTensorMode():
        model = nn.Linear(8, 4)
        with FlopCounter(model) as counter:
            model(torch.empty(5, 8)).sum().backward()
    count = summarize(counter)
    assert (count.macs, count.uncounted) == ({"forward": 160, "backward": 160}, {})


# ---- Nothing is left behind


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
def test_count_flops_leaves_everything_as_it_was(loss_fn):
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
def test_a_counted_step_is_bit_identical(name, precision):
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

    (plain_loss, plain), (counted_loss, counted) = step(False), step(True)
    assert torch.equal(plain_loss, counted_loss)
    assert_same(plain, counted)


@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_compiled_model_runs_compiled_afterwards(compiled_before):
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
    assert events["runs"] == before  # the counted call was eager: nothing hides in a graph
    for _ in range(3):
        model(x)
    assert events == {"compiled": 1, "runs": before + 3}


def test_a_lazy_model_is_refused():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelProfError, match=r"0\.weight"):
        count_flops(model, torch.ones(2, 3))
    assert nn.parameter.is_lazy(model[0].weight)


def test_a_module_that_fails_and_is_caught_does_not_shift_the_rest():
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
