"""The parts of validation loops inside a fit are exact to the nanosecond under a fake clock.

``Bench.check`` compares each part with what the user code says it spent there, both here and in
``test_phases_fake_clock.py``; this file tests what is specific to validation.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.lightning.in_validation import METRICS_COMPUTED, METRICS_LOGGED
from lightning_modelprof.measure.steps.validation_parts import MAX_MARKS, ValidationParts
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.phases import PART_INDEX, PARTS, PHASE_INDEX, ValidationTimes
from tests.measure.test_device_phases import FakeDeviceClock
from tests.support.bench import (
    COST_MS,
    HOOK_COST_MS,
    MS,
    Bench,
    CostlyCallback,
    CostlyDataset,
    CostlyLoader,
    CostlyLogger,
    CostlyProfiler,
    CostlyStream,
    FakeClock,
    HookedModel,
    PlainModel,
    Truth,
    make_trainer,
    parts_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning",
    "ignore::UserWarning:pytorch_lightning",
    "ignore::UserWarning:torchmetrics",
)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def validation_of(bench: Bench) -> ValidationTimes:
    times = bench.record.validation
    assert times is not None
    return times


def calls_of(times: ValidationTimes) -> dict[str, int | None]:
    return {part.key: part.calls for part in times.parts}


def in_ms(times: ValidationTimes) -> dict[str, int]:
    """Whole milliseconds, as all costs differ from each other by some nanoseconds."""
    return {part.key: part.total_ns // MS for part in times.parts if part.total_ns}


class CostlyMetric(Metric):
    """Spends time when updated and when computed."""

    full_state_update = False

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.truth.spend("forward", "update")
        self.total += value

    def compute(self) -> Tensor:
        self.truth.spend("epoch_end", "compute")
        return self.total


class MeteredModel(HookedModel):
    """Logs a metric object, which Lightning computes after the last batch, and one value per batch."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth)
        self.metric = CostlyMetric(truth)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.metric.update(torch.ones(()))
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("value", 1.0, on_step=True, on_epoch=True)


