"""Tests ``trainer.validate``, ``test`` and ``predict``: every phase of every batch, and the report.

With the fake clock, expected times are those that user code reports spending, as in
``tests/lightning/test_phases_fake_clock.py``. The data set and the public hooks mark the batches.
"""

from __future__ import annotations

import json
import signal
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.analysis.steps.benchmark import all_ranks
from lightning_modelprof.engine.loop import num_prefetched
from lightning_modelprof.engine.results import Results
from lightning_modelprof.engine.session import Session
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.lightning.classify import ActionTable
from lightning_modelprof.lightning.phases import PhaseProfiler
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.loops import FIT, LOOPS, loop_of
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import WindowStatus
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag
from lightning_modelprof.show.text import render_text
from tests.measure.test_device_phases import FakeDeviceClock
from tests.support.bench import (
    MIXES_PACKAGES,
    MS,
    Bench,
    CostlyCallbackHooks,
    CostlyDataset,
    CostlyHooks,
    CostlyLogger,
    CostlyProfiler,
    CostlySteps,
    CostlyStream,
    MeasuredCallback,
    Truth,
    differences,
    make_trainer,
    named_phases,
    remains,
)
from tests.support.documents import raw_rows
from tests.support.fits import (
    Net,
    fit_quietly,
    loader,
    loop_of_trainer,
    make_callback,
    our_warnings,
    phase_ranges,
    report_of,
    run_script,
    step_ranges,
    steps_of,
    trace_of,
    windows_of,
)
from tests.support.fits import make_trainer as make_real_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*predict returned None"),
]

KEYS = ("validate", "test", "predict")
HOOK_WORDS = {"validate": "validation", "test": "test", "predict": "predict"}
WORDS = {"validate": "validation", "test": "test", "predict": "prediction"}


# User code that records the time it spends


class EvaluationCallback(MeasuredCallback):
    """Callback under test, which also tells the truth when evaluation loops start and end."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        if trainer.state.fn != "fit":
            self.truth.training_begins(trainer)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        super().on_validation_batch_start(trainer, *args)
        if trainer.state.fn != "fit":
            self.truth.batch_begins()

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.state.fn != "fit":
            self.truth.batch_ended()

    def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.state.fn != "fit":
            self.truth.epoch_ended()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != "fit":
            self.truth.training_ends()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_end = on_predict_end = on_validation_end


class Prediction:
    """A prediction that takes time to move to the CPU."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth

    def to(self, *args: Any, **kwargs: Any) -> Prediction:
        self.truth.spend("predictions", "to")
        return self


class EvaluatedSteps(CostlySteps):
    """Step methods of the three loops. Validation inside a fit belongs to the fit."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.truth.spend("forward", "validation_step")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.truth.spend("forward", "validation_step")
        if not isinstance(self.truth.trainer.logger, CostlyLogger):
            return
        self.log("metric", 1.0, on_step=True, on_epoch=True)  # type: ignore[attr-defined]

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        self.truth.spend("forward", "validation_step")
        return Prediction(self.truth)


class EvaluatedHooks(EvaluatedSteps, CostlyHooks):
    """Adds every LightningModule hook that such a loop can call."""


class OtherHooks(CostlyCallbackHooks):
    """All hooks of another callback."""


def _hook(name: str, phase: str) -> Any:
    def spend(self: Any, *args: Any, **kwargs: Any) -> None:
        trainer = self.truth.trainer
        if trainer is not None and trainer.state.fn != "fit":
            if name.endswith("_epoch_end"):
                self.truth.epoch_ended()
            if name.endswith("_batch_start"):
                self.truth.batch_begins()
        self.truth.spend(phase, name)

    return spend


for _word in HOOK_WORDS.values():
    for _when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
        _name = f"on_{_word}_{_when}"
        setattr(EvaluatedHooks, _name, _hook(_name, "module_hooks"))
        setattr(OtherHooks, _name, _hook(_name, "callbacks"))


class PlainNet(EvaluatedSteps, LightningModule):
    """Overrides only the hooks it needs."""


class HookedNet(EvaluatedHooks, LightningModule):
    """Overrides every hook."""


class Other(OtherHooks, Callback):
    """Another callback that spends time in every hook."""


class EvaluationLoader(DataLoader[Any]):
    """Creating its iterator takes time: before the loop or, for later loaders, inside a fetch."""

    def __iter__(self) -> Any:
        truth = getattr(self.dataset, "items", self.dataset).truth
        truth.batch_begins()
        truth.spend("dataloader", "loader_iter")
        return super().__iter__()


class EvaluationBench(Bench):
    """A clock, the truth and the callback that should find it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.callback = EvaluationCallback(self.truth, **arguments)

    def data(self, length: int = 3, **arguments: Any) -> EvaluationLoader:
        return EvaluationLoader(CostlyDataset(self.truth, length), **arguments)

    def run(
        self, key: str, model: Any, data: Any, *, raises: Any = None, trainer: Any = None, **arguments: Any
    ):
        """Run a loop and check that we leave nothing behind; ``arguments`` are the Trainer's."""
        trainer = trainer or self.trainer(**arguments)
        profiler, callbacks = trainer.profiler, list(trainer.callbacks)
        with nullcontext() if raises is None else pytest.raises(raises):
            getattr(trainer, key)(model, data, **({} if key == "predict" else {"verbose": False}))
        assert trainer.profiler is profiler
        assert trainer.callbacks == callbacks
        assert remains(trainer) == []
        return trainer


