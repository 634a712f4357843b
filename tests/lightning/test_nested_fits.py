"""Tests nested loops, and loops in another thread, with one callback object."""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightning_modelprof.errors import ConfigError
from lightning_modelprof.run.archive import load_run
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, our_warnings

pytestmark = pytest.mark.slow


class Inner(Callback):
    """Runs another trainer with the given callbacks in one hook of a fit."""

    def __init__(self, folder, ours, hook, run=None):
        self.folder, self.ours, self.run = folder, ours, run or self.fit
        self.trainers, self.weights, self.seen = [], [], []
        setattr(self, hook, self.begin)

    def begin(self, trainer, *args):
        inner, module = make_trainer(self.folder, *self.ours), Net()
        self.trainers.append(inner)
        self.run(inner, module)
        self.weights += [one.detach().clone() for one in module.parameters()]
        self.seen += [one.report for one in self.ours]

    @staticmethod
    def fit(trainer: Any, module: Any) -> None:
        fit_quietly(trainer, module, loader(6))


class InStep(Net):
    """Starts an inner loop in batches 2 and 5."""

    def __init__(self, inside):
        super().__init__(dropout=0.5)
        self.inside = [inside]  # in a list, so that it isn't registered

    def training_step(self, batch, batch_idx):
        if self.trainer.state.fn == "fit" and batch_idx in {2, 5}:
            self.inside[0].begin(self.trainer)
        return super().training_step(batch, batch_idx)


def nested(folder, hook, *, is_measured, run=None, **kwargs):
    """Fit two epochs of eight steps with inner fits; return our callbacks, inner loops and weights."""
    seed_everything(5, verbose=False)
    ours = [make_callback(folder, **kwargs)] if is_measured else []
    inside = Inner(folder, ours, hook, run)
    module = InStep(inside) if hook == "training_step" else Net(dropout=0.5)
    others = [] if hook == "training_step" else [inside]
    trainer = make_trainer(folder, *ours, *others, max_epochs=2)
    profiler = trainer.profiler
    fit_quietly(trainer, module, loader(16))
    assert trainer.profiler is profiler
    assert all(type(one.profiler) is type(profiler) for one in inside.trainers)
    return ours, inside, [*(one.detach() for one in module.parameters()), *inside.weights]


@pytest.mark.parametrize("hook", ["training_step", "on_train_epoch_end", "on_train_start", "on_fit_start"])
def test_nested_fits_have_reports_and_callback_keeps_outer_one(tmp_path, hook):
    num_inner = {"training_step": 4, "on_train_epoch_end": 2}.get(hook, 1)
    with our_warnings() as messages:
        [callback], inside, weights = nested(
            tmp_path / "a", hook, is_measured=True, active=2, sampling=True, flops=True, peak_flops_per_s=1e9
        )
    # torch has one profiler, so the inner fit can't open a window while the outer one's is open.
    assert all("window 0 was not recorded" in message for message in messages)
    _, _, without = nested(tmp_path / "b", hook, is_measured=False)
    assert all(torch.equal(one, other) for one, other in zip(weights, without, strict=True))

    # The outer fit is set up first, but claims its directory when it starts training.
    is_outer_last = hook == "on_fit_start"
    outer_name = "modelprof/fit_2" if is_outer_last else "modelprof"
    outer = load_run(tmp_path / "a" / outer_name)
    assert (outer.info.status, outer.ranks[0].num_steps) == ("finished", 16)
    assert callback.run.info == outer.info
    assert callback.run.ranks[0].num_steps == 16
    names = ["modelprof"] if is_outer_last else [f"modelprof/fit_{n + 2}" for n in range(num_inner)]
    for name in names:
        inner = load_run(tmp_path / "a" / name)
        assert (inner.info.status, inner.ranks[0].num_steps) == ("finished", 3)
        assert sum("ran inside another one" in note for note in inner.ranks[0].notes) == 1
    assert sum("ran inside this one" in note for note in outer.ranks[0].notes) == 1
    assert len(inside.seen) == num_inner
    assert callback.report not in inside.seen
    assert (callback._session, callback._trainer, callback._outer_loops) == (None, None, [])


def test_validation_inside_fit_has_its_own_run(tmp_path):
    [callback], _, _ = nested(
        tmp_path,
        "on_train_epoch_end",
        is_measured=True,
        active=0,
        run=lambda trainer, module: trainer.validate(module, loader(8), verbose=False),
    )
    assert (callback.run.info.loop, callback.run.ranks[0].num_steps) == ("fit", 16)
    inner = load_run(tmp_path / "modelprof/validate")
    assert (inner.info.loop, inner.ranks[0].num_steps) == ("validate", 4)


class Fails(Callback):
    """Raises in training and again in on_exception, so that later callbacks don't get on_exception."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise ValueError("of the user")

    def on_exception(self, trainer, module, exception):
        raise RuntimeError("told nobody")


@pytest.mark.parametrize("is_told", [True, False])
def test_failed_inner_fit_does_not_affect_outer_one(tmp_path, is_told):
    def fit(trainer, module):
        failing = Fails()
        if is_told:
            failing.on_exception = lambda *args: None
        trainer.callbacks.insert(0, failing)
        with suppress(ValueError, RuntimeError):
            fit_quietly(trainer, module, loader(6))

    [callback], _, _ = nested(tmp_path, "on_train_epoch_end", is_measured=True, active=0, run=fit)
    assert (callback.run.info.status, callback.run.ranks[0].num_steps) == ("finished", 16)
    assert load_run(tmp_path / "modelprof/fit_2").info.status == "failed"


def test_exception_in_inner_fit_ends_both(tmp_path):
    def fit(trainer, module):
        module.at_batch = lambda number: 1 / (1 - number)
        fit_quietly(trainer, module, loader(6))

    with pytest.raises(ZeroDivisionError):
        nested(tmp_path, "on_train_epoch_end", is_measured=True, active=0, run=fit)
    for name, steps in (("modelprof", 8), ("modelprof/fit_2", 1)):
        run = load_run(tmp_path / name)
        assert (run.info.status, run.ranks[0].num_steps) == ("failed", steps), name


def test_copy_made_in_inner_fit_has_no_loop(tmp_path):
    copies = []

    def fit(trainer, module):
        module.at_batch = lambda number: copies.append(
            pickle.loads(ForkingPickler.dumps(trainer.callbacks[0]))
        )
        fit_quietly(trainer, module, loader(2))

    nested(tmp_path, "on_train_epoch_end", is_measured=True, active=0, run=fit)
    assert [(one._session, one._trainer, one._outer_loops) for one in copies] == [(None, None, [])] * 2


def test_callback_measuring_in_another_thread_is_rejected(tmp_path):
    """The running fit continues to be measured."""
    errors: list[BaseException] = []
    callback = make_callback(tmp_path, active=0)

    def other() -> None:
        try:
            fit_quietly(make_trainer(tmp_path, callback), Net(), loader(6))
        except BaseException as error:
            errors.append(error)

    def at_batch(number: int) -> None:
        if number == 3:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    fit_quietly(make_trainer(tmp_path, callback), Net(at_batch), loader(16))
    [error] = errors
    assert isinstance(error, ConfigError)
    assert "in another thread" in str(error)
    assert (callback.run.info.status, callback.run.ranks[0].num_steps) == ("finished", 8)
