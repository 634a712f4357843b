"""Live bytes in a step match bytes worked out by hand, and torch's own tracker.

The hand-derived values are for a stack of L linear layers with ReLU, all of width W, on a batch of B rows
in float32. One activation has a = 4 B W bytes, a layer's parameters p = w + b with w = 4 W W, b = 4 W.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.modules.live_tensors import LiveTensors
from lightning_modelprof.run.memory import CATEGORIES

CPU = torch.device("cpu")


def stack(layers, width, inplace=False):
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU(inplace=inplace))]
    return nn.Sequential(*parts)


def follow(model, batch, optimizer=None, *, loss=None, zero=True, device=CPU, counter=None):
    """One step of a plain loop: forward, zero_grad, backward, optimizer."""
    live = LiveTensors(device)
    with FlopCounter(model, force_eager=False, watches=(counter, live)):
        live.begin(model, [optimizer] if optimizer else [], batch)
        value = (loss or (lambda one, data: one(data).sum()))(model, batch)
        if optimizer and zero:
            optimizer.zero_grad()
        value.backward()
        if optimizer:
            optimizer.step()
    live.end()
    result = live.result(3)
    assert not live.errors
    for peak in result.peaks:
        assert tuple(peak.by_category) == CATEGORIES
        assert sum(peak.by_category.values()) == peak.num_bytes
    assert sum(result.begin_by_category.values()) == result.begin_bytes
    return result


def at(result, phase):
    """The nonzero categories at a phase's peak."""
    [peak] = [one for one in result.peaks if one.phase == phase]
    return {category: size for category, size in peak.by_category.items() if size}


def place(result, phase):
    [peak] = [one for one in result.peaks if one.phase == phase]
    return peak.operator, peak.module


def trained(model, batch, optimizer):
    """The model after one step, when gradients and optimizer state exist."""
    model(batch).sum().backward()
    optimizer.step()
    return model


SCALAR = 4
"""Bytes of the loss; in backward also of the initial 1, which torch creates earlier, so it's forward's."""


