"""Tests that Lightning skips our callback's hooks while they have no work."""

from __future__ import annotations

import pickle

import pytest
from lightning.pytorch import Callback

from lightning_modelprof.lightning.callback import _EMPTY_HOOKS, _INSPECTION_HOOKS
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer

HOOKS = {*_EMPTY_HOOKS, *_INSPECTION_HOOKS}


class Watched:
    def __init__(self, callback):
        self.callback, self.passed_over = callback, []

    def look(self, *_):
        self.passed_over.append({name for name in HOOKS if getattr(self.callback, name) is None})


@pytest.mark.parametrize("flops", [False, True])
def test_hooks_without_work_are_skipped(tmp_path, flops):
    callback = make_callback(tmp_path, active=0, flops=flops)
    watched, module = Watched(callback), Net()
    module.on_train_batch_start = watched.look
    fit_quietly(make_trainer(tmp_path, callback), module, loader())
    inspected = [one for one in watched.passed_over if not one]
    assert all(one in (HOOKS, set()) for one in watched.passed_over)
    assert bool(inspected) == flops
    assert len(inspected) < len(watched.passed_over), "most steps are not inspected"
    assert all(callable(getattr(callback, name)) for name in HOOKS), "after the fit all are there again"
    assert not HOOKS & set(vars(pickle.loads(pickle.dumps(callback))))


@pytest.mark.parametrize("is_on_object", [False, True])
def test_overridden_hook_is_called(tmp_path, is_on_object):
    calls = []
    callback = make_callback(tmp_path, active=0)
    if is_on_object:
        callback.on_after_backward = lambda *_: calls.append(1)
    else:
        kind = type(callback)
        callback.__class__ = type(
            kind.__name__,
            (kind,),
            {"on_after_backward": lambda *_: calls.append(1), "__module__": "mine"},
        )
    fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
    assert len(calls) > 1


class Around(Callback):
    """Calls the hooks of a callback that Lightning doesn't know."""

    def __init__(self, inner):
        self.inner = inner

    def setup(self, *given, **named):
        self.inner.setup(*given, **named)

    def teardown(self, *given, **named):
        self.inner.teardown(*given, **named)

    def on_train_start(self, *given):
        self.inner.on_train_start(*given)

    def on_after_backward(self, *given):
        self.inner.on_after_backward(*given)

    def on_train_end(self, *given):
        self.inner.on_train_end(*given)


def test_hooks_exist_for_other_callers(tmp_path):
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, Around(callback)), Net(), loader())
    assert len(callback.run.ranks[0].steps) > 1
