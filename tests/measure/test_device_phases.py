"""Device time by phase, from marks that are reached late, out of order or never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.measure.clock import TorchEventClock, device_clock
from lightning_modelprof.measure.steps.device_phases import FREE_NS, MAX_PENDING, MAX_SHARE, DevicePhases
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED
from lightning_modelprof.show.text import render_text
from tests.support.bench import (
    Bench,
    CostlyCallback,
    FakeClock,
    HookedModel,
    MeasuredCallback,
    PlainManualModel,
    PlainModel,
    Truth,
    differences,
    make_trainer,
    named_phases,
)

DATALOADER, FORWARD, BACKWARD, OTHER = (
    PHASE_INDEX[key] for key in ("dataloader", "forward", "backward", "other")
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class Mark:
    def __init__(self, now_ns: int) -> None:
        self.ns = now_ns
        self.times_released = 0


class FakeDeviceClock:
    """A stream whose time is polled and never waited for.

    Attributes:
        now_ns: where the host's next mark goes on the stream.
        reached_ns: how far the device has come; ``None`` means as far as the host.
        overtaken: marks of another stream that lags behind.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.reached_ns: int | None = None
        self.overtaken: set[Mark] = set()
        self.marks: list[Mark] = []
        self.is_closed = False

    def advance(self, ns: int) -> None:
        self.now_ns += ns

    def mark(self) -> Mark:
        self.marks.append(Mark(self.now_ns))
        return self.marks[-1]

    def is_reached(self, mark: Mark) -> bool:
        assert mark.times_released == 0
        return mark not in self.overtaken and (self.reached_ns is None or mark.ns <= self.reached_ns)

    def elapsed_ns(self, begin: Mark, end: Mark) -> int | None:
        assert begin.times_released == end.times_released == 0
        if not (self.is_reached(begin) and self.is_reached(end)):
            return None
        return end.ns - begin.ns

    def release(self, mark: Mark) -> None:
        mark.times_released += 1

    def close(self) -> None:
        self.is_closed = True


class Steps:
    """Marks steps of known length: dataloader 10 + n, forward 200, backward 3000, forward again 40000."""

    def __init__(self) -> None:
        self.clock = FakeDeviceClock()
        self.read: list[tuple[int, dict[int, int]]] = []
        self.phases = DevicePhases(self.clock, self.on_step)
        self.phases.mark(DATALOADER)
        self.number = 0

    def on_step(self, step: int, phases_ns: tuple[int, ...]) -> None:
        assert len(phases_ns) == len(PHASES)
        self.read.append((step, {phase: ns for phase, ns in enumerate(phases_ns) if ns}))

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            for ns, next_phase in (
                (10 + self.number, FORWARD),
                (200, BACKWARD),
                (3_000, FORWARD),
                (40_000, DATALOADER),
            ):
                self.clock.advance(ns)
                self.phases.mark(next_phase)
            self.phases.close_step(self.number)
            self.number += 1

    def expected(self, *numbers: int) -> list[tuple[int, dict[int, int]]]:
        return [(n, {DATALOADER: 10 + n, FORWARD: 40_200, BACKWARD: 3_000}) for n in numbers]


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_time_between_marks_belongs_to_phase_that_started(steps):
    steps.run(3)
    assert steps.read == steps.expected(0, 1, 2)
    assert steps.phases.num_given_up == 0


def test_steps_reached_late_are_read_late(steps):
    steps.clock.reached_ns = 0
    steps.run(3)
    assert steps.read == []
    steps.clock.reached_ns = steps.clock.now_ns
    steps.run()  # the device is now one step behind
    assert steps.read == steps.expected(0, 1, 2)
    steps.clock.reached_ns = None
    steps.phases.collect()
    assert steps.read == steps.expected(0, 1, 2, 3)


