"""Where ranks meet, and what becomes of a training in which one of them does not come."""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightning_modelprof.fit import meeting as meeting_module
from lightning_modelprof.fit.meeting import Meeting
from tests.fits import run_script


@pytest.fixture
def ranks(monkeypatch):
    """Makes the meetings of three ranks, by a store that they share; each is a thread."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(meeting_module, "_store", lambda: store)
    monkeypatch.setattr(meeting_module, "PATIENCE", timedelta(seconds=0.2))
    numbers = iter([7, 7, 7])
    monkeypatch.setattr(meeting_module, "_NUMBERS", numbers)
    return [Meeting(SimpleNamespace(world_size=3, is_global_zero=rank == 0)) for rank in range(3)]


def join(*meetings):
    """What each is told."""
    told = {}
    threads = [
        threading.Thread(target=lambda one=one: told.setdefault(one, one.join("the folder")))
        for one in meetings
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [told[one] for one in meetings]


def test_all_are_told_what_the_first_says(ranks):
    assert join(*ranks) == ["the folder"] * 3


def test_a_rank_that_does_not_come_is_not_waited_for_long(ranks):
    assert join(ranks[0], ranks[2]) == [None, None]
    assert join(ranks[1]) == [None], "what was decided without it holds for it as well"


def test_a_rank_that_calls_off_is_not_waited_for_at_all(ranks, monkeypatch):
    monkeypatch.setattr(meeting_module, "PATIENCE", timedelta(hours=1))
    ranks[1].cancel()
    assert join(ranks[0], ranks[2]) == [None, None]


def test_who_was_there_cannot_call_it_off(ranks):
    assert join(*ranks) == ["the folder"] * 3
    ranks[1].cancel()
    assert ranks[0].join("the folder") == "the folder"


def test_nothing_to_say_is_said_too(ranks):
    told = []
    threads = [threading.Thread(target=lambda one=one: told.append(one.join(""))) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert told == ["", "", ""]


def test_one_rank_meets_nobody(monkeypatch):
    monkeypatch.setattr(meeting_module, "_store", lambda: pytest.fail("there is nobody to meet"))
    alone = Meeting(SimpleNamespace(world_size=1, is_global_zero=True))
    assert alone.join("here") == "here"
    alone.cancel()


def test_without_a_store_the_strategy_is_asked(monkeypatch):
    monkeypatch.setattr(meeting_module, "_store", lambda: None)
    strategy = SimpleNamespace(broadcast=lambda message: f"{message}, said the first")
    trainer = SimpleNamespace(world_size=2, is_global_zero=False, strategy=strategy)
    assert Meeting(trainer).join("mine") == "mine, said the first"


def test_a_first_rank_that_has_gone_is_no_error_for_who_calls_off(monkeypatch):
    monkeypatch.setattr(meeting_module, "_store", lambda: SimpleNamespace(compare_set=broken))
    Meeting(SimpleNamespace(world_size=2, is_global_zero=False)).cancel()


def broken(*args):
    raise torch.distributed.DistNetworkError("the connection was closed")


# Real trainings: each hung until its process group's time-out while ranks met in a collective

JOB = """
import json, sys
from datetime import timedelta
from pathlib import Path
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import DDPStrategy
from lightning_modelprof import ModelProfCallback
from lightning_modelprof.fit import meeting
from lightning_modelprof.measure.capture import Capture
from lightning_modelprof.measure.metrics import BenchmarkMetric
from tests.fits import *

meeting.PATIENCE = timedelta(seconds=2)

class Uneven(LightningDataModule):
    # Rank 1 has no batch, so that Lightning skips its loop.
    def __init__(self):
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def val_dataloader(self):
        return loader(0 if self.trainer.global_rank else 16)

