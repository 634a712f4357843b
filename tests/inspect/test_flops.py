"""FLOPs of real calls match values worked out by hand, and are attributed to the right modules."""

from __future__ import annotations

from functools import partial
from math import prod

import lightning
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import library, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.flops.count import added_up, count_flops, step_count, summarize
from lightning_modelprof.run.model_cost import FLOP_PHASES, OperatorCount
from tests.support.flop_models import (
    CASES,
    SMALL,
    SMALL_BACKWARD,
    Small,
    Wrapped,
    checkpointed,
    shared,
    total,
    transformer_encoder,
)


@pytest.mark.parametrize("name", CASES)
def test_multiply_adds_match_hand_derivation(name):
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


def test_transformer_fast_path_is_counted():
    truth = transformer_encoder(True)
    count = count_flops(truth.model, *truth.args)
    assert list(count.by_operator["forward"]) == ["aten::_transformer_encoder_layer_fwd"]
    assert count.by_module["forward"] == {"": 2 * truth.forward} | {
        path: truth.forward * (2 if path == "layers" else 1) for path in ("layers", "layers.0", "layers.1")
    }


def test_composite_operators_in_inference_mode_are_counted():
    with torch.inference_mode():
        count = count_flops(
            nn.Sequential(nn.Linear(8, 4), nn.Bilinear(4, 4, 2, bias=False))[0], torch.ones(3, 8)
        )
        product = count_flops(Wrapped(lambda x: torch.matmul(x, x)), torch.ones(5, 4, 4))
    assert count.macs == {"forward": 3 * 8 * 4}
    assert product.macs == {"forward": 5 * 4 * 4 * 4}


@pytest.mark.parametrize("sizes", [(3, 8, 16, 4), (1, 8, 5, 4), (2, 1, 3, 2), (5, 3, 1, 1), (4, 6, 7, 1)])
def test_bilinear_layer_counts_torch_matrix_products(sizes):
    """Forward and gradients match the bmm calls that torch's own profiler sees below the operator."""
    batch, first, second, outputs = sizes
    layer = nn.Bilinear(first, second, outputs)
    arguments = [torch.randn(batch, width, requires_grad=True) for width in (first, second)]
    truth = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as forward:
        loss = layer(*arguments).sum()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as backward:
        loss.backward()
    for one in (forward, backward):
        shapes = [event.input_shapes for event in one.events() if event.name == "aten::bmm"]
        truth.append(sum(prod(a) * b[-1] for a, b, *_ in shapes))
    assert truth[0] == batch * outputs * second * (first + 1)  # by hand: x1 @ weight, then with x2
    counted = count_flops(layer, *arguments, loss_fn=total)
    assert [counted.macs[phase] for phase in ("forward", "backward")] == truth


def test_fourier_transforms_are_separate():
    count = count_flops(Wrapped(torch.fft.fft), torch.ones(3, 64, dtype=torch.cfloat))
    assert count.fourier_flops == {"forward": 3 * 5 * 64 * 6}  # log2 64 = 6
    assert count.macs == {}
    assert count.by_operator == {"forward": {"aten::_fft_c2c": 3 * 5 * 64 * 6}}


