"""The slow-step recorder: injected pauses of known length, and the causes it reports."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch import Callback

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.step_costs import COLLECTOR, MACHINE, slow_facts, step_costs
from lightning_modelprof.measure.resources import cpu as cpu_module
from lightning_modelprof.measure.steps import slow_steps as slow_steps_module
from lightning_modelprof.measure.steps.slow_steps import MAX_KEPT, CollectorWatch, Counts, SlowStepWatch
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import Status
from lightning_modelprof.report.rules.steps import _period
from lightning_modelprof.report.words import cause_words
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.locate import RUN_FILE
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import NOT_MEASURED, SlowStep, SlowSteps, StepTag, StepTimings
from tests.support.bench import FakeClock, UndisturbedClock
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer

MS = 1_000_000
MACHINE_WORDS = "CPU contention"


def steps_of(first, forward, tags=0):
    """Steps of one millisecond of data and the given milliseconds of forward."""
    forward = np.asarray(forward, float)
    phases_ns = np.zeros((len(forward), len(PHASES)), np.int64)
    phases_ns[:, PHASE_INDEX["forward"]] = np.round(forward * MS)
    phases_ns[:, PHASE_INDEX["dataloader"]] = MS
    return StepTimings(
        step=np.arange(first, first + len(forward)),
        duration_ns=phases_ns.sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=np.full_like(phases_ns, NOT_MEASURED),
        samples=np.full(len(forward), 4),
        tags=np.broadcast_to(np.asarray(tags, np.int64), len(forward)).copy(),
    )


def watched(*parts, ends=None):
    watch = SlowStepWatch()
    for number, part in enumerate(parts):
        watch.add(part)
        watch.look(ends[number] if ends else 0)
    return watch.record()


def test_slow_steps_are_counted_and_kept():
    usual = [9.0] * 40
    usual[17], usual[30] = 49, 29.5  # the median is 10 ms with the data: 30 ms is the limit, 30.5 is beyond
    record = watched(steps_of(0, [9] * 50), steps_of(50, usual))
    assert (record.count, record.num_special) == (2, 0)
    assert record.excess_ns == (50 - 10 + 30.5 - 10) * MS
    assert [one.step for one in record.worst] == [67, 80]
    worst = record.worst[0]
    assert (worst.duration_ns, worst.usual_ns) == (50 * MS, 10 * MS)
    assert worst.phases_ns == {"forward": 49 * MS, "dataloader": MS}
    assert (worst.first_watched, worst.last_watched) == (50, 89)


def test_three_times_median_is_not_slow():
    assert watched(steps_of(0, [9] * 50 + [29] * 3)).count == 0


def test_short_run_uses_median_of_steps_around():
    forward = [9] * 30
    forward[3] = 99
    assert [one.step for one in watched(steps_of(0, forward)).worst] == [3]


@pytest.mark.parametrize(("num_steps", "is_known"), [(19, False), (20, True)])
def test_too_few_steps_give_no_slow_steps(num_steps, is_known):
    record = watched(steps_of(0, [9] * num_steps))
    assert (record.count, record.why_not_looked_for == "") == (0, is_known)
    rank = RankRecord(rank=0, steps=steps_of(0, [9] * num_steps), slow=record)
    report = build_report(Facts(Run(info=RunInfo(created="today"), ranks=(rank,))))
    table = next(one for one in report.tables if one.id == "slow_steps")
    (finding,) = (one for one in report.findings if one.kind == "slow_steps")
    assert finding.status is (Status.CLEAN if is_known else Status.NOT_EVALUATED)
    reason = "no clean step took more than 3 times the median" if is_known else record.why_not_looked_for
    assert table.absent_reason == reason


def test_slow_steps_do_not_become_usual():
    """Half of the steps are slow for a while."""
    parts = [steps_of(50 * number, [9] * 25 + [40] * 25) for number in range(1, 20)]
    record = watched(steps_of(0, [9] * 50), *[one.select(one.step % 50 < 49) for one in parts])
    assert record.count == 19 * 24


def test_new_pace_becomes_usual():
    """Longer sequences from some step on count as slow for a while, not forever."""
    parts = [steps_of(50 * number, [40] * 50) for number in range(1, 40)]
    assert watched(steps_of(0, [9] * 50), *parts).count <= 6 * 50


def test_profiler_phase_makes_no_step_slow():
    part = steps_of(50, [9] * 50)
    part.phases_ns[20, PHASE_INDEX["profiler"]] = 400 * MS
    part.duration_ns[20] += 400 * MS
    assert watched(steps_of(0, [9] * 50), part).count == 0


@pytest.mark.parametrize(
    "tag",
    [
        StepTag.SKIP_FIRST,
        StepTag.PROFILED,
        StepTag.PROFILER_WARMUP,
        StepTag.PROFILER_STOP,
        StepTag.INSPECTED,
        StepTag.DRAINING,
    ],
)
def test_steps_with_profiler_work_are_not_slow(tag):
    record = watched(steps_of(0, [9] * 50), steps_of(50, [400, 9, 9], int(tag)))
    assert (record.count, record.num_special, record.worst) == (0, 0, ())


def test_validation_and_epoch_starts_are_counted_separately():
    tags = np.zeros(50, np.int64)
    tags[[5, 6]] = int(StepTag.VALIDATION), int(StepTag.FIRST_OF_EPOCH)
    forward = [9.0] * 50
    forward[5], forward[6], forward[7] = 500, 300, 60
    record = watched(steps_of(0, [9] * 50), steps_of(50, forward, tags))
    assert (record.count, record.num_special) == (1, 2)
    assert record.excess_ns == 51 * MS
    assert [one.step for one in record.worst] == [55, 56, 57]


def test_slowest_steps_are_kept_in_any_order():
    forward = np.full(1_000, 9.0)
    places = np.random.default_rng(1).choice(np.arange(50, 1_000), 60, replace=False)
    forward[places] = np.random.default_rng(2).permutation(60) + 100.0
    parts = [steps_of(first, forward[first : first + 50]) for first in range(0, 1_000, 50)]
    record = watched(*parts)
    assert record.count == 60
    expected = sorted(places[np.argsort(-forward[places])[:MAX_KEPT]].tolist())
    assert [one.step for one in record.worst] == expected


# Causes


def slow(**given):
    """A step of 90 ms where 10 ms is usual, alone in a look (the span between two reads) of one second."""
    phases_ns = given.pop("phases", {"forward": 89 * MS, "dataloader": MS})
    values = {"step": 60, "tags": 0, "usual_ns": 10.0 * MS, "collector_ns": 0, "generation": None}
    values |= {"first_watched": 50, "last_watched": 99, "watched_ns": 1_000 * MS, "beyond_ns": 80 * MS}
    values |= {"spread_ns": 0, "cpu_wait_ns": 0, "major_faults": 0}
    return SlowStep(**(values | {"duration_ns": sum(phases_ns.values()), "phases_ns": phases_ns} | given))


def cause_of(one, usual_cpu_wait=0.0):
    costs = step_costs(steps_of(0, [9] * 50), {})
    record = SlowSteps(factor=3.0, count=1, usual_cpu_wait=usual_cpu_wait, why_no_cpu_wait="", worst=(one,))
    return slow_facts(record, costs).causes[0]


EVERYWHERE = {"forward": 29 * MS, "dataloader": 21 * MS, "backward": 20 * MS, "optimizer": 20 * MS}


def test_causes():
    found = cause_of(slow())
    assert (found.cause, found.phase, found.phase_excess_ns) == ("forward", "forward", 80 * MS)
    assert cause_of(slow(collector_ns=41 * MS, generation=2)).cause == COLLECTOR
    assert cause_of(slow(collector_ns=39 * MS, generation=2)).cause == "forward"
    assert cause_of(slow(phases=EVERYWHERE)).cause == ""
    saved = {"checkpoint": 80 * MS, "forward": 9 * MS, "dataloader": MS}
    assert cause_of(slow(phases=saved)).cause == "checkpoint"


def test_cpu_wait_of_half_excess_blames_machine():
    assert cause_of(slow(phases=EVERYWHERE, cpu_wait_ns=40 * MS)).cause == MACHINE
    assert cause_of(slow(phases=EVERYWHERE, cpu_wait_ns=40 * MS - 1)).cause == ""
    assert cause_of(slow(cpu_wait_ns=40 * MS)).cause == MACHINE, "who computes cannot go on without a CPU"
    assert cause_of(slow(cpu_wait_ns=40 * MS - 1)).cause == "forward"
    fetched = {"dataloader": 81 * MS, "forward": 9 * MS}
    assert cause_of(slow(phases=fetched, cpu_wait_ns=80 * MS)).cause == "dataloader"


def test_cpu_wait_may_belong_to_other_slow_steps():
    assert cause_of(slow(cpu_wait_ns=80 * MS, beyond_ns=161 * MS)).cause == "forward"


def test_usual_cpu_wait_makes_no_step_slow():
    """In looks without slow steps the thread waits 3% of the time: 30 ms of this look's second."""
    assert cause_of(slow(cpu_wait_ns=70 * MS), 0.03).cause == MACHINE
    assert cause_of(slow(cpu_wait_ns=69 * MS), 0.03).cause == "forward"
    assert cause_of(slow(cpu_wait_ns=40 * MS), None).cause == MACHINE, "no look to compare with"


