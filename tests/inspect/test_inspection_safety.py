"""Inspected steps do not disturb training, even with unusual models, tensors and moments."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.show.terminal.short import short_lines
from tests.lightning.test_bit_identity import assert_same
from tests.support import fits
from tests.support.fits import Manual, Net, fit_quietly, loader, make_trainer, run_script

pytestmark = pytest.mark.slow

make_callback = partial(fits.make_callback, active=0, skip_first=10, flops=True)
COUNTED = 6
INSPECTED = (6, 7, 8, 9)

# Net on a batch of 2: 8 → 16 → 1; the first layer computes no gradient of the data.
FORWARD = 2 * (8 * 16 + 16 * 1)
BACKWARD = 2 * FORWARD - 2 * 8 * 16


def train(folder, make_module, *, callback=None, data=None, others=(), **trainer):
    """The results of a fit: weights, random states and what the module saw."""
    torch._dynamo.reset()
    seed_everything(3, verbose=False)
    module = make_module()
    callbacks = [*([] if callback is None else [callback]), *others]
    fit_quietly(make_trainer(folder, *callbacks, **trainer), module, data or loader(40))
    return {
        "weights": module.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "seen": getattr(module, "seen", None),
    }


def assert_unchanged(folder, make_module, make_data=lambda: None, **arguments):
    """Train without and with the callback; return the callback."""
    options = arguments.pop("trainer", {})
    callback = make_callback(folder / "with", **arguments)
    without = train(folder, make_module, data=make_data(), **options)
    assert_same(without, train(folder, make_module, callback=callback, data=make_data(), **options))
    assert _get_current_dispatch_mode_stack() == []
    return callback


def cost_of(callback):
    return callback.run.ranks[0].model_cost


def macs(callback):
    section = callback.report.summary.flops
    return {phase: section.phases[phase] // 2 for phase in ("forward", "backward") if phase in section.phases}


def hooks_on(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


# ---- Moments


class SkippingTheEpoch(Net):
    """Ends the first epoch in ``on_train_batch_start``; ``seen`` lists what is installed after each epoch."""

    def __init__(self, at):
        super().__init__(dropout=0.5)
        self.at, self.seen = at, []

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, self.at) else None

    def on_train_epoch_end(self):
        self.seen.append((hooks_on(self), len(_get_current_dispatch_mode_stack())))


@pytest.mark.parametrize("at", INSPECTED)
def test_epoch_that_ends_at_start_of_inspected_batch(tmp_path, at):
    options = {"max_epochs": 2}
    callback = assert_unchanged(tmp_path, lambda: SkippingTheEpoch(at), trainer=options)
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}
    module = SkippingTheEpoch(at)
    train(tmp_path, lambda: module, callback=make_callback(tmp_path), **options)
    assert module.seen == [(0, 0), (0, 0)]


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


class WithMode(Callback):
    """Turns a mode on from one batch's start to another's end; ``seen`` lists its calls by batch."""

    def __init__(self, begin, end):
        self.begin, self.end, self.mode, self.seen = begin, end, Calls(), []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.begin:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((self.mode.number, self.mode in _get_current_dispatch_mode_stack()))
        if batch_idx == self.end:
            self.mode.__exit__(None, None, None)


@pytest.mark.parametrize(("begin", "end"), [(6, 6), (6, 8), (3, 6), (5, 12)])
@pytest.mark.parametrize("is_first", [True, False])
def test_user_mode_sees_same_calls(tmp_path, begin, end, is_first):
    seen = []
    for callback in (None, make_callback(tmp_path)):
        watch = WithMode(begin, end)
        ours = [] if callback is None else [callback]
        train(tmp_path, Net, others=[watch, *ours] if is_first else [*ours, watch])
        seen.append(watch.seen)
        assert not is_in_torch_dispatch_mode()
    assert seen[0] == seen[1]
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}
    assert _get_current_dispatch_mode_stack() == []


class Saving(Net):
    """Copies and pickles itself in the middle of each inspected step."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def training_step(self, batch, batch_idx):
        if batch_idx in INSPECTED:
            file = io.BytesIO()
            torch.save(self.layers, file)
            file.seek(0)
            self.copies += [
                copy.deepcopy(self.layers),
                pickle.loads(pickle.dumps(self.layers)),
                torch.load(file, weights_only=False),
            ]
        return super().training_step(batch, batch_idx)


