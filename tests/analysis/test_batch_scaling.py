"""The part of a step that doesn't depend on its batch, for known costs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.statistics import theil_sen
from lightning_modelprof.analysis.steps.batches import batch_scaling
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.batches import small_batches
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.run.batches import BatchSizes
from lightning_modelprof.run.model_cost import ModelCost, StepCount
from lightning_modelprof.run.sites import LineCount, StepSites
from lightning_modelprof.run.steps import NOT_CLEAN, StepTag
from tests.support.bench import FakeClock
from tests.support.diagnosed import MS, analysis_of, only, steps_of
from tests.support.fits import Net, Numbers, fit_quietly, make_callback, make_trainer


def experiment(fixed_ms, sample_ms, sizes, *, noise_ms=0.0, tags=None, **phases_ms):
    """Steps with these fixed and per-sample costs, half of each in forward."""
    sizes = np.asarray(sizes)
    noise = np.random.default_rng(3).normal(0, 1, len(sizes)) * noise_ms
    cost = fixed_ms + sample_ms * sizes + noise
    steps = steps_of(len(sizes), tags, forward=cost / 2, backward=cost / 2, **phases_ms)
    columns = steps.columns() | {"samples": sizes.astype(np.int64)}
    return type(steps)(**columns)


LAST = [*[64] * 19, 20] * 8
"""Eight epochs of 19 batches and a smaller one."""


def evaluate(steps, limits=None, **arguments):
    return only(judge(small_batches, analysis_of(steps, **arguments), limits))


def test_known_costs_are_found_to_nanosecond():
    found = batch_scaling(experiment(6, 0.03125, LAST), None)  # 8 ms with 64 samples
    assert (found.num_samples, found.sizes, found.num_other) == (64, (20, 64), 7)
    assert found.fixed_ns == pytest.approx(6 * MS, abs=10)
    assert found.per_sample_ns == pytest.approx(31_250, abs=1)
    assert found.step_ns == 8 * MS
    # Two steps of 64 take 16 ms, one of 128 takes 10.
    assert found.with_twice(found.fixed_ns) == pytest.approx(10 / 16)


def test_finding_predicts_doubled_batch_and_warns_about_training():
    finding = evaluate(experiment(6, 0.03125, LAST))
    assert finding.status is Status.FOUND
    assert finding.severity is Severity.INFO
    assert finding.saving_ns_per_step is None
    assert "75% of a step with 64 samples (6 ms)" in finding.summary
    assert "about 62% of its time (at most 79%)" in finding.summary
    assert "128 samples" in finding.action
    assert "changes training" in finding.action
    assert "learning rate" in finding.action


def test_quadratic_cost_is_bounded():
    """1 ms plus 8 ms for pairs with 64 samples, 1 + 2 ms with 32, 1 + 32 ms with 128."""
    sizes = np.array([*[64] * 19, 32] * 8)
    steps = experiment(1, 8 / 64**2 * sizes, sizes)
    found = batch_scaling(steps, None)
    assert found.most_with_twice == pytest.approx(33 / 18, abs=0.01)
    assert evaluate(steps).status is Status.CLEAN


def test_no_batch_is_advised_if_quadratic_cost_cancels_gain():
    """2 of 18 ms are the same for any batch; 16 ms that grow quadratically would become 64 ms."""
    sizes = np.array([*[64] * 19, 80] * 8)
    steps = experiment(2, 0.25, sizes)
    finding = evaluate(steps, {"least_share": 0.1})
    assert finding.status is Status.FOUND
    assert finding.action == ""
    assert "twice" not in finding.summary


@pytest.mark.parametrize(
    ("fixed_ms", "sample_ms", "status"),
    [
        (5, 0.0625, Status.FOUND),  # 5 of 9 ms
        (3, 0.0625, Status.CLEAN),  # 3 of 7 ms
        (0, 0.1, Status.CLEAN),
        (0.2, 0.001, Status.CLEAN),  # less than 0.3 ms
    ],
)
def test_only_dominant_fixed_part_is_found(fixed_ms, sample_ms, status):
    assert evaluate(experiment(fixed_ms, sample_ms, LAST)).status is status


def test_fixed_part_within_noise_is_not_found():
    """5 of 9 ms, as found above, but with noise of 8 ms."""
    steps = experiment(5, 0.0625, LAST, noise_ms=8)
    found = batch_scaling(steps, None)
    assert found.least_fixed_ns < found.step_ns / 2
    assert evaluate(steps).status is Status.CLEAN


def test_interval_contains_truth_as_often_as_claimed():
    held, generator = 0, np.random.default_rng(5)
    x = np.array(sorted(LAST), float)
    for _ in range(200):
        _, low, high = theil_sen(x, 6 + 0.03 * x + generator.standard_t(3, len(x)))
        held += int(low <= 0.03 <= high)
    assert 180 <= held <= 199


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-50, 50)), min_size=2, max_size=30))
def test_points_of_same_size_make_no_pair(points):
    points.sort(key=lambda point: point[0])
    slopes = sorted((d - b) / (c - a) for a, b in points for c, d in points if a < c)
    if not slopes:
        return
    slope, low, high = theil_sen(*np.array(points, float).T)
    assert slope == pytest.approx(np.median(slopes))
    assert slopes[0] - 1e-9 <= low <= slope <= high <= slopes[-1] + 1e-9


def test_two_sizes_have_mann_whitney_interval():
    """For 10 and 30 points: 300 pairs, variance 10 * 30 * 41 / 3 = 4,100; (300 -+ 1.96 * 64.03) / 2."""
    x = np.repeat([0.0, 1.0], [10, 30])
    y = np.concatenate([np.zeros(10), np.arange(30)]) + np.tile(np.arange(10) / 1_000, 4)
    slopes = np.sort((y[10:] - y[:10, None]).ravel())
    _, low, high = theil_sen(x, y)
    assert slopes[85] <= low <= slopes[88]
    assert slopes[211] <= high <= slopes[214]


def test_fetches_count_as_proportional_to_batch():
    """The wait is part of the step but never of the fixed part."""
    found = batch_scaling(experiment(6, 0.03125, LAST, dataloader=8), None)
    assert found.fixed_ns == pytest.approx(6 * MS, abs=10)
    assert found.step_ns == 16 * MS


def test_last_batches_with_validation_are_compared_by_model_phases():
    is_last = np.array(LAST) == 20
    tags = np.where(is_last, int(StepTag.VALIDATION), 0)
    callbacks = np.where(is_last, 50, 1)
    found = batch_scaling(
        experiment(6, 0.03125, LAST, tags=tags, callbacks=callbacks, validation=100 * is_last), None
    )
    assert "callbacks" not in found.phases
    assert found.fixed_ns == pytest.approx(6 * MS, abs=10)
    # Without validations, callbacks are part of the step.
    found = batch_scaling(experiment(6, 0.03125, LAST, callbacks=1), None)
    assert "callbacks" in found.phases
    assert found.fixed_ns == pytest.approx(7 * MS, abs=10)


@pytest.mark.parametrize("tag", [tag for tag in StepTag if NOT_CLEAN & tag and tag != StepTag.VALIDATION])
def test_other_special_steps_are_not_compared(tag):
    tags = np.where(np.array(LAST) == 20, int(tag), 0)
    with pytest.raises(NotMeasured):
        batch_scaling(experiment(6, 0.03, LAST, tags=tags), None)


def test_optimizer_counts_only_if_it_always_steps():
    steps = experiment(6, 0.03125, LAST, optimizer=2)
    assert batch_scaling(steps, None).fixed_ns == pytest.approx(8 * MS, abs=10)
    tags = np.arange(len(LAST)) % 2 * int(StepTag.NO_OPTIMIZER_STEP)
    steps = experiment(6, 0.03125, LAST, optimizer=2, tags=tags)
    assert batch_scaling(steps, None).fixed_ns == pytest.approx(6 * MS, abs=10)


def test_accumulated_batches_can_grow_without_changing_training():
    finding = evaluate(experiment(6, 0.03125, LAST), accumulate_grad_batches=4)
    assert "accumulate_grad_batches=2" in finding.action
    assert "changes training" not in finding.action


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([64] * 100, "a different batch size"),
        ([*[64] * 19, 20] * 4, "a different batch size"),  # the first of them is a warm-up
        ([*[64] * 19, 60] * 8, "too similar"),
        ([-1] * 100, "sample count"),
    ],
)
def test_sizes_that_give_no_experiment(sizes, why):
    finding = evaluate(experiment(6, 0.03, sizes))
    assert finding.status is Status.NOT_EVALUATED
    assert why in finding.summary


def test_rule_needs_cpu_fit_on_one_rank():
    steps = experiment(6, 0.03, LAST)
    for info in ({"device_type": "cuda"}, {"world_size": 2}, {"loop": "test"}):
        assert evaluate(steps, **info).status is Status.NOT_EVALUATED


@pytest.mark.parametrize(
    ("shapes", "is_judged"),
    [
        ((((64, 8), (64,)), ((20, 8), (20,))), True),
        ((((64, 8), (64 * 3,)), ((20, 8), (20 * 3,))), True),
        ((((64, 8), (64,)), ((20, 8), (20,)), ((64, 9), (64,))), False),  # lengths vary, too
        ((((64, 8),), ((20, 9),)), False),
        ((((64, 8),), ((20, 8), (20,))), False),
    ],
)
def test_batches_with_other_differences_are_not_compared(shapes, is_judged):
    sizes = BatchSizes(shapes=shapes, clean_steps=(1,) * len(shapes))
    steps, refused = experiment(6, 0.03125, LAST), "more than their sample count"
    with nullcontext() if is_judged else pytest.raises(NotMeasured, match=refused):
        batch_scaling(steps, sizes)
    with pytest.raises(NotMeasured):
        batch_scaling(steps, replace(sizes, num_rounded=1))


class Costly(Net):
    """A training step of 4 ms plus 0.05 ms per sample."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.advance(4 * MS + len(batch[0]) * MS // 20)
        return self.loss(batch)