def trainer_of(callback, *others, **options):
    strategy = DDPStrategy(process_group_backend="gloo", start_method="fork", timeout=timedelta(seconds=60))
    callbacks = [callback, Note(callback), *others]
    return make_trainer(".", *callbacks, strategy=strategy, devices=2, enable_progress_bar=False, **options)

class OnOneRank(ModelProfCallback):
    # As good as not there on the other one.
    rank = 0

    def setup(self, trainer, *args, **kwargs):
        if trainer.global_rank == self.rank:
            super().setup(trainer, *args, **kwargs)

class Note(Callback):
    # Forked ranks end with the loop.
    def __init__(self, callback):
        self.callback = callback

    def teardown(self, trainer, module, stage):
        status = None if self.callback.run is None else self.callback.run.info.status
        weights = float(sum(p.double().sum() for p in module.parameters()))
        found = [trainer.global_step, status, weights]
        Path(f"{trainer.global_rank}.json").write_text(json.dumps(found))

class Sums(Callback):
    # The user's own collective after the loop, which took one of ours for its partner.
    def teardown(self, trainer, module, stage):
        figures = torch.ones(1)
        torch.distributed.all_reduce(figures)
        assert float(figures) == 2

def fit(callback):
    trainer_of(callback).fit(Net(), loader(64))

def fails_at_step_4(capture, step, begin_step=Capture.begin_step):
    if step == 4 and torch.distributed.get_rank() == 1:
        raise RuntimeError("injected")
    return begin_step(capture, step)

def fails_to_move(metric, device, move=BenchmarkMetric.to):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("injected")
    return move(metric, device)

if __name__ == "__main__":
    torch.set_num_threads(1)
    case = sys.argv[1]
    if case in ("0", "1"):
        callback = OnOneRank(dirpath="modelprof", active=0, flops=False, sampling=False, terminal=False)
        callback.rank = int(case)
        fit(callback)
    elif case == "one stops early":
        Capture.begin_step = fails_at_step_4
        fit(make_callback(Path(), stop_after_profile=True, skip_first=2, wait=1, warmup=0, active=2))
    elif case == "the sum fails":
        BenchmarkMetric.to = fails_to_move
        fit(make_callback(Path(), active=0))
    else:
        trainer = trainer_of(make_callback(Path(), active=0), Sums(), use_distributed_sampler=False)
        trainer.validate(Net(), datamodule=Uneven(), verbose=False)
"""


def run_job(folder, case):
    """Of each rank: the steps of the optimizer, the status of the run, the sum of the weights; and stderr."""
    result = run_script(JOB, case, cwd=folder, timeout=100)
    assert result.returncode == 0, result.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], result.stderr


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux"
)


@on_linux
@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_on_one_rank_alone(tmp_path, rank):
    found, said = run_job(tmp_path, str(rank))
    assert found[rank][:2] == [16, "finished"]
    assert found[1 - rank][:2] == [16, None]
    assert found[0][2] == found[1][2]
    assert said.count("not all ranks have begun training with this callback") == 1


@on_linux
def test_a_rank_without_batches(tmp_path):
    found, said = run_job(tmp_path, "uneven")
    assert [status for _, status, _ in found] == ["finished", None]
    assert said.count("not all ranks have begun the validation loop with this callback") == 1


@on_linux
def test_windows_end_training_on_a_rank_that_has_stepped_aside(tmp_path):
    found, said = run_job(tmp_path, "one stops early")
    assert [steps for steps, *_ in found] == [
        6,
        6,
    ]  # the last window is steps 3 and 4, which closes in step 5
    assert [status for _, status, _ in found] == ["finished", "aborted"]
    assert found[0][2] == found[1][2]
    assert said.count("an internal error stopped the measurement") == 1


@on_linux
def test_what_fails_on_one_rank_before_figures_are_summed(tmp_path):
    found, said = run_job(tmp_path, "the sum fails")
    assert [one[:2] for one in found] == [[16, "finished"], [16, "aborted"]]
    assert said.count("an internal error stopped the measurement") == 1