@pytest.mark.parametrize(
    ("transform", "signal", "operator"),
    [
        (torch.fft.rfft, torch.ones(3, 64), "aten::_fft_r2c"),
        (torch.fft.irfft, torch.ones(3, 33, dtype=torch.cfloat), "aten::_fft_c2r"),
    ],
)
def test_real_fourier_transforms_take_half(transform, signal, operator):
    """The real signal has 64 points, whether it's the input or the output."""
    count = count_flops(Wrapped(transform), signal)
    assert count.by_operator == {"forward": {operator: 3 * 5 * 64 * 6 // 2}}


def test_complex_product_counts_four_real_ones():
    count = count_flops(Wrapped(torch.mm), *[torch.ones(4, 4, dtype=torch.cfloat)] * 2)
    assert count.macs == {"forward": 4 * 4**3}


def test_nested_tensors_are_counted():
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    layer = nn.Linear(8, 4)
    expected = layer(nested)
    results = []
    with FlopCounter(layer) as counter:
        results.append(layer(nested))
    assert torch.equal(results[0].values(), expected.values())
    assert summarize(counter).macs == {"forward": 5 * 8 * 4}


# ---- Uncounted operators


@library.custom_op("modelprof_test::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def own_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


OWN_PRODUCT = torch.ops.modelprof_test.product


def test_unknown_operators_are_listed_not_counted_as_0():
    count = count_flops(Wrapped(lambda x: OWN_PRODUCT(x, OWN_PRODUCT(x, x)).relu()), torch.ones(4, 4))
    assert count.uncounted == {"forward": {"modelprof_test::product": 2}}
    assert count.flops == {}


@pytest.mark.parametrize("key", [OWN_PRODUCT, OWN_PRODUCT.default, "modelprof_test::product"])
def test_user_formulas(key):
    formulas = {key: lambda a, b, out_val: 2 * a.numel() * out_val.shape[-1]}
    count = count_flops(Wrapped(OWN_PRODUCT), torch.ones(4, 4), torch.ones(4, 3), formulas=formulas)
    assert (count.macs, count.uncounted) == ({"forward": 4 * 4 * 3}, {})


@pytest.mark.parametrize("wrong", [lambda *a, **k: 1 / 0, lambda *a, **k: -1, lambda *a, **k: None])
def test_failing_formula_does_not_reach_step(wrong):
    x = torch.randn(4, 4)
    with FlopCounter(nn.Identity(), {"aten::mm": wrong}) as counter:
        result = x @ x
    assert torch.equal(result, x @ x)
    count = summarize(counter)
    assert count.uncounted == {"forward": {"aten::mm": 1}}
    assert len(count.errors) == 1
    assert count.errors[0].startswith("aten::mm: ")
    assert count.flops == {}


def test_unknown_operator_name_is_rejected():
    with pytest.raises(KeyError, match="no_such"):
        FlopCounter(nn.Identity(), {"aten::no_such": len})


# ---- Attribution


class Step(nn.Module):
    """Children of the same class, called by a step rather than forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

    def training_step(self, x):
        return self.b(self.a(x).relu()).sum()


def test_attribution_to_modules_in_step():
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
def test_optimizer_has_its_own_phase(with_closure):
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


class Closure:
    """A closure whose forward runs without gradients, outside any module."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self):
        with torch.no_grad():
            torch.rand(8, 4) @ self.weight
        return 0.0

    def method(self, _unused=None):
        return self()


@pytest.mark.parametrize("form", ["object", "method", "partial of a method", "function by name"])
def test_forward_in_optimizer_closure_is_not_optimizer(form):
    """Lightning runs training_step inside the optimizer's step; what follows the closure is the optimizer."""
    model = nn.Linear(4, 16)
    closure = Closure(model.weight.T)
    model.weight.grad = torch.rand(16, 4)
    optimizer = Multiplying(model.parameters(), lr=0.1)

    def function():
        return closure()

    forms = {
        "object": lambda: optimizer.step(closure),
        "method": lambda: optimizer.step(closure.method),
        "partial of a method": lambda: optimizer.step(partial(partial(closure.method), None)),
        "function by name": lambda: optimizer.step(closure=function),
    }
    with FlopCounter(model) as counter:
        forms[form]()
    assert summarize(counter).macs == {"forward": 8 * 4 * 16, "optimizer": 2 * 16 * 16 * 4}


def test_kernel_that_recomputes_is_one_call():
    """The backward of fused attention is listed under backward and under recompute."""
    query = torch.rand(2, 4, 16, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), FlopCounter(nn.Identity()) as counter:
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    operators = step_count(counter).operators
    assert [(one.phase, one.calls) for one in operators] == [
        ("forward", 1),
        ("backward", 1),
        ("recompute", 0),
    ]


def test_gradients_of_gradients_are_backward():
    x = torch.randn(4, 16, requires_grad=True)
    model = nn.Linear(16, 8, bias=False)
    with FlopCounter(model) as counter:
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
    count = summarize(counter)
    one = 4 * 16 * 8
    # dX, then its backward and the layer's: the slope's two gradients and the layer's two.
    assert count.macs == {"forward": one, "backward": 5 * one}


def test_transformed_functions_are_not_recompute():
    model, x = nn.Linear(8, 4), torch.randn(5, 8)

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row,)).sum()

    with FlopCounter(model) as counter:
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    assert summarize(counter).macs == {"forward": 5 * 8 * 4, "backward": 5 * 8 * 4}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_of_plain_function(reentrant):
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with FlopCounter(nn.Identity()) as counter:
        y = checkpoint(lambda w: (x @ w).relu().exp(), weight, use_reentrant=reentrant)
        y.sum().backward()
    assert summarize(counter).macs == dict.fromkeys(("forward", "backward", "recompute"), 4 * 8 * 8)


def test_fake_tensors_count_like_real_ones():
    with torch._subclasses.FakeTensorMode():
        model = nn.Linear(8, 4)
        with FlopCounter(model) as counter:
            model(torch.empty(5, 8)).sum().backward()
    count = summarize(counter)
    assert (count.macs, count.uncounted) == ({"forward": 160, "backward": 160}, {})


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.last(self.first(batch["x"]).relu()), batch["y"])


