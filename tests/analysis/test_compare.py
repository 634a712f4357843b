"""Compare: coverage of the intervals, the decisions based on them, and the command for CI."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import fields, replace
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_modelprof.analysis.change import ASSUMED_RUN_SPREAD, FEW_STEPS, Change
from lightning_modelprof.analysis.compare import (
    DEFAULT_TOLERANCE,
    Outcome,
    compare,
    decide,
    detectable_change,
)
from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.statistics import (
    automatic_block_length,
    block_lengths,
    drift_within,
    resampled_means,
    small_sample_factor,
    t_975,
)
from lightning_modelprof.cli import compare as compare_command
from lightning_modelprof.cli.main import main
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.measure.setup.environment import written_class
from lightning_modelprof.place import Place
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_dashboard_entry import step_columns, timings_of
from lightning_modelprof.report.compare.build_compare import build_comparison
from lightning_modelprof.report.compare.compared_run import ComparedRun, compared_run
from lightning_modelprof.report.compare.stages import build_stages
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.report.model import Evidence, Finding, Report, Severity, Status, Unit
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import StepTag, StepTimings
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.tensorboard.profile_blob import pack_profile, unpack_profile, unpack_steps
from lightning_modelprof.show.terminal.terminal import print_report
from lightning_modelprof.show.text import render_text
from tests.support.fits import loader, run_fit

pytestmark = pytest.mark.slow

MS = 1_000_000
READER, FORWARD, OTHER = (PHASE_INDEX[key] for key in ("dataloader", "forward", "other"))


def steps(durations, *, reader=0, samples=32, tags=0):
    """Steps of these durations in nanoseconds; all but ``reader`` is forward."""
    duration = np.asarray(durations, float).round().astype(np.int64)
    n = len(duration)
    phases = np.zeros((n, len(PHASES)), np.int64)
    phases[:, READER] = reader
    phases[:, FORWARD] = duration - phases[:, READER]
    return StepTimings(
        step=np.arange(n),
        duration_ns=duration,
        phases_ns=phases,
        device_phases_ns=np.full((n, len(PHASES)), -1),
        samples=np.broadcast_to(np.int64(samples), n).copy(),
        tags=np.broadcast_to(np.int64(tags), n).copy(),
    )


def ar1(rng, n, phi, spread=0.1, mean=5 * MS):
    """A stationary AR(1) series with this relative standard deviation."""
    values = np.convolve(rng.normal(size=n + 200), phi ** np.arange(200))[200 : n + 200]
    return mean * (1 + spread * values * math.sqrt(1 - phi**2))


def turns(rng, n, mean=5 * MS):
    """Two alternating workers: every other step takes three times as long."""
    return mean * (1 + 0.5 * (-1.0) ** (np.arange(n) + rng.integers(2)) + 0.1 * rng.normal(size=n))


# The interval


@pytest.fixture
def quick(monkeypatch):
    """Fewer draws, so that hundreds of pairs take only seconds."""
    fewer = partial(resampled_means, resamples=400)
    monkeypatch.setattr("lightning_modelprof.analysis.change.resampled_means", fewer)


@pytest.fixture
def steps_alone(monkeypatch, quick):
    """Assume no spread between runs: simulated runs differ only in their steps."""
    monkeypatch.setattr("lightning_modelprof.analysis.change.ASSUMED_RUN_SPREAD", 0.0)
    monkeypatch.setattr("lightning_modelprof.analysis.change.drift_within", lambda values: 0.0)


SERIES = {
    "independent": lambda rng, n: ar1(rng, n, 0.0),
    "AR(1) 0.5": lambda rng, n: ar1(rng, n, 0.5),
    "AR(1) 0.8": lambda rng, n: ar1(rng, n, 0.8),
    "AR(1) -0.5": lambda rng, n: ar1(rng, n, -0.5),
    "turns": turns,
    "long tail": lambda rng, n: 4 * MS + MS * rng.exponential(size=n),
}


@pytest.mark.parametrize("name", SERIES)
def test_interval_covers_truth(name, steps_alone):
    """95% of 300 pairs: counts from 0.912 to 0.988 (3 deviations) are fair; a little more is safe."""
    rng = np.random.default_rng([ord(letter) for letter in name])
    covered = 0
    for _ in range(300):
        result = compare([steps(SERIES[name](rng, 200))], [steps(1.2 * SERIES[name](rng, 200))])
        covered += result.low <= 1 / 1.2 <= result.high
    assert 0.90 <= covered / 300 <= 0.995


def test_interval_for_independent_steps_is_too_narrow():
    """The simulation can show it: with blocks of one step, a correlation of 0.8 gives about half coverage."""
    rng = np.random.default_rng(8)
    covered = 0
    for _ in range(200):
        before, after = (ar1(rng, 200, 0.8) for _ in range(2))
        error = math.sqrt(sum(values.var(ddof=1) / 200 / values.mean() ** 2 for values in (before, after)))
        covered += abs(math.log(after.mean() / before.mean())) < 1.96 * error
    assert covered / 200 < 0.65


@pytest.mark.parametrize(("runs", "paired"), [(2, False), (3, False), (5, False), (3, True), (6, True)])
def test_interval_covers_runs_that_differ_more_than_steps(runs, paired, quick):
    """Runs differ by 3%, their 60 steps by 2%: ignoring the runs' spread would cover only a few."""
    rng = np.random.default_rng(runs)
    covered = 0
    for _ in range(100):
        drift = 1 + 0.1 * rng.normal(size=runs) if paired else np.ones(runs)
        sides = [
            [
                steps(ar1(rng, 60, 0.3, 0.02, 5 * MS * drift[i] * math.exp(0.03 * rng.normal())))
                for i in range(runs)
            ]
            for _ in range(2)
        ]
        result = compare(*sides, paired=paired)
        covered += result.low <= 1 <= result.high
    assert covered / 100 >= 0.88