def test_cpu_wait_that_other_steps_may_have_had_makes_no_step_slow():
    """Waking workers take the CPU in every step; these steps differ by 100 ms in total."""
    assert cause_of(slow(cpu_wait_ns=140 * MS, spread_ns=100 * MS)).cause == MACHINE
    assert cause_of(slow(cpu_wait_ns=139 * MS, spread_ns=100 * MS)).cause == "forward"
    assert cause_of(slow(cpu_wait_ns=140 * MS, spread_ns=100 * MS), 0.1).cause == MACHINE, "the same waiting"
    assert cause_of(slow(cpu_wait_ns=140 * MS, spread_ns=100 * MS), 0.101).cause == "forward"


def test_machine_is_never_blamed_without_cpu_wait():
    assert cause_of(slow(phases=EVERYWHERE, cpu_wait_ns=None)).cause == ""
    assert cause_of(slow(cpu_wait_ns=None)).cause == "forward"


def test_words_of_causes():
    collector = slow(collector_ns=80 * MS, generation=1)
    assert cause_words(cause_of(collector)) == "Python's garbage collector, generation 1"
    epoch = slow(collector_ns=80 * MS, generation=2, tags=int(StepTag.FIRST_OF_EPOCH))
    expected = "Python's garbage collector, generation 2, at the start of an epoch"
    assert cause_words(cause_of(epoch)) == expected
    assert cause_words(cause_of(slow(cpu_wait_ns=80 * MS))) == MACHINE_WORDS