class ComputesAtTheEnd(HookedModel):
    """Computes and logs in its own hook."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth)
        self.metric = CostlyMetric(truth)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metric.update(torch.ones(()))

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("metric", self.metric.compute())
        self.metric.reset()


class LaterLoader(CostlyLoader):
    """A second dataloader, whose iterator Lightning creates while fetching its first batch."""

    def __iter__(self) -> Any:
        self.dataset.truth.spend("dataloader", "loader_iter")
        return DataLoader.__iter__(self)


@pytest.mark.slow
def test_each_cost_is_in_exactly_one_part(bench):
    """One validation of two batches, worked out by hand from the costs in ``COST_MS``."""
    bench.fit(
        MeteredModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        before=(CostlyCallback(bench.truth),),
        logger=CostlyLogger(bench.truth),
        log_every_n_steps=50,
    )
    bench.check(num_steps=3)
    times = validation_of(bench)
    hooks = 7  # start, epoch start, two at batch start, two at batch end, end
    assert in_ms(times) == {
        "dataloader": 2 * COST_MS["dataset"],
        "transfer": 2 * (1 + 2 + 1),
        "forward": 2 * (COST_MS["validation_step"] + HOOK_COST_MS),
        "module_hooks": hooks * HOOK_COST_MS,
        "epoch_end": 2 * HOOK_COST_MS,  # the metric's compute and on_validation_epoch_end
        "logging": 3 * COST_MS["logger"],  # one point per batch and one at the end
        "dataloader_init": COST_MS["loader_iter"],
    }
    assert times.num_runs == 1
    assert times.num_batches == 2
    assert calls_of(times) == {
        "dataloader": 2,
        "transfer": 4,
        "forward": 2,
        "module_hooks": hooks,
        "dataloader_init": 1,
        **dict.fromkeys(("epoch_end", "logging", "other")),
    }
    # The callback's hooks belong to the phase Callbacks, not to validation.
    phases_ns = bench.record.steps.phases_ns.sum(axis=0)
    assert times.total_ns == phases_ns[PHASE_INDEX["validation"]]
    assert bench.truth.steps[-1]["callbacks"] > 8 * HOOK_COST_MS * MS


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [MeteredModel, ComputesAtTheEnd])
def test_metrics_are_separate_from_logger(bench, model_class):
    bench.fit(
        model_class(bench.truth),
        bench.data(4),
        validation=bench.validation_data(),
        val_check_interval=2,
        max_epochs=2,
        before=(CostlyCallback(bench.truth),),
        after=(CostlyCallback(bench.truth),),
        logger=CostlyLogger(bench.truth),
        log_every_n_steps=50,
    )
    bench.check(num_steps=8)
    assert validation_of(bench).num_runs == 4
    assert parts_of(bench.record)["epoch_end"] > 0
    assert parts_of(bench.record)["logging"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "num_runs"),
    [
        ({"val_check_interval": 1}, 8),
        ({"val_check_interval": 0.5}, 4),
        ({"check_val_every_n_epoch": 2}, 1),
        ({"check_val_every_n_epoch": None, "val_check_interval": 3}, 2),
        ({"limit_val_batches": 0}, 0),
    ],
)
def test_validation_schedules(bench, arguments, num_runs):
    bench.fit(
        MeteredModel(bench.truth),
        bench.data(4),
        validation=bench.validation_data(),
        max_epochs=2,
        num_sanity_val_steps=2,  # before training, so not measured
        **arguments,
    )
    bench.check(num_steps=8)
    assert bench.record.validation is None or validation_of(bench).num_runs == num_runs
    assert (bench.record.validation is None) == (num_runs == 0)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_validation_while_gradients_accumulate(bench, accumulate):
    """No hook marks the start of validation: starting workers before its first hook counts too."""
    bench.fit(
        MeteredModel(bench.truth),
        bench.data(4),
        validation=bench.validation_data(),
        val_check_interval=1,
        accumulate_grad_batches=accumulate,
    )
    bench.check(num_steps=4)
    assert in_ms(validation_of(bench))["dataloader_init"] == 4 * COST_MS["loader_iter"]


@pytest.mark.slow
def test_several_validation_dataloaders(bench):
    """The second loader starts its workers while fetching its first batch, and this is recorded."""
    later = LaterLoader(CostlyDataset(bench.truth, 3, is_training=False))
    bench.fit(
        MeteredModel(bench.truth),
        bench.data(),
        validation=[bench.validation_data(2), later],
        max_epochs=2,
        logger=CostlyLogger(bench.truth),
        log_every_n_steps=50,
    )
    bench.check(num_steps=6)
    times = validation_of(bench)
    assert (times.num_runs, times.num_batches, times.num_first_fetches) == (2, 10, 4)
    firsts_ms = 2 * (COST_MS["dataset"] + COST_MS["loader_iter"] + COST_MS["dataset"])
    assert times.first_fetch_ns // MS == firsts_ms


@pytest.mark.slow
def test_stream_fetches_first_batch_during_loader_init(bench):
    """Lightning asks for it before its first hook, to learn whether it is the last batch."""
    stream = CostlyStream(bench.truth, 3)
    stream.items.is_training = False
    bench.fit(PlainModel(bench.truth), bench.data(), validation=CostlyLoader(stream))
    first_ms = COST_MS["loader_iter"] + COST_MS["dataset"]
    # One of the remaining three fetches finds the end of the stream, which costs as much as an item.
    assert in_ms(validation_of(bench))["dataloader_init"] == first_ms
    assert in_ms(validation_of(bench))["dataloader"] == 3 * COST_MS["dataset"]


@pytest.mark.slow
def test_fetches_inside_validation_step(bench):
    class FetchesItself(PlainModel):
        def validation_step(self, dataloader_iter):
            next(dataloader_iter)
            self.truth.spend("validation", "validation_step")

    bench.fit(FetchesItself(bench.truth), bench.data(), validation=bench.validation_data())
    bench.check(num_steps=3)
    assert in_ms(validation_of(bench)) == {"dataloader": 6, "forward": 16, "dataloader_init": 13}


@pytest.mark.slow
def test_user_hooks_around_evaluation_mode(bench):
    class Modes(HookedModel):
        def on_validation_model_zero_grad(self):
            self.truth.spend("module_hooks", "on_validation_model_zero_grad")

        def on_validation_model_eval(self):
            self.truth.spend("module_hooks", "on_validation_model_eval")
            self.eval()

        def on_validation_model_train(self):
            self.truth.spend("module_hooks", "on_validation_model_train")
            self.train()

    bench.fit(Modes(bench.truth), bench.data(), validation=bench.validation_data(), val_check_interval=1)
    bench.check(num_steps=3)
    assert in_ms(validation_of(bench))["module_hooks"] == 3 * (7 + 3) * HOOK_COST_MS


@pytest.mark.slow
def test_user_profiler_and_callbacks_are_in_no_part(bench):
    bench.fit(
        MeteredModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        max_epochs=2,
        profiler=CostlyProfiler(bench.truth),
        before=(CostlyCallback(bench.truth),),
        after=(CostlyCallback(bench.truth),),
    )
    bench.check(num_steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["dataset", "validation_step", "compute", "on_validation_epoch_end"])
def test_failed_validation_is_counted_up_to_failure(bench, monkeypatch, where):
    spend, number = bench.truth.spend, 0

    def break_off(phase: str, what: str) -> None:
        nonlocal number
        spend(phase, what)
        number += what == where and bench.truth.is_on and bench.truth.trainer.validating
        if number == 2:
            raise RuntimeError("broken off")

    monkeypatch.setattr(bench.truth, "spend", break_off)
    bench.fit(
        MeteredModel(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        val_check_interval=1,
        raises=RuntimeError,
    )
    bench.check(num_steps=len(bench.truth.steps))
    assert bench.record.outside_ns["validation"] > 0


# Saved and read again


@pytest.mark.slow
def test_validation_parts_survive_saving(bench, tmp_path):
    bench.fit(MeteredModel(bench.truth), bench.data(), validation=bench.validation_data())
    save_run(bench.callback.run, tmp_path / "run.json")
    assert load_run(tmp_path).ranks[0].validation == bench.record.validation
    older = (tmp_path / "run.json").read_text().replace('"validation":{"num_runs"', '"later":{"num_runs"')
    (tmp_path / "run.json").write_text(older)
    assert load_run(tmp_path).ranks[0].validation is None


# On a device


@pytest.fixture
def device_bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose device takes three times the host's time for everything."""
    bench = Bench()
    bench.truth.device = FakeDeviceClock()
    monkeypatch.setattr(
        "lightning_modelprof.engine.step_times.device_clock", lambda device: bench.truth.device
    )
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_device_times_by_part(device_bench, is_late):
    """The device time between two marks belongs to the part that started at the first."""
    bench, device = device_bench, device_bench.truth.device
    device.reached_ns = -1 if is_late else None

    class ReachesTheEnd(Callback):
        def on_train_end(self, trainer, pl_module):
            device.reached_ns = None

    bench.fit(
        MeteredModel(bench.truth),
        bench.data(4),
        validation=bench.validation_data(),
        val_check_interval=2,
        before=(ReachesTheEnd(),),
    )
    bench.check(num_steps=4)
    device_ns = {part.key: part.device_ns for part in validation_of(bench).parts if part.device_ns}
    assert device_ns == {key: 3 * ns for key, ns in parts_of(bench.record).items()}
    assert all(mark.times_released <= 1 for mark in device.marks)


