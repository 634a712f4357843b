"""FLOPs of less common kinds of models, and of operators that torch's own registry lacks.

The true values were worked out by hand before the first count; comments say what had to change
afterwards.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.flops.contractions import WithRecompute
from lightning_modelprof.inspect.flops.count import count_flops, step_count, summarize
from lightning_modelprof.inspect.flops.formulas import formula_of
from tests.support.flop_models import Wrapped, case, convolution, total


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1])


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.up, self.down = parameter(4, 16, 32), parameter(4, 32, 16)

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = torch.bincount(expert, minlength=4).cumsum(0).to(torch.int32)
        y = torch._grouped_mm(x[order].bfloat16(), self.up.bfloat16(), offs=ends).relu()
        y = torch._grouped_mm(y, self.down.bfloat16(), offs=ends)
        return y.float() * weight[order, None]


def mixture_of_experts():
    # 32 rows, each through one expert: 16 → 32 → 16; the router has 4 outputs. The rows need no gradient.
    router, up, down = 32 * 16 * 4, 32 * 16 * 32, 32 * 32 * 16
    return case(
        MixtureOfExperts(),
        torch.randn(32, 16),
        forward=router + up + down,
        backward=router + up + 2 * down,
    )


class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def low_rank_adapters():
    # 8 rows. Frozen weights have no gradient, and only the second passes one on.
    first, second, head = 8 * 16 * 32, 8 * 32 * 32, 8 * 32 * 8
    a1, b1, a2, b2 = 8 * 16 * 4, 8 * 4 * 32, 8 * 32 * 4, 8 * 4 * 32
    forward = first + a1 + b1 + second + a2 + b2 + head
    backward = a1 + 2 * b1 + second + 2 * a2 + 2 * b2 + 2 * head
    model = nn.Sequential(Adapted(16, 32), Adapted(32, 32), nn.Linear(32, 8))
    return case(model, torch.randn(8, 16), forward=forward, backward=backward)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 50, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, words):
        return self.last(self.hidden(self.embedding(words)).tanh())


def tied_embedding():
    # 21 words; the embedding's rows need their gradient, so each product has both gradients.
    forward = 21 * 16 * 16 + 21 * 16 * 50
    return case(LanguageModel(), torch.randint(0, 50, (3, 7)), forward=forward, backward=2 * forward)


def convolutions_in_three_dimensions():
    # 6 x 6 x 6: dilated and padded by two, 27 weights per channel; pointwise; transposed in two groups.
    depthwise, pointwise = 216 * 4 * 27, 216 * 4 * 8
    transposed = 216 * 8 * 1 * 8  # each input element spreads over 2 x 2 x 2 and its group's one output
    model = nn.Sequential(
        nn.Conv3d(4, 4, 3, padding=2, dilation=2, groups=4),
        nn.Conv3d(4, 8, 1),
        nn.ConvTranspose3d(8, 2, 2, stride=2, groups=2),
    )
    forward = depthwise + pointwise + transposed
    return case(model, torch.randn(1, 4, 6, 6, 6), forward=forward, backward=2 * forward - depthwise)


class ConvolutionalLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Conv2d(3 + 8, 4 * 8, 3, padding=1)

    def forward(self, x):
        h = c = x.new_zeros(2, 8, 8, 8)
        for step in x.unbind(1):
            i, f, o, g = self.gates(torch.cat([step, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


def convolutional_lstm():
    # Five steps; before the first, neither the frame nor the state needs a gradient.
    step = convolution(2, 11, 32, (3, 3), (8, 8))
    return case(ConvolutionalLSTM(), torch.randn(2, 5, 3, 8, 8), forward=5 * step, backward=9 * step)


class GraphAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4)
        self.source, self.target = parameter(8), parameter(8)

    def forward(self, x, edges):
        h = self.first(x)
        start, end = edges
        score = F.leaky_relu((h @ self.source)[start] + (h @ self.target)[end]).exp()
        norm = torch.zeros(len(x)).index_add(0, end, score)
        weight = score / norm[end]
        return self.last(torch.zeros_like(h).index_add(0, end, h[start] * weight[:, None]))


def graph_attention():
    # 10 nodes. Gathering and scattering aren't contractions, nor is the outer product that is the gradient of
    # a matrix-vector product: it multiplies but doesn't sum.
    first, scores, last = 10 * 16 * 8, 2 * 10 * 8, 10 * 8 * 4
    batch = torch.randn(10, 16), torch.randint(0, 10, (2, 30))
    backward = first + scores + 2 * last
    return case(GraphAttention(), *batch, forward=first + scores + last, backward=backward)


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)) for part in self.project(x).chunk(3, -1))
        q, k = q.exp(), k.exp()
        memory = torch.einsum("bthd,bthe->bhde", k, v)
        norm = torch.einsum("bthd,bhd->bth", q, k.sum(1))
        return torch.einsum("bthd,bhde->bthe", q, memory) / norm[..., None]


def linear_attention():
    # Batch 2, 16 positions, 2 heads of 8: keys by values, queries by their product, and the norm.
    project, core = 2 * 16 * 16 * 48, 2 * (2 * 16 * 2 * 8 * 8) + 2 * 16 * 2 * 8
    forward = project + core
    return case(LinearAttention(), torch.randn(2, 16, 16), forward=forward, backward=2 * forward - project)


class Unfolded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = parameter(8, 27)

    def forward(self, x):
        return self.weight @ F.unfold(x, 3, padding=1)


def convolution_by_unfolding():
    forward = 2 * 8 * 27 * 64
    return case(Unfolded(), torch.randn(2, 3, 8, 8), forward=forward, backward=forward)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.RNN(8, 16)

    def forward(self, x, lengths):
        return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths))[1]


def packed_sequences():
    # Lengths 5, 3 and 2: ten elements. The three states before the first step need no gradient.
    inputs, states = 10 * 8 * 16, 10 * 16 * 16
    backward = inputs + states + (10 - 3) * 16 * 16
    batch = torch.randn(5, 3, 8), torch.tensor([5, 3, 2])
    return case(Packed(), *batch, forward=inputs + states, backward=backward)


class Attention(nn.Module):
    def __init__(self, query, key, value, **options):
        super().__init__()
        self.inputs = nn.ParameterList([parameter(*query), parameter(*key), parameter(*value)])
        self.options = options

    def forward(self):
        return F.scaled_dot_product_attention(*self.inputs, **self.options)


def grouped_heads():
    # 4 query heads share 2 of keys and values, 16 positions of 8. In newer versions the fused kernel handles
    # this and recomputes the scores (the hand-derived value at first left that out).
    forward = 4 * 16 * 16 * (8 + 8)
    model = Attention((1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8), enable_gqa=True)
    return case(model, forward=forward, backward=2 * forward, recompute=(None, forward // 2))


def cross_attention():
    # 10 queries meet 20 keys of 8; the values have 16. Depths differ, so the CPU uses no fused kernel.
    forward = 2 * 4 * 10 * 20 * (8 + 16)
    model = Attention((2, 4, 10, 8), (2, 4, 20, 8), (2, 4, 20, 16))
    return case(model, forward=forward, backward=2 * forward)


class SparseFirst(nn.Module):
    def __init__(self, to_layout):
        super().__init__()
        self.weight, self.last, self.to_layout = parameter(30, 8), nn.Linear(8, 4), to_layout

    def forward(self, adjacency):
        return self.last(torch.sparse.mm(self.to_layout(adjacency), self.weight))


def sparse_product(to_layout):
    # 40 stored elements meet 8 columns; backward multiplies by their transpose, for the weight alone.
    adjacency = torch.zeros(20 * 30)
    adjacency[::15] = 1.0
    forward, last = 40 * 8 + 20 * 8 * 4, 20 * 8 * 4
    model = SparseFirst(to_layout)
    return case(model, adjacency.view(20, 30), forward=forward, backward=40 * 8 + 2 * last)


def complex_convolution():
    # torch computes it with three real convolutions, not four.
    model = nn.Conv2d(3, 8, 3, padding=1, bias=False, dtype=torch.cfloat)
    one = convolution(1, 3, 8, (3, 3), (8, 8))
    return case(model, torch.randn(1, 3, 8, 8, dtype=torch.cfloat), forward=3 * one)


class Dequantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-128, 127, (32, 16), dtype=torch.int8), requires_grad=False)
        self.scale, self.first = nn.Parameter(torch.ones(32, 1)), nn.Linear(16, 16)

    def forward(self, x):
        return F.linear(self.first(x), self.weight.float() * self.scale)


def weight_only_quantisation():
    # 8 rows. The scale is trained, so the product with the weight has both gradients.
    first, forward = 8 * 16 * 16, 8 * 16 * 16 + 8 * 16 * 32
    return case(Dequantised(), torch.randn(8, 16), forward=forward, backward=2 * forward - first)


class Tagged(torch.Tensor):
    pass


def subclass():
    batch = torch.randn(8, 16).as_subclass(Tagged)
    return case(nn.Linear(16, 4), batch, forward=8 * 16 * 4, backward=8 * 16 * 4)


def dynamic_quantisation():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        model = torch.ao.quantization.quantize_dynamic(model)
    return case(model, torch.randn(8, 16), forward=8 * (16 * 32 + 32 * 4))


KINDS = {
    "mixture of experts": mixture_of_experts,
    "low-rank adapters": low_rank_adapters,
    "tied embedding": tied_embedding,
    "convolutions in three dimensions": convolutions_in_three_dimensions,
    "convolutional LSTM": convolutional_lstm,
    "graph attention": graph_attention,
    "linear attention": linear_attention,
    "convolution by unfolding": convolution_by_unfolding,
    "packed sequences": packed_sequences,
    "grouped heads": grouped_heads,
    "cross attention": cross_attention,
    "sparse COO": lambda: sparse_product(torch.Tensor.to_sparse),
    "sparse CSR": lambda: sparse_product(torch.Tensor.to_sparse_csr),
    "complex convolution": complex_convolution,
    "weight-only quantisation": weight_only_quantisation,
    "subclass": subclass,
    "dynamic quantisation": dynamic_quantisation,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", KINDS)
def test_multiply_adds_match_hand_derivation(kind):
    torch.manual_seed(0)
    if kind == "mixture of experts" and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped product")
    truth = KINDS[kind]()
    count = count_flops(truth.model, *truth.args, loss_fn=truth.backward and total, **truth.kwargs)
    assert count.macs["forward"] == truth.forward
    assert count.macs.get("backward") == truth.backward
    assert count.macs.get("recompute") in (truth.recompute or (None,))
    assert (count.errors, count.uncounted) == ((), {})


def test_distances_for_metric_learning():
    """Distances of 30 to 40 rows are one product with two extra columns; their gradients are products of 8.

    The hand-derived value at first had no products in backward, as for plain distances.
    """
    embed = nn.Linear(16, 8)
    a, b = torch.randn(30, 16), torch.randn(40, 16)
    count = count_flops(Wrapped(lambda: torch.cdist(embed(a), embed(b))), loss_fn=total)
    embedding = (30 + 40) * 16 * 8
    pairs = 30 * 40
    assert count.macs == {"forward": embedding + pairs * (8 + 2), "backward": embedding + 2 * pairs * 8}
    assert (count.errors, count.uncounted) == ((), {})


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_distances_without_product_are_listed(norm):
    a = torch.randn(5, 8, requires_grad=True)
    count = count_flops(Wrapped(lambda: torch.cdist(a, a.detach(), p=norm)), loss_fn=total)
    assert count.macs == {}
    assert count.uncounted == {
        "forward": {"aten::_cdist_forward": 1},
        "backward": {"aten::_cdist_backward": 1},
    }


def test_flexible_attention():
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="torch 2.5 and later")
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it should be compiled
        count = count_flops(Wrapped(lambda: flex.flex_attention(q, k, v)))
    # 2 heads, 16 positions of 8: scores and weighted sum. The CPU has no backward for it.
    assert count.macs == {"forward": 2 * 16 * 16 * (8 + 8)}
    assert (count.errors, count.uncounted) == ((), {})
    backward = formula_of(torch.ops.higher_order.flex_attention_backward)
    scores = 2 * 2 * 16 * 16 * 8
    assert backward(q[None][0], k, v, q, None, q, out_val=None) == WithRecompute(4 * scores, scores)


def test_jagged_attention():
    """Two sequences of 3 and 5 in 2 heads of 4: each sequence attends only to itself."""
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    projections = [nn.Linear(8, 8) for _ in range(3)]

    def attend(x):
        q, k, v = (project(x).unflatten(-1, (2, 4)).transpose(1, 2) for project in projections)
        return F.scaled_dot_product_attention(q, k, v)

    with torch.no_grad(), warnings.catch_warnings(), FlopCounter(nn.Identity()) as counter:
        warnings.simplefilter("ignore")  # nested tensors warn that they are a prototype
        attend(nested)
    count = summarize(counter)
    assert count.macs == {"forward": 3 * 8 * 8 * 8 + 2 * (3**2 + 5**2) * (4 + 4)}
    assert (count.errors, count.uncounted) == ((), {})


# ---- Single operators


def test_integer_product():
    a, b = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 16, dtype=torch.int8)
    with FlopCounter(nn.Identity()) as counter:
        torch._int_mm(a, b)
    (one,) = step_count(counter).operators
    assert (one.flops, one.dtype) == (2 * 32 * 64 * 16, "")


def test_product_with_packed_weights():
    x, weight = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(32, 16, dtype=torch.int8)
    with FlopCounter(nn.Identity()) as counter:
        torch.ops.aten._weight_int8pack_mm(x, weight, torch.ones(32, dtype=torch.bfloat16))
    (one,) = step_count(counter).operators
    assert (one.flops, one.dtype) == (2 * 8 * 16 * 32, "bfloat16")


def test_quantized_convolution():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = torch.ao.nn.quantized.Conv2d(3, 8, 3, padding=1)
        x = torch.quantize_per_tensor(torch.randn(1, 3, 8, 8), 0.1, 0, torch.quint8)
        count = count_flops(layer, x)
    assert count.macs == {"forward": convolution(1, 3, 8, (3, 3), (8, 8))}


@pytest.mark.parametrize("in_place", [False, True])
def test_operators_of_compiled_code(in_place):
    x, weight = torch.randn(8, 16), torch.randn(32, 16)
    image, kernel = torch.randn(1, 3, 8, 8), torch.randn(8, 3, 3, 3)
    sizes = ([1, 1], [1, 1], [1, 1], 1)
    mkldnn = torch.ops.mkldnn
    with FlopCounter(nn.Identity()) as counter:
        mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        mkldnn._linear_pointwise.binary(x, torch.ones(8, 32), weight, None, "add")
        mkldnn._convolution_pointwise(image, kernel, None, *sizes, "none", [], "")
        other = torch.zeros(1, 8, 8, 8)
        if in_place:
            mkldnn._convolution_pointwise_.binary(
                other, image, kernel, None, *sizes, "add", 1.0, None, [], None
            )
        else:
            mkldnn._convolution_pointwise.binary(
                image, other, kernel, None, *sizes, "add", 1.0, None, [], None
            )
    linear, convolved = 8 * 16 * 32, convolution(1, 3, 8, (3, 3), (8, 8))
    count = summarize(counter)
    assert count.macs == {"forward": 2 * linear + 2 * convolved}
    assert (count.errors, count.uncounted) == ((), {})


GROUPED = {
    "rows": ((12, 8), (3, 8, 4), 12 * 8 * 4),  # each row meets its group's matrix
    "columns": ((3, 12, 8), (8, 6), 12 * 8 * 6),  # each column meets its group's matrix
    "sums": ((4, 12), (12, 5), 4 * 12 * 5),  # each group sums over its part
    "batches": ((3, 12, 8), (3, 8, 4), 3 * 12 * 8 * 4),
}


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("name", ["_grouped_mm", "_scaled_grouped_mm"])
def test_grouped_product(kind, name):
    left, right, macs = GROUPED[kind]
    formula = formula_of(getattr(torch.ops.aten, name))
    assert formula(torch.ones(left), torch.ones(right), out_val=None) == 2 * macs


LINALG = {
    "solve": lambda x: torch.linalg.solve(x, x),
    "inv": torch.linalg.inv,
    "lu": lambda x: torch.linalg.lu_factor(x)[0],
    "qr": lambda x: torch.linalg.qr(x)[0],
    "svd": torch.linalg.svdvals,
    "cholesky": torch.linalg.cholesky,
    "eigh": torch.linalg.eigvalsh,
    "eig": torch.linalg.eigvals,
    "det": torch.linalg.det,
    "lstsq": lambda x: torch.linalg.lstsq(x, x)[0],
    "triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=True),
    "sparse by sparse": lambda x: torch.sparse.mm(x.to_sparse(), x.to_sparse()),
    "pdist": F.pdist,
}


@pytest.mark.parametrize("name", LINALG)
def test_factorizations_are_listed_not_counted_as_0(name):
    count = count_flops(Wrapped(LINALG[name]), torch.eye(4) * 2)
    assert sum(count.uncounted["forward"].values()) >= 1


# ---- Attention on devices this machine lacks: formulas look only at shapes.

FUSED = [
    f"_scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
]


@pytest.mark.parametrize("name", FUSED)
def test_fused_attention_backward_recomputes_scores(name):
    query, key, value = torch.ones(2, 4, 10, 8), torch.ones(2, 2, 20, 8), torch.ones(2, 2, 20, 16)
    scores, weighted_sum = 2 * 4 * 10 * 20 * 8, 2 * 4 * 10 * 20 * 16
    forward = formula_of(getattr(torch.ops.aten, name))
    backward = formula_of(getattr(torch.ops.aten, f"{name}_backward"))
    assert forward(query, key, value, out_val=None) == 2 * (scores + weighted_sum)
    grad = torch.ones(2, 4, 10, 16)
    assert backward(grad, query, key, value, out_val=None) == WithRecompute(
        gradients=4 * (scores + weighted_sum), recompute=2 * scores
    )


def test_fused_attention_with_different_lengths():
    """Sequences of 3 and 5 in 2 heads of 4, packed one after the other."""
    packed, ends = torch.ones(8, 2, 4), torch.tensor([0, 3, 8])
    scores = 2 * (3**2 + 5**2) * 4
    flash = formula_of(torch.ops.aten._flash_attention_backward)
    assert flash(*[packed] * 5, None, ends, ends, 5, 5, out_val=None) == WithRecompute(8 * scores, 2 * scores)
    efficient = formula_of(torch.ops.aten._efficient_attention_backward)
    batch = packed[None]
    assert efficient(*[batch] * 4, None, batch, ends, ends, 5, 5, out_val=None) == WithRecompute(
        8 * scores, 2 * scores
    )
