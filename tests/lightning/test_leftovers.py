"""Tests that however a loop ends, the callback leaves no changes in the process or the user's objects."""

from __future__ import annotations

import copy
import gc
import itertools
import shutil
import signal
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, _utils

from lightning_modelprof import LoopProfiler, ModelProfiler
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.session import Session
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.window.capture import Capture
from tests.support.fits import Net, Numbers, fit_quietly, grouped, loader, make_callback, make_trainer
from tests.support.leftovers import differences, things_of, things_of_process

pytestmark = [pytest.mark.slow, pytest.mark.skipif("not __import__('os').path.isdir('/proc/self/fd')")]

EVERYTHING = {"steps": (5, 7), "flops": True, "sampling": True, "peak_flops_per_s": 1e12}
"""Step 1 is counted, modules are timed in steps 2 to 4, and steps 5 and 6 are in a window."""

Ours = Callable[[], list[Any]]
"""Creates our callbacks, or none."""

Way = Callable[[Any, Ours], Iterator[Any]]
"""Yields the objects of a loop, then runs it."""


class Pruned(Exception):
    """Like the exception with which a hyperparameter tuner ends a trial."""


class Fails(Callback):
    """Raises in one hook, from batch ``at`` on if given."""

    def __init__(self, hook: str, error: type[BaseException] = ValueError, at: int = 0) -> None:
        def fail(trainer: Any, *_: Any, **__: Any) -> None:
            if not at or trainer.fit_loop.epoch_loop.batch_idx >= at:
                raise error("of the user")

        self.at, self.hook = at, hook
        setattr(self, hook, fail)

    @property
    def state_key(self) -> str:
        return f"Fails.{self.hook}.{self.at}"


class FailingNet(Net):
    """Raises in one of its methods, from batch ``at`` on if given."""

    def __init__(self, method: str, error: type[BaseException] = ValueError, at: int = 0) -> None:
        super().__init__()
        original = getattr(self, method)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if not at or self.trainer.fit_loop.epoch_loop.batch_idx >= at:
                raise error("of the user")
            return original(*args, **kwargs)

        setattr(self, method, fail)


class FailingNumbers(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise ValueError("of the user")
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Use a private directory for temporary files, as others write to /tmp, and restore signal handlers.

    Record the callers of gc.freeze, as counting frozen objects is slow.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # so that workers end sooner
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.extend(traceback.format_stack()))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.extend(traceback.format_stack()))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert frozen == []


def left_by(way: Way, folder: Any, ours: Ours) -> tuple[dict[Any, Any], list[Any], str]:
    """Changes that a loop left, our callbacks, and the error that ended it."""
    seed_everything(3, verbose=False)
    # It holds a worker's socket, whose path may have at most 107 characters.
    tempfile.tempdir = tempfile.mkdtemp(prefix="mp", dir="/tmp")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made: list[Any] = []
    going = way(folder, lambda: made.extend(ours()) or made)
    objects = next(going)
    before = things_of_process() | (things_of(*objects) if objects else {})
    error = ""
    try:
        next(going, None)
    except BaseException as caught:  # as in a notebook, which continues
        error = repr(caught)
    going.close()
    after = things_of_process() | (things_of(*objects) if objects else {})
    for number, handler in handlers.items():
        signal.signal(number, handler)
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    return differences(before, after), made, error


_LEFT_WITHOUT: dict[Way, tuple[dict[Any, Any], str]] = {}
"""Changes and error of each way without our callback, which are always the same."""