def test_pairs_remove_machine_drift():
    rng = np.random.default_rng(4)
    drift = np.linspace(1, 1.5, 5)
    before, after = (
        [steps(ar1(rng, 50, 0.3, 0.02, factor * 5 * MS * slow)) for slow in drift] for factor in (1.0, 1.08)
    )
    paired, unpaired = compare(before, after, paired=True), compare(before, after)
    assert paired.outcome is Outcome.SLOWER
    assert paired.times_as_fast == unpaired.times_as_fast == pytest.approx(1 / 1.08, rel=0.01)
    assert unpaired.outcome is Outcome.CANNOT_TELL
    assert unpaired.low < 1 < unpaired.high


def test_interval_of_two_runs_per_side_by_hand():
    """Constant steps: only the runs differ, so the interval is Student's t with 2 degrees of freedom."""
    before = [steps([ms * MS] * 30) for ms in (10, 12)]
    after = [steps([ms * MS] * 30) for ms in (20, 26)]
    result = compare(before, after)
    assert result.times_as_fast == pytest.approx(11 / 23)
    variance = (math.log(12 / 10) ** 2 / 2 + math.log(26 / 20) ** 2 / 2) / 2
    half = 4.303 * math.sqrt(variance)
    assert result.low == pytest.approx(11 / 23 * math.exp(-half))
    assert result.high == pytest.approx(11 / 23 * math.exp(half))


def test_interval_of_one_run_per_side_by_hand():
    """Constant steps: only the assumed spread between runs is left."""
    result = compare([steps([10 * MS] * 30)], [steps([20 * MS] * 30)])
    half = 1.959964 * ASSUMED_RUN_SPREAD * math.sqrt(2)
    assert (result.low, result.high) == pytest.approx((0.5 * math.exp(-half), 0.5 * math.exp(half)))
    assert result.detectable == pytest.approx(math.expm1((1.959964 + 0.841621) * 0.01 * math.sqrt(2)))


def test_promised_detectable_change_is_detected(steps_alone):
    """In at least four of five cases; a few more, as the interval is the widest of several."""
    rng = np.random.default_rng(5)
    promised = np.mean(
        [compare([noise(rng)], [noise(rng)]).detectable for noise in [lambda r: steps(ar1(r, 200, 0.3))] * 40]
    )
    caught = sum(
        compare([steps(ar1(rng, 200, 0.3))], [steps(ar1(rng, 200, 0.3, mean=(1 + promised) * 5 * MS))]).high
        < 1
        for _ in range(100)
    )
    assert 0.04 < promised < 0.06
    assert 0.75 <= caught / 100 <= 0.97


def test_slowdown_of_5_percent_is_detected(quick):
    """200 steps that vary by 6% and resemble their neighbors, on machines whose runs don't differ."""
    rng = np.random.default_rng(6)
    pairs = [(steps(ar1(rng, 200, 0.3, 0.06)), steps(ar1(rng, 200, 0.3, 0.06, 5.25 * MS))) for _ in range(40)]
    assert sum(compare([before], [after]).high < 1 for before, after in pairs) >= 36


def test_identical_runs_are_rarely_called_different(quick):
    rng = np.random.default_rng(7)
    pairs = [(steps(ar1(rng, 200, 0.5)), steps(ar1(rng, 200, 0.5))) for _ in range(60)]
    outcomes = [compare([before], [after]).outcome for before, after in pairs]
    assert sum(outcome in (Outcome.SLOWER, Outcome.FASTER) for outcome in outcomes) <= 3


def test_speedup_from_article():
    """70.99 and 137.3 steps/s are 1.93 times as fast, 93% more; the article says 193%."""
    report, result = build_comparison(
        [compared(steps([1e9 / 70.99] * 50))], [compared(steps([1e9 / 137.3] * 50))]
    )
    assert result.times_as_fast == pytest.approx(1.934, abs=0.001)
    assert report.title.startswith(
        "FASTER: 1.93× as fast, 14.1 → 7.28 ms per step (95% confidence interval 1.88× to 1.99×)"
    )
    assert dict(report.facts)["Change"] == "93% faster: each step takes 48% less time (tolerance 5%)"
    assert "193" not in render_text(report)


# Algebra


LISTS = st.lists(st.integers(1, 10**9), min_size=FEW_STEPS, max_size=60)


@settings(max_examples=60, deadline=None)
@given(LISTS, LISTS)
def test_swapped_sides_give_inverse(first, second):
    there, back = compare([steps(first)], [steps(second)]), compare([steps(second)], [steps(first)])
    assert there.times_as_fast == pytest.approx(1 / back.times_as_fast)
    assert there.low == pytest.approx(1 / back.high)
    assert there.high == pytest.approx(1 / back.low)
    assert there.low <= there.times_as_fast <= there.high
    opposite = {Outcome.FASTER: Outcome.SLOWER, Outcome.SLOWER: Outcome.FASTER}
    assert there.outcome is opposite.get(back.outcome, back.outcome)


