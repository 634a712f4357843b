"""The slow-step recorder: injected pauses of known length in known steps, and what is said of their cause."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from lightning.pytorch import Callback

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.slow_causes import COLLECTOR, MACHINE, slow_facts
from lightning_modelprof.analysis.step_costs import step_costs
from lightning_modelprof.measure import slow_steps as slow_steps_module
from lightning_modelprof.measure.slow_steps import MAX_KEPT, CollectorWatch, SlowStepWatch
from lightning_modelprof.report.model import Status
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.slow_steps import SlowStep, SlowSteps
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings
from tests.fits import Net, fit_quietly, loader, make_callback, make_trainer

MS = 1_000_000


def steps_of(first, forward, tags=0):
    """Steps of which all but a millisecond of data is forward; milliseconds."""
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
    usual[17], usual[30] = 49, 29.5  # 10 ms is usual with the data: 30 ms is the limit, 30.5 is beyond
    record = watched(steps_of(0, [9] * 50), steps_of(50, usual))
    assert (record.count, record.num_special) == (2, 0)
    assert record.excess_ns == (50 - 10 + 30.5 - 10) * MS
    assert [one.step for one in record.worst] == [67, 80]
    worst = record.worst[0]
    assert (worst.duration_ns, worst.usual_ns) == (50 * MS, 10 * MS)
    assert worst.phases_ns == {"forward": 49 * MS, "dataloader": MS}
    assert (worst.first_watched, worst.last_watched) == (50, 89)


def test_not_slow_is_what_takes_three_times_the_median():
    assert watched(steps_of(0, [9] * 50 + [29] * 3)).count == 0


def test_in_a_short_run_the_steps_around_say_what_is_usual():
    forward = [9] * 30
    forward[3] = 99
    assert [one.step for one in watched(steps_of(0, forward)).worst] == [3]
    assert watched(steps_of(0, forward[:19])).count == 0, "too few to know"


def test_what_is_slow_does_not_become_usual():
    """Half of the steps are slow for a while."""
    parts = [steps_of(50 * number, [9] * 25 + [40] * 25) for number in range(1, 20)]
    record = watched(steps_of(0, [9] * 50), *[one.select(one.step % 50 < 49) for one in parts])
    assert record.count == 19 * 24


def test_another_pace_is_usual_after_a_while():
    """Longer sequences from some step on: slow once, and not for ever."""
    parts = [steps_of(50 * number, [40] * 50) for number in range(1, 40)]
    assert watched(steps_of(0, [9] * 50), *parts).count <= 6 * 50


def test_what_we_do_ourselves_makes_no_step_slow():
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
def test_what_this_profiler_does_is_no_slow_step(tag):
    record = watched(steps_of(0, [9] * 50), steps_of(50, [400, 9, 9], int(tag)))
    assert (record.count, record.num_special, record.worst) == (0, 0, ())


def test_validation_and_epochs_are_kept_apart():
    tags = np.zeros(50, np.int64)
    tags[[5, 6]] = int(StepTag.VALIDATION), int(StepTag.FIRST_OF_EPOCH)
    forward = [9.0] * 50
    forward[5], forward[6], forward[7] = 500, 300, 60
    record = watched(steps_of(0, [9] * 50), steps_of(50, forward, tags))
    assert (record.count, record.num_special) == (1, 2)
    assert record.excess_ns == 51 * MS
    assert [one.step for one in record.worst] == [55, 56, 57]


def test_the_slowest_are_kept_whatever_their_order():
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
    phases_ns = given.pop("phases", {"forward": 89 * MS, "dataloader": MS})
    values = {"step": 60, "tags": 0, "usual_ns": 10.0 * MS, "collector_ns": 0, "generation": None}
    values |= {"first_watched": 50, "last_watched": 99, "watched_ns": 1_000 * MS}
    values |= {"preemptions": 0, "major_faults": 0}
    return SlowStep(**(values | {"duration_ns": sum(phases_ns.values()), "phases_ns": phases_ns} | given))


def cause_of(one):
    costs = step_costs(steps_of(0, [9] * 50), {})
    return slow_facts(SlowSteps(factor=3.0, count=1, worst=(one,)), costs).causes[0]


def test_causes():
    found = cause_of(slow())
    assert (found.cause, found.phase, found.phase_excess_ns) == ("forward", "forward", 80 * MS)
    assert cause_of(slow(collector_ns=41 * MS, generation=2)).cause == COLLECTOR
    assert cause_of(slow(collector_ns=39 * MS, generation=2)).cause == "forward"
    everywhere = {"forward": 29 * MS, "dataloader": 21 * MS, "backward": 20 * MS, "optimizer": 20 * MS}
    assert cause_of(slow(phases=everywhere)).cause == ""
    assert cause_of(slow(phases=everywhere, preemptions=50)).cause == MACHINE
    assert cause_of(slow(phases=everywhere, preemptions=49)).cause == ""
    assert cause_of(slow(preemptions=50)).cause == MACHINE, "whoever computes cannot go on without a CPU"
    fetched = {"dataloader": 81 * MS, "forward": 9 * MS}
    assert cause_of(slow(phases=fetched, preemptions=50)).cause == "dataloader"
    assert cause_of(slow(phases=everywhere, preemptions=None)).cause == ""
    saved = {"checkpoint": 80 * MS, "forward": 9 * MS, "dataloader": MS}
    assert cause_of(slow(phases=saved)).cause == "checkpoint"


def test_runs_that_were_not_watched():
    costs = step_costs(steps_of(0, [9] * 50), {})
    assert isinstance(slow_facts(None, costs), Absent)
    assert isinstance(slow_facts(SlowSteps(factor=3.0), Absent("no steps")), Absent)
    assert slow_facts(SlowSteps(factor=3.0), costs).worst is None


# The garbage collector


def test_the_collector_is_found_in_the_step_in_which_it_ran(monkeypatch):
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


def test_a_run_of_the_collector_counts_in_both_steps_that_it_is_in(monkeypatch):
    watch = CollectorWatch()
    times = iter([10 * MS, 30 * MS])
    monkeypatch.setattr(slow_steps_module, "host_clock", lambda: next(times))
    watch._note("start", {"generation": 2})
    watch._note("stop", {"generation": 2})
    assert watch.between(0, 15 * MS) == (5 * MS, 2)
    assert watch.between(15 * MS, 40 * MS) == (15 * MS, 2)
    assert watch.between(30 * MS, 40 * MS) == (0, None)


def test_the_collector_is_watched_only_while_the_loop_runs(tmp_path):
    seen = []
    module = Net(at_batch=lambda batch: seen.append(len(gc.callbacks)))
    before = list(gc.callbacks)
    fit_quietly(make_trainer(tmp_path, make_callback(tmp_path, active=0)), module, loader())
    assert set(seen) == {len(before) + 1}
    assert gc.callbacks == before


def test_the_collector_is_found_in_the_last_steps_of_a_run(tmp_path):
    """What comes after the last step does not shift the steps."""

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

PAUSE_S = 0.2


def test_a_pause_in_one_step_is_the_worst_step(tmp_path):
    def at_batch(batch_idx):
        if batch_idx == 150:
            time.sleep(PAUSE_S)

    callback = make_callback(tmp_path, active=0)
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
    assert row[keys.index("cause")] in ("Forward", "the machine: other processes had the CPU")
    assert tables["worst_step"].rows
    finding = next(one for one in callback.report.findings if one.kind == "slow_steps")
    assert finding.status is Status.FOUND
    share = next(one.value for one in finding.evidence if one.unit.name == "RATIO")
    assert 0 < share < 1