def check(way: Way, folder: Any, ours: Ours | None = None, *, ends_alike: bool = True) -> list[Any]:
    """Check that the way leaves the same with our callback as without it."""
    ours = ours or (lambda: [make_callback(folder, **EVERYTHING)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not _LEFT_WITHOUT:  # torch's profiler starts threads, modules are imported, ...
            left_by(NORMAL, folder, lambda: [make_callback(folder / "warm", **EVERYTHING)])
        if way not in _LEFT_WITHOUT:
            left, _, error = left_by(way, folder, list)
            _LEFT_WITHOUT[way] = left, error
        without, error = _LEFT_WITHOUT[way]
        left, callbacks, error_with = left_by(way, folder, ours)
    stays = {name: one for name, one in left.items() if one != without.get(name)}
    if not ends_alike:  # Lightning leaves its handlers after Ctrl-C, which only happened with ours
        stays = {name: one for name, one in stays.items() if name[0] != "signal handlers"}
    assert not stays, stays
    assert error == error_with or not ends_alike
    for one in callbacks:
        assert (one._session, one._trainer, one._outer_loops) == (None, None, [])
        assert not [name for name, value in vars(one).items() if name.startswith("on_") and value is None]
    return callbacks


def fit(
    *before: Any,
    after: Any = (),
    module: Callable[[], Any] = Net,
    data: Callable[[], Any] = lambda: loader(24),
    run: Callable[..., Any] = fit_quietly,
    **kwargs: Any,
) -> Way:
    """A fit with other callbacks before and after ours."""

    def way(folder: Any, ours: Ours) -> Iterator[Any]:
        others = [[copy.copy(one) for one in part] for part in (before, after)]
        trainer = make_trainer(
            folder, *others[0], *ours(), *others[1], **{"val_check_interval": 6, "max_epochs": 2, **kwargs}
        )
        net, batches, val = module(), data(), loader(4)
        yield trainer, net, batches, val, batches.dataset
        run(trainer, net, batches, val)

    return way


class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 5


class Terminates(Callback):
    """Sends a job scheduler's signal, which Lightning turns into an exception."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            signal.raise_signal(signal.SIGTERM)


def in_thread(trainer: Any, *args: Any) -> None:
    def work() -> None:
        with suppress(ValueError):
            fit_quietly(trainer, *args)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def twice(trainer: Any, *args: Any) -> None:
    fit_quietly(trainer, *args)
    trainer.fit_loop.max_epochs = 4
    fit_quietly(trainer, *args)


def nested(trainer: Any, module: Any, data: Any, val: Any) -> None:
    """Fit with the same callbacks inside batches that are counted, timed and in a window."""
    inner = make_trainer(trainer.default_root_dir, *trainer.callbacks)

    def begin(batch_idx: int) -> None:
        if batch_idx in (1, 2, 5):
            inner.fit_loop.max_epochs += 1
            fit_quietly(inner, Net(), loader(8))

    module.at_batch = begin
    fit_quietly(trainer, module, data, val)


def find_rate(trainer: Any, module: Any, data: Any, val: Any) -> None:
    module.lr = 0.1
    Tuner(trainer).lr_find(module, data, num_training=5)
    fit_quietly(trainer, module, data, val)


def interrupted_report(trainer: Any, *args: Any) -> None:
    """Raise Ctrl-C while the report is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        fit_quietly(trainer, *args)


NORMAL = fit()

ENDS: dict[str, Way] = {
    "normal": NORMAL,
    "max_steps": fit(max_steps=7),
    "max_steps in the window": fit(max_steps=6),
    "max_steps in the counted step": fit(max_steps=2),
    "should_stop": fit(Stops()),
    "early stopping": fit(EarlyStopping("val_loss", min_delta=1e9, patience=1)),
    "max_time": fit(max_time={"seconds": 0}),
    "no steps": fit(limit_train_batches=0),
    "fast_dev_run": fit(fast_dev_run=3),
    "overfit_batches": fit(overfit_batches=3),
    "pruned": fit(Fails("on_validation_end", Pruned, 5)),
    "sigterm": fit(Terminates()),
    "error in a worker": fit(data=lambda: DataLoader(FailingNumbers(24), batch_size=2, num_workers=1)),
    "workers": fit(data=lambda: loader(24, num_workers=1, persistent_workers=True)),
    "error in on_exception before ours": fit(Fails("on_exception"), Fails("on_train_batch_end", at=5)),
    "error in on_exception after ours": fit(after=[Fails("on_exception"), Fails("on_train_batch_end", at=5)]),
    "ctrl-c in on_exception": fit(
        Fails("on_exception", KeyboardInterrupt), Fails("on_train_batch_end", at=5)
    ),
    "fit in a fit": fit(run=nested),
    "two fits": fit(run=twice),
    "in a thread": fit(run=in_thread),
    "error in a thread": fit(Fails("on_train_batch_end", at=5), run=in_thread),
    "learning rate": fit(run=find_rate),
    "validate": fit(run=lambda trainer, module, data, _: trainer.validate(module, data, verbose=False)),
    "validate fails": fit(
        module=lambda: FailingNet("validation_step"),
        run=lambda trainer, module, data, _: trainer.validate(module, data, verbose=False),
    ),
    "validate without batches": fit(
        limit_val_batches=0,
        run=lambda trainer, module, data, _: trainer.validate(module, data, verbose=False),
    ),
    "ctrl-c in the report": fit(run=interrupted_report),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_way_to_end_leaves_nothing(tmp_path, name):
    check(ENDS[name], tmp_path, ends_alike=name != "ctrl-c in the report")


HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start"),
    *("on_validation_batch_start", "on_validation_end", "on_train_epoch_end", "on_train_end"),
    *("on_fit_end", "teardown"),
)
METHODS = ("training_step", "backward", "optimizer_step", "validation_step")


def at_batches(hook: str) -> tuple[int, ...]:
    """The counted step, a timed step and a step in the window, if the hook has batches."""
    return (1, 2, 5) if "train_batch" in hook or "_before_" in hook or hook == "on_after_backward" else (0,)


PLACES = [(hook, at) for hook in HOOKS for at in at_batches(hook)]
ORDERS = itertools.cycle(["before ours", "after ours"])


@pytest.mark.parametrize(("hook", "at", "order"), [(*one, next(ORDERS)) for one in PLACES], ids=str)
def test_error_in_another_callback_leaves_nothing(tmp_path, hook, at, order):
    failing = Fails(hook, at=at)
    check(fit(failing) if order == "before ours" else fit(after=[failing]), tmp_path)


@pytest.mark.parametrize(
    ("method", "at", "error"),
    [
        ("configure_optimizers", 0, ValueError),
        *((method, at, ValueError) for method in METHODS for at in (1, 2, 5)),
        *((method, 2, error) for method in METHODS for error in (KeyboardInterrupt, SystemExit)),
    ],
)
def test_error_in_module_leaves_nothing(tmp_path, method, at, error):
    check(fit(module=lambda: FailingNet(method, error, at)), tmp_path)


OUR_PLACES = {
    "arm": (Session, "arm", 1),
    "count": (Inspection, "begin_batch", 1),
    "counted": (Inspection, "end_batch", 1),
    "timed": (Inspection, "end_step", 2),
    "window opens": (Capture, "_start", 1),
    "window": (Capture, "begin_step", 4),
    "window closes": (Capture, "_close", 1),
    "look": (StackProbe, "look", 1),
    "stop": (Session, "stop", 1),
    "finish": (Session, "finish", 1),
    "close": (Session, "close", 1),
}


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *((place, ZeroDivisionError) for place in OUR_PLACES),
        *zip(OUR_PLACES, itertools.cycle([MemoryError, KeyboardInterrupt]), strict=False),
    ],
)
def test_internal_error_leaves_nothing(tmp_path, monkeypatch, place, error):
    owner, name, at = OUR_PLACES[place]
    original, calls = getattr(owner, name), []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)
    check(NORMAL, tmp_path, ends_alike=error is not KeyboardInterrupt)
    assert len(calls) >= at or place == "look"


