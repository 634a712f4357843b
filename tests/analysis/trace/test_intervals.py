"""Interval algebra compared with sets of integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.intervals import (
    innermost,
    intersect,
    length,
    locate,
    outermost,
    partition,
    subtract,
    union,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def columns(pairs):
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def points(pairs):
    return {point for begin, end in pairs for point in range(begin, end)}


def as_set(pairs):
    return union(*columns(pairs))


def assert_interval_set(intervals):
    assert intervals.dtype == np.int64
    assert intervals.shape[1:] == (2,)
    assert (intervals[:, 0] < intervals[:, 1]).all()
    assert (intervals[1:, 0] >= intervals[:-1, 1]).all()


@given(PAIRS)
def test_union_covers_same_points(pairs):
    begin, end = columns(pairs)
    before = begin.copy(), end.copy()
    merged = union(begin, end)
    assert_interval_set(merged)
    assert (merged[1:, 0] > merged[:-1, 1]).all()
    assert points(merged.tolist()) == points(pairs)
    assert length(merged) == len(points(pairs))
    assert (begin == before[0]).all()
    assert (end == before[1]).all()


@pytest.mark.parametrize(("function", "expected"), [(intersect, set.__and__), (subtract, set.__sub__)])
@given(left=PAIRS, right=PAIRS)
def test_intersect_and_subtract(function, expected, left, right):
    first, second = as_set(left), as_set(right)
    first.flags.writeable = second.flags.writeable = False
    result = function(first, second)
    assert_interval_set(result)
    assert points(result.tolist()) == expected(points(left), points(right))


@given(PAIRS, st.lists(PAIRS, max_size=4))
def test_partition_gives_points_to_first_layer_that_covers_them(whole, layers):
    parts = partition(as_set(whole), [as_set(layer) for layer in layers])
    rest = points(whole)
    for part, layer in zip(parts, [*layers, whole], strict=True):
        assert points(part.tolist()) == rest & points(layer)
        rest -= points(layer)
    assert sum(map(length, parts)) == length(as_set(whole))


def test_touching_rows_stay_separate():
    touching = np.array([[0, 5], [5, 9]])
    assert intersect(touching, np.array([[3, 7]])).tolist() == [[3, 5], [5, 7]]
    assert subtract(np.array([[0, 10]]), touching).tolist() == [[9, 10]]


@given(PAIRS, st.lists(st.integers(-5, 45), max_size=10))
def test_locate(pairs, where):
    intervals = as_set(pairs)
    expected = [
        next((row for row, (begin, end) in enumerate(intervals.tolist()) if begin <= point < end), -1)
        for point in where
    ]
    assert locate(np.array(where, np.int64), intervals).tolist() == expected


@given(PAIRS)
def test_innermost_is_open_range_that_started_last(pairs):
    ranges = sorted(((b, e) for b, e in pairs if b <= e), key=lambda r: (r[0], -r[1]))
    pieces, owner = innermost(*columns(ranges))
    assert_interval_set(pieces)
    got = {
        point: index
        for (begin, end), index in zip(pieces.tolist(), owner.tolist(), strict=True)
        for point in range(begin, end)
    }
    expected = {}
    for index, (begin, end) in enumerate(ranges):  # a later range overwrites: it started last
        expected.update(dict.fromkeys(range(begin, end), index))
    assert got == expected


@given(PAIRS)
def test_outermost_ranges_do_not_overlap(pairs):
    ranges = sorted(pairs)
    result, index = outermost(*columns(ranges))
    assert_interval_set(result)
    assert points(result.tolist()) == points(ranges)
    assert [ranges[i][1] for i in index] == result[:, 1].tolist()
