"""Counting without data gives the same numbers, computes nothing and leaves the model unchanged."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import lightning
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.core.model_copies import fake_copy, fake_inputs
from lightning_modelprof.inspect.flops.count import count_flops, summarize
from tests.inspect.test_flops_untouched import assert_same, state_of
from tests.support.flop_models import CASES, SMALL, SMALL_BACKWARD, Batch, Small, total

pytestmark = pytest.mark.slow

# Models that ask for values: a loop's length and the choice of rows.
NEEDS_VALUES = {"control flow"}


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_give_same_counts(name):
    torch.manual_seed(0)
    truth = CASES[name]()
    loss_fn = total if any(parameter.requires_grad for parameter in truth.model.parameters()) else None
    before = state_of(truth.model) if name not in ("compiled", "compiled by inductor") else None
    if name in NEEDS_VALUES:
        with pytest.raises(ModelProfError, match="without data"):
            count_flops(truth.model, *truth.args, loss_fn=loss_fn, on_fake_tensors=True)
    else:
        count = count_flops(truth.model, *truth.args, loss_fn=loss_fn, on_fake_tensors=True)
        assert count.macs["forward"] == pytest.approx(truth.forward, rel=1e-3)
        if truth.backward is not None:
            assert count.macs["backward"] == pytest.approx(truth.backward, rel=1e-3)
        assert count.macs.get("recompute") == truth.recompute
        assert (count.errors, count.uncounted) == ((), {})
    if before is not None:
        assert_same(before, state_of(truth.model))


def test_model_larger_than_memory():
    """A hundred layers of 40 GB each, on the meta device."""
    width = 100_000
    with torch.device("meta"):
        layers = [nn.Linear(width, width, bias=False) for _ in range(100)]
    model = nn.Sequential(*layers)
    count = count_flops(model, torch.empty(1024, width, device="meta"), loss_fn=total)
    one = 1024 * width**2
    assert count.macs == {"forward": 100 * one, "backward": 199 * one}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tied_meta_weights_stay_tied():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
        model[1].weight = model[0].weight
    copied, _ = fake_copy(model)
    assert copied[1].weight is copied[0].weight
    assert isinstance(copied[1].weight, nn.Parameter)
    assert copied[0].weight.device.type == "cpu"


# ---- Inputs

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


def test_inputs_keep_their_types():
    _, mode = fake_copy(nn.Identity())
    x, other = torch.ones(2, 3, requires_grad=True), object()
    value = {
        "dict": {"x": x, "other": other},
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=x),
        "user": UserDict(a=x),
        "list": [x, 1, None],
        "tuple": (x, "text"),
        "named": Pair(x, other),
        "dataclass": Batch(x),
        "frozen": Frozen(x, "name"),
        "read only": MappingProxyType({"x": x}),
    }
    before = copy.copy(value)
    fake = fake_inputs(mode, value)
    assert value == before
    for key in value.keys() - {"read only"}:
        assert type(fake[key]) is type(value[key])
    found = [
        fake["dict"]["x"],
        fake["ordered"]["a"],
        fake["default"]["a"],
        fake["user"]["a"],
        fake["list"][0],
        fake["tuple"][0],
        fake["named"].first,
        fake["dataclass"].x,
        fake["frozen"].x,
        fake["read only"]["x"],
    ]
    assert all(isinstance(tensor, FakeTensor) for tensor in found)
    assert len({id(tensor) for tensor in found}) == 1  # one tensor stays one
    assert (found[0].shape, found[0].requires_grad, found[0].is_leaf) == (x.shape, True, True)
    assert fake["default"].default_factory is list
    assert fake["dict"]["other"] is other
    assert fake["named"].second is other
    assert (fake["list"][1:], fake["frozen"].name) == ([1, None], "name")


def test_inputs_without_tensors_are_unchanged():
    _, mode = fake_copy(nn.Identity())
    for value in ({"a": 1}, [1, "a"], (1, None), torch.Size([2]), "text", 1, None, object(), Batch):
        assert fake_inputs(mode, value) is value


# ---- LightningModules


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.last.weight = self.embedding.weight
        self.metrics = torchmetrics.MetricCollection(
            [
                torchmetrics.Accuracy("multiclass", num_classes=50),
                torchmetrics.F1Score("multiclass", num_classes=50),
            ]
        )
        self.mean = torchmetrics.MeanMetric()
        self.losses = []

    def forward(self, x):
        return self.last(self.embedding(x).mean(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss)
        self.tell(logits, y, loss)
        return loss

    def tell(self, logits, y, loss):
        self.log("loss", loss)
        self.log_dict(self.metrics(logits, y))
        self.mean(loss)
        self.log("mean", self.mean)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Quiet(Lit):
    """Dynamo can't trace Lightning's log of a metric."""

    def tell(self, logits, y, loss):
        pass


# The mean of words for 4 rows, 16 wide, to 50 words; the embedding's rows need their gradient.
LIT_MACS = {"forward": 4 * 16 * 50, "backward": 2 * 4 * 16 * 50}
BATCH = torch.randint(0, 50, (4, 7)), torch.randint(0, 50, (4,))


class CountsACopy(lightning.Callback):
    def __init__(self):
        self.counts, self.trainer_of_copy = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        before, attributes, losses = (
            state_of_tensors(pl_module),
            dict(pl_module.__dict__),
            len(pl_module.losses),
        )
        copied, mode = fake_copy(pl_module)
        self.trainer_of_copy.append(copied._trainer)
        names = {"forward", "training_step", "_compiled_call_impl"} & copied.__dict__.keys()
        assert not names
        assert copied._compiler_ctx is None
        assert type(copied) is type(pl_module)
        assert copied.last.weight is copied.embedding.weight
        with mode, FlopCounter(copied) as counter:
            loss = copied.training_step(fake_inputs(mode, BATCH), 0)
            loss.backward()
        assert isinstance(loss, FakeTensor)
        assert len(copied.losses) == losses + 1
        self.counts.append(summarize(counter))
        # The original is unchanged.
        assert pl_module.__dict__ == attributes
        assert len(pl_module.losses) == losses
        assert pl_module._trainer is trainer
        for one, other in zip(before, state_of_tensors(pl_module), strict=True):
            assert torch.equal(one, other)


def state_of_tensors(module):
    tensors = [tensor.clone() for tensor in module.state_dict().values()]
    tensors += [
        torch.tensor(metric._update_count) for metric in module.modules() if hasattr(metric, "_update_count")
    ]
    return [*tensors, torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "torch.compile", "compile"])
def test_copy_of_lightning_module_in_fit(kind):
    torch._dynamo.reset()
    model = Lit() if kind == "plain" else Quiet()
    fitted = torch.compile(model, backend="aot_eager") if kind == "torch.compile" else model
    if kind == "compile":
        model.compile(backend="aot_eager")
        model.last.compile(backend="aot_eager")
    callback = CountsACopy()
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(fitted, torch.utils.data.DataLoader(list(zip(*BATCH, strict=True)), batch_size=4))
    assert callback.trainer_of_copy == [None, None]
    for count in callback.counts:
        assert (count.macs, count.uncounted, count.errors) == (LIT_MACS, {}, ())


# ---- Compiled parts


def test_compiled_parts_are_restored():
    runs = []

    def backend(graph, inputs):
        runs.append("compiled")
        return graph

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped = torch.compile(nn.Linear(16, 32), backend=backend)
            self.inside = nn.Linear(32, 4)
            self.inside.compile(backend=backend)
            self.scale = nn.Parameter(torch.ones(4))
            self.step = torch.compile(self.plain_step, backend=backend)

        def plain_step(self, y):
            return self.inside(y.relu()) * self.scale

        def forward(self, x):
            return self.step(self.wrapped(x))

    model = Parts()
    copied, mode = fake_copy(model)
    assert copied.step.__self__ is copied
    assert type(copied.wrapped) is nn.Linear
    with mode, FlopCounter(copied, force_eager=False) as counter:
        copied(fake_inputs(mode, torch.randn(4, 16))).sum().backward()
    assert summarize(counter).macs == {"forward": SMALL, "backward": SMALL_BACKWARD}
    assert runs == []
    model(torch.randn(4, 16))
    assert runs  # the model itself is still compiled


# ---- Models that cannot be copied or counted


def test_model_that_needs_values_is_rejected():
    class Asks(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(ModelProfError, match=r"needs their values .*on_fake_tensors=False"):
        count_flops(Asks(), torch.ones(3), on_fake_tensors=True)


def test_model_that_cannot_be_copied_is_rejected():
    model = Small()
    model.lines = (line for line in "ab")
    with pytest.raises(ModelProfError, match="Small can't be copied"):
        count_flops(model, torch.ones(4, 16), on_fake_tensors=True)


def test_model_errors_propagate():
    with pytest.raises(RuntimeError, match="reduction dim"):
        count_flops(Small(), torch.ones(4, 17), on_fake_tensors=True)
