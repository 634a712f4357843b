"""Tests our threads: if the system can't start one, only its work is lost and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from lightning_modelprof import threads
from lightning_modelprof.engine import helper
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.engine.trace_work import Setting
from lightning_modelprof.measure.sampling.sampler import Sampler
from lightning_modelprof.measure.window.other_profilers import watch
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.show.progress import show_waiting
from lightning_modelprof.threads import has_ended, start_thread
from tests.measure.test_cpu_usage import metadata_of
from tests.support.fits import our_warnings, run_fit, windows_of


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE_S", 0.05)


@pytest.fixture
def dying(monkeypatch, impatient):
    """Our threads die before they report that they run, as from a MemoryError with ``ulimit -v``."""
    bootstrap, died = threading.Thread._bootstrap, []

    def die(self):
        if not self.name.startswith("modelprof"):
            bootstrap(self)
        died.append(self.name)

    monkeypatch.setattr(threading.Thread, "_bootstrap", die)
    return died


def our_threads():
    return [one for one in threading.enumerate() if one.name.startswith("modelprof")]


def test_work_runs_in_thread_with_given_name():
    seen = []
    assert has_ended(start_thread(lambda: seen.append(threading.current_thread()), "modelprof-test"))
    [thread] = seen
    assert (thread.name, thread.daemon) == ("modelprof-test", True)
    assert thread is not threading.main_thread()


def test_thread_that_dies_at_start_is_given_up(dying):
    done = []
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(lambda: done.append(1), "modelprof-test")
    assert (dying, done, our_threads()) == (["modelprof-test"], [], [])


def test_thread_that_starts_too_late_does_nothing(monkeypatch, impatient):
    bootstrap, go_on, done, late = threading.Thread._bootstrap, threading.Event(), [], []

    def wait(self):
        late.append(self)
        go_on.wait(60)
        bootstrap(self)

    monkeypatch.setattr(threading.Thread, "_bootstrap", wait)
    with pytest.raises(RuntimeError, match="doesn't run"):
        start_thread(lambda: done.append(1), "modelprof-test")
    threading._limbo[late[0]] = late[0]  # the bootstrap removes this entry
    go_on.set()
    assert has_ended_at_last(late[0])
    assert done == []


def has_ended_at_last(thread):
    until = time.monotonic() + 60
    while not thread._started.is_set() or thread.is_alive():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_system_without_threads_raises_runtime_error(monkeypatch, error):
    def refuse(self):
        raise error

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(print, "modelprof-test")


def test_thread_that_does_not_end_is_abandoned(impatient):
    go_on = threading.Event()
    thread = start_thread(lambda: go_on.wait(60), "modelprof-test")
    assert not has_ended(thread)
    go_on.set()
    assert has_ended_at_last(thread)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_forked_child_does_not_wait_for_parents_lock():
    """The lock's owner is a parent thread, which the child doesn't have."""
    held, over = threading.Event(), threading.Event()

    def hold():
        with watch._lock:
            held.set()
            over.wait(60)

    thread = start_thread(hold, "modelprof-test")
    assert held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)  # kills the child if it waits
        watch.begin()
        watch.end()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    over.set()
    assert has_ended(thread)
    assert status == 0


@pytest.mark.slow
def test_training_continues_if_threads_die_at_start(tmp_path, dying):
    with our_warnings() as messages:
        callback = run_fit(tmp_path, steps=(2, 4), sampling=True)
    assert messages == []
    assert set(dying) == {"modelprof-cpu", "modelprof-sampler"}
    assert callback.run.info.status == "finished"
    [window] = windows_of(callback)
    assert window.recorded_steps == (2, 3)
    assert metadata_of(tmp_path, window)["cpu"] is None
    assert "Sampling ended, because no thread could be started" in "".join(callback.run.ranks[0].stacks.notes)
    assert our_threads() == []


def test_traces_are_analyzed_without_thread(monkeypatch, dying):
    def refuse(*_):
        raise OSError("no process either")

    monkeypatch.setattr(helper, "ProcessHelper", refuse)
    setting = Setting(folder=RunFolder(path=None, created=""), loop="fit", options=DEFAULT_OPTIONS)
    assert type(helper.make_helper(setting)) is helper.Helper
    assert dying == ["modelprof-traces"]


def test_show_waiting_works_without_thread(monkeypatch, dying):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with show_waiting("work"):
        pass
    assert dying == ["modelprof-waiting"]


def test_hanging_sample_ends_sampling_only(impatient):
    looked, go_on = threading.Event(), threading.Event()

    def hang(_):
        looked.set()
        go_on.wait(60)

    sampler = Sampler({"it": hang})
    sampler.resume()
    assert looked.wait(60)
    [thread] = our_threads()
    sampler.pause()
    assert sampler.notes == ["Sampling ended, because its thread didn't pause within 5 s."]
    sampler.resume()
    assert our_threads() == [thread]
    go_on.set()
    assert has_ended_at_last(thread)
