"""Models with their contractions' multiply-adds, derived by hand."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def case(model, *args, forward, backward=None, recompute=None, **kwargs):
    """A case in multiply-adds of contractions; backward is None if it can't be derived exactly."""
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
    """Every output element sums over the kernel and its group's input channels."""
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
    # The batch needs no gradient, so the first convolution computes only its weight's.
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
    """64 x 64 pixels: 32 after the stem, 16 after its pool, then 16, 8, 4 and 2 after the stages."""
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
    model = nn.Sequential(*first, *blocks, *last).eval()  # one image has no batch statistics at 2 x 2
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
    # oneDNN's kernel computes the input's gradient without need, so backward is exactly twice forward.
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
    # The fused kernel recomputes the scores, half of the core, in backward.
    recompute = None if need_weights else core // 2
    model = SelfAttention(need_weights)
    batch = torch.randn(2, 32, 64)
    return case(model, batch, forward=forward, backward=2 * forward - qkv, recompute=recompute)


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
    # Lookups and averages aren't contractions; the linear layer's input needs its gradient.
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
    # Non-reentrant recomputation stops at the last tensor that backward needs, before the second layer.
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
    # Its backward always computes both gradients.
    return case(OwnFunction(), torch.randn(4, 16), forward=4 * 16 * 32, backward=2 * 4 * 16 * 32)


def compiled(backend):
    found = convolutional()
    found.model = torch.compile(found.model, backend=backend)
    return found


class Products(nn.Module):
    """Operators missing in torch's registry."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(8, 16, 4)

    def forward(self, matrix, vector):
        y = torch.mv(matrix, vector) + torch.addmv(vector[:8], matrix, vector)
        y = y.sum() + torch.dot(vector, vector) + torch.addbmm(matrix[:, :8], matrix[None], matrix.t()[None])
        return y.sum() + self.bilinear(matrix.t()[:, :8], matrix.t() @ matrix).sum()


def products():
    # Two matrix-vector products, a scalar product, an 8 x 16 x 8 and a 16 x 8 x 16 product;
    # the bilinear layer multiplies, for each of 4 outputs, 16 x 8 by 8 x 16, and its rows by 16 rows of 16.
    forward = 2 * 8 * 16 + 16 + 8 * 16 * 8 + 16 * 8 * 16 + 4 * (16 * 8 * 16 + 16 * 16)
    return case(Products(), torch.randn(8, 16), torch.randn(16), forward=forward)


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


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
    "compiled": lambda: compiled("aot_eager"),
    "compiled by inductor": lambda: compiled("inductor"),
    "products": products,
}