def test_steps_reached_out_of_order_are_read_in_order(steps):
    """A step's last mark is the next step's first: it must not be reused while the step still waits."""
    steps.run(2)
    steps.clock.reached_ns = steps.clock.now_ns
    steps.run()
    end_of_third_step = steps.clock.marks[12]  # one mark at the start, then four per step
    steps.clock.overtaken = {end_of_third_step}
    steps.clock.reached_ns = None
    steps.run(2)
    assert steps.read == steps.expected(0, 1)
    assert end_of_third_step.times_released == 0
    steps.clock.overtaken.clear()
    steps.phases.collect()
    assert steps.read == steps.expected(0, 1, 2, 3, 4)


def test_step_waits_for_mark_on_lagging_stream(steps):
    steps.run()
    steps.clock.reached_ns = steps.clock.now_ns
    steps.run()
    in_the_middle = steps.clock.marks[6]
    steps.clock.reached_ns = None
    steps.clock.overtaken = {in_the_middle}
    steps.phases.collect()
    assert steps.read == steps.expected(0)
    steps.clock.overtaken.clear()
    steps.phases.collect()
    assert steps.read == steps.expected(0, 1)


def test_steps_never_reached_are_given_up(steps):
    steps.clock.reached_ns = 0
    steps.run(MAX_PENDING + 5)
    assert steps.phases.num_given_up == 5
    assert len(steps.phases._pending) == MAX_PENDING
    steps.clock.reached_ns = None
    steps.phases.collect()
    assert steps.read == steps.expected(*range(5, MAX_PENDING + 5))
    # marks of given-up steps may still be pending, so they aren't reused
    assert {mark.times_released for mark in steps.clock.marks[: 4 * 5]} == {0}


def test_step_with_negative_time_is_given_up(steps):
    steps.run()
    steps.clock.reached_ns = steps.clock.now_ns
    steps.run()
    steps.clock.marks[6].ns -= 1_000_000
    steps.clock.reached_ns = None
    steps.run()
    assert steps.read == steps.expected(0, 2)
    assert steps.phases.num_given_up == 1


def test_each_mark_is_released_once(steps):
    steps.run(7)
    *released, open_one = steps.clock.marks
    assert {mark.times_released for mark in released} == {1}
    assert open_one.times_released == 0  # the running step starts there


def test_discarded_marks_count_in_no_step(steps):
    steps.run()
    steps.clock.advance(77)
    steps.phases.mark(FORWARD)
    steps.clock.advance(77)
    steps.phases.mark(DATALOADER)
    steps.phases.discard()
    steps.run()
    assert steps.read == steps.expected(0, 1)


def test_step_without_marks_is_not_reported():
    read: list[int] = []
    phases = DevicePhases(FakeDeviceClock(), lambda step, phases_ns: read.append(step))
    phases.close_step(0)
    phases.mark(DATALOADER)
    phases.close_step(1)
    assert read == []


def test_cpu_has_no_device_clock():
    assert device_clock(torch.device("cpu")) is None


# In a fit


class EndsEpoch(Callback):
    """Spends time after an epoch's last step, which the device counts as the epoch's turn."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.truth.epoch_ended()
        self.truth.spend("callbacks", "on_train_epoch_end")


@pytest.fixture
def device_bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose device takes three times the host's time for everything."""
    bench = Bench()
    bench.truth.device = FakeDeviceClock()
    monkeypatch.setattr(
        "lightning_modelprof.engine.step_times.device_clock", lambda device: bench.truth.device
    )
    return bench


def device_steps_of(truth: Truth) -> list[dict[str, int]]:
    renamed = {"callbacks": "other"}  # callbacks and hooks set no marks
    return [{renamed.get(key, key): ns for key, ns in step.items()} for step in truth.device_steps]


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [PlainModel, PlainManualModel])
@pytest.mark.parametrize("lag_ns", [0, 10**12], ids=["reached at once", "reached at the end"])
def test_device_times_in_fit(device_bench, model_class, lag_ns):
    bench = device_bench
    device = bench.truth.device
    device.reached_ns = None if lag_ns == 0 else -1

    class ReachesTheEnd(Callback):
        def on_train_end(self, trainer, pl_module):
            device.reached_ns = None

    bench.fit(
        model_class(bench.truth),
        bench.data(),
        validation=bench.validation_data(),
        val_check_interval=2,
        max_epochs=2,
        before=(ReachesTheEnd(),),
        after=(EndsEpoch(bench.truth),),
    )
    bench.check(num_steps=6)
    assert differences(named_phases(bench.record.steps.device_phases_ns), device_steps_of(bench.truth)) == []
    assert all(mark.times_released <= 1 for mark in device.marks)
    assert "Device total" in render_text(bench.callback.report)
    assert device.is_closed


