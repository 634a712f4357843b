"""Tests how much is measured by default, depending on the loop's length."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.engine import budget, trace_work
from lightning_modelprof.engine.budget import NS_PER_OPERATOR, WINDOW_NS, Budget
from lightning_modelprof.engine.plan import InspectedSteps
from lightning_modelprof.measure.window import capture, torch_profiler
from lightning_modelprof.measure.window.schedule import Schedule, WindowAction
from lightning_modelprof.report.build import build_report
from lightning_modelprof.run.records import WindowStatus
from lightning_modelprof.run.steps import PROFILER, StepTag
from tests.support.bench import make_trainer
from tests.support.fits import grouped

pytestmark = [pytest.mark.slow, pytest.mark.short]

S = 1_000_000_000


@given(st.integers(0, 30), st.integers(0, 3), st.integers(1, 4), st.integers(0, 50), st.integers(1, 4))
def test_postponed_steps_are_outside_windows(skip, wait, active, by, accumulate):
    """They move by at least the given number, keep their place in accumulated batches, and avoid windows."""
    schedule = Schedule(skip_first=skip, wait=wait, warmup=1, active=active, repeat=2)
    later = InspectedSteps(3, (4, 5, 6))
    later.postpone(by, schedule=schedule, accumulate=accumulate)
    moved = later.counted - 3
    assert moved >= by
    assert moved % accumulate == 0
    assert later.next_step == later.counted
    assert later.timed == tuple(step + moved for step in (4, 5, 6))
    assert all(schedule.action(step) is WindowAction.WAIT for step in (later.counted, *later.timed))
    free = InspectedSteps(3, (4, 5, 6))
    free.postpone(by, schedule=None, accumulate=accumulate)
    assert 0 <= free.counted - 3 - by < accumulate


def test_only_remaining_steps_are_postponed():
    steps = InspectedSteps(3, (4, 5, 6))
    assert steps.begin_step(3)
    assert steps.begin_step(4)
    assert not steps.begin_step(4)
    steps.postpone(10, schedule=None, accumulate=4)
    assert (steps.counted, steps.timed, steps.next_step) == (3, (17, 18), 17)
    steps.leave_rest()
    assert steps.is_done


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch):
        return self.layer(torch.ones(2, 2)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder, num_steps, clock=None, model=None, **arguments):
    callback = ModelProfCallback(
        **grouped(
            {"dirpath": folder / "run", "terminal": False, "tensorboard": False, "sampling": False}
            | arguments
        )
    )
    callback._clock = clock or callback._clock
    trainer = make_trainer(
        callbacks=[callback], default_root_dir=folder, max_epochs=1, max_steps=-1, accumulate_grad_batches=1
    )
    model = model or Small()
    trainer.fit(model, [0] * num_steps)
    return callback, model


def test_short_fit_has_no_window_and_says_how_to_get_one(tmp_path):
    callback, _ = fit(tmp_path, 60)
    [window] = callback.run.ranks[0].windows
    assert window.status is WindowStatus.NOT_REACHED
    assert window.recorded_steps == ()
    assert window.note == (
        "a profiler window would have taken more than 5% of training; set active=10 to do it anyway"
    )
    assert not (callback.run.ranks[0].steps.tags & int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)).any()
    assert callback.run.ranks[0].model_cost.count is not None, "counting so small a step fits"


def test_explicit_requests_are_always_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_NS", 0)
    callback, _ = fit(tmp_path / "asked", 60, active=3, flops=True)
    [window] = callback.run.ranks[0].windows
    assert (window.status, len(window.recorded_steps)) == (WindowStatus.COMPLETE, 3)
    assert callback.run.ranks[0].model_cost.count is not None
    callback, _ = fit(tmp_path / "stacks", 60, with_stack=True)
    assert callback.run.ranks[0].windows[0].status is WindowStatus.COMPLETE
    callback, _ = fit(tmp_path / "alone", 60, Ticks())
    cost = callback.run.ranks[0].model_cost
    assert (cost.count, cost.times) == (None, None)
    assert cost.count_note == (
        "inspecting a step would have taken more than 5% of training; set flops=True to do it anyway"
    )
    assert not (callback.run.ranks[0].steps.tags & int(StepTag.INSPECTED)).any()


class Ticks:
    """A clock that advances by 50 µs whenever it is read."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 50_000
        return self.now


def test_window_opens_once_loop_has_run_long_enough(tmp_path, monkeypatch):
    """Past overhead and the window's expected cost are just within 5% of the elapsed time."""
    monkeypatch.setattr(budget, "LEAST_NS", 0)
    monkeypatch.setattr("lightning_modelprof.engine.budget.WINDOW_NS", 10_000_000)
    monkeypatch.setattr("lightning_modelprof.engine.budget.COUNT_NS", 2_000_000)
    callback, _ = fit(tmp_path, 1_500, Ticks())
    record = callback.run.ranks[0]
    [window] = record.windows
    assert (window.status, len(window.recorded_steps)) == (WindowStatus.COMPLETE, 10)
    assert window.recorded_steps == tuple(range(window.first_step, window.last_step + 1))
    steps = record.steps
    inspected = steps.step[(steps.tags & int(StepTag.INSPECTED)) != 0]
    assert 12 < inspected[0] < window.first_step
    before_ns = {
        step: int(steps.duration_ns[steps.step < step].sum()) for step in (inspected[0], window.first_step)
    }
    step_ns = before_ns[inspected[0]] / inspected[0]
    ours_ns = int(steps.phases_ns[steps.step < inspected[0], PROFILER].sum())
    # Counting is expected to take 2 ms, plus as much for the model and its layer.
    assert 0.05 * before_ns[inspected[0]] >= 4_000_000
    assert 0.05 * (before_ns[inspected[0]] * 7 / 8 - 20 * step_ns) < 4_000_000 + ours_ns
    assert 0.05 * before_ns[window.first_step] >= 10_000_000