@pytest.fixture
def bench() -> EvaluationBench:
    return EvaluationBench()


def everything(bench: Bench) -> dict[str, Any]:
    return {
        "before": (Other(bench.truth),),
        "after": (Other(bench.truth),),
        "logger": CostlyLogger(bench.truth),
        "log_every_n_steps": 1,
    }


# Phases


@pytest.mark.parametrize("key", KEYS)
def test_plain_model_has_only_its_own_phases(bench, key):
    bench.run(key, PlainNet(bench.truth), bench.data())
    bench.check(num_steps=3)
    expected = {"dataloader", "forward"} | ({"predictions"} if key == "predict" else set())
    assert [set(step) for step in bench.truth.steps] == [expected] * 3
    assert bench.record.outside_ns == {}  # not even the loader's start
    assert bench.callback.run.info.loop == key
    assert bench.has_tag(StepTag.FIRST_OF_EPOCH) == [True, False, False]
    assert bench.has_tag(StepTag.VALIDATION) == [False] * 3


@pytest.mark.parametrize("key", KEYS)
def test_known_costs_land_in_their_phases(bench, key):
    """Added by hand: data set 3 ms, transfer hooks 1 + 2 + 1, step 8, each other hook 2."""
    bench.run(key, HookedNet(bench.truth), bench.data(), before=(Other(bench.truth),))
    in_ms = [{phase: ns // MS for phase, ns in step.items()} for step in named_phases(phases_of(bench))]
    whole = {"dataloader": 3, "transfer": 4, "forward": 8, "module_hooks": 4, "callbacks": 4}
    whole |= {"predictions": 2} if key == "predict" else {}
    assert in_ms == [whole] * 3


def phases_of(bench: Bench) -> Any:
    return bench.record.steps.phases_ns


def text_of(bench: Bench) -> str:
    """Report as one line of text."""
    return " ".join(render_text(bench.callback.report).split())


@pytest.mark.parametrize("key", KEYS)
def test_all_hooks_and_logging_are_measured(bench, key):
    bench.run(key, HookedNet(bench.truth), bench.data(), **everything(bench))
    bench.check(num_steps=3)
    bench.check_callback_times()
    step = bench.truth.steps[1]
    assert {"dataloader", "transfer", "forward", "callbacks", "module_hooks"} <= set(step)
    assert ("logging" in step) == (key == "test")
    assert {"callbacks", "module_hooks"} <= set(bench.record.outside_ns)  # hooks outside the batches


@pytest.mark.parametrize("key", KEYS)
def test_multiple_dataloaders_are_measured(bench, key):
    data = [bench.data(3), bench.data(2)]
    bench.run(key, HookedNet(bench.truth), data, **everything(bench))
    bench.check(num_steps=5)
    assert bench.has_tag(StepTag.FIRST_OF_EPOCH) == [True, False, False, True, False]
    # The second loader starts inside the fetch of its first batch.
    assert [step["dataloader"] // MS for step in bench.truth.steps] == [3, 3, 3, 16, 3]
    assert "2 at the start of a dataloader" in text_of(bench)


@pytest.mark.parametrize("key", KEYS)
def test_stream_without_length_is_measured(bench, key):
    """The fetch in a step gets the next batch; the last one finds none."""
    bench.run(key, HookedNet(bench.truth), EvaluationLoader(CostlyStream(bench.truth)), **everything(bench))
    bench.check(num_steps=3)


@pytest.mark.parametrize("ours_is_first", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
def test_validation_step_with_dataloader_iter_is_measured(bench, ours_is_first, is_stream):
    class FetchesItself(HookedNet):
        def validation_step(self, dataloader_iter):
            self.truth.spend("forward", "validation_step")
            next(dataloader_iter)
            self.truth.spend("forward", "validation_step")

    arguments = everything(bench)
    if ours_is_first:
        del arguments["before"]
    data = EvaluationLoader(CostlyStream(bench.truth)) if is_stream else bench.data()
    bench.run("validate", FetchesItself(bench.truth), data, **arguments)
    bench.check(num_steps=3)
    assert bench.record.unfinished_steps == is_stream  # the iterator ends inside the step
    if is_stream:
        assert "where validation_step takes a dataloader_iter" in text_of(bench)


@pytest.mark.parametrize(
    ("arguments", "num_steps"),
    [({"limit_val_batches": 2}, 2), ({"limit_val_batches": 0.5}, 3), ({"fast_dev_run": 4}, 4)],
)
def test_limited_batches_are_measured(bench, arguments, num_steps):
    bench.run("validate", HookedNet(bench.truth), bench.data(6), before=(Other(bench.truth),), **arguments)
    bench.check(num_steps)


@pytest.mark.parametrize("key", KEYS)
def test_barebones_trainer_is_measured(bench, key):
    trainer = bench.trainer(before=(Other(bench.truth),), barebones=True)
    bench.run(key, HookedNet(bench.truth), bench.data(), trainer=trainer)
    bench.check(num_steps=3)


class EvaluationProfiler(CostlyProfiler):
    """A slow user profiler that receives every action."""

    def start(self, action_name: str) -> None:
        if action_name.endswith("_next"):
            self.truth.batch_begins()
        if action_name.endswith("_epoch_end"):
            self.truth.epoch_ended()
        super().start(action_name)


@pytest.mark.parametrize("key", KEYS)
def test_users_profiler_sees_all_actions(bench, key):
    alone = EvaluationProfiler(Truth(bench.clock))
    model = HookedNet(alone.truth)
    model.truth.trainer = trainer = make_trainer(profiler=alone)
    getattr(trainer, key)(model, DataLoader(torch.ones(3, 2)))

    profiler = EvaluationProfiler(bench.truth)
    bench.run(key, HookedNet(bench.truth), bench.data(), profiler=profiler)
    bench.check(num_steps=3)
    assert all(step["user_profiler"] > 0 for step in bench.truth.steps)
    ours = "[Callback]ModelProfCallback."
    assert [event for event in profiler.events if not event[1].startswith(ours)] == alone.events


@pytest.mark.skipif(not MIXES_PACKAGES, reason="this pytorch_lightning refuses callbacks of lightning")
@pytest.mark.parametrize("key", KEYS)
def test_pytorch_lightning_trainer_is_measured(bench, key):
    class PytorchLightningNet(EvaluatedHooks, pytorch_lightning.LightningModule):
        pass

    class PytorchLightningOther(OtherHooks, pytorch_lightning.Callback):
        pass

    bench.run(
        key,
        PytorchLightningNet(bench.truth),
        [bench.data(), bench.data(2)],
        trainer_class=pytorch_lightning.Trainer,
        before=(PytorchLightningOther(bench.truth),),
        after=(PytorchLightningOther(bench.truth),),
    )
    bench.check(num_steps=5)
    assert "pytorch_lightning" in bench.callback.run.info.versions


@pytest.mark.parametrize("key", KEYS)
def test_device_times_match_truth(monkeypatch, bench, key):
    """The device takes three times the CPU's time; predictions are copied from it."""
    bench.truth.device = FakeDeviceClock()
    monkeypatch.setattr("lightning_modelprof.engine.step_times.device_clock", lambda _: bench.truth.device)
    bench.run(key, PlainNet(bench.truth), bench.data())
    bench.check(num_steps=3)
    device_ns = bench.record.steps.device_phases_ns
    assert differences(named_phases(device_ns), bench.truth.device_steps) == []


# Ways a loop can end


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("where", ["dataset", "step", "module hook", "callback"])
def test_exception_ends_loop_as_failed(monkeypatch, bench, key, where):
    spend, number = bench.truth.spend, [0]
    what = {
        "dataset": "dataset",
        "step": "validation_step",
        "module hook": f"on_{HOOK_WORDS[key]}_batch_start",
        "callback": f"on_{HOOK_WORDS[key]}_batch_end",
    }[where]

    def break_off(phase: str, spent: str) -> None:
        spend(phase, spent)
        number[0] += spent == what
        if number[0] == 2:
            number[0] += 1
            raise RuntimeError("broken off")

    monkeypatch.setattr(bench.truth, "spend", break_off)
    model = (PlainNet if where == "callback" else HookedNet)(bench.truth)
    after = (Other(bench.truth),) if where == "callback" else ()
    trainer = bench.run(key, model, bench.data(), after=after, raises=RuntimeError)
    assert bench.callback.run.info.status == "failed"
    bench.check(num_steps=1)
    assert bench.record.unfinished_steps == 1
    assert f"an exception ended the {WORDS[key]} loop" in text_of(bench)

    monkeypatch.setattr(bench.truth, "spend", spend)
    bench.run(key, model, bench.data(), trainer=trainer)
    assert bench.callback.run.info.status == "finished"
    bench.check(num_steps=3)


def test_keyboard_interrupt_ends_loop_as_interrupted(bench):
    class Interrupted(HookedNet):
        def validation_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyboardInterrupt
            super().validation_step(batch, batch_idx)

    handler = signal.getsignal(signal.SIGINT)
    try:
        bench.run("validate", Interrupted(bench.truth), bench.data(), raises=SystemExit, **everything(bench))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from now on
    assert bench.callback.run.info.status == "interrupted"
    bench.check(num_steps=2)


def test_exception_before_loop_leaves_no_report(bench):
    class Fails(HookedNet):
        def on_validation_start(self):
            raise RuntimeError("broken off")

    bench.run("validate", Fails(bench.truth), bench.data(), raises=RuntimeError)
    assert bench.callback.run is None


# Multiple loops with one callback


def test_loops_after_fit_have_their_own_reports(bench):
    """Validation inside the fit belongs to the fit and has no report of its own."""

    class Fitted(HookedNet):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.truth.spend("forward", "validation_step")

    model = Fitted(bench.truth)
    trainer = Bench.fit(
        bench,
        model,
        Bench.data(bench),
        validation=bench.validation_data(),
        before=(Other(bench.truth),),
        num_sanity_val_steps=1,
        val_check_interval=2,
    )
    bench.check(num_steps=3)
    assert bench.has_tag(StepTag.VALIDATION) == [False, True, False]
    reports = [bench.callback.report]
    assert "3 training steps" in reports[0].title
    for key in KEYS:
        bench.run(key, model, bench.data(4), trainer=trainer)
        bench.check(num_steps=4)
        assert f"Fitted, 4 {WORDS[key]} batches (finished)" in bench.callback.report.title
        assert bench.callback.report not in reports
        reports.append(bench.callback.report)
    trainer.fit_loop.max_epochs = 2
    Bench.fit(bench, model, Bench.data(bench), trainer=trainer)
    bench.check(num_steps=3)
    assert bench.callback.run.info.loop == "fit"


def test_callback_works_in_several_trainers_in_turn(bench):
    for key, num_steps in (("test", 3), ("predict", 2), ("test", 4)):
        bench.run(key, HookedNet(bench.truth), bench.data(num_steps))
        bench.check(num_steps)
        assert bench.callback.run.info.loop == key


def test_one_trainer_validates_twice(bench):
    trainer = bench.run("validate", HookedNet(bench.truth), [bench.data(), bench.data(2)])
    bench.run("validate", HookedNet(bench.truth), [bench.data(), bench.data(2)], trainer=trainer)
    bench.check(num_steps=5)
    assert bench.has_tag(StepTag.FIRST_OF_EPOCH) == [True, False, False, True, False]


class Tunable(HookedNet):
    """Has a loader and a batch size that a tuner changes."""

    batch_size = 1

    def val_dataloader(self) -> Any:
        return EvaluationLoader(CostlyDataset(self.truth, 8), batch_size=self.batch_size)


@pytest.mark.parametrize("ours_is_first", [True, False])
def test_tuner_trials_are_not_measured(bench, tmp_path, ours_is_first):
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=1)
    model = Tunable(bench.truth)
    place = "after" if ours_is_first else "before"
    bench.run("validate", model, None, default_root_dir=tmp_path, **{place: (finder,)})
    assert len(bench.truth.steps) > 0
    bench.check(len(bench.truth.steps))


def test_tuner_that_exits_early_causes_no_warning(bench, tmp_path):
    trainer = bench.trainer(default_root_dir=tmp_path)
    with our_warnings() as messages:
        Tuner(trainer).scale_batch_size(
            Tunable(bench.truth), method="validate", steps_per_trial=1, init_val=2, max_trials=1
        )
    assert messages == []
    assert bench.callback.run is None
    assert remains(trainer) == []


# No batches


class Nothing(Callback):
    def on_validation_start(self, trainer, pl_module):
        raise AssertionError("Lightning was expected to skip the loop")


@pytest.mark.parametrize(
    ("data", "arguments"),
    [(DataLoader([]), {}), (DataLoader(torch.ones(3, 2)), {"limit_val_batches": 0})],
    ids=["empty", "limited to none"],
)
def test_skipped_loop_is_reported(bench, data, arguments):
    with our_warnings() as messages:
        bench.run("validate", HookedNet(bench.truth), data, before=(Nothing(),), **arguments)
    assert messages == ["ModelProfCallback: the validation loop had no batches, so it has no report."]
    assert bench.callback.run is None


@pytest.mark.parametrize("key", KEYS)
def test_empty_stream_has_report_that_says_so(bench, key):
    class EmptyStream(CostlyStream):
        def __iter__(self):
            return iter(())

    with our_warnings() as messages:
        bench.run(
            key, HookedNet(bench.truth), EvaluationLoader(EmptyStream(bench.truth)), **everything(bench)
        )
    assert messages == []
    bench.check(num_steps=0)
    text = text_of(bench)
    assert f"0 {WORDS[key]} batches" in text
    assert f"no {WORDS[key]} batch finished" in text


# The benchmark and the report


def test_clean_batches_exclude_initial_ones(bench):
    bench = EvaluationBench(skip_first=2)
    bench.run("test", PlainNet(bench.truth), [bench.data(6, batch_size=2), bench.data(9)])
    report = bench.callback.report
    text = text_of(bench)
    assert "Based on 9 clean batches out of 12." in text
    assert (
        "Excluded batches: 2 initial (skip_first=...), 1 at the start of a dataloader. A batch is counted"
        in text
    )
    assert "gradient accumulation" not in text
    figures = report.summary.benchmark
    assert figures.num_steps == 9
    clean = [step for number, step in enumerate(bench.truth.steps) if number not in {0, 1, 3}]
    total_ns = sum(sum(step.values()) for step in clean)
    reader_ns = sum(step["dataloader"] for step in clean)
    assert figures.batch_cost_ns.avg == total_ns / 9
    assert figures.reader_cost_ns.avg == reader_ns / 9
    assert figures.reader_ratio.avg == reader_ns / total_ns
    assert report.summary.run.steps_unit == "batches/s"
    assert figures.steps_per_s.avg == pytest.approx(9e9 / total_ns)
    assert figures.samples_per_s.avg == pytest.approx((1 * 2 + 8 * 1) * 1e9 / total_ns)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            {"skip_first": 10},
            "none of the 4 batches is clean; use more batches or set a smaller skip_first=...",
        ),
        ({"skip_first": 0}, "For more clean batches, use more batches."),
    ],
)
def test_few_clean_batches_give_advice(arguments, advice):
    bench = EvaluationBench(**arguments)
    bench.run("validate", PlainNet(bench.truth), bench.data(4))
    text = text_of(bench)
    assert advice in text
    assert "train" not in text.partition("Perf Summary")[2].partition("Phases")[0]


