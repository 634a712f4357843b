"""One share, one figure: the same name on a page has the same number, and a share says what it is of."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from lightning_modelprof.report.build import build_report, diagnose
from lightning_modelprof.report.model import Severity, Status, Unit
from lightning_modelprof.run.records import CallbackTime
from lightning_modelprof.run.setup import OptimizerSetup
from lightning_modelprof.run.steps import SlowStep, SlowSteps, StepTag
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, found_in, shares_by_name, steps_of

NUM_STEPS = 100


def tags(**numbers):
    """Ten first steps, a validation now and then, and one step that the profiler recorded."""
    found = [StepTag.SKIP_FIRST] * 10 + [StepTag(0)] * (NUM_STEPS - 10)
    for step in (30, 60, 90):
        found[step] = StepTag.VALIDATION
    found[50] = StepTag.PROFILED
    return found


def slow_record(cpu_wait):
    """Two slow steps of two groups of different length, and how long the thread waited in the whole loop."""
    common = {"tags": 0, "usual_ns": 25.0 * MS, "collector_ns": 0, "generation": None, "major_faults": 0}
    phases = {"dataloader": 200 * MS, "forward": 15 * MS}
    worst = tuple(
        SlowStep(
            step=step,
            duration_ns=215 * MS,
            phases_ns=phases,
            first_watched=first,
            last_watched=last,
            watched_ns=watched * MS,
            cpu_wait_ns=waited * MS,
            **common,
        )
        for step, first, last, watched, waited in ((40, 0, 49, 1_000, 100), (80, 50, 99, 4_000, 1_000))
    )
    return SlowSteps(
        factor=3.0,
        count=2,
        excess_ns=380 * MS,
        usual_cpu_wait=0.03,
        cpu_wait_share=cpu_wait,
        why_no_cpu_wait="" if cpu_wait is not None else "no counts",
        worst=worst,
    )


def page(cpu_wait=0.0, callback_ms=2, more_fetch=0.0, **changes):
    """A loader that is too slow, with a few fetches that are far slower, and much around the model."""
    fetch = np.full(NUM_STEPS, 10.0 + more_fetch)
    fetch[[40, 80]] = 200
    fetch[:10] = 60
    at = np.arange(NUM_STEPS)
    phases = {
        "dataloader": fetch,
        "forward": 9.0,
        "backward": 4.0,
        "optimizer": 2.0,
        "logging": 2.0,
        "transfer": 1.5,
        "clip": 1.25,
        "zero_grad": 1.0,
        "lr_scheduler": 1.5,
        "module_hooks": 1.5,
        "validation": np.where(np.isin(at, (30, 60, 90)), 300, 0),
        "checkpoint": np.where(at == 90, 150, 0),
        "profiler": np.where(at == 50, 500, 0.25),
    }
    optimizer = OptimizerSetup(
        kind="Adam", foreach=None, fused=None, has_foreach=True, has_fused=True, num_tensors=300
    )
    analysis = analysis_of(
        steps_of(NUM_STEPS, tags=tags(), **(phases | changes)),
        setup=replace(SETUP, optimizers=(optimizer,)),
        callbacks=(
            CallbackTime(
                callback="Slow", hook="on_train_batch_end", calls=100, total_ns=callback_ms * 100 * MS
            ),
        ),
        cost=cost_of(("", 10, 0, 0), ("layer", 10, 3, 0)),
        slow=slow_record(cpu_wait),
    )
    return build_report(analysis)


def table_of(report, name):
    return next(table for table in report.tables if table.id == name)


def cell(report, table, row, column):
    found = table_of(report, table)
    place = [one.key for one in found.columns].index(column)
    return next(cells[place] for cells in found.rows if cells[0] == row)


WAITS = [0.0, 0.05, 0.3, None]


@pytest.mark.parametrize("cpu_wait", WAITS)
def test_every_share_says_what_it_is_of(cpu_wait):
    report = page(cpu_wait)
    kinds = {one.kind for one in found_in(report)}
    assert {"input_bound", "slow_logger", "slow_callback", "slow_transfer", "clip_cost"} <= kinds
    assert {"validation_share", "checkpoint_share", "slow_forward_outside_model", "slow_steps"} <= kinds
    for sentence in (report.verdict.summary, *(one.summary for one in found_in(report))):
        for after in re.split(r"[\d.]+ %", sentence)[1:]:
            assert after.startswith((" of ", " of it")) or "had no CPU" in sentence, sentence


@pytest.mark.parametrize("cpu_wait", WAITS)
def test_a_share_of_one_name_has_one_figure(cpu_wait):
    """In the words of a finding and in the numbers behind it."""
    shares = shares_by_name(page(cpu_wait))
    assert len(shares) >= 9
    for name, figures in shares.items():
        assert len(figures) == 1, (name, figures)


@pytest.mark.parametrize("cpu_wait", WAITS)
def test_the_verdict_says_the_share_of_its_finding(cpu_wait):
    report = page(cpu_wait, more_fetch=30)
    assert report.verdict.kind == "input_bound"
    [finding] = [one for one in found_in(report) if one.kind == "input_bound"]
    number, whole = re.match(r"([\d.]+) % of (.+) goes to waiting", report.verdict.summary).groups()
    assert whole == ("a clean step" if cpu_wait == 0 else "a usual step")
    step, wait, share = map(
        float,
        re.match(r".*step of ([\d.]+) ms waits ([\d.]+) ms \(([\d.]+) % of it\)", finding.summary).groups(),
    )
    assert finding.summary.startswith(whole.capitalize())
    assert share == pytest.approx(100 * wait / step, abs=0.3)
    assert float(number) == share


def test_of_clean_steps_the_finding_says_what_perf_summary_says():
    report = page(0.0)
    [finding] = [one for one in found_in(report) if one.kind == "input_bound"]
    evidence = {one.label: one.value for one in finding.evidence}
    assert evidence["share of a clean step"] == pytest.approx(
        cell(report, "perf_summary", "Reader Ratio", "avg")
    )
    assert evidence["wait per step"] == cell(report, "perf_summary", "reader_cost", "avg")
    step_ms = cell(report, "perf_summary", "batch_cost", "avg") / MS
    assert f"A clean step of {float(f'{step_ms:.3g}'):g} ms waits" in finding.summary


def test_a_balanced_step_is_that_of_perf_summary():
    quiet = dict.fromkeys(
        ("dataloader", "logging", "transfer", "clip", "zero_grad", "lr_scheduler", "module_hooks"), 0.05
    )
    quiet["validation"] = np.where(np.arange(NUM_STEPS) == 30, 50, 0)
    report = page(0.0, callback_ms=0, **quiet, checkpoint=0.0, forward=3.0)
    assert report.verdict.kind == "balanced"
    model, step = re.search(
        r"take ([\d.]+) % of a clean step of ([\d.]+) ms", report.verdict.summary
    ).groups()
    batch_ms = cell(report, "perf_summary", "batch_cost", "avg") / MS
    assert float(step) == pytest.approx(batch_ms, rel=0.005)
    assert float(model) == pytest.approx(100 * 9 / batch_ms, abs=0.06)


def test_the_chart_is_the_table_and_both_say_that_they_are_of_all_steps():
    report = page(0.0)
    chart = next(one for one in report.charts if one.id == "phase_shares")
    for series in chart.series:
        if series.key != "rest":
            assert series.values[0] == cell(report, "phases", series.label, "ratio")
    for notes in (chart.notes, table_of(report, "phases").notes):
        assert any("Shares here are of all finished steps" in note for note in notes)


def test_waiting_for_a_cpu_is_a_share_of_the_time_that_was_looked_at():
    """100 of 1,000 ms, and 1,000 of 4,000 ms; 3 % where nothing was slow."""
    report = page(0.3)
    table = table_of(report, "slow_steps")
    place = [column.key for column in table.columns].index("cpu_wait")
    assert table.columns[place].unit is Unit.RATIO
    assert [row[place] for row in table.rows] == [0.1, 0.25]
    worst = table_of(report, "worst_step")
    [at] = [index for index, row in enumerate(worst.rows) if row[0] == "CPU wait"]
    assert worst.rows[at] == ("CPU wait", 0.03, 0.1, pytest.approx(0.07))
    assert worst.row_units[at] is Unit.RATIO


def test_hints_come_after_all_else():
    """A hint with much time at stake, and warnings with less."""
    _, findings = diagnose(
        analysis_of(
            steps_of(forward=10, backward=4, logging=0.6, clip=0.8),
            callbacks=(
                CallbackTime(
                    callback="RichProgressBar", hook="on_train_batch_end", calls=20, total_ns=80 * MS
                ),
            ),
            outside_ms={"callbacks": 80},
        )
    )
    found = [one for one in findings if one.status is Status.FOUND]
    assert [(one.kind, one.severity) for one in found] == [
        ("clip_cost", Severity.WARNING),
        ("slow_logger", Severity.WARNING),
        ("slow_callback", Severity.INFO),
    ]
    assert found[2].saving_ns_per_step > found[0].saving_ns_per_step
