"""Tests one-batch epochs: their steps are clean, and the time between them has its own phase."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from lightning.pytorch.loops.fit_loop import _FitLoop

from lightning_modelprof.analysis.steps.benchmark import benchmark
from lightning_modelprof.analysis.steps.step_costs import step_costs
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.validation import slow_epoch_turns, validation_share
from lightning_modelprof.report.verdict import account
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import StepTag
from tests.support.bench import MS, Bench, HookedModel
from tests.support.diagnosed import analysis_of, only, steps_of

FIRST, WHOLE = int(StepTag.FIRST_OF_EPOCH), int(StepTag.WHOLE_EPOCH)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


@pytest.fixture
def costly_turns(monkeypatch):
    """A bench whose Trainer spends a known time at each epoch boundary."""
    bench, advance_end = Bench(skip_first=0, flops=False), _FitLoop.on_advance_end

    def on_advance_end(self):
        advance_end(self)
        bench.truth.spend("epoch_turn", "turn")

    monkeypatch.setattr(_FitLoop, "on_advance_end", on_advance_end)
    return bench


@pytest.mark.parametrize("length", [1, 3])
def test_epoch_boundary_has_own_phase(costly_turns, length):
    bench = costly_turns
    bench.fit(HookedModel(bench.truth), bench.data(length), max_epochs=4)
    bench.check(num_steps=4 * length)
    turns = [step.get("epoch_turn", 0) > 0 for step in bench.truth.steps]
    assert turns == [step > 0 and step % length == 0 for step in range(4 * length)]
    assert bench.record.outside_ns["epoch_turn"] > 0, "the last turn is in no step"


def test_steps_of_one_batch_epochs_are_clean(costly_turns):
    bench = costly_turns
    bench.fit(HookedModel(bench.truth), bench.data(1), max_epochs=8)
    figures = benchmark(bench.record.steps)
    assert figures is not None
    assert figures.num_steps == 8
    assert (
        figures.batch_cost_ns.avg
        == sum(sum(step.values()) - step.get("profiler", 0) for step in bench.truth.steps) / 8
    )
    assert bench.has_tag(StepTag.WHOLE_EPOCH) == [True] * 8


def test_first_batches_of_longer_epochs_are_not_clean(costly_turns):
    bench = costly_turns
    bench.fit(HookedModel(bench.truth), bench.data(3), max_epochs=2)
    assert bench.has_tag(StepTag.FIRST_OF_EPOCH) == [True, False, False, True, False, False]
    assert not any(bench.has_tag(StepTag.WHOLE_EPOCH))


def rows(*tags):
    return [([MS] * len(PHASES), tag, 1) for tag in tags]


def recorded(*cuts, max_kept=10_000):
    recorder = Recorder(max_kept=max_kept)
    for tags in cuts:
        for row in rows(*tags):
            recorder.add(row)
        recorder.take_new()
    return recorder


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([[FIRST]], [FIRST]),
        ([[FIRST], [0]], [FIRST, 0]),
        ([[FIRST], [FIRST]], [WHOLE, WHOLE]),
        ([[FIRST, FIRST, FIRST]], [WHOLE, WHOLE, WHOLE]),
        ([[FIRST, FIRST], [FIRST], [FIRST, 0]], [FIRST, FIRST, FIRST, FIRST, 0]),
        ([[FIRST, FIRST], [0], [FIRST, FIRST]], [FIRST, FIRST, 0, FIRST, FIRST]),
    ],
)
def test_tags_do_not_depend_on_where_steps_are_cut(cuts, expected):
    assert recorded(*cuts).steps().tags.tolist() == expected


def test_longer_epoch_after_many_steps_changes_earlier_tags():
    """Totals and thinned steps are also corrected."""
    short = recorded(*[[FIRST] * 500] * 6, max_kept=512)
    assert len(short.totals().clean()) == 3_000
    grown = recorded(*[[FIRST] * 500] * 6, [FIRST, 0], max_kept=512)
    assert grown.totals().num_with(StepTag.WHOLE_EPOCH) == 0
    assert len(grown.totals().clean()) == 1
    assert not (grown.steps().tags & WHOLE).any()
    assert grown.totals().tags.tolist() == sorted(set(grown.totals().tags.tolist()))


def turning(turn_ms, *, validation_ms=0.0, tag=StepTag.WHOLE_EPOCH):
    turns = [0, *[turn_ms] * 19]
    return analysis_of(steps_of(tags=[tag] * 20, forward=8, epoch_turn=turns, validation=validation_ms))


@pytest.mark.parametrize(
    ("turn_ms", "status", "severity"),
    [
        (0.1, Status.CLEAN, None),
        (1.0, Status.FOUND, Severity.WARNING),
        (4.0, Status.FOUND, Severity.CRITICAL),
    ],
)
def test_slow_epoch_boundaries_are_found(turn_ms, status, severity):
    finding = only(judge(slow_epoch_turns, turning(turn_ms)))
    assert (finding.status, finding.severity) == (status, severity)
    if severity is not None:
        assert finding.saving_ns_per_step == pytest.approx(turn_ms * MS * 19 / 20)
        assert "one batch" in finding.summary
        assert "max_steps" in finding.action


def test_single_epoch_has_no_boundary():
    assert only(judge(slow_epoch_turns, analysis_of(steps_of(forward=8)))).status is Status.NOT_EVALUATED


def test_validation_is_evaluated_despite_slow_epoch_boundaries():
    """40% validation plus epoch boundaries of a fifth, which once counted as unattributed."""
    analysis = turning(4.0, validation_ms=8.0)
    finding = only(judge(validation_share, analysis))
    assert finding.status is Status.FOUND
    assert account(analysis).is_enough


def test_one_batch_epochs_have_no_worker_startup_estimate():
    """There is no fetch within an epoch to compare with."""
    steps = steps_of(tags=[WHOLE] * 20, forward=8, dataloader=[5] * 20)
    bounds = step_costs(steps, {}).boundaries
    assert (bounds.num_all, bounds.extra_wait_ns) == (19, None)


def test_archives_without_epoch_turn_phase_open(costly_turns, tmp_path):
    bench = costly_turns
    bench.callback = type(bench.callback)(bench.truth, skip_first=0, dirpath=tmp_path, files=True)
    bench.fit(HookedModel(bench.truth), bench.data(1), max_epochs=3)
    [path] = tmp_path.rglob("run.json")
    saved = path.read_bytes()
    assert b'"epoch_turn"' in saved
    old = msgspec.json.decode(saved)
    _rename(old, "epoch_turn", "other")  # as older versions stored it
    path.write_bytes(msgspec.json.encode(old))
    [record] = load_run(path.parent).ranks
    assert not record.steps.phases_ns[:, PHASE_INDEX["epoch_turn"]].any()
    assert np.array_equal(record.steps.phases_ns.sum(axis=1), record.steps.duration_ns)


def test_epoch_turn_is_last_phase():
    """So the indices of the other phases haven't changed."""
    assert [phase.key for phase in PHASES][-3:] == ["rank_wait", "user_profiler", "epoch_turn"]


def _rename(value, before, after):
    if isinstance(value, dict):
        if before in value and after not in value:
            value[after] = value.pop(before)
        elif before in value and isinstance(value[before], list):
            one, other = value.pop(before), value[after]
            value[after] = [a + b for a, b in zip(one, other, strict=True)]
        elif before in value:
            value[after] += value.pop(before)
        for one in value.values():
            _rename(one, before, after)
    elif isinstance(value, list):
        for one in value:
            _rename(one, before, after)