def test_copies_made_in_inspected_step_work_alone(tmp_path):
    module, callback = Saving(), make_callback(tmp_path)
    train(tmp_path, lambda: module, callback=callback)
    assert len(module.copies) == 3 * len(INSPECTED)
    before = copy.deepcopy(cost_of(callback))
    for each in module.copies:
        x = torch.rand(2, 8)
        assert each(x).shape == (2, 1)
        modules = list(each.modules())
        hooks = [
            hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        ]
        assert hooks
        assert all(len(pickle.dumps(hook)) < 200 for hook in hooks)  # no measuring object came along
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}
    assert cost_of(callback) == before


# ---- Tensors


class CopiesTrainer(Callback):
    """Copies everything in the middle of an inspected step and of other steps."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx in (2, COUNTED, 7):
            for callback in trainer.callbacks:
                pickle.dumps(callback)
            copied = copy.deepcopy(trainer)
            assert type(copied.profiler) is type(getattr(trainer.profiler, "inner", trainer.profiler))
            self.copied = batch_idx


@pytest.mark.parametrize("is_first", [True, False])
def test_trainer_can_be_copied_while_training(tmp_path, is_first):
    callback, other = make_callback(tmp_path, sampling=True, profile_memory=True), CopiesTrainer()
    train(tmp_path, Net, others=[other, callback] if is_first else [callback, other])
    assert other.copied == 7
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}


class Plain(torch.Tensor):
    """A tensor subclass without any code."""


class Listening(torch.Tensor):
    """A tensor subclass that counts its functions."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Listening.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class OfClass(Net):
    """Keeps the tensor class through an in-place activation, where torch asks a mode about it.

    The loss is a plain tensor, so backward meets tensors of the class in operators that torch itself calls.
    """

    def __init__(self, kind):
        super().__init__(dropout=0.5)
        self.layers[1] = nn.ReLU(inplace=True)
        self.kind = kind

    def loss(self, batch):
        return self.layers(batch[0].as_subclass(self.kind)).as_subclass(torch.Tensor).pow(2).mean()


class WithListeningLoss(OfClass):
    """The loss is of the tensor class, and the hooks of timed steps start at it."""

    def loss(self, batch):
        return super().loss(batch).as_subclass(self.kind)


@pytest.mark.parametrize("kind", [Plain, Listening])
def test_tensor_class_without_own_dispatch(tmp_path, kind):
    callback = assert_unchanged(tmp_path, lambda: OfClass(kind))
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}


def test_tensor_class_gets_no_extra_calls(tmp_path):
    calls = []
    for callback in (None, make_callback(tmp_path)):
        Listening.calls = 0
        train(tmp_path, lambda: OfClass(Listening), callback=callback)
        train(tmp_path, lambda: WithListeningLoss(Listening), callback=callback)
        calls.append(Listening.calls)
    assert calls[0] == calls[1] > 0


class Seeing:
    """``seen`` lists the gradients, whose last bits a small step would hide."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([p.grad.clone() for p in self.layers[0].parameters()])


class Products(Seeing):
    def loss(self, batch):
        return (1 + self.layers[0](batch[0]).sigmoid()).prod(1).mean()


class Filled(Seeing):
    """The mask's value is learned, and one mask is written into a view."""

    def loss(self, batch):
        hidden = self.layers[0](batch[0])
        wide = hidden.repeat(1, 40).exp()
        written = wide * 1
        written[:, 3:].masked_fill_(written[:, 3:] > 1, hidden[0, 1].sin())
        return wide.masked_fill(wide > 0.9, hidden[0, 0].sin()).sum() + written.sum()


class Product(Products, Net):
    pass


