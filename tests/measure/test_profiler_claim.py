"""A process runs one torch profiler at a time, across threads, nested fits and program exit."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_modelprof.measure.window import capture
from lightning_modelprof.measure.window import other_profilers as profiler_claim
from lightning_modelprof.measure.window.other_profilers import ENDING, ProfilerClaim
from lightning_modelprof.run.records import WindowStatus
from tests.support.fits import (
    Net,
    fit_quietly,
    is_profiling,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    run_script,
    steps_of,
    windows_of,
)

pytestmark = pytest.mark.slow


class Holder:
    """An object that records."""


def test_second_holder_is_refused_until_first_releases():
    claim, first, second = ProfilerClaim(), Holder(), Holder()
    assert claim.take(first) == claim.take(first) == ""
    assert (
        claim.take(second)
        == "another fit in this process has a profiler window open, and torch allows only one profiler"
    )
    claim.give_back(second)
    assert claim.take(second), "it was not the second's to give back"
    claim.give_back(first)
    assert claim.take(second) == ""


def test_deleted_holder_loses_claim():
    claim, first = ProfilerClaim(), Holder()
    assert claim.take(first) == ""
    del first
    gc.collect()
    assert claim.take(Holder()) == ""


def test_foreign_profiler_in_another_thread_is_seen():
    begun, ended = threading.Event(), threading.Event()

    def record():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            begun.set()
            ended.wait(60)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        assert begun.wait(60)
        assert not is_profiling(), "torch says so of this thread alone"
        assert (
            ProfilerClaim().take(Holder())
            == "another torch profiler was recording when this window should have opened"
        )
    finally:
        ended.set()
        thread.join(60)
    assert ProfilerClaim().take(Holder()) == ""


def test_exit_waits_only_for_daemon_thread(monkeypatch):
    monkeypatch.setattr(profiler_claim, "AT_EXIT_S", 3600.0)
    monkeypatch.setattr(profiler_claim, "_SAVING_S", 0.05)
    claim, holder, told = ProfilerClaim(), Holder(), []
    claim.take(holder)
    claim.end()  # this thread isn't a daemon: it does not wait for itself
    claim = ProfilerClaim()

    def record():
        told.append(claim.take(holder))
        taken.set()
        while not claim.is_ending:
            threading.Event().wait(0.001)
        told.append(claim.take(Holder()))
        claim.give_back(holder)

    taken = threading.Event()
    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    assert taken.wait(60)
    claim.end()
    thread.join(60)
    assert told == ["", ENDING]


def test_daemon_thread_rests_after_saving(monkeypatch):
    """Otherwise it may run C++ while the interpreter exits, which aborted one such program in ten."""
    monkeypatch.setattr(profiler_claim, "_SAVING_S", 3600.0)
    claim, holder, done = ProfilerClaim(), Holder(), []

    def record():
        claim.rest()  # the program isn't ending yet, so this returns
        claim.take(holder)
        taken.set()
        while not claim.is_ending:
            threading.Event().wait(0.001)
        claim.give_back(holder)
        done.append("saved")
        claim.rest()
        done.append("rested")

    taken = threading.Event()
    threading.Thread(target=record, daemon=True).start()
    assert taken.wait(60)
    claim.end()
    assert done == ["saved"]
    claim.rest()  # not a daemon thread, so this returns


def test_endless_thread_delays_exit_for_bounded_time(monkeypatch):
    monkeypatch.setattr(profiler_claim, "AT_EXIT_S", 0.05)
    claim, holder = ProfilerClaim(), Holder()
    thread = threading.Thread(target=claim.take, args=(holder,), daemon=True)
    thread.start()
    thread.join(60)
    claim.end()
    assert claim.is_ending


class Inside(Callback):
    """Trains another model in the middle of a window."""

    def __init__(self, folder, callback):
        self.folder, self.callback = folder, callback

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.callback.at:
            fit_quietly(make_trainer(self.folder, self.callback), Net(), loader(16))


@pytest.mark.parametrize("at", [2, 4], ids=["while it warms up", "while it records"])
def test_fit_inside_window_of_another_fit(tmp_path, at):
    outer = make_callback(tmp_path, wait=1, warmup=3, active=3, repeat=1)  # warms up in 1, records 4 to 6
    inner = make_callback(tmp_path / "inner", wait=0, warmup=1, active=2, repeat=1)
    inner.at = at
    trainer = make_trainer(tmp_path, outer, Inside(tmp_path / "inner", inner))
    with our_warnings() as messages:
        fit_quietly(trainer, Net(), loader(32))
    assert windows_of(outer)[0].status is WindowStatus.COMPLETE
    assert windows_of(outer)[0].recorded_steps == (4, 5, 6)
    assert windows_of(inner)[0].status is WindowStatus.REFUSED
    assert "another fit in this process" in windows_of(inner)[0].note
    assert [len(steps_of(one)) for one in (outer, inner)] == [16, 8]
    assert [message for message in messages if "was not recorded" not in message] == []
    again = make_callback(tmp_path / "again", steps=(1, 3))
    fit_quietly(make_trainer(tmp_path, again), Net(), loader(16))
    assert windows_of(again)[0].status is WindowStatus.COMPLETE


@pytest.mark.parametrize("name", ["_start", "_close", "_export"])
def test_claim_is_released_however_window_ends(tmp_path, monkeypatch, name):
    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(capture.Capture, name, broken)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit_quietly(make_trainer(tmp_path, make_callback(tmp_path, steps=(1, 3))), Net(), loader(16))
    assert not is_profiling()
    again = make_callback(tmp_path / "again", steps=(1, 3))
    fit_quietly(make_trainer(tmp_path, again), Net(), loader(16))
    assert windows_of(again)[0].status is WindowStatus.COMPLETE


SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch
from tests.support.fits import *

torch.set_num_threads(1)
folder, found, meet = Path.cwd(), {}, threading.Barrier(2)

def fit(name, at_batch, **window):
    callback = make_callback(folder / name, **window)
    fit_quietly(make_trainer(folder / name, callback), Net(at_batch), loader(40))
    found[name] = sorted(window.status.value for window in windows_of(callback))

def two():
    # Both are to record at the third batch; the second one gets a window of its own later.
    turns = {"a": {"wait": 0, "warmup": 1, "active": 4, "repeat": 1},
             "b": {"wait": 2, "warmup": 1, "active": 2, "repeat": 2}}
    def at_batch(batch_idx):
        # In step, so that a is first, the windows overlap, and the second one of b does not.
        if batch_idx in (1, 3, 6):
            meet.wait(60)
    threads = [threading.Thread(target=fit, args=(name, at_batch), kwargs=turns[name]) for name in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(found)

def daemon():
    recording = threading.Event()
    def at_batch(batch_idx):
        if batch_idx == 4:
            recording.set()
        time.sleep(0.05)
    window = {"wait": 0, "warmup": 1, "active": 15, "repeat": 1}
    threading.Thread(target=fit, args=("a", at_batch), kwargs=window, daemon=True).start()
    assert recording.wait(60)
    print("the program ends")

globals()[sys.argv[1]]()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="exit statuses of POSIX")
def test_overlapping_windows_of_two_threads(tmp_path):
    """This used to be a segmentation fault."""
    result = run_script(SCRIPT, "two", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "'a': ['complete']" in result.stdout
    assert "'b': ['complete', 'refused']" in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="exit statuses of POSIX")
def test_program_exits_while_daemon_thread_records(tmp_path):
    """This used to be a segmentation fault or a hang."""
    result = run_script(SCRIPT, "daemon", cwd=tmp_path, timeout=90)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the program ends" in result.stdout
    assert "internal error" not in result.stderr