def test_run_without_slow_step_record():
    costs = step_costs(steps_of(0, [9] * 50), {})
    unwatched = RankRecord(rank=0, steps=steps_of(0, [9] * 50), outside_ns={}, callbacks=())
    run = Run(info=RunInfo(created="today"), ranks=(unwatched,))
    assert "an older version" in Facts(run).why_not(Facts.slow)
    assert slow_facts(SlowSteps(factor=3.0), costs).worst is None


# Counts between looks


def counted(monkeypatch, *counts):
    """Patch in successive counts of (time, page faults, CPU wait), in ms."""
    found = iter(
        [Counts(int(at * MS), faults, None if wait is None else wait * MS) for at, faults, wait in counts]
    )
    monkeypatch.setattr(slow_steps_module, "_counts", lambda: next(found))


def test_counts_are_per_look_and_usual_wait_excludes_slow_looks(monkeypatch):
    counted(monkeypatch, (0, 7, 1_000), (500, 9, 1_010), (1_060, 9, 1_050), (1_560, 9, 1_080))
    watch = SlowStepWatch()
    watch.start()
    watch.stop()
    slow_look = [9.0] * 50
    slow_look[20] = 69
    for first, forward, end_ms in ((0, [9] * 50, 500), (50, slow_look, 1_060), (100, [9] * 50, 1_560)):
        watch.add(steps_of(first, forward))
        watch.look(end_ms * MS)
    record = watch.record()
    [one] = record.worst
    assert (one.watched_ns, one.beyond_ns) == (560 * MS, 60 * MS)
    assert (one.cpu_wait_ns, one.major_faults) == (40 * MS, 0)
    assert record.usual_cpu_wait == pytest.approx((10 + 30) / 1_000)
    assert record.cpu_wait_share == pytest.approx((10 + 40 + 30) / 1_560)
    assert record.why_no_cpu_wait == ""


