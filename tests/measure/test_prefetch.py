"""Steps whose batch was prefetched while the profiler worked are counted, tagged and left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_modelprof.engine import plan as save_timer
from lightning_modelprof.engine.live_figures import LiveFigures
from lightning_modelprof.engine.loop import num_prefetched
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag
from tests.support.bench import FakeClock
from tests.support.fits import (
    Net,
    Numbers,
    fit_quietly,
    loader,
    loop_of_trainer,
    make_callback,
    make_trainer,
    report_of,
    run_fit,
    steps_of,
)

REASON = "prefetched while the profiler worked"


# Number of prefetched batches


def trainer_with(*loaders):
    return SimpleNamespace(
        fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=list(loaders)))
    )


def host_with(*loaders):
    return loop_of_trainer(trainer_with(*loaders))


class Raising:
    """A loader that raises when read."""

    @property
    def num_workers(self):
        raise RuntimeError


def test_prefetched_batches_of_torch_dataloader():
    assert num_prefetched(host_with(DataLoader(Numbers()))) == 0
    assert num_prefetched(host_with(DataLoader(Numbers(), num_workers=3))) == 6  # torch's default: 2 each
    assert num_prefetched(host_with(DataLoader(Numbers(), num_workers=2, prefetch_factor=5))) == 10


@pytest.mark.parametrize(
    "odd",
    [
        [1, 2],
        object(),
        Raising(),
        SimpleNamespace(num_workers=2),
        SimpleNamespace(num_workers=2, prefetch_factor=None),
        SimpleNamespace(num_workers="2", prefetch_factor=2),
        SimpleNamespace(num_workers=-2, prefetch_factor=-2),
    ],
)
def test_other_loader_prefetches_nothing(odd):
    assert num_prefetched(host_with(odd)) == 0
    assert num_prefetched(host_with(odd, DataLoader(Numbers(), num_workers=1), odd)) == 2


@pytest.mark.parametrize(
    "trainer",
    [
        SimpleNamespace(),
        SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=None)),
        trainer_with(),
    ],
)
def test_trainer_without_loader_prefetches_nothing(trainer):
    assert num_prefetched(loop_of_trainer(trainer)) == 0


# Tags set by the recorder


def add_steps(recorder, count):
    for _ in range(count):
        recorder.add(([1] * len(PHASES), 0, NOT_MEASURED))


def draining(steps):
    return steps.step[(steps.tags & StepTag.DRAINING) != 0].tolist()


@pytest.mark.parametrize("cut_every", [1, 2, 3, 100])
def test_draining_steps_are_tagged_however_steps_are_cut(cut_every):
    recorder = Recorder()
    for step in range(30):
        if step in (4, 6, 20):  # the second comes while the first still drains
            recorder.drain(step, 3)
        if step == 15:
            recorder.drain(step, 0)
        if step % cut_every == 0:
            recorder.cut()
        add_steps(recorder, 1)
    assert draining(recorder.steps()) == [5, 6, 7, 8, 9, 21, 22, 23]
    assert recorder._draining == []  # nothing piles up


def test_live_figures_leave_out_draining_steps():
    recorder = Recorder()
    live = LiveFigures(recorder, "samples")
    add_steps(recorder, 4)
    recorder.drain(4, 3)
    live.flush()
    assert live.newest.num_steps == 4
    add_steps(recorder, 3)
    live.flush()
    assert live.newest.num_steps == 1  # step 4, which the ledger has to tag
    add_steps(recorder, 5)
    live.flush()
    assert live.newest.num_steps == 4  # 7 drains


# In real fits


@pytest.mark.slow
def test_window_leaves_out_one_step_per_prefetched_batch(tmp_path):
    data = loader(24, num_workers=2, prefetch_factor=2)
    callback = run_fit(tmp_path, data=data, steps=(3, 5))
    steps = steps_of(callback)
    assert len(steps) == 12
    assert steps.step[(steps.tags & StepTag.PROFILER_STOP) != 0].tolist() == [5]
    assert draining(steps) == [6, 7, 8, 9]
    report = report_of(tmp_path)
    assert {"reason": REASON, "num_steps": 4} in report["summary"]["run"]["excluded_steps"]
    assert report["summary"]["benchmark"]["num_steps"] == 3  # 1, 10 and 11; 2 is warm-up


@pytest.mark.slow
def test_largest_of_several_loaders_counts(tmp_path):
    class OfTwo(Net):
        def loss(self, batch):
            return super().loss(batch["b"])

    data = {"a": loader(24), "b": loader(24, num_workers=1, prefetch_factor=3)}
    assert draining(steps_of(run_fit(tmp_path, module=OfTwo(), data=data, steps=(3, 5)))) == [6, 7, 8]


@pytest.mark.slow
def test_no_step_is_left_out_without_workers(tmp_path):
    callback = run_fit(tmp_path, data=loader(24), steps=(3, 5))
    assert draining(steps_of(callback)) == []
    assert REASON not in str(report_of(tmp_path)["summary"]["run"]["excluded_steps"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_ns", "expected"),
    [(50, []), (250, [7, 8]), (10_000, [7, 8, 9, 10])],
    ids=["shorter than a step", "of two steps", "longer than the queue"],
)
def test_save_leaves_out_no_more_time_than_it_took(tmp_path, monkeypatch, save_ns, expected):
    """Otherwise slow steps with a long queue would never be clean again: a save comes every ten seconds."""
    clock = FakeClock()
    monkeypatch.setattr(save_timer, "_MIN_INTERVAL_NS", 550)
    saves = []

    def save_run(self, run):
        saves.append(len(run.ranks[0].steps))
        if len(saves) == 2:
            clock.advance(save_ns)

    monkeypatch.setattr(Outputs, "save_run", save_run)
    callback = make_callback(tmp_path, active=0, log_every_n_steps=100)
    callback._clock = clock
    module = Net(lambda batch_idx: clock.advance(100))
    fit_quietly(make_trainer(tmp_path, callback), module, loader(32, num_workers=2))
    steps = steps_of(callback)
    assert saves[1] == 6
    assert steps.step[(steps.tags & StepTag.PROFILER_STOP) != 0].tolist()[0] == 6
    assert draining(steps) == expected
