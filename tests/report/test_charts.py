"""A run's charts, compared with sums by hand or by a loop over the steps."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.charts.all_charts import CHARTS
from lightning_modelprof.report.charts.chart import MAX_BINS, MAX_LAYERS, bin_sizes, bin_starts
from lightning_modelprof.report.charts.steps import MAX_BARS
from lightning_modelprof.report.model import Unit
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings


def make_steps(phases_ns, *, samples=None, tags=None):
    """Steps from {phase: [time per step]}; phases not named take no time."""
    num_steps = len(next(iter(phases_ns.values())))
    times = np.zeros((num_steps, len(PHASES)), np.int64)
    for key, column in phases_ns.items():
        times[:, PHASE_INDEX[key]] = column
    return StepTimings(
        step=np.arange(num_steps),
        duration_ns=np.where(times == NOT_MEASURED, 0, times).sum(axis=1),
        phases_ns=times,
        device_phases_ns=np.full_like(times, NOT_MEASURED),
        samples=np.full(num_steps, NOT_MEASURED) if samples is None else np.array(samples),
        tags=np.zeros(num_steps, np.int64) if tags is None else np.array(tags),
    )


def charts_of(steps, **info):
    run = Run(info=RunInfo(created="", **info), ranks=(RankRecord(rank=0, steps=steps),))
    charts = build_report(Facts(run)).charts
    return {chart.id: chart for chart in charts}


def layers(chart):
    return {series.key: series.values for series in chart.series}


def test_no_steps_give_no_charts():
    assert charts_of(StepTimings.empty()) == {}


def test_each_step_is_point_whose_layers_add_up():
    """Three steps of 10, 20 and 60 ns."""
    charts = charts_of(make_steps({"dataloader": [4, 5, 40], "forward": [6, 15, 20]}))
    chart = charts["phases_per_step"]
    assert (chart.kind, chart.unit, chart.x) == ("stacked", Unit.DURATION_NS, (0.0, 1.0, 2.0))
    assert layers(chart) == {"dataloader": (4.0, 5.0, 40.0), "forward": (6.0, 15.0, 20.0)}
    assert chart.notes == ("All steps, including excluded ones. One point per step.",)
    shares = charts["phase_shares"]
    assert layers(shares) == {"dataloader": (49 / 90,), "forward": (41 / 90,)}
    assert shares.x == (3.0,)


def test_throughput_is_samples_over_time():
    """32 samples in 10 ns are 3.2e9 per second."""
    steps = make_steps({"forward": [10, 20, 0]}, samples=[32, 32, 32])
    chart = charts_of(steps, sample_unit="images")["throughput"]
    assert chart.series[0].values == (3.2e9, 1.6e9, None)  # the clock stood still
    assert chart.series[0].label == "images/s"


def test_throughput_without_samples_counts_steps():
    chart = charts_of(make_steps({"forward": [10, 20]}, samples=[32, NOT_MEASURED]))["throughput"]
    assert chart.series[0].values == (1e8, 5e7)
    assert chart.series[0].label == "steps/s"


def test_long_run_is_binned_without_losing_time():
    generator = np.random.default_rng(3)
    num_steps = 100_000
    forward, backward = generator.integers(1_000, 9_000, (2, num_steps))
    charts = charts_of(make_steps({"forward": forward, "backward": backward}, samples=np.full(num_steps, 8)))
    chart = charts["phases_per_step"]
    assert len(chart.x) == MAX_BINS
    assert chart.x[:3] == (0.0, 250.0, 500.0)
    assert "mean of 250 steps" in chart.notes[0]
    assert layers(chart)["forward"][7] == pytest.approx(forward[1750:2000].mean())
    assert sum(layers(chart)["backward"]) * 250 == pytest.approx(backward.sum())
    rates = charts["throughput"].series[0].values
    assert rates[0] == pytest.approx(8 * 250 * 1e9 / (forward[:250].sum() + backward[:250].sum()))
    assert "covers 250 steps" in charts["throughput"].notes[0]


@pytest.mark.parametrize("num_steps", [1, 2, MAX_BINS, MAX_BINS + 1, 999, 100_001])
def test_bins_hold_every_step_once(num_steps):
    starts = bin_starts(num_steps)
    sizes = bin_sizes(starts, num_steps)
    assert len(starts) <= MAX_BINS
    assert sizes.sum() == num_steps
    assert len(set(sizes[:-1].tolist())) <= 1
    assert 0 < sizes[-1] <= sizes[0]


def test_small_phases_share_a_layer():
    """Of ten phases of 1 to 10 ns, the three smallest (1 + 2 + 3) form the rest."""
    keys = [phase.key for phase in PHASES[:10]]
    charts = charts_of(make_steps({key: [10 - place] for place, key in enumerate(keys)}))
    chart = charts["phases_per_step"]
    assert [series.key for series in chart.series] == [*keys[:MAX_LAYERS], "rest"]
    assert layers(chart)["rest"] == (6.0,)
    labels = ", ".join(phase.label for phase in PHASES[7:10])
    assert chart.notes[-1] == f"Other phases: {labels}."
    assert layers(charts["phase_shares"])["rest"] == (pytest.approx(6 / 55),)
    assert sum(values[0] for values in layers(charts["phase_shares"]).values()) == pytest.approx(1)


def test_unmeasured_phase_is_named_not_zero():
    charts = charts_of(make_steps({"forward": [5, 6], "transfer": [NOT_MEASURED] * 2}))
    for key in ("phases_per_step", "phase_shares"):
        assert set(layers(charts[key])) == {"forward"}
        assert charts[key].notes[-1] == "Not measured: Transfer."


def test_step_time_histogram_counts_clean_steps():
    times = [10_000_000] * 5 + [12_000_000] * 3 + [999_000_000]
    tags = [0] * 8 + [int(StepTag.SKIP_FIRST)]
    chart = charts_of(make_steps({"forward": times}, tags=tags))["step_time"]
    counts = chart.series[0].values
    assert (sum(counts), counts[0], counts[-1]) == (8, 5, 3)
    assert chart.x[0] == 10.0
    width = chart.x[1] - chart.x[0]
    assert chart.x[-1] + width == pytest.approx(12.0)
    assert chart.notes == ("8 clean steps.",)


def test_very_slow_step_does_not_squeeze_bars():
    times = [*range(10_000_000, 10_500_000, 1_000), 900_000_000]
    chart = charts_of(make_steps({"forward": times}))["step_time"]
    assert chart.x[-1] < 11
    assert sum(chart.series[0].values) == 496  # up to the step with 495 of 501 below it
    assert chart.notes[1] == "5 slower steps are past the right edge."


def test_step_time_bars_are_limited():
    times = np.concatenate([np.full(50_000, 10_000_000), np.arange(10_000_000, 15_000_000, 1_000)])
    chart = charts_of(make_steps({"forward": times}))["step_time"]
    assert len(chart.x) <= MAX_BARS


@pytest.mark.parametrize("tags", [[2, 2], [0, 2]])
def test_one_clean_step_has_no_distribution(tags):
    assert "step_time" not in charts_of(make_steps({"forward": [5, 6]}, tags=tags))


def test_evaluation_loops_count_batches():
    charts = charts_of(make_steps({"forward": [5, 6]}), loop="validate")
    assert charts["phases_per_step"].x_label == "batch"
    assert charts["throughput"].series[0].label == "batches/s"


def test_all_but_eight_builders_give_charts():
    charts = charts_of(make_steps({"forward": [5, 6]}))
    # The other eight need FLOP counts, validation, memory per step or per window, several ranks or worker
    # records.
    assert len(charts) == len(CHARTS) - 8
