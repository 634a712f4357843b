"""Tests the times outside the loop with a fake clock: injected costs are found to the nanosecond."""

from __future__ import annotations

import json
from collections import Counter

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_modelprof import ModelProfCallback, ModelProfiler
from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS
from lightning_modelprof.lightning.phases import OutsideLoopClock
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import ActionTime
from tests.support.bench import MIXES_PACKAGES, MS, FakeClock, make_trainer
from tests.support.fits import grouped, loader, table_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning"
)

OLD = pytest.mark.skipif(not MIXES_PACKAGES, reason="its Trainer refuses our callback")
PACKAGES = [lightning, pytest.param(pytorch_lightning, marks=OLD)]
BEFORE = ("prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start")
AFTER = ("on_train_end", "on_fit_end", "teardown")


class Costs:
    """Advances the clock by a different time on each call, and sums the times by name."""

    def __init__(self):
        self.clock = FakeClock()
        self.begin_ns = self.clock.now_ns
        self.ns = Counter()
        self.calls = Counter()

    def spend(self, name):
        ns = 3 * MS + sum(self.calls.values()) + 1
        self.clock.advance(ns)
        self.ns[name] += ns
        self.calls[name] += 1


def hook(costs, name, make=lambda self: None):
    def spend(self, *args, **kwargs):
        costs.spend(f"{type(self).__name__}.{name}")
        return make(self)

    return spend


def module_of(package, costs, **more):
    """Module that spends time in all of its hooks outside the loop."""

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            costs.clock.advance(5 * MS)
            return self.layer(batch[0]).mean()

        def validation_step(self, batch, batch_idx):
            if self.trainer.sanity_checking:
                costs.spend("sanity check")

    makes = {
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
        "train_dataloader": lambda self: loader(40),
    }
    for name in (*BEFORE, "train_dataloader", *AFTER):
        setattr(Net, name, hook(costs, name, makes.get(name, lambda self: None)))
    for name, value in more.items():
        setattr(Net, name, value)
    return Net()


def callback_of(package, costs):
    """Another callback, set up before ours."""

    class Other(package.Callback):
        state_key = "Other{'monitor': 'a.b'}"

        def on_sanity_check_end(self, trainer, pl_module):
            costs.spend("sanity check")

    for name in ("setup", "on_fit_start", "on_sanity_check_start", *AFTER):
        named = hook(costs, name)
        setattr(Other, name, (lambda self, *_: costs.spend("sanity check")) if "sanity" in name else named)
    return Other()


def arguments(**more):
    quiet = dict.fromkeys(("terminal", "progress_bar", "files", "sampling", "tensorboard", "flops"), False)
    return grouped({**quiet, "active": 0, "skip_first": 0} | more)


def fit(package, costs, module=None, *, is_profiler=True, raises=None, **more):
    """Run one fit; return the profiler or callback."""
    measures = (ModelProfiler if is_profiler else ModelProfCallback)(**arguments(**more))
    (measures.callback if is_profiler else measures)._clock = costs.clock
    mine = {"profiler": measures} if is_profiler else {}
    ours = [] if is_profiler else [measures]
    trainer = make_trainer(
        package.Trainer, callbacks=[callback_of(package, costs), *ours], num_sanity_val_steps=2, **mine
    )
    profiler = trainer.profiler
    model = module or module_of(package, costs)
    if raises is None:
        trainer.fit(model, val_dataloaders=loader(8))
    else:
        with pytest.raises(raises):
            trainer.fit(model, val_dataloaders=loader(8))
    assert trainer.profiler is profiler
    return measures


def times_of(actions):
    """Time per label, without gaps and zero times."""
    return {one.label: one.total_ns for one in actions if one.total_ns}


def rows(measures, *, is_before):
    return [one for one in analysis_of_run(measures).outside_loop.rows if one.is_before is is_before]


def analysis_of_run(measures):
    return Facts(measures.run)


def spent(costs, *names):
    return {name: costs.ns[name] for name in names}


def of_both(*names):
    return [f"{owner}.{name}" for owner in ("Net", "Other") for name in names]


WHOLE_BEFORE = [
    *(f"Net.{name}" for name in (*BEFORE, "train_dataloader")),
    *("Other.setup", "Other.on_fit_start", "sanity check"),
]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_profiler_measures_everything_outside_loop(package):
    costs = Costs()
    profiler = fit(package, costs)
    assert times_of(rows(profiler, is_before=True)) == spent(costs, *WHOLE_BEFORE)
    # on_train_end of a callback before ours is part of the loop.
    after = [name for name in of_both(*AFTER) if name != "Other.on_train_end"]
    assert times_of(rows(profiler, is_before=False)) == spent(costs, *after)
    around = analysis_of_run(profiler).outside_loop
    whole_ns = around.before_ns + around.loop_ns + around.after_ns
    assert whole_ns == costs.clock.now_ns - costs.begin_ns
    assert around.sanity_ns == costs.ns["sanity check"]
    [check] = [one for one in around.rows if one.label == "sanity check"]
    assert (check.calls, check.place.function.rpartition(".")[2]) == (1, "validation_step")
    table = table_of(profiler.report, "around")
    assert sum(row[3] + row[4] for row in table.rows) == around.before_ns + around.after_ns
    place = next(row[-1] for row in table.rows if row[0] == "Net.configure_optimizers")
    assert place.startswith("test_outside_loop.py:")


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_callback_measures_from_its_setup_to_loop(package):
    costs = Costs()
    callback = fit(package, costs, is_profiler=False)
    unseen = {"Net.prepare_data", "Other.setup"}
    assert times_of(rows(callback, is_before=True)) == spent(
        costs, *[n for n in WHOLE_BEFORE if n not in unseen]
    )
    assert callback.run.ranks[0].around.after is None
    assert any("ModelProfiler" in note for note in table_of(callback.report, "around").notes)