@pytest.mark.slow
def test_flops_rate_uses_device_time_if_cpu_runs_ahead(device_bench):
    """The device takes three times as long as the host, which never waits for it."""
    device_bench.callback = MeasuredCallback(device_bench.truth, flops=True, skip_first=2)
    device_bench.fit(PlainModel(device_bench.truth), device_bench.data(24), limit_train_batches=24)
    report, steps = device_bench.callback.report, device_bench.record.steps.clean()
    device_ns = steps.device_phases_ns.sum() / len(steps)
    assert device_ns > 2 * steps.duration_ns.mean()
    assert [one for one in report.notes if "ran ahead" in one and "FLOP/s and MFU use GPU time" in one]
    (flops,) = (table for table in report.tables if table.id == "flops")
    keys = [column.key for column in flops.columns]
    (model,) = (dict(zip(keys, row, strict=True)) for row in flops.rows if row[0] == "Model")
    assert model["flops_per_s"] == pytest.approx(model["flops"] / (device_ns / 1e9))


@pytest.mark.slow
def test_device_times_sum_to_step_with_every_hook(device_bench):
    """Hooks belong to the phase marked last; no time is lost between marks."""
    bench = device_bench
    bench.fit(
        HookedModel(bench.truth),
        bench.data(5),
        before=(CostlyCallback(bench.truth),),
        after=(CostlyCallback(bench.truth),),
        accumulate_grad_batches=2,
        max_epochs=2,
    )
    bench.check(num_steps=10)
    sums = bench.record.steps.device_phases_ns.sum(axis=1).tolist()
    assert sums == [sum(step.values()) for step in bench.truth.device_steps]


@pytest.mark.slow
def test_skipped_batches_add_no_device_time(device_bench):
    bench = device_bench

    class Skips(PlainModel):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    bench.fit(Skips(bench.truth), bench.data(), max_epochs=3, after=(EndsEpoch(bench.truth),))
    bench.check(num_steps=3)
    assert differences(named_phases(bench.record.steps.device_phases_ns), device_steps_of(bench.truth)) == []


@pytest.mark.slow
def test_device_times_if_training_step_fetches_batches(device_bench):
    bench = device_bench

    class FetchesItself(PlainModel):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    bench.fit(FetchesItself(bench.truth), bench.data(), max_epochs=2, after=(EndsEpoch(bench.truth),))
    bench.check(num_steps=6)
    assert differences(named_phases(bench.record.steps.device_phases_ns), device_steps_of(bench.truth)) == []


@pytest.mark.slow
def test_report_notes_steps_without_device_time(device_bench, monkeypatch):
    bench, waits = device_bench, []
    bench.truth.device.reached_ns = -1
    monkeypatch.setattr(DevicePhases.finish, "__defaults__", (2.0, waits.append))
    bench.fit(PlainModel(bench.truth), bench.data(MAX_PENDING + 3))
    assert (bench.record.steps.device_phases_ns == NOT_MEASURED).all()
    assert any(f"{MAX_PENDING + 3} steps have no device time" in note for note in bench.record.notes)
    assert sum(waits) == pytest.approx(2.0)
    assert "Device total" not in render_text(bench.callback.report)


# On a device

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_cuda
def test_events_time_work_on_cuda_device():
    clock = TorchEventClock(torch.device("cuda"))
    matrix = torch.rand(4_096, 4_096, device="cuda")
    torch.cuda.synchronize()
    begin = clock.mark()
    for _ in range(50):
        matrix @ matrix
    end = clock.mark()
    assert clock.elapsed_ns(begin, end) is None or clock.is_reached(end)
    torch.cuda.synchronize()
    assert clock.is_reached(end)
    elapsed = clock.elapsed_ns(begin, end)
    assert elapsed is not None
    assert elapsed > 0
    clock.release(begin)
    assert clock.mark() is begin


