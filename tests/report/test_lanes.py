"""Rows of a timeline's slices, even where very many overlap."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.report.timeline.lanes import find_depths


def slow_rows(slices):
    """By definition: below all slices that contain it, and in no row that is taken."""
    placed = []
    for begin, end in slices:
        is_open = [(until, row) for until, row in placed if until > begin]
        taken = {row for _, row in is_open}
        row = 1 + max((row for until, row in is_open if until >= end), default=-1)
        while row in taken:
            row += 1
        placed.append((end, row))
    return [row for _, row in placed]


def depths(slices):
    begin, end = np.array(slices, np.int64).reshape(-1, 2).T
    return find_depths(begin, end, np.zeros(len(begin), np.int64)).tolist()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=25))
def test_rows_match_slow_search(given_slices):
    slices = sorted(
        ((begin, begin + length) for begin, length in given_slices), key=lambda one: (one[0], -one[1])
    )
    assert depths(slices) == slow_rows(slices)


def test_many_overlapping_slices_are_fast():
    """Checking every open slice for each new one would take an hour."""
    number = 150_000
    assert depths([(at, number + at) for at in range(number)]) == list(range(number))


def test_freed_rows_are_reused():
    """With many slices open, one ends and another starts, again and again."""
    number = 30_000
    first = [(at, number + at) for at in range(number)]
    again = [(number + at, 3 * number + at) for at in range(number)]
    assert depths(first + again) == [*range(number), *range(number)]