class ManualProduct(Products, Manual):
    pass


class Mask(Filled, Net):
    pass


class ManualMask(Filled, Manual):
    pass


FIRST_LAYER = 2 * 8 * 16  # forward; backward needs as much for the weights


@pytest.mark.parametrize("module", [Product, ManualProduct, Mask, ManualMask])
def test_gradient_sensitive_to_modes_stays_and_is_counted(tmp_path, module):
    """Under any dispatch mode torch computes it differently, with other last bits."""
    callback = assert_unchanged(tmp_path, module)
    cost = cost_of(callback)
    assert macs(callback) == {"forward": FIRST_LAYER, "backward": FIRST_LAYER}
    assert not cost.count.on_fake_tensors
    assert cost.sites.lines


class CountsAndReads(Net):
    """Like a segmentation metric: takes a shape's product without gradients and reads values."""

    def loss(self, batch):
        predicted = self.layers(batch[0]).squeeze(-1)
        num_elements = torch.prod(torch.tensor(predicted.shape))
        true_positives = ((predicted > 0.5) & (batch[1] > 0.5)).sum()
        self.read = (true_positives / num_elements).item()
        return nn.functional.mse_loss(predicted, batch[1])


def test_product_and_value_read_keep_flops_and_lines(tmp_path):
    callback = assert_unchanged(tmp_path, CountsAndReads)
    cost = cost_of(callback)
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}
    assert (cost.count.on_fake_tensors, cost.count_note, cost.sites_note) == (False, "", "")
    assert any(site.operator == "aten::_local_scalar_dense" for site in cost.sites.sites)


def product(leaf):
    return leaf.prod(1).sum()


def product_of_all(leaf):
    return leaf.prod()


def filled(leaf):
    return leaf.masked_fill(leaf > 1, leaf[0, 0]).exp().sum()


def filled_in_a_view(leaf):
    out = leaf * 1
    out[:, 1:].masked_fill_(out[:, 1:] > 1, leaf[0, 0])
    return (out.exp() * leaf).sum()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [product, product_of_all, filled, filled_in_a_view])
