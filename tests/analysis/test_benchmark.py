"""The benchmark figures, compared with independent formulas and with Paddle's output."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.steps.benchmark import all_ranks, averages, benchmark, exclusions
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.ranks import pack_rank_steps, unpack_rank_steps
from lightning_modelprof.run.records import RankSteps
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings
from tests.support.fits import (
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    steps_of,
)

pytestmark = pytest.mark.slow

DATALOADER = PHASE_INDEX["dataloader"]
SKIP = 10  # steps that Paddle's benchmark skips


def make_steps(duration, reader=None, samples=None, tags=None):
    """Steps with these columns; time outside the reader is forward."""
    n = len(duration)
    duration = np.array(duration, np.int64)
    reader = np.zeros(n, np.int64) if reader is None else np.array(reader, np.int64)
    phases = np.zeros((n, len(PHASES)), np.int64)
    phases[:, DATALOADER] = reader
    phases[:, PHASE_INDEX["forward"]] = duration - np.maximum(reader, 0)
    return StepTimings(
        step=np.arange(n),
        duration_ns=duration,
        phases_ns=phases,
        device_phases_ns=np.full((n, len(PHASES)), NOT_MEASURED, np.int64),
        samples=np.full(n, NOT_MEASURED) if samples is None else np.array(samples, np.int64),
        tags=np.zeros(n, np.int64) if tags is None else np.array(tags, np.int64),
    )


NO_TAG = st.just(0)


@st.composite
def all_steps(draw, tags=NO_TAG, unknown_samples=False):
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(1, 10**10), st.integers(0, 10**10), st.integers(-unknown_samples, 10**6), tags
            ),
            min_size=1,
            max_size=30,
        )
    )
    duration, reader, samples, tag = zip(*rows, strict=True)
    return make_steps(duration, np.minimum(reader, duration), samples, tag)


tagged = all_steps(tags=st.integers(0, 255), unknown_samples=True)


def close(value):
    return pytest.approx(float(value), rel=1e-12, abs=1e-12)


def percentile(values, q):
    """Linear interpolation between the two nearest sorted values, in fractions."""
    values = sorted(values)
    place = Fraction(q, 100) * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def assert_statistics(found, values, average):
    """``values``: the per-step figures, exact."""
    assert found.avg == close(average)
    assert found.max == close(max(values))
    assert found.min == close(min(values))
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(found, name) == close(percentile(values, q)), name


def test_known_figures():
    figures = benchmark(
        make_steps([1000, 2000, 3000, 6000], reader=[500, 500, 500, 1500], samples=[4, 4, 4, 3])
    )
    assert figures.num_steps == 4
    cost = figures.batch_cost_ns
    assert (cost.avg, cost.max, cost.min, cost.p50) == (3000, 6000, 1000, 2500)
    assert cost.p90 == pytest.approx(5100)
    assert cost.p99 == pytest.approx(5910)
    assert (figures.reader_cost_ns.avg, figures.reader_cost_ns.max) == (750, 1500)
    assert figures.reader_ratio.avg == 3000 / 12000  # ratio of the totals, not 0.29, the mean of the ratios
    assert (figures.reader_ratio.max, figures.reader_ratio.min) == (0.5, pytest.approx(1 / 6))
    assert figures.steps_per_s.avg == 4 / 12e-6
    assert (figures.steps_per_s.max, figures.steps_per_s.min) == (1e6, pytest.approx(1e9 / 6000))
    assert figures.samples_per_s.avg == 15 / 12e-6
    assert figures.samples_per_step == 3.75


@given(all_steps())
def test_figures_match_exact_arithmetic(steps):
    figures = benchmark(steps)
    duration = [Fraction(v) for v in steps.duration_ns.tolist()]
    reader = [Fraction(v) for v in steps.phases_ns[:, DATALOADER].tolist()]
    samples = [Fraction(v) for v in steps.samples.tolist()]
    total = sum(duration)
    assert_statistics(figures.batch_cost_ns, duration, total / len(duration))
    assert_statistics(figures.reader_cost_ns, reader, sum(reader) / len(reader))
    ratios = [r / d for r, d in zip(reader, duration, strict=True)]
    assert_statistics(figures.reader_ratio, ratios, sum(reader) / total)
    assert_statistics(figures.steps_per_s, [10**9 / d for d in duration], 10**9 * len(duration) / total)
    rates = [10**9 * s / d for s, d in zip(samples, duration, strict=True)]
    assert_statistics(figures.samples_per_s, rates, 10**9 * sum(samples) / total)
    assert figures.samples_per_step == close(statistics.mean(samples))


@given(all_steps())
def test_figures_are_consistent(steps):
    figures = benchmark(steps)
    rows = [figures.batch_cost_ns, figures.reader_cost_ns, figures.reader_ratio, figures.steps_per_s]
    for row in rows:
        assert row.min * (1 - 1e-12) <= row.avg <= row.max * (1 + 1e-12)
        assert row.min <= row.p50 <= row.p90 <= row.p99 <= row.max
    assert figures.steps_per_s.max == close(1e9 / figures.batch_cost_ns.min)
    assert figures.steps_per_s.min == close(1e9 / figures.batch_cost_ns.max)
    assert figures.steps_per_s.avg == close(1e9 / figures.batch_cost_ns.avg)
    assert figures.reader_ratio.avg == close(figures.reader_cost_ns.avg / figures.batch_cost_ns.avg)


# Standard errors


def error_of_durations(duration):
    return benchmark(make_steps(duration)).batch_cost_ns.standard_error


def independent_error(values):
    """The error if the values were independent."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def overlapping_batch_means(residuals):
    """The variance of the mean, by definition, in exact fractions."""
    n, length = len(residuals), math.isqrt(len(residuals))
    windows = [sum(residuals[i : i + length]) / length for i in range(n - length + 1)]
    factor = Fraction(n * length, (n - length) * (n - length + 1))
    return factor * sum(mean**2 for mean in windows) / n


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ([10], None),
        ([10, 40], 15.0),  # batches of one: deviation 21.21 over the root of 2
        ([10, 40, 10], 10.0),  # 17.32 over the root of 3
        ([10, 40, 10, 40], 0.0),  # batches of two: all means are 25
        # Means of two are -1500, -500, 1500 around 3000: 2 / (2 * 3) * 4.75e6.
        ([1000, 2000, 3000, 6000], math.sqrt(4.75e6 / 3)),
        # Means of three go from -3 to 3 around 5: 3 / (6 * 7) * 28.
        (list(range(1, 10)), math.sqrt(2)),
    ],
)
def test_standard_error_by_hand(duration, expected):
    assert error_of_durations(duration) == (None if expected is None else pytest.approx(expected))


