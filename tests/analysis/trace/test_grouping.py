"""Grouping without sorting, compared with plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.tally import by_name, distinct, rows_named, stable_order
from tests.support.traces import make_trace

numbers = st.lists(st.integers(0, 20), max_size=30).map(lambda values: np.array(values, np.int64))


@given(numbers, st.sampled_from([21, 10**12]))
def test_distinct(values, size):
    """A small size uses a table, a large one sorting."""
    found, place = distinct(values, size)
    assert found.tolist() == sorted(set(values.tolist()))
    assert found[place].tolist() == values.tolist()
    assert found.dtype == place.dtype == np.int64


@given(numbers, st.sampled_from([0, 2**16]))
def test_stable_order(values, offset):
    expected = sorted(range(len(values)), key=lambda index: values[index])
    assert stable_order(values + offset).tolist() == expected


def test_names_of_some_events():
    names = ["b", "a", "c", "b"]
    trace = make_trace(
        [{"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 1}
         for ts, name in enumerate(names)]
    )  # fmt: skip
    rows = np.array([0, 1, 3])
    texts, place = by_name(trace, rows)
    assert sorted(texts) == ["a", "b"]
    assert [texts[index] for index in place.tolist()] == ["b", "a", "b"]
    tested = []
    assert rows_named(trace, rows, lambda name: tested.append(name) or name == "b").tolist() == [0, 3]
    assert sorted(tested) == ["a", "b"]  # each once, and no other event's
    assert rows_named(trace, rows[:0], lambda name: True).tolist() == []