class Real(Net):
    """Module whose steps take real time."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layers(batch[0])


def run_real(folder, key, *, data=None, trainer=None, others=(), **kwargs):
    callback = make_callback(folder, **kwargs)
    run_quietly(make_real_trainer(folder, callback, *others, **(trainer or {})), key, data)
    return callback


def run_quietly(trainer, key, data=None, module=None):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!ModelProfCallback)")
        return getattr(trainer, key)(module or Real(), data or loader())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("key", KEYS)
def test_files_and_report_under_the_real_clock(tmp_path, key, num_workers):
    callback = run_real(tmp_path, key, data=loader(80, num_workers=num_workers), active=0)
    steps = steps_of(callback)
    assert len(steps) == 40
    assert steps.phases_ns.sum(axis=1).tolist() == steps.duration_ns.tolist()
    for phase in ("dataloader", "transfer", "forward"):
        assert (steps.phases_ns[:, PHASE_INDEX[phase]] > 0).all(), phase
    assert steps.samples.tolist() == [2] * 40
    folder = tmp_path / "modelprof"
    assert {path.name for path in folder.iterdir()} == {
        "report.html",
        "report.json",
        "report.txt",
        "run.json",
    }
    assert f"Real, 40 {WORDS[key]} batches (finished)" in (folder / "report.txt").read_text()
    summary = report_of(tmp_path)["summary"]
    assert summary["run"]["loop"] == key
    assert summary["run"]["num_steps"] == 40
    assert summary["benchmark"]["num_steps"] == 39
    assert sum(phase["total_ns"] for phase in summary["phases"]) == summary["run"]["wall_ns"]
    run = load_run(tmp_path)
    assert run.info == callback.run.info
    assert run.info.loop == key


def test_next_loop_gets_its_own_directory(tmp_path):
    callback = ModelProfCallback(active=0, report={"terminal": False})
    trainer = make_real_trainer(tmp_path, callback, logger=CSVLogger(tmp_path, name="", version=""))
    fit_quietly(trainer, Real(), loader(), loader(4))
    for key in KEYS:
        run_quietly(trainer, key)
    run_quietly(trainer, "validate")
    found = {
        str(path.parent.relative_to(tmp_path)): load_run(path).info.loop
        for path in tmp_path.rglob("run.json")
    }
    assert found == {
        "modelprof": "fit",
        "modelprof/validate": "validate",
        "modelprof/test": "test",
        "modelprof/predict": "predict",
        "modelprof/validate_2": "validate",
    }


def test_terminal_and_step_info_show_loop(tmp_path, capsys):
    class Asks(Callback):
        seen = ""

        def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 20:
                self.seen = trainer.callbacks[0].step_info("images")

    asks = Asks()
    run_real(tmp_path, "test", active=0, terminal=True, others=(asks,))
    assert "Real, 32 test batches (finished)" in capsys.readouterr().out
    assert "reader_cost:" in asks.seen
    assert "images/s" in asks.seen


def test_loggers_get_no_points(tmp_path):
    logger = CSVLogger(tmp_path)
    run_real(tmp_path, "validate", active=0, log_every_n_steps=1, trainer={"logger": logger})
    metrics = Path(logger.log_dir, "metrics.csv").read_text()
    assert "val_loss" in metrics
    assert "modelprof" not in metrics


def test_environment_variable_disables_measuring(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "0")
    callback = run_real(tmp_path, "validate")
    assert callback.run is None
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_leaves_no_files(tmp_path):
    callback = ModelProfCallback(report={"terminal": False})
    trainer = make_real_trainer(tmp_path, callback, fast_dev_run=True)
    run_quietly(trainer, "test")
    assert len(steps_of(callback)) == 1
    assert "Real, 1 test batch (finished)" in callback.report.title
    assert list(tmp_path.rglob("run.json")) == []


def test_invalid_configuration_is_rejected_before_loop(tmp_path):
    class NoBatch(Callback):
        def on_test_batch_start(self, *args):
            raise AssertionError("a batch came")

    with pytest.raises(ConfigError, match="wait"):
        run_real(tmp_path, "test", others=(NoBatch(),), wait=-1)


def test_archive_without_loop_name_counts_as_fit(tmp_path):
    run_real(tmp_path, "validate", active=0)
    path = tmp_path / "modelprof" / "run.json"
    saved = json.loads(path.read_text())
    del saved["info"]["loop"]
    path.write_text(json.dumps(saved))
    assert load_run(path).info.loop == "fit"


def test_loop_names():
    assert {key: loop.key for key, loop in LOOPS.items()} == {key: key for key in ("fit", *KEYS)}
    assert loop_of("predict").name == "prediction"
    assert loop_of("of a later version") is FIT


# Profiler windows


@pytest.mark.parametrize("key", KEYS)
def test_windows_record_whole_batches(tmp_path, key):
    callback = run_real(tmp_path, key, skip_first=2, wait=1, warmup=1, active=3, repeat=2)
    windows = windows_of(callback)
    assert [window.recorded_steps for window in windows] == [(4, 5, 6), (9, 10, 11)]
    assert [window.status for window in windows] == [WindowStatus.COMPLETE] * 2
    steps = steps_of(callback)
    assert steps.step[(steps.tags & StepTag.PROFILED) != 0].tolist() == [4, 5, 6, 9, 10, 11]
    assert steps.step[(steps.tags & StepTag.PROFILER_STOP) != 0].tolist() == [7, 12]
    trace = trace_of(tmp_path, windows[0])
    assert [name for name, _, _ in step_ranges(trace)] == ["4", "5", "6"]
    names = [name for name, _, _ in phase_ranges(trace)]
    for phase in ("dataloader", "transfer", "forward", "predictions" if key == "predict" else "logging"):
        assert names.count(phase) == 3, phase
    rows = raw_rows(report_of(tmp_path)["tables"]["model_summary"])
    calls = {row["name"]: row["calls"] for row in rows}
    assert {name: calls[name] for name in ("ProfileStep", "Dataloader", "Forward", "Backward")} == {
        "ProfileStep": 3,
        "Dataloader": 3,
        "Forward": 3,
        "Backward": 0,
    }


def test_window_can_cover_whole_loop(tmp_path):
    callback = run_real(tmp_path, "test", data=loader(8), wait=0, warmup=0, active=4, repeat=1)
    (window,) = windows_of(callback)
    assert window.recorded_steps == (0, 1, 2, 3)
    assert window.status is WindowStatus.COMPLETE


def test_window_cut_by_end_of_loop_is_noted(tmp_path):
    callback = run_real(tmp_path, "test", data=loader(8), wait=2, warmup=0, active=4, repeat=1)
    (window,) = windows_of(callback)
    assert window.recorded_steps == (2, 3)
    assert window.note == "the test loop ended first"


def test_stop_after_profile_does_not_affect_later_fit(tmp_path):
    callback = make_callback(tmp_path, wait=0, warmup=0, active=2, repeat=1, stop_after_profile=True)
    trainer = make_real_trainer(tmp_path, callback)
    run_quietly(trainer, "validate")
    assert len(steps_of(callback)) == 32
    assert not trainer.should_stop


def test_batches_prefetched_while_a_window_closed_are_not_clean(tmp_path):
    data = loader(80, num_workers=1, prefetch_factor=2)
    callback = run_real(tmp_path, "validate", data=data, wait=3, warmup=0, active=2, repeat=1)
    steps = steps_of(callback)
    assert steps.step[(steps.tags & StepTag.DRAINING) != 0].tolist() == [6, 7]


def test_num_prefetched_is_that_of_running_loop():
    trainer = make_trainer()
    trainer.validate_loop._combined_loader = type(
        "Loader", (), {"flattened": [DataLoader(torch.ones(3), num_workers=1)]}
    )()
    assert num_prefetched(loop_of_trainer(trainer, LOOPS["validate"])) == 2
    assert (
        num_prefetched(loop_of_trainer(trainer))
        == num_prefetched(loop_of_trainer(trainer, LOOPS["test"]))
        == 0
    )


# The loop is unaffected


@pytest.mark.parametrize("key", KEYS)
def test_evaluation_is_bit_identical(tmp_path, key):
    class Noisy(Real):
        """Draws in every batch, so that a draw by us would change the rest."""

        def loss(self, batch):
            return super().loss(batch) * torch.rand(())

        def predict_step(self, batch, batch_idx):
            return super().predict_step(batch, batch_idx) * torch.rand(())

    def outcome(*callbacks):
        torch.manual_seed(3)
        module = Noisy(dropout=0.5)
        results = run_quietly(make_real_trainer(tmp_path, *callbacks), key, loader(shuffle=True), module)
        state = [value.clone() for value in module.state_dict().values()]
        return results, state, torch.random.get_rng_state(), module.training, list(module._forward_hooks)

    alone, ours = outcome(), outcome(make_callback(tmp_path, wait=2, warmup=1, active=3))
    assert str(alone[0]) == str(ours[0])
    if key == "predict":
        assert all(torch.equal(a, b) for a, b in zip(alone[0], ours[0], strict=True))
    else:
        assert alone[0] == ours[0]
    assert all(torch.equal(a, b) for a, b in zip(alone[1], ours[1], strict=True))
    assert torch.equal(alone[2], ours[2])
    assert alone[3:] == ours[3:]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Session, "arm"),
        (Session, "_on_boundary"),
        (Session, "stop"),
        (Results, "conclude"),
    ],
)
def test_internal_error_does_not_stop_loop(tmp_path, monkeypatch, owner, name):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("broken by a test")

    monkeypatch.setattr(owner, name, broken)
    callback = make_callback(tmp_path, active=0)
    trainer = make_real_trainer(tmp_path, callback)
    profiler = trainer.profiler
    with our_warnings() as messages:
        results = trainer.validate(Real(), loader(), verbose=False)
    assert "val_loss" in results[0]
    assert len(messages) == 1, messages
    assert "stopped the profiler; the validation loop continues without it" in messages[0]
    assert trainer.profiler is profiler
    if name == "arm":
        assert callback.run is None
    else:
        assert callback.run.info.status == "aborted"
        assert "before the validation loop ended" in callback.run.ranks[0].notes[0]


def test_failing_samples_fn_loses_only_samples(tmp_path):
    with our_warnings() as messages:
        callback = run_real(tmp_path, "predict", active=0, samples_fn=lambda batch: batch["missing"])
    assert len(messages) == 1
    assert "The report won't have samples/s" in messages[0]
    assert (steps_of(callback).samples == NOT_MEASURED).all()
    assert len(steps_of(callback)) == 32


# Multiple processes

DDP = """
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from lightning_modelprof.engine import process_loops
from lightning_modelprof.engine.session import Session
from tests.support.fits import *

