"""Which steps are inspected: never one of a profiler window, and early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.plan import NUM_TIMED, choose_inspected, steps_to_skip
from lightning_modelprof.measure.window.schedule import Schedule, WindowAction

SMALL = st.integers(0, 6)


@pytest.mark.parametrize(
    ("schedule", "skip_first", "options", "counted", "timed"),
    [
        # The default: before the benchmark and the window begin.
        (Schedule(skip_first=10, wait=1, warmup=1, active=10), 10, {}, 6, (7, 8, 9)),
        # Four batches to an optimizer step: the batches 3, 7, ... end with one.
        (Schedule(skip_first=10, wait=1, warmup=1, active=10), 10, {"accumulate": 4}, 3, (4, 5, 6)),
        (Schedule(active=0), 0, {}, 1, (2, 3, 4)),
        # A window over the first ten steps.
        (Schedule(active=10), 0, {}, 10, (11, 12, 13)),
        # Three such windows and nothing between.
        (Schedule(active=5, repeat=3), 0, {}, 15, (16, 17, 18)),
        # Windows without end and nothing between.
        (Schedule(active=10, repeat=0), 0, {}, None, ()),
        (Schedule(wait=1, warmup=1, active=3, repeat=0), 0, {}, 5, (10,)),
        # Short fits.
        (Schedule(skip_first=10, wait=1, active=3), 10, {"num_steps": 1}, 0, ()),
        (Schedule(skip_first=10, wait=1, active=3), 10, {"num_steps": 2}, 1, ()),
        (Schedule(skip_first=10, wait=1, active=3), 10, {"num_steps": 5}, 1, (2, 3, 4)),
    ],
)
def test_the_plan(schedule, skip_first, options, counted, timed):
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
def test_no_inspected_step_is_in_a_window(skip_first, wait, warmup, active, repeat, accumulate, num_steps):
    schedule = Schedule(skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat)
    plan = choose_inspected(schedule, skip_first=skip_first, accumulate=accumulate, num_steps=num_steps)
    steps = [step for step in (plan.counted, *plan.timed) if step is not None]
    assert steps == sorted(set(steps))
    assert len(plan.timed) <= NUM_TIMED
    assert all(schedule.action(step) is WindowAction.WAIT for step in steps)
    assert all(step < num_steps for step in steps if num_steps is not None)
    if plan.counted is None:
        # Then there is no free step at all, but perhaps the very first.
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
def test_a_short_loop_skips_less_unless_it_is_asked_to(asked, num_steps, expected):
    assert steps_to_skip(ProfileConfig(skip_first=asked), num_steps) == expected