def test_all_time_beyond_usual_may_have_waited(monkeypatch):
    """Beyond 10 ms each: 60 ms, 500 of validation, 100 of first steps, 400 of the profiler, 40 in no step."""
    counted(monkeypatch, (0, 0, 0), (500, 0, 0), (500 + 500 + 60 + 500 + 100 + 400 + 40, 0, 30))
    watch = SlowStepWatch()
    watch.start()
    watch.stop()
    watch.add(steps_of(0, [9] * 50))
    watch.look(500 * MS)
    forward, tags = [9.0] * 50, np.zeros(50, np.int64)
    forward[20], forward[30], forward[1] = 69, 509, 109
    tags[[30, 1]] = int(StepTag.VALIDATION), int(StepTag.SKIP_FIRST)
    part = steps_of(50, forward, tags)
    part.phases_ns[40, PHASE_INDEX["profiler"]] = 400 * MS
    part.duration_ns[40] += 400 * MS
    watch.add(part)
    watch.look(2_060 * MS)
    one = next(one for one in watch.record().worst if one.step == 70)
    assert (one.duration_ns, one.watched_ns) == (70 * MS, (500 + 1_100) * MS)
    assert one.beyond_ns == (60 + 500 + 100 + 400 + 40) * MS
    assert one.spread_ns == 0


def test_spread_is_time_of_other_steps_beyond_fastest(monkeypatch):
    counted(monkeypatch, (0, 0, 0), (600, 0, 0))
    watch = SlowStepWatch()
    watch.start()
    watch.stop()
    watch.add(steps_of(0, [9] * 20 + [69, 7, 8, 29] + [9] * 26))  # 10 ms is usual, 8 the fastest, 30 not slow
    watch.look(577 * MS)
    [one] = watch.record().worst
    assert one.spread_ns == (1 + 22 + 46 * 2) * MS


def test_looks_with_validation_count_as_usual(monkeypatch):
    """Otherwise nothing would be usual if every look had a validation."""
    counted(monkeypatch, (0, 0, 0), (1_000, 0, 100))
    watch = SlowStepWatch()
    watch.start()
    watch.stop()
    tags = np.zeros(50, np.int64)
    tags[5] = int(StepTag.VALIDATION)
    watch.add(steps_of(0, [9] * 5 + [509] + [9] * 44, tags))
    watch.look(1_000 * MS)
    assert watch.record().usual_cpu_wait == pytest.approx(0.1)
    assert watch.record().num_special == 1


def test_no_usual_look_gives_no_usual_wait(monkeypatch):
    counted(monkeypatch, (0, 0, 0), (560, 0, 50))
    watch = SlowStepWatch()
    watch.start()
    watch.stop()
    watch.add(steps_of(0, [9] * 20 + [69] + [9] * 29))
    watch.look(560 * MS)
    assert watch.record().usual_cpu_wait is None


