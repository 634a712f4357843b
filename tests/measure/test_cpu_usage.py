"""CPU times in a window match processes that measure themselves, and invented process histories."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import igzip
from torch.utils.data import DataLoader

from lightning_modelprof.measure.resources import cpu as cpu_usage
from lightning_modelprof.measure.resources.cpu import (
    CpuReading,
    Instant,
    ProcessTimes,
    cpu_use_between,
    read_cpu,
)
from lightning_modelprof.measure.window import capture
from tests.support.fits import Numbers, run_fit, windows_of

pytestmark = pytest.mark.slow

KEYS = ["elapsed_ns", "process_ns", "workers_ns", "system_busy_ns", "system_total_ns", "num_cpus"]
TICK_NS = 10_000_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux accounts for ended children")


def burn(seconds):
    """Use CPU time; return what this process has used since it started."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return time.process_time_ns()


# Processes that measure themselves. They burn as much CPU time as standard input asks for and answer with
# the total they've used.

BURNER = """
import os, subprocess, sys, time
child = None
print(0, flush=True)
for line in sys.stdin:
    word, _, argument = line.strip().partition(" ")
    if word == "burn":
        end = time.process_time() + float(argument)
        while time.process_time() < end: pass
        print(time.process_time_ns(), flush=True)
    elif word == "child":  # a child of its own, that does what it is told "through" this one
        child = subprocess.Popen(sys.orig_argv, stdin=-1, stdout=-1, text=True)
        child.stdout.readline()
        print(0, flush=True)
    elif word == "through":
        print(argument, file=child.stdin, flush=True)
        print(child.stdout.readline().strip(), flush=True)
    elif word == "reap":
        child.stdin.close()
        child.wait()
        print(time.process_time_ns(), flush=True)
    elif word == "time":
        print(time.process_time_ns(), flush=True)
"""