@settings(max_examples=40, deadline=None)
@given(LISTS, LISTS)
def test_parts_add_up_to_whole(first, second):
    sides = [steps(values, reader=np.array(values) // 3) for values in (first, second)]
    result = compare([sides[0]], [sides[1]])
    for side in ("before", "after"):
        step = getattr(result.figures[0], side)
        assert sum(getattr(phase, side) for phase in result.phases) == pytest.approx(step)
    difference = result.figures[0].after - result.figures[0].before
    assert sum(phase.change for phase in result.phases) == pytest.approx(
        difference, abs=1e-6 * max(first + second)
    )
    ips = result.figures[2]
    assert ips.after / ips.before == pytest.approx(result.times_as_fast)


def test_same_steps_give_same_result():
    rng = np.random.default_rng(0)
    first, second = (steps(ar1(rng, 100, 0.5)) for _ in range(2))
    assert compare([first], [second]) == compare([first], [second])


def test_only_clean_steps_count():
    tags = np.array([int(StepTag.SKIP_FIRST)] * 10 + [0] * 30 + [int(StepTag.PROFILED)] * 10)
    before = steps([90 * MS] * 10 + [10 * MS] * 30 + [99 * MS] * 10, tags=tags)
    result = compare([before], [steps([10 * MS] * 30)])
    assert result.num_steps == (30, 30)
    assert result.times_as_fast == 1.0
    assert result.outcome is Outcome.SAME


def test_unmeasured_phase_is_none():
    before = steps([10 * MS] * 30, reader=MS)
    before.phases_ns[:, OTHER] = -1
    phases = {phase.key: phase for phase in compare([before], [steps([10 * MS] * 30)]).phases}
    assert phases["other"].before is None
    assert phases["other"].change is None
    assert phases["dataloader"].change == -MS


def test_ten_thousand_steps_take_less_than_one_second():
    """A loose limit because machines are busy: it takes about 0.15 s."""
    rng = np.random.default_rng(0)
    first, second = (steps(5 * MS * (1 + 0.1 * rng.normal(size=10_000))) for _ in range(2))
    began = time.process_time()
    compare([first], [second])
    assert time.process_time() - began < 1.0


# Decisions


def change(low, middle, high):
    return Change(key="time", before=1.0, after=1.0 + middle, change=middle, low=low, high=high)


@pytest.mark.parametrize(
    ("interval", "expected", "reason"),
    [
        ((-0.04, 0.0, 0.04), Outcome.SAME, ""),
        ((0.01, 0.02, 0.03), Outcome.SAME, ""),
        ((0.01, 0.06, 0.11), Outcome.SLOWER, ""),
        ((0.01, 0.05, 0.09), Outcome.CANNOT_TELL, "slower, but the interval"),
        ((-0.01, 0.06, 0.13), Outcome.CANNOT_TELL, "too noisy"),
        ((-0.11, -0.06, -0.01), Outcome.FASTER, ""),
        ((-0.09, -0.04, -0.01), Outcome.CANNOT_TELL, "faster, but the interval"),
        ((-0.3, 0.0, 0.3), Outcome.CANNOT_TELL, "too noisy"),
    ],
)
def test_decisions(interval, expected, reason):
    outcome, said = decide(change(*interval), (100, 100), 0.05)
    assert outcome is expected
    assert said.startswith(reason)
    assert bool(said) == bool(reason)


@pytest.mark.parametrize(
    ("interval", "expected", "reason"),
    [
        ((-0.5, 0.0, 1.0), Outcome.SAME, ""),
        ((-0.50001, 0.0, 1.0), Outcome.CANNOT_TELL, "too noisy"),
        ((-0.5, 0.0, 1.00001), Outcome.CANNOT_TELL, "too noisy"),
        ((0.00001, 1.00001, 3.0), Outcome.SLOWER, ""),
        ((0.00001, 1.0, 3.0), Outcome.CANNOT_TELL, "slower, but the interval"),
        ((0.0, 1.00001, 3.0), Outcome.CANNOT_TELL, "too noisy"),
        ((-0.75, -0.50001, -0.00001), Outcome.FASTER, ""),
        ((-0.75, -0.5, -0.00001), Outcome.CANNOT_TELL, "faster, but the interval"),
        ((-0.75, -0.50001, 0.0), Outcome.CANNOT_TELL, "too noisy"),
    ],
)
def test_bounds_of_decisions(interval, expected, reason):
    """With a tolerance of 100%, slower means twice the time and faster half the time."""
    outcome, said = decide(change(*interval), (100, 100), 1.0)
    assert outcome is expected
    assert said.startswith(reason)
    assert bool(said) == bool(reason)


@pytest.mark.parametrize("missing", [{"low": None}, {"high": None}, {"low": None, "high": None}])
def test_half_interval_decides_nothing(missing):
    outcome, said = decide(replace(change(0.5, 0.6, 0.7), **missing), (30, 19), 0.05)
    assert outcome is Outcome.CANNOT_TELL
    assert said.startswith(
        f"30 and 19 clean steps are too few to know how much they vary; each side needs {FEW_STEPS}"
    )


def test_sides_without_data_cannot_be_compared():
    result = compare([steps([MS] * 30, tags=1)], [steps([MS] * 30)])
    assert (result.outcome, result.reason) == (Outcome.CANNOT_TELL, "no clean step before")
    assert result.times_as_fast is None
    assert result.detectable is None
    assert compare([StepTimings.empty()], [StepTimings.empty()]).reason == "no clean step before and after"
    still = compare([steps([0] * 30)], [steps([MS] * 30)])
    assert (still.outcome, still.reason) == (Outcome.CANNOT_TELL, "one side took no measurable time")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([10] * 19, [11] * 19, Outcome.CANNOT_TELL),
        ([10] * 5, [15.1] * 5, Outcome.SLOWER),
        ([10] * 5, [14.9] * 5, Outcome.CANNOT_TELL),
        ([10] * 4 + [20], [25] * 5, Outcome.CANNOT_TELL),
        ([16] * 5, [10] * 200, Outcome.FASTER),
        ([10] * 4, [99] * 200, Outcome.CANNOT_TELL),
        ([10] * 5, [15] * 5, Outcome.CANNOT_TELL),  # 1.5 times as long is the limit
        ([15] * 5, [10] * 5, Outcome.CANNOT_TELL),
        ([10] * 5, [25] * 4 + [12], Outcome.CANNOT_TELL),
        ([25] * 4 + [12], [10] * 5, Outcome.CANNOT_TELL),
        ([25] * 5, [10] * 4 + [20], Outcome.CANNOT_TELL),
    ],
)
def test_few_steps(before, after, expected):
    result = compare([steps(np.array(before) * MS)], [steps(np.array(after) * MS)])
    assert result.outcome is expected
    assert result.low is None
    assert "few" in result.reason