def test_counter_keeps_gradients_other_modes_change(function):
    x = torch.rand(64, 160, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.99
    counter = FlopCounter(nn.Identity())
    gradients = []
    for context in (torch.enable_grad(), counter, Watching()):
        leaf = x.clone().requires_grad_()
        with context:
            loss = function(leaf)
            counter.before_backward()
            loss.backward()
        gradients.append(leaf.grad)
    plain, counted, watched = gradients
    assert torch.equal(plain, counted)
    assert not torch.equal(plain, watched)  # proves that this test can fail


@pytest.mark.parametrize("function", [product, filled])
def test_user_backward_under_counter_needs_no_call(function):
    """The pass starts with an operator, and a node may run twice."""
    x = torch.rand(64, 160, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.99
    gradients = []
    for context in (torch.enable_grad(), FlopCounter(nn.Identity())):
        leaf = x.clone().requires_grad_()
        with context:
            loss = function(leaf)
            first = torch.autograd.grad(loss, leaf, retain_graph=True)
            gradients.append((*first, *torch.autograd.grad(loss, leaf)))
    assert all(map(torch.equal, *gradients))


def test_operators_after_node_without_mode_are_counted():
    model = nn.Linear(16, 16, bias=False)
    x = torch.rand(4, 16, requires_grad=True)
    with FlopCounter(model) as counter:
        (1 + model(x)).prod(1).sum().backward()
    by_phase = {place.phase: 0 for place in counter.flops}
    for place, flops in counter.flops.items():
        by_phase[place.phase] += flops
    assert by_phase == {"forward": 2 * 4 * 16 * 16, "backward": 2 * 2 * 4 * 16 * 16}
    assert not counter.errors


def test_failing_node_without_mode_leaves_no_mode():
    leaf = torch.rand(4, 4, requires_grad=True)

    def fail(_gradients):
        raise ValueError("on purpose")

    with FlopCounter(nn.Identity()):
        products = leaf.prod(1)
        loss = products.sum()  # an operator, so the node has its hooks
        products.grad_fn.register_prehook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
    assert _get_current_dispatch_mode_stack() == []


# ---- Counted copies


def compiled(module):
    module.layers[3] = torch.compile(module.layers[3], backend="eager")
    return module


class ChartSpec(Net):
    """Draws from each random generator."""

    def loss(self, batch):
        return super().loss(batch) * (1 + random.random() + float(np.random.rand()) + torch.rand(()))


def test_copy_draws_no_random_number(tmp_path):
    callback = assert_unchanged(tmp_path, lambda: compiled(ChartSpec(dropout=0.5)), fvcore=True)
    assert cost_of(callback).count.on_fake_tensors


class Kept(Dataset):
    """Returns the same tensors again in the next epoch."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.batches = [(torch.rand(2, 8, generator=generator), torch.ones(2)) for _ in range(12)]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class Normalizing(Net):
    """Changes its batch in place."""

    def loss(self, batch):
        batch[0].mul_(1.5)
        return super().loss(batch)


def test_copy_has_its_own_batch(tmp_path):
    callback = assert_unchanged(
        tmp_path,
        Normalizing,
        lambda: DataLoader(Kept(), batch_size=None),
        fvcore=True,
        trainer={"max_epochs": 2},
    )
    assert cost_of(callback).forward_table is not None


class Hooked(Net):
    """Collects features with a hook that closes over a list."""

    def __init__(self):
        super().__init__()
        self.seen = seen = []
        self.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))


def test_copy_does_not_call_hooks_that_cannot_be_copied(tmp_path):
    callback = assert_unchanged(tmp_path, lambda: compiled(Hooked()), fvcore=True)
    cost = cost_of(callback)
    assert "layers.0: expected hooks that can be copied, got Hooked.__init__" in cost.count_note
    assert cost.count_note.startswith("torch.compile wraps layers.3, and a copy without data couldn't be")
    assert cost.count_note.endswith(cost.forward_table_note)
    callback = assert_unchanged(tmp_path, Hooked)  # nothing is copied
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}


OUTSIDE = nn.Parameter(torch.ones(()))


class Reaching(Net):
    """Trains a parameter outside the module; ``seen`` lists the classes of its gradient."""

    def __init__(self):
        super().__init__()
        OUTSIDE.data.fill_(1)
        self.seen = []

    def loss(self, batch):
        return super().loss(batch) * OUTSIDE

    def on_train_batch_end(self, *_):
        OUTSIDE.grad = None

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(type(OUTSIDE.grad).__name__)


def test_copy_gives_no_gradient_to_outside_parameters(tmp_path):
    callback = assert_unchanged(tmp_path, lambda: compiled(Reaching()))
    assert "the loss depends on parameters outside the module" in cost_of(callback).count_note


ELSEWHERE = SimpleNamespace(loss=None)


class CallsCompiled(Net):
    """Keeps the compiled functions where they can't be found."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.seen = seen = []

        def backend(graph, inputs):
            seen.append("compiled")

            def run(*arguments):
                seen.append("run")
                return graph(*arguments)

            return run

        ELSEWHERE.loss = torch.compile(nn.functional.mse_loss, backend=backend)
        ELSEWHERE.call = torch.compile(lambda module, x: module(x), backend=backend)

    def training_step(self, batch, batch_idx):
        return ELSEWHERE.loss(ELSEWHERE.call(self.layers, batch[0]).squeeze(-1), batch[1])


def test_hidden_compiled_functions_are_noticed(tmp_path):
    callback = assert_unchanged(tmp_path, CallsCompiled)
    assert cost_of(callback).count.on_fake_tensors
    assert macs(callback) == {"forward": FORWARD, "backward": BACKWARD}


class KeywordStep(Net):
    def training_step(self, batch, *, factor=1, **options):
        return self.loss(batch)


def test_copy_gets_only_positional_arguments(tmp_path):
    assert macs(assert_unchanged(tmp_path, lambda: compiled(KeywordStep()))) == {
        "forward": FORWARD,
        "backward": BACKWARD,
    }


# ---- Two ranks

TWO_RANKS = """
    import sys
    from pathlib import Path

    import torch
    from lightning.pytorch import seed_everything
    from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer
    from tests.lightning.test_bit_identity import Losses

    class Keep(Losses):
        def on_fit_end(self, trainer, pl_module):
            if trainer.global_rank == 0:
                found = {"losses": self.seen, "weights": pl_module.state_dict(), "rng": torch.get_rng_state()}
                torch.save(found, folder / "found.pt")

    if __name__ == "__main__":
        torch.set_num_threads(1)
        for flops in (False, True):
            folder = Path(str(flops))
            folder.mkdir()
            seed_everything(3, verbose=False)
            ours = [make_callback(folder, active=0, skip_first=10, flops=True, fvcore=True)] if flops else []
            trainer = make_trainer(folder, *ours, Keep(), strategy="ddp_fork", devices=2)
            fit_quietly(trainer, Net(dropout=0.5), loader(80))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_counting_on_two_ranks(tmp_path):
    done = run_script(TWO_RANKS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    without, counted = (
        torch.load(tmp_path / flops / "found.pt", weights_only=False) for flops in ("False", "True")
    )
    assert len(without["losses"]) == 20
    assert_same(without, counted)
    (cost,) = [rank.model_cost for rank in load_run(tmp_path / "True" / "modelprof").ranks if rank.rank == 0]
    assert sum(operator.flops or 0 for operator in cost.count.operators) == 2 * (FORWARD + BACKWARD)
    assert cost.times.steps == 3
    assert (
        cost.forward_table_note == "with multiple ranks, a forward on one could wait for the others forever"
    )


class Leaving(Net):
    """Raises an error when it is copied."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("no copies"), RuntimeError("no copies")])
def test_copy_that_exits_does_not_end_training(tmp_path, error):
    callback = assert_unchanged(tmp_path, lambda: Leaving(error), fvcore=True)
    assert type(error).__name__ in callback.run.ranks[0].model_cost.forward_table_note


class Penalized(Net):
    """Needs gradients inside its step."""

    def loss(self, batch):
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.layers(inputs).sum(), inputs, create_graph=True)
        return super().loss(batch) + slope.square().mean()


def first_screen(callback):
    return " ".join(" ".join(short_lines(callback.report, None, "utf-8")).split())


def test_fvcore_error_is_quoted_as_reason(tmp_path):
    callback = assert_unchanged(tmp_path, Penalized, fvcore=True)
    said = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    assert cost_of(callback).forward_table_note == said
    assert f"Not done: fvcore: {said}" in first_screen(callback)
    assert macs(callback)["forward"] > 0


def test_missing_fvcore_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fvcore.nn", None)
    callback = assert_unchanged(tmp_path, Net, fvcore=True)
    assert "Not done: fvcore: fvcore's table needs fvcore, which can't be imported" in first_screen(callback)


def test_model_saved_in_inspected_step_loads_elsewhere(tmp_path):
    """A callback before ours saves the whole module, as some users do, while it has our hooks."""
    saved = tmp_path / "model.pt"

    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if any(one._forward_hooks for one in module.layers.modules()):
                torch.save(module.layers, saved)

    class Layers(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

        def training_step(self, batch):
            return self.layers(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    callback = make_callback(tmp_path, active=0, flops=True)
    trainer = make_trainer(tmp_path, Saves(), callback)
    fit_quietly(trainer, Layers(), DataLoader(torch.ones(60, 4), 2))
    assert saved.exists(), "no step was inspected while the callback looked"
    script = (
        "import sys; sys.modules['lightning_modelprof'] = None\n"
        "import torch; model = torch.load(sys.argv[1], weights_only=False)\n"
        "assert model(torch.ones(2, 4)).shape == (2, 1)"
    )
    done = run_script(script, saved, cwd=tmp_path, has_ours=False)
    assert done.returncode == 0, done.stderr
