"""Profiler overhead, from invented steps and from real runs against the clock."""

from __future__ import annotations

import time

import numpy as np
import pytest
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_modelprof.analysis.steps.phase_times import own_cost
from lightning_modelprof.analysis.steps.step_costs import step_costs
from lightning_modelprof.engine.traces import Traces
from lightning_modelprof.reading import read_report
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings
from tests.support.facts import why_not
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, table_of

MS = 1_000_000


def steps_of(rows):
    """Steps from (forward ms, profiler ms, tags)."""
    phases_ns = np.zeros((len(rows), len(PHASES)), np.int64)
    for place, (forward, profiler, _) in enumerate(rows):
        phases_ns[place, PHASE_INDEX["forward"]] = forward * MS
        phases_ns[place, PHASE_INDEX["profiler"]] = profiler * MS
    return StepTimings(
        step=np.arange(len(rows)),
        duration_ns=phases_ns.sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=np.full_like(phases_ns, NOT_MEASURED),
        samples=np.full(len(rows), 4),
        tags=np.array([int(tags) for _, _, tags in rows]),
    )


def cost_of(rows, outside_ns=None):
    steps, outside_ns = steps_of(rows), outside_ns or {}
    return own_cost(StepTotals.of(steps), outside_ns, step_costs(steps, outside_ns))


def test_user_profiler_is_not_our_overhead(tmp_path):
    """It takes much of this run's time; our overhead must not include it."""

    class Slow(PassThroughProfiler):
        def start(self, action_name):
            if action_name.endswith("training_step"):
                time.sleep(0.002)

    ours = make_callback(tmp_path, active=2, wait=10, warmup=1, repeat=4)
    fit_quietly(make_trainer(tmp_path, ours, profiler=Slow()), Net(), loader(240))
    phases = {row[0]: row for row in table_of(ours.report, "phases").rows}
    assert phases["Your profiler"][2] >= 120 * 2 * MS
    cost = ours.report.summary.own_cost
    assert cost.work_ns < cost.loop_ns - phases["Your profiler"][2]


def test_overhead_of_window_and_inspection():
    rows = [
        *[(10, 0, 0)] * 8,
        (10, 2, 0),  # work between steps
        (14, 30, StepTag.PROFILER_WARMUP),  # the window opens
        (16, 0, StepTag.PROFILED),
        (15, 0, StepTag.PROFILED),
        (10, 200, StepTag.PROFILER_STOP),  # and closes
        (35, 5, StepTag.INSPECTED),
    ]
    cost = cost_of(rows, {"profiler": 50 * MS, "checkpoint": 100 * MS})
    assert cost.work_ns == (2 + 30 + 200 + 5 + 50) * MS
    assert cost.recorded_ns == (14 + 16 + 15 - 3 * 10) * MS
    assert cost.inspected_ns == 25 * MS
    assert cost.loop_ns == (8 * 10 + 12 + 44 + 16 + 15 + 210 + 40 + 150) * MS
    assert cost.share == pytest.approx((287 + 15 + 25) / 567)


@pytest.mark.parametrize("tag", [StepTag.VALIDATION, StepTag.FIRST_OF_EPOCH])
def test_user_work_in_window_is_not_overhead(tag):
    rows = [*[(10, 0, 0)] * 8, (12, 0, StepTag.PROFILED), (2_000, 0, StepTag.PROFILED | tag)]
    assert cost_of(rows).recorded_ns == 2 * MS


def test_faster_steps_in_window_are_not_gain():
    cost = cost_of([*[(10, 0, 0)] * 8, (9, 0, StepTag.PROFILED)])
    assert (cost.work_ns, cost.recorded_ns, cost.inspected_ns) == (0, 0.0, 0.0)


def test_overhead_is_unknown_without_clean_steps():
    assert why_not(cost_of, [(10, 0, StepTag.PROFILED)] * 5)


def test_window_costs_more_than_no_window(tmp_path):
    def share(**arguments):
        callback = make_callback(tmp_path / str(len(arguments)), **arguments)
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader(100))
        section = callback.report.summary.own_cost
        notes = next(table for table in callback.report.tables if table.id == "perf_summary").notes
        assert any("Profiler overhead" in note for note in notes)
        assert 0 < section.share < 1
        assert section.loop_ns >= callback.report.summary.run.wall_ns
        return section

    without, with_window = share(active=0), share(active=5, wait=0, repeat=1)
    assert with_window.work_ns > without.work_ns
    window = with_window.work_ns - without.work_ns
    assert window > 10 * MS, "closing a window takes some tens of milliseconds"


def test_waiting_for_report_is_overhead(tmp_path, monkeypatch):
    """The report includes its own wait, as far as it can know it."""
    monkeypatch.setattr(Traces, "wait", lambda self: time.sleep(0.3))
    callback = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, callback), Net(), loader(100))
    cost, wait_ns = callback.report.summary.own_cost, callback.run.ranks[0].report_wait_ns
    assert cost.report_wait_ns == wait_ns >= 300 * MS
    known_ns = cost.work_ns + cost.recorded_ns + cost.inspected_ns + wait_ns
    assert cost.share == pytest.approx(known_ns / (cost.loop_ns + wait_ns))
    assert cost.loop_ns < callback.report.summary.run.wall_ns + 300 * MS
    (note,) = (one for one in table_of(callback.report, "perf_summary").notes if "Profiler overhead" in one)
    assert "was spent waiting for the report after the loop" in note
    assert read_report(tmp_path / "modelprof").summary.own_cost == cost


def test_unknown_report_wait_is_none():
    cost = cost_of([(10, 0, 0)] * 8)
    assert (cost.report_wait_ns, cost.share) == (None, 0.0)
