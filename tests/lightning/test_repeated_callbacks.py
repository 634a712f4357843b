"""Tests a Trainer with repeated callbacks: one of them measures, and one line says so."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors import callback_connector

from lightning_modelprof import ModelProfCallback, ModelProfiler
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.lightning.from_environment import callbacks as from_environment
from tests.support.fits import (
    Net,
    fit_quietly,
    grouped,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    steps_of,
    windows_of,
)

SAID = "the Trainer has {} ModelProfCallbacks and uses only one. Pass one, in a new list per Trainer."


pytestmark = pytest.mark.slow


def said(messages):
    return [message.partition(": ")[2] for message in messages]


def test_same_object_measures_once(tmp_path, monkeypatch):
    entered, counted = [], []
    enter = FlopCounter.__enter__
    monkeypatch.setattr(FlopCounter, "__enter__", lambda self: entered.append(1) or enter(self))
    callback = make_callback(
        tmp_path, flops=True, peak_flops_per_s=1e12, steps=(5, 7), samples_fn=lambda _: counted.append(1) or 2
    )
    trainer = make_trainer(tmp_path, callback, Callback(), callback, callback)
    with our_warnings() as messages:
        fit_quietly(trainer, Net(), loader(20))
        fit_quietly(trainer, Net(), loader(20))  # max_epochs is reached
        trainer.validate(Net(), loader(20), verbose=False)
    assert said(messages) == [SAID.format(3)]
    assert len(entered) == 2  # for the fit and for the validation
    assert len(counted) == 20
    assert [type(one) for one in trainer.callbacks] == [ModelProfCallback, Callback]


def test_repeated_callback_measures_as_single_one(tmp_path):
    weights, steps, records = [], [], []
    for number in (1, 3):
        seed_everything(4, verbose=False)
        callback = make_callback(tmp_path / str(number), flops=True, peak_flops_per_s=1e12, steps=(5, 7))
        module = Net(dropout=0.5)
        with our_warnings() as messages:
            fit_quietly(make_trainer(tmp_path, *number * [callback]), module, loader(24), loader(4))
        assert len(messages) == (number > 1)
        weights.append([one.detach().clone() for one in module.parameters()])
        steps.append(steps_of(callback).samples.tolist())
        records.append([one.recorded_steps for one in windows_of(callback)])
    assert all(map(torch.equal, *weights))
    assert steps[0] == steps[1]
    assert records == [[(5, 6)], [(5, 6)]]


def test_reused_callback_list_warns_of_repeated_callbacks(tmp_path, monkeypatch):
    """Lightning adds the entry point's callback to the user's list."""
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=0,report.terminal=false,report.files=false")
    shared = [Callback()]
    seen = []
    monkeypatch.setattr(callback_connector, "_load_external_callbacks", lambda _: from_environment())
    for _ in range(3):
        with our_warnings() as messages:
            trainer = make_trainer(tmp_path, callbacks=shared)
            fit_quietly(trainer, Net(), loader(20))
        seen.append(said(messages))
    assert seen == [[], [SAID.format(2)], [SAID.format(3)]]


def test_programs_callback_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=3,report.terminal=false,report.files=false")
    monkeypatch.setattr(callback_connector, "_load_external_callbacks", lambda _: from_environment())
    own = make_callback(tmp_path, active=0)
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, own), Net(), loader(20))
    assert said(messages) == [SAID.format(2)]
    assert own.run.info.status == "finished"


def test_profiler_and_callback_share_one_report(tmp_path):
    arguments = grouped({"active": 0, "sampling": False, "terminal": False, "files": False})
    profiler, callback = ModelProfiler(**arguments), ModelProfCallback(**arguments)
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback, profiler=profiler), Net(), loader(20))
    assert said(messages) == [SAID.format(2)]
    assert profiler.report is callback.report is not None


def test_only_first_rank_warns(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "is_global_zero", False)
    callback = make_callback(tmp_path, active=0, files=False)
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback, callback), Net(), loader(20))
    assert messages == []


def test_hooks_also_called_by_another_callback_count_once(tmp_path, monkeypatch):
    """The callback is in the list once, but each hook is called twice."""
    entered = []
    enter = FlopCounter.__enter__
    monkeypatch.setattr(FlopCounter, "__enter__", lambda self: entered.append(1) or enter(self))
    ours = make_callback(tmp_path, flops=True, peak_flops_per_s=1e12, steps=(5, 7))

    class HandsOn(Callback):
        pass

    for name in vars(ModelProfCallback):
        if name in ("setup", "teardown") or name.startswith("on_"):
            setattr(HandsOn, name, staticmethod(getattr(ours, name)))
    fit_quietly(make_trainer(tmp_path, HandsOn(), ours), Net(), loader(20))
    assert len(entered) == 1
    assert ours.run.info.status == "finished"
    assert [one.recorded_steps for one in windows_of(ours)] == [(5, 6)]