class Burner:
    """One such process, started but idle."""

    def __init__(self, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", BURNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.process.stdout.readline()

    def do(self, words):
        """Send a command; return the process's CPU time since it started."""
        print(words, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def burners(count, **environment):
    all_of_them = [Burner(**environment) for _ in range(count)]
    try:
        yield all_of_them
    finally:
        for burner in all_of_them:
            if burner.process.returncode is None:
                burner.end()


def assert_workers(start, truth_ns, num_processes):
    """Allow two ticks, for user and system time, per process and reading."""
    used = cpu_use_between(start, read_cpu())
    assert used["workers_ns"] == pytest.approx(truth_ns, abs=2 * 2 * TICK_NS * num_processes)
    return used


def test_children_alive_throughout_window_are_counted():
    with burners(2) as (one, other):
        before = one.do("burn 0.3") + other.do("time")
        start = read_cpu()
        after = one.do("burn 0.2") + other.do("burn 0.1")
        used = assert_workers(start, after - before, 2)
    assert list(used) == KEYS
    assert used["workers_ns"] >= 250_000_000
    assert used["process_ns"] < 100_000_000  # excludes the children's time
    assert used["elapsed_ns"] >= 300_000_000
    assert 0 < used["system_busy_ns"] <= used["system_total_ns"]
    assert used["num_cpus"] == os.cpu_count()


def test_own_process_time_is_finer_than_tick():
    start = read_cpu()
    begin = time.process_time_ns()
    end = burn(0.004)
    used = cpu_use_between(start, read_cpu())
    assert end - begin <= used["process_ns"] < end - begin + 3_000_000
    # The two clocks aren't read at the same instant, and other tests' threads may still spin for a while.
    assert used["elapsed_ns"] >= used["process_ns"] - 2_000_000


def test_reading_time_is_outside_window(monkeypatch):
    monkeypatch.setattr(cpu_usage.psutil, "cpu_count", lambda: burn(0.05) and 3)
    used = cpu_use_between(read_cpu(), read_cpu())
    assert used["process_ns"] < 20_000_000
    assert used["num_cpus"] == 3


@linux
def test_child_that_ends_during_window_is_counted():
    with burners(1) as (one,):
        before = one.do("burn 0.3")
        start = read_cpu()
        after = one.do("burn 0.2")
        one.end()
    # Python's shutdown isn't in the child's own figure, but the system counts it.
    used = assert_workers(start, after - before, 2)
    assert used["workers_ns"] < 300_000_000  # excludes what it used before the window


@linux
def test_child_that_starts_and_ends_during_window_is_counted():
    start = read_cpu()
    with burners(1) as (one,):
        truth = one.do("burn 0.25")
    assert_workers(start, truth, 2)


def test_child_that_starts_during_window_is_counted():
    start = read_cpu()
    with burners(1) as (one,):
        assert_workers(start, one.do("burn 0.25"), 1)


@linux
@pytest.mark.parametrize("reaps", ["after", "meanwhile"])
def test_grandchildren_are_counted(reaps):
    with burners(1) as (one,):
        one.do("child")
        before = one.do("through burn 0.2") + one.do("time")
        start = read_cpu()
        after = one.do("through burn 0.15") + (one.do("reap") if reaps == "meanwhile" else one.do("burn 0.1"))
        assert_workers(start, after - before, 3)


@linux
def test_zombie_child_is_counted():
    with burners(1) as (one,):
        before = one.do("burn 0.2")
        start = read_cpu()
        after = one.do("burn 0.15")
        one.process.stdin.close()
        while psutil.Process(one.process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert_workers(start, after - before, 2)
        one.end()
        assert_workers(start, after - before, 2)  # reaped: the same from the parent's figure


@linux
def test_workers_are_unknown_if_ended_children_are_unaccounted():
    with burners(2) as (one, other):
        one.do("burn 0.2")
        start = read_cpu()
        handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            one.end()
        finally:
            signal.signal(signal.SIGCHLD, handler)
        other.do("burn 0.1")
        assert cpu_use_between(start, read_cpu())["workers_ns"] is None


@linux
def test_other_ranks_are_not_workers(monkeypatch):
    """Lightning's rank 0 starts the others as its children, with LOCAL_RANK in their environment."""
    with burners(1) as (forked,):  # started without LOCAL_RANK, as if forked before it was set
        monkeypatch.setenv("LOCAL_RANK", "0")
        with burners(1) as (spawned,), burners(1, LOCAL_RANK="1") as (rank_1,):
            rank_1.do("child")
            before = forked.do("time") + spawned.do("time")
            start = read_cpu()
            after = forked.do("burn 0.1") + spawned.do("burn 0.1")
            rank_1.do("burn 0.2")
            rank_1.do("through burn 0.2")
            assert_workers(start, after - before, 2)


# Invented readings


def made_reading(clock=0, process=0, system=(0, 0), num_cpus=4, **family):
    instant = Instant(clock, process, system)
    times = {name: ProcessTimes(*values) for name, values in family.items()}
    return CpuReading(begin=instant, end=instant, family=times, num_cpus=num_cpus)


def test_cpu_use_worked_out_by_hand():
    """One tick is 1, far below what rounding may hide."""
    second = 1_000_000_000
    start = made_reading(
        clock=5 * second,
        process=2 * second,
        system=(100, 900),
        me=(0, 7 * second),
        stays=(3 * second, 0),
        ends=(4 * second, 1 * second),
    )
    stop = made_reading(
        clock=15 * second,
        process=8 * second,
        system=(160, 1000),
        # + 9 s: "ends" with 4 + 1 + 2 more seconds, and one that started and ended with 2 s
        me=(0, 16 * second),
        stays=(6 * second, 500),  # 3 s more, and 500 ns of its own children
        comes=(1 * second, 0),
    )
    assert cpu_use_between(start, stop) == {
        "elapsed_ns": 10 * second,
        "process_ns": 6 * second,
        "workers_ns": (3 + 1 + 2 + 2) * second + 500,
        "system_busy_ns": 60,
        "system_total_ns": 160,
        "num_cpus": 4,
    }


def test_rounding_yields_no_negative_time():
    start = made_reading(clock=5, process=5, system=(5, 5), me=(0, 50), ends=(TICK_NS, 0), stays=(9, 9))
    stop = made_reading(clock=4, process=4, system=(6, 1), me=(0, 60), stays=(8, 8))
    used = cpu_use_between(start, stop)
    assert used == {
        "elapsed_ns": 0,
        "process_ns": 0,
        "workers_ns": 0,
        "system_busy_ns": 1,
        "system_total_ns": 1,
        "num_cpus": 4,
    }


@st.composite
def lives(draw):
    """A family's history in ticks: who runs, forks, ends and is reaped between two readings.

    Returns the two readings and the true time, from a slow independent count.
    """
    own, reaped, parent, truth, readings = {"me": 0}, {"me": 0}, {}, 0, []
    names = iter(range(1000))
    num_events = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    for num, counts in zip(num_events, (False, True), strict=True):
        for _ in range(num):
            what = draw(st.sampled_from(["run", "fork", "end"]))
            who = draw(st.sampled_from(sorted(own)))
            if what == "fork":
                child = f"process_{next(names)}"
                own[child], reaped[child], parent[child] = 0, 0, who
            elif what == "run" and who != "me":
                ticks = draw(st.integers(1, 1000))
                own[who] += ticks
                truth += ticks * counts
            elif what == "end" and who != "me" and who not in parent.values():
                mother = parent.pop(who)
                reaped[mother] += own.pop(who) + reaped.pop(who)
        readings.append(made_reading(**{name: (own[name] * TICK_NS, reaped[name] * TICK_NS) for name in own}))
    return *readings, truth * TICK_NS


@settings(max_examples=100, deadline=None)
@given(lives())
def test_every_history_is_counted_once(history):
    start, stop, truth_ns = history
    assert cpu_use_between(start, stop)["workers_ns"] == truth_ns


# A psutil that fails


def raise_it(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_no_reading_without_psutil(monkeypatch):
    monkeypatch.setattr(cpu_usage, "psutil", None)
    assert read_cpu() is None


@pytest.mark.parametrize(
    "error",
    [psutil.NoSuchProcess(1), psutil.AccessDenied(1), psutil.ZombieProcess(1), OSError(), ValueError()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [
        (psutil.Process, "children", {"workers_ns"}),
        (psutil.Process, "cpu_times", {"workers_ns"}),
        (psutil, "Process", {"workers_ns"}),
        (psutil, "cpu_times", {"system_busy_ns", "system_total_ns"}),
        (psutil, "cpu_count", {"num_cpus"}),
    ],
    ids=["children", "process times", "process", "system times", "number of CPUs"],
)
@pytest.mark.parametrize("when", ["start", "stop"])
def test_value_psutil_cannot_read_is_none(monkeypatch, owner, name, missing, error, when):
    readings = {}
    if name == "children":  # used only if the system has no list of children
        monkeypatch.setattr(cpu_usage, "_PROCESSES", Path("/nowhere"))
    for moment in ("start", "stop"):
        with monkeypatch.context() as patch:
            if moment == when:
                patch.setattr(owner, name, raise_it(error))
            readings[moment] = read_cpu()
    used = cpu_use_between(readings["start"], readings["stop"])
    if name == "cpu_count" and when == "start":
        missing = set()  # read twice, needed once
    assert {key for key, value in used.items() if value is None} == missing


def test_platform_with_fewer_cpu_fields(monkeypatch):
    """Windows counts interrupts in system time and has no iowait."""
    times = SimpleNamespace(user=3.0, system=2.0, idle=10.0, interrupt=0.5, dpc=0.25)
    monkeypatch.setattr(cpu_usage.psutil, "cpu_times", lambda: times)
    assert read_cpu().end.system_ns == (5_000_000_000, 10_000_000_000)


@pytest.mark.parametrize(("failures", "expected"), [(2, 1), (3, None)])
def test_family_is_read_again_if_child_vanishes(monkeypatch, failures, expected):
    remaining = [failures]
    read_once = cpu_usage._read_family_once

    def vanish():
        if remaining[0]:
            remaining[0] -= 1
            raise psutil.NoSuchProcess(1)
        return read_once()

    monkeypatch.setattr(cpu_usage, "_read_family_once", vanish)
    family = read_cpu().family
    assert (family and len([process for process in family if process.pid == os.getpid()])) == expected


# In a window


class Burning(Numbers):
    """Its workers burn CPU time and record how much."""

    def __init__(self, folder, size=16):
        super().__init__(size)
        self.folder = folder

    def __getitem__(self, index):
        burn(0.02)
        (self.folder / f"worker_{os.getpid()}").write_text(str(time.process_time_ns()))
        return super().__getitem__(index)


def metadata_of(folder, window):
    packed = (folder / "modelprof" / window.trace_file).read_bytes()
    return json.loads(igzip.decompress(packed))["modelprof"]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="fits in workers are slow")
def test_window_counts_workers(tmp_path):
    data = DataLoader(Burning(tmp_path), batch_size=2, num_workers=2, multiprocessing_context="fork")
    callback = run_fit(tmp_path, data=data, trainer={"max_epochs": 2}, steps=(2, 13))
    (window,) = windows_of(callback)
    metadata = metadata_of(tmp_path, window)
    assert metadata["recorded_steps"] == list(range(2, 13))
    used = metadata["cpu"]
    assert list(used) == KEYS
    steps = callback.run.ranks[0].steps
    recorded_ns = int(steps.duration_ns[(steps.step >= 2) & (steps.step < 13)].sum())
    # Each reading falls in the first or last recorded step, or in its neighbor.
    surely_ns = int(steps.duration_ns[(steps.step >= 3) & (steps.step < 12)].sum())
    at_most_ns = int(steps.duration_ns[(steps.step >= 1) & (steps.step < 14)].sum())
    assert surely_ns <= used["elapsed_ns"] <= at_most_ns
    assert 0 < used["process_ns"] < recorded_ns * used["num_cpus"]
    # Across the epoch boundary: of 32 numbers at 20 ms, workers have prefetched at most 12 before step 2 and
    # have fetched at least 22 when step 12 gets its batch.
    told_ns = sum(int(file.read_text()) for file in tmp_path.glob("worker_*"))
    assert 10 * 20_000_000 <= used["workers_ns"] <= told_ns + 4 * 2 * TICK_NS
    assert used["workers_ns"] > used["process_ns"] / 10
    assert used["workers_ns"] <= used["system_busy_ns"] + 8 * TICK_NS
    assert used["system_busy_ns"] <= used["system_total_ns"]
    assert used["system_total_ns"] == pytest.approx(used["elapsed_ns"] * used["num_cpus"], rel=0.2)


def test_each_window_has_its_own_cpu_times(tmp_path):
    callback = run_fit(tmp_path, active=2, repeat=2, wait=0, warmup=0)
    steps = callback.run.ranks[0].steps
    assert len(windows_of(callback)) == 2
    for window in windows_of(callback):
        used = metadata_of(tmp_path, window)["cpu"]
        assert used["process_ns"] > 0
        near = (steps.step >= window.first_step - 1) & (steps.step <= window.last_step + 1)
        assert 0 < used["elapsed_ns"] <= int(steps.duration_ns[near].sum())
        assert used["workers_ns"] is not None


def test_window_without_psutil_has_no_cpu_times(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_usage, "psutil", None)
    callback = run_fit(tmp_path, steps=(2, 4))
    assert metadata_of(tmp_path, windows_of(callback)[0])["cpu"] is None


def test_window_without_reader_thread_has_no_cpu_times(tmp_path, monkeypatch):
    def refuse(work, name):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(capture, "start_thread", refuse)
    callback = run_fit(tmp_path, steps=(2, 4))
    assert metadata_of(tmp_path, windows_of(callback)[0])["cpu"] is None


def test_cpu_is_read_twice_per_window(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(capture, "read_cpu", lambda: calls.append(1) or read_cpu())
    run_fit(tmp_path / "short", steps=(2, 4))
    run_fit(tmp_path / "long", steps=(2, 30))
    assert len(calls) == 4
    run_fit(tmp_path / "timing", active=0)
    assert len(calls) == 4


def test_trace_with_stacks_excludes_cpu_reading(tmp_path):
    callback = run_fit(tmp_path, steps=(2, 3), with_stack=True)
    packed = (tmp_path / "modelprof" / windows_of(callback)[0].trace_file).read_bytes()
    calls = {event["name"] for event in json.loads(igzip.decompress(packed))["traceEvents"]}
    assert any("capture.py" in name for name in calls)  # it would show up
    assert {name for name in calls if "psutil" in name or ("cpu.py" in name and "read" in name)} == set()
