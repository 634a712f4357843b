"""Tests what is due at which step, and which steps are inspected: early ones outside profiler windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.plan import NUM_TIMED, InspectedSteps, Plan, choose_inspected, steps_to_skip
from lightning_modelprof.measure.window.schedule import Schedule, WindowAction
from lightning_modelprof.measure.window.window_plan import WindowPlan

SMALL = st.integers(0, 6)


@pytest.mark.parametrize(
    ("schedule", "skip_first", "options", "counted", "timed"),
    [
        # The default: before the clean steps and the window start.
        (Schedule(skip_first=10, wait=1, warmup=1, active=10), 10, {}, 6, (7, 8, 9)),
        # Four batches per optimizer step: batches 3, 7, ... end with one.
        (Schedule(skip_first=10, wait=1, warmup=1, active=10), 10, {"accumulate": 4}, 3, (4, 5, 6)),
        (Schedule(active=0), 0, {}, 1, (2, 3, 4)),
        # A window over the first ten steps.
        (Schedule(active=10), 0, {}, 10, (11, 12, 13)),
        # Three such windows and nothing between.
        (Schedule(active=5, repeat=3), 0, {}, 15, (16, 17, 18)),
        # Endless windows and nothing between.
        (Schedule(active=10, repeat=0), 0, {}, None, ()),
        (Schedule(wait=1, warmup=1, active=3, repeat=0), 0, {}, 5, (10,)),
        # Short fits.
        (Schedule(skip_first=10, wait=1, active=3), 10, {"num_steps": 1}, 0, ()),
        (Schedule(skip_first=10, wait=1, active=3), 10, {"num_steps": 2}, 1, ()),
        (Schedule(skip_first=10, wait=1, active=3), 10, {"num_steps": 5}, 1, (2, 3, 4)),
    ],
)
def test_inspected_steps_avoid_windows(schedule, skip_first, options, counted, timed):
    plan = choose_inspected(schedule, skip_first=skip_first, **options)
    assert (plan.counted, plan.timed) == (counted, timed)


@given(
    skip_first=st.integers(0, 12),
    wait=SMALL,
    warmup=SMALL,
    active=SMALL,
    repeat=st.integers(0, 3),
    accumulate=st.integers(1, 5),
    num_steps=st.none() | st.integers(0, 30),
)
def test_inspected_steps_are_never_in_window(skip_first, wait, warmup, active, repeat, accumulate, num_steps):
    schedule = Schedule(skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat)
    plan = choose_inspected(schedule, skip_first=skip_first, accumulate=accumulate, num_steps=num_steps)
    steps = [step for step in (plan.counted, *plan.timed) if step is not None]
    assert steps == sorted(set(steps))
    assert len(plan.timed) <= NUM_TIMED
    assert all(schedule.action(step) is WindowAction.WAIT for step in steps)
    assert all(step < num_steps for step in steps if num_steps is not None)
    if plan.counted is None:
        # No step is free, except possibly the first.
        last = 200 if num_steps is None else num_steps
        assert all(schedule.action(step) is not WindowAction.WAIT for step in range(1, last))


@pytest.mark.short
@pytest.mark.parametrize(
    ("asked", "num_steps", "expected"),
    [
        (10, None, 10),
        (10, 600, 10),
        (10, 60, 10),
        (10, 59, 9),
        (10, 12, 2),
        (10, 5, 1),
        (7, 12, 7),
        (0, 12, 0),
    ],
)
def test_short_loop_skips_fewer_steps_unless_requested(asked, num_steps, expected):
    assert steps_to_skip(ProfileConfig(skip_first=asked), num_steps) == expected


def plan_of(log_every=5, *, has_loggers=True, **parts):
    """Plan for a fit that logs every five steps."""
    loop = Loop()
    loop.log_every_n_steps = log_every
    parts = {"windows": None, "inspected": None, "has_bar": False} | parts
    return Plan(ProfileConfig(), loop, has_loggers=has_loggers, **parts)


def test_next_due_step():
    windows = WindowPlan(Schedule(wait=7, warmup=1, active=2))
    inspected = InspectedSteps(3, (4, 12))
    plan = plan_of(windows=windows, inspected=inspected)
    assert plan.next_due(0, []) == 1, "are all names known?"
    assert plan.next_due(1, []) == 3
    assert plan.next_due(1, [2]) == 2, "somebody else has something to do"
    assert inspected.begin_step(3)
    assert inspected.begin_step(4)
    assert plan.next_due(4, []) == 5
    assert plan.is_cut_due(5)
    plan.cut(5)
    assert plan.next_due(5, []) == 7
    assert (plan.is_window_due(6), plan.is_window_due(7)) == (False, True)
    windows.begin_step(7)
    assert plan.next_due(7, []) == 8


def test_delayed_figures_are_logged_at_next_logging_step():
    plan = plan_of()
    plan.cut(5, wait=7)
    assert plan.has_left_out
    assert next(step for step in range(6, 20) if plan.is_cut_due(step)) == 15
    plan.cut(15)
    assert not plan.has_left_out
    assert plan.next_due(15, []) == 20


def test_checks_are_rare_without_logger_and_bar():
    plan = plan_of(has_loggers=False)
    assert not any(map(plan.is_cut_due, range(1_000)))
    assert [step for step in range(1_001) if plan.is_look_due(step)] == [500, 1_000]
    assert plan.next_due(1, []) == 500


def test_next_save_waits_200_times_its_duration():
    plan = plan_of()
    assert plan.save(begin_ns=0, end_ns=10**9) == 10**9
    assert plan.next_save_ns == 201 * 10**9
    assert plan.save_step(10, now=10**9, step_ns=10**9) == 210
    assert plan.save_step(10, now=300 * 10**9, step_ns=10**9) == 11, "it is late already"
    plan.save(begin_ns=0, end_ns=1)
    assert plan.next_save_ns == 10**10 + 1, "never more often than every ten seconds"