@pytest.mark.parametrize("has_validation", [False, True])
def test_fit_with_smaller_last_batches(tmp_path, has_validation):
    """52 samples in batches of 16: three of 16 and one of 4. 4 of 4.8 ms don't depend on the batch."""
    clock = FakeClock()
    callback = make_callback(tmp_path, skip_first=2)
    callback._clock = clock
    trainer = make_trainer(tmp_path, callback, max_epochs=8, max_steps=-1)
    torch.manual_seed(0)
    loaders = [DataLoader(Numbers(52), batch_size=16)]
    if has_validation:
        loaders.append(DataLoader(Numbers(16), batch_size=16))
    fit_quietly(trainer, Costly(clock), *loaders)
    finding = next(one for one in callback.report.findings if one.kind == "small_batches")
    assert finding.status is Status.FOUND
    evidence = {one.label: one.value for one in finding.evidence}
    assert evidence["fixed time per step"] == pytest.approx(4 * MS, abs=1)
    assert evidence["time per additional sample"] == pytest.approx(MS / 20, abs=1)
    # Two batches of 16 take 9.6 ms, one of 32 takes 5.6.
    assert evidence["epoch time with twice the batch size"] == pytest.approx(5.6 / 9.6)


@pytest.mark.parametrize(("samples", "every", "is_found"), [(2, 8, True), (2, 1, False), (64, 8, False)])
def test_accumulated_tiny_batches_are_found(samples, every, is_found):
    """If all batches have the same size and no step was counted, only that size is known."""
    steps = steps_of(forward=9)
    steps = type(steps)(**(steps.columns() | {"samples": np.full(20, samples)}))
    finding = only(judge(small_batches, analysis_of(steps, accumulate_grad_batches=every)))
    assert (finding.title == "Gradients are accumulated over tiny batches") is is_found
    assert not is_found or "Try batches of 4 samples or more" in finding.action


def test_tiny_batches_are_warning_if_operator_calls_dominate():
    """8 of 9 ms would be the same with any batch; there are no times for other sizes."""
    steps = steps_of(forward=4, backward=5)
    steps = type(steps)(**(steps.columns() | {"samples": np.full(20, 1)}))
    line = LineCount(
        file="/home/me/net.py",
        line=30,
        function="Net.forward",
        function_line=29,
        module="",
        phase="forward",
        calls=1000,
        views=0,
        operators=1,
        elements=0,
        num_bytes=2_000_000,
    )
    sites = StepSites(step=2, device="cpu", sites=(), lines=(line,))
    count = StepCount(step=2, samples=1, on_fake_tensors=False, operators=())
    analysis = analysis_of(steps, cost=ModelCost(count=count, sites=sites), accumulate_grad_batches=32)
    finding = only(judge(small_batches, analysis))
    assert finding.severity is Severity.WARNING
    assert "Try batches of 2 samples or more" in finding.action
