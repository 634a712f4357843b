"""The schedule matches torch.profiler's schedule and Paddle's (start, end) range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.measure.window.schedule import Schedule, WindowAction

TORCH_ACTIONS = {
    torch.profiler.ProfilerAction.NONE: WindowAction.WAIT,
    torch.profiler.ProfilerAction.WARMUP: WindowAction.WARMUP,
    torch.profiler.ProfilerAction.RECORD: WindowAction.ACTIVE,
    torch.profiler.ProfilerAction.RECORD_AND_SAVE: WindowAction.ACTIVE_LAST,
}

small = st.integers(0, 5)
schedules = st.builds(
    Schedule, skip_first=small, wait=small, warmup=small, active=st.integers(1, 5), repeat=st.integers(0, 4)
)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@given(schedules, st.integers(0, 100))
def test_action_matches_torch_profiler(schedule, step):
    theirs = torch.profiler.schedule(
        skip_first=schedule.skip_first,
        wait=schedule.wait,
        warmup=schedule.warmup,
        active=schedule.active,
        repeat=schedule.repeat,
    )
    assert schedule.action(step) is TORCH_ACTIONS[theirs(step)]


@given(schedules)
def test_windows_match_actions(schedule):
    expected = {}
    num_windows = schedule.repeat or 4
    for index in range(num_windows):
        window = schedule.window(index)
        assert window.index == index
        expected |= dict.fromkeys(range(window.first_warmup, window.first), WindowAction.WARMUP)
        expected |= dict.fromkeys(range(window.first, window.last), WindowAction.ACTIVE)
        expected[window.last] = WindowAction.ACTIVE_LAST
    end = schedule.skip_first + num_windows * schedule.cycle
    for step in range(end):
        assert schedule.action(step) is expected.get(step, WindowAction.WAIT), step
    if schedule.repeat:
        assert schedule.window(num_windows) is None
        assert {schedule.action(step) for step in range(end, end + 20)} == {WindowAction.WAIT}


@given(small, small, small, small, st.integers(0, 4))
def test_no_window_without_active_steps(skip_first, wait, warmup, repeat, step):
    schedule = Schedule(skip_first=skip_first, wait=wait, warmup=warmup, active=0, repeat=repeat)
    assert schedule.action(step) is WindowAction.WAIT
    assert schedule.window(0) is None


def test_schedule_from_paddle_range():
    schedule = Schedule.from_range(3, 14)
    actions = [schedule.action(step) for step in range(20)]
    assert actions == [
        *[WindowAction.WAIT] * 2,
        WindowAction.WARMUP,
        *[WindowAction.ACTIVE] * 10,
        WindowAction.ACTIVE_LAST,
        *[WindowAction.WAIT] * 6,
    ]


@given(st.integers(0, 20), st.integers(1, 20))
def test_range_records_start_to_end_minus_one(start, length):
    schedule = Schedule.from_range(start, start + length)
    recorded = [
        step for step in range(60) if schedule.action(step) in {WindowAction.ACTIVE, WindowAction.ACTIVE_LAST}
    ]
    assert recorded == list(range(start, start + length))
    warmup = [step for step in range(60) if schedule.action(step) is WindowAction.WARMUP]
    assert warmup == ([start - 1] if start else [])  # like Paddle: one step, if there is one
    assert schedule.window(0).last == start + length - 1
