"""The recorder's memory doesn't grow with the step count: totals stay exact and a sample of steps is kept."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.benchmark import benchmark
from lightning_modelprof.measure.steps.recorder import MAX_KEPT, Recorder
from lightning_modelprof.report.build import build_report
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.step_totals import ADDED, StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings

FORWARD, DATALOADER = PHASE_INDEX["forward"], PHASE_INDEX["dataloader"]
VALIDATION = PHASE_INDEX["validation"]
EVERY = 50  # steps between two cuts, like a Trainer's logging interval


def phases(**times):
    row = [0] * len(PHASES)
    for key, time in times.items():
        row[PHASE_INDEX[key]] = time
    return row


def record(num_steps, row_of, *, max_kept=MAX_KEPT, device_of=None, late=3):
    """A recorder that gets steps as from the ledger, cut and read as by the session."""
    recorder = Recorder(max_kept=max_kept)
    for step in range(num_steps):
        recorder.add(row_of(step))
        if device_of is not None and step >= late:
            recorder.add_device(step - late, device_of(step - late))
        if (step + 1) % EVERY == 0:
            recorder.take_new()
    return recorder


def usual(step):
    """Every 50th step validates, every 7th waits long; forward's time encodes the step number."""
    tags = StepTag.VALIDATION if step % 50 == 0 else 0
    row = phases(forward=1_000_000 + step, dataloader=9_000 if step % 7 == 0 else 1_000, optimizer=5)
    row[VALIDATION] = 40_000_000 if tags else 0
    return row, int(tags), 4


def test_short_run_keeps_all_steps():
    recorder = record(300, usual, max_kept=300)
    assert recorder.totals() is None
    assert recorder.steps().step.tolist() == list(range(300))


@pytest.fixture(scope="module")
def long_run():
    return record(40_000, usual, max_kept=2_000)


def test_long_run_keeps_some_steps_unchanged(long_run):
    steps = long_run.steps()
    assert 1_000 <= len(steps) <= 2_000
    assert (np.diff(steps.step) > 0).all()
    for place in range(0, len(steps), 37):
        row, tags, samples = usual(int(steps.step[place]))
        assert steps.phases_ns[place].tolist() == row
        assert steps.duration_ns[place] == sum(row)
        assert (steps.tags[place], steps.samples[place]) == (tags, samples)


def test_totals_of_long_run_are_exact(long_run):
    totals = long_run.totals()
    rows = [usual(step) for step in range(40_000)]
    assert len(totals) == 40_000
    for tags in (0, int(StepTag.VALIDATION)):
        mine = np.array([row for row, its_tags, _ in rows if its_tags == tags])
        one = totals.select(totals.tags == tags)
        assert one.num_steps.tolist() == [len(mine)]
        assert one.phases_ns[0].tolist() == mine.sum(axis=0).tolist()
        assert one.phases_max_ns[0].tolist() == mine.max(axis=0).tolist()
        assert one.phases_min_ns[0].tolist() == mine.min(axis=0).tolist()
        assert one.num_in_phase[0].tolist() == (mine > 0).sum(axis=0).tolist()
        assert one.duration_ns[0] == mine.sum()
        assert one.duration_max_ns[0] == mine.sum(axis=1).max()
        assert one.duration_min_ns[0] == mine.sum(axis=1).min()
        assert (one.samples[0], one.num_counted[0]) == (4 * len(mine), len(mine))


@pytest.mark.parametrize("period", [2, 3, 7, 10, 16, 50, 64, 100, 128])
def test_periodic_steps_keep_their_share(long_run, period):
    """Special steps are as frequent among kept steps as among all steps, whatever the period."""
    step = long_run.steps().step
    for first in (0, 1, period - 1):
        share = ((step % period) == first).mean()
        assert share == pytest.approx(1 / period, abs=4 / len(step) + 0.05 / period)


def test_kept_steps_are_spread_evenly(long_run):
    step = long_run.steps().step
    assert np.diff(step).max() <= 3 * 40_000 / len(step)


def test_all_ranks_keep_same_steps():
    one = record(9_000, usual, max_kept=500).steps()
    other = record(9_000, lambda step: (phases(backward=step), 0, 1), max_kept=500).steps()
    assert one.step.tolist() == other.step.tolist()


def test_inspected_steps_are_kept():
    inspected = {40, 41, 977, 5_003}

    def row(step):
        return phases(forward=1), int(StepTag.INSPECTED) if step in inspected else 0, 1

    assert inspected <= set(record(20_000, row, max_kept=256).steps().step.tolist())


def test_late_device_times_reach_totals_and_kept_steps():
    def device(step):
        return tuple(step if index == FORWARD else 0 for index in range(len(PHASES)))

    recorder = record(10_000, usual, max_kept=500, device_of=device, late=60)
    totals, steps = recorder.totals(), recorder.steps()
    assert int(totals.total("num_on_device")[FORWARD]) == 10_000 - 60
    assert int(totals.total("device_ns")[FORWARD]) == sum(range(10_000 - 60))
    known = steps.step < 10_000 - 60
    assert (steps.device_phases_ns[known, FORWARD] == steps.step[known]).all()
    assert (steps.device_phases_ns[~known] == NOT_MEASURED).all()


@pytest.mark.parametrize("largest", [1, 2**7, 2**31 - 1, 2**31, 2**40])
def test_large_times_are_kept_exactly(largest):
    recorder = record(6_000, lambda step: (phases(forward=largest, other=3), 0, -1), max_kept=300)
    steps = recorder.steps()
    assert set(steps.phases_ns[:, FORWARD].tolist()) == {largest}
    assert steps.phases_ns.dtype == steps.device_phases_ns.dtype == np.int64
    assert set(steps.samples.tolist()) == {-1}


