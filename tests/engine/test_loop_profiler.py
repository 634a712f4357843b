"""Tests the three entry points: ModelProfCallback, Trainer(profiler=...) and LoopProfiler."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.profiler import schedule
from torch.utils.data import DataLoader, TensorDataset

from lightning_modelprof import ConfigError, LoopProfiler, ModelProfiler
from lightning_modelprof.config.checks import make_config
from lightning_modelprof.measure.window.schedule import Schedule, fit_schedule
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag
from tests.support.bench import (
    Bench,
    CostlyDataset,
    CostlySGD,
    FakeClock,
    PlainModel,
    Truth,
    make_trainer,
    named_phases,
)
from tests.support.fits import Net, fit_quietly, grouped, loader

QUIET = grouped(
    dict.fromkeys(("terminal", "progress_bar", "files", "sampling"), False) | {"active": 0, "skip_first": 0}
)
NUM_STEPS = 6


def quiet(**arguments):
    names = {name: value for name, value in QUIET.items() if name != "active" or "steps" not in arguments}
    return {**names, **arguments}


def phases_of(run):
    return [dict(step) for step in named_phases(run.ranks[0].steps.phases_ns)]


def data_of(bench):
    """Loader without workers, as Lightning starts the first ones before the loop."""
    return DataLoader(CostlyDataset(bench.truth, 3))


def by_callback():
    bench = Bench()
    bench.fit(PlainModel(bench.truth), data_of(bench), max_epochs=2)
    return bench.callback.run


def by_profiler():
    clock = FakeClock()
    profiler = ModelProfiler(**quiet(flops=False))
    profiler.callback._clock = clock
    bench = Bench()
    bench.truth = Truth(clock)
    trainer = make_trainer(profiler=profiler, max_epochs=2)
    trainer.fit(PlainModel(bench.truth), data_of(bench))
    return profiler.run


def by_loop():
    truth = Truth(FakeClock())
    bench = Bench()
    bench.truth = truth
    model = PlainModel(truth)
    optimizer = CostlySGD(truth, model.layer.parameters())
    profiler = LoopProfiler(model, optimizers=[optimizer], **quiet(flops=False))
    profiler._clock = truth.clock
    with profiler:
        data = data_of(bench)
        for _ in range(2):
            for batch in profiler.fetch(data):
                with profiler.phase("forward"):
                    loss = model.loss(batch)
                with profiler.phase("zero_grad"):
                    optimizer.zero_grad()
                profiler.backward(loss)
                with profiler.phase("optimizer"):
                    optimizer.step()
                profiler.step()
    return profiler.run


def test_all_three_entry_points_give_same_phases():
    runs = [by_callback(), by_profiler(), by_loop()]
    first = phases_of(runs[0])
    assert len(first) == NUM_STEPS
    assert set(first[1]) == {"dataloader", "forward", "zero_grad", "backward", "optimizer"}
    assert phases_of(runs[1]) == first
    assert phases_of(runs[2]) == first
    tags = [run.ranks[0].steps.tags.tolist() for run in runs]
    assert tags[0] == tags[1] == tags[2]
    assert [run.ranks[0].unfinished_steps for run in runs] == [0, 0, 0]


# Plain loops


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    data = TensorDataset(torch.randn(160, 8), torch.randint(0, 2, (160,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)


def train(profiler, model, optimizer, batches, epochs=2):
    for _ in range(epochs):
        for x, y in profiler.fetch(batches) if profiler is not None else batches:
            if profiler is None:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                continue
            optimizer.zero_grad()
            with profiler.phase("forward"):
                loss = nn.functional.cross_entropy(model(x), y)
            profiler.backward(loss)
            with profiler.phase("optimizer"):
                optimizer.step()
            profiler.step()


def test_plain_loop_has_windows_counts_and_files(tmp_path):
    model, optimizer, batches = small()
    seen = []
    with LoopProfiler(
        model,
        optimizers=[optimizer],
        dirpath=tmp_path / "run",
        on_trace_ready=lambda path, report: seen.append((path, report)),
        steps=(12, 15),
        flops=True,
        profile_memory=True,
        report={"terminal": False},
    ) as profiler:
        train(profiler, model, optimizer, batches)
    [(path, report)] = seen
    assert path.is_file()
    assert report.table("operators").rows
    record = load_run(tmp_path / "run").ranks[0]
    assert record.num_steps == 40
    assert record.windows[0].recorded_steps == (12, 13, 14)
    # Two layers: forward and both gradients, except for the first layer's input.
    forward = 2 * 8 * (8 * 16 + 16 * 2)
    counted = sum(one.flops or 0 for one in record.model_cost.count.operators)
    assert counted == forward + 2 * 8 * (8 * 16 + 2 * 16 * 2)
    assert {one.path for one in record.model_cost.modules} >= {"0", "2"}
    times = {one.path: one for one in record.model_cost.times.times}
    assert times["2"].forward_ns > 0
    assert times["2"].backward_ns > 0
    assert record.setup.loaders[0].batch_size == 8
    assert record.setup.optimizers[0].kind == "SGD"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["schema_version"] == 2
    assert record.steps.samples.tolist() == [8] * 40


def test_training_is_bit_identical():
    weights = []
    for measured in (False, True):
        model, optimizer, batches = small()
        if measured:
            with LoopProfiler(model, **quiet(steps=(3, 5), flops=True)) as profiler:
                train(profiler, model, optimizer, batches)
        else:
            train(None, model, optimizer, batches)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def test_start_and_stop_work_without_fetch(tmp_path):
    """Used like torch.profiler."""
    model, optimizer, batches = small()
    profiler = LoopProfiler(
        schedule=schedule(skip_first=2, wait=3, warmup=1, active=2, repeat=2),
        dirpath=tmp_path / "run",
        report={"terminal": False},
    )
    profiler.start()
    for x, y in batches:
        with profiler.phase("forward"):
            loss = nn.functional.cross_entropy(model(x), y)
        with profiler.phase("backward"):
            loss.backward()
        optimizer.step()
        profiler.step()
    profiler.stop()
    profiler.stop()
    record = profiler.run.ranks[0]
    assert [window.recorded_steps for window in record.windows] == [(6, 7), (12, 13)]
    assert record.num_steps == 20
    steps = record.steps
    assert (steps.phases_ns[:, PHASE_INDEX["dataloader"]] == NOT_MEASURED).all()
    assert (steps.phases_ns[:, PHASE_INDEX["forward"]] > 0).all()
    assert steps.tags[0] & StepTag.FIRST_OF_EPOCH


def test_early_exit_is_finished_and_error_is_failed():
    model, optimizer, batches = small()
    with LoopProfiler(**quiet()) as profiler:
        for number, _ in enumerate(profiler.fetch(batches)):
            if number == 3:
                break
            profiler.step()
    assert profiler.run.info.status == "finished"
    assert profiler.run.ranks[0].num_steps == 4
    profiler = LoopProfiler(model, optimizers=[optimizer], **quiet())
    with pytest.raises(ZeroDivisionError), profiler:
        [1 / 0 for _ in profiler.fetch(batches)]
    assert profiler.run.info.status == "failed"


def test_internal_error_does_not_stop_loop(monkeypatch):
    model, optimizer, batches = small()
    monkeypatch.setattr("lightning_modelprof.engine.profiler.LoopProfiler._end_step", lambda _: 1 / 0)
    with (
        pytest.warns(RuntimeWarning, match="LoopProfiler: an internal error .* the loop continues") as warned,
        LoopProfiler(model, **quiet()) as profiler,
    ):
        train(profiler, model, optimizer, batches)
    assert len(warned) == 1
    assert profiler.run.info.status == "aborted"


def test_failing_samples_fn_loses_only_samples():
    model, optimizer, batches = small()
    with (
        pytest.warns(RuntimeWarning, match="LoopProfiler: samples_fn raised ZeroDivisionError.*won't have"),
        LoopProfiler(model, samples_fn=lambda _: 1 // 0, **quiet()) as profiler,
    ):
        train(profiler, model, optimizer, batches)
    assert profiler.run.info.status == "finished"
    assert profiler.run.ranks[0].num_steps == 40


def test_environment_variable_disables_profiler(monkeypatch):
    model, optimizer, batches = small()
    monkeypatch.setenv("LIGHTNING_MODELPROF", "0")
    with LoopProfiler(model, **quiet()) as profiler:
        train(profiler, model, optimizer, batches)
    assert profiler.run is None


def test_error_in_on_trace_ready_is_reported(tmp_path):
    model, optimizer, batches = small()

    def fail(path, report):
        raise OSError("no such bucket")

    with (
        pytest.warns(RuntimeWarning, match="on_trace_ready raised OSError: no such bucket"),
        LoopProfiler(model, on_trace_ready=fail, **quiet(active=2, wait=1)) as profiler,
    ):
        train(profiler, model, optimizer, batches)
    assert profiler.run.info.status == "finished"


def test_invalid_uses_are_rejected():
    with pytest.raises(ConfigError, match=r"expected one of .*forward.*got 'forwad'. Did you mean 'forward'"):
        LoopProfiler(**quiet()).phase("forwad")
    with pytest.raises(ConfigError, match=r"LoopProfiler\(...\).*'activ'.*active"):
        LoopProfiler(activ=3)
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module"):
        LoopProfiler([1])
    with pytest.raises(ConfigError, match="expected schedule or active, got both"):
        LoopProfiler(active=3, schedule=schedule(wait=1, warmup=1, active=1))
    with pytest.raises(ConfigError, match="windows of equal length and distance"):
        LoopProfiler(schedule=lambda step: schedule(wait=1, warmup=0, active=1 + step // 50)(step))
    profiler = LoopProfiler(**quiet())
    with profiler, pytest.raises(ConfigError, match="already running"):
        profiler.start()


@pytest.mark.parametrize(
    "arguments",
    [
        {"wait": 1, "warmup": 1, "active": 3, "repeat": 2},
        {"wait": 0, "warmup": 0, "active": 1},
        {"wait": 5, "warmup": 2, "active": 1, "repeat": 1, "skip_first": 7},
        {"wait": 0, "warmup": 3, "active": 4, "repeat": 3, "skip_first": 2},
    ],
)
def test_torch_schedule_is_understood(arguments):
    asked = schedule(**arguments)
    found = fit_schedule(lambda step: asked(step).name)
    expected = Schedule(**{"repeat": 0, **arguments})
    names = {"wait": "NONE", "warmup": "WARMUP", "active": "RECORD", "active_last": "RECORD_AND_SAVE"}
    for step in range(300):
        assert names[found.action(step).value] == asked(step).name
    assert (found.repeat, found.active, found.warmup) == (expected.repeat, expected.active, expected.warmup)


# Trainer(profiler=...)


def test_profiler_adds_its_callback_once_to_every_loop(tmp_path):
    profiler = ModelProfiler(active=2, report={"terminal": False}, dirpath=tmp_path / "run")
    trainer = make_trainer(profiler=profiler, max_epochs=2, max_steps=-1)
    model = Net()
    fit_quietly(trainer, model, loader(64))
    assert profiler.run.info.loop == "fit"
    assert profiler.run.ranks[0].windows
    assert trainer.profiler is profiler
    assert trainer.callbacks.count(profiler.callback) == 1
    trainer.validate(model, loader(64), verbose=False)
    assert profiler.run.info.loop == "validate"
    assert trainer.callbacks.count(profiler.callback) == 1
    assert "validat" in profiler.summary()


def test_profiler_can_be_copied_and_pickled():
    profiler = ModelProfiler(active=3)
    for other in (copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler))):
        assert type(other) is ModelProfiler
    with pytest.raises(ConfigError, match="active"):
        ModelProfiler(active=-1)


def test_profiler_takes_callbacks_arguments():
    assert ModelProfiler(active=7, bounds={"max_overhead": 0.1}).callback.config == make_config(
        {"active": 7, "bounds": {"max_overhead": 0.1}}
    )
    assert set(PHASE_INDEX) == {phase.key for phase in PHASES}