def test_few_steps_with_more_ranks_use_total_time_per_sample():
    """Steps take longer but hold more ranks' samples: the total time per sample decides."""
    before, after = [steps([100 * MS] * 10)], [steps([160 * MS] * 10)]
    result = compare(before, after, per_sample=True, ranks=(1, 4))
    assert (result.outcome, result.times_as_fast) == (Outcome.FASTER, pytest.approx(2.5))
    result = compare(after, before, per_sample=True, ranks=(4, 1))
    assert (result.outcome, result.times_as_fast) == (Outcome.SLOWER, pytest.approx(0.4))


@pytest.mark.parametrize(("per_sample", "expected"), [(True, Outcome.FASTER), (False, Outcome.CANNOT_TELL)])
def test_few_steps_with_more_samples(per_sample, expected):
    """Twice the samples in the same time are faster per sample but the same per step."""
    sides = [[steps([10 * MS] * 10, samples=samples)] for samples in (32, 64)]
    assert compare(*sides, per_sample=per_sample).outcome is expected


@pytest.mark.parametrize("count", [10, 100])
@pytest.mark.parametrize("uncounted", [slice(None), slice(0, 1)])
def test_uncounted_samples_decide_nothing(count, uncounted):
    samples = np.full(count, 32)
    samples[uncounted] = -1
    other = steps([100 * MS] * count)
    for sides in permutations(([steps([10 * MS] * count, samples=samples)], [other])):
        result = compare(*sides, per_sample=True)
        assert (result.outcome, result.times_as_fast) == (Outcome.CANNOT_TELL, None)
        assert result.reason == "the sample count of one side is unknown"


def test_paired_needs_equal_numbers_of_runs():
    with pytest.raises(ValueError, match="got 1 and 2"):
        compare([steps([MS] * 30)], [steps([MS] * 30)] * 2, paired=True)


def test_run_without_clean_steps_has_no_partner():
    runs = [steps([MS] * 30), steps([MS] * 30, tags=1), steps([2 * MS] * 30)]
    assert not compare(runs, [steps([MS] * 30)] * 3, paired=True).paired


# Blocks


def test_student_quantiles_match_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, 40), 60, 120, 1_000):
        assert t_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4), freedom


@pytest.mark.parametrize("phi", [0.3, 0.6, 0.8])
def test_automatic_block_length_matches_theory(phi):
    """(2 G² / D)^(1/3) n^(1/3), with the sums over AR(1)'s true covariances: phi^k / (1 - phi²)."""
    n, rng = 100_000, np.random.default_rng(1)
    lags = np.arange(1, 2_000)
    covariances = phi**lags / (1 - phi**2)
    spread = 1 / (1 - phi**2) + 2 * covariances.sum()
    slope = 2 * (lags * covariances).sum()
    theory = (2 * slope**2 / (4 / 3 * spread**2)) ** (1 / 3) * n ** (1 / 3)
    found = np.mean([automatic_block_length(ar1(rng, n, phi)) for _ in range(2)])
    assert found == pytest.approx(theory, rel=0.2)


def test_block_lengths_at_limits():
    assert automatic_block_length(np.ones(50)) == 1.0
    assert automatic_block_length(np.array([1.0, 2.0, 3.0])) == 1.0
    assert block_lengths(np.ones(20)) == (1, 1, 2)
    assert block_lengths(np.ones(10_000)) == (20, 500, 1_000)


@pytest.mark.parametrize(
    ("blocks", "inflation", "quantile"),
    [
        (1.0, 2 / 1, 4.303),  # like 2 blocks: 1.5 degrees of freedom, rounded to 2
        (2.0, 2 / 1, 4.303),
        (3.0, 3 / 2, 3.182),  # 3 degrees
        (5.0, 5 / 4, 2.447),  # 6 degrees
        (11.0, 11 / 10, 2.131),  # 15 degrees
        (21.0, 21 / 20, 2.042),  # 30 degrees
    ],
)
def test_few_blocks_widen_interval(blocks, inflation, quantile):
    """By the variance that n draws of n miss, and by Student's t instead of the normal quantile."""
    assert small_sample_factor(blocks) == pytest.approx(math.sqrt(inflation) * quantile / 1.959964, rel=1e-6)


def test_resampled_means_by_hand():
    """Blocks as long as the series contain every step once, wherever they start: no variation."""
    columns = np.array([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0]])
    assert resampled_means(columns, 3, resamples=50) == pytest.approx(np.tile([3.0, 30.0], (50, 1)))
    drawn = resampled_means(columns, 2, resamples=500)
    # Two blocks of two out of (1,2) (2,6) (6,1): the mean is the mean of two of 1.5, 4, 3.5.
    allowed = {(a + b) / 2 for a in (1.5, 4.0, 3.5) for b in (1.5, 4.0, 3.5)}
    assert set(drawn[:, 0].round(6)) == allowed
    assert drawn[:, 1] == pytest.approx(10 * drawn[:, 0])


def test_no_change_is_detectable_without_interval():
    assert detectable_change(replace(change(0, 0, 0), low=None, high=None)) is None


def test_drift_by_hand():
    """Alternating tenths of 0.9 and 1.1: there's no variation within a tenth, so all of it is drift."""
    values = np.repeat([0.9, 1.1] * 5, 20)
    variance = 10 * 0.1**2 / 9
    explained = (40 * 0.1**2 / 39) * 5 / 20
    assert drift_within(values) == pytest.approx(math.sqrt(variance - explained))
    assert drift_within(values[:39]) == 0.0
    assert drift_within(np.ones(200)) == drift_within(np.zeros(200)) == 0.0
    assert drift_within(np.tile([0.9, 1.1], 100)) == 0.0