def test_standard_error_of_ratio_by_hand():
    """5 - 10 / 4 = 2.5 and 5 - 30 / 4 = -2.5, over the mean of 20: their mean varies by 0.125."""
    figures = benchmark(make_steps([10, 30], reader=[5, 5]))
    assert figures.reader_ratio.avg == 0.25
    assert figures.reader_ratio.standard_error == pytest.approx(0.125)


@given(all_steps())
def test_standard_errors_match_exact_arithmetic(steps):
    figures, n = benchmark(steps), len(steps)
    duration = [Fraction(v) for v in steps.duration_ns.tolist()]
    reader = [Fraction(v) for v in steps.phases_ns[:, DATALOADER].tolist()]
    samples = [Fraction(v) for v in steps.samples.tolist()]
    total = sum(duration)
    residuals = {
        "batch_cost_ns": [d - total / n for d in duration],
        "reader_cost_ns": [r - sum(reader) / n for r in reader],
    }
    for name, above in (
        ("reader_ratio", reader),
        ("steps_per_s", [Fraction(10**9)] * n),
        ("samples_per_s", [10**9 * s for s in samples]),
    ):
        ratio = sum(above) / total
        residuals[name] = [(a - ratio * d) / (total / n) for a, d in zip(above, duration, strict=True)]
    for name, values in residuals.items():
        found = getattr(figures, name).standard_error
        if n == 1:
            assert found is None
        else:
            largest = float(max(abs(value) for value in values))
            rounding = 1e-9 * largest + 1e-13 * getattr(figures, name).avg
            expected = math.sqrt(overlapping_batch_means(values))
            assert found == pytest.approx(expected, rel=1e-9, abs=rounding), name