@pytest.mark.helper
@pytest.mark.parametrize(
    "name", ["normal", "pruned", "error in a worker", "two fits", "ctrl-c in the report"]
)
def test_helper_process_leaves_nothing(tmp_path, name):
    check(ENDS[name], tmp_path, ends_alike=name != "ctrl-c in the report")


def test_rejected_callbacks_leave_nothing(tmp_path):
    two = [make_callback(tmp_path, **EVERYTHING), make_callback(tmp_path, active=0)]
    check(NORMAL, tmp_path, lambda: two, ends_alike=False)


def test_repeated_callback_leaves_nothing(tmp_path):
    [callback, _, _] = check(NORMAL, tmp_path, lambda: 3 * [make_callback(tmp_path, **EVERYTHING)])
    assert callback.run.info.status == "finished"


def test_profiler_leaves_nothing(tmp_path):
    def way(folder, ours):
        profiler = (
            ModelProfiler(**grouped({"dirpath": folder / "modelprof", **EVERYTHING})) if ours() else None
        )
        trainer = make_trainer(folder, profiler=profiler)
        module, data = Net(), loader(24)
        yield trainer, module, data, data.dataset
        fit_quietly(trainer, module, data)

    check(way, tmp_path, lambda: [make_callback(tmp_path)])


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("ends", ["close", "error", "del"])
def test_plain_loop_leaves_nothing(tmp_path, at, ends):
    """The loop is in a generator that ends in the middle of a step."""

    def train(folder, is_measured, module, data):
        profiler = LoopProfiler(module, **grouped({"dirpath": folder / "own", **EVERYTHING}))
        if not is_measured:
            yield from data
            return
        with profiler:
            for batch in profiler.fetch(data):
                loss = module.loss(batch)
                profiler.backward(loss)
                yield batch

    def way(folder, ours):
        module, data = Net(), loader(24)
        yield None
        going = train(folder, bool(ours()), module, data)
        for number, _ in enumerate(going):
            if number == at and ends == "close":
                going.close()
            if number == at and ends == "error":
                going.throw(ValueError)
            if number == at and ends == "del":
                break
        del going

    check(way, tmp_path, lambda: [make_callback(tmp_path)])


def test_leftovers_are_found(tmp_path):
    """The comparison detects each kind of leftover."""

    class Leaves(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.layers[0].register_forward_hook(lambda *_: None)
            module.layers[0].weight.register_hook(lambda _: None)
            trainer.optimizers[0].register_step_pre_hook(lambda *_: None)
            trainer.strategy.process_dataloader = lambda one: one
            files.append(tempfile.NamedTemporaryFile())  # noqa: SIM115
            threading.Thread(target=over.wait, args=(60,), name="left", daemon=True).start()

    files: list[Any] = []
    over = threading.Event()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left, _, _ = left_by(NORMAL, tmp_path, lambda: [Leaves()])
    over.set()
    found = {kind for kind, _ in left}
    assert {"hooks", "tensor hooks", "attributes", "threads", "open files", "temporary files"} <= found
    assert {("hooks", ("module layers.0", "_forward_hooks"))} <= set(left)