def test_drift_is_rarely_found_without_drift():
    rng = np.random.default_rng(3)
    assert sum(drift_within(ar1(rng, 200, 0.0)) > 0 for _ in range(400)) / 400 < 0.1


# The report


def compared(timings, *, source="run", findings=(), **info):
    run = Run(
        info=RunInfo(**({"created": "2026-01-01T00:00:00+00:00", "status": "finished"} | info)),
        ranks=(RankRecord(rank=0, steps=timings),),
    )
    analysis = Facts(run)
    report = replace(build_report(analysis), findings=tuple(findings))
    return compared_run(source, report, timings)


def table(report, name):
    return next(table for table in report.tables if table.id == f"comparison_{name}")


def noisy(mean_ms, seed, n=200):
    return steps(ar1(np.random.default_rng(seed), n, 0.3, 0.03, mean_ms * MS), reader=MS)


def test_first_lines():
    def first_line(before, after, **arguments):
        report, _ = build_comparison([compared(before)], [compared(after)], **arguments)
        return report.title

    assert first_line(noisy(28, 0), noisy(21, 1)).startswith("FASTER: 1.33× as fast, 27.")
    assert first_line(noisy(21, 1), noisy(28, 0)).startswith("SLOWER: 0.75× as fast, 20.")
    assert first_line(noisy(28, 0), noisy(28, 1)).startswith("SAME within 5.0%: ")
    assert first_line(noisy(28, 0), noisy(28, 1), tolerance=0.001).startswith("CANNOT TELL: ")
    assert first_line(noisy(28, 0, 10), noisy(27, 1, 10)).endswith("(too few steps for an interval)")
    assert first_line(noisy(28, 0, 0), noisy(28, 1)) == "CANNOT TELL: no clean step before"


def test_doubled_batch_is_compared_per_sample():
    """Twice the samples in 1.6 times the time: steps are slower, but training is 1.25 times as fast."""
    before, after = steps([10 * MS] * 50, samples=32), steps([16 * MS] * 50, samples=64)
    report, result = build_comparison([compared(before)], [compared(after)])
    assert result.per_sample
    assert result.times_as_fast == pytest.approx(1.25)
    assert report.title == "FASTER: 3,200 → 4,000 samples/s (no speedup shown because batch size differs)"
    assert ("Warning", "Batch size differs: 32 before, 64 after.") in report.facts
    assert "Change" not in dict(report.facts)
    assert ("samples per step", "32", "64") in table(report, "settings").rows
    assert any("time per sample decides" in note for note in report.notes)


def test_more_ranks_are_compared_by_total_samples():
    """Four ranks with the same batch each, each 1.25 times as slow: 3.2 times as fast, and shown as such."""
    before, after = compared(steps([10 * MS] * 50)), compared(steps([12.5 * MS] * 50), world_size=4)
    report, result = build_comparison([before], [after])
    assert result.times_as_fast == pytest.approx(3.2)
    assert report.title.startswith("FASTER: 3.20× as fast, 3,200 → 10,240 samples/s, all ranks")
    worlds = "Different world sizes: 1 before, 4 after. The result includes this difference."
    assert [text for label, text in report.facts if label == "Warning"] == [
        worlds,
        "All figures and phases are from the first rank.",
    ]
    stages = build_stages([before, after])
    assert stages.title == "2 runs: run is 3.20× as fast as run"
    assert stages.facts == (("Warning", f"run: {worlds}"),)
    strong = build_comparison([before], [compared(steps([5 * MS] * 50, samples=8), world_size=4)])
    assert not strong[1].per_sample
    assert "2.00× as fast" in strong[0].title
    other, _ = build_comparison([before], [compared(steps([5 * MS] * 50, samples=16), world_size=4)])
    assert ("Warning", "Batch size per rank differs: 32 before, 16 after.") in other.facts
    assert "no speedup shown because batch size per rank differs" in other.title


def test_different_settings_are_listed():
    before = compared(
        steps([MS] * 30), versions={"torch": "2.4"}, config={"active": 3, "dirpath": "a"}, model="A"
    )
    after = compared(
        steps([MS] * 30), versions={"torch": "2.5"}, config={"active": 0, "dirpath": "b"}, model="B"
    )
    report, _ = build_comparison([before], [after])
    assert table(report, "settings").rows == (
        ("model", "A", "B"),
        ("torch version", "2.4", "2.5"),
        ("callback: active", "3", "0"),
    )
    assert ("Warning", "Model differs: A before, B after.") in report.facts
    mixed, _ = build_comparison([before, after], [before, before])
    differing = "model, torch version, callback: active"
    said = f"The runs before aren't repeats of the same run; they differ in {differing}."
    assert ("Warning", said) in mixed.facts