def test_columns_use_smallest_fitting_integers():
    recorder = record(10_000, lambda step: (phases(forward=3_000_000, dataloader=70_000), 0, 8), max_kept=500)
    part = recorder._kept[0]
    assert (part.phases_ns.dtype, part.device_phases_ns.dtype) == (np.int32, np.int8)
    recorder = record(10_000, lambda step: (phases(forward=3_000_000_000), 0, 8), max_kept=500)
    assert recorder._kept[0].phases_ns.dtype == np.int64


def test_memory_is_bounded():
    """benchmarks/many_steps.py tests 1,000,000 steps; here five times as many steps take no more memory."""

    def grown(num_steps):
        tracemalloc.start()
        recorder = record(num_steps, usual, max_kept=1_000)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert recorder.num_steps == num_steps
        return size

    few, many = grown(8_000), grown(40_000)
    assert many < 1.3 * few
    assert many < 700_000


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(-1, 10**6), min_size=len(PHASES), max_size=len(PHASES)),
        st.sampled_from([0, 1, 4, 32, 36, 64]),
        st.integers(-1, 9),
    ),
    max_size=40,
)


def steps_of(rows):
    """Steps with arbitrary columns; the device's are the host's in reverse order."""
    recorder = Recorder()
    for row in rows:
        recorder.add(row)
    steps = recorder.steps()
    return StepTimings(**(steps.columns() | {"device_phases_ns": steps.phases_ns[:, ::-1].copy()}))


@given(rows=ROWS, cut=st.integers(0, 40))
@settings(max_examples=60)
def test_merged_totals_equal_totals_of_whole(rows, cut):
    steps = steps_of(rows)
    numbers = np.arange(len(steps))
    parts = [StepTotals.of(steps.select(numbers < cut)), StepTotals.of(steps.select(numbers >= cut))]
    whole, merged = StepTotals.of(steps), StepTotals.merge(parts)
    for name in StepTotals.__slots__:
        assert getattr(merged, name).tolist() == getattr(whole, name).tolist(), name
    assert whole.tags.tolist() == sorted(set(steps.tags.tolist()))
    for name in ADDED:
        assert getattr(whole, name).dtype == np.int64


@given(rows=ROWS)
@settings(max_examples=40)
def test_totals_exclude_phases_not_measured(rows):
    steps = steps_of(rows)
    totals = StepTotals.of(steps)
    assert len(totals.total("phases_ns")) == len(totals.total("num_measured")) == len(PHASES)
    for index in range(len(PHASES)):
        known = [value for value in steps.phases_ns[:, index].tolist() if value != NOT_MEASURED]
        assert int(totals.total("phases_ns")[index]) == sum(known)
        assert int(totals.total("num_measured")[index]) == len(known)
        assert bool(totals.measured_phases()[index]) == (len(known) == len(rows))


def run_of(recorder):
    record = RankRecord(rank=0, steps=recorder.steps(), totals=recorder.totals())
    return Run(info=RunInfo(created="2026-01-01T00:00:00+00:00", status="finished"), ranks=(record,))


def test_report_of_long_run_covers_all_steps(tmp_path):
    """It matches the report with every step kept, except for estimates made from kept steps."""
    whole, thin = (run_of(record(20_000, usual, max_kept=size)) for size in (10**6, 1_000))
    save_run(thin, tmp_path / "run.json")
    thin = load_run(tmp_path / "run.json")
    assert thin.ranks[0].num_steps == 20_000
    reports = [build_report(Facts(run)) for run in (whole, thin)]
    whole, kept = (report.summary for report in reports)
    for key in ("num_steps", "wall_ns", "excluded_steps", "num_steps_without_optimizer_step"):
        assert getattr(whole.run, key) == getattr(kept.run, key), key
    assert whole.phases == kept.phases
    benchmarks = [asdict(summary.benchmark) for summary in (whole, kept)]
    assert benchmarks[0]["num_steps"] == benchmarks[1]["num_steps"] == 19_600
    for cost in ("batch_cost_ns", "reader_cost_ns"):
        for figure in ("avg", "max", "min"):
            assert benchmarks[0][cost][figure] == benchmarks[1][cost][figure]
        for figure in ("p50", "p90", "p99"):
            assert benchmarks[1][cost][figure] == pytest.approx(benchmarks[0][cost][figure], rel=0.01)
        assert benchmarks[1][cost]["standard_error"] > 0
    for rate in ("steps_per_s", "reader_ratio", "samples_per_s"):
        assert benchmarks[0][rate]["avg"] == benchmarks[1][rate]["avg"]
    assert reports[0].notes == ()
    assert "of 20,000 steps were saved, evenly spaced" in reports[1].notes[0]
    assert reports[0].verdict.kind == reports[1].verdict.kind


def test_archive_of_short_run_has_no_totals(tmp_path):
    run = run_of(record(100, usual))
    save_run(run, tmp_path / "run.json")
    assert load_run(tmp_path / "run.json").ranks[0].totals is None


@pytest.mark.parametrize("max_kept", [10**6, 400])
def test_no_benchmark_without_clean_step(max_kept):
    tags = int(StepTag.PROFILED)
    recorder = record(3_000, lambda step: (phases(forward=1), tags, 1), max_kept=max_kept)
    assert benchmark(recorder.steps(), recorder.totals()) is None
    run = run_of(recorder)
    assert Facts(replace(run)).exclusions[0].num_steps == 3_000