def test_pending_device_marks_are_bounded():
    device = FakeDeviceClock()
    device.reached_ns = -1
    parts = ValidationParts(device)
    parts.begin_run(0, 0)
    for number in range(MAX_MARKS):
        parts.begin(number % 2 + 1, number)
    assert len(device.marks) == MAX_MARKS + 1
    assert parts.has_given_up
    times = parts.times()
    assert times is not None
    assert {part.device_ns for part in times.parts} == {None}
    parts.begin(4, 9_999)
    assert len(device.marks) == MAX_MARKS + 1


def test_pending_mark_has_no_device_time():
    device = FakeDeviceClock()
    device.reached_ns = -1
    parts = ValidationParts(device)
    parts.begin_run(0, 0)
    parts.begin(1, 3)
    times = parts.times()
    assert times is not None
    assert {part.device_ns for part in times.parts} == {None}


def test_parts_give_up_on_negative_time():
    device = FakeDeviceClock()
    parts = ValidationParts(device)
    parts.begin_run(0, 0)
    device.now_ns = -5
    parts.begin(1, 3)
    assert parts.has_given_up


# Overhead


class ReadsOfBatches:
    """A validation dataset that records the clock's read count at each fetch."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(self.clock.reads)
        return torch.ones(2)


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "most"), [(PlainModel, 7), (HookedModel, 13)])
def test_clock_reads_per_validation_batch(model_class, most):
    """Two for the fetch, the transfer, the step and each overridden hook; one at the batch's end."""
    clock = FakeClock()
    callback = ModelProfCallback(report={"terminal": False, "files": False}, inspect={"sampling": False})
    callback._clock = clock
    data = ReadsOfBatches(clock)
    make_trainer(callbacks=[callback]).fit(
        model_class(Truth(clock)), DataLoader(torch.ones(4, 2)), DataLoader(data)
    )
    reads = [after - before for before, after in zip(data.reads, data.reads[1:], strict=False)]
    assert reads == [most] * 5


# Lightning's internals


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning], ids=lambda one: one.__name__)
def test_lightning_has_metric_methods(package):
    """Without them, computing metrics would count as Logging; see ``lightning/in_validation.py``."""
    connector = package.trainer.connectors.logger_connector.logger_connector._LoggerConnector
    assert callable(getattr(connector, METRICS_COMPUTED))
    assert callable(getattr(connector, METRICS_LOGGED))


@pytest.mark.slow
def test_parts_sum_to_phase_without_metric_methods(bench, monkeypatch):
    class Renamed(logger_connector._LoggerConnector):
        def __getattribute__(self, name):
            if name in {METRICS_COMPUTED, METRICS_LOGGED} and looks["away"]:
                raise AttributeError(name)
            return super().__getattribute__(name)

    looks = {"away": False}
    trainer = bench.trainer()
    trainer._logger_connector.__class__ = Renamed
    arm = bench.callback._arm

    def arm_without(*arguments):
        looks["away"] = True
        try:
            return arm(*arguments)
        finally:
            looks["away"] = False

    monkeypatch.setattr(bench.callback, "_arm", arm_without)
    bench.fit(MeteredModel(bench.truth), bench.data(), validation=bench.validation_data(), trainer=trainer)
    times = validation_of(bench)
    phases_ns = bench.record.steps.phases_ns.sum(axis=0)
    assert times.total_ns == phases_ns[PHASE_INDEX["validation"]] == sum(bench.truth.validation.values())
    assert in_ms(times)["logging"] == HOOK_COST_MS  # the metric's compute


def test_parts_share_phase_names():
    assert list(PART_INDEX) == [part.key for part in PARTS]
    assert {part.key for part in PARTS} - set(PHASE_INDEX) == {"epoch_end"}
