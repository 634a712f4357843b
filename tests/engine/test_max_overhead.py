"""Tests that ``max_overhead`` skips windows beyond the budget, with hand-made steps and in real runs."""

from __future__ import annotations

import pytest

from lightning_modelprof.config.options import Bounds, ProfileConfig
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.run.records import WindowStatus
from lightning_modelprof.run.steps import StepTag
from tests.measure.test_own_cost import steps_of
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, our_warnings, windows_of

MS = 1_000_000


def budget_of(max_overhead, *parts, num_windows=1, close_ms=20):
    budget = Budget(int, ProfileConfig(bounds=Bounds(max_overhead=max_overhead)))
    for rows in parts:
        budget.add(steps_of(rows))
    for _ in range(num_windows):
        budget.add_window(close_ms * MS)
    return budget


CLEAN = [(10, 0, 0)] * 97
WINDOW = [(16, 1, StepTag.PROFILER_WARMUP), (14, 0, StepTag.PROFILED), (10, 20, StepTag.PROFILER_STOP)]


def test_own_time_includes_slower_steps():
    """21 ms between steps, and 10 ms by which two steps were slower than clean ones."""
    assert budget_of(None, CLEAN, WINDOW).own_ns == 31 * MS
    assert budget_of(None, WINDOW, CLEAN).own_ns == 31 * MS
    assert budget_of(None).own_ns == 0


def test_another_window_must_fit_budget():
    loop_ms = 970 + 17 + 14 + 30
    assert budget_of(None, CLEAN, WINDOW).window_ns == 31 * MS
    share = (31 + 31) / (loop_ms + 31)  # another window like the first, which also counts as loop time
    assert budget_of(share * 1.001, CLEAN, WINDOW).why_no_window() == ""
    reason = budget_of(share * 0.999, CLEAN, WINDOW).why_no_window()
    assert 'raised the overhead to 5.84% (bounds={"max_overhead": 0.058' in reason
    twice = budget_of(0.05, CLEAN, WINDOW, num_windows=2, close_ms=10)  # expects half as much for the third
    assert twice.why_no_window() == ""


def test_one_time_costs_are_not_expected_again():
    """FLOPs and module times are measured once: 0.6 s of 10.6 s, plus a window of 40 ms."""
    inspected = [(10, 150, StepTag.INSPECTED)] * 4
    budget = budget_of(None, [(10, 0, 0)] * 1_000, inspected, [(12, 0, StepTag.PROFILED)] * 10)
    assert budget.window_ns == (20 + 20) * MS
    assert budget.own_ns == (600 + 20) * MS
    share = (600 + 20 + 40) / (10_000 + 640 + 120 + 40)
    assert budget_of(share * 1.001, [(10, 0, 0)] * 1_000, inspected, [(12, 0, 8)] * 10).why_no_window() == ""
    assert budget_of(share * 0.999, [(10, 0, 0)] * 1_000, inspected, [(12, 0, 8)] * 10).why_no_window() != ""


def test_overhead_share_stays_below_100_percent():
    """Only windows were recorded."""
    reason = budget_of(0.5, WINDOW, num_windows=1, close_ms=10_000).why_no_window()
    assert "raised the overhead to 99.6%" in reason  # 10,022 of 10,062 ms


def test_first_window_is_always_recorded():
    assert budget_of(0.0001, WINDOW, num_windows=0).why_no_window() == ""
    assert budget_of(None, WINDOW).why_no_window() == ""


def test_user_work_in_window_is_not_overhead():
    long = (2_000, 0, StepTag.PROFILED | StepTag.VALIDATION)
    assert budget_of(0.07, CLEAN, WINDOW, [long]).own_ns == 31 * MS


def test_time_spent_just_now_counts():
    budget = budget_of(0.1, CLEAN, WINDOW)
    assert budget.why_no_window() == ""
    assert budget.why_no_window(100 * MS).startswith("another window would have raised the overhead")


def test_budget_grows_with_time():
    budget = budget_of(0.01, CLEAN, WINDOW)
    assert budget.why_no_window()
    for _ in range(6):
        budget.add(steps_of(CLEAN))
    assert budget.why_no_window() == ""


def test_windows_beyond_the_budget_are_skipped(tmp_path):
    callback = make_callback(tmp_path, active=2, wait=10, warmup=1, repeat=4, max_overhead=0.001)
    with our_warnings() as messages:
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader(240))
    assert messages == [], "it is what was asked for"
    windows = windows_of(callback)
    statuses = [window.status for window in windows]
    assert statuses == [WindowStatus.COMPLETE] + [WindowStatus.SKIPPED] * 3
    assert all(window.note.endswith('(bounds={"max_overhead": 0.001})') for window in windows[1:])
    assert not any(window.recorded_steps or window.trace_file for window in windows[1:])
    assert any("skipped: another window would have" in note for note in callback.report.notes)
    steps = callback.run.ranks[0].steps
    recorded = steps.step[(steps.tags & int(StepTag.PROFILED)) != 0]
    assert recorded.tolist() == list(windows[0].recorded_steps)


def test_all_windows_are_recorded_without_budget(tmp_path):
    callback = make_callback(tmp_path, active=2, wait=10, warmup=1, repeat=4)
    fit_quietly(make_trainer(tmp_path, callback), Net(), loader(240))
    assert [window.status for window in windows_of(callback)] == [WindowStatus.COMPLETE] * 4


@pytest.mark.parametrize("wrong", [0, 1, -0.1, 2.0, "1%", True, float("nan")])
def test_invalid_shares_are_rejected(tmp_path, wrong):
    with pytest.raises(ConfigError, match="max_overhead: expected a share of time between 0 and 1"):
        make_callback(tmp_path, max_overhead=wrong)