process_loops.SHORT_EVALUATION = 0  # or 16 batches have no report

class BreaksRankOne(Callback):
    # What is broken on one rank must not make the others wait.
    def on_validation_start(self, trainer, module):
        if trainer.global_rank == 1:
            Session._on_boundary = lambda self: 1 / 0

def validate(folder, *others):
    callback = make_callback(Path(folder), active=0)
    trainer = make_trainer(Path(folder), callback, *others, strategy="ddp_fork", devices=2)
    trainer.validate(Net(), loader(), verbose=False)

if __name__ == "__main__":
    torch.set_num_threads(1)
    validate("whole")
    validate("broken", BreaksRankOne())
    print("both ended")
"""


def test_two_ranks_are_combined(tmp_path):
    result = run_script(DDP, cwd=tmp_path, timeout=100)
    assert result.returncode == 0, result.stderr[-5000:]
    assert "both ended" in result.stdout
    files = [tmp_path / "whole" / "modelprof" / name for name in ("run.json", "run_rank1.json")]
    runs = [load_run(file) for file in files]
    assert [run.info.loop for run in runs] == ["validate"] * 2
    assert [len(run.ranks[0].steps) for run in runs] == [16] * 2
    clean = [run.ranks[0].steps.clean() for run in runs]
    figures = all_ranks(runs[0].rank_steps)  # includes the other ranks' figures
    assert figures.num_steps == sum(len(steps) for steps in clean) == 30
    assert figures.batch_total_ns == sum(int(steps.duration_ns.sum()) for steps in clean)
    assert "All 2 ranks" in (tmp_path / "whole" / "modelprof" / "report.txt").read_text()

    assert result.stderr.count("an internal error stopped the profiler") == 1
    broken = tmp_path / "broken" / "modelprof"
    [absent] = load_run(broken / "run.json").absent_ranks
    assert (absent.rank, absent.reason) == (1, "an internal error stopped the profiler there")
    assert load_run(broken / "run_rank1.json").info.status == "aborted"


# A Lightning version with unknown action names


@contextmanager
def renamed(monkeypatch, hook):
    def renaming_table(self: PhaseProfiler, make: Any) -> ActionTable:
        def make_renamed(name: str) -> Any:
            owner, dot, own_hook = name.rpartition(".")
            is_ours = own_hook == hook and not name.startswith("[Callback]")
            return make(f"{owner}{dot}renamed_{own_hook}" if is_ours else name)

        return ActionTable(make_renamed)

    with monkeypatch.context() as patch:
        patch.setattr(PhaseProfiler, "_table", renaming_table)
        yield


@pytest.mark.parametrize("hook", ["val_next", "validation_step"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_unknown_action_names_end_measuring(monkeypatch, bench, hook, place):
    with renamed(monkeypatch, hook), our_warnings() as messages:
        bench.run("validate", PlainNet(bench.truth), bench.data(6), **{place: (Other(bench.truth),)})
    assert len(messages) == 1, messages
    assert f"this Lightning version doesn't report {hook}" in messages[0]
    assert bench.callback.run.info.status == "aborted"
    assert len(bench.record.steps) == 1


def test_known_action_names_cause_no_warning(bench):
    for key in KEYS:
        with our_warnings() as messages:
            bench.run(key, PlainNet(bench.truth), bench.data(1))
        assert messages == []
        bench.check(num_steps=1)


def test_tensorboard_separates_loops(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    callback = make_callback(tmp_path, active=0, flops=False)
    trainer = make_real_trainer(tmp_path, callback, logger=logger)
    fit_quietly(trainer, Net(), loader(8))
    trainer.validate(Net(), loader(8), verbose=False)
    logger.experiment.flush()
    events = event_accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    texts = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    assert texts == ["modelprof/report/text_summary", "modelprof/validate/report/text_summary"]


@pytest.mark.parametrize("key", ["fit", "predict"])
def test_loop_failing_in_its_first_batch_prints_one_line(tmp_path, capsys, key):
    """Nothing was measured, so there is no report to read, and longer training is no advice."""

    class Broken(Net):
        def training_step(self, *_):
            raise ValueError("broken")

        predict_step = training_step

    trainer = make_real_trainer(tmp_path, ModelProfCallback(dirpath=tmp_path / "modelprof"))
    with pytest.raises(ValueError, match="broken"):
        getattr(trainer, key)(Broken(), loader(200))
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    told = next(line for line in lines if "failed" in line)
    assert "CANNOT TELL: No step finished." in told
    assert len(lines) == 1
    assert "train for longer" not in (tmp_path / "modelprof" / "report.txt").read_text("utf-8")


def test_repr_of_report_and_run_is_one_line(tmp_path):
    callback = ModelProfCallback(dirpath=tmp_path / "modelprof")
    fit_quietly(make_real_trainer(tmp_path, callback), Net(), loader(60))
    assert repr(callback.report).startswith(
        "<Report: lightning-modelprof: Net, 30 training steps (finished);"
    )
    assert f"{callback.report.verdict.kind}; findings " in repr(callback.report)
    assert repr(callback.run).startswith("<Run: fit of Net, finished; 30 steps, ranks 1, of 20")
    assert max(len(repr(one)) for one in (callback.report, callback.run)) < 120