def test_missing_system_counts_are_none_with_reason(monkeypatch):
    counted(monkeypatch, (0, None, None), (500, None, None), (1_060, None, None))
    watch = SlowStepWatch()
    watch.start()
    watch.stop()
    for first, forward, end_ms in ((0, [9] * 50, 500), (50, [9] * 20 + [69] + [9] * 29, 1_060)):
        watch.add(steps_of(first, forward))
        watch.look(end_ms * MS)
    record = watch.record()
    [one] = record.worst
    assert (one.cpu_wait_ns, one.major_faults, record.usual_cpu_wait) == (None, None, None)
    assert "not available on this system" in record.why_no_cpu_wait


@pytest.mark.slow
def test_counts_before_loop_are_excluded(tmp_path, monkeypatch):
    """Sanity check, data setup and compilation come between creating the watch and the first step."""
    wait_ns = 0
    monkeypatch.setattr(slow_steps_module, "cpu_wait_ns", lambda: wait_ns)

    class Before(Callback):
        def on_fit_start(self, trainer, pl_module):
            nonlocal wait_ns
            wait_ns += 10_000 * MS

    def at_batch(batch_idx):
        nonlocal wait_ns
        if batch_idx == 50:
            wait_ns += 3 * MS
            time.sleep(PAUSE_S)

    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, Before(), callback), Net(at_batch=at_batch), loader(200))
    one = next(one for one in callback.run.ranks[0].slow.worst if one.step == 50)
    assert one.cpu_wait_ns == 3 * MS
    assert one.beyond_ns >= one.duration_ns - one.usual_ns


@pytest.mark.slow
def test_files_are_read_once_per_500_steps(tmp_path, monkeypatch):
    reads = []

    def cpu_wait_ns():
        reads.append(1)
        return 6

    monkeypatch.setattr(slow_steps_module, "cpu_wait_ns", cpu_wait_ns)
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), Net(), loader(2_200))
    assert len(reads) == 4, "at the start, after 500 and 1,000 steps, and at the end"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("793086 41 3\n", 41), ("793086 0 1\n", 0), ("0 0 0\n", None), ("", None), ("x", None)],
)
def test_cpu_wait_is_read_from_schedstat(tmp_path, monkeypatch, text, expected):
    """All zeros come from a kernel without scheduler statistics: the reading thread ran at least once."""
    file = tmp_path / "schedstat"
    file.write_text(text)
    monkeypatch.setattr(cpu_module, "_SCHEDSTAT", file)
    assert cpu_module.cpu_wait_ns() == expected


