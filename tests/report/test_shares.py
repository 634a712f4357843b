"""Shares on a page: the same name has the same number, and each share names its whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_modelprof.report.build import build_report, diagnose
from lightning_modelprof.report.model import Severity, Status, Unit
from lightning_modelprof.report.one_step import per_step
from lightning_modelprof.run.records import CallbackTime
from lightning_modelprof.run.setup import OptimizerSetup
from lightning_modelprof.run.steps import SlowStep, SlowSteps, StepTag
from tests.support.adds_up import wrong_sums
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, found_in, steps_of

NUM_STEPS = 100


def tags(**numbers):
    """Ten initial steps, three validations and one profiled step."""
    found = [StepTag.SKIP_FIRST] * 10 + [StepTag(0)] * (NUM_STEPS - 10)
    for step in (30, 60, 90):
        found[step] = StepTag.VALIDATION
    found[50] = StepTag.PROFILED
    return found


def slow_record(cpu_wait):
    """Slow steps of two groups of different length, and the thread's CPU wait in the whole loop."""
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
    """Report of a slow loader with a few very slow fetches, and much overhead around the model."""
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


@pytest.mark.parametrize("more_fetch", [0, 30])
@pytest.mark.parametrize("cpu_wait", WAITS)
def test_page_with_many_findings_adds_up(cpu_wait, more_fetch):
    """Even where robust means decide, the page prints the means of the clean steps."""
    report = page(cpu_wait, more_fetch=more_fetch)
    kinds = {one.kind for one in found_in(report)}
    assert {"input_bound", "slow_steps"} <= kinds
    others = {"slow_logger", "slow_transfer", "clip_cost", "checkpoint_share", "validation_share"}
    assert more_fetch or others <= kinds
    assert not wrong_sums(report)


def test_finding_matches_perf_summary():
    report = page(0.3)
    [finding] = [one for one in found_in(report) if one.kind == "input_bound"]
    evidence = {one.label: one.value for one in finding.evidence}
    wait_ns, step_ns = (cell(report, "perf_summary", row, "avg") for row in ("reader_cost", "batch_cost"))
    assert evidence["data wait per step"] == wait_ns
    assert finding.whole_ns == pytest.approx(step_ns)
    assert f"waits {per_step(wait_ns, step_ns)} for data" in finding.summary


def test_time_between_steps_is_share_of_loop():
    """900 ms of validation in 100 steps of 32 ms, and a checkpoint."""
    found = {one.kind: one for one in found_in(page(0.0))}
    assert {kind for kind, one in found.items() if one.share_of == "loop" and one.share} == {
        "validation_share",
        "checkpoint_share",
        "slow_callback",  # none of its time is in the steps of this run
    }
    assert "of the loop)" in found["validation_share"].summary


def test_chart_matches_table_and_both_cover_all_steps():
    report = page(0.0)
    chart = next(one for one in report.charts if one.id == "phase_shares")
    for series in chart.series:
        if series.key != "rest":
            assert series.values[0] == cell(report, "phases", series.label, "ratio")
    for notes in (chart.notes, table_of(report, "phases").notes):
        assert any("Ratios are computed over all steps" in note for note in notes)


def test_cpu_wait_is_share_of_watched_time():
    """100 of 1,000 ms and 1,000 of 4,000 ms; 3% in usual steps."""
    report = page(0.3)
    table = table_of(report, "slow_steps")
    place = [column.key for column in table.columns].index("cpu_wait")
    assert table.columns[place].unit is Unit.RATIO
    assert [row[place] for row in table.rows] == [0.1, 0.25]
    worst = table_of(report, "worst_step")
    [at] = [index for index, row in enumerate(worst.rows) if row[0] == "CPU wait"]
    assert worst.rows[at] == ("CPU wait", 0.03, 0.1, pytest.approx(0.07))
    assert worst.row_units[at] is Unit.RATIO


def test_hints_come_last():
    """The hint saves more than the warnings above it."""
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