@pytest.mark.slow
def test_failed_loop_keeps_times_before_it():
    costs = Costs()

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("no more")
        return self.layer(batch[0]).mean()

    profiler = fit(
        lightning, costs, module_of(lightning, costs, training_step=training_step), raises=RuntimeError
    )
    assert profiler.run.info.status == "failed"
    assert times_of(rows(profiler, is_before=True)) == spent(costs, *WHOLE_BEFORE)
    assert profiler.run.ranks[0].around.after is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["on_fit_end", "teardown"])
def test_failure_after_loop_keeps_earlier_times(name):
    costs = Costs()

    def fail(self, *args, **kwargs):
        costs.spend(f"Net.{name}")
        raise RuntimeError("no more")

    profiler = fit(lightning, costs, module_of(lightning, costs, **{name: fail}), raises=RuntimeError)
    assert profiler.run.info.status == "finished"
    times = times_of(rows(profiler, is_before=False))
    assert times[f"Net.{name}"] == costs.ns[f"Net.{name}"]
    assert sum(times.values()) == analysis_of_run(profiler).outside_loop.after_ns


@pytest.mark.slow
def test_failure_before_loop_gives_no_report():
    costs = Costs()

    def fail(self, *args):
        raise RuntimeError("no data")

    for name in ("prepare_data", "configure_optimizers"):
        profiler = fit(lightning, costs, module_of(lightning, costs, **{name: fail}), raises=RuntimeError)
        assert profiler.run is None


@pytest.mark.slow
def test_every_loop_has_its_own_outside_times(tmp_path):
    """The first loop's files keep the times after it, whatever the process runs later."""
    costs = Costs()
    profiler = fit(lightning, costs, files=True, dirpath=tmp_path / "run")
    first = profiler.run
    assert load_run(tmp_path / "run").ranks[0].around == first.ranks[0].around
    trainer = make_trainer(profiler=profiler)
    trainer.validate(module_of(lightning, costs), loader(64), verbose=False)
    names = [one.action for one in profiler.run.ranks[0].around.before]
    assert not any("train" in name for name in names)
    assert profiler.run.ranks[0].around.after
    PROCESS_LOOPS.save()
    saved = load_run(tmp_path / "run")
    assert saved.ranks[0].around == first.ranks[0].around


@pytest.mark.slow
def test_loading_checkpoint_is_gap_between_actions(tmp_path):
    costs = Costs()

    class Loading(TorchCheckpointIO):
        def load_checkpoint(self, *args, **kwargs):
            costs.spend("load")
            return super().load_checkpoint(*args, **kwargs)

    path = tmp_path / "last.ckpt"
    first = make_trainer(max_epochs=1)
    first.fit(module_of(lightning, costs))
    first.save_checkpoint(path)
    profiler = ModelProfiler(**arguments())
    profiler.callback._clock = costs.clock
    trainer = make_trainer(profiler=profiler, max_epochs=2, plugins=[Loading()])
    trainer.fit(module_of(lightning, costs), ckpt_path=path, weights_only=False)
    gaps = {one.label: one.after_ns for one in rows(profiler, is_before=True) if one.after_ns}
    assert gaps == {"Net.configure_model": costs.ns["load"]}


@pytest.mark.slow
def test_run_from_older_version_opens(tmp_path):
    profiler = fit(lightning, Costs(), files=True, dirpath=tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    saved = json.loads(path.read_text())
    del saved["ranks"][0]["around"], saved["ranks"][0]["setup"]["data_hooks"]
    path.write_text(json.dumps(saved))
    assert load_run(path).ranks[0].around is None
    assert profiler.run.ranks[0].around is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finish", "loop_ends"])
def test_internal_error_warns_once_and_drops_times(monkeypatch, name):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(OutsideLoopClock, name, fail)
    with pytest.warns(RuntimeWarning, match="internal error") as caught:
        profiler = fit(lightning, Costs())
    assert len([one for one in caught if "internal error" in str(one.message)]) == 1
    assert profiler.run.ranks[0].around.after is None


# The clock alone


def test_open_actions_shift_nothing_and_only_outermost_count():
    clock = FakeClock()
    outside = OutsideLoopClock(clock)

    def at(method, name, ms=0):
        getattr(outside, method)(name)
        clock.advance(ms * MS)

    at("begin", "a", 1)
    at("begin", "b", 2)
    at("begin", "a", 4)
    at("end", "a", 8)
    at("end", "b")
    at("end", "a", 16)
    at("end", "never begun")
    at("begin", "c", 32)  # never ends
    at("begin", "d", 64)
    outside.loop_begins(clock.now_ns)
    at("begin", "of the loop", 128)
    outside.loop_ends(clock.now_ns)
    clock.advance(256 * MS)
    at("begin", "e", 512)
    assert outside.times().after is None
    outside.finish()
    assert outside.times().before == (
        ActionTime(action="a", calls=1, total_ns=15 * MS, after_ns=16 * MS),
        ActionTime(action="c", calls=1, total_ns=96 * MS, after_ns=0),
    )
    assert outside.times().after == (
        ActionTime(action="report", calls=1, total_ns=256 * MS, after_ns=0),
        ActionTime(action="e", calls=1, total_ns=512 * MS, after_ns=0),
    )