def test_many_small_operators_delay_window(tmp_path, monkeypatch):
    """Operators without FLOPs also become events in a window, which take time to write."""
    monkeypatch.setattr(budget, "LEAST_NS", 0)
    num_additions = 400

    class Slow(Small):
        def training_step(self, batch):
            clock.now += 60_000_000
            return super().training_step(batch)

    class Chatty(Slow):
        def training_step(self, batch):
            loss = super().training_step(batch)
            for _ in range(num_additions):
                loss = loss + 0
            return loss

    waited_ns = {}
    for model in (Slow(), Chatty()):
        clock = Ticks()
        callback, _ = fit(tmp_path / type(model).__name__, 170, clock, model=model)
        [record] = callback.run.ranks
        [window] = record.windows
        assert len(window.recorded_steps) == 10
        before = record.steps.step < window.first_step
        waited_ns[type(model)] = int(record.steps.duration_ns[before].sum())
    assert 0.05 * waited_ns[Slow] >= WINDOW_NS
    assert 0.05 * waited_ns[Chatty] >= WINDOW_NS + 10 * num_additions * NS_PER_OPERATOR
    assert waited_ns[Slow] < waited_ns[Chatty] / 2


@pytest.mark.parametrize(("step_ns", "reports"), [(1_000_000, 1), (1_000_000_000, 2)])
def test_short_loop_builds_report_only_at_end(tmp_path, monkeypatch, step_ns, reports):
    """A loop that has run for ten seconds also gets one when a window closes."""
    clock, built = Ticks(), []

    class Slow(Small):
        def training_step(self, batch):
            clock.now += step_ns
            return super().training_step(batch)

    monkeypatch.setattr(trace_work, "build_report", lambda *args: built.append(1) or build_report(*args))
    callback, _ = fit(tmp_path, 40, clock, model=Slow(), active=2, flops=False)
    assert callback.run.ranks[0].windows[0].recorded_steps
    assert len(built) == reports


def test_window_counts_against_budget_unless_requested(tmp_path, monkeypatch):
    """Closing a window takes a second here. Later figures wait until that is 5% of the loop's time."""
    clock, budgets = Ticks(), []

    def stop(profiler, ranges):
        torch_profiler.stop(profiler, ranges)
        clock.now += S

    made = Budget.__init__
    monkeypatch.setattr(capture, "stop", stop)
    monkeypatch.setattr(
        Budget, "__init__", lambda self, *args, **named: budgets.append(self) or made(self, *args, **named)
    )
    monkeypatch.setattr(budget, "LEAST_NS", 10**18)
    callback, _ = fit(tmp_path / "asked", 300, clock, active=2, skip_first=5, wait=50, repeat=3, flops=False)
    assert [len(one.recorded_steps) for one in callback.run.ranks[0].windows] == [2, 2, 2]
    callback, _ = fit(tmp_path / "by itself", 60, clock, flops=False)
    assert len(callback.run.ranks[0].windows[0].recorded_steps) == 10
    asked, by_itself = (one._spent_ns for one in budgets)
    assert asked < S / 10
    assert S < by_itself < 1.2 * S


@pytest.mark.parametrize("num_steps", [60, 400])
def test_weights_are_unchanged(tmp_path, num_steps):
    torch.manual_seed(0)
    _, with_ours = fit(tmp_path, num_steps)
    torch.manual_seed(0)
    bare = Small()
    make_trainer(default_root_dir=tmp_path, max_epochs=1, max_steps=-1).fit(bare, [0] * num_steps)
    assert all(map(torch.equal, with_ours.parameters(), bare.parameters()))


class SlowData(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(2)


def test_twelve_steps_get_verdict(tmp_path):
    """A short fit with default settings, which mostly waits for data."""
    callback = ModelProfCallback(dirpath=tmp_path / "run", report={"terminal": False, "tensorboard": False})
    trainer = make_trainer(callbacks=[callback], default_root_dir=tmp_path, max_epochs=1, max_steps=-1)
    trainer.fit(Small(), torch.utils.data.DataLoader(SlowData(), batch_size=1))
    assert callback.report.verdict.kind == "input_bound"
    steps = callback.run.ranks[0].steps
    assert len(steps) == 12
    assert (steps.tags & int(StepTag.SKIP_FIRST) != 0).sum() == 2
    assert (steps.tags & int(StepTag.INSPECTED) != 0).sum() <= 3
    assert callback.run.info.config["skip_first"] == 10, "as it was asked for"
