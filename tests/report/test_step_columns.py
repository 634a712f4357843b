"""Step columns for the dashboard: nothing is lost, and exclusions match the benchmark's."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.benchmark import benchmark
from lightning_modelprof.report.build_dashboard_entry import step_columns, timings_of
from lightning_modelprof.report.charts.steps import phases_per_step
from lightning_modelprof.run.loops import FIT, LOOPS
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings
from lightning_modelprof.show.html.chart import chart_view
from lightning_modelprof.show.tensorboard.packing import pack_columns, unpack_columns
from lightning_modelprof.show.tensorboard.profile_blob import TAG_WORDS, pack_steps, unpack_steps

# Exclusions in the order of docs/report.md, by tag; the first match counts.
DEFINITION = (
    (StepTag.SKIP_FIRST, "skip_first"),
    (StepTag.FIRST_OF_EPOCH, None),
    (StepTag.PROFILED, "recorded by torch.profiler"),
    (StepTag.PROFILER_WARMUP, "profiler warm-up"),
    (StepTag.PROFILER_STOP, "closing a window or saving the run"),
    (StepTag.INSPECTED, "counting FLOPs or timing modules"),
    (StepTag.DRAINING, "prefetched while the profiler worked"),
    (StepTag.VALIDATION, "with validation"),
)


def reason_by_definition(tags, loop):
    for tag, reason in DEFINITION:
        if tags & tag:
            return reason or ("first in an epoch" if loop.key == "fit" else "first in a dataloader")
    return ""


@st.composite
def all_steps(draw, max_size=12):
    """Steps with some phases that take no time, and some that are unmeasured in some or all steps."""
    n = draw(st.integers(0, max_size))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    phases = seed.integers(0, 10**9, (n, len(PHASES)))
    phases[:, draw(st.lists(st.integers(0, len(PHASES) - 1)))] = 0
    duration = phases.sum(axis=1)
    for place in draw(st.lists(st.integers(0, len(PHASES) - 1), max_size=3)):
        some = seed.random(n) < draw(st.sampled_from((0.5, 1.0)))
        duration -= np.where(some, np.maximum(phases[:, place], 0), 0)
        phases[some, place] = NOT_MEASURED
    return StepTimings(
        step=np.cumsum(seed.integers(1, draw(st.integers(2, 5)), n)),
        duration_ns=duration,
        phases_ns=phases,
        device_phases_ns=np.full((n, len(PHASES)), NOT_MEASURED, np.int64),
        samples=seed.integers(-1, 10**6, n),
        tags=np.array(draw(st.lists(st.integers(0, 511), min_size=n, max_size=n)), np.int64),
    )


def assert_same(one, other):
    for name, column in one.columns().items():
        np.testing.assert_array_equal(column, other.columns()[name], name)


@given(steps=all_steps(), loop=st.sampled_from(list(LOOPS.values())))
def test_packing_round_trip(steps, loop):
    columns = step_columns(steps, loop)
    back = unpack_steps(pack_steps(columns))
    assert (back.exclusions, back.phases) == (columns.exclusions, columns.phases)
    for name in ("step", "duration_ns", "samples", "tags", "exclusion", "phases_ns"):
        np.testing.assert_array_equal(getattr(back, name), getattr(columns, name), name)
    assert_same(timings_of(back), steps)
    assert benchmark(timings_of(back)) == benchmark(steps)


@given(steps=all_steps(), loop=st.sampled_from(list(LOOPS.values())))
def test_reasons_match_definition_and_report(steps, loop):
    columns = step_columns(steps, loop)
    reasons = [columns.exclusions[place] for place in columns.exclusion.tolist()]
    assert reasons == [reason_by_definition(tags, loop) for tags in steps.tags.tolist()]
    run = Run(info=RunInfo(created="", loop=loop.key), ranks=(RankRecord(rank=0, steps=steps),))
    counted = {entry.reason: entry.num_steps for entry in Facts(run).exclusions}
    assert Counter(filter(None, reasons)) == counted
    assert columns.exclusions[0] == ""


def test_device_times_are_not_kept():
    steps = make_run(3)
    steps.device_phases_ns[:] = 7
    assert (timings_of(step_columns(steps)).device_phases_ns == NOT_MEASURED).all()


def make_run(n, phases=("forward",)):
    times = np.zeros((n, len(PHASES)), np.int64)
    for place, key in enumerate(phases):
        times[:, PHASE_INDEX[key]] = 10**6 * (place + 1)
    return StepTimings(
        step=np.arange(n),
        duration_ns=times.sum(axis=1),
        phases_ns=times,
        device_phases_ns=np.full((n, len(PHASES)), NOT_MEASURED, np.int64),
        samples=np.full(n, 2),
        tags=np.zeros(n, np.int64),
    )


def test_unmeasured_phases_are_kept_and_empty_ones_dropped():
    steps = make_run(4, ("dataloader", "forward", "clip"))
    steps.phases_ns[1, PHASE_INDEX["clip"]] = NOT_MEASURED
    columns = step_columns(steps)
    assert [key for key, _ in columns.phases] == ["dataloader", "forward", "clip"]
    meta, packed = unpack_columns(pack_steps(columns))
    assert meta["unmeasured"] == [2]
    assert [layer["label"] for layer in meta["layers"]] == ["Dataloader", "Forward"]
    assert packed["phase_2"].tolist() == [3 * 10**6, NOT_MEASURED, 3 * 10**6, 3 * 10**6]


@given(steps=all_steps())
def test_layers_and_colors_match_report(steps):
    """The same phases have their own layer as in report.html, with the same color."""
    run = Run(info=RunInfo(created=""), ranks=(RankRecord(rank=0, steps=steps),))
    chart = phases_per_step(Facts(run))
    view = None if chart is None else chart_view(chart)
    expected = [] if view is None else [(layer.label, layer.color) for layer in view.layers]
    columns = step_columns(steps)
    meta, _ = unpack_columns(pack_steps(columns))
    assert [(layer["label"], layer["color"]) for layer in meta["layers"]] == expected
    if chart is not None and chart.series:
        for layer, series in zip(meta["layers"], chart.series, strict=True):
            total = columns.phases_ns[:, layer["phases"]].sum()
            assert sum(series.values) == pytest.approx(total)


def test_only_newest_steps_are_packed_with_note(monkeypatch):
    monkeypatch.setattr("lightning_modelprof.show.tensorboard.profile_blob.MAX_STEPS", 1_000)
    meta, packed = unpack_columns(pack_steps(step_columns(make_run(1_005))))
    assert meta["notes"] == ["Newest 1,000 steps; 5 older ones are left out."]
    assert packed["step"][0] == 5
    assert {len(column) for column in packed.values()} == {1_000}
    assert unpack_columns(pack_steps(step_columns(make_run(3))))[0]["notes"] == []


def test_tag_words_match_benchmark_reasons():
    assert set(TAG_WORDS) == {int(tag) for tag in StepTag}
    for tag, reason in DEFINITION:
        assert reason is None or TAG_WORDS[tag] == reason
    steps = make_run(2)
    for loop, word in ((FIT, "first in an epoch"), (LOOPS["test"], "first in a dataloader")):
        steps.tags[0] = StepTag.FIRST_OF_EPOCH
        meta, _ = unpack_columns(pack_steps(step_columns(steps, loop)))
        assert meta["tags"]["1"] == word


@pytest.mark.parametrize("missing", ["step", "exclusion", "phase_0"])
def test_missing_columns_are_rejected(missing):
    meta, packed = unpack_columns(pack_steps(step_columns(make_run(2))))
    del packed[missing]
    with pytest.raises(ValueError, match="hold no steps"):
        unpack_steps(pack_columns(meta, packed))


def test_damaged_bytes_are_rejected():
    with pytest.raises(ValueError, match="damaged"):
        unpack_steps(b"no columns")