@pytest.mark.slow
@gpu
@needs_cuda
def test_fit_on_cuda_device():
    class OnDevice(PlainModel):
        def loss(self, batch, backward_phase="backward"):
            matrix = torch.rand(2_048, 2_048, device=self.device)
            return (matrix @ matrix).sum() * 0 + self.layer(batch).sum()

    callback = ModelProfCallback(report={"terminal": False, "files": False})
    model = OnDevice(Truth(FakeClock()))
    data = torch.utils.data.DataLoader(torch.ones(12, 2))
    make_trainer(callbacks=[callback], accelerator="gpu").fit(model, data)
    assert callback.run is not None
    steps = callback.run.ranks[0].steps
    known = (steps.device_phases_ns != NOT_MEASURED).all(axis=1)
    assert known[:-1].all()  # the last step's marks may be pending
    assert (steps.device_phases_ns[known][:, FORWARD] > 0).all()
    assert "Device total" in render_text(callback.report)


# Cost of marking


class CostlyMarks(FakeDeviceClock):
    """A device whose driver takes host time for each mark, and half as much for each query."""

    def __init__(self, host: FakeHost, mark_ns: int) -> None:
        super().__init__()
        self.host, self.mark_ns = host, mark_ns

    def mark(self) -> Mark:
        self.host.now_ns += self.mark_ns
        return super().mark()

    def elapsed_ns(self, begin: Mark, end: Mark) -> int | None:
        self.host.now_ns += self.mark_ns // 2
        return super().elapsed_ns(begin, end)


class FakeHost:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def costly_steps(step_ns: int, mark_ns: int, count: int) -> tuple[DevicePhases, list[int], CostlyMarks, int]:
    """Run four-phase steps; return the phases, measured step numbers, the clock and the final host time."""
    host, measured = FakeHost(), []
    clock = CostlyMarks(host, mark_ns)
    phases = DevicePhases(clock, lambda step, phases_ns: measured.append(step), host)
    phases.mark(DATALOADER)
    for number in range(count):
        for phase in (FORWARD, BACKWARD, FORWARD, DATALOADER):
            host.now_ns += step_ns // 4
            clock.advance(step_ns // 4)
            phases.mark(phase)
        phases.close_step(number)
    phases.collect()
    return phases, measured, clock, host.now_ns


def test_marking_pauses_if_it_exceeds_its_share():
    phases, measured, clock, loop_ns = costly_steps(step_ns=2_400_000, mark_ns=60_000, count=20_000)
    one_step_ns = 6 * 60_000
    assert phases.cost_ns <= FREE_NS + MAX_SHARE * loop_ns + one_step_ns
    assert phases.cost_ns >= 0.5 * MAX_SHARE * loop_ns  # it pauses no longer than needed
    assert measured[:100] == list(range(100))  # the first steps are all measured
    assert len(measured) + phases.num_unmarked == 20_000
    # A batch with an optimizer step, every fourth, is measured as often as any other.
    counts = [sum(number % 4 == rest for number in measured) for rest in range(4)]
    assert min(counts) > 0.7 * max(counts)
    assert max(mark.times_released for mark in clock.marks) == 1
    assert sum(mark.times_released == 0 for mark in clock.marks) <= 1


def test_marking_long_steps_never_pauses():
    phases, measured, _, _ = costly_steps(step_ns=50_000_000, mark_ns=60_000, count=500)
    assert phases.num_unmarked == 0
    assert len(measured) == 500


def test_finish_reads_steps_still_on_device(steps):
    steps.clock.reached_ns = 0
    steps.run(17)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            steps.clock.reached_ns = None

    steps.phases.finish(sleep=sleep)
    assert steps.read == steps.expected(*range(17))
    assert len(naps) == 5


def test_finish_gives_up_on_hanging_device(steps):
    steps.clock.reached_ns = 0
    steps.run(3)
    naps: list[float] = []
    steps.phases.finish(sleep=naps.append)
    assert steps.read == []
    assert 1.9 <= sum(naps) <= 2.1