@pytest.mark.parametrize("n", [90, 100, 101])
def test_alternating_steps_vary_less_in_mean(n):
    """Batches from two workers come in pairs."""
    duration = [10_000, 40_000] * (n // 2) + [10_000] * (n % 2)
    assert error_of_durations(duration) < 0.4 * independent_error(duration)


def test_slow_and_fast_periods_vary_more_in_mean():
    lengths = np.random.default_rng(5).geometric(0.1, size=40)  # no period that √n steps might cover exactly
    duration = np.concatenate([[(10_000, 40_000)[i % 2]] * k for i, k in enumerate(lengths)])
    assert error_of_durations(duration) > 2 * independent_error(duration)


def simulate(kind, generator, n):
    """Durations for one run."""
    noise = generator.normal(0, 1e5, size=n)
    if kind == "turns":
        noise += np.where(np.arange(n) % 2, 4e5, -4e5)
    elif kind == "runs":
        for i in range(1, n):
            noise[i] += 0.6 * noise[i - 1]
    return (3e6 + noise).astype(np.int64)


@pytest.mark.parametrize(("kind", "tolerance"), [("independent", 0.12), ("turns", 0.15), ("runs", 0.2)])
def test_standard_error_matches_spread_between_runs(kind, tolerance):
    generator = np.random.default_rng(3)
    runs = [simulate(kind, generator, 400) for _ in range(500)]
    figures = [benchmark(make_steps(run)) for run in runs]
    for name in ("batch_cost_ns", "steps_per_s"):
        rows = [getattr(figure, name) for figure in figures]
        spread = np.std([row.avg for row in rows], ddof=1)
        found = math.sqrt(np.mean([row.standard_error**2 for row in rows]))
        assert found == pytest.approx(spread, rel=tolerance), name
    errors = math.sqrt(np.mean([independent_error(run) ** 2 for run in runs]))
    spread = np.std([figure.batch_cost_ns.avg for figure in figures], ddof=1)
    if kind == "independent":
        assert errors == pytest.approx(spread, rel=tolerance)
    else:  # shows that the test can fail
        assert not 0.6 < errors / spread < 1.5


@given(all_steps(), st.integers(2, 1000))
def test_standard_error_scales_with_unit(steps, factor):
    cost = benchmark(steps).batch_cost_ns
    scaled = benchmark(make_steps(steps.duration_ns * factor, steps.phases_ns[:, DATALOADER] * factor))
    if len(steps) > 1:
        spread = (cost.max - cost.min) * factor
        assert scaled.batch_cost_ns.standard_error == pytest.approx(
            cost.standard_error * factor, rel=1e-9, abs=1e-9 * spread
        )
        ratio = benchmark(steps).reader_ratio
        assert scaled.reader_ratio.standard_error == pytest.approx(ratio.standard_error, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("figure", ["reader_ratio", "steps_per_s", "samples_per_s"])
def test_standard_error_of_ratio_matches_bootstrap(figure):
    """Averaged over many orders of the same steps, because the bootstrap ignores order."""
    generator = np.random.default_rng(1)
    duration = generator.gamma(20, 1e5, size=400).astype(np.int64)
    reader = (duration * generator.beta(2, 5, size=400)).astype(np.int64)
    samples = generator.integers(20, 40, size=400)
    above, scale = {
        "reader_ratio": (reader, 1.0),
        "steps_per_s": (np.ones(400), 1e9),
        "samples_per_s": (samples, 1e9),
    }[figure]
    picks = generator.integers(400, size=(4000, 400))
    resampled = scale * above[picks].sum(axis=1) / duration[picks].sum(axis=1)
    orders = [generator.permutation(400) for _ in range(200)]
    figures = [benchmark(make_steps(duration[o], reader[o], samples[o])) for o in orders]
    found = math.sqrt(np.mean([getattr(f, figure).standard_error ** 2 for f in figures]))
    assert found == pytest.approx(resampled.std(), rel=0.06)


@given(tagged)
def test_exclusions_add_up_to_steps_left_out(steps):
    left = exclusions(StepTotals.of(steps))
    assert sum(exclusion.num_steps for exclusion in left) == len(steps) - len(steps.clean())
    assert all(exclusion.num_steps > 0 for exclusion in left)
    assert len({exclusion.reason for exclusion in left}) == len(left)
    figures = benchmark(steps)
    assert (0 if figures is None else figures.num_steps) == len(steps.clean())


@pytest.mark.parametrize("tag", list(StepTag))
def test_every_unclean_tag_has_reason(tag):
    steps = make_steps([5, 7], tags=[0, tag])
    is_left_out = bool(tag & NOT_CLEAN)
    assert [exclusion.num_steps for exclusion in exclusions(StepTotals.of(steps))] == [1] * is_left_out
    assert benchmark(steps).num_steps == 2 - is_left_out


@given(tagged)
def test_averages_match_benchmark(steps):
    quick, full = averages(StepTotals.of(steps.clean())), benchmark(steps)
    assert (quick is None) == (full is None)
    if quick is None:
        return
    assert quick.num_steps == full.num_steps
    for name in ("batch_cost_ns", "reader_cost_ns", "reader_ratio", "steps_per_s", "samples_per_s"):
        expected = getattr(full, name)
        if expected is None:
            assert getattr(quick, name) is None
        else:
            assert getattr(quick, name) == close(expected.avg), name
    assert sum(quick.phases_ns) == close(full.batch_cost_ns.avg)


def test_unknown_is_none_instead_of_zero():
    figures = benchmark(make_steps([10, 20], reader=[NOT_MEASURED] * 2, samples=[4, NOT_MEASURED]))
    assert figures.reader_cost_ns is None
    assert figures.reader_ratio is None
    assert figures.samples_per_s is None
    assert figures.samples_per_step is None
    assert figures.batch_cost_ns.avg == 15
    assert benchmark(make_steps([10], tags=[StepTag.PROFILED])) is None
    assert benchmark(StepTimings.empty()) is None
    assert averages(StepTotals.of(StepTimings.empty())) is None


def test_unknown_sample_count_in_excluded_step_is_harmless():
    steps = make_steps([10, 20], samples=[NOT_MEASURED, 4], tags=[StepTag.SKIP_FIRST, 0])
    assert benchmark(steps).samples_per_s.avg == 4 / 20e-9


def test_clock_that_stands_still():
    figures = benchmark(make_steps([0, 0]))
    assert figures.batch_cost_ns.avg == 0
    assert figures.steps_per_s is None
    assert figures.reader_ratio is None
    half = benchmark(make_steps([0, 10], samples=[2, 2]))
    assert half.samples_per_s.avg == 4 / 10e-9
    assert half.samples_per_s.max == 2 / 10e-9


# What paddlepaddle 3.3.1's paddle.profiler.Profiler(timer_only=True) printed for two runs of 20 steps on the
# CPU (a slow NumPy dataset with 0 and with 4 workers), and the wall time of each step that the program
# measured with the same clock.
PADDLE = {
    "0 workers": {
        "batch_s": [
            *(0.47696, 0.25469, 0.33877, 0.26871, 0.26349, 0.23625, 0.31736, 0.28113, 0.29299, 0.31845),
            *(0.31484, 0.25142, 0.29268, 0.30816, 0.26014, 0.24769, 0.21570, 0.29679, 0.33083, 0.31633),
        ],
        "batch_cost": {"avg": 0.31529, "max": 0.33082, "min": 0.21570},
        "ips": {"avg": 3.17166, "max": 4.63616, "min": 3.02276},
    },
    "4 workers": {
        "batch_s": [
            *(0.81714, 0.23785, 0.18937, 0.18717, 0.15964, 0.23584, 0.23135, 0.22946, 0.26285, 0.31758),
            *(0.23540, 0.24360, 0.24269, 0.21836, 0.18032, 0.17291, 0.16424, 0.17601, 0.17504, 0.18151),
        ],
        "batch_cost": {"avg": 0.23075, "max": 0.31755, "min": 0.16423},
        "ips": {"avg": 4.33363, "max": 6.08902, "min": 4.10533},
    },
}
# The table from the article that made this summary known (20 steps): its figures are enough.
ARTICLE = {
    "batch_cost": {"avg": 0.01408, "max": 0.01325, "min": 0.01246},
    "ips": {"avg": 70.999, "max": 80.24, "min": 75.464},
}


@pytest.mark.parametrize("run", PADDLE.values(), ids=PADDLE)
def test_paddle_average_divides_by_one_step_too_few(run):
    """It sums the steps from the tenth on, N - 9 of them, and divides by N - 10."""
    timed = run["batch_s"][SKIP - 1 :]
    assert run["batch_cost"]["avg"] == pytest.approx(sum(timed) / (len(timed) - 1), abs=2e-5)
    assert run["batch_cost"]["avg"] / statistics.mean(timed) == pytest.approx(11 / 10, abs=1e-4)
    assert run["batch_cost"]["max"] == pytest.approx(max(timed), abs=5e-5)


def test_paddle_minimum_misses_one_step():
    """ips min is the rate of the slowest step, but the minimum ignores its first value."""
    run = PADDLE["4 workers"]
    assert run["ips"]["min"] > 1.25 / run["batch_cost"]["max"]  # 4.1, but its own maximum gives 3.1


def test_paddle_average_can_be_outside_its_range():
    assert ARTICLE["batch_cost"]["avg"] > ARTICLE["batch_cost"]["max"]
    assert ARTICLE["ips"]["avg"] < ARTICLE["ips"]["min"]
    corrected = ARTICLE["batch_cost"]["avg"] * (20 - 10) / (20 - 9)
    assert ARTICLE["batch_cost"]["min"] < corrected < ARTICLE["batch_cost"]["max"]


@pytest.mark.parametrize("run", PADDLE.values(), ids=PADDLE)
def test_our_figures_for_same_steps_are_consistent(run):
    batch_ns = [round(seconds * 1e9) for seconds in run["batch_s"]]
    tags = [StepTag.SKIP_FIRST] * SKIP + [0] * (len(batch_ns) - SKIP)
    figures = benchmark(make_steps(batch_ns, tags=tags))
    clean = run["batch_s"][SKIP:]
    assert figures.num_steps == 10
    cost, rate = figures.batch_cost_ns, figures.steps_per_s
    assert cost.avg / 1e9 == pytest.approx(statistics.mean(clean))
    assert (cost.max / 1e9, cost.min / 1e9) == (max(clean), min(clean))
    assert cost.min < cost.avg < cost.max
    assert rate.avg == pytest.approx(1e9 / cost.avg)
    assert rate.max == pytest.approx(1e9 / cost.min)
    assert rate.min == pytest.approx(1e9 / cost.max)


# Figures over all ranks


def expected_totals(steps):
    reader = steps.phases_ns[:, DATALOADER]
    return {
        "num_steps": len(steps),
        "batch_total_ns": int(steps.duration_ns.sum()),
        "batch_max_ns": int(steps.duration_ns.max()),
        "batch_min_ns": int(steps.duration_ns.min()),
        "reader_total_ns": None if (reader == NOT_MEASURED).any() else int(reader.sum()),
        "samples": None if (steps.samples == NOT_MEASURED).any() else int(steps.samples.sum()),
    }


def told_of(rank, steps):
    """A rank's message about its clean steps, as received."""
    said = RankSteps(
        rank=rank, host="", num_steps=len(steps), totals=StepTotals.of(steps).clean(), steps=steps.clean()
    )
    return unpack_rank_steps(pack_rank_steps(said))


@given(st.lists(all_steps(unknown_samples=True), min_size=2, max_size=4))
def test_all_ranks_match_benchmark_of_all_steps(parts):
    found = all_ranks([told_of(rank, part) for rank, part in enumerate(parts)])
    together = StepTimings.concatenate([part.clean() for part in parts])
    if len(together) == 0:
        assert found is None
        return
    assert asdict(found) == {"world_size": len(parts), **expected_totals(together)}


def test_all_ranks_need_two_ranks_and_clean_step():
    nothing = told_of(1, StepTimings.empty())
    assert all_ranks([]) is None
    assert all_ranks([told_of(0, make_steps([5, 7]))]) is None
    assert all_ranks([nothing, nothing]) is None
    found = all_ranks([told_of(0, make_steps([5, 7])), nothing])
    assert (found.world_size, found.num_steps, found.batch_total_ns) == (2, 2, 12)


def test_nanoseconds_of_all_ranks_are_exact():
    """More than float32 or float64 can hold."""
    found = all_ranks([told_of(0, make_steps([2**53 + 1])), told_of(1, make_steps([2**53 + 3]))])
    assert (found.batch_total_ns, found.batch_max_ns) == (2**54 + 4, 2**53 + 3)


def test_step_info_covers_each_step_once(tmp_path):
    lines = []

    def at_batch(batch_idx):
        if batch_idx % 8 == 0:
            lines.append(callback.step_info())

    callback = make_callback(tmp_path, active=0, samples_fn=lambda batch: len(batch[0]), unit="images")
    fit_quietly(make_trainer(tmp_path, callback), Net(at_batch), loader())
    steps = steps_of(callback)
    assert lines[0] == ""  # no step has ended yet
    assert callback.step_info() == ""  # training has ended
    for number, line in enumerate(lines[1:]):
        part = steps.select((steps.step >= 8 * number) & (steps.step < 8 * number + 8))
        batch_s = int(part.duration_ns.sum()) / 8e9
        reader_s = int(part.phases_ns[:, DATALOADER].sum()) / 8e9
        assert line == (
            f" reader_cost: {reader_s:.5f} s batch_cost: {batch_s:.5f} s ips: {2 / batch_s:.3f} images/s"
        )