OTHERS = {
    "Model": ({"model": "A"}, {"model": "B"}, "A before, B after"),
    "Device": ({"device_name": "H100"}, {"device_name": "H200"}, "cpu H100 before, cpu H200 after"),
    "Precision": ({"precision": "32-true"}, {"precision": "bf16-mixed"}, "32-true before, bf16-mixed after"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_different_setups_show_no_speedup(name):
    one, other, values = OTHERS[name]
    before, after = compared(noisy(28, 0), **one), compared(noisy(21, 1), **other)
    report, result = build_comparison([before], [after])
    assert result.outcome is Outcome.FASTER
    assert re.fullmatch(
        rf"FASTER: [\d.]+ → [\d.]+ ms per step \(no speedup shown because {name.lower()} differs\)",
        report.title,
    )
    assert report.facts[0] == ("Warning", f"{name} differs: {values}.")
    assert "Change" not in dict(report.facts)
    assert table(report, "figures").rows
    assert [one.name for one in report.summary.comparison.differences] == [name]
    stages = build_stages([before, after])
    assert "as fast" not in stages.title
    assert stages.facts == (("Warning", f"run: {name} differs: {values}."),)


def test_unknown_setting_is_not_difference():
    report, _ = build_comparison([compared(noisy(28, 0), model="A")], [compared(noisy(21, 1))])
    assert "1.33× as fast" in report.title
    assert "Warning" not in dict(report.facts)
    after = compared(noisy(21, 1), model="A")
    known, _ = build_comparison([compared(noisy(28, 0), model=name) for name in ("A", "")], [after])
    assert not any("differs" in text for _, text in known.facts)
    other, _ = build_comparison([compared(noisy(28, 0), model=name) for name in ("B", "")], [after])
    assert ("Warning", "Model differs: B before, A after.") in other.facts


def test_order_of_runs_is_not_difference():
    one, other = (compared(noisy(28, 0), model=name) for name in "AB")
    report, _ = build_comparison([one, other], [other, one])
    assert not any("differs" in text for _, text in report.facts)
    assert not table(report, "settings").rows


@pytest.mark.parametrize("wrapper", ["OptimizedModule", "DistributedDataParallel"])
def test_stored_wrapper_as_model_is_unknown(wrapper):
    report, _ = build_comparison(
        [compared(noisy(28, 0), model="Net")], [compared(noisy(21, 1), model=wrapper)]
    )
    assert "1.33× as fast" in report.title
    assert "Warning" not in dict(report.facts)


def test_wrapped_model_is_recorded_by_its_own_class():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    model = Wrapped()
    assert written_class(torch.compile(model)) is Wrapped
    assert written_class(nn.DataParallel(torch.compile(model))) is Wrapped
    assert written_class(model) is Wrapped  # it has a .module, too


def test_note_if_before_is_newer():
    old, new = (compared(noisy(5, 0), created=f"2026-01-0{day}T09:30:00+00:00") for day in (1, 2))
    report, _ = build_comparison([new], [old])
    said = "Before is the newer run (started 2026-01-02 09:30, after 2026-01-01 09:30). Swap them?"
    assert dict(report.facts)["Order"] == said
    assert "Order" not in dict(build_comparison([old], [new])[0].facts)
    assert "Order" not in dict(build_comparison([old, new], [new, old])[0].facts)
    middle = compared(noisy(5, 0), created="2026-01-01T20:00:00+00:00")
    report, _ = build_comparison([new], [old, middle])
    assert dict(report.facts)["Order"] == said.replace("after 2026-01-01 09:30", "after 2026-01-01 20:00")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("2026-01-01T10:00:00+02:00", "2026-01-01T09:00:00+00:00", ""),  # an hour earlier in another zone
        (
            "2026-01-01T09:30:00+00:00",
            "2026-01-01T10:00:00+02:00",
            "Before is the newer run (started 2026-01-01 09:30, after 2026-01-01 08:00). Swap them?",
        ),
        ("2026-01-01T09:00:59+00:00", "2026-01-01T09:00:00+00:00", ""),  # ranks of one job
        ("now", "2026-01-01T09:00:00+00:00", ""),
        ("2026-01-02T09:00:00", "2026-01-01T09:00:00", ""),
        ("2026-01-02T09:00:00+00:00", "", ""),
    ],
)
def test_order_is_decided_by_time(before, after, said):
    runs = [[compared(noisy(5, 0), created=created)] for created in (before, after)]
    assert dict(build_comparison(*runs)[0].facts).get("Order", "") == said


def test_interleaved_runs_are_recognized_by_start_time():
    def at(second):
        return compared(steps([MS] * 30), created=f"2026-01-01T00:00:{second:02}+00:00")

    assert build_comparison([at(0), at(30)], [at(10), at(20)])[1].paired  # A B B A
    assert not build_comparison([at(0), at(10)], [at(20), at(30)])[1].paired
    assert not build_comparison([at(0), at(10)], [at(0), at(10), at(20)])[1].paired
    assert not build_comparison([at(0), at(0)], [at(0), at(0)])[1].paired
    zones = [
        compared(steps([MS] * 30), created=f"2026-01-01T{text}")
        for text in ("12:00:00+02:00", "10:30:00+00:00")
    ]
    later = [compared(steps([MS] * 30), created=f"2026-01-01T{text}:00+00:00") for text in ("10:10", "10:40")]
    assert build_comparison(zones, later)[1].paired


def finding(kind, *, function=None, status=Status.FOUND, line=1):
    return Finding(
        kind=kind,
        status=status,
        title=kind.replace("_", " "),
        summary="so it is",
        severity=Severity.WARNING if status is Status.FOUND else None,
        saving_ns_per_step=2.0 * MS,
        locations=(Place(file="a.py", line=line, function=function),),
        evidence=(Evidence(label="x", value=1, unit=Unit.COUNT),),
    )


def test_removed_and_new_findings():
    before = compared(
        steps([MS] * 30),
        findings=(finding("sync", function="f"), finding("sync", function="g"), finding("input")),
    )
    after = compared(
        steps([MS] * 30),
        findings=(
            finding("sync", function="g", line=9),
            finding("copy"),
            finding("input", status=Status.CLEAN),
        ),
    )
    rows = table(build_comparison([before], [after])[0], "findings").rows
    assert rows == (
        ("sync", "removed", 2.0 * MS, None),
        ("input", "removed", 2.0 * MS, None),
        ("copy", "new", None, 2.0 * MS),
        ("sync", "unchanged", 2.0 * MS, 2.0 * MS),
    )
    moved = compared(steps([MS] * 30), findings=(finding("input", function="elsewhere"),))
    rows = table(build_comparison([before], [moved])[0], "findings").rows
    assert ("input", "unchanged", 2.0 * MS, 2.0 * MS) in rows
    nobody_looked, _ = build_comparison([compared(steps([MS] * 30))], [after])
    assert table(nobody_looked, "findings").absent_reason == "one side has no findings data"