def test_system_without_schedstat_has_no_cpu_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_module, "_SCHEDSTAT", tmp_path / "nothing")
    assert cpu_module.cpu_wait_ns() is None


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not count")
def test_thread_that_shares_its_cpu_waits_for_it():
    """Runs until 50 ms are counted; in a wrong unit, this would be more or less than the elapsed time."""
    usable = os.sched_getaffinity(0)
    endless = (
        "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"
    )
    cpu = min(usable)
    with subprocess.Popen([sys.executable, "-c", endless, str(cpu)], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            os.sched_setaffinity(0, {cpu})
            began_ns, began_wait_ns, began_cpu_ns = (
                time.perf_counter_ns(),
                cpu_module.cpu_wait_ns(),
                time.thread_time_ns(),
            )
            waited_ns = 0
            while waited_ns < 50 * MS and time.thread_time_ns() - began_cpu_ns < 5_000 * MS:
                waited_ns = cpu_module.cpu_wait_ns() - began_wait_ns
            elapsed_ns = time.perf_counter_ns() - began_ns
        finally:
            os.sched_setaffinity(0, usable)
            other.kill()
    assert 50 * MS <= waited_ns <= elapsed_ns


# Saved runs


def test_older_run_loads_with_reason_for_missing_counts(tmp_path):
    record = SlowSteps(factor=3.0, count=1, excess_ns=80 * MS, worst=(slow(),))
    run = Run(
        info=RunInfo(created="today"),
        ranks=(RankRecord(rank=0, steps=steps_of(0, [9] * 50), slow=record),),
    )
    save_run(run, tmp_path / RUN_FILE)
    saved = json.loads((tmp_path / RUN_FILE).read_text())
    older = saved["ranks"][0]["slow"]
    for key in ("usual_cpu_wait", "why_no_cpu_wait"):
        del older[key]
    for key in ("beyond_ns", "spread_ns", "cpu_wait_ns"):
        del older["worst"][0][key]
    older["worst"][0]["preemptions"] = 5_000
    (tmp_path / RUN_FILE).write_text(json.dumps(saved))
    loaded = load_run(tmp_path).ranks[0].slow
    assert "older version" in loaded.why_no_cpu_wait
    [one] = loaded.worst
    assert (one.cpu_wait_ns, one.beyond_ns, one.major_faults) == (None, None, 0)
    assert cause_of(one).cause == "forward"


@pytest.mark.parametrize(("reason", "is_said"), [("", False), ("nobody counts here", True)])
def test_note_below_table_gives_reason_for_missing_cpu_wait(reason, is_said):
    wait_ns = None if reason else 5 * MS
    record = SlowSteps(factor=3.0, count=1, why_no_cpu_wait=reason, worst=(slow(cpu_wait_ns=wait_ns),))
    rank = RankRecord(rank=0, steps=steps_of(0, [9] * 50), slow=record)
    run = Run(info=RunInfo(created="today"), ranks=(rank,))
    table = next(one for one in build_report(Facts(run)).tables if one.id == "slow_steps")
    place = [column.key for column in table.columns].index("cpu_wait")
    assert table.rows[0][place] == (None if reason else 0.005)  # of the look's one second
    assert any("nobody counts here" in note for note in table.notes) is is_said


# The garbage collector


def test_collector_is_found_in_its_step(monkeypatch):
    now = 0
    monkeypatch.setattr(slow_steps_module, "host_clock", lambda: now)
    watch = SlowStepWatch()
    note = watch.collector._note
    usual = steps_of(0, [9] * 50)  # ends at 500 ms
    forward = [9.0] * 50
    forward[20] = 69  # from 700 to 770 ms
    for begin_ms, end_ms, generation in [(100, 130, 1), (705, 755, 2), (760, 760.5, 0)]:
        now = begin_ms * MS
        note("start", {"generation": generation})
        now = int(end_ms * MS)
        note("stop", {"generation": generation})
    watch.add(usual)
    watch.look(500 * MS)
    watch.add(steps_of(50, forward))
    watch.look(1_060 * MS)
    [one] = watch.record().worst
    assert (one.step, one.collector_ns, one.generation) == (70, 50 * MS, 2)


def test_collector_run_counts_in_both_of_its_steps(monkeypatch):
    watch = CollectorWatch()
    times = iter([10 * MS, 30 * MS])
    monkeypatch.setattr(slow_steps_module, "host_clock", lambda: next(times))
    watch._note("start", {"generation": 2})
    watch._note("stop", {"generation": 2})
    assert watch.between(0, 15 * MS) == (5 * MS, 2)
    assert watch.between(15 * MS, 40 * MS) == (15 * MS, 2)
    assert watch.between(30 * MS, 40 * MS) == (0, None)


@pytest.mark.slow
def test_collector_is_watched_only_during_loop(tmp_path):
    seen = []
    module = Net(at_batch=lambda batch: seen.append(len(gc.callbacks)))
    before = list(gc.callbacks)
    fit_quietly(make_trainer(tmp_path, make_callback(tmp_path, active=0)), module, loader())
    assert set(seen) == {len(before) + 1}
    assert gc.callbacks == before


@pytest.mark.slow
def test_collector_is_found_in_last_steps_of_run(tmp_path):
    """Time after the last step doesn't shift the steps."""

    class Tail(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            time.sleep(0.5)

    def at_batch(batch_idx):
        if batch_idx == 97:
            begin_ns = time.perf_counter_ns()
            watch = next(
                one.__self__
                for one in gc.callbacks
                if isinstance(getattr(one, "__self__", None), CollectorWatch)
            )
            watch._note("start", {"generation": 2})
            while time.perf_counter_ns() - begin_ns < 200 * MS:
                pass
            watch._note("stop", {"generation": 2})

    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback, Tail()), Net(at_batch=at_batch), loader(200))
    found = {one.step: one for one in callback.run.ranks[0].slow.worst}
    assert found[97].collector_ns >= 199 * MS
    assert not any(one.collector_ns > 50 * MS for step, one in found.items() if step != 97)


