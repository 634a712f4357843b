"""Step costs by hand: which steps count where, and how time is distributed."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.steps.step_costs import step_costs
from lightning_modelprof.run.steps import StepTag, StepTimings
from tests.support.diagnosed import MS, steps_of
from tests.support.facts import why_not

FIRST, CHECK, OURS = StepTag.FIRST_OF_EPOCH, StepTag.VALIDATION, StepTag.INSPECTED


def test_steady_steps_include_validations_and_epoch_starts():
    """One of 6 steps is inspected; of the other 5, one starts an epoch and one validates."""
    costs = step_costs(steps_of(6, tags=[OURS, 0, FIRST, CHECK, 0, 0], forward=[90, 1, 2, 3, 4, 8]), {})
    assert (costs.steady.num_steps, costs.inner.num_steps) == (5, 3)
    assert costs.steady.phases_ns["forward"] == pytest.approx((1 + 2 + 3 + 4 + 8) / 5 * MS)
    assert costs.inner.phases_ns["forward"] == pytest.approx((1 + 4 + 8) / 3 * MS)
    assert costs.typical is costs.inner
    assert costs.inner.medians_ns["forward"] == 4 * MS
    assert costs.inner.quartiles_ns["forward"] == 2.5 * MS


@pytest.mark.parametrize(
    "tag",
    [
        StepTag.SKIP_FIRST,
        StepTag.PROFILED,
        StepTag.PROFILER_WARMUP,
        StepTag.PROFILER_STOP,
        StepTag.DRAINING,
        StepTag.INSPECTED,
    ],
)
def test_unsteady_steps(tag):
    assert why_not(step_costs, steps_of(3, tags=[tag] * 3, forward=1), {})


def test_no_steps_give_no_costs():
    assert why_not(step_costs, StepTimings.empty(), {})


def test_steady_steps_are_typical_if_all_are_special():
    costs = step_costs(steps_of(4, tags=[CHECK] * 4, forward=1, validation=5), {})
    assert costs.inner is None
    assert costs.typical is costs.steady
    assert costs.steady.share("validation") == pytest.approx(5 / 6)


def test_profiler_phase_is_not_part_of_step():
    costs = step_costs(steps_of(4, forward=5, profiler=5), {})
    assert costs.steady.wall_ns == costs.loop.wall_ns == 5 * MS
    assert "profiler" not in costs.steady.phases_ns


def test_mean_step_of_loop():
    """One of 4 steps is inspected: its 30 ms of forward don't count, 8 ms of validation and 12 after do."""
    steps = steps_of(4, tags=[OURS, 0, 0, 0], forward=[30, 2, 2, 2], validation=[8, 0, 0, 0])
    loop = step_costs(steps, {"validation": 12 * MS, "profiler": 100 * MS, "forward": 4 * MS}).loop
    assert loop.phases_ns["validation"] == (8 + 12) / 4 * MS
    assert loop.phases_ns["forward"] == (2 + 4 / 4) * MS
    assert loop.wall_ns == (5 + 3) * MS
    assert loop.share("validation") == pytest.approx(5 / 8)


def test_epoch_boundaries():
    """Epochs start at steps 0, 2 and 4; step 2 is inspected. The usual wait is 1 ms."""
    steps = steps_of(
        6,
        tags=[FIRST, 0, FIRST | OURS, 0, FIRST, 0],
        dataloader=[50, 1, 9, 1, 7, 1],
        dataloader_init=[40, 0, 30, 0, 20, 0],
    )
    bounds = step_costs(steps, {}).boundaries
    assert (bounds.num_all, bounds.count) == (2, 1)
    assert (bounds.init_ns, bounds.extra_wait_ns) == (20 * MS, 6 * MS)


def test_unmeasured_phase_is_none():
    costs = step_costs(steps_of(4, forward=5, dataloader=None), {})
    assert costs.steady.phases_ns["dataloader"] is None
    assert costs.steady.share("dataloader") is None
    assert costs.steady.exposed_wait_ns is None
    assert costs.steady.share("forward", "dataloader") is None
    assert "dataloader" not in costs.steady.medians_ns
    assert costs.loop.phases_ns["dataloader"] is None


def test_exposed_wait_is_shorter_of_both_clocks():
    steps = steps_of(4, dataloader=5, device_ms={"dataloader": 2})
    assert step_costs(steps, {}).steady.exposed_wait_ns == 2 * MS
    steps = steps_of(4, dataloader=5, device_ms={"dataloader": 9})
    assert step_costs(steps, {}).steady.exposed_wait_ns == 5 * MS


def test_standard_errors_of_four_steps():
    """Values 1, 1, 1, 5 ms. Batches of 2: their means deviate from 2 ms by -1, -1, 1; the formula for
    overlapping batch means gives 4 * 2 / ((4 - 2) * 3) * (1 + 1 + 1) = 4, over 4 steps: 1 ms."""
    costs = step_costs(steps_of(4, forward=[1, 1, 1, 5]), {})
    assert costs.steady.errors_ns["forward"] == pytest.approx(1 * MS)
    assert step_costs(steps_of(1, forward=5), {}).steady.errors_ns == {}