def test_largest_phase_change_is_listed_first():
    report, _ = build_comparison(
        [compared(steps([10 * MS] * 30, reader=4 * MS))], [compared(steps([9 * MS] * 30, reader=MS))]
    )
    rows = table(report, "phases").rows
    assert [row[0] for row in rows] == ["Step", "Dataloader", "Forward"]
    assert [row[3] for row in rows] == pytest.approx([-MS, -3 * MS, 2 * MS])
    assert [row[-1] for row in rows] == ["less", "less", "more"]


def test_report_works_in_every_output():
    for before, after in ((noisy(5, 0), noisy(5, 1)), (noisy(5, 0, 3), noisy(5, 0, 0))):
        report, result = build_comparison([compared(before)], [compared(after)])
        assert render_text(report).splitlines()[0] == report.title
        comparison = json.loads(render_json(report))["summary"]["comparison"]
        assert comparison["outcome"] == result.outcome.value
        assert comparison["exit_code"] in (0, 3, 4)


# Comparisons from a report and its steps


def stored(source, run, report):
    """The part of a run that an event file stores."""
    blobs = pack_profile(
        DashboardEntry(
            kind="run",
            loop=run.info.loop,
            window=None,
            label="all steps",
            report=report,
            steps=step_columns(run.ranks[0].steps),
        )
    )
    return compared_run(source, unpack_profile(blobs[0]).report, timings_of(unpack_steps(blobs[1])))


def test_report_and_steps_are_enough_to_compare(tmp_path):
    """Real fits, one with twice the batch: the result equals that from all measurements."""
    measured, kept = [], []
    for batch_size in (2, 4):
        folder = tmp_path / str(batch_size)
        live = run_fit(folder, data=loader(size=128, batch_size=batch_size), wait=5, active=3).report
        run = load_run(str(folder))
        analysis = Facts(run)
        report = build_report(analysis)
        assert report.summary.settings == live.summary.settings
        measured.append(compared_run(str(folder), report, analysis.steps))
        kept.append(stored(str(folder), run, report))
    for one, other in zip(measured, kept, strict=True):
        for field in fields(ComparedRun):
            if field.name not in ("steps", "report"):
                assert getattr(one, field.name) == getattr(other, field.name), field.name
        assert one.global_batch_size == other.global_batch_size is not None
    (first, result), (second, again) = (build_comparison(runs[:1], runs[1:]) for runs in (measured, kept))
    assert result == again
    assert result.per_sample
    for field in fields(Report):
        assert getattr(first, field.name) == getattr(second, field.name), field.name
    assert ("samples per step", "2", "4") in table(second, "settings").rows


def test_run_without_clean_steps_is_stored():
    run = Run(info=RunInfo(created="now"), ranks=(RankRecord(rank=0, steps=steps([MS] * 3, tags=1)),))
    one = stored("a", run, build_report(Facts(run)))
    assert (one.num_clean_steps, one.batch_cost_ns, one.global_batch_size) == (0, None, None)


def test_report_without_run_is_rejected():
    report = Report(title="t", facts=(), tables=(), notes=())
    with pytest.raises(ArchiveError, match="a: expected a run's report"):
        compared_run("a", report, steps([MS]))


# The command


def many_findings(state):
    return [finding(f"a_finding_with_a_long_name_that_is_{state}_{i}", function="f") for i in range(9)]