# A real run

PAUSE_S = 0.6  # more than 3% of the steps' time, even at 90 ms per step


@pytest.mark.slow
def test_pause_makes_worst_step(tmp_path):
    def at_batch(batch_idx):
        if batch_idx == 150:
            time.sleep(PAUSE_S)

    callback = make_callback(tmp_path, active=0)
    callback._clock = UndisturbedClock()  # a busy machine doesn't lengthen the other steps
    fit_quietly(make_trainer(tmp_path, callback), Net(at_batch=at_batch), loader(400))
    record = load_run(tmp_path / "modelprof").ranks[0].slow
    assert record == callback.run.ranks[0].slow
    assert 150 in [one.step for one in record.worst]
    one = next(one for one in record.worst if one.step == 150)
    assert one.phases_ns["forward"] >= PAUSE_S * 1e9
    assert (one.first_watched, one.last_watched) == (0, 199)
    tables = {table.id: table for table in callback.report.tables}
    row = next(row for row in tables["slow_steps"].rows if row[0] == "step 150")
    keys = [column.key for column in tables["slow_steps"].columns]
    assert row[keys.index("phase")] == "Forward"
    assert row[keys.index("cause")] in ("Forward", MACHINE_WORDS)
    assert tables["worst_step"].rows
    finding = next(one for one in callback.report.findings if one.kind == "slow_steps")
    assert finding.status is Status.FOUND
    share = re.search(r"costs [\d.,]+ \w+ per step \(([\d.]+)%\)", finding.summary)
    assert share is not None
    assert 0 < float(share[1]) < 100


@pytest.mark.parametrize(
    ("steps", "number", "num_steps", "every"),
    [
        ([10, 20, 30, 40, 90], 9, 95, 10),
        ([10, 20, 31, 40, 90], 9, 95, None),  # one doesn't fit
        ([10, 20, 30, 40], 4, 400, None),  # most of the steps with this period aren't slow
        ([10, 20, 30], 3, 30, None),
        ([3, 4, 5, 6], 4, 4, None),
    ],
)
def test_period_of_slow_steps(steps, number, num_steps, every):
    assert _period(steps, number, num_steps) == every


@pytest.mark.slow
def test_work_every_ten_steps_is_found_with_line(tmp_path, monkeypatch):
    """A fit of 1 ms per step, where every tenth step takes 30 ms more."""
    monkeypatch.setattr(slow_steps_module, "cpu_wait_ns", lambda: 0)
    callback = make_callback(tmp_path, active=0)
    callback._clock = clock = FakeClock()

    def every_ten(batch_idx):
        clock.advance((31 if batch_idx % 10 == 9 else 1) * MS)

    fit_quietly(make_trainer(tmp_path, callback), Net(every_ten), loader(200))
    [found] = [one for one in callback.report.findings if one.kind == "slow_steps"]
    assert found.title == "Slow forward every 10 steps"
    assert found.saving_ns_per_step == pytest.approx(30 * MS * 10 / 99)  # less the first step
    assert found.locations