@pytest.mark.parametrize(("rows", "width", "layers"), [(64, 16, 4), (8, 64, 3)])
def test_stack_with_sgd(rows, width, layers):
    """Rows and width make either activations or parameters larger.

    Forward: at the last ReLU all ReLU outputs are saved, and its own input is still there: (L + 1) a.
    The previous step's gradients exist until zero_grad.
    Backward, at the sum for the bias gradient of layer i: the outputs of ReLUs 1 to i - 1, the gradients
    of the layer's output and (except for layer 1) input, and of the parameters of layers i to L:
    (i + 1) a + (L - i + 1) p. With a > p the peak is at i = L. With p > 2 a it is at i = 1, where the
    gradient of the input isn't computed: a + L p.
    """
    a, w, b = 4 * rows * width, 4 * width * width, 4 * width
    p = w + b
    model, batch = stack(layers, width), torch.randn(rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = follow(trained(model, batch, optimizer), batch, optimizer)

    held = {"parameters": layers * p, "batch": a}
    assert result.begin_bytes == 2 * layers * p + a
    assert result.begin_by_category["gradients"] == layers * p
    assert at(result, "forward") == held | {"gradients": layers * p, "activations": (layers + 1) * a}
    assert place(result, "forward") == ("aten::relu", str(2 * layers - 1))
    if a > p:
        assert at(result, "backward") == held | {
            "gradients": p,
            "activations": (layers - 1) * a + 2 * SCALAR,
            "other": 2 * a,
        }
        assert place(result, "backward") == ("aten::sum", str(2 * layers - 2))
    else:
        assert p > 2 * a
        assert at(result, "backward") == held | {
            "gradients": layers * p,
            "activations": 2 * SCALAR,
            "other": a,
        }
        assert place(result, "backward") == ("aten::sum", "0")
    assert at(result, "optimizer") == held | {"gradients": layers * p, "activations": SCALAR}
    assert [peak.phase for peak in result.peaks] == ["forward", "backward", "optimizer"]
    assert (result.step, result.device, result.dropped) == (3, "cpu", ())


def test_stack_with_adam():
    """Adam holds two averages and one 4-byte step count for each of 2 L parameters.

    On the CPU it handles one parameter after the other: it computes the root of the second average and then
    its quotient, 2 w, while the previous parameter's quotient, a bias, is still there: 2 w + b from the
    second layer on.
    """
    rows, width, layers = 8, 32, 3
    a, w, b = 4 * rows * width, 4 * width * width, 4 * width
    p = w + b
    model, batch = stack(layers, width), torch.randn(rows, width)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    result = follow(trained(model, batch, optimizer), batch, optimizer)
    state = 2 * layers * p + 2 * layers * 4
    held = {"parameters": layers * p, "optimizer state": state, "batch": a, "gradients": layers * p}
    assert at(result, "forward") == held | {"activations": (layers + 1) * a}
    assert at(result, "optimizer") == held | {"activations": SCALAR, "other": 2 * w + b}
    assert place(result, "optimizer")[1] == ""


def test_first_step_creates_gradients_and_state():
    """Neither exists at the start; both are categorized at the optimizer's peak."""
    rows, width, layers = 8, 32, 2
    a, p = 4 * rows * width, 4 * width * (width + 1)
    model, batch = stack(layers, width), torch.randn(rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    result = follow(model, batch, optimizer)
    assert result.begin_bytes == layers * p + a
    assert at(result, "optimizer") == {
        "parameters": layers * p,
        "gradients": layers * p,
        "optimizer state": layers * p,
        "batch": a,
        "activations": SCALAR,
    }


def test_accumulation_keeps_gradients():
    """Without zero_grad they exist throughout; a layer's gradients are computed again and added: p more."""
    rows, width, layers = 8, 64, 3
    a, w, b = 4 * rows * width, 4 * width * width, 4 * width
    p = w + b
    model, batch = stack(layers, width), torch.randn(rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = follow(trained(model, batch, optimizer), batch, optimizer, zero=False)
    backward = at(result, "backward")
    assert backward["gradients"] == layers * p
    # The first layer in backward: the gradients of its output and input, its weight and its bias.
    assert backward["other"] == 2 * a + p
    assert backward["activations"] == (layers - 1) * a + 2 * SCALAR


def test_checkpointed_blocks():
    """Blocks of 3 layers run again: only their outputs stay, and within a block one input and its output.

    When a block runs again, its own output isn't needed any more but the saved ones exist:
    n - 1 outputs before it, and at its last ReLU 2 ReLU outputs and that ReLU's input and output.
    """
    rows, width, blocks, layers = 64, 16, 3, 3
    a = 4 * rows * width
    batch = torch.randn(rows, width)
    model = nn.Sequential(*(stack(layers, width) for _ in range(blocks)))

    def loss(whole, data):
        for block in whole:
            data = checkpoint(block, data, use_reentrant=False)
        return data.sum()

    plain = follow(model, batch)
    model.zero_grad()
    result = follow(model, batch, loss=loss)
    assert at(plain, "forward")["activations"] == (blocks * layers + 1) * a
    assert at(result, "forward")["activations"] == (blocks - 1 + 2) * a
    assert [peak.phase for peak in result.peaks] == ["forward", "backward", "recompute"]
    again = at(result, "recompute")
    assert (
        again["activations"]
        <= (blocks - 1 + layers + 1) * a + 2 * SCALAR
        < at(plain, "forward")["activations"]
    )


def test_in_place_operators_allocate_nothing():
    """One output per layer, and finally the loss and the initial 1 of backward."""
    rows, width, layers = 8, 32, 3
    result = follow(stack(layers, width, inplace=True), torch.randn(rows, width))
    assert at(result, "forward")["activations"] == layers * 4 * rows * width + 2 * SCALAR


def test_views_share_storage():
    batch = torch.randn(6, 4)
    scale = nn.Linear(4, 1, bias=False)

    def loss(model, data):
        views = [
            data.view(24),
            data.t(),
            data[1:],
            data.expand(3, 6, 4),
            data.detach(),
            data.unflatten(1, (2, 2)),
        ]
        return model(views[4]).sum()

    assert at(follow(scale, batch, loss=loss), "forward") == {
        "parameters": 16,
        "batch": 96,
        "activations": 24 + SCALAR,
    }


def test_autocast_copies_count():
    """Autocast keeps half-size copies of all parameters and of the batch; outputs are half-size too."""
    rows, width, layers = 16, 32, 3
    a, p = 4 * rows * width, 4 * width * (width + 1)
    model = stack(layers, width)

    def loss(whole, data):
        with torch.autocast("cpu", torch.bfloat16):
            out = whole(data)
        return out.sum()

    result = follow(model, torch.randn(rows, width), loss=loss)
    assert at(result, "forward") == {
        "parameters": layers * p,
        "batch": a,
        "activations": layers * p // 2 + a // 2 + (layers + 1) * a // 2,
    }


def test_frozen_layers_save_nothing():
    """All layers but the last save only the output that the last one needs, and have no gradients."""
    rows, width, layers = 64, 16, 4
    a, p = 4 * rows * width, 4 * width * (width + 1)
    model = stack(layers, width)
    for parameter in model[:-2].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    result = follow(model, torch.randn(rows, width), optimizer)
    assert at(result, "forward")["activations"] == 3 * a
    assert at(result, "optimizer")["gradients"] == p


def test_tied_weights_and_shared_storages_count_once():
    """Two layers share one weight, and one buffer is part of another."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    flat = torch.zeros(100)
    model.register_buffer("flat", flat)
    model.register_buffer("part", flat[:10])
    result = follow(model, torch.randn(2, 8))
    assert result.begin_by_category["parameters"] == 4 * 64
    assert result.begin_by_category["buffers"] == 400


@dataclass
class Sample:
    inputs: torch.Tensor
    more: list[torch.Tensor]
    name: str = "x"


def test_nested_batch_counts_whole_storage_once():
    """The batch has a dict, a dataclass and a non-contiguous tensor."""
    inputs = torch.randn(8, 20)[:, ::2]
    batch = {"a": Sample(inputs, [torch.zeros(5), inputs]), "text": "words", "n": 3}
    result = follow(nn.Linear(10, 1), batch, loss=lambda model, data: model(data["a"].inputs).sum())
    assert result.begin_by_category["batch"] == 4 * 8 * 20 + 4 * 5


def test_unknown_tensors_count_from_first_use():
    """A constant that isn't a buffer, or that comes from NumPy, is in category other."""
    constant = torch.ones(100)
    result = follow(nn.Linear(4, 1), torch.ones(4), loss=lambda model, data: (model(data) * constant).sum())
    assert at(result, "forward")["other"] == 400


def test_only_model_device_counts():
    """The model is on the meta device; tensors on the CPU aren't in its memory."""
    meta = torch.device("meta")
    model = nn.Linear(8, 8, device=meta)
    batch = torch.ones(8)  # on the CPU

    def loss(whole, data):
        data * 2
        return whole(data.to(meta)).sum()

    result = follow(model, batch, loss=loss, device=meta)
    assert result.begin_by_category["batch"] == 0
    assert at(result, "forward")["parameters"] == 4 * 72
    assert at(follow(model, batch, loss=loss), "forward") == {"batch": 32, "activations": 32}


def test_clipping_is_not_forward():
    """Gradient norms after backward belong to the optimizer, and forward keeps its own peak."""
    model, batch = stack(2, 8), torch.randn(4, 8)
    live = LiveTensors(CPU)
    with FlopCounter(model, force_eager=False, watches=(live,)):
        live.begin(model, [], batch)
        model(batch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    live.end()
    result = live.result(0)
    assert [peak.phase for peak in result.peaks] == ["forward", "backward", "optimizer"]
    assert "gradients" not in at(result, "forward")


def test_gradients_freed_before_end_are_categorized():
    """zero_grad runs after the optimizer's step: gradients were categorized at the end of backward."""
    model, batch = stack(2, 64), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveTensors(CPU)
    with FlopCounter(model, force_eager=False, watches=(live,)):
        live.begin(model, [optimizer], batch)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    live.end()
    assert at(live.result(0), "optimizer")["gradients"] == 2 * 4 * 64 * 65


def test_tensors_without_storage_are_skipped_and_noted():
    embedding = nn.Embedding(10, 4, sparse=True)
    result = follow(embedding, torch.tensor([1, 2]))
    assert result.dropped
    assert "torch.sparse_coo" in result.dropped[0]
    assert at(result, "forward")["activations"] == 2 * 4 * 4 + SCALAR
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    nested = follow(nn.Linear(4, 4), ragged, loss=lambda model, data: model(data).values().sum())
    assert nested.begin_by_category["batch"] >= 5 * 4 * 4
    assert at(nested, "forward")["activations"] >= 5 * 4 * 4


def test_resized_storage_has_new_size():
    live, tensor = LiveTensors(CPU), torch.zeros(10)
    live.begin(nn.Identity(), [], tensor)

    def use(number):
        live(torch.ops.aten.add.Tensor, (tensor,), {}, tensor, lambda: ("forward", ""))
        assert live._total == number

    use(40)
    tensor.untyped_storage().resize_(400)
    use(400)
    tensor.untyped_storage().resize_(0)
    use(0)
    live.end()
    [peak] = live.result(0).peaks
    assert (peak.num_bytes, peak.by_category["batch"]) == (400, 400)


def test_tensor_freed_before_peak_is_not_in_it():
    """A tensor of 100 numbers dies, and the next operator creates one of 200."""
    live = LiveTensors(CPU)
    with FlopCounter(nn.Identity(), force_eager=False, watches=(live,)):
        live.begin(nn.Identity(), [], None)
        small = torch.ones(100)
        del small
        large = torch.ones(200)
    live.end()
    assert at(live.result(0), "forward") == {"activations": 800}
    assert len(large) == 200


def test_no_tensor_is_kept_alive():
    """Tensors die as early as without it, and without the garbage collector."""
    gc.disable()
    try:
        model, batch = stack(2, 8), torch.randn(4, 8)
        live = LiveTensors(CPU)
        with FlopCounter(model, force_eager=False, watches=(live,)):
            live.begin(model, [], batch)
            inner = model[0](batch)
            gone = weakref.ref(inner.untyped_storage())
            out = model[1](inner).sum()
            saved = weakref.ref(out.grad_fn.next_functions[0][0]._saved_result.untyped_storage())
            del inner
            assert gone() is None  # ReLU saves its result
            assert saved() is not None
            out.backward()
            assert saved() is None
            whole = weakref.ref(batch.untyped_storage())
            live.end()
            del batch
            assert whole() is None
    finally:
        gc.enable()


def test_training_is_bit_identical():
    def train(watched):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(32, 8)
        for _ in range(3):
            live = LiveTensors(CPU) if watched else None
            with FlopCounter(model, force_eager=False, watches=(live,)):
                if live is not None:
                    live.begin(model, [optimizer], batch)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return [*model.parameters(), *model.buffers()]

    watched, plain = train(True), train(False)
    assert len(plain) == 6 + 3  # parameters, buffers
    for one, other in zip(watched, plain, strict=True):
        assert torch.equal(one, other)


def test_internal_error_does_not_reach_step(monkeypatch):
    def fail(self):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(LiveTensors, "_take_dead", fail)
    model, batch = stack(1, 4), torch.randn(2, 4)
    live = LiveTensors(CPU)
    with FlopCounter(model, force_eager=False, watches=(live,)):
        live.begin(model, [], batch)
        model(batch).sum().backward()
    monkeypatch.undo()
    live.end()
    assert "ZeroDivisionError: ours" in live.result(0).dropped[0]


@pytest.mark.parametrize("kind", ["stack", "convolution", "transformer"])
def test_peak_agrees_with_torch_tracker(kind):
    """Compares the step's peak; torch's tracker is another dispatch mode with weak references."""
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    torch.manual_seed(0)
    models = {
        "stack": lambda: (stack(3, 32), torch.randn(8, 32)),
        "convolution": lambda: (
            nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
            ),
            torch.randn(4, 3, 8, 8),
        ),
        "transformer": lambda: (
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            torch.randn(2, 5, 16),
        ),
    }
    model, batch = models[kind]()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    trained(model, batch, optimizer)

    def step():
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    theirs = tracker.MemTracker()
    theirs.track_external(model, optimizer, batch)
    with theirs:
        step()
    [snapshot] = [
        sums for device, sums in theirs.get_tracker_snapshot("peak").items() if device.type == "cpu"
    ]
    live = LiveTensors(CPU)
    with FlopCounter(model, force_eager=False, watches=(live,)):
        live.begin(model, [optimizer], batch)
        step()
    live.end()
    ours = max(peak.num_bytes for peak in live.result(0).peaks)
    assert ours == snapshot["Total"]