@pytest.mark.parametrize("is_worst", [False, True])
def test_terminal_output_has_at_most_twenty_lines(is_worst, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    rng = np.random.default_rng(3)
    sides = []
    for number, state in enumerate(("gone", "new")):
        timings = noisy(28 - 8 * number, number)
        if is_worst:  # every phase changes
            phases = rng.normal(MS * (1 + number), MS / 100, timings.phases_ns.shape).astype(np.int64)
            timings.phases_ns[:], timings.duration_ns[:] = phases, phases.sum(axis=1)
        info = {"model": f"{'M' * 120}{number}", "precision": str(number), "device_name": str(number)}
        found = [*many_findings(state), finding("busy_cpus")]
        runs = 5 if is_worst else 1
        if is_worst:
            info |= {"world_size": 1 + number, "status": "failed"}
        sides.append(
            [
                compared(
                    timings,
                    source=f"runs/{'x' * 30}{state}{run}",
                    **(info | {"num_threads": run} if is_worst else {}),
                    findings=found if is_worst else found[:1],
                    created=f"2026-01-0{5 - number}T00:00:00+00:00",
                )
                for run in range(runs)
            ]
        )
    report, _ = build_comparison(*sides)
    print_report(report, last_words=["newest of 2: a", "newest of 3: b", "all tables: add --full"])
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for said in (
        "Order: ",
        "Before: ",
        "After: ",
        "-BOUND, 5 runs" if is_worst else "After: BALANCED, 200 clean steps: ",
        "Findings gone: ",
        "New findings: ",
        "more warnings in all tables" if is_worst else "Forward ",
    ):
        assert said in text, text
    assert ("more in all tables" in text) == is_worst
    assert ("no speedup shown" in " ".join(lines)) == is_worst
    assert lines[-1] == "all tables: add --full"


def test_unchanged_phases_are_not_shown(capsys):
    report, _ = build_comparison([compared(noisy(28, 0))], [compared(noisy(28, 1))])
    print_report(report)
    out = capsys.readouterr().out
    assert "No phase changed by more than its error." in out
    assert "Phase changes per step" not in out
    few, _ = build_comparison([compared(noisy(28, 0, 5))], [compared(noisy(28, 1, 5))])
    print_report(few)
    assert "Too few steps to compare phases." in capsys.readouterr().out
    print_report(report, full=True)
    assert "Phase changes per step" in capsys.readouterr().out


@pytest.fixture
def saved(tmp_path):
    """Saves runs as ``folder/modelprof/run.json``; returns the folder as text."""

    def save(name, timings, **info):
        folder = tmp_path / name
        (folder / "modelprof").mkdir(parents=True)
        run = Run(info=RunInfo(**({"created": "now"} | info)), ranks=(RankRecord(rank=0, steps=timings),))
        save_run(run, folder / "modelprof" / "run.json")
        return str(folder)

    return save


def test_exit_codes(saved, capsys):
    fast, slow, slower, short = (
        saved(name, noisy(ms, seed, n))
        for seed, (name, ms, n) in enumerate((("a", 5, 200), ("b", 7, 200), ("c", 7.4, 200), ("d", 5.2, 10)))
    )
    assert main(["compare", slow, fast]) == 0
    assert capsys.readouterr().out.startswith("FASTER: 1.4")
    assert main(["compare", fast, slow]) == 3
    assert main(["compare", fast, slow, "--tolerance", "0.9"]) == 0
    assert main(["compare", slow, slower, "--tolerance", "0.15"]) == 0
    assert main(["compare", fast, short]) == 4
    assert capsys.readouterr().err == ""


def test_runs_are_given_as_folder_or_file(saved, tmp_path, capsys):
    saved("a", noisy(5, 0))
    saved("b", noisy(5, 1))
    (tmp_path / "a" / "modelprof" / "report.json").write_text("{}")
    target = tmp_path / "out.json"
    before, after = tmp_path / "a" / "modelprof" / "report.json", tmp_path / "b" / "modelprof"
    assert main(["compare", str(before), str(after), "--json", str(target)]) == 0
    assert capsys.readouterr().out == ""
    comparison = json.loads(target.read_text())["summary"]["comparison"]
    assert comparison["outcome"] == "same"
    assert comparison["runs_before"][0]["source"] == str(before)


def test_short_output_shows_warnings(saved, capsys):
    before = saved("a", noisy(5, 0), status="finished", num_threads=1)
    other = saved("c", noisy(5, 2), status="finished", num_threads=2)
    after = saved("b", noisy(5, 1), status="failed", world_size=2)
    main(["compare", "--before", before, other, "--after", after])
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 20
    text = " ".join(out.split())
    for said in (
        "Warning: Different world sizes: 1 before, 2 after. The result includes this difference.",
        "Warning: The runs before aren't repeats of the same run; they differ in threads.",
        f"Warning: {after}: the run is failed, not finished.",
        "Warning: All figures and phases are from the first rank.",
    ):
        assert said in text, text


def test_several_runs_per_side(saved, tmp_path, capsys):
    before = [saved(f"a{i}", noisy(5, i)) for i in range(3)]
    after = [saved(f"b{i}", noisy(7, 10 + i)) for i in range(3)]
    assert main(["compare", "--before", *before, "--after", *after]) == 3
    out = capsys.readouterr().out
    assert "3 runs, 600 clean steps" in out
    assert "from the differences between runs of the same side" not in " ".join(out.split())
    assert main(["compare", "--before", *before, "--after", *after, "--full"]) == 3
    full = capsys.readouterr().out
    assert "from the differences between runs of the same side" in " ".join(full.split())


@pytest.mark.parametrize(
    "arguments",
    [[], ["a"], ["--before", "a"], ["a", "b", "--before", "c"], ["a", "--after", "b"]],
)
def test_wrong_sides_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    assert ended.value.code == 2
    assert "expected two runs, or runs for both --before and --after, got" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "1", "-0.1", "5%", "nan"])
def test_wrong_tolerance_is_rejected(text, capsys):
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", "--tolerance", text])
    assert "expected a fraction above 0 and below 1" in capsys.readouterr().err


def test_errors_take_one_line(saved, tmp_path, capsys):
    fit, validation = saved("a", noisy(5, 0)), saved("b", noisy(5, 1), loop="validate")
    for arguments, message in (
        ([fit, str(tmp_path / "none")], "no such file or directory: "),
        ([fit, fit], "the same run is given twice, first as"),
        ([fit, f"{fit}/modelprof/run.json"], "the same run is given twice, first as"),
        ([fit, validation], "expected a trainer.fit run like"),
    ):
        assert main(["compare", *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_help_lists_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "Exit status: 0 if AFTER is faster or unchanged, or if a table is printed; 3 if it is slower by more"
        " than the tolerance; 4 if the result is CANNOT TELL" in out
    )
    assert "BEFORE AFTER" in out


def test_default_tolerance_is_shared():
    assert compare_command.DEFAULT_TOLERANCE == DEFAULT_TOLERANCE


@pytest.mark.parametrize("sides", [(1, 1), (1, 3), (3, 3)])
def test_single_runs_on_busy_machine_cannot_tell(sides):
    """Twice as fast according to the steps, but the difference may come from the machine."""
    quick = [compared(steps([MS] * 60)) for _ in range(sides[1])]
    slow = [compared(steps([2 * MS] * 60)) for _ in range(sides[0])]
    assert build_comparison(slow, quick)[1].outcome is Outcome.FASTER
    busy = [compared(steps([2 * MS] * 60), findings=(finding("busy_cpus"),)), *slow[1:]]
    for before, after in ((busy, quick), (quick, busy)):
        report, result = build_comparison(before, after)
        is_single = min(sides) == 1
        assert (result.outcome is Outcome.CANNOT_TELL) == is_single
        assert ("ran on a busy machine" in dict(report.facts).get("Why", "")) == is_single
        assert report.summary.comparison.exit_code == (4 if is_single else 0 if before is busy else 3)
