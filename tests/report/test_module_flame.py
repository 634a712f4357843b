"""Flame graph of the module tree: hand-derived widths, and invariants for any tree."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.modules.module_tree import module_tree
from lightning_modelprof.report.charts.flames import flame_of_modules
from lightning_modelprof.run.model_cost import ModelCost
from tests.analysis.test_module_tree import COST, record, timed


def test_tree_becomes_boxes():
    """Own times: model 750, body 50, body.0 6000, body.1 350, body.2 1300, head 1050 ns."""
    flame = flame_of_modules(module_tree(COST))
    assert flame.title == "Modules, forward and backward"
    assert [(f.name, f.detail, f.parent, f.depth, f.begin, f.total, f.own) for f in flame.frames] == [
        ("Net", "", None, 0, 0, 9_500, 750),
        ("body (Sequential)", "body", 0, 1, 0, 7_700, 50),
        ("0 (Linear)", "body.0", 1, 2, 0, 6_000, 6_000),
        ("1 (ReLU)", "body.1", 1, 2, 6_000, 350, 350),
        ("2 (Linear)", "body.2", 1, 2, 6_350, 1_300, 1_300),
        ("head (Linear)", "head", 0, 1, 7_700, 1_050, 1_050),
    ]
    assert flame.notes == (
        "Median forward and backward time over 2 timed steps. Each module includes its submodules.",
    )
    assert {frame.is_users for frame in flame.frames} == {None}


def test_evaluation_loop_shows_forward_only():
    times = timed(("", 1, 10, None), ("body", 1, 5, None), steps=1, clock="device")
    flame = flame_of_modules(module_tree(replace(COST, times=times)))
    assert flame.title == "Modules, forward"
    assert [(f.name, f.total, f.own) for f in flame.frames] == [("Net", 15, 10), ("body (Sequential)", 5, 5)]
    assert flame.notes == (
        "Median forward time over one timed step. Each module includes its submodules.",
        "Times are between events on the GPU stream, so they include waiting for the CPU.",
        "4 modules aren't shown because they have no time of their own.",
    )


def test_path_that_is_not_a_module_is_skipped():
    """``blocks`` isn't a module here, so its child is placed on the model."""
    cost = ModelCost(
        modules=(record("", "Net"), record("blocks.0", "Linear")),
        times=timed(("", 1, 1, 1), ("blocks.0", 1, 2, 2)),
    )
    frames = flame_of_modules(module_tree(cost)).frames
    assert [(f.parent, f.depth, f.total) for f in frames] == [(None, 0, 6), (0, 1, 4)]


def test_no_times_give_no_graph():
    assert flame_of_modules(module_tree(replace(COST, times=None))) is None
    assert flame_of_modules(module_tree(replace(COST, times=timed(("", 0, None, None))))) is None
    assert flame_of_modules(module_tree(replace(COST, times=timed(("", 1, 0, 0))))) is None


def test_times_that_include_ignored_modules_give_no_graph():
    """``head`` has FLOPs but no time, so the model's own time would include it and is unknown."""
    times = timed(("", 1, 10, None), ("body", 1, 5, None), steps=1)
    assert flame_of_modules(module_tree(replace(COST, times=times), ignore=["head"])) is None


@st.composite
def trees(draw):
    paths = [""]
    for number in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from(paths))
        paths.append(f"{above}.m{number}" if above else f"m{number}")
    time = st.none() | st.integers(0, 1000)
    rows = [(path, draw(st.integers(0, 2)), draw(time), draw(time)) for path in paths]
    return ModelCost(modules=tuple(record(path, "M") for path in sorted(paths)), times=timed(*rows))


@given(trees())
def test_boxes_lie_within_their_parent(cost):
    flame = flame_of_modules(module_tree(cost))
    if flame is None:
        return
    ends = {}
    inside = dict.fromkeys(range(len(flame.frames)), 0.0)
    for place, frame in enumerate(flame.frames):
        assert frame.total > 0
        assert frame.own >= 0
        if frame.parent is None:
            assert (place, frame.begin) == (0, 0)
            continue
        outer = flame.frames[frame.parent]
        assert frame.parent < place
        assert frame.depth == outer.depth + 1
        assert frame.begin == ends.get(frame.parent, outer.begin)  # neighbors touch
        ends[frame.parent] = frame.begin + frame.total
        inside[frame.parent] += frame.total
    for place, frame in enumerate(flame.frames):
        assert frame.total == frame.own + inside[place]
    measured = sum(
        (row.forward_ns or 0) * bool(row.calls) + (row.backward_ns or 0) for row in cost.times.times
    )
    assert flame.frames[0].total == measured