def test_module_with_step_but_no_forward():
    model = Lit()
    with FlopCounter(model, force_eager=False) as counter:
        model.training_step({"x": torch.randn(4, 16), "y": torch.randint(0, 4, (4,))}, 0).backward()
    count = summarize(counter)
    assert count.macs == {"forward": SMALL, "backward": SMALL_BACKWARD}
    first, last = 2 * 4 * 16 * 32, 2 * 4 * 32 * 4
    assert count.by_module_and_operator == {
        "forward": {"first": {"aten::addmm": first}, "last": {"aten::addmm": last}},
        "backward": {"first": {"aten::mm": first}, "last": {"aten::mm": 2 * last}},
    }


# ---- Record


def test_record_of_step():
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)), torch.randn(4, 16)
    with FlopCounter(model) as counter:
        with torch.autocast("cpu", torch.bfloat16):
            y = model[0](x)
        OWN_PRODUCT(model[1](y.float()), torch.randn(4, 4)).sum()
        torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8))
    record = step_count(counter, step=7, samples=4)
    assert (record.step, record.samples, record.on_fake_tensors, record.errors) == (7, 4, False, ())

    def row(module, operator, dtype, flops):
        return OperatorCount(
            phase="forward", module=module, operator=operator, dtype=dtype, calls=1, flops=flops
        )

    assert set(record.operators) == {
        row("0", "aten::addmm", "bfloat16", 2 * 4 * 16 * 32),
        row("1", "aten::addmm", "float32", 2 * 4 * 32 * 4),
        row("", "aten::_int_mm", "", 2 * 32 * 16 * 8),
        row("", "modelprof_test::product", "float32", None),
    }


@pytest.mark.parametrize("name", ["fused attention", "checkpoint", "lstm"])
def test_record_adds_up_to_summary(name):
    truth = CASES[name]()
    with FlopCounter(truth.model) as counter:
        total(truth.model(*truth.args)).backward()
    record, count = step_count(counter), summarize(counter)
    assert added_up(record) == count
    for phase, flops in count.flops.items():
        assert phase in FLOP_PHASES
        assert flops == sum(one.flops for one in record.operators if one.phase == phase)
        assert sum(sum(one.values()) for one in count.by_module_and_operator[phase].values()) == flops


def test_operator_that_sometimes_fails_has_two_rows():
    def picky(a, b, out_val):
        if a.shape[0] == 1:
            raise ValueError("one row")
        return 2 * a.numel() * b.shape[1]

    with FlopCounter(nn.Identity(), {"aten::mm": picky}) as counter:
        for rows in (1, 2, 3):
            torch.mm(torch.ones(rows, 4), torch.ones(4, 5))
    record = step_count(counter)
    assert [(one.calls, one.flops) for one in record.operators] == [(2, 2 * 5 * 4 * 5), (1, None)]
    assert record.errors == ("aten::mm: ValueError: one row (1 times)",)


# ---- Wrappers and communication


class FsdpLike(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, x):
        return self._fsdp_wrapped_module(x)


def test_paths_omit_wrapper_names():
    model = nn.Sequential(
        FsdpLike(checkpoint_wrapper(nn.Sequential(nn.Linear(8, 8)))), FsdpLike(nn.Linear(8, 8))
    )
    with FlopCounter(model) as counter:
        model(torch.ones(2, 8)).sum().backward()
    one = 2 * 2 * 8 * 8
    count = summarize(counter)
    assert count.by_module["forward"] == {"": 2 * one, "0": one, "0.0": one, "1": one}
    # The batch needs no gradient, so the first layer computes only its weight's.
    assert count.by_module["backward"] == {"": 3 * one, "0": one, "0.0": one, "1": 2 * one}


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_root_is_omitted_from_paths(alone):
    model = DistributedDataParallel(Small())
    x = torch.randn(4, 16)
    with FlopCounter(model, force_eager=False) as counter:
        model(x).sum().backward()
    count = summarize(counter)
    assert set(count.by_module["forward"]) == {"", "first", "last"}
    assert (count.macs, count.uncounted) == ({"forward": SMALL, "backward": SMALL_BACKWARD}, {})
    # Below the root, "module" is a name like any other.
    model = nn.ModuleDict({"module": nn.Linear(16, 4)})
    with FlopCounter(model) as counter:
        model["module"](x)
    assert set(summarize(counter).by_module["forward"]) == {"", "module"}


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.zeros_like(x)], x),
    "barrier": lambda x: dist.barrier(),
    "functional": lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "default_pg"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_cost_nothing_or_are_refused(alone, name):
    if name == "functional":
        torch._C._distributed_c10d._register_process_group("default_pg", dist.group.WORLD)
    x = torch.ones(3)
    with FlopCounter(nn.Identity()) as counter:
        COLLECTIVES[name](x)
    count = summarize(counter)
    assert (count.flops, count.uncounted, count.errors) == ({}, {}, ())
    refusing = FlopCounter(nn.Identity(), refuse_collectives=True)
    with refusing, pytest.raises(ModelProfError, match=r"the model communicates \(.*c10d"):
        COLLECTIVES[name](x)
