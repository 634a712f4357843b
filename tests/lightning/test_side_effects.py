"""Tests that user objects are called exactly as often as without the callback.

A special method may draw random numbers or count its calls. Each one here records its calls.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset, Sampler

from tests.support import fits
from tests.support.fits import fit_quietly, make_callback, make_trainer

pytestmark = pytest.mark.slow

calls: Counter[str] = Counter()

CLASS_HOOKS = ("__hash__", "__eq__", "__instancecheck__", "__subclasscheck__")
HOOKS = (
    *("__hash__", "__eq__", "__len__", "__bool__", "__iter__", "__contains__", "__getitem__"),
    *("__repr__", "__str__", "__reduce_ex__", "__deepcopy__", "__copy__", "__getattr__", "__setattr__"),
    *("__call__", "forward", "training_step", "validation_step", "step", "zero_grad", "state_dict"),
    *("modules", "named_modules", "children", "named_children", "parameters", "named_parameters"),
    *("buffers", "named_buffers", "extra_repr", "apply", "register_forward_hook", "train", "eval"),
)


def noted(name, original):
    def method(self, *arguments, **options):
        calls[name] += 1
        return original(self, *arguments, **options)

    return method


def tattling(base):
    """Subclass that records each call of its own methods and those of its metaclass."""
    kind = type(base)
    own_class = {name: noted(f"class {name}", getattr(kind, name)) for name in CLASS_HOOKS}
    own = {
        name: noted(f"{base.__name__}.{name}", getattr(base, name)) for name in HOOKS if hasattr(base, name)
    }
    return type("Meta", (kind,), own_class)(base.__name__, (base,), own)


class Tattling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        calls["__torch_function__"] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Numbers(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.ones(4) * index


class InOrder(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter(range(60))

    def __len__(self):
        return 60


class Relu(torch.nn.Module):
    def forward(self, inputs):
        return inputs.relu()


class Watching(Callback):
    pass


class Batch(dict):
    pass


class Kept(list):
    pass


Linear, Activation, Descent = map(tattling, (torch.nn.Linear, Relu, torch.optim.SGD))
Data, Order, Watch, Mapping, Memory = map(tattling, (Numbers, InOrder, Watching, Batch, Kept))


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Linear(4, 4), Activation(), Linear(4, 1)])
        self.layers[0].weight = torch.nn.Parameter(self.layers[0].weight.detach().as_subclass(Tattling))
        self.register_buffer("buffer", torch.ones(3).as_subclass(Tattling))
        self.plain, self.memory = torch.ones(3).as_subclass(Tattling), Memory()

    def loss(self, batch):
        inputs = batch["x"].as_subclass(torch.Tensor)
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.mean()

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.loss(batch)

    def configure_optimizers(self):
        return Descent(self.parameters(), 1e-3)


Module = tattling(Net)


def collate(samples):
    return Mapping(x=torch.stack(samples).as_subclass(Tattling))


def calls_in_a_fit(folder, *callbacks):
    torch.manual_seed(1)
    module = Module()
    train = DataLoader(Data(), 2, sampler=Order(), collate_fn=collate)
    validation = DataLoader(Data(), 10, collate_fn=collate)
    trainer = make_trainer(folder, Watch(), *callbacks, max_epochs=2)
    calls.clear()
    fit_quietly(trainer, module, train, validation)
    return Counter(calls), module.layers[0].weight.detach().as_subclass(torch.Tensor)


def test_user_objects_are_not_called_more_often(tmp_path):
    calls_in_a_fit(tmp_path)  # abstract classes cache earlier checks
    without, weight = calls_in_a_fit(tmp_path)
    callback = make_callback(tmp_path, active=0, flops=True, sampling=True)
    with_it, same_weight = calls_in_a_fit(tmp_path, callback)
    assert without["__torch_function__"] > 100
    assert {name: with_it[name] - without[name] for name in with_it if with_it[name] != without[name]} == {}
    assert torch.equal(weight, same_weight)
    assert callback.run.ranks[0].model_cost.count is not None
    assert set(callback.run.ranks[0].steps.samples.tolist()) == {2}


class Functions(torch.overrides.TorchFunctionMode):
    """Records each torch function called while active."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*arguments, **(options or {}))


def test_users_function_mode_sees_same_in_inspected_steps(tmp_path):
    seen = []

    class Watched(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

        def training_step(self, batch):
            with Functions() as functions:
                loss = self.layers(batch).mean()
            seen.append(functions.seen)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    callback = make_callback(tmp_path, active=0, flops=True)
    fit_quietly(make_trainer(tmp_path, callback), Watched(), DataLoader(Numbers(), 2))
    assert callback.run.ranks[0].model_cost.count is not None
    assert len(seen) == 30
    assert seen == [seen[0]] * 30


@pytest.mark.parametrize("recorded", [12, 60])
def test_users_torch_profiler_sees_no_inspected_step(tmp_path, recorded):
    """It counts operators, including those that run inside ours."""

    class Profiled(Callback):
        def on_train_batch_start(self, *others):
            if others[-1] == 0:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profiler.start()

        def on_train_batch_end(self, *others):
            if others[-1] == recorded - 1:
                self.profiler.stop()
                self.calls = {one.key: one.count for one in self.profiler.key_averages()}

    calls = []
    for folder, ours in (("with", make_callback(tmp_path / "with", active=0, flops=None)), ("without", None)):
        profiled = Profiled()
        callbacks = [profiled] if ours is None else [profiled, ours]
        fit_quietly(make_trainer(tmp_path / folder, *callbacks), fits.Net(), fits.loader(120))
        calls.append({name: count for name, count in profiled.calls.items() if name.startswith("aten::")})
        if ours is not None:
            cost = ours.run.ranks[0].model_cost
    assert calls[0] == calls[1]
    assert (cost.count is None) == (recorded == 60)
    assert cost.count is not None or "another torch profiler was recording" in cost.count_note


class Recursive(LightningModule):
    """Calls itself ``depth`` times."""

    def __init__(self, depth):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.depth, self.limits = depth, set()

    def forward(self, x, depth=0):
        if depth == 0:
            return x * self.scale
        return self(x, depth - 1)

    def training_step(self, batch):
        self.limits.add(sys.getrecursionlimit())
        return self(batch.float().mean(), self.depth).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def deepest():
    def fits_in(depth):
        try:
            fit_quietly(make_trainer(None, max_steps=2), Recursive(depth), DataLoader(Numbers(), 2))
        except RecursionError:
            return False
        return True

    return 99 + bisect.bisect_left(range(100, 500), True, key=lambda depth: not fits_in(depth))


def test_model_that_needs_whole_stack_trains(tmp_path):
    """Our hooks use one Python stack frame at every level."""
    module = Recursive(deepest() - 9)
    callback = make_callback(tmp_path, active=0, flops=True)
    before = sys.getrecursionlimit()
    fit_quietly(make_trainer(tmp_path, callback), module, DataLoader(Numbers(), 2))
    assert callback.run.ranks[0].model_cost.count is not None
    assert len(module.limits) == 2, "more in inspected steps"
    assert sys.getrecursionlimit() == before
