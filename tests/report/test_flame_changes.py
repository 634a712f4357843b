"""Flame graphs of what changed: by hand, and that differences sum, on random graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.report.compare.flame_changes import flame_change, flame_changes
from lightning_modelprof.report.model import Report, Unit
from tests.support.sample_flames import flame_of

BEFORE = (
    ("Data", 0.0, None, (("get", 2.0, True, (("convert", 28.0, False, ()),)),)),
    ("Forward", 10.0, None, (("net", 60.0, True, ()),)),
)
AFTER = (
    ("Data", 0.0, None, (("get", 2.0, True, (("open", 8.0, False, ()),)),)),
    ("Forward", 10.0, None, (("net", 20.0, True, ()), ("net", 10.0, True, ()))),
)


def graph(tree, name="call_stacks"):
    return flame_of(tree, id=name, title="Lines")


def report_of(*flames):
    return Report(title="t", facts=(), tables=(), notes=(), sections={}, flames=flames)


def changes(flame):
    return [(frame.name, round(frame.change, 6), frame.is_new) for frame in flame.frames]


def test_shares_by_hand():
    """30 of 100 and 10 of 50: the shares of Data are 30 and 20%."""
    (flame,) = flame_changes(report_of(graph(BEFORE)), report_of(graph(AFTER)))
    assert changes(flame) == [
        ("Data", -0.1, False),
        ("get", -0.1, False),
        ("open", 0.16, True),
        ("Forward", 0.1, False),
        ("net", -0.2, False),
        ("net", 0.2, True),  # there was one of that name
    ]
    assert flame.change_unit is Unit.RATIO
    assert [frame.total for frame in flame.frames] == [frame.total for frame in graph(AFTER).frames]
    assert flame.notes[1] == "Removed: convert -28 points."
    assert flame.id == "call_stacks_changes"


def test_modules_are_compared_by_time():
    flame = flame_change(graph(BEFORE, "modules"), graph(AFTER, "modules"))
    assert flame.change_unit is Unit.DURATION_NS
    assert changes(flame)[:3] == [("Data", -20.0, False), ("get", -20.0, False), ("open", 8.0, True)]


def test_lines_may_move():
    moved = flame_of(BEFORE, id="call_stacks", detail="train.py:99")
    assert {change for _, change, _ in changes(flame_change(graph(BEFORE), moved))} == {0.0}


def test_a_graph_of_one_side_or_without_a_width_is_not_compared():
    empty = replace(graph(BEFORE), frames=())
    assert flame_changes(report_of(), report_of(graph(AFTER))) == ()
    assert flame_change(empty, graph(AFTER)) is None
    assert flame_change(graph(AFTER), empty) is None


def test_of_what_is_gone_the_outermost_are_named():
    many = (*BEFORE, *((f"gone {i}", float(i), None, (("in it", 1.0, True, ()),)) for i in range(1, 9)))
    note = flame_change(graph(many, "modules"), graph(BEFORE, "modules")).notes[1]
    names = ("gone 8", "gone 7", "gone 6", "gone 5", "gone 4")
    assert all(name in note for name in names)
    assert "gone 3 " not in note
    assert note.endswith(", and 11 more, including some nested in these.")


nodes = st.recursive(
    st.tuples(st.sampled_from("abc"), st.integers(0, 50).map(float), st.just(True), st.just(())),
    lambda inner: st.tuples(
        st.sampled_from("abc"),
        st.integers(0, 50).map(float),
        st.just(True),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)
trees = st.lists(nodes, min_size=1, max_size=3).map(tuple)


@given(trees, trees, st.sampled_from(["call_stacks", "modules"]))
def test_differences_sum(before, after, name):
    """Of each box: its change is that of what is on it, of its own, and of what is gone from it."""
    old, new = graph(before, name), graph(after, name)
    flame = flame_change(old, new)
    wholes = [sum(frame.total for frame in one.frames if frame.depth == 0) for one in (old, new)]
    if flame is None:
        assert 0.0 in wholes
        return
    scales = wholes if name == "call_stacks" else (1.0, 1.0)

    def figures(graph, scale):
        """Numbered names from the outside in → total and own, by a plain search for each box."""
        found = {}
        for place, frame in enumerate(graph.frames):
            path, at = [], place
            while at is not None:
                one = graph.frames[at]
                same = [
                    p for p, f in enumerate(graph.frames[:at]) if (f.parent, f.name) == (one.parent, one.name)
                ]
                path.insert(0, (one.name, len(same)))
                at = one.parent
            found[tuple(path)] = (frame.total / scale, frame.own / scale)
        return found

    olds, news = figures(old, scales[0]), figures(new, scales[1])
    change = dict(zip(news, (frame.change for frame in flame.frames), strict=True))
    assert len(change) == len(flame.frames)
    for path, value in change.items():
        on_it = sum(one for other, one in change.items() if other[:-1] == path)
        gone = sum(total for other, (total, _) in olds.items() if other[:-1] == path and other not in news)
        own = news[path][1] - olds.get(path, (0.0, 0.0))[1]
        assert value == pytest.approx(on_it - gone + own, abs=1e-9)
    outer = sum(value for path, value in change.items() if len(path) == 1)
    gone = sum(total for path, (total, _) in olds.items() if len(path) == 1 and path not in news)
    expected = 0.0 if name == "call_stacks" else wholes[1] - wholes[0]
    assert outer - gone == pytest.approx(expected, abs=1e-9)
