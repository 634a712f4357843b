"""The call tree and its flame graph: by hand, and compared with sums over the stacks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.call_tree import call_tree
from lightning_modelprof.report.charts import flames
from lightning_modelprof.report.charts.flames import call_flame
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.stacks import StackSamples
from lightning_modelprof.run.steps import StepTimings
from tests.analysis.test_hot_lines import CALL, stacks_of
from tests.support.facts import why_not


def shape(nodes):
    """(name, own, total, children), without fields derived from the frames."""
    return [(node.function, node.own_ns, node.total_ns, shape(node.children)) for node in nodes]


def graph_of(samples):
    record = RankRecord(rank=0, steps=StepTimings.empty(), stacks=samples)
    return call_flame(Facts(Run(info=RunInfo(created="today"), ranks=(record,))))


SAMPLES = stacks_of(
    ("forward", f"step:12 {CALL} torch.nn.modules.linear.forward:3", 4, 400),
    ("forward", f"step:13 {CALL} torch.nn.modules.linear.forward:4", 1, 100),
    ("forward", f"step:12 {CALL}", 1, 70),
    ("forward", "step:15 loss:22 again:41 again:42", 2, 200),
    ("backward", "torch.backward:7", 5, 900),
    ("other", "", 1, 10),
)


def test_stacks_are_merged_from_outermost_frame():
    tree = call_tree(SAMPLES)
    assert shape(tree.phases) == [
        ("backward", 0, 900, [("backward", 900, 900, [])]),
        (
            "forward",
            0,
            770,
            [
                (
                    "step",
                    70,  # time in plumbing counts for its caller
                    770,
                    [
                        ("forward", 500, 500, []),
                        ("loss", 0, 200, [("again", 0, 200, [("again", 200, 200, [])])]),
                    ],
                )
            ],
        ),
        ("other", 10, 10, []),
    ]
    assert (tree.total_ns, tree.samples) == (1680, 14)
    step = tree.phases[1].children[0]
    assert (step.file, step.line, step.is_users, step.samples) == ("train.py", 10, True, 1)
    assert (tree.phases[1].file, tree.phases[1].is_users) == (None, None)


def test_flame_graph_of_tree():
    graph = graph_of(SAMPLES)
    assert (graph.id, graph.unit.value) == ("call_stacks", "ns")
    boxes = [(box.name, box.detail, box.depth, box.begin, box.total, box.own) for box in graph.frames]
    assert boxes == [
        ("Backward", "", 0, 0, 900, 0),
        ("backward", "torch.py:1", 1, 0, 900, 900),
        ("Forward", "", 0, 900, 770, 0),
        ("step", "train.py:10", 1, 900, 770, 70),
        ("forward", "torch.nn.modules.linear.py:1", 2, 900, 500, 500),
        ("loss", "train.py:20", 2, 1400, 200, 0),
        ("again", "train.py:40", 3, 1400, 200, 0),
        ("again", "train.py:40", 4, 1400, 200, 200),
        ("Loop", "", 0, 1670, 10, 10),
    ]
    assert [box.parent for box in graph.frames] == [None, 0, None, 2, 3, 3, 5, 6, None]
    assert [box.is_users for box in graph.frames[:4]] == [None, False, None, True]


def test_narrow_boxes_are_merged():
    samples = stacks_of(
        ("forward", "step:12 loss:22", 9, 9_000),
        ("forward", "step:12 row:31", 1, 10),
        ("forward", "step:12 again:41 row:31", 1, 5),
        ("backward", "torch.backward:7", 1, 1),
    )
    graph = graph_of(samples)
    boxes = [(box.name, box.detail, box.parent, box.begin, box.total, box.own) for box in graph.frames]
    assert boxes == [
        ("Forward", "", None, 0, 9_015, 0),
        ("step", "train.py:10", 0, 0, 9_015, 0),
        ("loss", "train.py:20", 1, 0, 9_000, 9_000),
        ("other", "2 functions", 1, 9_000, 15, 15),
        ("other", "1 function", None, 9_015, 1, 1),
    ]


def test_graph_size_is_limited(monkeypatch):
    monkeypatch.setattr(flames, "_MOST_BOXES", 10)
    samples = stacks_of(*(("forward", f"torch.m{i}.f:1 torch.m{i}.g:1", 1, 100 + i) for i in range(30)))
    graph = graph_of(samples)
    assert 10 < len(graph.frames) + 2 <= 20
    check(graph, samples)


def test_nested_functions_are_named_without_outer_function():
    samples = stacks_of(("forward", "step:12", 3, 300))
    [frame] = samples.frames
    frames = (replace(frame, function="make.<locals>.Net.step"),)
    assert graph_of(replace(samples, frames=frames)).frames[1].name == "Net.step"


@pytest.mark.parametrize("samples", [None, StackSamples()])
def test_missing_samples_give_no_tree(samples):
    assert why_not(call_tree, samples)


def check(graph, samples):
    """Widths add up: the roots to the total, and the boxes on a box plus its own time to that box."""
    assert sum(box.own for box in graph.frames) == sum(stack.time_ns for stack in samples.stacks)
    for place, box in enumerate(graph.frames):
        on_it = [one for one in graph.frames if one.parent == place]
        assert box.total == box.own + sum(one.total for one in on_it)
        edge = box.begin
        for one in on_it:
            assert (one.begin, one.depth) == (edge, box.depth + 1)
            edge += one.total
        assert box.parent is None or box.parent < place


NAMES = st.sampled_from(["step:12", "step:13", "loss:22", "again:41", "torch.a.f:1", "torch.b.f:2", CALL])
STACKS = st.lists(
    st.tuples(
        st.sampled_from(["forward", "backward"]),
        st.lists(NAMES, max_size=6).map(" ".join),
        st.integers(1, 5),
        st.integers(1, 2_000),
    ),
    min_size=1,
    max_size=30,
)


@given(STACKS)
def test_sums_match_stacks(stacks):
    own, total = Counter(), Counter()
    for phase, text, _, time_ns in stacks:
        # Function names suffice: each names one function here, except f, which is in two modules.
        path = (phase, *(one.partition(":")[0] for one in text.split() if one != CALL))
        own[path] += time_ns
        for end in range(1, len(path) + 1):
            total[path[:end]] += time_ns
    found_own, found_total = Counter(), Counter()

    def visit(node, path):
        name = (
            node.function
            if node.file in (None, "train.py")
            else f"{node.file.removesuffix('.py')}.{node.function}"
        )
        path = (*path, name)
        found_own[path] += node.own_ns
        found_total[path] += node.total_ns
        for child in node.children:
            visit(child, path)

    samples = stacks_of(*stacks)
    tree = call_tree(samples)
    for phase in tree.phases:
        visit(phase, ())
    assert +found_own == own
    assert found_total == total
    assert tree.total_ns == sum(found_own.values()) == sum(time_ns for *_, time_ns in stacks)
    assert tree.samples == sum(samples for _, _, samples, _ in stacks)
    check(graph_of(samples), samples)
